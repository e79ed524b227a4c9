// Rows of a KV cache or a scratchpad, on the device: tokens are converted into rows, and rows into
// arrays. Every conversion gives the same bits as in main memory, except for NaN products. All
// rounding is to nearest even, by integer arithmetic or by operations that name it, so that no
// option of the compiler (fused multiply-add, fast division) changes a bit. A test compiles this
// source for the CPU and compares; hence no include, and no warp-wide operation.
//
// A kernel takes one structure of 64-bit integers, by value, as row_kernels.pyx fills it.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef signed char i8;

const u32 MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

// ---- one value ----

__device__ inline u16 f16_of_f32(float value) {
    u32 bits = __float_as_uint(value), magnitude = bits & MAGNITUDE, half;
    if (magnitude > INFINITE) {
        half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    } else if (magnitude >= 0x47800000) { // 2^16 and above, infinity included
        half = 0x7c00;
    } else if (magnitude >= 0x38800000) { // 2^-14 and above: a normal float16
        // Rounding may carry into the exponent, and into infinity, as it should.
        half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    } else if (magnitude > 0x33000000) { // above 2^-25: a denormal, in units of 2^-24
        u32 shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffff) | 0x800000;
        half = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    } else {
        half = 0;
    }
    return (u16)(bits >> 16 & 0x8000 | half);
}

__device__ inline float f32_of_f16(u16 half) {
    u32 sign = (u32)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    u32 bits;
    if (exponent == 0x1f) {
        bits = INFINITE | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0);
    } else if (exponent != 0) {
        bits = (exponent + 112) << 23 | mantissa << 13;
    } else {
        bits = __float_as_uint(__fmul_rn((float)mantissa, 1.0f / 16777216)); // exact
    }
    return __uint_as_float(sign | bits);
}

__device__ inline u16 bf16_of_f32(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & MAGNITUDE) > INFINITE) {
        return (u16)(bits >> 16 | 0x40);
    }
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ inline double f64_of_f32(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & MAGNITUDE) > INFINITE) {
        u64 sign = (u64)(bits >> 31) << 63, payload = (u64)(bits & 0x7fffff) << 29;
        return __longlong_as_double((i64)(sign | 0x7ff8000000000000 | payload));
    }
    return (double)value; // exact
}

// ---- types of rows ----

// Each type has the bytes of a unit, the number of its values, and code to read and write a value.

struct f64 {
    typedef double Value;
    enum { VALUES = 1, BYTES = 8 };
    __device__ static void write(char *out, float value) { *(double *)out = f64_of_f32(value); }
};

struct f32 {
    typedef float Value;
    enum { VALUES = 1, BYTES = 4 };
    __device__ static float read(const char *in) { return *(const float *)in; }
    __device__ static void write(char *out, float value) { *(float *)out = value; }
};

struct f16 {
    typedef u16 Value;
    enum { VALUES = 1, BYTES = 2 };
    __device__ static float read(const char *in) { return f32_of_f16(*(const u16 *)in); }
    __device__ static void write(char *out, float value) { *(u16 *)out = f16_of_f32(value); }
};

struct bf16 {
    typedef u16 Value;
    enum { VALUES = 1, BYTES = 2 };
    __device__ static float read(const char *in) {
        return __uint_as_float((u32) * (const u16 *)in << 16);
    }
    __device__ static void write(char *out, float value) { *(u16 *)out = bf16_of_f32(value); }
};

// ggml's block_q8_0: a scale, as float16, and 32 integers.
struct q8_0 {
    enum { VALUES = 32, BYTES = 34 };
};

// Returns the low byte of x as an integer, a half rounded away from zero; 0 if x is a NaN or does
// not fit into 32 bits.
__device__ inline u32 q8_of(float x) {
    if (!(x > -2147483648.0f && x < 2147483648.0f)) {
        return 0;
    }
    int whole = (int)x;
    float rest = x - (float)whole; // exact
    whole += (rest >= 0.5f) - (rest <= -0.5f);
    return (u32)whole & 0xff;
}

// Writes one unit of a row, from values that lie `stride` bytes apart.
template <class From, class To>
__device__ inline void put(From, To, char *out, const char *in, i64) {
    To::write(out, From::read(in));
}

// Without conversion all bits are kept, even of a NaN.
template <class Same> __device__ inline void put(Same, Same, char *out, const char *in, i64) {
    typedef typename Same::Value Value;
    *(Value *)out = *(const Value *)in;
}

template <class From>
__device__ inline void put(From, q8_0, char *out, const char *in, i64 stride) {
    float values[q8_0::VALUES], amax = 0;
#pragma unroll
    for (int i = 0; i < q8_0::VALUES; i++) {
        values[i] = From::read(in + i * stride);
        // As in ggml's reference, a NaN resets the maximum, and is itself forgotten unless it is
        // the last value.
        float magnitude = __uint_as_float(__float_as_uint(values[i]) & MAGNITUDE);
        amax = amax > magnitude ? amax : magnitude;
    }
    float d = __fdiv_rn(amax, 127.0f), id = d != 0 ? __fdiv_rn(1.0f, d) : 0;
    u16 *halves = (u16 *)out; // a block begins at any even address
    halves[0] = __float_as_uint(amax) > INFINITE ? 0x7e00 : f16_of_f32(d);
#pragma unroll
    for (int i = 0; i < q8_0::VALUES; i += 2) {
        u32 low = q8_of(__fmul_rn(values[i], id)), high = q8_of(__fmul_rn(values[i + 1], id));
        halves[1 + i / 2] = (u16)(low | high << 8);
    }
}

// Writes value i of a row.
template <class From, class To>
__device__ inline void get(From from, To to, char *out, const char *row, i64 i) {
    put(from, to, out, row + i * From::BYTES, 0);
}

template <class To> __device__ inline void get(q8_0, To, char *out, const char *row, i64 i) {
    const char *block = row + i / q8_0::VALUES * q8_0::BYTES;
    float q = (float)*(const i8 *)(block + 2 + i % q8_0::VALUES);
    To::write(out, __fmul_rn(f32_of_f16(*(const u16 *)block), q));
}

// ---- kernels ----

struct Strides {
    i64 layer, stream, head, token, value;
};

// K or V: the given tokens, and the lanes that they go to. Strides are in bytes.
struct Side {
    u64 given, out;
    i64 heads, dim;
    Strides strides;
    i64 layer_stride, lane_stride, row_bytes;
};

struct Append {
    Side k, v;
    i64 layers, streams, n, row, n_rows;
    u64 row_address;
};

struct Read {
    u64 lanes, array;
    i64 streams, heads, n, dim, lane_stride, row_bytes, row;
};

// Writes tokens [layers, streams, heads, n, dim] of K, and of V unless none are given (address 0),
// to the rows `row`, `row + 1`, ... of their lanes. A lane is K or V of one stream of one layer; a
// token is one row of it, with its heads beside each other. Unless row_address is 0, the row is an
// int32 there, read when the kernel runs. Rows outside [0, n_rows) are not written.
template <class From, class To> __device__ inline void append_rows(const Append &a) {
    i64 first = a.row_address != 0 ? *(const int *)a.row_address : a.row;
    i64 n_lanes = a.layers * a.streams, n_sides = a.v.given != 0 ? 2 : 1;
    for (i64 z = blockIdx.z; z < n_sides * n_lanes; z += gridDim.z) {
        const Side side = z < n_lanes ? a.k : a.v;
        i64 layer = z % n_lanes / a.streams, stream = z % a.streams;
        i64 n_units = side.dim / To::VALUES;
        const char *given = (const char *)side.given;
        given += layer * side.strides.layer + stream * side.strides.stream;
        char *lane = (char *)side.out + layer * side.layer_stride + stream * side.lane_stride;
        for (i64 y = blockIdx.y * (i64)blockDim.y + threadIdx.y; y < a.n * side.heads;
             y += gridDim.y * (i64)blockDim.y) {
            i64 token = y / side.heads, head = y % side.heads, at = first + token;
            if (at < 0 || at >= a.n_rows) {
                continue;
            }
            const char *in = given + head * side.strides.head + token * side.strides.token;
            char *out = lane + at * side.row_bytes + head * n_units * To::BYTES;
            for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < n_units;
                 x += gridDim.x * (i64)blockDim.x) {
                put(From(), To(), out + x * To::BYTES, in + x * To::VALUES * side.strides.value,
                    side.strides.value);
            }
        }
    }
}

// Copies rows from `row` on, of `streams` lanes, to an array [streams, heads, n, dim].
template <class From, class To> __device__ inline void read_rows(const Read &r) {
    for (i64 z = blockIdx.z; z < r.streams; z += gridDim.z) {
        for (i64 y = blockIdx.y * (i64)blockDim.y + threadIdx.y; y < r.n * r.heads;
             y += gridDim.y * (i64)blockDim.y) {
            i64 token = y / r.heads, head = y % r.heads;
            const char *in = (const char *)r.lanes + z * r.lane_stride;
            in += (r.row + token) * r.row_bytes;
            char *out = (char *)r.array + ((z * r.heads + head) * r.n + token) * r.dim * To::BYTES;
            for (i64 x = blockIdx.x * (i64)blockDim.x + threadIdx.x; x < r.dim;
                 x += gridDim.x * (i64)blockDim.x) {
                get(From(), To(), out + x * To::BYTES, in, head * r.dim + x);
            }
        }
    }
}

#define APPEND(FROM, TO)                                                                           \
    extern "C" __global__ void append_##FROM##_##TO(Append a) {                                    \
        append_rows<FROM, TO>(a);                                                                  \
    }

#define READ(FROM, TO)                                                                             \
    extern "C" __global__ void read_##FROM##_##TO(Read r) {                                        \
        read_rows<FROM, TO>(r);                                                                    \
    }

#define OF_FLOATS(MAKE, TO) MAKE(f32, TO) MAKE(f16, TO) MAKE(bf16, TO)

OF_FLOATS(APPEND, f32)
OF_FLOATS(APPEND, f16)
OF_FLOATS(APPEND, bf16)
OF_FLOATS(APPEND, q8_0)
APPEND(f32, f64)
APPEND(f64, f64)

OF_FLOATS(READ, f32)
OF_FLOATS(READ, f16)
OF_FLOATS(READ, bf16)
READ(q8_0, f32)
READ(q8_0, f16)
READ(q8_0, bf16)
