/* Mirrored memory: a memfd of which each piece is mapped twice, back to back. */
#include "mirror.h"

#include "os.h"
#include "steps.h"

#include <stdint.h>

static char *image(const um_block *block, size_t i) {
    return (char *)block->base + i * block->mirror_nbytes;
}

int um_mirror_map(const um_block *block) {
    size_t m = block->mirror_nbytes;
    int os_errno = 0;
    for (size_t i = 0; os_errno == 0 && i < um_mirror_n_images(block); i++) {
        os_errno = um_os_map_file_at(image(block, i), block->fd, um_block_file_offset(block, i * m),
                                     m, block->access);
    }
    return os_errno;
}

/* ---- discarding ---- */

/* The part of the file to punch next. Parts that continue it are joined to it, which saves
 * calls. */
typedef struct hole {
    size_t first, end;
} hole;

static int punch(const um_block *block, const hole *h) {
    return h->first < h->end ? um_os_punch_hole(block->fd, h->first, h->end - h->first) : 0;
}

/* Adds a part to the hole. Parts come from the end of the file to its beginning. */
static int extend(const um_block *block, hole *pending, size_t first, size_t end) {
    int os_errno = 0;
    if (end == pending->first) {
        pending->first = first;
    } else if (first < end) {
        os_errno = punch(block, pending);
        *pending = (hole){first, end};
    }
    return os_errno;
}

int um_mirror_discard(const um_block *block, um_run range, size_t *out_nbytes) {
    size_t m = block->mirror_nbytes, from = range.first * block->step_nbytes;
    size_t to = range.end * block->step_nbytes, covered = 0;
    hole pending = {SIZE_MAX, SIZE_MAX};
    int os_errno = 0;
    for (size_t start = from / m / 2 * 2 * m; os_errno == 0 && start < to; start += 2 * m) {
        /* Offsets inside the piece and its mirror: the range may begin before them or end behind
         * them. */
        size_t first = from > start ? from - start : 0,
               end = to - start < 2 * m ? to - start : 2 * m;
        size_t file = um_block_file_offset(block, start);
        if (end <= m || first >= m) { /* one image */
            size_t behind = first >= m ? m : 0;
            covered += end - first;
            os_errno = extend(block, &pending, file + first - behind, file + end - behind);
        } else if (end - m >= first) { /* all of the piece */
            covered += m;
            os_errno = extend(block, &pending, file, file + m);
        } else {
            covered += m - first + end - m;
            os_errno = extend(block, &pending, file + first, file + m);
            os_errno = os_errno == 0 ? extend(block, &pending, file, file + end - m) : os_errno;
        }
    }
    *out_nbytes = covered;
    return os_errno == 0 ? punch(block, &pending) : os_errno;
}

/* ---- moving ---- */

/* Maps through image `to` the pages that are in RAM through image `from`. */
static int populate_as(char *to, char *from, size_t nbytes, const char **out_call) {
    unsigned char pages[4096];
    size_t page = um_os_page_bytes();
    for (size_t at = 0; at < nbytes;) {
        size_t part = nbytes - at < sizeof pages * page ? nbytes - at : sizeof pages * page;
        *out_call = "mincore";
        int os_errno = um_os_residency(from + at, part, pages);
        *out_call = os_errno == 0 ? "madvise" : "mincore";
        for (size_t first = 0, end; os_errno == 0 && first < part / page; first = end + 1) {
            while (first < part / page && (pages[first] & 1) == 0) {
                first++;
            }
            for (end = first; end < part / page && (pages[end] & 1) != 0;) {
                end++;
            }
            if (first < end) {
                os_errno = um_os_advise(to + at + first * page, (end - first) * page,
                                        UM_OS_POPULATE_WRITE);
            }
        }
        if (os_errno != 0) {
            return os_errno;
        }
        at += part;
    }
    return 0;
}

int um_mirror_fold(const um_block *block, const char **out_call) {
    int os_errno = 0;
    size_t n = block->lock == UM_LOCK_NONE ? um_mirror_n_images(block) : 0;
    for (size_t i = 0; os_errno == 0 && i + 1 < n; i += 2) {
        os_errno =
            populate_as(image(block, i), image(block, i + 1), block->mirror_nbytes, out_call);
        if (os_errno == 0) {
            *out_call = "madvise"; /* shared memory loses nothing by it */
            os_errno = um_os_advise(image(block, i + 1), block->mirror_nbytes, UM_OS_DONTNEED);
        }
    }
    return os_errno;
}

int um_mirror_unfold(const um_block *block, const char **out_call) {
    int os_errno = 0;
    size_t n = block->lock == UM_LOCK_NONE ? um_mirror_n_images(block) : 0;
    for (size_t i = 0; os_errno == 0 && i + 1 < n; i += 2) {
        os_errno =
            populate_as(image(block, i + 1), image(block, i), block->mirror_nbytes, out_call);
    }
    return os_errno;
}
