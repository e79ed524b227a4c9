/* The contiguous KV cache: tokens are appended as rows, in storage of the caller's.
 *
 *     a lane of a plain cache, where position p is in row p - shift:
 *     row 0        first - shift         end - shift         usable_rows       n_rows
 *     | cropped    | tokens              | may be written    | not yet         |
 *
 *     a lane of a ring, where position p is in row p % n_rows, and all rows are mapped twice:
 *     row 0            end % n_rows        n_rows                              2 * n_rows
 *     | newest tokens  | oldest tokens ... | newest tokens   | the same rows again ... |
 *
 * An append moves `end` of one layer, and `top` where it overwrites; a token counts once every
 * layer has it. A crop moves `end` back, a trim moves `first` on, and no bytes move but kept first
 * tokens. Readers need no lock: `end` is stored behind the rows that it covers. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "values/convert.h"
#include "values/rotate.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { LANE_ALIGN = 64 };

/* ---- sizes ---- */

static const char *const DIMS = "a dimension is 0, or their product does not fit";

static um_dtype type_of(const um_kv_spec *spec, int v) {
    return v != 0 ? spec->v_type : spec->type;
}

static uint32_t head_dim_of(const um_kv_spec *spec, int v) {
    if (v == 0 || spec->v_head_dim == 0) {
        return spec->head_dim;
    }
    return spec->v_head_dim == UM_KV_NO_V ? 0 : spec->v_head_dim;
}

um_status um_kv_row_bytes(const um_kv_spec *spec, int v, size_t *out, um_error *err) {
    um_dtype type = type_of(spec, v);
    uint32_t head_dim = head_dim_of(spec, v);
    size_t values = um_dtype_block_values(type), row;
    UM__INVALID_IF(values == 0, err, "type");
    UM__INVALID_IF(spec->n_layers == 0 || spec->n_kv_heads == 0 || spec->head_dim == 0 ||
                       spec->batch == 0 || spec->max_seq_len == 0,
                   err, DIMS);
    UM__INVALID_IF(spec->window > spec->max_seq_len, err, "window is above max_seq_len");
    UM__INVALID_IF(head_dim % values != 0, err, "head_dim is not a multiple of the type's blocks");
    UM__INVALID_IF(spec->rotate != 0 && um_rotation_block(head_dim, v) == 0, err,
                   "rotate: head_dim is not a multiple of 64");
    UM__INVALID_IF(!um__mul(spec->n_kv_heads, head_dim / values, &row) ||
                       !um__mul(row, um_dtype_block_bytes(type), &row),
                   err, DIMS);
    *out = row;
    return UM_OK;
}

/* Computes the bytes of all lanes of K, or of V. */
static bool mul_lanes(const um_kv_spec *spec, size_t lane, size_t *out) {
    size_t n;
    return um__mul(spec->n_layers, spec->batch, &n) && um__mul(n, lane, out);
}

um_status um_kv_storage_bytes(const um_kv_spec *spec, size_t *out, um_error *err) {
    size_t row, lane, lanes[2];
    for (int v = 0; v < 2; v++) {
        UM__TRY(um_kv_row_bytes(spec, v, &row, err));
        UM__INVALID_IF(!um__mul(row, (size_t)spec->max_seq_len, &lane) ||
                           !um__round_up(lane, LANE_ALIGN, &lane) ||
                           !mul_lanes(spec, lane, &lanes[v]) || lanes[v] > PTRDIFF_MAX,
                       err, DIMS);
    }
    UM__INVALID_IF(lanes[0] + lanes[1] > PTRDIFF_MAX, err, DIMS);
    *out = lanes[0] + lanes[1];
    return UM_OK;
}

/* Checks the lanes of K or of V. */
static um_status check_lanes(const um_kv_spec *spec, const um_kv_storage *storage, size_t row,
                             size_t stride, um_error *err) {
    size_t lane, total;
    UM__INVALID_IF(storage->base == NULL || (uintptr_t)storage->base % LANE_ALIGN != 0 ||
                       stride % LANE_ALIGN != 0,
                   err, "storage is not aligned to 64 bytes");
    UM__INVALID_IF(storage->usable_rows > storage->n_rows || storage->n_rows > SIZE_MAX / 2 ||
                       storage->n_rows < (spec->window != 0 ? spec->window : 1) ||
                       (spec->window != 0 && storage->usable_rows != storage->n_rows),
                   err, "rows of the storage");
    size_t n_mapped = (size_t)storage->n_rows * (spec->window != 0 ? 2 : 1);
    UM__INVALID_IF(!um__mul(row, n_mapped, &lane) || lane > stride ||
                       !mul_lanes(spec, stride, &total) || total > SIZE_MAX / 2,
                   err, "lane_stride has no room for the rows");
    return UM_OK;
}

um_status um_kv_init(um_kv *kv, const um_kv_spec *spec, const um_kv_storage *storage,
                     um_error *err) {
    size_t row, v_row;
    UM__TRY(um_kv_row_bytes(spec, 0, &row, err));
    UM__TRY(um_kv_row_bytes(spec, 1, &v_row, err));
    UM__TRY(check_lanes(spec, storage, row, storage->lane_stride, err));
    UM__TRY(check_lanes(spec, storage, v_row, storage->v_lane_stride, err));
    /* One allocation holds both tables. */
    UM_ATOMIC(uint64_t) *words = um__heap_alloc((size_t)spec->n_layers * 2, sizeof *words);
    UM__RETURN_IF(words == NULL,
                  um__fail_os(err, ENOMEM, (size_t)spec->n_layers * 2 * sizeof *words, "calloc"));
    *kv = (um_kv){.spec = *spec,
                  .base = storage->base,
                  .row_bytes = row,
                  .v_row_bytes = v_row,
                  .lane_stride = storage->lane_stride,
                  .v_lane_stride = storage->v_lane_stride,
                  .n_rows = storage->n_rows,
                  .usable_rows = storage->usable_rows,
                  .end_limit = UINT64_MAX,
                  .end = words,
                  .top = words + spec->n_layers};
    um_kv_set_mover(kv, NULL, NULL);
    return UM_OK;
}

void um_kv_free(um_kv *kv) {
    um__heap_free((void *)kv->end);
    memset(kv, 0, sizeof *kv);
}

/* ---- rows and positions ---- */

static bool is_ring(const um_kv *kv) {
    return kv->spec.window != 0;
}

void *um_kv_lane(const um_kv *kv, uint32_t layer, int v, uint32_t stream) {
    if (layer >= kv->spec.n_layers || stream >= kv->spec.batch) {
        return NULL;
    }
    size_t batch = kv->spec.batch, of_k = kv->lane_stride, of_v = kv->v_lane_stride;
    size_t in_layer = v != 0 ? batch * of_k + stream * of_v : stream * of_k;
    return kv->base + layer * batch * (of_k + of_v) + in_layer;
}

static size_t row_bytes_of(const um_kv *kv, int v) {
    return v != 0 ? kv->v_row_bytes : kv->row_bytes;
}

uint64_t um_kv_row(const um_kv *kv, uint64_t position) {
    return is_ring(kv) ? position % kv->n_rows : position - kv->shift;
}

static uint64_t end_of(const um_kv *kv, uint32_t layer) {
    return atomic_load_explicit(&kv->end[layer], memory_order_acquire);
}

static uint64_t top_of(const um_kv *kv, uint32_t layer) {
    return atomic_load_explicit(&kv->top[layer], memory_order_relaxed);
}

static uint64_t first_of(const um_kv *kv) {
    return atomic_load_explicit(&kv->first, memory_order_relaxed);
}

/* Records that rows up to `top` are written, or may be. */
static void raise_top(um_kv *kv, uint32_t layer, uint64_t top) {
    if (top > top_of(kv, layer)) {
        atomic_store_explicit(&kv->top[layer], top, memory_order_relaxed);
    }
}

static void set_end(um_kv *kv, uint32_t layer, uint64_t end) {
    raise_top(kv, layer, end);
    /* Release: a reader of this end sees the rows below it. */
    atomic_store_explicit(&kv->end[layer], end, memory_order_release);
}

static void set_all_ends(um_kv *kv, uint64_t end) {
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        set_end(kv, layer, end);
    }
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Returns the first position whose row this layer still holds. */
static uint64_t oldest_of(const um_kv *kv, uint32_t layer) {
    uint64_t first = first_of(kv);
    uint64_t top = top_of(kv, layer);
    return is_ring(kv) && top > kv->n_rows ? max_u64(first, top - kv->n_rows) : first;
}

/* Returns the first position to show of those from `oldest` to `end`. */
static uint64_t first_shown(const um_kv *kv, uint64_t oldest, uint64_t end) {
    uint64_t window = kv->spec.window;
    if (window != 0 && end > window) {
        oldest = max_u64(oldest, end - window);
    }
    return oldest < end ? oldest : end;
}

/* Returns the least end of all layers. *out_most is the largest. */
static uint64_t ends_of(const um_kv *kv, uint64_t *out_most) {
    uint64_t least = *out_most = end_of(kv, 0);
    for (uint32_t layer = 1; layer < kv->spec.n_layers; layer++) {
        uint64_t end = end_of(kv, layer);
        least = end < least ? end : least;
        *out_most = max_u64(*out_most, end);
    }
    return least;
}

uint64_t um_kv_next_position(const um_kv *kv) {
    uint64_t most;
    return ends_of(kv, &most);
}

uint64_t um_kv_oldest_position(const um_kv *kv) {
    uint64_t oldest = oldest_of(kv, 0);
    for (uint32_t layer = 1; is_ring(kv) && layer < kv->spec.n_layers; layer++) {
        oldest = max_u64(oldest, oldest_of(kv, layer));
    }
    return oldest;
}

uint64_t um_kv_first_position(const um_kv *kv) {
    return first_shown(kv, um_kv_oldest_position(kv), um_kv_next_position(kv));
}

uint64_t um_kv_seq_len(const um_kv *kv) {
    uint64_t end = um_kv_next_position(kv);
    return end - first_shown(kv, um_kv_oldest_position(kv), end);
}

uint64_t um_kv_layer_len(const um_kv *kv, uint32_t layer, uint64_t *out_first_position) {
    if (layer >= kv->spec.n_layers) {
        return 0;
    }
    uint64_t end = end_of(kv, layer), first = first_shown(kv, oldest_of(kv, layer), end);
    if (out_first_position != NULL) {
        *out_first_position = first;
    }
    return end - first;
}

static um_status check_not_reserved(const um_kv *kv, um_error *err) {
    UM__RETURN_IF(atomic_load_explicit(&kv->reserved, memory_order_relaxed) != 0,
                  um__fail_detail(err, UM_E_STATE, UM_KV_RESERVED,
                                  "rows are reserved: commit or roll back first"));
    return UM_OK;
}

static um_status check_whole(const um_kv *kv, um_error *err) {
    uint64_t most;
    UM__TRY(check_not_reserved(kv, err));
    UM__RETURN_IF(
        ends_of(kv, &most) != most,
        um__fail_detail(err, UM_E_STATE, UM_KV_UNEVEN, "layers differ in length: roll back first"));
    return UM_OK;
}

/* Checks that n rows can be written behind `end`. */
static um_status check_room(const um_kv *kv, uint64_t end, uint64_t n, um_error *err) {
    if (!is_ring(kv)) {
        uint64_t used = end - first_of(kv);
        UM__RETURN_IF(n > kv->spec.max_seq_len - used,
                      um__fail_full(err, UM_KV_FULL, kv->spec.max_seq_len, used, n, "kv"));
        uint64_t row = um_kv_row(kv, end);
        UM__RETURN_IF(n > kv->usable_rows - row,
                      um__fail_full(err, UM_KV_ROWS, kv->usable_rows, row, n, "rows"));
    }
    UM__RETURN_IF(n > UINT64_MAX - end, um__fail_full(err, UM_KV_FULL, UINT64_MAX, end, n, "kv"));
    return end + n <= kv->end_limit ? UM_OK
                                    : um__fail_full(err, UM_KV_ROWS, kv->end_limit, end, n, "rows");
}

/* ---- appending ---- */

/* Checks that rows of K or V can be converted from this type, or to it. */
static um_status check_type(const um_kv *kv, int v, um_dtype type, um_error *err) {
    UM__INVALID_IF(um_dtype_block_values(type) != 1 && type != type_of(&kv->spec, v), err, "type");
    return UM_OK;
}

static um_status check_types(const um_kv *kv, um_dtype type, um_error *err) {
    UM__TRY(check_type(kv, 0, type, err));
    return check_type(kv, 1, type, err);
}

/* The rows given to an append: those of tokens [skip, n) go to the lanes, from row `row` on. */
typedef struct source {
    const unsigned char *rows;
    um_dtype type;
    um_kv_order order;
    uint64_t n, skip, row;
} source;

/* Converts n values, which are whole heads, and rotates them on the way. */
static void write_rotated(unsigned char *out, um_dtype type, const unsigned char *in,
                          um_dtype in_type, size_t n, size_t block) {
    float piece[UM_ROTATION_MOST];
    for (size_t done = 0; done < n; done += UM_ROTATION_MOST) {
        size_t part = n - done < UM_ROTATION_MOST ? n - done : UM_ROTATION_MOST;
        um__convert_values(piece, UM_F32, in + um__dtype_nbytes(in_type, done), in_type, part);
        um__rotate_values(piece, part, block);
        um__convert_values(out + um__dtype_nbytes(type, done), type, piece, UM_F32, part);
    }
}

/* Writes K or V of a layer. pre: the types were checked. */
static void write_rows(const um_kv *kv, uint32_t layer, int v, source in) {
    const um_kv_spec *s = &kv->spec;
    size_t heads = s->n_kv_heads, dim = head_dim_of(s, v), n = (size_t)in.n, skip = (size_t)in.skip;
    bool rotates = s->rotate != 0 && um_dtype_block_values(in.type) == 1;
    size_t block = rotates ? um_rotation_block((uint32_t)dim, v) : 0;
    size_t row = row_bytes_of(kv, v), in_head = um__dtype_nbytes(in.type, dim),
           out_head = row / heads;
    um_dtype type = type_of(s, v);
    /* The distances of streams, tokens and heads in the input, in heads. */
    bool by_token = in.order == UM_KV_TOKEN_MAJOR;
    size_t stream = by_token ? heads : heads * n, token = by_token ? s->batch * heads : 1;
    size_t head = by_token ? 1 : n;
    /* Values in the order of the storage are converted at once: a head, a token, or all. */
    size_t n_heads = head == 1 || heads == 1 ? heads : 1, n_tokens = token == heads ? n - skip : 1;
    for (uint32_t b = 0; b < s->batch; b++) {
        unsigned char *out = um_kv_lane(kv, layer, v, b);
        out += in.row * row;
        for (size_t t = skip; t < n; t += n_tokens) {
            for (size_t h = 0; h < heads; h += n_heads, out += n_tokens * n_heads * out_head) {
                const unsigned char *from = in.rows + (b * stream + t * token + h * head) * in_head;
                size_t n_values = n_tokens * n_heads * dim;
                if (rotates) {
                    write_rotated(out, type, from, in.type, n_values, block);
                } else {
                    um__convert_values(out, type, from, in.type, n_values);
                }
            }
        }
    }
}

/* Returns how many of n tokens, from the first on, a ring has no rows for. */
static uint64_t n_skipped(const um_kv *kv, uint64_t n) {
    return is_ring(kv) && n > kv->n_rows ? n - kv->n_rows : 0;
}

um_status um_kv_append_begin(const um_kv *kv, uint32_t layer, uint64_t n, uint64_t *out_row,
                             um_error *err) {
    UM__INVALID_IF(layer >= kv->spec.n_layers, err, "layer");
    uint64_t end = end_of(kv, layer);
    UM__TRY(check_not_reserved(kv, err));
    UM__TRY(check_room(kv, end, n, err));
    *out_row = um_kv_row(kv, end + n_skipped(kv, n));
    return UM_OK;
}

void um_kv_append_end(um_kv *kv, uint32_t layer, uint64_t n) {
    set_end(kv, layer, end_of(kv, layer) + n);
}

um_status um_kv_append(um_kv *kv, uint32_t layer, const void *k, const void *v, um_dtype type,
                       um_kv_order order, uint64_t n, um_error *err) {
    UM__INVALID_IF(order != UM_KV_HEAD_MAJOR && order != UM_KV_TOKEN_MAJOR, err, "order");
    source in = {.rows = k, .type = type, .order = order, .n = n, .skip = n_skipped(kv, n)};
    UM__TRY(check_types(kv, type, err));
    UM__TRY(um_kv_append_begin(kv, layer, n, &in.row, err));
    if (n != 0) {
        write_rows(kv, layer, 0, in);
        in.rows = v;
        write_rows(kv, layer, 1, in);
        um_kv_append_end(kv, layer, n);
    }
    return UM_OK;
}

um_status um_kv_append_all(um_kv *kv, const void *k, const void *v, um_dtype type, um_error *err) {
    uint64_t end = end_of(kv, 0);
    UM__TRY(check_types(kv, type, err));
    UM__TRY(check_whole(kv, err));
    UM__TRY(check_room(kv, end, 1, err));
    const um_kv_spec *s = &kv->spec;
    size_t heads = (size_t)s->batch * s->n_kv_heads;
    size_t k_row = um__dtype_nbytes(type, heads * head_dim_of(s, 0));
    size_t v_row = um__dtype_nbytes(type, heads * head_dim_of(s, 1));
    source in = {.type = type, .n = 1, .row = um_kv_row(kv, end)};
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        in.rows = (const unsigned char *)k + layer * k_row;
        write_rows(kv, layer, 0, in);
        in.rows = (const unsigned char *)v + layer * v_row;
        write_rows(kv, layer, 1, in);
    }
    set_all_ends(kv, end + 1);
    return UM_OK;
}

um_status um_kv_reserve(um_kv *kv, uint64_t n, uint64_t *out_row, um_error *err) {
    UM__INVALID_IF(n == 0, err, "n is 0");
    UM__TRY(check_whole(kv, err));
    uint64_t end = end_of(kv, 0);
    UM__RETURN_IF(is_ring(kv) && n > kv->n_rows,
                  um__fail_full(err, UM_KV_FULL, kv->n_rows, 0, n, "kv"));
    UM__TRY(check_room(kv, end, n, err));
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        raise_top(kv, layer, end + n);
    }
    atomic_store_explicit(&kv->reserved, n, memory_order_relaxed);
    *out_row = um_kv_row(kv, end);
    return UM_OK;
}

um_status um_kv_commit(um_kv *kv, uint64_t n, um_error *err) {
    uint64_t reserved = atomic_load_explicit(&kv->reserved, memory_order_relaxed);
    UM__RETURN_IF(reserved == 0,
                  um__fail_detail(err, UM_E_STATE, UM_KV_UNRESERVED, "nothing is reserved"));
    UM__INVALID_IF(n > reserved, err, "n is above what was reserved");
    set_all_ends(kv, end_of(kv, 0) + n);
    atomic_store_explicit(&kv->reserved, 0, memory_order_relaxed);
    return UM_OK;
}

/* Records that all layers hold the tokens [first, end), and that rows up to `top` were written. */
static void set_all(um_kv *kv, uint64_t first, uint64_t top, uint64_t end) {
    atomic_store_explicit(&kv->reserved, 0, memory_order_relaxed);
    atomic_store_explicit(&kv->first, first, memory_order_relaxed);
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        atomic_store_explicit(&kv->top[layer], top, memory_order_relaxed);
        set_end(kv, layer, end);
    }
}

void um_kv_rollback_to(um_kv *kv, uint64_t position) {
    uint64_t first = first_of(kv);
    uint64_t next = um_kv_next_position(kv);
    uint64_t end = max_u64(first, position < next ? position : next), top = end;
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        top = max_u64(top, top_of(kv, layer));
    }
    if (is_ring(kv) && top - end >= kv->n_rows) {
        first = top = end; /* some layer has overwritten all rows before */
    }
    set_all(kv, first, top, end);
}

void um_kv_rollback(um_kv *kv) {
    um_kv_rollback_to(kv, UINT64_MAX);
}

/* ---- reading ---- */

um_status um_kv_read(const um_kv *kv, uint32_t layer, int v, uint64_t position, uint64_t n,
                     void *out, um_dtype type, um_error *err) {
    const um_kv_spec *s = &kv->spec;
    UM__INVALID_IF(layer >= s->n_layers, err, "layer");
    UM__TRY(check_type(kv, v, type, err));
    uint64_t first = 0, len = um_kv_layer_len(kv, layer, &first);
    UM__INVALID_IF(position < first || position - first > len || n > len - (position - first), err,
                   "the layer does not hold these tokens");
    size_t heads = s->n_kv_heads, dim = head_dim_of(s, v);
    size_t row = row_bytes_of(kv, v), in_head = row / heads, out_head = um__dtype_nbytes(type, dim);
    size_t run = heads == 1 ? (size_t)n : 1; /* tokens that lie one after the other */
    unsigned char *to = out;
    for (uint32_t b = 0; b < s->batch; b++) {
        const unsigned char *rows = um_kv_lane(kv, layer, v, b);
        rows += um_kv_row(kv, position) * row;
        for (size_t h = 0; h < heads; h++) {
            for (size_t t = 0; t < (size_t)n; t += run, to += run * out_head) {
                const unsigned char *from = rows + t * row + h * in_head;
                um__convert_values(to, type, from, type_of(s, v), run * dim);
            }
        }
    }
    return UM_OK;
}

/* ---- forgetting ---- */

uint64_t um_kv_lowest_crop(const um_kv *kv) {
    uint64_t first = first_of(kv);
    uint64_t end = end_of(kv, 0), oldest = um_kv_oldest_position(kv);
    if (!is_ring(kv) || oldest <= first) {
        return first < end ? first : end;
    }
    /* Further back, the window would reach overwritten rows, before `oldest`. */
    return oldest < end && kv->spec.window < end - oldest ? oldest + kv->spec.window : end;
}

um_status um_kv_crop_to(um_kv *kv, uint64_t position, um_error *err) {
    UM__TRY(check_whole(kv, err));
    UM__INVALID_IF(position > end_of(kv, 0) || position < um_kv_lowest_crop(kv), err, "position");
    set_all_ends(kv, position);
    return UM_OK;
}

um_status um_kv_crop(um_kv *kv, uint64_t n, um_error *err) {
    UM__TRY(check_whole(kv, err));
    uint64_t end = end_of(kv, 0), len = um_kv_seq_len(kv);
    UM__INVALID_IF(n > len, err, "n is above seq_len");
    uint64_t least = um_kv_lowest_crop(kv);
    if (end - (len - n) >= least) {
        return um_kv_crop_to(kv, end - (len - n), err);
    }
    um__fail_detail(err, UM_E_INVALID, UM_KV_OVERWRITTEN,
                    "a ring has overwritten what it would have to show");
    if (err != NULL) {
        err->limit = len - (end - least);
    }
    return UM_E_INVALID;
}

static um_status move_bytes(void *context, void *to, const void *from, size_t nbytes) {
    (void)context;
    memmove(to, from, nbytes);
    return UM_OK;
}

/* Copies n rows in all lanes of a layer; the ranges may overlap. */
static um_status copy_rows(const um_kv *kv, uint32_t layer, uint64_t to, uint64_t from, uint64_t n,
                           um_error *err) {
    for (uint32_t stream = 0; n != 0 && to != from && stream < kv->spec.batch; stream++) {
        for (int v = 0; v < 2; v++) {
            unsigned char *rows = um_kv_lane(kv, layer, v, stream);
            size_t row = row_bytes_of(kv, v);
            unsigned char *there = rows + to * row, *here = rows + from * row;
            um_status status = kv->mover(kv->mover_context, there, here, (size_t)n * row);
            UM__RETURN_IF(status != UM_OK, um__fail(err, status, "moving rows"));
        }
    }
    return UM_OK;
}

um_status um_kv_trim(um_kv *kv, uint64_t n, uint64_t keep_first, um_error *err) {
    UM__INVALID_IF(is_ring(kv) && keep_first != 0, err,
                   "keep_first of a ring, whose rows follow from positions");
    UM__TRY(check_whole(kv, err));
    uint64_t len = um_kv_seq_len(kv);
    if (n >= len || keep_first >= len - n) {
        return UM_OK;
    }
    uint64_t end = end_of(kv, 0), first = end - n - keep_first;
    uint64_t to = um_kv_row(kv, first), from = um_kv_row(kv, um_kv_first_position(kv));
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        UM__TRY(copy_rows(kv, layer, to, from, keep_first, err));
    }
    atomic_store_explicit(&kv->first, first, memory_order_release);
    return UM_OK;
}

void um_kv_clear(um_kv *kv) {
    kv->shift = 0;
    set_all(kv, 0, 0, 0);
}

/* ---- for the owner of the storage ---- */

um_status um_kv_set_usable(um_kv *kv, uint64_t n, um_error *err) {
    uint64_t end = 0;
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        end = max_u64(end, um_kv_row(kv, end_of(kv, layer)));
    }
    end += atomic_load_explicit(&kv->reserved, memory_order_relaxed);
    UM__INVALID_IF(is_ring(kv) || n > kv->n_rows || n < end, err, "rows that can be written");
    kv->usable_rows = n;
    return UM_OK;
}

uint64_t um_kv_lost_before(const um_kv *kv, uint64_t end) {
    uint64_t first = first_of(kv);
    uint64_t oldest = um_kv_oldest_position(kv);
    if (oldest <= first_shown(kv, first, end)) {
        return 0;
    }
    return oldest < end ? oldest : end;
}

void um_kv_set_first(um_kv *kv, uint64_t first, uint64_t held) {
    for (uint32_t layer = 0; held > first && layer < kv->spec.n_layers; layer++) {
        raise_top(kv, layer, held + kv->n_rows); /* then `held` is the oldest */
    }
    atomic_store_explicit(&kv->first, first, memory_order_release);
}

void um_kv_limit_end(um_kv *kv, uint64_t position) {
    kv->end_limit = position;
}

um_status um_kv_move(um_kv *kv, uint64_t row, um_error *err) {
    uint64_t first = first_of(kv), longest = 0;
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        longest = max_u64(longest, end_of(kv, layer) - first);
    }
    UM__INVALID_IF(is_ring(kv) || row > kv->usable_rows || longest > kv->usable_rows - row, err,
                   "row");
    UM__TRY(check_not_reserved(kv, err));
    uint64_t from = um_kv_row(kv, first);
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        UM__TRY(copy_rows(kv, layer, row, from, end_of(kv, layer) - first, err));
    }
    kv->shift = first - row; /* may wrap around; um_kv_row wraps it back */
    return UM_OK;
}

void um_kv_set_mover(um_kv *kv, um_kv_mover *mover, void *context) {
    kv->mover = mover == NULL ? move_bytes : mover;
    kv->mover_context = context;
}

um_status um_kv_adopt(um_kv *kv, uint64_t next_position, uint64_t n, um_error *err) {
    uint64_t most = is_ring(kv) ? kv->spec.window : kv->usable_rows;
    UM__INVALID_IF(n > next_position || n > most || n > kv->spec.max_seq_len, err, "n");
    uint64_t first = kv->shift = next_position - n;
    if (is_ring(kv) && n == kv->spec.window && first <= UINT64_MAX - kv->n_rows) {
        /* Tokens before a whole window were not dropped, but these rows lack them. */
        set_all(kv, 0, first + kv->n_rows, next_position);
    } else {
        set_all(kv, first, next_position, next_position);
    }
    return UM_OK;
}
