/* The instruction sets of this CPU that code of ours is written for. */
#ifndef UM_CPU_FEATURES_H
#define UM_CPU_FEATURES_H

#include <stdbool.h>

#if defined(__x86_64__)

enum { UM_F16C = 1, UM_AVX2 = 2, UM_AVX512F = 4 };

/* Whether the CPU and the kernel let programs use all of these: UM_F16C | UM_AVX2. */
bool um_cpu_has(unsigned wanted);

#endif
#endif
