/* Warming: bringing pages into RAM before anybody waits for them. */
#include "internal.h"
#include "os.h"

#include <errno.h>

enum { CPU_MASK_WORDS = 1024 / 64, WARM_STEP_BYTES = 16 << 20, MAX_WARM_THREADS = 64 };

typedef struct warm_part {
    char *address;
    size_t nbytes;
    int write;
    int cpu; /* -1: anywhere */
    int os_errno;
    um_os_thread thread;
} warm_part;

/* Populates in steps, so that a signal or a full system is noticed between them. */
static void *warm_run(void *arg) {
    warm_part *part = arg;
    if (part->cpu >= 0) {
        uint64_t mask[CPU_MASK_WORDS] = {0};
        mask[part->cpu / 64] |= UINT64_C(1) << (part->cpu % 64);
        /* A thread that cannot be pinned still warms; it may only be slower. */
        um_os_set_affinity(mask, sizeof mask);
    }
    for (size_t done = 0; done < part->nbytes && part->os_errno == 0;) {
        size_t left = part->nbytes - done, step = left < WARM_STEP_BYTES ? left : WARM_STEP_BYTES;
        int os_errno = um_os_advise(part->address + done, step,
                                    part->write ? UM_OS_POPULATE_WRITE : UM_OS_POPULATE_READ);
        if (os_errno == 0) {
            done += step;
        } else if (os_errno != EINTR && os_errno != EAGAIN) {
            part->os_errno = os_errno;
        }
    }
    return NULL;
}

/* The n-th CPU of the mask, counting round; -1 for an empty mask. */
static int nth_cpu(const uint64_t *mask, unsigned n) {
    int cpus[CPU_MASK_WORDS * 64], count = 0;
    for (int cpu = 0; cpu < CPU_MASK_WORDS * 64; cpu++) {
        if (mask[cpu / 64] >> (cpu % 64) & 1) {
            cpus[count++] = cpu;
        }
    }
    return count == 0 ? -1 : cpus[n % (unsigned)count];
}

um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                        const int *cpus, um_error *err) {
    size_t end;
    if (!um_add(offset, nbytes, &end) || end > block->nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside the block");
    }
    if (n_threads == 0) {
        return um_fail(err, UM_E_INVALID, "n_threads");
    }
    if (nbytes == 0) {
        return UM_OK;
    }
    size_t align = um_os_page_bytes();
    if (!block->is_file && block->requested_pages != UM_PAGES_4K) {
        /* Threads meet at huge page borders: two that fill one huge page together get small ones.
         */
        size_t huge_page = um_huge_page_bytes();
        align = huge_page > align && block->nbytes % huge_page == 0 ? huge_page : align;
    }
    size_t page = um_os_page_bytes();
    size_t first = offset / page * page, last = (end + page - 1) / page * page;
    if (n_threads > MAX_WARM_THREADS) {
        n_threads = MAX_WARM_THREADS;
    }
    /* From the border below the first byte: so there are never more parts than threads. */
    size_t share = ((last - first / align * align) / n_threads / align + 1) * align;

    uint64_t mask[CPU_MASK_WORDS] = {0};
    if (n_threads > 1 && um_os_get_affinity(mask, sizeof mask) != 0) {
        memset(mask, 0, sizeof mask);
    }
    warm_part parts[MAX_WARM_THREADS] = {0};
    unsigned n_parts = 0;
    for (size_t at = first; at < last; n_parts++) {
        size_t part_end = (at / align * align) + share;
        part_end = part_end < last ? part_end : last;
        parts[n_parts] = (warm_part){.address = (char *)block->base + at,
                                     .nbytes = part_end - at,
                                     .write = !block->is_file,
                                     .cpu = cpus != NULL      ? cpus[n_parts]
                                            : n_threads > 1 ? nth_cpu(mask, n_parts)
                                                            : -1};
        at = part_end;
    }
    /* One thread of one's own is the caller's, unpinned: its affinity is not ours to change. */
    unsigned n_started = 0;
    int os_errno = 0;
    if (n_parts == 1) {
        warm_run(&parts[0]);
    } else {
        while (n_started < n_parts && os_errno == 0) {
            os_errno = um_os_thread_start(&parts[n_started].thread, warm_run, &parts[n_started]);
            n_started += os_errno == 0;
        }
        for (unsigned i = 0; i < n_started; i++) {
            um_os_thread_join(parts[i].thread);
        }
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, nbytes, "pthread_create");
        }
    }
    for (unsigned i = 0; i < n_parts; i++) {
        if (parts[i].os_errno == EFAULT && block->is_file) {
            return um_fail(err, UM_E_IO, "madvise"); /* pages behind the end of the file */
        }
        if (parts[i].os_errno != 0) {
            return um_fail_os(err, parts[i].os_errno, nbytes, "madvise");
        }
    }
    return UM_OK;
}
