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

/* Returns from a function whose call has failed, with its status. */
#define UM_TRY(call)                                                                               \
    do {                                                                                           \
        um_status status_ = (call);                                                                \
        if (status_ != UM_OK) {                                                                    \
            return status_;                                                                        \
        }                                                                                          \
    } while (0)

/* Heap memory, counted. um_heap_alloc returns zeroed memory, or NULL. */
void *um_heap_alloc(size_t n, size_t item_bytes);
void um_heap_free(void *p);

/* How many bytes from s on are well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no
 * surrogates, nothing above U+10FFFF); nbytes: all of them. */
uint64_t um_utf8_nbytes(const unsigned char *s, uint64_t nbytes);

/* A name in the header of a file, which has less than 4 GiB: `offset` is where it stands. */
typedef struct um_name {
    uint64_t hash;
    const unsigned char *bytes;
    uint32_t nbytes, offset;
} um_name;
um_name um_name_of(const unsigned char *bytes, uint64_t nbytes, uint64_t offset);
/* Whether no two names are the same; false: *out_offset is that of the first in the file that was
 * there before. The names are sorted, which bounds the time for any input, as a hash table does
 * not. */
bool um_names_differ(um_name *names, uint64_t n, uint64_t *out_offset);

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
/* The same of steps that are a file's (um_block_overlay), or are not. */
bool um_block_next_overlay(const um_block *block, size_t from, size_t end, bool overlaid,
                           um_run *out);
/* The steps that the block reserves. */
size_t um_block_n_steps(const um_block *block);

/* Maps a range of reserved address space as the block is: its pages, policy, sharing and lock.
 * After a failure the range may be mapped in part, and has to be reserved again or unmapped.
 * `asked` is for the error. */
um_status um_block_map_range(const um_block *block, size_t offset, size_t nbytes, size_t asked,
                             um_error *err);

/* ---- mirrored memory ---- */

/* Each piece has two images in the address space, and one place in the file. There the pieces lie
 * from the last to the first: so no image continues what the one before it maps, the kernel never
 * joins two of them, and smaps and numa_maps say of each for itself what is in RAM. */
static inline size_t um_mirror_n_images(const um_block *block) {
    return block->mirror_nbytes == 0 ? 1 : block->reserved_nbytes / block->mirror_nbytes;
}

/* Where what lies at an offset of the block is in its file. */
static inline size_t um_block_file_offset(const um_block *block, size_t offset) {
    if (block->mirror_nbytes == 0) {
        return offset;
    }
    size_t m = block->mirror_nbytes, n_pieces = um_mirror_n_images(block) / 2;
    return (n_pieces - 1 - offset / m / 2) * m + offset % m;
}

/* The memory of a block, where committed_nbytes is its address space. */
static inline size_t um_block_memory_nbytes(const um_block *block) {
    return block->mirror_nbytes == 0 ? block->committed_nbytes : block->committed_nbytes / 2;
}

/* Maps all images. Returns 0 or an errno. */
int um_mirror_map(const um_block *block);
/* Punches the file where steps of either image are; *out_nbytes is how much memory that was.
 * Returns 0 or an errno. */
int um_mirror_discard(const um_block *block, um_run range, size_t *out_nbytes);
/* The kernel moves a page only when it is mapped once: takes all that is in RAM into the first
 * images alone, or maps it through both again. Locked memory is left as it is. Returns 0 or an
 * errno, and the call that it is of. */
int um_mirror_fold(const um_block *block, const char **out_call);
int um_mirror_unfold(const um_block *block, const char **out_call);

/* The one node that has memory; -1 when there are several, or when that cannot be told. Asked anew
 * each time, since memory can be plugged in. */
int um_only_memory_node(void);

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
