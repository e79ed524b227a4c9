/* The file behind the shared memory of a new block: a memfd, or an empty file of the caller's. */
#include "block/memfd.h"

#include "base/status.h"
#include "block/space.h"
#include "os/os.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The kernel takes names up to this length: it puts "memfd:" before them. */
enum { MAX_NAME_BYTES = 249 };

static um_status make_memfd(const um_block_options *options, int *out_fd, um_error *err) {
    const char *name = options->name == NULL ? "unimem" : options->name;
    if (strlen(name) > MAX_NAME_BYTES) {
        return um__fail(err, UM_E_INVALID, "name is longer than 249 bytes");
    }
    int os_errno = um__os_memfd(name, um__hugetlb_shift(options->pages), out_fd);
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, "memfd_create");
}

/* The caller's file, when memory can be made of it. */
static um_status take_file(const um_block_options *options, int *out_fd, um_error *err) {
    int fd;
    int os_errno = um__os_duplicate(options->fd, &fd);
    if (os_errno != 0) {
        return um__fail_os(err, os_errno, 0, "fcntl");
    }
    unsigned shift = um__hugetlb_shift(options->pages);
    size_t page = 0, asked_page = shift == 0 ? um__os_page_bytes() : (size_t)1 << shift;
    uint64_t nbytes = 0;
    um_status status = UM_OK;
    if ((os_errno = um__os_file_page_bytes(fd, &page)) != 0) {
        status = um__fail_os(err, os_errno, 0, "fstatfs");
    } else if (page != asked_page) {
        status = um__fail(err, UM_E_INVALID, "pages: the file system has pages of another size");
    } else if ((os_errno = um__os_file_nbytes(fd, &nbytes)) != 0) {
        status = um__fail_os(err, os_errno, 0, "fstat");
    } else if (nbytes != 0) {
        status = um__fail(err, UM_E_INVALID, "fd: the file is not empty");
    }
    if (status != UM_OK) {
        um__os_close(fd);
        return status;
    }
    *out_fd = fd;
    return UM_OK;
}

void um__memfd_discard(const um_block_options *options, int fd) {
    if (options->sharing == UM_SHARING_FD) {
        um__os_resize(fd, 0);
    }
    um__os_close(fd);
}

um_status um__memfd_open(const um_block_options *options, size_t nbytes, int *out_fd,
                         um_error *err) {
    bool is_file = options->sharing == UM_SHARING_FD;
    int fd;
    UM__TRY(is_file ? take_file(options, &fd, err) : make_memfd(options, &fd, err));
    const char *call = "ftruncate";
    int os_errno = um__os_resize(fd, nbytes);
    if (os_errno == 0 && !is_file) {
        call = "fcntl";
        os_errno = um__os_seal(fd, 0);
    }
    if (os_errno != 0) {
        um__memfd_discard(options, fd);
        return um__fail_os(err, os_errno, nbytes, call);
    }
    *out_fd = fd;
    return UM_OK;
}
