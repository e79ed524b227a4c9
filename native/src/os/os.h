/* Every system call that unimem makes, one function each. They return 0 or an errno, count
 * themselves, and decide nothing. The tests wrap each of them to make the Nth one fail. */
#ifndef UM_OS_H
#define UM_OS_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* ---- address space ---- */

/* Reserves inaccessible address space. pre: nbytes is a multiple of the base page. */
int um_os_reserve(size_t nbytes, void **out);
/* Makes a range inaccessible again, and charged to nobody, in place of what is mapped there. pre:
 * both are multiples of the page (of a hugetlb mapping: the huge page). */
int um_os_reserve_at(void *address, size_t nbytes);
/* Maps zeroed private memory at an address inside a reservation. huge_shift is 0, or the logarithm
 * of a hugetlb page's size. pre: both are multiples of the page. */
int um_os_map_at(void *address, size_t nbytes, unsigned huge_shift);
/* Maps a file at an address inside a reservation. pre: address and offset are multiples of the
 * file's page. */
int um_os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access);
/* Unmaps a range. pre: it was mapped by one of the above; both are multiples of the page. */
int um_os_unmap(void *address, size_t nbytes);

/* ---- pages ---- */

typedef enum um_os_advice {
    UM_OS_HUGE,
    UM_OS_NO_HUGE,
    UM_OS_COLLAPSE,
    UM_OS_DONT_FORK,
    UM_OS_WILLNEED,
    UM_OS_SEQUENTIAL,
    UM_OS_RANDOM,
    UM_OS_DONTNEED,
    UM_OS_POPULATE_READ,
    UM_OS_POPULATE_WRITE
} um_os_advice;

/* Calls madvise once. pre: the range is mapped. */
int um_os_advise(void *address, size_t nbytes, um_os_advice advice);
/* Calls mincore: a byte for each page, whose lowest bit is set if the page is in RAM. pre: the
 * range is mapped. */
int um_os_residency(void *address, size_t nbytes, unsigned char *out_pages);
typedef struct um__page_run um__page_run; /* of kernel.h */
/* Scans an open /proc/self/pagemap (PAGEMAP_SCAN): gives the first runs of a range, and how many
 * bytes were scanned for them. pre: both are multiples of the page, capacity is at least 1. */
int um_os_scan_pages(int pagemap, const void *address, size_t nbytes, um__page_run *out,
                     size_t capacity, size_t *out_n, size_t *out_scanned_nbytes);
/* Locks a range (mlock2). pre: it is mapped. */
int um_os_lock(void *address, size_t nbytes, int on_fault);
int um_os_unlock(void *address, size_t nbytes);

/* ---- NUMA ---- */

/* Sets the policy of pages that will be touched (mbind). pre: the range is mapped; numa->mode is
 * not NONE. */
int um_os_bind(void *address, size_t nbytes, const um_numa *numa);
/* Asks where n pages of this process are (nodes NULL), or moves them (move_pages). out_status[i] is
 * the node, or a negative errno. pre: n addresses, each inside a page. */
int um_os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status);

/* ---- files ---- */

/* Calls pread once. 0 bytes mean the end of the file. */
int um_os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes);
/* Calls read once, at the file's own position, for /proc. */
int um_os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes);
int um_os_file_nbytes(int fd, uint64_t *out);
/* Returns the page size of a file's mappings: of hugetlbfs its own, else the base page. */
int um_os_file_page_bytes(int fd, size_t *out);
int um_os_open_read(const char *path, int *out_fd);
int um_os_close(int fd);
/* Makes a second descriptor of the same file, closed on exec. */
int um_os_duplicate(int fd, int *out_fd);
/* Makes an empty memfd that can be sealed and never be executed; huge_shift as above. */
int um_os_memfd(const char *name, unsigned huge_shift, int *out_fd);
int um_os_resize(int fd, uint64_t nbytes);
/* Seals a memfd against growing and shrinking, and with `write` against writing and more seals. */
int um_os_seal(int fd, int write);
/* Gives back the memory of a range of a shared file. pre: multiples of the file's page. */
int um_os_punch_hole(int fd, uint64_t offset, uint64_t nbytes);

/* ---- file systems ---- */

/* Opens a file system of a type, sets its options, creates it, and mounts it nowhere. The result is
 * its folder. The file system goes with the last descriptor of the folder and the last file in it.
 * An option without a value is a flag. pre: fd is of um_os_fs_open. */
int um_os_fs_open(const char *type, int *out_fd);
int um_os_fs_set(int fd, const char *key, const char *value);
int um_os_fs_create(int fd);
int um_os_fs_mount(int fd, int *out_fd);
/* Opens the file system of a folder of um_os_fs_mount for new options, and applies them. */
int um_os_fs_pick(int mount, int *out_fd);
int um_os_fs_reconfigure(int fd);

/* ---- threads ---- */

/* Gets the CPUs that this thread may run on, as a bit mask of mask_nbytes bytes (a multiple of a
 * word). */
int um_os_get_affinity(void *mask, size_t mask_nbytes);
int um_os_set_affinity(const void *mask, size_t mask_nbytes);
/* A thread that runs fn(arg). It receives no signals but those of its own faults: the others are
 * for the thread that started it. */
typedef struct um_os_thread {
    uint64_t handle;
} um_os_thread;
int um_os_thread_start(um_os_thread *out, void *(*fn)(void *), void *arg);
int um_os_thread_join(um_os_thread thread);
/* Sets functions to call before a fork, and behind it in the parent and in the child
 * (pthread_atfork). */
int um_os_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));
/* Sleeps while *word is `value`, until woken, a signal comes, or the time is over (ETIMEDOUT).
 * EAGAIN: *word has another value. */
int um_os_wait(const _Atomic uint32_t *word, uint32_t value, unsigned milliseconds);
int um_os_wake(const _Atomic uint32_t *word);

/* ---- signals: async-signal-safe ---- */

/* Sets and reads the action of SIGBUS (sigaction); either may be NULL. */
int um_os_bus_action(const struct sigaction *action, struct sigaction *out_previous);
/* Sends SIGBUS to this thread. */
int um_os_raise_bus(void);
/* Changes the signal mask of this thread (pthread_sigmask); out_previous may be NULL. */
int um_os_signal_mask(int how, const sigset_t *mask, sigset_t *out_previous);

/* Returns the base page size; cannot fail. */
size_t um_os_page_bytes(void);

#endif
