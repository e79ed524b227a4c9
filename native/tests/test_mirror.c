/* Mirrored memory: two images of each piece, in the kernel's books and in ours. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "blocks.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault_os.h"
#include "huge_pool.h"

static size_t page, huge_page;

static um_block_options mirror_of(size_t mirror_nbytes, um_pages pages) {
    return (um_block_options){.pages = pages,
                              .category = UM_CAT_HISTORY,
                              .sharing = UM_SHARING_MEMFD,
                              .mirror_nbytes = mirror_nbytes};
}

static um_block make_mirror(size_t n_pieces, size_t mirror_nbytes, um_pages pages) {
    um_block_options options = mirror_of(mirror_nbytes, pages);
    return make_block(n_pieces * mirror_nbytes, &options);
}

static unsigned char *image(const um_block *block, size_t i) {
    return (unsigned char *)block->base + i * block->mirror_nbytes;
}

/* Bytes that the memfd holds. */
static uint64_t file_bytes(const um_block *block) {
    struct stat st;
    CHECK(fstat(block->fd, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

static void fill(const um_block *block) {
    for (size_t i = 0; i < block->nbytes / block->mirror_nbytes; i += 2) {
        memset(image(block, i), (int)(i + 1), block->mirror_nbytes);
    }
}

static void test_images(void) {
    enum { N_PIECES = 5 };
    size_t m = 3 * page;
    fault_os_fail_nth(0, 0);
    um_block block = make_mirror(N_PIECES, m, UM_PAGES_AUTO);
    CHECK_EQ_U64(fault_os_calls_of("um_os_map_file_at"), 2 * N_PIECES);
    CHECK_EQ_U64(block.nbytes, 2 * N_PIECES * m);
    CHECK_EQ_U64(block.reserved_nbytes, 2 * N_PIECES * m);
    CHECK_EQ_U64(block.committed_nbytes, 2 * N_PIECES * m);
    CHECK_EQ_U64(block.requested_nbytes, N_PIECES * m);
    CHECK_EQ_U64(block.mirror_nbytes, m);
    CHECK_EQ_U64(block.step_nbytes, page);
    CHECK_EQ_U64(ledger_row(UM_CAT_HISTORY).mapped_bytes, N_PIECES * m);
    CHECK(is_filled(block.base, block.nbytes, 0));
    fill(&block);
    for (size_t i = 0; i < N_PIECES; i++) {
        CHECK(is_filled(image(&block, 2 * i), 2 * m, (unsigned char)(2 * i + 1)));
        CHECK(has_vm_flag(image(&block, 2 * i), "dc") &&
              has_vm_flag(image(&block, 2 * i + 1), "dc"));
        /* Each image is an entry of its own, with no neighbour joined to it. */
        CHECK_EQ_U64(smaps_bytes(image(&block, 2 * i), "Size"), m);
        CHECK_EQ_U64(smaps_bytes(image(&block, 2 * i + 1), "Size"), m);
    }
    image(&block, 3)[m - 1] = 77;
    CHECK(image(&block, 2)[m - 1] == 77);
    memset(image(&block, 4) + m - 5, 88, 10); /* over the end, which is the beginning */
    CHECK(is_filled(image(&block, 4), 5, 88) && is_filled(image(&block, 5) + m - 5, 5, 88));
    CHECK(image(&block, 4)[5] == 5);
    CHECK_EQ_U64(file_bytes(&block), N_PIECES * m);
    unmap_block(&block);
    CHECK_EQ_U64(ledger_row(UM_CAT_HISTORY).mapped_bytes, 0);
}

static void test_refused(void) {
    um_block block, untouched;
    memset(&block, 0x5A, sizeof block);
    untouched = block;
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
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        um_block_options options = {.pages = bad[i].pages,
                                    .sharing = bad[i].sharing,
                                    .reserve_nbytes = bad[i].reserve_nbytes,
                                    .mirror_nbytes = bad[i].mirror_nbytes};
        CHECK_STATUS(UM_E_INVALID, um_block_map(&block, bad[i].nbytes, &options, &test_err));
        CHECK(memcmp(&block, &untouched, sizeof block) == 0);
    }
    block = make_mirror(2, 2 * page, UM_PAGES_AUTO);
    untouched = block;
    CHECK_STATUS(UM_E_INVALID, um_block_commit(&block, 0, page, &test_err));
    CHECK_STATUS(UM_E_INVALID, um_block_release(&block, 0, page, NULL, &test_err));
    CHECK_STATUS(UM_E_INVALID, um_block_overlay(&block, 0, block.fd, 0, page, &test_err));
    CHECK(memcmp(&block, &untouched, sizeof block) == 0);
    unmap_block(&block);
}

static um_status run_map(void *context, um_error *err) {
    um_block_options options = mirror_of(2 * page, UM_PAGES_4K);
    return um_block_map(context, 6 * page, &options, err);
}

static void undo_map(void *context) {
    unmap_block(context);
}

static void test_failures_of_map(void) {
    static um_block block;
    fault_os_check_each(&(fault_case){.run = run_map,
                                      .undo = undo_map,
                                      .context = &block,
                                      .outputs = &block,
                                      .outputs_nbytes = sizeof block,
                                      .harmless = HARMLESS_HUGE_PAGE});
}

/* ---- placement ---- */

static void test_warm(void) {
    enum { N_PIECES = 4 };
    size_t m = 8 * page;
    um_block block = make_mirror(N_PIECES, m, UM_PAGES_4K);
    um_placement placement = placement_of(&block);
    CHECK_EQ_U64(placement.resident_bytes, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 2, NULL, &test_err));
    struct rusage usage_before, usage_after;
    CHECK(getrusage(RUSAGE_SELF, &usage_before) == 0);
    for (size_t at = 0; at < block.nbytes; at += page) {
        ((volatile unsigned char *)block.base)[at] = 1;
    }
    CHECK(getrusage(RUSAGE_SELF, &usage_after) == 0);
    CHECK_EQ_U64(usage_after.ru_minflt - usage_before.ru_minflt, 0);
    for (size_t i = 0; i < 2 * N_PIECES; i++) {
        CHECK_EQ_U64(smaps_bytes(image(&block, i), "Rss"), m);
        CHECK_EQ_U64(smaps_bytes(image(&block, i), "Pss"), m / 2);
    }
    placement = placement_of(&block);
    CHECK_EQ_U64(placement.resident_bytes, N_PIECES * m);
    CHECK_EQ_U64(placement.pss_bytes, N_PIECES * m);
    CHECK(placement.pages == UM_PAGES_4K && placement.huge_bytes == 0);
    uint64_t on_nodes = 0;
    for (unsigned node = 0; node < UM_MAX_NODES; node++) {
        on_nodes += placement.node_bytes[node];
    }
    CHECK_EQ_U64(on_nodes, N_PIECES * m);
    unmap_block(&block);
}

static void test_touched_in_part(void) {
    size_t m = 8 * page;
    um_block block = make_mirror(3, m, UM_PAGES_4K), other;
    image(&block, 0)[0] = 1; /* through the first image, through the mirror, through both */
    image(&block, 1)[2 * page] = 1;
    image(&block, 2)[0] = 1;
    image(&block, 3)[0] = 1;
    image(&block, 5)[0] = 1;
    CHECK_EQ_U64(placement_of(&block).resident_bytes, 4 * page);
    CHECK_EQ_U64(placement_of(&block).pss_bytes, 4 * page);
    /* Another mapping of it is another user of its pages, and has none of ours in its figures. */
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_SHARED, UM_CAT_HISTORY, &test_err));
    CHECK_EQ_U64(other.nbytes, 3 * m);
    CHECK(other.mirror_nbytes == 0);
    CHECK_EQ_U64(placement_of(&other).resident_bytes, 0);
    memset(other.base, 2, other.nbytes);
    CHECK(is_filled(block.base, 4 * m, 2) && is_filled(image(&block, 5), m, 2));
    CHECK_EQ_U64(placement_of(&block).resident_bytes, 3 * m);
    unmap_block(&other);
    unmap_block(&block);
}

int main(void) {
    page = um_page_bytes();
    huge_page = um_huge_page_bytes();
    test_images();
    test_refused();
    test_failures_of_map();
    test_warm();
    test_touched_in_part();
    return test_report();
}
