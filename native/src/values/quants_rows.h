/* The quantized types for one instruction set. quants.c includes this once for each, with
 *
 * - V(name): `name` of the instruction set: the block of 32 `values`, whose parts `at` are vectors
 *   of the compiler; `amax` (the bits of the largest magnitude), `which` values have a magnitude,
 *   `least`, `most`, `levels` ((x - low) * id + half, cut off and at most `most`), `q8_levels` (x *
 *   id, a half rounded away from zero), `iq4_nl_levels`, `floats` (of signed bytes);
 * - BYTES(name): `name` of 32 levels, a byte each;
 * - SCALE(half): the float of a float16;
 * - TARGET: the attribute of its functions.
 *
 * Products and sums are rounded one after the other, as in the reference. */

enum { V(PARTS) = sizeof((V(values) *)0)->at / sizeof((V(values) *)0)->at[0] };

TARGET static inline V(values) V(load)(const float *in) {
    V(values) out;
    for (size_t j = 0; j < V(PARTS); j++) {
        memcpy(&out.at[j], in + j * UM__BLOCK_VALUES / V(PARTS), sizeof out.at[j]);
    }
    return out;
}

TARGET static inline void V(store)(float *out, V(values) in) {
    for (size_t j = 0; j < V(PARTS); j++) {
        memcpy(out + j * UM__BLOCK_VALUES / V(PARTS), &in.at[j], sizeof in.at[j]);
    }
}

TARGET static inline V(values) V(times)(V(values) a, V(values) b) {
    for (size_t j = 0; j < V(PARTS); j++) {
        a.at[j] *= b.at[j];
    }
    return a;
}

/* Returns in * d + m; without `adds`, in * d. */
TARGET static inline V(values) V(scaled)(V(values) in, float d, bool adds, float m) {
    for (size_t j = 0; j < V(PARTS); j++) {
        in.at[j] = adds ? in.at[j] * d + m : in.at[j] * d;
    }
    return in;
}

/* Returns the first value of the largest magnitude. */
TARGET static inline float V(extreme)(V(values) values, const float *in, uint32_t amax) {
    return amax == 0 ? 0 : in[__builtin_ctz(V(which)(values, amax))];
}

/* As find_range, without the division. */
TARGET static inline float V(range)(V(values) values, const float *in, float *out_least) {
    float least = V(least)(values), most = V(most)(values);
    *out_least = least == 0 ? first_zero(in) : least;
    return most > least ? most - least : 0;
}

#define EACH_BLOCK(type, values)                                                                   \
    for (type *end = block + n / UM__BLOCK_VALUES; block != end;                                   \
         block++, (values) += UM__BLOCK_VALUES)

TARGET static void V(q8_0_of_f32)(void *out, const float *in, size_t n) {
    um__q8_0 *block = out;
    EACH_BLOCK(um__q8_0, in) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        if (!is_usual_amax(amax)) {
            q8_0_of_f32_block(block, in);
            continue;
        }
        float d = float_of(amax) / Q8_0_MAX;
        BYTES(bytes) found = V(q8_levels)(values, reciprocal(d));
        block->d = f16_of_f32(d);
        memcpy(block->qs, &found.low, HALF);
        memcpy(block->qs + HALF, &found.high, HALF);
    }
}

/* Quantizes to a scale; with `fifth`, to five bits. */
#define QUANTIZE_SCALED(name, type, most_level, fifth)                                             \
    TARGET static void V(name##_of_f32)(void *out, const float *in, size_t n) {                    \
        type *block = out;                                                                         \
        EACH_BLOCK(type, in) {                                                                     \
            V(values) values = V(load)(in);                                                        \
            uint32_t amax = V(amax)(values);                                                       \
            if (!is_usual_amax(amax)) {                                                            \
                name##_of_f32_block(block, in);                                                    \
                continue;                                                                          \
            }                                                                                      \
            const float half = (most_level + 1) / 2;                                               \
            float d = V(extreme)(values, in, amax) / -half;                                        \
            BYTES(bytes) found = V(levels)(values, 0, reciprocal(d), half + 0.5f, most_level);     \
            block->d = f16_of_f32(d);                                                              \
            BYTES(put_nibbles)(block->qs, found);                                                  \
            fifth;                                                                                 \
        }                                                                                          \
    }
QUANTIZE_SCALED(q4_0, um__q4_0, 15, (void)0)
QUANTIZE_SCALED(q5_0, um__q5_0, 31, BYTES(put_fifth_bits)(block->qh, found))

/* Quantizes to a scale and a least value. */
#define QUANTIZE_RANGE(name, type, most_level, fifth)                                              \
    TARGET static void V(name##_of_f32)(void *out, const float *in, size_t n) {                    \
        type *block = out;                                                                         \
        EACH_BLOCK(type, in) {                                                                     \
            V(values) values = V(load)(in);                                                        \
            uint32_t amax = V(amax)(values);                                                       \
            float least = 0, range = amax < F32_INFINITY ? V(range)(values, in, &least) : 0;       \
            if (!is_usual_range(amax, range)) {                                                    \
                name##_of_f32_block(block, in);                                                    \
                continue;                                                                          \
            }                                                                                      \
            float d = range / (most_level);                                                        \
            BYTES(bytes) found = V(levels)(values, least, reciprocal(d), 0.5f, most_level);        \
            block->d = f16_of_f32(d);                                                              \
            block->m = f16_of_f32(least);                                                          \
            BYTES(put_nibbles)(block->qs, found);                                                  \
            fifth;                                                                                 \
        }                                                                                          \
    }
QUANTIZE_RANGE(q4_1, um__q4_1, 15, (void)0)
QUANTIZE_RANGE(q5_1, um__q5_1, 31, BYTES(put_fifth_bits)(block->qh, found))

TARGET static void V(iq4_nl_of_f32)(void *out, const float *in, size_t n) {
    um__q4_0 *block = out;
    EACH_BLOCK(um__q4_0, in) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        if (!is_usual_for_iq4_nl(amax)) {
            iq4_nl_of_f32_block(block, in);
            continue;
        }
        float id = 1 / (V(extreme)(values, in, amax) / um__iq4_nl_values[0]);
        float products[UM__BLOCK_VALUES], squares[UM__BLOCK_VALUES];
        BYTES(bytes) found = V(iq4_nl_levels)(values, id);
        V(values) level = V(floats)(BYTES(iq4_nl)(found));
        V(values) weighted = V(times)(V(times)(values, values), level);
        V(store)(products, V(times)(weighted, values));
        V(store)(squares, V(times)(weighted, level));
        block->d = f16_of_scale(fit_scale(products, squares));
        BYTES(put_nibbles)(block->qs, found);
    }
}

/* Reads blocks of a type: `found` are the signed levels of a block. */
#define DEQUANTIZE(name, type, adds, m, found)                                                     \
    TARGET static void V(f32_of_##name)(float *out, const void *in, size_t n) {                    \
        const type *block = in;                                                                    \
        EACH_BLOCK(const type, out) {                                                              \
            V(store)(out, V(scaled)(V(floats)(found), SCALE(block->d), adds, m));                  \
        }                                                                                          \
    }
DEQUANTIZE(q8_0, um__q8_0, false, 0, BYTES(read)(block->qs))
DEQUANTIZE(q4_0, um__q4_0, false, 0, BYTES(minus)(BYTES(nibbles)(block->qs), 8))
DEQUANTIZE(q4_1, um__q4_1, true, SCALE(block->m), BYTES(nibbles)(block->qs))
DEQUANTIZE(q5_0, um__q5_0, false, 0,
           BYTES(minus)(BYTES(add_fifth_bits)(BYTES(nibbles)(block->qs), load_bits(block->qh)), 16))
DEQUANTIZE(q5_1, um__q5_1, true, SCALE(block->m),
           BYTES(add_fifth_bits)(BYTES(nibbles)(block->qs), load_bits(block->qh)))
DEQUANTIZE(iq4_nl, um__q4_0, false, 0, BYTES(iq4_nl)(BYTES(nibbles)(block->qs)))

QUANT_CODES(V)
#undef EACH_BLOCK
#undef QUANTIZE_SCALED
#undef QUANTIZE_RANGE
#undef DEQUANTIZE
#undef SCALE
#undef TARGET
#undef V
