/* Huge pages from the pool of the machine, for the duration of a test. */
#ifndef UM_HUGE_POOL_H
#define UM_HUGE_POOL_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

/* The pool of the default size, or -1. It is kept open and locked, so that programs that run at the
 * same time wait for each other. */
static int huge_pool_fd = -1;
static unsigned huge_pool_borrowed;

static inline unsigned huge_pool_read(void) {
    char text[32] = "";
    ssize_t n = pread(huge_pool_fd, text, sizeof text - 1, 0);
    return n > 0 ? (unsigned)strtoul(text, NULL, 10) : 0;
}

static inline void huge_pool_write(unsigned n) {
    char text[32];
    int length = snprintf(text, sizeof text, "%u", n);
    if (pwrite(huge_pool_fd, text, (size_t)length, 0) != length) {
        fprintf(stderr, "the pool of huge pages cannot be set to %u\n", n);
    }
}

static inline void huge_pool_give_back(void) {
    if (huge_pool_fd >= 0) {
        /* Another process may have emptied the pool in the meantime. */
        unsigned now = huge_pool_read();
        huge_pool_write(now > huge_pool_borrowed ? now - huge_pool_borrowed : 0);
        close(huge_pool_fd);
        huge_pool_fd = -1;
    }
}

/* Adds n pages to the pool. Returns false, and leaves the pool as it was, when this process may not
 * do so or when the machine has too few free pages. The pages are given back when the program ends,
 * at the latest. */
static inline bool huge_pool_borrow(unsigned n) {
    huge_pool_fd = open("/proc/sys/vm/nr_hugepages", O_RDWR | O_CLOEXEC);
    if (huge_pool_fd < 0) {
        return false;
    }
    flock(huge_pool_fd, LOCK_EX);
    unsigned before = huge_pool_read();
    huge_pool_write(before + n);
    huge_pool_borrowed = huge_pool_read() - before;
    if (huge_pool_borrowed != n) {
        huge_pool_give_back();
        return false;
    }
    atexit(huge_pool_give_back);
    return true;
}

#endif
