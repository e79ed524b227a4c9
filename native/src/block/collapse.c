/* Collapsing: resident pages become huge pages. */
#include "base/status.h"
#include "block/mirror.h"
#include "block/space.h"
#include "block/steps.h"
#include "os/os.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

/* How often a page is tried while the kernel is busy with it. */
enum { COLLAPSE_TRIES = 4 };

/* Finds whether any page of a range is in RAM. Returns 0 or an errno. */
static int find_resident(char *address, size_t nbytes, bool *out) {
    unsigned char pages[4096];
    size_t page = um__os_page_bytes(), most = sizeof pages * page, part;
    int os_errno = 0;
    *out = false;
    for (size_t at = 0; at < nbytes && !*out && os_errno == 0; at += part) {
        part = nbytes - at < most ? nbytes - at : most;
        os_errno = um__os_residency(address + at, part, pages);
        for (size_t i = 0; i < part / page && os_errno == 0; i++) {
            *out = *out || (pages[i] & 1) != 0;
        }
    }
    return os_errno;
}

static int collapse_page(char *address, size_t huge_page, char *mirror, const char **out_call) {
    bool resident;
    *out_call = "mincore";
    int os_errno = find_resident(address, huge_page, &resident);
    if (os_errno != 0 || !resident) {
        return os_errno;
    }
    *out_call = "madvise";
    for (int i = 0; i < COLLAPSE_TRIES; i++) {
        os_errno = um__os_advise(address, huge_page, UM__OS_COLLAPSE);
        if (os_errno != EAGAIN && os_errno != EINTR) {
            break;
        }
    }
    /* The other image has lost its small pages. Populating it saves its faults. */
    return os_errno == 0 && mirror != NULL ? um__os_advise(mirror, huge_page, UM__OS_POPULATE_WRITE)
                                           : os_errno;
}

/* Collapses one huge page at a time: the kernel fails with EINVAL for a range of several if one of
 * them was never touched. `mirror` is the distance to the other image, or 0. */
static um_status collapse_range(uintptr_t first, uintptr_t end, size_t huge_page, ptrdiff_t mirror,
                                um_error *err) {
    for (uintptr_t at = (first + huge_page - 1) / huge_page * huge_page; at + huge_page <= end;
         at += huge_page) {
        const char *call;
        char *page = (char *)at;
        int os_errno = collapse_page(page, huge_page, mirror == 0 ? NULL : page + mirror, &call);
        /* EBUSY: the memory cgroup has no room for a huge page. */
        UM__RETURN_IF(os_errno == EBUSY, um__fail_nomem(err, os_errno, huge_page, call));
        UM__RETURN_IF(os_errno != 0, um__fail_os(err, os_errno, huge_page, call));
    }
    return UM_OK;
}

static um_status collapse_all(um_block *block, size_t huge_page, um_error *err) {
    size_t step = block->step_nbytes;
    UM__EACH_RUN(run, block, 0, um__block_n_steps(block), true) {
        UM__TRY(collapse_range((uintptr_t)block->base + run.first * step,
                               (uintptr_t)block->base + run.end * step, huge_page, 0, err));
    }
    return UM_OK;
}

/* Collapses the images whose addresses agree with their places in the file. */
static um_status collapse_images(um_block *block, size_t huge_page, um_error *err) {
    for (size_t at = 0; at < block->reserved_nbytes;) {
        um__piece piece = um__mirror_piece(block, at);
        uintptr_t first = (uintptr_t)block->base + at;
        ptrdiff_t other = at == piece.start ? (ptrdiff_t)piece.nbytes : -(ptrdiff_t)piece.nbytes;
        if ((first - piece.file) % huge_page == 0) {
            UM__TRY(collapse_range(first, first + piece.nbytes, huge_page, other, err));
        }
        at += piece.nbytes;
    }
    return UM_OK;
}

um_status um_block_collapse(um_block *block, um_error *err) {
    size_t step = block->step_nbytes;
    if (um__hugetlb_shift(block->requested_pages) != 0 || step == 0) {
        return UM_OK;
    }
    UM__RETURN_IF(block->requested_pages == UM_PAGES_4K,
                  um__fail_os(err, EINVAL, um__block_committed_nbytes(block), "madvise"));
    size_t huge_page = step > um__os_page_bytes() ? step : um_huge_page_bytes();
    UM__RETURN_IF(huge_page == 0,
                  um__fail_os(err, EOPNOTSUPP, um__block_committed_nbytes(block), "madvise"));
    um_status status = block->mirror_nbytes == 0 ? collapse_all(block, huge_page, err)
                                                 : collapse_images(block, huge_page, err);
    /* The kernel ignores the policy: it puts a huge page on the node with most of its small pages,
     * or the first such node, where a whole interleaved block would end up. */
    bool spread = block->numa.mode == UM_NUMA_INTERLEAVE || block->numa.mode == UM_NUMA_WEIGHTED;
    if (!spread) {
        return status;
    }
    um_status repaired = um_block_repair(block, NULL, status == UM_OK ? err : NULL);
    return status == UM_OK ? repaired : status;
}
