/* Reads the header of a safetensors file (https://github.com/huggingface/safetensors), in one pass
 * and without recursion: the format fixes the keys and the depth of its JSON. The input is not
 * trusted: tables grow with the rows seen, and no sum or product is unchecked. */
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
    LENGTH_NBYTES = 8,
    JSON_NBYTES_MAX = 100000000, /* the limit of the format */
    KEYS_MAX = 65536,
    FIRST_ROWS = 16,
    ESCAPE_NBYTES_MAX = 6 /* for one byte of text: \u0041 */
};

static const char not_json[] = "the header is not valid JSON";
static const char not_an_integer[] = "a dimension or offset is not an unsigned integer";

/* ---- types ---- */

typedef struct type_row {
    const char *name;
    unsigned bits;
} type_row;

#define ROW(name, bits) [UM_ST_##name] = {#name, bits}
static const type_row types[UM_ST_TYPE_COUNT] = {
    ROW(BOOL, 8),        ROW(F4, 4),      ROW(F6_E2M3, 6), ROW(F6_E3M2, 6), ROW(U8, 8),
    ROW(I8, 8),          ROW(F8_E5M2, 8), ROW(F8_E4M3, 8), ROW(F8_E8M0, 8), ROW(F8_E4M3FNUZ, 8),
    ROW(F8_E5M2FNUZ, 8), ROW(I16, 16),    ROW(U16, 16),    ROW(F16, 16),    ROW(BF16, 16),
    ROW(I32, 32),        ROW(U32, 32),    ROW(F32, 32),    ROW(C64, 64),    ROW(F64, 64),
    ROW(I64, 64),        ROW(U64, 64)};

const char *um_safetensors_type_name(um_safetensors_type type) {
    return (unsigned)type < UM_ST_TYPE_COUNT ? types[type].name : NULL;
}

unsigned um_safetensors_type_bits(um_safetensors_type type) {
    return (unsigned)type < UM_ST_TYPE_COUNT ? types[type].bits : 0;
}

/* ---- bytes ---- */

typedef struct reader {
    const unsigned char *bytes;
    uint64_t at, end, file_nbytes;
    um_error *err;
} reader;

static um_status fail(const reader *r, const char *rule, uint64_t offset) {
    return um__fail_format(r->err, rule, offset);
}

/* Returns the table with room for one more row; NULL without memory, and then the table stays.
 * Capacities are powers of two. */
static void *grow(const reader *r, void *table, uint64_t n, size_t row_bytes) {
    if (n != 0 && (n < FIRST_ROWS || !um__is_power_of_two(n))) {
        return table;
    }
    uint64_t n_rows = n == 0 ? FIRST_ROWS : 2 * n;
    void *grown = um__heap_alloc(n_rows, row_bytes);
    if (grown == NULL) {
        um__fail_os(r->err, ENOMEM, n_rows * row_bytes, "calloc");
        return NULL;
    }
    if (n != 0) {
        memcpy(grown, table, n * row_bytes);
    }
    um__heap_free(table);
    return grown;
}

/* Skips spaces and returns the next byte, without taking it; 0 at the end. */
static unsigned char peek(reader *r) {
    while (r->at < r->end) {
        unsigned char c = r->bytes[r->at];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r') {
            return c;
        }
        r->at++;
    }
    return 0;
}

static um_status pass(reader *r, unsigned char c) {
    UM__BREAKS_IF(peek(r) != c, r->err, not_json, r->at);
    r->at++;
    return UM_OK;
}

/* Fails for a wrong value: one of another kind breaks `rule`, any other text is no JSON. */
static um_status fail_value(reader *r, const char *rule) {
    unsigned char first = peek(r);
    bool is_value = first != 0 && strchr("{[\"-0123456789tfn", first) != NULL;
    return fail(r, is_value ? rule : not_json, r->at);
}

/* Begins a value whose first byte must be c. */
static um_status begin(reader *r, unsigned char c, const char *rule, uint64_t *out_field) {
    UM__RETURN_IF(peek(r) != c, fail_value(r, rule));
    *out_field = r->at++;
    return UM_OK;
}

/* Goes to the n-th item of an object or array; *out_more is false behind the last one. */
static um_status next_item(reader *r, uint64_t n, unsigned char close, bool *out_more) {
    unsigned char c = peek(r);
    *out_more = c != close;
    if (c == close || (n > 0 && c == ',')) {
        r->at++;
    } else if (n > 0) {
        return fail(r, not_json, r->at);
    }
    return UM_OK;
}

/* ---- strings ---- */

enum { NO_ESCAPE = 0x110000, HALF_A_PAIR };

/* Returns the number of four hexadecimal digits, or NO_ESCAPE. */
static uint32_t read_hex(const unsigned char *p) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t c = p[i], letter = (c | 0x20) - 'a';
        if (c - '0' > 9 && letter > 5) {
            return NO_ESCAPE;
        }
        value = value << 4 | (c - '0' <= 9 ? c - '0' : letter + 10);
    }
    return value;
}

/* Returns the code point of the escape at p, which ends before `end`; or NO_ESCAPE, HALF_A_PAIR. */
static uint32_t read_escape(const unsigned char *p, const unsigned char *end,
                            unsigned *out_nbytes) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    *out_nbytes = 2;
    if (end - p < 2) {
        return NO_ESCAPE;
    }
    if (p[1] != 'u') {
        const char *letter = memchr(letters, p[1], sizeof(letters) - 1);
        return letter == NULL ? NO_ESCAPE : (uint32_t)meanings[letter - letters];
    }
    *out_nbytes = 6;
    uint32_t c = end - p < 6 ? NO_ESCAPE : read_hex(p + 2);
    if (c < 0xd800 || c > 0xdfff) {
        return c;
    }
    uint32_t low = end - p >= 12 && p[6] == '\\' && p[7] == 'u' ? read_hex(p + 8) : 0;
    if (c >= 0xdc00 || low < 0xdc00 || low > 0xdfff) {
        return HALF_A_PAIR;
    }
    *out_nbytes = 12;
    return 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
}

/* Reads a string behind its quote. The header is known to be UTF-8. */
static um_status read_string(reader *r, um_safetensors_text *out) {
    out->offset = (uint32_t)r->at;
    for (;;) {
        unsigned char c = r->at < r->end ? r->bytes[r->at] : 0;
        if (c == '"') {
            break;
        }
        if (c == '\\') {
            unsigned nbytes;
            uint32_t code = read_escape(r->bytes + r->at, r->bytes + r->end, &nbytes);
            UM__BREAKS_IF(code >= NO_ESCAPE, r->err,
                          code == NO_ESCAPE ? "a string has an escape that JSON does not know"
                                            : "a string has half of a surrogate pair",
                          r->at);
            r->at += nbytes;
        } else if (c < 0x20) {
            return fail(r, r->at < r->end ? "a string has a control character" : not_json, r->at);
        } else {
            r->at++;
        }
    }
    out->nbytes = (uint32_t)r->at - out->offset;
    r->at++;
    return UM_OK;
}

static size_t write_utf8(uint32_t c, char *out) {
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t n_more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
    out[0] = (char)(lead[n_more] | c >> 6 * n_more);
    for (size_t i = 1; i <= n_more; i++) {
        out[i] = (char)(0x80 | (c >> 6 * (n_more - i) & 0x3f));
    }
    return n_more + 1;
}

size_t um_safetensors_write_text(const void *bytes, um_safetensors_text text, char *out) {
    const unsigned char *p = (const unsigned char *)bytes + text.offset, *end = p + text.nbytes;
    size_t n = 0;
    while (p < end) {
        const unsigned char *escape = memchr(p, '\\', (size_t)(end - p));
        size_t n_plain = (size_t)((escape == NULL ? end : escape) - p);
        memcpy(out + n, p, n_plain);
        n += n_plain;
        p += n_plain;
        if (escape != NULL) {
            unsigned nbytes;
            n += write_utf8(read_escape(p, end, &nbytes), out + n);
            p += nbytes;
        }
    }
    return n;
}

static bool text_is(const reader *r, um_safetensors_text text, const char *expected) {
    char resolved[ESCAPE_NBYTES_MAX * sizeof("__metadata__")];
    size_t nbytes = strlen(expected);
    if (text.nbytes == nbytes) {
        return memcmp(r->bytes + text.offset, expected, nbytes) == 0;
    }
    return text.nbytes > nbytes && text.nbytes <= ESCAPE_NBYTES_MAX * nbytes &&
           um_safetensors_write_text(r->bytes, text, resolved) == nbytes &&
           memcmp(resolved, expected, nbytes) == 0;
}

static um_status read_key(reader *r, um_safetensors_text *out) {
    UM__TRY(pass(r, '"'));
    UM__TRY(read_string(r, out));
    return pass(r, ':');
}

static uint64_t quote_of(um_safetensors_text text) {
    return text.offset - 1;
}

/* ---- texts that differ ---- */

/* Fails for the first text in the header that repeats an earlier one, its escapes resolved. Each of
 * n rows, `stride` bytes apart, begins with a text. */
static um_status check_texts_differ(const reader *r, const void *rows, size_t stride, uint64_t n,
                                    const char *rule) {
    if (n < 2) {
        return UM_OK;
    }
    um_safetensors_text text;
    uint64_t resolved_nbytes = 1;
    for (uint64_t i = 0; i < n; i++) {
        memcpy(&text, (const unsigned char *)rows + i * stride, sizeof(text));
        if (memchr(r->bytes + text.offset, '\\', text.nbytes) != NULL) {
            resolved_nbytes += text.nbytes;
        }
    }
    um__name *names = um__heap_alloc(n, sizeof(*names));
    char *resolved = um__heap_alloc(resolved_nbytes, 1);
    bool differ = true;
    uint64_t twice = 0;
    if (names != NULL && resolved != NULL) {
        char *next = resolved;
        for (uint64_t i = 0; i < n; i++) {
            memcpy(&text, (const unsigned char *)rows + i * stride, sizeof(text));
            const unsigned char *bytes = r->bytes + text.offset;
            size_t nbytes = text.nbytes;
            if (memchr(bytes, '\\', nbytes) != NULL) {
                bytes = (const unsigned char *)next;
                nbytes = um_safetensors_write_text(r->bytes, text, next);
                next += nbytes;
            }
            names[i] = um__name_of(bytes, nbytes, quote_of(text));
        }
        differ = um__names_differ(names, n, &twice);
    }
    um_status status =
        names == NULL || resolved == NULL
            ? um__fail_os(r->err, ENOMEM, n * sizeof(*names) + resolved_nbytes, "calloc")
        : differ ? UM_OK
                 : fail(r, rule, twice);
    um__heap_free(names);
    um__heap_free(resolved);
    return status;
}

/* ---- metadata ---- */

static um_status read_metadata(reader *r, um_safetensors *st) {
    static const char null[] = "null"; /* the format's library reads it as none */
    uint64_t field;
    if (peek(r) == null[0] && r->end - r->at >= sizeof(null) - 1 &&
        memcmp(r->bytes + r->at, null, sizeof(null) - 1) == 0) {
        r->at += sizeof(null) - 1;
        return UM_OK;
    }
    UM__TRY(begin(r, '{', "__metadata__ is not an object", &field));
    for (bool more;;) {
        um_safetensors_kv kv;
        UM__TRY(next_item(r, st->n_kv, '}', &more));
        if (!more) {
            break;
        }
        UM__BREAKS_IF(st->n_kv == KEYS_MAX, r->err, "more than 65536 keys of __metadata__", r->at);
        UM__TRY(read_key(r, &kv.key));
        UM__TRY(begin(r, '"', "a value of __metadata__ is not a string", &field));
        UM__TRY(read_string(r, &kv.value));
        void *rows = grow(r, st->kv, st->n_kv, sizeof(*st->kv));
        UM__RETURN_IF(rows == NULL, UM_E_NOMEM);
        st->kv = rows;
        st->kv[st->n_kv++] = kv;
    }
    return check_texts_differ(r, st->kv, sizeof(*st->kv), st->n_kv,
                              "a key of __metadata__ occurs twice");
}

/* ---- tensors ---- */

enum { DTYPE, SHAPE, DATA_OFFSETS, N_FIELDS };

/* A tensor while it is read. `fields` are the places of the values; 0: not seen yet. */
typedef struct entry {
    uint64_t fields[N_FIELDS];
    uint64_t begin, end;
} entry;

static bool is_digit(const reader *r) {
    return r->at < r->end && r->bytes[r->at] >= '0' && r->bytes[r->at] <= '9';
}

static um_status read_integer(reader *r, uint64_t *out) {
    peek(r);
    uint64_t field = r->at;
    UM__RETURN_IF(!is_digit(r), fail_value(r, not_an_integer));
    bool fits = true;
    for (*out = 0; is_digit(r); r->at++) {
        fits = fits && !__builtin_mul_overflow(*out, (uint64_t)10, out) &&
               !__builtin_add_overflow(*out, (uint64_t)(r->bytes[r->at] - '0'), out);
    }
    unsigned char next = r->at < r->end ? r->bytes[r->at] : 0;
    UM__BREAKS_IF((r->bytes[field] == '0' && r->at - field > 1) || next == '.' || next == 'e' ||
                      next == 'E',
                  r->err, not_an_integer, field);
    return fits ? UM_OK : fail(r, "a dimension or offset has more than 64 bits", field);
}

static um_status read_dtype(reader *r, um_safetensors_tensor *t) {
    uint64_t field;
    um_safetensors_text text;
    UM__TRY(begin(r, '"', "a tensor's dtype is not a string", &field));
    UM__TRY(read_string(r, &text));
    for (t->type = 0; t->type < UM_ST_TYPE_COUNT; t->type++) {
        if (text_is(r, text, types[t->type].name)) {
            return UM_OK;
        }
    }
    return fail(r, "unknown dtype of a tensor", field);
}

static um_status read_shape(reader *r, um_safetensors *st, um_safetensors_tensor *t) {
    uint64_t field;
    UM__TRY(begin(r, '[', "a tensor's shape is not an array", &field));
    t->first_dim = (uint32_t)st->n_dims;
    for (bool more;; t->n_dims++) {
        uint64_t dim;
        UM__TRY(next_item(r, t->n_dims, ']', &more));
        if (!more) {
            return UM_OK;
        }
        peek(r);
        field = r->at;
        UM__TRY(read_integer(r, &dim));
        UM__BREAKS_IF(t->n_dims == UM_SAFETENSORS_MAX_DIMS, r->err,
                      "a tensor has more than 64 dimensions", field);
        void *rows = grow(r, st->dims, st->n_dims, sizeof(*st->dims));
        UM__RETURN_IF(rows == NULL, UM_E_NOMEM);
        st->dims = rows;
        st->dims[st->n_dims++] = dim;
    }
}

static um_status read_data_offsets(reader *r, entry *e) {
    static const char rule[] = "a tensor's data_offsets are not an array of two";
    uint64_t field, numbers[2] = {0}, n = 0;
    UM__TRY(begin(r, '[', rule, &field));
    for (bool more;; n++) {
        UM__TRY(next_item(r, n, ']', &more));
        if (!more) {
            break;
        }
        UM__BREAKS_IF(n == 2, r->err, rule, field);
        UM__TRY(read_integer(r, &numbers[n]));
    }
    e->begin = numbers[0];
    e->end = numbers[1];
    return n == 2 ? UM_OK : fail(r, rule, field);
}

/* Checks the fields against each other and the file, and sets the place of the data. */
static um_status place_tensor(const reader *r, const um_safetensors *st, const entry *e,
                              um_safetensors_tensor *t) {
    /* A dimension of 0 makes an empty tensor, but must not hide an overflow of the others: NumPy
     * has no array of such a shape. */
    uint64_t n_bits = types[t->type].bits;
    bool is_empty = false;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        uint64_t dim = st->dims[t->first_dim + i];
        is_empty = is_empty || dim == 0;
        UM__BREAKS_IF(__builtin_mul_overflow(n_bits, dim == 0 ? 1 : dim, &n_bits), r->err,
                      "a tensor's dimensions overflow", e->fields[SHAPE]);
    }
    UM__BREAKS_IF(!is_empty && n_bits % 8 != 0, r->err, "a tensor's values are not whole bytes",
                  e->fields[SHAPE]);
    t->nbytes = is_empty ? 0 : n_bits / 8;
    t->place = (uint32_t)e->fields[DATA_OFFSETS];
    UM__BREAKS_IF(e->begin > e->end, r->err, "a tensor ends before it begins", t->place);
    UM__BREAKS_IF(e->end - e->begin != t->nbytes, r->err,
                  "a tensor has not the bytes of its shape and dtype", t->place);
    UM__BREAKS_IF(e->end > r->file_nbytes - st->header_nbytes, r->err,
                  "a tensor passes the end of the file", t->place);
    t->offset = st->header_nbytes + e->begin;
    return UM_OK;
}

static um_status read_tensor(reader *r, um_safetensors *st, um_safetensors_text name) {
    static const char *const names[N_FIELDS] = {"dtype", "shape", "data_offsets"};
    static const char *const missing[N_FIELDS] = {"a tensor has no dtype", "a tensor has no shape",
                                                  "a tensor has no data_offsets"};
    um_safetensors_tensor t = {.name = name};
    entry e = {{0}, 0, 0};
    uint64_t field;
    UM__TRY(begin(r, '{', "a tensor is not an object", &field));
    bool more;
    for (uint64_t n = 0;; n++) {
        um_safetensors_text key;
        UM__TRY(next_item(r, n, '}', &more));
        if (!more) {
            break;
        }
        UM__TRY(read_key(r, &key));
        int which = 0;
        while (which < N_FIELDS && !text_is(r, key, names[which])) {
            which++;
        }
        UM__BREAKS_IF(which == N_FIELDS, r->err,
                      "a tensor has a field that the format does not know", quote_of(key));
        UM__BREAKS_IF(e.fields[which] != 0, r->err, "a field of a tensor occurs twice",
                      quote_of(key));
        peek(r);
        e.fields[which] = r->at;
        UM__TRY(which == DTYPE   ? read_dtype(r, &t)
                : which == SHAPE ? read_shape(r, st, &t)
                                 : read_data_offsets(r, &e));
    }
    for (int i = 0; i < N_FIELDS; i++) {
        UM__BREAKS_IF(e.fields[i] == 0, r->err, missing[i], field);
    }
    UM__TRY(place_tensor(r, st, &e, &t));
    void *rows = grow(r, st->tensors, st->n_tensors, sizeof(*st->tensors));
    UM__RETURN_IF(rows == NULL, UM_E_NOMEM);
    st->tensors = rows;
    st->tensors[st->n_tensors++] = t;
    return UM_OK;
}

/* ---- where data lies ---- */

static int compare_places(const void *a, const void *b) {
    const um_safetensors_tensor *x = *(const um_safetensors_tensor *const *)a;
    const um_safetensors_tensor *y = *(const um_safetensors_tensor *const *)b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    if (x->nbytes != y->nbytes) {
        return x->nbytes < y->nbytes ? -1 : 1;
    }
    return (x->place > y->place) - (x->place < y->place);
}

/* Checks that each byte behind the header belongs to one tensor: in this order, the tensors follow
 * each other up to the end of the file. */
static um_status check_data_covered(const reader *r, const um_safetensors *st,
                                    const um_safetensors_tensor *const *order) {
    uint64_t end = st->header_nbytes;
    for (uint64_t i = 0; i < st->n_tensors; i++) {
        const um_safetensors_tensor *t = order[i];
        UM__BREAKS_IF(t->offset != end, r->err,
                      t->offset < end ? "two tensors overlap"
                                      : "the bytes before a tensor are no tensor's",
                      t->place);
        end += t->nbytes;
    }
    return end == r->file_nbytes ? UM_OK : fail(r, "the file goes on behind its tensors", end);
}

static um_status check_places(const reader *r, const um_safetensors *st) {
    const um_safetensors_tensor **order =
        um__heap_alloc(st->n_tensors == 0 ? 1 : st->n_tensors, sizeof(*order));
    UM__RETURN_IF(order == NULL,
                  um__fail_os(r->err, ENOMEM, st->n_tensors * sizeof(*order), "calloc"));
    bool in_order = true; /* writers usually sort them */
    for (uint64_t i = 0; i < st->n_tensors; i++) {
        order[i] = &st->tensors[i];
        in_order = in_order && (i == 0 || compare_places(&order[i - 1], &order[i]) < 0);
    }
    if (!in_order) {
        qsort(order, st->n_tensors, sizeof(*order), compare_places);
    }
    um_status status = check_data_covered(r, st, order);
    um__heap_free(order);
    return status;
}

/* ---- the whole ---- */

static um_status read_head(reader *r, um_safetensors *st) {
    static const char truncated[] = "the file ends inside its header";
    uint64_t limit = LENGTH_NBYTES + (uint64_t)JSON_NBYTES_MAX, json_nbytes = 0;
    if (r->file_nbytes < limit) {
        limit = r->file_nbytes;
    }
    UM__BREAKS_IF(limit < LENGTH_NBYTES, r->err, truncated, 0);
    UM__RETURN_IF(r->end < LENGTH_NBYTES, um__fail_full(r->err, UM_HEADER_FULL, limit, r->end,
                                                        LENGTH_NBYTES, "bytes of the header"));
    memcpy(&json_nbytes, r->bytes, LENGTH_NBYTES);
    UM__BREAKS_IF(json_nbytes > JSON_NBYTES_MAX, r->err,
                  "the header is longer than 100000000 bytes", 0);
    st->header_nbytes = LENGTH_NBYTES + json_nbytes;
    UM__BREAKS_IF(st->header_nbytes > r->file_nbytes, r->err, truncated, 0);
    UM__RETURN_IF(st->header_nbytes > r->end,
                  um__fail_full(r->err, UM_HEADER_FULL, limit, r->end, st->header_nbytes,
                                "bytes of the header"));
    r->at = LENGTH_NBYTES;
    r->end = st->header_nbytes;
    uint64_t utf8_nbytes = um__utf8_nbytes(r->bytes + r->at, json_nbytes);
    return utf8_nbytes == json_nbytes
               ? UM_OK
               : fail(r, "the header is not valid UTF-8", r->at + utf8_nbytes);
}

static um_status read_entries(reader *r, um_safetensors *st) {
    if (r->at == r->end || r->bytes[r->at] != '{') {
        return fail(r, "the header does not begin with {", r->at);
    }
    r->at++;
    bool more, has_metadata = false;
    for (uint64_t n = 0;; n++) {
        um_safetensors_text key;
        UM__TRY(next_item(r, n, '}', &more));
        if (!more) {
            break;
        }
        UM__TRY(read_key(r, &key));
        if (!text_is(r, key, "__metadata__")) {
            UM__TRY(read_tensor(r, st, key));
        } else if (has_metadata) {
            return fail(r, "__metadata__ occurs twice", quote_of(key));
        } else {
            has_metadata = true;
            UM__TRY(read_metadata(r, st));
        }
    }
    return peek(r) == 0 && r->at == r->end ? UM_OK
                                           : fail(r, "the header goes on behind its JSON", r->at);
}

static um_status read_all(reader *r, um_safetensors *st) {
    UM__TRY(read_head(r, st));
    UM__TRY(read_entries(r, st));
    UM__TRY(check_texts_differ(r, st->tensors, sizeof(*st->tensors), st->n_tensors,
                               "a tensor's name occurs twice"));
    return check_places(r, st);
}

um_status um_safetensors_parse(um_safetensors *out, const void *bytes, size_t nbytes,
                               uint64_t file_nbytes, um_error *err) {
    UM__INVALID_IF(nbytes > file_nbytes, err, "more bytes than the file has");
    reader r = {.bytes = bytes, .end = nbytes, .file_nbytes = file_nbytes, .err = err};
    um_safetensors st = {0};
    um_status status = read_all(&r, &st);
    if (status != UM_OK) {
        um_safetensors_free(&st);
        return status;
    }
    *out = st;
    return UM_OK;
}

void um_safetensors_free(um_safetensors *safetensors) {
    um__heap_free(safetensors->kv);
    um__heap_free(safetensors->tensors);
    um__heap_free(safetensors->dims);
    *safetensors = (um_safetensors){0};
}
