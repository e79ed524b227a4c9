/* The CPUs that the threads of a call are pinned to. Without pinning, two threads may share a
 * core. */
#ifndef UM_CPUS_H
#define UM_CPUS_H

#include <stdint.h>

#include "unimem.h"

enum { UM_MAX_THREADS = 512, UM_MAX_CPUS = 8192 };

typedef struct um_cpus {
    unsigned n_threads; /* the most threads of the call */
    const int *chosen;  /* one for each thread; NULL: the allowed ones in turn */
    uint64_t allowed[UM_MAX_CPUS / 64];
} um_cpus;

/* Sets the number of threads and the chosen CPUs; no CPU is allowed yet. errors: UM_E_INVALID (no
 * threads, or a CPU above all that there can be). */
UM_CHECKED um_status um_cpus_init(um_cpus *out, unsigned n_threads, const int *chosen,
                                  um_error *err);
/* Allows the CPUs that this thread may run on, unless CPUs were chosen. */
void um_cpus_allow(um_cpus *cpus);
/* Returns the CPU of the ith thread; -1 if it may run anywhere. */
int um_cpus_at(const um_cpus *cpus, unsigned i);
/* Pins the calling thread. A thread that cannot be pinned still works, only more slowly. */
void um_cpus_pin(int cpu);

#endif
