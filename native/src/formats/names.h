/* Names in the headers of model files. */
#ifndef UM_NAMES_H
#define UM_NAMES_H

#include <stdbool.h>
#include <stdint.h>

/* Returns how many of nbytes from s on are well-formed UTF-8, by Unicode 15, table 3-7: no overlong
 * forms, no surrogates, nothing above U+10FFFF. */
uint64_t um__utf8_nbytes(const unsigned char *s, uint64_t nbytes);

/* A name in the header of a file. Headers are shorter than 4 GiB. */
typedef struct um__name {
    uint64_t hash;
    const unsigned char *bytes;
    uint32_t nbytes, offset; /* offset: the name's place in the file */
} um__name;

um__name um__name_of(const unsigned char *bytes, uint64_t nbytes, uint64_t offset);
/* Returns whether all names differ; else *out_offset is the place of the first name in the file
 * that repeats an earlier one. Sorting them bounds the time for any input, unlike a hash table. */
bool um__names_differ(um__name *names, uint64_t n, uint64_t *out_offset);

#endif
