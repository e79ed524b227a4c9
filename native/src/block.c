/* Blocks: mapped memory, its pages, and what the kernel says of it. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdlib.h>

size_t um_page_bytes(void) {
    return um_os_page_bytes();
}

/* A small file of /proc or /sys as text; its length, or 0. */
static size_t read_text(const char *path, char *out, size_t capacity) {
    int fd;
    size_t n = 0;
    if (um_os_open_read(path, &fd) != 0) {
        return 0;
    }
    if (um_os_read(fd, out, capacity - 1, &n) != 0) {
        n = 0;
    }
    um_os_close(fd);
    out[n] = '\0';
    return n;
}

size_t um_huge_page_bytes(void) {
    char text[32];
    size_t n = read_text("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof text);
    return n == 0 ? 0 : (size_t)strtoull(text, NULL, 10);
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

um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                       um_error *err) {
    um_pages pages = options->pages;
    um_category category = options->category;
    size_t page = um_os_page_bytes();
    if (um_category_name(category) == NULL) {
        return um_fail(err, UM_E_INVALID, "category");
    }
    if (pages != UM_PAGES_AUTO && pages != UM_PAGES_4K && pages != UM_PAGES_THP) {
        return um_fail(err, UM_E_INVALID, "pages");
    }
    size_t huge_page = pages == UM_PAGES_4K ? 0 : um_huge_page_bytes();
    bool huge = huge_page != 0 && (pages == UM_PAGES_THP || nbytes >= huge_page);
    size_t align = huge ? huge_page : page;
    size_t data_nbytes;
    if (nbytes == 0 || !um_round_up(nbytes, align, &data_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    um_space space;
    um_status status = um_space_reserve(&space, data_nbytes, align, 0, nbytes, err);
    if (status != UM_OK) {
        return status;
    }
    const char *call = "mmap";
    int os_errno = um_os_map_at(space.data, data_nbytes, 0);
    if (os_errno == 0 && (huge_page != 0 || pages == UM_PAGES_4K)) {
        call = "madvise";
        os_errno = um_os_advise(space.data, data_nbytes, huge ? UM_OS_HUGE : UM_OS_NO_HUGE);
        if (os_errno == EINVAL && pages == UM_PAGES_4K) {
            os_errno = 0; /* a kernel without THP, where 4k pages need no advice */
        }
    }
    if (os_errno != 0) {
        um_os_unmap(space.map_base, space.map_nbytes);
        return um_fail_os(err, os_errno, nbytes, call);
    }
    *out = (um_block){.base = space.data,
                      .nbytes = data_nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = pages,
                      .category = category,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .is_file = 0};
    um_ledger_enter(category, data_nbytes);
    return UM_OK;
}

um_status um_block_unmap(um_block *block, um_error *err) {
    if (block->map_base == NULL) {
        return UM_OK;
    }
    int os_errno = um_os_unmap(block->map_base, block->map_nbytes);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, block->map_nbytes, "munmap");
    }
    um_ledger_leave(block->category, block->map_nbytes - 2 * um_os_page_bytes());
    *block = (um_block){0};
    return UM_OK;
}
