/* Repairing: which pages are moved, where to, and what is left when they cannot be moved.
 *
 * The machine that runs the tests may have one node, so the kernel is simulated: its reports are
 * invented files, and move_pages is a function that does what Linux does, even where Linux gives
 * up. */
#include "block/numa.h"
#include "fault_os.h"
#include "os/os.h"

enum { MAX_PAGES = 1 << 15, N_NODES = 4, NOWHERE = -1 };

static unsigned char *const base = (unsigned char *)(uintptr_t)0x100000000000;

static struct {
    size_t page_bytes, n_pages;
    int node[MAX_PAGES];       /* NOWHERE: never touched */
    size_t first[MAX_PAGES];   /* the first page of its huge page; its own number: a small page */
    size_t n_of_page;          /* pages in a huge page */
    bool pinned[MAX_PAGES];    /* cannot be migrated, and ends the call */
    bool elsewhere[MAX_PAGES]; /* mapped by another process too */
    unsigned busy[MAX_PAGES];  /* how often it will still be busy */
    bool gap[MAX_PAGES];       /* must not be asked about */
    size_t room[N_NODES];      /* pages that a node can still take */
    size_t n_moved, n_calls, n_asked_to_move;
} kernel;

static char smaps[512], numa_maps[512];

/* Pages that are all on one node. */
static void play(size_t n_pages, size_t page_bytes, int node) {
    memset(&kernel, 0, sizeof kernel);
    kernel.page_bytes = page_bytes;
    kernel.n_pages = n_pages;
    kernel.n_of_page = 1;
    for (size_t i = 0; i < MAX_PAGES; i++) {
        kernel.node[i] = i < n_pages ? node : NOWHERE;
        kernel.first[i] = i;
    }
    for (size_t i = 0; i < N_NODES; i++) {
        kernel.room[i] = MAX_PAGES;
    }
}

/* Makes n pages from `first` on a huge page. */
static void play_huge(size_t first, size_t n) {
    kernel.n_of_page = n;
    for (size_t i = first; i < first + n; i++) {
        kernel.first[i] = first;
    }
}

static size_t n_on(int node) {
    size_t n = 0;
    for (size_t i = 0; i < kernel.n_pages; i++) {
        n += kernel.node[i] == node;
    }
    return n;
}

static size_t n_huge(void) {
    size_t n = 0;
    for (size_t i = 0; i < kernel.n_pages; i++) {
        n += kernel.node[i] != NOWHERE &&
             (kernel.first[i] != i || (i + 1 < MAX_PAGES && kernel.first[i + 1] == i));
    }
    return n;
}

static size_t page_of(const void *address) {
    size_t offset = (size_t)((const unsigned char *)address - base);
    size_t page = offset / kernel.page_bytes;
    if (offset % kernel.page_bytes != 0 || page >= kernel.n_pages || kernel.gap[page]) {
        REQUIRE(!"an address that must not be asked about");
    }
    return page;
}

/* Moves the pages that were set aside for a node. Returns an errno, or -1 when a page could not be
 * moved. */
static int migrate(const size_t *aside, size_t n, int node) {
    int result = 0;
    for (size_t i = 0; i < n; i++) {
        size_t first = kernel.first[aside[i]], n_pages = 1;
        while (first + n_pages < kernel.n_pages && kernel.first[first + n_pages] == first) {
            n_pages++;
        }
        if (kernel.room[node] < n_pages) {
            return ENOMEM;
        }
        if (kernel.pinned[first]) {
            result = -1;
            continue;
        }
        for (size_t page = first; page < first + n_pages; page++) {
            kernel.room[kernel.node[page]]++;
            kernel.room[node]--;
            kernel.node[page] = node;
            kernel.n_moved++;
        }
    }
    return result;
}

/* Returns false if the page is to be set aside, or true if it has a status already. */
static bool has_status(size_t page, int node, const size_t *aside, size_t n, int *out_status) {
    size_t first = kernel.first[page];
    bool is_aside = false;
    for (size_t i = 0; i < n; i++) {
        is_aside = is_aside || kernel.first[aside[i]] == first;
    }
    if (kernel.node[page] == NOWHERE) {
        *out_status = -ENOENT;
    } else if (kernel.node[page] == node) {
        *out_status = node;
    } else if (kernel.elsewhere[first]) {
        *out_status = -EACCES;
    } else if (is_aside || kernel.busy[first] > 0) {
        kernel.busy[first] -= kernel.busy[first] > 0;
        *out_status = -EBUSY;
    } else {
        return false;
    }
    return true;
}

/* As in Linux, pages for the same node are set aside and migrated together. When one of them fails,
 * the call ends, and no status is written for these and all later pages. */
static int play_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status) {
    static size_t aside[MAX_PAGES];
    size_t n_aside = 0, begin = 0;
    kernel.n_calls++;
    kernel.n_asked_to_move += nodes != NULL ? n : 0;
    for (size_t i = 0; i < n && nodes == NULL; i++) {
        int node = kernel.node[page_of(pages[i])];
        out_status[i] = node == NOWHERE ? -ENOENT : node;
    }
    for (size_t i = 0; nodes != NULL && i <= n; i++) {
        int status = 0;
        bool ends = i == n || (i > begin && nodes[i] != nodes[begin]);
        bool own = !ends && has_status(page_of(pages[i]), nodes[i], aside, n_aside, &status);
        if (ends || own) {
            int result = migrate(aside, n_aside, nodes[begin < n ? begin : n - 1]);
            if (result != 0) {
                return result < 0 ? 0 : result;
            }
            for (; begin < i; begin++) {
                out_status[begin] = nodes[begin];
            }
            n_aside = 0;
        }
        if (own) {
            out_status[i] = status;
            begin = i + 1;
        } else if (i < n) {
            begin = ends ? i : begin;
            own = ends && has_status(page_of(pages[i]), nodes[i], aside, 0, &status);
            if (own) {
                out_status[i] = status;
                begin = i + 1;
            } else {
                aside[n_aside++] = page_of(pages[i]);
            }
        }
    }
    return 0;
}

/* Writes the reports of the kernel. */
static void play_books(void) {
    size_t kb = kernel.page_bytes / 1024, resident = kernel.n_pages - n_on(NOWHERE);
    bool hugetlb = kernel.page_bytes > um_page_bytes();
    uintptr_t start = (uintptr_t)base, end = start + kernel.n_pages * kernel.page_bytes;
    snprintf(smaps, sizeof smaps,
             "%zx-%zx rw-p 00000000 00:00 0\nKernelPageSize: %zu kB\nRss: %zu kB\nPss: %zu kB\n"
             "AnonHugePages: %zu kB\nPrivate_Hugetlb: %zu kB\nVmFlags: rd wr\n",
             start, end, kb, hugetlb ? 0 : resident * kb, hugetlb ? 0 : resident * kb,
             hugetlb ? 0 : n_huge() * kb, hugetlb ? resident * kb : 0);
    int n = snprintf(numa_maps, sizeof numa_maps, "%zx default anon=1", start);
    for (int node = 0; node < N_NODES; node++) {
        n += snprintf(numa_maps + n, sizeof numa_maps - (size_t)n, " N%d=%zu", node, n_on(node));
    }
    snprintf(numa_maps + n, sizeof numa_maps - (size_t)n, " kernelpagesize_kB=%zu\n", kb);
    fault_os_file("/proc/self/smaps", smaps);
    fault_os_file("/proc/self/numa_maps", numa_maps);
    fault_os_file("/sys/devices/system/node/has_memory", "0-3\n");
    fault_os_move_pages(play_move_pages);
}

static um_numa policy(um_numa_mode mode, uint64_t nodes) {
    return (um_numa){.mode = mode, .nodes = {nodes}};
}

static um_block make_block(um_numa_mode mode, uint64_t nodes, size_t step_pages) {
    size_t nbytes = kernel.n_pages * kernel.page_bytes;
    return (um_block){.base = base,
                      .nbytes = nbytes,
                      .requested_nbytes = nbytes,
                      .numa = policy(mode, nodes),
                      .step_nbytes = step_pages * kernel.page_bytes,
                      .reserved_nbytes = nbytes,
                      .committed_nbytes = nbytes,
                      .fd = -1};
}

/* Repairs the block, and returns how many pages stay misplaced. */
static size_t repair(um_block *block) {
    uint64_t elsewhere = UINT64_MAX;
    um_block copy = *block;
    play_books();
    kernel.n_moved = kernel.n_calls = kernel.n_asked_to_move = 0;
    CHECK_OK(um_block_repair(block, &elsewhere, &test_err));
    CHECK(memcmp(block, &copy, sizeof copy) == 0);
    CHECK(elsewhere % kernel.page_bytes == 0);
    return (size_t)elsewhere / kernel.page_bytes;
}

/* The pages whose unit is not where the pattern with this phase puts it. */
static size_t n_misplaced(const um__numa_pattern *pattern, size_t unit_pages, uint64_t phase) {
    size_t n = 0;
    for (size_t i = 0; i < kernel.n_pages; i++) {
        unsigned index = um__numa_pattern_index(pattern, i / unit_pages + phase);
        n += kernel.node[i] != NOWHERE && kernel.node[i] != pattern->nodes[index];
    }
    return n;
}

/* The same, with the best phase. */
static size_t n_misplaced_at_best(const um_numa *numa, const uint32_t *weights, size_t unit_pages) {
    um__numa_pattern pattern;
    size_t best = SIZE_MAX;
    um__numa_pattern_make(&pattern, numa, weights);
    for (uint64_t phase = 0; phase < pattern.cycle; phase++) {
        size_t n = n_misplaced(&pattern, unit_pages, phase);
        best = n < best ? n : best;
    }
    return best;
}

TEST(pattern) {
    uint64_t seed = 7;
    for (int round = 0; round < 200; round++) {
        um_numa numa = {.mode = UM_NUMA_WEIGHTED};
        uint32_t weights[UM_MAX_NODES] = {0};
        size_t n_expected = 0, n_nodes = 1 + (size_t)(test_random(&seed) % 20);
        int expected[20 * 255];
        unsigned node = 0;
        bool weighted = round % 3 != 0;
        for (size_t i = 0; i < n_nodes; i++) {
            node += 1 + (unsigned)(test_random(&seed) % 50);
            numa.nodes[node / 64] |= UINT64_C(1) << (node % 64);
            weights[node] = weighted ? 1 + (uint32_t)(test_random(&seed) % 255) : 1;
            for (uint32_t k = 0; k < weights[node]; k++) {
                expected[n_expected++] = (int)node;
            }
        }
        um__numa_pattern pattern;
        um__numa_pattern_make(&pattern, &numa, weighted ? weights : NULL);
        CHECK_EQ(pattern.n_nodes, n_nodes);
        CHECK_EQ(pattern.cycle, n_expected);
        bool same = true;
        for (uint64_t unit = 0; unit < 2 * n_expected + 3; unit++) {
            same = same && pattern.nodes[um__numa_pattern_index(&pattern, unit)] ==
                               expected[unit % n_expected];
        }
        CHECK(same);
    }
    um_numa last = {.mode = UM_NUMA_BIND};
    last.nodes[15] = UINT64_C(1) << 63;
    um__numa_pattern pattern;
    um__numa_pattern_make(&pattern, &last, NULL);
    CHECK(pattern.n_nodes == 1);
    CHECK(pattern.nodes[0] == 1023);
    CHECK(pattern.cycle == 1);
    CHECK_EQ(um__numa_pattern_index(&pattern, UINT64_MAX), 0);
}

TEST(bind) {
    um_numa_mode modes[] = {UM_NUMA_BIND, UM_NUMA_PREFERRED};
    for (int i = 0; i < 2; i++) {
        play(10000, um_page_bytes(), NOWHERE);
        for (size_t page = 0; page < 10000; page++) {
            kernel.node[page] = page % 10 == 9 ? NOWHERE : page % 3 == 0 ? 1 : 0;
        }
        size_t n_stray = n_on(1), n_untouched = n_on(NOWHERE);
        um_block block = make_block(modes[i], 1, 1);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(n_on(1), 0);
        CHECK_EQ(n_on(NOWHERE), n_untouched);
        CHECK_EQ(kernel.n_moved, n_stray);
        /* If there is nothing to do, no page is asked about. */
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(kernel.n_calls, 0);
        CHECK(um_block_repair(&block, NULL, NULL) == UM_OK);
    }
    /* With several nodes, pages that are on one of them stay; the others are spread. */
    play(1000, um_page_bytes(), NOWHERE);
    for (size_t page = 0; page < 1000; page++) {
        kernel.node[page] = page < 500 ? 2 : 1;
    }
    um_block block = make_block(UM_NUMA_BIND, 1 << 0 | 1 << 2, 1);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(n_on(2), 750);
    CHECK_EQ(n_on(0), 250);
    CHECK_EQ(kernel.n_moved, 500);
}

TEST(gaps) {
    play(64 * 20, um_page_bytes(), NOWHERE);
    uint64_t committed[1] = {0};
    um_block block = make_block(UM_NUMA_BIND, 1 << 3, 64);
    for (size_t page = 0; page < kernel.n_pages; page++) {
        bool usable = page / 64 % 3 != 1;
        kernel.gap[page] = !usable;
        kernel.node[page] = usable ? 2 : NOWHERE;
        committed[0] |= (uint64_t)usable << (page / 64);
    }
    block.committed = committed;
    block.nbytes = 64 * kernel.page_bytes;
    block.committed_nbytes = 13 * block.nbytes;
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(n_on(3), 13 * 64);
    CHECK_EQ(n_on(2), 0);
}

TEST(interleave) {
    uint64_t nodes = 1 << 0 | 1 << 1 | 1 << 3, seed = 11;
    int of[] = {0, 1, 3};
    for (size_t phase = 0; phase < 3; phase++) {
        play(5000, um_page_bytes(), NOWHERE);
        for (size_t page = 0; page < 5000; page++) {
            kernel.node[page] = page % 7 == 6 ? NOWHERE : of[(page + phase) % 3];
        }
        um_block block = make_block(UM_NUMA_INTERLEAVE, nodes, 1);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(kernel.n_moved, 0); /* wherever the kernel started */
        CHECK_EQ(kernel.n_calls, 2);

        for (size_t i = 0; i < 700; i++) {
            kernel.node[test_random(&seed) % 5000] = (int)(test_random(&seed) % N_NODES);
        }
        um__numa_pattern pattern;
        um__numa_pattern_make(&pattern, &block.numa, NULL);
        size_t n_wrong = n_misplaced(&pattern, 1, phase);
        CHECK(n_wrong > 100);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(kernel.n_moved, n_wrong);
        CHECK_EQ(n_misplaced(&pattern, 1, phase), 0);
    }
    /* All on one node: each gets its third. */
    play(9000, um_page_bytes(), 0);
    um_block block = make_block(UM_NUMA_INTERLEAVE, nodes, 1);
    CHECK_EQ(repair(&block), 0);
    CHECK(n_on(0) == 3000);
    CHECK(n_on(1) == 3000);
    CHECK(n_on(3) == 3000);
    CHECK_EQ(kernel.n_moved, 6000);
    /* Interleaving over one node is the same as bind. */
    block = make_block(UM_NUMA_INTERLEAVE, 1 << 1, 1);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(n_on(1), 9000);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(kernel.n_calls, 0);
}

#define WEIGHT_OF(node) "/sys/kernel/mm/mempolicy/weighted_interleave/node" #node

TEST(weighted) {
    uint32_t weights[UM_MAX_NODES] = {[0] = 3, [2] = 1};
    fault_os_file(WEIGHT_OF(0), "3\n");
    fault_os_file(WEIGHT_OF(2), "1\n");
    for (size_t phase = 0; phase < 4; phase++) {
        play(4000, um_page_bytes(), NOWHERE);
        um_block block = make_block(UM_NUMA_WEIGHTED, 1 << 0 | 1 << 2, 1);
        um__numa_pattern pattern;
        um__numa_pattern_make(&pattern, &block.numa, weights);
        for (size_t page = 0; page < 4000; page++) {
            kernel.node[page] = pattern.nodes[um__numa_pattern_index(&pattern, page + phase)];
        }
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(kernel.n_moved, 0);
        CHECK_EQ(kernel.n_calls, 1);
        kernel.node[17] = kernel.node[18] = 1;
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(kernel.n_moved, 2);
        CHECK_EQ(n_misplaced(&pattern, 1, phase), 0);
        CHECK_EQ(n_on(0), 3000);
        CHECK_EQ(n_on(2), 1000);
    }
    /* A weight that is missing or invalid is 1. */
    fault_os_file(WEIGHT_OF(2), NULL);
    const char *nothing[] = {"", "0\n", "many\n", "256\n"};
    for (size_t i = 0; i < 4; i++) {
        fault_os_file(WEIGHT_OF(1), nothing[i]);
        play(1000, um_page_bytes(), 0);
        um_block block = make_block(UM_NUMA_WEIGHTED, 1 << 0 | 1 << 1, 1);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(n_on(0), 750);
        CHECK_EQ(n_on(1), 250);
    }
    fault_os_file(WEIGHT_OF(0), NULL);
    fault_os_file(WEIGHT_OF(1), NULL);
    /* So is the weight of a node without a file. */
    if (access(WEIGHT_OF(3), F_OK) != 0) {
        play(100, um_page_bytes(), 0);
        um_block block = make_block(UM_NUMA_WEIGHTED, 1 << 2 | 1 << 3, 1);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(n_on(3), 50);
    } else {
        test_skip("this machine has a node 3");
    }
}

enum { HUGE = 512 };

TEST(huge_pages) {
    um_numa_mode modes[] = {UM_NUMA_BIND, UM_NUMA_INTERLEAVE};
    for (int i = 0; i < 2; i++) {
        play(HUGE * 20, um_page_bytes(), NOWHERE);
        for (size_t page = 0; page < kernel.n_pages; page++) {
            kernel.node[page] = page / HUGE < 10 ? 2 : 1;
        }
        /* Two thirds are huge pages; the rest are small pages, on several nodes. */
        for (size_t unit = 0; unit < 20; unit++) {
            if (unit % 3 < 2) {
                play_huge(unit * HUGE, HUGE);
            } else {
                kernel.node[unit * HUGE + 5] = 0;
                kernel.node[unit * HUGE + 6] = 3;
                kernel.node[unit * HUGE + 7] = NOWHERE;
            }
        }
        um_block block = make_block(modes[i], 1 << 1 | 1 << 3, HUGE);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(n_on(0) + n_on(2), 0);
        CHECK_EQ(n_on(NOWHERE), 6);
        if (modes[i] == UM_NUMA_INTERLEAVE) {
            CHECK_EQ(n_misplaced_at_best(&block.numa, NULL, HUGE), 0);
        }
        CHECK(kernel.n_calls < 40);
    }
    /* One address moves a huge page. A huge page that cannot be moved is tried only once. */
    play(HUGE * 20, um_page_bytes(), 0);
    for (size_t first = 0; first < kernel.n_pages; first += HUGE) {
        play_huge(first, HUGE);
    }
    um_block block = make_block(UM_NUMA_BIND, 1 << 1, HUGE);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(kernel.n_asked_to_move, 20);
    memset(kernel.node, 0, sizeof kernel.node);
    kernel.pinned[3 * HUGE] = true;
    CHECK_EQ(repair(&block), HUGE);
    CHECK(kernel.n_calls < 40);
}

/* If the kernel had no huge pages, it spreads small ones, which stay where they are. */
TEST(small_pages_of_huge_units) {
    play(HUGE * 20, um_page_bytes(), NOWHERE);
    for (size_t page = 0; page < kernel.n_pages; page++) {
        kernel.node[page] = (int)((page + 1) % 2);
    }
    um_block block = make_block(UM_NUMA_INTERLEAVE, 1 << 0 | 1 << 1, HUGE);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(kernel.n_moved, 0);

    kernel.node[77] = 2; /* then the units become whole */
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(n_misplaced_at_best(&block.numa, NULL, HUGE), 0);
}

/* Pieces of the page cache that are as large as huge pages move whole: a block of a file is spread
 * by these, and each is moved once. */
TEST(pieces_of_a_file) {
    size_t n = um_huge_page_bytes() / um_page_bytes();
    SKIP_UNLESS(n > 1, "this kernel has no transparent huge pages");
    play(8 * n + 1, um_page_bytes(), 2);
    for (size_t first = 0; first < 8 * n; first += n) {
        play_huge(first, n);
    }
    um_block block = make_block(UM_NUMA_INTERLEAVE, 1 << 0 | 1 << 1, 1);
    block.is_file = 1;
    block.nbytes -= 100; /* of the last page */
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(kernel.n_moved, 8 * n + 1);
    CHECK_EQ(n_misplaced_at_best(&block.numa, NULL, n), 0);
    block.numa = policy(UM_NUMA_BIND, 1 << 3);
    CHECK_EQ(repair(&block), 0);
    CHECK_EQ(n_on(3), 8 * n + 1);
}

TEST(hugetlb) {
    size_t sizes[] = {(size_t)2 << 20, (size_t)1 << 30};
    for (int i = 0; i < 2; i++) {
        play(100, sizes[i], 0);
        um_block block = make_block(UM_NUMA_INTERLEAVE, 1 << 0 | 1 << 1, 1);
        CHECK_EQ(repair(&block), 0);
        CHECK_EQ(n_on(0), 50);
        CHECK_EQ(n_misplaced_at_best(&block.numa, NULL, 1), 0);
        CHECK(kernel.n_calls < 6);
        kernel.room[3] = 20; /* the pool of this node */
        block = make_block(UM_NUMA_BIND, 1 << 3, 1);
        CHECK_EQ(repair(&block), 80);
        CHECK_EQ(n_on(3), 20);
    }
}

TEST(full_node) {
    play(20000, um_page_bytes(), 2);
    kernel.room[1] = 3000;
    um_block block = make_block(UM_NUMA_INTERLEAVE, 1 << 0 | 1 << 1, 1);
    CHECK_EQ(repair(&block), 7000);
    CHECK_EQ(n_on(0), 10000);
    CHECK_EQ(n_on(1), 3000);
    CHECK_EQ(n_on(2), 7000);

    kernel.room[0] = 0;
    block = make_block(UM_NUMA_BIND, 1 << 0, 1);
    CHECK_EQ(repair(&block), 10000);
    CHECK(kernel.n_calls < 40); /* not one for each page */
}

TEST(immovable_pages) {
    uint64_t seed = 23;
    play(10000, um_page_bytes(), NOWHERE);
    size_t n_pinned = 0, n_shared = 0;
    for (size_t page = 0; page < kernel.n_pages; page++) {
        uint64_t r = test_random(&seed) % 100;
        kernel.node[page] = r < 50 ? 1 : 0;
        kernel.pinned[page] = r < 2;
        kernel.elsewhere[page] = r == 3;
        kernel.busy[page] = r == 5 ? 2 : 0;
        n_pinned += r < 2;
        n_shared += r == 3;
    }
    REQUIRE(n_pinned > 50);
    REQUIRE(n_shared > 50);
    um_block block = make_block(UM_NUMA_BIND, 1, 1);
    CHECK_EQ(repair(&block), n_pinned + n_shared);
    CHECK_EQ(n_on(1), n_pinned + n_shared);
    /* A page that is in use for a moment is tried again; for one that stays in use there is no
     * wait. */
    play(10, um_page_bytes(), 0);
    kernel.busy[3] = 2;
    block = make_block(UM_NUMA_BIND, 1 << 1, 1);
    CHECK_EQ(repair(&block), 0);
    memset(kernel.node, 0, sizeof kernel.node);
    kernel.busy[3] = UINT32_MAX;
    CHECK_EQ(repair(&block), 1);
    CHECK(kernel.n_calls < 20);
    /* All of the memory is pinned by a device: after some pages the rest is not tried. */
    size_t unit_pages[] = {1, HUGE};
    for (int i = 0; i < 2; i++) {
        play(MAX_PAGES, um_page_bytes(), 0);
        memset(kernel.pinned, true, sizeof kernel.pinned);
        for (size_t first = 0; i == 1 && first < MAX_PAGES; first += HUGE) {
            play_huge(first, HUGE);
        }
        block = make_block(UM_NUMA_BIND, 1 << 1, unit_pages[i]);
        CHECK_EQ(repair(&block), MAX_PAGES);
        CHECK(kernel.n_calls < 1000);
    }
}

TEST(refused) {
    play(4, um_page_bytes(), NOWHERE);
    play_books();
    uint64_t elsewhere = 12345;
    um_block block = make_block(UM_NUMA_NONE, 0, 1);
    CHECK_INVALID(um_block_repair(&block, &elsewhere, &test_err));
    CHECK(um_block_repair(&block, NULL, NULL) == UM_E_INVALID);
    CHECK_EQ(elsewhere, 12345);
}

/* Half of the pages on the wrong node. */
static void play_strays(void) {
    play(5000, um_page_bytes(), NOWHERE);
    for (size_t page = 0; page < kernel.n_pages; page++) {
        kernel.node[page] = page % 4 < 2 ? 0 : 2;
    }
    play_books();
}

/* Returns true when there was an Nth call to fail. */
static bool check_fault(um_block *block, unsigned n, int os_errno) {
    uint64_t elsewhere = 12345;
    play_strays();
    os_state_begin();
    fault_os_fail_nth(n, os_errno);
    test_err_pattern(&test_err);
    um_status status = um_block_repair(block, &elsewhere, &test_err);
    const char *failed = fault_os_failed();
    fault_os_fail_nth(0, 0);
    CHECK(os_state_unchanged());
    if (status == UM_OK) {
        /* A fault changes only which reports are read, or in which order. A node that is said to be
         * full is not tried again, and its pages are counted as misplaced. */
        bool full = failed != NULL && strcmp(failed, "um__os_move_pages") == 0;
        CHECK(failed == NULL || full || strcmp(failed, "um__os_open_read") == 0 ||
              strcmp(failed, "um__os_read") == 0 || strcmp(failed, "um__os_close") == 0);
        CHECK(!full || os_errno == ENOMEM);
        size_t n_wrong = n_misplaced_at_best(&block->numa, NULL, 1);
        CHECK_EQ(elsewhere, n_wrong * kernel.page_bytes);
        CHECK((n_wrong == 0) == !full);
    } else {
        CHECK(failed != NULL);
        CHECK(test_err.status == status);
        CHECK(test_err.os_errno == os_errno);
        CHECK(status == (os_errno == ENOMEM ? UM_E_NOMEM : UM_E_OS) || status == UM_E_IO);
        CHECK_EQ(elsewhere, 12345);
        CHECK_EQ(n_on(NOWHERE), 0);
        CHECK_EQ(repair(block), 0);
    }
    return failed != NULL;
}

TEST(faults) {
    fault_os_file(WEIGHT_OF(0), "1\n");
    fault_os_file(WEIGHT_OF(1), "1\n");
    play_strays();
    um_numa_mode modes[] = {UM_NUMA_WEIGHTED, UM_NUMA_INTERLEAVE};
    um_block block = make_block(modes[0], 1 << 0 | 1 << 1, 1);
    for (int i = 0; i < 4; i++) {
        unsigned n = 1;
        block.numa.mode = modes[i % 2];
        while (check_fault(&block, n, i / 2 == 0 ? EPERM : ENOMEM)) {
            n++;
        }
        CHECK(n > 10);
    }
    for (unsigned n = 1; n <= 2; n++) {
        uint64_t elsewhere = 12345;
        play_strays();
        fault_os_fail_nth_alloc(n);
        CHECK_STATUS(UM_E_NOMEM, um_block_repair(&block, &elsewhere, &test_err));
        CHECK(test_err.os_errno == ENOMEM);
        CHECK_EQ(elsewhere, 12345);
    }
}

/* If the kernel spreads pages itself, the pattern found agrees with it. */
TEST(real_kernel) {
    um_block block;
    um_placement placement;
    um_block_options options = {.pages = UM_PAGES_4K, .category = UM_CAT_SCRATCH};
    REQUIRE(CHECK_OK(um_block_map(&block, 100 * um_page_bytes(), &options, &test_err)));
    memset(block.base, 1, block.nbytes);
    CHECK_OK(um_block_verify(&block, &placement, &test_err));
    CHECK_OK(um_block_unmap(&block, &test_err));
    options.numa.mode = UM_NUMA_INTERLEAVE;
    for (unsigned node = 0; node < 64; node++) {
        options.numa.nodes[0] |= (uint64_t)(placement.node_bytes[node] > 0) << node;
    }
    SKIP_UNLESS(options.numa.nodes[0] != 0, "memory lies on no node below 64");
    um_status status = um_block_map(&block, 100 * um_page_bytes(), &options, &test_err);
    SKIP_UNLESS(status == UM_OK, "this process may not set a NUMA policy");
    memset(block.base, 1, block.nbytes);
    uint64_t elsewhere = 12345;
    CHECK_OK(um_block_repair(&block, &elsewhere, &test_err));
    CHECK_EQ(elsewhere, 0);
    CHECK(is_filled(block.base, block.nbytes, 1));
    int node = __builtin_ctzll(options.numa.nodes[0]), where[2] = {node, node};
    void *pages[2] = {block.base, (char *)block.base + um_page_bytes()};
    if (um__os_move_pages(2, pages, NULL, where) != 0) {
        test_skip("the kernel refuses move_pages here");
    }
    CHECK(where[0] == node);
    CHECK(where[1] == node);
    CHECK_OK(um_block_unmap(&block, &test_err));
}
