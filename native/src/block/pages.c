/* The state of each page of a block. */
#include "base/status.h"
#include "block/space.h"
#include "block/steps.h"
#include "os/kernel.h"
#include "os/os.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Runs in one scan, entries in one read of pagemap, and addresses in one call of move_pages. */
enum { RUNS = 1024, ENTRIES = 4096, BATCH = 4096 };

/* A bit of an entry of pagemap. */
#define ENTRY_PRESENT (UINT64_C(1) << 63)

/* The base pages that a call looks at. */
typedef struct view {
    char *first;
    size_t n_pages;
    size_t page;
    size_t hugetlb_page; /* 0: other memory */
    uint8_t mapped;      /* the flags of a page that is mapped */
    uint8_t *pages;
} view;

/* Marks mapped pages by PAGEMAP_SCAN. Returns 0 or an errno: ENOTTY before Linux 6.7. */
static int mark_scanned(const view *v, int pagemap) {
    um__page_run runs[RUNS];
    size_t nbytes = v->n_pages * v->page;
    for (size_t at = 0; at < nbytes;) {
        size_t n_runs, scanned;
        int os_errno =
            um__os_scan_pages(pagemap, v->first + at, nbytes - at, runs, RUNS, &n_runs, &scanned);
        if (os_errno == EINTR) {
            continue;
        }
        UM__RETURN_IF(os_errno != 0, os_errno);
        for (size_t i = 0; i < n_runs; i++) {
            size_t from = (size_t)(runs[i].start - (uintptr_t)v->first) / v->page;
            size_t to = (size_t)(runs[i].end - (uintptr_t)v->first) / v->page;
            memset(v->pages + from, v->mapped | (runs[i].categories != 0 ? UM_PAGE_HUGE : 0),
                   to - from);
        }
        at += scanned;
    }
    return 0;
}

/* Marks mapped pages by the entries of older kernels, which do not tell whether a page is a part of
 * a huge page. Returns 0 or an errno. */
static int mark_read(const view *v, int pagemap) {
    uint64_t entries[ENTRIES];
    for (size_t i = 0; i < v->n_pages;) {
        size_t n = v->n_pages - i < ENTRIES ? v->n_pages - i : ENTRIES, got;
        uint64_t first = ((uintptr_t)v->first / v->page + i) * sizeof *entries;
        int os_errno = um__os_pread(pagemap, entries, n * sizeof *entries, first, &got);
        if (os_errno == EINTR) {
            continue;
        }
        UM__RETURN_IF(os_errno != 0 || got < sizeof *entries, os_errno != 0 ? os_errno : EIO);
        for (size_t k = 0; k < got / sizeof *entries; k++, i++) {
            if ((entries[k] & ENTRY_PRESENT) != 0) {
                v->pages[i] = v->mapped;
            }
        }
    }
    return 0;
}

static um_status mark_mapped(const view *v, um_error *err) {
    int pagemap, os_errno = um__os_open_read("/proc/self/pagemap", &pagemap);
    if (os_errno == EACCES) {
        /* mincore does not serve hugetlb memory, so nothing is known of it. */
        memset(v->pages, UM_PAGE_UNKNOWN, v->hugetlb_page != 0 ? v->n_pages : 0);
        return UM_OK;
    }
    UM__RETURN_IF(os_errno != 0, um__fail_os(err, os_errno, 0, "open /proc/self/pagemap"));
    const char *call = "ioctl of /proc/self/pagemap";
    os_errno = mark_scanned(v, pagemap);
    if (os_errno == ENOTTY) {
        call = "pread of /proc/self/pagemap";
        os_errno = mark_read(v, pagemap);
    }
    um__os_close(pagemap);
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, call);
}

/* Returns whether a page is in the same huge page, and so on the same node, as the page before. */
static bool is_inside_huge_page(const view *v, size_t i, size_t huge_page) {
    return i > 0 && (v->pages[i] & UM_PAGE_HUGE) != 0 && (v->pages[i - 1] & UM_PAGE_HUGE) != 0 &&
           ((uintptr_t)v->first + i * v->page) % huge_page != 0;
}

static int ask_nodes(const view *v, size_t huge_page, int16_t *out_nodes) {
    void *addresses[BATCH];
    int status[BATCH];
    for (size_t begin = 0, end = 0; begin < v->n_pages; begin = end) {
        size_t n = 0;
        while (end < v->n_pages && n < BATCH) {
            if ((v->pages[end] & UM_PAGE_MAPPED) != 0 && !is_inside_huge_page(v, end, huge_page)) {
                addresses[n++] = v->first + end * v->page;
            }
            end++;
        }
        int os_errno = n == 0 ? 0 : um__os_move_pages(n, addresses, NULL, status);
        UM__RETURN_IF(os_errno != 0, os_errno);
        for (size_t i = begin, k = 0; i < end; i++) {
            if ((v->pages[i] & UM_PAGE_MAPPED) == 0) {
                out_nodes[i] = -1;
            } else if (is_inside_huge_page(v, i, huge_page)) {
                out_nodes[i] = out_nodes[i - 1];
            } else {
                /* A page that has gone meanwhile has a negative status. */
                out_nodes[i] = (int16_t)(status[k] < 0 ? -1 : status[k]);
                k++;
            }
        }
    }
    return 0;
}

static um_status find_nodes(const view *v, int16_t *out_nodes, um_error *err) {
    int only_node = um__only_memory_node();
    if (only_node >= 0) {
        for (size_t i = 0; i < v->n_pages; i++) {
            out_nodes[i] = (int16_t)((v->pages[i] & UM_PAGE_MAPPED) != 0 ? only_node : -1);
        }
        return UM_OK;
    }
    size_t huge_page = v->hugetlb_page != 0 ? v->hugetlb_page : um_huge_page_bytes();
    int os_errno = ask_nodes(v, huge_page != 0 ? huge_page : v->page, out_nodes);
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, "move_pages");
}

um_status um_block_pages(const um_block *block, size_t offset, size_t nbytes, uint8_t *out_pages,
                         int16_t *out_nodes, um_error *err) {
    size_t end, page = um__os_page_bytes();
    UM__TRY(um__block_check_range(block, offset, nbytes, true, &end, err));
    if (nbytes == 0) {
        return UM_OK;
    }
    size_t first = offset / page;
    bool hugetlb = um__hugetlb_shift(block->requested_pages) != 0 ||
                   (block->is_file != 0 && block->step_nbytes > page);
    bool locked = hugetlb || block->lock != UM_LOCK_NONE;
    view v = {.first = (char *)block->base + first * page,
              .n_pages = (end + page - 1) / page - first,
              .page = page,
              .hugetlb_page = hugetlb ? block->step_nbytes : 0,
              .mapped = (uint8_t)(UM_PAGE_IN_RAM | UM_PAGE_MAPPED | (hugetlb ? UM_PAGE_HUGE : 0) |
                                  (locked ? UM_PAGE_LOCKED : 0)),
              .pages = out_pages};
    if (hugetlb) {
        bool is_shared = block->is_file != 0 || block->sharing != UM_SHARING_NONE;
        memset(out_pages, is_shared ? UM_PAGE_UNKNOWN : 0, v.n_pages);
    } else if (block->is_cache_hidden != 0) {
        memset(out_pages, UM_PAGE_UNKNOWN, v.n_pages);
    } else {
        UM__TRY_OS(um__os_residency(v.first, v.n_pages * page, out_pages), err, nbytes, "mincore");
        for (size_t i = 0; i < v.n_pages; i++) {
            out_pages[i] = (out_pages[i] & 1) != 0 ? UM_PAGE_IN_RAM : 0;
        }
    }
    UM__TRY(mark_mapped(&v, err));
    return out_nodes != NULL ? find_nodes(&v, out_nodes, err) : UM_OK;
}
