/* Growing and shrinking: which steps of a block's address space have memory. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdlib.h>

enum { WORD_STEPS = 64 };

/* ---- the steps ---- */

size_t um_block_n_steps(const um_block *block) {
    return block->step_nbytes == 0 ? 0 : block->reserved_nbytes / block->step_nbytes;
}

/* The first step in [from, end) whose bit is `set`; `end` when there is none. */
static size_t find_bit(const uint64_t *words, size_t from, size_t end, bool set) {
    while (from < end) {
        uint64_t word = words[from / WORD_STEPS];
        uint64_t wanted = (set ? word : ~word) >> (from % WORD_STEPS);
        if (wanted != 0) {
            from += (size_t)__builtin_ctzll(wanted);
            return from < end ? from : end;
        }
        from += WORD_STEPS - from % WORD_STEPS;
    }
    return end;
}

/* The first step in [from, end) that is committed, or that is not; `end` when there is none. */
static size_t find_step(const um_block *block, size_t from, size_t end, bool committed) {
    if (block->committed != NULL) {
        return find_bit(block->committed, from, end, committed);
    }
    size_t n_committed = block->committed_nbytes / block->step_nbytes;
    size_t found = committed == (from < n_committed) ? from : committed ? end : n_committed;
    return found < end ? found : end;
}

bool um_block_next_run(const um_block *block, size_t from, size_t end, bool committed,
                       um_run *out) {
    if (from >= end) {
        return false;
    }
    size_t first = find_step(block, from, end, committed);
    if (first == end) {
        return false;
    }
    *out = (um_run){.first = first, .end = find_step(block, first, end, !committed)};
    return true;
}

bool um_block_next_overlay(const um_block *block, size_t from, size_t end, bool overlaid,
                           um_run *out) {
    if (block->overlaid == NULL) {
        *out = (um_run){.first = from, .end = end};
        return !overlaid && from < end;
    }
    size_t first = find_bit(block->overlaid, from, end, overlaid);
    if (first >= end) {
        return false;
    }
    *out = (um_run){.first = first, .end = find_bit(block->overlaid, first, end, !overlaid)};
    return true;
}

int um_block_is_committed(const um_block *block, size_t offset, size_t nbytes) {
    size_t end = 0, step = block->step_nbytes;
    if (!um_add(offset, nbytes, &end)) {
        return 0;
    }
    if (block->is_file) {
        return end <= block->nbytes;
    }
    if (nbytes == 0 || end > block->reserved_nbytes) {
        return end <= block->reserved_nbytes;
    }
    size_t end_step = (end - 1) / step + 1;
    return find_step(block, offset / step, end_step, false) == end_step;
}

int um_block_is_overlaid(const um_block *block, size_t offset, size_t nbytes) {
    size_t end = 0, step = block->step_nbytes;
    if (block->overlaid == NULL || nbytes == 0 || !um_add(offset, nbytes, &end) ||
        end > block->reserved_nbytes) {
        return 0;
    }
    size_t end_step = (end - 1) / step + 1;
    return find_bit(block->overlaid, offset / step, end_step, true) != end_step;
}

static void set_steps(uint64_t *words, um_run run, bool set) {
    for (size_t at = run.first; at < run.end;) {
        size_t word = at / WORD_STEPS, bit = at % WORD_STEPS, n = WORD_STEPS - bit;
        n = n < run.end - at ? n : run.end - at;
        uint64_t mask = (n == WORD_STEPS ? UINT64_MAX : (UINT64_C(1) << n) - 1) << bit;
        words[word] = set ? words[word] | mask : words[word] & ~mask;
        at += n;
    }
}

/* What a call that changes steps needs before it changes any. */
typedef struct change {
    um_run range;
    uint64_t *words; /* a bitmap of the steps as they are; NULL where the block needs none after */
} change;

/* Whether the range can be committed, or released, and what is committed still is one piece from
 * the base on. */
static bool stays_whole(const um_block *block, um_run range, bool committed) {
    size_t n_committed = block->committed_nbytes / block->step_nbytes;
    return block->committed == NULL &&
           (committed ? range.first <= n_committed : range.end >= n_committed);
}

/* A bit a step, none of them set. */
static um_status make_words(const um_block *block, uint64_t **out, um_error *err) {
    size_t n_words = (um_block_n_steps(block) - 1) / WORD_STEPS + 1;
    *out = um_heap_alloc(n_words, sizeof **out);
    return *out != NULL ? UM_OK : um_fail_os(err, ENOMEM, n_words * sizeof **out, "calloc");
}

static um_status begin_change(const um_block *block, um_run range, bool committed, change *out,
                              um_error *err) {
    *out = (change){.range = range, .words = block->committed};
    if (block->committed == NULL && !stays_whole(block, range, committed)) {
        um_status status = make_words(block, &out->words, err);
        if (status != UM_OK) {
            return status;
        }
        set_steps(out->words, (um_run){0, block->committed_nbytes / block->step_nbytes}, true);
    }
    return UM_OK;
}

static void abandon_change(const um_block *block, const change *c) {
    if (c->words != block->committed) {
        um_heap_free(c->words);
    }
}

static size_t count_steps(const um_block *block, um_run range, bool committed) {
    size_t n = 0;
    for (um_run run = {.end = range.first};
         um_block_next_run(block, run.end, range.end, committed, &run);) {
        n += run.end - run.first;
    }
    return n;
}

/* The range has changed: the block says so from now on. */
static void finish_change(um_block *block, const change *c, bool committed) {
    size_t step = block->step_nbytes;
    size_t changed = count_steps(block, c->range, !committed) * step;
    size_t total =
        committed ? block->committed_nbytes + changed : block->committed_nbytes - changed;
    um_ledger_resize(block->category, block->committed_nbytes, total);
    block->committed_nbytes = total;
    block->committed = c->words;
    if (block->overlaid != NULL && !committed) {
        set_steps(block->overlaid, c->range, false);
    }
    if (c->words == NULL) {
        block->nbytes = total;
        return;
    }
    set_steps(c->words, c->range, committed);
    block->nbytes = find_step(block, 0, um_block_n_steps(block), false) * step;
    if (block->nbytes == total) {
        block->committed = NULL; /* the last gap is closed */
        um_heap_free(c->words);
    }
}

/* ---- commit and release ---- */

static void *address_of(const um_block *block, size_t n_steps) {
    return (char *)block->base + n_steps * block->step_nbytes;
}

static size_t nbytes_of(const um_block *block, um_run run) {
    return (run.end - run.first) * block->step_nbytes;
}

static um_status check_range(const um_block *block, size_t offset, size_t nbytes, size_t *out_end,
                             um_error *err) {
    if (block->is_file) {
        return um_fail(err, UM_E_INVALID, "a mapped file is not committed, released or discarded");
    }
    if (!um_add(offset, nbytes, out_end) || *out_end > block->reserved_nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside what is reserved");
    }
    return UM_OK;
}

static bool may_only_be_read(const um_block *block) {
    return block->sharing != UM_SHARING_NONE && block->access == UM_ACCESS_READ;
}

/* The whole steps inside of a range; none: both are 0. */
static um_run whole_steps(const um_block *block, size_t offset, size_t end) {
    size_t step = block->step_nbytes;
    size_t first = offset / step + (offset % step != 0);
    return first < end / step ? (um_run){first, end / step} : (um_run){0, 0};
}

/* The same, for what changes steps. */
static um_status check_change(const um_block *block, size_t offset, size_t nbytes, size_t *out_end,
                              um_error *err) {
    if (block->mirror_nbytes != 0) {
        return um_fail(err, UM_E_INVALID, "mirrored memory is not committed or released");
    }
    return check_range(block, offset, nbytes, out_end, err);
}

um_status um_block_commit(um_block *block, size_t offset, size_t nbytes, um_error *err) {
    size_t end = 0, step = block->step_nbytes;
    um_status status = check_change(block, offset, nbytes, &end, err);
    if (status != UM_OK || nbytes == 0) {
        return status;
    }
    change c;
    um_run range = {offset / step, (end - 1) / step + 1};
    status = begin_change(block, range, true, &c, err);
    if (status != UM_OK) {
        return status;
    }
    um_run run = {.end = range.first};
    while (status == UM_OK && um_block_next_run(block, run.end, range.end, false, &run)) {
        status = um_block_map_range(block, run.first * step, nbytes_of(block, run), nbytes, err);
    }
    if (status != UM_OK) {
        /* Memory that other processes see is left as it is: what they wrote there is theirs. So
         * hugetlb pages that the pool has promised to an earlier run of shared memory stay promised
         * to it: for the next try, or until the file ends. */
        for (um_run undo = {.end = range.first};
             um_block_next_run(block, undo.end, run.end, false, &undo);) {
            um_os_reserve_at(address_of(block, undo.first), nbytes_of(block, undo));
        }
        abandon_change(block, &c);
        return status;
    }
    finish_change(block, &c, true);
    return UM_OK;
}

/* The pool has a hugetlb page of shared memory back only when the page was there: one that is
 * merely promised stays so. */
static void fetch_promised_pages(const um_block *block, um_run range) {
    if (block->sharing == UM_SHARING_NONE || um_hugetlb_shift(block->requested_pages) == 0) {
        return;
    }
    for (um_run run = {.end = range.first};
         um_block_next_run(block, run.end, range.end, true, &run);) {
        um_os_advise(address_of(block, run.first), nbytes_of(block, run), UM_OS_POPULATE_WRITE);
    }
}

/* Shared memory that could not be given back is mapped again where it was. Where that is refused,
 * too, the memory keeps what it holds, and may be committed later; until then the block says what
 * is so: that it is not there. */
static void restore(um_block *block, const change *c) {
    bool restored = true;
    for (um_run run = {.end = c->range.first};
         um_block_next_run(block, run.end, c->range.end, true, &run);) {
        size_t nbytes = nbytes_of(block, run);
        restored = restored && um_block_map_range(block, run.first * block->step_nbytes, nbytes,
                                                  nbytes, NULL) == UM_OK;
    }
    if (restored) {
        abandon_change(block, c);
    } else {
        um_os_reserve_at(address_of(block, c->range.first), nbytes_of(block, c->range));
        finish_change(block, c, false);
    }
}

um_status um_block_release(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                           um_error *err) {
    size_t end = 0;
    um_status status = check_change(block, offset, nbytes, &end, err);
    if (status != UM_OK) {
        return status;
    }
    if (may_only_be_read(block)) {
        return um_fail(err, UM_E_INVALID, "memory that may only be read cannot be released");
    }
    um_run range = nbytes == 0 ? (um_run){0, 0} : whole_steps(block, offset, end);
    size_t released = 0;
    if (range.first < range.end) {
        change c;
        status = begin_change(block, range, false, &c, err);
        if (status != UM_OK) {
            return status;
        }
        size_t range_nbytes = nbytes_of(block, range);
        fetch_promised_pages(block, range);
        int os_errno = um_os_reserve_at(address_of(block, range.first), range_nbytes);
        if (os_errno != 0) {
            abandon_change(block, &c);
            return um_fail_os(err, os_errno, nbytes, "mmap");
        }
        if (block->sharing != UM_SHARING_NONE) {
            os_errno = um_os_punch_hole(block->fd, range.first * block->step_nbytes, range_nbytes);
            if (os_errno != 0) {
                restore(block, &c);
                return um_fail_os(err, os_errno, nbytes, "fallocate");
            }
        }
        released = block->committed_nbytes;
        finish_change(block, &c, false);
        released -= block->committed_nbytes;
    }
    if (out_nbytes != NULL) {
        *out_nbytes = released;
    }
    return UM_OK;
}

/* ---- discard ---- */

/* Steps that are a file's become the block's own: dropped pages would come back from the file. */
static um_status replace_overlays(um_block *block, um_run range, um_error *err) {
    um_status status = UM_OK;
    for (um_run run = {.end = range.first};
         status == UM_OK && um_block_next_overlay(block, run.end, range.end, true, &run);) {
        size_t offset = run.first * block->step_nbytes, nbytes = nbytes_of(block, run);
        status = um_block_release(block, offset, nbytes, NULL, err);
        if (status == UM_OK) {
            status = um_block_commit(block, offset, nbytes, err);
        }
    }
    return status;
}

um_status um_block_discard(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                           um_error *err) {
    size_t end = 0;
    um_status status = check_range(block, offset, nbytes, &end, err);
    if (status != UM_OK) {
        return status;
    }
    if (!um_block_is_committed(block, offset, nbytes)) {
        return um_fail(err, UM_E_INVALID, "the range is not committed");
    }
    if (may_only_be_read(block)) {
        return um_fail(err, UM_E_INVALID, "memory that may only be read cannot be discarded");
    }
    if (block->lock != UM_LOCK_NONE) {
        return um_fail(err, UM_E_INVALID, "locked memory cannot be discarded");
    }
    /* The pool would keep the pages for the block, so that nobody gains by it; and where it does
     * not (of a file, or of private memory before Linux 6.9), or has none left on the node that the
     * block is bound to, the next touch would end the process. */
    if (um_hugetlb_shift(block->requested_pages) != 0) {
        return um_fail(err, UM_E_INVALID, "hugetlb memory cannot be discarded: release it");
    }
    um_run range = nbytes == 0 ? (um_run){0, 0} : whole_steps(block, offset, end);
    size_t discarded = nbytes_of(block, range);
    if (range.first < range.end) {
        const char *call = "fallocate";
        int os_errno;
        if (block->mirror_nbytes != 0) {
            os_errno = um_mirror_discard(block, range, &discarded);
        } else if (block->sharing != UM_SHARING_NONE) {
            os_errno = um_os_punch_hole(block->fd, range.first * block->step_nbytes, discarded);
        } else {
            call = "madvise";
            os_errno = um_os_advise(address_of(block, range.first), discarded, UM_OS_DONTNEED);
        }
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, nbytes, call);
        }
        status = replace_overlays(block, range, err);
        if (status != UM_OK) {
            return status;
        }
    }
    if (out_nbytes != NULL) {
        *out_nbytes = discarded;
    }
    return UM_OK;
}

/* ---- overlay ---- */

static um_status check_overlay(const um_block *block, size_t offset, size_t nbytes, um_run *out,
                               um_error *err) {
    size_t end = 0, step = block->step_nbytes;
    um_status status = check_range(block, offset, nbytes, &end, err);
    if (status != UM_OK) {
        return status;
    }
    if (block->sharing != UM_SHARING_NONE) {
        return um_fail(err, UM_E_INVALID, "shared memory cannot be overlaid with a file");
    }
    if (step != um_os_page_bytes()) {
        return um_fail(err, UM_E_INVALID, "huge pages cannot be overlaid with a file");
    }
    if (block->lock != UM_LOCK_NONE) {
        return um_fail(err, UM_E_INVALID, "locked memory cannot be overlaid with a file");
    }
    if (offset % step != 0 || nbytes % step != 0) {
        return um_fail(err, UM_E_INVALID, "offset and nbytes are not multiples of the step");
    }
    *out = (um_run){offset / step, end / step};
    um_run run;
    if (um_block_next_run(block, out->first, out->end, true, &run)) {
        return um_fail(err, UM_E_INVALID, "the range is committed");
    }
    return UM_OK;
}

/* errors: UM_E_INVALID, UM_E_OS. */
static um_status check_file(int fd, uint64_t file_offset, size_t nbytes, um_error *err) {
    size_t page;
    uint64_t file_nbytes;
    int os_errno = um_os_file_page_bytes(fd, &page);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, nbytes, "fstatfs");
    }
    if (page != um_os_page_bytes() || file_offset % page != 0) {
        return um_fail(err, UM_E_INVALID, "file_offset is not a multiple of the page size");
    }
    os_errno = um_os_file_nbytes(fd, &file_nbytes);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, nbytes, "fstat");
    }
    if (file_offset > file_nbytes || nbytes > file_nbytes - file_offset) {
        return um_fail(err, UM_E_INVALID, "the range goes beyond the end of the file");
    }
    return UM_OK;
}

um_status um_block_overlay(um_block *block, size_t offset, int fd, uint64_t file_offset,
                           size_t nbytes, um_error *err) {
    um_run range;
    um_status status = check_overlay(block, offset, nbytes, &range, err);
    if (status == UM_OK) {
        status = check_file(fd, file_offset, nbytes, err);
    }
    if (status != UM_OK || nbytes == 0) {
        return status;
    }
    uint64_t *overlaid = block->overlaid;
    change c = {.words = block->committed};
    if (overlaid == NULL) {
        status = make_words(block, &overlaid, err);
    }
    if (status == UM_OK) {
        status = begin_change(block, range, true, &c, err);
    }
    if (status == UM_OK) {
        void *address = address_of(block, range.first);
        int os_errno = um_os_map_file_at(address, fd, file_offset, nbytes, UM_ACCESS_PRIVATE);
        if (os_errno != 0) {
            um_os_reserve_at(address, nbytes);
            status = um_fail_os(err, os_errno, nbytes, "mmap");
        }
    }
    if (status != UM_OK) {
        abandon_change(block, &c);
        if (overlaid != block->overlaid) {
            um_heap_free(overlaid);
        }
        return status;
    }
    block->overlaid = overlaid;
    set_steps(overlaid, range, true);
    finish_change(block, &c, true);
    return UM_OK;
}
