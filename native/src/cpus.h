/* The CPUs that the threads of a call are pinned to: unpinned, two of them may share one core. */
#ifndef UM_CPUS_H
#define UM_CPUS_H

#include <stdint.h>

#include "unimem.h"

enum { UM_MAX_THREADS = 512, UM_MAX_CPUS = 8192 };

typedef struct um_cpus {
    unsigned n_threads; /* as many as there may be */
    const int *chosen;  /* one a thread, or NULL: the allowed ones in turn */
    uint64_t allowed[UM_MAX_CPUS / 64];
} um_cpus;

/* Nothing is allowed yet. errors: UM_E_INVALID (no threads, a CPU above all that there can be). */
UM_CHECKED um_status um_cpus_init(um_cpus *out, unsigned n_threads, const int *chosen,
                                  um_error *err);
/* Where none are chosen, those that this thread may run on are allowed. */
void um_cpus_allow(um_cpus *cpus);
/* The CPU of the ith thread; -1: it runs anywhere. */
int um_cpus_at(const um_cpus *cpus, unsigned i);
/* Pins the thread that calls. One that cannot be pinned works all the same, if more slowly. */
void um_cpus_pin(int cpu);

#endif
