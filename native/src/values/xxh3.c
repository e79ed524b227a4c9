/* XXH3 of 128 bits, with the standard secret and seed 0, of bytes that are copied in the same pass.
 * Names and constants are those of its specification (github.com/Cyan4973/xxHash, doc). */
#include "values/xxh3.h"

#include "os/cpu_features.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "XXH3 is written for little-endian CPUs"
#endif

enum {
    SECRET = 192,
    BLOCK_STRIPES = (SECRET - UM__STRIPE) / 8,
    BLOCK = BLOCK_STRIPES * UM__STRIPE,
    SHORT = 240,
    STREAMED = 1 << 18 /* from here on, what is written is not worth a place in the caches */
};

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D,
                      P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F,
                      P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63,
                      P64_5 = 0x27D4EB2F165667C5, MX1 = 0x165667919E3779F9,
                      MX2 = 0x9FB21C651E98DF25;

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct {
    uint64_t low, high;
} u128;

static uint64_t r32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint64_t r64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static u128 mul128(uint64_t a, uint64_t b) {
    __extension__ unsigned __int128 product = (unsigned __int128)a * b;
    return (u128){(uint64_t)product, (uint64_t)(product >> 64)};
}

static uint64_t fold(uint64_t a, uint64_t b) {
    u128 product = mul128(a, b);
    return product.low ^ product.high;
}

static uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * MX1;
    return h ^ h >> 32;
}

static uint64_t avalanche_of_xxh64(uint64_t h) {
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

/* ---- short inputs ---- */

static u128 of_3(const uint8_t *in, size_t n) {
    uint32_t low =
        (uint32_t)in[0] << 16 | (uint32_t)in[n >> 1] << 24 | in[n - 1] | (uint32_t)n << 8;
    uint32_t high = __builtin_bswap32(low);
    high = high << 13 | high >> 19;
    return (u128){avalanche_of_xxh64(low ^ r32(secret) ^ r32(secret + 4)),
                  avalanche_of_xxh64(high ^ r32(secret + 8) ^ r32(secret + 12))};
}

static u128 of_8(const uint8_t *in, size_t n) {
    uint64_t word = (r32(in) + (r32(in + n - 4) << 32)) ^ r64(secret + 16) ^ r64(secret + 24);
    u128 h = mul128(word, P64_1 + (n << 2));
    h.high += h.low << 1;
    h.low ^= h.high >> 3;
    h.low = (h.low ^ h.low >> 35) * MX2;
    return (u128){h.low ^ h.low >> 28, avalanche(h.high)};
}

static u128 of_16(const uint8_t *in, size_t n) {
    uint64_t low = r64(in), high = r64(in + n - 8);
    u128 m = mul128(low ^ high ^ r64(secret + 32) ^ r64(secret + 40), P64_1);
    m.low += (uint64_t)(n - 1) << 54;
    high ^= r64(secret + 48) ^ r64(secret + 56);
    m.high += high + (uint32_t)high * (P32_2 - 1);
    m.low ^= __builtin_bswap64(m.high);
    u128 h = mul128(m.low, P64_2);
    h.high += m.high * P64_2;
    return (u128){avalanche(h.low), avalanche(h.high)};
}

static uint64_t mix16(const uint8_t *in, const uint8_t *key) {
    return fold(r64(in) ^ r64(key), r64(in + 8) ^ r64(key + 8));
}

static u128 mix32(u128 sum, const uint8_t *a, const uint8_t *b, const uint8_t *key) {
    sum.low = (sum.low + mix16(a, key)) ^ (r64(b) + r64(b + 8));
    sum.high = (sum.high + mix16(b, key + 16)) ^ (r64(a) + r64(a + 8));
    return sum;
}

static u128 of_240(const uint8_t *in, size_t n) {
    u128 sum = {n * P64_1, 0};
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            sum = mix32(sum, in + 16 * i, in + n - 16 * (i + 1), secret + 32 * i);
        }
    } else {
        for (size_t i = 0; i < n / 32; i++) {
            const uint8_t *key = i < 4 ? secret + 32 * i : secret + 3 + 32 * (i - 4);
            sum = mix32(sum, in + 32 * i, in + 32 * i + 16, key);
            if (i == 3) {
                sum = (u128){avalanche(sum.low), avalanche(sum.high)};
            }
        }
        sum = mix32(sum, in + n - 16, in + n - 32, secret + 103);
    }
    uint64_t high = sum.low * P64_1 + sum.high * P64_4 + n * P64_2;
    return (u128){avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

static u128 of_short(const uint8_t *in, size_t n) {
    if (n == 0) {
        return (u128){avalanche_of_xxh64(r64(secret + 64) ^ r64(secret + 72)),
                      avalanche_of_xxh64(r64(secret + 80) ^ r64(secret + 88))};
    }
    return n <= 3 ? of_3(in, n) : n <= 8 ? of_8(in, n) : n <= 16 ? of_16(in, n) : of_240(in, n);
}

/* ---- stripes ---- */

static void add_scalar(uint64_t sums[UM__LANES], uint8_t *out, const uint8_t *in, size_t n_stripes,
                       const uint8_t *key, bool streams) {
    (void)streams;
    for (size_t stripe = 0; stripe < n_stripes; stripe++, in += UM__STRIPE, key += 8) {
        uint64_t words[UM__LANES];
        memcpy(words, in, UM__STRIPE);
        if (out != NULL) {
            memcpy(out + stripe * UM__STRIPE, words, UM__STRIPE);
        }
        for (size_t i = 0; i < UM__LANES; i++) {
            uint64_t word = words[i], keyed = word ^ r64(key + 8 * i);
            sums[i ^ 1] += word;
            sums[i] += (uint32_t)keyed * (keyed >> 32);
        }
    }
}

#if defined(__x86_64__)

/* Both codes differ in the number of bits, and in the registers of a stripe: two or one. */
#define ADD(isa, bits, target_, n_parts)                                                           \
    __attribute__((target(target_))) static void add_##isa(uint64_t sums[UM__LANES], uint8_t *out, \
                                                           const uint8_t *in, size_t n_stripes,    \
                                                           const uint8_t *key, bool streams) {     \
        __m##bits##i sum[n_parts], *to = (void *)out;                                              \
        memcpy(sum, sums, sizeof sum);                                                             \
        for (size_t stripe = 0; stripe < n_stripes; stripe++, key += 8) {                          \
            for (size_t i = 0; i < (n_parts); i++, in += sizeof *sum) {                            \
                __m##bits##i word = _mm##bits##_loadu_si##bits((const void *)in);                  \
                __m##bits##i keyed = _mm##bits##_xor_si##bits(                                     \
                    word, _mm##bits##_loadu_si##bits((const void *)(key + i * sizeof *sum)));      \
                __m##bits##i product =                                                             \
                    _mm##bits##_mul_epu32(keyed, _mm##bits##_srli_epi64(keyed, 32));               \
                sum[i] = _mm##bits##_add_epi64(sum[i], product);                                   \
                sum[i] = _mm##bits##_add_epi64(sum[i], _mm##bits##_shuffle_epi32(word, 0x4e));     \
                if (streams) {                                                                     \
                    _mm##bits##_stream_si##bits(to++, word);                                       \
                } else if (out != NULL) {                                                          \
                    _mm##bits##_storeu_si##bits(to++, word);                                       \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        memcpy(sums, sum, sizeof sum);                                                             \
    }
ADD(avx2, 256, "avx2", 2)
ADD(avx512, 512, "avx512f", 1)

#endif

um__xxh3_code *um__xxh3_code_at(size_t i) {
    um__xxh3_code *codes[3] = {add_scalar};
    size_t n = 1;
#if defined(__x86_64__)
    if (um__cpu_has(UM__AVX2)) {
        codes[n++] = add_avx2;
    }
    if (um__cpu_has(UM__AVX512F)) {
        codes[n++] = add_avx512;
    }
#endif
    return i < n ? codes[i] : NULL;
}

/* ---- long inputs ---- */

static void scramble(uint64_t sums[UM__LANES]) {
    for (size_t i = 0; i < UM__LANES; i++) {
        sums[i] = (sums[i] ^ sums[i] >> 47 ^ r64(secret + SECRET - UM__STRIPE + 8 * i)) * P32_1;
    }
}

static uint64_t merge(const uint64_t sums[UM__LANES], const uint8_t *key, uint64_t start) {
    for (size_t i = 0; i < UM__LANES; i += 2) {
        start += fold(sums[i] ^ r64(key + 8 * i), sums[i + 1] ^ r64(key + 8 * i + 8));
    }
    return avalanche(start);
}

/* The input: bytes, and zeros behind. */
typedef struct {
    const uint8_t *bytes;
    size_t nbytes, n_all;
} input;

/* Copies a part of the input. */
static const uint8_t *part(uint8_t *out, const input *in, size_t first, size_t n) {
    size_t n_bytes = first >= in->nbytes ? 0 : in->nbytes - first < n ? in->nbytes - first : n;
    memset(out + n_bytes, 0, n - n_bytes);
    if (n_bytes > 0) {
        memcpy(out, in->bytes + first, n_bytes);
    }
    return out;
}

static u128 copy_long(um__xxh3_code *code, uint8_t *out, const input *in) {
    uint64_t sums[UM__LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t n_blocks = (in->n_all - 1) / BLOCK, n_whole = in->nbytes / BLOCK;
    bool streams = out != NULL && in->nbytes >= STREAMED && (uintptr_t)out % UM__STRIPE == 0;
    n_whole = n_whole < n_blocks ? n_whole : n_blocks;
    n_whole -= n_whole > 0; /* the last stripe may begin in the last whole block */
    for (size_t i = 0; i < n_whole; i++) {
        uint8_t *to = out == NULL ? NULL : out + i * BLOCK;
        code(sums, to, in->bytes + i * BLOCK, BLOCK_STRIPES, secret, streams);
        scramble(sums);
    }
    /* Others may write to the input: what is hashed twice is read once, and what is copied, too. */
    uint8_t bytes[2 * BLOCK], stripes[BLOCK];
    size_t begin = n_whole * BLOCK;
    input rest = {bytes, in->nbytes - begin, in->n_all - begin};
    if (rest.nbytes > 0) {
        memcpy(bytes, in->bytes + begin, rest.nbytes);
    }
    if (out != NULL && rest.nbytes > 0) {
        memcpy(out + begin, bytes, rest.nbytes);
    }
    for (size_t i = n_whole; i <= n_blocks; i++) {
        size_t first = i * BLOCK - begin;
        size_t n = i < n_blocks ? BLOCK_STRIPES : (rest.n_all - 1 - first) / UM__STRIPE;
        code(sums, NULL, part(stripes, &rest, first, n * UM__STRIPE), n, secret, false);
        if (i < n_blocks) {
            scramble(sums);
        }
    }
    code(sums, NULL, part(stripes, &rest, rest.n_all - UM__STRIPE, UM__STRIPE), 1,
         secret + SECRET - UM__STRIPE - 7, false);
#if defined(__x86_64__)
    if (streams) {
        _mm_sfence(); /* before whatever tells others of the bytes */
    }
#endif
    return (u128){merge(sums, secret + 11, in->n_all * P64_1),
                  merge(sums, secret + SECRET - UM__STRIPE - 11, ~(in->n_all * P64_2))};
}

void um__copy_hashed(um__xxh3_code *code, void *out, const void *in, size_t nbytes, size_t n_zeros,
                     uint8_t *out_hash) {
    input all = {in, nbytes, nbytes + n_zeros};
    u128 hash;
    if (all.n_all > SHORT) {
        hash = copy_long(code, out, &all);
    } else {
        uint8_t bytes[SHORT];
        hash = of_short(part(bytes, &all, 0, all.n_all), all.n_all);
        if (out != NULL && nbytes > 0) {
            memcpy(out, bytes, nbytes);
        }
    }
    uint64_t words[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
    memcpy(out_hash, words, sizeof words);
}

void um_copy_hashed(void *out, const void *in, size_t nbytes, size_t n_zeros, uint8_t *out_hash) {
    um__xxh3_code *best = add_scalar;
    for (size_t i = 0; um__xxh3_code_at(i) != NULL; i++) {
        best = um__xxh3_code_at(i);
    }
    um__copy_hashed(best, out, in, nbytes, n_zeros, out_hash);
}
