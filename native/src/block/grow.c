/* Growing and shrinking: steps of a block's address space get memory, or give it back.
 *
 *     step        0  1  2  3  4  5  6  7
 *     committed   1  1  1  0  1  1  0  0     nbytes ends at step 3, the first gap
 *     overlaid    0  0  0  0  1  1  0  0     steps 4 and 5 are a file's, copy-on-write
 *
 * commit maps steps that are not committed: 3, 6, 7. release makes steps inaccessible again and
 * punches the file of shared memory. discard drops pages and leaves the bits. overlay commits steps
 * as a mapping of a file. A change is prepared, made, and only then recorded (steps.h). */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "block/map.h"
#include "block/mirror.h"
#include "block/space.h"
#include "block/steps.h"
#include "os/os.h"

#include <stdbool.h>
#include <stdint.h>

/* ---- commit and release ---- */

static void *address_of(const um_block *block, size_t n_steps) {
    return (char *)block->base + n_steps * block->step_nbytes;
}

static size_t nbytes_of(const um_block *block, um__run run) {
    return (run.end - run.first) * block->step_nbytes;
}

static um_status check_range(const um_block *block, size_t offset, size_t nbytes, size_t *out_end,
                             um_error *err) {
    UM__INVALID_IF(block->is_file, err, "a mapped file is not committed, released or discarded");
    UM__INVALID_IF(!um__add(offset, nbytes, out_end) || *out_end > block->reserved_nbytes, err,
                   "the range is outside what is reserved");
    return UM_OK;
}

static bool may_only_be_read(const um_block *block) {
    return block->sharing != UM_SHARING_NONE && block->access == UM_ACCESS_READ;
}

/* Returns the whole steps inside of a range; {0, 0} if there are none. */
static um__run whole_steps(const um_block *block, size_t offset, size_t end) {
    size_t step = block->step_nbytes;
    size_t first = offset / step + (offset % step != 0);
    return first < end / step ? (um__run){first, end / step} : (um__run){0, 0};
}

/* Checks a range whose steps are to be committed or released. */
static um_status check_change(const um_block *block, size_t offset, size_t nbytes, size_t *out_end,
                              um_error *err) {
    UM__INVALID_IF(block->mirror_nbytes != 0, err, "mirrored memory is not committed or released");
    return check_range(block, offset, nbytes, out_end, err);
}

um_status um_block_commit(um_block *block, size_t offset, size_t nbytes, um_error *err) {
    size_t end = 0, step = block->step_nbytes;
    UM__TRY(check_change(block, offset, nbytes, &end, err));
    if (nbytes == 0) {
        return UM_OK;
    }
    um__steps_change change;
    um__run range = {offset / step, (end - 1) / step + 1};
    UM__TRY(um__steps_begin(block, range, true, &change, err));
    um_status status = UM_OK;
    um__run run = {.end = range.first};
    while (status == UM_OK && um__block_next_run(block, run.end, range.end, false, &run)) {
        status = um__block_map_range(block, run.first * step, nbytes_of(block, run), nbytes, err);
    }
    if (status != UM_OK) {
        /* The file of shared memory stays, since other processes may have written to it. So hugetlb
         * pages that the pool has promised stay promised, for the next try or until the file
         * goes. */
        UM__EACH_RUN(undo, block, range.first, run.end, false) {
            um__os_reserve_at(address_of(block, undo.first), nbytes_of(block, undo));
        }
        um__steps_abandon(block, &change);
        return status;
    }
    um__steps_finish(block, &change, true);
    return UM_OK;
}

/* Touches the hugetlb pages of shared memory that the pool has only promised: punching a hole gives
 * back pages, and no promises. */
static void fetch_promised_pages(const um_block *block, um__run range) {
    if (block->sharing == UM_SHARING_NONE || um__hugetlb_shift(block->requested_pages) == 0) {
        return;
    }
    UM__EACH_RUN(run, block, range.first, range.end, true) {
        um__os_advise(address_of(block, run.first), nbytes_of(block, run), UM__OS_POPULATE_WRITE);
    }
}

/* Maps shared memory again that could not be given back. If the kernel refuses that, too, the
 * memory keeps its contents, and the block records that it is not committed. */
static void restore(um_block *block, const um__steps_change *change) {
    bool restored = true;
    UM__EACH_RUN(run, block, change->range.first, change->range.end, true) {
        size_t nbytes = nbytes_of(block, run);
        restored = restored && um__block_map_range(block, run.first * block->step_nbytes, nbytes,
                                                   nbytes, NULL) == UM_OK;
    }
    if (restored) {
        um__steps_abandon(block, change);
    } else {
        um__os_reserve_at(address_of(block, change->range.first), nbytes_of(block, change->range));
        um__steps_finish(block, change, false);
    }
}

um_status um_block_release(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                           um_error *err) {
    size_t end = 0;
    UM__TRY(check_change(block, offset, nbytes, &end, err));
    UM__INVALID_IF(may_only_be_read(block), err, "memory that may only be read cannot be released");
    um__run range = whole_steps(block, offset, end);
    size_t released = 0;
    if (range.first < range.end) {
        um__steps_change change;
        UM__TRY(um__steps_begin(block, range, false, &change, err));
        size_t range_nbytes = nbytes_of(block, range);
        fetch_promised_pages(block, range);
        int os_errno = um__os_reserve_at(address_of(block, range.first), range_nbytes);
        if (os_errno != 0) {
            um__steps_abandon(block, &change);
            return um__fail_os(err, os_errno, nbytes, "mmap");
        }
        if (block->sharing != UM_SHARING_NONE) {
            os_errno = um__os_punch_hole(block->fd, range.first * block->step_nbytes, range_nbytes);
            if (os_errno != 0) {
                restore(block, &change);
                return um__fail_os(err, os_errno, nbytes, "fallocate");
            }
        }
        released = block->committed_nbytes;
        um__steps_finish(block, &change, false);
        released -= block->committed_nbytes;
    }
    if (out_nbytes != NULL) {
        *out_nbytes = released;
    }
    return UM_OK;
}

/* ---- discard ---- */

/* Makes steps of a file the block's own: dropped pages would be read from the file again. */
static um_status replace_overlays(um_block *block, um__run range, um_error *err) {
    for (um__run run = {.end = range.first};
         um__block_next_overlay(block, run.end, range.end, true, &run);) {
        size_t offset = run.first * block->step_nbytes, nbytes = nbytes_of(block, run);
        UM__TRY(um_block_release(block, offset, nbytes, NULL, err));
        UM__TRY(um_block_commit(block, offset, nbytes, err));
    }
    return UM_OK;
}

um_status um_block_discard(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                           um_error *err) {
    size_t end = 0;
    UM__TRY(check_range(block, offset, nbytes, &end, err));
    UM__INVALID_IF(!um_block_is_committed(block, offset, nbytes), err,
                   "the range is not committed");
    UM__INVALID_IF(may_only_be_read(block), err,
                   "memory that may only be read cannot be discarded");
    UM__INVALID_IF(block->lock != UM_LOCK_NONE, err, "locked memory cannot be discarded");
    /* The pool would keep the pages for the block, so nothing would be gained. If it does not (for
     * a file, or private memory before Linux 6.9), or has none on the block's node, the next touch
     * would kill the process. */
    UM__INVALID_IF(um__hugetlb_shift(block->requested_pages) != 0, err,
                   "hugetlb memory cannot be discarded: release it");
    um__run range = whole_steps(block, offset, end);
    size_t discarded = nbytes_of(block, range);
    if (range.first < range.end) {
        const char *call = "fallocate";
        int os_errno;
        if (block->mirror_nbytes != 0) {
            os_errno = um__mirror_discard(block, range, &discarded);
        } else if (block->sharing != UM_SHARING_NONE) {
            os_errno = um__os_punch_hole(block->fd, range.first * block->step_nbytes, discarded);
        } else {
            call = "madvise";
            os_errno = um__os_advise(address_of(block, range.first), discarded, UM__OS_DONTNEED);
        }
        UM__RETURN_IF(os_errno != 0, um__fail_os(err, os_errno, nbytes, call));
        UM__TRY(replace_overlays(block, range, err));
    }
    if (out_nbytes != NULL) {
        *out_nbytes = discarded;
    }
    return UM_OK;
}

/* ---- overlay ---- */

static um_status check_overlay(const um_block *block, size_t offset, size_t nbytes, um__run *out,
                               um_error *err) {
    size_t end = 0, step = block->step_nbytes;
    UM__TRY(check_range(block, offset, nbytes, &end, err));
    UM__INVALID_IF(block->sharing != UM_SHARING_NONE, err,
                   "shared memory cannot be overlaid with a file");
    UM__INVALID_IF(step != um__os_page_bytes(), err, "huge pages cannot be overlaid with a file");
    UM__INVALID_IF(block->lock != UM_LOCK_NONE, err,
                   "locked memory cannot be overlaid with a file");
    UM__INVALID_IF(offset % step != 0 || nbytes % step != 0, err,
                   "offset and nbytes are not multiples of the step");
    *out = (um__run){offset / step, end / step};
    um__run run;
    UM__INVALID_IF(um__block_next_run(block, out->first, out->end, true, &run), err,
                   "the range is committed");
    return UM_OK;
}

um_status um_block_overlay(um_block *block, size_t offset, int fd, uint64_t file_offset,
                           size_t nbytes, um_error *err) {
    um__run range;
    size_t page;
    uint64_t file_nbytes;
    UM__TRY(check_overlay(block, offset, nbytes, &range, err));
    UM__TRY(um__file_check_range(fd, file_offset, nbytes, &page, &file_nbytes, err));
    UM__INVALID_IF(page != block->step_nbytes, err, "the file has pages of another size");
    if (nbytes == 0) {
        return UM_OK;
    }
    uint64_t *overlaid = block->overlaid;
    um__steps_change change = {.words = block->committed};
    um_status status = overlaid == NULL ? um__steps_alloc(block, &overlaid, err) : UM_OK;
    if (status == UM_OK) {
        status = um__steps_begin(block, range, true, &change, err);
    }
    if (status == UM_OK) {
        void *address = address_of(block, range.first);
        int os_errno = um__os_map_file_at(address, fd, file_offset, nbytes, UM_ACCESS_PRIVATE);
        if (os_errno != 0) {
            um__os_reserve_at(address, nbytes);
            status = um__fail_os(err, os_errno, nbytes, "mmap");
        }
    }
    if (status != UM_OK) {
        um__steps_abandon(block, &change);
        if (overlaid != block->overlaid) {
            um__heap_free(overlaid);
        }
        return status;
    }
    um__steps_set(overlaid, range, true);
    __atomic_store_n(&block->overlaid, overlaid, __ATOMIC_RELEASE);
    um__steps_finish(block, &change, true);
    return UM_OK;
}
