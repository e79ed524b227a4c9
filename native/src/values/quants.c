/* The quantized types. Blocks are as ggml's reference quantizers (ggml-quants.c,
 * quantize_row_q8_0_ref and those beside it) make them on x86, bit for bit, and are read as its
 * dequantizers read them. */
#include "values/quants.h"

#include "values/floats.h"

#include <float.h>
#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { HALF = UM__BLOCK_VALUES / 2 };
static const float Q8_0_MAX = 127;

const int8_t um__iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
/* Twice the middle between a level and the one before it, where the nearer one changes. */
static const float IQ4_NL_STEPS[15] = {-231, -187, -148, -114, -84, -57, -32, -9,
                                       14,   38,   63,   91,   122, 158, 202};
/* A block of smaller values is of zeros. */
static const float IQ4_NL_LEAST = 1e-15f;

/* ---- scalar ---- */

/* The quantized values of a block. */
typedef struct levels {
    uint8_t at[UM__BLOCK_VALUES];
} levels;

/* Returns the first value of the largest magnitude; 0 where all are NaNs. */
static float extreme_of(const float *in) {
    float amax = 0, extreme = 0;
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        if (amax < fabsf(in[i])) {
            amax = fabsf(in[i]);
            extreme = in[i];
        }
    }
    return extreme;
}

/* Returns the low byte of x as an integer, with a half rounded away from zero; 0 if x is a NaN or
 * does not fit into 32 bits. x86 gives this 0 for the reference's cast, whose result C leaves
 * open. */
static int8_t q8_of(float x) {
    if (!(x > -0x1p31f && x < 0x1p31f)) {
        return 0;
    }
    int32_t whole = (int32_t)x;
    float rest = x - (float)whole; /* exact */
    whole += (rest >= 0.5f) - (rest <= -0.5f);
    return (int8_t)(uint8_t)(uint32_t)whole;
}

static void q8_0_of_f32_block(um__q8_0 *out, const float *in) {
    float amax = 0;
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        /* Like the reference, this forgets values before a NaN, and a NaN that is not the last. */
        float magnitude = float_of(bits_of(in[i]) & F32_MAGNITUDE);
        amax = amax > magnitude ? amax : magnitude;
    }
    float d = amax / Q8_0_MAX, id = reciprocal(d);
    out->d = bits_of(amax) > F32_INFINITY ? 0x7e00 : f16_of_f32(d);
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        out->qs[i] = q8_of(in[i] * id);
    }
}

/* Returns the low byte of x without its fraction; 0 if x is a NaN or does not fit into 32 bits. x86
 * gives this for the reference's cast, whose result C leaves open. */
static int8_t low_byte(float x) {
    if (!(x > -0x1p31f && x < 0x1p31f)) {
        return 0;
    }
    return (int8_t)(uint8_t)(uint32_t)(int32_t)x;
}

static void find_levels(levels *out, const float *in, float low, float id, float half, int most) {
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        int level = low_byte((in[i] - low) * id + half);
        out->at[i] = (uint8_t)(level < most ? level : most);
    }
}

static void put_nibbles(uint8_t *qs, const levels *in) {
    for (size_t i = 0; i < HALF; i++) {
        qs[i] = (uint8_t)((in->at[i] & 0xf) | in->at[i + HALF] << 4);
    }
}

static void put_fifth_bits(uint8_t *qh, const levels *in) {
    memset(qh, 0, UM__BLOCK_VALUES / 8);
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        qh[i / 8] = (uint8_t)(qh[i / 8] | (in->at[i] >> 4 & 1) << i % 8);
    }
}

static void q4_0_of_f32_block(um__q4_0 *out, const float *in) {
    levels found;
    float d = extreme_of(in) / -8;
    find_levels(&found, in, 0, reciprocal(d), 8.5f, 15);
    out->d = f16_of_f32(d);
    for (size_t i = 0; i < HALF; i++) {
        /* What the reference's cast makes of an infinity spoils its neighbour, too. */
        out->qs[i] = (uint8_t)(found.at[i] | found.at[i + HALF] << 4);
    }
}

static void q5_0_of_f32_block(um__q5_0 *out, const float *in) {
    levels found;
    float d = extreme_of(in) / -16;
    find_levels(&found, in, 0, reciprocal(d), 16.5f, 31);
    out->d = f16_of_f32(d);
    put_nibbles(out->qs, &found);
    put_fifth_bits(out->qh, &found);
}

/* Returns the scale of a block with n_steps levels above the lowest. */
static float find_range(float *out_least, const float *in, float n_steps) {
    float least = FLT_MAX, most = -FLT_MAX;
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        least = in[i] < least ? in[i] : least;
        most = in[i] > most ? in[i] : most;
    }
    *out_least = least;
    return (most - least) / n_steps;
}

static void q4_1_of_f32_block(um__q4_1 *out, const float *in) {
    levels found;
    float least, d = find_range(&least, in, 15);
    find_levels(&found, in, least, reciprocal(d), 0.5f, 15);
    out->d = f16_of_f32(d);
    out->m = f16_of_f32(least);
    for (size_t i = 0; i < HALF; i++) {
        out->qs[i] = (uint8_t)(found.at[i] | found.at[i + HALF] << 4); /* as in q4_0 */
    }
}

static void q5_1_of_f32_block(um__q5_1 *out, const float *in) {
    levels found;
    float least, d = find_range(&least, in, 31);
    find_levels(&found, in, least, reciprocal(d), 0.5f, UINT8_MAX);
    out->d = f16_of_f32(d);
    out->m = f16_of_f32(least);
    put_nibbles(out->qs, &found);
    put_fifth_bits(out->qh, &found);
}

/* Returns the scale of the least squared error, weighted by the squares of the values. The last
 * bits of the sums depend on their order. */
static float fit_scale(const float *products, const float *squares) {
    float product = 0, square = 0;
    for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
        product += products[i];
        square += squares[i];
    }
    return product / square;
}

/* Any NaN is one NaN. */
static uint16_t f16_of_scale(float d) {
    return isnan(d) ? 0x7e00 : f16_of_f32(d);
}

static void iq4_nl_of_f32_block(um__q4_0 *out, const float *in) {
    levels found = {{0}};
    float extreme = extreme_of(in), d = 0;
    if (fabsf(extreme) >= IQ4_NL_LEAST) {
        float products[UM__BLOCK_VALUES], squares[UM__BLOCK_VALUES];
        float id = 1 / (extreme / um__iq4_nl_values[0]);
        for (size_t i = 0; i < UM__BLOCK_VALUES; i++) {
            float x = id * in[i], weight = in[i] * in[i];
            for (size_t j = 0; j < 15; j++) {
                found.at[i] = (uint8_t)(found.at[i] + (x + x >= IQ4_NL_STEPS[j]));
            }
            float level = um__iq4_nl_values[found.at[i]];
            products[i] = weight * level * in[i];
            squares[i] = weight * level * level;
        }
        d = fit_scale(products, squares);
    }
    out->d = f16_of_scale(d);
    put_nibbles(out->qs, &found);
}

/* Names a function of a type for the code of an instruction set. */
#define NAME_(name, isa) name##_##isa
#define NAME(name, isa) NAME_(name, isa)

#define QUANTIZE_SCALAR(type, block)                                                               \
    static void NAME(type, of_f32_scalar)(void *out, const float *in, size_t n) {                  \
        block *blocks = out;                                                                       \
        for (size_t i = 0; i < n / UM__BLOCK_VALUES; i++) {                                        \
            NAME(type, of_f32_block)(&blocks[i], in + i * UM__BLOCK_VALUES);                       \
        }                                                                                          \
    }
QUANTIZE_SCALAR(q8_0, um__q8_0)
QUANTIZE_SCALAR(q4_0, um__q4_0)
QUANTIZE_SCALAR(q4_1, um__q4_1)
QUANTIZE_SCALAR(q5_0, um__q5_0)
QUANTIZE_SCALAR(q5_1, um__q5_1)
QUANTIZE_SCALAR(iq4_nl, um__q4_0)

static inline int low_bits(const uint8_t *qs, size_t i) {
    return i < HALF ? qs[i] & 0xf : qs[i - HALF] >> 4;
}

static inline int five_bits(const uint8_t *qs, const uint8_t *qh, size_t i) {
    return low_bits(qs, i) | (qh[i / 8] >> i % 8 & 1) << 4;
}

/* Reads values of blocks `b`, which lie `at` in them. */
#define DEQUANTIZE_SCALAR(type, block, value)                                                      \
    static void NAME(f32_of, NAME(type, scalar))(float *out, const void *in, size_t n) {           \
        const block *blocks = in;                                                                  \
        for (size_t i = 0; i < n; i++) {                                                           \
            const block *b = &blocks[i / UM__BLOCK_VALUES];                                        \
            size_t at = i % UM__BLOCK_VALUES;                                                      \
            float d = f32_of_f16(b->d);                                                            \
            out[i] = value;                                                                        \
        }                                                                                          \
    }
DEQUANTIZE_SCALAR(q8_0, um__q8_0, (float)b->qs[at] * d)
DEQUANTIZE_SCALAR(q4_0, um__q4_0, (float)(low_bits(b->qs, at) - 8) * d)
DEQUANTIZE_SCALAR(q4_1, um__q4_1, (float)low_bits(b->qs, at) * d + f32_of_f16(b->m))
DEQUANTIZE_SCALAR(q5_0, um__q5_0, (float)(five_bits(b->qs, b->qh, at) - 16) * d)
DEQUANTIZE_SCALAR(q5_1, um__q5_1, (float)five_bits(b->qs, b->qh, at) * d + f32_of_f16(b->m))
DEQUANTIZE_SCALAR(iq4_nl, um__q4_0, (float)um__iq4_nl_values[low_bits(b->qs, at)] * d)

#define QUANT_CODES(of)                                                                            \
    const um__quant_code of(um__quants)[UM__N_QUANTS] = {                                          \
        {of(q8_0_of_f32), of(f32_of_q8_0)}, {of(q4_0_of_f32), of(f32_of_q4_0)},                    \
        {of(q4_1_of_f32), of(f32_of_q4_1)}, {of(q5_0_of_f32), of(f32_of_q5_0)},                    \
        {of(q5_1_of_f32), of(f32_of_q5_1)}, {of(iq4_nl_of_f32), of(f32_of_iq4_nl)},                \
    };
#define SCALAR(name) NAME(name, scalar)
QUANT_CODES(SCALAR)

/* ---- what vector codes need of scalars ---- */

/* Returns the first zero, which has the sign of the least value of a block if that is zero. */
static float first_zero(const float *in) {
    while (*in != 0) {
        in++;
    }
    return *in;
}

/* As is_usual_amax, of a block that is scaled by its range. */
static inline bool is_usual_range(uint32_t amax_bits, float range) {
    return amax_bits < 0x7e800000 /* 2^126 */ && (range == 0 || range >= 0x1p-90f);
}

/* As is_usual_amax, of a block that is not of zeros. */
static inline bool is_usual_for_iq4_nl(uint32_t amax_bits) {
    return amax_bits < F32_INFINITY && float_of(amax_bits) >= IQ4_NL_LEAST;
}

static inline uint32_t load_bits(const uint8_t *qh) {
    uint32_t bits;
    memcpy(&bits, qh, sizeof bits);
    return bits;
}

#if defined(__x86_64__)

/* ---- bytes of x86 ---- */

#define SSE __attribute__((target("avx2,f16c")))

/* The levels of values 0 to 15, and of 16 to 31. */
typedef struct bytes_x86 {
    __m128i low, high;
} bytes_x86;

SSE static inline bytes_x86 read_x86(const int8_t *qs) {
    bytes_x86 out;
    memcpy(&out, qs, sizeof out);
    return out;
}

SSE static inline void put_nibbles_x86(uint8_t *qs, bytes_x86 in) {
    const __m128i nibble = _mm_set1_epi8(0xf);
    __m128i high = _mm_slli_epi16(_mm_and_si128(in.high, nibble), 4);
    _mm_storeu_si128((__m128i *)(void *)qs, _mm_or_si128(_mm_and_si128(in.low, nibble), high));
}

SSE static inline bytes_x86 nibbles_x86(const uint8_t *qs) {
    const __m128i nibble = _mm_set1_epi8(0xf);
    __m128i both = _mm_loadu_si128((const __m128i *)(const void *)qs);
    return (bytes_x86){_mm_and_si128(both, nibble), _mm_and_si128(_mm_srli_epi16(both, 4), nibble)};
}

SSE static inline void put_fifth_bits_x86(uint8_t *qh, bytes_x86 in) {
    /* The highest bit of each byte is taken. */
    uint32_t low = (uint32_t)_mm_movemask_epi8(_mm_slli_epi16(in.low, 3)),
             high = (uint32_t)_mm_movemask_epi8(_mm_slli_epi16(in.high, 3)),
             bits = low | high << 16;
    memcpy(qh, &bits, sizeof bits);
}

/* Returns 16 in each byte whose bit is set. */
SSE static inline __m128i fifth_bits_x86(uint32_t bits) {
    const __m128i each = _mm_set1_epi64x((long long)0x8040201008040201);
    const __m128i which = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m128i bytes = _mm_shuffle_epi8(_mm_set1_epi32((int)bits), which);
    __m128i is_set = _mm_cmpeq_epi8(_mm_and_si128(bytes, each), each);
    return _mm_and_si128(is_set, _mm_set1_epi8(16));
}

SSE static inline bytes_x86 add_fifth_bits_x86(bytes_x86 in, uint32_t bits) {
    return (bytes_x86){_mm_or_si128(in.low, fifth_bits_x86(bits)),
                       _mm_or_si128(in.high, fifth_bits_x86(bits >> 16))};
}

SSE static inline bytes_x86 minus_x86(bytes_x86 in, int n) {
    const __m128i less = _mm_set1_epi8((char)n);
    return (bytes_x86){_mm_sub_epi8(in.low, less), _mm_sub_epi8(in.high, less)};
}

SSE static inline bytes_x86 iq4_nl_x86(bytes_x86 in) {
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)um__iq4_nl_values);
    return (bytes_x86){_mm_shuffle_epi8(table, in.low), _mm_shuffle_epi8(table, in.high)};
}

#define BYTES(name) NAME(name, x86)

/* ---- AVX2 ---- */

#define TARGET SSE
#define V(name) NAME(name, avx2)
#define SCALE _cvtsh_ss

/* The 32 values of a block. */
typedef struct values_avx2 {
    __m256 at[4];
} values_avx2;

TARGET static inline __m256i magnitude_avx2(__m256 values) {
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32((int)F32_MAGNITUDE));
}

TARGET static inline uint32_t amax_avx2(values_avx2 in) {
    __m256i max = magnitude_avx2(in.at[0]);
    for (size_t j = 1; j < 4; j++) {
        max = _mm256_max_epu32(max, magnitude_avx2(in.at[j]));
    }
    __m128i one = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    one = _mm_max_epu32(one, _mm_shuffle_epi32(one, _MM_SHUFFLE(1, 0, 3, 2)));
    one = _mm_max_epu32(one, _mm_shuffle_epi32(one, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t)_mm_cvtsi128_si32(one);
}

/* Returns a bit for each value of this magnitude. */
TARGET static inline uint32_t which_avx2(values_avx2 in, uint32_t magnitude) {
    uint32_t found = 0;
    for (size_t j = 0; j < 4; j++) {
        __m256i same =
            _mm256_cmpeq_epi32(magnitude_avx2(in.at[j]), _mm256_set1_epi32((int)magnitude));
        found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << 8 * j;
    }
    return found;
}

#define FOLD_AVX2(name, op)                                                                        \
    TARGET static inline float name(values_avx2 in) {                                              \
        __m256 all =                                                                               \
            _mm256_##op(_mm256_##op(in.at[0], in.at[1]), _mm256_##op(in.at[2], in.at[3]));         \
        __m128 one = _mm_##op(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));         \
        one = _mm_##op(one, _mm_movehl_ps(one, one));                                              \
        return _mm_cvtss_f32(_mm_##op(one, _mm_movehdup_ps(one)));                                 \
    }
FOLD_AVX2(least_avx2, min_ps)
FOLD_AVX2(most_avx2, max_ps)

/* Narrows sixteen integers to bytes. */
TARGET static inline __m128i narrow_avx2(__m256i low, __m256i high) {
    /* Packing works in halves of 128 bits, so the quarters are put into order between. */
    __m256i mixed = _mm256_packs_epi32(low, high);
    __m256i shorts = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
    return _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
}

TARGET static inline bytes_x86 levels_avx2(values_avx2 in, float low, float id, float half,
                                           int most) {
    __m256i out[4];
    for (size_t j = 0; j < 4; j++) {
        __m256 x = _mm256_mul_ps(_mm256_sub_ps(in.at[j], _mm256_set1_ps(low)), _mm256_set1_ps(id));
        __m256i level = _mm256_cvttps_epi32(_mm256_add_ps(x, _mm256_set1_ps(half)));
        out[j] = _mm256_min_epi32(level, _mm256_set1_epi32(most));
    }
    return (bytes_x86){narrow_avx2(out[0], out[1]), narrow_avx2(out[2], out[3])};
}

/* Rounds a half away from zero: adds the largest float below 0.5 and cuts off the rest, which is
 * right for all floats up to 127. CMakeLists.txt forbids the compiler to fuse product and sum. */
TARGET static inline bytes_x86 q8_levels_avx2(values_avx2 in, float id) {
    __m256i out[4];
    for (size_t j = 0; j < 4; j++) {
        __m256 x = in.at[j] * _mm256_set1_ps(id), sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
        out[j] = _mm256_cvttps_epi32(x + _mm256_or_ps(sign, _mm256_set1_ps(0x0.ffffffp-1f)));
    }
    return (bytes_x86){narrow_avx2(out[0], out[1]), narrow_avx2(out[2], out[3])};
}

TARGET static inline bytes_x86 iq4_nl_levels_avx2(values_avx2 in, float id) {
    __m256i out[4];
    for (size_t j = 0; j < 4; j++) {
        __m256 x = _mm256_mul_ps(in.at[j], _mm256_set1_ps(id));
        out[j] = _mm256_setzero_si256();
        for (size_t step = 0; step < 15; step++) {
            __m256 above =
                _mm256_cmp_ps(_mm256_add_ps(x, x), _mm256_set1_ps(IQ4_NL_STEPS[step]), _CMP_GE_OQ);
            out[j] = _mm256_sub_epi32(out[j], _mm256_castps_si256(above));
        }
    }
    return (bytes_x86){narrow_avx2(out[0], out[1]), narrow_avx2(out[2], out[3])};
}

TARGET static inline values_avx2 floats_avx2(bytes_x86 in) {
    __m128i parts[4] = {in.low, _mm_srli_si128(in.low, 8), in.high, _mm_srli_si128(in.high, 8)};
    values_avx2 out;
    for (size_t j = 0; j < 4; j++) {
        out.at[j] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(parts[j]));
    }
    return out;
}

#include "values/quants_rows.h"

/* ---- AVX-512 ---- */

#define TARGET __attribute__((target("avx512f,f16c")))
#define V(name) NAME(name, avx512)
#define SCALE _cvtsh_ss
enum { ALL_16 = 0xffff };

typedef struct values_avx512 {
    __m512 at[2];
} values_avx512;

TARGET static inline __m512i magnitude_avx512(__m512 values) {
    return _mm512_and_epi32(_mm512_castps_si512(values), _mm512_set1_epi32((int)F32_MAGNITUDE));
}

TARGET static inline uint32_t amax_avx512(values_avx512 in) {
    return _mm512_reduce_max_epu32(
        _mm512_max_epu32(magnitude_avx512(in.at[0]), magnitude_avx512(in.at[1])));
}

TARGET static inline uint32_t which_avx512(values_avx512 in, uint32_t magnitude) {
    const __m512i wanted = _mm512_set1_epi32((int)magnitude);
    uint32_t low = _mm512_cmpeq_epi32_mask(magnitude_avx512(in.at[0]), wanted),
             high = _mm512_cmpeq_epi32_mask(magnitude_avx512(in.at[1]), wanted);
    return low | high << 16;
}

TARGET static inline float least_avx512(values_avx512 in) {
    return _mm512_reduce_min_ps(_mm512_min_ps(in.at[0], in.at[1]));
}

TARGET static inline float most_avx512(values_avx512 in) {
    return _mm512_reduce_max_ps(_mm512_max_ps(in.at[0], in.at[1]));
}

TARGET static inline bytes_x86 levels_avx512(values_avx512 in, float low, float id, float half,
                                             int most) {
    __m128i out[2];
    for (size_t j = 0; j < 2; j++) {
        __m512 x = _mm512_mul_ps(_mm512_sub_ps(in.at[j], _mm512_set1_ps(low)), _mm512_set1_ps(id));
        __m512i level = _mm512_cvttps_epi32(_mm512_add_ps(x, _mm512_set1_ps(half)));
        out[j] = _mm512_cvtepi32_epi8(_mm512_min_epi32(level, _mm512_set1_epi32(most)));
    }
    return (bytes_x86){out[0], out[1]};
}

/* As q8_levels_avx2. */
TARGET static inline bytes_x86 q8_levels_avx512(values_avx512 in, float id) {
    __m128i out[2];
    for (size_t j = 0; j < 2; j++) {
        __m512 x = in.at[j] * _mm512_set1_ps(id);
        __m512i sign = _mm512_and_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
        __m512i almost_half = _mm512_or_epi32(sign, _mm512_set1_epi32(0x3effffff));
        out[j] = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x + _mm512_castsi512_ps(almost_half)));
    }
    return (bytes_x86){out[0], out[1]};
}

TARGET static inline bytes_x86 iq4_nl_levels_avx512(values_avx512 in, float id) {
    const __m512i one = _mm512_set1_epi32(1);
    __m128i out[2];
    for (size_t j = 0; j < 2; j++) {
        __m512 x = _mm512_mul_ps(in.at[j], _mm512_set1_ps(id));
        __m512i level = _mm512_setzero_si512();
        for (size_t step = 0; step < 15; step++) {
            __mmask16 above = _mm512_cmp_ps_mask(_mm512_add_ps(x, x),
                                                 _mm512_set1_ps(IQ4_NL_STEPS[step]), _CMP_GE_OQ);
            level = _mm512_mask_add_epi32(level, above, level, one);
        }
        out[j] = _mm512_cvtepi32_epi8(level);
    }
    return (bytes_x86){out[0], out[1]};
}

TARGET static inline values_avx512 floats_avx512(bytes_x86 in) {
    return (values_avx512){{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(in.low)),
                            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(in.high))}};
}

#include "values/quants_rows.h"

#elif defined(__aarch64__)

/* ---- NEON ---- */

#define TARGET
#define V(name) NAME(name, neon)
#define SCALE f32_of_f16
#define BYTES(name) NAME(name, neon)

typedef struct bytes_neon {
    uint8x16_t low, high;
} bytes_neon;

typedef struct values_neon {
    float32x4_t at[8];
} values_neon;

static const uint8_t EACH_BIT[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};

static inline bytes_neon read_neon(const int8_t *qs) {
    bytes_neon out;
    memcpy(&out, qs, sizeof out);
    return out;
}

static inline void put_nibbles_neon(uint8_t *qs, bytes_neon in) {
    vst1q_u8(qs, vorrq_u8(vandq_u8(in.low, vdupq_n_u8(0xf)), vshlq_n_u8(in.high, 4)));
}

static inline bytes_neon nibbles_neon(const uint8_t *qs) {
    uint8x16_t both = vld1q_u8(qs);
    return (bytes_neon){vandq_u8(both, vdupq_n_u8(0xf)), vshrq_n_u8(both, 4)};
}

/* Returns a bit for each byte that has bits of `mask`. */
static inline uint32_t gather_neon(bytes_neon in, uint8_t mask) {
    const uint8x16_t each = vld1q_u8(EACH_BIT);
    uint8x16_t low = vandq_u8(vtstq_u8(in.low, vdupq_n_u8(mask)), each);
    uint8x16_t high = vandq_u8(vtstq_u8(in.high, vdupq_n_u8(mask)), each);
    return (uint32_t)vaddv_u8(vget_low_u8(low)) | (uint32_t)vaddv_u8(vget_high_u8(low)) << 8 |
           (uint32_t)vaddv_u8(vget_low_u8(high)) << 16 |
           (uint32_t)vaddv_u8(vget_high_u8(high)) << 24;
}

static inline void put_fifth_bits_neon(uint8_t *qh, bytes_neon in) {
    uint32_t bits = gather_neon(in, 16);
    memcpy(qh, &bits, sizeof bits);
}

static inline uint8x16_t fifth_bits_neon(uint32_t bits) {
    uint8x16_t bytes = vcombine_u8(vdup_n_u8((uint8_t)bits), vdup_n_u8((uint8_t)(bits >> 8)));
    return vandq_u8(vtstq_u8(bytes, vld1q_u8(EACH_BIT)), vdupq_n_u8(16));
}

static inline bytes_neon add_fifth_bits_neon(bytes_neon in, uint32_t bits) {
    return (bytes_neon){vorrq_u8(in.low, fifth_bits_neon(bits)),
                        vorrq_u8(in.high, fifth_bits_neon(bits >> 16))};
}

static inline bytes_neon minus_neon(bytes_neon in, int n) {
    const uint8x16_t less = vdupq_n_u8((uint8_t)n);
    return (bytes_neon){vsubq_u8(in.low, less), vsubq_u8(in.high, less)};
}

static inline bytes_neon iq4_nl_neon(bytes_neon in) {
    const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(um__iq4_nl_values));
    return (bytes_neon){vqtbl1q_u8(table, in.low), vqtbl1q_u8(table, in.high)};
}

static inline uint32x4_t magnitude_neon(float32x4_t values) {
    return vandq_u32(vreinterpretq_u32_f32(values), vdupq_n_u32(F32_MAGNITUDE));
}

static inline uint32_t amax_neon(values_neon in) {
    uint32x4_t max = magnitude_neon(in.at[0]);
    for (size_t j = 1; j < 8; j++) {
        max = vmaxq_u32(max, magnitude_neon(in.at[j]));
    }
    return vmaxvq_u32(max);
}

/* Narrows sixteen integers to bytes. */
static inline uint8x16_t narrow_neon(const uint32x4_t *in) {
    uint16x8_t low = vcombine_u16(vmovn_u32(in[0]), vmovn_u32(in[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(in[2]), vmovn_u32(in[3]));
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
}

static inline uint32_t which_neon(values_neon in, uint32_t magnitude) {
    uint32x4_t same[8];
    for (size_t j = 0; j < 8; j++) {
        same[j] = vceqq_u32(magnitude_neon(in.at[j]), vdupq_n_u32(magnitude));
    }
    return gather_neon((bytes_neon){narrow_neon(same), narrow_neon(same + 4)}, 0xff);
}

#define FOLD_NEON(name, op)                                                                        \
    static inline float name(values_neon in) {                                                     \
        float32x4_t all = in.at[0];                                                                \
        for (size_t j = 1; j < 8; j++) {                                                           \
            all = v##op##q_f32(all, in.at[j]);                                                     \
        }                                                                                          \
        return v##op##vq_f32(all);                                                                 \
    }
FOLD_NEON(least_neon, min)
FOLD_NEON(most_neon, max)

/* vcvtaq rounds a half away from zero. */
static inline bytes_neon q8_levels_neon(values_neon in, float id) {
    uint32x4_t out[8];
    for (size_t j = 0; j < 8; j++) {
        out[j] = vreinterpretq_u32_s32(vcvtaq_s32_f32(vmulq_n_f32(in.at[j], id)));
    }
    return (bytes_neon){narrow_neon(out), narrow_neon(out + 4)};
}

static inline bytes_neon levels_neon(values_neon in, float low, float id, float half, int most) {
    uint32x4_t out[8];
    for (size_t j = 0; j < 8; j++) {
        float32x4_t x = vmulq_n_f32(vsubq_f32(in.at[j], vdupq_n_f32(low)), id);
        int32x4_t level = vcvtq_s32_f32(vaddq_f32(x, vdupq_n_f32(half)));
        out[j] = vreinterpretq_u32_s32(vminq_s32(level, vdupq_n_s32(most)));
    }
    return (bytes_neon){narrow_neon(out), narrow_neon(out + 4)};
}

static inline bytes_neon iq4_nl_levels_neon(values_neon in, float id) {
    uint32x4_t out[8];
    for (size_t j = 0; j < 8; j++) {
        float32x4_t x = vmulq_n_f32(in.at[j], id);
        out[j] = vdupq_n_u32(0);
        for (size_t step = 0; step < 15; step++) {
            uint32x4_t above = vcgeq_f32(vaddq_f32(x, x), vdupq_n_f32(IQ4_NL_STEPS[step]));
            out[j] = vsubq_u32(out[j], above);
        }
    }
    return (bytes_neon){narrow_neon(out), narrow_neon(out + 4)};
}

static inline values_neon floats_neon(bytes_neon in) {
    const uint8x16_t halves[2] = {in.low, in.high};
    values_neon out;
    for (size_t j = 0; j < 2; j++) {
        int8x16_t bytes = vreinterpretq_s8_u8(halves[j]);
        int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
        out.at[4 * j] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
        out.at[4 * j + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
        out.at[4 * j + 2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
        out.at[4 * j + 3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    }
    return out;
}

#include "values/quants_rows.h"

#endif
