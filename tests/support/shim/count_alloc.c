/* Counts allocations and memory system calls by who makes them. Loaded with LD_PRELOAD by a test.
 *
 * A caller is known by its return address: the test names the address ranges of libraries, and what
 * is in none of them counts as the rest. Counting is on between count_start and count_stop.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t nbytes);
extern void *__libc_calloc(size_t n, size_t nbytes);
extern void *__libc_realloc(void *p, size_t nbytes);
extern void *__libc_memalign(size_t align, size_t nbytes);
extern void __libc_free(void *p);

enum { OWNERS = 4, RANGES = 256 };

static struct {
    uintptr_t begin, end;
    int owner;
} ranges[RANGES];
static int n_ranges;
static atomic_int counting;
/* By owner; owner 0 is whoever is in no range. */
static atomic_long allocations[OWNERS], allocated_bytes[OWNERS], os_calls[OWNERS];

/* Returns 0 when there is no room for the range. */
int count_range(uintptr_t begin, uintptr_t end, int owner) {
    if (n_ranges == RANGES || owner < 0 || owner >= OWNERS) {
        return 0;
    }
    ranges[n_ranges].begin = begin;
    ranges[n_ranges].end = end;
    ranges[n_ranges].owner = owner;
    n_ranges++;
    return 1;
}

void count_start(void) {
    for (int i = 0; i < OWNERS; i++) {
        allocations[i] = allocated_bytes[i] = os_calls[i] = 0;
    }
    counting = 1;
}

void count_stop(void) {
    counting = 0;
}
long count_allocations(int owner) {
    return allocations[owner];
}
long count_bytes(int owner) {
    return allocated_bytes[owner];
}
long count_os_calls(int owner) {
    return os_calls[owner];
}

static int owner_of(void *caller) {
    uintptr_t address = (uintptr_t)caller;
    for (int i = 0; i < n_ranges; i++) {
        if (address >= ranges[i].begin && address < ranges[i].end) {
            return ranges[i].owner;
        }
    }
    return 0;
}

static void count_allocation(void *caller, size_t nbytes) {
    if (counting) {
        int owner = owner_of(caller);
        allocations[owner]++;
        allocated_bytes[owner] += (long)nbytes;
    }
}

static void count_os_call(void *caller) {
    if (counting) {
        os_calls[owner_of(caller)]++;
    }
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t nbytes) {
    count_allocation(CALLER, nbytes);
    return __libc_malloc(nbytes);
}

void *calloc(size_t n, size_t nbytes) {
    count_allocation(CALLER, n * nbytes);
    return __libc_calloc(n, nbytes);
}

void *realloc(void *p, size_t nbytes) {
    count_allocation(CALLER, nbytes);
    return __libc_realloc(p, nbytes);
}

void *memalign(size_t align, size_t nbytes) {
    count_allocation(CALLER, nbytes);
    return __libc_memalign(align, nbytes);
}

void *aligned_alloc(size_t align, size_t nbytes) {
    count_allocation(CALLER, nbytes);
    return __libc_memalign(align, nbytes);
}

int posix_memalign(void **out, size_t align, size_t nbytes) {
    count_allocation(CALLER, nbytes);
    void *p = __libc_memalign(align, nbytes);
    if (p == NULL) {
        return ENOMEM;
    }
    *out = p;
    return 0;
}

void free(void *p) {
    __libc_free(p);
}

/* The real function behind a name. */
#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))

void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    typedef void *(*function)(void *, size_t, int, int, int, off_t);
    count_os_call(CALLER);
    return REAL(function, "mmap")(address, nbytes, protection, flags, fd, offset);
}

int munmap(void *address, size_t nbytes) {
    typedef int (*function)(void *, size_t);
    count_os_call(CALLER);
    return REAL(function, "munmap")(address, nbytes);
}

int mprotect(void *address, size_t nbytes, int protection) {
    typedef int (*function)(void *, size_t, int);
    count_os_call(CALLER);
    return REAL(function, "mprotect")(address, nbytes, protection);
}

int madvise(void *address, size_t nbytes, int advice) {
    typedef int (*function)(void *, size_t, int);
    count_os_call(CALLER);
    return REAL(function, "madvise")(address, nbytes, advice);
}

void *mremap(void *address, size_t old_nbytes, size_t nbytes, int flags, ...) {
    typedef void *(*function)(void *, size_t, size_t, int, void *);
    va_list more;
    va_start(more, flags);
    void *target = (flags & MREMAP_FIXED) ? va_arg(more, void *) : NULL;
    va_end(more);
    count_os_call(CALLER);
    return REAL(function, "mremap")(address, old_nbytes, nbytes, flags, target);
}

ssize_t read(int fd, void *out, size_t nbytes) {
    typedef ssize_t (*function)(int, void *, size_t);
    count_os_call(CALLER);
    return REAL(function, "read")(fd, out, nbytes);
}

ssize_t pread(int fd, void *out, size_t nbytes, off_t offset) {
    typedef ssize_t (*function)(int, void *, size_t, off_t);
    count_os_call(CALLER);
    return REAL(function, "pread")(fd, out, nbytes, offset);
}

long syscall(long number, ...) {
    typedef long (*function)(long, long, long, long, long, long, long);
    long a[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(more, long);
    }
    va_end(more);
    count_os_call(CALLER);
    return REAL(function, "syscall")(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
