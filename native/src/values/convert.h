/* The conversions behind um_convert: one function for each direction and instruction set. */
#ifndef UM_CONVERT_H
#define UM_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include "unimem.h"
#include "values/quants.h"

/* One implementation. All give the same bits. n counts values: whole blocks, for quantized
 * types. */
typedef struct um__convert_code {
    const char *isa;
    void (*f16_of_f32)(uint16_t *out, const float *in, size_t n);
    void (*f32_of_f16)(float *out, const uint16_t *in, size_t n);
    void (*bf16_of_f32)(uint16_t *out, const float *in, size_t n);
    void (*f32_of_bf16)(float *out, const uint16_t *in, size_t n);
    const um__quant_code *quants; /* for each type from UM_Q8_0 on */
} um__convert_code;

/* Returns the i-th code that this CPU runs, the slowest first; NULL behind the last. */
const um__convert_code *um__convert_code_at(size_t i);

/* Does the same as um_convert, with this code. */
UM_CHECKED um_status um__convert_by(const um__convert_code *code, void *out, um_dtype out_type,
                                    const void *in, um_dtype in_type, size_t n, um_error *err);

/* Returns the bytes of n values. pre: the type is known, and n is whole blocks of it. */
static inline size_t um__dtype_nbytes(um_dtype type, size_t n) {
    return n / um_dtype_block_values(type) * um_dtype_block_bytes(type);
}

/* Does the same as um_convert, and cannot fail. pre: both types are known, and n is whole blocks of
 * both. */
void um__convert_values(void *out, um_dtype out_type, const void *in, um_dtype in_type, size_t n);

#endif
