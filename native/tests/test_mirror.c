/* Mirrored memory: two images of each piece, in the figures of the kernel and in ours. */
#include "mirrors.h"

TEST(images) {
    enum { N_PIECES = 5 };
    size_t m = 3 * page;
    fault_os_fail_nth(0, 0);
    um_block block = make_mirror(N_PIECES, m, UM_PAGES_AUTO);
    CHECK_EQ(fault_os_calls_of("um__os_map_file_at"), 2 * N_PIECES);
    um_block want =
        BLOCK(.nbytes = 2 * N_PIECES * m, .requested_nbytes = N_PIECES * m,
              .reserved_nbytes = 2 * N_PIECES * m, .step_nbytes = page, .mirror_nbytes = m,
              .category = UM_CAT_HISTORY, .sharing = UM_SHARING_MEMFD, .access = UM_ACCESS_SHARED);
    check_block(&block, want);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, N_PIECES * m);
    CHECK(is_filled(block.base, block.nbytes, 0));
    fill_images(&block);
    for (size_t i = 0; i < N_PIECES; i++) {
        CHECK(is_filled(image(&block, 2 * i), 2 * m, (unsigned char)(2 * i + 1)));
        CHECK(has_vm_flag(image(&block, 2 * i), "dc"));
        CHECK(has_vm_flag(image(&block, 2 * i + 1), "dc"));
        /* Each image is an entry of smaps, joined with no neighbour. */
        CHECK_EQ(smaps_bytes(image(&block, 2 * i), "Size"), m);
        CHECK_EQ(smaps_bytes(image(&block, 2 * i + 1), "Size"), m);
    }
    image(&block, 3)[m - 1] = 77;
    CHECK(image(&block, 2)[m - 1] == 77);
    memset(image(&block, 4) + m - 5, 88, 10); /* past the end, to the beginning */
    CHECK(is_filled(image(&block, 4), 5, 88));
    CHECK(is_filled(image(&block, 5) + m - 5, 5, 88));
    CHECK(image(&block, 4)[5] == 5);
    CHECK_EQ(file_bytes(&block), N_PIECES * m);
    unmap_block(&block);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 0);
}

/* Runs of pieces of two sizes, as a ring has them whose K and V differ. */
TEST(two_sizes) {
    enum { RUN = 3, N_PIECES = 4 * RUN };
    size_t sizes[] = {5 * page, 4 * page}, starts[N_PIECES], at = 0, total = RUN * 18 * page;
    um_block_options options = mirror_of(sizes[0], UM_PAGES_4K);
    options.mirror_other_nbytes = sizes[1];
    options.mirror_run = RUN;
    AUTO_BLOCK block = make_block(total, &options);
    CHECK_EQ(block.nbytes, 2 * total);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, total);
    unsigned char *base = block.base;
    for (size_t i = 0; i < N_PIECES; i++) {
        size_t m = sizes[i / RUN % 2];
        starts[i] = at;
        memset(base + at, (int)(i + 1), m);
        base[at + m - 1] = 99; /* past its end the piece goes on at its beginning */
        CHECK_EQ(base[at + m], i + 1);
        CHECK_EQ(base[at + 2 * m - 1], 99);
        CHECK_EQ(smaps_bytes(base + at, "Size"), m);
        at += 2 * m;
    }
    CHECK_EQ(at, block.nbytes);
    for (size_t i = 0; i < N_PIECES; i++) { /* none is part of another */
        size_t m = sizes[i / RUN % 2];
        CHECK(is_filled(base + starts[i], m - 1, (unsigned char)(i + 1)));
        CHECK(is_filled(base + starts[i] + m, m - 1, (unsigned char)(i + 1)));
    }
    check_placed(&block, UM_PAGES_4K, page, total, 0, 0);
    /* Through any image, and across pieces. */
    size_t out;
    for (size_t i = 0; i < N_PIECES; i++) {
        size_t m = sizes[i / RUN % 2];
        CHECK_OK(um_block_discard(&block, starts[i] + m, page, &out, &test_err));
        CHECK_EQ(out, page);
        CHECK_EQ(file_bytes(&block), total - (i + 1) * page);
    }
    CHECK_OK(um_block_discard(&block, starts[2] + page, starts[4] - starts[2], &out, &test_err));
    CHECK_EQ(out, 10 * page);
    CHECK(is_filled(base + starts[2], 10 * page, 0));
    CHECK(base[starts[5]] == 0);
    CHECK(base[starts[6] + page] == 7);
    struct {
        size_t nbytes, first, other, run;
    } bad[] = {{total, sizes[0], sizes[1] + 1, RUN},
               {total, sizes[0], sizes[1], 0},
               {total + page, sizes[0], sizes[1], RUN},
               {total, sizes[0], sizes[1], SIZE_MAX / page}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        um_block refused;
        SPOIL(refused);
        options.mirror_nbytes = bad[i].first;
        options.mirror_other_nbytes = bad[i].other;
        options.mirror_run = bad[i].run;
        CHECK_INVALID(um_block_map(&refused, bad[i].nbytes, &options, &test_err));
        CHECK_SPOILT(refused);
    }
}

TEST(refused) {
    AUTO_BLOCK block;
    SPOIL(block);
    struct {
        size_t nbytes, mirror_nbytes, reserve_nbytes;
        um_pages pages;
        um_sharing sharing;
    } bad[] = {{4 * page, 2 * page, 0, UM_PAGES_AUTO, UM_SHARING_NONE},
               {4 * page, 2 * page, 0, UM_PAGES_AUTO, UM_SHARING_FD},
               {4 * page, 2 * page + 1, 0, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {4 * page, 3 * page, 0, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {2 * page, 4 * page, 0, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {0, page, 0, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {4 * page + 1, 2 * page, 0, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {4 * page, 2 * page, 6 * page, UM_PAGES_AUTO, UM_SHARING_MEMFD},
               {4 * page, 2 * page, 0, UM_PAGES_2M, UM_SHARING_MEMFD},
               {SIZE_MAX / 2 + 1, page, 0, UM_PAGES_4K, UM_SHARING_MEMFD}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        um_block_options options = *OPTIONS(.pages = bad[i].pages, .sharing = bad[i].sharing,
                                            .reserve_nbytes = bad[i].reserve_nbytes,
                                            .mirror_nbytes = bad[i].mirror_nbytes);
        CHECK_INVALID(um_block_map(&block, bad[i].nbytes, &options, &test_err));
        CHECK_SPOILT(block);
    }
    block = make_mirror(2, 2 * page, UM_PAGES_AUTO);
    um_block copy = block;
    CHECK_INVALID(um_block_commit(&block, 0, page, &test_err));
    CHECK_INVALID(um_block_release(&block, 0, page, NULL, &test_err));
    CHECK_INVALID(um_block_overlay(&block, 0, block.fd, 0, page, &test_err));
    CHECK(memcmp(&block, &copy, sizeof block) == 0);
}

static um_status run_map(void *context, um_error *err) {
    um_block_options options = mirror_of(2 * page, UM_PAGES_4K);
    return um_block_map(context, 6 * page, &options, err);
}

static void undo_map(void *context) {
    unmap_block(context);
}

TEST(failures_of_map) {
    static um_block block;
    CHECK_EACH_FAULT(run_map, undo_map, &block, block, HARMLESS_HUGE_PAGE);
}

TEST(warm) {
    enum { N_PIECES = 4 };
    size_t m = 8 * page;
    AUTO_BLOCK block = make_mirror(N_PIECES, m, UM_PAGES_4K);
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 2, NULL, &test_err));
    CHECK_EQ(faults_of_reading(&block), 0);
    fill_images(&block); /* writing takes no faults either */
    CHECK_EQ(faults_of_reading(&block), 0);
    for (size_t i = 0; i < 2 * N_PIECES; i++) {
        CHECK_EQ(smaps_bytes(image(&block, i), "Rss"), m);
        CHECK_EQ(smaps_bytes(image(&block, i), "Pss"), m / 2);
    }
    check_placed(&block, UM_PAGES_4K, page, N_PIECES * m, 0, 0);
    uint64_t resident;
    /* EFAULT does not mean a truncated file: the memfd is sealed. */
    fault_os_fail_nth(1, EFAULT);
    CHECK_STATUS(UM_E_NOMEM, um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
    CHECK_OK(um_block_resident(&block, m, 3 * m, &resident, &test_err));
    CHECK_EQ(resident, 3 * m); /* counted in address space */
}

TEST(touched_in_part) {
    size_t m = 8 * page;
    AUTO_BLOCK block = make_mirror(3, m, UM_PAGES_4K), other;
    image(&block, 0)[0] = 1; /* through the first image, the mirror, both */
    image(&block, 1)[2 * page] = 1;
    image(&block, 2)[0] = 1;
    image(&block, 3)[0] = 1;
    image(&block, 5)[0] = 1;
    CHECK_EQ(placement_of(&block).resident_bytes, 4 * page);
    CHECK_EQ(placement_of(&block).pss_bytes, 4 * page);
    /* Another mapping shares the pages, and its figures do not include ours. */
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_SHARED, UM_CAT_HISTORY, &test_err));
    CHECK_EQ(other.nbytes, 3 * m);
    CHECK(other.mirror_nbytes == 0);
    CHECK_EQ(placement_of(&other).resident_bytes, 0);
    memset(other.base, 2, other.nbytes);
    CHECK(is_filled(block.base, 4 * m, 2));
    CHECK(is_filled(image(&block, 5), m, 2));
    CHECK_EQ(placement_of(&block).resident_bytes, 3 * m);
}

TEST(lock) {
    size_t m = 8 * page;
    AUTO_BLOCK block = make_mirror(3, m, UM_PAGES_4K);
    if (um_block_lock(&block, UM_LOCK_NOW, NULL) != UM_OK) {
        test_skip("this process may not lock memory");
    } else {
        CHECK_EQ(placement_of(&block).locked_bytes, 3 * m);
        CHECK_EQ(placement_of(&block).resident_bytes, 3 * m);
        CHECK_EQ(faults_of_reading(&block), 0);
        CHECK_INVALID(um_block_discard(&block, 0, m, NULL, &test_err));
        CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
        CHECK_OK(um_block_discard(&block, 0, block.nbytes, NULL, &test_err));
        CHECK_OK(um_block_lock(&block, UM_LOCK_ONFAULT, &test_err));
        image(&block, 0)[0] = 1;
        image(&block, 3)[page] = 1; /* through the mirror */
        image(&block, 4)[page] = 1;
        CHECK_EQ(placement_of(&block).locked_bytes, 3 * page);
        CHECK_EQ(placement_of(&block).resident_bytes, 3 * page);
        CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
        CHECK_EQ(placement_of(&block).locked_bytes, 0);
    }
}

TEST(policy) {
    SKIP_UNLESS(may_bind(), "this process may not set policies");
    um_block_options options = mirror_of(4 * page, UM_PAGES_4K);
    options.numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {1}};
    AUTO_BLOCK block = make_block(8 * page, &options);
    for (size_t i = 0; i < 4; i++) {
        CHECK_STR(policy_at(image(&block, i)), "bind:0");
    }
    fill_images(&block);
    CHECK_EQ(placement_of(&block).node_bytes[0], 8 * page);
    CHECK_OK(um_block_repair(&block, NULL, &test_err));
}

TEST(other_calls) {
    size_t m = 2 * page;
    AUTO_BLOCK block = make_mirror(3, m, UM_PAGES_AUTO);
    um_block copy, other;
    fill_images(&block);
    for (int advice = UM_ADVICE_WILLNEED; advice <= UM_ADVICE_NOHUGEPAGE; advice++) {
        if (advice == UM_ADVICE_DONTNEED) {
            CHECK_INVALID(um_block_advise(&block, (um_advice)advice, &test_err));
        } else if (huge_page != 0) {
            CHECK_OK(um_block_advise(&block, (um_advice)advice, &test_err));
        }
    }
    /* In the file the last piece comes first. */
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_OTHER, &test_err));
    CHECK_EQ(other.nbytes, 3 * m);
    for (size_t i = 0; i < 3; i++) {
        CHECK(is_filled(bytes_of(&other, i * m), m, (unsigned char)(5 - 2 * i)));
    }
    unmap_block(&other);
    um_block_options options = {.category = UM_CAT_OTHER};
    CHECK_OK(um_block_copy_sealed(&copy, &block, &options, &test_err));
    CHECK(copy.mirror_nbytes == 0);
    CHECK(memcmp(copy.base, block.base, block.nbytes) == 0);
    unmap_block(&copy);
    options.mirror_nbytes = m;
    CHECK_INVALID(um_block_copy_sealed(&copy, &block, &options, &test_err));
    CHECK(ftruncate(block.fd, (off_t)(4 * m)) != 0); /* sealed */
    CHECK(ftruncate(block.fd, (off_t)m) != 0);
}

static bool child_forgets(void *arg) {
    um_block *block = arg;
    bool left_out = strcmp(os_state_permissions(image(block, 0)), "") == 0 &&
                    strcmp(os_state_permissions(image(block, 3)), "") == 0;
    um_block_forget(block);
    return left_out && block->base == NULL && ledger_row(UM_CAT_HISTORY).mapped_bytes == 0;
}

TEST(fork) {
    AUTO_BLOCK block = make_mirror(2, 2 * page, UM_PAGES_AUTO);
    CHECK(in_child(child_forgets, &block));
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 4 * page);
}

enum { PIECES = 4, PIECE_PAGES = 5 };

/* The contents of the pages of each piece. */
typedef struct contents {
    unsigned char pages[PIECES][PIECE_PAGES];
} contents;

static bool images_hold(const um_block *block, const contents *c) {
    bool right = true;
    for (size_t i = 0; i < 2 * PIECES; i++) {
        for (size_t p = 0; p < PIECE_PAGES; p++) {
            right = right && is_filled(image(block, i) + p * page, page, c->pages[i / 2][p]);
        }
    }
    return right;
}

static void refill(const um_block *block, contents *c, uint64_t *random) {
    for (size_t i = 0; i < PIECES; i++) {
        for (size_t p = 0; p < PIECE_PAGES; p++) {
            c->pages[i][p] = (unsigned char)(test_random(random) % 255 + 1);
            memset(image(block, 2 * i + (*random & 1)) + p * page, c->pages[i][p], page);
        }
    }
}

/* Forgets steps of the address space; returns how many pages of memory those are. */
static size_t forget(contents *c, size_t first, size_t end) {
    bool seen[PIECES][PIECE_PAGES] = {{false}};
    size_t n = 0;
    for (size_t at = first; at < end; at++) {
        size_t piece = at / PIECE_PAGES / 2, p = at % PIECE_PAGES;
        n += !seen[piece][p];
        seen[piece][p] = true;
        c->pages[piece][p] = 0;
    }
    return n;
}

TEST(discard) {
    AUTO_BLOCK block = make_mirror(PIECES, PIECE_PAGES * page, UM_PAGES_4K);
    uint64_t random = 1;
    size_t n_steps = block.nbytes / page;
    for (size_t first = 0; first <= n_steps; first++) {
        for (size_t end = first; end <= n_steps; end++) {
            contents m;
            refill(&block, &m, &random);
            size_t n = forget(&m, first, end), out = 12345;
            fault_os_fail_nth(0, 0);
            CHECK_OK(um_block_discard(&block, first * page, (end - first) * page, &out, &test_err));
            /* The pieces in the middle are one hole; at each end there is one more, or one that
             * wraps. */
            CHECK(fault_os_calls() <= 4);
            CHECK(fault_os_calls_of("um__os_punch_hole") == fault_os_calls());
            CHECK((fault_os_calls() == 0) == (n == 0));
            CHECK(n % PIECE_PAGES != 0 || fault_os_calls() <= 3);
            CHECK_EQ(out, n * page);
            CHECK_EQ(file_bytes(&block), (PIECES * PIECE_PAGES - n) * page);
            CHECK(images_hold(&block, &m));
        }
    }
    CHECK_OK(um_block_discard(&block, 0, block.nbytes, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_discard(&block, 0, block.nbytes, NULL, &test_err));
    CHECK_EQ(fault_os_calls(), 1);                                /* the whole file is one hole */
    CHECK_OK(um_block_discard(&block, 1, page, NULL, &test_err)); /* no whole step */
    CHECK_EQ(fault_os_calls(), 1);
}

typedef struct discarding {
    um_block block;
    size_t out_nbytes;
} discarding;

static um_status run_discard(void *context, um_error *err) {
    discarding *d = context;
    return um_block_discard(&d->block, 3 * page, 24 * page, &d->out_nbytes, err);
}

static void undo_discard(void *context) {
    ((discarding *)context)->out_nbytes = 12345;
}

TEST(failures_of_discard) {
    discarding d = {.block = make_mirror(PIECES, PIECE_PAGES * page, UM_PAGES_4K),
                    .out_nbytes = 12345};
    CHECK_EACH_FAULT(run_discard, undo_discard, &d, d, NULL);
    unmap_block(&d.block);
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(4);
    uint64_t available = huge_pages_available();
    um_block block = make_mirror(2, HUGE_BYTES, UM_PAGES_2M), untouched = block;
    CHECK_EQ(huge_pages_available(), available - 2); /* each page once */
    CHECK_EQ(block.step_nbytes, HUGE_BYTES);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 2, NULL, &test_err));
    CHECK_EQ(faults_of_reading(&block), 0);
    fill_images(&block);
    CHECK(is_filled(image(&block, 1), HUGE_BYTES, 1));
    CHECK(is_filled(image(&block, 3), HUGE_BYTES, 3));
    check_placed(&block, UM_PAGES_2M, HUGE_BYTES, 2 * HUGE_BYTES, 2 * HUGE_BYTES, 2 * HUGE_BYTES);
    CHECK_INVALID(um_block_discard(&block, 0, HUGE_BYTES, NULL, &test_err));
    unmap_block(&block);
    CHECK_EQ(huge_pages_available(), available);
    um_block_options options = mirror_of(HUGE_BYTES / 2, UM_PAGES_2M);
    CHECK_INVALID(um_block_map(&block, HUGE_BYTES, &options, &test_err));
    options = mirror_of(HUGE_BYTES, UM_PAGES_2M);
    block = untouched;
    CHECK_STATUS(UM_E_NOMEM, um_block_map(&block, 1000 * (size_t)HUGE_BYTES, &options, &test_err));
    CHECK(memcmp(&block, &untouched, sizeof block) == 0);
    CHECK_EQ(huge_pages_available(), available);
}

enum { N_PLAYED = PIECES * PIECE_PAGES };

static struct {
    const um_block *block;
    int node[N_PLAYED]; /* of each page of the file; -1: never touched */
    size_t n_moved;
    char numa_maps[4096];
} kernel;

static size_t file_page_of(const void *address) {
    size_t offset = (size_t)((const unsigned char *)address - image(kernel.block, 0));
    size_t piece = offset / page / PIECE_PAGES / 2;
    REQUIRE(offset / page / PIECE_PAGES % 2 == 0); /* only first images */
    return (PIECES - 1 - piece) * PIECE_PAGES + offset / page % PIECE_PAGES;
}

/* As in Linux, a page that is mapped twice is not moved. */
static int play_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status) {
    for (size_t i = 0; i < n; i++) {
        size_t at = file_page_of(pages[i]);
        unsigned char *mirror = (unsigned char *)pages[i] + kernel.block->mirror_nbytes;
        out_status[i] = kernel.node[at] < 0 ? -ENOENT : kernel.node[at];
        if (nodes != NULL && out_status[i] >= 0) {
            bool twice = smaps_bytes(mirror, "Rss") != 0;
            out_status[i] = twice ? -EACCES : nodes[i];
            kernel.node[at] = twice ? kernel.node[at] : nodes[i];
            kernel.n_moved += !twice;
        }
    }
    return 0;
}

static void play(um_block *block, um_numa_mode mode, uint64_t nodes) {
    block->numa = (um_numa){.mode = mode, .nodes = {nodes}};
    kernel.block = block;
    kernel.n_moved = 0;
    size_t length = 0;
    for (size_t i = 0; i < 2 * PIECES; i++) {
        size_t counts[2] = {0};
        for (size_t p = 0; p < PIECE_PAGES; p++) {
            int node = kernel.node[file_page_of(image(block, i / 2 * 2) + p * page)];
            counts[node == 1] += node >= 0;
        }
        length += (size_t)snprintf(kernel.numa_maps + length, sizeof kernel.numa_maps - length,
                                   "%zx default N0=%zu N1=%zu kernelpagesize_kB=%zu\n",
                                   (size_t)image(block, i), counts[0], counts[1], page / 1024);
    }
    fault_os_file("/proc/self/numa_maps", kernel.numa_maps);
    fault_os_file("/sys/devices/system/node/has_memory", "0-1\n");
    fault_os_move_pages(play_move_pages);
}

TEST(repair) {
    AUTO_BLOCK block = make_mirror(PIECES, PIECE_PAGES * page, UM_PAGES_4K);
    uint64_t random = 3, elsewhere = 12345;
    contents m;
    refill(&block, &m, &random); /* through either image */
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
    for (size_t i = 0; i < N_PLAYED; i++) {
        kernel.node[i] = i % 3 == 0;
    }
    play(&block, UM_NUMA_BIND, 1);
    um_placement placement = placement_of(&block);
    CHECK_EQ(placement.node_bytes[1], 7 * page); /* each page once */
    CHECK_EQ(placement.node_bytes[0], (N_PLAYED - 7) * page);
    CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
    CHECK_EQ(elsewhere, 0);
    CHECK_EQ(kernel.n_moved, 7);
    CHECK(images_hold(&block, &m));
    /* Interleaving follows the place in the file. */
    for (size_t i = 0; i < N_PLAYED; i++) {
        kernel.node[i] = i % 2 == 0;
    }
    play(&block, UM_NUMA_INTERLEAVE, 3);
    CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
    CHECK_EQ(elsewhere, 0);
    CHECK_EQ(kernel.n_moved, 0);
    kernel.node[4] = kernel.node[17] = 0;
    CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
    CHECK_EQ(kernel.n_moved, 2 - (4 % 2 != 0) - (17 % 2 != 0));
    CHECK_EQ(faults_of_reading(&block), 0); /* mapped through both images again */
}

/* Untouched pages stay untouched, and pages touched only through the mirror are moved. */
TEST(repair_in_part) {
    AUTO_BLOCK block = make_mirror(PIECES, PIECE_PAGES * page, UM_PAGES_4K);
    uint64_t elsewhere = 12345;
    memset(kernel.node, 0xFF, sizeof kernel.node); /* -1 */
    kernel.block = &block;
    image(&block, 1)[3 * page] = 77;
    image(&block, 4)[0] = 88;
    kernel.node[file_page_of(image(&block, 0) + 3 * page)] = 1;
    kernel.node[file_page_of(image(&block, 4))] = 1;
    play(&block, UM_NUMA_PREFERRED, 1);
    CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
    CHECK_EQ(elsewhere, 0);
    CHECK_EQ(kernel.n_moved, 2);
    CHECK_EQ(file_bytes(&block), 2 * page);
    CHECK(image(&block, 0)[3 * page] == 77);
    CHECK(image(&block, 5)[0] == 88);
    /* Locked pages stay mapped twice, so they are not moved. */
    kernel.node[file_page_of(image(&block, 4))] = 1;
    play(&block, UM_NUMA_PREFERRED, 1);
    if (um_block_lock(&block, UM_LOCK_ONFAULT, NULL) == UM_OK) {
        CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
        CHECK_EQ(elsewhere, page);
        CHECK_EQ(kernel.n_moved, 0);
    }
}

/* Failures of the calls for mirrored memory; test_numa.c has the others. */
TEST(failures_of_repair) {
    AUTO_BLOCK block = make_mirror(PIECES, PIECE_PAGES * page, UM_PAGES_4K);
    uint64_t elsewhere = 12345;
    unsigned n_failed = 0;
    fill_images(&block);
    memset(kernel.node, 0, sizeof kernel.node);
    kernel.block = &block;
    for (unsigned nth = 1;; nth++) {
        kernel.node[0] = kernel.node[7] = 1;
        play(&block, UM_NUMA_BIND, 1);
        fault_os_fail_nth(nth, EPERM);
        um_status status = um_block_repair(&block, &elsewhere, NULL);
        const char *failed = fault_os_failed();
        fault_os_fail_nth(0, 0);
        if (failed == NULL) {
            CHECK(status == UM_OK);
            CHECK(elsewhere == 0);
            break;
        }
        if (strcmp(failed, "um__os_residency") == 0 || strcmp(failed, "um__os_advise") == 0) {
            n_failed++;
            fault_os_fail_nth(nth, EPERM);
            kernel.node[0] = 1;
            play(&block, UM_NUMA_BIND, 1);
            CHECK_STATUS(UM_E_OS, um_block_repair(&block, &elsewhere, &test_err));
            fault_os_fail_nth(0, 0);
            CHECK(test_err.os_errno == EPERM);
            CHECK_STR(test_err.what, strcmp(failed, "um__os_advise") == 0 ? "madvise" : "mincore");
        }
        for (size_t i = 0; i < 2 * PIECES; i++) {
            CHECK(is_filled(image(&block, i), block.mirror_nbytes, (unsigned char)(i / 2 * 2 + 1)));
        }
    }
    CHECK(n_failed >= 4 * PIECES);
}
