/* The file behind the shared memory of a new block: a memfd, or an empty file of the caller's. */
#include "block/map.h"

#include "base/status.h"
#include "block/space.h"
#include "os/os.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The kernel takes names up to this length, and puts "memfd:" before them. */
enum { MAX_NAME_BYTES = 249 };

static um_status make_memfd(const um_block_options *options, int *out_fd, um_error *err) {
    const char *name = options->name == NULL ? "unimem" : options->name;
    UM__INVALID_IF(strlen(name) > MAX_NAME_BYTES, err, "name is longer than 249 bytes");
    UM__TRY_OS(um__os_memfd(name, um__hugetlb_shift(options->pages), out_fd), err, 0,
               "memfd_create");
    return UM_OK;
}

static um_status check_file(int fd, um_pages pages, um_error *err) {
    unsigned shift = um__hugetlb_shift(pages);
    size_t page = 0, asked_page = shift == 0 ? um__os_page_bytes() : (size_t)1 << shift;
    uint64_t nbytes = 0;
    UM__TRY_OS(um__os_file_page_bytes(fd, &page), err, 0, "fstatfs");
    UM__INVALID_IF(page != asked_page, err, "pages: the file system has pages of another size");
    UM__TRY_OS(um__os_file_nbytes(fd, &nbytes), err, 0, "fstat");
    UM__INVALID_IF(nbytes != 0, err, "fd: the file is not empty");
    return UM_OK;
}

/* Takes the caller's file if memory can be made of it. */
static um_status take_file(const um_block_options *options, int *out_fd, um_error *err) {
    int fd;
    UM__TRY_OS(um__os_duplicate(options->fd, &fd), err, 0, "fcntl");
    um_status status = check_file(fd, options->pages, err);
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

static um_status set_size(int fd, size_t nbytes, bool seals, um_error *err) {
    UM__TRY_OS(um__os_resize(fd, nbytes), err, nbytes, "ftruncate");
    UM__TRY_OS(seals ? um__os_seal(fd, 0) : 0, err, nbytes, "fcntl");
    return UM_OK;
}

um_status um__memfd_open(const um_block_options *options, size_t nbytes, int *out_fd,
                         um_error *err) {
    bool is_file = options->sharing == UM_SHARING_FD;
    int fd;
    UM__TRY(is_file ? take_file(options, &fd, err) : make_memfd(options, &fd, err));
    um_status status = set_size(fd, nbytes, !is_file, err);
    if (status != UM_OK) {
        um__memfd_discard(options, fd);
        return status;
    }
    *out_fd = fd;
    return UM_OK;
}
