/* Safetensors headers. An input is parsed as a whole file and piece by piece. Few changes keep the
 * length of the header and the end of the data consistent, so the same JSON is also parsed behind a
 * correct length, in a file that ends where the largest number in the JSON says. */
#include "fuzz.h"

enum { LENGTH_NBYTES = 8 };

/* Tables are compared as bytes. */
_Static_assert(sizeof(um_safetensors_kv) == 4 * sizeof(uint32_t), "padding");
_Static_assert(sizeof(um_safetensors_tensor) == 2 * sizeof(uint64_t) + 6 * sizeof(uint32_t),
               "padding");

/* ---- texts ---- */

/* Writes as weights/safetensors.pyx does: into memory of the size of the text. */
static fuzz_text write_text(const uint8_t *bytes, um_safetensors_text text,
                            uint64_t header_nbytes) {
    PROMISED(text.offset > LENGTH_NBYTES);
    PROMISED(fuzz_end(text.offset, text.nbytes) < header_nbytes);
    PROMISED(bytes[text.offset - 1] == '"');
    PROMISED(bytes[text.offset + text.nbytes] == '"');
    uint8_t *out = malloc(text.nbytes);
    PROMISED(out != NULL);
    size_t nbytes = um_safetensors_write_text(bytes, text, (char *)out);
    PROMISED(nbytes <= text.nbytes);
    PROMISED(fuzz_is_utf8(out, nbytes));
    return (fuzz_text){out, nbytes};
}

static bool texts_differ(fuzz_text *texts, uint64_t n) {
    bool differ = fuzz_all_differ(texts, n);
    for (uint64_t i = 0; i < n; i++) {
        free((void *)(uintptr_t)texts[i].bytes);
    }
    return differ;
}

static void check_metadata(const um_safetensors *st, const uint8_t *bytes) {
    fuzz_text *keys = malloc(st->n_kv * sizeof *keys);
    PROMISED(keys != NULL);
    for (uint64_t i = 0; i < st->n_kv; i++) {
        keys[i] = write_text(bytes, st->kv[i].key, st->header_nbytes);
        fuzz_text value = write_text(bytes, st->kv[i].value, st->header_nbytes);
        free((void *)(uintptr_t)value.bytes);
    }
    PROMISED(texts_differ(keys, st->n_kv));
    free(keys);
}

/* ---- tensors ---- */

static void check_tensor(const um_safetensors *st, const um_safetensors_tensor *t,
                         const uint8_t *bytes, uint64_t file_nbytes) {
    PROMISED(um_safetensors_type_name(t->type) != NULL);
    PROMISED(t->n_dims <= UM_SAFETENSORS_MAX_DIMS);
    PROMISED(fuzz_end(t->first_dim, t->n_dims) <= st->n_dims);
    uint64_t n_bits = um_safetensors_type_bits(t->type);
    PROMISED(n_bits != 0);
    for (uint32_t i = 0; i < t->n_dims; i++) {
        PROMISED(!__builtin_mul_overflow(n_bits, st->dims[t->first_dim + i], &n_bits));
    }
    PROMISED(n_bits % 8 == 0);
    PROMISED(t->nbytes == n_bits / 8);
    PROMISED(t->offset >= st->header_nbytes);
    PROMISED(fuzz_end(t->offset, t->nbytes) <= file_nbytes);
    PROMISED(t->place < st->header_nbytes);
    PROMISED(bytes[t->place] == '[');
}

/* Each byte after the header belongs to exactly one tensor. */
static void check_tensors(const um_safetensors *st, const uint8_t *bytes, uint64_t file_nbytes) {
    uint64_t nbytes = st->header_nbytes;
    fuzz_text *names = malloc(st->n_tensors * sizeof *names);
    fuzz_range *ranges = malloc(st->n_tensors * sizeof *ranges);
    PROMISED(names != NULL);
    PROMISED(ranges != NULL);
    for (uint64_t i = 0; i < st->n_tensors; i++) {
        const um_safetensors_tensor *t = &st->tensors[i];
        check_tensor(st, t, bytes, file_nbytes);
        names[i] = write_text(bytes, t->name, st->header_nbytes);
        ranges[i] = (fuzz_range){t->offset, t->nbytes};
        nbytes = fuzz_end(nbytes, t->nbytes);
    }
    PROMISED(texts_differ(names, st->n_tensors));
    PROMISED(fuzz_all_apart(ranges, st->n_tensors));
    PROMISED(nbytes == file_nbytes);
    free(names);
    free(ranges);
}

/* ---- the whole ---- */

typedef struct answer {
    um_status status;
    um_error err;
    um_safetensors st;
} answer;

static answer parse(const uint8_t *bytes, uint64_t nbytes, uint64_t file_nbytes) {
    answer a = {0};
    um_counters before, after;
    uint8_t *exact = fuzz_copy(bytes, nbytes);
    memset(&a.err, FUZZ_PATTERN, sizeof a.err);
    um_counters_read(&before);
    a.status = um_safetensors_parse(&a.st, exact, nbytes, file_nbytes, &a.err);
    um_counters_read(&after);
    fuzz_check_status(a.status, &a.err, nbytes, file_nbytes, file_nbytes);
    PROMISED(after.allocated_bytes - before.allocated_bytes <= 4096 + 20 * nbytes);
    if (a.status == UM_OK) {
        PROMISED(a.st.header_nbytes <= nbytes);
        PROMISED(a.st.n_kv <= nbytes);
        PROMISED(a.st.n_tensors <= nbytes);
        PROMISED(a.st.n_dims <= nbytes);
        check_metadata(&a.st, exact);
        check_tensors(&a.st, exact, file_nbytes);
    } else {
        PROMISED(a.st.kv == NULL);
        PROMISED(a.st.tensors == NULL);
        PROMISED(a.st.dims == NULL);
    }
    free(exact);
    return a;
}

static bool same_table(const void *a, const void *b, uint64_t n, size_t row_bytes) {
    return n == 0 || memcmp(a, b, n * row_bytes) == 0;
}

static bool same_answer(const answer *a, const answer *b) {
    const um_safetensors *x = &a->st, *y = &b->st;
    if (a->status != b->status) {
        return false;
    }
    if (a->status != UM_OK) {
        return a->err.what == b->err.what && a->err.offset == b->err.offset;
    }
    return x->header_nbytes == y->header_nbytes && x->n_kv == y->n_kv &&
           x->n_tensors == y->n_tensors && x->n_dims == y->n_dims &&
           same_table(x->kv, y->kv, x->n_kv, sizeof *x->kv) &&
           same_table(x->tensors, y->tensors, x->n_tensors, sizeof *x->tensors) &&
           same_table(x->dims, y->dims, x->n_dims, sizeof *x->dims);
}

/* Parses the first nbytes of a file that may be longer. A reader that starts with fewer bytes and
 * reads on as asked gets the same result. */
static void parse_file(const uint8_t *bytes, uint64_t nbytes, uint64_t file_nbytes) {
    answer whole = parse(bytes, nbytes, file_nbytes);
    answer pieces = parse(bytes, fuzz_hash(bytes, nbytes) % (nbytes + 1), file_nbytes);
    while (pieces.status == UM_E_FULL && pieces.err.asked <= nbytes) {
        pieces = parse(bytes, pieces.err.asked, file_nbytes);
    }
    PROMISED(whole.status != UM_E_FULL || nbytes < file_nbytes);
    PROMISED(whole.status == UM_E_FULL ? pieces.status == UM_E_FULL : same_answer(&whole, &pieces));
    um_safetensors_free(&whole.st);
    um_safetensors_free(&pieces.st);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    parse_file(bytes, nbytes, nbytes);
    if (nbytes >= LENGTH_NBYTES) {
        uint8_t *repaired = fuzz_copy(bytes, nbytes);
        uint64_t json_nbytes = nbytes - LENGTH_NBYTES;
        memcpy(repaired, &json_nbytes, sizeof json_nbytes);
        uint64_t data_nbytes = fuzz_largest_number(bytes + LENGTH_NBYTES, json_nbytes);
        parse_file(repaired, nbytes, nbytes + data_nbytes);
        free(repaired);
    }
    return 0;
}
