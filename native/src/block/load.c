/* Loading: several threads read ranges of files into memory. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "os/cpus.h"
#include "os/os.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>

enum { DIRECT_ALIGN = 4096, DEFAULT_REQUEST_NBYTES = 4 << 20 };

typedef enum load_state { LOADING, ENDED, FAILED } load_state;

typedef struct load_part {
    um_load_part range;
    size_t first_piece, end_piece; /* numbers among the pieces of all parts */
} load_part;

typedef struct load_thread {
    um_load *load;
    int cpu;
    um__os_thread thread;
} load_thread;

struct um_load {
    size_t piece_nbytes;   /* of what a thread takes at once, up to a border of huge pages */
    size_t request_nbytes; /* of one read */
    size_t align;          /* a read begins at a multiple of it; 1, unless direct */
    size_t n_pieces;
    _Atomic size_t next_piece;
    _Atomic uint64_t done_nbytes;
    _Atomic uint32_t n_reading; /* threads; waiters are woken at 0 */
    _Atomic int state;
    size_t failed_part; /* written by the thread that sets FAILED */
    int failed_errno;
    unsigned n_threads;
    load_thread threads[UM__MAX_THREADS];
    load_part parts[];
};

static void fail_load(um_load *load, const load_part *part, int os_errno) {
    int loading = LOADING;
    if (atomic_compare_exchange_strong(&load->state, &loading, FAILED)) {
        load->failed_part = (size_t)(part - load->parts);
        load->failed_errno = os_errno;
    }
}

/* Reads one piece of a part, by its number there. */
static void read_piece(um_load *load, const load_part *part, size_t piece) {
    const um_load_part *range = &part->range;
    size_t phase = (uintptr_t)range->to % load->piece_nbytes;
    size_t at = piece == 0 ? 0 : piece * load->piece_nbytes - phase;
    size_t end = (piece + 1) * load->piece_nbytes - phase;
    end = end < range->nbytes ? end : range->nbytes;
    while (at < end && atomic_load(&load->state) == LOADING) {
        size_t left = end - at, n = 0;
        size_t asked = (left + load->align - 1) / load->align * load->align;
        asked = asked < load->request_nbytes ? asked : load->request_nbytes;
        int os_errno =
            um__os_pread(range->fd, (char *)range->to + at, asked, range->offset + at, &n);
        /* The next read begins behind the whole units of this one. A direct read that stops inside
         * a unit has come to the end of the file, or the next one says so. */
        size_t step = n >= left ? left : n / load->align * load->align;
        if (os_errno == 0 && step > 0) {
            at += step;
            atomic_fetch_add(&load->done_nbytes, step);
        } else if (os_errno != EINTR) {
            fail_load(load, part, os_errno);
        }
    }
}

static void *thread_run(void *arg) {
    const load_thread *thread = arg;
    um_load *load = thread->load;
    const load_part *part = load->parts;
    um__cpus_pin(thread->cpu);
    while (atomic_load(&load->state) == LOADING) {
        size_t piece = atomic_fetch_add(&load->next_piece, 1);
        if (piece >= load->n_pieces) {
            break;
        }
        while (piece >= part->end_piece) {
            part++;
        }
        read_piece(load, part, piece - part->first_piece);
    }
    if (atomic_fetch_sub(&load->n_reading, 1) == 1) {
        um__os_wake(&load->n_reading);
    }
    return NULL;
}

static void join_threads(um_load *load) {
    int loading = LOADING;
    atomic_compare_exchange_strong(&load->state, &loading, ENDED);
    for (unsigned i = 0; i < load->n_threads; i++) {
        um__os_thread_join(load->threads[i].thread);
    }
}

/* errors: UM_E_INVALID. */
static um_status set_parts(um_load *load, const um_load_part *parts, size_t n_parts,
                           um_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < n_parts; i++) {
        const um_load_part *part = &parts[i];
        size_t address = (uintptr_t)part->to, phase = address % load->piece_nbytes, end;
        UM__INVALID_IF(part->offset % load->align != 0 || address % load->align != 0, err,
                       "a direct part begins elsewhere than at a multiple "
                       "of 4096, in the file or in memory");
        UM__INVALID_IF(
            !um__add(total, part->nbytes, &total) || !um__add(address, part->nbytes, &end) ||
                !um__add(end, load->piece_nbytes, &end) || part->nbytes > INT64_MAX - load->align ||
                part->offset > INT64_MAX - load->align - part->nbytes,
            err, "the parts are too large: each ends below 2**63");
        load_part *set = &load->parts[i];
        *set = (load_part){.range = *part, .first_piece = load->n_pieces};
        load->n_pieces +=
            part->nbytes == 0 ? 0 : (phase + part->nbytes - 1) / load->piece_nbytes + 1;
        set->end_piece = load->n_pieces;
    }
    return UM_OK;
}

/* errors: UM_E_INVALID. */
static um_status set_sizes(um_load *load, const um_load_options *options, um_error *err) {
    size_t huge_page = um_huge_page_bytes();
    size_t border = huge_page > DIRECT_ALIGN ? huge_page : DIRECT_ALIGN;
    size_t request =
        options->request_nbytes == 0 ? DEFAULT_REQUEST_NBYTES : options->request_nbytes;
    load->align = options->direct ? DIRECT_ALIGN : 1;
    UM__INVALID_IF(!um__round_up(request, load->align, &load->request_nbytes) ||
                       !um__round_up(request, border, &load->piece_nbytes),
                   err, "request_nbytes");
    return UM_OK;
}

um_status um_load_start(um_load **out, const um_load_part *parts, size_t n_parts,
                        const um_load_options *options, um_error *err) {
    um__cpus cpus;
    UM__TRY(um__cpus_init(&cpus, options->n_threads, options->cpus, err));
    size_t nbytes;
    UM__INVALID_IF(!um__mul(n_parts, sizeof(load_part), &nbytes) ||
                       !um__add(nbytes, sizeof(um_load), &nbytes),
                   err, "n_parts");
    um_load *load = um__heap_alloc(1, nbytes);
    UM__RETURN_IF(load == NULL, um__fail_nomem(err, ENOMEM, nbytes, "calloc"));
    um_status status = set_sizes(load, options, err);
    if (status == UM_OK) {
        status = set_parts(load, parts, n_parts, err);
    }
    if (status != UM_OK) {
        um__heap_free(load);
        return status;
    }
    um__cpus_allow(&cpus);
    unsigned n_threads =
        load->n_pieces < cpus.n_threads ? (unsigned)load->n_pieces : cpus.n_threads;
    atomic_store(&load->n_reading, n_threads);
    for (; load->n_threads < n_threads; load->n_threads++) {
        load_thread *thread = &load->threads[load->n_threads];
        *thread = (load_thread){.load = load, .cpu = um__cpus_at(&cpus, load->n_threads)};
        int os_errno = um__os_thread_start(&thread->thread, thread_run, thread);
        if (os_errno != 0) {
            join_threads(load);
            um__heap_free(load);
            return um__fail_os(err, os_errno, nbytes, "pthread_create");
        }
    }
    *out = load;
    return UM_OK;
}

void um_load_wait(um_load *load, unsigned milliseconds, uint64_t *out_nbytes, int *out_running) {
    uint32_t n_reading = atomic_load(&load->n_reading);
    if (n_reading != 0) {
        um__os_wait(&load->n_reading, n_reading, milliseconds);
    }
    *out_running = atomic_load(&load->n_reading) != 0;
    *out_nbytes = atomic_load(&load->done_nbytes);
}

um_status um_load_end(um_load *load, size_t *out_part, um_error *err) {
    join_threads(load);
    if (atomic_load(&load->state) != FAILED) {
        um__heap_free(load);
        return UM_OK;
    }
    size_t part = load->failed_part, nbytes = load->parts[part].range.nbytes;
    int os_errno = load->failed_errno;
    um__heap_free(load);
    if (out_part != NULL) {
        *out_part = part;
    }
    /* EFAULT: the pool of huge pages, or the file system of shared memory, is full. */
    UM__RETURN_IF(os_errno == EFAULT || os_errno == ENOMEM,
                  um__fail_nomem(err, ENOMEM, nbytes, "pread"));
    return um__fail_io(err, os_errno, nbytes, "pread");
}
