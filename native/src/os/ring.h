/* An io_uring that reads files. One thread at a time puts and takes; any may enter meanwhile. */
#ifndef UM_RING_H
#define UM_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct um__ring_entry um__ring_entry; /* of kernel.h */
typedef struct um__ring_event um__ring_event;

typedef struct um__ring {
    int fd;
    unsigned char *rings; /* shared with the kernel, and not with forked children */
    um__ring_entry *entries;
    size_t rings_nbytes, entries_nbytes;
    uint32_t *asked_head, *asked_tail, asked_mask; /* the kernel moves the head */
    uint32_t *ended_head, *ended_tail, ended_mask; /* the kernel moves the tail */
    um__ring_event *ended;
} um__ring;

/* How a read ended. */
typedef struct um__read_end {
    uint32_t id;
    int os_errno;  /* 0: it brought nbytes; no bytes mean the end of the file */
    size_t nbytes; /* may be less than asked for */
} um__read_end;

/* Makes a ring in which n_reads reads can be. Returns 0 or an errno. */
int um__ring_open(um__ring *out, uint32_t n_reads);
/* Puts a read into the ring, which begins with the next um__ring_enter. pre: fewer than n_reads
 * were put and not taken; nbytes is less than 2 GiB. */
void um__ring_put(um__ring *ring, uint32_t id, int fd, void *to, size_t nbytes, uint64_t offset);
/* Begins what was put, and waits until n_least reads can be taken. Returns 0, also if less began, or
 * an errno. */
int um__ring_enter(um__ring *ring, unsigned n_least);
/* Takes a read that has ended, or returns false. */
bool um__ring_take(um__ring *ring, um__read_end *out);
/* Closes the ring. pre: no read is under way. A forked child has no mapping of it. */
void um__ring_close(um__ring *ring, bool in_child);

#endif
