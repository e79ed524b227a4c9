/* Files: mapping a range, and reading one without mapping it. */
#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "block/map.h"
#include "block/space.h"
#include "os/os.h"

#include <errno.h>
#include <stdint.h>

/* Finds whether the page cache of a file is hidden from this user. Since Linux 5.2, the kernel
 * tells a user who neither owns a file nor may write it that all of it is in RAM, even a page
 * behind its end. This page stays mapped at `space`. Returns 0 or an errno. */
static int find_whether_hidden(int fd, uint64_t file_nbytes, void *space, int *out) {
    size_t page = um__os_page_bytes();
    unsigned char in_ram = 0;
    uint64_t behind = (file_nbytes + page - 1) / page * page;
    int os_errno = um__os_map_file_at(space, fd, behind, page, UM_ACCESS_READ);
    if (os_errno == 0) {
        /* A kernel that refuses to answer hides the cache as well. */
        *out = um__os_residency(space, page, &in_ram) != 0 || (in_ram & 1) != 0;
    }
    return os_errno;
}

/* A range of a file to map. */
typedef struct file_range {
    int fd;
    uint64_t offset, file_nbytes;
    size_t nbytes, whole_pages, page;
} file_range;

um_status um__file_check_range(int fd, uint64_t offset, size_t nbytes, size_t *out_page,
                               uint64_t *out_file_nbytes, um_error *err) {
    UM__TRY_OS(um__os_file_page_bytes(fd, out_page), err, nbytes, "fstatfs");
    UM__INVALID_IF(offset % *out_page != 0, err,
                   "the offset in the file is not a multiple of the page size");
    UM__TRY_OS(um__os_file_nbytes(fd, out_file_nbytes), err, nbytes, "fstat");
    UM__RETURN_IF(offset > *out_file_nbytes || nbytes > *out_file_nbytes - offset,
                  um__fail_detail(err, UM_E_INVALID, UM_BLOCK_PAST_FILE,
                                  "the range goes beyond the end of the file"));
    return UM_OK;
}

/* Maps the range at `base`. errors: UM_E_NOMEM, UM_E_OS. */
static um_status map_at(void *base, const file_range *range, um_access access,
                        int *out_is_cache_hidden, um_error *err) {
    *out_is_cache_hidden = 0;
    /* hugetlb pages are promised when they are mapped, and are not in the page cache. */
    if (range->page == um__os_page_bytes()) {
        UM__TRY_OS(find_whether_hidden(range->fd, range->file_nbytes, base, out_is_cache_hidden),
                   err, range->nbytes, "mmap");
    }
    UM__TRY_OS(um__os_map_file_at(base, range->fd, range->offset, range->nbytes, access), err,
               range->nbytes, "mmap");
    if (access == UM_ACCESS_SHARED) {
        UM__TRY_OS(um__os_advise(base, range->whole_pages, UM__OS_DONT_FORK), err, range->nbytes,
                   "madvise");
    }
    return UM_OK;
}

um_status um_block_map_file(um_block *out, int fd, uint64_t offset, size_t nbytes, um_access access,
                            um_category category, um_error *err) {
    UM__INVALID_IF(um_category_name(category) == NULL, err, "category");
    UM__INVALID_IF((unsigned)access > UM_ACCESS_SHARED, err, "access");
    file_range range = {.fd = fd, .offset = offset, .nbytes = nbytes};
    UM__TRY(um__file_check_range(fd, offset, nbytes, &range.page, &range.file_nbytes, err));
    UM__INVALID_IF(nbytes == 0 || !um__round_up(nbytes, range.page, &range.whole_pages), err,
                   "nbytes");
    size_t align = um__space_align(range.page, range.whole_pages);
    um__space space;
    int is_cache_hidden;
    UM__TRY(um__space_reserve(&space, range.whole_pages, align, offset % align, nbytes, err));
    um_status status = map_at(space.data, &range, access, &is_cache_hidden, err);
    if (status != UM_OK) {
        um__os_unmap(space.map_base, space.map_nbytes);
        return status;
    }
    *out = (um_block){.base = space.data,
                      .nbytes = nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = UM_PAGES_AUTO,
                      .category = category,
                      .access = access,
                      .step_nbytes = range.page,
                      .reserved_nbytes = range.whole_pages,
                      .committed_nbytes = range.whole_pages,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .fd = -1,
                      .is_file = 1,
                      .is_cache_hidden = is_cache_hidden};
    um__ledger_enter(category, range.whole_pages);
    return UM_OK;
}

um_status um_file_read(int fd, uint64_t offset, void *out, size_t nbytes, um_error *err) {
    size_t done = 0;
    while (done < nbytes) {
        size_t n;
        int os_errno = um__os_pread(fd, (char *)out + done, nbytes - done, offset + done, &n);
        if (os_errno == EINTR) {
            continue;
        }
        if (os_errno != 0 || n == 0) {
            um__fail_io(err, os_errno, nbytes, "pread");
            if (err != NULL) {
                err->used = done;
            }
            return UM_E_IO;
        }
        done += n;
    }
    return UM_OK;
}
