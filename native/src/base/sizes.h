/* Arithmetic on sizes. The functions return false if a result does not fit. */
#ifndef UM_SIZES_H
#define UM_SIZES_H

#include <stdbool.h>
#include <stddef.h>

static inline bool um__is_power_of_two(size_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

static inline bool um__add(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

static inline bool um__mul(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}

/* pre: align is a power of two. */
static inline bool um__round_up(size_t n, size_t align, size_t *out) {
    size_t sum;
    if (!um__add(n, align - 1, &sum)) {
        return false;
    }
    *out = sum & ~(align - 1);
    return true;
}

#endif
