/* Conversions over all of their inputs; outside of the tests, since it takes minutes: `make
 * exhaust`.
 *
 *   - Every float32 to float16 and bfloat16: the scalar code against arithmetic in double precision
 *     (an oracle that shares nothing with it), every other code against the scalar code.
 *   - Quantizing: every float32 up to 127 in a block whose scale is 1, the scalar code against the
 * C library's roundf; every largest magnitude of a block, every other code against the scalar code.
 *
 * All of it in the usual floating-point mode, and where denormals are zeros and rounding is
 * upwards. Ends with status 1 when a bit differs. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "fp_modes.h"
#include "values/convert.h"

enum { CHUNK = 1 << 16, BLOCK = UM__BLOCK_VALUES };

static uint64_t n_wrong;

static void wrong(const char *isa, const char *what, uint32_t input, unsigned got, unsigned want) {
    if (n_wrong++ < 20) {
        printf("WRONG: %s, %s: 0x%08x becomes 0x%04x, expected 0x%04x\n", isa, what, input, got,
               want);
    }
}

/* Runs one code in one mode. It cannot fail, since the arguments were checked. */
static void convert(const um__convert_code *code, uint64_t mode, void *out, um_dtype type,
                    const float *in, size_t n) {
    set_mode(mode);
    um__convert_by(code, out, type, in, UM_F32, n, NULL);
    set_mode(modes[0].word);
}

/* The code nearest to a number. A tie goes to the even code, as rint does. */
static uint16_t nearest(float value, int mantissa_bits) {
    int bias = (1 << (14 - mantissa_bits)) - 1, infinity = (2 * bias + 1) << mantissa_bits;
    int sign = signbit(value) ? 0x8000 : 0, exponent;
    double magnitude = fabs((double)value);
    if (magnitude == 0 || isinf(magnitude)) {
        return (uint16_t)(sign | (magnitude == 0 ? 0 : infinity));
    }
    frexp(magnitude, &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    int steps = (int)rint(ldexp(magnitude, mantissa_bits - exponent));
    int code = steps + ((exponent + bias - 1) << mantissa_bits);
    return (uint16_t)(sign | (code < infinity ? code : infinity));
}

static bool is_nan(uint16_t code, int mantissa_bits) {
    return (code & 0x7fff) > (0x7fff & ~((1 << mantissa_bits) - 1));
}

static void narrow_all(um_dtype type, const char *what, int mantissa_bits) {
    static float in[CHUNK];
    static uint16_t plain[CHUNK], out[CHUNK];
    for (uint64_t first = 0; first < (uint64_t)1 << 32; first += CHUNK) {
        for (uint32_t i = 0; i < CHUNK; i++) {
            in[i] = float_of((uint32_t)first + i);
        }
        convert(um__convert_code_at(0), modes[0].word, plain, type, in, CHUNK);
        for (uint32_t i = 0; i < CHUNK; i++) {
            if (isnan(in[i])) {
                if (!is_nan(plain[i], mantissa_bits)) {
                    wrong("scalar", what, (uint32_t)first + i, plain[i], 0x7fff);
                }
            } else if (plain[i] != nearest(in[i], mantissa_bits)) {
                wrong("scalar", what, (uint32_t)first + i, plain[i], nearest(in[i], mantissa_bits));
            }
        }
        for (size_t c = 0; um__convert_code_at(c) != NULL; c++) {
            for (size_t m = 0; m < N_MODES; m++) {
                const um__convert_code *code = um__convert_code_at(c);
                convert(code, modes[m].word, out, type, in, CHUNK);
                for (uint32_t i = 0; memcmp(out, plain, sizeof out) != 0 && i < CHUNK; i++) {
                    if (out[i] != plain[i]) {
                        wrong(code->isa, what, (uint32_t)first + i, out[i], plain[i]);
                    }
                }
            }
        }
    }
    printf("%s: 2^32 values, %llu wrong\n", what, (unsigned long long)n_wrong);
}

/* Compares quantized blocks of every code, in every mode, with those of the scalar code. */
static void compare_blocks(const float *in, const um__q8_0 *plain, size_t n_blocks,
                           const char *what) {
    static um__q8_0 out[CHUNK / BLOCK];
    for (size_t c = 0; um__convert_code_at(c) != NULL; c++) {
        for (size_t m = c == 0; m < N_MODES; m++) {
            const um__convert_code *code = um__convert_code_at(c);
            convert(code, modes[m].word, out, UM_Q8_0, in, n_blocks * BLOCK);
            for (size_t b = 0; b < n_blocks; b++) {
                if (memcmp(&out[b], &plain[b], sizeof out[b]) != 0) {
                    uint32_t bits;
                    memcpy(&bits, in + b * BLOCK + 1, sizeof bits);
                    wrong(code->isa, what, bits, out[b].d, plain[b].d);
                }
            }
        }
    }
}

/* The first value of each block is 127, so that d and 1 / d are 1. */
static void round_all(void) {
    static float in[CHUNK];
    static um__q8_0 plain[CHUNK / BLOCK];
    const uint32_t end = 0x42fe0001; /* the float after 127 */
    uint32_t next = 0;
    while (next < end) {
        uint32_t first = next;
        for (uint32_t i = 0; i < CHUNK; i++) {
            uint32_t bits = next < end ? next : 0;
            in[i] = i % BLOCK == 0 ? 127 : float_of(bits | (i & 1) << 31);
            /* Each value is followed by its negative. */
            next += i % BLOCK != 0 && (i & 1) == 0;
        }
        convert(um__convert_code_at(0), modes[0].word, plain, UM_Q8_0, in, CHUNK);
        for (uint32_t i = 0; i < CHUNK; i++) {
            int got = plain[i / BLOCK].qs[i % BLOCK], want = (int)roundf(in[i]);
            if (got != want || plain[i / BLOCK].d != 0x3c00) {
                wrong("scalar", "rounding", first, (unsigned)got, (unsigned)want);
            }
        }
        compare_blocks(in, plain, CHUNK / BLOCK, "rounding");
    }
    printf("q8_0: every value up to 127, %llu wrong\n", (unsigned long long)n_wrong);
}

static void scale_all(void) {
    static float in[CHUNK];
    static um__q8_0 plain[CHUNK / BLOCK];
    for (uint64_t first = 0; first < (uint64_t)1 << 31; first += CHUNK / BLOCK) {
        for (uint32_t i = 0; i < CHUNK; i++) {
            float amax = float_of((uint32_t)first + i / BLOCK);
            in[i] = amax * (1 - 0x1.07p-4f * (float)(i % BLOCK));
        }
        convert(um__convert_code_at(0), modes[0].word, plain, UM_Q8_0, in, CHUNK);
        compare_blocks(in, plain, CHUNK / BLOCK, "scale");
    }
    printf("q8_0: every largest magnitude, %llu wrong\n", (unsigned long long)n_wrong);
}

int main(void) {
    printf("codes:");
    for (size_t i = 0; um__convert_code_at(i) != NULL; i++) {
        printf(" %s", um__convert_code_at(i)->isa);
    }
    printf("\n");
    setvbuf(stdout, NULL, _IOLBF, 0);
    narrow_all(UM_F16, "float16", 10);
    narrow_all(UM_BF16, "bfloat16", 7);
    round_all();
    scale_all();
    return n_wrong != 0;
}
