/* Mirrored memory: each piece of a memfd is mapped twice, back to back.
 *
 * A piece has two images in the address space and one place in the file, where the pieces lie from
 * the last to the first. So no image continues the mapping before it, the kernel never joins two of
 * them, and smaps and numa_maps have an entry for each image. */
#ifndef UM_MIRROR_H
#define UM_MIRROR_H

#include <stddef.h>

#include "block/steps.h"
#include "unimem.h"

typedef struct um__piece {
    size_t start;  /* of its first image in the block; the second begins nbytes behind it */
    size_t nbytes; /* of an image */
    size_t file;   /* its place in the file */
} um__piece;

/* Returns the piece that an offset lies in. pre: the block is mirrored, and has the offset. */
static inline um__piece um__mirror_piece(const um_block *block, size_t offset) {
    size_t run = 2 * block->mirror_run * block->mirror_nbytes; /* address space */
    size_t both = run + 2 * block->mirror_run * block->mirror_other_nbytes;
    size_t at = offset % both, first = at < run ? 0 : run;
    size_t nbytes = at < run ? block->mirror_nbytes : block->mirror_other_nbytes;
    size_t start = offset - at + first + (at - first) / (2 * nbytes) * (2 * nbytes);
    return (um__piece){start, nbytes, block->reserved_nbytes / 2 - start / 2 - nbytes};
}

/* Returns where the next piece begins. */
static inline size_t um__mirror_next(const um__piece *piece) {
    return piece->start + 2 * piece->nbytes;
}

/* Returns the place in the block's file of an offset of the block. */
static inline size_t um__block_file_offset(const um_block *block, size_t offset) {
    if (block->mirror_nbytes == 0) {
        return offset;
    }
    um__piece piece = um__mirror_piece(block, offset);
    return piece.file + (offset - piece.start) % piece.nbytes;
}

/* Returns the bytes of memory of a block. committed_nbytes counts its address space. */
static inline size_t um__block_memory_nbytes(const um_block *block) {
    return block->mirror_nbytes == 0 ? block->committed_nbytes : block->committed_nbytes / 2;
}

/* These return 0 or an errno. */

/* Maps all images. */
int um__mirror_map(const um_block *block);
/* Punches the file where steps of either image lie. *out_nbytes is how much memory that was. */
int um__mirror_discard(const um_block *block, um__run range, size_t *out_nbytes);
/* The kernel moves only pages that are mapped once. fold maps all pages in RAM through the first
 * images alone; unfold maps them through both images again. Locked memory is left alone. *out_call
 * is the system call that failed. */
int um__mirror_fold(const um_block *block, const char **out_call);
int um__mirror_unfold(const um_block *block, const char **out_call);

#endif
