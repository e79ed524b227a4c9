/* What the source files share and the public does not see. */
#ifndef UM_INTERNAL_H
#define UM_INTERNAL_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "unimem.h"

/* Every failure is made by one of these, so that an um_error is always whole. */
um_status um_fail(um_error *err, um_status status, const char *what);
um_status um_fail_full(um_error *err, uint64_t limit, uint64_t used, uint64_t asked,
                       const char *what);
um_status um_fail_os(um_error *err, int os_errno, uint64_t asked, const char *call);
um_status um_fail_format(um_error *err, const char *rule, uint64_t offset);

/* Heap memory, counted. um_heap_alloc returns zeroed memory, or NULL. */
void *um_heap_alloc(size_t n, size_t item_bytes);
void um_heap_free(void *p);

/* One row of the ledger goes up or down by a mapping. */
void um_ledger_enter(um_category category, uint64_t nbytes);
void um_ledger_leave(um_category category, uint64_t nbytes);
/* A mapping has grown or shrunk. */
void um_ledger_change(um_category category, uint64_t old_nbytes, uint64_t new_nbytes);
void um_count_os_call(void);

/* Address space for a block, with one page of no access on either side, which keep the kernel from
 * merging the block with a neighbour: its range is one whole entry of smaps, and belongs to nothing
 * else. `data` is `phase` above a multiple of `align`. */
typedef struct um_space {
    void *data;
    void *map_base;
    size_t map_nbytes;
} um_space;

/* pre: nbytes, align and phase are multiples of the base page, align a power of two above phase.
 * `asked` is for the error. errors: UM_E_INVALID (nbytes too large), UM_E_NOMEM, UM_E_OS. */
um_status um_space_reserve(um_space *out, size_t nbytes, size_t align, size_t phase, size_t asked,
                           um_error *err);

/* Maps whole steps of a block's address space, placed and locked as the block is. Returns 0 or an
 * errno and the call that failed; what it had mapped is the caller's to undo. */
int um_block_map_steps(const um_block *block, size_t offset, size_t nbytes, const char **out_call);
/* The first run of steps in [from, to) that are committed, or are not; false when there is none.
 * pre: from and to are multiples of the step, inside the reserved range. */
bool um_block_next_run(const um_block *block, size_t from, size_t to, bool committed,
                       size_t *out_start, size_t *out_end);
/* The file behind a block's shared memory, of nbytes: the block's own, or one that was given.
 * errors: UM_E_NOMEM, UM_E_OS. */
um_status um_share_make(const um_block_options *options, unsigned huge_shift, size_t nbytes,
                        int *out_fd, um_error *err);

static inline bool um_is_power_of_two(size_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

/* false when the sum, product or rounding does not fit. */
static inline bool um_add(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool um_mul(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool um_round_up(size_t n, size_t align, size_t *out) {
    size_t sum;
    if (!um_add(n, align - 1, &sum)) {
        return false;
    }
    *out = sum & ~(align - 1);
    return true;
}

#endif
