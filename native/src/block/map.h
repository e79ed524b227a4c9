/* Mapping the memory of a block into its address space, and the file behind shared memory. */
#ifndef UM_MAP_H
#define UM_MAP_H

#include <stddef.h>

#include "unimem.h"

/* Maps a range of reserved address space as the block says: pages, policy, sharing and lock.
 * `asked` is for the error. After a failure the range may be mapped in part: the caller reserves it
 * again or unmaps it. errors: UM_E_NOMEM, UM_E_OS. */
UM_CHECKED um_status um__block_map_range(const um_block *block, size_t offset, size_t nbytes,
                                         size_t asked, um_error *err);

/* Checks that a range of a file can be mapped. *out_page is the page of its mappings. errors:
 * UM_E_INVALID, UM_E_OS. */
UM_CHECKED um_status um__file_check_range(int fd, uint64_t offset, size_t nbytes, size_t *out_page,
                                          uint64_t *out_file_nbytes, um_error *err);

/* Fails for an errno of mlock2 or munlock. */
um_status um__fail_lock(um_error *err, int os_errno, size_t asked, const char *call);

/* Opens a descriptor of nbytes of shared memory. The caller closes it. errors: UM_E_INVALID,
 * UM_E_NOMEM, UM_E_OS. */
UM_CHECKED um_status um__memfd_open(const um_block_options *options, size_t nbytes, int *out_fd,
                                    um_error *err);
/* Undoes um__memfd_open if no block is made of it. */
void um__memfd_discard(const um_block_options *options, int fd);

#endif
