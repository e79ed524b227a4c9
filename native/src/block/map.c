/* Mapping the memory of a block into its address space. */
#include "block/map.h"

#include "base/status.h"
#include "block/mirror.h"
#include "block/space.h"
#include "os/os.h"

#include <errno.h>

/* Tells the kernel which pages a range may have. */
static int advise_pages(const um_block *block, void *address, size_t nbytes) {
    if (um__hugetlb_shift(block->requested_pages) != 0) {
        return 0;
    }
    if (block->step_nbytes > um__os_page_bytes()) {
        return um__os_advise(address, nbytes, UM__OS_HUGE);
    }
    if (block->sharing != UM_SHARING_NONE && block->requested_pages != UM_PAGES_4K) {
        return 0; /* the process that made shared memory decides */
    }
    int os_errno = um__os_advise(address, nbytes, UM__OS_NO_HUGE);
    return os_errno == EINVAL ? 0 : os_errno; /* a kernel without THP needs no advice */
}

/* mlock2 fails with EAGAIN if the system has no page. */
um_status um__fail_lock(um_error *err, int os_errno, size_t asked, const char *call) {
    return os_errno == EAGAIN ? um__fail_nomem(err, os_errno, asked, call)
                              : um__fail_os(err, os_errno, asked, call);
}

static int map_pages(const um_block *block, void *address, size_t offset, size_t nbytes) {
    if (block->mirror_nbytes != 0) {
        return um__mirror_map(block);
    }
    return block->sharing != UM_SHARING_NONE
               ? um__os_map_file_at(address, block->fd, offset, nbytes, block->access)
               : um__os_map_at(address, nbytes, um__hugetlb_shift(block->requested_pages));
}

um_status um__block_map_range(const um_block *block, size_t offset, size_t nbytes, size_t asked,
                              um_error *err) {
    char *address = (char *)block->base + offset;
    UM__TRY_OS(map_pages(block, address, offset, nbytes), err, asked, "mmap");
    UM__TRY_OS(advise_pages(block, address, nbytes), err, asked, "madvise");
    if (block->sharing != UM_SHARING_NONE && block->access != UM_ACCESS_READ) {
        UM__TRY_OS(um__os_advise(address, nbytes, UM__OS_DONT_FORK), err, asked, "madvise");
    }
    int os_errno =
        block->numa.mode == UM_NUMA_NONE ? 0 : um__os_bind(address, nbytes, &block->numa);
    if (os_errno != 0) {
        um_status status = um__fail_os(err, os_errno, asked, "mbind");
        if (err != NULL) {
            err->detail = UM_BLOCK_NO_POLICY;
        }
        return status;
    }
    if (block->lock != UM_LOCK_NONE) {
        os_errno = um__os_lock(address, nbytes, block->lock == UM_LOCK_ONFAULT);
    }
    return os_errno == 0 ? UM_OK : um__fail_lock(err, os_errno, asked, "mlock2");
}
