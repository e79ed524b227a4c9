/* File systems in memory that are mounted nowhere. */
#include "base/status.h"
#include "os/os.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

static um_status configure(int fs, uint64_t nbytes, int huge, int *out_fd, um_error *err) {
    char size[24];
    snprintf(size, sizeof size, "%" PRIu64, nbytes);
    UM__TRY_OS(um__os_fs_set(fs, "size", size), err, nbytes, "fsconfig");
    if (huge != 0) { /* a kernel without huge pages does not know this option */
        UM__TRY_OS(um__os_fs_set(fs, "huge", "always"), err, nbytes, "fsconfig");
    }
    UM__TRY_OS(um__os_fs_create(fs), err, nbytes, "fsconfig");
    UM__TRY_OS(um__os_fs_mount(fs, out_fd), err, nbytes, "fsmount");
    return UM_OK;
}

um_status um_tmpfs_open(int *out_fd, uint64_t nbytes, int huge, um_error *err) {
    int fs;
    UM__INVALID_IF(nbytes == 0, err, "nbytes"); /* the kernel would set no limit */
    UM__TRY_OS(um__os_fs_open("tmpfs", &fs), err, nbytes, "fsopen");
    um_status status = configure(fs, nbytes, huge, out_fd, err);
    um__os_close(fs);
    return status;
}

um_status um_tmpfs_seal(int fd, um_error *err) {
    int fs;
    UM__TRY_OS(um__os_fs_pick(fd, &fs), err, 0, "fspick");
    /* Changes the file system, not the mount: there may be clones of the mount. */
    int os_errno = um__os_fs_set(fs, "ro", NULL);
    os_errno = os_errno == 0 ? um__os_fs_reconfigure(fs) : os_errno;
    um__os_close(fs);
    UM__TRY_OS(os_errno, err, 0, "fsconfig");
    return UM_OK;
}
