/* Safetensors headers: a file with everything, each of its prefixes, each rule, failing
 * allocations, and files with random damage. */
#include "unimem_formats.h"

#define HEADER um_safetensors
#define PARSE um_safetensors_parse
#define FREE um_safetensors_free
#include "formats.h"

/* Writes the length of the header, the header, and data. In `json`, a ' stands for a quote, and a ^
 * is not written but marks the offset of a field. */
static void put_file(const char *json, size_t data_nbytes) {
    file_nbytes = 8;
    for (const char *c = json; *c != '\0'; c++) {
        if (*c == '^') {
            marked = file_nbytes;
        } else {
            put(*c == '\'' ? "\"" : c, 1);
        }
    }
    uint64_t json_nbytes = file_nbytes - 8;
    memcpy(file, &json_nbytes, 8);
    put_zeros(data_nbytes);
}

/* Every type, all kinds of dimensions, escapes, spaces, and data in another order than the
 * names. */
static void put_everything(void) {
    static const struct {
        const char *name, *type;
        int nbytes;
    } rest[] = {{"i8", "I8", 1},        {"e5m2", "F8_E5M2", 1},      {"e4m3", "F8_E4M3", 1},
                {"e8m0", "F8_E8M0", 1}, {"e4m3z", "F8_E4M3FNUZ", 1}, {"e5m2z", "F8_E5M2FNUZ", 1},
                {"i16", "I16", 2},      {"u16", "U16", 2},           {"f16", "F16", 2},
                {"bf16", "BF16", 2},    {"i32", "I32", 4},           {"u32", "U32", 4},
                {"c64", "C64", 8},      {"f64", "F64", 8},           {"i64", "I64", 8},
                {"u64", "U64", 8}};
    char json[4096];
    int n = snprintf(
        json, sizeof json, "%s",
        "{ '__metadata__' : {'format':'pt', 'k\\u0041':'\\ud83d\\ude00\\n\xc3\xa9','':''},\n"
        "'scalar':{'dtype':'F32','shape':[],'data_offsets':[9,13]},"
        "'t\\\\0':{'shape':[ 2 , 3 ],'data_offsets':[ 3,9 ],'\\u0064type':'U8'},"
        "'empty':{'dtype':'F64','shape':[1,0,288230376151711743],'data_offsets':[3,3]},"
        "'bool':{'dtype':'BOOL','shape':[1],'data_offsets':[13,14]},"
        "'f4':{'dtype':'F4','shape':[2,3],'data_offsets':[0,3]},"
        "'f6':{'dtype':'F6_E2M3','shape':[4],'data_offsets':[14,17]},"
        "'f6b':{'dtype':'F6_E3M2','shape':[1,4],'data_offsets':[17,20]}");
    for (int i = 0, at = 20; i < (int)COUNT(rest); at += rest[i++].nbytes) {
        n += snprintf(json + n, sizeof json - (size_t)n,
                      ",'%s':{'dtype':'%s','shape':[1],'data_offsets':[%d,%d]}", rest[i].name,
                      rest[i].type, at, at + rest[i].nbytes);
    }
    snprintf(json + n, sizeof json - (size_t)n, " } \n\t\r ");
    put_file(json, 74);
}

static bool is_text(um_safetensors_text text, const char *expected) {
    char *resolved = malloc(text.nbytes + 1); /* the most that a text can need */
    REQUIRE(resolved != NULL);
    size_t nbytes = um_safetensors_write_text(file, text, resolved);
    bool same = nbytes == strlen(expected) && memcmp(resolved, expected, nbytes) == 0;
    free(resolved);
    return same;
}

TEST(everything) {
    um_safetensors s;
    put_everything();
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    CHECK_EQ(s.header_nbytes, file_nbytes - 74);
    CHECK_EQ(s.n_kv, 3);
    CHECK(is_text(s.kv[0].key, "format"));
    CHECK(is_text(s.kv[0].value, "pt"));
    CHECK(is_text(s.kv[1].key, "kA"));
    CHECK(is_text(s.kv[1].value, "\xf0\x9f\x98\x80\n\xc3\xa9"));
    CHECK(is_text(s.kv[2].key, ""));
    CHECK(is_text(s.kv[2].value, ""));
    CHECK_EQ(s.n_tensors, 23);
    static const char *const names[] = {"scalar", "t\\0", "empty", "bool"};
    static const uint64_t offsets[] = {9, 3, 3, 13}, nbytes[] = {4, 6, 0, 1},
                          n_dims[] = {0, 2, 3, 1};
    for (int i = 0; i < 4; i++) {
        const um_safetensors_tensor *t = &s.tensors[i];
        CHECK(is_text(t->name, names[i]));
        CHECK_EQ(t->offset, s.header_nbytes + offsets[i]);
        CHECK_EQ(t->nbytes, nbytes[i]);
        CHECK_EQ(t->n_dims, n_dims[i]);
    }
    const uint64_t *dims = s.dims + s.tensors[2].first_dim;
    CHECK(dims[0] == 1);
    CHECK(dims[1] == 0);
    CHECK(dims[2] == 288230376151711743);
    CHECK_EQ(s.dims[s.tensors[1].first_dim + 1], 3);
    uint64_t sum = 0;
    unsigned seen = 0;
    for (uint64_t i = 0; i < s.n_tensors; i++) {
        seen |= 1u << s.tensors[i].type;
        sum += s.tensors[i].nbytes;
    }
    CHECK_EQ(seen, (1u << UM_ST_TYPE_COUNT) - 1);
    CHECK_EQ(sum, 74);
    um_safetensors_free(&s);
    CHECK(s.kv == NULL);
    CHECK(s.tensors == NULL);
    CHECK(s.dims == NULL);
    um_safetensors_free(&s);
}

TEST(types) {
    CHECK_STR(um_safetensors_type_name(UM_ST_BF16), "BF16");
    CHECK_EQ(um_safetensors_type_bits(UM_ST_F6_E3M2), 6);
    for (unsigned type = 0; type < UM_ST_TYPE_COUNT; type++) {
        CHECK(um_safetensors_type_name((um_safetensors_type)type) != NULL);
        CHECK(um_safetensors_type_bits((um_safetensors_type)type) >= 4);
    }
    CHECK(um_safetensors_type_name(UM_ST_TYPE_COUNT) == NULL);
    CHECK_EQ(um_safetensors_type_bits(UM_ST_TYPE_COUNT), 0);
}

TEST(nothing) {
    um_safetensors s;
    put_file("{}", 0);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    CHECK_EQ(s.n_tensors + s.n_kv, 0);
    um_safetensors_free(&s);
    put_file("{'__metadata__':{}}", 0);
    check_parses(file_nbytes, file_nbytes);
}

static void check_rule(const char *rule, const char *json, size_t data_nbytes) {
    put_file(json, data_nbytes);
    check_breaks(rule);
}

TEST(prefixes) {
    um_safetensors s;
    put_everything();
    size_t header_nbytes = file_nbytes - 74;
    for (size_t n = 0; n < header_nbytes; n++) {
        check_fails(UM_E_FORMAT, n, n); /* the file ends there */
        CHECK_STR(test_err.what, "the file ends inside its header");
        check_fails(UM_E_FULL, n, file_nbytes); /* more of it can be read */
        CHECK_EQ(test_err.used, n);
        CHECK_EQ(test_err.limit, file_nbytes);
        CHECK_EQ(test_err.asked, n < 8 ? 8 : header_nbytes);
    }
    check_parses(header_nbytes, file_nbytes);
    for (size_t n = header_nbytes; n < file_nbytes; n++) {
        check_fails(UM_E_FORMAT, n, n);
        CHECK_STR(test_err.what, "a tensor passes the end of the file");
    }
    check_fails(UM_E_INVALID, file_nbytes, file_nbytes - 1);
    CHECK(um_safetensors_parse(&s, file, 3, file_nbytes, NULL) == UM_E_FULL);
    CHECK(um_safetensors_parse(&s, file, 3, 3, NULL) == UM_E_FORMAT);
    /* JSON that ends early, in a file that goes on. */
    for (uint64_t n = 0; n < header_nbytes - 8 - 6; n++) {
        memcpy(file, &n, 8);
        check_fails(UM_E_FORMAT, file_nbytes, file_nbytes);
        CHECK(test_err.offset <= 8 + n);
    }
}

TEST(failing_allocations) {
    put_everything();
    check_failing_allocations(8); /* three tables, one that grows, and names with escapes */
}

TEST(head_rules) {
    const uint64_t too_long[] = {100000001, UINT64_C(1) << 32, INT64_MAX, UINT64_MAX - 7,
                                 UINT64_MAX};
    for (size_t i = 0; i < COUNT(too_long); i++) {
        put_file("{}", 0);
        memcpy(file, &too_long[i], 8);
        marked = 0;
        check_breaks("the header is longer than 100000000 bytes");
    }
    put_file("{}", 0);
    const uint64_t three = 3, most = 100000000;
    memcpy(file, &three, 8);
    check_breaks("the file ends inside its header");
    memcpy(file, &most, 8);
    check_fails(UM_E_FULL, file_nbytes, most + 8);
    CHECK_EQ(test_err.asked, most + 8);
    static const char not_begun[] = "the header does not begin with {";
    check_rule(not_begun, "^", 0);
    check_rule(not_begun, "^ {}", 0);
    check_rule(not_begun, "^[]", 0);
    check_rule(not_begun, "^\xef\xbb\xbf{}", 0);
    static const char behind[] = "the header goes on behind its JSON";
    check_rule(behind, "{} ^{}", 0);
    check_rule(behind, "{}^}", 0);
    put_file("{}^ ", 0);
    file[marked] = '\0';
    check_breaks(behind);
}

/* Also outside of strings; test_names.c has all kinds of UTF-8. */
TEST(utf8_rule) {
    static const char *const bad[] = {
        "{'__metadata__':{'a':'^\x80'}}", "{'__metadata__':{'a':'12345678\xc3\xa9^\xed\xa0\x80'}}",
        "{'__metadata__':{'a':'1234567^\xff'}}", "{}^\xff", "{'^\xe2\x82"};
    for (size_t i = 0; i < COUNT(bad); i++) {
        check_rule("the header is not valid UTF-8", bad[i], 0);
    }
    put_file("{'__metadata__':{'\xdf\xbf\xe0\xa0\x80':'\xed\x9f\xbf\xf4\x8f\xbf\xbf\x7f'}}", 0);
    check_parses(file_nbytes, file_nbytes);
}

/* Each text in place of %s breaks the rule. */
static void check_rule_in(const char *rule, const char *format, const char *const *texts,
                          size_t n_texts, size_t data_nbytes) {
    char json[128];
    for (size_t i = 0; i < n_texts; i++) {
        snprintf(json, sizeof json, format, texts[i]);
        check_rule(rule, json, data_nbytes);
    }
}

TEST(json_rule) {
    static const char rule[] = "the header is not valid JSON";
    static const char *const broken[] = {"{^",
                                         "{^,}",
                                         "{'a'^}",
                                         "{'a':^}",
                                         "{'a':^,",
                                         "{'a^",
                                         "{^a",
                                         "{^1:2}",
                                         "{'t':{'dtype':'^",
                                         "{'t':{'dtype':^U8}}",
                                         "{'__metadata__':{},^}",
                                         "{'t':{'data_offsets':[1,2^"};
    static const char *const metadata[] = {":'b'^",   ":'b',^}}", ":'b'^'c':'d'}}",
                                           "^,'b'}}", ":^b}}",    ":'b'}^]}"};
    static const char *const shapes[] = {"[^,1]}}", "[1,^]}}", "[1 ^2]}}", "[1^x2]}}", "[0^x2]}}",
                                         "[^+1]}}", "[^.1]}}", "^]}}",     "[1]^]}}",  "[1],^}}"};
    check_rule_in(rule, "%s", broken, COUNT(broken), 0);
    check_rule_in(rule, "{'__metadata__':{'a'%s", metadata, COUNT(metadata), 0);
    check_rule_in(rule, "{'t':{'shape':%s", shapes, COUNT(shapes), 0);
}

TEST(string_rules) {
    static const char *const unknown[] = {"^\\x41", "a^\\u12",  "^\\u12g4", "^\\U0041",
                                          "^\\ ",   "^\\u-041", "^\\u00:1"};
    static const char *const halves[] = {
        "^\\ud800",        "^\\udfff",    "^\\udc00\\ud800",       "^\\ud800\\ud800",
        "^\\ud800\\u0041", "^\\ud83d\\n", "\\ud83d\\ude00^\\ude00"};
    check_rule_in("a string has an escape that JSON does not know", "{'__metadata__':{'a':'%s'}}",
                  unknown, COUNT(unknown), 0);
    check_rule("a string has an escape that JSON does not know", "{'^\\", 0);
    check_rule("a string has an escape that JSON does not know", "{'^\\u004", 0);
    check_rule_in("a string has half of a surrogate pair", "{'%s':{}}", halves, COUNT(halves), 0);
    for (char c = 0; c < 0x20; c++) {
        put_file("{'__metadata__':{'a^_':'b'}}", 0);
        file[marked] = (unsigned char)c;
        check_breaks("a string has a control character");
    }
    um_safetensors s;
    put_file("{'__metadata__':{'\\\"\\\\\\/"
             "\\b\\f\\n\\r\\t':'\\u00e9\\u20AC\\ud83D\\uDe00\\uFFFF\\u007f\\u0080'}}",
             0);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    CHECK(is_text(s.kv[0].key, "\"\\/\b\f\n\r\t"));
    CHECK(is_text(s.kv[0].value, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbf\x7f\xc2\x80"));
    um_safetensors_free(&s);
    /* Names are compared as resolved, in a buffer that holds all of those with escapes. */
#define LONG "0123456789012345678901234567890123456789012345678901234567890123456789"
    put_file("{'__metadata__':{'\\u0061" LONG LONG "':'','\\u0062" LONG LONG "':''}}", 0);
#undef LONG
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_safetensors_free(&s);
}

TEST(metadata_rules) {
    check_rule("__metadata__ is not an object", "{'__metadata__':^[]}", 0);
    check_rule("__metadata__ is not an object", "{'__metadata__':^nul}", 0);
    check_rule("the header is not valid JSON", "{'__metadata__':null^x}", 0);
    put_file("{'__metadata__': null }", 0);
    check_parses(file_nbytes, file_nbytes);
    static const char *const values[] = {"1", "null", "true", "{}", "['a']", "-1"};
    check_rule_in("a value of __metadata__ is not a string", "{'__metadata__':{'a': ^%s}}", values,
                  COUNT(values), 0);
    check_rule("__metadata__ occurs twice", "{'__metadata__':{},^'__metadata__':{}}", 0);
    check_rule("__metadata__ occurs twice", "{'__metadata__':{},^'__metadata\\u005f_':{}}", 0);
    static const char twice[] = "a key of __metadata__ occurs twice";
    check_rule(twice, "{'__metadata__':{'a':'','b':'',^'a':'','b':''}}", 0);
    check_rule(twice, "{'__metadata__':{'/':'','a':'',^'\\u0061':'','\\/':''}}", 0);
    check_rule(twice, "{'__metadata__':{'':'',^'':''}}", 0);
}

TEST(tensor_rules) {
    check_rule("a tensor is not an object", "{'t':^['U8',[1],[0,1]]}", 1);
    check_rule("a tensor is not an object", "{'t': ^'U8'}", 1);
    check_rule("a tensor has a field that the format does not know",
               "{'t':{'dtype':'U8','shape':[1],^'strides':[1],'data_offsets':[0,1]}}", 1);
    check_rule("a tensor has a field that the format does not know", "{'t':{^'':0}}", 1);
    check_rule("a field of a tensor occurs twice", "{'t':{'dtype':'U8',^'dtype':'U8'}}", 1);
    check_rule("a field of a tensor occurs twice", "{'t':{'shape':[],^'\\u0073hape':[]}}", 1);
    check_rule("a tensor has no dtype", "{'t':^{'shape':[1],'data_offsets':[0,1]}}", 1);
    check_rule("a tensor has no shape", "{'t':^{'dtype':'U8','data_offsets':[0,1]}}", 1);
    check_rule("a tensor has no data_offsets", "{'t':^{'dtype':'U8','shape':[1]}}", 1);
    check_rule("a tensor has no dtype", "{'t': ^{}}", 1);
    check_rule("a tensor's dtype is not a string", "{'t':{'dtype': ^8}}", 1);
    static const char *const unknown[] = {"", "u8", "U8 ", "F12", "F32F", "F3", "\\u0055"};
    check_rule_in("unknown dtype of a tensor", "{'t':{'dtype':^'%s'}}", unknown, COUNT(unknown), 1);
    check_rule("a tensor's shape is not an array", "{'t':{'shape':^1}}", 1);
    check_rule("a tensor's shape is not an array", "{'t':{'shape': ^{}}}", 1);
    static const char *const numbers[] = {"-1", "-0",  "1.0", "1e0",  "1E2", "01",
                                          "00", "'1'", "[1]", "null", "true"};
    static const char not_unsigned[] = "a dimension or offset is not an unsigned integer";
    check_rule_in(not_unsigned, "{'t':{'shape':[1, ^%s]}}", numbers, COUNT(numbers), 1);
    check_rule_in(not_unsigned, "{'t':{'data_offsets':[^%s,1]}}", numbers, COUNT(numbers), 1);
    check_rule("a dimension or offset has more than 64 bits",
               "{'t':{'shape':[18446744073709551615,^18446744073709551616]}}", 1);
    check_rule("a dimension or offset has more than 64 bits",
               "{'t':{'data_offsets':[0,^99999999999999999999999999999999]}}", 1);
    static const char not_two[] = "a tensor's data_offsets are not an array of two";
    check_rule(not_two, "{'t':{'data_offsets':^{}}}", 1);
    check_rule(not_two, "{'t':{'data_offsets':^[]}}", 1);
    check_rule(not_two, "{'t':{'data_offsets':^[0]}}", 1);
    check_rule(not_two, "{'t':{'data_offsets':^[0,1,1]}}", 1);
}

TEST(many_dimensions) {
    um_safetensors s;
    for (int n = 64; n <= 65; n++) {
        char json[256] = "{'t':{'dtype':'U8','shape':[1";
        for (int i = 1; i < n; i++) {
            strcat(json, i == 64 ? ",^1" : ",1");
        }
        strcat(json, "],'data_offsets':[0,1]}}");
        if (n == 64) {
            put_file(json, 1);
            CHECK_OK(parse(&s, file_nbytes, file_nbytes));
            CHECK_EQ(s.tensors[0].n_dims, 64);
            um_safetensors_free(&s);
        } else {
            check_rule("a tensor has more than 64 dimensions", json, 1);
        }
    }
}

/* A tensor of one dimension whose field at ^ breaks a rule. */
#define TENSOR(name, type, shape, offsets)                                                         \
    "'" name "':{'dtype':'" type "','shape':" shape ",'data_offsets':" offsets "}"

TEST(size_rules) {
    static const char *const overflow[] = {
        "'U8','shape':^[4294967296,4294967296]", "'F4','shape':^[9223372036854775808]",
        "'F64','shape':^[288230376151711744]", "'U8','shape':^[0,9223372036854775808]",
        "'U8','shape':^[9223372036854775808,2,0]"};
    check_rule_in("a tensor's dimensions overflow", "{'t':{'dtype':%s,'data_offsets':[0,0]}}",
                  overflow, COUNT(overflow), 0);
    static const char not_whole[] = "a tensor's values are not whole bytes";
    check_rule(not_whole, "{" TENSOR("t", "F4", "^[3]", "[0,1]") "}", 1);
    check_rule(not_whole, "{" TENSOR("t", "F6_E2M3", "^[2]", "[0,1]") "}", 1);
    check_rule(not_whole, "{" TENSOR("t", "F4", "^[]", "[0,0]") "}", 0);
    check_rule("a tensor ends before it begins", "{" TENSOR("t", "U8", "[1]", "^[1,0]") "}", 1);
    static const char not_its[] = "a tensor has not the bytes of its shape and dtype";
    check_rule(not_its, "{" TENSOR("t", "U8", "[2]", "^[0,1]") "}", 1);
    check_rule(not_its, "{'t':{'data_offsets':^[0,1],'dtype':'U8','shape':[0]}}", 1);
    check_rule(not_its, "{" TENSOR("t", "F32", "[]", " ^[0,1]") "}", 1);
    check_rule(not_its, "{" TENSOR("t", "U8", "[1]", "^[0,18446744073709551615]") "}", 1);
}

#define U8(name, n, offsets) TENSOR(name, "U8", "[" #n "]", offsets)

TEST(place_rules) {
    static const struct {
        const char *rule, *json;
        size_t data_nbytes;
    } cases[] = {{"a tensor passes the end of the file", U8("t", 2, "^[0,2]"), 1},
                 {"a tensor passes the end of the file", U8("t", 0, "^[2,2]"), 1},
                 {"a tensor passes the end of the file",
                  U8("t", 1, "^[18446744073709551614,18446744073709551615]"), 1},
                 {"the bytes before a tensor are no tensor's", U8("t", 1, "^[1,2]"), 2},
                 {"the bytes before a tensor are no tensor's",
                  U8("b", 1, "^[2,3]") "," U8("a", 1, "[0,1]"), 3},
                 {"two tensors overlap", U8("b", 2, "^[1,3]") "," U8("a", 2, "[0,2]"), 3},
                 {"two tensors overlap", U8("a", 1, "[0,1]") "," U8("b", 1, "^[0,1]"), 1},
                 {"two tensors overlap", U8("a", 4, "[0,4]") "," U8("e", 0, "^[2,2]"), 4},
                 {"a tensor's name occurs twice",
                  U8("a", 1, "[0,1]") "," U8("b", 1, "[1,2]") ",^" U8("\\u0061", 1, "[2,3]"), 3}};
    char json[256];
    for (size_t i = 0; i < COUNT(cases); i++) {
        snprintf(json, sizeof json, "{%s}", cases[i].json);
        check_rule(cases[i].rule, json, cases[i].data_nbytes);
    }
    static const char behind[] = "the file goes on behind its tensors";
    check_rule(behind, "{}^", 1);
    put_file("{" U8("a", 1, "[0,1]") "}^", 2);
    marked++;
    check_breaks(behind);
    static const char any_order[] = "{" U8("c", 0, "[3,3]") "," U8("b", 1, "[2,3]") "," /**/
        U8("e", 0, "[0,0]") "," U8("a", 2, "[0,2]") "}";
    put_file(any_order, 3);
    check_parses(file_nbytes, file_nbytes);
}

TEST(allocations_are_bounded) {
    um_counters before, after;
    um_safetensors s;
    /* The most rows for the number of bytes: keys of one byte, and dimensions of one digit. */
    file_nbytes = 8;
    put("{\"__metadata__\":{", 17);
    for (unsigned i = 0; i < 2000; i++) {
        char key[16];
        put(key, (size_t)snprintf(key, sizeof key, "%s\"%x\":\"\"", i == 0 ? "" : ",", i));
    }
    put("}}", 2);
    uint64_t json_nbytes = file_nbytes - 8;
    memcpy(file, &json_nbytes, 8);
    um_counters_read(&before);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_counters_read(&after);
    CHECK_EQ(s.n_kv, 2000);
    um_safetensors_free(&s);
    CHECK(after.allocated_bytes - before.allocated_bytes <= 16 * file_nbytes);
    /* No memory is allocated for a length that is only claimed. */
    put_file("{}", 0);
    json_nbytes = 100000000;
    memcpy(file, &json_nbytes, 8);
    um_counters_read(&before);
    check_fails(UM_E_FULL, file_nbytes, UINT64_C(1) << 60);
    um_counters_read(&after);
    CHECK_EQ(after.allocated_bytes, before.allocated_bytes);
}

static void check_parsed(const um_safetensors *s, size_t nbytes) {
    uint64_t sum = s->header_nbytes;
    for (uint64_t i = 0; i < s->n_tensors; i++) {
        const um_safetensors_tensor *t = &s->tensors[i];
        CHECK(t->offset >= s->header_nbytes);
        CHECK(t->nbytes <= nbytes - t->offset);
        CHECK(t->first_dim + t->n_dims <= s->n_dims);
        sum += t->nbytes;
    }
    CHECK_EQ(sum, nbytes);
    for (uint64_t i = 0; i < s->n_kv; i++) {
        AUTO_FREE char *resolved = malloc(s->kv[i].value.nbytes + 1);
        REQUIRE(resolved != NULL);
        CHECK(um_safetensors_write_text(file, s->kv[i].value, resolved) <= s->kv[i].value.nbytes);
    }
}

TEST(random_damage) {
    static const char tokens[] = "{}[]:,\"\\u0d819- e.\xff\x80\x01";
    check_random_damage(put_everything, 74, tokens, sizeof tokens - 1, check_parsed);
}
