/* The system calls of the library, straight to the kernel: the C library's functions of these names
 * are the hooks. */
#include "exec.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/kernel.h"

static void *pointer_of(long result) {
    return result == -1 ? NULL : (void *)result; // NOLINT: the kernel's answer is an address
}

void *um__sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return pointer_of(syscall(SYS_mmap, at, nbytes, protection, flags, fd, offset));
}

int um__sys_unmap(void *at, size_t nbytes) {
    return (int)syscall(SYS_munmap, at, nbytes);
}

void *um__sys_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at) {
    return pointer_of(syscall(SYS_mremap, at, nbytes, new_nbytes, flags, new_at));
}

int um__sys_advise(void *at, size_t nbytes, int advice) {
    return (int)syscall(SYS_madvise, at, nbytes, advice);
}

int um__sys_bind(void *at, size_t nbytes, int mode, const uint64_t *nodes) {
    /* The kernel reads one bit less than the size says. */
    return (int)syscall(SYS_mbind, at, nbytes, mode, nodes, 16 * 64 + 1UL, 0);
}

int um__sys_lock(void *at, size_t nbytes) {
    return (int)syscall(SYS_mlock2, at, nbytes, MLOCK_ONFAULT);
}

/* Moves a descriptor to a number that programs do not count on. */
static int raise_number(int fd) {
    struct rlimit most;
    int first = getrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_cur > 1000 ? 900 : 100;
    int high = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, first);
    if (high < 0) {
        return fd;
    }
    syscall(SYS_close, fd);
    return high;
}

int um__sys_share(void *at, size_t nbytes, const char *name) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    long fd = syscall(SYS_memfd_create, name, flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) { /* before Linux 6.3 */
        fd = syscall(SYS_memfd_create, name, flags);
    }
    if (fd < 0) {
        return -1;
    }
    if (syscall(SYS_ftruncate, fd, nbytes) != 0 ||
        um__sys_map(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)fd, 0) ==
            NULL) {
        syscall(SYS_close, fd);
        return -1;
    }
    syscall(SYS_fcntl, fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    /* From here on, no process that opens it may write (Linux 5.1). */
    syscall(SYS_fcntl, fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
    return raise_number((int)fd);
}

uint64_t um__sys_cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

uint64_t um__sys_block_signals(void) {
    uint64_t all = UINT64_MAX, before = 0;
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &all, &before, sizeof all);
    return before;
}

void um__sys_restore_signals(uint64_t before) {
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
}

void um__sys_print(const char *text) {
    syscall(SYS_write, STDERR_FILENO, text, strlen(text));
}

uint64_t um__sys_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

void um__sys_rest(long ns) {
    struct timespec rest = {.tv_nsec = ns};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &rest, NULL);
}

static bool read_number(size_t page_bytes, const char *name, size_t *out) {
    char path[96], text[24];
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%zukB/%s", page_bytes >> 10,
             name);
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    long n = fd < 0 ? -1 : syscall(SYS_read, fd, text, sizeof text - 1);
    if (fd >= 0) {
        syscall(SYS_close, fd);
    }
    text[n < 0 ? 0 : n] = '\0';
    *out = strtoull(text, NULL, 10);
    return n > 0;
}

bool um__sys_pool(size_t page_bytes, size_t *out_total, size_t *out_unused) {
    size_t unused, promised;
    bool done = read_number(page_bytes, "nr_hugepages", out_total) &&
                read_number(page_bytes, "free_hugepages", &unused) &&
                read_number(page_bytes, "resv_hugepages", &promised);
    *out_unused = done && unused > promised ? unused - promised : 0;
    return done;
}

uint64_t um__sys_faults(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (uint64_t)used.ru_minflt;
}

int um__sys_pid(void) {
    return (int)syscall(SYS_getpid);
}

uint64_t um__sys_started(void) {
    char text[1024];
    long fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    long n = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (n <= 0) {
        return 0;
    }
    text[n] = '\0';
    /* The second field is a name in parentheses, of any letters; the 22nd is wanted. */
    const char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

int um__sys_scan(void *at, size_t nbytes, uint64_t *out_resident, uint64_t *out_huge) {
    um__page_run runs[64];
    uintptr_t start = (uintptr_t)at, end = start + nbytes;
    long fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    *out_resident = *out_huge = 0;
    long n = 0;
    while (start < end && n >= 0) {
        um__scan_arguments arguments = um__scan_of(start, end, runs, sizeof runs / sizeof runs[0]);
        n = syscall(SYS_ioctl, fd, UM__SCAN_PAGES, &arguments);
        for (long i = 0; i < n; i++) {
            uint64_t size = runs[i].end - runs[i].start;
            *out_resident += size;
            *out_huge += (runs[i].categories & UM__PAGE_IS_HUGE) != 0 ? size : 0;
        }
        start = (uintptr_t)arguments.walk_end;
    }
    syscall(SYS_close, fd);
    return n < 0 ? -1 : 0;
}
