/* ggml's quantized types: their blocks, and the conversions of each instruction set. */
#ifndef UM_QUANTS_H
#define UM_QUANTS_H

#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

enum {
    UM__BLOCK_VALUES = 32, /* of a block of any quantized type */
    UM__N_QUANTS = UM_DTYPE_COUNT - UM_Q8_0
};

/* Value i is d * qs[i]. d and m are float16. */
typedef struct um__q8_0 {
    uint16_t d;
    int8_t qs[UM__BLOCK_VALUES];
} um__q8_0;

/* Byte i of qs has the low four bits of value i and, above them, those of value i + 16. Bit i of qh
 * is the fifth bit of value i. */

/* Value i is d * (q - 8); for UM_IQ4_NL, d * um__iq4_nl_values[q]. */
typedef struct um__q4_0 {
    uint16_t d;
    uint8_t qs[UM__BLOCK_VALUES / 2];
} um__q4_0;

/* Value i is d * q + m. */
typedef struct um__q4_1 {
    uint16_t d, m;
    uint8_t qs[UM__BLOCK_VALUES / 2];
} um__q4_1;

/* Value i is d * (q - 16). */
typedef struct um__q5_0 {
    uint16_t d;
    uint8_t qh[4], qs[UM__BLOCK_VALUES / 2];
} um__q5_0;

/* Value i is d * q + m. */
typedef struct um__q5_1 {
    uint16_t d, m;
    uint8_t qh[4], qs[UM__BLOCK_VALUES / 2];
} um__q5_1;

/* The levels of UM_IQ4_NL, as ggml-common.h has them (kvalues_iq4nl). */
extern const int8_t um__iq4_nl_values[16];

/* The conversions of one type. n counts values, and is whole blocks. */
typedef struct um__quant_code {
    void (*of_f32)(void *out, const float *in, size_t n);
    void (*to_f32)(float *out, const void *in, size_t n);
} um__quant_code;

/* For each type from UM_Q8_0 on. All give the same bits. */
extern const um__quant_code um__quants_scalar[UM__N_QUANTS];
#if defined(__x86_64__)
extern const um__quant_code um__quants_avx2[UM__N_QUANTS], um__quants_avx512[UM__N_QUANTS];
#elif defined(__aarch64__)
extern const um__quant_code um__quants_neon[UM__N_QUANTS];
#endif

#endif
