/* Warming: bringing pages into RAM before they are used. */
#include "base/sizes.h"
#include "base/status.h"
#include "block/space.h"
#include "block/steps.h"
#include "os/cpus.h"
#include "os/os.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { WARM_STEP_BYTES = 16 << 20 };

/* What the threads of one call share. */
typedef struct warming {
    um__os_advice advice;
    _Atomic int os_errno; /* of the first thread that failed, which stops the others */
} warming;

typedef struct warm_part {
    warming *shared;
    char *address;
    size_t nbytes;
    int cpu; /* -1: anywhere */
    um__os_thread thread;
} warm_part;

/* Populates in steps, between which it notices a signal, a full system or a failed thread. */
static void warm_run(const warm_part *part) {
    warming *shared = part->shared;
    for (size_t done = 0; done < part->nbytes && atomic_load(&shared->os_errno) == 0;) {
        size_t left = part->nbytes - done, step = left < WARM_STEP_BYTES ? left : WARM_STEP_BYTES;
        int os_errno = um__os_advise(part->address + done, step, shared->advice), none = 0;
        if (os_errno == 0) {
            done += step;
        } else if (os_errno != EINTR && os_errno != EAGAIN) {
            atomic_compare_exchange_strong(&shared->os_errno, &none, os_errno);
        }
    }
}

static void *thread_run(void *arg) {
    const warm_part *part = arg;
    um__cpus_pin(part->cpu);
    warm_run(part);
    return NULL;
}

/* Starts a thread for each part, and waits for those that were started. Returns 0, or the errno of
 * the thread that could not be started. */
static int run_threads(warm_part *parts, unsigned n_parts) {
    unsigned n_started = 0;
    int os_errno = 0;
    while (n_started < n_parts && os_errno == 0) {
        os_errno = um__os_thread_start(&parts[n_started].thread, thread_run, &parts[n_started]);
        n_started += os_errno == 0;
    }
    int none = 0;
    atomic_compare_exchange_strong(&parts->shared->os_errno, &none, os_errno);
    for (unsigned i = 0; i < n_started; i++) {
        um__os_thread_join(parts[i].thread);
    }
    return os_errno;
}

/* The kernel fails with EFAULT where a touch would raise SIGBUS: behind the end of a file that has
 * become shorter, or where the pool of huge pages or the file system of shared memory is full. */
static um_status fail_populate(const um_block *block, bool is_file, int os_errno, size_t end,
                               size_t nbytes, um_error *err) {
    UM__RETURN_IF(os_errno != EFAULT, um__fail_os(err, os_errno, nbytes, "madvise"));
    bool shared = !is_file && block->sharing != UM_SHARING_NONE;
    uint64_t file_nbytes;
    size_t mapped_nbytes = SIZE_MAX; /* the rest was cut off; a mirrored memfd is sealed */
    if (shared && block->mirror_nbytes == 0 && um__os_file_nbytes(block->fd, &file_nbytes) == 0) {
        (void)um__round_up((size_t)file_nbytes, block->step_nbytes, &mapped_nbytes);
    }
    UM__RETURN_IF(is_file || mapped_nbytes < end, um__fail(err, UM_E_IO, "madvise"));
    return um__fail_os(err,
                       shared || um__hugetlb_shift(block->requested_pages) != 0 ? ENOMEM : EFAULT,
                       nbytes, "madvise");
}

static bool is_read_only(const um_block *block) {
    bool has_file = block->is_file != 0 || block->sharing != UM_SHARING_NONE;
    return has_file && block->access == UM_ACCESS_READ;
}

/* Warms whole pages, which are all a file's or all not. */
static um_status warm_range(const um_block *block, bool is_file, bool writes, size_t first,
                            size_t last, const um__cpus *cpus, um_error *err) {
    /* Parts meet at borders of huge pages: two threads that fill one huge page get small pages.
     * They are counted from the border below the first byte, so that none has no thread. */
    size_t page = um__os_page_bytes();
    size_t align = block->step_nbytes > page ? block->step_nbytes : page;
    size_t share = ((last - first / align * align) / cpus->n_threads / align + 1) * align;

    /* Writing would copy the pages of a privately mapped file, and write back shared ones. */
    bool reads = is_file ? !writes : is_read_only(block);
    warming shared = {.advice = reads ? UM__OS_POPULATE_READ : UM__OS_POPULATE_WRITE};
    warm_part parts[UM__MAX_THREADS];
    unsigned n_parts = 0;
    for (size_t at = first; at < last; n_parts++) {
        size_t part_end = (at / align * align) + share;
        part_end = part_end < last ? part_end : last;
        parts[n_parts] = (warm_part){.shared = &shared,
                                     .address = (char *)block->base + at,
                                     .nbytes = part_end - at,
                                     .cpu = um__cpus_at(cpus, n_parts)};
        at = part_end;
    }
    /* The caller works on a single part itself, unless that would change its affinity. */
    if (n_parts == 1 && (cpus->chosen == NULL || parts[0].cpu < 0)) {
        warm_run(&parts[0]);
    } else {
        UM__TRY_OS(run_threads(parts, n_parts), err, last - first, "pthread_create");
    }
    int os_errno = atomic_load(&shared.os_errno);
    return os_errno == 0 ? UM_OK : fail_populate(block, is_file, os_errno, last, last - first, err);
}

static um_status warm(um_block *block, bool writes, size_t offset, size_t nbytes,
                      unsigned n_threads, const int *chosen_cpus, um_error *err) {
    size_t end, page = um__os_page_bytes();
    um__cpus cpus;
    UM__TRY(um__block_check_range(block, offset, nbytes, true, &end, err));
    UM__TRY(um__cpus_init(&cpus, n_threads, chosen_cpus, err));
    if (nbytes == 0) {
        return UM_OK;
    }
    if (n_threads > 1) {
        um__cpus_allow(&cpus);
    }
    size_t first = offset / page * page, last = (end + page - 1) / page * page;
    if (__atomic_load_n(&block->overlaid, __ATOMIC_ACQUIRE) == NULL) {
        return warm_range(block, block->is_file != 0, writes, first, last, &cpus, err);
    }
    /* Steps are pages here. */
    um__run run;
    for (size_t at = first / page; at < last / page; at = run.end) {
        bool is_file = um__block_next_overlay(block, at, at + 1, true, &run);
        um__block_next_overlay(block, at, last / page, is_file, &run);
        UM__TRY(warm_range(block, is_file, writes, run.first * page, run.end * page, &cpus, err));
    }
    return UM_OK;
}

um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                        const int *cpus, um_error *err) {
    return warm(block, false, offset, nbytes, n_threads, cpus, err);
}

um_status um_block_warm_to_write(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                                 const int *cpus, um_error *err) {
    UM__INVALID_IF(is_read_only(block), err, "the block is read-only");
    return warm(block, true, offset, nbytes, n_threads, cpus, err);
}
