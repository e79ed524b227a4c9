/* The system calls of os.h on Linux. No other file includes sys/mman.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "os/os.h"

#include "base/stats.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/kernel.h" /* behind the system's headers */

static int result_of_map(void *mapped, void **out) {
    if (mapped == MAP_FAILED) {
        return errno;
    }
    *out = mapped;
    return 0;
}

int um__os_reserve(size_t nbytes, void **out) {
    um__count_os_call();
    return result_of_map(
        mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), out);
}

int um__os_reserve_at(void *address, size_t nbytes) {
    void *mapped;
    um__count_os_call();
    return result_of_map(mmap(address, nbytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0),
                         &mapped);
}

int um__os_map_at(void *address, size_t nbytes, unsigned huge_shift) {
    int huge = huge_shift == 0 ? 0 : MAP_HUGETLB | (int)(huge_shift << MAP_HUGE_SHIFT);
    /* The kernel interleaves by the offset in the mapping. For anonymous memory it takes the
     * address, whatever is said here, but for hugetlb memory it takes the offset as it is: with 0,
     * memory that a block grows by would always begin on the first node. */
    off_t offset = huge == 0 ? 0 : (off_t)(uintptr_t)address;
    void *mapped;
    um__count_os_call();
    return result_of_map(mmap(address, nbytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | huge, -1, offset),
                         &mapped);
}

int um__os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access) {
    int protection = access == UM_ACCESS_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    int sharing = access == UM_ACCESS_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
    void *mapped;
    um__count_os_call();
    return result_of_map(mmap(address, nbytes, protection, sharing | MAP_FIXED, fd, (off_t)offset),
                         &mapped);
}

int um__os_unmap(void *address, size_t nbytes) {
    um__count_os_call();
    return munmap(address, nbytes) == 0 ? 0 : errno;
}

int um__os_advise(void *address, size_t nbytes, um__os_advice advice) {
    static const int numbers[] = {
        [UM__OS_HUGE] = MADV_HUGEPAGE,
        [UM__OS_NO_HUGE] = MADV_NOHUGEPAGE,
        [UM__OS_COLLAPSE] = MADV_COLLAPSE,
        [UM__OS_DONT_FORK] = MADV_DONTFORK,
        [UM__OS_WILLNEED] = MADV_WILLNEED,
        [UM__OS_SEQUENTIAL] = MADV_SEQUENTIAL,
        [UM__OS_RANDOM] = MADV_RANDOM,
        [UM__OS_DONTNEED] = MADV_DONTNEED,
        [UM__OS_POPULATE_READ] = MADV_POPULATE_READ,
        [UM__OS_POPULATE_WRITE] = MADV_POPULATE_WRITE,
    };
    um__count_os_call();
    return madvise(address, nbytes, numbers[advice]) == 0 ? 0 : errno;
}

int um__os_residency(void *address, size_t nbytes, unsigned char *out_pages) {
    um__count_os_call();
    return mincore(address, nbytes, out_pages) == 0 ? 0 : errno;
}

int um__os_scan_pages(int pagemap, const void *address, size_t nbytes, um__page_run *out,
                      size_t capacity, size_t *out_n, size_t *out_scanned_nbytes) {
    um__scan_arguments arguments =
        um__scan_of((uintptr_t)address, (uintptr_t)address + nbytes, out, capacity);
    um__count_os_call();
    int n = ioctl(pagemap, UM__SCAN_PAGES, &arguments);
    if (n < 0) {
        return errno;
    }
    *out_n = (size_t)n;
    *out_scanned_nbytes = (size_t)(arguments.walk_end - arguments.start);
    return 0;
}

int um__os_lock(void *address, size_t nbytes, int on_fault) {
    um__count_os_call();
    return syscall(SYS_mlock2, address, nbytes, on_fault ? MLOCK_ONFAULT : 0) == 0 ? 0 : errno;
}

int um__os_unlock(void *address, size_t nbytes) {
    um__count_os_call();
    /* Calls the kernel as um__os_lock does, not through the C library: AddressSanitizer replaces its
     * munlock. */
    return syscall(SYS_munlock, address, nbytes) == 0 ? 0 : errno;
}

int um__os_bind(void *address, size_t nbytes, const um_numa *numa) {
    int n_nodes = 0;
    for (size_t i = 0; i < sizeof numa->nodes / sizeof numa->nodes[0]; i++) {
        n_nodes += __builtin_popcountll(numa->nodes[i]);
    }
    /* The mode for one preferred node is older than the one for several, and means the same. */
    const int modes[] = {
        [UM_NUMA_BIND] = UM__MPOL_BIND,
        [UM_NUMA_INTERLEAVE] = UM__MPOL_INTERLEAVE,
        [UM_NUMA_WEIGHTED] = UM__MPOL_WEIGHTED_INTERLEAVE,
        [UM_NUMA_PREFERRED] = n_nodes == 1 ? UM__MPOL_PREFERRED : UM__MPOL_PREFERRED_MANY,
    };
    um__count_os_call();
    /* The kernel reads one bit less than it is told. */
    return syscall(SYS_mbind, address, nbytes, modes[numa->mode], numa->nodes,
                   (unsigned long)UM_MAX_NODES + 1, 0) == 0
               ? 0
               : errno;
}

int um__os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status) {
    um__count_os_call();
    /* A positive result is the number of pages that could not be moved: out_status has the
     * reasons. */
    return syscall(SYS_move_pages, 0, n, pages, nodes, out_status, UM__MPOL_MF_MOVE) >= 0 ? 0
                                                                                          : errno;
}

int um__os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes) {
    um__count_os_call();
    ssize_t n = pread(fd, out, nbytes, (off_t)offset);
    if (n < 0) {
        return errno;
    }
    *out_nbytes = (size_t)n;
    return 0;
}

int um__os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes) {
    um__count_os_call();
    ssize_t n = read(fd, out, nbytes);
    if (n < 0) {
        return errno;
    }
    *out_nbytes = (size_t)n;
    return 0;
}

int um__os_file_nbytes(int fd, uint64_t *out) {
    struct stat st;
    um__count_os_call();
    if (fstat(fd, &st) != 0) {
        return errno;
    }
    *out = (uint64_t)st.st_size;
    return 0;
}

int um__os_file_page_bytes(int fd, size_t *out) {
    struct statfs fs;
    um__count_os_call();
    if (fstatfs(fd, &fs) != 0) {
        return errno;
    }
    bool huge = (uint32_t)fs.f_type == HUGETLBFS_MAGIC;
    *out = huge ? (size_t)fs.f_bsize : um__os_page_bytes();
    return 0;
}

int um__os_open_read(const char *path, int *out_fd) {
    um__count_os_call();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    *out_fd = fd;
    return 0;
}

int um__os_close(int fd) {
    um__count_os_call();
    return close(fd) == 0 ? 0 : errno;
}

int um__os_duplicate(int fd, int *out_fd) {
    um__count_os_call();
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        return errno;
    }
    *out_fd = copy;
    return 0;
}

int um__os_memfd(const char *name, unsigned huge_shift, int *out_fd) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    flags |= huge_shift == 0 ? 0 : MFD_HUGETLB | huge_shift << MFD_HUGE_SHIFT;
    /* Hardened kernels (vm.memfd_noexec) refuse memory that could be made executable. Old kernels
     * do not know the flag that rules it out. */
    um__count_os_call();
    int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) {
        um__count_os_call();
        fd = memfd_create(name, flags);
    }
    if (fd < 0) {
        return errno;
    }
    *out_fd = fd;
    return 0;
}

int um__os_resize(int fd, uint64_t nbytes) {
    um__count_os_call();
    return ftruncate(fd, (off_t)nbytes) == 0 ? 0 : errno;
}

int um__os_seal(int fd, int write) {
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | (write ? F_SEAL_WRITE | F_SEAL_SEAL : 0);
    um__count_os_call();
    return fcntl(fd, F_ADD_SEALS, seals) == 0 ? 0 : errno;
}

int um__os_punch_hole(int fd, uint64_t offset, uint64_t nbytes) {
    um__count_os_call();
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                     (off_t)nbytes) == 0
               ? 0
               : errno;
}

int um__os_fs_open(const char *type, int *out_fd) {
    um__count_os_call();
    long fd = syscall(UM__SYS_FSOPEN, type, UM__FSOPEN_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    *out_fd = (int)fd;
    return 0;
}

int um__os_fs_set(int fd, const char *key, const char *value) {
    um__count_os_call();
    int command = value == NULL ? UM__FSCONFIG_SET_FLAG : UM__FSCONFIG_SET_STRING;
    return syscall(UM__SYS_FSCONFIG, fd, command, key, value, 0) == 0 ? 0 : errno;
}

int um__os_fs_create(int fd) {
    um__count_os_call();
    return syscall(UM__SYS_FSCONFIG, fd, UM__FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0 ? 0 : errno;
}

int um__os_fs_mount(int fd, int *out_fd) {
    um__count_os_call();
    long mount = syscall(UM__SYS_FSMOUNT, fd, UM__FSMOUNT_CLOEXEC,
                         UM__MOUNT_ATTR_NOSUID | UM__MOUNT_ATTR_NODEV | UM__MOUNT_ATTR_NOEXEC);
    if (mount < 0) {
        return errno;
    }
    *out_fd = (int)mount;
    return 0;
}

int um__os_fs_pick(int mount, int *out_fd) {
    um__count_os_call();
    long fd = syscall(UM__SYS_FSPICK, mount, "", UM__FSPICK_EMPTY_PATH | UM__FSPICK_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    *out_fd = (int)fd;
    return 0;
}

int um__os_fs_reconfigure(int fd) {
    um__count_os_call();
    return syscall(UM__SYS_FSCONFIG, fd, UM__FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0) == 0 ? 0
                                                                                           : errno;
}

int um__os_get_affinity(void *mask, size_t mask_nbytes) {
    um__count_os_call();
    return sched_getaffinity(0, mask_nbytes, mask) == 0 ? 0 : errno;
}

int um__os_set_affinity(const void *mask, size_t mask_nbytes) {
    um__count_os_call();
    return sched_setaffinity(0, mask_nbytes, mask) == 0 ? 0 : errno;
}

int um__os_thread_start(um__os_thread *out, void *(*fn)(void *), void *arg) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        sigdelset(&blocked, faults[i]);
    }
    pthread_t thread;
    um__count_os_call();
    /* A thread begins with the mask of the one that makes it. */
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    int os_errno = pthread_create(&thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (os_errno == 0) {
        out->handle = (uint64_t)thread;
    }
    return os_errno;
}

int um__os_thread_join(um__os_thread thread) {
    um__count_os_call();
    return pthread_join((pthread_t)thread.handle, NULL);
}

int um__os_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    um__count_os_call();
    return pthread_atfork(before, in_parent, in_child);
}

int um__os_wait(const _Atomic uint32_t *word, uint32_t value, unsigned milliseconds) {
    struct timespec most = {.tv_sec = milliseconds / 1000,
                            .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    um__count_os_call();
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &most, NULL, 0) == 0 ? 0 : errno;
}

int um__os_wake(const _Atomic uint32_t *word) {
    um__count_os_call();
    return syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0) >= 0 ? 0 : errno;
}

int um__os_bus_action(const struct sigaction *action, struct sigaction *out_previous) {
    um__count_os_call();
    return sigaction(SIGBUS, action, out_previous) == 0 ? 0 : errno;
}

int um__os_raise_bus(void) {
    um__count_os_call();
    return raise(SIGBUS) == 0 ? 0 : errno;
}

int um__os_signal_mask(int how, const sigset_t *mask, sigset_t *out_previous) {
    um__count_os_call();
    return pthread_sigmask(how, mask, out_previous);
}

size_t um__os_page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}
