/* Every system call that unimem makes, one function each. They return 0 or an errno, count
 * themselves, and decide nothing. The tests wrap each of them to make the Nth one fail. */
#ifndef UM_OS_H
#define UM_OS_H

#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* Inaccessible address space. pre: nbytes is a multiple of the base page. */
int um_os_reserve(size_t nbytes, void **out);
/* Zeroed private memory at an address inside a reservation. pre: both are multiples of the base
 * page. */
int um_os_map_at(void *address, size_t nbytes);
/* A file, at an address inside a reservation. pre: address and offset are multiples of the base
 * page. */
int um_os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access);
/* pre: the range was mapped by one of the above; both are multiples of the base page. */
int um_os_unmap(void *address, size_t nbytes);
/* MADV_HUGEPAGE or MADV_NOHUGEPAGE. pre: the range is mapped. */
int um_os_advise_huge(void *address, size_t nbytes, int huge);
/* MADV_POPULATE_WRITE or MADV_POPULATE_READ. pre: the range is mapped. */
int um_os_populate(void *address, size_t nbytes, int write);
/* mincore: one byte a page, its lowest bit set when the page is in RAM. pre: the range is mapped.
 */
int um_os_residency(void *address, size_t nbytes, unsigned char *out_pages);
/* One pread. 0 bytes read means the end of the file. */
int um_os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes);
/* One read at the file's own position, for /proc. */
int um_os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes);
int um_os_file_nbytes(int fd, uint64_t *out);
int um_os_open_read(const char *path, int *out_fd);
int um_os_close(int fd);
/* The CPUs this thread may run on, as a bit mask of mask_nbytes bytes (a multiple of a word). */
int um_os_get_affinity(void *mask, size_t mask_nbytes);
int um_os_set_affinity(const void *mask, size_t mask_nbytes);
/* A thread that runs fn(arg); and waiting for its end. */
typedef struct um_os_thread {
    uint64_t handle;
} um_os_thread;
int um_os_thread_start(um_os_thread *out, void *(*fn)(void *), void *arg);
int um_os_thread_join(um_os_thread thread);
/* The base page; cannot fail. */
size_t um_os_page_bytes(void);

#endif
