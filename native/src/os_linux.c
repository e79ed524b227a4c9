/* The system calls of os.h on Linux. The only file that includes sys/mman.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "os.h"

#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linux 5.14; the C library's headers may be older than the kernel. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

static int result_of_map(void *mapped, void **out) {
    if (mapped == MAP_FAILED) {
        return errno;
    }
    *out = mapped;
    return 0;
}

int um_os_reserve(size_t nbytes, void **out) {
    um_count_os_call();
    return result_of_map(
        mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), out);
}

int um_os_map_at(void *address, size_t nbytes) {
    void *mapped;
    um_count_os_call();
    return result_of_map(mmap(address, nbytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
                         &mapped);
}

int um_os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access) {
    int protection = access == UM_ACCESS_PRIVATE ? PROT_READ | PROT_WRITE : PROT_READ;
    int sharing = access == UM_ACCESS_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
    void *mapped;
    um_count_os_call();
    return result_of_map(mmap(address, nbytes, protection, sharing | MAP_FIXED, fd, (off_t)offset),
                         &mapped);
}

int um_os_unmap(void *address, size_t nbytes) {
    um_count_os_call();
    return munmap(address, nbytes) == 0 ? 0 : errno;
}

int um_os_advise_huge(void *address, size_t nbytes, int huge) {
    um_count_os_call();
    return madvise(address, nbytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0 ? 0 : errno;
}

int um_os_populate(void *address, size_t nbytes, int write) {
    um_count_os_call();
    return madvise(address, nbytes, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0 ? 0
                                                                                           : errno;
}

int um_os_residency(void *address, size_t nbytes, unsigned char *out_pages) {
    um_count_os_call();
    return mincore(address, nbytes, out_pages) == 0 ? 0 : errno;
}

int um_os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes) {
    um_count_os_call();
    ssize_t n = pread(fd, out, nbytes, (off_t)offset);
    if (n < 0) {
        return errno;
    }
    *out_nbytes = (size_t)n;
    return 0;
}

int um_os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes) {
    um_count_os_call();
    ssize_t n = read(fd, out, nbytes);
    if (n < 0) {
        return errno;
    }
    *out_nbytes = (size_t)n;
    return 0;
}

int um_os_file_nbytes(int fd, uint64_t *out) {
    struct stat st;
    um_count_os_call();
    if (fstat(fd, &st) != 0) {
        return errno;
    }
    *out = (uint64_t)st.st_size;
    return 0;
}

int um_os_open_read(const char *path, int *out_fd) {
    um_count_os_call();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    *out_fd = fd;
    return 0;
}

int um_os_close(int fd) {
    um_count_os_call();
    return close(fd) == 0 ? 0 : errno;
}

int um_os_get_affinity(void *mask, size_t mask_nbytes) {
    um_count_os_call();
    return sched_getaffinity(0, mask_nbytes, mask) == 0 ? 0 : errno;
}

int um_os_set_affinity(const void *mask, size_t mask_nbytes) {
    um_count_os_call();
    return sched_setaffinity(0, mask_nbytes, mask) == 0 ? 0 : errno;
}

int um_os_thread_start(um_os_thread *out, void *(*fn)(void *), void *arg) {
    pthread_t thread;
    um_count_os_call();
    int os_errno = pthread_create(&thread, NULL, fn, arg);
    if (os_errno == 0) {
        out->handle = (uint64_t)thread;
    }
    return os_errno;
}

int um_os_thread_join(um_os_thread thread) {
    um_count_os_call();
    return pthread_join((pthread_t)thread.handle, NULL);
}

size_t um_os_page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}
