/* Helpers for the tests of mirrored memory. */
#ifndef UM_MIRRORS_H
#define UM_MIRRORS_H

#include "blocks.h"

static inline um_block_options mirror_of(size_t mirror_nbytes, um_pages pages) {
    return *OPTIONS(.pages = pages, .category = UM_CAT_HISTORY, .sharing = UM_SHARING_MEMFD,
                    .mirror_nbytes = mirror_nbytes);
}

static inline um_block make_mirror(size_t n_pieces, size_t mirror_nbytes, um_pages pages) {
    um_block_options options = mirror_of(mirror_nbytes, pages);
    return make_block(n_pieces * mirror_nbytes, &options);
}

static inline unsigned char *image(const um_block *block, size_t i) {
    return (unsigned char *)block->base + i * block->mirror_nbytes;
}

/* Both images of a piece read as the number of the first image plus 1. */
static inline void fill_images(const um_block *block) {
    for (size_t i = 0; i < block->nbytes / block->mirror_nbytes; i += 2) {
        memset(image(block, i), (int)(i + 1), block->mirror_nbytes);
    }
}

/* How many page faults it takes to read every page through every image. Sanitizers would add faults
 * of their own. */
__attribute__((no_sanitize("address", "thread"))) static inline long
faults_of_reading(const um_block *block) {
    size_t step = um_page_bytes(); /* ThreadSanitizer notes each call, in memory of its own */
    long before = faults_now();
    for (size_t at = 0; at < block->nbytes; at += step) {
        (void)((volatile unsigned char *)block->base)[at];
    }
    return faults_now() - before;
}

#endif
