/* Files of /proc and /sys as text. */
#include "os/proc_file.h"

#include "base/status.h"
#include "os/os.h"

#include <errno.h>
#include <string.h>

/* Reads once, and again if a signal interrupts the read. */
static int read_some(int fd, char *out, size_t nbytes, size_t *out_nbytes) {
    int os_errno;
    do {
        os_errno = um__os_read(fd, out, nbytes, out_nbytes);
    } while (os_errno == EINTR);
    return os_errno;
}

int um__proc_text(const char *path, char *out, size_t capacity) {
    out[0] = '\0';
    int fd, os_errno = um__os_open_read(path, &fd);
    UM__RETURN_IF(os_errno != 0, os_errno);
    size_t total = 0, n = 1;
    while (n > 0 && total < capacity - 1 && os_errno == 0) {
        os_errno = read_some(fd, out + total, capacity - 1 - total, &n);
        total += os_errno == 0 ? n : 0;
    }
    um__os_close(fd);
    out[os_errno == 0 ? total : 0] = '\0';
    return os_errno;
}

int um__proc_lines_open(um__proc_lines *out, const char *path, size_t read_nbytes) {
    out->read_nbytes = read_nbytes;
    out->used = out->at = 0;
    return um__os_open_read(path, &out->fd);
}

int um__proc_lines_next(um__proc_lines *lines, char **out_line) {
    for (;;) {
        char *start = lines->buffer + lines->at;
        char *end = memchr(start, '\n', lines->used - lines->at);
        if (end != NULL) {
            *end = '\0';
            lines->at = (size_t)(end - lines->buffer) + 1;
            *out_line = start;
            return 0;
        }
        size_t rest = lines->used - lines->at;
        if (rest == sizeof lines->buffer) {
            rest = 0;
        }
        memmove(lines->buffer, lines->buffer + lines->used - rest, rest);
        lines->used = rest;
        lines->at = 0;
        size_t room = sizeof lines->buffer - rest, n;
        int os_errno = read_some(lines->fd, lines->buffer + rest,
                                 room < lines->read_nbytes ? room : lines->read_nbytes, &n);
        UM__RETURN_IF(os_errno != 0, os_errno);
        if (n == 0) {
            *out_line = NULL;
            return 0;
        }
        lines->used += n;
    }
}

void um__proc_lines_close(um__proc_lines *lines) {
    um__os_close(lines->fd);
}
