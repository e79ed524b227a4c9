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

/* ---- memory of another block ---- */

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
    UM__TRY_OS(um__os_file_nbytes(block->fd, &nbytes), err, 0, "fstat");
    UM__TRY_OS(um__os_file_page_bytes(block->fd, &block->step_nbytes), err, nbytes, "fstatfs");
    UM__INVALID_IF(!pages_of(block->step_nbytes, &block->requested_pages), err,
                   "fd: its huge pages are neither of 2 MiB nor of 1 GiB");
    UM__INVALID_IF(nbytes == 0, err, "fd: the file is empty");
    UM__INVALID_IF(nbytes > SIZE_MAX ||
                       !um__round_up((size_t)nbytes, block->step_nbytes, &whole_pages),
                   err, "fd: the file is too large");
    block->requested_nbytes = (size_t)nbytes;
    block->nbytes = block->reserved_nbytes = block->committed_nbytes = whole_pages;
    return UM_OK;
}

static um_status map_whole(um_block *block, um_error *err) {
    um__space space;
    UM__TRY(look_at_file(block, err));
    size_t align = um__space_align(block->step_nbytes, block->nbytes);
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
    UM__INVALID_IF(um_category_name(category) == NULL, err, "category");
    UM__INVALID_IF(access != UM_ACCESS_READ && access != UM_ACCESS_SHARED, err, "access");
    um_block block = {.category = category, .sharing = UM_SHARING_FD, .access = access};
    UM__TRY_OS(um__os_duplicate(fd, &block.fd), err, 0, "fcntl");
    um_status status = map_whole(&block, err);
    if (status != UM_OK) {
        um__os_close(block.fd);
        return status;
    }
    *out = block;
    um__ledger_enter(category, block.committed_nbytes);
    return UM_OK;
}

/* ---- sealed copies ---- */

/* Opens the file again for reading: before Linux 6.7, a sealed memfd cannot be mapped through a
 * descriptor that may write. If that fails, the old descriptor stays, which newer kernels map. */
static void reopen_read_only(um_block *block) {
    char path[32];
    int fd;
    snprintf(path, sizeof path, "/proc/self/fd/%d", block->fd);
    if (um__os_open_read(path, &fd) == 0) {
        um__os_close(block->fd);
        block->fd = fd;
    }
}

/* Seals the memory. The kernel refuses while a writable mapping exists, so the range is unmapped
 * first, and its address space stays reserved. */
static um_status seal(um_block *block, um_error *err) {
    UM__TRY_OS(um__os_reserve_at(block->base, block->reserved_nbytes), err, block->requested_nbytes,
               "mmap");
    UM__TRY_OS(um__os_seal(block->fd, 1), err, block->requested_nbytes, "fcntl");
    reopen_read_only(block);
    block->access = UM_ACCESS_READ;
    UM__TRY(um__block_map_range(block, 0, block->nbytes, block->requested_nbytes, err));
    /* The pages are in RAM, but the new mapping has none of them yet. */
    return um_block_warm(block, 0, block->nbytes, 1, NULL, err);
}

/* Copies the bytes; under the guard if another process may truncate their file. */
static um_status copy_bytes(const um_block *to, const um_block *from, um_error *err) {
    if (from->is_file || from->overlaid != NULL || from->sharing == UM_SHARING_FD) {
        return um_guard_copy(to->base, from->base, from->nbytes, err);
    }
    memcpy(to->base, from->base, from->nbytes);
    return UM_OK;
}

um_status um_block_copy_sealed(um_block *out, const um_block *block,
                               const um_block_options *options, um_error *err) {
    UM__INVALID_IF(options->sharing == UM_SHARING_FD, err, "sharing: only a memfd can be sealed");
    UM__INVALID_IF(options->reserve_nbytes != 0, err,
                   "reserve_nbytes: a sealed copy does not grow");
    UM__INVALID_IF(options->mirror_nbytes != 0, err, "mirror_nbytes: a sealed copy is mapped once");
    UM__INVALID_IF(block->nbytes == 0, err, "block: nothing is committed at its base");
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
        /* The first failure counts. A copy that cannot be unmapped stays in the ledger. */
        um_status unmapped = um_block_unmap(&copy, NULL);
        (void)unmapped;
        return status;
    }
    *out = copy;
    return UM_OK;
}
