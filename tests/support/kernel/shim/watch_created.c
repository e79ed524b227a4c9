/* Writes down each file, folder, pipe and device that is created, with its mode at that moment: a
 * line "MODE INODE PATH" in the file that CREATED_LOG names, also by children. For LD_PRELOAD, by
 * tests/project/test_created_modes.py. Calls that the C library makes itself do not come by, but
 * those of `fopen` and `shm_open` do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool is_absent(int folder, const char *path) {
    return syscall(SYS_faccessat, folder, path, F_OK) != 0;
}

static void note(int fd) {
    int kept = errno;
    char link[64], path[4096] = "";
    struct stat it;
    const char *log = getenv("CREATED_LOG");
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    if (log != NULL && fstat(fd, &it) == 0 && readlink(link, path, sizeof(path) - 1) > 0) {
        int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
        int out = (int)syscall(SYS_openat, AT_FDCWD, log, flags, 0600);
        dprintf(out, "%o %lu %s\n", it.st_mode & 07777, (unsigned long)it.st_ino, path);
        syscall(SYS_close, out);
    }
    errno = kept;
}

static int opened(int folder, const char *path, int flags, unsigned mode) {
    bool is_new = (flags & O_TMPFILE) == O_TMPFILE || (flags & O_CREAT && is_absent(folder, path));
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (is_new && fd >= 0) {
        note(fd);
    }
    return fd;
}

static int made(long result, int folder, const char *path) {
    if (result == 0) {
        int flags = O_PATH | O_NOFOLLOW | O_CLOEXEC;
        int fd = (int)syscall(SYS_openat, folder, path, flags, 0);
        note(fd);
        syscall(SYS_close, fd);
    }
    return (int)result;
}

/* The mode of a variadic open, where one is given. */
#define MODE(flags, mode)                                                                          \
    unsigned mode = 0;                                                                             \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                         \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, unsigned);                                                             \
        va_end(more);                                                                              \
    }
#define OPENS(suffix)                                                                              \
    int open##suffix(const char *path, int flags, ...) {                                           \
        MODE(flags, mode)                                                                          \
        return opened(AT_FDCWD, path, flags, mode);                                                \
    }                                                                                              \
    int openat##suffix(int folder, const char *path, int flags, ...) {                             \
        MODE(flags, mode)                                                                          \
        return opened(folder, path, flags, mode);                                                  \
    }                                                                                              \
    int creat##suffix(const char *path, mode_t mode) {                                             \
        return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);                         \
    }                                                                                              \
    FILE *fopen##suffix(const char *path, const char *how) {                                       \
        bool is_new = is_absent(AT_FDCWD, path);                                                   \
        FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen" #suffix);             \
        FILE *file = real(path, how);                                                              \
        if (is_new && file != NULL) {                                                              \
            note(fileno(file));                                                                    \
        }                                                                                          \
        return file;                                                                               \
    }
OPENS()
OPENS(64)

int shm_open(const char *name, int flags, mode_t mode) {
    char path[300];
    snprintf(path, sizeof(path), "/dev/shm/%s", name + strspn(name, "/"));
    return opened(AT_FDCWD, path, flags | O_CLOEXEC | O_NOFOLLOW, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    return made(syscall(SYS_mkdirat, folder, path, mode), folder, path);
}
int mkdir(const char *path, mode_t mode) {
    return mkdirat(AT_FDCWD, path, mode);
}
int mknodat(int folder, const char *path, mode_t mode, dev_t device) {
    return made(syscall(SYS_mknodat, folder, path, mode, device), folder, path);
}
int mknod(const char *path, mode_t mode, dev_t device) {
    return mknodat(AT_FDCWD, path, mode, device);
}
int mkfifoat(int folder, const char *path, mode_t mode) {
    return mknodat(folder, path, mode | S_IFIFO, 0);
}
int mkfifo(const char *path, mode_t mode) {
    return mkfifoat(AT_FDCWD, path, mode);
}
