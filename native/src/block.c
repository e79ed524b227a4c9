/* Blocks: mapped memory, its pages, its lock. */
#include "internal.h"
#include "os.h"
#include "proc_file.h"

#include <errno.h>
#include <stdlib.h>

size_t um_page_bytes(void) {
    return um_os_page_bytes();
}

size_t um_huge_page_bytes(void) {
    char text[32];
    int os_errno =
        um_proc_text("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof text);
    return os_errno != 0 ? 0 : (size_t)strtoull(text, NULL, 10);
}

um_status um_space_reserve(um_space *out, size_t nbytes, size_t align, size_t phase, size_t asked,
                           um_error *err) {
    size_t page = um_os_page_bytes(), reserved_nbytes;
    if (!um_add(nbytes, align + 2 * page, &reserved_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    void *reserved;
    int os_errno = um_os_reserve(reserved_nbytes, &reserved);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, asked, "mmap");
    }
    /* More was reserved than is needed, so that the data can be aligned inside it; the rest goes
     * back. */
    uintptr_t start = (uintptr_t)reserved, end = start + reserved_nbytes;
    uintptr_t data = ((start + page - phase + align - 1) & ~(uintptr_t)(align - 1)) + phase;
    uintptr_t map_base = data - page, map_end = data + nbytes + page;
    if (map_base > start) {
        os_errno = um_os_unmap(reserved, map_base - start);
        start = os_errno == 0 ? map_base : start;
    }
    if (os_errno == 0 && end > map_end) {
        os_errno = um_os_unmap((void *)map_end, end - map_end);
    }
    if (os_errno != 0) {
        /* Only what is still ours: another thread may have mapped what was given back. */
        um_os_unmap((void *)start, end - start);
        return um_fail_os(err, os_errno, asked, "munmap");
    }
    *out = (um_space){
        .data = (void *)data, .map_base = (void *)map_base, .map_nbytes = map_end - map_base};
    return UM_OK;
}

/* ---- mapping ---- */

unsigned um_hugetlb_shift(um_pages pages) {
    return pages == UM_PAGES_2M ? 21 : pages == UM_PAGES_1G ? 30 : 0;
}

/* errors: UM_E_INVALID. */
static um_status check_numa(const um_numa *numa, um_error *err) {
    bool any = false;
    for (size_t i = 0; i < sizeof numa->nodes / sizeof numa->nodes[0]; i++) {
        any = any || numa->nodes[i] != 0;
    }
    if ((unsigned)numa->mode > UM_NUMA_PREFERRED) {
        return um_fail(err, UM_E_INVALID, "numa.mode");
    }
    if (any != (numa->mode != UM_NUMA_NONE)) {
        return um_fail(err, UM_E_INVALID,
                       any ? "numa.nodes: nodes without a mode"
                           : "numa.nodes: a mode without nodes");
    }
    return UM_OK;
}

/* errors: UM_E_INVALID. */
static um_status check_options(const um_block_options *options, um_error *err) {
    if (um_category_name(options->category) == NULL) {
        return um_fail(err, UM_E_INVALID, "category");
    }
    if ((unsigned)options->pages > UM_PAGES_1G) {
        return um_fail(err, UM_E_INVALID, "pages");
    }
    if ((unsigned)options->sharing > UM_SHARING_FD) {
        return um_fail(err, UM_E_INVALID, "sharing");
    }
    return check_numa(&options->numa, err);
}

/* The page that is asked for. A block that will grow is as large as it may become. */
static size_t page_asked_for(um_pages pages, size_t reserve_nbytes) {
    size_t page = um_os_page_bytes();
    if (um_hugetlb_shift(pages) != 0) {
        return (size_t)1 << um_hugetlb_shift(pages);
    }
    size_t huge_page = pages == UM_PAGES_4K ? 0 : um_huge_page_bytes();
    bool huge = huge_page > page && (pages == UM_PAGES_THP || reserve_nbytes >= huge_page);
    return huge ? huge_page : page;
}

/* The same of mirrored memory. Huge pages are mapped as such only where an address and its place in
 * the file agree: in all images, or in few of them. */
static size_t page_of_mirror(const um_block_options *options) {
    size_t page = um_os_page_bytes();
    if (um_hugetlb_shift(options->pages) == 0 && options->pages != UM_PAGES_THP) {
        return page;
    }
    size_t huge_page = page_asked_for(options->pages, 0);
    bool fits = um_hugetlb_shift(options->pages) != 0 || options->mirror_nbytes % huge_page == 0;
    return fits ? huge_page : page;
}

/* errors: UM_E_INVALID. */
static um_status check_mirror(const um_block_options *options, size_t nbytes, size_t step,
                              um_error *err) {
    if (options->sharing != UM_SHARING_MEMFD) {
        return um_fail(err, UM_E_INVALID, "mirror_nbytes: only a memfd can be mirrored");
    }
    if (options->mirror_nbytes % step != 0) {
        return um_fail(err, UM_E_INVALID, "mirror_nbytes is not a multiple of the page size");
    }
    if (nbytes % options->mirror_nbytes != 0) {
        return um_fail(err, UM_E_INVALID, "nbytes is not a multiple of mirror_nbytes");
    }
    if (options->reserve_nbytes != 0 && options->reserve_nbytes != nbytes) {
        return um_fail(err, UM_E_INVALID, "reserve_nbytes: mirrored memory does not grow");
    }
    return UM_OK;
}

/* Tells the kernel which pages a range may have. */
static int advise_pages(const um_block *block, void *address, size_t nbytes) {
    if (um_hugetlb_shift(block->requested_pages) != 0) {
        return 0;
    }
    if (block->step_nbytes > um_os_page_bytes()) {
        return um_os_advise(address, nbytes, UM_OS_HUGE);
    }
    if (block->sharing != UM_SHARING_NONE && block->requested_pages != UM_PAGES_4K) {
        return 0; /* whoever made shared memory decides */
    }
    int os_errno = um_os_advise(address, nbytes, UM_OS_NO_HUGE);
    return os_errno == EINVAL ? 0 : os_errno; /* a kernel without THP needs no advice */
}

/* mlock2 says EAGAIN where a page could not be had. */
static um_status fail_lock(um_error *err, int os_errno, size_t asked, const char *call) {
    return os_errno == EAGAIN ? um_fail_nomem(err, os_errno, asked, call)
                              : um_fail_os(err, os_errno, asked, call);
}

um_status um_block_map_range(const um_block *block, size_t offset, size_t nbytes, size_t asked,
                             um_error *err) {
    char *address = (char *)block->base + offset;
    bool shared = block->sharing != UM_SHARING_NONE;
    const char *call = "mmap";
    int os_errno;
    if (block->mirror_nbytes != 0) {
        os_errno = um_mirror_map(block);
    } else if (shared) {
        os_errno = um_os_map_file_at(address, block->fd, offset, nbytes, block->access);
    } else {
        os_errno = um_os_map_at(address, nbytes, um_hugetlb_shift(block->requested_pages));
    }
    if (os_errno == 0) {
        call = "madvise";
        os_errno = advise_pages(block, address, nbytes);
    }
    if (os_errno == 0 && shared && block->access != UM_ACCESS_READ) {
        os_errno = um_os_advise(address, nbytes, UM_OS_DONT_FORK);
    }
    if (os_errno == 0 && block->numa.mode != UM_NUMA_NONE) {
        call = "mbind";
        os_errno = um_os_bind(address, nbytes, &block->numa);
    }
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, asked, call);
    }
    if (block->lock != UM_LOCK_NONE) {
        os_errno = um_os_lock(address, nbytes, block->lock == UM_LOCK_ONFAULT);
    }
    return os_errno == 0 ? UM_OK : fail_lock(err, os_errno, asked, "mlock2");
}

um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                       um_error *err) {
    um_status status = check_options(options, err);
    if (status != UM_OK) {
        return status;
    }
    size_t reserve = options->reserve_nbytes == 0 ? nbytes : options->reserve_nbytes;
    if (reserve < nbytes) {
        return um_fail(err, UM_E_INVALID, "reserve_nbytes is less than nbytes");
    }
    bool mirrored = options->mirror_nbytes != 0;
    size_t step = mirrored ? page_of_mirror(options) : page_asked_for(options->pages, reserve);
    size_t data_nbytes, reserved_nbytes;
    if (nbytes == 0 || !um_round_up(nbytes, step, &data_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    if (!um_round_up(reserve, step, &reserved_nbytes)) {
        return um_fail(err, UM_E_INVALID, "reserve_nbytes");
    }
    size_t file_nbytes = reserved_nbytes, align = step;
    if (mirrored) {
        status = check_mirror(options, nbytes, step, err);
        if (status != UM_OK) {
            return status;
        }
        if (!um_mul(nbytes, 2, &data_nbytes)) {
            return um_fail(err, UM_E_INVALID, "nbytes");
        }
        reserved_nbytes = data_nbytes;
        align = page_asked_for(options->pages, nbytes);
    }
    um_space space;
    status = um_space_reserve(&space, reserved_nbytes, align, 0, reserve, err);
    if (status != UM_OK) {
        return status;
    }
    bool shared = options->sharing != UM_SHARING_NONE;
    um_block block = {.base = space.data,
                      .nbytes = data_nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = options->pages,
                      .category = options->category,
                      .numa = options->numa,
                      .lock = UM_LOCK_NONE,
                      .sharing = options->sharing,
                      .access = shared ? UM_ACCESS_SHARED : UM_ACCESS_PRIVATE,
                      .mirror_nbytes = options->mirror_nbytes,
                      .step_nbytes = step,
                      .reserved_nbytes = reserved_nbytes,
                      .committed_nbytes = data_nbytes,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .fd = -1};
    status = shared ? um_share_open(options, file_nbytes, &block.fd, err) : UM_OK;
    if (status == UM_OK) {
        status = um_block_map_range(&block, 0, data_nbytes, nbytes, err);
    }
    if (status != UM_OK) {
        um_os_unmap(space.map_base, space.map_nbytes);
        if (block.fd >= 0) {
            um_share_discard(options, block.fd);
        }
        return status;
    }
    *out = block;
    um_ledger_enter(block.category, um_block_memory_nbytes(&block));
    return UM_OK;
}

void um_block_forget(um_block *block) {
    if (block->map_base == NULL) {
        return;
    }
    if (block->fd >= 0) {
        um_os_close(block->fd);
    }
    um_heap_free(block->committed);
    um_heap_free(block->overlaid);
    um_ledger_leave(block->category, um_block_memory_nbytes(block));
    *block = (um_block){0};
}

um_status um_block_unmap(um_block *block, um_error *err) {
    if (block->map_base == NULL) {
        return UM_OK;
    }
    int os_errno = um_os_unmap(block->map_base, block->map_nbytes);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, block->map_nbytes, "munmap");
    }
    um_block_forget(block);
    return UM_OK;
}

/* ---- what is committed ---- */

/* Calls madvise, mlock2 or munlock for each committed run. Returns the errno of the first that
 * fails, and in *out_done the step up to which it went. */
typedef int (*range_call)(const um_block *block, void *address, size_t nbytes, int argument);

static int call_runs(const um_block *block, size_t end, range_call call, int argument,
                     size_t *out_done) {
    size_t step = block->step_nbytes;
    for (um_run run = {0}; um_block_next_run(block, run.end, end, true, &run);) {
        int os_errno = call(block, (char *)block->base + run.first * step,
                            (run.end - run.first) * step, argument);
        *out_done = run.end;
        if (os_errno != 0) {
            return os_errno;
        }
    }
    return 0;
}

static int call_advise(const um_block *block, void *address, size_t nbytes, int advice) {
    (void)block;
    return um_os_advise(address, nbytes, (um_os_advice)advice);
}

static int call_lock(const um_block *block, void *address, size_t nbytes, int lock) {
    (void)block;
    return lock == UM_LOCK_NONE ? um_os_unlock(address, nbytes)
                                : um_os_lock(address, nbytes, lock == UM_LOCK_ONFAULT);
}

um_status um_block_lock(um_block *block, um_lock lock, um_error *err) {
    if ((unsigned)lock > UM_LOCK_ONFAULT) {
        return um_fail(err, UM_E_INVALID, "lock");
    }
    size_t done = 0;
    int os_errno = call_runs(block, um_block_n_steps(block), call_lock, (int)lock, &done);
    if (os_errno != 0) {
        size_t undone;
        call_runs(block, done, call_lock, (int)block->lock, &undone);
        return fail_lock(err, os_errno, block->committed_nbytes,
                         lock == UM_LOCK_NONE ? "munlock" : "mlock2");
    }
    block->lock = lock;
    return UM_OK;
}

um_status um_block_advise(um_block *block, um_advice advice, um_error *err) {
    static const um_os_advice advices[] = {
        [UM_ADVICE_WILLNEED] = UM_OS_WILLNEED, [UM_ADVICE_SEQUENTIAL] = UM_OS_SEQUENTIAL,
        [UM_ADVICE_RANDOM] = UM_OS_RANDOM,     [UM_ADVICE_DONTNEED] = UM_OS_DONTNEED,
        [UM_ADVICE_HUGEPAGE] = UM_OS_HUGE,     [UM_ADVICE_NOHUGEPAGE] = UM_OS_NO_HUGE,
    };
    if ((unsigned)advice > UM_ADVICE_NOHUGEPAGE) {
        return um_fail(err, UM_E_INVALID, "advice");
    }
    bool is_of_a_file = block->is_file != 0 && block->access != UM_ACCESS_PRIVATE;
    if (advice == UM_ADVICE_DONTNEED && !is_of_a_file) {
        return um_fail(err, UM_E_INVALID, "advice: DONTNEED would lose what was written");
    }
    size_t done;
    int os_errno =
        call_runs(block, um_block_n_steps(block), call_advise, (int)advices[advice], &done);
    return os_errno == 0 ? UM_OK : um_fail_os(err, os_errno, block->committed_nbytes, "madvise");
}

/* ---- collapsing ---- */

/* How often a page is tried that the kernel is busy with. */
enum { COLLAPSE_TRIES = 4 };

/* Whether any page of a range is in RAM. */
static int find_resident(char *address, size_t nbytes, bool *out) {
    unsigned char pages[4096];
    size_t page = um_os_page_bytes();
    *out = false;
    for (size_t at = 0; at < nbytes && !*out;) {
        size_t part = nbytes - at < sizeof pages * page ? nbytes - at : sizeof pages * page;
        int os_errno = um_os_residency(address + at, part, pages);
        if (os_errno != 0) {
            return os_errno;
        }
        for (size_t i = 0; i < part / page; i++) {
            *out = *out || (pages[i] & 1) != 0;
        }
        at += part;
    }
    return 0;
}

static int collapse_page(char *address, size_t huge_page, char *mirror, const char **out_call) {
    bool resident;
    *out_call = "mincore";
    int os_errno = find_resident(address, huge_page, &resident);
    if (os_errno != 0 || !resident) {
        return os_errno;
    }
    *out_call = "madvise";
    for (int i = 0; i < COLLAPSE_TRIES; i++) {
        os_errno = um_os_advise(address, huge_page, UM_OS_COLLAPSE);
        if (os_errno != EAGAIN && os_errno != EINTR) {
            break;
        }
    }
    /* The small pages are gone from the other image as well: it shall not fault for that. */
    return os_errno == 0 && mirror != NULL ? um_os_advise(mirror, huge_page, UM_OS_POPULATE_WRITE)
                                           : os_errno;
}

/* Huge page by huge page: the kernel's answer for a range of several is EINVAL when one of them was
 * never touched. `mirror` is how far away the other image is, or 0. */
static um_status collapse_range(uintptr_t first, uintptr_t end, size_t huge_page, ptrdiff_t mirror,
                                um_error *err) {
    for (uintptr_t at = (first + huge_page - 1) / huge_page * huge_page; at + huge_page <= end;
         at += huge_page) {
        const char *call;
        char *page = (char *)at;
        int os_errno = collapse_page(page, huge_page, mirror == 0 ? NULL : page + mirror, &call);
        /* EBUSY: the memory cgroup has no room for a huge page. */
        if (os_errno == EBUSY) {
            return um_fail_nomem(err, os_errno, huge_page, call);
        }
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, huge_page, call);
        }
    }
    return UM_OK;
}

static um_status collapse_all(um_block *block, size_t huge_page, um_error *err) {
    size_t step = block->step_nbytes;
    um_status status = UM_OK;
    for (um_run run = {0};
         status == UM_OK &&
         um_block_next_run(block, run.end, um_block_n_steps(block), true, &run);) {
        status = collapse_range((uintptr_t)block->base + run.first * step,
                                (uintptr_t)block->base + run.end * step, huge_page, 0, err);
    }
    return status;
}

/* Image by image, where addresses and places in the file agree. */
static um_status collapse_images(um_block *block, size_t huge_page, um_error *err) {
    size_t m = block->mirror_nbytes;
    um_status status = UM_OK;
    for (size_t i = 0; status == UM_OK && i < um_mirror_n_images(block); i++) {
        uintptr_t first = (uintptr_t)block->base + i * m;
        if ((first - um_block_file_offset(block, i * m)) % huge_page == 0) {
            status = collapse_range(first, first + m, huge_page,
                                    i % 2 == 0 ? (ptrdiff_t)m : -(ptrdiff_t)m, err);
        }
    }
    return status;
}

um_status um_block_collapse(um_block *block, um_error *err) {
    size_t step = block->step_nbytes;
    if (um_hugetlb_shift(block->requested_pages) != 0 || step == 0) {
        return UM_OK;
    }
    if (block->requested_pages == UM_PAGES_4K) {
        return um_fail_os(err, EINVAL, block->committed_nbytes, "madvise");
    }
    size_t huge_page = step > um_os_page_bytes() ? step : um_huge_page_bytes();
    if (huge_page == 0) {
        return um_fail_os(err, EOPNOTSUPP, block->committed_nbytes, "madvise");
    }
    um_status status = block->mirror_nbytes == 0 ? collapse_all(block, huge_page, err)
                                                 : collapse_images(block, huge_page, err);
    /* The kernel asks no policy: a huge page comes to the node that most of it was on and, of equal
     * ones, to the first. All of an interleaved block would be there. */
    bool spread = block->numa.mode == UM_NUMA_INTERLEAVE || block->numa.mode == UM_NUMA_WEIGHTED;
    if (!spread) {
        return status;
    }
    um_status repaired = um_block_repair(block, NULL, status == UM_OK ? err : NULL);
    return status == UM_OK ? repaired : status;
}
