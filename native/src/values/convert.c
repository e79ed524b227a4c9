/* Conversions between float32, float16, bfloat16 and ggml's quantized types (quants.c), with the
 * instructions that the CPU has. All codes round to nearest even and give the same bits. A NaN that
 * becomes a float16 or bfloat16 is made quiet, and keeps its sign and the upper bits of its
 * payload, as F16C does. */
#include "values/convert.h"

#include "base/status.h"
#include "os/cpu_features.h"
#include "values/floats.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <fenv.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

/* ---- scalar ---- */

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

static void bf16_of_f32_scalar(uint16_t *out, const float *in, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]);
        /* Rounding may carry into the exponent, and into infinity, as it should. */
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        bool is_nan = (bits & F32_MAGNITUDE) > F32_INFINITY;
        out[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : rounded);
    }
}

/* The compiler makes vectors of this for each instruction set. */
#define F32_OF_BF16(target, isa)                                                                   \
    target static void f32_of_bf16_##isa(float *out, const uint16_t *in, size_t n) {               \
        for (size_t i = 0; i < n; i++) {                                                           \
            out[i] = float_of((uint32_t)in[i] << 16);                                              \
        }                                                                                          \
    }
F32_OF_BF16(, scalar)

/* Converts by a code of an instruction set, `width` values at a time, and the rest by the
 * scalar. */
#define BY_WIDTH(target, name, isa, out_type, in_type, width, ...)                                 \
    target static void name##_##isa(out_type *out, const in_type *in, size_t n) {                  \
        size_t i = 0;                                                                              \
        for (; i + (width) <= n; i += (width)) {                                                   \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
        name##_scalar(out + i, in + i, n - i);                                                     \
    }

static const um__convert_code scalar = {"scalar",           f16_of_f32_scalar,  f32_of_f16_scalar,
                                        bf16_of_f32_scalar, f32_of_bf16_scalar, um__quants_scalar};

#if defined(__x86_64__)

/* ---- AVX2 and F16C ---- */

#define AVX2 __attribute__((target("avx2,f16c")))

F32_OF_BF16(AVX2, avx2)
BY_WIDTH(AVX2, f16_of_f32, avx2, uint16_t, float, 8,
         _mm_storeu_si128((__m128i *)(void *)(out + i),
                          _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT)))
BY_WIDTH(AVX2, f32_of_f16, avx2, float, uint16_t, 8,
         __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
         _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half)))

/* Eight bfloat16, each in 32 bits. */
AVX2 static inline __m256i bf16_of_f32_x8(const float *in) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)in);
    __m256i high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32((int)F32_MAGNITUDE));
    __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32((int)F32_INFINITY));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}

AVX2 static void bf16_of_f32_avx2(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        /* Packing works in halves of 128 bits, so the quarters are put into order afterwards. */
        __m256i mixed = _mm256_packus_epi32(bf16_of_f32_x8(in + i), bf16_of_f32_x8(in + i + 8));
        __m256i packed = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), packed);
    }
    bf16_of_f32_scalar(out + i, in + i, n - i);
}

static const um__convert_code avx2 = {"avx2",           f16_of_f32_avx2,  f32_of_f16_avx2,
                                      bf16_of_f32_avx2, f32_of_bf16_avx2, um__quants_avx2};

/* ---- AVX-512 ---- */

/* The instruction of AVX512_BF16 is not used: it takes denormals for zero. Some intrinsics are used
 * in their masked forms, since the others warn of a sign conversion in GCC's own header when not
 * optimised. */

#define AVX512 __attribute__((target("avx512f,f16c")))
enum { ALL_16 = 0xffff };

F32_OF_BF16(AVX512, avx512)
BY_WIDTH(AVX512, f16_of_f32, avx512, uint16_t, float, 16,
         __m256i half = _mm512_maskz_cvtps_ph(ALL_16, _mm512_loadu_ps(in + i),
                                              _MM_FROUND_TO_NEAREST_INT);
         _mm256_storeu_si256((__m256i *)(void *)(out + i), half))
BY_WIDTH(AVX512, f32_of_f16, avx512, float, uint16_t, 16,
         __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(in + i));
         _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half)))

AVX512 static void bf16_of_f32_avx512(uint16_t *out, const float *in, size_t n) {
    const __m512i magnitude = _mm512_set1_epi32((int)F32_MAGNITUDE);
    const __m512i infinity = _mm512_set1_epi32((int)F32_INFINITY);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i bits = _mm512_loadu_si512(in + i), high = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_epi32(high, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_srli_epi32(
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        __mmask16 is_nan = _mm512_cmpgt_epi32_mask(_mm512_and_epi32(bits, magnitude), infinity);
        __m512i value = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtepi32_epi16(value));
    }
    bf16_of_f32_scalar(out + i, in + i, n - i);
}

static const um__convert_code avx512 = {"avx512",           f16_of_f32_avx512,  f32_of_f16_avx512,
                                        bf16_of_f32_avx512, f32_of_bf16_avx512, um__quants_avx512};

#elif defined(__aarch64__)

/* ---- NEON ---- */

F32_OF_BF16(, neon)
BY_WIDTH(, f16_of_f32, neon, uint16_t, float, 4,
         vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i)))))
BY_WIDTH(, f32_of_f16, neon, float, uint16_t, 4,
         vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(in + i)))))

static void bf16_of_f32_neon(uint16_t *out, const float *in, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(in + i)), high = vshrq_n_u32(bits, 16);
        uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
        uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
        uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(F32_MAGNITUDE));
        uint32x4_t is_nan = vcgtq_u32(magnitude, vdupq_n_u32(F32_INFINITY));
        uint32x4_t value = vbslq_u32(is_nan, vorrq_u32(high, vdupq_n_u32(0x40)), rounded);
        vst1_u16(out + i, vmovn_u32(value));
    }
    bf16_of_f32_scalar(out + i, in + i, n - i);
}

static const um__convert_code neon = {"neon",           f16_of_f32_neon,  f32_of_f16_neon,
                                      bf16_of_f32_neon, f32_of_bf16_neon, um__quants_neon};

#endif

/* ---- which code ---- */

const um__convert_code *um__convert_code_at(size_t i) {
    const um__convert_code *codes[4] = {&scalar};
    size_t n = 1;
#if defined(__x86_64__)
    if (um__cpu_has(UM__F16C | UM__AVX2)) {
        codes[n++] = &avx2;
    }
    if (um__cpu_has(UM__F16C | UM__AVX512F)) {
        codes[n++] = &avx512;
    }
#elif defined(__aarch64__)
    codes[n++] = &neon;
#endif
    return i < n ? codes[i] : NULL;
}

static const um__convert_code *best_code(void) {
    /* Two threads that look at the same time find the same code. */
    static const um__convert_code *_Atomic found;
    const um__convert_code *code = atomic_load_explicit(&found, memory_order_relaxed);
    if (code == NULL) {
        for (size_t i = 0; um__convert_code_at(i) != NULL; i++) {
            code = um__convert_code_at(i);
        }
        atomic_store_explicit(&found, code, memory_order_relaxed);
    }
    return code;
}

const char *um_convert_isa(void) {
    return best_code()->isa;
}

/* ---- the floating-point mode of the thread ---- */

/* A thread can be in a mode that takes denormals for zero, or rounds in another direction. On x86
 * this changes quantizing, and the sums that q4_1 and q5_1 are read by: the other conversions are
 * exact, integer arithmetic, or name their rounding. Elsewhere it changes float16, too. The codes
 * are called through pointers, so that no compiler moves arithmetic past a change of the mode. */

static inline bool is_quantized(um_dtype type) {
    return (unsigned)type >= UM_Q8_0;
}

#if defined(__x86_64__)

enum { MXCSR_DEFAULT = 0x1f80, MXCSR_FLAGS = 0x3f, F16_DEPENDS_ON_MODE = false };
typedef unsigned fp_mode;

static fp_mode enter_default_mode(void) {
    fp_mode mode = _mm_getcsr();
    if ((mode & ~(unsigned)MXCSR_FLAGS) != MXCSR_DEFAULT) {
        _mm_setcsr(MXCSR_DEFAULT);
    }
    return mode;
}

static void leave_default_mode(fp_mode mode) {
    if ((mode & ~(unsigned)MXCSR_FLAGS) != MXCSR_DEFAULT) {
        _mm_setcsr(mode);
    }
}

#else

enum { F16_DEPENDS_ON_MODE = true };
typedef fenv_t fp_mode;

static fp_mode enter_default_mode(void) {
    fp_mode mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    return mode;
}

static void leave_default_mode(fp_mode mode) {
    fesetenv(&mode);
}

#endif

static bool depends_on_mode(um_dtype out_type, um_dtype in_type) {
    bool is_read_by_a_sum = in_type == UM_Q4_1 || in_type == UM_Q5_1;
    return is_quantized(out_type) || is_read_by_a_sum ||
           (F16_DEPENDS_ON_MODE && out_type == UM_F16);
}

/* ---- any to any ---- */

static const um_dtype_info TYPES[UM_DTYPE_COUNT] = {
    [UM_F32] = {"f32", 1, sizeof(float), 0},
    [UM_F16] = {"f16", 1, sizeof(uint16_t), 1},
    [UM_BF16] = {"bf16", 1, sizeof(uint16_t), 30},
    [UM_Q8_0] = {"q8_0", UM__BLOCK_VALUES, sizeof(um__q8_0), 8},
    [UM_Q4_0] = {"q4_0", UM__BLOCK_VALUES, sizeof(um__q4_0), 2},
    [UM_Q4_1] = {"q4_1", UM__BLOCK_VALUES, sizeof(um__q4_1), 3},
    [UM_Q5_0] = {"q5_0", UM__BLOCK_VALUES, sizeof(um__q5_0), 6},
    [UM_Q5_1] = {"q5_1", UM__BLOCK_VALUES, sizeof(um__q5_1), 7},
    [UM_IQ4_NL] = {"iq4_nl", UM__BLOCK_VALUES, sizeof(um__q4_0), 20},
};

/* Returns the bytes of n values. pre: n is whole blocks. */
static inline size_t bytes_of(um_dtype type, size_t n) {
    return (is_quantized(type) ? n / UM__BLOCK_VALUES : n) * TYPES[type].block_bytes;
}

const um_dtype_info *um_dtype_describe(um_dtype type) {
    return (unsigned)type < UM_DTYPE_COUNT ? &TYPES[type] : NULL;
}

size_t um_dtype_block_values(um_dtype type) {
    return (unsigned)type < UM_DTYPE_COUNT ? TYPES[type].block_values : 0;
}

size_t um_dtype_block_bytes(um_dtype type) {
    return (unsigned)type < UM_DTYPE_COUNT ? TYPES[type].block_bytes : 0;
}

static void of_f32(const um__convert_code *code, void *out, um_dtype out_type, const float *in,
                   size_t n) {
    if (out_type == UM_F16) {
        code->f16_of_f32(out, in, n);
    } else if (out_type == UM_BF16) {
        code->bf16_of_f32(out, in, n);
    } else {
        code->quants[out_type - UM_Q8_0].of_f32(out, in, n);
    }
}

static void to_f32(const um__convert_code *code, float *out, const void *in, um_dtype in_type,
                   size_t n) {
    if (in_type == UM_F16) {
        code->f32_of_f16(out, in, n);
    } else if (in_type == UM_BF16) {
        code->f32_of_bf16(out, in, n);
    } else {
        code->quants[in_type - UM_Q8_0].to_f32(out, in, n);
    }
}

static void convert(const um__convert_code *code, void *out, um_dtype out_type, const void *in,
                    um_dtype in_type, size_t n) {
    if (in_type == UM_F32) {
        of_f32(code, out, out_type, in, n);
    } else if (out_type == UM_F32) {
        to_f32(code, out, in, in_type, n);
    } else {
        /* Goes through float32, which holds the values of all types exactly: those of q4_1 and q5_1
         * are sums in float32. */
        enum { PIECE = 1024 };
        float piece[PIECE];
        for (size_t done = 0; done < n; done += PIECE) {
            size_t part = n - done < PIECE ? n - done : PIECE;
            to_f32(code, piece, (const unsigned char *)in + bytes_of(in_type, done), in_type, part);
            of_f32(code, (unsigned char *)out + bytes_of(out_type, done), out_type, piece, part);
        }
    }
}

/* pre: as um__convert_values. */
static void convert_in_default_mode(const um__convert_code *code, void *out, um_dtype out_type,
                                    const void *in, um_dtype in_type, size_t n) {
    if (n == 0) {
        return; /* the pointers may be NULL */
    }
    if (out_type == in_type) {
        memcpy(out, in, bytes_of(out_type, n));
    } else if (depends_on_mode(out_type, in_type)) {
        fp_mode mode = enter_default_mode();
        convert(code, out, out_type, in, in_type, n);
        leave_default_mode(mode);
    } else {
        convert(code, out, out_type, in, in_type, n);
    }
}

void um__convert_values(void *out, um_dtype out_type, const void *in, um_dtype in_type, size_t n) {
    convert_in_default_mode(best_code(), out, out_type, in, in_type, n);
}

um_status um__convert_by(const um__convert_code *code, void *out, um_dtype out_type, const void *in,
                         um_dtype in_type, size_t n, um_error *err) {
    UM__INVALID_IF(um_dtype_describe(out_type) == NULL || um_dtype_describe(in_type) == NULL, err,
                   "type");
    UM__INVALID_IF(n % UM__BLOCK_VALUES != 0 && (is_quantized(out_type) || is_quantized(in_type)),
                   err, "n is not whole blocks");
    convert_in_default_mode(code, out, out_type, in, in_type, n);
    return UM_OK;
}

um_status um_convert(void *out, um_dtype out_type, const void *in, um_dtype in_type, size_t n,
                     um_error *err) {
    return um__convert_by(best_code(), out, out_type, in, in_type, n, err);
}
