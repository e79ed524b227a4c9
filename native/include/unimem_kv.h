/* unimem: KV caches, contiguous and paged. unimem.h includes this header and has the
 * conventions. */
#ifndef UNIMEM_KV_H
#define UNIMEM_KV_H

#ifndef UNIMEM_H
#error "include unimem.h, which includes this header"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- rotation ---- */

enum { UM_ROTATION_LEAST = 64, UM_ROTATION_MOST = 4096 };

/* Rotates each `block` of n values, in place, by the Hadamard matrix of Sylvester's construction,
 * divided by the square root of its size: symmetric, and its own inverse.
 *
 * Rotated keys are multiplied with rotated queries; the result of attention over rotated values is
 * rotated back. This spreads outliers over a head, so that quantizing costs less
 * (ggml-org/llama.cpp#21038, whose matrix this is).
 * - UM_E_INVALID: block is no power of two from UM_ROTATION_LEAST to UM_ROTATION_MOST, or n is not
 *   whole blocks. */
UM_API UM_CHECKED um_status um_rotate(float *values, size_t n, size_t block, um_error *err);
/* Returns the block that heads of K (v = 0) or V (v = 1) are rotated in: for V UM_ROTATION_LEAST,
 * for K the largest power of two up to UM_ROTATION_MOST that divides head_dim; 0 if head_dim is no
 * multiple of UM_ROTATION_LEAST. */
UM_API size_t um_rotation_block(uint32_t head_dim, int v);

/* ---- kv ---- */

/* K and V of all layers of one stream (optionally of a batch), in storage of the caller's.
 *
 * A lane is K or V of one layer of one stream: rows of n_kv_heads * head_dim values, one for each
 * token. Lanes are in the order of layers, K before V, and streams: those of K are lane_stride
 * bytes apart, those of V v_lane_stride. um_kv_lane returns their addresses.
 *
 * - A plain cache holds its tokens in consecutive rows, beginning at any row.
 * - A ring (window != 0) holds the token of position p in row p % n_rows. Its lanes are mirrored
 *   (um_block_options): rows n_rows to 2 * n_rows are rows 0 to n_rows again.
 *
 * To keep the rows of each head side by side, as attention reads them, make a cache of batch *
 * n_kv_heads streams with one head each. Arguments and results have the same bytes: [batch, heads,
 * n, dim] is [batch * heads, 1, n, dim].
 *
 * Tokens have positions, counted from 0, which never change. The cache holds the tokens from a
 * first position up to um_kv_next_position; a ring shows the last `window` of them. A token counts
 * once every layer holds it.
 *
 * Threads: one writer; while it appends, reserves, commits or makes rows usable, any number of
 * um_kv_read, um_kv_lane, um_kv_row, um_kv_seq_len, um_kv_layer_len and of calls that return a
 * position. No thread reads while it crops, trims, moves, adopts or clears. While a thread reads
 * from a ring, the writer may append as many tokens as there are rows beyond the window: more would
 * overwrite what is read. */
typedef struct um_kv_spec {
    uint32_t n_layers, n_kv_heads, head_dim, batch;
    uint64_t max_seq_len; /* the most tokens that the cache holds; of a ring, at least the window */
    uint64_t window;      /* 0: a plain cache; else a ring that shows this many tokens */
    um_dtype type;        /* of K; of blocks: head_dim is a multiple of 32 */
    um_dtype v_type;      /* of V */
    uint32_t v_head_dim;  /* of V; 0: as head_dim; UM_KV_NO_V: rows of V have no values */
    int rotate; /* whether appends rotate heads (um_rotate), but for rows in the stored type */
} um_kv_spec;

/* For um_kv_spec.v_head_dim: a layer that keeps only keys, which contain the values. */
#define UM_KV_NO_V UINT32_MAX

/* The place of the lanes. */
typedef struct um_kv_storage {
    void *base;           /* aligned to 64 bytes */
    size_t lane_stride;   /* bytes; a multiple of 64 with room for all rows (of a ring: twice) */
    size_t v_lane_stride; /* the same for V */
    uint64_t n_rows;      /* rows of a lane; of a ring, at least the window */
    uint64_t usable_rows; /* rows [0, usable_rows) may be written now; of a ring, n_rows */
} um_kv_storage;

/* Copies bytes between two places of a lane, which may overlap. */
typedef um_status um_kv_mover(void *context, void *to, const void *from, size_t nbytes);

typedef struct um_kv {
    um_kv_spec spec;              /* read */
    unsigned char *base;          /* read */
    size_t row_bytes;             /* read: one token of K in one layer of one stream */
    size_t v_row_bytes;           /* read: the same of V */
    size_t lane_stride;           /* read */
    size_t v_lane_stride;         /* read */
    uint64_t n_rows;              /* read */
    uint64_t usable_rows;         /* read; see um_kv_set_usable */
    uint64_t shift;               /* of a plain cache: position p is in row p - shift */
    UM_ATOMIC(uint64_t) first;    /* read: tokens before this position were dropped for good */
    UM_ATOMIC(uint64_t) reserved; /* rows that are reserved and not committed */
    UM_ATOMIC(uint64_t) * end;    /* of each layer, the position behind its last token */
    UM_ATOMIC(uint64_t) * top;    /* of each layer, the highest `end`; n_rows before it, a ring has
                                     overwritten all */
    uint64_t end_limit;           /* see um_kv_limit_end */
    um_kv_mover *mover;           /* see um_kv_set_mover */
    void *mover_context;
} um_kv;

/* Computes the bytes of one row of K (v = 0) or V (v = 1). UM_E_INVALID: a dimension is 0, a
 * product overflows, the type is unknown, head_dim is not whole blocks of the type or of a
 * rotation, or window is above max_seq_len. */
UM_API UM_CHECKED um_status um_kv_row_bytes(const um_kv_spec *spec, int v, size_t *out,
                                            um_error *err);
/* Computes the bytes of fixed storage: lanes of max_seq_len rows, rounded up to 64 bytes.
 * UM_E_INVALID: as um_kv_row_bytes. */
UM_API UM_CHECKED um_status um_kv_storage_bytes(const um_kv_spec *spec, size_t *out, um_error *err);
/* Makes an empty cache. It allocates a few words for each layer: call um_kv_free.
 * - UM_E_INVALID: as um_kv_row_bytes, or the storage breaks what um_kv_storage says. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_kv_init(um_kv *kv, const um_kv_spec *spec,
                                       const um_kv_storage *storage, um_error *err);
/* Frees what um_kv_init allocated. The storage and a zeroed kv are left alone. */
UM_API void um_kv_free(um_kv *kv);

/* Returns the address of row 0 of a lane of K (v = 0) or V (v = 1), which never changes; NULL for
 * no such lane. */
UM_API void *um_kv_lane(const um_kv *kv, uint32_t layer, int v, uint32_t stream);
/* Returns the row of a position. */
UM_API uint64_t um_kv_row(const um_kv *kv, uint64_t position);

/* The order of the rows that um_kv_append takes and um_kv_read gives. */
typedef enum um_kv_order {
    UM_KV_TOKEN_MAJOR = 0, /* [n, batch, heads, head_dim]: as a matrix product leaves them */
    UM_KV_HEAD_MAJOR       /* [batch, heads, n, head_dim]: as attention code holds them */
} um_kv_order;

/* Appends n tokens (may be 0) to one layer: a copy, or a conversion if the types differ.
 *
 * k and v are aligned for `type`, which is float32, float16, bfloat16 or, if K and V have one type,
 * the cache's. A ring takes the last n_rows of more tokens. After a failure no row is appended.
 *
 *
 * - UM_E_INVALID: there is no such layer, type or order.
 * - UM_E_FULL: UM_KV_FULL; or UM_KV_ROWS, and um_kv_set_usable or um_kv_move makes room.
 * - UM_E_STATE: UM_KV_RESERVED. */
UM_API UM_CHECKED um_status um_kv_append(um_kv *kv, uint32_t layer, const void *k, const void *v,
                                         um_dtype type, um_kv_order order, uint64_t n,
                                         um_error *err);
/* Appends one token to all layers, k and v [n_layers, batch, heads, head_dim].
 *
 * - UM_E_INVALID, UM_E_FULL: as um_kv_append. UM_E_STATE: UM_KV_RESERVED, UM_KV_UNEVEN. */
UM_API UM_CHECKED um_status um_kv_append_all(um_kv *kv, const void *k, const void *v, um_dtype type,
                                             um_error *err);

/* Begins to append n tokens to a layer whose rows the caller writes. *out_row is the row of the
 * first token that the cache takes: of a ring, of the last n_rows.
 *
 * UM_E_INVALID, UM_E_FULL, UM_E_STATE: as um_kv_append. */
UM_API UM_CHECKED um_status um_kv_append_begin(const um_kv *kv, uint32_t layer, uint64_t n,
                                               uint64_t *out_row, um_error *err);
/* Shows the tokens of um_kv_append_begin, which the caller has written. */
UM_API void um_kv_append_end(um_kv *kv, uint32_t layer, uint64_t n);

/* Reserves n rows in every layer for an engine that writes them itself. *out_row is the first. In a
 * ring the rows may go on into the mirror, or be taken % n_rows. Their old contents are lost.
 *
 *
 * - UM_E_INVALID: n is 0.
 * - UM_E_FULL: as um_kv_append; UM_KV_FULL if n is above a ring's n_rows.
 * - UM_E_STATE: UM_KV_RESERVED, UM_KV_UNEVEN. */
UM_API UM_CHECKED um_status um_kv_reserve(um_kv *kv, uint64_t n, uint64_t *out_row, um_error *err);
/* Shows the first n of the reserved rows, in all layers at once. UM_E_INVALID: n is above what was
 * reserved. UM_E_STATE: UM_KV_UNRESERVED. */
UM_API UM_CHECKED um_status um_kv_commit(um_kv *kv, uint64_t n, um_error *err);
/* Drops the reservation, and tokens that not all layers hold. */
UM_API void um_kv_rollback(um_kv *kv);
/* Drops the reservation, the tokens from `position` on, and those that not all layers hold. A ring
 * may lack tokens that it then has to show: see um_kv_lost_before. */
UM_API void um_kv_rollback_to(um_kv *kv, uint64_t position);

/* Returns the number of tokens that all layers hold, and a ring shows. */
UM_API uint64_t um_kv_seq_len(const um_kv *kv);
/* Returns the position behind the last of these. */
UM_API uint64_t um_kv_next_position(const um_kv *kv);
/* Returns the position of the first of these: next_position - seq_len. */
UM_API uint64_t um_kv_first_position(const um_kv *kv);
/* Returns the first position that every layer still has. A crop may show it in the window again. */
UM_API uint64_t um_kv_oldest_position(const um_kv *kv);
/* Returns the number of tokens that one layer holds, and a ring shows; 0 for no such layer.
 * *out_first_position (may be NULL) is the position of the first. */
UM_API uint64_t um_kv_layer_len(const um_kv *kv, uint32_t layer, uint64_t *out_first_position);

/* Copies n tokens of K or V of a layer, from `position` on, to out [batch, heads, n, head_dim], as
 * float32, float16, bfloat16 or the type of K, or V. UM_E_INVALID: there is no such layer or type,
 * or the layer does not hold the tokens. */
UM_API UM_CHECKED um_status um_kv_read(const um_kv *kv, uint32_t layer, int v, uint64_t position,
                                       uint64_t n, void *out, um_dtype type, um_error *err);

/* Keeps the first n of the seq_len tokens. next_position goes back by what is dropped, and a ring
 * shows the `window` tokens before it again.
 *
 *
 * - UM_E_INVALID: n is above seq_len.
 * - UM_E_INVALID, UM_KV_OVERWRITTEN: err->limit is the smallest n that works.
 * - UM_E_STATE: UM_KV_RESERVED, UM_KV_UNEVEN. */
UM_API UM_CHECKED um_status um_kv_crop(um_kv *kv, uint64_t n, um_error *err);
/* Drops the tokens from `position` on, even if a ring no longer shows that one.
 *
 * - UM_E_INVALID: it is above um_kv_next_position, or below um_kv_lowest_crop.
 * - UM_E_STATE: as um_kv_crop. */
UM_API UM_CHECKED um_status um_kv_crop_to(um_kv *kv, uint64_t position, um_error *err);
/* Returns the lowest position that um_kv_crop_to takes. */
UM_API uint64_t um_kv_lowest_crop(const um_kv *kv);
/* Keeps the first keep_first and the last n of the seq_len tokens, or all if that is more.
 * next_position stays. Only the keep_first tokens move: they are copied to the rows before the last
 * n, and get the positions there.
 *
 *
 * - UM_E_INVALID: keep_first of a ring is not 0.
 * - UM_E_STATE: as um_kv_crop.
 * - Other statuses: as the mover (um_kv_set_mover). */
UM_API UM_CHECKED um_status um_kv_trim(um_kv *kv, uint64_t n, uint64_t keep_first, um_error *err);
/* Drops all tokens and the reservation. The next position is 0. */
UM_API void um_kv_clear(um_kv *kv);

/* ---- kv: for the owner of the storage ---- */

/* Allows writing to rows [0, n) from now on. UM_E_INVALID: the cache is a ring; n is above n_rows,
 * or below the end of tokens or reserved rows. */
UM_API UM_CHECKED um_status um_kv_set_usable(um_kv *kv, uint64_t n, um_error *err);
/* The next three are for a ring beside a plain cache of other layers, which decides how far tokens
 * go back and on. */

/* Returns the position before which a ring lacks tokens that it would show if it ended at `end`,
 * which is at most um_kv_next_position; 0 if it has all of them. */
UM_API uint64_t um_kv_lost_before(const um_kv *kv, uint64_t end);
/* Declares that a ring's tokens begin at `first`, and that those before `held` are lost. Both are
 * at most um_kv_next_position. */
UM_API void um_kv_set_first(um_kv *kv, uint64_t first, uint64_t held);
/* Refuses tokens from `position` on, as if the rows were used up (UM_KV_ROWS); UINT64_MAX, the
 * initial value, refuses none. */
UM_API void um_kv_limit_end(um_kv *kv, uint64_t position);
/* Moves the tokens of a plain cache so that the first lies in `row`. An empty cache begins there.
 *
 * - UM_E_INVALID: the cache is a ring, or rows are not usable. UM_E_STATE: UM_KV_RESERVED.
 * - Other statuses: as the mover (um_kv_set_mover). */
UM_API UM_CHECKED um_status um_kv_move(um_kv *kv, uint64_t row, um_error *err);
/* Sets the function that moves rows, for storage that memmove cannot reach or touch safely.
 *
 * um_kv_trim with keep_first, and um_kv_move, call `mover` (NULL: memmove) for each lane, and
 * return its status if it fails. Lengths and positions are then as before, but the target rows may
 * have been written, and their tokens are lost. So a mover fails before its first byte, or gives
 * the cache up. Only these, um_kv_append, um_kv_append_all and um_kv_read touch the storage. */
UM_API void um_kv_set_mover(um_kv *kv, um_kv_mover *mover, void *context);
/* Declares that the rows hold n tokens before next_position: a plain cache in rows [0, n), a ring
 * in the rows of their positions. Tokens before these were dropped, unless they fill the window of
 * a ring: then the ring lacks them, as if it had overwritten them, and no crop shows a part of a
 * window. UM_E_INVALID: n is above next_position, max_seq_len, the usable rows or the window. */
UM_API UM_CHECKED um_status um_kv_adopt(um_kv *kv, uint64_t next_position, uint64_t n,
                                        um_error *err);

/* ---- paged kv ---- */

/* K and V of many sequences, in blocks of tokens that they share, in storage of the caller's.
 *
 * A block has block_tokens tokens of all layers: [n_layers, 2, n_kv_heads, block_tokens, head_dim],
 * K before V, at base + id * block_bytes. So copy-on-write is one memcpy, and gathering and
 * attention read runs of block_tokens rows of a head. With strides this is [n_blocks, block_tokens,
 * n_kv_heads, head_dim] for each layer, as kernels with block tables take it. K and V may differ in
 * type and size.
 *
 * A sequence is a table of block ids. A sequence that appends to a shared block gets a copy first.
 * A block that no sequence holds any more is free or, if it is cached (um_paged_cache), evictable:
 *
 * - An evictable block keeps its tokens until a block is needed and none is free. The block that
 *   has been evictable for longest is then taken, and is no longer cached.
 * - The blocks that a sequence gives back are evicted from its end on.
 * - An index of cached blocks asks um_paged_is_cached for a block that it has found.
 * - A block also stops being cached if the only sequence that holds it was cropped into it and
 *   appends.
 *
 * Threads: the pool with all of its sequences has one writer. Beside it, any number of threads may
 * call um_paged_append_write (each between its own begin and end) and, for sequences that are not
 * cropped, cleared or freed meanwhile, um_paged_gather, um_paged_seq_len and um_paged_layer_len. */
typedef struct um_paged_spec {
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t n_blocks, block_tokens; /* n_blocks: below 2^31 - 1 */
    um_dtype type;                   /* of K; of blocks: head_dim is a multiple of 32 */
    um_dtype v_type;                 /* of V */
} um_paged_spec;

typedef struct um_paged_block um_paged_block; /* the state of a block */

typedef struct um_paged {
    um_paged_spec spec;   /* read */
    unsigned char *base;  /* read */
    size_t head_bytes;    /* read: K of one head of one token */
    size_t v_head_bytes;  /* read: the same of V */
    size_t lane_bytes;    /* read: K of one layer in a block */
    size_t v_lane_bytes;  /* read: the same of V */
    size_t block_bytes;   /* read: a multiple of 64 */
    uint32_t n_free;      /* read: blocks that hold nothing */
    uint32_t n_evictable; /* read: blocks that are cached, and that no sequence holds */
    um_paged_block *blocks;
} um_paged;

typedef struct um_paged_seq {
    um_paged *paged;
    uint32_t n_blocks;         /* read: entries of the table */
    int32_t *table;            /* read: block ids; never moves, since it has room for all blocks */
    UM_ATOMIC(uint64_t) * len; /* of each layer, in tokens */
} um_paged_seq;

/* Computes the bytes that n_blocks blocks need. UM_E_INVALID: a dimension is 0, a product
 * overflows, there are too many blocks, the type is unknown, or head_dim is not whole blocks of the
 * type. */
UM_API UM_CHECKED um_status um_paged_storage_bytes(const um_paged_spec *spec, size_t *out,
                                                   um_error *err);
/* Makes a pool of free blocks over that many bytes of storage, aligned to 64. It allocates a few
 * words for each block: call um_paged_free. UM_E_INVALID: as um_paged_storage_bytes; the storage is
 * NULL or not aligned. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_paged_init(um_paged *paged, const um_paged_spec *spec, void *storage,
                                          um_error *err);
/* Frees what um_paged_init allocated; the sequences are of no use then. The storage and a zeroed
 * paged are left alone. */
UM_API void um_paged_free(um_paged *paged);

/* Returns the address of K (v = 0) or V (v = 1) of a layer in a block; NULL if there is no such
 * lane. */
UM_API void *um_paged_lane(const um_paged *paged, uint32_t block, uint32_t layer, int v);
/* Returns how many sequences hold a block; 0 for no such block. */
UM_API uint32_t um_paged_n_holders(const um_paged *paged, uint32_t block);
/* Returns how many blocks sequences hold. */
UM_API uint32_t um_paged_n_in_use(const um_paged *paged);

UM_API int um_paged_is_cached(const um_paged *paged, uint32_t block);
/* Caches a block that a sequence holds. UM_E_INVALID: there is no such block. UM_E_STATE:
 * UM_PAGED_UNHELD. */
UM_API UM_CHECKED um_status um_paged_cache(um_paged *paged, uint32_t block, um_error *err);
/* Undoes um_paged_cache. A block that no sequence holds becomes free. */
UM_API void um_paged_uncache(um_paged *paged, uint32_t block);

/* Makes a sequence that begins with n_blocks full blocks (may be 0), in the order of their tokens.
 * The blocks are held or cached. The sequence allocates nothing later: call um_paged_seq_free.
 * UM_E_INVALID: there is no such block, it is free, or is in the table twice. UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_paged_seq_init(um_paged_seq *out, um_paged *paged,
                                              const int32_t *blocks, uint32_t n_blocks,
                                              um_error *err);
/* Makes a sequence with the same tokens in the same blocks. UM_E_STATE: UM_PAGED_UNEVEN.
 * UM_E_NOMEM. */
UM_API UM_CHECKED um_status um_paged_seq_fork(um_paged_seq *out, const um_paged_seq *seq,
                                              um_error *err);
/* Drops all tokens, and gives all blocks back. */
UM_API void um_paged_seq_clear(um_paged_seq *seq);
/* Clears the sequence and frees its memory. A zeroed seq is left alone. */
UM_API void um_paged_seq_free(um_paged_seq *seq);

UM_API uint64_t um_paged_seq_len(const um_paged_seq *seq); /* tokens that all layers hold */
UM_API uint64_t um_paged_layer_len(const um_paged_seq *seq, uint32_t layer);
/* Returns whether the next append to this layer copies a shared block. */
UM_API int um_paged_will_copy(const um_paged_seq *seq, uint32_t layer);

/* Appends n tokens to one layer, like um_kv_append with batch 1. A failure changes nothing.
 *
 * - UM_E_INVALID: there is no such layer, type or order.
 * - UM_E_FULL, UM_PAGED_FULL: limit is n_blocks, used is what sequences hold, and asked is what the
 *   call needs, the copy of a shared block included. */
UM_API UM_CHECKED um_status um_paged_append(um_paged_seq *seq, uint32_t layer, const void *k,
                                            const void *v, um_dtype type, um_kv_order order,
                                            uint64_t n, um_error *err);
/* Appends one token to all layers, k and v [n_layers, heads, head_dim]. UM_E_INVALID, UM_E_FULL: as
 * um_paged_append. UM_E_STATE: UM_PAGED_UNEVEN. */
UM_API UM_CHECKED um_status um_paged_append_all(um_paged_seq *seq, const void *k, const void *v,
                                                um_dtype type, um_error *err);

/* Tokens that are being appended. */
typedef struct um_paged_pending {
    um_paged_seq *seq;
    const void *rows[2]; /* K and V */
    um_dtype types[2];
    um_kv_order order;
    uint32_t layer, n_layers;
    uint64_t at, n;
    uint32_t first_block; /* of the first token: the table's, or one that takes its place */
} um_paged_pending;

/* Begins an append in three steps, for callers that hold no lock while tokens are copied.
 *
 * um_paged_append_begin takes blocks, and is the only step that fails. um_paged_append_write writes
 * where no thread reads yet. um_paged_append_end shows the tokens. Between the first and the last
 * step, k and v stay as they are, and tokens may be gathered from the sequence, and nothing else be
 * done with it. Other sequences of the pool may be used beside the second step only. UM_E_INVALID,
 * UM_E_FULL: as um_paged_append. */
UM_API UM_CHECKED um_status um_paged_append_begin(um_paged_pending *out, um_paged_seq *seq,
                                                  uint32_t layer, const void *k, const void *v,
                                                  um_dtype type, um_kv_order order, uint64_t n,
                                                  um_error *err);
/* Begins the same with rows in the stored types: K of the pool's type, and V of its own.
 * UM_E_INVALID, UM_E_FULL: as um_paged_append. */
UM_API UM_CHECKED um_status um_paged_append_stored_begin(um_paged_pending *out, um_paged_seq *seq,
                                                         uint32_t layer, const void *k,
                                                         const void *v, um_kv_order order,
                                                         uint64_t n, um_error *err);
/* Begins um_paged_append_all in three steps, with its errors. */
UM_API UM_CHECKED um_status um_paged_append_all_begin(um_paged_pending *out, um_paged_seq *seq,
                                                      const void *k, const void *v, um_dtype type,
                                                      um_error *err);
UM_API void um_paged_append_write(const um_paged_pending *pending);
UM_API void um_paged_append_end(const um_paged_pending *pending);

/* Drops tokens that not all layers hold. */
UM_API void um_paged_rollback(um_paged_seq *seq);
/* Keeps the first n tokens, and gives back the blocks behind them. UM_E_INVALID: there are fewer
 * tokens. UM_E_STATE: UM_PAGED_UNEVEN. */
UM_API UM_CHECKED um_status um_paged_crop(um_paged_seq *seq, uint64_t n, um_error *err);

/* Copies the first n tokens of K or V of a layer to out [heads, n, head_dim].
 *
 * Heads are head_stride bytes apart. The tokens are converted to float32, float16, bfloat16 or the
 * type of K, or V. The call may run beside a writer that does not crop, clear or free this
 * sequence.
 *
 * UM_E_INVALID: there is no such layer or type, the layer does not hold the tokens, or head_stride
 * is below what n tokens need. */
UM_API UM_CHECKED um_status um_paged_gather(const um_paged_seq *seq, uint32_t layer, int v,
                                            uint64_t n, void *out, size_t head_stride,
                                            um_dtype type, um_error *err);

#ifdef __cplusplus
}
#endif
#endif
