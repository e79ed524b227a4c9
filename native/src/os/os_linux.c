/* The system calls of os.h on Linux. No other file includes sys/mman.h. Each call is counted. */
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
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/kernel.h" /* behind the system's headers */

/* Returns 0, or the errno of a call that returned a negative number. */
static int result_of(long result) {
    um__count_os_call();
    return result < 0 ? errno : 0;
}

/* Does so for a call that returns a descriptor. */
static int descriptor_of(long result, int *out_fd) {
    int os_errno = result_of(result);
    if (os_errno == 0) {
        *out_fd = (int)result;
    }
    return os_errno;
}

/* Does so for a call that returns a number of bytes or other things. */
static int count_of(long result, size_t *out) {
    int os_errno = result_of(result);
    if (os_errno == 0) {
        *out = (size_t)result;
    }
    return os_errno;
}

/* Maps at *address, or where the kernel likes. */
static int map(void **address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    um__count_os_call();
    void *mapped = mmap(*address, nbytes, protection, flags, fd, offset);
    if (mapped == MAP_FAILED) {
        return errno;
    }
    *address = mapped;
    return 0;
}

enum { RESERVES = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };

int um__os_reserve(size_t nbytes, void **out) {
    void *mapped = NULL;
    int os_errno = map(&mapped, nbytes, PROT_NONE, RESERVES, -1, 0);
    if (os_errno == 0) {
        *out = mapped;
    }
    return os_errno;
}

int um__os_reserve_at(void *address, size_t nbytes) {
    return map(&address, nbytes, PROT_NONE, RESERVES | MAP_FIXED, -1, 0);
}

int um__os_map_at(void *address, size_t nbytes, unsigned huge_shift) {
    int huge = huge_shift == 0 ? 0 : MAP_HUGETLB | (int)(huge_shift << MAP_HUGE_SHIFT);
    /* The kernel interleaves by the offset in the mapping. For anonymous memory it takes the
     * address, whatever the offset, but for hugetlb memory it takes the offset as it is: with 0,
     * memory that a block grows by would always begin on the first node. */
    off_t offset = huge == 0 ? 0 : (off_t)(uintptr_t)address;
    return map(&address, nbytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | huge, -1, offset);
}

int um__os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access) {
    int protection = access == UM_ACCESS_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    int sharing = access == UM_ACCESS_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
    return map(&address, nbytes, protection, sharing | MAP_FIXED, fd, (off_t)offset);
}

int um__os_unmap(void *address, size_t nbytes) {
    return result_of(munmap(address, nbytes));
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
    return result_of(madvise(address, nbytes, numbers[advice]));
}

int um__os_residency(void *address, size_t nbytes, unsigned char *out_pages) {
    return result_of(mincore(address, nbytes, out_pages));
}

int um__os_scan_pages(int pagemap, const void *address, size_t nbytes, um__page_run *out,
                      size_t capacity, size_t *out_n, size_t *out_scanned_nbytes) {
    um__scan_arguments arguments =
        um__scan_of((uintptr_t)address, (uintptr_t)address + nbytes, out, capacity);
    int os_errno = count_of(ioctl(pagemap, UM__SCAN_PAGES, &arguments), out_n);
    *out_scanned_nbytes = (size_t)(arguments.walk_end - arguments.start);
    return os_errno;
}

int um__os_lock(void *address, size_t nbytes, int on_fault) {
    return result_of(syscall(SYS_mlock2, address, nbytes, on_fault ? MLOCK_ONFAULT : 0));
}

int um__os_unlock(void *address, size_t nbytes) {
    /* As um__os_lock, not through the C library, whose munlock AddressSanitizer replaces. */
    return result_of(syscall(SYS_munlock, address, nbytes));
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
    /* The kernel reads one bit less than the size says. */
    return result_of(syscall(SYS_mbind, address, nbytes, modes[numa->mode], numa->nodes,
                             (unsigned long)UM_MAX_NODES + 1, 0));
}

int um__os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status) {
    /* A positive result counts pages that could not be moved; out_status has the reasons. */
    return result_of(syscall(SYS_move_pages, 0, n, pages, nodes, out_status, UM__MPOL_MF_MOVE));
}

int um__os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes) {
    return count_of(pread(fd, out, nbytes, (off_t)offset), out_nbytes);
}

int um__os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes) {
    return count_of(read(fd, out, nbytes), out_nbytes);
}

int um__os_file_nbytes(int fd, uint64_t *out) {
    struct stat st;
    int os_errno = result_of(fstat(fd, &st));
    if (os_errno == 0) {
        *out = (uint64_t)st.st_size;
    }
    return os_errno;
}

int um__os_file_page_bytes(int fd, size_t *out) {
    struct statfs fs;
    int os_errno = result_of(fstatfs(fd, &fs));
    if (os_errno == 0) {
        bool huge = (uint32_t)fs.f_type == HUGETLBFS_MAGIC;
        *out = huge ? (size_t)fs.f_bsize : um__os_page_bytes();
    }
    return os_errno;
}

int um__os_open_read(const char *path, int *out_fd) {
    return descriptor_of(open(path, O_RDONLY | O_CLOEXEC), out_fd);
}

int um__os_open_direct(int fd, int *out_fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return descriptor_of(open(path, O_RDONLY | O_CLOEXEC | O_DIRECT), out_fd);
}

int um__os_close(int fd) {
    return result_of(close(fd));
}

int um__os_duplicate(int fd, int *out_fd) {
    return descriptor_of(fcntl(fd, F_DUPFD_CLOEXEC, 0), out_fd);
}

int um__os_memfd(const char *name, unsigned huge_shift, int *out_fd) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    flags |= huge_shift == 0 ? 0 : MFD_HUGETLB | huge_shift << MFD_HUGE_SHIFT;
    /* Hardened kernels (vm.memfd_noexec) refuse memory that could be made executable. Old kernels
     * do not know the flag that rules it out. */
    int os_errno = descriptor_of(memfd_create(name, flags | MFD_NOEXEC_SEAL), out_fd);
    return os_errno == EINVAL ? descriptor_of(memfd_create(name, flags), out_fd) : os_errno;
}

int um__os_resize(int fd, uint64_t nbytes) {
    return result_of(ftruncate(fd, (off_t)nbytes));
}

int um__os_seal(int fd, int write) {
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | (write ? F_SEAL_WRITE | F_SEAL_SEAL : 0);
    return result_of(fcntl(fd, F_ADD_SEALS, seals));
}

int um__os_punch_hole(int fd, uint64_t offset, uint64_t nbytes) {
    return result_of(
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)nbytes));
}

int um__os_ring_setup(unsigned n, um__ring_params *params, int *out_fd) {
    return descriptor_of(syscall(UM__SYS_RING_SETUP, n, params), out_fd);
}

int um__os_ring_map(int fd, uint64_t offset, size_t nbytes, void **out) {
    void *mapped = NULL;
    int os_errno =
        map(&mapped, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t)offset);
    if (os_errno == 0) {
        *out = mapped;
    }
    return os_errno;
}

int um__os_ring_enter(int fd, unsigned n, unsigned n_least) {
    unsigned flags = n_least > 0 ? UM__RING_ENTER_WAIT : 0;
    return result_of(syscall(UM__SYS_RING_ENTER, fd, n, n_least, flags, NULL, 0));
}

int um__os_fs_open(const char *type, int *out_fd) {
    return descriptor_of(syscall(UM__SYS_FSOPEN, type, UM__FSOPEN_CLOEXEC), out_fd);
}

int um__os_fs_set(int fd, const char *key, const char *value) {
    int command = value == NULL ? UM__FSCONFIG_SET_FLAG : UM__FSCONFIG_SET_STRING;
    return result_of(syscall(UM__SYS_FSCONFIG, fd, command, key, value, 0));
}

int um__os_fs_create(int fd) {
    return result_of(syscall(UM__SYS_FSCONFIG, fd, UM__FSCONFIG_CMD_CREATE, NULL, NULL, 0));
}

int um__os_fs_mount(int fd, int *out_fd) {
    return descriptor_of(
        syscall(UM__SYS_FSMOUNT, fd, UM__FSMOUNT_CLOEXEC,
                UM__MOUNT_ATTR_NOSUID | UM__MOUNT_ATTR_NODEV | UM__MOUNT_ATTR_NOEXEC),
        out_fd);
}

int um__os_fs_pick(int mount, int *out_fd) {
    return descriptor_of(
        syscall(UM__SYS_FSPICK, mount, "", UM__FSPICK_EMPTY_PATH | UM__FSPICK_CLOEXEC), out_fd);
}

int um__os_fs_reconfigure(int fd) {
    return result_of(syscall(UM__SYS_FSCONFIG, fd, UM__FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0));
}

int um__os_get_affinity(void *mask, size_t mask_nbytes) {
    return result_of(sched_getaffinity(0, mask_nbytes, mask));
}

int um__os_set_affinity(const void *mask, size_t mask_nbytes) {
    return result_of(sched_setaffinity(0, mask_nbytes, mask));
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
    /* A thread inherits the mask of its creator. */
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
    return result_of(syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &most, NULL, 0));
}

int um__os_wake(const _Atomic uint32_t *word) {
    return result_of(syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0));
}

int um__os_bus_action(const struct sigaction *action, struct sigaction *out_previous) {
    return result_of(sigaction(SIGBUS, action, out_previous));
}

int um__os_raise_bus(void) {
    return result_of(raise(SIGBUS));
}

int um__os_signal_mask(int how, const sigset_t *mask, sigset_t *out_previous) {
    um__count_os_call();
    return pthread_sigmask(how, mask, out_previous);
}

uint64_t um__os_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

size_t um__os_page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}
