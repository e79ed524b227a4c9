/* Paged KV memory: blocks of tokens that count their holders, and sequences that are tables of
 * blocks.
 *
 *     sequence A   [ 7 | 2 | 5 ]     block 7, 2: 2 holders     block 5, 9: 1 holder
 *     sequence B   [ 7 | 2 | 9 ]
 *     free         head - 3 - 0 - head      taken and given back at the front
 *     evictable    head - 4 - 1 - head      cached, without a holder: the oldest in front
 *
 * A block is held, or it is in one of the lists. An append to a shared block first takes another
 * one, copies the shared block to it, and puts it into the table: nothing else ever moves. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "values/convert.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { BLOCK_ALIGN = 64 };

struct um_paged_block {
    uint32_t n_holders;
    uint32_t before, after; /* neighbours in its list, while no sequence holds it */
    bool cached;
};

/* ---- lists: rings through a head, which lies behind the blocks ---- */

static uint32_t free_list(const um_paged *p) {
    return p->spec.n_blocks;
}

static uint32_t evictable_list(const um_paged *p) {
    return p->spec.n_blocks + 1;
}

static void link_behind(um_paged *p, uint32_t at, uint32_t block) {
    um_paged_block *b = p->blocks;
    b[block].before = at;
    b[block].after = b[at].after;
    b[b[at].after].before = block;
    b[at].after = block;
}

static void unlink_block(um_paged *p, uint32_t block) {
    um_paged_block *b = p->blocks;
    b[b[block].before].after = b[block].after;
    b[b[block].after].before = b[block].before;
}

static void add_free(um_paged *p, uint32_t block) {
    /* To the front: the block used last is still in the CPU's caches. */
    link_behind(p, free_list(p), block);
    p->n_free++;
}

static uint64_t n_available(const um_paged *p) {
    return (uint64_t)p->n_free + p->n_evictable;
}

/* Takes a free block, or else the oldest evictable one. pre: one is available. */
static uint32_t take_block(um_paged *p) {
    bool is_free = p->n_free != 0;
    uint32_t block = p->blocks[is_free ? free_list(p) : evictable_list(p)].after;
    *(is_free ? &p->n_free : &p->n_evictable) -= 1;
    unlink_block(p, block);
    p->blocks[block].cached = false;
    p->blocks[block].n_holders = 1;
    return block;
}

/* Adds a holder to a block. pre: it is held or cached. */
static void hold_block(um_paged *p, uint32_t block) {
    if (p->blocks[block].n_holders++ == 0) {
        unlink_block(p, block);
        p->n_evictable--;
    }
}

static void drop_block(um_paged *p, uint32_t block) {
    um_paged_block *b = &p->blocks[block];
    if (--b->n_holders != 0) {
        return;
    }
    if (b->cached) {
        link_behind(p, p->blocks[evictable_list(p)].before, block);
        p->n_evictable++;
    } else {
        add_free(p, block);
    }
}

/* ---- the pool ---- */

static um_dtype type_of(const um_paged_spec *spec, int v) {
    return v != 0 ? spec->v_type : spec->type;
}

static size_t head_bytes_of(const um_paged *p, int v) {
    return v != 0 ? p->v_head_bytes : p->head_bytes;
}

static const char *const DIMS = "a dimension is 0, or their product does not fit";

/* Computes the bytes of K or V of a head of a token, and of a layer in a block. */
static um_status lane_sizes_of(const um_paged_spec *spec, int v, size_t *out_head, size_t *out_lane,
                               um_error *err) {
    um_dtype type = type_of(spec, v);
    size_t values = um_dtype_block_values(type);
    UM__INVALID_IF(values == 0, err, "type");
    UM__INVALID_IF(spec->head_dim % values != 0, err,
                   "head_dim is not a multiple of the type's blocks");
    size_t head = um__dtype_nbytes(type, spec->head_dim), lane;
    UM__INVALID_IF(head == 0 || spec->n_kv_heads == 0 || spec->block_tokens == 0 ||
                       !um__mul(head, spec->block_tokens, &lane) ||
                       !um__mul(lane, spec->n_kv_heads, &lane),
                   err, DIMS);
    *out_head = head;
    *out_lane = lane;
    return UM_OK;
}

static um_status sizes_of(const um_paged_spec *spec, um_paged *out, size_t *out_total,
                          um_error *err) {
    um_paged made = {.spec = *spec};
    size_t block, total;
    UM__TRY(lane_sizes_of(spec, 0, &made.head_bytes, &made.lane_bytes, err));
    UM__TRY(lane_sizes_of(spec, 1, &made.v_head_bytes, &made.v_lane_bytes, err));
    UM__INVALID_IF(spec->n_blocks >= INT32_MAX, err, "n_blocks is not below 2^31 - 1");
    UM__INVALID_IF(spec->n_layers == 0 || spec->n_blocks == 0 ||
                       !um__add(made.lane_bytes, made.v_lane_bytes, &block) ||
                       !um__mul(block, spec->n_layers, &block) ||
                       !um__round_up(block, BLOCK_ALIGN, &block) ||
                       !um__mul(block, spec->n_blocks, &total) || total > PTRDIFF_MAX,
                   err, DIMS);
    made.block_bytes = block;
    *out = made;
    *out_total = total;
    return UM_OK;
}

um_status um_paged_storage_bytes(const um_paged_spec *spec, size_t *out, um_error *err) {
    um_paged sizes;
    return sizes_of(spec, &sizes, out, err);
}

um_status um_paged_init(um_paged *paged, const um_paged_spec *spec, void *storage, um_error *err) {
    um_paged made;
    size_t total;
    UM__TRY(sizes_of(spec, &made, &total, err));
    UM__INVALID_IF(storage == NULL || (uintptr_t)storage % BLOCK_ALIGN != 0, err,
                   "storage is not aligned to 64 bytes");
    size_t n = (size_t)spec->n_blocks + 2;
    made.base = storage;
    made.blocks = um__heap_alloc(n, sizeof *made.blocks);
    UM__RETURN_IF(made.blocks == NULL,
                  um__fail_nomem(err, ENOMEM, n * sizeof *made.blocks, "calloc"));
    for (uint32_t list = free_list(&made); list <= evictable_list(&made); list++) {
        made.blocks[list].before = made.blocks[list].after = list;
    }
    for (uint32_t block = spec->n_blocks; block-- > 0;) {
        add_free(&made, block);
    }
    *paged = made;
    return UM_OK;
}

void um_paged_free(um_paged *paged) {
    um__heap_free(paged->blocks);
    paged->blocks = NULL;
}

static unsigned char *lane_of(const um_paged *p, uint32_t block, uint32_t layer, int v) {
    size_t in_block = layer * (p->lane_bytes + p->v_lane_bytes) + (v != 0 ? p->lane_bytes : 0);
    return p->base + block * p->block_bytes + in_block;
}

void *um_paged_lane(const um_paged *paged, uint32_t block, uint32_t layer, int v) {
    bool there = block < paged->spec.n_blocks && layer < paged->spec.n_layers;
    return there ? lane_of(paged, block, layer, v) : NULL;
}

uint32_t um_paged_n_holders(const um_paged *paged, uint32_t block) {
    return block < paged->spec.n_blocks ? paged->blocks[block].n_holders : 0;
}

uint32_t um_paged_n_in_use(const um_paged *paged) {
    return paged->spec.n_blocks - (uint32_t)n_available(paged);
}

int um_paged_is_cached(const um_paged *paged, uint32_t block) {
    return block < paged->spec.n_blocks && paged->blocks[block].cached;
}

um_status um_paged_cache(um_paged *paged, uint32_t block, um_error *err) {
    UM__INVALID_IF(block >= paged->spec.n_blocks, err, "no such block");
    UM__RETURN_IF(paged->blocks[block].n_holders == 0,
                  um__fail_detail(err, UM_E_STATE, UM_PAGED_UNHELD, "no sequence holds the block"));
    paged->blocks[block].cached = true;
    return UM_OK;
}

void um_paged_uncache(um_paged *paged, uint32_t block) {
    if (!um_paged_is_cached(paged, block)) {
        return;
    }
    paged->blocks[block].cached = false;
    if (paged->blocks[block].n_holders == 0) {
        unlink_block(paged, block);
        paged->n_evictable--;
        add_free(paged, block);
    }
}

/* ---- sequences ---- */

/* Readers read the table while its entries change: a copy takes the place of a shared block. */
static uint32_t block_at(const um_paged_seq *seq, uint64_t i) {
    return (uint32_t)__atomic_load_n(&seq->table[i], __ATOMIC_ACQUIRE);
}

static void set_block(um_paged_seq *seq, uint64_t i, uint32_t block) {
    __atomic_store_n(&seq->table[i], (int32_t)block, __ATOMIC_RELEASE);
}

static uint64_t blocks_of(const um_paged *p, uint64_t n_tokens) {
    return n_tokens / p->spec.block_tokens + (n_tokens % p->spec.block_tokens != 0);
}

uint64_t um_paged_layer_len(const um_paged_seq *seq, uint32_t layer) {
    return layer < seq->paged->spec.n_layers
               ? atomic_load_explicit(&seq->len[layer], memory_order_acquire)
               : 0;
}

/* Returns the least length of all layers. *out_most is the largest. */
static uint64_t lens_of(const um_paged_seq *seq, uint64_t *out_most) {
    uint64_t least = *out_most = um_paged_layer_len(seq, 0);
    for (uint32_t layer = 1; layer < seq->paged->spec.n_layers; layer++) {
        uint64_t len = um_paged_layer_len(seq, layer);
        least = len < least ? len : least;
        *out_most = len > *out_most ? len : *out_most;
    }
    return least;
}

uint64_t um_paged_seq_len(const um_paged_seq *seq) {
    uint64_t most;
    return lens_of(seq, &most);
}

static void set_layer_len(um_paged_seq *seq, uint32_t layer, uint64_t len) {
    /* Release: a reader of this length sees the tokens below it. */
    atomic_store_explicit(&seq->len[layer], len, memory_order_release);
}

static void set_all_lens(um_paged_seq *seq, uint64_t len) {
    for (uint32_t layer = 0; layer < seq->paged->spec.n_layers; layer++) {
        set_layer_len(seq, layer, len);
    }
}

static um_status check_layers(const um_paged_seq *seq, um_error *err) {
    uint64_t most;
    UM__RETURN_IF(lens_of(seq, &most) != most,
                  um__fail_detail(err, UM_E_STATE, UM_PAGED_UNEVEN,
                                  "layers differ in length: roll back first"));
    return UM_OK;
}

static um_status new_seq(um_paged_seq *out, um_paged *paged, um_error *err) {
    /* One allocation holds the lengths and, behind them, the table. */
    size_t lens = paged->spec.n_layers * sizeof *out->len;
    size_t nbytes = lens + paged->spec.n_blocks * sizeof *out->table;
    unsigned char *memory = um__heap_alloc(1, nbytes);
    UM__RETURN_IF(memory == NULL, um__fail_nomem(err, ENOMEM, nbytes, "calloc"));
    *out = (um_paged_seq){.paged = paged, .len = (void *)memory, .table = (void *)(memory + lens)};
    return UM_OK;
}

/* Returns whether a table, which has room for each block once, has a block twice. `notes` has an
 * entry for each block, all zeros, before the call and after it. */
static bool has_twice(const int32_t *blocks, uint32_t n_blocks, int32_t *notes) {
    bool found = false;
    for (uint32_t i = 0; i < n_blocks; i++) {
        found = found || notes[blocks[i]] != 0;
        notes[blocks[i]] = 1;
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        notes[blocks[i]] = 0;
    }
    return found;
}

um_status um_paged_seq_init(um_paged_seq *out, um_paged *paged, const int32_t *blocks,
                            uint32_t n_blocks, um_error *err) {
    um_paged_seq made;
    UM__INVALID_IF(n_blocks > paged->spec.n_blocks, err, "n_blocks");
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint32_t block = (uint32_t)blocks[i];
        UM__INVALID_IF(um_paged_n_holders(paged, block) == 0 && !um_paged_is_cached(paged, block),
                       err, "no such block, or it is free");
    }
    UM__TRY(new_seq(&made, paged, err));
    if (has_twice(blocks, n_blocks, made.table)) {
        um__heap_free(made.len);
        return um__fail(err, UM_E_INVALID, "a block stands in the table twice");
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        made.table[i] = blocks[i];
        hold_block(paged, (uint32_t)blocks[i]);
    }
    made.n_blocks = n_blocks;
    set_all_lens(&made, (uint64_t)n_blocks * paged->spec.block_tokens);
    *out = made;
    return UM_OK;
}

um_status um_paged_seq_fork(um_paged_seq *out, const um_paged_seq *seq, um_error *err) {
    um_paged_seq made;
    UM__TRY(check_layers(seq, err));
    UM__TRY(new_seq(&made, seq->paged, err));
    memcpy(made.table, seq->table, seq->n_blocks * sizeof *seq->table);
    for (uint32_t i = 0; i < seq->n_blocks; i++) {
        seq->paged->blocks[seq->table[i]].n_holders++;
    }
    made.n_blocks = seq->n_blocks;
    set_all_lens(&made, um_paged_layer_len(seq, 0));
    *out = made;
    return UM_OK;
}

/* Keeps n tokens of every layer. */
static void keep_tokens(um_paged_seq *seq, uint64_t n) {
    uint64_t n_blocks = blocks_of(seq->paged, n);
    set_all_lens(seq, n);
    /* From the end on, so that the last of a chain of cached blocks is evicted first: a block is
     * found only by way of those before it. */
    while (seq->n_blocks > n_blocks) {
        drop_block(seq->paged, block_at(seq, --seq->n_blocks));
    }
}

void um_paged_seq_clear(um_paged_seq *seq) {
    keep_tokens(seq, 0);
}

void um_paged_seq_free(um_paged_seq *seq) {
    if (seq->paged != NULL) {
        um_paged_seq_clear(seq);
        um__heap_free(seq->len);
        *seq = (um_paged_seq){0};
    }
}

void um_paged_rollback(um_paged_seq *seq) {
    keep_tokens(seq, um_paged_seq_len(seq));
}

um_status um_paged_crop(um_paged_seq *seq, uint64_t n, um_error *err) {
    UM__TRY(check_layers(seq, err));
    UM__INVALID_IF(n > um_paged_layer_len(seq, 0), err, "n is above the length");
    keep_tokens(seq, n);
    return UM_OK;
}

/* ---- append ---- */

static bool is_shared_at(const um_paged_seq *seq, uint64_t len) {
    uint64_t i = len / seq->paged->spec.block_tokens;
    return i < seq->n_blocks && seq->paged->blocks[seq->table[i]].n_holders > 1;
}

int um_paged_will_copy(const um_paged_seq *seq, uint32_t layer) {
    return is_shared_at(seq, um_paged_layer_len(seq, layer));
}

/* Makes tokens `len` to `len + n` writable: takes the missing blocks, and one for a copy if other
 * sequences hold the block of token `len`. *out_first is the block of token `len`. */
static um_status make_room(um_paged_seq *seq, uint64_t len, uint64_t n, uint32_t *out_first,
                           um_error *err) {
    um_paged *p = seq->paged;
    uint64_t needed = blocks_of(p, n > UINT64_MAX - len ? UINT64_MAX : len + n);
    uint64_t n_new = needed > seq->n_blocks ? needed - seq->n_blocks : 0;
    uint64_t first = len / p->spec.block_tokens;
    bool copies = is_shared_at(seq, len);
    UM__RETURN_IF(n_new + copies > n_available(p),
                  um__fail_full(err, UM_PAGED_FULL, p->spec.n_blocks, um_paged_n_in_use(p),
                                n_new + copies, "paged"));
    if (!copies && first < seq->n_blocks) {
        p->blocks[block_at(seq, first)].cached = false;
    }
    for (; n_new > 0; n_new--) {
        set_block(seq, seq->n_blocks, take_block(p));
        seq->n_blocks++;
    }
    *out_first = copies ? take_block(p) : block_at(seq, first);
    return UM_OK;
}

static um_status check_type(const um_paged *p, int v, um_dtype type, um_error *err) {
    UM__INVALID_IF(um_dtype_block_values(type) != 1 && type != type_of(&p->spec, v), err, "type");
    return UM_OK;
}

/* Takes blocks for n tokens of a layer. pre: the types were checked. */
static um_status begin_append(um_paged_pending *out, um_paged_seq *seq, uint32_t layer,
                              const void *k, const void *v, um_dtype k_type, um_dtype v_type,
                              um_kv_order order, uint64_t n, um_error *err) {
    UM__INVALID_IF(layer >= seq->paged->spec.n_layers, err, "layer");
    UM__INVALID_IF(order != UM_KV_TOKEN_MAJOR && order != UM_KV_HEAD_MAJOR, err, "order");
    um_paged_pending made = {.seq = seq,
                             .rows = {k, v},
                             .types = {k_type, v_type},
                             .order = order,
                             .layer = layer,
                             .n_layers = 1,
                             .at = um_paged_layer_len(seq, layer),
                             .n = n};
    if (n != 0) {
        UM__TRY(make_room(seq, made.at, n, &made.first_block, err));
    }
    *out = made;
    return UM_OK;
}

um_status um_paged_append_begin(um_paged_pending *out, um_paged_seq *seq, uint32_t layer,
                                const void *k, const void *v, um_dtype type, um_kv_order order,
                                uint64_t n, um_error *err) {
    UM__TRY(check_type(seq->paged, 0, type, err));
    UM__TRY(check_type(seq->paged, 1, type, err));
    return begin_append(out, seq, layer, k, v, type, type, order, n, err);
}

um_status um_paged_append_stored_begin(um_paged_pending *out, um_paged_seq *seq, uint32_t layer,
                                       const void *k, const void *v, um_kv_order order, uint64_t n,
                                       um_error *err) {
    const um_paged_spec *s = &seq->paged->spec;
    return begin_append(out, seq, layer, k, v, s->type, s->v_type, order, n, err);
}

um_status um_paged_append_all_begin(um_paged_pending *out, um_paged_seq *seq, const void *k,
                                    const void *v, um_dtype type, um_error *err) {
    um_paged_pending made;
    UM__TRY(check_layers(seq, err));
    UM__TRY(um_paged_append_begin(&made, seq, 0, k, v, type, UM_KV_HEAD_MAJOR, 1, err));
    made.n_layers = seq->paged->spec.n_layers;
    *out = made;
    return UM_OK;
}

/* Writes the tokens' K or V of one layer. pre: the types were checked. */
static void write_tokens(const um_paged_pending *t, uint32_t layer, int v) {
    const um_paged *p = t->seq->paged;
    um_dtype type = t->types[v], to = type_of(&p->spec, v);
    size_t heads = p->spec.n_kv_heads, dim = p->spec.head_dim,
           in_head = um__dtype_nbytes(type, dim);
    size_t of_head = head_bytes_of(p, v); /* one token's */
    size_t per_block = p->spec.block_tokens, out_head = per_block * of_head, run;
    uint64_t n = t->n, first = t->at / per_block;
    const unsigned char *in = t->rows[v];
    in += (layer - t->layer) * (size_t)n * heads * in_head;
    for (size_t done = 0; done < n; done += run) {
        uint64_t i = (t->at + done) / per_block;
        size_t row = (size_t)((t->at + done) % per_block);
        run = n - done < per_block - row ? (size_t)n - done : per_block - row;
        uint32_t block = i == first ? t->first_block : block_at(t->seq, i);
        unsigned char *out = lane_of(p, block, layer, v) + row * of_head;
        for (size_t h = 0; t->order == UM_KV_HEAD_MAJOR && h < heads; h++) {
            um__convert_values(out + h * out_head, to, in + (h * (size_t)n + done) * in_head, type,
                               run * dim);
        }
        for (size_t i_run = 0; t->order == UM_KV_TOKEN_MAJOR && i_run < run; i_run++) {
            for (size_t h = 0; h < heads; h++) {
                um__convert_values(out + h * out_head + i_run * of_head, to,
                                   in + ((done + i_run) * heads + h) * in_head, type, dim);
            }
        }
    }
}

void um_paged_append_write(const um_paged_pending *pending) {
    if (pending->n == 0) {
        return;
    }
    const um_paged *p = pending->seq->paged;
    uint32_t shared = block_at(pending->seq, pending->at / p->spec.block_tokens);
    if (shared != pending->first_block) {
        /* The sequence still holds the shared block, so no other holder writes to it. */
        memcpy(lane_of(p, pending->first_block, 0, 0), lane_of(p, shared, 0, 0), p->block_bytes);
    }
    for (uint32_t i = 0; i < pending->n_layers; i++) {
        write_tokens(pending, pending->layer + i, 0);
        write_tokens(pending, pending->layer + i, 1);
    }
}

void um_paged_append_end(const um_paged_pending *pending) {
    if (pending->n == 0) {
        return;
    }
    um_paged_seq *seq = pending->seq;
    uint64_t first = pending->at / seq->paged->spec.block_tokens;
    uint32_t shared = block_at(seq, first);
    if (shared != pending->first_block) {
        set_block(seq, first, pending->first_block);
        drop_block(seq->paged, shared);
    }
    for (uint32_t i = 0; i < pending->n_layers; i++) {
        set_layer_len(seq, pending->layer + i, pending->at + pending->n);
    }
}

static um_status finish_append(const um_paged_pending *pending) {
    um_paged_append_write(pending);
    um_paged_append_end(pending);
    return UM_OK;
}

um_status um_paged_append(um_paged_seq *seq, uint32_t layer, const void *k, const void *v,
                          um_dtype type, um_kv_order order, uint64_t n, um_error *err) {
    um_paged_pending pending;
    UM__TRY(um_paged_append_begin(&pending, seq, layer, k, v, type, order, n, err));
    return finish_append(&pending);
}

um_status um_paged_append_all(um_paged_seq *seq, const void *k, const void *v, um_dtype type,
                              um_error *err) {
    um_paged_pending pending;
    UM__TRY(um_paged_append_all_begin(&pending, seq, k, v, type, err));
    return finish_append(&pending);
}

/* ---- gather ---- */

enum {
    LINE = 64,                   /* of the CPU's caches */
    FETCH_AHEAD = 4096,          /* bytes: the CPU's own prefetcher stops where a run ends */
    STREAM_FROM_BYTES = 4 << 20, /* copies of this size do not stay in the caches */
};

static size_t fetched_ahead(size_t nbytes) {
    return nbytes < FETCH_AHEAD ? nbytes : FETCH_AHEAD;
}

#if defined(__x86_64__)

/* Copies like memcpy, but past the caches, so that no line of `out` is read first. Prefetches the
 * next bytes, and at the end those of the next run, at `next`. */
static void copy_streamed(unsigned char *out, const unsigned char *in, const unsigned char *next,
                          size_t nbytes) {
    size_t ahead = fetched_ahead(nbytes), at = -(uintptr_t)out % LINE;
    at = at < nbytes ? at : nbytes;
    memcpy(out, in, at);
    for (; at + LINE <= nbytes; at += LINE) {
        size_t far = at + ahead;
        __builtin_prefetch(far < nbytes ? in + far : next + (far - nbytes));
        for (size_t i = at; i < at + LINE; i += sizeof(__m128i)) {
            __m128i part = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
            _mm_stream_si128((__m128i *)(void *)(out + i), part);
        }
    }
    memcpy(out + at, in + at, nbytes - at);
}

static void end_streamed(void) {
    _mm_sfence();
}

#else

static void copy_streamed(unsigned char *out, const unsigned char *in, const unsigned char *next,
                          size_t nbytes) {
    __builtin_prefetch(next);
    memcpy(out, in, nbytes);
}

static void end_streamed(void) {}

#endif

/* Where and how a block's run of tokens is copied. */
typedef struct gather_job {
    const um_paged *paged;
    unsigned char *out;
    size_t head_stride, run, head_bytes; /* the last of a token in the blocks */
    um_dtype type, stored;
    bool streams;
} gather_job;

/* A gather reads a block, and reads it again if the sequence has meanwhile replaced it.
 * ThreadSanitizer does not know such reads, and leaves them out. */
#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#define BEGIN_READS() AnnotateIgnoreReadsBegin(__FILE__, __LINE__)
#define END_READS() AnnotateIgnoreReadsEnd(__FILE__, __LINE__)
#else
#define BEGIN_READS() ((void)0)
#define END_READS() ((void)0)
#endif

static void gather_lane(const gather_job *job, const unsigned char *lane,
                        const unsigned char *next_lane) {
    const um_paged *p = job->paged;
    size_t heads = p->spec.n_kv_heads, in_stride = p->spec.block_tokens * job->head_bytes;
    size_t nbytes = job->run * job->head_bytes;
    for (size_t h = 0; h < heads; h++) {
        const unsigned char *in = lane + h * in_stride;
        const unsigned char *next = h + 1 < heads ? in + in_stride : next_lane;
        unsigned char *out = job->out + h * job->head_stride;
        if (job->streams) {
            copy_streamed(out, in, next, nbytes);
            continue;
        }
        for (size_t at = 0; at < fetched_ahead(nbytes); at += LINE) {
            __builtin_prefetch(next + at);
        }
        um__convert_values(out, job->type, in, job->stored, job->run * p->spec.head_dim);
    }
}

um_status um_paged_gather(const um_paged_seq *seq, uint32_t layer, int v, uint64_t n, void *out,
                          size_t head_stride, um_dtype type, um_error *err) {
    const um_paged *p = seq->paged;
    size_t heads = p->spec.n_kv_heads, per_block = p->spec.block_tokens;
    UM__INVALID_IF(layer >= p->spec.n_layers, err, "layer");
    UM__INVALID_IF(n > um_paged_layer_len(seq, layer), err, "n is above what the layer holds");
    UM__TRY(check_type(p, v, type, err));
    size_t out_head = um__dtype_nbytes(type, p->spec.head_dim);
    UM__INVALID_IF(heads > 1 && head_stride / out_head < n, err, "head_stride");
    gather_job job = {.paged = p,
                      .out = out,
                      .head_stride = head_stride,
                      .head_bytes = head_bytes_of(p, v),
                      .type = type,
                      .stored = type_of(&p->spec, v)};
    job.streams = type == job.stored && heads * n * job.head_bytes >= STREAM_FROM_BYTES;
    for (size_t done = 0; done < n; done += job.run, job.out += job.run * out_head) {
        uint64_t i = done / per_block;
        job.run = n - done < per_block ? (size_t)n - done : per_block;
        uint32_t block, next = block_at(seq, done + job.run < n ? i + 1 : i);
        do {
            block = block_at(seq, i);
            BEGIN_READS();
            gather_lane(&job, lane_of(p, block, layer, v), lane_of(p, next, layer, v));
            END_READS();
            atomic_thread_fence(memory_order_acquire);
            /* If the writer has replaced the block by a copy, its other holders may have given it
             * back since. */
        } while (block_at(seq, i) != block);
    }
    if (job.streams) {
        end_streamed();
    }
    return UM_OK;
}
