/* The quantized types for one instruction set. quants.c includes this once for each, with
 *
 * - V(name): `name` of the instruction set: the block of 32 `values`, `load`, `store`, `amax` (the
 *   bits of the largest magnitude), `which` values have a magnitude, `least`, `most`, `levels`
 *   ((x - low) * id + half, cut off and at most `most`), `iq4_nl_levels`, `floats` (of signed
 *   bytes), `times`, `scaled`, `plus`;
 * - BYTES(name): `name` of 32 levels, a byte each;
 * - TARGET: the attribute of its functions.
 *
 * Products and sums are rounded one after the other, as in the reference. */

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

TARGET static void V(q4_0_of_f32)(void *out, const float *in, size_t n) {
    um__q4_0 *block = out, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, in += UM__BLOCK_VALUES) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        if (!is_usual_amax(amax)) {
            q4_0_of_f32_block(block, in);
            continue;
        }
        float d = V(extreme)(values, in, amax) / -8;
        block->d = f16_of_f32(d);
        BYTES(put_nibbles)(block->qs, V(levels)(values, 0, reciprocal(d), 8.5f, 15));
    }
}

TARGET static void V(q4_1_of_f32)(void *out, const float *in, size_t n) {
    um__q4_1 *block = out, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, in += UM__BLOCK_VALUES) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        float least = 0, range = amax < F32_INFINITY ? V(range)(values, in, &least) : 0;
        if (!is_usual_range(amax, range)) {
            q4_1_of_f32_block(block, in);
            continue;
        }
        float d = range / 15;
        block->d = f16_of_f32(d);
        block->m = f16_of_f32(least);
        BYTES(put_nibbles)(block->qs, V(levels)(values, least, reciprocal(d), 0.5f, 15));
    }
}

TARGET static void V(q5_0_of_f32)(void *out, const float *in, size_t n) {
    um__q5_0 *block = out, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, in += UM__BLOCK_VALUES) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        if (!is_usual_amax(amax)) {
            q5_0_of_f32_block(block, in);
            continue;
        }
        float d = V(extreme)(values, in, amax) / -16;
        BYTES(bytes) found = V(levels)(values, 0, reciprocal(d), 16.5f, 31);
        block->d = f16_of_f32(d);
        BYTES(put_nibbles)(block->qs, found);
        BYTES(put_fifth_bits)(block->qh, found);
    }
}

TARGET static void V(q5_1_of_f32)(void *out, const float *in, size_t n) {
    um__q5_1 *block = out, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, in += UM__BLOCK_VALUES) {
        V(values) values = V(load)(in);
        uint32_t amax = V(amax)(values);
        float least = 0, range = amax < F32_INFINITY ? V(range)(values, in, &least) : 0;
        if (!is_usual_range(amax, range)) {
            q5_1_of_f32_block(block, in);
            continue;
        }
        float d = range / 31;
        BYTES(bytes) found = V(levels)(values, least, reciprocal(d), 0.5f, 31);
        block->d = f16_of_f32(d);
        block->m = f16_of_f32(least);
        BYTES(put_nibbles)(block->qs, found);
        BYTES(put_fifth_bits)(block->qh, found);
    }
}

TARGET static void V(iq4_nl_of_f32)(void *out, const float *in, size_t n) {
    um__q4_0 *block = out, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, in += UM__BLOCK_VALUES) {
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

TARGET static void V(f32_of_q4_0)(float *out, const void *in, size_t n) {
    const um__q4_0 *block = in, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, out += UM__BLOCK_VALUES) {
        BYTES(bytes) found = BYTES(minus)(BYTES(nibbles)(block->qs), 8);
        V(store)(out, V(scaled)(V(floats)(found), f32_of_f16(block->d)));
    }
}

TARGET static void V(f32_of_q4_1)(float *out, const void *in, size_t n) {
    const um__q4_1 *block = in, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, out += UM__BLOCK_VALUES) {
        V(values) scaled = V(scaled)(V(floats)(BYTES(nibbles)(block->qs)), f32_of_f16(block->d));
        V(store)(out, V(plus)(scaled, f32_of_f16(block->m)));
    }
}

TARGET static void V(f32_of_q5_0)(float *out, const void *in, size_t n) {
    const um__q5_0 *block = in, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, out += UM__BLOCK_VALUES) {
        BYTES(bytes) found = BYTES(add_fifth_bits)(BYTES(nibbles)(block->qs), load_bits(block->qh));
        V(store)(out, V(scaled)(V(floats)(BYTES(minus)(found, 16)), f32_of_f16(block->d)));
    }
}

TARGET static void V(f32_of_q5_1)(float *out, const void *in, size_t n) {
    const um__q5_1 *block = in, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, out += UM__BLOCK_VALUES) {
        BYTES(bytes) found = BYTES(add_fifth_bits)(BYTES(nibbles)(block->qs), load_bits(block->qh));
        V(values) scaled = V(scaled)(V(floats)(found), f32_of_f16(block->d));
        V(store)(out, V(plus)(scaled, f32_of_f16(block->m)));
    }
}

TARGET static void V(f32_of_iq4_nl)(float *out, const void *in, size_t n) {
    const um__q4_0 *block = in, *end = block + n / UM__BLOCK_VALUES;
    for (; block != end; block++, out += UM__BLOCK_VALUES) {
        BYTES(bytes) found = BYTES(iq4_nl)(BYTES(nibbles)(block->qs));
        V(store)(out, V(scaled)(V(floats)(found), f32_of_f16(block->d)));
    }
}
