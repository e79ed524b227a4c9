/* The rotation of heads: a fast Walsh-Hadamard transform, one code that is compiled for each
 * instruction set. It adds in one order, so that all give the same bits. */
#include "values/rotate.h"

#include "base/status.h"
#include "os/cpu_features.h"

#include <math.h>
#include <string.h>

enum { LANES = 8, LEAST = UM_ROTATION_LEAST, MOST = UM_ROTATION_MOST };

typedef float v8 __attribute__((vector_size(LANES * sizeof(float))));

#define INLINE static inline __attribute__((always_inline))

/* Returns the sums and differences of each value with the one that lies `distance` beside it. */
#define PAIR(v, distance, ...)                                                                     \
    (__builtin_shufflevector(v, v, (0 ^ (distance)), (1 ^ (distance)), (2 ^ (distance)),           \
                             (3 ^ (distance)), (4 ^ (distance)), (5 ^ (distance)),                 \
                             (6 ^ (distance)), (7 ^ (distance))) +                                 \
     v * (v8){__VA_ARGS__})

INLINE void rotate_block(float *x, size_t n, float scale) {
    for (size_t i = 0; i < n; i += LANES) {
        v8 v;
        memcpy(&v, x + i, sizeof v);
        v *= scale; /* first: no sum overflows that the result does not */
        v = PAIR(v, 1, 1, -1, 1, -1, 1, -1, 1, -1);
        v = PAIR(v, 2, 1, 1, -1, -1, 1, 1, -1, -1);
        v = PAIR(v, 4, 1, 1, 1, 1, -1, -1, -1, -1);
        memcpy(x + i, &v, sizeof v);
    }
    for (size_t distance = LANES; distance < n; distance *= 2) {
        for (size_t i = 0; i < n; i += 2 * distance) {
            for (size_t j = i; j < i + distance; j += LANES) {
                v8 a, b, sum, difference;
                memcpy(&a, x + j, sizeof a);
                memcpy(&b, x + j + distance, sizeof b);
                sum = a + b;
                difference = a - b;
                memcpy(x + j, &sum, sizeof sum);
                memcpy(x + j + distance, &difference, sizeof difference);
            }
        }
    }
}

INLINE void rotate_blocks(float *values, size_t n, size_t block) {
    float scale = 1 / sqrtf((float)block);
    for (size_t i = 0; i < n; i += block) {
        rotate_block(values + i, block, scale);
    }
}

static void rotate_anywhere(float *values, size_t n, size_t block) {
    rotate_blocks(values, n, block);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void rotate_avx2(float *values, size_t n, size_t block) {
    rotate_blocks(values, n, block);
}
#endif

um__rotate_code *um__rotate_code_at(size_t i) {
    um__rotate_code *codes[2] = {rotate_anywhere};
    size_t n = 1;
#if defined(__x86_64__)
    if (um__cpu_has(UM__AVX2)) {
        codes[n++] = rotate_avx2;
    }
#endif
    return i < n ? codes[i] : NULL;
}

void um__rotate_values(float *values, size_t n, size_t block) {
    um__rotate_code *best = um__rotate_code_at(1);
    (best != NULL ? best : rotate_anywhere)(values, n, block);
}

um_status um_rotate(float *values, size_t n, size_t block, um_error *err) {
    UM__INVALID_IF(block < LEAST || block > MOST || (block & (block - 1)) != 0, err,
                   "block is no power of two from 64 to 4096");
    UM__INVALID_IF(n % block != 0, err, "n is not whole blocks");
    um__rotate_values(values, n, block);
    return UM_OK;
}

size_t um_rotation_block(uint32_t head_dim, int v) {
    size_t block = LEAST;
    if (head_dim % LEAST != 0) {
        return 0;
    }
    while (v == 0 && block < MOST && head_dim % (2 * block) == 0) {
        block *= 2;
    }
    return block;
}
