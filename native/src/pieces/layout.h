/* Reads past the page cache are of whole units, in the file and in memory. */
#ifndef UM_LAYOUT_H
#define UM_LAYOUT_H

#include <stddef.h>

#include "unimem_pieces.h"

enum { UM__PIECES_UNIT = 4096 };

/* Rounds up to whole units. pre: the result fits. */
static inline size_t um__pieces_whole(size_t nbytes) {
    return (nbytes + UM__PIECES_UNIT - 1) / UM__PIECES_UNIT * UM__PIECES_UNIT;
}

#endif
