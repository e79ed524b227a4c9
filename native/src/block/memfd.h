/* The file behind the shared memory of a new block: a memfd, or an empty file of the caller's. */
#ifndef UM_MEMFD_H
#define UM_MEMFD_H

#include <stddef.h>

#include "unimem.h"

/* Opens a descriptor of nbytes of shared memory. The caller closes it. errors: UM_E_INVALID,
 * UM_E_NOMEM, UM_E_OS. */
UM_CHECKED um_status um__memfd_open(const um_block_options *options, size_t nbytes, int *out_fd,
                                    um_error *err);
/* Undoes um__memfd_open if no block is made of it. */
void um__memfd_discard(const um_block_options *options, int fd);

#endif
