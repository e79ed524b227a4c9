/* Memory for a build without sanitizers, which runs ten times as many inputs: what a target and
 * the library take ends at a page that cannot be touched. The first byte read or written behind it
 * ends the process, as AddressSanitizer would. What is before it, or was given back, only that
 * sees.
 *
 * The linker puts these in the place of malloc, calloc and free (--wrap). They take a slot of a
 * pool; what is larger, or does not find a slot, comes from the C library, as everything does
 * before the pool is made. A process has one thread that calls a target. */
#include "fuzz.h"

#include <sys/mman.h>
#include <unistd.h>

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t n, size_t nbytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t n, size_t nbytes);
void __wrap_free(void *memory);

enum { N_SLOTS = 64, SLOT_NBYTES = 1 << 16, STRIDE_NBYTES = 2 * SLOT_NBYTES };

static uint8_t *pool;
static uint8_t free_slots[N_SLOTS];
static unsigned n_free;

__attribute__((constructor)) static void make_pool(void) {
    void *made = mmap(NULL, (size_t)N_SLOTS * STRIDE_NBYTES, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    PROMISED(made != MAP_FAILED);
    pool = made;
    for (unsigned i = 0; i < N_SLOTS; i++) {
        PROMISED(mprotect(pool + (size_t)i * STRIDE_NBYTES, SLOT_NBYTES, PROT_READ | PROT_WRITE) ==
                 0);
        free_slots[i] = (uint8_t)i;
    }
    n_free = N_SLOTS;
}

void *__wrap_malloc(size_t nbytes) {
    if (n_free == 0 || nbytes > SLOT_NBYTES) {
        return __real_malloc(nbytes);
    }
    return pool + (size_t)free_slots[--n_free] * STRIDE_NBYTES + SLOT_NBYTES - nbytes;
}

void *__wrap_calloc(size_t n, size_t nbytes) {
    size_t whole;
    if (__builtin_mul_overflow(n, nbytes, &whole) || n_free == 0 || whole > SLOT_NBYTES) {
        return __real_calloc(n, nbytes);
    }
    return memset(__wrap_malloc(whole), 0, whole);
}

void __wrap_free(void *memory) {
    /* An empty piece begins at its fence, which belongs to its slot, too. */
    size_t at = (size_t)((uint8_t *)memory - pool);
    if (pool == NULL || at >= (size_t)N_SLOTS * STRIDE_NBYTES) {
        __real_free(memory);
        return;
    }
    PROMISED(n_free < N_SLOTS);
    free_slots[n_free++] = (uint8_t)(at / STRIDE_NBYTES);
}
