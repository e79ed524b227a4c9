/* Blocks of four and five bits: some by hand, and every code that this CPU can run, in every
 * floating-point mode, against the scalar code, which tests/_core/test_convert.py compares with
 * ggml's. */
#include "fp_modes.h"
#include "test.h"
#include "values/convert.h"
#include <math.h>

enum { BLOCK = UM__BLOCK_VALUES, N_BLOCKS = 20000, N_VALUES = N_BLOCKS * BLOCK };

static size_t bytes_of(um_dtype type, size_t n) {
    return n / BLOCK * um_dtype_block_bytes(type);
}

/* Values that are levels of a scale of 1: their blocks, and the way back. */
static void check_exact(um_dtype type, const float *values, const void *want) {
    size_t nbytes = bytes_of(type, BLOCK);
    AUTO_FREE unsigned char *out = allocate(nbytes);
    float back[BLOCK];
    for (size_t i = 0; um__convert_code_at(i) != NULL; i++) {
        const um__convert_code *code = um__convert_code_at(i);
        memset(out, 0xA5, nbytes);
        CHECK_OK(um__convert_by(code, out, type, values, UM_F32, BLOCK, &test_err));
        CHECK(memcmp(out, want, nbytes) == 0);
        CHECK_OK(um__convert_by(code, back, UM_F32, want, type, BLOCK, &test_err));
        CHECK(memcmp(back, values, sizeof back) == 0);
    }
}

TEST(blocks_by_hand) {
    const uint16_t one = 0x3c00, minus_8 = 0xc800, minus_16 = 0xcc00;
    float of_16[BLOCK], of_32[BLOCK], of_nl[BLOCK];
    um__q4_0 q4_0 = {.d = one};
    um__q4_1 q4_1 = {.d = one, .m = minus_8};
    um__q5_0 q5_0 = {.d = one};
    um__q5_1 q5_1 = {.d = one, .m = minus_16};
    for (int i = 0; i < BLOCK; i++) {
        of_16[i] = (float)(i % 16) - 8;
        of_32[i] = (float)i - 16;
        of_nl[i] = um__iq4_nl_values[i % 16];
    }
    for (int i = 0; i < BLOCK / 2; i++) {
        /* Values i and i + 16 share a byte. Of five bits, those from 16 on have the fifth. */
        q4_0.qs[i] = q4_1.qs[i] = q5_0.qs[i] = q5_1.qs[i] = (uint8_t)(i | i << 4);
    }
    q5_0.qh[2] = q5_0.qh[3] = q5_1.qh[2] = q5_1.qh[3] = 0xff;
    check_exact(UM_Q4_0, of_16, &q4_0);
    check_exact(UM_Q4_1, of_16, &q4_1);
    check_exact(UM_Q5_0, of_32, &q5_0);
    check_exact(UM_Q5_1, of_32, &q5_1);
    check_exact(UM_IQ4_NL, of_nl, &q4_0);
}

static float *values;

/* Usual blocks; of any exponent, also of denormal and infinite scales; of any bits; with one
 * special value; between two levels; and of equal values, zeros of either sign among them. */
static void make_values(void) {
    static const float odd[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, 0x1.fffffep127f};
    uint64_t seed = 7;
    values = allocate(N_VALUES * sizeof *values);
    for (int b = 0; b < N_BLOCKS; b++) {
        float *block = values + (size_t)b * BLOCK;
        uint64_t dice = test_random(&seed);
        int exponent = b % 6 == 1 ? (int)(dice % 280) - 150 : 2;
        for (int i = 0; i < BLOCK; i++) {
            uint64_t random = test_random(&seed);
            float usual = (float)ldexp((double)(int64_t)random * 0x1p-63, exponent);
            float half = (float)(random % 64) / 2;
            block[i] = b % 6 == 2 ? float_of((uint32_t)random) : b % 6 == 4 ? half : usual;
        }
        if (b % 6 == 3) {
            block[dice % BLOCK] = odd[dice / BLOCK % COUNT(odd)];
        }
        for (int i = 0; b % 6 == 5 && i < BLOCK; i++) {
            block[i] = dice % 4 == 0 ? (i % 3 == 0 ? -0.0f : 0) : block[0];
        }
    }
}

static bool same_float(float a, float b) {
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

static size_t count_wrong(const float *got, const float *want) {
    size_t n_wrong = 0;
    for (size_t i = 0; i < N_VALUES; i++) {
        n_wrong += !same_float(got[i], want[i]);
    }
    return n_wrong;
}

static void convert(const um__convert_code *code, fp_mode mode, void *out, um_dtype out_type,
                    const void *in, um_dtype in_type) {
    set_mode(mode.word);
    um_status status = um__convert_by(code, out, out_type, in, in_type, N_VALUES, &test_err);
    uint64_t after = get_mode();
    set_mode(modes[0].word);
    CHECK_EQ(after, mode.word);
    test_status(status, UM_OK, __FILE__, __LINE__, code->isa);
}

static void check_type(um_dtype type) {
    size_t nbytes = bytes_of(type, N_VALUES), block = um_dtype_block_bytes(type);
    AUTO_FREE unsigned char *blocks = allocate(nbytes), *want = allocate(nbytes),
                            *any = allocate(nbytes);
    AUTO_FREE float *read = allocate(N_VALUES * sizeof *read),
                    *expected = allocate(N_VALUES * sizeof *expected);
    uint64_t seed = 11;
    for (size_t i = 0; i < nbytes; i++) {
        any[i] = (unsigned char)test_random(&seed);
    }
    convert(um__convert_code_at(0), modes[0], want, type, values, UM_F32);
    convert(um__convert_code_at(0), modes[0], expected, UM_F32, any, type);
    for (size_t i = 0; um__convert_code_at(i) != NULL; i++) {
        const um__convert_code *code = um__convert_code_at(i);
        for (size_t mode = 0; mode < N_MODES; mode++) {
            memset(blocks, 0xA5, nbytes);
            convert(code, modes[mode], blocks, type, values, UM_F32);
            for (size_t b = 0; b < N_BLOCKS; b++) {
                if (memcmp(blocks + b * block, want + b * block, block) != 0) {
                    fprintf(stderr, "%s, %s: block %zu of type %d differs\n", code->isa,
                            modes[mode].name, b, (int)type);
                    CHECK(false);
                    break;
                }
            }
            convert(code, modes[mode], read, UM_F32, any, type);
            CHECK_EQ(count_wrong(read, expected), 0);
        }
    }
}

TEST(every_code_in_every_mode) {
    make_values();
    for (um_dtype type = UM_Q4_0; type < UM_DTYPE_COUNT; type++) {
        check_type(type);
    }
}
