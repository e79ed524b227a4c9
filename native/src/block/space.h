/* Address space: page sizes, reservations, and the nodes that memory can lie on. */
#ifndef UM_SPACE_H
#define UM_SPACE_H

#include <stddef.h>

#include "unimem.h"

/* Address space for a block, with an inaccessible page on either side: so the kernel never merges
 * the block with a neighbour, and its range is an entry of smaps of its own. */
typedef struct um__space {
    void *data;
    void *map_base;
    size_t map_nbytes;
} um__space;

/* Reserves address space whose data begins `phase` bytes above a multiple of `align`. `asked` is
 * for the error. pre: nbytes, align and phase are multiples of the base page; align is a power of
 * two above phase. errors: UM_E_INVALID (nbytes too large), UM_E_NOMEM, UM_E_OS. */
UM_CHECKED um_status um__space_reserve(um__space *out, size_t nbytes, size_t align, size_t phase,
                                       size_t asked, um_error *err);

/* Returns the alignment of nbytes of a file with this page: the kernel maps huge pages of the page
 * cache as such only where the address and the offset agree. */
size_t um__space_align(size_t page, size_t nbytes);

/* Returns the logarithm of the hugetlb page size that was asked for; 0 for other pages. */
unsigned um__hugetlb_shift(um_pages pages);

/* Returns the only node with memory; -1 if there are several or the kernel does not tell. Asks the
 * kernel each time, since memory can be plugged in. */
int um__only_memory_node(void);

#endif
