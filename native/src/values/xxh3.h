/* The codes behind um_copy_hashed: one function for each instruction set. */
#ifndef UM_XXH3_H
#define UM_XXH3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

enum { UM__STRIPE = 64, UM__LANES = 8 };

/* Adds stripes to the sums, each with the 8 bytes of the secret behind those of the stripe before,
 * and copies them to out, unless that is NULL. With streams they pass the caches, and out must be
 * aligned to a stripe. All give the same bits. */
typedef void um__xxh3_code(uint64_t sums[UM__LANES], uint8_t *out, const uint8_t *in,
                           size_t n_stripes, const uint8_t *secret, bool streams);

/* Returns the i-th code that this CPU runs, the slowest first; NULL behind the last. */
um__xxh3_code *um__xxh3_code_at(size_t i);

/* Does the same as um_copy_hashed, by one code. */
void um__copy_hashed(um__xxh3_code *code, void *out, const void *in, size_t nbytes, size_t n_zeros,
                     uint8_t *out_hash);

#endif
