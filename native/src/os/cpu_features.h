/* The instruction sets of this CPU that code of ours is written for. */
#ifndef UM_CPU_FEATURES_H
#define UM_CPU_FEATURES_H

#include <stdbool.h>

#if defined(__x86_64__)

enum { UM__F16C = 1, UM__AVX2 = 2, UM__AVX512F = 4 };

/* Whether the CPU and the kernel let programs use all of these: UM__F16C | UM__AVX2. */
bool um__cpu_has(unsigned wanted);

#endif
#endif
