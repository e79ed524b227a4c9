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
/* A mapping that stays has another size now. */
void um_ledger_resize(um_category category, uint64_t from_nbytes, uint64_t to_nbytes);
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

/* Neighbouring steps of a block, by their numbers. */
typedef struct um_run {
    size_t first, end;
} um_run;

/* The first run inside [from, end) whose steps all are committed, or all are not; false: none. */
bool um_block_next_run(const um_block *block, size_t from, size_t end, bool committed, um_run *out);
/* The steps that the block reserves. */
size_t um_block_n_steps(const um_block *block);

/* Maps a range of reserved address space as the block is: its pages, policy, sharing and lock.
 * After a failure the range may be mapped in part, and has to be reserved again or unmapped.
 * `asked` is for the error. */
um_status um_block_map_range(const um_block *block, size_t offset, size_t nbytes, size_t asked,
                             um_error *err);

/* A failure of which errno does not say that it was for want of memory. */
um_status um_fail_nomem(um_error *err, int os_errno, uint64_t asked, const char *call);

/* The logarithm of the size of the hugetlb pages that are asked for; 0: none are. */
unsigned um_hugetlb_shift(um_pages pages);

/* The descriptor, the caller's to close, of shared memory of nbytes that a block is to be made of.
 * errors: UM_E_INVALID, UM_E_NOMEM, UM_E_OS. */
um_status um_share_open(const um_block_options *options, size_t nbytes, int *out_fd, um_error *err);
/* Undoes it, where no block came of it. */
void um_share_discard(const um_block_options *options, int fd);

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
