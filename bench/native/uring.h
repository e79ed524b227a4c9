/* Reading a file with io_uring, without its library. */
#ifndef BENCH_URING_H
#define BENCH_URING_H

#include <stddef.h>

/* Reads `nbytes` of a file to memory, with up to `depth` requests under way, and in whole pages
 * past the end where `page` is not 0. Returns 0 or an errno: ENOSYS where there is no io_uring. */
int bench_read_uring(int fd, unsigned char *to, size_t nbytes, size_t request_nbytes,
                     unsigned depth, size_t page);

/* Reads a part of a file with pread, as bench_read_uring does with what ended early. */
int bench_read_part(int fd, unsigned char *to, size_t begin, size_t end, size_t page);

#endif
