/* Reads of files that are under way: in an io_uring, or in threads. One thread at a time puts and
 * takes, and one waits; any may begin meanwhile. */
#ifndef UM_READS_H
#define UM_READS_H

#include <stdbool.h>
#include <stdint.h>

#include "os/ring.h"
#include "unimem_pieces.h"

typedef struct um__reads um__reads;

/* errors: UM_E_OS (a thread cannot be started, or a ring was asked for and is refused),
 * UM_E_NOMEM. */
UM_CHECKED um_status um__reads_open(um__reads **out, um_pieces_io io, uint32_t n_reads,
                                    um_error *err);
/* The most reads that can be under way; at most what was asked for. */
uint32_t um__reads_limit(const um__reads *reads);
bool um__reads_has_ring(const um__reads *reads);
/* pre: fewer than the limit were put and not taken; id is below the limit. */
void um__reads_put(um__reads *reads, uint32_t id, int fd, void *to, size_t nbytes, uint64_t offset);
/* Begins what was put. Returns 0 or an errno; what has not begun stays put. */
int um__reads_begin(um__reads *reads);
/* Begins what was put, and waits until one can be taken. Returns 0, also if none can, or an errno,
 * such as EINTR. pre: a read was put and not taken. */
int um__reads_wait(um__reads *reads);
/* Takes a read that has ended, or returns false. */
bool um__reads_take(um__reads *reads, um__read_end *out);
/* Frees all. pre: all reads were taken, unless this is a forked child, which has none. */
void um__reads_close(um__reads *reads, bool in_child);

#endif
