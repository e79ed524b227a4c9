/* GGUF headers: a file with everything, each of its prefixes, each rule, failing allocations, and
 * files with random damage. The bytes always end where an allocation ends, so that a sanitizer sees
 * a read past them. */

#include "fault_os.h"
#include "unimem_formats.h"

/* ---- writing files ---- */

enum { FILE_MAX = 1 << 16, DATA_NBYTES = 256, UNKNOWN_TENSOR_TYPE = 42 };

static unsigned char file[FILE_MAX];
static size_t file_nbytes;
static size_t marked; /* the offset of the field that a rule is about */

static void put(const void *bytes, size_t nbytes) {
    REQUIRE(nbytes <= FILE_MAX - file_nbytes);
    memcpy(file + file_nbytes, bytes, nbytes);
    file_nbytes += nbytes;
}
static void put_u8(uint8_t value) {
    put(&value, sizeof value);
}
static void put_u32(uint32_t value) {
    put(&value, sizeof value);
}
static void put_u64(uint64_t value) {
    put(&value, sizeof value);
}
static void put_string(const char *text) {
    put_u64(strlen(text));
    put(text, strlen(text));
}
static void put_array(um_gguf_type item_type, uint64_t n) {
    put_u32(item_type);
    put_u64(n);
}
static void put_key(const char *key, um_gguf_type type) {
    put_string(key);
    put_u32(type);
}
static void mark(void) {
    marked = file_nbytes;
}
static void start(uint64_t n_tensors, uint64_t n_kv) {
    file_nbytes = 0;
    put("GGUF", 4);
    put_u32(3);
    put_u64(n_tensors);
    put_u64(n_kv);
}
static void put_zeros(size_t nbytes) {
    REQUIRE(nbytes <= FILE_MAX - file_nbytes);
    memset(file + file_nbytes, 0, nbytes);
    file_nbytes += nbytes;
}
static void put_data(size_t alignment) {
    put_zeros((alignment - file_nbytes % alignment) % alignment + DATA_NBYTES);
}
/* A tensor with up to two dimensions, of which n_dims are written. */
static void put_tensor(const char *name, uint32_t n_dims, uint64_t ne0, uint64_t ne1, uint32_t type,
                       uint64_t offset) {
    const uint64_t ne[2] = {ne0, ne1};
    put_string(name);
    put_u32(n_dims);
    put(ne, n_dims * sizeof(uint64_t));
    put_u32(type);
    put_u64(offset);
}

/* Every type of metadata, and tensors with 0 to 4 dimensions. */
static void put_everything(void) {
    static const unsigned char value[8] = {1, 0, 0, 0, 0, 0, 0, 0};
    static const size_t value_bytes[UM_GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    static const uint64_t ne[UM_GGUF_MAX_DIMS] = {2, 3, 1, 2};
    start(4, 2 * UM_GGUF_TYPE_COUNT);
    for (uint32_t type = 0; type < UM_GGUF_TYPE_COUNT; type++) {
        char key[16];
        snprintf(key, sizeof key, "value.%u", type);
        if (type == UM_GGUF_ARRAY) {
            put_key("general.alignment", UM_GGUF_UINT32);
            put_u32(64);
        } else {
            put_key(key, (um_gguf_type)type);
            if (type == UM_GGUF_STRING) {
                put_string("a string");
            } else {
                put(value, value_bytes[type]);
            }
        }
        snprintf(key, sizeof key, "array.%u", type);
        put_key(key, UM_GGUF_ARRAY);
        put_array((um_gguf_type)type, 2);
        for (int i = 0; i < 2; i++) {
            if (type == UM_GGUF_STRING) {
                put_string(i == 0 ? "" : "\xff");
            } else if (type == UM_GGUF_ARRAY) {
                put_array(UM_GGUF_UINT16, 1);
                put(value, 2);
            } else {
                put(value, value_bytes[type]);
            }
        }
    }
    put_tensor("scalar", 0, 0, 0, 0, 0);
    put_tensor("quantized", 1, 64, 0, 8, 64);
    put_tensor("empty \xc3\xa9", 2, 4, 0, 0, 64);
    put_string("four");
    put_u32(4);
    put(ne, sizeof ne);
    put_u32(1);
    put_u64(192);
    put_data(64);
}

/* ---- reading them ---- */

/* Parses the first nbytes of `file` as part of a file of `size`. */
static um_status parse(um_gguf *out, size_t nbytes, uint64_t size) {
    unsigned char *exact = malloc(nbytes == 0 ? 1 : nbytes);
    REQUIRE(exact != NULL);
    memcpy(exact, file, nbytes);
    um_status status = um_gguf_parse(out, exact, nbytes, size, &test_err);
    free(exact);
    return status;
}

static bool is_text(uint64_t offset, uint64_t nbytes, const char *text) {
    return nbytes == strlen(text) && memcmp(file + offset, text, nbytes) == 0;
}

TEST(everything) {
    um_gguf g;
    put_everything();
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    CHECK_EQ(g.version, 3);
    CHECK_EQ(g.alignment, 64);
    CHECK_EQ(g.n_kv, 2 * UM_GGUF_TYPE_COUNT);
    CHECK_EQ(g.n_tensors, 4);
    CHECK_EQ(g.data_offset, file_nbytes - DATA_NBYTES);
    CHECK(g.header_nbytes <= g.data_offset);
    CHECK(g.data_offset - g.header_nbytes < 64);
    for (uint32_t type = 0; type < UM_GGUF_TYPE_COUNT; type++) {
        const um_gguf_kv *value = &g.kv[2 * type], *array = &g.kv[2 * type + 1];
        if (type != UM_GGUF_ARRAY) {
            CHECK_EQ(value->type, type);
            CHECK_EQ(value->item_type, UM_GGUF_TYPE_COUNT);
            CHECK_EQ(value->n_items, 1);
        }
        CHECK_EQ(array->type, UM_GGUF_ARRAY);
        CHECK_EQ(array->item_type, type);
        CHECK_EQ(array->n_items, 2);
        if (type < UM_GGUF_STRING || type > UM_GGUF_ARRAY) {
            CHECK_EQ(array->value_nbytes, 2 * value->value_nbytes);
        }
    }
    const um_gguf_kv *text = &g.kv[2 * UM_GGUF_STRING];
    CHECK(is_text(text->key_offset, text->key_nbytes, "value.8"));
    CHECK(is_text(text->value_offset, text->value_nbytes, "a string"));
    CHECK_EQ(text[1].value_nbytes, 8 + 8 + 1);
    CHECK_EQ(g.kv[2 * UM_GGUF_ARRAY + 1].value_nbytes, 2 * (4 + 8 + 2));

    const uint64_t nbytes[4] = {4, 68, 0, 24}, offsets[4] = {0, 64, 64, 192};
    const uint32_t n_dims[4] = {0, 1, 2, 4};
    const char *names[4] = {"scalar", "quantized", "empty \xc3\xa9", "four"};
    for (int i = 0; i < 4; i++) {
        CHECK(is_text(g.tensors[i].name_offset, g.tensors[i].name_nbytes, names[i]));
        CHECK_EQ(g.tensors[i].nbytes, nbytes[i]);
        CHECK_EQ(g.tensors[i].offset, g.data_offset + offsets[i]);
        CHECK_EQ(g.tensors[i].n_dims, n_dims[i]);
    }
    CHECK_EQ(g.tensors[1].ne[0], 64);
    CHECK_EQ(g.tensors[1].ne[3], 1);
    CHECK_EQ(g.tensors[3].ne[1], 3);
    um_gguf_free(&g);
    CHECK(g.kv == NULL);
    CHECK(g.tensors == NULL);
    um_gguf_free(&g);
}

/* Parses an input that must fail, and checks that `out` was left alone. */
static void check_fails(um_status expected, size_t nbytes, uint64_t size) {
    um_gguf g, before;
    memset(&g, 0x5a, sizeof g);
    before = g;
    CHECK_STATUS(expected, parse(&g, nbytes, size));
    CHECK(memcmp(&g, &before, sizeof g) == 0);
}

/* `file` must break the rule, at the mark. */
static void check_rule(const char *rule) {
    check_fails(UM_E_FORMAT, file_nbytes, file_nbytes);
    REQUIRE(test_err.status == UM_E_FORMAT);
    if (!CHECK_STR(test_err.what, rule)) {
        fprintf(stderr, "expected: %s\n     got: %s\n", rule, test_err.what);
    }
    CHECK_EQ(test_err.offset, marked);
}

TEST(prefixes) {
    um_gguf g;
    put_everything();
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    size_t header_nbytes = g.header_nbytes;
    um_gguf_free(&g);
    for (size_t n = 0; n < header_nbytes; n++) {
        check_fails(UM_E_FORMAT, n, n); /* the file ends there */
        CHECK(test_err.offset <= n);
        check_fails(UM_E_FULL, n, file_nbytes); /* more of it can be read */
        CHECK_EQ(test_err.used, n);
        CHECK_EQ(test_err.limit, file_nbytes);
        CHECK(test_err.asked > n);
        CHECK(test_err.asked <= file_nbytes);
    }
    CHECK_OK(parse(&g, header_nbytes, file_nbytes));
    um_gguf_free(&g);
    marked = header_nbytes; /* a tensor's data is missing */
    for (size_t n = header_nbytes; n < file_nbytes - DATA_NBYTES + 216; n++) {
        check_fails(UM_E_FORMAT, n, n);
        CHECK_STR(test_err.what, "a tensor passes the end of the file");
    }
    CHECK_OK(parse(&g, header_nbytes, file_nbytes - DATA_NBYTES + 216));
    um_gguf_free(&g);
    check_fails(UM_E_INVALID, file_nbytes, file_nbytes - 1);
    CHECK(um_gguf_parse(&g, file, 3, file_nbytes, NULL) == UM_E_FULL);
    CHECK(um_gguf_parse(&g, file, 3, 3, NULL) == UM_E_FORMAT);
}

TEST(failing_allocations) {
    um_gguf g;
    put_everything();
    fault_os_fail_nth_alloc(0);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    um_gguf_free(&g);
    unsigned n_allocs = fault_os_allocs();
    CHECK(n_allocs >= 2);
    for (unsigned n = 1; n <= n_allocs; n++) {
        fault_os_fail_nth_alloc(n);
        check_fails(UM_E_NOMEM, file_nbytes, file_nbytes);
        CHECK(test_err.os_errno == ENOMEM);
        CHECK(test_err.asked > 0);
    }
    fault_os_fail_nth_alloc(0);
}

/* ---- rules ---- */

TEST(head_rules) {
    start(0, 0);
    marked = 0;
    file[0] = 'g';
    check_rule("the file does not begin with GGUF");
    marked = 4;
    start(0, 0);
    memcpy(file + 4, "\0\0\0\3", 4);
    check_rule("the file is big-endian; only little-endian files are read");
    const uint32_t versions[] = {0, 1, 4, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        start(0, 0);
        memcpy(file + 4, &versions[i], 4);
        check_rule("the version is not 2 or 3");
    }
    for (uint64_t n = 1; n != 0; n *= 8) {
        start(n, 0);
        marked = 8;
        check_rule("more tensors than the file can hold");
        start(0, n);
        marked = 16;
        check_rule("more metadata than the file can hold");
    }
}

TEST(version_2) {
    um_gguf g;
    put_everything();
    file[4] = 2;
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    CHECK_EQ(g.version, 2);
    um_gguf_free(&g);
}

TEST(key_rules) {
    static const char *const not_utf8[] = {"\x80",
                                           "a\xc3",
                                           "\xc0\x80",
                                           "\xc1\xbf",
                                           "\xe0\x9f\xbf",
                                           "\xed\xa0\x80",
                                           "\xed\xbf\xbf",
                                           "\xf0\x8f\xbf\xbf",
                                           "\xf4\x90\x80\x80",
                                           "\xf8\x88\x80\x80\x80",
                                           "\xe2\x28\xa1",
                                           "\xff"};
    static const char *const utf8[] = {"\xc2\x80",         "\xdf\xbf",         "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",     "\xee\x80\x80",     "\xef\xbf\xbf",
                                       "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", ""};
    for (size_t i = 0; i < COUNT(not_utf8); i++) {
        start(0, 1);
        marked = file_nbytes + 8;
        put_key(not_utf8[i], UM_GGUF_UINT32);
        put_u32(0);
        check_rule("a key is not valid UTF-8");
    }
    for (size_t i = 0; i < COUNT(utf8); i++) {
        um_gguf g;
        start(0, 1);
        put_key(utf8[i], UM_GGUF_UINT32);
        put_u32(0);
        CHECK_OK(parse(&g, file_nbytes, file_nbytes));
        um_gguf_free(&g);
    }
    start(0, 1);
    mark();
    put_u64(65536);
    put_zeros(1000);
    check_rule("a key is longer than 65535 bytes");
    start(0, 1);
    mark();
    put_u64(60000);
    put_zeros(1000);
    check_rule("a string is longer than the rest of the file");
    start(0, 3);
    put_key("twice", UM_GGUF_UINT32);
    put_u32(0);
    put_key("once", UM_GGUF_UINT32);
    put_u32(0);
    marked = file_nbytes + 8;
    put_key("twice", UM_GGUF_UINT8);
    put_u8(0);
    check_rule("a key occurs twice");
}

TEST(value_rules) {
    start(0, 1);
    marked = file_nbytes + 8 + 3;
    put_key("key", UM_GGUF_TYPE_COUNT);
    put_u64(0);
    check_rule("unknown type of metadata");
    start(0, 1);
    put_key("key", UM_GGUF_BOOL);
    mark();
    put_u8(2);
    check_rule("a bool is neither 0 nor 1");
    start(0, 1);
    put_key("key", UM_GGUF_ARRAY);
    put_array(UM_GGUF_BOOL, 3);
    put("\0\1", 2);
    mark();
    put_u8(0xff);
    check_rule("a bool is neither 0 nor 1");
    start(0, 1);
    put_key("key", UM_GGUF_STRING);
    mark();
    put_u64(UINT64_MAX);
    check_rule("a string is longer than the rest of the file");
    start(0, 1);
    put_key("key", UM_GGUF_ARRAY);
    put_array(UM_GGUF_STRING, 2);
    put_string("first");
    mark();
    put_u64(1);
    check_rule("a string is longer than the rest of the file");
    start(0, 1);
    put_key("key", UM_GGUF_ARRAY);
    mark();
    put_array(UM_GGUF_TYPE_COUNT, 0);
    check_rule("unknown type of metadata");
    for (uint32_t type = 0; type < UM_GGUF_TYPE_COUNT; type++) {
        /* Lengths that overflow to small numbers when multiplied by the size of an item. */
        const uint64_t lengths[] = {UINT64_MAX, UINT64_C(1) << 61, UINT64_C(1) << 62,
                                    UINT64_C(1) << 63, 1000};
        for (int i = 0; i < 5; i++) {
            start(0, 1);
            put_key("key", UM_GGUF_ARRAY);
            marked = file_nbytes + 4;
            put_array((um_gguf_type)type, lengths[i]);
            put_zeros(8);
            check_rule("an array is longer than the rest of the file");
        }
    }
}

TEST(nested_arrays) {
    um_gguf g;
    for (unsigned depth = 1; depth <= 17; depth++) {
        start(0, 1);
        put_key("key", UM_GGUF_ARRAY);
        for (unsigned i = 1; i < depth; i++) {
            put_array(UM_GGUF_ARRAY, 1);
        }
        mark();
        put_array(UM_GGUF_UINT8, 1);
        put_u8(7);
        if (depth <= 16) {
            CHECK_OK(parse(&g, file_nbytes, file_nbytes));
            um_gguf_free(&g);
        } else {
            check_rule("arrays are nested deeper than 16");
        }
    }
}

TEST(long_header) {
    /* A sparse file: its length is accepted, but it is not read. */
    start(0, 1);
    put_key("key", UM_GGUF_ARRAY);
    marked = file_nbytes + 4;
    put_array(UM_GGUF_UINT8, UINT64_C(1) << 40);
    check_fails(UM_E_FORMAT, file_nbytes, UINT64_C(1) << 41);
    CHECK_STR(test_err.what, "the header is longer than 256 MiB");
    CHECK_EQ(test_err.offset, marked);
}

TEST(alignment_rules) {
    const uint32_t bad[] = {0, 1, 4, 12, 33, UINT32_MAX};
    for (size_t i = 0; i < COUNT(bad); i++) {
        start(0, 1);
        put_key("general.alignment", UM_GGUF_UINT32);
        mark();
        put_u32(bad[i]);
        check_rule("general.alignment is not a power of two of at least 8");
    }
    start(0, 1);
    put_string("general.alignment");
    mark();
    put_u32(UM_GGUF_UINT64);
    put_u64(32);
    check_rule("general.alignment is not a UINT32");
    um_gguf g;
    start(0, 1);
    put_key("general.alignment", UM_GGUF_UINT32);
    put_u32(UINT32_C(1) << 31);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    CHECK_EQ(g.data_offset, UINT64_C(1) << 31);
    um_gguf_free(&g);
}

TEST(dimension_rules) {
    start(1, 0);
    put_string("t");
    mark();
    put_u32(5);
    put_zeros(64);
    check_rule("a tensor has more than 4 dimensions");
    const uint64_t half = UINT64_C(1) << 62;
    const uint64_t pairs[][2] = {{half, 2}, {UINT64_MAX, 0}, {half, half}, {0, UINT64_MAX}};
    const size_t which[] = {1, 0, 1, 1};
    for (int i = 0; i < 4; i++) {
        start(1, 0);
        marked = file_nbytes + 8 + 1 + 4 + 8 * which[i];
        put_tensor("t", 2, pairs[i][0], pairs[i][1], 0, 0);
        check_rule("a tensor's dimensions overflow");
    }
    start(1, 0);
    marked = file_nbytes + 8 + 1 + 4;
    put_tensor("t", 1, INT64_MAX, 0, 28, 0);
    check_rule("a tensor's dimensions overflow");
    start(1, 0);
    marked = file_nbytes + 8 + 1 + 4;
    put_tensor("t", 1, 33, 0, 8, 0);
    put_data(32);
    check_rule("a tensor's rows are not whole blocks of its type");
    start(1, 0);
    marked = file_nbytes + 8 + 1;
    put_tensor("t", 0, 0, 0, 8, 0);
    put_data(32);
    check_rule("a tensor's rows are not whole blocks of its type");
}

TEST(type_rules) {
    const uint32_t removed[] = {4, 5, 31, 32, 33, 36, 37, 38};
    for (size_t i = 0; i < COUNT(removed); i++) {
        CHECK(um_gguf_type_of_tensor(removed[i]) == NULL);
        start(1, 0);
        marked = file_nbytes + 8 + 1 + 4 + 8;
        put_tensor("t", 1, 256, 0, removed[i], 0);
        put_data(32);
        check_rule("a tensor's type was removed from ggml");
    }
    const uint32_t unknown[] = {UNKNOWN_TENSOR_TYPE, INT32_MAX, UINT32_MAX};
    for (size_t i = 0; i < COUNT(unknown); i++) {
        CHECK(um_gguf_type_of_tensor(unknown[i]) == NULL);
        start(1, 0);
        marked = file_nbytes + 8 + 1 + 4 + 8;
        put_tensor("t", 1, 256, 0, unknown[i], 0);
        put_data(32);
        check_rule("unknown type of a tensor");
    }
    unsigned n_known = 0;
    for (uint32_t type = 0; type < UNKNOWN_TENSOR_TYPE; type++) {
        const um_gguf_tensor_type *known = um_gguf_type_of_tensor(type);
        if (known != NULL) {
            n_known++;
            CHECK(known->block_values > 0);
            CHECK(known->block_bytes > 0);
        }
    }
    CHECK_EQ(n_known, UNKNOWN_TENSOR_TYPE - COUNT(removed));
    CHECK_STR(um_gguf_type_of_tensor(8)->name, "q8_0");
}

/* The last field of a tensor is its offset. */
static void mark_last_field(void) {
    marked = file_nbytes - sizeof(uint64_t);
}

TEST(place_rules) {
    um_gguf g;
    start(1, 0);
    put_tensor("t", 1, 1, 0, 0, 16);
    mark_last_field();
    put_data(32);
    check_rule("a tensor's offset is not a multiple of the alignment");
    const uint64_t offsets[] = {DATA_NBYTES - 32, DATA_NBYTES, DATA_NBYTES + 32, 0 - UINT64_C(32)};
    for (int i = 0; i < 4; i++) {
        start(1, 0);
        put_tensor("t", 1, 9, 0, 0, offsets[i]);
        mark_last_field();
        put_data(32);
        check_rule("a tensor passes the end of the file");
    }
    start(3, 0); /* in any order, with a gap, and with an empty tensor inside another */
    put_tensor("b", 1, 9, 0, 0, 64);
    put_tensor("a", 1, 8, 0, 0, 0);
    put_tensor("e", 1, 0, 0, 0, 64);
    put_data(32);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    um_gguf_free(&g);
    start(3, 0);
    put_tensor("c", 1, 1, 0, 0, 64);
    mark_last_field();
    put_tensor("b", 1, 8, 0, 0, 128);
    put_tensor("a", 1, 17, 0, 0, 0);
    put_data(32);
    check_rule("two tensors overlap");
    start(2, 0);
    put_tensor("a", 1, 1, 0, 0, 0);
    put_tensor("b", 1, 1, 0, 0, 0);
    mark_last_field();
    put_data(32);
    check_rule("two tensors overlap");
    start(2, 0);
    put_tensor("a", 1, 1, 0, 0, 0);
    marked = file_nbytes + 8;
    put_tensor("a", 1, 1, 0, 0, 32);
    put_data(32);
    check_rule("a tensor's name occurs twice");
    start(1, 0);
    marked = file_nbytes + 8;
    put_tensor("\xff", 1, 1, 0, 0, 0);
    put_data(32);
    check_rule("a tensor's name is not valid UTF-8");
    start(1, 0);
    mark();
    put_u64(65536);
    put_zeros(1000);
    check_rule("a tensor's name is longer than 65535 bytes");
}

/* Tables are limited by the number of bytes given, whatever the counts say. */
TEST(allocations_are_bounded) {
    um_counters before, after;
    start(UINT64_C(1) << 50, UINT64_C(1) << 50);
    um_counters_read(&before);
    check_fails(UM_E_FULL, file_nbytes, UINT64_C(1) << 60);
    um_counters_read(&after);
    CHECK(after.allocated_bytes - before.allocated_bytes <= 16 * file_nbytes);
}

/* ---- damage ---- */

TEST(random_damage) {
    enum { N_ROUNDS = 20000 };
    uint64_t state = 2;
    unsigned n_ok = 0, n_format = 0;
    for (int round = 0; round < N_ROUNDS; round++) {
        put_everything();
        unsigned n_changes = 1 + (unsigned)(test_random(&state) % 4);
        for (unsigned i = 0; i < n_changes; i++) {
            size_t at = test_random(&state) % (file_nbytes - DATA_NBYTES);
            uint64_t what = test_random(&state);
            if (what % 3 == 0) {
                file[at] ^= (unsigned char)(1u << what / 3 % 8);
            } else {
                file[at] = what % 3 == 1 ? (unsigned char)(what >> 8) : 0xff;
            }
        }
        um_gguf g;
        um_error err;
        size_t nbytes =
            test_random(&state) % 4 == 0 ? test_random(&state) % file_nbytes : file_nbytes;
        unsigned char *exact = malloc(nbytes == 0 ? 1 : nbytes);
        REQUIRE(exact != NULL);
        memcpy(exact, file, nbytes);
        um_status status = um_gguf_parse(&g, exact, nbytes, nbytes, &err);
        if (status == UM_OK) {
            n_ok++;
            for (uint64_t i = 0; i < g.n_tensors; i++) {
                CHECK(g.tensors[i].offset >= g.data_offset);
                CHECK(g.tensors[i].nbytes <= nbytes - g.tensors[i].offset);
            }
            um_gguf_free(&g);
        } else {
            n_format++;
            CHECK(status == UM_E_FORMAT);
            CHECK(err.offset <= nbytes);
        }
        free(exact);
    }
    CHECK(n_ok > 0);
    CHECK(n_format > 0);
}
