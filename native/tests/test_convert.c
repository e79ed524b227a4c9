/* Conversions: every code that this CPU can run, in every floating-point mode, against independent
 * references: a table of all values of a 16-bit format in double precision, in which the nearest is
 * looked up; and ggml's quantizer of eight bits, rewritten from its definition (ggml-quants.c,
 * quantize_row_q8_0_ref). */
#include "fp_modes.h"
#include "test.h"
#include "unimem_formats.h"
#include "values/convert.h"
#include <math.h>

enum { N_NARROW = 65536, BLOCK = 32 };

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The values of a 16-bit format in order, from 0 to the largest, and the one that would follow: a
 * number nearer to that than to the largest becomes infinite. All are exact. */
typedef struct format {
    um_dtype type;
    int mantissa_bits, bias;
    uint16_t infinity, quiet;
    double magnitudes[0x7f81];
} format;

static format formats[] = {{.type = UM_F16, 10, 15, 0x7c00, 0x200, {0}},
                           {.type = UM_BF16, 7, 127, 0x7f80, 0x40, {0}}};
enum { N_FORMATS = 2 };

static void make_formats(void) {
    for (format *f = formats; f != formats + N_FORMATS; f++) {
        for (int code = 0; code <= f->infinity; code++) {
            int exponent = code >> f->mantissa_bits,
                mantissa = code & ((1 << f->mantissa_bits) - 1);
            int least = 1 - f->bias - f->mantissa_bits;
            f->magnitudes[code] =
                exponent == 0 ? ldexp(mantissa, least)
                              : ldexp((1 << f->mantissa_bits) + mantissa, exponent - 1 + least);
        }
    }
}

/* The code of the value nearest to a float; a tie goes to the even code. A NaN keeps its sign and
 * the upper bits of its payload, and becomes quiet. */
static uint16_t nearest(const format *f, float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) {
        uint32_t payload = (bits_of(value) & 0x7fffff) >> (23 - f->mantissa_bits);
        return (uint16_t)(sign | f->infinity | f->quiet | payload);
    }
    double wanted = fabs((double)value);
    if (wanted >= f->magnitudes[f->infinity]) {
        return sign | f->infinity;
    }
    int low = 0, high = f->infinity; /* magnitudes[low] <= wanted < magnitudes[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (f->magnitudes[middle] <= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = wanted - f->magnitudes[low], above = f->magnitudes[high] - wanted;
    bool up = above < below || (above == below && low % 2 == 1);
    return (uint16_t)(sign | (up ? high : low));
}

/* The value of a code, as a float. */
static float value_of(const format *f, uint16_t code) {
    uint16_t magnitude = code & 0x7fff;
    double value = magnitude > f->infinity    ? (double)NAN
                   : magnitude == f->infinity ? (double)INFINITY
                                              : f->magnitudes[magnitude];
    return (float)(code & 0x8000 ? -value : value);
}

static void quantize(um__q8_0 *out, const float *in) {
    float amax = 0;
    for (int i = 0; i < BLOCK; i++) {
        amax = amax > fabsf(in[i]) ? amax : fabsf(in[i]);
    }
    float d = amax / 127, id = d != 0 ? 1.0f / d : 0;
    out->d = isnan(d) ? 0x7e00 : nearest(&formats[0], d);
    for (int i = 0; i < BLOCK; i++) {
        float rounded = roundf(in[i] * id);
        bool fits = rounded >= -0x1p31f && rounded < 0x1p31f;
        out->qs[i] = (int8_t)(fits ? (int64_t)rounded & 0xff : 0);
    }
}

/* Checks the references themselves with well-known values. */
TEST(references) {
    make_formats();
    const format *f16 = &formats[0], *bf16 = &formats[1];
    const struct {
        const format *f;
        int code;
        double value;
    } magnitudes[] = {{f16, 1, 0x1p-24},      {f16, 0x400, 0x1p-14},
                      {f16, 0x3c00, 1.0},     {f16, 0x3555, 0.333251953125},
                      {f16, 0x7bff, 65504.0}, {f16, 0x7c00, 65536.0},
                      {bf16, 0x3f80, 1.0},    {bf16, 0x80, 0x1p-126},
                      {bf16, 1, 0x1p-133},    {bf16, 0x7f80, 0x1p128}};
    const struct {
        const format *f;
        float value;
        int code;
    } codes[] = {{f16, 65519.996f, 0x7bff},
                 {f16, 65520.0f, 0x7c00},
                 {f16, -INFINITY, 0xfc00},
                 {f16, -0.0f, 0x8000},
                 {f16, 0x1p-25f, 0},
                 {f16, 0x1.000002p-25f, 1},
                 {f16, 0x1.8p-24f, 2},
                 {f16, 0x1.4p-23f, 2},
                 {f16, 1.0f + 0x1p-11f, 0x3c00},
                 {f16, 1.0f + 0x3p-11f, 0x3c02},
                 {bf16, 0x1.ffp127f, 0x7f80},
                 {bf16, 0x1.fefffep127f, 0x7f7f},
                 {bf16, 0x1p-134f, 0},
                 {bf16, -0x1.8p-133f, 0x8002},
                 {bf16, 1.0f + 0x1p-8f, 0x3f80},
                 {bf16, 1.0f + 0x3p-8f, 0x3f82}};
    for (size_t i = 0; i < COUNT(magnitudes); i++) {
        CHECK(magnitudes[i].f->magnitudes[magnitudes[i].code] == magnitudes[i].value);
    }
    for (size_t i = 0; i < COUNT(codes); i++) {
        CHECK_EQ(nearest(codes[i].f, codes[i].value), codes[i].code);
    }
    CHECK_EQ(nearest(f16, float_of(0xff812345)), 0xfe00 | 0x12345 >> 13);
    CHECK_EQ(nearest(bf16, float_of(0x7f800001)), 0x7fc0);
    float in[BLOCK] = {127, 0.5f, -0.5f, 1.5f, 0x0.ffffffp-1f, -126.5f, -0.0f};
    const int8_t qs[BLOCK] = {127, 1, -1, 2, 0, -127, 0};
    um__q8_0 block;
    quantize(&block, in);
    CHECK(block.d == 0x3c00);
    CHECK(memcmp(block.qs, qs, sizeof qs) == 0);
}

/* The subject of a test: one code in one mode. */
typedef struct way {
    const um__convert_code *code;
    fp_mode mode;
} way;

static void convert(const way *w, void *out, um_dtype out_type, const void *in, um_dtype in_type,
                    size_t n) {
    test_err_pattern(&test_err);
    set_mode(w->mode.word);
    um_status status = um__convert_by(w->code, out, out_type, in, in_type, n, &test_err);
    uint64_t mode = get_mode();
    set_mode(modes[0].word);
    CHECK_EQ(mode, w->mode.word);
    test_status(status, UM_OK, __FILE__, __LINE__, w->code->isa);
}

/* Prints the first items that differ. */
static void check_same(const way *w, const char *what, const void *got, const void *expected,
                       size_t n, size_t item) {
    const unsigned char *a = got, *b = expected;
    size_t n_wrong = 0;
    for (size_t i = 0; i < n; i++) {
        if (memcmp(a + i * item, b + i * item, item) != 0 && n_wrong++ < 3) {
            fprintf(stderr, "%s, %s, %s: item %zu differs:", w->code->isa, w->mode.name, what, i);
            for (size_t j = 0; j < item; j++) {
                fprintf(stderr, " %02x/%02x", a[i * item + j], b[i * item + j]);
            }
            fprintf(stderr, "\n");
        }
    }
    CHECK_EQ(n_wrong, 0);
}

static void check_all_narrow(const way *w, const format *f) {
    AUTO_FREE uint16_t *codes = allocate(N_NARROW * sizeof *codes),
                       *back = allocate(N_NARROW * sizeof *back);
    AUTO_FREE float *values = allocate(N_NARROW * sizeof *values);
    for (unsigned i = 0; i < N_NARROW; i++) {
        codes[i] = (uint16_t)i;
    }
    convert(w, values, UM_F32, codes, f->type, N_NARROW);
    convert(w, back, f->type, values, UM_F32, N_NARROW);
    size_t n_wrong = 0;
    for (unsigned i = 0; i < N_NARROW; i++) {
        bool is_nan = (i & 0x7fff) > f->infinity;
        /* A NaN keeps its sign and payload, and is quiet after the way back. */
        bool right = is_nan
                         ? isnan(values[i]) && back[i] == (i | f->quiet)
                         : bits_of(values[i]) == bits_of(value_of(f, (uint16_t)i)) && back[i] == i;
        if (!right && n_wrong++ < 3) {
            fprintf(stderr, "%s, %s: 0x%04x becomes 0x%08x and 0x%04x\n", w->code->isa,
                    w->mode.name, i, bits_of(values[i]), back[i]);
        }
    }
    CHECK_EQ(n_wrong, 0);
}

enum { MAX_INPUTS = 3 << 20 };
static float *inputs;
static uint16_t *expected[N_FORMATS];
static size_t n_inputs;

static void add_input(uint32_t bits) {
    REQUIRE(n_inputs < MAX_INPUTS);
    inputs[n_inputs++] = float_of(bits);
}

/* Every sign and exponent. For each: the values around every float16 and bfloat16 and every tie
 * between two, also where they are denormal and the steps are larger, and random values. */
static void make_inputs(void) {
    uint64_t seed = 42;
    inputs = allocate(MAX_INPUTS * sizeof *inputs);
    for (uint32_t top = 0; top < 512; top++) {
        uint32_t high = top << 23;
        for (uint32_t step = 0; step < 1024; step++) {
            uint32_t at = high | step << 13;
            add_input(at);
            add_input(at + 0xfff);
            add_input(at + 0x1000);
            add_input(at + 0x1001);
        }
        for (uint32_t step = 0; step < 128; step++) {
            uint32_t at = high | step << 16;
            add_input(at + 0x7fff);
            add_input(at + 0x8001);
        }
        for (uint32_t shift = 0; shift <= 23; shift++) {
            uint32_t half = 1u << shift >> 1, mask = 0x7fffff;
            for (int i = 0; i < 8; i++) {
                uint32_t at = (uint32_t)test_random(&seed) << shift;
                add_input(high | ((at + half) & mask));
                add_input(high | ((at + half - 1) & mask));
                add_input(high | ((at + half + 1) & mask));
            }
        }
        for (int i = 0; i < 512; i++) {
            add_input(high | ((uint32_t)test_random(&seed) & 0x7fffff));
        }
    }
    for (int i = 0; i < N_FORMATS; i++) {
        expected[i] = allocate(n_inputs * sizeof *expected[i]);
        for (size_t j = 0; j < n_inputs; j++) {
            expected[i][j] = nearest(&formats[i], inputs[j]);
        }
    }
}

static void check_narrowing(const way *w) {
    AUTO_FREE uint16_t *out = allocate(n_inputs * sizeof *out);
    for (int i = 0; i < N_FORMATS; i++) {
        memset(out, 0xA5, n_inputs * sizeof *out);
        convert(w, out, formats[i].type, inputs, UM_F32, n_inputs);
        check_same(w, "16 bits", out, expected[i], n_inputs, sizeof *out);
    }
}

enum { N_BLOCKS = 40000 };
static float *rows;
static um__q8_0 *quantized;

/* Random values below 2^exponent, of either sign. */
static void random_block(float *out, uint64_t *seed, int exponent) {
    for (int i = 0; i < BLOCK; i++) {
        double part = (double)(int64_t)test_random(seed) * 0x1p-63;
        out[i] = (float)ldexp(part, exponent);
    }
}

/* Makes values halfway between two steps of the scale d, or next to that, from values below half of
 * the range. */
static void make_ties(float *row, uint64_t *seed, float d) {
    for (int i = 0; i < BLOCK; i++) {
        uint64_t dice = test_random(seed);
        float tie = ((float)(dice % 128) - 63.5f) * d;
        if (fabsf(row[i]) < 64 * fabsf(d)) {
            row[i] = float_of(bits_of(tie) + (uint32_t)(dice >> 32) % 3 - 1);
        }
    }
}

static void make_rows(void) {
    static const float odd_ones[] = {0,        -0.0f,     INFINITY,  -INFINITY,
                                     NAN,      -NAN,      0x1p-149f, -0x1p-126f,
                                     0x1p127f, -0x1p100f, 1,         0x1.fffffep127f};
    enum { N_ODD_ONES = COUNT(odd_ones) };
    uint64_t seed = 7;
    rows = allocate(N_BLOCKS * BLOCK * sizeof *rows);
    quantized = allocate(N_BLOCKS * sizeof *quantized);
    for (int b = 0; b < N_BLOCKS; b++) {
        float *row = rows + (size_t)b * BLOCK;
        uint64_t dice = test_random(&seed);
        switch (b % 8) {
        case 0: /* any exponent, including those where a scale is denormal, infinite or 0 */
            random_block(row, &seed, (int)(dice % 280) - 150);
            break;
        case 1: /* any bits */
            for (int i = 0; i < BLOCK; i++) {
                row[i] = float_of((uint32_t)test_random(&seed));
            }
            break;
        case 2: /* one special value among usual values, at any place */
            random_block(row, &seed, 3);
            row[dice % BLOCK] = odd_ones[dice / BLOCK % N_ODD_ONES];
            break;
        case 3: /* mostly special values */
            for (int i = 0; i < BLOCK; i++) {
                row[i] = odd_ones[test_random(&seed) % N_ODD_ONES];
            }
            break;
        case 4: /* ties and the floats next to them, with scales that are powers of two or any */
            random_block(row, &seed, (int)(dice % 20));
            row[dice / 32 % BLOCK] = ldexpf(dice & 1024 ? -127 : 127, (int)(dice % 20));
            make_ties(row, &seed, ldexpf(1, (int)(dice % 20)));
            break;
        case 6:
            random_block(row, &seed, (int)(dice % 20));
            make_ties(row, &seed, row[dice / 32 % BLOCK] / 127);
            break;
        case 5: /* around the limits of the vector code, and of denormal scales */
            random_block(row, &seed, -90);
            row[dice % BLOCK] = ldexpf(
                1 + (float)(dice >> 40) * 0x1p-24f,
                (const int[]){-100, -101, -121, -122, -143, -149, 127, 126}[dice / BLOCK % 8]);
            break;
        default:
            random_block(row, &seed, 4);
        }
    }
    /* Zeros of either sign. */
    for (int i = 0; i < 2 * BLOCK; i++) {
        rows[i] = i < BLOCK ? 0 : -0.0f;
    }
    for (int b = 0; b < N_BLOCKS; b++) {
        quantize(&quantized[b], rows + (size_t)b * BLOCK);
    }
}

static void check_quantizing(const way *w) {
    AUTO_FREE um__q8_0 *out = allocate(N_BLOCKS * sizeof *out);
    memset(out, 0xA5, N_BLOCKS * sizeof *out);
    convert(w, out, UM_Q8_0, rows, UM_F32, (size_t)N_BLOCKS * BLOCK);
    check_same(w, "q8_0", out, quantized, N_BLOCKS, sizeof *out);
}

/* Every scale with every value. */
static void check_dequantizing(const way *w) {
    enum { PER_SCALE = 256 / BLOCK };
    size_t n_blocks = (size_t)N_NARROW * PER_SCALE, n = n_blocks * BLOCK;
    AUTO_FREE um__q8_0 *in = allocate(n_blocks * sizeof *in);
    AUTO_FREE float *out = allocate(n * sizeof *out);
    for (size_t i = 0; i < n; i++) {
        in[i / BLOCK].d = (uint16_t)(i / 256);
        in[i / BLOCK].qs[i % BLOCK] = (int8_t)(i % 256);
    }
    convert(w, out, UM_F32, in, UM_Q8_0, n);
    size_t n_wrong = 0;
    for (size_t i = 0; i < n; i++) {
        /* The product is exact, in double precision and in single. */
        double product = (double)value_of(&formats[0], (uint16_t)(i / 256)) * (int8_t)(i % 256);
        bool right = isnan(product) ? isnan(out[i]) : bits_of(out[i]) == bits_of((float)product);
        n_wrong += !right;
    }
    CHECK_EQ(n_wrong, 0);
}

static size_t bytes_of(um_dtype type, size_t n) {
    return n / um_dtype_block_values(type) * um_dtype_block_bytes(type);
}

/* n usual values of a type. */
static void *usual_values(um_dtype type, size_t n, uint64_t *seed) {
    AUTO_FREE float *values = allocate(n * sizeof *values);
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)(int64_t)test_random(seed) * 0x1p-60f;
    }
    void *out = allocate(bytes_of(type, n));
    CHECK_OK(um__convert_by(um__convert_code_at(0), out, type, values, UM_F32, n, &test_err));
    return out;
}

/* Many values, against the scalar code in two steps by way of float32. */
static void check_pairs(const way *w) {
    uint64_t seed = 3;
    const size_t lengths[] = {BLOCK, 1024 - BLOCK, 1024, 3 * 1024 + 5 * BLOCK};
    for (um_dtype from = UM_F32; from < UM_DTYPE_COUNT; from++) {
        for (um_dtype to = UM_F32; to < UM_DTYPE_COUNT; to++) {
            for (size_t i = 0; i < COUNT(lengths); i++) {
                size_t n = lengths[i], out_bytes = bytes_of(to, n);
                AUTO_FREE void *in = usual_values(from, n, &seed);
                AUTO_FREE float *wide = allocate(n * sizeof *wide);
                AUTO_FREE unsigned char *out = allocate(out_bytes), *want = allocate(out_bytes);
                const um__convert_code *plain = um__convert_code_at(0);
                memset(out, 0xA5, out_bytes);
                convert(w, out, to, in, from, n);
                if (from == to) {
                    memcpy(want, in, out_bytes);
                } else {
                    CHECK_OK(um__convert_by(plain, wide, UM_F32, in, from, n, &test_err));
                    CHECK_OK(um__convert_by(plain, want, to, wide, UM_F32, n, &test_err));
                }
                check_same(w, "a pair", out, want, out_bytes, 1);
            }
        }
    }
}

/* Each length from 0 on, at each address modulo a vector: all of the output is written, nothing
 * beyond it, and nothing is read beyond the input. */
static void check_lengths(const way *w) {
    enum { MAX_N = 70, MAX_SHIFT = 17 };
    uint64_t seed = 5;
    for (um_dtype from = UM_F32; from < UM_DTYPE_COUNT; from++) {
        for (um_dtype to = UM_F32; to < UM_DTYPE_COUNT; to++) {
            bool right = true, bounded = true;
            size_t step = from >= UM_Q8_0 || to >= UM_Q8_0 ? BLOCK : 1;
            size_t in_align = from == UM_F32 ? 4 : 2, out_align = to == UM_F32 ? 4 : 2;
            for (size_t n = 0; n <= MAX_N; n += step) {
                AUTO_FREE void *in = usual_values(from, n, &seed);
                size_t in_bytes = bytes_of(from, n), out_bytes = bytes_of(to, n);
                AUTO_FREE unsigned char *want = allocate(out_bytes);
                CHECK_OK(um__convert_by(um__convert_code_at(0), want, to, in, from, n, &test_err));
                for (size_t shift = 0; shift < MAX_SHIFT; shift++) {
                    size_t before = shift * out_align;
                    AUTO_FREE unsigned char *source = allocate(shift * in_align + in_bytes);
                    AUTO_FREE unsigned char *out = allocate(before + out_bytes + 1);
                    memcpy(source + shift * in_align, in, in_bytes);
                    memset(out, 0xEE, before + out_bytes + 1);
                    convert(w, out + before, to, source + shift * in_align, from, n);
                    right = right && memcmp(out + before, want, out_bytes) == 0;
                    bounded = bounded && out[before + out_bytes] == 0xEE;
                    bounded = bounded && (shift == 0 || out[before - 1] == 0xEE);
                }
            }
            CHECK(right);
            CHECK(bounded);
        }
    }
}

static void check_convert(um_dtype to, const void *want, um_dtype from, const void *in, size_t n) {
    AUTO_FREE unsigned char *out = allocate(bytes_of(to, n));
    CHECK_OK(um_convert(out, to, in, from, n, &test_err));
    CHECK(memcmp(out, want, bytes_of(to, n)) == 0);
}

TEST(convert) {
    const float in[5] = {1.0f, -2.0f, 0.5f, 65504.0f, 1e-7f};
    const float back[5] = {1.0f, -2.0f, 0.5f, 65504.0f, 0x1p-23f};
    const uint16_t halves[5] = {0x3c00, 0xc000, 0x3800, 0x7bff, 0x0002};
    const uint16_t brains[5] = {0x3f80, 0xc000, 0x3f00, 0x4780, 0x33d7};
    const uint16_t halves_of_brains[5] = {0x3c00, 0xc000, 0x3800, 0x7c00, 0x0002};
    check_convert(UM_F16, halves, UM_F32, in, 5);
    check_convert(UM_BF16, brains, UM_F32, in, 5);
    check_convert(UM_F16, halves_of_brains, UM_BF16, brains, 5);
    check_convert(UM_F32, back, UM_F16, halves, 5);
    /* The same type is copied bit by bit, signalling NaNs included. */
    const uint32_t bits[3] = {0x7f800001, 0xff812345, 0x00000001};
    const uint16_t nans[3] = {0x7f81, 0xfd55, 0x0001};
    const um__q8_0 blocks[2] = {{0x7c01, {1, -128}}, {0xfd55, {127}}};
    check_convert(UM_F32, bits, UM_F32, bits, 3);
    check_convert(UM_F16, nans, UM_F16, nans, 3);
    check_convert(UM_BF16, nans, UM_BF16, nans, 3);
    check_convert(UM_Q8_0, blocks, UM_Q8_0, blocks, 2 * BLOCK);
}

TEST(refusals) {
    float in[BLOCK * 2] = {1};
    unsigned char out[sizeof in];
    SPOIL(out);
    const um_dtype unknown[] = {(um_dtype)9, (um_dtype)-1, (um_dtype)255};
    for (size_t i = 0; i < COUNT(unknown); i++) {
        CHECK_INVALID(um_convert(out, unknown[i], in, UM_F32, 5, &test_err));
        CHECK_INVALID(um_convert(out, UM_F16, in, unknown[i], 5, &test_err));
        CHECK_INVALID(um_convert(out, unknown[i], in, unknown[i], 5, &test_err));
        CHECK_INVALID(um_convert(out, unknown[i], in, UM_F32, 0, &test_err));
        CHECK(um_convert(out, unknown[i], in, UM_F32, 5, NULL) == UM_E_INVALID);
        CHECK_EQ(um_dtype_block_bytes(unknown[i]), 0);
        CHECK_EQ(um_dtype_block_values(unknown[i]), 0);
    }
    for (um_dtype other = UM_F32; other < UM_DTYPE_COUNT; other++) {
        for (um_dtype blocks = UM_Q8_0; blocks < UM_DTYPE_COUNT; blocks++) {
            CHECK_INVALID(um_convert(out, blocks, in, other, BLOCK + 1, &test_err));
            CHECK_INVALID(um_convert(out, other, in, blocks, BLOCK - 1, &test_err));
            CHECK_OK(um_convert(NULL, blocks, NULL, other, 0, &test_err));
            CHECK_OK(um_convert(NULL, other, NULL, blocks, 0, &test_err));
        }
        CHECK_OK(um_convert(NULL, other, NULL, UM_F32, 0, &test_err));
    }
    CHECK_SPOILT(out);
}

/* The description of a type agrees with ggml's table of types. */
TEST(types) {
    const size_t n_bytes[] = {4, 2, 2, 34, 18, 20, 22, 24, 18};
    for (um_dtype type = UM_F32; type < UM_DTYPE_COUNT; type++) {
        const um_dtype_info *info = um_dtype_describe(type);
        const um_gguf_tensor_type *ggml = um_gguf_type_of_tensor(info->ggml_type);
        REQUIRE(ggml != NULL);
        CHECK_STR(info->name, ggml->name);
        CHECK_EQ(info->block_bytes, ggml->block_bytes);
        CHECK_EQ(info->block_values, ggml->block_values);
        CHECK_EQ(um_dtype_block_bytes(type), n_bytes[type]);
        CHECK_EQ(um_dtype_block_values(type), type >= UM_Q8_0 ? 32 : 1);
    }
    CHECK(um_dtype_describe(UM_DTYPE_COUNT) == NULL);
    CHECK(um_dtype_describe((um_dtype)-1) == NULL);
}

TEST(every_code_in_every_mode) {
    make_inputs();
    make_rows();
    const um__convert_code *last = NULL;
    for (size_t i = 0; um__convert_code_at(i) != NULL; i++) {
        last = um__convert_code_at(i);
        printf("%s, ", last->isa);
        for (size_t j = 0; j < N_MODES; j++) {
            way w = {last, modes[j]};
            for (int k = 0; k < N_FORMATS; k++) {
                check_all_narrow(&w, &formats[k]);
            }
            check_narrowing(&w);
            check_quantizing(&w);
            check_dequantizing(&w);
            check_pairs(&w);
            check_lengths(&w);
        }
    }
    REQUIRE(last != NULL);
    CHECK_STR(um__convert_code_at(0)->isa, "scalar");
    CHECK_STR(um_convert_isa(), last->isa);
    printf("%zu floats, %d blocks: ", n_inputs, N_BLOCKS);
}
