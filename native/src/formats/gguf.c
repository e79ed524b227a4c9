/* Reads the header of a GGUF file, which is not trusted: bounds are checked before a value is read,
 * nothing is allocated for a count that the bytes in hand cannot hold, and no sum or product is
 * unchecked. The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md,
 * versions 2 and 3, which do not differ here. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "formats/names.h"
#include "unimem_formats.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "values are read as they lie in the file");

enum {
    HEADER_NBYTES_MAX = 256 << 20, /* the longest known header has 20 MB */
    NAME_NBYTES_MAX = 65535,
    ARRAY_DEPTH_MAX = 16,
    /* Many times what models have. Each entry costs readers far more than its few bytes. */
    TENSORS_MAX = 65536,
    KEYS_MAX = 4096,
    INNER_ARRAYS_MAX = 4096,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_UNIT = 8, /* so that a mapped tensor is aligned for every element type */
    /* Headers with a vocabulary are nearly all shorter. Further requests double the size. */
    SECOND_PIECE_NBYTES = 16 << 20,
    /* The least bytes of an entry of each kind. They bound how many entries there can be. */
    KV_NBYTES_MIN = 8 + 4 + 1,
    TENSOR_NBYTES_MIN = 8 + 4 + 4 + 8,
    STRING_NBYTES_MIN = 8,
    ARRAY_NBYTES_MIN = 4 + 8
};

static const char truncated[] = "the file ends inside its header";
static const char string_too_long[] = "a string is longer than the rest of the file";
static const char array_too_long[] = "an array is longer than the rest of the file";

/* ---- tensor types ---- */

/* Names, values and bytes of a block as ggml 0.26 has them (ggml.h, ggml-common.h). */
static const um_gguf_tensor_type tensor_types[] = {
    [0] = {"f32", 1, 4},         [1] = {"f16", 1, 2},         [2] = {"q4_0", 32, 18},
    [3] = {"q4_1", 32, 20},      [6] = {"q5_0", 32, 22},      [7] = {"q5_1", 32, 24},
    [8] = {"q8_0", 32, 34},      [9] = {"q8_1", 32, 36},      [10] = {"q2_K", 256, 84},
    [11] = {"q3_K", 256, 110},   [12] = {"q4_K", 256, 144},   [13] = {"q5_K", 256, 176},
    [14] = {"q6_K", 256, 210},   [15] = {"q8_K", 256, 292},   [16] = {"iq2_xxs", 256, 66},
    [17] = {"iq2_xs", 256, 74},  [18] = {"iq3_xxs", 256, 98}, [19] = {"iq1_s", 256, 50},
    [20] = {"iq4_nl", 32, 18},   [21] = {"iq3_s", 256, 110},  [22] = {"iq2_s", 256, 82},
    [23] = {"iq4_xs", 256, 136}, [24] = {"i8", 1, 1},         [25] = {"i16", 1, 2},
    [26] = {"i32", 1, 4},        [27] = {"i64", 1, 8},        [28] = {"f64", 1, 8},
    [29] = {"iq1_m", 256, 56},   [30] = {"bf16", 1, 2},       [34] = {"tq1_0", 256, 54},
    [35] = {"tq2_0", 256, 66},   [39] = {"mxfp4", 32, 17},    [40] = {"nvfp4", 64, 36},
    [41] = {"q1_0", 128, 18},    [42] = {"q2_0", 64, 18},
};
static const uint32_t n_tensor_types = sizeof(tensor_types) / sizeof(tensor_types[0]);

const um_gguf_tensor_type *um_gguf_type_of_tensor(uint32_t type) {
    return type < n_tensor_types && tensor_types[type].name != NULL ? &tensor_types[type] : NULL;
}

/* ---- bytes ---- */

typedef struct reader {
    const unsigned char *bytes;
    uint64_t nbytes, file_nbytes, at;
    um_error *err;
    unsigned n_inner_arrays;
} reader;

static uint64_t min_u64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Checks that the next n bytes are in hand. If the file does not have them, the field at `field`
 * breaks the rule. */
static um_status need(const reader *r, uint64_t n, const char *rule, uint64_t field) {
    UM__BREAKS_IF(n > r->file_nbytes - r->at, r->err, rule, field);
    /* Otherwise a large sparse file would be read into memory as a whole. */
    UM__BREAKS_IF(n > HEADER_NBYTES_MAX - r->at, r->err, "the header is longer than 256 MiB",
                  field);
    if (n > r->nbytes - r->at) {
        uint64_t limit = min_u64(r->file_nbytes, HEADER_NBYTES_MAX);
        uint64_t asked = max_u64(r->nbytes * 2, SECOND_PIECE_NBYTES);
        asked = max_u64(min_u64(asked, limit), r->at + n);
        return um__fail_full(r->err, UM_HEADER_FULL, limit, r->nbytes, asked,
                             "bytes of the header");
    }
    return UM_OK;
}

/* Returns how many of n rows, each of at least nbytes_min, the bytes in hand can hold: a table of
 * this size is large enough, since more rows need more bytes. */
static uint64_t rows_at_most(const reader *r, uint64_t n, uint64_t nbytes_min) {
    return min_u64(n, (r->nbytes - r->at) / nbytes_min);
}

/* Returns a table, which may have no rows; NULL, with err filled, without memory. */
static void *alloc_table(const reader *r, uint64_t n, size_t row_bytes) {
    void *table = um__heap_alloc(n == 0 ? 1 : n, row_bytes);
    if (table == NULL) {
        um__fail_os(r->err, ENOMEM, n * row_bytes, "calloc");
    }
    return table;
}

static uint32_t load_u32(const unsigned char *p) {
    uint32_t value;
    memcpy(&value, p, sizeof(value));
    return value;
}

static uint64_t load_u64(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof(value));
    return value;
}

static um_status read_number(reader *r, void *out, size_t nbytes) {
    UM__TRY(need(r, nbytes, truncated, r->at));
    memcpy(out, r->bytes + r->at, nbytes);
    r->at += nbytes;
    return UM_OK;
}

/* Reads a string of at most `most` bytes; `too_long` is the rule that a longer one breaks. */
static um_status read_string(reader *r, uint64_t most, const char *too_long, uint64_t *out_offset,
                             uint64_t *out_nbytes) {
    uint64_t field = r->at;
    UM__TRY(read_number(r, out_nbytes, sizeof(*out_nbytes)));
    UM__BREAKS_IF(*out_nbytes > most, r->err, too_long, field);
    UM__TRY(need(r, *out_nbytes, string_too_long, field));
    *out_offset = r->at;
    r->at += *out_nbytes;
    return UM_OK;
}

/* ---- names ---- */

typedef struct name_rules {
    const char *empty, *too_long, *not_utf8, *twice; /* empty: NULL where a name may be */
} name_rules;

static const name_rules key_rules = {"a key is empty", "a key is longer than 65535 bytes",
                                     "a key is not valid UTF-8", "a key occurs twice"};
static const name_rules tensor_name_rules = {NULL, "a tensor's name is longer than 65535 bytes",
                                             "a tensor's name is not valid UTF-8",
                                             "a tensor's name occurs twice"};

static um_status read_name(reader *r, const name_rules *rules, uint64_t *out_offset,
                           uint64_t *out_nbytes) {
    uint64_t field = r->at;
    UM__TRY(read_string(r, NAME_NBYTES_MAX, rules->too_long, out_offset, out_nbytes));
    UM__BREAKS_IF(*out_nbytes == 0 && rules->empty != NULL, r->err, rules->empty, field);
    UM__BREAKS_IF(um__utf8_nbytes(r->bytes + *out_offset, *out_nbytes) != *out_nbytes, r->err,
                  rules->not_utf8, *out_offset);
    return UM_OK;
}

/* Fails for the first name in the file that repeats an earlier one. Each of n rows, `stride` bytes
 * apart, begins with the offset and the length of a name. */
static um_status check_names_differ(const reader *r, const void *rows, size_t stride, uint64_t n,
                                    const char *rule) {
    if (n < 2) {
        return UM_OK;
    }
    um__name *names = alloc_table(r, n, sizeof(*names));
    UM__RETURN_IF(names == NULL, UM_E_NOMEM);
    for (uint64_t i = 0; i < n; i++) {
        const unsigned char *row = (const unsigned char *)rows + i * stride;
        uint64_t offset = load_u64(row);
        names[i] = um__name_of(r->bytes + offset, load_u64(row + sizeof(offset)), offset);
    }
    uint64_t twice;
    bool differ = um__names_differ(names, n, &twice);
    um__heap_free(names);
    return differ ? UM_OK : um__fail_format(r->err, rule, twice);
}

/* ---- metadata ---- */

/* The bytes of a value of fixed size; 0 for strings and arrays. */
static const uint8_t value_nbytes[UM_GGUF_TYPE_COUNT] = {
    [UM_GGUF_UINT8] = 1,  [UM_GGUF_INT8] = 1,   [UM_GGUF_BOOL] = 1,    [UM_GGUF_UINT16] = 2,
    [UM_GGUF_INT16] = 2,  [UM_GGUF_UINT32] = 4, [UM_GGUF_INT32] = 4,   [UM_GGUF_FLOAT32] = 4,
    [UM_GGUF_UINT64] = 8, [UM_GGUF_INT64] = 8,  [UM_GGUF_FLOAT64] = 8,
};

static um_status read_type(reader *r, um_gguf_type *out) {
    uint64_t field = r->at;
    uint32_t type;
    UM__TRY(read_number(r, &type, sizeof(uint32_t)));
    UM__BREAKS_IF(type >= UM_GGUF_TYPE_COUNT, r->err, "unknown type of metadata", field);
    *out = (um_gguf_type)type;
    return UM_OK;
}

/* Skips n values of a fixed size; `field` is the place of the count n. */
static um_status pass_fixed(reader *r, um_gguf_type type, uint64_t n, uint64_t field) {
    uint64_t nbytes;
    UM__BREAKS_IF(__builtin_mul_overflow(n, (uint64_t)value_nbytes[type], &nbytes), r->err,
                  array_too_long, field);
    UM__TRY(need(r, nbytes, array_too_long, field));
    if (type == UM_GGUF_BOOL) {
        for (uint64_t i = r->at; i < r->at + nbytes; i++) {
            UM__BREAKS_IF(r->bytes[i] > 1, r->err, "a bool is neither 0 nor 1", i);
        }
    }
    r->at += nbytes;
    return UM_OK;
}

static um_status check_fits(const reader *r, uint64_t n, uint64_t nbytes_min, const char *rule,
                            uint64_t field) {
    return n > (r->file_nbytes - r->at) / nbytes_min ? um__fail_format(r->err, rule, field) : UM_OK;
}

static um_status pass_strings(reader *r, uint64_t n, uint64_t field) {
    UM__TRY(check_fits(r, n, STRING_NBYTES_MIN, array_too_long, field));
    uint64_t offset, nbytes;
    for (uint64_t i = 0; i < n; i++) {
        /* Vocabularies have hundreds of thousands of strings: one comparison skips each that is in
         * hand as a whole. */
        uint64_t left = r->nbytes - r->at;
        if (left >= sizeof(nbytes) &&
            (nbytes = load_u64(r->bytes + r->at)) <= left - sizeof(nbytes)) {
            r->at += sizeof(nbytes) + nbytes;
        } else {
            UM__TRY(read_string(r, UINT64_MAX, string_too_long, &offset, &nbytes));
        }
    }
    return UM_OK;
}

typedef struct array_head {
    um_gguf_type item_type;
    uint64_t n, first;
} array_head;

/* Skips a whole array; `depth` counts the arrays around it. */
static um_status pass_array(reader *r, unsigned depth, array_head *out) {
    uint64_t field = r->at;
    UM__TRY(read_type(r, &out->item_type));
    UM__BREAKS_IF(depth == ARRAY_DEPTH_MAX, r->err, "arrays are nested deeper than 16", field);
    UM__BREAKS_IF(depth > 0 && r->n_inner_arrays++ == INNER_ARRAYS_MAX, r->err,
                  "more than 4096 arrays lie in arrays", field);
    field = r->at;
    UM__TRY(read_number(r, &out->n, sizeof(uint64_t)));
    out->first = r->at;
    if (out->item_type == UM_GGUF_STRING) {
        return pass_strings(r, out->n, field);
    }
    if (out->item_type != UM_GGUF_ARRAY) {
        return pass_fixed(r, out->item_type, out->n, field);
    }
    UM__TRY(check_fits(r, out->n, ARRAY_NBYTES_MIN, array_too_long, field));
    for (uint64_t i = 0; i < out->n; i++) {
        array_head inner;
        UM__TRY(pass_array(r, depth + 1, &inner));
    }
    return UM_OK;
}

static um_status read_kv(reader *r, um_gguf_kv *out) {
    UM__TRY(read_name(r, &key_rules, &out->key_offset, &out->key_nbytes));
    UM__TRY(read_type(r, &out->type));
    out->n_items = 1;
    out->item_type = UM_GGUF_TYPE_COUNT;
    out->value_offset = r->at;
    if (out->type == UM_GGUF_STRING) {
        return read_string(r, UINT64_MAX, string_too_long, &out->value_offset, &out->value_nbytes);
    }
    if (out->type == UM_GGUF_ARRAY) {
        array_head head;
        UM__TRY(pass_array(r, 0, &head));
        out->item_type = head.item_type;
        out->n_items = head.n;
        out->value_offset = head.first;
    } else {
        out->value_nbytes = value_nbytes[out->type];
        UM__TRY(need(r, out->value_nbytes, truncated, r->at));
        UM__TRY(pass_fixed(r, out->type, 1, r->at));
    }
    out->value_nbytes = r->at - out->value_offset;
    return UM_OK;
}

/* Reads the alignment if this is the key general.alignment. */
static um_status read_alignment(const reader *r, const um_gguf_kv *kv, uint64_t *out) {
    static const char key[] = "general.alignment";
    if (kv->key_nbytes != sizeof(key) - 1 ||
        memcmp(r->bytes + kv->key_offset, key, sizeof(key) - 1) != 0) {
        return UM_OK;
    }
    UM__BREAKS_IF(kv->type != UM_GGUF_UINT32, r->err, "general.alignment is not a UINT32",
                  kv->key_offset + kv->key_nbytes);
    uint32_t alignment = load_u32(r->bytes + kv->value_offset);
    UM__BREAKS_IF(alignment == 0 || alignment % ALIGNMENT_UNIT != 0, r->err,
                  "general.alignment is not 8 or a multiple of it", kv->value_offset);
    *out = alignment;
    return UM_OK;
}

static um_status read_metadata(reader *r, um_gguf *gguf) {
    gguf->kv = alloc_table(r, rows_at_most(r, gguf->n_kv, KV_NBYTES_MIN), sizeof(*gguf->kv));
    UM__RETURN_IF(gguf->kv == NULL, UM_E_NOMEM);
    for (uint64_t i = 0; i < gguf->n_kv; i++) {
        um_gguf_kv kv;
        UM__TRY(read_kv(r, &kv));
        UM__TRY(read_alignment(r, &kv, &gguf->alignment));
        gguf->kv[i] = kv;
    }
    return check_names_differ(r, gguf->kv, sizeof(*gguf->kv), gguf->n_kv, key_rules.twice);
}

/* ---- tensors ---- */

/* The places of the fields behind a tensor's name: n_dims, ne[n_dims] with the type, offset. */
static uint64_t dims_field(const um_gguf_tensor *t) {
    return t->name_offset + t->name_nbytes;
}
static uint64_t ne_field(const um_gguf_tensor *t, uint32_t i) {
    return dims_field(t) + sizeof(uint32_t) + i * sizeof(uint64_t);
}
static uint64_t offset_field(const um_gguf_tensor *t) {
    return ne_field(t, t->n_dims) + sizeof(uint32_t);
}

static um_status read_dims(reader *r, um_gguf_tensor *out) {
    /* A dimension of 0 makes an empty tensor, but must not hide an overflow of the others. */
    uint64_t n_values = 1;
    UM__TRY(read_number(r, &out->n_dims, sizeof(uint32_t)));
    UM__BREAKS_IF(out->n_dims > UM_GGUF_MAX_DIMS, r->err, "a tensor has more than 4 dimensions",
                  dims_field(out));
    for (uint32_t i = 0; i < UM_GGUF_MAX_DIMS; i++) {
        out->ne[i] = 1;
        if (i < out->n_dims) {
            UM__TRY(read_number(r, &out->ne[i], sizeof(uint64_t)));
        }
        UM__BREAKS_IF(
            __builtin_mul_overflow(n_values, out->ne[i] == 0 ? 1 : out->ne[i], &n_values) ||
                n_values > INT64_MAX,
            r->err, "a tensor's dimensions overflow", ne_field(out, i));
    }
    return UM_OK;
}

static bool is_unknown(const um_gguf_tensor *t) {
    return um_gguf_type_of_tensor(t->type) == NULL;
}

/* Computes the size of a tensor. If its type is unknown, that is one byte until all are placed. */
static um_status measure_tensor(const reader *r, um_gguf_tensor *t) {
    const um_gguf_tensor_type *type = um_gguf_type_of_tensor(t->type);
    if (type == NULL) {
        t->nbytes = t->ne[0] != 0 && t->ne[1] != 0 && t->ne[2] != 0 && t->ne[3] != 0;
        return UM_OK;
    }
    UM__BREAKS_IF(t->ne[0] % type->block_values != 0, r->err,
                  "a tensor's rows are not whole blocks of its type",
                  t->n_dims == 0 ? dims_field(t) : ne_field(t, 0));
    t->nbytes = t->ne[0] / type->block_values;
    for (uint32_t i = 1; i < UM_GGUF_MAX_DIMS; i++) {
        t->nbytes *= t->ne[i];
    }
    UM__BREAKS_IF(__builtin_mul_overflow(t->nbytes, (uint64_t)type->block_bytes, &t->nbytes),
                  r->err, "a tensor's dimensions overflow", ne_field(t, 0));
    return UM_OK;
}

static um_status read_tensor(reader *r, um_gguf_tensor *out) {
    UM__TRY(read_name(r, &tensor_name_rules, &out->name_offset, &out->name_nbytes));
    UM__TRY(read_dims(r, out));
    UM__TRY(read_number(r, &out->type, sizeof(uint32_t)));
    UM__TRY(measure_tensor(r, out));
    return read_number(r, &out->offset, sizeof(uint64_t));
}

/* Turns the offset in the data into an offset in the file. */
static um_status place_tensor(const reader *r, const um_gguf *gguf, um_gguf_tensor *t) {
    uint64_t room = r->file_nbytes - min_u64(gguf->data_offset, r->file_nbytes);
    UM__BREAKS_IF(t->offset % gguf->alignment != 0, r->err,
                  "a tensor's offset is not a multiple of the alignment", offset_field(t));
    UM__BREAKS_IF(t->offset > room || t->nbytes > room - t->offset, r->err,
                  "a tensor passes the end of the file", offset_field(t));
    t->offset += gguf->data_offset;
    return UM_OK;
}

static int compare_offsets(const void *a, const void *b) {
    const um_gguf_tensor *x = *(const um_gguf_tensor *const *)a;
    const um_gguf_tensor *y = *(const um_gguf_tensor *const *)b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

/* Fails for the first tensor, in the order of the data, that begins inside another one. A tensor of
 * an unknown type gets the bytes up to the next one, or to the end of the file. Empty tensors do
 * not count. */
static um_status lay_out(const reader *r, const um_gguf *gguf, um_gguf_tensor *const *tensors) {
    um_gguf_tensor *before = NULL;
    uint64_t end = gguf->data_offset;
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        um_gguf_tensor *t = tensors[i];
        if (t->nbytes == 0) {
            continue;
        }
        UM__BREAKS_IF(t->offset < end, r->err, "two tensors overlap", offset_field(t));
        if (before != NULL && is_unknown(before)) {
            before->nbytes = t->offset - before->offset;
        }
        end = t->offset + t->nbytes;
        before = t;
    }
    if (before != NULL && is_unknown(before)) {
        before->nbytes = r->file_nbytes - before->offset;
    }
    return UM_OK;
}

static um_status lay_out_tensors(const reader *r, const um_gguf *gguf) {
    um_gguf_tensor **order = alloc_table(r, gguf->n_tensors, sizeof(*order));
    UM__RETURN_IF(order == NULL, UM_E_NOMEM);
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        order[i] = &gguf->tensors[i];
    }
    qsort(order, gguf->n_tensors, sizeof(*order), compare_offsets);
    um_status status = lay_out(r, gguf, order);
    um__heap_free(order);
    return status;
}

static um_status read_tensors(reader *r, um_gguf *gguf) {
    gguf->tensors =
        alloc_table(r, rows_at_most(r, gguf->n_tensors, TENSOR_NBYTES_MIN), sizeof(*gguf->tensors));
    UM__RETURN_IF(gguf->tensors == NULL, UM_E_NOMEM);
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        um_gguf_tensor tensor;
        UM__TRY(read_tensor(r, &tensor));
        gguf->tensors[i] = tensor;
    }
    gguf->header_nbytes = r->at;
    /* This cannot overflow: the header is in memory, and the alignment has 32 bits. */
    gguf->data_offset = (r->at + gguf->alignment - 1) / gguf->alignment * gguf->alignment;
    UM__TRY(check_names_differ(r, gguf->tensors, sizeof(*gguf->tensors), gguf->n_tensors,
                               tensor_name_rules.twice));
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        UM__TRY(place_tensor(r, gguf, &gguf->tensors[i]));
    }
    return gguf->n_tensors == 0 ? UM_OK : lay_out_tensors(r, gguf);
}

/* ---- the whole ---- */

static um_status read_head(reader *r, um_gguf *gguf) {
    uint32_t magic;
    UM__TRY(read_number(r, &magic, sizeof(uint32_t)));
    UM__BREAKS_IF(memcmp(&magic, "GGUF", sizeof(magic)) != 0, r->err,
                  "the file does not begin with GGUF", 0);
    uint64_t version_field = r->at;
    UM__TRY(read_number(r, &gguf->version, sizeof(uint32_t)));
    if (gguf->version != 0 && (gguf->version & 0xffff) == 0) {
        return um__fail_format(r->err, "the file is big-endian; only little-endian files are read",
                               version_field);
    }
    UM__BREAKS_IF(gguf->version != 2 && gguf->version != 3, r->err, "the version is not 2 or 3",
                  version_field);
    uint64_t n_tensors_field = r->at;
    UM__TRY(read_number(r, &gguf->n_tensors, sizeof(uint64_t)));
    uint64_t n_kv_field = r->at;
    UM__TRY(read_number(r, &gguf->n_kv, sizeof(uint64_t)));
    UM__TRY(check_fits(r, gguf->n_tensors, TENSOR_NBYTES_MIN, "more tensors than the file can hold",
                       n_tensors_field));
    UM__TRY(check_fits(r, gguf->n_kv, KV_NBYTES_MIN, "more metadata than the file can hold",
                       n_kv_field));
    UM__BREAKS_IF(gguf->n_tensors > TENSORS_MAX, r->err, "more than 65536 tensors",
                  n_tensors_field);
    UM__BREAKS_IF(gguf->n_kv > KEYS_MAX, r->err, "more than 4096 keys", n_kv_field);
    return UM_OK;
}

static um_status read_all(reader *r, um_gguf *gguf) {
    UM__TRY(read_head(r, gguf));
    UM__TRY(read_metadata(r, gguf));
    return read_tensors(r, gguf);
}

um_status um_gguf_parse(um_gguf *out, const void *bytes, size_t nbytes, uint64_t file_nbytes,
                        um_error *err) {
    UM__INVALID_IF(nbytes > file_nbytes, err, "more bytes than the file has");
    reader r = {bytes, min_u64(nbytes, HEADER_NBYTES_MAX), file_nbytes, 0, err, 0};
    um_gguf gguf = {.alignment = ALIGNMENT_DEFAULT};
    um_status status = read_all(&r, &gguf);
    if (status != UM_OK) {
        um_gguf_free(&gguf);
        return status;
    }
    *out = gguf;
    return UM_OK;
}

void um_gguf_free(um_gguf *gguf) {
    um__heap_free(gguf->kv);
    um__heap_free(gguf->tensors);
    *gguf = (um_gguf){0};
}
