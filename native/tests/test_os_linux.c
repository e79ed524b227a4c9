/* Each system call on its own: what it does, that it returns an errno, and that it is counted. */
#include "blocks.h"
#include "os/kernel.h"
#include "os/os.h"
#include <sched.h>

/* `call` must make one system call and return this result. */
#define CHECK_CALL(expected, call)                                                                 \
    do {                                                                                           \
        um_counters counted_before, counted_after;                                                 \
        um_counters_read(&counted_before);                                                         \
        CHECK_EQ(call, expected);                                                                  \
        um_counters_read(&counted_after);                                                          \
        CHECK_EQ(counted_after.n_os_calls, counted_before.n_os_calls + 1);                         \
    } while (0)

TEST(page_bytes) {
    CHECK_EQ(um__os_page_bytes(), sysconf(_SC_PAGESIZE));
    CHECK_EQ(page, um__os_page_bytes());
}

/* Pages that can be read and written. */
static char *map_pages(size_t n) {
    char *base = NULL;
    CHECK_CALL(0, um__os_reserve(n * page, (void **)&base));
    CHECK_CALL(0, um__os_map_at(base, n * page, 0));
    return base;
}

/* The second, the third and the seventh of eight pages are mapped. */
static void check_scan(char *eight) {
    int pagemap = -1;
    size_t n_runs = 777, scanned = 777;
    um__page_run runs[4];
    CHECK_CALL(0, um__os_open_read("/proc/self/pagemap", &pagemap));
    int os_errno = um__os_scan_pages(pagemap, eight, 8 * page, runs, 4, &n_runs, &scanned);
    if (os_errno == ENOTTY) {
        test_skip("this kernel is older than Linux 6.7");
        CHECK(n_runs == 777);
        CHECK(scanned == 777);
    } else {
        CHECK_EQ(os_errno, 0);
        CHECK(n_runs == 2);
        CHECK(scanned == 8 * page);
        static const size_t ends[][2] = {{1, 3}, {6, 7}};
        for (size_t i = 0; i < 2; i++) {
            CHECK_EQ(runs[i].start, (uintptr_t)eight + ends[i][0] * page);
            CHECK_EQ(runs[i].end, (uintptr_t)eight + ends[i][1] * page);
            CHECK_EQ(runs[i].categories, 0);
        }
        CHECK_CALL(0, um__os_scan_pages(pagemap, eight, 8 * page, runs, 1, &n_runs, &scanned));
        CHECK(n_runs == 1);
        CHECK(scanned >= 3 * page);
        CHECK(scanned <= 6 * page);
        n_runs = 777;
        CHECK_CALL(EBADF, um__os_scan_pages(-1, eight, page, runs, 4, &n_runs, &scanned));
        CHECK_EQ(n_runs, 777);
    }
    CHECK_CALL(0, um__os_close(pagemap));
}

TEST(memory) {
    char *base = NULL;
    CHECK_CALL(0, um__os_reserve(16 * page, (void **)&base));
    REQUIRE(base != NULL);
    REQUIRE((uintptr_t)base % page == 0);
    CHECK_PAGES(base, "----------------");
    CHECK_CALL(0, um__os_map_at(base + 4 * page, 8 * page, 0));
    CHECK_STR(os_state_permissions(base + 4 * page), "rw-p");
    CHECK_STR(os_state_permissions(base + 4 * page - 1), "---p");
    CHECK_STR(os_state_permissions(base + 12 * page - 1), "rw-p");
    CHECK_STR(os_state_permissions(base + 12 * page), "---p");

    unsigned char pages[8];
    static const unsigned char resident[8] = {0, 1, 1, 0, 0, 0, 1, 0};
    for (int touched = 0; touched < 2; touched++) {
        memset(pages, 0xFF, sizeof pages);
        CHECK_CALL(0, um__os_residency(base + 4 * page, 8 * page, pages));
        for (int i = 0; i < 8; i++) {
            CHECK_EQ(pages[i] & 1, touched ? resident[i] : 0);
        }
        CHECK_CALL(0, um__os_advise(base + 5 * page, 2 * page, UM__OS_POPULATE_WRITE));
        CHECK_CALL(0, um__os_advise(base + 10 * page, page, UM__OS_POPULATE_READ));
    }
    check_scan(base + 4 * page);
    CHECK_PAGES(base, "----00000000----");

    if (um_huge_page_bytes() != 0) {
        CHECK_CALL(0, um__os_advise(base + 4 * page, 8 * page, UM__OS_HUGE));
        CHECK_CALL(0, um__os_advise(base + 4 * page, 8 * page, UM__OS_NO_HUGE));
    }
    CHECK_CALL(0, um__os_unmap(base, 16 * page));
    CHECK_STR(os_state_permissions(base + 5 * page), "");
    /* A failure leaves the output alone. */
    void *untouched = &page;
    CHECK_CALL(ENOMEM, um__os_reserve((size_t)1 << 62, &untouched));
    CHECK(untouched == &page);
    CHECK_CALL(EINVAL, um__os_unmap(base + 1, page));
    CHECK_CALL(ENOMEM, um__os_advise(base, page, UM__OS_POPULATE_WRITE));
    CHECK_CALL(ENOMEM, um__os_residency(base, page, pages));
    CHECK_CALL(EINVAL, um__os_advise(base + 1, page, UM__OS_HUGE));
}

TEST(files) {
    int fd = memory_file(0), opened = 777;
    CHECK(pwrite(fd, "first", 5, 0) == 5);
    CHECK(pwrite(fd, "second", 6, (off_t)page) == 6);
    uint64_t file_nbytes = 777;
    CHECK_CALL(0, um__os_file_nbytes(fd, &file_nbytes));
    CHECK_EQ(file_nbytes, page + 6);

    char path[64], bytes[16] = "";
    size_t n = 777;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK_CALL(0, um__os_open_read(path, &opened));
    REQUIRE(opened != 777);
    CHECK((fcntl(opened, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((fcntl(opened, F_GETFL) & O_ACCMODE) == O_RDONLY);
    CHECK_CALL(0, um__os_read(opened, bytes, 3, &n));
    CHECK(n == 3);
    CHECK(memcmp(bytes, "fir", 3) == 0);
    CHECK_CALL(0, um__os_read(opened, bytes, 2, &n));
    CHECK(n == 2);
    CHECK(memcmp(bytes, "st", 2) == 0);
    CHECK_CALL(0, um__os_pread(opened, bytes, sizeof bytes, page, &n));
    CHECK(n == 6);
    CHECK(memcmp(bytes, "second", 6) == 0);
    CHECK_CALL(0, um__os_pread(opened, bytes, sizeof bytes, page + 6, &n));
    CHECK_EQ(n, 0);
    CHECK_CALL(0, um__os_close(opened));
    CHECK_CALL(EBADF, um__os_close(opened));

    unsigned char *shared, *private;
    CHECK_CALL(0, um__os_reserve(page, (void **)&shared));
    CHECK_CALL(0, um__os_reserve(2 * page, (void **)&private));
    CHECK_CALL(0, um__os_map_file_at(shared, fd, page, page, UM_ACCESS_READ));
    CHECK_CALL(0, um__os_map_file_at(private, fd, 0, 2 * page, UM_ACCESS_PRIVATE));
    CHECK_STR(os_state_permissions(shared), "r--s");
    CHECK_STR(os_state_permissions(private), "rw-p");
    CHECK(memcmp(shared, "second", 6) == 0);
    CHECK(memcmp(private + page, "second", 6) == 0);
    private[page] = 'S';
    CHECK(shared[0] == 's');
    CHECK_CALL(0, um__os_unmap(private, 2 * page));
    CHECK_CALL(0, um__os_unmap(shared, page));

    close(fd);
}

/* A failure leaves the output alone. */
TEST(failures_of_files) {
    int fd = memory_file(0), opened = 777;
    uint64_t file_nbytes = 777;
    size_t n = 777;
    char bytes[1];
    unsigned char *shared;
    CHECK_CALL(0, um__os_reserve(page, (void **)&shared));
    CHECK_CALL(EBADF, um__os_map_file_at(shared, -1, 0, page, UM_ACCESS_READ));
    CHECK_CALL(EINVAL, um__os_map_file_at(shared, fd, 1, page, UM_ACCESS_READ));
    CHECK_STR(os_state_permissions(shared), "---p");
    CHECK_CALL(0, um__os_unmap(shared, page));
    CHECK_CALL(EBADF, um__os_pread(-1, bytes, 1, 0, &n));
    CHECK_CALL(EINVAL, um__os_pread(fd, bytes, 1, UINT64_MAX, &n));
    CHECK_CALL(EBADF, um__os_read(-1, bytes, 1, &n));
    CHECK_CALL(EBADF, um__os_file_nbytes(-1, &file_nbytes));
    CHECK_CALL(ENOENT, um__os_open_read("/no/such/file", &opened));
    CHECK(n == 777);
    CHECK(file_nbytes == 777);
    CHECK(opened == 777);
    close(fd);
}

TEST(reserve_at) {
    char *base = map_pages(8);
    memset(base, 1, 8 * page);
    CHECK_CALL(0, um__os_reserve_at(base + 2 * page, 3 * page));
    CHECK_PAGES(base, "11---111");
    CHECK(has_vm_flag(base, "ac"));
    CHECK(!has_vm_flag(base + 2 * page, "ac"));
    CHECK_CALL(0, um__os_map_at(base + 2 * page, 3 * page, 0));
    CHECK_CALL(EINVAL, um__os_reserve_at(base + 1, page));
    CHECK_PAGES(base, "11000111");
    CHECK_CALL(0, um__os_unmap(base, 8 * page));
}

/* Each advice has the effect of its name, as far as smaps shows it. */
TEST(advice) {
    struct {
        um__os_advice advice;
        const char *flag;
        bool there;
    } cases[] = {{UM__OS_SEQUENTIAL, "sr", true}, {UM__OS_RANDOM, "rr", true},
                 {UM__OS_DONT_FORK, "dc", true},  {UM__OS_HUGE, "hg", true},
                 {UM__OS_NO_HUGE, "nh", true},    {UM__OS_NO_HUGE, "hg", false}};
    bool thp = um_huge_page_bytes() != 0;
    char *base = map_pages(4);
    for (size_t i = 0; i < COUNT(cases); i++) {
        if (thp || (cases[i].advice != UM__OS_HUGE && cases[i].advice != UM__OS_NO_HUGE)) {
            CHECK_CALL(0, um__os_advise(base, 4 * page, cases[i].advice));
            CHECK(has_vm_flag(base, cases[i].flag) == cases[i].there);
        }
    }
    memset(base, 1, 4 * page);
    CHECK_CALL(0, um__os_advise(base, 4 * page, UM__OS_DONTNEED));
    CHECK(is_filled(base, 4 * page, 0));
    CHECK_CALL(EINVAL, um__os_advise(base, 4 * page, UM__OS_COLLAPSE)); /* too small */
    CHECK_CALL(0, um__os_unmap(base, 4 * page));
    CHECK_CALL(ENOMEM, um__os_advise(base, 4 * page, UM__OS_WILLNEED));
}

TEST(lock) {
    char *base = map_pages(4);
    if (um__os_lock(base, page, 1) != 0) {
        test_skip("this process may not lock memory");
    } else {
        unsigned char pages[4];
        CHECK_CALL(0, um__os_lock(base, 2 * page, 0));
        CHECK_CALL(0, um__os_lock(base + 2 * page, 2 * page, 1));
        CHECK(has_vm_flag(base, "lo"));
        CHECK(has_vm_flag(base + 3 * page, "lo"));
        CHECK_CALL(0, um__os_residency(base, 4 * page, pages));
        CHECK((pages[1] & 1) == 1);
        CHECK((pages[2] & 1) == 0);
        CHECK_CALL(0, um__os_unlock(base, 4 * page));
        CHECK(!has_vm_flag(base, "lo"));
        CHECK(!has_vm_flag(base + 3 * page, "lo"));
    }
    CHECK_CALL(0, um__os_unmap(base, 4 * page));
    CHECK_CALL(ENOMEM, um__os_lock(base, page, 0));
    CHECK_CALL(ENOMEM, um__os_unlock(base, page));
}

TEST(policy) {
    struct {
        um_numa_mode mode;
        const char *policy;
    } cases[] = {{UM_NUMA_BIND, "bind:0"},
                 {UM_NUMA_INTERLEAVE, "interleave:0"},
                 {UM_NUMA_PREFERRED, "prefer:0"}};
    um_numa numa = {.mode = UM_NUMA_BIND, .nodes = {1}};
    char *base = map_pages(4);
    int os_errno = um__os_bind(base, 4 * page, &numa);
    if (os_errno == EPERM || os_errno == ENOSYS) {
        test_skip("mbind is refused here");
        CHECK_CALL(0, um__os_unmap(base, 4 * page));
        return;
    }
    for (size_t i = 0; i < COUNT(cases); i++) {
        numa.mode = cases[i].mode;
        CHECK_CALL(0, um__os_bind(base, 4 * page, &numa));
        CHECK_STR(policy_at(base), cases[i].policy);
    }
    numa.mode = UM_NUMA_WEIGHTED;
    if (um__os_bind(base, 4 * page, &numa) == 0) {
        CHECK_STR(policy_at(base), "weighted interleave:0");
    } else {
        test_skip("the kernel is older than 6.9");
    }
    /* All possible nodes: those that the machine lacks are left out, not misread. */
    numa.mode = UM_NUMA_PREFERRED;
    memset(numa.nodes, 0xFF, sizeof numa.nodes);
    os_errno = um__os_bind(base, 4 * page, &numa);
    CHECK(os_errno == 0 || os_errno == EINVAL);
    numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {[15] = UINT64_C(1) << 63}};
    CHECK_CALL(EINVAL, um__os_bind(base, 4 * page, &numa));
    CHECK_CALL(0, um__os_unmap(base, 4 * page));
    numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {1}};
    CHECK_CALL(EFAULT, um__os_bind(base, 4 * page, &numa));
}

TEST(move_pages) {
    char *base = map_pages(4);
    base[page] = 1;
    void *pages[] = {base, base + page};
    int status[] = {777, 777}, nodes[] = {0, 0};
    int os_errno = um__os_move_pages(2, pages, NULL, status);
    if (os_errno == EPERM || os_errno == ENOSYS) {
        test_skip("it is refused here");
    } else {
        CHECK_CALL(0, um__os_move_pages(2, pages, NULL, status));
        CHECK(status[0] == -ENOENT);
        CHECK(status[1] >= 0);
        nodes[0] = nodes[1] = status[1];
        CHECK_CALL(0, um__os_move_pages(2, pages, nodes, status));
        CHECK(status[1] == nodes[1]);
        CHECK(base[page] == 1);
        nodes[1] = UM_MAX_NODES + 1;
        CHECK_CALL(ENODEV, um__os_move_pages(2, pages, nodes, status));
    }
    CHECK_CALL(0, um__os_unmap(base, 4 * page));
}

TEST(memfd) {
    int fd = 777, copy = 777;
    uint64_t nbytes = 777;
    size_t file_page = 777;
    CHECK_CALL(0, um__os_memfd("unimem-test", 0, &fd));
    REQUIRE(fd != 777);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((fcntl(fd, F_GET_SEALS) & F_SEAL_SEAL) == 0);
    int known = memfd_create("unimem-test", MFD_CLOEXEC | 8U); /* MFD_NOEXEC_SEAL, Linux 6.3 */
    CHECK((fchmod(fd, 0777) == 0) == (known < 0));
    close(known);
    CHECK_CALL(0, um__os_file_nbytes(fd, &nbytes));
    CHECK_EQ(nbytes, 0);
    CHECK_CALL(0, um__os_resize(fd, 4 * page));
    CHECK_CALL(0, um__os_file_nbytes(fd, &nbytes));
    CHECK_EQ(nbytes, 4 * page);
    CHECK_CALL(0, um__os_file_page_bytes(fd, &file_page));
    CHECK_EQ(file_page, page);
    CHECK_CALL(0, um__os_duplicate(fd, &copy));
    CHECK(copy != fd);
    CHECK(copy != 777);
    CHECK((fcntl(copy, F_GETFD) & FD_CLOEXEC) != 0);

    char *base = NULL;
    CHECK_CALL(0, um__os_reserve(4 * page, (void **)&base));
    CHECK_CALL(0, um__os_map_file_at(base, copy, 0, 4 * page, UM_ACCESS_SHARED));
    CHECK_STR(os_state_permissions(base), "rw-s");
    memset(base, 1, 4 * page);
    CHECK_CALL(0, um__os_punch_hole(fd, page, 2 * page));
    CHECK_PAGES(base, "1001");

    int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;
    CHECK_CALL(0, um__os_seal(fd, 0));
    CHECK((fcntl(fd, F_GET_SEALS) & (size_seals | F_SEAL_WRITE | F_SEAL_SEAL)) == size_seals);
    CHECK_CALL(EPERM, um__os_resize(fd, 5 * page));
    CHECK_CALL(EBUSY, um__os_seal(fd, 1)); /* it could still be written */
    CHECK_CALL(0, um__os_unmap(base, 4 * page));
    CHECK_CALL(0, um__os_seal(fd, 1));
    CHECK((fcntl(fd, F_GET_SEALS) & F_SEAL_WRITE) != 0);
    CHECK_CALL(EPERM, um__os_seal(fd, 0));
    CHECK_CALL(EPERM, um__os_punch_hole(fd, 0, page));
    CHECK_CALL(0, um__os_close(copy));
    CHECK_CALL(0, um__os_close(fd));
}

TEST(memfd_failures) {
    int fd = 777;
    size_t file_page = 777;
    CHECK_CALL(EBADF, um__os_duplicate(-1, &fd));
    CHECK_CALL(EBADF, um__os_file_page_bytes(-1, &file_page));
    CHECK_CALL(EBADF, um__os_resize(-1, 0));
    CHECK_CALL(EBADF, um__os_seal(-1, 0));
    CHECK_CALL(EBADF, um__os_punch_hole(-1, 0, page));
    CHECK(um__os_memfd("huge pages of 2 bytes", 1, &fd) != 0);
    CHECK(fd == 777);
    CHECK(file_page == 777);
}

TEST(hugetlb) {
    enum { SHIFT = 21 };
    BORROW_HUGE_PAGES(4);
    char *reserved = NULL;
    CHECK_CALL(0, um__os_reserve(5 * HUGE_BYTES, (void **)&reserved));
    char *base = (char *)(((uintptr_t)reserved / HUGE_BYTES + 1) * HUGE_BYTES);
    CHECK_CALL(0, um__os_map_at(base, 2 * HUGE_BYTES, SHIFT));
    CHECK_EQ(smaps_bytes(base, "KernelPageSize:"), HUGE_BYTES);
    base[HUGE_BYTES] = 1;
    CHECK_CALL(0, um__os_reserve_at(base + HUGE_BYTES, HUGE_BYTES));
    CHECK_STR(os_state_permissions(base + HUGE_BYTES), "---p");
    CHECK_CALL(EINVAL, um__os_map_at(base + page, HUGE_BYTES, SHIFT));

    int fd = 777;
    size_t file_page = 777;
    CHECK_CALL(0, um__os_memfd("unimem-test", SHIFT, &fd));
    CHECK_CALL(0, um__os_file_page_bytes(fd, &file_page));
    CHECK_EQ(file_page, HUGE_BYTES);
    CHECK_CALL(0, um__os_resize(fd, 2 * HUGE_BYTES));
    CHECK_CALL(
        0, um__os_map_file_at(base + 2 * HUGE_BYTES, fd, HUGE_BYTES, HUGE_BYTES, UM_ACCESS_SHARED));
    base[2 * HUGE_BYTES] = 1;
    CHECK_CALL(0, um__os_punch_hole(fd, HUGE_BYTES, HUGE_BYTES));
    CHECK(base[2 * HUGE_BYTES] == 0);
    CHECK_CALL(0, um__os_unmap(reserved, 5 * HUGE_BYTES));
    CHECK_CALL(0, um__os_close(fd));
}

typedef struct runner {
    size_t cpu;
    _Atomic int ran;
    int result;
    cpu_set_t cpus;
} runner;

static void *run_on_cpu(void *arg) {
    runner *r = arg;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(r->cpu, &mask);
    r->result = um__os_set_affinity(&mask, sizeof mask);
    sched_getaffinity(0, sizeof r->cpus, &r->cpus);
    atomic_store(&r->ran, 1);
    return NULL;
}

static void *read_mask(void *arg) {
    pthread_sigmask(SIG_BLOCK, NULL, arg);
    return NULL;
}

/* A thread gets no signals except for its own faults. The mask of the thread that started it is
 * unchanged. */
TEST(signals_of_threads) {
    sigset_t before, after, seen;
    um__os_thread thread;
    sigemptyset(&seen);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    CHECK_EQ(um__os_thread_start(&thread, read_mask, &seen), 0);
    CHECK_EQ(um__os_thread_join(thread), 0);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    for (int i = 1; i < SIGRTMIN; i++) {
        CHECK(sigismember(&after, i) == sigismember(&before, i));
    }
    int blocked[] = {SIGINT, SIGTERM, SIGALRM, SIGCHLD, SIGUSR1, SIGRTMIN, SIGRTMAX};
    for (size_t i = 0; i < COUNT(blocked); i++) {
        CHECK(sigismember(&seen, blocked[i]) == 1);
    }
    int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    for (size_t i = 0; i < COUNT(faults); i++) {
        CHECK(sigismember(&seen, faults[i]) == 0);
    }
}

static void *set_and_wake(void *arg) {
    _Atomic uint32_t *word = arg;
    atomic_store(word, 1);
    um__os_wake(word);
    return NULL;
}

TEST(waiting) {
    _Atomic uint32_t word = 5;
    CHECK_CALL(EAGAIN, um__os_wait(&word, 4, 60000));
    CHECK_CALL(ETIMEDOUT, um__os_wait(&word, 5, 1));
    CHECK_CALL(ETIMEDOUT, um__os_wait(&word, 5, 0));
    CHECK_CALL(0, um__os_wake(&word));
    um__os_thread thread;
    atomic_store(&word, 0);
    CHECK_EQ(um__os_thread_start(&thread, set_and_wake, &word), 0);
    while (atomic_load(&word) == 0) {
        int os_errno = um__os_wait(&word, 0, 3600000);
        CHECK(os_errno == 0 || os_errno == EAGAIN);
    }
    CHECK_EQ(um__os_thread_join(thread), 0);
}

TEST(file_systems) {
    int fs = 777, mount = 777;
    if (um__os_fs_open("no such file system", &fs) != ENODEV) {
        test_skip("this process may not mount any");
        return;
    }
    CHECK_CALL(EINVAL, um__os_fs_set(-1, "size", "1"));
    CHECK_CALL(EINVAL, um__os_fs_create(-1));
    CHECK_CALL(EBADF, um__os_fs_mount(-1, &mount));
    CHECK_CALL(EBADF, um__os_fs_pick(-1, &fs));
    CHECK_CALL(EINVAL, um__os_fs_reconfigure(-1));
    CHECK(fs == 777);
    CHECK(mount == 777);
    CHECK_CALL(0, um__os_fs_open("tmpfs", &fs));
    CHECK((fcntl(fs, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_CALL(EINVAL, um__os_fs_set(fs, "no such option", "1"));
    CHECK_CALL(0, um__os_fs_set(fs, "size", "65536"));
    CHECK_CALL(0, um__os_fs_create(fs));
    CHECK_CALL(0, um__os_fs_mount(fs, &mount));
    CHECK((fcntl(mount, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_CALL(0, um__os_close(fs));
    CHECK_CALL(0, um__os_fs_pick(mount, &fs));
    CHECK((fcntl(fs, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_CALL(EINVAL, um__os_fs_set(fs, "no such option", NULL));
    CHECK_CALL(0, um__os_fs_set(fs, "ro", NULL));
    CHECK_CALL(0, um__os_fs_reconfigure(fs));
    CHECK_CALL(0, um__os_close(fs));
    CHECK(mkdirat(mount, "a", 0700) == -1);
    CHECK(errno == EROFS);
    CHECK_CALL(0, um__os_close(mount));
}

TEST(threads) {
    cpu_set_t mine, mask;
    CPU_ZERO(&mask);
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    CHECK_CALL(0, um__os_get_affinity(&mask, sizeof mask));
    CHECK(CPU_EQUAL(&mine, &mask));
    CHECK(CPU_COUNT(&mask) > 0);

    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &mine)) {
            continue;
        }
        runner r = {.cpu = cpu, .result = -1};
        um__os_thread thread;
        um_counters start, end;
        um_counters_read(&start);
        CHECK_EQ(um__os_thread_start(&thread, run_on_cpu, &r), 0);
        CHECK_EQ(um__os_thread_join(thread), 0);
        um_counters_read(&end);
        CHECK_EQ(end.n_os_calls, start.n_os_calls + 3); /* start, set_affinity, join */
        CHECK_EQ(atomic_load(&r.ran), 1);
        CHECK_EQ(r.result, 0);
        CHECK(CPU_COUNT(&r.cpus) == 1);
        CHECK(CPU_ISSET(cpu, &r.cpus));
    }
    /* Pinning a thread does not move other threads. */
    CPU_ZERO(&mask);
    CHECK_CALL(EINVAL, um__os_set_affinity(&mask, sizeof mask));
    CHECK_CALL(0, um__os_set_affinity(&mine, sizeof mine));
    CHECK_CALL(0, um__os_get_affinity(&mask, sizeof mask));
    CHECK(CPU_EQUAL(&mine, &mask));
}
