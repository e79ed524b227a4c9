/* Mirrored memory: each piece of a memfd is mapped twice, back to back.
 *
 * A piece has two images in the address space and one place in the file. In the file, the pieces
 * lie from the last to the first. So no image continues the mapping before it, the kernel never
 * joins two of them, and smaps and numa_maps have an entry for each image. */
#ifndef UM_MIRROR_H
#define UM_MIRROR_H

#include <stddef.h>

#include "steps.h"
#include "unimem.h"

static inline size_t um_mirror_n_images(const um_block *block) {
    return block->mirror_nbytes == 0 ? 1 : block->reserved_nbytes / block->mirror_nbytes;
}

/* Returns the place in the block's file of an offset of the block. */
static inline size_t um_block_file_offset(const um_block *block, size_t offset) {
    if (block->mirror_nbytes == 0) {
        return offset;
    }
    size_t m = block->mirror_nbytes, n_pieces = um_mirror_n_images(block) / 2;
    return (n_pieces - 1 - offset / m / 2) * m + offset % m;
}

/* Returns the bytes of memory of a block. committed_nbytes counts its address space. */
static inline size_t um_block_memory_nbytes(const um_block *block) {
    return block->mirror_nbytes == 0 ? block->committed_nbytes : block->committed_nbytes / 2;
}

/* The functions below return 0 or an errno. */

/* Maps all images. */
int um_mirror_map(const um_block *block);
/* Punches the file where steps of either image lie. *out_nbytes is how much memory that was. */
int um_mirror_discard(const um_block *block, um_run range, size_t *out_nbytes);
/* The kernel moves a page only if it is mapped once. fold maps all pages in RAM through the first
 * images alone; unfold maps them through both images again. Locked memory is left as it is.
 * *out_call is the system call that failed. */
int um_mirror_fold(const um_block *block, const char **out_call);
int um_mirror_unfold(const um_block *block, const char **out_call);

#endif
