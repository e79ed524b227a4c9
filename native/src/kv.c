/* The contiguous KV cache: fixed storage, appended to row by row. A token counts when every layer
 * holds it. */
#include "internal.h"

#include <stdatomic.h>

enum { PART_ALIGN = 64 };

/* Sizes that follow from a spec; false when one of them does not fit. */
typedef struct kv_sizes {
    size_t row_bytes, part_bytes, lens_offset, total;
} kv_sizes;

static bool sizes_of(const um_kv_spec *spec, kv_sizes *out) {
    size_t item = um_float_bytes(spec->type), rows, part, parts, lens;
    kv_sizes s;
    if (item == 0 || spec->n_layers == 0 || spec->n_kv_heads == 0 || spec->head_dim == 0 ||
        spec->batch == 0 || spec->max_seq_len == 0) {
        return false;
    }
    if (!um_mul(spec->n_kv_heads, spec->head_dim, &s.row_bytes) ||
        !um_mul(s.row_bytes, item, &s.row_bytes) ||
        !um_mul(spec->batch, spec->max_seq_len, &rows) || !um_mul(rows, s.row_bytes, &part) ||
        !um_round_up(part, PART_ALIGN, &s.part_bytes) || !um_mul(s.part_bytes, 2, &parts) ||
        !um_mul(parts, spec->n_layers, &s.lens_offset) ||
        !um_mul(sizeof(uint64_t), spec->n_layers, &lens) ||
        !um_add(s.lens_offset, lens, &s.total)) {
        return false;
    }
    *out = s;
    return true;
}

um_status um_kv_storage_bytes(const um_kv_spec *spec, size_t *out, um_error *err) {
    kv_sizes sizes;
    if (!sizes_of(spec, &sizes)) {
        return um_fail(err, UM_E_INVALID, "a dimension is 0, or their product does not fit");
    }
    *out = sizes.total;
    return UM_OK;
}

um_status um_kv_init(um_kv *kv, const um_kv_spec *spec, void *storage, size_t storage_bytes,
                     um_error *err) {
    kv_sizes sizes;
    if (!sizes_of(spec, &sizes)) {
        return um_fail(err, UM_E_INVALID, "a dimension is 0, or their product does not fit");
    }
    if (storage == NULL || (uintptr_t)storage % PART_ALIGN != 0) {
        return um_fail(err, UM_E_INVALID, "storage is not aligned to 64 bytes");
    }
    if (storage_bytes < sizes.total) {
        return um_fail_full(err, storage_bytes, 0, sizes.total, "kv storage");
    }
    kv->spec = *spec;
    kv->base = storage;
    kv->row_bytes = sizes.row_bytes;
    kv->part_bytes = sizes.part_bytes;
    kv->layer_len = (void *)(kv->base + sizes.lens_offset);
    um_kv_clear(kv);
    return UM_OK;
}

void *um_kv_part(const um_kv *kv, uint32_t layer, int v) {
    if (layer >= kv->spec.n_layers) {
        return NULL;
    }
    return kv->base + ((size_t)layer * 2 + (v != 0)) * kv->part_bytes;
}

uint64_t um_kv_layer_len(const um_kv *kv, uint32_t layer) {
    return layer < kv->spec.n_layers
               ? atomic_load_explicit(&kv->layer_len[layer], memory_order_acquire)
               : 0;
}

uint64_t um_kv_seq_len(const um_kv *kv) {
    uint64_t len = um_kv_layer_len(kv, 0);
    for (uint32_t layer = 1; layer < kv->spec.n_layers; layer++) {
        uint64_t other = um_kv_layer_len(kv, layer);
        len = other < len ? other : len;
    }
    return len;
}

static void set_layer_len(um_kv *kv, uint32_t layer, uint64_t len) {
    /* Release: who reads this length sees the rows below it. */
    atomic_store_explicit(&kv->layer_len[layer], len, memory_order_release);
}

static void set_all_lens(um_kv *kv, uint64_t len) {
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        set_layer_len(kv, layer, len);
    }
}

static bool layers_differ(const um_kv *kv) {
    uint64_t len = um_kv_layer_len(kv, 0);
    for (uint32_t layer = 1; layer < kv->spec.n_layers; layer++) {
        if (um_kv_layer_len(kv, layer) != len) {
            return true;
        }
    }
    return false;
}

static um_status check_append(const um_kv *kv, um_float type, um_error *err) {
    if (um_float_bytes(type) == 0) {
        return um_fail(err, UM_E_INVALID, "type");
    }
    if (atomic_load_explicit(&kv->reserved, memory_order_relaxed) != 0) {
        return um_fail(err, UM_E_STATE, "rows are reserved: commit or roll back first");
    }
    return UM_OK;
}

static um_status check_room(const um_kv *kv, uint64_t len, uint64_t n, um_error *err) {
    if (n > kv->spec.max_seq_len - len) {
        return um_fail_full(err, kv->spec.max_seq_len, len, n, "kv");
    }
    return UM_OK;
}

/* Writes n tokens of one part from row `row` on. The types were checked, so no conversion fails. */
static void write_rows(const um_kv *kv, unsigned char *part, uint64_t row, const unsigned char *in,
                       um_float type, um_kv_order order, uint64_t n) {
    const um_kv_spec *s = &kv->spec;
    size_t heads = s->n_kv_heads, dim = s->head_dim, in_item = um_float_bytes(type);
    if (order == UM_KV_TOKEN_MAJOR || (n == 1 && s->batch == 1)) {
        um_convert(part + row * kv->row_bytes, s->type, in, type, (size_t)n * heads * dim, NULL);
        return;
    }
    size_t out_head = kv->row_bytes / heads;
    for (size_t b = 0; b < s->batch; b++) {
        for (size_t t = 0; t < n; t++) {
            unsigned char *out = part + (b * s->max_seq_len + row + t) * kv->row_bytes;
            for (size_t h = 0; h < heads; h++) {
                const unsigned char *from = in + ((b * heads + h) * n + t) * dim * in_item;
                um_convert(out + h * out_head, s->type, from, type, dim, NULL);
            }
        }
    }
}

um_status um_kv_append(um_kv *kv, uint32_t layer, const void *k, const void *v, um_float type,
                       um_kv_order order, uint64_t n, um_error *err) {
    if (layer >= kv->spec.n_layers) {
        return um_fail(err, UM_E_INVALID, "layer");
    }
    if (order != UM_KV_HEAD_MAJOR && (order != UM_KV_TOKEN_MAJOR || kv->spec.batch != 1)) {
        return um_fail(err, UM_E_INVALID, "order");
    }
    uint64_t len = um_kv_layer_len(kv, layer);
    um_status status = check_append(kv, type, err);
    if (status == UM_OK) {
        status = check_room(kv, len, n, err);
    }
    if (status != UM_OK || n == 0) {
        return status;
    }
    write_rows(kv, um_kv_part(kv, layer, 0), len, k, type, order, n);
    write_rows(kv, um_kv_part(kv, layer, 1), len, v, type, order, n);
    set_layer_len(kv, layer, len + n);
    return UM_OK;
}

um_status um_kv_append_all(um_kv *kv, const void *k, const void *v, um_float type, um_error *err) {
    if (kv->spec.batch != 1) {
        return um_fail(err, UM_E_INVALID, "batch is not 1");
    }
    uint64_t len = um_kv_layer_len(kv, 0);
    um_status status = check_append(kv, type, err);
    if (status == UM_OK && layers_differ(kv)) {
        status = um_fail(err, UM_E_STATE, "layers differ in length: roll back first");
    }
    if (status == UM_OK) {
        status = check_room(kv, len, 1, err);
    }
    if (status != UM_OK) {
        return status;
    }
    size_t in_row = (size_t)kv->spec.n_kv_heads * kv->spec.head_dim * um_float_bytes(type);
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        const unsigned char *k_row = (const unsigned char *)k + layer * in_row;
        const unsigned char *v_row = (const unsigned char *)v + layer * in_row;
        write_rows(kv, um_kv_part(kv, layer, 0), len, k_row, type, UM_KV_TOKEN_MAJOR, 1);
        write_rows(kv, um_kv_part(kv, layer, 1), len, v_row, type, UM_KV_TOKEN_MAJOR, 1);
    }
    set_all_lens(kv, len + 1);
    return UM_OK;
}

um_status um_kv_reserve(um_kv *kv, uint64_t n, uint64_t *out_row, um_error *err) {
    uint64_t len = um_kv_layer_len(kv, 0);
    if (n == 0) {
        return um_fail(err, UM_E_INVALID, "n is 0");
    }
    if (atomic_load_explicit(&kv->reserved, memory_order_relaxed) != 0) {
        return um_fail(err, UM_E_STATE, "rows are reserved: commit or roll back first");
    }
    if (layers_differ(kv)) {
        return um_fail(err, UM_E_STATE, "layers differ in length: roll back first");
    }
    um_status status = check_room(kv, len, n, err);
    if (status != UM_OK) {
        return status;
    }
    atomic_store_explicit(&kv->reserved, n, memory_order_relaxed);
    *out_row = len;
    return UM_OK;
}

um_status um_kv_commit(um_kv *kv, uint64_t n, um_error *err) {
    uint64_t reserved = atomic_load_explicit(&kv->reserved, memory_order_relaxed);
    if (reserved == 0) {
        return um_fail(err, UM_E_STATE, "nothing is reserved");
    }
    if (n > reserved) {
        return um_fail(err, UM_E_INVALID, "n is above what was reserved");
    }
    set_all_lens(kv, um_kv_layer_len(kv, 0) + n);
    atomic_store_explicit(&kv->reserved, 0, memory_order_relaxed);
    return UM_OK;
}

void um_kv_rollback(um_kv *kv) {
    atomic_store_explicit(&kv->reserved, 0, memory_order_relaxed);
    set_all_lens(kv, um_kv_seq_len(kv));
}

um_status um_kv_crop(um_kv *kv, uint64_t n, um_error *err) {
    if (atomic_load_explicit(&kv->reserved, memory_order_relaxed) != 0) {
        return um_fail(err, UM_E_STATE, "rows are reserved: commit or roll back first");
    }
    if (layers_differ(kv)) {
        return um_fail(err, UM_E_STATE, "layers differ in length: roll back first");
    }
    if (n > um_kv_layer_len(kv, 0)) {
        return um_fail(err, UM_E_INVALID, "n is above seq_len");
    }
    set_all_lens(kv, n);
    return UM_OK;
}

void um_kv_clear(um_kv *kv) {
    atomic_store_explicit(&kv->reserved, 0, memory_order_relaxed);
    set_all_lens(kv, 0);
}
