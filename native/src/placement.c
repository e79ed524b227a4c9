/* Placement: what the kernel says of a block. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdlib.h>

/* Reads a file line by line through a buffer of its own. */
typedef struct line_reader {
    int fd;
    size_t used, at;
    char buffer[32768];
} line_reader;

/* The next line without its end, cut off at the buffer's size; NULL at the end (os_errno 0) or on
 * failure. */
static char *next_line(line_reader *reader, int *os_errno) {
    for (;;) {
        char *start = reader->buffer + reader->at;
        char *end = memchr(start, '\n', reader->used - reader->at);
        if (end != NULL) {
            *end = '\0';
            reader->at = (size_t)(end - reader->buffer) + 1;
            return start;
        }
        size_t rest = reader->used - reader->at, n;
        if (rest == sizeof reader->buffer) {
            rest = 0; /* a line longer than the buffer holds nothing that is looked for */
        }
        memmove(reader->buffer, reader->buffer + reader->used - rest, rest);
        reader->used = rest;
        reader->at = 0;
        do {
            *os_errno =
                um_os_read(reader->fd, reader->buffer + rest, sizeof reader->buffer - rest, &n);
        } while (*os_errno == EINTR);
        if (*os_errno != 0 || n == 0) {
            return NULL;
        }
        reader->used += n;
    }
}

/* Adds a line such as "Rss:   1234 kB" to *bytes when it has this name. */
static bool add_field(const char *line, const char *name, uint64_t *bytes) {
    size_t n = strlen(name);
    if (strncmp(line, name, n) != 0 || line[n] != ':') {
        return false;
    }
    *bytes += strtoull(line + n + 1, NULL, 10) * 1024;
    return true;
}

um_status um_block_verify(const um_block *block, um_placement *out, um_error *err) {
    uintptr_t first = (uintptr_t)block->base, last = first + block->nbytes;
    line_reader reader = {0};
    int os_errno = um_os_open_read("/proc/self/smaps", &reader.fd);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, 0, "open /proc/self/smaps");
    }
    um_placement found = {0};
    uint64_t eligible = 0;
    bool inside = false;
    for (char *line; (line = next_line(&reader, &os_errno)) != NULL;) {
        char *after;
        uintptr_t start = (uintptr_t)strtoull(line, &after, 16);
        if (after != line && *after == '-') {
            uintptr_t end = (uintptr_t)strtoull(after + 1, NULL, 16);
            if (start >= last) {
                break; /* entries are in the order of addresses */
            }
            inside = end > first;
        } else if (inside) {
            (void)(add_field(line, "Rss", &found.resident_bytes) ||
                   add_field(line, "Pss", &found.pss_bytes) ||
                   add_field(line, "AnonHugePages", &found.huge_bytes) ||
                   add_field(line, "ShmemPmdMapped", &found.huge_bytes) ||
                   add_field(line, "FilePmdMapped", &found.huge_bytes) ||
                   add_field(line, "Locked", &found.locked_bytes) ||
                   add_field(line, "Swap", &found.swapped_bytes) ||
                   add_field(line, "THPeligible", &eligible));
        }
    }
    um_os_close(reader.fd);
    if (os_errno != 0) {
        um_fail(err, UM_E_IO, "read /proc/self/smaps");
        if (err != NULL) {
            err->os_errno = os_errno;
        }
        return UM_E_IO;
    }
    /* Pages that are there say what they are; before the first one, eligibility says what they will
     * be. */
    bool huge = found.huge_bytes > 0 || (found.resident_bytes == 0 && eligible > 0);
    found.pages = huge ? UM_PAGES_THP : UM_PAGES_4K;
    found.page_bytes = huge ? um_huge_page_bytes() : um_os_page_bytes();
    *out = found;
    return UM_OK;
}

um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                            uint64_t *out_bytes, um_error *err) {
    size_t end, page = um_os_page_bytes();
    if (!um_add(offset, nbytes, &end) || end > block->nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside the block");
    }
    unsigned char pages[4096];
    uint64_t n_resident = 0;
    size_t last = (end + page - 1) / page * page;
    for (size_t at = offset / page * page; at < last && nbytes != 0;) {
        size_t step = last - at < sizeof pages * page ? last - at : sizeof pages * page;
        int os_errno = um_os_residency((char *)block->base + at, step, pages);
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, nbytes, "mincore");
        }
        for (size_t i = 0; i < step / page; i++) {
            n_resident += pages[i] & 1;
        }
        at += step;
    }
    *out_bytes = n_resident * page;
    return UM_OK;
}
