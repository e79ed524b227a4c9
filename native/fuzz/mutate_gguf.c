/* Mutants of GGUF headers: keys and tensors are dropped, repeated, moved and changed, and counts,
 * lengths and offsets are right again, but for some. */
#include "mutate.h"

enum { MAX_ROWS = 64, MAX_DEPTH = 4, HEAD_NBYTES = 24 };

typedef enum change {
    DROP,
    REPEAT,
    SWAP,
    RENAME,
    REWRITE,
    SET_ALIGNMENT,
    SET_COUNT,
    N_CHANGES,
} change;

typedef struct mutant {
    const uint8_t *bytes;
    const um_gguf *gguf;
    mutate_random random;
    mutate_file file;
    change change;
    bool of_tensors;     /* or of keys */
    bool lays_out;       /* gives each tensor its place */
    uint64_t row, other; /* that are changed */
} mutant;

/* Where a number overflows, wraps or turns negative, and small ones. */
static uint64_t any_number(mutate_random *random) {
    static const uint64_t edges[] = {0,
                                     1,
                                     31,
                                     32,
                                     33,
                                     255,
                                     256,
                                     INT32_MAX,
                                     UINT32_MAX,
                                     (uint64_t)1 << 32,
                                     (uint64_t)1 << 60,
                                     (uint64_t)1 << 61,
                                     INT64_MAX,
                                     (uint64_t)INT64_MAX + 1,
                                     UINT64_MAX - 31,
                                     UINT64_MAX};
    uint64_t i = mutate_below(random, 2 * sizeof edges / sizeof edges[0]);
    return i < sizeof edges / sizeof edges[0] ? edges[i] : mutate_below(random, 300);
}

/* ---- keys ---- */

static void put_name(mutant *m, uint64_t offset, uint64_t nbytes, bool renamed) {
    mutate_put_u64(&m->file, nbytes + renamed);
    mutate_put(&m->file, m->bytes + offset, nbytes);
    uint8_t letter = (uint8_t)('a' + mutate_below(&m->random, 26));
    mutate_put(&m->file, &letter, renamed);
}

static void put_item(mutant *m, uint32_t type) {
    static const uint8_t widths[UM_GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t value = any_number(&m->random);
    if (type == UM_GGUF_STRING) {
        mutate_put_u64(&m->file, value % 9);
        mutate_put(&m->file, "a\xc3\xa9 b\nc\0d", value % 9);
    } else if (type < UM_GGUF_TYPE_COUNT) {
        value = type == UM_GGUF_BOOL ? value % 2 : value;
        mutate_put(&m->file, &value, widths[type]);
    }
}

static void put_array(mutant *m, unsigned depth) {
    uint32_t type = (uint32_t)mutate_below(&m->random, UM_GGUF_TYPE_COUNT);
    type = type == UM_GGUF_ARRAY && depth == MAX_DEPTH ? UM_GGUF_STRING : type;
    uint64_t n = mutate_below(&m->random, 4);
    mutate_put_u32(&m->file, type);
    mutate_put_u64(&m->file, n);
    for (uint64_t i = 0; i < n; i++) {
        if (type == UM_GGUF_ARRAY) {
            put_array(m, depth + 1);
        } else {
            put_item(m, type);
        }
    }
}

/* Writes a value of any type, and of one that there is not. */
static void put_value(mutant *m) {
    uint32_t type = (uint32_t)mutate_below(&m->random, (uint64_t)UM_GGUF_TYPE_COUNT + 1);
    mutate_put_u32(&m->file, type);
    if (type == UM_GGUF_ARRAY) {
        put_array(m, 0);
    } else {
        put_item(m, type);
    }
}

static void put_kv(mutant *m, const um_gguf_kv *kv, bool renamed, bool rewritten) {
    put_name(m, kv->key_offset, kv->key_nbytes, renamed);
    if (rewritten) {
        put_value(m);
        return;
    }
    /* The type stands behind the key, and the lengths of an array or a string before its bytes. */
    uint64_t begin = kv->key_offset + kv->key_nbytes;
    mutate_put(&m->file, m->bytes + begin, kv->value_offset + kv->value_nbytes - begin);
}

static void put_alignment(mutant *m) {
    static const char key[] = "general.alignment";
    mutate_put_u64(&m->file, sizeof key - 1);
    mutate_put(&m->file, key, sizeof key - 1);
    mutate_put_u32(&m->file, UM_GGUF_UINT32);
    mutate_put_u32(&m->file, (uint32_t)1 << mutate_below(&m->random, 17));
}

/* ---- tensors ---- */

static void put_tensor(mutant *m, const um_gguf_tensor *given, bool renamed, bool rewritten,
                       uint64_t *end) {
    um_gguf_tensor t = *given;
    if (rewritten) {
        uint64_t what = mutate_below(&m->random, 4);
        t.type = what == 0 ? (uint32_t)mutate_below(&m->random, 44) : t.type;
        t.n_dims = what == 1 ? (uint32_t)mutate_below(&m->random, 6) : t.n_dims;
        t.ne[mutate_below(&m->random, UM_GGUF_MAX_DIMS)] = any_number(&m->random);
    }
    put_name(m, t.name_offset, t.name_nbytes, renamed);
    mutate_put_u32(&m->file, t.n_dims);
    for (uint32_t i = 0; i < t.n_dims; i++) {
        mutate_put_u64(&m->file, t.ne[i % UM_GGUF_MAX_DIMS]);
    }
    mutate_put_u32(&m->file, t.type);
    mutate_put_u64(&m->file, m->lays_out ? *end : t.offset - m->gguf->data_offset);
    const um_gguf_tensor_type *type = um_gguf_type_of_tensor(t.type);
    uint64_t n_values = t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3], align = m->gguf->alignment;
    uint64_t nbytes = type == NULL ? 0 : n_values / type->block_values * type->block_bytes;
    *end = (*end + nbytes + align - 1) / align * align;
}

/* ---- the whole ---- */

/* Writes the rows of one table; returns how many. */
static uint64_t put_rows(mutant *m, bool of_tensors) {
    uint64_t n = of_tensors ? m->gguf->n_tensors : m->gguf->n_kv, n_put = 0, end = 0;
    change is = m->of_tensors == of_tensors ? m->change : N_CHANGES;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t from = is == SWAP && i == m->row     ? m->other
                        : is == SWAP && i == m->other ? m->row
                                                      : i;
        bool here = i == m->row;
        unsigned n_times = is == DROP && here ? 0 : is == REPEAT && here ? 2 : 1;
        for (unsigned j = 0; j < n_times; j++) {
            bool renamed = here && (is == RENAME || j > 0);
            if (of_tensors) {
                put_tensor(m, &m->gguf->tensors[from], renamed, here && is == REWRITE, &end);
            } else {
                put_kv(m, &m->gguf->kv[from], renamed, here && is == REWRITE);
            }
            n_put++;
        }
    }
    return n_put;
}

static size_t put_file(mutant *m) {
    uint64_t counts[2] = {0, 0}; /* of tensors, of keys */
    mutate_put(&m->file, m->bytes, HEAD_NBYTES);
    if (m->change == SET_ALIGNMENT) {
        put_alignment(m);
        counts[1]++;
    }
    counts[1] += put_rows(m, false);
    counts[0] += put_rows(m, true);
    if (m->change == SET_COUNT) {
        counts[mutate_below(&m->random, 2)] = any_number(&m->random);
    }
    memcpy(m->file.bytes + HEAD_NBYTES - sizeof counts, counts, sizeof counts);
    return m->file.is_full ? 0 : m->file.nbytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t nbytes, size_t capacity, unsigned seed) {
    um_gguf gguf = {0};
    mutant m = {.bytes = bytes, .gguf = &gguf, .random = {seed}};
    bool of_bytes = mutate_below(&m.random, 3) == 0;
    if (of_bytes || um_gguf_parse(&gguf, bytes, nbytes, UINT64_MAX, NULL) != UM_OK) {
        return LLVMFuzzerMutate(bytes, nbytes, capacity);
    }
    size_t made = 0;
    if (gguf.n_kv + gguf.n_tensors <= MAX_ROWS && capacity > HEAD_NBYTES) {
        m.change = (change)mutate_below(&m.random, N_CHANGES);
        m.of_tensors = mutate_below(&m.random, 2) != 0;
        m.lays_out = mutate_below(&m.random, 4) != 0;
        uint64_t n = m.of_tensors ? gguf.n_tensors : gguf.n_kv;
        m.row = mutate_below(&m.random, n);
        m.other = mutate_below(&m.random, n);
        m.file = (mutate_file){.bytes = malloc(capacity), .capacity = capacity};
        PROMISED(m.file.bytes != NULL);
        made = put_file(&m);
        memcpy(bytes, m.file.bytes, made);
        free(m.file.bytes);
    }
    um_gguf_free(&gguf);
    return made != 0 ? made : LLVMFuzzerMutate(bytes, nbytes, capacity);
}
