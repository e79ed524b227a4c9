/* Slots and pools: what a cache of pieces consists of. */
#ifndef UM_SLOTS_H
#define UM_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem_pieces.h"

enum { UM__NO_PIECE = UINT32_MAX, UM__NO_SLOT = UINT32_MAX };

typedef enum um__slot_state {
    UM__SLOT_FREE,
    UM__SLOT_READING, /* its reads are queued or under way */
    UM__SLOT_MOVING,  /* a thread moves its parts to their places */
    UM__SLOT_READY,
    UM__SLOT_FAILED /* holders are to learn of it */
} um__slot_state;

typedef struct um__piece {
    uint32_t slot; /* or UM__NO_SLOT */
    uint32_t pool;
    double weight;        /* its uses; older ones count less */
    uint64_t first_range; /* the number of its first part's range */
    bool is_marked;       /* while a call counts its pieces */
} um__piece;

typedef struct um__slot {
    uint32_t piece; /* or UM__NO_PIECE: also if its reads are to be forgotten */
    uint32_t pool;
    uint32_t n_holds;
    um__slot_state state;
    bool is_prefetched;     /* and not used since */
    uint64_t used;          /* the call that used it last */
    uint64_t awaited_until; /* the call up to which a prefetch expects a use */
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

/* A slot in a heap, whose top has the lowest value. The value is at most the present one. */
typedef struct um__ranked {
    double value;
    uint32_t slot;
} um__ranked;

typedef struct um__pool {
    um_pieces_pool layout; /* with the present n_slots */
    uint32_t first;        /* the number of its first slot among those of all pools */
    uint32_t free;         /* the first free slot; others follow by `next` */
    um__ranked *heap;      /* the first n_ranked are a heap, and those up to n_slots set aside */
    uint32_t n_ranked;
    uint32_t n_asked; /* while a call counts its pieces */
} um__pool;

/* The slots of all pools, and what a policy knows of their pieces. */
typedef struct um__slots {
    um__pool *pools;
    um__slot *slots;
    um__piece *pieces;
    uint32_t n_pools, n_pieces;
    um_pieces_policy policy;
    uint64_t now;  /* the number of the present call */
    double weight; /* of a use now */
    double growth; /* of that weight, with each use */
} um__slots;

#endif
