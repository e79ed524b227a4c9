/* Rotation: every code against the Hadamard matrix, and against each other bit by bit. */
#include "test.h"
#include "values/rotate.h"
#include <math.h>

enum { MOST = UM_ROTATION_MOST };

static void fill(float *values, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)((double)(int64_t)test_random(&seed) * 0x1p-60);
    }
}

/* The element of Sylvester's matrix, which has entries of 1 and -1. */
static int sign_of(size_t row, size_t column) {
    return __builtin_popcountll(row & column) % 2 == 0 ? 1 : -1;
}

/* An addition of floats is off by 2^-24 of its result at most, and there are log2(block) of them
 * one after the other; the scale, and its product with a value, are off by as much each. */
static double most_error(const float *x, size_t block) {
    double squares = 0, n_steps = log2((double)block) + 3;
    for (size_t i = 0; i < block; i++) {
        squares += (double)x[i] * x[i];
    }
    return n_steps * 0x1p-24 * sqrt(squares);
}

TEST(every_code_is_the_matrix) {
    static float in[2 * MOST], first[2 * MOST], out[2 * MOST];
    for (size_t block = UM_ROTATION_LEAST; block <= MOST; block *= 2) {
        fill(in, 2 * block, block);
        for (size_t i = 0; um__rotate_code_at(i) != NULL; i++) {
            memcpy(out, in, 2 * block * sizeof *in);
            um__rotate_code_at(i)(out, 2 * block, block);
            if (i == 0) {
                memcpy(first, out, 2 * block * sizeof *out);
            }
            CHECK(memcmp(out, first, 2 * block * sizeof *out) == 0);
        }
        size_t n_wrong = 0, step = block / 64; /* 64 rows of each block */
        for (size_t row = 0; row < 2 * block; row += step) {
            const float *x = in + row / block * block;
            double want = 0;
            for (size_t i = 0; i < block; i++) {
                want += sign_of(row % block, i) * (double)x[i];
            }
            want /= sqrt((double)block);
            n_wrong += !(fabs(first[row] - want) <= most_error(x, block));
        }
        CHECK_EQ(n_wrong, 0);
    }
}

TEST(it_is_its_own_inverse) {
    static float in[MOST], out[MOST];
    fill(in, MOST, 3);
    memcpy(out, in, sizeof in);
    CHECK_OK(um_rotate(out, MOST, 256, &test_err));
    CHECK(memcmp(out, in, sizeof in) != 0);
    CHECK_OK(um_rotate(out, MOST, 256, &test_err));
    size_t n_wrong = 0;
    for (size_t i = 0; i < MOST; i++) {
        n_wrong += !(fabs((double)out[i] - in[i]) <= 2 * most_error(in + i / 256 * 256, 256));
    }
    CHECK_EQ(n_wrong, 0);
}

TEST(sums_do_not_overflow) {
    static float all[MOST];
    for (size_t i = 0; i < MOST; i++) {
        all[i] = 0x1p120f;
    }
    CHECK_OK(um_rotate(all, MOST, MOST, &test_err));
    CHECK(all[0] == 0x1p126f); /* times 4096 / sqrt(4096) */
    CHECK(all[1] == 0);
}

TEST(blocks_of_heads) {
    static const struct {
        uint32_t head_dim;
        size_t k, v;
    } cases[] = {
        {64, 64, 64},  {128, 128, 64}, {192, 64, 64}, {576, 64, 64},    {256, 256, 64},
        {320, 64, 64}, {96, 0, 0},     {32, 0, 0},    {8192, 4096, 64}, {384, 128, 64},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        CHECK_EQ(um_rotation_block(cases[i].head_dim, 0), cases[i].k);
        CHECK_EQ(um_rotation_block(cases[i].head_dim, 1), cases[i].v);
    }
}

TEST(refused_sizes_and_types) {
    static float values[128];
    CHECK_INVALID(um_rotate(values, 128, 32, &test_err));
    CHECK_INVALID(um_rotate(values, 128, 96, &test_err));
    CHECK_INVALID(um_rotate(values, 8192, 8192, &test_err));
    CHECK_INVALID(um_rotate(values, 96, 64, &test_err));
    CHECK_OK(um_rotate(values, 0, 64, &test_err));
}
