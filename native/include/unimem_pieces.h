/* unimem: a cache of pieces of files, for weights larger than RAM. It has the conventions of
 * unimem.h.
 *
 * A piece is read and evicted whole, such as an expert of a layer. It consists of parts, such as
 * its gate, up and down matrices: each is a range of a file. A pool is an array of equal slots for
 * the pieces whose parts have the same sizes. Part p of the piece in slot s begins at
 *
 *     base + s * stride + part_offset[p]
 *
 * so that a part of all slots is one array with a constant stride. The caller owns the memory.
 *
 * Reads go past the page cache (O_DIRECT) where the file system allows it, and are under way at
 * once: in an io_uring, or in threads where that is not allowed. Without misses, um_pieces_ensure
 * makes no system call. No lock is held over a read, and no call but the creations allocates.
 *
 * Threads: any may call um_pieces_ensure, um_pieces_release, um_pieces_prefetch, um_pieces_resize
 * and um_pieces_stat_read at once. A holder is for one thread at a time. A forked child has none of
 * the reads that are under way: there all calls fail but those that destroy. */
#ifndef UNIMEM_PIECES_H
#define UNIMEM_PIECES_H

#include "unimem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- pieces ---- */

#define UM_PIECES_MAX_PARTS 8

/* Where a part of a piece is. */
typedef struct um_pieces_range {
    uint32_t file;   /* a number among the files */
    uint64_t offset; /* any; the size is the part's in its pool */
} um_pieces_range;

typedef struct um_pieces_pool {
    uint32_t n_parts; /* at least 1 */
    size_t part_nbytes[UM_PIECES_MAX_PARTS];
    /* Set by um_pieces_layout: */
    size_t part_offset[UM_PIECES_MAX_PARTS]; /* in a slot; a multiple of 32 */
    size_t stride;                           /* from slot to slot; a multiple of 4096 */
    /* For um_pieces_create: */
    void *base;         /* a multiple of 4096, with room for n_slots slots */
    uint32_t n_slots;   /* at least 1; um_pieces_resize changes the number */
    uint32_t max_slots; /* the most slots that there can be */
} um_pieces_pool;

/* Which piece is evicted. A piece that a holder keeps is never evicted. */
typedef enum um_pieces_policy {
    /* The one that is worth least by its uses, where older ones count less, and those of its
     * group's last call more; and by how soon it is the group's turn, as groups call in order. */
    UM_PIECES_FREQUENT = 0,
    UM_PIECES_RECENT, /* the one not used for the longest time (LRU) */
    UM_PIECES_CYCLE,  /* the one used last: best where all pieces are used in a circle */
    UM_PIECES_POLICY_COUNT
} um_pieces_policy;

typedef enum um_pieces_io {
    UM_PIECES_IO_AUTO = 0, /* an io_uring, and threads where that is not allowed */
    UM_PIECES_IO_RING,
    UM_PIECES_IO_THREADS,
    UM_PIECES_IO_COUNT
} um_pieces_io;

typedef struct um_pieces_spec {
    const int *fds; /* open files, which the caller may close after um_pieces_create */
    uint32_t n_files;
    um_pieces_pool *pools;
    uint32_t n_pools;
    uint32_t n_pieces;
    const uint32_t *pool_of;       /* of each piece */
    const um_pieces_range *ranges; /* of all parts of the first piece, then of the second, ... */
    /* Of each piece: a call asks for pieces of one group, such as the experts of a layer. NULL: all
     * are one group. */
    const uint32_t *group_of;
    uint32_t n_groups;
    um_pieces_policy policy;
    um_pieces_io io;
    uint32_t n_reads; /* the most reads under way, up to 1024; 0: chosen */
} um_pieces_spec;

typedef struct um_pieces um_pieces;
/* Keeps the pieces of its last um_pieces_ensure from being evicted. */
typedef struct um_pieces_holder um_pieces_holder;

/* Totals since the creation; the last two are of now. */
typedef struct um_pieces_stat {
    uint64_t hits;           /* pieces that were there, or on their way; once for each call */
    uint64_t misses;         /* pieces whose reading a call began and waited for */
    uint64_t prefetched;     /* pieces whose reading a prefetch began */
    uint64_t prefetch_hits;  /* of these, used before they were evicted */
    uint64_t evicted;        /* pieces that others replaced, or a smaller pool had no slot for */
    uint64_t failed;         /* pieces that could not be read */
    uint64_t n_reads;        /* reads that ended */
    uint64_t read_bytes;     /* bytes that they brought */
    uint64_t waited_ns;      /* time that calls spent waiting for reads, the sum over threads */
    uint64_t resident;       /* pieces that are in slots */
    uint64_t resident_bytes; /* of their parts */
} um_pieces_stat;

/* Sets part_offset and stride of every pool, from the sizes of its parts and the offsets of its
 * pieces. A part keeps the place within 4096 bytes that most of its pieces have in their files, so
 * that these are read to where they belong, and others are moved by less than 4096 bytes.
 *
 * UM_E_INVALID: a number or a size is 0, or there are too many parts; a pool or a file does not
 * exist; sizes overflow. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_pieces_layout(um_pieces_spec *spec, um_error *err);

/* Makes a cache without a piece in it. The memory of the pools has to stay until it is destroyed.
 *
 * - UM_E_INVALID: as um_pieces_layout; a base is NULL or not aligned; n_slots is 0 or above
 *   max_slots; n_reads is above 1024; the policy or io is unknown; a pool was not laid out; a group
 *   is not below n_groups.
 * - UM_E_OS: a file cannot be opened again, a thread cannot be started, or io_uring was asked for
 *   and is refused. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_pieces_create(um_pieces **out, const um_pieces_spec *spec,
                                             um_error *err);
/* Waits for the reads that are under way, and frees the cache. NULL is left alone. pre: its holders
 * were destroyed. */
UM_API void um_pieces_destroy(um_pieces *pieces);

/* Makes a holder, which keeps nothing yet. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_pieces_holder_create(um_pieces_holder **out, um_pieces *pieces,
                                                    um_error *err);
/* Lets all go, and frees the holder. NULL is left alone. */
UM_API void um_pieces_holder_destroy(um_pieces_holder *holder);

/* Makes n pieces present, and waits until they are; ids may repeat. slots[i] is the slot of piece
 * ids[i] in its pool; `slots` may be NULL, or `ids`.
 *
 * The holder lets go what it kept before, and keeps these pieces until its next um_pieces_ensure
 * or um_pieces_release. What is missing is read, all at once, before what was only prefetched.
 * After a failure the holder keeps nothing, unless the list says otherwise; pieces may have been
 * read or evicted, and `slots` is unchanged.
 *
 * - UM_E_INVALID: there is no such piece; what the holder kept stays.
 * - UM_E_FULL, UM_PIECES_FULL: the call has more different pieces of a pool (err->asked) than the
 *   pool has slots (err->limit); nothing was read or evicted, and what the holder kept stays.
 * - UM_E_BUSY, UM_PIECES_HELD: other holders keep too many slots.
 * - UM_E_IO: a range cannot be read, or the file has become shorter (os_errno is 0). err->used is
 *   the number of the file, err->offset is where the range begins, and err->asked its size. The
 *   slot is free again, and the next call tries again.
 * - UM_E_OS, UM_PIECES_INTERRUPTED: a signal interrupted this thread while it waited (os_errno is
 *   EINTR). The reads go on: the next call finds what they brought.
 * - UM_E_OS, UM_E_NOMEM: the kernel refused to begin reads, or to wait for them.
 * - UM_E_STATE, UM_PIECES_FORKED: this is a forked child. */
UM_API UM_CHECKED um_status um_pieces_ensure(um_pieces *pieces, um_pieces_holder *holder,
                                             const int32_t *ids, size_t n, int32_t *slots,
                                             um_error *err);
/* Lets go what a holder keeps. The pieces stay until others replace them. */
UM_API void um_pieces_release(um_pieces *pieces, um_pieces_holder *holder);

/* Begins to read the pieces that are missing, in this order, and does not wait.
 *
 * A piece is left out if all slots have pieces that holders keep, or that were prefetched since
 * the last um_pieces_ensure for their group. Reads that um_pieces_ensure needs overtake those that
 * have not begun. Prefetches have at most half of n_reads under way, and the next call of any kind
 * begins the others. A piece that cannot be read counts as one that was not asked for.
 *
 * UM_E_INVALID: there is no such piece. UM_E_OS, UM_E_NOMEM, UM_E_STATE: as um_pieces_ensure. */
UM_API UM_CHECKED um_status um_pieces_prefetch(um_pieces *pieces, const int32_t *ids, size_t n,
                                               um_error *err);

/* Changes the number of slots of a pool. The caller gives it memory before it grows, and may take
 * memory back after it has shrunk: pieces in the slots from n_slots on are evicted, and reads into
 * them have ended.
 *
 * - UM_E_INVALID: there is no such pool; n_slots is 0 or above max_slots.
 * - UM_E_BUSY, UM_PIECES_HELD: a holder keeps a piece in a slot that would go; nothing changed.
 * - UM_E_STATE, UM_PIECES_FORKED: this is a forked child. */
UM_API UM_CHECKED um_status um_pieces_resize(um_pieces *pieces, uint32_t pool, uint32_t n_slots,
                                             um_error *err);

/* Returns the slot of a piece in its pool; -1 if it is not there, or not yet. */
UM_API int32_t um_pieces_slot(um_pieces *pieces, int32_t id);
UM_API void um_pieces_stat_read(um_pieces *pieces, um_pieces_stat *out);
/* Returns how many pieces of a pool had their reading begun, by any call. pre: the number is of a
 * pool. */
UM_API uint64_t um_pieces_fetched(um_pieces *pieces, uint32_t pool);
/* Whether reads are made by an io_uring. */
UM_API int um_pieces_has_ring(const um_pieces *pieces);
/* Whether a file is read past the page cache. pre: the number is of a file. */
UM_API int um_pieces_is_direct(um_pieces *pieces, uint32_t file);

#ifdef __cplusplus
}
#endif
#endif
