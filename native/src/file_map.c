/* Files: mapping a range, and reading one without mapping it. */
#include "internal.h"
#include "os.h"

#include <errno.h>

/* Since Linux 5.2 the kernel says that all of a file is in RAM to those who neither own nor may
 * write it: even a page behind its end, which nothing can hold. Leaves that mapped at `space`. */
static int find_whether_hidden(int fd, uint64_t file_nbytes, void *space, int *out) {
    size_t page = um_os_page_bytes();
    unsigned char in_ram = 0;
    uint64_t behind = (file_nbytes + page - 1) / page * page;
    int os_errno = um_os_map_file_at(space, fd, behind, page, UM_ACCESS_READ);
    if (os_errno == 0) {
        /* Where the question is forbidden, nothing is told either. */
        *out = um_os_residency(space, page, &in_ram) != 0 || (in_ram & 1) != 0;
    }
    return os_errno;
}

um_status um_block_map_file(um_block *out, int fd, uint64_t offset, size_t nbytes, um_access access,
                            um_category category, um_error *err) {
    if (um_category_name(category) == NULL) {
        return um_fail(err, UM_E_INVALID, "category");
    }
    if ((unsigned)access > UM_ACCESS_SHARED) {
        return um_fail(err, UM_E_INVALID, "access");
    }
    size_t page, whole_pages;
    int os_errno = um_os_file_page_bytes(fd, &page);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, nbytes, "fstatfs");
    }
    if (offset % page != 0) {
        return um_fail(err, UM_E_INVALID, "offset is not a multiple of the page size");
    }
    if (nbytes == 0 || !um_round_up(nbytes, page, &whole_pages)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    uint64_t file_nbytes;
    os_errno = um_os_file_nbytes(fd, &file_nbytes);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, nbytes, "fstat");
    }
    if (offset > file_nbytes || nbytes > file_nbytes - offset) {
        return um_fail(err, UM_E_INVALID, "the range goes beyond the end of the file");
    }
    /* Huge pages of the page cache are mapped as such only where address and offset agree. */
    size_t huge_page = um_huge_page_bytes();
    size_t align = huge_page > page && whole_pages >= huge_page ? huge_page : page;
    um_space space;
    um_status status = um_space_reserve(&space, whole_pages, align, offset % align, nbytes, err);
    if (status != UM_OK) {
        return status;
    }
    const char *call = "mmap";
    int is_cache_hidden = 0;
    /* hugetlb pages are asked for when they are mapped, and are not in the page cache. */
    os_errno = page == um_os_page_bytes()
                   ? find_whether_hidden(fd, file_nbytes, space.data, &is_cache_hidden)
                   : 0;
    if (os_errno == 0) {
        os_errno = um_os_map_file_at(space.data, fd, offset, nbytes, access);
    }
    if (os_errno == 0 && access == UM_ACCESS_SHARED) {
        call = "madvise";
        os_errno = um_os_advise(space.data, whole_pages, UM_OS_DONT_FORK);
    }
    if (os_errno != 0) {
        um_os_unmap(space.map_base, space.map_nbytes);
        return um_fail_os(err, os_errno, nbytes, call);
    }
    *out = (um_block){.base = space.data,
                      .nbytes = nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = UM_PAGES_AUTO,
                      .category = category,
                      .access = access,
                      .step_nbytes = page,
                      .reserved_nbytes = whole_pages,
                      .committed_nbytes = whole_pages,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .fd = -1,
                      .is_file = 1,
                      .is_cache_hidden = is_cache_hidden};
    um_ledger_enter(category, whole_pages);
    return UM_OK;
}

um_status um_file_read(int fd, uint64_t offset, void *out, size_t nbytes, um_error *err) {
    size_t done = 0;
    while (done < nbytes) {
        size_t n;
        int os_errno = um_os_pread(fd, (char *)out + done, nbytes - done, offset + done, &n);
        if (os_errno == EINTR) {
            continue;
        }
        if (os_errno != 0 || n == 0) {
            um_fail(err, UM_E_IO, "pread");
            if (err != NULL) {
                err->os_errno = os_errno;
                err->used = done;
                err->asked = nbytes;
            }
            return UM_E_IO;
        }
        done += n;
    }
    return UM_OK;
}
