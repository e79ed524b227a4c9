/* malloc and its kind: what is large has a mapping of its own, all else is the next allocator's. */
#include "exec.h"

#include <errno.h>
#include <string.h>

enum { LEAST_ALIGN = 16 }; /* of what malloc gives */

static bool is_large(size_t nbytes) {
    return nbytes >= um__settings_now.min_bytes;
}

static bool is_power_of_two(size_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

/* Whether the next allocator shall be asked for what could not be placed. */
static bool passes_on(void) {
    if (um__settings_now.strict) {
        errno = ENOMEM;
    }
    return !um__settings_now.strict;
}

static void *take(size_t align, size_t nbytes, um__via via, bool *zeroed) {
    align = align < UM__SLOT_BYTES ? UM__SLOT_BYTES : align;
    return um__place_take(nbytes, align, via, zeroed);
}

void *um__large_malloc(size_t nbytes) {
    bool zeroed;
    if (is_large(nbytes)) {
        void *address = take(LEAST_ALIGN, nbytes, UM__VIA_MALLOC, &zeroed);
        if (address != NULL || !passes_on()) {
            return address;
        }
    }
    return um__next_now.malloc(nbytes);
}

void *um__large_calloc(size_t n, size_t nbytes) {
    size_t whole;
    bool zeroed;
    if (!__builtin_mul_overflow(n, nbytes, &whole) && is_large(whole)) {
        void *address = take(LEAST_ALIGN, whole, UM__VIA_CALLOC, &zeroed);
        if (address != NULL && !zeroed) {
            memset(address, 0, whole);
        }
        if (address != NULL || !passes_on()) {
            return address;
        }
    }
    return um__next_now.calloc(n, nbytes);
}

/* Moves contents to another allocation, and frees the old one. */
static void *move(void *old, size_t old_nbytes, size_t nbytes) {
    bool zeroed;
    void *address = NULL;
    if (is_large(nbytes)) {
        address = take(LEAST_ALIGN, nbytes, UM__VIA_REALLOC, &zeroed);
        if (address == NULL && !passes_on()) {
            return NULL;
        }
    }
    if (address == NULL) {
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
    if (!is_large(nbytes)) {
        return um__next_now.realloc(address, nbytes);
    }
    /* It grows out of the next allocator. One that was large before was passed on, and stays. */
    size_t was = um__next_now.usable_size(address);
    return is_large(was) ? um__next_now.realloc(address, nbytes) : move(address, was, nbytes);
}

void um__large_free(void *address) {
    int before = errno;
    if (um__large_may_be_ours(address) && um__table_has(address) && um__place_give(address)) {
        errno = before;
        return;
    }
    um__next_now.free(address);
}

void *um__large_memalign(size_t align, size_t nbytes) {
    bool zeroed;
    if (is_large(nbytes) && is_power_of_two(align)) {
        void *address = take(align, nbytes, UM__VIA_ALIGNED, &zeroed);
        if (address != NULL || !passes_on()) {
            return address;
        }
    }
    return um__next_now.memalign(align, nbytes);
}

void *um__large_aligned_alloc(size_t align, size_t nbytes) {
    bool zeroed;
    if (is_large(nbytes) && is_power_of_two(align)) {
        void *address = take(align, nbytes, UM__VIA_ALIGNED, &zeroed);
        if (address != NULL || !passes_on()) {
            return address;
        }
    }
    return um__next_now.aligned_alloc(align, nbytes);
}

int um__large_posix_memalign(void **out, size_t align, size_t nbytes) {
    bool zeroed;
    if (is_large(nbytes) && is_power_of_two(align) && align % sizeof(void *) == 0) {
        int before = errno;
        void *address = take(align, nbytes, UM__VIA_ALIGNED, &zeroed);
        bool passed_on = address == NULL && passes_on();
        errno = before; /* which this function never changes */
        if (address != NULL) {
            *out = address;
            return 0;
        }
        if (!passed_on) {
            return ENOMEM;
        }
    }
    return um__next_now.posix_memalign(out, align, nbytes);
}

size_t um__large_usable_size(void *address) {
    size_t mapped;
    if (address != NULL && um__large_may_be_ours(address) &&
        um__table_asked(address, &mapped) != 0) {
        return mapped;
    }
    return um__next_now.usable_size(address);
}
