/* The conversions behind um_convert, one function a direction and instruction set; public to the
 * tests only. */
#ifndef UM_CONVERT_H
#define UM_CONVERT_H

#include <stddef.h>
#include <stdint.h>

typedef void um_f16_of_f32_fn(uint16_t *out, const float *in, size_t n);
typedef void um_f32_of_f16_fn(float *out, const uint16_t *in, size_t n);

typedef struct um_convert_code {
    const char *isa;
    um_f16_of_f32_fn *f16_of_f32;
    um_f32_of_f16_fn *f32_of_f16;
} um_convert_code;

/* The i-th code that this CPU runs, the slowest first; NULL behind the last. */
const um_convert_code *um_convert_code_at(size_t i);

#endif
