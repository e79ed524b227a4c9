/* The CPUs that the threads of a call are pinned to: otherwise, two threads may share a core. */
#ifndef UM_CPUS_H
#define UM_CPUS_H

#include <stdint.h>

#include "unimem.h"

enum { UM__MAX_THREADS = 512, UM__MAX_CPUS = 8192 };

typedef struct um__cpus {
    unsigned n_threads; /* the most threads of the call */
    const int *chosen;  /* one for each thread; NULL: the allowed ones in turn */
    uint64_t allowed[UM__MAX_CPUS / 64];
} um__cpus;

/* Sets the number of threads and the chosen CPUs; no CPU is allowed yet. errors: UM_E_INVALID (no
 * threads, or a number above all CPUs). */
UM_CHECKED um_status um__cpus_init(um__cpus *out, unsigned n_threads, const int *chosen,
                                   um_error *err);
/* Allows the CPUs that this thread may run on, unless CPUs were chosen. */
void um__cpus_allow(um__cpus *cpus);
/* Returns the CPU of the ith thread; -1 if it may run anywhere. */
int um__cpus_at(const um__cpus *cpus, unsigned i);
/* Pins the calling thread. A thread that cannot be pinned still works, only more slowly. */
void um__cpus_pin(int cpu);

#endif
