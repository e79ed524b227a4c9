/* Slots and pools: what a cache of pieces consists of. */
#ifndef UM_SLOTS_H
#define UM_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem_pieces.h"

enum { UM__NO_PIECE = UINT32_MAX, UM__NO_SLOT = UINT32_MAX };
enum { UM__N_AGES = 512 }; /* after which a use does not count any more */

typedef enum um__slot_state {
    UM__SLOT_FREE,
    UM__SLOT_READING, /* its reads are queued or under way */
    UM__SLOT_MOVING,  /* a thread moves its parts to their places */
    UM__SLOT_READY,
    UM__SLOT_FAILED /* holders are to learn of it */
} um__slot_state;

typedef struct um__piece {
    uint32_t slot; /* or UM__NO_SLOT */
    uint32_t pool, group;
    float count;          /* its uses, as they counted at the last one */
    uint32_t last;        /* what its group's clock was at its last use, */
    uint32_t awaited;     /* and, plus 1, when it was prefetched */
    uint64_t used;        /* the call that used it last */
    uint64_t first_range; /* the number of its first part's range */
    bool is_marked;       /* while a call counts its pieces */
} um__piece;

/* Pieces that the same calls ask for. */
typedef struct um__group {
    uint32_t clock; /* the calls that asked for some of them */
    uint64_t used;  /* the last of these */
} um__group;

typedef struct um__slot {
    uint32_t piece; /* or UM__NO_PIECE: also if its reads are to be forgotten */
    uint32_t pool;
    uint32_t n_holds;
    um__slot_state state;
    bool is_prefetched; /* and not used since */
    /* While it is read: */
    uint32_t next, previous; /* in a queue */
    bool is_demanded, is_queued;
    uint32_t part; /* the next read is of this part, */
    size_t at;     /* from this place of the bytes that it needs */
    uint32_t n_under_way;
    bool is_failed;
    int failed_errno;
    uint64_t failed_range; /* its number, */
    size_t failed_nbytes;  /* and its size */
} um__slot;

typedef struct um__pool {
    um_pieces_pool layout; /* with the present n_slots */
    uint32_t first;        /* the number of its first slot among those of all pools */
    uint32_t n_asked;      /* while a call counts its pieces */
    uint64_t n_fetched;    /* the pieces whose reading was begun */
} um__pool;

/* The slots of all pools, and what a policy knows of their pieces. */
typedef struct um__slots {
    um__pool *pools;
    um__slot *slots;
    um__piece *pieces;
    um__group *groups;
    uint32_t n_pools, n_pieces, n_groups;
    um_pieces_policy policy;
    uint64_t now;             /* the number of the present call, */
    uint32_t group;           /* and the group that it asks for */
    float shares[UM__N_AGES]; /* of a use, by its age in calls */
} um__slots;

#endif
