/* File systems in memory that are mounted nowhere. */
#include "base/status.h"
#include "os/os.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

static um_status configure(int fs, uint64_t nbytes, int huge, int *out_fd, um_error *err) {
    char size[24];
    snprintf(size, sizeof size, "%" PRIu64, nbytes);
    const char *call = "fsconfig";
    int os_errno = um__os_fs_set(fs, "size", size);
    /* A kernel without huge pages does not know this option, and uses none anyway. */
    if (os_errno == 0 && huge != 0) {
        os_errno = um__os_fs_set(fs, "huge", "always");
    }
    if (os_errno == 0) {
        os_errno = um__os_fs_create(fs);
    }
    if (os_errno == 0) {
        call = "fsmount";
        os_errno = um__os_fs_mount(fs, out_fd);
    }
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, nbytes, call);
}

um_status um_tmpfs_open(int *out_fd, uint64_t nbytes, int huge, um_error *err) {
    UM__INVALID_IF(nbytes == 0, err, "nbytes"); /* the kernel would set no limit */
    int fs;
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
    if (os_errno == 0) {
        os_errno = um__os_fs_reconfigure(fs);
    }
    um__os_close(fs);
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, "fsconfig");
}
