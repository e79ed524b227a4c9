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

/* The logarithm of a hugetlb page's size; 0 for pages that are not hugetlb. */
static unsigned huge_shift_of(um_pages pages) {
    return pages == UM_PAGES_2M ? 21 : pages == UM_PAGES_1G ? 30 : 0;
}

static const char *unknown_option(const um_block_options *options) {
    bool has_node = false;
    for (size_t i = 0; i < sizeof options->numa.nodes / sizeof options->numa.nodes[0]; i++) {
        has_node |= options->numa.nodes[i] != 0;
    }
    if ((unsigned)options->pages > UM_PAGES_1G) {
        return "pages";
    }
    if (um_category_name(options->category) == NULL) {
        return "category";
    }
    if ((unsigned)options->sharing > UM_SHARING_FD) {
        return "sharing";
    }
    if ((unsigned)options->numa.mode > UM_NUMA_PREFERRED ||
        has_node != (options->numa.mode != UM_NUMA_NONE)) {
        return "numa";
    }
    return NULL;
}

int um_block_map_steps(const um_block *block, size_t offset, size_t nbytes, const char **out_call) {
    char *at = (char *)block->base + offset;
    bool shared = block->sharing != UM_SHARING_NONE;
    unsigned huge_shift = huge_shift_of(block->requested_pages);
    *out_call = "mmap";
    int os_errno = shared ? um_os_map_file_at(at, block->fd, offset, nbytes, block->access)
                          : um_os_map_at(at, nbytes, huge_shift);
    bool is_base = block->step_nbytes == um_os_page_bytes();
    if (os_errno == 0 && huge_shift == 0) {
        *out_call = "madvise";
        os_errno = um_os_advise(at, nbytes, is_base ? UM_OS_NO_HUGE : UM_OS_HUGE);
        if (os_errno == EINVAL && is_base) {
            os_errno = 0; /* a kernel without THP, where base pages need no advice */
        }
    }
    if (os_errno == 0 && shared && block->access == UM_ACCESS_SHARED) {
        *out_call = "madvise";
        os_errno = um_os_advise(at, nbytes, UM_OS_DONT_FORK);
    }
    if (os_errno == 0 && block->numa.mode != UM_NUMA_NONE) {
        *out_call = "mbind";
        os_errno = um_os_bind(at, nbytes, &block->numa);
    }
    if (os_errno == 0 && block->lock != UM_LOCK_NONE) {
        *out_call = "mlock2";
        os_errno = um_os_lock(at, nbytes, block->lock == UM_LOCK_ONFAULT);
    }
    return os_errno;
}

um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                       um_error *err) {
    const char *unknown = unknown_option(options);
    if (unknown != NULL) {
        return um_fail(err, UM_E_INVALID, unknown);
    }
    size_t most = options->reserve_nbytes == 0 ? nbytes : options->reserve_nbytes;
    if (most < nbytes) {
        return um_fail(err, UM_E_INVALID, "reserve_nbytes");
    }
    unsigned huge_shift = huge_shift_of(options->pages);
    size_t step = um_os_page_bytes();
    if (huge_shift != 0) {
        step = (size_t)1 << huge_shift;
    } else if (options->pages != UM_PAGES_4K) {
        size_t huge_page = um_huge_page_bytes();
        bool huge = huge_page != 0 && (options->pages == UM_PAGES_THP || most >= huge_page);
        step = huge ? huge_page : step;
    }
    um_block block = {.requested_nbytes = nbytes,
                      .requested_pages = options->pages,
                      .category = options->category,
                      .numa = options->numa,
                      .sharing = options->sharing,
                      .access = UM_ACCESS_PRIVATE,
                      .step_nbytes = step,
                      .fd = -1};
    if (nbytes == 0 || !um_round_up(nbytes, step, &block.nbytes) ||
        !um_round_up(most, step, &block.reserved_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    block.committed_nbytes = block.nbytes;
    um_space space;
    um_status status = um_space_reserve(&space, block.reserved_nbytes, step, 0, nbytes, err);
    if (status != UM_OK) {
        return status;
    }
    block.base = space.data;
    block.map_base = space.map_base;
    block.map_nbytes = space.map_nbytes;
    if (options->sharing != UM_SHARING_NONE) {
        block.access = UM_ACCESS_SHARED;
        status = um_share_make(options, huge_shift, block.reserved_nbytes, &block.fd, err);
    }
    if (status == UM_OK) {
        const char *call;
        int os_errno = um_block_map_steps(&block, 0, block.nbytes, &call);
        if (os_errno != 0) {
            status = um_fail_os(err, os_errno, nbytes, call);
        }
    }
    if (status != UM_OK) {
        um_os_unmap(block.map_base, block.map_nbytes);
        if (block.fd >= 0) {
            um_os_close(block.fd);
        }
        return status;
    }
    um_ledger_enter(block.category, block.committed_nbytes);
    *out = block;
    return UM_OK;
}

/* What is left of a block whose addresses are not its own any more. */
static void let_go(um_block *block) {
    if (block->sharing != UM_SHARING_NONE) {
        um_os_close(block->fd); /* whose failure closes it all the same */
    }
    um_heap_free(block->committed);
    um_ledger_leave(block->category, block->committed_nbytes);
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
    let_go(block);
    return UM_OK;
}

void um_block_forget(um_block *block) {
    if (block->map_base != NULL) {
        let_go(block);
    }
}

/* ---- what is asked of all that is committed ---- */

/* One madvise a committed run. */
static um_status advise_all(um_block *block, um_os_advice advice, um_error *err) {
    size_t start = 0, end = 0;
    while (um_block_next_run(block, end, block->reserved_nbytes, true, &start, &end)) {
        int os_errno = um_os_advise((char *)block->base + start, end - start, advice);
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, end - start, "madvise");
        }
    }
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
    if (advice == UM_ADVICE_DONTNEED && !(block->is_file && block->access != UM_ACCESS_PRIVATE)) {
        return um_fail(err, UM_E_INVALID, "advice: what is in this memory would be lost");
    }
    return advise_all(block, advices[advice], err);
}

um_status um_block_collapse(um_block *block, um_error *err) {
    if (huge_shift_of(block->requested_pages) != 0) {
        return UM_OK;
    }
    return advise_all(block, UM_OS_COLLAPSE, err);
}

/* 0 or an errno. */
static int lock_run(const um_block *block, size_t start, size_t end, um_lock lock) {
    char *at = (char *)block->base + start;
    return lock == UM_LOCK_NONE ? um_os_unlock(at, end - start)
                                : um_os_lock(at, end - start, lock == UM_LOCK_ONFAULT);
}

um_status um_block_lock(um_block *block, um_lock lock, um_error *err) {
    if ((unsigned)lock > UM_LOCK_ONFAULT) {
        return um_fail(err, UM_E_INVALID, "lock");
    }
    size_t start = 0, end = 0;
    while (um_block_next_run(block, end, block->reserved_nbytes, true, &start, &end)) {
        int os_errno = lock_run(block, start, end, lock);
        if (os_errno != 0) {
            /* As it was, the run that failed halfway included. */
            size_t undo_end = end;
            for (start = end = 0; um_block_next_run(block, end, undo_end, true, &start, &end);) {
                lock_run(block, start, end, block->lock);
            }
            return um_fail_os(err, os_errno, block->committed_nbytes,
                              lock == UM_LOCK_NONE ? "munlock" : "mlock2");
        }
    }
    block->lock = lock;
    return UM_OK;
}
