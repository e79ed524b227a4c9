/* Files of /proc and /sys as text. */
#ifndef UM_PROC_FILE_H
#define UM_PROC_FILE_H

#include <stddef.h>

/* Reads a small file whole, cut off at the capacity. out always ends with a zero, and is empty
 * after a failure. Returns 0 or an errno. pre: capacity is at least 1. */
int um__proc_text(const char *path, char *out, size_t capacity);

/* A file that is read line by line. */
typedef struct um__proc_lines {
    int fd;
    size_t read_nbytes;
    size_t used, at;
    char buffer[40960]; /* a line of numa_maps may have a path and 1024 nodes */
} um__proc_lines;

/* Opens a file to be read in pieces of read_nbytes. The kernel walks the pages of a mapping before
 * it writes its lines, and writes as many mappings as fit the read: small reads spare walks.
 * Returns 0 or an errno. */
int um__proc_lines_open(um__proc_lines *out, const char *path, size_t read_nbytes);
/* Reads the next line, without its end; NULL behind the last line. It is valid until the next call.
 * A line that does not fit the buffer loses its beginning. Returns 0 or an errno. */
int um__proc_lines_next(um__proc_lines *lines, char **out_line);
void um__proc_lines_close(um__proc_lines *lines);

#endif
