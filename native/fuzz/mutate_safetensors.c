/* Mutants of safetensors headers: tensors and texts are dropped, repeated, moved and changed, and
 * the data has no gap again, but for some. */
#include "mutate.h"

#include <inttypes.h>

enum { LENGTH_NBYTES = 8, MAX_ROWS = 64, MAX_DIMS = 8 };

typedef enum change {
    DROP,
    REPEAT,
    RENAME,
    RESHAPE,
    RETYPE,
    MOVE_DATA,
    DROP_TEXTS,
    REPEAT_TEXT,
    N_CHANGES,
} change;

typedef struct mutant {
    const uint8_t *bytes;
    const um_safetensors *st;
    mutate_random random;
    mutate_file file;
    change change;
    uint64_t row, end; /* that is changed; where data ends that was laid out */
} mutant;

static void put_text(mutant *m, const char *text) {
    mutate_put(&m->file, text, strlen(text));
}

static void put_number(mutant *m, uint64_t number) {
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, number);
    put_text(m, text);
}

/* Blanks are allowed between any two words. */
static void put_word(mutant *m, const char *word) {
    static const char *const blanks[] = {"", "", "", "", "", " ", "\n", "\t\r "};
    put_text(m, blanks[mutate_below(&m->random, sizeof blanks / sizeof blanks[0])]);
    put_text(m, word);
}

/* Copies a text with its quotes; one that is renamed ends with more. */
static void put_quoted(mutant *m, um_safetensors_text text, bool renamed) {
    static const char *const ends[] = {"a",       "\\n",      "\\u0041", "\\ud83d\\ude00",
                                       "\\ud800", "\xc3\xa9", "\\/",     "\\\\",
                                       "\\\"",    "\\u0000",  "\xff",    "\x1f"};
    mutate_put(&m->file, m->bytes + text.offset - 1, text.nbytes + UINT64_C(1));
    if (renamed) {
        put_text(m, ends[mutate_below(&m->random, sizeof ends / sizeof ends[0])]);
    }
    put_text(m, "\"");
}

static void put_texts(mutant *m) {
    uint64_t repeated = mutate_below(&m->random, m->st->n_kv);
    put_word(m, "\"__metadata__\"");
    put_word(m, ":");
    put_word(m, "{");
    for (uint64_t i = 0; i < m->st->n_kv; i++) {
        unsigned n_times = m->change == REPEAT_TEXT && i == repeated ? 2 : 1;
        for (unsigned j = 0; j < n_times; j++) {
            put_text(m, i + j > 0 ? "," : "");
            put_quoted(m, m->st->kv[i].key, j > 0);
            put_word(m, ":");
            put_quoted(m, m->st->kv[i].value, mutate_below(&m->random, 16) == 0);
        }
    }
    put_word(m, "}");
}

static void put_tensor(mutant *m, const um_safetensors_tensor *t, bool here, bool renamed) {
    static const uint64_t sizes[] = {0, 1, 2, 3, 7, 32, 4096, UINT32_MAX, INT64_MAX, UINT64_MAX};
    uint64_t dims[MAX_DIMS] = {0}, n_dims = t->n_dims < MAX_DIMS ? t->n_dims : MAX_DIMS - 1;
    for (uint64_t i = 0; i < n_dims; i++) {
        dims[i] = m->st->dims[t->first_dim + i];
    }
    if (here && m->change == RESHAPE) {
        n_dims = mutate_below(&m->random, n_dims + 2);
        for (uint64_t i = t->n_dims; i < n_dims; i++) {
            dims[i] = 1;
        }
        dims[mutate_below(&m->random, n_dims)] =
            sizes[mutate_below(&m->random, sizeof sizes / sizeof sizes[0])];
    }
    um_safetensors_type type = here && m->change == RETYPE
                                   ? (um_safetensors_type)mutate_below(&m->random, UM_ST_TYPE_COUNT)
                                   : t->type;
    put_quoted(m, t->name, renamed);
    put_word(m, ":");
    put_word(m, "{\"dtype\":\"");
    put_text(m, um_safetensors_type_name(type));
    put_word(m, "\",\"shape\":[");
    uint64_t n_bits = um_safetensors_type_bits(type);
    for (uint64_t i = 0; i < n_dims; i++) {
        put_word(m, i > 0 ? "," : "");
        put_number(m, dims[i]);
        n_bits *= dims[i];
    }
    put_word(m, "],\"data_offsets\":[");
    uint64_t begin = m->end, nbytes = n_bits / 8;
    if (here && m->change == MOVE_DATA) {
        begin = sizes[mutate_below(&m->random, sizeof sizes / sizeof sizes[0])];
    }
    put_number(m, begin);
    put_word(m, ",");
    put_number(m, begin + nbytes);
    put_word(m, "]");
    put_word(m, "}");
    m->end = begin + nbytes;
}

static size_t put_file(mutant *m) {
    uint64_t length = 0, n = m->st->n_tensors, first = mutate_below(&m->random, n);
    mutate_put(&m->file, &length, sizeof length);
    put_text(m, "{");
    bool is_first = true;
    if (m->st->n_kv > 0 && m->change != DROP_TEXTS) {
        put_texts(m);
        is_first = false;
    }
    for (uint64_t i = 0; i < n; i++) {
        uint64_t row = (first + i) % n; /* any order is valid */
        bool here = row == m->row;
        unsigned n_times = here && m->change == DROP ? 0 : here && m->change == REPEAT ? 2 : 1;
        for (unsigned j = 0; j < n_times; j++) {
            put_text(m, is_first ? "" : ",");
            put_tensor(m, &m->st->tensors[row], here, here && (m->change == RENAME || j > 0));
            is_first = false;
        }
    }
    put_text(m, "}");
    length = m->file.nbytes - sizeof length;
    memcpy(m->file.bytes, &length, sizeof length);
    return m->file.is_full ? 0 : m->file.nbytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t nbytes, size_t capacity, unsigned seed) {
    um_safetensors st = {0};
    mutant m = {.bytes = bytes, .st = &st, .random = {seed}};
    if (mutate_below(&m.random, 3) == 0 || nbytes < LENGTH_NBYTES) {
        return LLVMFuzzerMutate(bytes, nbytes, capacity);
    }
    /* As the target does: behind the right length, and before as much data as the header names. */
    uint64_t length = nbytes - LENGTH_NBYTES;
    memcpy(bytes, &length, sizeof length);
    uint64_t file_nbytes = nbytes + fuzz_largest_number(bytes + LENGTH_NBYTES, length);
    if (um_safetensors_parse(&st, bytes, nbytes, file_nbytes, NULL) != UM_OK) {
        return LLVMFuzzerMutate(bytes, nbytes, capacity);
    }
    size_t made = 0;
    if (st.n_tensors + st.n_kv <= MAX_ROWS && capacity > LENGTH_NBYTES) {
        m.change = (change)mutate_below(&m.random, N_CHANGES);
        m.row = mutate_below(&m.random, st.n_tensors);
        m.file = (mutate_file){.bytes = malloc(capacity), .capacity = capacity};
        PROMISED(m.file.bytes != NULL);
        made = put_file(&m);
        memcpy(bytes, m.file.bytes, made);
        free(m.file.bytes);
    }
    um_safetensors_free(&st);
    return made != 0 ? made : LLVMFuzzerMutate(bytes, nbytes, capacity);
}
