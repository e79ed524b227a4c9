/* Blocks: mapping memory, locking it, and advising the kernel about it.
 *
 *     map_base                                                        map_base + map_nbytes
 *     | guard page | committed | gap | committed | reserved, no memory ... | guard page |
 *                  base ------ nbytes                      base + reserved_nbytes
 *
 * The base never moves. Memory comes and goes in steps: pages, huge or not (grow.c). While exactly
 * [0, nbytes) is committed, the block has no bits; from the first gap on, it has a bit for each
 * step (steps.c). Shared memory is a file with the same offsets; mirrored memory maps each piece of
 * its file twice (mirror.h). */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "block/map.h"
#include "block/mirror.h"
#include "block/space.h"
#include "block/steps.h"
#include "os/os.h"

#include <stdbool.h>

/* ---- mapping ---- */

/* errors: UM_E_INVALID. */
static um_status check_numa(const um_numa *numa, um_error *err) {
    bool any = false;
    for (size_t i = 0; i < sizeof numa->nodes / sizeof numa->nodes[0]; i++) {
        any = any || numa->nodes[i] != 0;
    }
    UM__INVALID_IF((unsigned)numa->mode > UM_NUMA_PREFERRED, err, "numa.mode");
    UM__INVALID_IF(any != (numa->mode != UM_NUMA_NONE), err,
                   any ? "numa.nodes: nodes without a mode" : "numa.nodes: a mode without nodes");
    return UM_OK;
}

/* errors: UM_E_INVALID. */
static um_status check_options(const um_block_options *options, um_error *err) {
    UM__INVALID_IF(um_category_name(options->category) == NULL, err, "category");
    UM__INVALID_IF((unsigned)options->pages > UM_PAGES_1G, err, "pages");
    UM__INVALID_IF((unsigned)options->sharing > UM_SHARING_FD, err, "sharing");
    return check_numa(&options->numa, err);
}

/* Returns the page size that the options ask for. A block that will grow counts as large as it may
 * become. */
static size_t page_asked_for(um_pages pages, size_t reserve_nbytes) {
    size_t page = um__os_page_bytes();
    if (um__hugetlb_shift(pages) != 0) {
        return (size_t)1 << um__hugetlb_shift(pages);
    }
    size_t huge_page = pages == UM_PAGES_4K ? 0 : um_huge_page_bytes();
    bool huge = huge_page > page && (pages == UM_PAGES_THP || reserve_nbytes >= huge_page);
    return huge ? huge_page : page;
}

/* Does the same for mirrored memory. The kernel maps a huge page as such only where the address and
 * the place in the file agree: that holds for all images if the pieces are whole huge pages, and
 * else for few. */
static size_t page_of_mirror(const um_block_options *options) {
    size_t page = um__os_page_bytes();
    if (um__hugetlb_shift(options->pages) == 0 && options->pages != UM_PAGES_THP) {
        return page;
    }
    size_t huge_page = page_asked_for(options->pages, 0);
    bool fits =
        options->mirror_nbytes % huge_page == 0 && options->mirror_other_nbytes % huge_page == 0;
    return fits || um__hugetlb_shift(options->pages) != 0 ? huge_page : page;
}

/* errors: UM_E_INVALID. */
static um_status check_mirror(const um_block_options *options, size_t nbytes, size_t step,
                              um_error *err) {
    UM__INVALID_IF(options->sharing != UM_SHARING_MEMFD, err,
                   "mirror_nbytes: only a memfd can be mirrored");
    size_t other = options->mirror_other_nbytes, whole = options->mirror_nbytes;
    UM__INVALID_IF(options->mirror_nbytes % step != 0 || other % step != 0, err,
                   "mirror_nbytes is not a multiple of the page size");
    UM__INVALID_IF(other != 0 && (options->mirror_run == 0 || !um__add(whole, other, &whole) ||
                                  !um__mul(whole, options->mirror_run, &whole)),
                   err, "mirror_run");
    UM__INVALID_IF(nbytes % whole != 0, err, "nbytes is not a multiple of mirror_nbytes");
    UM__INVALID_IF(options->reserve_nbytes != 0 && options->reserve_nbytes != nbytes, err,
                   "reserve_nbytes: mirrored memory does not grow");
    return UM_OK;
}

/* The sizes that follow from a request. */
typedef struct extent {
    size_t step, align;
    size_t data_nbytes, reserved_nbytes; /* address space */
    size_t file_nbytes;                  /* of the file behind shared memory */
} extent;

/* errors: UM_E_INVALID. */
static um_status measure(const um_block_options *options, size_t nbytes, size_t reserve,
                         extent *out, um_error *err) {
    bool mirrored = options->mirror_nbytes != 0;
    size_t step = mirrored ? page_of_mirror(options) : page_asked_for(options->pages, reserve);
    *out = (extent){.step = step, .align = step};
    UM__INVALID_IF(nbytes == 0 || !um__round_up(nbytes, step, &out->data_nbytes), err, "nbytes");
    UM__INVALID_IF(!um__round_up(reserve, step, &out->reserved_nbytes), err, "reserve_nbytes");
    out->file_nbytes = out->reserved_nbytes;
    if (mirrored) {
        UM__TRY(check_mirror(options, nbytes, step, err));
        UM__INVALID_IF(!um__mul(nbytes, 2, &out->data_nbytes), err, "nbytes");
        out->reserved_nbytes = out->data_nbytes;
        out->align = page_asked_for(options->pages, nbytes);
    }
    return UM_OK;
}

um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                       um_error *err) {
    UM__TRY(check_options(options, err));
    size_t reserve = options->reserve_nbytes == 0 ? nbytes : options->reserve_nbytes;
    UM__INVALID_IF(reserve < nbytes, err, "reserve_nbytes is less than nbytes");
    extent e;
    um__space space;
    UM__TRY(measure(options, nbytes, reserve, &e, err));
    UM__TRY(um__space_reserve(&space, e.reserved_nbytes, e.align, 0, reserve, err));
    bool shared = options->sharing != UM_SHARING_NONE;
    bool apart = options->mirror_other_nbytes != 0;
    um_block block = {.base = space.data,
                      .nbytes = e.data_nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = options->pages,
                      .category = options->category,
                      .numa = options->numa,
                      .sharing = options->sharing,
                      .access = shared ? UM_ACCESS_SHARED : UM_ACCESS_PRIVATE,
                      .mirror_nbytes = options->mirror_nbytes,
                      .mirror_other_nbytes =
                          apart ? options->mirror_other_nbytes : options->mirror_nbytes,
                      .mirror_run = apart ? options->mirror_run : 1,
                      .step_nbytes = e.step,
                      .reserved_nbytes = e.reserved_nbytes,
                      .committed_nbytes = e.data_nbytes,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .fd = -1};
    um_status status = shared ? um__memfd_open(options, e.file_nbytes, &block.fd, err) : UM_OK;
    if (status == UM_OK) {
        status = um__block_map_range(&block, 0, e.data_nbytes, nbytes, err);
    }
    if (status != UM_OK) {
        um__os_unmap(space.map_base, space.map_nbytes);
        if (block.fd >= 0) {
            um__memfd_discard(options, block.fd);
        }
        return status;
    }
    *out = block;
    um__ledger_enter(block.category, um__block_memory_nbytes(&block));
    return UM_OK;
}

void um_block_forget(um_block *block) {
    if (block->map_base == NULL) {
        return;
    }
    if (block->fd >= 0) {
        um__os_close(block->fd);
    }
    um__heap_free(block->committed);
    um__heap_free(block->overlaid);
    um__ledger_leave(block->category, um__block_memory_nbytes(block));
    *block = (um_block){0};
}

um_status um_block_unmap(um_block *block, um_error *err) {
    if (block->map_base == NULL) {
        return UM_OK;
    }
    UM__TRY_OS(um__os_unmap(block->map_base, block->map_nbytes), err, block->map_nbytes, "munmap");
    um_block_forget(block);
    return UM_OK;
}

/* ---- what is committed ---- */

/* A call of madvise, mlock2 or munlock for one committed run. */
typedef int (*range_call)(const um_block *block, void *address, size_t nbytes, int argument);

/* Makes the call for each committed run. Returns 0, or the errno of the first call that fails.
 * *out_done is the step behind the last run that was tried. */
static int call_runs(const um_block *block, size_t end, range_call call, int argument,
                     size_t *out_done) {
    size_t step = block->step_nbytes;
    UM__EACH_RUN(run, block, 0, end, true) {
        int os_errno = call(block, (char *)block->base + run.first * step,
                            (run.end - run.first) * step, argument);
        *out_done = run.end;
        UM__RETURN_IF(os_errno != 0, os_errno);
    }
    return 0;
}

static int call_advise(const um_block *block, void *address, size_t nbytes, int advice) {
    (void)block;
    return um__os_advise(address, nbytes, (um__os_advice)advice);
}

static int call_lock(const um_block *block, void *address, size_t nbytes, int lock) {
    (void)block;
    return lock == UM_LOCK_NONE ? um__os_unlock(address, nbytes)
                                : um__os_lock(address, nbytes, lock == UM_LOCK_ONFAULT);
}

um_status um_block_lock(um_block *block, um_lock lock, um_error *err) {
    UM__INVALID_IF((unsigned)lock > UM_LOCK_ONFAULT, err, "lock");
    size_t done = 0;
    int os_errno = call_runs(block, um__block_n_steps(block), call_lock, (int)lock, &done);
    if (os_errno != 0) {
        size_t undone;
        call_runs(block, done, call_lock, (int)block->lock, &undone);
        return um__fail_lock(err, os_errno, block->committed_nbytes,
                             lock == UM_LOCK_NONE ? "munlock" : "mlock2");
    }
    block->lock = lock;
    return UM_OK;
}

/* The kernel reads no more at a call than its read-ahead and the largest request of the disk. */
enum { ASKED_AT_ONCE = 512 << 10 };

void um_block_will_need(const um_block *block, size_t offset, size_t nbytes) {
    size_t end = offset + nbytes;
    for (size_t at = offset / block->step_nbytes * block->step_nbytes; at < end;) {
        size_t left = end - at, n = left < ASKED_AT_ONCE ? left : ASKED_AT_ONCE;
        if (um__os_advise((char *)block->base + at, n, UM__OS_WILLNEED) != 0) {
            return;
        }
        at += n;
    }
}

um_status um_block_advise(um_block *block, um_advice advice, um_error *err) {
    static const um__os_advice advices[] = {
        [UM_ADVICE_WILLNEED] = UM__OS_WILLNEED, [UM_ADVICE_SEQUENTIAL] = UM__OS_SEQUENTIAL,
        [UM_ADVICE_RANDOM] = UM__OS_RANDOM,     [UM_ADVICE_DONTNEED] = UM__OS_DONTNEED,
        [UM_ADVICE_HUGEPAGE] = UM__OS_HUGE,     [UM_ADVICE_NOHUGEPAGE] = UM__OS_NO_HUGE,
    };
    UM__INVALID_IF((unsigned)advice > UM_ADVICE_NOHUGEPAGE, err, "advice");
    bool is_of_a_file = block->is_file != 0 && block->access != UM_ACCESS_PRIVATE;
    UM__INVALID_IF(advice == UM_ADVICE_DONTNEED && !is_of_a_file, err,
                   "advice: DONTNEED would lose what was written");
    size_t done;
    int os_errno =
        call_runs(block, um__block_n_steps(block), call_advise, (int)advices[advice], &done);
    return os_errno == 0 ? UM_OK
                         : um__fail_os(err, os_errno, um__block_committed_nbytes(block), "madvise");
}
