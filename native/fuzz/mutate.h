/* What the mutators share, which know a format: they take a valid file apart and write another one,
 * that a parser follows further than one with changed bytes. libFuzzer calls them in its place. */
#ifndef UM_MUTATE_H
#define UM_MUTATE_H

#include "fuzz.h"

/* libFuzzer's interface. Changes an input in place and returns its new size; the same seed makes
 * the same change. */
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t nbytes, size_t capacity, unsigned seed);
/* libFuzzer's own changes, of bytes. */
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t nbytes, size_t capacity);

/* Numbers that depend on a seed alone. */
typedef struct mutate_random {
    uint64_t state;
} mutate_random;

static inline uint64_t mutate_next(mutate_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Returns a number below n; 0 if n is 0. */
static inline uint64_t mutate_below(mutate_random *random, uint64_t n) {
    return n == 0 ? 0 : mutate_next(random) % n;
}

/* A file that is being written. What does not fit is left out, and noted. */
typedef struct mutate_file {
    uint8_t *bytes;
    size_t nbytes, capacity;
    bool is_full;
} mutate_file;

static inline void mutate_put(mutate_file *file, const void *bytes, uint64_t nbytes) {
    if (nbytes > file->capacity - file->nbytes) {
        file->is_full = true;
        return;
    }
    memcpy(file->bytes + file->nbytes, bytes, nbytes);
    file->nbytes += nbytes;
}

static inline void mutate_put_u32(mutate_file *file, uint32_t value) {
    mutate_put(file, &value, sizeof value);
}

static inline void mutate_put_u64(mutate_file *file, uint64_t value) {
    mutate_put(file, &value, sizeof value);
}

#endif
