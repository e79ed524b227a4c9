#define _GNU_SOURCE
#include "uring.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__has_include) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

static size_t whole_pages(size_t nbytes, size_t page) {
    return page ? (nbytes + page - 1) / page * page : nbytes;
}

int bench_read_part(int fd, unsigned char *to, size_t begin, size_t end, size_t page) {
    while (begin < end) {
        ssize_t got = pread(fd, to + begin, whole_pages(end - begin, page), (off_t)begin);
        if (got <= 0) {
            return got ? errno : EIO;
        }
        begin += (size_t)got;
    }
    return 0;
}

/* Headers of Linux before 5.6 have no IORING_OP_READ, which is no macro; this one came with it. */
#ifdef IORING_FEAT_RW_CUR_POS

typedef struct ring {
    int fd;
    unsigned char *rings;
    size_t rings_nbytes;
    struct io_uring_sqe *entries;
    size_t entries_nbytes;
    struct io_uring_params p;
    unsigned tail, pending;
} ring;

static unsigned *ring_word(ring *u, unsigned offset) {
    return (unsigned *)(u->rings + offset);
}

static void ring_close(ring *u) {
    if (u->entries != MAP_FAILED) {
        munmap(u->entries, u->entries_nbytes);
    }
    if (u->rings != MAP_FAILED) {
        munmap(u->rings, u->rings_nbytes);
    }
    close(u->fd);
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
    u->entries_nbytes = u->p.sq_entries * sizeof *u->entries;
    u->rings = mmap(0, u->rings_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd,
                    IORING_OFF_SQ_RING);
    u->entries = mmap(0, u->entries_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      u->fd, IORING_OFF_SQES);
    if (u->rings == MAP_FAILED || u->entries == MAP_FAILED) {
        ring_close(u);
        return ENOMEM;
    }
    return 0;
}

static void ring_read(ring *u, const struct io_uring_sqe *entry) {
    unsigned slot = u->tail & *ring_word(u, u->p.sq_off.ring_mask);
    u->entries[slot] = *entry;
    ring_word(u, u->p.sq_off.array)[slot] = slot;
    u->tail++;
    u->pending++;
    __atomic_store_n(ring_word(u, u->p.sq_off.tail), u->tail, __ATOMIC_RELEASE);
}

int bench_read_uring(int fd, unsigned char *to, size_t nbytes, size_t request_nbytes,
                     unsigned depth, size_t page) {
    ring u;
    int failed = ring_open(&u, depth);
    if (failed) {
        return failed;
    }
    size_t next = 0, done = 0;
    unsigned under_way = 0;
    while (!failed && done < nbytes) {
        for (; under_way < depth && next < nbytes; under_way++) {
            size_t left = nbytes - next;
            size_t want = whole_pages(left < request_nbytes ? left : request_nbytes, page);
            ring_read(&u, &(struct io_uring_sqe){
                              .opcode = IORING_OP_READ,
                              .fd = fd,
                              .addr = (uint64_t)(uintptr_t)(to + next),
                              .len = (unsigned)want,
                              .off = next,
                              .user_data = next,
                          });
            next += request_nbytes;
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
        for (; !failed && head != tail; head++, under_way--) {
            struct io_uring_cqe *event = &events[head & *ring_word(&u, u.p.cq_off.ring_mask)];
            size_t begin = event->user_data, left = nbytes - begin;
            size_t end = begin + (left < request_nbytes ? left : request_nbytes);
            failed = event->res < 0 ? -event->res : 0;
            if (!failed && begin + (size_t)event->res < end) {
                failed = bench_read_part(fd, to, begin + (size_t)event->res, end, page);
            }
            done += end - begin;
        }
        __atomic_store_n(ring_word(&u, u.p.cq_off.head), head, __ATOMIC_RELEASE);
    }
    ring_close(&u);
    return failed;
}

#else

int bench_read_uring(int fd, unsigned char *to, size_t nbytes, size_t request_nbytes,
                     unsigned depth, size_t page) {
    (void)fd, (void)to, (void)nbytes, (void)request_nbytes, (void)depth, (void)page;
    return ENOSYS;
}

#endif
