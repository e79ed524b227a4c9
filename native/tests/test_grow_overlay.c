/* Files mapped over reserved memory: what is read, what is copied, and what is left when a call
 * fails. */
#include "blocks.h"

enum { FILE_PAGES = 6, RESERVED = 12 };

/* A file whose pages are filled with a, b, c ... */
static int make_file(void) {
    int fd = temp_file();
    AUTO_FREE unsigned char *bytes = allocate(FILE_PAGES * page);
    for (size_t i = 0; i < FILE_PAGES; i++) {
        memset(bytes + i * page, 'a' + (int)i, page);
    }
    REQUIRE(write(fd, bytes, FILE_PAGES * page) == (ssize_t)(FILE_PAGES * page));
    return fd;
}

static bool file_is_as_it_was(int fd) {
    bool same = true;
    AUTO_FREE unsigned char *bytes = allocate(page);
    for (size_t i = 0; i < FILE_PAGES; i++) {
        same = same && pread(fd, bytes, page, (off_t)(i * page)) == (ssize_t)page &&
               is_filled(bytes, page, (unsigned char)('a' + i));
    }
    return same;
}

static um_block make_reserved(void) {
    return make_block(1, OPTIONS(.pages = UM_PAGES_4K, .category = UM_CAT_HISTORY,
                                 .reserve_nbytes = RESERVED * page));
}

static unsigned char *at(const um_block *block, size_t n_pages) {
    return (unsigned char *)block->base + n_pages * page;
}

static void overlay(um_block *block, size_t to, int fd, size_t from, size_t n) {
    CHECK_OK(um_block_overlay(block, to * page, fd, from * page, n * page, &test_err));
}

TEST(contents) {
    int fd = make_file(), copy = dup(fd);
    um_block block = make_reserved();
    memset(at(&block, 0), 1, page);
    fault_os_fail_nth(0, 0);
    overlay(&block, 2, copy, 1, 3);
    CHECK_EQ(fault_os_calls(), 3);
    CHECK_EQ(fault_os_calls_of("um__os_map_file_at"), 1);
    close(copy);
    CHECK(um_block_is_committed(&block, 2 * page, 3 * page));
    CHECK(!um_block_is_committed(&block, page, page));
    CHECK(!um_block_is_committed(&block, 5 * page, page));
    CHECK_EQ(block.nbytes, page);
    CHECK_EQ(block.committed_nbytes, 4 * page);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 4 * page);
    CHECK_STR(os_state_permissions(at(&block, 2)), "rw-p");
    CHECK_PAGES(block.base, "1-bcd-------");
    memset(at(&block, 3), 9, page); /* changes the block, not the file */
    CHECK_PAGES(block.base, "1-b9d-------");
    CHECK(file_is_as_it_was(fd));
    CHECK_OK(um_block_commit(&block, 0, 7 * page, &test_err)); /* it grows as before */
    CHECK_EQ(block.nbytes, 7 * page);
    overlay(&block, 7, fd, 5, 1);
    CHECK_EQ(block.nbytes, 8 * page);
    CHECK_PAGES(block.base, "10b9d00f----");
    overlay(&block, 9, fd, 0, 0); /* nothing */
    CHECK_EQ(block.committed_nbytes, 8 * page);
    /* Once released, the range is memory like any other. */
    release(&block, 2 * page, 2 * page, 2 * page);
    CHECK_PAGES(block.base, "10--d00f----");
    CHECK_OK(um_block_commit(&block, 2 * page, page, &test_err));
    overlay(&block, 3, fd, 0, 1);
    CHECK_PAGES(block.base, "100ad00f----");
    unmap_block(&block);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 0);
    close(fd);
}

TEST(refused) {
    int fd = make_file(), closed = dup(fd);
    close(closed);
    um_block block = make_reserved(), copy = block;
    struct {
        size_t offset, file_offset, nbytes;
        um_detail detail;
    } bad[] = {{0, 0, page, UM_DETAIL_NONE}, /* committed there */
               {page, 0, RESERVED * page, UM_DETAIL_NONE},
               {RESERVED * page, 0, page, UM_DETAIL_NONE},
               {SIZE_MAX - page + 1, 0, page, UM_DETAIL_NONE},
               {page + 1, 0, page, UM_DETAIL_NONE},
               {page, 0, page + 1, UM_DETAIL_NONE},
               {page, 1, page, UM_DETAIL_NONE},
               {page, FILE_PAGES * page, page, UM_BLOCK_PAST_FILE},
               {page, 0, (FILE_PAGES + 1) * page, UM_BLOCK_PAST_FILE},
               {page, SIZE_MAX - page + 1, page, UM_BLOCK_PAST_FILE}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        CHECK_DETAIL(UM_E_INVALID, bad[i].detail,
                     um_block_overlay(&block, bad[i].offset, fd, bad[i].file_offset, bad[i].nbytes,
                                      &test_err));
    }
    CHECK_STATUS(UM_E_OS, um_block_overlay(&block, page, closed, 0, page, &test_err));
    CHECK(test_err.os_errno == EBADF);
    int pipes[2];
    REQUIRE(pipe(pipes) == 0);
    CHECK_INVALID(um_block_overlay(&block, page, pipes[0], 0, page, &test_err));
    close(pipes[0]);
    close(pipes[1]);
    CHECK(memcmp(&block, &copy, sizeof copy) == 0);
    CHECK_STR(os_state_permissions(at(&block, 1)), "---p");
    if (um_block_lock(&block, UM_LOCK_ONFAULT, NULL) == UM_OK) {
        CHECK_INVALID(um_block_overlay(&block, page, fd, 0, page, &test_err));
    } else {
        test_skip("this process may not lock memory");
    }
    unmap_block(&block);
    um_block_options options =
        *OPTIONS(.sharing = UM_SHARING_MEMFD, .reserve_nbytes = RESERVED * page);
    block = make_block(page, &options);
    CHECK_INVALID(um_block_overlay(&block, page, fd, 0, page, &test_err));
    unmap_block(&block);
    CHECK_OK(um_block_map_file(&block, fd, 0, page, UM_ACCESS_READ, UM_CAT_OTHER, &test_err));
    CHECK_INVALID(um_block_overlay(&block, 0, fd, 0, page, &test_err));
    unmap_block(&block);
    if (huge_page != 0) {
        options = *OPTIONS(.pages = UM_PAGES_THP, .reserve_nbytes = 2 * huge_page);
        block = make_block(1, &options);
        CHECK_INVALID(um_block_overlay(&block, huge_page, fd, 0, page, &test_err));
        unmap_block(&block);
    }
    close(fd);
}

TEST(warm) {
    AUTO_FD fd = make_file();
    AUTO_BLOCK block = make_reserved();
    overlay(&block, 2, fd, 0, 6);
    CHECK_OK(um_block_commit(&block, 0, 10 * page, &test_err));
    for (unsigned n_threads = 1; n_threads < 4; n_threads++) {
        CHECK_OK(um_block_warm(&block, 0, 10 * page, n_threads, NULL, &test_err));
    }
    /* No page of the file was copied. */
    CHECK_EQ(smaps_bytes(at(&block, 2), "Size"), 6 * page);
    CHECK_EQ(smaps_bytes(at(&block, 2), "Rss"), 6 * page);
    CHECK_EQ(smaps_bytes(at(&block, 2), "Anonymous"), 0);
    CHECK_EQ(placement_of(&block).resident_bytes, 10 * page);
    long before = faults_now();
    unsigned sum = 0;
    for (size_t i = 0; i < 10; i++) {
        sum += *(volatile unsigned char *)at(&block, i);
    }
    *(volatile unsigned char *)at(&block, 1) = 1; /* the block's own pages can be written, too */
    *(volatile unsigned char *)at(&block, 9) = 1;
    CHECK_EQ(faults_now() - before, 0);
    CHECK_EQ(sum, 'a' + 'b' + 'c' + 'd' + 'e' + 'f');
    /* A range that begins and ends inside the file, and one outside of it. */
    CHECK_OK(um_block_warm(&block, 3 * page + 1, page, 2, NULL, &test_err));
    CHECK_OK(um_block_warm(&block, 0, page, 1, NULL, &test_err));
    CHECK_EQ(smaps_bytes(at(&block, 2), "Anonymous"), 0);
}

TEST(shrunk_file) {
    AUTO_FD fd = make_file();
    AUTO_BLOCK block = make_reserved();
    overlay(&block, 1, fd, 0, 6);
    REQUIRE(ftruncate(fd, (off_t)(2 * page)) == 0);
    CHECK_STATUS(UM_E_IO, um_block_warm(&block, 0, 7 * page, 1, NULL, &test_err));
    CHECK(test_err.os_errno == 0);
    CHECK_STATUS(UM_E_IO, um_block_warm(&block, 4 * page, page, 3, NULL, &test_err));
    CHECK_OK(um_block_warm(&block, 0, 3 * page, 1, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 3 * page);
    if (um_block_lock(&block, UM_LOCK_ONFAULT, NULL) != UM_OK) {
        test_skip("this process may not lock memory");
    } else {
        CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
        CHECK(um_block_lock(&block, UM_LOCK_NOW, NULL) != UM_OK);
        CHECK(block.lock == UM_LOCK_NONE);
        CHECK(!has_vm_flag(at(&block, 1), "lo"));
    }
    /* Lost pages can be discarded. */
    size_t out = 0;
    CHECK_OK(um_block_discard(&block, page, 6 * page, &out, &test_err));
    CHECK_EQ(out, 6 * page);
    CHECK(is_filled(at(&block, 1), 6 * page, 0));
}

TEST(discard) {
    AUTO_FD fd = make_file();
    AUTO_BLOCK block = make_reserved();
    overlay(&block, 2, fd, 0, 6);
    CHECK_OK(um_block_commit(&block, 0, 10 * page, &test_err));
    memset(at(&block, 0), 1, 2 * page);
    memset(at(&block, 4), 4, page); /* a private copy */
    CHECK_PAGES(block.base, "11ab4def00--");
    size_t out = 0;
    CHECK_OK(um_block_discard(&block, page, 4 * page, &out, &test_err));
    CHECK_EQ(out, 4 * page);
    CHECK_EQ(block.nbytes, 10 * page);
    CHECK_PAGES(block.base, "10000def00--");
    CHECK(has_vm_flag(at(&block, 3), "nh") || huge_page == 0); /* as the block is */
    memset(at(&block, 1), 7, 4 * page);
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_discard(&block, page, 4 * page, NULL, &test_err));
    CHECK_EQ(fault_os_calls(), 1); /* memory of the block itself */
    CHECK_PAGES(block.base, "10000def00--");
    CHECK(file_is_as_it_was(fd));
    /* If there is no memory for new pages of the block, the range is not committed any more. */
    for (unsigned nth = 1; nth <= 4; nth++) {
        bool kept = nth <= 2; /* the madvise, and the mmap that releases */
        fault_os_fail_nth(nth, ENOMEM);
        CHECK_STATUS(UM_E_NOMEM, um_block_discard(&block, 6 * page, page, &out, &test_err));
        CHECK((um_block_is_committed(&block, 6 * page, page) != 0) == kept);
        CHECK_PAGES(block.base, kept ? "10000def00--" : "10000d-f00--");
        CHECK_EQ(block.committed_nbytes, kept ? 10 * page : 9 * page);
        if (!kept) {
            overlay(&block, 6, fd, 4, 1);
        }
    }
}

/* The contents of each page; GAP: it is not committed. */
enum { GAP = -1 };

static void check_model(const um_block *block, const int *pages) {
    size_t n_committed = 0;
    bool right = true;
    for (size_t i = 0; i < RESERVED; i++) {
        n_committed += pages[i] != GAP;
        right = right && (um_block_is_committed(block, i * page, page) != 0) == (pages[i] != GAP);
        right =
            right && (pages[i] == GAP || is_filled(at(block, i), page, (unsigned char)pages[i]));
    }
    CHECK(right);
    CHECK_EQ(block->committed_nbytes, n_committed * page);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, n_committed * page);
}

static void apply(um_block *block, int *pages, int fd, uint64_t r) {
    size_t first = (size_t)(r % RESERVED), n = (size_t)(r >> 8) % (RESERVED - first) + 1;
    size_t from = (size_t)(r >> 16) % FILE_PAGES, n_there = 0;
    for (size_t i = first; i < first + n; i++) {
        n_there += pages[i] != GAP;
    }
    unsigned choice = r >> 24 & 3;
    bool fits = from + n <= FILE_PAGES;
    um_status expected = UM_OK;
    switch (choice) {
    case 0:
        expected = n_there == 0 && fits ? UM_OK : UM_E_INVALID;
        CHECK_STATUS(expected,
                     um_block_overlay(block, first * page, fd, from * page, n * page, &test_err));
        break;
    case 1:
        CHECK_OK(um_block_release(block, first * page, n * page, NULL, &test_err));
        break;
    case 2:
        CHECK_OK(um_block_commit(block, first * page, n * page, &test_err));
        break;
    default:
        expected = n_there == n ? UM_OK : UM_E_INVALID;
        CHECK_STATUS(expected, um_block_discard(block, first * page, n * page, NULL, &test_err));
    }
    for (size_t i = first; expected == UM_OK && i < first + n; i++) {
        const int after[] = {(int)(from + i - first) + 'a', GAP, pages[i] == GAP ? 0 : pages[i], 0};
        pages[i] = after[choice];
    }
    if ((r >> 26 & 1) != 0 && pages[first] != GAP) {
        pages[first] = (int)(r >> 27 & 63);
        memset(at(block, first), pages[first], page);
    }
}

TEST(any_order) {
    AUTO_FD fd = make_file();
    for (uint64_t seed = 1; seed <= 4; seed++) {
        AUTO_BLOCK block = make_reserved();
        int pages[RESERVED] = {0};
        for (size_t i = 1; i < RESERVED; i++) {
            pages[i] = GAP;
        }
        uint64_t random = seed;
        for (int round = 0; round < 400; round++) {
            apply(&block, pages, fd, test_random(&random));
            check_model(&block, pages);
        }
    }
    CHECK(file_is_as_it_was(fd));
}

typedef struct laying {
    um_block block;
    int fd;
} laying;

static um_status run_overlay(void *context, um_error *err) {
    laying *l = context;
    um_status status = um_block_overlay(&l->block, 2 * page, l->fd, page, 3 * page, err);
    CHECK((um_block_is_committed(&l->block, 2 * page, 3 * page) != 0) == (status == UM_OK));
    CHECK(is_filled(at(&l->block, 0), page, 1));
    return status;
}

static void undo_overlay(void *context) {
    laying *l = context;
    CHECK(um_block_release(&l->block, 2 * page, 3 * page, NULL, NULL) == UM_OK);
}

TEST(faults) {
    laying l = {.block = make_reserved(), .fd = make_file()};
    memset(at(&l.block, 0), 1, page);
    um_block copy = l.block;
    os_state_begin();
    for (unsigned nth = 1; nth <= 2; nth++) { /* the bitmaps of files and of gaps */
        fault_os_fail_nth_alloc(nth);
        CHECK_STATUS(UM_E_NOMEM, um_block_overlay(&l.block, 2 * page, l.fd, 0, page, &test_err));
        CHECK_OS_ERR(ENOMEM, "calloc");
    }
    fault_os_fail_nth_alloc(0);
    CHECK(memcmp(&l.block, &copy, sizeof copy) == 0);
    CHECK(os_state_unchanged());
    /* The range of a failed mmap is unmapped: it is reserved again. */
    fault_os_fail_nth(3, ENOMEM);
    CHECK_STATUS(UM_E_NOMEM, um_block_overlay(&l.block, 2 * page, l.fd, 0, page, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_reserve_at"), 1);
    /* The first run leaves a bitmap, which the next ones use. */
    CHECK(run_overlay(&l, NULL) == UM_OK);
    undo_overlay(&l);
    CHECK_EACH_FAULT(run_overlay, undo_overlay, &l, l, NULL);
    unmap_block(&l.block);
    close(l.fd);
}
