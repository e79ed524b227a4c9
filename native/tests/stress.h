/* Helpers for stress tests: many threads that do as they like with one object, for as long as
 * UNIMEM_STRESS_SECONDS says, and for some rounds where it says nothing. They are made for
 * ThreadSanitizer (`make tsan`), and check what they can see themselves. */
#ifndef UM_STRESS_H
#define UM_STRESS_H

#include <time.h>

#include "test.h"

enum { N_THREADS = 16, N_ROUNDS = 40 };

typedef struct worker {
    unsigned number;
    uint64_t random; /* of its own, for test_random */
    void (*round)(struct worker *);
    time_t until; /* 0: N_ROUNDS rounds */
} worker;

static inline time_t stress_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

static inline size_t any_of(worker *w, size_t n) {
    return (size_t)(test_random(&w->random) % n);
}

static inline void *stress_run(void *arg) {
    worker *w = arg;
    for (unsigned i = 0; w->until == 0 ? i < N_ROUNDS : stress_now() < w->until; i++) {
        w->round(w);
    }
    return NULL;
}

/* Runs rounds of `round` in all threads at once. */
static inline void stress(void (*round)(worker *)) {
    const char *text = getenv("UNIMEM_STRESS_SECONDS");
    long seconds = text == NULL ? 0 : strtol(text, NULL, 10);
    worker workers[N_THREADS];
    for (unsigned i = 0; i < N_THREADS; i++) {
        workers[i] = (worker){.number = i,
                              .random = i + 1,
                              .round = round,
                              .until = seconds > 0 ? stress_now() + seconds : 0};
    }
    run_threads(N_THREADS, stress_run, workers, sizeof workers[0]);
}

#endif
