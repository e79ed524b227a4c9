/* Sharing: memory behind a descriptor, which other processes map too. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>

um_status um_share_make(const um_block_options *options, unsigned huge_shift, size_t nbytes,
                        int *out_fd, um_error *err) {
    int fd;
    bool own = options->sharing == UM_SHARING_MEMFD;
    const char *call = own ? "memfd_create" : "fcntl";
    const char *name = options->name == NULL ? "unimem" : options->name;
    int os_errno = own ? um_os_memfd(name, huge_shift, &fd) : um_os_duplicate(options->fd, &fd);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, nbytes, call);
    }
    call = "ftruncate";
    os_errno = um_os_resize(fd, nbytes);
    if (os_errno == 0 && own) {
        call = "fcntl";
        os_errno = um_os_seal(fd, 0);
    }
    if (os_errno != 0) {
        um_os_close(fd);
        return um_fail_os(err, os_errno, nbytes, call);
    }
    *out_fd = fd;
    return UM_OK;
}

/* The hugetlb pages of a file with this page size, or AUTO. */
static um_pages pages_of(size_t page_nbytes) {
    return page_nbytes == (size_t)1 << 21   ? UM_PAGES_2M
           : page_nbytes == (size_t)1 << 30 ? UM_PAGES_1G
                                            : UM_PAGES_AUTO;
}

um_status um_block_attach(um_block *out, int fd, um_access access, um_category category,
                          um_error *err) {
    if (um_category_name(category) == NULL) {
        return um_fail(err, UM_E_INVALID, "category");
    }
    if (access != UM_ACCESS_READ && access != UM_ACCESS_SHARED) {
        return um_fail(err, UM_E_INVALID, "access");
    }
    um_block block = {.category = category, .sharing = UM_SHARING_FD, .access = access};
    int os_errno = um_os_duplicate(fd, &block.fd);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, 0, "fcntl");
    }
    uint64_t file_nbytes = 0;
    const char *call = "fstat";
    os_errno = um_os_file_nbytes(block.fd, &file_nbytes);
    if (os_errno == 0) {
        call = "fstatfs";
        os_errno = um_os_file_page_bytes(block.fd, &block.step_nbytes);
    }
    um_status status = os_errno == 0 ? UM_OK : um_fail_os(err, os_errno, 0, call);
    if (status == UM_OK &&
        (file_nbytes == 0 || !um_round_up(file_nbytes, block.step_nbytes, &block.nbytes))) {
        status = um_fail(err, UM_E_INVALID, "the file is empty, or too large");
    }
    um_space space;
    if (status == UM_OK) {
        /* Huge pages of shared memory are mapped as such only at addresses of their multiples. */
        size_t huge_page = um_huge_page_bytes();
        bool huge = huge_page > block.step_nbytes && block.nbytes >= huge_page;
        status = um_space_reserve(&space, block.nbytes, huge ? huge_page : block.step_nbytes, 0,
                                  file_nbytes, err);
    }
    if (status != UM_OK) {
        um_os_close(block.fd);
        return status;
    }
    block.base = space.data;
    block.map_base = space.map_base;
    block.map_nbytes = space.map_nbytes;
    block.requested_nbytes = file_nbytes;
    block.requested_pages = pages_of(block.step_nbytes);
    block.reserved_nbytes = block.committed_nbytes = block.nbytes;
    call = "mmap";
    os_errno = um_os_map_file_at(block.base, block.fd, 0, block.nbytes, access);
    if (os_errno == 0 && access == UM_ACCESS_SHARED) {
        call = "madvise";
        os_errno = um_os_advise(block.base, block.nbytes, UM_OS_DONT_FORK);
    }
    if (os_errno != 0) {
        um_os_unmap(block.map_base, block.map_nbytes);
        um_os_close(block.fd);
        return um_fail_os(err, os_errno, file_nbytes, call);
    }
    um_ledger_enter(category, block.committed_nbytes);
    *out = block;
    return UM_OK;
}

um_status um_block_copy_sealed(um_block *out, const um_block *block,
                               const um_block_options *options, um_error *err) {
    um_block copy;
    um_block_options own = *options;
    own.sharing = UM_SHARING_MEMFD;
    own.reserve_nbytes = 0;
    um_status status = um_block_map(&copy, block->nbytes, &own, err);
    if (status != UM_OK) {
        return status;
    }
    /* A page that cannot be had must be an error here, not a signal in the copy. */
    status = um_block_warm(&copy, 0, copy.nbytes, 1, NULL, err);
    if (status == UM_OK) {
        memcpy(copy.base, block->base, block->nbytes);
        /* Sealing wants no writable mapping, and older kernels map sealed memory only through a
         * descriptor that cannot write. */
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", copy.fd);
        int read_fd = -1;
        const char *call = "mmap";
        int os_errno = um_os_reserve_at(copy.base, copy.nbytes);
        if (os_errno == 0) {
            call = "fcntl";
            os_errno = um_os_seal(copy.fd, 1);
        }
        if (os_errno == 0) {
            call = "open";
            os_errno = um_os_open_read(path, &read_fd);
        }
        if (os_errno == 0) {
            um_os_close(copy.fd);
            copy.fd = read_fd;
            copy.access = UM_ACCESS_READ;
            copy.numa =
                (um_numa){0}; /* the policy is the memory's now; setting it twice is a write */
            os_errno = um_block_map_steps(&copy, 0, copy.nbytes, &call);
            copy.numa = own.numa;
        }
        if (os_errno != 0) {
            status = um_fail_os(err, os_errno, block->nbytes, call);
        }
    }
    if (status != UM_OK) {
        um_block_unmap(&copy, NULL);
        return status;
    }
    *out = copy;
    return UM_OK;
}
