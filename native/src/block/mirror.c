/* Mirrored memory: a memfd of which each piece is mapped twice, back to back. */
#include "block/mirror.h"

#include "block/steps.h"
#include "os/os.h"

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

/* The part of the file to punch next. Parts that continue it are joined to it, which saves
 * calls. */
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
        /* Offsets inside the piece and its mirror: the range may begin before them or end behind
         * them. */
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
    size_t page = um__os_page_bytes();
    for (size_t at = 0; at < nbytes;) {
        size_t part = nbytes - at < sizeof pages * page ? nbytes - at : sizeof pages * page;
        *out_call = "mincore";
        int os_errno = um__os_residency(from + at, part, pages);
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
        if (os_errno != 0) {
            return os_errno;
        }
        at += part;
    }
    return 0;
}

int um__mirror_fold(const um_block *block, const char **out_call) {
    int os_errno = 0;
    size_t end = block->lock == UM_LOCK_NONE ? block->reserved_nbytes : 0;
    for (size_t at = 0; os_errno == 0 && at < end;) {
        um__piece piece = um__mirror_piece(block, at);
        char *first = (char *)block->base + at, *second = first + piece.nbytes;
        os_errno = populate_as(first, second, piece.nbytes, out_call);
        if (os_errno == 0) {
            *out_call = "madvise"; /* shared memory loses nothing by it */
            os_errno = um__os_advise(second, piece.nbytes, UM__OS_DONTNEED);
        }
        at = um__mirror_next(&piece);
    }
    return os_errno;
}

int um__mirror_unfold(const um_block *block, const char **out_call) {
    int os_errno = 0;
    size_t end = block->lock == UM_LOCK_NONE ? block->reserved_nbytes : 0;
    for (size_t at = 0; os_errno == 0 && at < end;) {
        um__piece piece = um__mirror_piece(block, at);
        char *first = (char *)block->base + at;
        os_errno = populate_as(first + piece.nbytes, first, piece.nbytes, out_call);
        at = um__mirror_next(&piece);
    }
    return os_errno;
}
