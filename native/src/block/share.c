/* Sharing: mapping another block's memory, and making sealed copies. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "block/map.h"
#include "block/space.h"
#include "os/os.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* ---- memory of somebody else ---- */

/* Finds the name of a file's page size; returns false if it has none. */
static bool pages_of(size_t page, um_pages *out) {
    static const um_pages hugetlb[] = {UM_PAGES_2M, UM_PAGES_1G};
    if (page == um__os_page_bytes()) {
        *out = UM_PAGES_AUTO;
        return true;
    }
    for (size_t i = 0; i < sizeof hugetlb / sizeof hugetlb[0]; i++) {
        if (page == (size_t)1 << um__hugetlb_shift(hugetlb[i])) {
            *out = hugetlb[i];
            return true;
        }
    }
    return false;
}

/* Fills the block's sizes and pages from the file of block->fd. */
static um_status look_at_file(um_block *block, um_error *err) {
    uint64_t nbytes;
    size_t whole_pages;
    int os_errno = um__os_file_nbytes(block->fd, &nbytes);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, 0, "fstat");
    }
    os_errno = um__os_file_page_bytes(block->fd, &block->step_nbytes);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, nbytes, "fstatfs");
    }
    if (!pages_of(block->step_nbytes, &block->requested_pages)) {
        return um__fail(err, UM_E_INVALID, "fd: its huge pages are neither of 2 MiB nor of 1 GiB");
    }
    if (nbytes == 0) {
        return um__fail(err, UM_E_INVALID, "fd: the file is empty");
    }
    if (nbytes > SIZE_MAX || !um__round_up((size_t)nbytes, block->step_nbytes, &whole_pages)) {
        return um__fail(err, UM_E_INVALID, "fd: the file is too large");
    }
    block->requested_nbytes = (size_t)nbytes;
    block->nbytes = block->reserved_nbytes = block->committed_nbytes = whole_pages;
    return UM_OK;
}

static um_status map_whole(um_block *block, um_error *err) {
    size_t huge_page = um_huge_page_bytes(), align = block->step_nbytes;
    /* The kernel maps huge pages of shared memory as such only where address and offset agree. */
    if (huge_page > align && block->nbytes >= huge_page) {
        align = huge_page;
    }
    um__space space;
    UM__TRY(um__space_reserve(&space, block->nbytes, align, 0, block->requested_nbytes, err));
    block->base = space.data;
    block->map_base = space.map_base;
    block->map_nbytes = space.map_nbytes;
    um_status status = um__block_map_range(block, 0, block->nbytes, block->requested_nbytes, err);
    if (status != UM_OK) {
        um__os_unmap(space.map_base, space.map_nbytes);
    }
    return status;
}

um_status um_block_attach(um_block *out, int fd, um_access access, um_category category,
                          um_error *err) {
    if (um_category_name(category) == NULL) {
        return um__fail(err, UM_E_INVALID, "category");
    }
    if (access != UM_ACCESS_READ && access != UM_ACCESS_SHARED) {
        return um__fail(err, UM_E_INVALID, "access");
    }
    um_block block = {.category = category, .sharing = UM_SHARING_FD, .access = access};
    int os_errno = um__os_duplicate(fd, &block.fd);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, 0, "fcntl");
    }
    um_status status = look_at_file(&block, err);
    if (status == UM_OK) {
        status = map_whole(&block, err);
    }
    if (status != UM_OK) {
        um__os_close(block.fd);
        return status;
    }
    *out = block;
    um__ledger_enter(category, block.committed_nbytes);
    return UM_OK;
}

/* ---- sealed copies ---- */

/* Before Linux 6.7, a sealed memfd cannot be mapped through a descriptor that may write. If the
 * file cannot be opened again for reading, the old descriptor stays: newer kernels map it. */
static void reopen_read_only(um_block *block) {
    char path[32];
    int fd;
    snprintf(path, sizeof path, "/proc/self/fd/%d", block->fd);
    if (um__os_open_read(path, &fd) == 0) {
        um__os_close(block->fd);
        block->fd = fd;
    }
}

/* Seals the memory. The kernel refuses to while a writable mapping exists, so the range is unmapped
 * first; its address space stays reserved. */
static um_status seal(um_block *block, um_error *err) {
    int os_errno = um__os_reserve_at(block->base, block->reserved_nbytes);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, block->requested_nbytes, "mmap");
    }
    os_errno = um__os_seal(block->fd, 1);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, block->requested_nbytes, "fcntl");
    }
    reopen_read_only(block);
    block->access = UM_ACCESS_READ;
    UM__TRY(um__block_map_range(block, 0, block->nbytes, block->requested_nbytes, err));
    /* The pages are in RAM, but the new mapping has none of them yet. */
    return um_block_warm(block, 0, block->nbytes, 1, NULL, err);
}

/* Copies the bytes; under the guard if they are of a file that others may truncate. */
static um_status copy_bytes(const um_block *to, const um_block *from, um_error *err) {
    if (from->is_file || from->overlaid != NULL || from->sharing == UM_SHARING_FD) {
        return um_guard_copy(to->base, from->base, from->nbytes, err);
    }
    memcpy(to->base, from->base, from->nbytes);
    return UM_OK;
}

um_status um_block_copy_sealed(um_block *out, const um_block *block,
                               const um_block_options *options, um_error *err) {
    if (options->sharing == UM_SHARING_FD) {
        return um__fail(err, UM_E_INVALID, "sharing: only a memfd can be sealed");
    }
    if (options->reserve_nbytes != 0) {
        return um__fail(err, UM_E_INVALID, "reserve_nbytes: a sealed copy does not grow");
    }
    if (options->mirror_nbytes != 0) {
        return um__fail(err, UM_E_INVALID, "mirror_nbytes: a sealed copy is mapped once");
    }
    if (block->nbytes == 0) {
        return um__fail(err, UM_E_INVALID, "block: nothing is committed at its base");
    }
    um_block copy;
    um_block_options shared = *options;
    shared.sharing = UM_SHARING_MEMFD;
    UM__TRY(um_block_map(&copy, block->nbytes, &shared, err));
    /* Without memory, warming fails, while memcpy would kill the process. */
    um_status status = um_block_warm(&copy, 0, block->nbytes, 1, NULL, err);
    if (status == UM_OK) {
        status = copy_bytes(&copy, block, err);
    }
    if (status == UM_OK) {
        status = seal(&copy, err);
    }
    if (status != UM_OK) {
        /* The caller hears of the first failure. A copy that cannot be unmapped stays in the
         * ledger. */
        um_status unmapped = um_block_unmap(&copy, NULL);
        (void)unmapped;
        return status;
    }
    *out = copy;
    return UM_OK;
}
