/* Reads under way: the kernel's io_uring, or as many threads as reads, which sleep in pread. */
#include "pieces/reads.h"

#include "base/stats.h"
#include "base/status.h"
#include "os/lock.h"
#include "os/os.h"

#include <errno.h>
#include <stdatomic.h>

enum { DEFAULT_READS = 64, MOST_THREADS = 16 };

typedef struct asked_read {
    int fd;
    void *to;
    size_t nbytes;
    uint64_t offset;
} asked_read;

/* Numbers of reads in the order in which they were given: at most n_reads. */
typedef struct id_queue {
    uint32_t *ids;
    uint32_t first, n;
} id_queue;

struct um__reads {
    uint32_t n_reads;
    bool has_ring;
    um__ring ring;
    /* Of threads: */
    um__lock lock;
    bool ends; /* with the lock, as all up to n_threads */
    id_queue asked, ended;
    asked_read *reads;
    um__read_end *ends_of;
    _Atomic uint32_t n_asked, n_ended; /* words to sleep on */
    uint32_t n_threads;
    um__os_thread threads[MOST_THREADS];
};

/* ---- threads ---- */

static void queue_put(const um__reads *reads, id_queue *queue, uint32_t id) {
    queue->ids[(queue->first + queue->n++) % reads->n_reads] = id;
}

static bool queue_take(const um__reads *reads, id_queue *queue, uint32_t *out) {
    if (queue->n == 0) {
        return false;
    }
    *out = queue->ids[queue->first];
    queue->first = (queue->first + 1) % reads->n_reads;
    queue->n--;
    return true;
}

static void *thread_run(void *arg) {
    um__reads *reads = arg;
    uint32_t id;
    um__lock_take(&reads->lock);
    while (!reads->ends) {
        if (!queue_take(reads, &reads->asked, &id)) {
            uint32_t n_asked = atomic_load(&reads->n_asked);
            um__lock_drop(&reads->lock);
            um__os_wait(&reads->n_asked, n_asked, 60000);
            um__lock_take(&reads->lock);
            continue;
        }
        asked_read read = reads->reads[id];
        um__lock_drop(&reads->lock);
        um__read_end end = {.id = id};
        end.os_errno = um__os_pread(read.fd, read.to, read.nbytes, read.offset, &end.nbytes);
        um__lock_take(&reads->lock);
        reads->ends_of[id] = end;
        queue_put(reads, &reads->ended, id);
        atomic_fetch_add(&reads->n_ended, 1);
        um__os_wake(&reads->n_ended);
    }
    um__lock_drop(&reads->lock);
    return NULL;
}

static void free_reads(um__reads *reads) {
    um__heap_free(reads->asked.ids);
    um__heap_free(reads->ended.ids);
    um__heap_free(reads->reads);
    um__heap_free(reads->ends_of);
    um__heap_free(reads);
}

static void wake_threads(um__reads *reads) {
    atomic_fetch_add(&reads->n_asked, 1);
    um__os_wake(&reads->n_asked);
}

static void end_threads(um__reads *reads) {
    um__lock_take(&reads->lock);
    reads->ends = true;
    um__lock_drop(&reads->lock);
    wake_threads(reads);
    while (reads->n_threads > 0) {
        um__os_thread_join(reads->threads[--reads->n_threads]);
    }
}

/* errors: UM_E_OS, UM_E_NOMEM. */
static um_status start_threads(um__reads *reads, um_error *err) {
    uint32_t n = reads->n_reads < MOST_THREADS ? reads->n_reads : MOST_THREADS;
    reads->n_reads = n;
    reads->asked.ids = um__heap_alloc(n, sizeof(uint32_t));
    reads->ended.ids = um__heap_alloc(n, sizeof(uint32_t));
    reads->reads = um__heap_alloc(n, sizeof(asked_read));
    reads->ends_of = um__heap_alloc(n, sizeof(um__read_end));
    UM__RETURN_IF(reads->asked.ids == NULL || reads->ended.ids == NULL || reads->reads == NULL ||
                      reads->ends_of == NULL,
                  um__fail_nomem(err, ENOMEM, n * sizeof(asked_read), "calloc"));
    for (; reads->n_threads < n; reads->n_threads++) {
        int os_errno = um__os_thread_start(&reads->threads[reads->n_threads], thread_run, reads);
        if (os_errno != 0) {
            end_threads(reads);
            return um__fail_os(err, os_errno, 0, "pthread_create");
        }
    }
    return UM_OK;
}

/* ---- both ---- */

um_status um__reads_open(um__reads **out, um_pieces_io io, uint32_t n_reads, um_error *err) {
    um__reads *reads = um__heap_alloc(1, sizeof *reads);
    UM__RETURN_IF(reads == NULL, um__fail_nomem(err, ENOMEM, sizeof *reads, "calloc"));
    reads->n_reads = n_reads == 0 ? DEFAULT_READS : n_reads;
    um_status status = UM_OK;
    if (io != UM_PIECES_IO_THREADS) {
        int os_errno = um__ring_open(&reads->ring, reads->n_reads);
        reads->has_ring = os_errno == 0;
        if (os_errno != 0 && io == UM_PIECES_IO_RING) {
            status = um__fail_os(err, os_errno, 0, "io_uring_setup, mmap or madvise");
        }
    }
    if (status == UM_OK && !reads->has_ring) {
        status = start_threads(reads, err);
    }
    if (status != UM_OK) {
        free_reads(reads);
        return status;
    }
    *out = reads;
    return UM_OK;
}

uint32_t um__reads_limit(const um__reads *reads) {
    return reads->n_reads;
}

bool um__reads_has_ring(const um__reads *reads) {
    return reads->has_ring;
}

void um__reads_put(um__reads *reads, uint32_t id, int fd, void *to, size_t nbytes,
                   uint64_t offset) {
    if (reads->has_ring) {
        um__ring_put(&reads->ring, id, fd, to, nbytes, offset);
        return;
    }
    um__lock_take(&reads->lock);
    reads->reads[id] = (asked_read){.fd = fd, .to = to, .nbytes = nbytes, .offset = offset};
    queue_put(reads, &reads->asked, id);
    um__lock_drop(&reads->lock);
}

/* Enters the ring. Without memory for more reads, the kernel wants some to end first. */
static int enter_ring(um__reads *reads, unsigned n_least) {
    int os_errno = um__ring_enter(&reads->ring, n_least);
    if (os_errno == EAGAIN || os_errno == EBUSY) {
        os_errno = um__os_wait(&reads->n_ended, 0, 1);
        os_errno = os_errno == ETIMEDOUT ? 0 : os_errno;
    }
    return os_errno;
}

int um__reads_begin(um__reads *reads) {
    if (reads->has_ring) {
        return enter_ring(reads, 0);
    }
    um__lock_take(&reads->lock);
    bool is_asked = reads->asked.n > 0;
    um__lock_drop(&reads->lock);
    if (is_asked) {
        wake_threads(reads);
    }
    return 0;
}

int um__reads_wait(um__reads *reads) {
    if (reads->has_ring) {
        return enter_ring(reads, 1);
    }
    um__reads_begin(reads);
    um__lock_take(&reads->lock);
    uint32_t n_ended = atomic_load(&reads->n_ended);
    bool is_ended = reads->ended.n > 0;
    um__lock_drop(&reads->lock);
    int os_errno = is_ended ? 0 : um__os_wait(&reads->n_ended, n_ended, 1000);
    return os_errno == EAGAIN || os_errno == ETIMEDOUT ? 0 : os_errno;
}

bool um__reads_take(um__reads *reads, um__read_end *out) {
    if (reads->has_ring) {
        return um__ring_take(&reads->ring, out);
    }
    uint32_t id;
    um__lock_take(&reads->lock);
    bool is_ended = queue_take(reads, &reads->ended, &id);
    if (is_ended) {
        *out = reads->ends_of[id];
    }
    um__lock_drop(&reads->lock);
    return is_ended;
}

void um__reads_close(um__reads *reads, bool in_child) {
    if (reads->has_ring) {
        um__ring_close(&reads->ring, in_child);
    } else if (!in_child) {
        end_threads(reads);
    }
    free_reads(reads);
}
