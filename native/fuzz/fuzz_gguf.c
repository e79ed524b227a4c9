/* GGUF headers. An input is parsed as a whole file, piece by piece, and as the beginning of longer
 * files. */
#include "fuzz.h"

/* Bytes that follow the input in a longer file: room for some tensors, and the most there can
 * be. */
static const uint64_t more_nbytes[] = {1 << 16, UINT64_MAX};

/* Tables are compared as bytes. */
_Static_assert(sizeof(um_gguf_kv) == 5 * sizeof(uint64_t) + 2 * sizeof(um_gguf_type), "padding");
_Static_assert(sizeof(um_gguf_tensor) == 8 * sizeof(uint64_t) + 2 * sizeof(uint32_t), "padding");

/* ---- metadata ---- */

static uint64_t number_nbytes(um_gguf_type type) {
    static const uint8_t nbytes[UM_GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    PROMISED(type < UM_GGUF_TYPE_COUNT);
    PROMISED(nbytes[type] != 0);
    return nbytes[type];
}

static uint64_t load_u64(const uint8_t *bytes, uint64_t at) {
    uint64_t value;
    memcpy(&value, bytes + at, sizeof value);
    return value;
}

static void decode_numbers(const uint8_t *bytes, um_gguf_type type, uint64_t at, uint64_t n) {
    fuzz_touch(bytes + at, n * number_nbytes(type));
    for (uint64_t i = 0; type == UM_GGUF_BOOL && i < n; i++) {
        PROMISED(bytes[at + i] <= 1);
    }
}

/* Decodes as weights/gguf.pyx does, which relies on the parser for the bounds. Returns where the
 * items end. */
static uint64_t decode_items(const uint8_t *bytes, um_gguf_type type, uint64_t at, uint64_t n) {
    if (type != UM_GGUF_STRING && type != UM_GGUF_ARRAY) {
        decode_numbers(bytes, type, at, n);
        return at + n * number_nbytes(type);
    }
    for (uint64_t i = 0; i < n; i++) {
        if (type == UM_GGUF_STRING) {
            uint64_t nbytes = load_u64(bytes, at);
            at += sizeof nbytes;
            fuzz_touch(bytes + at, nbytes);
            at += nbytes;
        } else {
            uint32_t inner;
            memcpy(&inner, bytes + at, sizeof inner);
            uint64_t inner_n = load_u64(bytes, at + sizeof inner);
            at += sizeof inner + sizeof inner_n;
            at = decode_items(bytes, (um_gguf_type)inner, at, inner_n);
        }
    }
    return at;
}

static void check_kv(const um_gguf_kv *kv, const uint8_t *bytes, uint64_t header_nbytes) {
    PROMISED(fuzz_end(kv->key_offset, kv->key_nbytes) <= header_nbytes);
    PROMISED(fuzz_is_utf8(bytes + kv->key_offset, kv->key_nbytes));
    uint64_t end = fuzz_end(kv->value_offset, kv->value_nbytes);
    PROMISED(end <= header_nbytes);
    if (kv->type == UM_GGUF_ARRAY) {
        PROMISED(decode_items(bytes, kv->item_type, kv->value_offset, kv->n_items) == end);
        return;
    }
    PROMISED(kv->n_items == 1);
    PROMISED(kv->item_type == UM_GGUF_TYPE_COUNT);
    if (kv->type == UM_GGUF_STRING) {
        fuzz_touch(bytes + kv->value_offset, kv->value_nbytes);
    } else {
        PROMISED(kv->value_nbytes == number_nbytes(kv->type));
        decode_numbers(bytes, kv->type, kv->value_offset, 1);
    }
}

/* ---- tensors ---- */

static void check_tensor(const um_gguf_tensor *t, const um_gguf *g, const uint8_t *bytes,
                         uint64_t file_nbytes) {
    PROMISED(fuzz_end(t->name_offset, t->name_nbytes) <= g->header_nbytes);
    PROMISED(fuzz_is_utf8(bytes + t->name_offset, t->name_nbytes));
    const um_gguf_tensor_type *type = um_gguf_type_of_tensor(t->type);
    PROMISED(t->n_dims <= UM_GGUF_MAX_DIMS);
    uint64_t n_values = 1, nbytes = 0;
    for (uint32_t i = 0; i < UM_GGUF_MAX_DIMS; i++) {
        PROMISED(i < t->n_dims || t->ne[i] == 1);
        PROMISED(!__builtin_mul_overflow(n_values, t->ne[i], &n_values));
        PROMISED(n_values <= INT64_MAX);
    }
    if (type != NULL) {
        PROMISED(type->name != NULL);
        PROMISED(t->ne[0] % type->block_values == 0);
        PROMISED(!__builtin_mul_overflow(n_values / type->block_values, (uint64_t)type->block_bytes,
                                         &nbytes));
        PROMISED(t->nbytes == nbytes);
    } else {
        PROMISED((t->nbytes == 0) == (n_values == 0));
    }
    PROMISED(t->offset >= g->data_offset);
    PROMISED(t->offset % g->alignment == 0);
    PROMISED(fuzz_end(t->offset, t->nbytes) <= file_nbytes || t->nbytes == 0);
}

/* ---- the whole ---- */

static void check_tables(const um_gguf *g, const uint8_t *bytes, uint64_t nbytes,
                         uint64_t file_nbytes) {
    PROMISED(g->version == 2 || g->version == 3);
    PROMISED(g->alignment >= 8);
    PROMISED(g->alignment % 8 == 0);
    PROMISED(g->header_nbytes <= nbytes);
    PROMISED(g->data_offset % g->alignment == 0);
    PROMISED(g->data_offset >= g->header_nbytes);
    PROMISED(g->data_offset - g->header_nbytes < g->alignment);
    PROMISED(g->n_kv <= nbytes);
    PROMISED(g->n_tensors <= nbytes);
    uint64_t n = g->n_kv > g->n_tensors ? g->n_kv : g->n_tensors;
    fuzz_text *texts = malloc(n * sizeof *texts);
    fuzz_range *ranges = malloc(n * sizeof *ranges);
    PROMISED(texts != NULL);
    PROMISED(ranges != NULL);
    for (uint64_t i = 0; i < g->n_kv; i++) {
        check_kv(&g->kv[i], bytes, g->header_nbytes);
        texts[i] = (fuzz_text){bytes + g->kv[i].key_offset, g->kv[i].key_nbytes};
    }
    PROMISED(fuzz_all_differ(texts, g->n_kv));
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const um_gguf_tensor *t = &g->tensors[i];
        check_tensor(t, g, bytes, file_nbytes);
        texts[i] = (fuzz_text){bytes + t->name_offset, t->name_nbytes};
        ranges[i] = (fuzz_range){t->offset, t->nbytes};
    }
    PROMISED(fuzz_all_differ(texts, g->n_tensors));
    PROMISED(fuzz_all_apart(ranges, g->n_tensors));
    free(texts);
    free(ranges);
}

typedef struct answer {
    um_status status;
    um_error err;
    um_gguf gguf;
} answer;

static answer parse(const uint8_t *bytes, uint64_t nbytes, uint64_t file_nbytes) {
    answer a = {0};
    um_counters before, after;
    uint8_t *exact = fuzz_copy(bytes, nbytes);
    memset(&a.err, FUZZ_PATTERN, sizeof a.err);
    um_counters_read(&before);
    a.status = um_gguf_parse(&a.gguf, exact, nbytes, file_nbytes, &a.err);
    um_counters_read(&after);
    fuzz_check_status(a.status, &a.err, nbytes, file_nbytes, nbytes);
    PROMISED(after.allocated_bytes - before.allocated_bytes <= 4096 + 10 * nbytes);
    if (a.status == UM_OK) {
        check_tables(&a.gguf, exact, nbytes, file_nbytes);
    } else {
        PROMISED(a.gguf.kv == NULL);
        PROMISED(a.gguf.tensors == NULL);
    }
    free(exact);
    return a;
}

static bool same_header(const um_gguf *a, const um_gguf *b) {
    return a->version == b->version && a->alignment == b->alignment &&
           a->header_nbytes == b->header_nbytes && a->data_offset == b->data_offset &&
           a->n_kv == b->n_kv && a->n_tensors == b->n_tensors &&
           memcmp(a->kv, b->kv, a->n_kv * sizeof *a->kv) == 0 &&
           memcmp(a->tensors, b->tensors, a->n_tensors * sizeof *a->tensors) == 0;
}

static bool same_answer(const answer *a, const answer *b) {
    if (a->status != b->status) {
        return false;
    }
    if (a->status == UM_OK) {
        return same_header(&a->gguf, &b->gguf);
    }
    return a->err.what == b->err.what && a->err.offset == b->err.offset;
}

/* Gives tensors of unknown types, which may have grown with the file, the bytes that they had. */
static void shorten_unknown(const um_gguf *before, um_gguf *longer) {
    for (uint64_t i = 0; i < before->n_tensors && before->n_tensors == longer->n_tensors; i++) {
        const um_gguf_tensor *was = &before->tensors[i];
        um_gguf_tensor *now = &longer->tensors[i];
        if (um_gguf_type_of_tensor(was->type) == NULL && now->nbytes >= was->nbytes) {
            now->nbytes = was->nbytes;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    answer whole = parse(bytes, nbytes, nbytes);
    PROMISED(whole.status != UM_E_FULL);

    /* A reader that starts with a part and reads on as asked gets the same result. */
    answer pieces = parse(bytes, fuzz_hash(bytes, nbytes) % (nbytes + 1), nbytes);
    while (pieces.status == UM_E_FULL) {
        pieces = parse(bytes, pieces.err.asked, nbytes);
    }
    PROMISED(same_answer(&whole, &pieces));
    um_gguf_free(&pieces.gguf);

    /* A header that is valid in a file is valid in a longer one. A last tensor of an unknown type
     * gets the bytes up to the end of the file. */
    for (size_t i = 0; i < sizeof more_nbytes / sizeof more_nbytes[0]; i++) {
        uint64_t more = more_nbytes[i];
        answer longer = parse(bytes, nbytes, more > UINT64_MAX - nbytes ? more : nbytes + more);
        if (whole.status == UM_OK && longer.status == UM_OK) {
            shorten_unknown(&whole.gguf, &longer.gguf);
        }
        PROMISED(whole.status != UM_OK || same_answer(&whole, &longer));
        um_gguf_free(&longer.gguf);
    }
    um_gguf_free(&whole.gguf);
    return 0;
}
