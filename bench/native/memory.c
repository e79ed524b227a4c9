#define _GNU_SOURCE
#include "memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "team.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20, HUGETLB_2M = 21 << 26 /* MAP_HUGE_2MB */ };

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double bench_cpu_now(void) {
    return seconds_of(CLOCK_THREAD_CPUTIME_ID);
}

double bench_now(void) {
    return seconds_of(CLOCK_MONOTONIC);
}

/* ---- new memory ---- */

int bench_map(bench_mapping *out, size_t nbytes, size_t align, enum bench_pages pages) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (pages == BENCH_2M ? MAP_HUGETLB | HUGETLB_2M : 0);
    align = align > HUGE_PAGE ? align : HUGE_PAGE;
    if (nbytes > SIZE_MAX - align) {
        return ENOMEM;
    }
    out->room = pages == BENCH_2M ? nbytes : nbytes + align;
    out->base = mmap(0, out->room, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (out->base == MAP_FAILED) {
        return errno;
    }
    out->at = out->base;
    if (pages != BENCH_2M) {
        out->at += -(uintptr_t)out->base % align;
        madvise(out->at, nbytes, pages == BENCH_THP ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    return 0;
}

void bench_unmap(bench_mapping *mapping) {
    munmap(mapping->base, mapping->room);
}

/* ---- words ---- */

static inline __attribute__((always_inline)) uint64_t add_words(const unsigned char *at,
                                                                size_t nbytes) {
    uint64_t total = 0;
    for (size_t i = 0; i + 8 <= nbytes; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        total += word;
    }
    return total;
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static uint64_t add_words_avx2(const unsigned char *at,
                                                               size_t nbytes) {
    return add_words(at, nbytes);
}
#endif

uint64_t bench_sum_words(const unsigned char *at, size_t nbytes) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        return add_words_avx2(at, nbytes);
    }
#endif
    return add_words(at, nbytes);
}

/* Keeps the compiler from leaving out what nobody looks at. */
static void is_used(const void *at) {
    __asm__ volatile("" : : "r"(at) : "memory");
}

/* ---- in CPU time ---- */

double bench_copy(const bench_piece *pieces, size_t n) {
    double start = bench_cpu_now();
    for (size_t i = 0; i < n; i++) {
        memcpy(pieces[i].to, pieces[i].from, pieces[i].nbytes);
        is_used(pieces[i].to);
    }
    return bench_cpu_now() - start;
}

double bench_read(const unsigned char *at, size_t nbytes) {
    double start = bench_cpu_now();
    uint64_t total = bench_sum_words(at, nbytes);
    is_used(&total);
    return bench_cpu_now() - start;
}

double bench_fill(unsigned char *at, size_t nbytes, int value) {
    double start = bench_cpu_now();
    memset(at, value, nbytes);
    is_used(at);
    return bench_cpu_now() - start;
}

double bench_churn(size_t n) {
    enum { HELD = 64 };
    void *held[HELD] = {0};
    double start = bench_cpu_now();
    for (size_t i = 0; i < n; i++) {
        void **at = &held[i % HELD];
        free(*at);
        *at = malloc(16 + i % 1000);
        is_used(*at);
    }
    double seconds = bench_cpu_now() - start;
    for (size_t i = 0; i < HELD; i++) {
        free(held[i]);
    }
    return seconds;
}

/* ---- by threads ---- */

typedef struct job {
    unsigned char *to;
    const unsigned char *from;
    const bench_range *ranges;
    size_t n_ranges;
    size_t nbytes, step;
    int value;
    _Atomic uint64_t sum;
} job;

typedef struct share {
    size_t begin, end;
} share;

/* The part `index` of n of `nbytes`, in whole steps; the last one has the rest. */
static share share_of(size_t nbytes, size_t step, int index, int n) {
    size_t each = nbytes / step / (size_t)n * step;
    size_t begin = each * (size_t)index;
    return (share){begin, index == n - 1 ? nbytes : begin + each};
}

static int copy_share(void *arg, int index, int n) {
    job *j = arg;
    share s = share_of(j->nbytes, CACHE_LINE, index, n);
    memcpy(j->to + s.begin, j->from + s.begin, s.end - s.begin);
    return 0;
}

static int fill_share(void *arg, int index, int n) {
    job *j = arg;
    share s = share_of(j->nbytes, CACHE_LINE, index, n);
    memset(j->to + s.begin, j->value, s.end - s.begin);
    return 0;
}

static int touch_share(void *arg, int index, int n) {
    job *j = arg;
    share s = share_of(j->nbytes, j->step, index, n);
    for (size_t i = s.begin; i < s.end; i += j->step) {
        *(volatile unsigned char *)(j->to + i) = 1;
    }
    return 0;
}

static int scan_share(void *arg, int index, int n) {
    job *j = arg;
    share s = share_of(j->nbytes, 8, index, n);
    uint64_t total = 0;
    size_t begin = 0;
    for (size_t i = 0; i < j->n_ranges; begin += j->ranges[i++].nbytes) {
        size_t end = begin + j->ranges[i].nbytes;
        size_t from = s.begin > begin ? s.begin : begin, to = s.end < end ? s.end : end;
        if (from < to) {
            total += bench_sum_words(j->ranges[i].at + (from - begin), to - from);
        }
    }
    j->sum += total;
    return 0;
}

static double run(bench_work *work, job *j, const int *cpus, int n_cpus) {
    double start = bench_now();
    int failed = bench_run_team(work, j, n_cpus, cpus, n_cpus);
    double seconds = bench_now() - start;
    errno = failed;
    return failed ? -1 : seconds;
}

double bench_copy_by_threads(unsigned char *to, const unsigned char *from, size_t nbytes,
                             const int *cpus, int n_cpus) {
    job j = {.to = to, .from = from, .nbytes = nbytes};
    return run(copy_share, &j, cpus, n_cpus);
}

double bench_fill_by_threads(unsigned char *at, size_t nbytes, int value, const int *cpus,
                             int n_cpus) {
    job j = {.to = at, .nbytes = nbytes, .value = value};
    return run(fill_share, &j, cpus, n_cpus);
}

/* Touches one byte every `step` of a new mapping, which is made before, and dropped after. */
double bench_touch(size_t nbytes, size_t step, int pages, const int *cpus, int n_cpus) {
    bench_mapping memory;
    int failed = step ? bench_map(&memory, nbytes, step, (enum bench_pages)pages) : EINVAL;
    if (failed) {
        errno = failed;
        return -1;
    }
    job j = {.to = memory.at, .nbytes = nbytes, .step = step};
    double seconds = run(touch_share, &j, cpus, n_cpus);
    failed = errno;
    bench_unmap(&memory);
    errno = failed;
    return seconds;
}

/* Reads ranges, whose sizes are multiples of 8, and adds their words up. */
double bench_scan(const bench_range *ranges, size_t n_ranges, const int *cpus, int n_cpus,
                  uint64_t *sum) {
    job j = {.ranges = ranges, .n_ranges = n_ranges};
    for (size_t i = 0; i < n_ranges; i++) {
        j.nbytes += ranges[i].nbytes;
    }
    double seconds = run(scan_share, &j, cpus, n_cpus);
    *sum = j.sum;
    return seconds;
}
