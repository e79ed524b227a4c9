/* Copying, reading, writing and touching memory, timed. */
#ifndef BENCH_MEMORY_H
#define BENCH_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define BENCH_EXPORT __attribute__((visibility("default")))

typedef struct bench_range {
    const unsigned char *at;
    size_t nbytes;
} bench_range;

typedef struct bench_piece {
    unsigned char *to;
    const unsigned char *from;
    size_t nbytes;
} bench_piece;

enum bench_pages { BENCH_4K, BENCH_THP, BENCH_2M };

/* New memory: `nbytes` from `at` on, which begins a huge page. */
typedef struct bench_mapping {
    void *base;
    size_t room;
    unsigned char *at;
} bench_mapping;

int bench_map(bench_mapping *out, size_t nbytes, size_t align, enum bench_pages pages);
void bench_unmap(bench_mapping *mapping);

/* Seconds on the wall; and of this thread on a CPU. */
double bench_now(void);
double bench_cpu_now(void);

/* The sum of the words of 8 bytes; up to 7 bytes at the end are left. */
uint64_t bench_sum_words(const unsigned char *at, size_t nbytes);

/* What follows returns seconds, or -1 with errno set. */

/* CPU time of this thread. */
BENCH_EXPORT double bench_copy(const bench_piece *pieces, size_t n);
BENCH_EXPORT double bench_read(const unsigned char *at, size_t nbytes);
BENCH_EXPORT double bench_fill(unsigned char *at, size_t nbytes, int value);
/* Frees and allocates up to 1 KiB, n times, with the malloc of the process. */
BENCH_EXPORT double bench_churn(size_t n);

/* On the wall, by a pinned thread on each CPU. */
BENCH_EXPORT double bench_copy_by_threads(unsigned char *to, const unsigned char *from,
                                          size_t nbytes, const int *cpus, int n_cpus);
BENCH_EXPORT double bench_fill_by_threads(unsigned char *at, size_t nbytes, int value,
                                          const int *cpus, int n_cpus);
BENCH_EXPORT double bench_touch(size_t nbytes, size_t step, int pages, const int *cpus, int n_cpus);
BENCH_EXPORT double bench_scan(const bench_range *ranges, size_t n_ranges, const int *cpus,
                               int n_cpus, uint64_t *sum);

#endif
