/* The bits of floats, and float16 in integer arithmetic, for the conversions. */
#ifndef UM_FLOATS_H
#define UM_FLOATS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static const uint32_t F32_MAGNITUDE = 0x7fffffff, F32_INFINITY = 0x7f800000;

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t f16_of_f32(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & F32_MAGNITUDE,
             half;
    if (magnitude > F32_INFINITY) {
        half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    } else if (magnitude >= 0x47800000) { /* 2^16 and above, infinity included */
        half = 0x7c00;
    } else if (magnitude >= 0x38800000) { /* 2^-14 and above: a normal float16 */
        /* Rebias the exponent; rounding may carry into it, and into infinity, as it should. */
        uint32_t odd = magnitude >> 13 & 1;
        half = (magnitude - 0x38000000 + 0xfff + odd) >> 13;
    } else if (magnitude > 0x33000000) { /* above 2^-25: a denormal, in units of 2^-24 */
        uint32_t shift = 126 - (magnitude >> 23);
        uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
        uint32_t odd = mantissa >> shift & 1;
        half = (mantissa + (1u << (shift - 1)) - 1 + odd) >> shift;
    } else {
        half = 0;
    }
    return (uint16_t)(sign | half);
}

static inline float f32_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f,
             mantissa = half & 0x3ff, bits;
    if (exponent == 0x1f) {
        bits = F32_INFINITY | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0);
    } else if (exponent != 0) {
        bits = (exponent + 112) << 23 | mantissa << 13;
    } else {
        bits = bits_of((float)mantissa * 0x1p-24f);
    }
    return float_of(sign | bits);
}

/* The scale that quantizing multiplies by. */
static inline float reciprocal(float d) {
    return d != 0 ? 1 / d : 0;
}

/* Returns whether the vector codes may quantize a block with this largest magnitude: then no value
 * of it, and nothing on the way, is a NaN, infinite, or out of range. They take its bits as an
 * integer, where a NaN is above infinity. The scalar code quantizes all other blocks. */
static inline bool is_usual_amax(uint32_t amax_bits) {
    const uint32_t least = 0x0d800000; /* 2^-100 */
    return amax_bits == 0 || amax_bits - least < F32_INFINITY - least;
}

#endif
