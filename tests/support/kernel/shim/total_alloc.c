/* Counts all allocations of a process, and prints their number at its end: for LD_PRELOAD. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>

extern void *__libc_malloc(size_t nbytes);
extern void *__libc_calloc(size_t n, size_t nbytes);
extern void *__libc_realloc(void *p, size_t nbytes);
extern void *__libc_memalign(size_t align, size_t nbytes);

static atomic_long n_allocations;

#define COUNTED(name, parameters, made)                                                            \
    void *name parameters {                                                                        \
        n_allocations++;                                                                           \
        return made;                                                                               \
    }

COUNTED(malloc, (size_t n), __libc_malloc(n))
COUNTED(calloc, (size_t n, size_t size), __libc_calloc(n, size))
COUNTED(realloc, (void *p, size_t n), __libc_realloc(p, n))
COUNTED(memalign, (size_t align, size_t n), __libc_memalign(align, n))
COUNTED(aligned_alloc, (size_t align, size_t n), __libc_memalign(align, n))

__attribute__((destructor)) static void tell(void) {
    long n = n_allocations;
    fprintf(stderr, "%ld allocations in all\n", n);
}
