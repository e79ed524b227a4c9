/* malloc and its kind: a large allocation has a mapping of its own, the next allocator has all
 * else. */
#include "exec.h"

#include <errno.h>
#include <string.h>

static bool is_large(size_t nbytes) {
    return nbytes >= um__settings_now.heap_bytes;
}

static bool is_power_of_two(size_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

/* Places an allocation if it is large. Returns true if *out is the answer, which is NULL if
 * `strict` refuses what could not be placed; false if the next allocator has to be asked. */
static bool take(size_t align, size_t nbytes, um__via via, void **out, bool *zeroed) {
    if (!is_large(nbytes)) {
        return false;
    }
    *out = um__place_take(nbytes, align < UM__SLOT_BYTES ? UM__SLOT_BYTES : align, via, zeroed);
    if (*out == NULL && um__settings_now.strict) {
        errno = ENOMEM;
    }
    return *out != NULL || um__settings_now.strict;
}

static bool take_aligned(size_t align, size_t nbytes, void **out) {
    bool zeroed;
    return is_power_of_two(align) && take(align, nbytes, UM__ALIGNED, out, &zeroed);
}

void *um__large_malloc(size_t nbytes) {
    bool zeroed;
    void *address;
    return take(1, nbytes, UM__MALLOC, &address, &zeroed) ? address : um__next_now.malloc(nbytes);
}

void *um__large_calloc(size_t n, size_t nbytes) {
    size_t whole;
    bool zeroed;
    void *address;
    if (__builtin_mul_overflow(n, nbytes, &whole) ||
        !take(1, whole, UM__CALLOC, &address, &zeroed)) {
        return um__next_now.calloc(n, nbytes);
    }
    if (address != NULL && !zeroed) {
        memset(address, 0, whole);
    }
    return address;
}

/* Moves contents to another allocation, and frees the old one. */
static void *move(void *old, size_t old_nbytes, size_t nbytes) {
    bool zeroed;
    void *address;
    if (!take(1, nbytes, UM__REALLOC, &address, &zeroed)) {
        address = um__next_now.malloc(nbytes);
    }
    if (address != NULL) {
        memcpy(address, old, old_nbytes < nbytes ? old_nbytes : nbytes);
        um__large_free(old);
    }
    return address;
}

void *um__large_realloc(void *address, size_t nbytes) {
    size_t mapped = 0;
    if (address == NULL) {
        return um__large_malloc(nbytes);
    }
    if (um__large_may_be_ours(address) && um__table_asked(address, &mapped) != 0) {
        if (nbytes == 0) {
            um__large_free(address);
            return NULL;
        }
        void *resized = is_large(nbytes) ? um__place_resize(address, nbytes) : NULL;
        return resized != NULL ? resized : move(address, mapped, nbytes);
    }
    /* What was large before was passed on, and stays with the next allocator. */
    size_t was = is_large(nbytes) ? um__next_now.usable_size(address) : 0;
    return !is_large(nbytes) || is_large(was) ? um__next_now.realloc(address, nbytes)
                                              : move(address, was, nbytes);
}

void um__large_free(void *address) {
    int before = errno;
    if (um__large_may_be_ours(address) && um__table_find(address) != NULL &&
        um__place_give(address)) {
        errno = before;
        return;
    }
    um__next_now.free(address);
}

void *um__large_memalign(size_t align, size_t nbytes) {
    void *address;
    return take_aligned(align, nbytes, &address) ? address : um__next_now.memalign(align, nbytes);
}

void *um__large_aligned_alloc(size_t align, size_t nbytes) {
    void *address;
    return take_aligned(align, nbytes, &address) ? address
                                                 : um__next_now.aligned_alloc(align, nbytes);
}

int um__large_posix_memalign(void **out, size_t align, size_t nbytes) {
    int before = errno; /* which this function never changes */
    void *address = NULL;
    bool done = align % sizeof(void *) == 0 && take_aligned(align, nbytes, &address);
    errno = before;
    if (!done) {
        return um__next_now.posix_memalign(out, align, nbytes);
    }
    if (address == NULL) {
        return ENOMEM;
    }
    *out = address;
    return 0;
}

size_t um__large_usable_size(void *address) {
    size_t mapped;
    if (address != NULL && um__large_may_be_ours(address) &&
        um__table_asked(address, &mapped) != 0) {
        return mapped;
    }
    return um__next_now.usable_size(address);
}
