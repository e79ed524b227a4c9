/* The ways to bring a file into memory that a program in C has. Each returns seconds on the wall,
 * or -1 with errno set; what it mapped is unmapped after the clock has stopped. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "memory.h"
#include "team.h"
#include "uring.h"

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

enum { LINE = 64, HUGE_PAGE = 2 << 20 };
enum way { WAY_READ, WAY_PREAD, WAY_MEMCPY, WAY_STREAM, WAY_TOUCH, WAY_URING };

/* Beside the file and the CPUs: how it is loaded. plain.py declares the same. */
typedef struct bench_loading {
    int way, direct, populate, n_threads;
    size_t request_nbytes;
    unsigned depth; /* of io_uring */
} bench_loading;

typedef struct reading {
    int fd;
    const bench_loading *how;
    size_t page;
    size_t nbytes;
    unsigned char *to;         /* NULL for WAY_TOUCH */
    const unsigned char *from; /* of the ways that map */
    atomic_size_t next;        /* where the next request begins */
} reading;

BENCH_EXPORT double bench_map_and_scan(const char *path, size_t offset, int populate,
                                       const int *cpus, int n_cpus, uint64_t *sum);
BENCH_EXPORT double bench_load(const char *path, size_t offset, const bench_loading *how,
                               const int *cpus, int n_cpus, uint64_t *sum);
BENCH_EXPORT double bench_cached_bytes(const char *path);

static double fail(int error) {
    errno = error;
    return -1;
}

/* Opens a file of more than `offset` bytes; returns 0 or an errno. */
static int open_file(const char *path, int flags, size_t offset, int *fd, size_t *nbytes) {
    struct stat info;
    *fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (*fd < 0) {
        return errno;
    }
    int failed = fstat(*fd, &info) ? errno : (size_t)info.st_size <= offset ? EINVAL : 0;
    if (failed) {
        close(*fd);
        return failed;
    }
    *nbytes = (size_t)info.st_size;
    return 0;
}

/* Maps a file and reads the words from `offset` on. */
double bench_map_and_scan(const char *path, size_t offset, int populate, const int *cpus,
                          int n_cpus, uint64_t *sum) {
    double start = bench_now();
    int fd;
    size_t nbytes = 0;
    int failed = open_file(path, 0, offset, &fd, &nbytes);
    if (failed) {
        return fail(failed);
    }
    unsigned char *at =
        mmap(0, nbytes, PROT_READ, MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, 0);
    failed = at == MAP_FAILED ? errno : 0;
    close(fd);
    if (failed) {
        return fail(failed);
    }
    bench_range all = {at + offset, nbytes - offset};
    failed = bench_scan(&all, 1, cpus, n_cpus, sum) < 0 ? errno : 0;
    double seconds = bench_now() - start;
    munmap(at, nbytes);
    return failed ? fail(failed) : seconds;
}

/* ---- reading a file into memory ---- */

/* Past the caches, from and to addresses that are multiples of 64. */
static int stream(unsigned char *to, const unsigned char *from, size_t nbytes) {
#ifdef __SSE2__
    size_t i = 0;
    for (; i + LINE <= nbytes; i += LINE) {
        const __m128i *source = (const __m128i *)(from + i);
        __m128i *target = (__m128i *)(to + i);
        __m128i a = _mm_load_si128(source), b = _mm_load_si128(source + 1);
        __m128i c = _mm_load_si128(source + 2), d = _mm_load_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
    memcpy(to + i, from + i, nbytes - i);
    return 0;
#else
    (void)to, (void)from, (void)nbytes;
    return ENOSYS;
#endif
}

static int load_part(reading *r, size_t begin, size_t end) {
    switch (r->how->way) {
    case WAY_MEMCPY:
        memcpy(r->to + begin, r->from + begin, end - begin);
        return 0;
    case WAY_STREAM:
        return stream(r->to + begin, r->from + begin, end - begin);
    case WAY_TOUCH:
        for (size_t i = begin; i < end; i += r->page) {
            (void)*(const volatile unsigned char *)(r->from + i);
        }
        return 0;
    default:
        return bench_read_part(r->fd, r->to, begin, end, r->how->direct ? r->page : 0);
    }
}

static int load_share(void *job, int index, int n) {
    reading *r = job;
    size_t request = r->how->request_nbytes;
    (void)index, (void)n;
    for (;;) {
        size_t begin = atomic_fetch_add(&r->next, request);
        if (begin >= r->nbytes) {
            return 0;
        }
        size_t left = r->nbytes - begin;
        int failed = load_part(r, begin, begin + (left < request ? left : request));
        if (failed) {
            return failed;
        }
    }
}

/* read() as it comes: one after the other, from where the last one ended. */
static int read_plain(reading *r) {
    size_t done = 0, request = r->how->request_nbytes;
    while (done < r->nbytes) {
        size_t left = r->nbytes - done;
        ssize_t got = read(r->fd, r->to + done, left < request ? left : request);
        if (got <= 0) {
            return got ? errno : EIO;
        }
        done += (size_t)got;
    }
    return 0;
}

static int populate_share(void *job, int index, int n) {
    reading *r = job;
    size_t share = (r->nbytes / (size_t)n + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    size_t begin = share * (size_t)index;
    size_t end = begin + share < r->nbytes ? begin + share : r->nbytes;
    return begin < end && madvise(r->to + begin, end - begin, MADV_POPULATE_WRITE) ? errno : 0;
}

static int load_all(reading *r, const int *cpus, int n_cpus) {
    const bench_loading *how = r->how;
    int failed = how->populate ? bench_run_team(populate_share, r, n_cpus, cpus, n_cpus) : 0;
    if (failed) {
        return failed;
    }
    if (how->way == WAY_READ) {
        return read_plain(r);
    }
    if (how->way == WAY_URING) {
        return bench_read_uring(r->fd, r->to, r->nbytes, how->request_nbytes, how->depth,
                                how->direct ? r->page : 0);
    }
    return bench_run_team(load_share, r, how->n_threads, cpus, n_cpus);
}

/* Brings all of a file into new memory on transparent huge pages, or, for WAY_TOUCH, into a mapping
 * of the file. *sum is of its words from `offset` on, made after the clock has stopped. */
double bench_load(const char *path, size_t offset, const bench_loading *how, const int *cpus,
                  int n_cpus, uint64_t *sum) {
    reading r = {.how = how, .page = (size_t)sysconf(_SC_PAGESIZE)};
    bench_mapping memory = {0};
    int mapped = how->way == WAY_MEMCPY || how->way == WAY_STREAM || how->way == WAY_TOUCH;
    if (how->request_nbytes == 0 || how->request_nbytes % r.page) {
        return fail(EINVAL);
    }
    double start = bench_now(), seconds = 0;
    int failed = open_file(path, how->direct ? O_DIRECT : 0, offset, &r.fd, &r.nbytes);
    if (failed) {
        return fail(failed);
    }
    if (mapped) {
        void *from = mmap(0, r.nbytes, PROT_READ, MAP_SHARED, r.fd, 0);
        failed = from == MAP_FAILED ? errno : 0;
        r.from = failed ? 0 : from;
    }
    if (!failed && how->way != WAY_TOUCH) {
        size_t room = (r.nbytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        failed = bench_map(&memory, room, HUGE_PAGE, BENCH_THP);
        r.to = memory.at;
    }
    if (!failed) {
        failed = load_all(&r, cpus, n_cpus);
        seconds = bench_now() - start;
    }
    if (!failed) {
        *sum = bench_sum_words((r.to ? r.to : r.from) + offset, r.nbytes - offset);
    }
    if (r.from) {
        munmap((void *)r.from, r.nbytes);
    }
    if (r.to) {
        bench_unmap(&memory);
    }
    close(r.fd);
    return failed ? fail(failed) : seconds;
}

/* ---- the page cache ---- */

/* Bytes of a file that are in the page cache, to whole pages; -1 with errno set. */
double bench_cached_bytes(const char *path) {
    size_t nbytes = 0, page = (size_t)sysconf(_SC_PAGESIZE);
    int fd;
    int failed = open_file(path, 0, 0, &fd, &nbytes);
    if (failed) {
        return fail(failed);
    }
    void *at = mmap(0, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    failed = at == MAP_FAILED ? errno : 0;
    close(fd);
    if (failed) {
        return fail(failed);
    }
    size_t n_pages = (nbytes + page - 1) / page, n_there = 0;
    unsigned char *pages = malloc(n_pages);
    failed = pages == 0 ? ENOMEM : mincore(at, nbytes, pages) ? errno : 0;
    for (size_t i = 0; !failed && i < n_pages; i++) {
        n_there += pages[i] & 1;
    }
    free(pages);
    munmap(at, nbytes);
    return failed ? fail(failed) : (double)(n_there * page);
}
