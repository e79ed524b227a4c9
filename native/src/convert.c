/* Between float32 and float16, with the instructions that the CPU has. All of them round to nearest
 * even and give the same bits, NaNs included (made quiet, the upper bits of the payload kept, as
 * F16C does). */
#include "convert.h"

#include "internal.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static uint16_t f16_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff, half;
    if (magnitude > 0x7f800000) {
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

static float f32_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f,
             mantissa = half & 0x3ff, bits;
    if (exponent == 0x1f) {
        bits = 0x7f800000 | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0);
    } else if (exponent != 0) {
        bits = (exponent + 112) << 23 | mantissa << 13;
    } else {
        float tiny = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &tiny, sizeof bits);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void f16_of_f32_scalar(uint16_t *out, const float *in, size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = f16_of_f32(in[i]);
    }
}

static void f32_of_f16_scalar(float *out, const uint16_t *in, size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = f32_of_f16(in[i]);
    }
}

static const um_convert_code scalar = {"scalar", f16_of_f32_scalar, f32_of_f16_scalar};

#if defined(__x86_64__)

__attribute__((target("avx,f16c"))) static void f16_of_f32_f16c(uint16_t *out, const float *in,
                                                                size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(out + i), half);
    }
    f16_of_f32_scalar(out + i, in + i, n - i);
}

__attribute__((target("avx,f16c"))) static void f32_of_f16_f16c(float *out, const uint16_t *in,
                                                                size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
    }
    f32_of_f16_scalar(out + i, in + i, n - i);
}

__attribute__((target("avx512f"))) static void f16_of_f32_avx512(uint16_t *out, const float *in,
                                                                 size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        /* The unmasked form warns of a sign conversion in GCC's own header when not optimised. */
        __m256i half =
            _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)(void *)(out + i), half);
    }
    f16_of_f32_scalar(out + i, in + i, n - i);
}

__attribute__((target("avx512f"))) static void f32_of_f16_avx512(float *out, const uint16_t *in,
                                                                 size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(in + i));
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
    }
    f32_of_f16_scalar(out + i, in + i, n - i);
}

static const um_convert_code f16c = {"f16c", f16_of_f32_f16c, f32_of_f16_f16c};
static const um_convert_code avx512 = {"avx512", f16_of_f32_avx512, f32_of_f16_avx512};

#elif defined(__aarch64__)

static void f16_of_f32_neon(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i))));
    }
    f16_of_f32_scalar(out + i, in + i, n - i);
}

static void f32_of_f16_neon(float *out, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(in + i))));
    }
    f32_of_f16_scalar(out + i, in + i, n - i);
}

static const um_convert_code neon = {"neon", f16_of_f32_neon, f32_of_f16_neon};

#endif

const um_convert_code *um_convert_code_at(size_t i) {
    const um_convert_code *codes[4] = {&scalar};
    size_t n = 1;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c")) {
        codes[n++] = &f16c;
    }
    if (__builtin_cpu_supports("avx512f")) {
        codes[n++] = &avx512;
    }
#elif defined(__aarch64__)
    codes[n++] = &neon;
#endif
    return i < n ? codes[i] : NULL;
}

static const um_convert_code *best_code(void) {
    /* Found once; two threads that find it at the same time find the same. */
    static const um_convert_code *_Atomic found;
    const um_convert_code *code = atomic_load_explicit(&found, memory_order_relaxed);
    if (code == NULL) {
        for (size_t i = 0; um_convert_code_at(i) != NULL; i++) {
            code = um_convert_code_at(i);
        }
        atomic_store_explicit(&found, code, memory_order_relaxed);
    }
    return code;
}

const char *um_convert_isa(void) {
    return best_code()->isa;
}

size_t um_dtype_block_values(um_dtype type) {
    return type == UM_Q8_0 ? 32 : um_dtype_block_bytes(type) != 0;
}

size_t um_dtype_block_bytes(um_dtype type) {
    switch (type) {
    case UM_F32:
        return 4;
    case UM_F16:
    case UM_BF16:
        return 2;
    case UM_Q8_0:
        return 34;
    }
    return 0;
}

um_status um_convert(void *out, um_dtype out_type, const void *in, um_dtype in_type, size_t n,
                     um_error *err) {
    size_t item = um_dtype_block_bytes(out_type);
    if (item == 0 || um_dtype_block_bytes(in_type) == 0) {
        return um_fail(err, UM_E_INVALID, "type");
    }
    if (n == 0) {
        return UM_OK; /* the pointers may be NULL then */
    }
    if (out_type == in_type) {
        memcpy(out, in, n * item);
    } else if (out_type == UM_F16) {
        best_code()->f16_of_f32(out, in, n);
    } else {
        best_code()->f32_of_f16(out, in, n);
    }
    return UM_OK;
}
