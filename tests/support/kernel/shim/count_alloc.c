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

/* Counts an allocation, and makes it. */
#define ALLOCATES(name, parameters, nbytes, made)                                                  \
    void *name parameters {                                                                        \
        count_allocation(CALLER, nbytes);                                                          \
        return made;                                                                               \
    }

ALLOCATES(malloc, (size_t n), n, __libc_malloc(n))
ALLOCATES(calloc, (size_t n, size_t size), n *size, __libc_calloc(n, size))
ALLOCATES(realloc, (void *p, size_t n), n, __libc_realloc(p, n))
ALLOCATES(memalign, (size_t align, size_t n), n, __libc_memalign(align, n))
ALLOCATES(aligned_alloc, (size_t align, size_t n), n, __libc_memalign(align, n))

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

/* Counts a call of a function of the system, and makes it. */
#define COUNTED(result, name, parameters, arguments)                                               \
    result name parameters {                                                                       \
        count_os_call(CALLER);                                                                     \
        return ((result(*) parameters)dlsym(RTLD_NEXT, #name))arguments;                           \
    }

COUNTED(void *, mmap, (void *at, size_t n, int access, int flags, int fd, off_t offset),
        (at, n, access, flags, fd, offset))
COUNTED(int, munmap, (void *at, size_t n), (at, n))
COUNTED(int, mprotect, (void *at, size_t n, int access), (at, n, access))
COUNTED(int, madvise, (void *at, size_t n, int advice), (at, n, advice))
COUNTED(ssize_t, read, (int fd, void *out, size_t n), (fd, out, n))
COUNTED(ssize_t, pread, (int fd, void *out, size_t n, off_t offset), (fd, out, n, offset))

void *mremap(void *address, size_t old_nbytes, size_t nbytes, int flags, ...) {
    typedef void *(*function)(void *, size_t, size_t, int, void *);
    va_list more;
    va_start(more, flags);
    void *target = (flags & MREMAP_FIXED) ? va_arg(more, void *) : NULL;
    va_end(more);
    count_os_call(CALLER);
    return ((function)dlsym(RTLD_NEXT, "mremap"))(address, old_nbytes, nbytes, flags, target);
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
    return ((function)dlsym(RTLD_NEXT, "syscall"))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
