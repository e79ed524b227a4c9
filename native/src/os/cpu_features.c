/* The instruction sets of this CPU, by CPUID: zig's __builtin_cpu_supports always says no. */
#include "os/cpu_features.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <stdatomic.h>

/* What the kernel saves when threads take turns: registers of AVX, and of AVX-512. */
enum { YMM = 0x6, ZMM = 0xe6, ASKED = 8 };

static unsigned read_features(void) {
    unsigned a, b, c, d, saved, upper;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) {
        return 0;
    }
    unsigned found = (c & bit_F16C) != 0 ? UM__F16C : 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        found |= (b & bit_AVX2) != 0 ? UM__AVX2 : 0;
        found |= (b & bit_AVX512F) != 0 ? UM__AVX512F : 0;
    }
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
    if ((saved & YMM) != YMM) {
        return 0;
    }
    return (saved & ZMM) == ZMM ? found : found & ~(unsigned)UM__AVX512F;
}

bool um__cpu_has(unsigned wanted) {
    /* Read once, since a virtual machine takes microseconds to answer. */
    static _Atomic unsigned found;
    unsigned features = atomic_load_explicit(&found, memory_order_relaxed);
    if (features == 0) {
        features = read_features() | ASKED;
        atomic_store_explicit(&found, features, memory_order_relaxed);
    }
    return (features & wanted) == wanted;
}

#endif
