/* The CPU that each thread runs on. */
#include "os/cpus.h"

#include "base/status.h"
#include "os/os.h"

#include <stdint.h>
#include <string.h>

enum { MASK_WORDS = UM__MAX_CPUS / 64 };

um_status um__cpus_init(um__cpus *out, unsigned n_threads, const int *chosen, um_error *err) {
    UM__INVALID_IF(n_threads == 0, err, "n_threads");
    n_threads = n_threads < UM__MAX_THREADS ? n_threads : UM__MAX_THREADS;
    for (unsigned i = 0; chosen != NULL && i < n_threads; i++) {
        UM__INVALID_IF(chosen[i] >= UM__MAX_CPUS, err, "cpus: a number above 8191");
    }
    *out = (um__cpus){.n_threads = n_threads, .chosen = chosen};
    return UM_OK;
}

void um__cpus_allow(um__cpus *cpus) {
    if (cpus->chosen == NULL && um__os_get_affinity(cpus->allowed, sizeof cpus->allowed) != 0) {
        memset(cpus->allowed, 0, sizeof cpus->allowed);
    }
}

int um__cpus_at(const um__cpus *cpus, unsigned i) {
    if (cpus->chosen != NULL) {
        return cpus->chosen[i];
    }
    unsigned n_cpus = 0;
    for (unsigned word = 0; word < MASK_WORDS; word++) {
        n_cpus += (unsigned)__builtin_popcountll(cpus->allowed[word]);
    }
    i = n_cpus == 0 ? 0 : i % n_cpus;
    for (int cpu = 0; n_cpus != 0 && cpu < UM__MAX_CPUS; cpu++) {
        if ((cpus->allowed[cpu / 64] >> (cpu % 64) & 1) != 0 && i-- == 0) {
            return cpu;
        }
    }
    return -1;
}

void um__cpus_pin(int cpu) {
    if (cpu >= 0) {
        uint64_t mask[MASK_WORDS] = {0};
        mask[cpu / 64] |= UINT64_C(1) << (cpu % 64);
        um__os_set_affinity(mask, sizeof mask);
    }
}
