/* Every system call of the core, one function each. They return 0 or an errno, count themselves,
 * and decide nothing. The tests wrap them, to make the Nth one fail. */
#ifndef UM_OS_H
#define UM_OS_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* ---- address space ---- */

/* Reserves inaccessible address space. pre: nbytes is a multiple of the base page. */
int um__os_reserve(size_t nbytes, void **out);
/* Makes a range inaccessible again, without a charge, in place of its mapping. pre: both are
 * multiples of the page (of a hugetlb mapping: the huge page). */
int um__os_reserve_at(void *address, size_t nbytes);
/* Maps zeroed private memory at an address inside a reservation. huge_shift is 0, or the logarithm
 * of a hugetlb page's size. pre: both are multiples of the page. */
int um__os_map_at(void *address, size_t nbytes, unsigned huge_shift);
/* Maps a file at an address inside a reservation. pre: address and offset are multiples of the
 * file's page. */
int um__os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access);
/* Unmaps a range. pre: it was mapped by one of the above; both are multiples of the page. */
int um__os_unmap(void *address, size_t nbytes);

/* ---- pages ---- */

typedef enum um__os_advice {
    UM__OS_HUGE,
    UM__OS_NO_HUGE,
    UM__OS_COLLAPSE,
    UM__OS_DONT_FORK,
    UM__OS_WILLNEED,
    UM__OS_SEQUENTIAL,
    UM__OS_RANDOM,
    UM__OS_DONTNEED,
    UM__OS_POPULATE_READ,
    UM__OS_POPULATE_WRITE
} um__os_advice;

/* Calls madvise once. pre: the range is mapped. */
int um__os_advise(void *address, size_t nbytes, um__os_advice advice);
/* Calls mincore: a byte for each page, whose lowest bit is set if the page is in RAM. pre: the
 * range is mapped. */
int um__os_residency(void *address, size_t nbytes, unsigned char *out_pages);
typedef struct um__page_run um__page_run; /* of kernel.h */
/* Scans an open /proc/self/pagemap (PAGEMAP_SCAN): gives the first runs of a range, and how many
 * bytes were scanned for them. pre: both are multiples of the page, capacity is at least 1. */
int um__os_scan_pages(int pagemap, const void *address, size_t nbytes, um__page_run *out,
                      size_t capacity, size_t *out_n, size_t *out_scanned_nbytes);
/* Locks a range (mlock2). pre: it is mapped. */
int um__os_lock(void *address, size_t nbytes, int on_fault);
int um__os_unlock(void *address, size_t nbytes);

/* ---- NUMA ---- */

/* Sets the policy of pages that will be touched (mbind). pre: the range is mapped; numa->mode is
 * not NONE. */
int um__os_bind(void *address, size_t nbytes, const um_numa *numa);
/* Asks where n pages of this process are (nodes NULL), or moves them (move_pages). out_status[i] is
 * the node, or a negative errno. */
int um__os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status);

/* ---- files ---- */

/* Calls pread once. 0 bytes mean the end of the file. */
int um__os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes);
/* Calls read once, at the file's own position, for /proc. */
int um__os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes);
int um__os_file_nbytes(int fd, uint64_t *out);
/* Returns the page size of a file's mappings: of hugetlbfs its own, else the base page. */
int um__os_file_page_bytes(int fd, size_t *out);
int um__os_open_read(const char *path, int *out_fd);
/* Opens the file of a descriptor once more, to be read past the page cache (O_DIRECT). EINVAL: its
 * file system cannot. */
int um__os_open_direct(int fd, int *out_fd);
int um__os_close(int fd);
/* Makes a second descriptor of the same file, closed on exec. */
int um__os_duplicate(int fd, int *out_fd);
/* Makes an empty memfd that can be sealed and never be executed; huge_shift as above. */
int um__os_memfd(const char *name, unsigned huge_shift, int *out_fd);
int um__os_resize(int fd, uint64_t nbytes);
/* Seals a memfd against growing and shrinking, and with `write` against writing and more seals. */
int um__os_seal(int fd, int write);
/* Gives back the memory of a range of a shared file. pre: multiples of the file's page. */
int um__os_punch_hole(int fd, uint64_t offset, uint64_t nbytes);

/* ---- io_uring: see ring.h ---- */

typedef struct um__ring_params um__ring_params; /* of kernel.h */
/* Makes an io_uring for n operations. */
int um__os_ring_setup(unsigned n, um__ring_params *params, int *out_fd);
/* Maps a part of an io_uring, for um__os_unmap. */
int um__os_ring_map(int fd, uint64_t offset, size_t nbytes, void **out);
/* Begins n operations, and waits until n_least can be taken; less than n may have begun. */
int um__os_ring_enter(int fd, unsigned n, unsigned n_least);

/* ---- file systems ---- */

/* Opens a file system of a type, sets its options (without a value: a flag), creates it, and
 * returns its folder, mounted nowhere. It goes with the last descriptor of the folder or of a file
 * in it. */
int um__os_fs_open(const char *type, int *out_fd);
int um__os_fs_set(int fd, const char *key, const char *value);
int um__os_fs_create(int fd);
int um__os_fs_mount(int fd, int *out_fd);
/* Opens the file system of a folder of um__os_fs_mount for new options, and applies them. */
int um__os_fs_pick(int mount, int *out_fd);
int um__os_fs_reconfigure(int fd);

/* ---- threads ---- */

/* Gets the CPUs that this thread may run on, as a bit mask of whole words. */
int um__os_get_affinity(void *mask, size_t mask_nbytes);
int um__os_set_affinity(const void *mask, size_t mask_nbytes);
/* A thread that runs fn(arg). It receives no signals but those of its own faults. */
typedef struct um__os_thread {
    uint64_t handle;
} um__os_thread;
int um__os_thread_start(um__os_thread *out, void *(*fn)(void *), void *arg);
int um__os_thread_join(um__os_thread thread);
/* Sets functions to call before and after a fork (pthread_atfork). */
int um__os_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));
/* Sleeps while *word is `value`, until woken, a signal, or the time is over (ETIMEDOUT). EAGAIN:
 * *word has another value. */
int um__os_wait(const _Atomic uint32_t *word, uint32_t value, unsigned milliseconds);
int um__os_wake(const _Atomic uint32_t *word);

/* ---- signals: async-signal-safe ---- */

/* Sets and reads the action of SIGBUS (sigaction); either may be NULL. */
int um__os_bus_action(const struct sigaction *action, struct sigaction *out_previous);
/* Sends SIGBUS to this thread. */
int um__os_raise_bus(void);
/* Changes the signal mask of this thread (pthread_sigmask); out_previous may be NULL. */
int um__os_signal_mask(int how, const sigset_t *mask, sigset_t *out_previous);

/* Returns the time of the monotonic clock; cannot fail. */
uint64_t um__os_now_ns(void);
/* Returns the base page size; cannot fail. */
size_t um__os_page_bytes(void);

#endif
