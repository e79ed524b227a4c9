/* What the fuzz targets share. A target parses an input as the library's users do, and aborts when
 * a result breaks a promise of the header. The sanitizers see accesses outside of its memory. A
 * process runs one target in one thread. */
#ifndef UM_FUZZ_H
#define UM_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unimem_formats.h"

/* libFuzzer's interface: one input, which is neither kept nor changed. Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes);

#define PROMISED(cond)                                                                             \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond);                     \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct fuzz_text {
    const uint8_t *bytes;
    uint64_t nbytes;
} fuzz_text;

typedef struct fuzz_range {
    uint64_t offset, nbytes;
} fuzz_range;

/* A copy in heap memory of exactly nbytes, so that a sanitizer sees a read past the end. */
uint8_t *fuzz_copy(const uint8_t *bytes, size_t nbytes);
/* A number that depends on all of the input. */
uint64_t fuzz_hash(const uint8_t *bytes, size_t nbytes);
bool fuzz_is_utf8(const uint8_t *text, uint64_t nbytes);
/* Sorts the texts. */
bool fuzz_all_differ(fuzz_text *texts, uint64_t n);
/* Sorts the ranges. Empty ranges are apart from all others. */
bool fuzz_all_apart(fuzz_range *ranges, uint64_t n);
/* offset + nbytes, which does not overflow. */
uint64_t fuzz_end(uint64_t offset, uint64_t nbytes);
/* The largest decimal number in a text that is at most 2^40. */
uint64_t fuzz_largest_number(const uint8_t *bytes, size_t nbytes);
/* Reads memory. */
void fuzz_touch(const void *bytes, uint64_t nbytes);

/* The pattern that `err` is filled with before a call, and that a call which succeeds leaves. */
enum { FUZZ_PATTERN = 0xa5 };
/* nbytes of the file were given. The offset of a broken rule is at most last_offset. */
void fuzz_check_status(um_status status, const um_error *err, uint64_t nbytes, uint64_t file_nbytes,
                       uint64_t last_offset);

#endif
