/* Safetensors headers: a file with everything, each of its prefixes, each rule, failing
 * allocations, and files with random damage. The bytes always end where an allocation ends, so that
 * a sanitizer sees a read past them. */

#include "fault_os.h"
#include "unimem_formats.h"

/* ---- writing files ---- */

enum { FILE_MAX = 1 << 16 };

static unsigned char file[FILE_MAX];
static size_t file_nbytes;
static size_t marked; /* the offset of the field that a rule is about */

static void put(const void *bytes, size_t nbytes) {
    REQUIRE(nbytes <= FILE_MAX - file_nbytes);
    memcpy(file + file_nbytes, bytes, nbytes);
    file_nbytes += nbytes;
}

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
    REQUIRE(data_nbytes <= FILE_MAX - file_nbytes);
    memset(file + file_nbytes, 0, data_nbytes);
    file_nbytes += data_nbytes;
}

/* Every type, all kinds of dimensions, escapes, spaces, and data in another order than the
 * names. */
static void put_everything(void) {
    put_file("{ '__metadata__' : {'format':'pt', 'k\\u0041':'\\ud83d\\ude00\\n\xc3\xa9','':''},\n"
             "'scalar':{'dtype':'F32','shape':[],'data_offsets':[9,13]},"
             "'t\\\\0':{'shape':[ 2 , 3 ],'data_offsets':[ 3,9 ],'\\u0064type':'U8'},"
             "'empty':{'dtype':'F64','shape':[1,0,288230376151711743],'data_offsets':[3,3]},"
             "'bool':{'dtype':'BOOL','shape':[1],'data_offsets':[13,14]},"
             "'f4':{'dtype':'F4','shape':[2,3],'data_offsets':[0,3]},"
             "'f6':{'dtype':'F6_E2M3','shape':[4],'data_offsets':[14,17]},"
             "'f6b':{'dtype':'F6_E3M2','shape':[1,4],'data_offsets':[17,20]},"
             "'i8':{'dtype':'I8','shape':[1],'data_offsets':[20,21]},"
             "'e5m2':{'dtype':'F8_E5M2','shape':[1],'data_offsets':[21,22]},"
             "'e4m3':{'dtype':'F8_E4M3','shape':[1],'data_offsets':[22,23]},"
             "'e8m0':{'dtype':'F8_E8M0','shape':[1],'data_offsets':[23,24]},"
             "'e4m3z':{'dtype':'F8_E4M3FNUZ','shape':[1],'data_offsets':[24,25]},"
             "'e5m2z':{'dtype':'F8_E5M2FNUZ','shape':[1],'data_offsets':[25,26]},"
             "'i16':{'dtype':'I16','shape':[1],'data_offsets':[26,28]},"
             "'u16':{'dtype':'U16','shape':[1],'data_offsets':[28,30]},"
             "'f16':{'dtype':'F16','shape':[1],'data_offsets':[30,32]},"
             "'bf16':{'dtype':'BF16','shape':[1],'data_offsets':[32,34]},"
             "'i32':{'dtype':'I32','shape':[1],'data_offsets':[34,38]},"
             "'u32':{'dtype':'U32','shape':[1],'data_offsets':[38,42]},"
             "'c64':{'dtype':'C64','shape':[1],'data_offsets':[42,50]},"
             "'f64':{'dtype':'F64','shape':[1],'data_offsets':[50,58]},"
             "'i64':{'dtype':'I64','shape':[1],'data_offsets':[58,66]},"
             "'u64':{'dtype':'U64','shape':[1],'data_offsets':[66,74]} } \n\t\r ",
             74);
}

/* ---- reading them ---- */

/* Parses the first nbytes of `file` as part of a file of `size`. */
static um_status parse(um_safetensors *out, size_t nbytes, uint64_t size) {
    unsigned char *exact = malloc(nbytes == 0 ? 1 : nbytes);
    REQUIRE(exact != NULL);
    memcpy(exact, file, nbytes);
    um_status status = um_safetensors_parse(out, exact, nbytes, size, &test_err);
    free(exact);
    return status;
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
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_safetensors_free(&s);
}

/* Parses an input that must fail, and checks that `out` was left alone. */
static void check_fails(um_status expected, size_t nbytes, uint64_t size) {
    um_safetensors s, before;
    memset(&s, 0x5a, sizeof s);
    before = s;
    CHECK_STATUS(expected, parse(&s, nbytes, size));
    CHECK(memcmp(&s, &before, sizeof s) == 0);
}

/* `file` must break the rule, at the mark. */
static void check_breaks(const char *rule) {
    check_fails(UM_E_FORMAT, file_nbytes, file_nbytes);
    REQUIRE(test_err.status == UM_E_FORMAT);
    if (!CHECK_STR(test_err.what, rule)) {
        fprintf(stderr, "expected: %s\n     got: %s\n", rule, test_err.what);
    }
    CHECK_EQ(test_err.offset, marked);
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
    CHECK_OK(parse(&s, header_nbytes, file_nbytes));
    um_safetensors_free(&s);
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
    um_safetensors s;
    put_everything();
    fault_os_fail_nth_alloc(0);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_safetensors_free(&s);
    unsigned n_allocs = fault_os_allocs();
    CHECK(n_allocs >= 8); /* three tables, one of which grows, and names with and without escapes */
    for (unsigned n = 1; n <= n_allocs; n++) {
        fault_os_fail_nth_alloc(n);
        check_fails(UM_E_NOMEM, file_nbytes, file_nbytes);
        CHECK(test_err.os_errno == ENOMEM);
        CHECK(test_err.asked > 0);
    }
    fault_os_fail_nth_alloc(0);
}

/* ---- rules ---- */

#define U8(begin, end, n) "{'dtype':'U8','shape':[" #n "],'data_offsets':[" #begin "," #end "]}"

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

TEST(utf8_rule) {
    static const char *const bad[] = {"^\x80",
                                      "a^\xc3",
                                      "^\xc0\x80",
                                      "^\xe0\x9f\xbf",
                                      "12345678\xc3\xa9^\xed\xa0\x80",
                                      "^\xed\xbf\xbf",
                                      "^\xf0\x8f\xbf\xbf",
                                      "^\xf4\x90\x80\x80",
                                      "12345678^\xf8\x88\x80\x80\x80",
                                      "^\xe2\x28\xa1",
                                      "1234567^\xff"};
    for (size_t i = 0; i < COUNT(bad); i++) {
        char json[64];
        snprintf(json, sizeof json, "{'__metadata__':{'a':'%s'}}", bad[i]);
        check_rule("the header is not valid UTF-8", json, 0);
    }
    check_rule("the header is not valid UTF-8", "{}^\xff", 0); /* also outside of strings */
    check_rule("the header is not valid UTF-8", "{'^\xe2\x82", 0);
    um_safetensors s;
    put_file("{'__metadata__':{'\xdf\xbf\xe0\xa0\x80':'\xed\x9f\xbf\xf4\x8f\xbf\xbf\x7f'}}", 0);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_safetensors_free(&s);
}

TEST(json_rule) {
    static const char *const broken[] = {
        "{^",
        "{^,}",
        "{'a'^}",
        "{'a':^}",
        "{'a':^,",
        "{'a^",
        "{^a",
        "{^1:2}",
        "{'__metadata__':{'a':'b'^",
        "{'__metadata__':{'a':'b',^}}",
        "{'__metadata__':{'a':'b'^'c':'d'}}",
        "{'__metadata__':{'a'^,'b'}}",
        "{'__metadata__':{'a':^b}}",
        "{'__metadata__':{'a':'b'}^]}",
        "{'__metadata__':{},^}",
        "{'t':{'shape':[^,1]}}",
        "{'t':{'shape':[1,^]}}",
        "{'t':{'shape':[1 ^2]}}",
        "{'t':{'shape':[1^x2]}}",
        "{'t':{'shape':[0^x2]}}",
        "{'t':{'shape':[^+1]}}",
        "{'t':{'shape':[^.1]}}",
        "{'t':{'shape':^]}}",
        "{'t':{'shape':[1]^]}}",
        "{'t':{'shape':[1],^}}",
        "{'t':{'data_offsets':[1,2^",
        "{'t':{'dtype':'^",
        "{'t':{'dtype':^U8}}",
    };
    for (size_t i = 0; i < COUNT(broken); i++) {
        check_rule("the header is not valid JSON", broken[i], 0);
    }
}

TEST(string_rules) {
    static const char *const unknown[] = {"^\\x41",   "a^\\u12", "^\\u12g4",
                                          "^\\U0041", "^\\ ",    "^\\u-041"};
    static const char *const halves[] = {
        "^\\ud800",        "^\\udfff",    "^\\udc00\\ud800",       "^\\ud800\\ud800",
        "^\\ud800\\u0041", "^\\ud83d\\n", "\\ud83d\\ude00^\\ude00"};
    char json[64];
    for (size_t i = 0; i < COUNT(unknown); i++) {
        snprintf(json, sizeof json, "{'__metadata__':{'a':'%s'}}", unknown[i]);
        check_rule("a string has an escape that JSON does not know", json, 0);
    }
    check_rule("a string has an escape that JSON does not know", "{'^\\", 0);
    check_rule("a string has an escape that JSON does not know", "{'^\\u004", 0);
    for (size_t i = 0; i < COUNT(halves); i++) {
        snprintf(json, sizeof json, "{'%s':{}}", halves[i]);
        check_rule("a string has half of a surrogate pair", json, 0);
    }
    for (char c = 0; c < 0x20; c++) {
        put_file("{'__metadata__':{'a^_':'b'}}", 0);
        file[marked] = (unsigned char)c;
        check_breaks("a string has a control character");
    }
    um_safetensors s;
    put_file("{'__metadata__':{'\\\"\\\\\\/"
             "\\b\\f\\n\\r\\t':'\\u00e9\\u20AC\\ud83D\\uDe00\\uFFFF\\u007f'}}",
             0);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    CHECK(is_text(s.kv[0].key, "\"\\/\b\f\n\r\t"));
    CHECK(is_text(s.kv[0].value, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbf\x7f"));
    um_safetensors_free(&s);
}

TEST(metadata_rules) {
    check_rule("__metadata__ is not an object", "{'__metadata__':^[]}", 0);
    check_rule("__metadata__ is not an object", "{'__metadata__':^null}", 0);
    static const char *const values[] = {"1", "null", "true", "{}", "['a']", "-1"};
    for (size_t i = 0; i < COUNT(values); i++) {
        char json[64];
        snprintf(json, sizeof json, "{'__metadata__':{'a': ^%s}}", values[i]);
        check_rule("a value of __metadata__ is not a string", json, 0);
    }
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
    for (size_t i = 0; i < COUNT(unknown); i++) {
        char json[64];
        snprintf(json, sizeof json, "{'t':{'dtype':^'%s'}}", unknown[i]);
        check_rule("unknown dtype of a tensor", json, 1);
    }
    check_rule("a tensor's shape is not an array", "{'t':{'shape':^1}}", 1);
    check_rule("a tensor's shape is not an array", "{'t':{'shape': ^{}}}", 1);
    static const char *const numbers[] = {"-1", "-0",  "1.0", "1e0",  "1E2", "01",
                                          "00", "'1'", "[1]", "null", "true"};
    for (size_t i = 0; i < COUNT(numbers); i++) {
        char json[64];
        snprintf(json, sizeof json, "{'t':{'shape':[1, ^%s]}}", numbers[i]);
        check_rule("a dimension or offset is not an unsigned integer", json, 1);
        snprintf(json, sizeof json, "{'t':{'data_offsets':[^%s,1]}}", numbers[i]);
        check_rule("a dimension or offset is not an unsigned integer", json, 1);
    }
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

TEST(size_rules) {
    static const char *const overflow[] = {
        "'U8','shape':^[4294967296,4294967296]", "'F4','shape':^[9223372036854775808]",
        "'F64','shape':^[288230376151711744]", "'U8','shape':^[0,9223372036854775808]",
        "'U8','shape':^[9223372036854775808,2,0]"};
    for (size_t i = 0; i < COUNT(overflow); i++) {
        char json[128];
        snprintf(json, sizeof json, "{'t':{'dtype':%s,'data_offsets':[0,0]}}", overflow[i]);
        check_rule("a tensor's dimensions overflow", json, 0);
    }
    static const char not_whole[] = "a tensor's values are not whole bytes";
    check_rule(not_whole, "{'t':{'dtype':'F4','shape':^[3],'data_offsets':[0,1]}}", 1);
    check_rule(not_whole, "{'t':{'dtype':'F6_E2M3','shape':^[2],'data_offsets':[0,1]}}", 1);
    check_rule(not_whole, "{'t':{'dtype':'F4','shape':^[],'data_offsets':[0,0]}}", 0);
    check_rule("a tensor ends before it begins",
               "{'t':{'dtype':'U8','shape':[1],'data_offsets':^[1,0]}}", 1);
    static const char not_its[] = "a tensor has not the bytes of its shape and dtype";
    check_rule(not_its, "{'t':{'dtype':'U8','shape':[2],'data_offsets':^[0,1]}}", 1);
    check_rule(not_its, "{'t':{'data_offsets':^[0,1],'dtype':'U8','shape':[0]}}", 1);
    check_rule(not_its, "{'t':{'dtype':'F32','shape':[],'data_offsets': ^[0,1]}}", 1);
    check_rule(not_its, "{'t':{'dtype':'U8','shape':[1],'data_offsets':^[0,18446744073709551615]}}",
               1);
}

TEST(place_rules) {
    um_safetensors s;
    static const char end[] = "a tensor passes the end of the file";
    check_rule(end, "{'t':{'dtype':'U8','shape':[2],'data_offsets':^[0,2]}}", 1);
    check_rule(end, "{'t':{'dtype':'U8','shape':[0],'data_offsets':^[2,2]}}", 1);
    check_rule(end,
               "{'t':{'dtype':'U8','shape':[1],'data_offsets':^[18446744073709551614,"
               "18446744073709551615]}}",
               1);
    static const char hole[] = "the bytes before a tensor are no tensor's";
    check_rule(hole, "{'t':{'dtype':'U8','shape':[1],'data_offsets':^[1,2]}}", 2);
    check_rule(hole, "{'b':{'dtype':'U8','shape':[1],'data_offsets':^[2,3]},'a':" U8(0, 1, 1) "}",
               3);
    static const char overlap[] = "two tensors overlap";
    check_rule(overlap,
               "{'b':{'dtype':'U8','shape':[2],'data_offsets':^[1,3]},'a':" U8(0, 2, 2) "}", 3);
    check_rule(overlap,
               "{'a':" U8(0, 1, 1) ",'b':{'dtype':'U8','shape':[1],'data_offsets':^[0,1]}}", 1);
    check_rule(overlap,
               "{'a':" U8(0, 4, 4) ",'e':{'dtype':'U8','shape':[0],'data_offsets':^[2,2]}}", 4);
    static const char behind[] = "the file goes on behind its tensors";
    check_rule(behind, "{}^", 1);
    put_file("{'a':" U8(0, 1, 1) "}^", 2);
    marked++;
    check_breaks(behind);
    put_file("{'c':" U8(3, 3, 0) ",'b':" U8(2, 3, 1) ",'e':" U8(0, 0, 0) ",'a':" U8(0, 2, 2) "}",
             3);
    CHECK_OK(parse(&s, file_nbytes, file_nbytes));
    um_safetensors_free(&s);
    check_rule("a tensor's name occurs twice",
               "{'a':" U8(0, 1, 1) ",'b':" U8(1, 2, 1) ",^'\\u0061':" U8(2, 3, 1) "}", 3);
}

/* ---- memory, and damage ---- */

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

static void check_parsed(const um_safetensors *s, const unsigned char *bytes, size_t nbytes) {
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
        char *resolved = malloc(s->kv[i].value.nbytes + 1);
        REQUIRE(resolved != NULL);
        CHECK(um_safetensors_write_text(bytes, s->kv[i].value, resolved) <= s->kv[i].value.nbytes);
        free(resolved);
    }
}

TEST(random_damage) {
    enum { N_ROUNDS = 20000 };
    static const char tokens[] = "{}[]:,\"\\u0d819- e.\xff\x80\x01";
    uint64_t state = 3;
    unsigned n_ok = 0, n_format = 0;
    for (int round = 0; round < N_ROUNDS; round++) {
        put_everything();
        unsigned n_changes = (unsigned)(test_random(&state) % 4);
        for (unsigned i = 0; i < n_changes; i++) {
            size_t at = test_random(&state) % (file_nbytes - 74);
            uint64_t what = test_random(&state);
            if (what % 3 == 0) {
                file[at] ^= (unsigned char)(1u << what / 3 % 8);
            } else {
                file[at] = (unsigned char)tokens[what / 3 % (sizeof tokens - 1)];
            }
        }
        um_safetensors s;
        um_error err;
        size_t nbytes =
            test_random(&state) % 4 == 0 ? test_random(&state) % file_nbytes : file_nbytes;
        unsigned char *exact = malloc(nbytes == 0 ? 1 : nbytes);
        REQUIRE(exact != NULL);
        memcpy(exact, file, nbytes);
        um_status status = um_safetensors_parse(&s, exact, nbytes, nbytes, &err);
        if (status == UM_OK) {
            n_ok++;
            check_parsed(&s, exact, nbytes);
            um_safetensors_free(&s);
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
