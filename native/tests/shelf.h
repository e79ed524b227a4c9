/* Files with pieces at all kinds of places, and a cache of them. */
#ifndef UM_SHELF_H
#define UM_SHELF_H

#include "blocks.h"
#include "unimem_pieces.h"

enum { N_FILES = 2, N_POOLS = 2, N_SMALL = 40, N_LARGE = 5, N_PIECES = N_SMALL + N_LARGE };
enum { LARGE_NBYTES = (1 << 20) + 12345 }; /* several reads */

typedef struct shelf {
    int fds[N_FILES];
    um_pieces_pool pools[N_POOLS]; /* of small pieces of three parts, and of large ones of one */
    uint32_t pool_of[N_PIECES];
    um_pieces_range ranges[N_SMALL * 3 + N_LARGE];
    um_pieces_spec spec;
    um_pieces *pieces;
} shelf;

static inline const um_pieces_range *ranges_of(const shelf *s, int32_t id) {
    return &s->ranges[id < N_SMALL ? id * 3 : N_SMALL * 3 + id - N_SMALL];
}

/* Where a part of a piece in a slot is. */
static inline unsigned char *part_at(const shelf *s, uint32_t pool, int32_t slot, uint32_t part) {
    const um_pieces_pool *p = &s->pools[pool];
    return (unsigned char *)p->base + (size_t)slot * p->stride + p->part_offset[part];
}

/* Whether a slot has all of a piece. */
static inline bool has_piece(const shelf *s, int32_t id, int32_t slot) {
    uint32_t pool = s->pool_of[id];
    const um_pieces_range *range = ranges_of(s, id);
    bool has = slot >= 0 && slot < (int32_t)s->pools[pool].max_slots;
    for (uint32_t p = 0; has && p < s->pools[pool].n_parts; p++) {
        has = holds(part_at(s, pool, slot, p), range[p].file, range[p].offset,
                    s->pools[pool].part_nbytes[p]);
    }
    return has;
}

/* Lays the pieces out in files of a disk, or in memory. Every third piece begins at a whole unit,
 * and the last one of each file ends with it. */
static inline void make_files(shelf *s, bool in_memory) {
    uint64_t at[N_FILES] = {32, 7};
    for (int32_t id = 0; id < N_PIECES; id++) {
        s->pool_of[id] = id >= N_SMALL;
        um_pieces_range *range = (um_pieces_range *)ranges_of(s, id);
        for (uint32_t p = 0; p < s->pools[s->pool_of[id]].n_parts; p++) {
            uint32_t file = (uint32_t)(id + (int32_t)p) % N_FILES;
            at[file] = id % 3 == 0 ? (at[file] + 4095) / 4096 * 4096 : at[file] + (uint64_t)id * 3;
            range[p] = (um_pieces_range){.file = file, .offset = at[file]};
            at[file] += s->pools[s->pool_of[id]].part_nbytes[p];
        }
    }
    for (uint32_t i = 0; i < N_FILES; i++) {
        s->fds[i] = in_memory ? memory_file(0) : temp_file();
        fill_file(s->fds[i], i, at[i]);
    }
}

static inline void *slots_memory(size_t nbytes) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    return memory;
}

/* Everything but the cache itself. */
static inline void prepare_shelf(shelf *s, bool in_memory, uint32_t n_small, uint32_t n_large) {
    *s = (shelf){.pools = {{.n_parts = 3, .part_nbytes = {5000, 300, 70001}},
                           {.n_parts = 1, .part_nbytes = {LARGE_NBYTES}}}};
    make_files(s, in_memory);
    s->spec = (um_pieces_spec){.fds = s->fds,
                               .n_files = N_FILES,
                               .pools = s->pools,
                               .n_pools = N_POOLS,
                               .n_pieces = N_PIECES,
                               .pool_of = s->pool_of,
                               .ranges = s->ranges};
    REQUIRE(CHECK_OK(um_pieces_layout(&s->spec, &test_err)));
    for (uint32_t i = 0; i < N_POOLS; i++) {
        um_pieces_pool *pool = &s->pools[i];
        pool->max_slots = i == 0 ? N_SMALL : N_LARGE;
        pool->n_slots = i == 0 ? n_small : n_large;
        pool->base = slots_memory(pool->max_slots * pool->stride);
    }
}

static inline void clear_shelf(shelf *s) {
    um_pieces_destroy(s->pieces);
    for (uint32_t i = 0; i < N_POOLS; i++) {
        munmap(s->pools[i].base, s->pools[i].max_slots * s->pools[i].stride);
    }
    for (uint32_t i = 0; i < N_FILES; i++) {
        close(s->fds[i]);
    }
}
#define AUTO_SHELF __attribute__((cleanup(clear_shelf))) shelf

static inline void make_shelf(shelf *s, um_pieces_io io, um_pieces_policy policy, uint32_t n_small,
                              uint32_t n_large) {
    prepare_shelf(s, false, n_small, n_large);
    s->spec.io = io;
    s->spec.policy = policy;
    REQUIRE(CHECK_OK(um_pieces_create(&s->pieces, &s->spec, &test_err)));
}

static inline um_pieces_holder *make_holder(const shelf *s) {
    um_pieces_holder *holder;
    REQUIRE(CHECK_OK(um_pieces_holder_create(&holder, s->pieces, &test_err)));
    return holder;
}

static inline void clear_holder(um_pieces_holder **holder) {
    um_pieces_holder_destroy(*holder);
}
#define AUTO_HOLDER __attribute__((cleanup(clear_holder))) um_pieces_holder *

static inline um_pieces_stat stat_of(const shelf *s) {
    um_pieces_stat stat;
    um_pieces_stat_read(s->pieces, &stat);
    return stat;
}

/* Makes pieces present, and checks what is in their slots. */
static inline void ensure(const shelf *s, um_pieces_holder *holder, const int32_t *ids, size_t n) {
    int32_t slots[256];
    REQUIRE(n <= COUNT(slots));
    if (CHECK_OK(um_pieces_ensure(s->pieces, holder, ids, n, slots, &test_err))) {
        for (size_t i = 0; i < n; i++) {
            CHECK(has_piece(s, ids[i], slots[i]));
            CHECK_EQ(um_pieces_slot(s->pieces, ids[i]), slots[i]);
        }
    }
}
#define ENSURE(s, holder, ...)                                                                     \
    ensure(s, holder, (int32_t[]){__VA_ARGS__}, COUNT(((int32_t[]){__VA_ARGS__})))

/* The kinds of io that this kernel has. */
static inline bool has_io(um_pieces_io io) {
    AUTO_SHELF s;
    prepare_shelf(&s, true, 1, 1);
    s.spec.io = io;
    return um_pieces_create(&s.pieces, &s.spec, NULL) == UM_OK;
}
#define EACH_IO(io)                                                                                \
    for (um_pieces_io io = UM_PIECES_IO_RING; io < UM_PIECES_IO_COUNT; io++)                       \
        if (!has_io(io)) {                                                                         \
            test_skip("the kernel refuses io_uring");                                              \
        } else

#endif
