/* ggml's quantized types of four and five bits: their blocks, and the conversions of each
 * instruction set. */
#ifndef UM_QUANTS_H
#define UM_QUANTS_H

#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

enum {
    UM_BLOCK_VALUES = 32, /* of a block of any quantized type */
    UM_N_QUANTS = UM_IQ4_NL - UM_Q4_0 + 1
};

/* Byte i of qs has the low four bits of value i and, above them, those of value i + 16. Bit i of qh
 * is the fifth bit of value i. d and m are float16. */

/* Value i is d * (q - 8). Of UM_IQ4_NL it is d * um_iq4_nl_values[q]. */
typedef struct um_q4_0 {
    uint16_t d;
    uint8_t qs[UM_BLOCK_VALUES / 2];
} um_q4_0;

/* Value i is d * q + m. */
typedef struct um_q4_1 {
    uint16_t d, m;
    uint8_t qs[UM_BLOCK_VALUES / 2];
} um_q4_1;

/* Value i is d * (q - 16). */
typedef struct um_q5_0 {
    uint16_t d;
    uint8_t qh[4], qs[UM_BLOCK_VALUES / 2];
} um_q5_0;

/* Value i is d * q + m. */
typedef struct um_q5_1 {
    uint16_t d, m;
    uint8_t qh[4], qs[UM_BLOCK_VALUES / 2];
} um_q5_1;

/* The levels of UM_IQ4_NL, as ggml-common.h has them (kvalues_iq4nl). */
extern const int8_t um_iq4_nl_values[16];

/* The conversions of one type. n counts values, and is whole blocks. */
typedef struct um_quant_code {
    void (*of_f32)(void *out, const float *in, size_t n);
    void (*to_f32)(float *out, const void *in, size_t n);
} um_quant_code;

/* Of each type from UM_Q4_0 on. All give the same bits. */
extern const um_quant_code um_quants_scalar[UM_N_QUANTS];
#if defined(__x86_64__)
extern const um_quant_code um_quants_avx2[UM_N_QUANTS], um_quants_avx512[UM_N_QUANTS];
#elif defined(__aarch64__)
extern const um_quant_code um_quants_neon[UM_N_QUANTS];
#endif

#endif
