/* Touching memory before the program does. The kernel may take long to find huge pages if free
 * memory is in small pieces, or if a host has taken them from a virtual machine. */
#include "exec.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include "os/kernel.h"

enum { STEP_BYTES = 2 << 20, MOST_THREADS = 64 };
/* A huge page takes 0.2 ms if memory is free, and 4 to 5 ms if a host has to find it first; small
 * ones take 1 ms for as much. One slow page may be a chance. */
static const uint64_t SLOW_NS = 1500000;
enum { MOST_SLOW = 2 };
/* Less is not worth a thread. */
static const size_t SHARE_BYTES = 16 << 20;

typedef struct part {
    char *at;
    size_t nbytes;
    int cpu; /* -1: anywhere */
    bool huge, stalled, failed;
} part;

static void touch(part *own) {
    int n_slow = 0;
    uint64_t began = um__sys_cpu_ns();
    for (size_t done = 0; done < own->nbytes;) {
        size_t left = own->nbytes - done, step = left < STEP_BYTES ? left : STEP_BYTES;
        if (um__sys_advise(own->at + done, step, MADV_POPULATE_WRITE) != 0) {
            if (errno == EINTR || errno == EAGAIN) {
                continue;
            }
            own->failed = true; /* so will the program's own touches */
            return;
        }
        done += step;
        uint64_t ended = um__sys_cpu_ns();
        n_slow += ended - began > SLOW_NS;
        began = ended;
        if (own->huge && !own->stalled && n_slow == MOST_SLOW) {
            own->stalled = true;
            um__sys_advise(own->at + done, own->nbytes - done, MADV_NOHUGEPAGE);
        }
    }
}

static void *run(void *argument) {
    part *own = argument;
    if (own->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((unsigned)own->cpu, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    touch(own);
    return NULL;
}

/* Returns the next CPU that this thread may run on, behind another one. */
static int next_cpu(const cpu_set_t *allowed, int cpu) {
    for (int i = 1; i <= CPU_SETSIZE; i++) {
        int each = (cpu + i) % CPU_SETSIZE;
        if (CPU_ISSET((unsigned)each, allowed)) {
            return each;
        }
    }
    return -1;
}

bool um__prefault(void *at, size_t nbytes, bool huge, unsigned n_threads, bool *out_stalled) {
    size_t most = nbytes / SHARE_BYTES;
    size_t n = n_threads < most ? n_threads : most;
    n = n > MOST_THREADS ? MOST_THREADS : n;
    if (n < 2) {
        part whole = {.at = at, .nbytes = nbytes, .cpu = -1, .huge = huge};
        touch(&whole);
        *out_stalled = whole.stalled;
        return !whole.failed;
    }
    /* Parts meet at borders of huge pages. */
    size_t share = (nbytes / n + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES;
    part parts[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    bool runs[MOST_THREADS];
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    /* The program's signals are for its own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int cpu = -1;
    size_t i = 0;
    for (size_t done = 0; done < nbytes; done += share, i++) {
        cpu = next_cpu(&allowed, cpu);
        size_t left = nbytes - done;
        parts[i] = (part){.at = (char *)at + done,
                          .nbytes = left < share ? left : share,
                          .cpu = cpu,
                          .huge = huge};
        runs[i] = pthread_create(&threads[i], NULL, run, &parts[i]) == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    bool stalled = false, failed = false;
    for (size_t j = 0; j < i; j++) {
        if (runs[j]) {
            pthread_join(threads[j], NULL);
        } else {
            touch(&parts[j]);
        }
        stalled |= parts[j].stalled;
        failed |= parts[j].failed;
    }
    *out_stalled = stalled;
    return !failed;
}
