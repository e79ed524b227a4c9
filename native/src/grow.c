/* Growing and shrinking in place: which steps of a block's address space are committed. */
#include "internal.h"
#include "os.h"

#include <errno.h>

static bool is_set(const um_block *block, size_t step) {
    return (block->committed[step / 64] >> (step % 64) & 1) != 0;
}

bool um_block_next_run(const um_block *block, size_t from, size_t to, bool committed,
                       size_t *out_start, size_t *out_end) {
    size_t start = from, end;
    if (block->committed == NULL) {
        /* Committed is exactly what lies below committed_nbytes. */
        size_t border = block->committed_nbytes;
        start = committed || from > border ? from : border;
        end = committed && border < to ? border : to;
    } else {
        size_t step = block->step_nbytes;
        while (start < to && is_set(block, start / step) != committed) {
            start += step;
        }
        end = start;
        while (end < to && is_set(block, end / step) == committed) {
            end += step;
        }
    }
    if (start >= end) {
        return false;
    }
    *out_start = start;
    *out_end = end;
    return true;
}

int um_block_is_committed(const um_block *block, size_t offset, size_t nbytes) {
    size_t end, start, run_end;
    if (!um_add(offset, nbytes, &end) || end > block->reserved_nbytes) {
        return 0;
    }
    if (nbytes == 0) {
        return 1;
    }
    size_t first = offset / block->step_nbytes * block->step_nbytes;
    return um_block_next_run(block, first, block->reserved_nbytes, true, &start, &run_end) &&
           start == first && run_end >= end;
}

/* The bitmap is made when the first gap or growth needs it. */
static bool make_bitmap(um_block *block) {
    size_t n_steps = block->reserved_nbytes / block->step_nbytes;
    uint64_t *bits = um_heap_alloc((n_steps + 63) / 64, sizeof *bits);
    for (size_t i = 0; bits != NULL && i < block->committed_nbytes / block->step_nbytes; i++) {
        bits[i / 64] |= UINT64_C(1) << (i % 64);
    }
    block->committed = bits;
    return bits != NULL;
}

/* Enters a change of [first, last) into the bitmap, the sizes and the ledger. */
static void set_committed(um_block *block, size_t first, size_t last, bool committed) {
    size_t step = block->step_nbytes, before = block->committed_nbytes;
    for (size_t i = first / step; i < last / step; i++) {
        uint64_t bit = UINT64_C(1) << (i % 64);
        if (is_set(block, i) != committed) {
            block->committed[i / 64] ^= bit;
            block->committed_nbytes += committed ? step : -step;
        }
    }
    size_t start, end;
    bool any = um_block_next_run(block, 0, block->reserved_nbytes, true, &start, &end);
    block->nbytes = any && start == 0 ? end : 0;
    um_ledger_change(block->category, before, block->committed_nbytes);
}

static bool may_change(const um_block *block) {
    return !block->is_file &&
           (block->sharing == UM_SHARING_NONE || block->access == UM_ACCESS_SHARED);
}

um_status um_block_commit(um_block *block, size_t offset, size_t nbytes, um_error *err) {
    size_t end, step = block->step_nbytes;
    if (!may_change(block)) {
        return um_fail(err, UM_E_INVALID, "this memory cannot grow: it is a file, or read-only");
    }
    if (!um_add(offset, nbytes, &end) || end > block->reserved_nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside the reserved range");
    }
    if (um_block_is_committed(block, offset, nbytes)) {
        return UM_OK;
    }
    bool had_bitmap = block->committed != NULL;
    if (!had_bitmap && !make_bitmap(block)) {
        return um_fail_os(err, ENOMEM, nbytes, "calloc");
    }
    size_t first = offset / step * step, last = (end + step - 1) / step * step;
    size_t start, run_end = first;
    while (um_block_next_run(block, run_end, last, false, &start, &run_end)) {
        const char *call;
        int os_errno = um_block_map_steps(block, start, run_end - start, &call);
        if (os_errno != 0) {
            /* All or nothing: the gaps that were filled so far are gaps again. */
            size_t undo_end = run_end;
            run_end = first;
            while (um_block_next_run(block, run_end, undo_end, false, &start, &run_end)) {
                um_os_reserve_at((char *)block->base + start, run_end - start);
                if (block->sharing != UM_SHARING_NONE) {
                    um_os_punch_hole(block->fd, start, run_end - start);
                }
            }
            if (!had_bitmap) {
                um_heap_free(block->committed);
                block->committed = NULL;
            }
            return um_fail_os(err, os_errno, nbytes, call);
        }
    }
    set_committed(block, first, last, true);
    return UM_OK;
}

/* The gap [first, last) is memory again, with what is in the file; what cannot be mapped stays
 * a gap. */
static void map_again(um_block *block, size_t first, size_t last) {
    size_t start, end = first;
    const char *call;
    while (um_block_next_run(block, end, last, true, &start, &end)) {
        um_block_map_steps(block, start, end - start, &call);
    }
}

um_status um_block_release(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                           um_error *err) {
    size_t end, first, step = block->step_nbytes;
    if (!may_change(block)) {
        return um_fail(err, UM_E_INVALID, "this memory cannot shrink: it is a file, or read-only");
    }
    if (!um_add(offset, nbytes, &end) || end > block->reserved_nbytes ||
        !um_round_up(offset, step, &first)) {
        return um_fail(err, UM_E_INVALID, "the range is outside the reserved range");
    }
    size_t last = end / step * step, start, run_end;
    size_t before = block->committed_nbytes;
    if (first < last && um_block_next_run(block, first, last, true, &start, &run_end)) {
        bool had_bitmap = block->committed != NULL;
        if (!had_bitmap && !make_bitmap(block)) {
            return um_fail_os(err, ENOMEM, nbytes, "calloc");
        }
        const char *call = "mmap";
        int os_errno = um_os_reserve_at((char *)block->base + first, last - first);
        if (os_errno == 0 && block->sharing != UM_SHARING_NONE) {
            call = "fallocate";
            os_errno = um_os_punch_hole(block->fd, first, last - first);
            if (os_errno != 0) {
                map_again(block, first, last);
            }
        }
        if (os_errno != 0) {
            if (!had_bitmap) {
                um_heap_free(block->committed);
                block->committed = NULL;
            }
            return um_fail_os(err, os_errno, nbytes, call);
        }
        set_committed(block, first, last, false);
    }
    if (out_nbytes != NULL) {
        *out_nbytes = before - block->committed_nbytes;
    }
    return UM_OK;
}
