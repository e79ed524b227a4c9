/* Files: mapping a range of a file, and reading a file without mapping it. */
#include "blocks.h"

static int make_file(size_t nbytes) {
    int fd = temp_file();
    fill_file(fd, 0, nbytes);
    return fd;
}

static bool holds_file(const um_block *block, uint64_t offset) {
    return holds(block->base, 0, offset, block->nbytes);
}

static um_block map_file(int fd, uint64_t offset, size_t nbytes, um_access access) {
    um_block block;
    SPOIL(block);
    REQUIRE(
        CHECK_OK(um_block_map_file(&block, fd, offset, nbytes, access, UM_CAT_WEIGHTS, &test_err)));
    return block;
}

TEST(map) {
    size_t file_nbytes = 10 * page + 123;
    struct {
        uint64_t offset;
        size_t nbytes;
    } ranges[] = {{0, file_nbytes},     {0, 1},           {0, page},      {page, 3 * page},
                  {2 * page, page + 1}, {10 * page, 123}, {10 * page, 1}, {9 * page, page + 123}};
    for (um_access access = UM_ACCESS_READ; access <= UM_ACCESS_SHARED; access++) {
        for (size_t i = 0; i < COUNT(ranges); i++) {
            uint64_t offset = ranges[i].offset;
            size_t nbytes = ranges[i].nbytes, whole = (nbytes + page - 1) / page * page;
            int fd = make_file(file_nbytes);
            um_ledger_row row = ledger_row(UM_CAT_WEIGHTS), mapped;
            um_block block = map_file(fd, offset, nbytes, access);
            close(fd);
            check_block(&block, BLOCK(.nbytes = nbytes, .requested_nbytes = nbytes,
                                      .reserved_nbytes = whole, .step_nbytes = page,
                                      .requested_pages = block.requested_pages,
                                      .category = UM_CAT_WEIGHTS, .access = access, .is_file = 1));
            CHECK(um_block_is_committed(&block, 0, nbytes));
            CHECK(!um_block_is_committed(&block, 0, nbytes + 1));
            CHECK(holds_file(&block, offset));
            const char *permissions[] = {"r--s", "rw-p", "rw-s"};
            CHECK_STR(os_state_permissions(block.base), permissions[access]);
            CHECK(has_vm_flag(block.base, "dc") == (access == UM_ACCESS_SHARED));
            mapped = ledger_row(UM_CAT_WEIGHTS);
            CHECK_EQ(mapped.n_mappings, row.n_mappings + 1);
            CHECK_EQ(mapped.mapped_bytes, row.mapped_bytes + whole);
            um_placement p = placement_of(&block);
            CHECK_EQ(p.resident_bytes, whole);
            CHECK(p.pss_bytes <= whole);
            CHECK(p.pss_bytes > 0);
            CHECK_EQ(resident(&block, 0, nbytes), whole);
            unmap_block(&block);
            mapped = ledger_row(UM_CAT_WEIGHTS);
            CHECK_EQ(mapped.n_mappings, row.n_mappings);
            CHECK_EQ(mapped.mapped_bytes, row.mapped_bytes);
        }
    }
}

TEST(private_writes_stay_private) {
    AUTO_FD fd = make_file(3 * page);
    AUTO_BLOCK written = map_file(fd, 0, 3 * page, UM_ACCESS_PRIVATE);
    AUTO_BLOCK other = map_file(fd, 0, 3 * page, UM_ACCESS_READ);
    memset(written.base, 0xAB, written.nbytes);
    CHECK(holds_file(&other, 0));
    unsigned char bytes[64];
    CHECK_OK(um_file_read(fd, page, bytes, sizeof bytes, &test_err));
    CHECK(bytes[0] == byte_of(0, page));
    CHECK(bytes[63] == byte_of(0, page + 63));
}

/* Without the gaps, neighbouring ranges of one file would become one entry of smaps. */
TEST(neighbours_stay_apart) {
    enum { N = 8 };
    AUTO_FD fd = make_file(N * page);
    um_block blocks[N];
    for (size_t i = 0; i < N; i++) {
        blocks[i] = map_file(fd, i * page, page, UM_ACCESS_READ);
        CHECK(holds_file(&blocks[i], i * page));
    }
    for (size_t i = 0; i < N; i++) {
        um_placement placement;
        CHECK_OK(um_block_verify(&blocks[i], &placement, &test_err));
        CHECK_EQ(placement.resident_bytes, page);
        CHECK_STR(os_state_permissions((char *)blocks[i].base - page), "---p");
        CHECK_STR(os_state_permissions((char *)blocks[i].base + page), "---p");
        unmap_block(&blocks[i]);
    }
}

/* Huge pages of the page cache can be mapped as such only where address and offset agree. */
TEST(large_files_lie_as_in_the_file) {
    AUTO_FD fd = make_file(3 * page);
    if (huge_page <= page || ftruncate(fd, (off_t)(3 * huge_page)) != 0) {
        test_skip("no transparent huge pages, or no sparse files");
    } else {
        for (uint64_t offset = 0; offset <= huge_page; offset += huge_page / 4) {
            AUTO_BLOCK block = map_file(fd, offset, huge_page + page, UM_ACCESS_READ);
            CHECK_EQ((uintptr_t)block.base % huge_page, offset % huge_page);
        }
    }
}

/* A write through a shared mapping goes to the file, and one to the file is visible. */
TEST(shared_writes_are_the_files) {
    AUTO_FD fd = make_file(3 * page + 5);
    um_block written = map_file(fd, page, 2 * page + 5, UM_ACCESS_SHARED);
    AUTO_BLOCK other = map_file(fd, 0, 3 * page, UM_ACCESS_READ);
    memset(written.base, 0xAB, page);
    CHECK(is_filled(bytes_of(&other, page), page, 0xAB));
    CHECK(pwrite(fd, "changed", 7, 10) == 7);
    CHECK(memcmp(bytes_of(&other, 10), "changed", 7) == 0);
    unmap_block(&written);
    unsigned char bytes[2];
    CHECK_OK(um_file_read(fd, 2 * page - 1, bytes, sizeof bytes, &test_err));
    CHECK(bytes[0] == 0xAB);
    CHECK(bytes[1] == byte_of(0, 2 * page));
}

/* Dropped pages of a file are read again. A private mapping would lose what was written. */
TEST(advise) {
    AUTO_FD fd = make_file(8 * page);
    for (um_access access = UM_ACCESS_READ; access <= UM_ACCESS_SHARED; access++) {
        AUTO_BLOCK block = map_file(fd, page, 7 * page, access);
        CHECK_OK(um_block_advise(&block, UM_ADVICE_WILLNEED, &test_err));
        CHECK_OK(um_block_advise(&block, UM_ADVICE_RANDOM, &test_err));
        CHECK(has_vm_flag(block.base, "rr"));
        if (access == UM_ACCESS_PRIVATE) {
            memset(block.base, 1, page);
            CHECK_INVALID(um_block_advise(&block, UM_ADVICE_DONTNEED, &test_err));
            CHECK(is_filled(block.base, page, 1));
        } else {
            CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
            CHECK_OK(um_block_advise(&block, UM_ADVICE_DONTNEED, &test_err));
            CHECK_EQ(placement_of(&block).resident_bytes, 0);
            CHECK(holds_file(&block, page));
        }
    }
}

/* A part is read without being touched; what the kernel refuses is no error. */
TEST(will_need) {
    size_t size = 300 * page; /* more than one call asks for */
    AUTO_FD fd = make_file(size);
    AUTO_BLOCK block = map_file(fd, 0, size, UM_ACCESS_READ);
    CHECK_OK(um_block_advise(&block, UM_ADVICE_RANDOM, &test_err));
    um_counters before, after;
    um_counters_read(&before);
    um_block_will_need(&block, page + 1, 280 * page);
    um_counters_read(&after);
    CHECK_EQ(after.n_os_calls - before.n_os_calls, 3);
    um_block_will_need(&block, size - 1, 1);
    um_block_will_need(&block, 0, 0);
    fault_os_fail_nth(1, EIO);
    um_block_will_need(&block, 0, size);
    CHECK(holds_file(&block, 0));
}

TEST(lock) {
    AUTO_FD fd = make_file(4 * page + 1);
    AUTO_BLOCK block = map_file(fd, 0, 4 * page + 1, UM_ACCESS_READ);
    if (um_block_lock(&block, UM_LOCK_NOW, NULL) != UM_OK) {
        test_skip("this process may not lock memory");
    } else {
        CHECK_EQ(placement_of(&block).locked_bytes, 5 * page);
        CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
        CHECK_EQ(placement_of(&block).locked_bytes, 0);
    }
}

/* The kernel maps whole huge pages of such a file, and memory after them must stay untouched. */
TEST(file_of_huge_pages) {
    BORROW_HUGE_PAGES(4);
    AUTO_FD fd = memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB);
    REQUIRE(fd >= 0);
    CHECK(ftruncate(fd, 3 * HUGE_BYTES) == 0);
    AUTO_BLOCK block = map_file(fd, HUGE_BYTES, page + 1, UM_ACCESS_SHARED);
    um_block refused;
    CHECK_EQ(block.nbytes, page + 1);
    CHECK_EQ(block.step_nbytes, HUGE_BYTES);
    CHECK_EQ(block.reserved_nbytes, HUGE_BYTES);
    CHECK_EQ((uintptr_t)block.base % HUGE_BYTES, 0);
    memset(block.base, 1, HUGE_BYTES);
    CHECK_STR(os_state_permissions(bytes_of(&block, HUGE_BYTES)), "---p");
    CHECK_INVALID(
        um_block_map_file(&refused, fd, page, page, UM_ACCESS_READ, UM_CAT_WEIGHTS, &test_err));
}

static void check_map_fails(um_status status, int os_errno, int fd, uint64_t offset, size_t nbytes,
                            um_access access, um_category category) {
    CHECK_MAKES_NONE(status, "", um_block_map_file, fd, offset, nbytes, access, category);
    CHECK(test_err.os_errno == os_errno);
}

TEST(refused_maps) {
    size_t n = 4 * page + 7;
    AUTO_FD fd = make_file(n);
    uint64_t max = SIZE_MAX, last = 0 - (uint64_t)page, half = (uint64_t)1 << 63;
    uint64_t ranges[][2] = {{0, 0},
                            {page, 0},
                            {1, page},
                            {page - 1, 1},
                            {page * 3 / 2, 1},
                            {0, n + 1},
                            {page, 3 * page + 8},
                            {4 * page, 8},
                            {5 * page, 1},
                            {0, max},
                            {page, max},
                            {page, last},
                            {page, last + 8},
                            {last, page},
                            {last, page + 7},
                            {half, page}};
    for (um_access a = UM_ACCESS_READ; a <= UM_ACCESS_SHARED; a++) {
        for (size_t i = 0; i < COUNT(ranges); i++) {
            check_map_fails(UM_E_INVALID, 0, fd, ranges[i][0], ranges[i][1], a, UM_CAT_WEIGHTS);
            bool whole = ranges[i][0] % page == 0 && ranges[i][1] != 0;
            CHECK_EQ(test_err.detail, whole ? UM_BLOCK_PAST_FILE : UM_DETAIL_NONE);
        }
        check_map_fails(UM_E_INVALID, 0, fd, 0, page, a, UM_CAT_COUNT);
        check_map_fails(UM_E_INVALID, 0, fd, 0, page, a, (um_category)-1);
        check_map_fails(UM_E_OS, EBADF, -1, 0, page, a, UM_CAT_WEIGHTS);
    }
    check_map_fails(UM_E_INVALID, 0, fd, 0, page, (um_access)3, UM_CAT_WEIGHTS);
    check_map_fails(UM_E_INVALID, 0, fd, 0, page, (um_access)-1, UM_CAT_WEIGHTS);
    close(fd);
    /* A folder, and a file that is not open for reading. */
    struct stat folder;
    fd = open("/", O_RDONLY | O_DIRECTORY);
    REQUIRE(fstat(fd, &folder) == 0);
    if (folder.st_size > 0) {
        check_map_fails(UM_E_OS, ENODEV, fd, 0, 1, UM_ACCESS_READ, UM_CAT_WEIGHTS);
    } else {
        test_skip("folders have no size on this file system");
    }
    close(fd);
    fd = make_file(page);
    AUTO_FD write_only = reopen(fd, O_WRONLY);
    REQUIRE(write_only >= 0);
    check_map_fails(UM_E_OS, EACCES, write_only, 0, page, UM_ACCESS_READ, UM_CAT_WEIGHTS);
}

TEST(warm) {
    for (um_access access = UM_ACCESS_READ; access <= UM_ACCESS_SHARED; access++) {
        AUTO_FD fd = make_file(100 * page + 1);
        AUTO_BLOCK block = map_file(fd, page, 99 * page + 1, access);
        CHECK_OK(um_block_warm(&block, 0, block.nbytes, 3, NULL, &test_err));
        CHECK_EQ(placement_of(&block).resident_bytes, 100 * page);
        CHECK(holds_file(&block, page));
        CHECK_OK(um_block_warm(&block, 99 * page, 1, 1, NULL, &test_err));
        CHECK_INVALID(um_block_warm(&block, 99 * page, 2, 1, NULL, &test_err));
        /* The file becomes shorter: an error, not a dead process, and the beginning is still
         * readable. */
        CHECK(ftruncate(fd, (off_t)(50 * page)) == 0);
        CHECK_STATUS(UM_E_IO, um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
        CHECK(test_err.os_errno == 0);
        CHECK_FAILS(UM_E_IO, um_block_warm, &block, 0, block.nbytes, 3, NULL);
        CHECK_OK(um_block_warm(&block, 0, 49 * page, 2, NULL, &test_err));
        CHECK(*bytes_of(&block, 49 * page - 1) == byte_of(0, 50 * page - 1));
    }
}

/* A page that was only read in faults at its first write. Nothing is written: the kernel takes the
 * pages of the file as they are. */
TEST(warm_to_write) {
    enum { N = 100 };
    for (um_access access = UM_ACCESS_PRIVATE; access <= UM_ACCESS_SHARED; access++) {
        for (unsigned n_threads = 1; n_threads <= 3; n_threads += 2) {
            AUTO_FD fd = make_file(N * page);
            AUTO_BLOCK block = map_file(fd, page, (N - 1) * page, access);
            CHECK_OK(um_block_warm_to_write(&block, 0, 50 * page, n_threads, NULL, &test_err));
            CHECK(holds_file(&block, page));
            long before = faults_now();
            for (size_t at = 0; at < 50 * page; at += page) {
                *bytes_of(&block, at) += 1;
            }
            CHECK_EQ(faults_now(), before);
            *bytes_of(&block, 60 * page) += 1;
            CHECK(faults_now() > before);
            CHECK(ftruncate(fd, (off_t)(50 * page)) == 0);
            CHECK_FAILS(UM_E_IO, um_block_warm_to_write, &block, 0, block.nbytes, n_threads, NULL);
            CHECK(test_err.os_errno == 0);
        }
    }
    AUTO_FD fd = make_file(page);
    AUTO_BLOCK block = map_file(fd, 0, page, UM_ACCESS_READ);
    CHECK_FAILS(UM_E_INVALID, um_block_warm_to_write, &block, 0, page, 1, NULL);
    AUTO_FD memory = memory_file(page);
    AUTO_BLOCK attached = attach_block(memory, UM_ACCESS_READ);
    CHECK_FAILS(UM_E_INVALID, um_block_warm_to_write, &attached, 0, page, 1, NULL);
    AUTO_BLOCK own = make_pages(4 * page, UM_PAGES_4K);
    CHECK_OK(um_block_warm_to_write(&own, 0, own.nbytes, 1, NULL, &test_err));
    CHECK_EQ(placement_of(&own).resident_bytes, own.nbytes);
}

TEST(read) {
    size_t n = 3 * page + 11;
    AUTO_FD fd = make_file(n);
    AUTO_FREE unsigned char *bytes = allocate(n);
    size_t limits[] = {0, 1, 7, page - 1, page, n};
    for (size_t i = 0; i < COUNT(limits); i++) {
        size_t offsets[] = {0, 1, page, 3 * page, n - 1, n};
        fault_os_limit_read(limits[i]);
        for (size_t j = 0; j < COUNT(offsets); j++) {
            size_t offset = offsets[j], nbytes = n - offset;
            memset(bytes, 0xEE, n);
            CHECK_OK(um_file_read(fd, offset, bytes, nbytes, &test_err));
            bool right = true;
            for (size_t k = 0; k < n; k++) {
                right = right && bytes[k] == (k < nbytes ? byte_of(0, offset + k) : 0xEE);
            }
            CHECK(right);
        }
        /* The file ends earlier: the error says how many bytes were read. */
        CHECK_STATUS(UM_E_IO, um_file_read(fd, n - 100, bytes, 200, &test_err));
        CHECK(test_err.os_errno == 0);
        CHECK_EQ(test_err.used, 100);
        CHECK_EQ(test_err.asked, 200);
        CHECK_STATUS(UM_E_IO, um_file_read(fd, n, bytes, 1, &test_err));
        CHECK(test_err.os_errno == 0);
        CHECK_EQ(test_err.used, 0);
    }
    fault_os_limit_read(0);
    /* The position of the file is neither used nor moved. */
    CHECK(lseek(fd, 5, SEEK_SET) == 5);
    CHECK_OK(um_file_read(fd, 9, bytes, 1, &test_err));
    CHECK(bytes[0] == byte_of(0, 9));
    CHECK(lseek(fd, 0, SEEK_CUR) == 5);
    CHECK_OK(um_file_read(fd, n, NULL, 0, &test_err));
    CHECK_STATUS(UM_E_IO, um_file_read(-1, 0, bytes, 1, &test_err));
    CHECK(test_err.os_errno == EBADF);
    CHECK(um_file_read(-1, 0, bytes, 1, NULL) == UM_E_IO);
    CHECK_STATUS(UM_E_IO, um_file_read(fd, UINT64_MAX, bytes, 1, &test_err));
    CHECK_STATUS(UM_E_IO, um_file_read(fd, UINT64_MAX - 10, bytes, 100, &test_err));
    CHECK_STATUS(UM_E_IO, um_file_read(fd, (uint64_t)1 << 63, bytes, 100, &test_err));
}

typedef struct mapping {
    um_block block;
    int fd;
    um_access access;
} mapping;

static um_status run_map(void *context, um_error *err) {
    mapping *m = context;
    return um_block_map_file(&m->block, m->fd, page, 2 * page, m->access, UM_CAT_WEIGHTS, err);
}

static void undo_map(void *context) {
    mapping *m = context;
    CHECK(um_block_unmap(&m->block, NULL) == UM_OK);
    SPOIL(m->block);
}

static um_status run_read(void *context, um_error *err) {
    static unsigned char bytes[100];
    return um_file_read(*(int *)context, 10, bytes, sizeof bytes, err);
}

static um_status run_warm(void *context, um_error *err) {
    mapping *m = context;
    return um_block_warm(&m->block, 0, m->block.nbytes, 2, NULL, err);
}

TEST(faults) {
    mapping m = {.fd = make_file(3 * page)};
    SPOIL(m.block);
    os_state_settle_threads(4);
    for (um_access access = UM_ACCESS_READ; access <= UM_ACCESS_SHARED; access++) {
        m.access = access;
        CHECK_EACH_FAULT(run_map, undo_map, &m, m.block, HARMLESS_HUGE_PAGE " um__os_residency ");
        CHECK(run_map(&m, NULL) == UM_OK);
        CHECK_EACH_FAULT_AT(run_warm, NULL, &m, m.block.base, m.block.nbytes, HARMLESS_THREADS);
        undo_map(&m);
    }
    fault_os_limit_read(30);
    CHECK_EACH_FAULT(run_read, NULL, &m.fd, m.fd, NULL);
    unsigned char bytes[100];
    fault_os_fail_nth(3, EINTR);
    CHECK_OK(um_file_read(m.fd, page, bytes, sizeof bytes, &test_err));
    CHECK_STR(fault_os_failed(), "um__os_pread");
    CHECK(bytes[0] == byte_of(0, page));
    CHECK(bytes[99] == byte_of(0, page + 99));
    fault_os_fail_nth(3, EIO);
    CHECK_STATUS(UM_E_IO, um_file_read(m.fd, page, bytes, sizeof bytes, &test_err));
    CHECK(test_err.os_errno == EIO);
    CHECK_EQ(test_err.used, 60);
    close(m.fd);
}
