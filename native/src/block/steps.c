/* The steps of a block: a bit for each one that is committed, and for each one that is a file's.
 *
 * One thread changes them while others walk them. So words are read and written whole, and a block
 * keeps its bits even when no gap is left. */
#include "block/steps.h"

#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

enum { WORD_STEPS = 64 };

/* ---- asking ---- */

size_t um__block_n_steps(const um_block *block) {
    return block->step_nbytes == 0 ? 0 : block->reserved_nbytes / block->step_nbytes;
}

static uint64_t *committed_bits(const um_block *block) {
    return __atomic_load_n(&block->committed, __ATOMIC_ACQUIRE);
}

static uint64_t *overlaid_bits(const um_block *block) {
    return __atomic_load_n(&block->overlaid, __ATOMIC_ACQUIRE);
}

size_t um__block_committed_nbytes(const um_block *block) {
    return __atomic_load_n(&block->committed_nbytes, __ATOMIC_RELAXED);
}

/* Returns the first step in [from, end) whose bit is `set`, or `end`. */
static size_t find_bit(const uint64_t *words, size_t from, size_t end, bool set) {
    while (from < end) {
        uint64_t word = __atomic_load_n(&words[from / WORD_STEPS], __ATOMIC_RELAXED);
        uint64_t wanted = (set ? word : ~word) >> (from % WORD_STEPS);
        if (wanted != 0) {
            from += (size_t)__builtin_ctzll(wanted);
            return from < end ? from : end;
        }
        from += WORD_STEPS - from % WORD_STEPS;
    }
    return end;
}

/* Returns the first step in [from, end) that is committed, or is not; or `end`. */
static size_t find_step(const um_block *block, size_t from, size_t end, bool committed) {
    const uint64_t *bits = committed_bits(block);
    if (bits != NULL) {
        return find_bit(bits, from, end, committed);
    }
    size_t n_committed = um__block_committed_nbytes(block) / block->step_nbytes;
    size_t found = committed == (from < n_committed) ? from : committed ? end : n_committed;
    return found < end ? found : end;
}

bool um__block_next_run(const um_block *block, size_t from, size_t end, bool committed,
                        um__run *out) {
    size_t first = from < end ? find_step(block, from, end, committed) : end;
    if (first == end) {
        return false;
    }
    *out = (um__run){.first = first, .end = find_step(block, first, end, !committed)};
    return true;
}

bool um__block_next_overlay(const um_block *block, size_t from, size_t end, bool overlaid,
                            um__run *out) {
    const uint64_t *bits = overlaid_bits(block);
    if (bits == NULL) {
        *out = (um__run){.first = from, .end = end};
        return !overlaid && from < end;
    }
    size_t first = find_bit(bits, from, end, overlaid);
    if (first >= end) {
        return false;
    }
    *out = (um__run){.first = first, .end = find_bit(bits, first, end, !overlaid)};
    return true;
}

um_status um__block_check_range(const um_block *block, size_t offset, size_t nbytes, bool committed,
                                size_t *out_end, um_error *err) {
    size_t limit = block->is_file ? block->nbytes : block->reserved_nbytes;
    UM__INVALID_IF(!um__add(offset, nbytes, out_end) || *out_end > limit, err,
                   "the range is outside the block");
    UM__INVALID_IF(committed && !um_block_is_committed(block, offset, nbytes), err,
                   "the range is not committed");
    return UM_OK;
}

int um_block_is_committed(const um_block *block, size_t offset, size_t nbytes) {
    size_t end = 0, step = block->step_nbytes;
    if (um__block_check_range(block, offset, nbytes, false, &end, NULL) != UM_OK) {
        return 0;
    }
    if (block->is_file || nbytes == 0) {
        return 1;
    }
    size_t end_step = (end - 1) / step + 1;
    return find_step(block, offset / step, end_step, false) == end_step;
}

int um_block_is_overlaid(const um_block *block, size_t offset, size_t nbytes) {
    size_t end = 0, step = block->step_nbytes;
    const uint64_t *bits = overlaid_bits(block);
    if (bits == NULL || nbytes == 0 || !um__add(offset, nbytes, &end) ||
        end > block->reserved_nbytes) {
        return 0;
    }
    size_t end_step = (end - 1) / step + 1;
    return find_bit(bits, offset / step, end_step, true) != end_step;
}

/* ---- changing ---- */

void um__steps_set(uint64_t *words, um__run run, bool set) {
    for (size_t at = run.first; at < run.end;) {
        size_t word = at / WORD_STEPS, bit = at % WORD_STEPS, n = WORD_STEPS - bit;
        n = n < run.end - at ? n : run.end - at;
        uint64_t mask = (n == WORD_STEPS ? UINT64_MAX : (UINT64_C(1) << n) - 1) << bit;
        uint64_t now = set ? words[word] | mask : words[word] & ~mask;
        __atomic_store_n(&words[word], now, __ATOMIC_RELAXED);
        at += n;
    }
}

/* Returns whether the committed steps are one piece from the base on, and stay so with the
 * change. */
static bool stays_whole(const um_block *block, um__run range, bool committed) {
    size_t n_committed = block->committed_nbytes / block->step_nbytes;
    return block->committed == NULL &&
           (committed ? range.first <= n_committed : range.end >= n_committed);
}

um_status um__steps_alloc(const um_block *block, uint64_t **out, um_error *err) {
    size_t n_words = (um__block_n_steps(block) - 1) / WORD_STEPS + 1;
    *out = um__heap_alloc(n_words, sizeof **out);
    return *out != NULL ? UM_OK : um__fail_os(err, ENOMEM, n_words * sizeof **out, "calloc");
}

um_status um__steps_begin(const um_block *block, um__run range, bool committed,
                          um__steps_change *out, um_error *err) {
    *out = (um__steps_change){.range = range, .words = block->committed};
    if (block->committed == NULL && !stays_whole(block, range, committed)) {
        UM__TRY(um__steps_alloc(block, &out->words, err));
        um__steps_set(out->words, (um__run){0, block->committed_nbytes / block->step_nbytes}, true);
    }
    return UM_OK;
}

void um__steps_abandon(const um_block *block, const um__steps_change *change) {
    if (change->words != block->committed) {
        um__heap_free(change->words);
    }
}

static size_t count_steps(const um_block *block, um__run range, bool committed) {
    size_t n = 0;
    UM__EACH_RUN(run, block, range.first, range.end, committed) {
        n += run.end - run.first;
    }
    return n;
}

void um__steps_finish(um_block *block, const um__steps_change *change, bool committed) {
    size_t step = block->step_nbytes;
    size_t changed = count_steps(block, change->range, !committed) * step;
    size_t total =
        committed ? block->committed_nbytes + changed : block->committed_nbytes - changed;
    um__ledger_resize(block->category, block->committed_nbytes, total);
    __atomic_store_n(&block->committed_nbytes, total, __ATOMIC_RELAXED);
    if (block->overlaid != NULL && !committed) {
        um__steps_set(block->overlaid, change->range, false);
    }
    size_t usable = total;
    if (change->words != NULL) {
        um__steps_set(change->words, change->range, committed);
        __atomic_store_n(&block->committed, change->words, __ATOMIC_RELEASE);
        usable = find_step(block, 0, um__block_n_steps(block), false) * step;
    }
    __atomic_store_n(&block->nbytes, usable, __ATOMIC_RELAXED);
}
