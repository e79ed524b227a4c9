/* The floating-point modes in which conversions must give the same bits. */
#ifndef UM_FP_MODES_H
#define UM_FP_MODES_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct fp_mode {
    const char *name;
    uint64_t word; /* MXCSR, FPCR */
} fp_mode;

/* Denormals become zeros, as operands (DAZ) and as results (FTZ), and rounding is upwards. */
#if defined(__x86_64__)
static const fp_mode modes[] = {{"usual mode", 0x1f80}, {"FTZ, DAZ, rounding up", 0xdfc0}};
static inline void set_mode(uint64_t word) {
    _mm_setcsr((unsigned)word);
}
static inline uint64_t get_mode(void) {
    return _mm_getcsr() & ~0x3fu;
}
#elif defined(__aarch64__)
static const fp_mode modes[] = {{"usual mode", 0}, {"FZ, rounding up", 1 << 24 | 1 << 22}};
static inline void set_mode(uint64_t word) {
    __asm__ volatile("msr fpcr, %0" : : "r"(word));
}
static inline uint64_t get_mode(void) {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
#else
static const fp_mode modes[] = {{"usual mode", 0}};
static inline void set_mode(uint64_t word) {
    (void)word;
}
static inline uint64_t get_mode(void) {
    return 0;
}
#endif
enum { N_MODES = sizeof modes / sizeof modes[0] };

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
