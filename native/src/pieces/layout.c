/* Where the parts of a piece lie in a slot.
 *
 *     slot:  | part 0 ....... slack | part 1 ....... slack | ...
 *            4096                   4096
 *
 * A direct read brings whole units of 4096 bytes. A part that begins inside a unit of its file has
 * the bytes before it in front of it, up to the beginning of its room. A part lies where most of its
 * pieces are then; the others are moved after the read. */
#include "pieces/layout.h"

#include "base/stats.h"
#include "base/status.h"

#include <errno.h>
#include <string.h>

enum { MOST_FILES = 1 << 16, LEAST_ALIGN = 32 };

static um_status check(const um_pieces_spec *spec, um_error *err) {
    UM__INVALID_IF(spec->n_files == 0 || spec->n_files > MOST_FILES || spec->n_pools == 0 ||
                       spec->n_pieces == 0 || spec->n_pieces > INT32_MAX,
                   err, "expected files, pools and pieces");
    for (uint32_t i = 0; i < spec->n_pools; i++) {
        const um_pieces_pool *pool = &spec->pools[i];
        UM__INVALID_IF(pool->n_parts == 0 || pool->n_parts > UM_PIECES_MAX_PARTS, err, "n_parts");
        for (uint32_t p = 0; p < pool->n_parts; p++) {
            UM__INVALID_IF(pool->part_nbytes[p] == 0 ||
                               pool->part_nbytes[p] > INT64_MAX / 2 / UM_PIECES_MAX_PARTS,
                           err, "part_nbytes");
        }
    }
    const um_pieces_range *range = spec->ranges;
    for (uint32_t i = 0; i < spec->n_pieces; i++) {
        UM__INVALID_IF(spec->pool_of[i] >= spec->n_pools, err, "pool_of: there is no such pool");
        const um_pieces_pool *pool = &spec->pools[spec->pool_of[i]];
        for (uint32_t p = 0; p < pool->n_parts; p++, range++) {
            UM__INVALID_IF(range->file >= spec->n_files, err, "ranges: there is no such file");
            UM__INVALID_IF(range->offset > INT64_MAX / 2, err, "ranges: the offset is too large");
        }
    }
    return UM_OK;
}

/* Counts, for one part of one pool, the pieces at each place within a unit. Returns the place of
 * most, and the last place. */
static void count_places(const um_pieces_spec *spec, uint32_t pool, uint32_t part, uint32_t *counts,
                         size_t *out_usual, size_t *out_last) {
    const um_pieces_range *range = spec->ranges;
    *out_usual = *out_last = 0;
    for (uint32_t i = 0; i < spec->n_pieces; i++) {
        if (spec->pool_of[i] == pool) {
            size_t place = range[part].offset % UM__PIECES_UNIT;
            counts[place]++;
            *out_last = place > *out_last ? place : *out_last;
            if (place % LEAST_ALIGN == 0 && counts[place] > counts[*out_usual]) {
                *out_usual = place;
            }
        }
        range += spec->pools[spec->pool_of[i]].n_parts;
    }
}

um_status um_pieces_layout(um_pieces_spec *spec, um_error *err) {
    UM__TRY(check(spec, err));
    size_t counts_nbytes = UM__PIECES_UNIT * sizeof(uint32_t);
    uint32_t *counts = um__heap_alloc(1, counts_nbytes);
    UM__RETURN_IF(counts == NULL, um__fail_nomem(err, ENOMEM, counts_nbytes, "calloc"));
    for (uint32_t i = 0; i < spec->n_pools; i++) {
        um_pieces_pool *pool = &spec->pools[i];
        pool->stride = 0;
        for (uint32_t p = 0; p < pool->n_parts; p++) {
            size_t usual, last;
            memset(counts, 0, counts_nbytes);
            count_places(spec, i, p, counts, &usual, &last);
            pool->part_offset[p] = pool->stride + usual;
            pool->stride += um__pieces_whole(last + pool->part_nbytes[p]);
        }
    }
    um__heap_free(counts);
    return UM_OK;
}
