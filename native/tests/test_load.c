/* Loading: memory holds what the files hold, however the reads are split, and all threads end. */
#include "blocks.h"
#include <dirent.h>
#include <sched.h>

/* A size that takes long to read byte by byte, so that a check in between finds it unfinished. */
enum { ENDLESS = 64 << 20 };

static int make_file(uint64_t seed, size_t nbytes) {
    int fd = memory_file(0);
    fill_file(fd, seed, nbytes);
    return fd;
}

/* Waits for the end; *out_nbytes is what was read. */
static um_status load_all(const um_load_part *parts, size_t n_parts, const um_load_options *options,
                          uint64_t *out_nbytes, size_t *out_part, um_error *err) {
    um_load *load = NULL;
    um_status status = um_load_start(&load, parts, n_parts, options, err);
    if (status != UM_OK) {
        CHECK(load == NULL);
        return status;
    }
    int running = 1;
    uint64_t before = 0;
    while (running) {
        um_load_wait(load, 60000, out_nbytes, &running);
        CHECK(*out_nbytes >= before);
        before = *out_nbytes;
    }
    return um_load_end(load, out_part, err);
}

static void check_load(const um_load_part *parts, size_t n_parts, const um_load_options *options) {
    uint64_t nbytes = 0, total = 0;
    for (size_t i = 0; i < n_parts; i++) {
        total += parts[i].nbytes;
    }
    CHECK_OK(load_all(parts, n_parts, options, &nbytes, NULL, &test_err));
    CHECK_EQ(nbytes, total);
}

TEST(sizes) {
    size_t file_nbytes = 3 * unit + 7;
    AUTO_BLOCK block = make_pages(6 * unit, UM_PAGES_AUTO);
    unsigned char *base = block.base;
    AUTO_FD fd = make_file(1, file_nbytes);
    size_t phases[] = {0, 1, page, unit - 1};
    size_t sizes[] = {0, 1, page - 1, unit - 1, unit, unit + 1, 2 * unit, 3 * unit + 7};
    size_t requests[] = {0, 1000, unit - 1, unit, unit + 1, 2 * unit, 64 * unit};
    for (size_t i = 0; i < 4 * 8 * 7; i++) {
        size_t phase = phases[i % 4], nbytes = sizes[i / 4 % 8], request = requests[i / 32];
        size_t offset = i % 3 == 0 ? file_nbytes - nbytes : 0;
        if (request == 1000 && nbytes > unit) {
            continue; /* thousands of reads that test nothing more */
        }
        unsigned char *to = base + unit + phase;
        memset(base, 0xEE, block.nbytes);
        um_load_part part = {.fd = fd, .offset = offset, .to = to, .nbytes = nbytes};
        um_load_options options = {.n_threads = 1 + (unsigned)i % 5, .request_nbytes = request};
        fault_os_fail_nth(0, 0);
        check_load(&part, 1, &options);
        CHECK(holds(to, 1, offset, nbytes));
        CHECK(is_filled(base, (size_t)(to - base), 0xEE));
        CHECK(is_filled(to + nbytes, block.nbytes - (size_t)(to - base) - nbytes, 0xEE));
        unsigned n_started = fault_os_calls_of("um__os_thread_start");
        CHECK(n_started <= options.n_threads);
        CHECK((n_started > 0) == (nbytes > 0));
        CHECK_EQ(fault_os_calls_of("um__os_thread_join"), n_started);
    }
}

/* Pieces end at the borders of huge pages of the memory, whatever the request is: the number of
 * reads shows it. */
TEST(borders) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    bool gives = gives_huge_pages(9);
    AUTO_BLOCK block = make_pages(9 * huge_page, UM_PAGES_THP);
    AUTO_FD fd = make_file(2, 8 * huge_page);
    size_t phases[] = {0, page, huge_page - page};
    size_t requests[] = {huge_page, huge_page + 1, 3 * huge_page, 16 * huge_page};
    for (size_t i = 0; i < 3 * 4; i++) {
        um_load_part part = {
            .fd = fd, .to = (char *)block.base + phases[i % 3], .nbytes = 8 * huge_page};
        um_load_options options = {.n_threads = 2, .request_nbytes = requests[i / 3]};
        size_t piece = (requests[i / 3] + huge_page - 1) / huge_page * huge_page;
        uintptr_t first = (uintptr_t)part.to, last = first + part.nbytes - 1;
        fault_os_fail_nth(0, 0);
        check_load(&part, 1, &options);
        size_t n_reads = 0; /* a piece larger than the request takes several reads */
        for (uintptr_t at = first / piece * piece; at <= last; at += piece) {
            uintptr_t from = at < first ? first : at,
                      to = at + piece <= last ? at + piece : last + 1;
            n_reads += (to - from + requests[i / 3] - 1) / requests[i / 3];
        }
        CHECK_EQ(fault_os_calls_of("um__os_pread"), n_reads);
        CHECK(holds(part.to, 2, 0, part.nbytes));
    }
    um_load_part part = {.fd = fd, .to = block.base, .nbytes = 3 * huge_page};
    fault_os_fail_nth(0, 0);
    check_load(&part, 1, &(um_load_options){.n_threads = 3, .request_nbytes = huge_page / 4});
    CHECK_EQ(fault_os_calls_of("um__os_pread"), 12);
    CHECK(!gives || placement_of(&block).huge_bytes == block.nbytes);
}

TEST(parts) {
    enum { N = 40 };
    AUTO_BLOCK block = make_pages((size_t)N * 40 * page, UM_PAGES_AUTO);
    int fds[3] = {make_file(1, 30 * page), make_file(2, 30 * page), make_file(3, 30 * page)};
    uint64_t seed = 11;
    for (unsigned n_threads = 1; n_threads <= 4; n_threads++) {
        um_load_part parts[N];
        memset(block.base, 0xEE, block.nbytes);
        for (size_t i = 0; i < N; i++) {
            uint64_t r = test_random(&seed);
            parts[i] = (um_load_part){.fd = fds[i % 3],
                                      .offset = r % (20 * page),
                                      .to = (char *)block.base + 40 * i * page + (r >> 20) % page,
                                      .nbytes = i % 5 == 4 ? 0 : (r >> 32) % (10 * page)};
        }
        check_load(parts, N, &(um_load_options){.n_threads = n_threads});
        for (size_t i = 0; i < N; i++) {
            const um_load_part *part = &parts[i];
            CHECK(holds(part->to, i % 3 + 1, part->offset, part->nbytes));
            CHECK(is_filled((char *)part->to + part->nbytes, page, 0xEE));
        }
        check_load(parts, 0, &(um_load_options){.n_threads = n_threads});
        check_load(&parts[4], 1, &(um_load_options){.n_threads = n_threads});
    }
    for (int i = 0; i < 3; i++) {
        close(fds[i]);
    }
}

/* Reads that return less than was asked for. */
TEST(partial_reads) {
    enum { PIECE = 4 << 20 };
    size_t nbytes = 20 * page + 77;
    AUTO_BLOCK block = make_pages(PIECE + 24 * page, UM_PAGES_4K);
    /* At a unit between pieces: a unit inside would be one read more. */
    void *to = (void *)(((uintptr_t)block.base + PIECE - 1) / PIECE * PIECE);
    AUTO_FD fd = make_file(4, nbytes);
    um_load_part part = {.fd = fd, .to = to, .nbytes = nbytes};
    size_t limits[] = {97, 999, 4096, 5000};
    for (int i = 0; i < 8; i++) {
        bool direct = i >= 4;
        size_t limit = limits[i % 4];
        memset(to, 0xEE, 24 * page);
        fault_os_limit_read(limit);
        fault_os_fail_nth(0, 0);
        um_load_options options = {.n_threads = 2, .direct = direct};
        if (direct && limit < 4096) {
            /* A direct read is as short as this only at the end of a file. */
            CHECK_STATUS(UM_E_IO, load_all(&part, 1, &options, &(uint64_t){0}, NULL, &test_err));
            CHECK_EQ(test_err.os_errno, 0);
        } else {
            check_load(&part, 1, &options);
            CHECK(holds(to, 4, 0, nbytes));
            unsigned n_reads = 0;
            size_t align = direct ? 4096 : 1;
            for (size_t left = nbytes; left > 0; n_reads++) {
                left = left <= limit ? 0 : left - limit / align * align;
            }
            CHECK_EQ(fault_os_calls_of("um__os_pread"), n_reads);
        }
        fault_os_limit_read(0);
    }
}

/* Reads past the page cache, of a real file. */
TEST(direct) {
    size_t file_nbytes = 2 * unit + 12345;
    int plain = temp_file();
    fill_file(plain, 5, file_nbytes);
    REQUIRE(fsync(plain) == 0);
    AUTO_FD fd = reopen(plain, O_RDONLY | O_DIRECT);
    close(plain);
    SKIP_UNLESS(fd >= 0, "the file system of /tmp refuses O_DIRECT");
    AUTO_BLOCK block = make_pages(4 * unit, UM_PAGES_AUTO);
    unsigned char *base = block.base;
    size_t offsets[] = {0, 4096, unit}, phases[] = {0, 4096, unit - 4096};
    for (size_t i = 0; i < 9; i++) {
        size_t offset = offsets[i % 3], whole = file_nbytes - offset;
        size_t sizes[] = {whole, whole - 1, 1, 4096, unit + 1};
        for (size_t j = 0; j < 5; j++) {
            unsigned char *to = base + 4096 + phases[i / 3];
            um_load_part part = {.fd = fd, .offset = offset, .to = to, .nbytes = sizes[j]};
            memset(base, 0xEE, block.nbytes);
            check_load(&part, 1, &(um_load_options){.n_threads = 3, .direct = 1});
            CHECK(holds(to, 5, offset, sizes[j]));
            size_t room = (sizes[j] + 4095) / 4096 * 4096, end = (size_t)(to - base) + room;
            CHECK(is_filled(base, (size_t)(to - base), 0xEE));
            CHECK(is_filled(base + end, block.nbytes - end, 0xEE));
            part.nbytes = whole + 1;
            CHECK_STATUS(UM_E_IO,
                         load_all(&part, 1, &(um_load_options){.n_threads = 3, .direct = 1},
                                  &(uint64_t){0}, NULL, &test_err));
            CHECK_EQ(test_err.os_errno, 0);
        }
    }
}

TEST(short_files) {
    AUTO_BLOCK block = make_pages(30 * page, UM_PAGES_4K);
    AUTO_FD whole = make_file(1, 10 * page), empty = make_file(2, 0);
    for (int direct = 0; direct < 2; direct++) {
        for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
            um_load_options options = {.n_threads = n_threads, .direct = direct};
            um_load_part parts[] = {{.fd = whole, .to = block.base, .nbytes = 10 * page},
                                    {.fd = whole, .to = (char *)block.base + 10 * page},
                                    {.fd = empty, .to = (char *)block.base + 20 * page}};
            struct {
                size_t part, nbytes;
                uint64_t offset;
            } cases[] = {{0, 10 * page + 1, 0}, {1, 1, 10 * page}, {1, page + 1, 9 * page},
                         {1, 1, 1000 * page},   {2, 1, 0},         {2, 5 * page, page}};
            for (size_t i = 0; i < COUNT(cases); i++) {
                um_load_part tried[] = {parts[0], parts[1], parts[2]};
                tried[cases[i].part].nbytes = cases[i].nbytes;
                tried[cases[i].part].offset = cases[i].offset;
                uint64_t nbytes = 0;
                size_t part = 777;
                CHECK_STATUS(UM_E_IO, load_all(tried, 3, &options, &nbytes, &part, &test_err));
                CHECK_EQ(part, cases[i].part);
                CHECK_EQ(test_err.os_errno, 0);
                CHECK_EQ(test_err.asked, cases[i].nbytes);
                CHECK(load_all(tried, 3, &options, &nbytes, NULL, NULL) == UM_E_IO);
            }
            size_t part = 777;
            uint64_t nbytes = 0;
            CHECK_OK(load_all(parts, 3, &options, &nbytes, &part, &test_err));
            CHECK_EQ(part, 777);
        }
    }
}

TEST(shorter_meanwhile) {
    AUTO_BLOCK block = make_pages(ENDLESS, UM_PAGES_4K);
    AUTO_FD fd = make_file(1, 0);
    REQUIRE(ftruncate(fd, ENDLESS) == 0);
    um_load_part part = {.fd = fd, .to = block.base, .nbytes = ENDLESS};
    um_load *load = NULL;
    fault_os_limit_read(1);
    CHECK_OK(um_load_start(&load, &part, 1, &(um_load_options){.n_threads = 2}, &test_err));
    uint64_t nbytes = 0;
    int running = 1;
    while (nbytes == 0) {
        um_load_wait(load, 1, &nbytes, &running);
    }
    CHECK(running);
    CHECK(ftruncate(fd, 0) == 0);
    while (running) {
        um_load_wait(load, 60000, &nbytes, &running);
    }
    size_t failed = 777;
    CHECK_STATUS(UM_E_IO, um_load_end(load, &failed, &test_err));
    CHECK(failed == 0);
    CHECK(test_err.os_errno == 0);
    CHECK(nbytes < ENDLESS);
}

/* A read that fails stops another one that would take long. */
TEST(failure_stops) {
    AUTO_BLOCK block = make_pages(ENDLESS, UM_PAGES_4K);
    AUTO_FD fd = make_file(1, 0);
    REQUIRE(ftruncate(fd, ENDLESS) == 0);
    /* The first thread is busy with the first part, which is one piece that no other thread can
     * take a share of. */
    um_load_part parts[] = {
        {.fd = fd, .to = block.base, .nbytes = unit},
        {.fd = -1, .to = bytes_of(&block, unit), .nbytes = unit},
        {.fd = fd, .to = bytes_of(&block, 2 * unit), .nbytes = ENDLESS - 2 * unit}};
    fault_os_limit_read(1);
    fault_os_fail_nth(0, 0);
    uint64_t nbytes = 0;
    size_t part = 777;
    um_load_options options = {.n_threads = 2};
    CHECK_STATUS(UM_E_IO, load_all(parts, 3, &options, &nbytes, &part, &test_err));
    CHECK(part == 1);
    CHECK(test_err.os_errno == EBADF);
    CHECK(nbytes <= unit);
    CHECK(is_filled(bytes_of(&block, unit), ENDLESS - unit, 0));
}

/* Memory that the kernel has no page for. */
TEST(no_memory) {
    AUTO_FD fd = make_file(1, 20 * page);
    static const int errnos[] = {EFAULT, ENOMEM};
    for (int i = 0; i < 2; i++) {
        AUTO_BLOCK block = make_pages(20 * page, UM_PAGES_4K);
        um_load_part part = {.fd = fd, .to = block.base, .nbytes = 20 * page};
        um_load_options options = {.n_threads = 1};
        um_status status;
        size_t failed = 777;
        unsigned n = 1;
        const char *call;
        do {
            fault_os_fail_nth(n++, errnos[i]);
            status = load_all(&part, 1, &options, &(uint64_t){0}, &failed, &test_err);
            call = fault_os_failed();
            n = call == NULL ? 1 : n; /* threads wait for each other more or less often */
        } while (call == NULL || strcmp(call, "um__os_pread") != 0);
        CHECK(status == UM_E_NOMEM);
        fault_os_fail_nth(0, 0);
        CHECK(failed == 0);
        CHECK(test_err.os_errno == ENOMEM);
        CHECK_EQ(test_err.asked, 20 * page);
    }
}

TEST(full_file_system) {
    int full = file_in_room_for(4), fd = make_file(1, 20 * page);
    if (full < 0) {
        test_skip("this process may not mount one");
    } else {
        AUTO_BLOCK block = make_block(
            20 * page, OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_FD, .fd = full));
        um_load_part part = {.fd = fd, .to = block.base, .nbytes = 20 * page};
        um_load_options options = {.n_threads = 2};
        CHECK_STATUS(UM_E_NOMEM, load_all(&part, 1, &options, &(uint64_t){0}, NULL, &test_err));
        close(full);
    }
    close(fd);
}

typedef struct loading {
    um_load_part parts[3];
    um_load_options options;
} loading;

static um_status run_load(void *context, um_error *err) {
    const loading *l = context;
    return load_all(l->parts, 3, &l->options, &(uint64_t){0}, NULL, err);
}

TEST(faults) {
    static const int cpus[] = {0, -1, 0};
    AUTO_BLOCK block = make_pages(8 * unit, UM_PAGES_AUTO);
    AUTO_FD fd = make_file(1, 2 * unit);
    memset(block.base, 0xEE, block.nbytes);
    os_state_settle_threads(8);
    loading l = {.parts = {{.fd = fd, .to = block.base, .nbytes = 2 * unit},
                           {.fd = fd, .to = bytes_of(&block, 3 * unit), .nbytes = 1},
                           {.fd = fd, .to = bytes_of(&block, 5 * unit), .nbytes = unit}}};
    for (unsigned i = 0; i < 6; i++) {
        l.options = (um_load_options){.n_threads = 1 + i / 2, .cpus = i % 2 ? cpus : NULL};
        /* A thread that cannot be pinned still reads, and a waiting thread that cannot sleep
         * polls. */
        fault_os_check_each(
            &(fault_case){run_load, NULL, &l, "", 0,
                          HARMLESS_THREADS "um__os_wait um__os_wake" HARMLESS_HUGE_PAGE, true});
    }
    for (unsigned n = 1; fault_os_fail_nth(n, EINTR), run_load(&l, NULL) == UM_OK; n++) {
        if (fault_os_failed() == NULL) {
            break;
        }
    }
    /* All calls are repeated after an interruption, except the start of a thread. */
    REQUIRE(fault_os_failed() != NULL);
    CHECK_STR(fault_os_failed(), "um__os_thread_start");
    fault_os_fail_nth(0, 0);
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, run_load(&l, &test_err));
    CHECK_EQ(fault_os_allocs(), 1);
}

TEST(refused) {
    AUTO_BLOCK block = make_pages(4 * page, UM_PAGES_4K);
    AUTO_FD fd = make_file(1, 4 * page);
    size_t quarter = SIZE_MAX / 4;
    um_load_part good = {.fd = fd, .to = block.base, .nbytes = page};
    um_load_part large = {.fd = fd, .to = block.base, .nbytes = quarter};
    struct {
        um_load_part parts[5];
        um_load_options options;
    } cases[] = {
        {{good}, {.n_threads = 0}},
        {{good}, {.n_threads = 1, .cpus = (const int[]){8192}}},
        {{good}, {.n_threads = 1, .request_nbytes = SIZE_MAX}},
        {{good}, {.n_threads = 1, .request_nbytes = SIZE_MAX, .direct = 1}},
        {{{.fd = fd, .to = bytes_of(&block, 512), .nbytes = page}}, {.n_threads = 1, .direct = 1}},
        {{{.fd = fd, .offset = 512, .to = block.base, .nbytes = page}},
         {.n_threads = 1, .direct = 1}},
        {{{.fd = fd, .offset = INT64_MAX, .to = block.base, .nbytes = page}}, {.n_threads = 1}},
        {{{.fd = fd, .offset = UINT64_MAX, .to = block.base, .nbytes = page}}, {.n_threads = 1}},
        {{{.fd = fd, .to = block.base, .nbytes = SIZE_MAX}}, {.n_threads = 1}},
        {{{.fd = fd, .to = block.base, .nbytes = SIZE_MAX - (uintptr_t)block.base}},
         {.n_threads = 1}},
        {{large, large, large, large, large}, {.n_threads = 1}},
    };
    fault_os_fail_nth(0, 0);
    for (size_t i = 0; i < COUNT(cases); i++) {
        um_load *load = (um_load *)&block;
        size_t n_parts = cases[i].parts[1].nbytes == 0 ? 1 : 5;
        CHECK_FAILS(UM_E_INVALID, um_load_start, &load, cases[i].parts, n_parts, &cases[i].options);
        CHECK(load == (um_load *)&block);
    }
    um_load *load = NULL;
    CHECK_INVALID(
        um_load_start(&load, &good, SIZE_MAX / 8, &(um_load_options){.n_threads = 1}, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 0);
    CHECK_EQ(fault_os_calls_of("um__os_pread"), 0);
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
}

TEST(cpus) {
    AUTO_BLOCK block = make_pages(4 * unit, UM_PAGES_AUTO);
    AUTO_FD fd = make_file(1, 4 * unit);
    um_load_part part = {.fd = fd, .to = block.base, .nbytes = 4 * unit};
    cpu_set_t allowed, after;
    REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    size_t piece = unit;

    fault_os_fail_nth(0, 0);
    check_load(&part, 1, &(um_load_options){.n_threads = 4, .request_nbytes = piece});
    CHECK_EQ(fault_os_calls_of("um__os_set_affinity"), 4); /* test_cpus.c: to which CPU */
    /* The caller's own affinity is not changed, even with one thread. */
    int one = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        one = CPU_ISSET((size_t)cpu, &allowed) ? cpu : one;
    }
    fault_os_fail_nth(0, 0);
    check_load(&part, 1, &(um_load_options){.n_threads = 1, .cpus = &one});
    CHECK_EQ(fault_os_pinned_to((unsigned)one), 1);
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 1);
    CHECK_EQ(fault_os_calls_of("um__os_get_affinity"), 0);

    check_load(&part, 1, &(um_load_options){.n_threads = UINT32_MAX});
    REQUIRE(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&allowed, &after));
}

static pthread_t main_thread;
static _Atomic unsigned n_signals, n_elsewhere;

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add(&n_signals, 1);
    if (!pthread_equal(pthread_self(), main_thread)) {
        atomic_fetch_add(&n_elsewhere, 1);
    }
}

/* The threads of this process, by /proc. */
static unsigned n_threads_now(void) {
    unsigned n = 0;
    DIR *tasks = opendir("/proc/self/task");
    REQUIRE(tasks != NULL);
    for (const struct dirent *task; (task = readdir(tasks)) != NULL;) {
        n += task->d_name[0] != '.';
    }
    closedir(tasks);
    return n;
}

/* A load that is ended early reads nothing more. Signals go to the caller only, and end its
 * wait. */
TEST(end_in_the_middle) {
    AUTO_BLOCK block = make_pages(ENDLESS, UM_PAGES_4K);
    unsigned char *base = block.base;
    AUTO_FD fd = make_file(1, ENDLESS);
    um_load_part part = {.fd = fd, .to = base, .nbytes = ENDLESS};
    main_thread = pthread_self();
    fault_os_limit_read(1);
    for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
        um_load *load = NULL;
        unsigned n_before = n_threads_now();
        CHECK_OK(
            um_load_start(&load, &part, 1, &(um_load_options){.n_threads = n_threads}, &test_err));
        uint64_t nbytes = 0, more = 0;
        int running = 0;
        while (nbytes == 0) {
            um_load_wait(load, 1, &nbytes, &running);
            CHECK(running);
        }
        CHECK_EQ(n_threads_now(), n_before + n_threads);
        test_interrupt(on_signal);
        um_load_wait(load, 3600000, &more, &running); /* a signal ends the wait */
        test_interrupt(NULL);
        CHECK(running);
        CHECK(more >= nbytes);
        CHECK(more < ENDLESS);
        CHECK_OK(um_load_end(load, NULL, &test_err));
        /* The kernel may still list a thread that was joined. */
        for (int i = 0; i < 100000 && n_threads_now() != n_before; i++) {
            usleep(1000);
        }
        CHECK_EQ(n_threads_now(), n_before);
        CHECK(base[0] == byte_of(1, 0));
        CHECK(base[ENDLESS - 1] == 0);
    }
    CHECK(atomic_load(&n_signals) > 0);
    CHECK_EQ(atomic_load(&n_elsewhere), 0);
}

/* A waiting thread sleeps: it wakes at most once for each thread that ends, and once more. */
TEST(waiting) {
    AUTO_BLOCK block = make_pages(ENDLESS, UM_PAGES_AUTO);
    AUTO_FD fd = make_file(1, ENDLESS);
    um_load_part part = {.fd = fd, .to = block.base, .nbytes = ENDLESS};
    for (unsigned n_threads = 1; n_threads <= 4; n_threads++) {
        fault_os_fail_nth(0, 0);
        check_load(&part, 1, &(um_load_options){.n_threads = n_threads});
        CHECK(fault_os_calls_of("um__os_wait") <= n_threads + 1);
        CHECK_EQ(fault_os_calls_of("um__os_wake"), 1);
    }
}
