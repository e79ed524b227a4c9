/* What load.py compares with: the ways to bring a file into memory that a program in C has. Each
 * returns seconds, or -1 with errno set; what it mapped is unmapped after the clock has stopped. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 64, HUGE = 2 << 20, PAGE = 4096 };

typedef struct range {
    const unsigned char *at;
    size_t nbytes;
} range;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- threads, pinned ---- */

typedef struct team {
    int (*work)(void *job, int index, int n); /* 0, or an errno */
    void *job;
    int n;
    const int *cpus; /* n_cpus of them; thread i runs on i modulo n_cpus */
    int n_cpus;
    atomic_int failed;
} team;

typedef struct member {
    team *team;
    int index;
    pthread_t thread;
} member;

static void *run_member(void *arg) {
    member *m = arg;
    team *t = m->team;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(t->cpus[m->index % t->n_cpus], &set);
    sched_setaffinity(0, sizeof set, &set);
    int failed = t->work(t->job, m->index, t->n);
    if (failed) {
        t->failed = failed;
    }
    return 0;
}

/* 0, or an errno; with one thread the caller is it, as it is. */
static int run_team(team *t) {
    if (t->n == 1) {
        return t->work(t->job, 0, 1);
    }
    member members[MAX_THREADS];
    int started = 0;
    for (; started < t->n; started++) {
        members[started] = (member){.team = t, .index = started};
        int failed = pthread_create(&members[started].thread, 0, run_member, &members[started]);
        if (failed) {
            t->failed = failed;
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(members[i].thread, 0);
    }
    return t->failed;
}

/* ---- reading every byte ---- */

typedef struct scanning {
    const range *ranges;
    size_t n_ranges;
    size_t total;
    _Atomic uint64_t sum;
} scanning;

static uint64_t sum_words(const unsigned char *at, size_t nbytes) {
    uint64_t total = 0;
    for (size_t i = 0; i + 8 <= nbytes; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        total += word;
    }
    return total;
}

static int scan_share(void *job, int index, int n) {
    scanning *s = job;
    size_t share = s->total / 8 / (size_t)n * 8;
    size_t first = share * (size_t)index;
    size_t last = index == n - 1 ? s->total : first + share;
    uint64_t total = 0;
    size_t begin = 0;
    for (size_t i = 0; i < s->n_ranges; begin += s->ranges[i++].nbytes) {
        size_t end = begin + s->ranges[i].nbytes;
        size_t from = first > begin ? first : begin, to = last < end ? last : end;
        if (from < to) {
            total += sum_words(s->ranges[i].at + (from - begin), to - from);
        }
    }
    s->sum += total;
    return 0;
}

/* Reads all ranges as 8-byte words (their sizes are multiples of 8) and adds them up. */
double scan(const range *ranges, size_t n_ranges, int n_threads, const int *cpus, uint64_t *sum) {
    double start = now();
    scanning s = {.ranges = ranges, .n_ranges = n_ranges};
    for (size_t i = 0; i < n_ranges; i++) {
        s.total += ranges[i].nbytes;
    }
    team t = {scan_share, &s, n_threads, cpus, n_threads, 0};
    errno = run_team(&t);
    *sum = s.sum;
    return errno ? -1 : now() - start;
}

/* ---- mapping the file ---- */

/* Maps a file and reads the words from `offset` on. */
double map_and_scan(const char *path, size_t offset, int populate, int n_threads, const int *cpus,
                    uint64_t *sum) {
    double start = now();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) {
        return -1;
    }
    size_t nbytes = (size_t)info.st_size;
    unsigned char *at =
        mmap(0, nbytes, PROT_READ, MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, 0);
    close(fd);
    if (at == MAP_FAILED) {
        return -1;
    }
    range all = {at + offset, nbytes - offset};
    double scanned = scan(&all, 1, n_threads, cpus, sum);
    double seconds = now() - start;
    munmap(at, nbytes);
    return scanned < 0 ? -1 : seconds;
}

/* ---- reading the file into memory ---- */

enum way { WAY_READ, WAY_PREAD, WAY_MEMCPY, WAY_STREAM, WAY_TOUCH, WAY_URING };

typedef struct reading {
    int fd, direct;
    enum way way;
    size_t nbytes, request_nbytes;
    unsigned depth;            /* of io_uring */
    unsigned char *to;         /* NULL for WAY_TOUCH */
    const unsigned char *from; /* of the ways that map */
    atomic_size_t next;        /* where the next request begins */
} reading;

static int read_request(reading *r, size_t begin, size_t end) {
    while (begin < end) {
        size_t want = end - begin;
        if (r->direct) {
            want = (want + PAGE - 1) / PAGE * PAGE;
        }
        ssize_t got = pread(r->fd, r->to + begin, want, (off_t)begin);
        if (got <= 0) {
            return got ? errno : EIO;
        }
        begin += (size_t)got;
    }
    return 0;
}

/* Past the caches: 64 bytes at a time, from and to addresses that are multiples of 64. */
__attribute__((target("avx"))) static void stream(unsigned char *to, const unsigned char *from,
                                                  size_t nbytes) {
    size_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        __m256i a = _mm256_load_si256((const __m256i *)(from + i));
        __m256i b = _mm256_load_si256((const __m256i *)(from + i + 32));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
    }
    _mm_sfence();
    memcpy(to + i, from + i, nbytes - i);
}

static int read_share(void *job, int index, int n) {
    reading *r = job;
    (void)index;
    (void)n;
    for (;;) {
        size_t begin = atomic_fetch_add(&r->next, r->request_nbytes);
        if (begin >= r->nbytes) {
            return 0;
        }
        size_t end = r->nbytes - begin < r->request_nbytes ? r->nbytes : begin + r->request_nbytes;
        int failed = 0;
        if (r->way == WAY_MEMCPY) {
            memcpy(r->to + begin, r->from + begin, end - begin);
        } else if (r->way == WAY_STREAM) {
            stream(r->to + begin, r->from + begin, end - begin);
        } else if (r->way == WAY_TOUCH) {
            for (size_t i = begin; i < end; i += PAGE) {
                (void)*(const volatile unsigned char *)(r->from + i);
            }
        } else {
            failed = read_request(r, begin, end);
        }
        if (failed) {
            return failed;
        }
    }
}

/* read() as it comes: one after the other, from where the last one ended. */
static int read_plain(reading *r) {
    size_t done = 0;
    while (done < r->nbytes) {
        size_t want = r->nbytes - done < r->request_nbytes ? r->nbytes - done : r->request_nbytes;
        ssize_t got = read(r->fd, r->to + done, want);
        if (got <= 0) {
            return got ? errno : EIO;
        }
        done += (size_t)got;
    }
    return 0;
}

/* ---- io_uring, without its library ---- */

typedef struct ring {
    int fd;
    unsigned char *rings;
    size_t rings_nbytes;
    struct io_uring_sqe *entries;
    struct io_uring_params p;
    unsigned tail, pending;
} ring;

static unsigned *ring_word(ring *u, unsigned offset) {
    return (unsigned *)(u->rings + offset);
}

static int ring_open(ring *u, unsigned depth) {
    *u = (ring){0};
    u->fd = (int)syscall(SYS_io_uring_setup, depth, &u->p);
    if (u->fd < 0) {
        return errno;
    }
    size_t submitted = u->p.sq_off.array + u->p.sq_entries * sizeof(unsigned);
    size_t completed = u->p.cq_off.cqes + u->p.cq_entries * sizeof(struct io_uring_cqe);
    u->rings_nbytes = submitted > completed ? submitted : completed;
    u->rings = mmap(0, u->rings_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd,
                    IORING_OFF_SQ_RING);
    u->entries = mmap(0, u->p.sq_entries * sizeof *u->entries, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQES);
    return u->rings == MAP_FAILED || u->entries == MAP_FAILED ? errno : 0;
}

static void ring_close(ring *u) {
    munmap(u->entries, u->p.sq_entries * sizeof *u->entries);
    munmap(u->rings, u->rings_nbytes);
    close(u->fd);
}

static void ring_read(ring *u, reading *r, size_t begin) {
    size_t left = r->nbytes - begin;
    size_t want = left < r->request_nbytes ? left : r->request_nbytes;
    if (r->direct) {
        want = (want + PAGE - 1) / PAGE * PAGE;
    }
    unsigned slot = u->tail & *ring_word(u, u->p.sq_off.ring_mask);
    u->entries[slot] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ,
        .fd = r->fd,
        .addr = (uint64_t)(uintptr_t)(r->to + begin),
        .len = (unsigned)want,
        .off = begin,
        .user_data = begin,
    };
    ring_word(u, u->p.sq_off.array)[slot] = slot;
    u->tail++;
    u->pending++;
    __atomic_store_n(ring_word(u, u->p.sq_off.tail), u->tail, __ATOMIC_RELEASE);
}

/* Keeps `depth` reads under way. A read that ends early is gone on with. */
static int read_uring(reading *r) {
    ring u;
    int failed = ring_open(&u, r->depth);
    size_t next = 0, done = 0;
    unsigned under_way = 0;
    while (!failed && done < r->nbytes) {
        for (; under_way < r->depth && next < r->nbytes; under_way++) {
            ring_read(&u, r, next);
            next += r->request_nbytes;
        }
        int taken =
            (int)syscall(SYS_io_uring_enter, u.fd, u.pending, 1, IORING_ENTER_GETEVENTS, 0, 0);
        if (taken < 0) {
            failed = errno == EINTR ? 0 : errno;
            continue;
        }
        u.pending -= (unsigned)taken;
        unsigned head = *ring_word(&u, u.p.cq_off.head);
        unsigned tail = __atomic_load_n(ring_word(&u, u.p.cq_off.tail), __ATOMIC_ACQUIRE);
        struct io_uring_cqe *events = (void *)(u.rings + u.p.cq_off.cqes);
        for (; head != tail; head++) {
            struct io_uring_cqe *event = &events[head & *ring_word(&u, u.p.cq_off.ring_mask)];
            if (event->res <= 0) {
                failed = event->res ? -event->res : EIO;
                break;
            }
            size_t begin = event->user_data, got = (size_t)event->res;
            size_t end = begin - begin % r->request_nbytes + r->request_nbytes;
            end = end < r->nbytes ? end : r->nbytes;
            got = got < end - begin ? got : end - begin;
            done += got;
            if (begin + got < end) {
                failed = read_request(r, begin + got, end);
                done += end - begin - got;
            }
            under_way--;
        }
        __atomic_store_n(ring_word(&u, u.p.cq_off.head), head, __ATOMIC_RELEASE);
    }
    ring_close(&u);
    return failed;
}

/* ---- one load, timed ---- */

static int populate_share(void *job, int index, int n) {
    reading *r = job;
    size_t share = (r->nbytes / (size_t)n + HUGE - 1) / HUGE * HUGE;
    size_t begin = share * (size_t)index;
    size_t end = begin + share < r->nbytes ? begin + share : r->nbytes;
    return begin < end && madvise(r->to + begin, end - begin, MADV_POPULATE_WRITE) ? errno : 0;
}

static int load_into(reading *r, int n_threads, int populate, const int *cpus, int n_cpus) {
    int failed = 0;
    if (populate) {
        team t = {populate_share, r, n_cpus, cpus, n_cpus, 0};
        failed = run_team(&t);
    }
    if (failed) {
        return failed;
    }
    if (r->way == WAY_READ) {
        return read_plain(r);
    }
    if (r->way == WAY_URING) {
        return read_uring(r);
    }
    team t = {read_share, r, n_threads, cpus, n_cpus, 0};
    return run_team(&t);
}

/* Opens a file and brings all of it into new memory on transparent huge pages, or, for WAY_TOUCH,
 * into a mapping of the file. *sum is of its words from `offset` on, made after the clock stopped.
 */
double load(const char *path, size_t offset, int way, int direct, int populate, int n_threads,
            size_t request_nbytes, unsigned depth, const int *cpus, int n_cpus, uint64_t *sum) {
    double start = now();
    int fd = open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) {
        return -1;
    }
    reading r = {.fd = fd,
                 .direct = direct,
                 .way = (enum way)way,
                 .nbytes = (size_t)info.st_size,
                 .request_nbytes = request_nbytes,
                 .depth = depth};
    int mapped = way == WAY_MEMCPY || way == WAY_STREAM || way == WAY_TOUCH;
    if (mapped) {
        r.from = mmap(0, r.nbytes, PROT_READ, MAP_SHARED, fd, 0);
        if (r.from == MAP_FAILED) {
            return -1;
        }
    }
    size_t room = 0;
    unsigned char *memory = 0;
    if (way != WAY_TOUCH) {
        room = (r.nbytes + HUGE - 1) / HUGE * HUGE + HUGE;
        memory = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            return -1;
        }
        r.to = (unsigned char *)(((uintptr_t)memory + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
        madvise(r.to, room - HUGE, MADV_HUGEPAGE);
    }
    int failed = load_into(&r, n_threads, populate, cpus, n_cpus);
    double seconds = now() - start;
    *sum = sum_words((r.to ? r.to : r.from) + offset, r.nbytes - offset);
    if (mapped) {
        munmap((void *)r.from, r.nbytes);
    }
    if (memory) {
        munmap(memory, room);
    }
    close(fd);
    errno = failed;
    return failed ? -1 : seconds;
}

/* ---- the state of memory and of the page cache ---- */

/* Bytes of a file that are in the page cache, to whole pages; -1 with errno set. */
double cached_bytes(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) {
        return -1;
    }
    size_t nbytes = (size_t)info.st_size, n_pages = (nbytes + PAGE - 1) / PAGE;
    void *at = mmap(0, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    unsigned char *pages = malloc(n_pages);
    double found = 0;
    if (at == MAP_FAILED || pages == 0 || mincore(at, nbytes, pages)) {
        found = -1;
    }
    for (size_t i = 0; found >= 0 && i < n_pages; i++) {
        found += (pages[i] & 1) * (double)PAGE;
    }
    munmap(at, nbytes);
    free(pages);
    return found;
}

/* Touches and frees so much on huge pages: memory that was free for seconds is the host's. */
double touch(size_t nbytes, const int *cpus, int n_cpus) {
    double start = now();
    size_t room = nbytes + HUGE;
    unsigned char *at = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        return -1;
    }
    reading r = {.to = (unsigned char *)(((uintptr_t)at + HUGE - 1) & ~(uintptr_t)(HUGE - 1)),
                 .nbytes = nbytes};
    madvise(r.to, nbytes, MADV_HUGEPAGE);
    team t = {populate_share, &r, n_cpus, cpus, n_cpus, 0};
    int failed = run_team(&t);
    munmap(at, room);
    errno = failed;
    return failed ? -1 : now() - start;
}
