/* Conversions, of every code that this CPU runs, against a reference that shares nothing with them:
 * a table of all float16 values in double precision, where the nearest one is looked up. */
#include "test.h"

#include <math.h>

#include "convert.h"

enum { N_HALVES = 65536, INFINITY_F16 = 0x7c00, MAX_F16 = 0x7bff };

/* ---- the reference ---- */

/* The values of 0x0000 to 0x7bff, in their order, and behind them the one that would come next:
 * what is nearer to it than to the largest is infinite. All of them are exact. */
static double magnitudes[INFINITY_F16 + 1];

static void make_reference(void) {
    for (int half = 0; half <= INFINITY_F16; half++) {
        int exponent = half / 1024, mantissa = half % 1024;
        magnitudes[half] =
            exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024.0 + mantissa, exponent - 25);
    }
}

static bool is_nan_f16(uint16_t half) {
    return (half & 0x7fff) > INFINITY_F16;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The float16 nearest to a number that is not a NaN; of two equally near the even one. */
static uint16_t nearest_f16(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double wanted = fabs((double)value);
    if (wanted >= magnitudes[INFINITY_F16]) {
        return sign | INFINITY_F16;
    }
    int low = 0, high = INFINITY_F16; /* magnitudes[low] <= wanted < magnitudes[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (magnitudes[middle] <= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = wanted - magnitudes[low], above = magnitudes[high] - wanted;
    bool up = above < below || (above == below && low % 2 == 1);
    return (uint16_t)(sign | (up ? high : low));
}

/* ---- every float16 ---- */

static void test_all_halves(const um_convert_code *code) {
    static uint16_t halves[N_HALVES], back[N_HALVES];
    static float values[N_HALVES];
    for (unsigned i = 0; i < N_HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    code->f32_of_f16(values, halves, N_HALVES);
    code->f16_of_f32(back, values, N_HALVES);
    for (unsigned i = 0; i < N_HALVES; i++) {
        unsigned magnitude = i & 0x7fff;
        bool right;
        if (is_nan_f16((uint16_t)i)) {
            /* Quiet, with its sign and payload. */
            right = bits_of(values[i]) ==
                        ((uint32_t)(i & 0x8000) << 16 | 0x7fc00000 | (uint32_t)(i & 0x3ff) << 13) &&
                    back[i] == (i | 0x200);
        } else {
            double expected = magnitude == INFINITY_F16 ? (double)INFINITY : magnitudes[magnitude];
            right = fabs((double)values[i]) == expected &&
                    (signbit(values[i]) != 0) == ((i & 0x8000) != 0) && back[i] == i;
        }
        if (!right) {
            fprintf(stderr, "%s: 0x%04x becomes 0x%08x and 0x%04x\n", code->isa, i,
                    bits_of(values[i]), back[i]);
            CHECK(right);
            return;
        }
    }
    CHECK(true);
}

/* ---- float32, by strata ---- */

static float *inputs;
static uint16_t *expected;
static size_t n_inputs;

enum { MAX_INPUTS = 3 << 20 };

static void add_input(uint32_t bits) {
    if (n_inputs < MAX_INPUTS) {
        inputs[n_inputs++] = float_of(bits);
    }
}

/* Every sign and exponent; in each the values round about every float16 and every tie between two,
 * also where float16 is denormal and steps are larger, and some at random. */
static void make_inputs(void) {
    uint64_t seed = 42;
    for (uint32_t top = 0; top < 512; top++) {
        uint32_t high = top << 23;
        for (uint32_t step = 0; step < 1024; step++) {
            uint32_t at = high | step << 13;
            add_input(at);
            add_input(at + 0xfff);
            add_input(at + 0x1000);
            add_input(at + 0x1001);
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
    /* Ties at both ends of the range. */
    uint32_t edges[] = {0x477fefff, 0x477ff000, 0x477ff001, 0x33000000, 0x33000001, 0x32ffffff,
                        0x33800000, 0x38800000, 0x387fffff, 0x387fe000, 0x387fdfff, 0x33c00000};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        add_input(edges[i]);
        add_input(edges[i] | 0x80000000);
    }
    REQUIRE(n_inputs < MAX_INPUTS);
    for (size_t i = 0; i < n_inputs; i++) {
        /* A NaN keeps its sign and the upper bits of its payload, and is made quiet. */
        uint32_t bits = bits_of(inputs[i]);
        expected[i] = isnan(inputs[i])
                          ? (uint16_t)(bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff)
                          : nearest_f16(inputs[i]);
    }
}

static void test_f16_of_f32(const um_convert_code *code) {
    uint16_t *out = malloc(n_inputs * sizeof *out);
    REQUIRE(out != NULL);
    memset(out, 0xA5, n_inputs * sizeof *out);
    code->f16_of_f32(out, inputs, n_inputs);
    size_t n_wrong = 0;
    for (size_t i = 0; i < n_inputs; i++) {
        if (out[i] != expected[i] && n_wrong++ < 5) {
            fprintf(stderr, "%s: 0x%08x becomes 0x%04x, expected 0x%04x\n", code->isa,
                    bits_of(inputs[i]), out[i], expected[i]);
        }
    }
    CHECK_EQ_U64(n_wrong, 0);
    free(out);
}

/* The reference itself, against what everybody knows. */
static void test_reference(void) {
    CHECK(magnitudes[1] == 0x1p-24 && magnitudes[0x400] == 0x1p-14);
    CHECK(magnitudes[0x3c00] == 1.0 && magnitudes[0x3555] == 0.333251953125);
    CHECK(magnitudes[MAX_F16] == 65504.0 && magnitudes[INFINITY_F16] == 65536.0);
    CHECK(nearest_f16(65519.996f) == MAX_F16 && nearest_f16(65520.0f) == INFINITY_F16);
    CHECK(nearest_f16(-INFINITY) == 0xfc00 && nearest_f16(-0.0f) == 0x8000);
    CHECK(nearest_f16(0x1p-25f) == 0 && nearest_f16(0x1.000002p-25f) == 1);
    CHECK(nearest_f16(0x1.8p-24f) == 2 && nearest_f16(0x1.4p-23f) == 2);
    CHECK(nearest_f16(1.0f + 0x1p-11f) == 0x3c00 && nearest_f16(1.0f + 0x3p-11f) == 0x3c02);
}

/* ---- lengths and addresses ---- */

/* Each length from 0 on, at each address modulo a vector: all of the output, nothing beyond it. The
 * buffers end where the heap block ends, so that AddressSanitizer sees a read behind them. */
static void test_lengths(const um_convert_code *code) {
    enum { MAX_N = 70, MAX_SHIFT = 17 };
    bool narrow_right = true, widen_right = true, bounded = true;
    for (size_t n = 0; n <= MAX_N; n++) {
        for (size_t shift = 0; shift < MAX_SHIFT; shift++) {
            float *wide = malloc((shift + n) * sizeof *wide + 1);
            uint16_t *narrow = malloc((shift + n + 1) * sizeof *narrow);
            REQUIRE(wide != NULL && narrow != NULL);
            for (size_t i = 0; i < n; i++) {
                wide[shift + i] = (float)(i * 3 + 1) / 4;
            }
            memset(narrow, 0xEE, (shift + n + 1) * sizeof *narrow);
            code->f16_of_f32(narrow + shift, wide + shift, n);
            for (size_t i = 0; i < n; i++) {
                narrow_right =
                    narrow_right && narrow[shift + i] == nearest_f16((float)(i * 3 + 1) / 4);
            }
            bounded = bounded && narrow[shift + n] == 0xEEEE;
            bounded = bounded && (shift == 0 || narrow[shift - 1] == 0xEEEE);
            free(wide);

            wide = malloc((shift + n + 1) * sizeof *wide);
            REQUIRE(wide != NULL);
            memset(wide, 0xEE, (shift + n + 1) * sizeof *wide);
            uint16_t *exact = malloc((shift + n) * sizeof *exact + 1);
            REQUIRE(exact != NULL);
            memcpy(exact, narrow, (shift + n) * sizeof *exact);
            code->f32_of_f16(wide + shift, exact + shift, n);
            for (size_t i = 0; i < n; i++) {
                widen_right = widen_right && wide[shift + i] == (float)(i * 3 + 1) / 4;
            }
            bounded = bounded && bits_of(wide[shift + n]) == 0xEEEEEEEE;
            bounded = bounded && (shift == 0 || bits_of(wide[shift - 1]) == 0xEEEEEEEE);
            free(exact);
            free(wide);
            free(narrow);
        }
    }
    CHECK(narrow_right);
    CHECK(widen_right);
    CHECK(bounded);
}

/* ---- the public function ---- */

static void test_convert(void) {
    const float in[5] = {1.0f, -2.0f, 0.5f, 65504.0f, 1e-7f};
    const uint16_t halves[5] = {0x3c00, 0xc000, 0x3800, 0x7bff, 0x0002};
    uint16_t out[5];
    CHECK_OK(um_convert(out, UM_F16, in, UM_F32, 5, &test_err));
    CHECK(memcmp(out, halves, sizeof out) == 0);
    float back[5];
    CHECK_OK(um_convert(back, UM_F32, halves, UM_F16, 5, &test_err));
    CHECK(back[0] == 1.0f && back[1] == -2.0f && back[2] == 0.5f && back[3] == 65504.0f &&
          back[4] == 0x1p-23f);

    /* The same type is copied bit for bit, signalling NaNs too. */
    uint32_t bits[3] = {0x7f800001, 0xff812345, 0x00000001}, bits_out[3] = {0};
    CHECK_OK(um_convert(bits_out, UM_F32, bits, UM_F32, 3, &test_err));
    CHECK(memcmp(bits, bits_out, sizeof bits) == 0);
    uint16_t nans[3] = {0x7c01, 0xfd55, 0x0001}, nans_out[3] = {0};
    CHECK_OK(um_convert(nans_out, UM_F16, nans, UM_F16, 3, &test_err));
    CHECK(memcmp(nans, nans_out, sizeof nans) == 0);

    CHECK_OK(um_convert(NULL, UM_F16, NULL, UM_F32, 0, &test_err));
    CHECK_OK(um_convert(NULL, UM_F16, NULL, UM_F16, 0, &test_err));

    memset(out, 0x5A, sizeof out);
    um_dtype unknown[] = {(um_dtype)2, (um_dtype)-1, (um_dtype)255};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        CHECK_STATUS(UM_E_INVALID, um_convert(out, unknown[i], in, UM_F32, 5, &test_err));
        CHECK_STATUS(UM_E_INVALID, um_convert(out, UM_F16, in, unknown[i], 5, &test_err));
        CHECK_STATUS(UM_E_INVALID, um_convert(out, unknown[i], in, unknown[i], 5, &test_err));
        CHECK(um_convert(out, unknown[i], in, UM_F32, 5, NULL) == UM_E_INVALID);
        CHECK_EQ_U64(um_dtype_block_bytes(unknown[i]), 0);
    }
    for (size_t i = 0; i < 5; i++) {
        CHECK(out[i] == 0x5A5A);
    }
    CHECK_EQ_U64(um_dtype_block_bytes(UM_F32), 4);
    CHECK_EQ_U64(um_dtype_block_bytes(UM_F16), 2);
}

int main(void) {
    inputs = malloc(MAX_INPUTS * sizeof *inputs);
    expected = malloc(MAX_INPUTS * sizeof *expected);
    REQUIRE(inputs != NULL && expected != NULL);
    make_reference();
    test_reference();
    make_inputs();
    const um_convert_code *last = NULL;
    for (size_t i = 0; um_convert_code_at(i) != NULL; i++) {
        last = um_convert_code_at(i);
        printf("%s, ", last->isa);
        test_all_halves(last);
        test_f16_of_f32(last);
        test_lengths(last);
    }
    REQUIRE(last != NULL);
    CHECK(strcmp(um_convert_code_at(0)->isa, "scalar") == 0);
    CHECK(strcmp(um_convert_isa(), last->isa) == 0);
    test_convert();
    printf("%zu floats: ", n_inputs);
    free(inputs);
    free(expected);
    return test_report();
}
