/* Mirrored memory: a memfd whose pieces are mapped twice, back to back. */
#include "block/mirror.h"

#include "block/steps.h"
#include "os/os.h"

#include <stdbool.h>
#include <stdint.h>

int um__mirror_map(const um_block *block) {
    int os_errno = 0;
    for (size_t at = 0; os_errno == 0 && at < block->reserved_nbytes;) {
        um__piece piece = um__mirror_piece(block, at);
        for (char *image = (char *)block->base + at; os_errno == 0 && at < um__mirror_next(&piece);
             at += piece.nbytes, image += piece.nbytes) {
            os_errno =
                um__os_map_file_at(image, block->fd, piece.file, piece.nbytes, block->access);
        }
    }
    return os_errno;
}

/* ---- discarding ---- */

/* The part of the file to punch next. Parts that continue it are joined to it. */
typedef struct hole {
    size_t first, end;
} hole;

static int punch(const um_block *block, const hole *h) {
    return h->first < h->end ? um__os_punch_hole(block->fd, h->first, h->end - h->first) : 0;
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

int um__mirror_discard(const um_block *block, um__run range, size_t *out_nbytes) {
    size_t from = range.first * block->step_nbytes;
    size_t to = range.end * block->step_nbytes, covered = 0;
    hole pending = {SIZE_MAX, SIZE_MAX};
    int os_errno = 0;
    for (size_t at = from; os_errno == 0 && at < to;) {
        um__piece piece = um__mirror_piece(block, at);
        size_t start = piece.start, m = piece.nbytes, file = piece.file;
        /* Offsets inside the piece and its mirror; the range may reach beyond them. */
        size_t first = from > start ? from - start : 0,
               end = to - start < 2 * m ? to - start : 2 * m;
        at = um__mirror_next(&piece);
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
    size_t page = um__os_page_bytes(), most = sizeof pages * page, part;
    int os_errno = 0;
    for (size_t at = 0; at < nbytes && os_errno == 0; at += part) {
        part = nbytes - at < most ? nbytes - at : most;
        *out_call = "mincore";
        os_errno = um__os_residency(from + at, part, pages);
        *out_call = os_errno == 0 ? "madvise" : "mincore";
        for (size_t first = 0, end; os_errno == 0 && first < part / page; first = end + 1) {
            while (first < part / page && (pages[first] & 1) == 0) {
                first++;
            }
            for (end = first; end < part / page && (pages[end] & 1) != 0;) {
                end++;
            }
            if (first < end) {
                os_errno = um__os_advise(to + at + first * page, (end - first) * page,
                                         UM__OS_POPULATE_WRITE);
            }
        }
    }
    return os_errno;
}

/* Maps what is in RAM through the second images through the first ones alone, or with `unfold` what
 * is in RAM through the first ones through both. */
static int fold(const um_block *block, bool unfold, const char **out_call) {
    int os_errno = 0;
    size_t end = block->lock == UM_LOCK_NONE ? block->reserved_nbytes : 0;
    for (size_t at = 0; os_errno == 0 && at < end;) {
        um__piece piece = um__mirror_piece(block, at);
        char *first = (char *)block->base + at, *second = first + piece.nbytes;
        os_errno = unfold ? populate_as(second, first, piece.nbytes, out_call)
                          : populate_as(first, second, piece.nbytes, out_call);
        if (os_errno == 0 && !unfold) {
            *out_call = "madvise"; /* shared memory loses nothing by it */
            os_errno = um__os_advise(second, piece.nbytes, UM__OS_DONTNEED);
        }
        at = um__mirror_next(&piece);
    }
    return os_errno;
}

int um__mirror_fold(const um_block *block, const char **out_call) {
    return fold(block, false, out_call);
}

int um__mirror_unfold(const um_block *block, const char **out_call) {
    return fold(block, true, out_call);
}
