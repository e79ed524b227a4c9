/* Makes the nth call of a function of the system fail, once. For LD_PRELOAD, by tools/faults.
 *
 * Callers are known by their return address: calls of what is in no range that was named are
 * neither counted nor failed. Functions are told apart by their names alone: each takes six words,
 * as registers hold them, and those that a function does not take are passed on unseen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>

extern void *__libc_malloc(size_t nbytes);
extern void *__libc_calloc(size_t n, size_t nbytes);
extern void *__libc_realloc(void *p, size_t nbytes);

enum { RANGES = 512, CALLS = 1 << 16, ERRORS = 3 };
/* In the place of an errno: half of the bytes are transferred. */
enum { HALF = -1 };
/* What a range may fail. The interpreter maps memory for itself, which is no matter of ours. */
enum { SYSTEM = 1, MAPPINGS = 2, ALLOCATIONS = 4 };

typedef struct call {
    const char *name;
    int errors[ERRORS]; /* one a round; 0 for no more */
} call;

static struct {
    uintptr_t begin, end;
    int kinds;
} ranges[RANGES];
static int n_ranges;

static const call *_Atomic calls[CALLS]; /* in order */
static atomic_uint n_calls, n_matching, fail_at;
static const char *_Atomic fail_function;
static atomic_int counting, fail_round, failed_errno;

void fail_forget_ranges(void) {
    n_ranges = 0;
}

/* Returns 0 when there is no room for the range. */
int fail_range(uintptr_t begin, uintptr_t end, int kinds) {
    if (n_ranges == RANGES) {
        return 0;
    }
    ranges[n_ranges].begin = begin;
    ranges[n_ranges].end = end;
    ranges[n_ranges++].kinds = kinds;
    return 1;
}

/* Counts from here on, and fails the nth call (1 is the next, 0 none) of a function with its error
 * of a round; a call that has no such error is made. The name stays the caller's. */
void fail_begin(const char *name, unsigned n, int round) {
    n_calls = n_matching = failed_errno = 0;
    fail_function = name;
    fail_at = n;
    fail_round = round;
    counting = 1;
}

void fail_end(void) {
    counting = 0;
}

unsigned fail_calls(void) {
    return n_calls;
}

/* The errno that the call has failed with, HALF, or 0 where none has failed. */
int fail_errno(void) {
    return failed_errno;
}

/* The name of the nth call; NULL where there was none. */
const char *fail_name(unsigned n) {
    return n == 0 || n > n_calls || n > CALLS ? NULL : calls[n - 1]->name;
}

/* What a call has to fail with, or 0. */
static int fault(const call *now, int kind, void *caller) {
    if (!counting) {
        return 0;
    }
    uintptr_t address = (uintptr_t)caller;
    int i = 0;
    while (i < n_ranges && (address < ranges[i].begin || address >= ranges[i].end)) {
        i++;
    }
    if (i == n_ranges || (ranges[i].kinds & kind) == 0) {
        return 0;
    }
    unsigned n = atomic_fetch_add(&n_calls, 1) + 1;
    if (n <= CALLS) {
        calls[n - 1] = now;
    }
    bool is_it = fail_at != 0 && strcmp(now->name, fail_function) == 0 &&
                 atomic_fetch_add(&n_matching, 1) + 1 == fail_at;
    int error = is_it ? now->errors[fail_round] : 0;
    if (error != 0) {
        failed_errno = error;
    }
    return error;
}

typedef long (*function)(long, long, long, long, long, long);
#define WORDS long a, long b, long c, long d, long e, long f
#define FAULT(kind) fault(&now, kind, __builtin_return_address(0))
/* What a wrapper begins with. The results of functions that return an int have it in their lower
 * half. */
#define BEGIN(symbol, name, ...)                                                                   \
    static const call now = {#name, {__VA_ARGS__}};                                                \
    static function real;                                                                          \
    if (real == NULL) {                                                                            \
        real = (function)dlsym(RTLD_NEXT, #symbol);                                                \
    }
#define MAKE real(a, b, c, d, e, f)

#define CALL_OF(symbol, name, kind, failure, ...)                                                  \
    long symbol(WORDS);                                                                            \
    long symbol(WORDS) {                                                                           \
        BEGIN(symbol, name, __VA_ARGS__)                                                           \
        int error = FAULT(kind);                                                                   \
        if (error != 0) {                                                                          \
            errno = error;                                                                         \
            return failure;                                                                        \
        }                                                                                          \
        return MAKE;                                                                               \
    }
#define CALL(name, ...) CALL_OF(name, name, SYSTEM, -1, __VA_ARGS__)
/* Also by its name where offsets have 64 bits anyway. */
#define CALLS_OF(name, ...) CALL(name, __VA_ARGS__) CALL_OF(name##64, name, SYSTEM, -1, __VA_ARGS__)

CALL_OF(mmap, mmap, MAPPINGS, -1, ENOMEM, EAGAIN)
CALL_OF(mmap64, mmap, MAPPINGS, -1, ENOMEM, EAGAIN)
CALL_OF(munmap, munmap, MAPPINGS, -1, ENOMEM)
CALL_OF(mremap, mremap, MAPPINGS, -1, ENOMEM)
CALL(madvise, ENOMEM, EINVAL, EAGAIN)
CALL(mprotect, ENOMEM)
CALL(mincore, ENOMEM)
CALL(memfd_create, EMFILE, ENOMEM)
CALL(fallocate, ENOSPC, EOPNOTSUPP, EINTR)
CALL_OF(posix_fallocate, posix_fallocate, SYSTEM, error, ENOSPC, EOPNOTSUPP)
CALL_OF(posix_fallocate64, posix_fallocate, SYSTEM, error, ENOSPC, EOPNOTSUPP)
CALLS_OF(ftruncate, ENOSPC, EIO, EINTR)
CALL(fsync, EIO, ENOSPC)
CALL(fdatasync, EIO, ENOSPC)
CALL(flock, ENOLCK, EIO, EINTR)
CALL(rename, ENOSPC, EIO)
CALL(renameat, ENOSPC, EIO)
CALL(link, ENOSPC, EPERM)
CALL(symlink, ENOSPC, EIO)
CALL(symlinkat, ENOSPC, EIO)
CALL(unlink, EIO, EBUSY)
CALL(unlinkat, EIO, EBUSY)
CALL(mkdir, ENOSPC, EACCES)
CALL(rmdir, EIO, EBUSY)
CALL(chmod, EIO, EPERM)
CALL(fchmod, EIO, EPERM)
CALL(utimensat, EIO, EPERM)
CALL(futimens, EIO, EPERM)
CALL(access, EIO, EACCES)
CALL(readlink, EACCES, ENOMEM)
CALL(readlinkat, EACCES, ENOMEM)
CALLS_OF(stat, EACCES, EIO)
CALLS_OF(lstat, EACCES, EIO)
CALLS_OF(fstat, EIO, ENOMEM)
CALLS_OF(fstatat, EACCES, EIO)
CALL(fstatfs, EIO)
CALLS_OF(fstatvfs, EIO)
CALLS_OF(statvfs, EIO)
CALL(dup, EMFILE)
CALL(pipe2, EMFILE, ENFILE)
CALL(socket, EMFILE, ENOBUFS)
CALL(socketpair, EMFILE, ENOBUFS)
CALL(sched_getaffinity, EINVAL)
CALL(sched_setaffinity, EINVAL)
CALL_OF(opendir, opendir, SYSTEM, 0, EMFILE, ENOMEM)
CALL_OF(fdopendir, opendir, SYSTEM, 0, EMFILE, ENOMEM)
CALL_OF(readdir64, readdir, SYSTEM, 0, EIO)
CALL_OF(pthread_create, pthread_create, SYSTEM, error, EAGAIN)

/* Whose further arguments are of any type: a word each. */
#define VARIADIC(symbol, name, ...)                                                                \
    long symbol(long a, long b, ...);                                                              \
    long symbol(long a, long b, ...) {                                                             \
        BEGIN(symbol, name, __VA_ARGS__)                                                           \
        va_list more;                                                                              \
        va_start(more, b);                                                                         \
        long c = va_arg(more, long), d = va_arg(more, long), e = 0, f = 0;                         \
        va_end(more);                                                                              \
        int error = FAULT(SYSTEM);                                                                 \
        if (error != 0) {                                                                          \
            errno = error;                                                                         \
            return -1;                                                                             \
        }                                                                                          \
        return MAKE;                                                                               \
    }
VARIADIC(open, open, EMFILE, EACCES, EINTR)
VARIADIC(open64, open, EMFILE, EACCES, EINTR)
VARIADIC(openat, openat, EMFILE, EACCES, EINTR)
VARIADIC(openat64, openat, EMFILE, EACCES, EINTR)
VARIADIC(fcntl, fcntl, EMFILE, EINVAL, EPERM)
VARIADIC(fcntl64, fcntl, EMFILE, EINVAL, EPERM)
VARIADIC(ioctl, ioctl, ENOTTY, ENOMEM)

/* Which may transfer less than they are asked to. */
#define TRANSFER(symbol, name, ...)                                                                \
    long symbol(WORDS);                                                                            \
    long symbol(WORDS) {                                                                           \
        BEGIN(symbol, name, __VA_ARGS__)                                                           \
        int error = FAULT(SYSTEM);                                                                 \
        if (error > 0) {                                                                           \
            errno = error;                                                                         \
            return -1;                                                                             \
        }                                                                                          \
        if (error == HALF) {                                                                       \
            c = (c + 1) / 2;                                                                       \
        }                                                                                          \
        return MAKE;                                                                               \
    }
TRANSFER(read, read, EIO, EINTR, HALF)
TRANSFER(pread, pread, EIO, EINTR, HALF)
TRANSFER(pread64, pread, EIO, EINTR, HALF)
TRANSFER(write, write, ENOSPC, EINTR, HALF)
TRANSFER(pwrite, pwrite, ENOSPC, EINTR, HALF)
TRANSFER(pwrite64, pwrite, ENOSPC, EINTR, HALF)

#define TRANSFER_VECTOR(symbol, name, ...)                                                         \
    long symbol(WORDS);                                                                            \
    long symbol(WORDS) {                                                                           \
        BEGIN(symbol, name, __VA_ARGS__)                                                           \
        int error = FAULT(SYSTEM);                                                                 \
        if (error > 0) {                                                                           \
            errno = error;                                                                         \
            return -1;                                                                             \
        }                                                                                          \
        /* A struct iovec. */                                                                      \
        struct {                                                                                   \
            long begin, nbytes;                                                                    \
        } half = {((const long *)b)[0], (((const long *)b)[1] + 1) / 2};                           \
        if (error == HALF) {                                                                       \
            b = (long)&half;                                                                       \
            c = 1;                                                                                 \
        }                                                                                          \
        return MAKE;                                                                               \
    }
TRANSFER_VECTOR(preadv64v2, preadv, EIO, EINTR, HALF)
TRANSFER_VECTOR(pwritev64v2, pwritev, ENOSPC, EINTR, HALF)

/* Fails when it is done: the kernel keeps no descriptor whose close it fails. */
long close(WORDS);
long close(WORDS) {
    BEGIN(close, close, EIO)
    int error = FAULT(SYSTEM);
    long result = MAKE;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return result;
}

/* Those that the C library has no function for. A futex only makes threads wait. */
static const call *numbered(long number) {
    static const call mlock2 = {"mlock2", {ENOMEM, EPERM, EAGAIN}}, munlock = {"munlock", {ENOMEM}},
                      mbind = {"mbind", {ENOMEM, EPERM, EINVAL}},
                      move_pages = {"move_pages", {ENOMEM, EPERM}},
                      mount = {"fsmount", {EMFILE, EPERM, ENOSYS}},
                      ring = {"io_uring_setup", {ENOMEM, EPERM, ENOSYS}},
                      enter = {"io_uring_enter", {EIO, EAGAIN, EINTR}};
    switch (number) {
    case SYS_mlock2:
        return &mlock2;
    case SYS_munlock:
        return &munlock;
    case SYS_mbind:
        return &mbind;
    case SYS_move_pages:
        return &move_pages;
    case SYS_io_uring_setup:
        return &ring;
    case SYS_io_uring_enter:
        return &enter;
    default:
        return number >= 428 && number <= 433 ? &mount : NULL; /* open_tree to fspick */
    }
}

long syscall(long number, ...) {
    typedef long (*caller)(long, long, long, long, long, long, long);
    static caller real;
    if (real == NULL) {
        real = (caller)dlsym(RTLD_NEXT, "syscall");
    }
    long words[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++) {
        words[i] = va_arg(more, long);
    }
    va_end(more);
    const call *now = numbered(number);
    int error = now != NULL ? fault(now, SYSTEM, __builtin_return_address(0)) : 0;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

static const call allocation = {"malloc", {ENOMEM}};
#define ALLOCATES(name, parameters, made)                                                          \
    void *name parameters;                                                                         \
    void *name parameters {                                                                        \
        if (fault(&allocation, ALLOCATIONS, __builtin_return_address(0)) != 0) {                   \
            errno = ENOMEM;                                                                        \
            return NULL;                                                                           \
        }                                                                                          \
        return made;                                                                               \
    }
ALLOCATES(malloc, (size_t n), __libc_malloc(n))
ALLOCATES(calloc, (size_t n, size_t size), __libc_calloc(n, size))
ALLOCATES(realloc, (void *p, size_t n), __libc_realloc(p, n))
