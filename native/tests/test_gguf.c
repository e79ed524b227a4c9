/* GGUF headers: a file with everything, each of its prefixes, each rule, failing allocations, and
 * files with random damage. */
#include "unimem_formats.h"

#define HEADER um_gguf
#define PARSE um_gguf_parse
#define FREE um_gguf_free
#include "formats.h"

enum { DATA_NBYTES = 256, UNKNOWN_TENSOR_TYPE = 43 };

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
static void put_data(size_t alignment) {
    put_zeros((alignment - file_nbytes % alignment) % alignment + DATA_NBYTES);
}
/* A tensor with up to two dimensions; n_dims are written. */
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
    CHECK_EQ(g.version, 0);
    um_gguf_free(&g);
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
    check_parses(header_nbytes, file_nbytes);
    marked = header_nbytes; /* a tensor's data is missing */
    for (size_t n = header_nbytes; n < file_nbytes - DATA_NBYTES + 216; n++) {
        check_fails(UM_E_FORMAT, n, n);
        CHECK_STR(test_err.what, "a tensor passes the end of the file");
    }
    check_parses(header_nbytes, file_nbytes - DATA_NBYTES + 216);
    check_fails(UM_E_INVALID, file_nbytes, file_nbytes - 1);
    CHECK(um_gguf_parse(&g, file, 3, file_nbytes, NULL) == UM_E_FULL);
    CHECK(um_gguf_parse(&g, file, 3, 3, NULL) == UM_E_FORMAT);
}

TEST(failing_allocations) {
    put_everything();
    check_failing_allocations(2);
}

TEST(head_rules) {
    start(0, 0);
    marked = 0;
    file[0] = 'g';
    check_breaks("the file does not begin with GGUF");
    marked = 4;
    start(0, 0);
    memcpy(file + 4, "\0\0\0\3", 4);
    check_breaks("the file is big-endian; only little-endian files are read");
    const uint32_t versions[] = {0, 1, 4, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        start(0, 0);
        memcpy(file + 4, &versions[i], 4);
        check_breaks("the version is not 2 or 3");
    }
    for (uint64_t n = 1; n != 0; n *= 8) {
        start(n, 0);
        marked = 8;
        check_breaks("more tensors than the file can hold");
        start(0, n);
        marked = 16;
        check_breaks("more metadata than the file can hold");
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

/* A file with one key, whose value is a uint32. */
static void put_one_key(const char *key, uint32_t value) {
    start(0, 1);
    put_key(key, UM_GGUF_UINT32);
    mark();
    put_u32(value);
}

/* test_names.c has all kinds of UTF-8. */
TEST(key_rules) {
    static const char *const not_utf8[] = {"\x80", "a\xc3", "\xed\xa0\x80", "\xff"};
    static const char *const utf8[] = {"\xc2\x80", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf", "a"};
    for (size_t i = 0; i < COUNT(utf8); i++) {
        put_one_key(not_utf8[i], 0);
        marked = 24 + 8;
        check_breaks("a key is not valid UTF-8");
        put_one_key(utf8[i], 0);
        check_parses(file_nbytes, file_nbytes);
    }
    put_one_key("", 0);
    marked = 24;
    check_breaks("a key is empty");
    for (int i = 0; i < 2; i++) {
        start(0, 1);
        mark();
        put_u64(i == 0 ? 65536 : 60000);
        put_zeros(1000);
        check_breaks(i == 0 ? "a key is longer than 65535 bytes"
                            : "a string is longer than the rest of the file");
    }
    start(0, 3);
    put_key("twice", UM_GGUF_UINT32);
    put_u32(0);
    put_key("once", UM_GGUF_UINT32);
    put_u32(0);
    marked = file_nbytes + 8;
    put_key("twice", UM_GGUF_UINT8);
    put_u8(0);
    check_breaks("a key occurs twice");
}

/* The beginning of a file with one value. */
static void start_value(um_gguf_type type) {
    start(0, 1);
    put_key("key", type);
    mark();
}

static void start_array(um_gguf_type item_type, uint64_t n) {
    start_value(UM_GGUF_ARRAY);
    put_array(item_type, n);
}

TEST(value_rules) {
    start_value(UM_GGUF_TYPE_COUNT);
    marked -= 4;
    put_u64(0);
    check_breaks("unknown type of metadata");
    start_array(UM_GGUF_TYPE_COUNT, 0);
    check_breaks("unknown type of metadata");
    start_value(UM_GGUF_BOOL);
    put_u8(2);
    check_breaks("a bool is neither 0 nor 1");
    start_array(UM_GGUF_BOOL, 3);
    put("\0\1", 2);
    mark();
    put_u8(0xff);
    check_breaks("a bool is neither 0 nor 1");
    start_value(UM_GGUF_STRING);
    put_u64(UINT64_MAX);
    check_breaks("a string is longer than the rest of the file");
    start_array(UM_GGUF_STRING, 2);
    put_string("first");
    mark();
    put_u64(1);
    check_breaks("a string is longer than the rest of the file");
    /* Lengths that overflow to small numbers when multiplied by the size of an item. */
    const uint64_t lengths[] = {UINT64_MAX, UINT64_C(1) << 61, UINT64_C(1) << 62, UINT64_C(1) << 63,
                                1000};
    for (size_t i = 0; i < UM_GGUF_TYPE_COUNT * COUNT(lengths); i++) {
        start_array((um_gguf_type)(i / COUNT(lengths)), lengths[i % COUNT(lengths)]);
        marked += 4;
        put_zeros(8);
        check_breaks("an array is longer than the rest of the file");
    }
}

TEST(nested_arrays) {
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
            check_parses(file_nbytes, file_nbytes);
        } else {
            check_breaks("arrays are nested deeper than 16");
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
    const uint32_t bad[] = {0, 1, 4, 12, 33, UINT32_MAX}, good[] = {8, 24, 40, 4096, 4104};
    for (size_t i = 0; i < COUNT(bad); i++) {
        put_one_key("general.alignment", bad[i]);
        check_breaks("general.alignment is not 8 or a multiple of it");
    }
    for (size_t i = 0; i < COUNT(good); i++) {
        um_gguf g;
        put_one_key("general.alignment", good[i]);
        CHECK_OK(parse(&g, file_nbytes, file_nbytes));
        CHECK_EQ(g.data_offset % good[i], 0);
        CHECK(g.data_offset - g.header_nbytes < good[i]);
        um_gguf_free(&g);
    }
    start(0, 1);
    put_string("general.alignment");
    mark();
    put_u32(UM_GGUF_UINT64);
    put_u64(32);
    check_breaks("general.alignment is not a UINT32");
    um_gguf g;
    put_one_key("general.alignment", UINT32_C(1) << 31);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    CHECK_EQ(g.data_offset, UINT64_C(1) << 31);
    um_gguf_free(&g);
}

/* One tensor, whose field at this offset behind the name breaks a rule. */
static void check_tensor(const char *rule, size_t field, uint32_t n_dims, uint64_t ne0,
                         uint64_t ne1, uint32_t type, uint64_t offset) {
    start(1, 0);
    marked = file_nbytes + 8 + 1 + field;
    put_tensor("t", n_dims, ne0, ne1, type, offset);
    put_data(32);
    check_breaks(rule);
}

TEST(dimension_rules) {
    static const char overflow[] = "a tensor's dimensions overflow";
    static const char not_whole[] = "a tensor's rows are not whole blocks of its type";
    const uint64_t half = UINT64_C(1) << 62;
    start(1, 0);
    put_string("t");
    mark();
    put_u32(5);
    put_zeros(64);
    check_breaks("a tensor has more than 4 dimensions");
    check_tensor(overflow, 12, 2, half, 2, 0, 0);
    check_tensor(overflow, 4, 2, UINT64_MAX, 0, 0, 0);
    check_tensor(overflow, 12, 2, half, half, 0, 0);
    check_tensor(overflow, 12, 2, 0, UINT64_MAX, 0, 0);
    check_tensor(overflow, 4, 1, INT64_MAX, 0, 28, 0);
    check_tensor(not_whole, 4, 1, 33, 0, 8, 0);
    check_tensor(not_whole, 0, 0, 0, 0, 8, 0);
    /* A dimension of 0 counts as 1: the largest product beside it is allowed. */
    um_gguf g;
    start(1, 0);
    put_tensor("t", 2, 0, half, 0, 0);
    put_data(32);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    CHECK_EQ(g.tensors[0].nbytes, 0);
    um_gguf_free(&g);
}

/* The size of a tensor of an unknown type is the gap behind its offset. */
static void check_unknown(uint32_t type) {
    um_gguf g;
    CHECK(um_gguf_type_of_tensor(type) == NULL);
    start(4, 0);
    put_tensor("last", 1, 100, 0, type, 96);
    put_tensor("empty", 2, 0, 7, type, 32);
    put_tensor("known", 1, 8, 0, 0, 64);
    put_tensor("first", 1, 100, 0, type, 0);
    put_data(32);
    CHECK_OK(parse(&g, file_nbytes, file_nbytes));
    const uint64_t nbytes[4] = {DATA_NBYTES - 96, 0, 32, 64};
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(g.tensors[i].nbytes, nbytes[i]);
    }
    um_gguf_free(&g);
    start(2, 0);
    put_tensor("a", 1, 3, 0, type, 0);
    put_tensor("b", 1, 3, 0, type, 0);
    marked = file_nbytes - 8;
    put_data(32);
    check_breaks("two tensors overlap");
}

TEST(type_rules) {
    const uint32_t removed[] = {4, 5, 31, 32, 33, 36, 37, 38};
    const uint32_t unknown[] = {UNKNOWN_TENSOR_TYPE, INT32_MAX, UINT32_MAX};
    for (size_t i = 0; i < COUNT(removed); i++) {
        CHECK(um_gguf_type_of_tensor(removed[i]) == NULL);
        check_unknown(removed[i]);
    }
    for (size_t i = 0; i < COUNT(unknown); i++) {
        CHECK(um_gguf_type_of_tensor(unknown[i]) == NULL);
        check_unknown(unknown[i]);
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

TEST(places) {
    static const uint64_t passing[] = {DATA_NBYTES - 32, DATA_NBYTES, DATA_NBYTES + 32,
                                       0 - UINT64_C(32)};
    check_tensor("a tensor's offset is not a multiple of the alignment", 16, 1, 1, 0, 0, 16);
    for (size_t i = 0; i < COUNT(passing); i++) {
        check_tensor("a tensor passes the end of the file", 16, 1, 9, 0, 0, passing[i]);
    }
    start(3, 0); /* in any order, with a gap, and with an empty tensor inside another */
    put_tensor("b", 1, 9, 0, 0, 64);
    put_tensor("a", 1, 8, 0, 0, 0);
    put_tensor("e", 1, 0, 0, 0, 64);
    put_data(32);
    check_parses(file_nbytes, file_nbytes);
    start(3, 0);
    put_tensor("c", 1, 1, 0, 0, 64);
    marked = file_nbytes - 8;
    put_tensor("b", 1, 8, 0, 0, 128);
    put_tensor("a", 1, 17, 0, 0, 0);
    put_data(32);
    check_breaks("two tensors overlap");
    start(2, 0);
    put_tensor("a", 1, 1, 0, 0, 0);
    put_tensor("b", 1, 1, 0, 0, 0);
    marked = file_nbytes - 8;
    put_data(32);
    check_breaks("two tensors overlap");
}

TEST(name_rules) {
    start(2, 0);
    put_tensor("a", 1, 1, 0, 0, 0);
    marked = file_nbytes + 8;
    put_tensor("a", 1, 1, 0, 0, 32);
    put_data(32);
    check_breaks("a tensor's name occurs twice");
    start(1, 0);
    marked = file_nbytes + 8;
    put_tensor("\xff", 1, 1, 0, 0, 0);
    put_data(32);
    check_breaks("a tensor's name is not valid UTF-8");
    start(1, 0);
    mark();
    put_u64(65536);
    put_zeros(1000);
    check_breaks("a tensor's name is longer than 65535 bytes");
}

TEST(entries_are_limited) {
    start(65537, 0);
    check_fails(UM_E_FORMAT, file_nbytes, UINT64_C(1) << 60);
    CHECK_STR(test_err.what, "more than 65536 tensors");
    start(0, 4097);
    check_fails(UM_E_FORMAT, file_nbytes, UINT64_C(1) << 60);
    CHECK_STR(test_err.what, "more than 4096 keys");
}

/* Tables are limited by the number of bytes given, whatever the counts say. */
TEST(allocations_are_bounded) {
    um_counters before, after;
    start(65536, 4096);
    um_counters_read(&before);
    check_fails(UM_E_FULL, file_nbytes, UINT64_C(1) << 60);
    um_counters_read(&after);
    CHECK(after.allocated_bytes - before.allocated_bytes <= 16 * file_nbytes);
}

static void check_parsed(const um_gguf *g, size_t nbytes) {
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        CHECK(g->tensors[i].offset >= g->data_offset);
        CHECK(g->tensors[i].nbytes <= nbytes - g->tensors[i].offset);
    }
}

TEST(random_damage) {
    check_random_damage(put_everything, DATA_NBYTES, "\xff", 1, check_parsed);
}
