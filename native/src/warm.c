/* Warming: bringing pages into RAM before anybody waits for them. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdatomic.h>

enum { MAX_CPUS = 8192, CPU_MASK_WORDS = MAX_CPUS / 64, MAX_WARM_THREADS = 512 };
enum { WARM_STEP_BYTES = 16 << 20 };

/* What the threads of one call share. */
typedef struct warming {
    um_os_advice advice;
    _Atomic int os_errno; /* of the first that failed; the others stop then */
} warming;

typedef struct warm_part {
    warming *shared;
    char *address;
    size_t nbytes;
    int cpu; /* -1: anywhere */
    um_os_thread thread;
} warm_part;

/* Populates in steps, so that a signal, a full system and another thread's failure are noticed
 * between them. */
static void warm_run(const warm_part *part) {
    warming *shared = part->shared;
    for (size_t done = 0; done < part->nbytes && atomic_load(&shared->os_errno) == 0;) {
        size_t left = part->nbytes - done, step = left < WARM_STEP_BYTES ? left : WARM_STEP_BYTES;
        int os_errno = um_os_advise(part->address + done, step, shared->advice), none = 0;
        if (os_errno == 0) {
            done += step;
        } else if (os_errno != EINTR && os_errno != EAGAIN) {
            atomic_compare_exchange_strong(&shared->os_errno, &none, os_errno);
        }
    }
}

static void *thread_run(void *arg) {
    const warm_part *part = arg;
    if (part->cpu >= 0) {
        uint64_t mask[CPU_MASK_WORDS] = {0};
        mask[part->cpu / 64] |= UINT64_C(1) << (part->cpu % 64);
        /* A thread that cannot be pinned still warms; it may only be slower. */
        um_os_set_affinity(mask, sizeof mask);
    }
    warm_run(part);
    return NULL;
}

/* The n-th CPU of the mask, counting round; -1 for an empty mask. */
static int nth_cpu(const uint64_t *mask, unsigned n) {
    unsigned n_cpus = 0;
    for (unsigned i = 0; i < CPU_MASK_WORDS; i++) {
        n_cpus += (unsigned)__builtin_popcountll(mask[i]);
    }
    n = n_cpus == 0 ? 0 : n % n_cpus;
    for (int cpu = 0; n_cpus != 0 && cpu < MAX_CPUS; cpu++) {
        if ((mask[cpu / 64] >> (cpu % 64) & 1) != 0 && n-- == 0) {
            return cpu;
        }
    }
    return -1;
}

/* Starts a thread a part, and waits for all that were started. Returns 0 or the errno of the thread
 * that could not be started. */
static int run_threads(warm_part *parts, unsigned n_parts) {
    unsigned n_started = 0;
    int os_errno = 0;
    while (n_started < n_parts && os_errno == 0) {
        os_errno = um_os_thread_start(&parts[n_started].thread, thread_run, &parts[n_started]);
        n_started += os_errno == 0;
    }
    int none = 0;
    atomic_compare_exchange_strong(&parts->shared->os_errno, &none, os_errno);
    for (unsigned i = 0; i < n_started; i++) {
        um_os_thread_join(parts[i].thread);
    }
    return os_errno;
}

/* EFAULT is the kernel's answer where a touch would end in SIGBUS: behind the end of a file that
 * has become shorter, or where the pool of huge pages, or the file system of shared memory, is used
 * up. */
static um_status fail_populate(const um_block *block, bool is_file, int os_errno, size_t end,
                               size_t nbytes, um_error *err) {
    if (os_errno != EFAULT) {
        return um_fail_os(err, os_errno, nbytes, "madvise");
    }
    bool shared = !is_file && block->sharing != UM_SHARING_NONE;
    uint64_t file_nbytes;
    size_t mapped_nbytes = SIZE_MAX; /* what is behind it was cut off; a mirrored memfd is sealed */
    if (shared && block->mirror_nbytes == 0 && um_os_file_nbytes(block->fd, &file_nbytes) == 0) {
        (void)um_round_up((size_t)file_nbytes, block->step_nbytes, &mapped_nbytes);
    }
    if (is_file || mapped_nbytes < end) {
        return um_fail(err, UM_E_IO, "madvise");
    }
    return um_fail_os(err,
                      shared || um_hugetlb_shift(block->requested_pages) != 0 ? ENOMEM : EFAULT,
                      nbytes, "madvise");
}

/* What the caller of um_block_warm has chosen. */
typedef struct warm_threads {
    unsigned n;
    const int *cpus;
} warm_threads;

/* Whole pages that all are a file's, or none of them. A private mapping of a file is read: to be
 * written, its pages would have to be copied. */
static um_status warm_range(const um_block *block, bool is_file, size_t first, size_t last,
                            const warm_threads *threads, um_error *err) {
    /* Threads meet at borders of huge pages: two that fill one huge page together get small ones.
     */
    size_t page = um_os_page_bytes();
    size_t align = block->step_nbytes > page ? block->step_nbytes : page;
    /* From the border below the first byte: so there are never more parts than threads. */
    size_t share = ((last - first / align * align) / threads->n / align + 1) * align;

    uint64_t mask[CPU_MASK_WORDS] = {0};
    const int *cpus = threads->cpus;
    if (cpus == NULL && threads->n > 1 && um_os_get_affinity(mask, sizeof mask) != 0) {
        memset(mask, 0, sizeof mask);
    }
    bool read_only =
        is_file || (block->sharing != UM_SHARING_NONE && block->access == UM_ACCESS_READ);
    warming shared = {.advice = read_only ? UM_OS_POPULATE_READ : UM_OS_POPULATE_WRITE};
    warm_part parts[MAX_WARM_THREADS];
    unsigned n_parts = 0;
    for (size_t at = first; at < last; n_parts++) {
        size_t part_end = (at / align * align) + share;
        part_end = part_end < last ? part_end : last;
        parts[n_parts] = (warm_part){.shared = &shared,
                                     .address = (char *)block->base + at,
                                     .nbytes = part_end - at,
                                     .cpu = cpus != NULL ? cpus[n_parts] : nth_cpu(mask, n_parts)};
        at = part_end;
    }
    /* One part that needs no pinning is the caller's. One that does is not: the caller's affinity
     * is not ours to change. */
    if (n_parts == 1 && (cpus == NULL || parts[0].cpu < 0)) {
        warm_run(&parts[0]);
    } else {
        int os_errno = run_threads(parts, n_parts);
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, last - first, "pthread_create");
        }
    }
    int os_errno = atomic_load(&shared.os_errno);
    return os_errno == 0 ? UM_OK : fail_populate(block, is_file, os_errno, last, last - first, err);
}

um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                        const int *cpus, um_error *err) {
    size_t end, page = um_os_page_bytes();
    size_t limit = block->is_file ? block->nbytes : block->reserved_nbytes;
    if (!um_add(offset, nbytes, &end) || end > limit) {
        return um_fail(err, UM_E_INVALID, "the range is outside the block");
    }
    if (n_threads == 0) {
        return um_fail(err, UM_E_INVALID, "n_threads");
    }
    if (n_threads > MAX_WARM_THREADS) {
        n_threads = MAX_WARM_THREADS;
    }
    for (unsigned i = 0; cpus != NULL && i < n_threads; i++) {
        if (cpus[i] >= MAX_CPUS) {
            return um_fail(err, UM_E_INVALID, "cpus");
        }
    }
    if (nbytes == 0) {
        return UM_OK;
    }
    if (!um_block_is_committed(block, offset, nbytes)) {
        return um_fail(err, UM_E_INVALID, "the range is not committed");
    }
    warm_threads threads = {.n = n_threads, .cpus = cpus};
    size_t first = offset / page * page, last = (end + page - 1) / page * page;
    if (block->overlaid == NULL) {
        return warm_range(block, block->is_file != 0, first, last, &threads, err);
    }
    /* Steps are pages here. */
    um_status status = UM_OK;
    um_run run;
    for (size_t at = first / page; status == UM_OK && at < last / page; at = run.end) {
        bool is_file = um_block_next_overlay(block, at, at + 1, true, &run);
        um_block_next_overlay(block, at, last / page, is_file, &run);
        status = warm_range(block, is_file, run.first * page, run.end * page, &threads, err);
    }
    return status;
}
