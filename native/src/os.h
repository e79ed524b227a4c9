/* Every system call that unimem makes, one function each. They return 0 or an errno, count
 * themselves, and decide nothing. The tests wrap each of them to make the Nth one fail. */
#ifndef UM_OS_H
#define UM_OS_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "unimem.h"

/* ---- address space ---- */

/* Inaccessible address space. pre: nbytes is a multiple of the base page. */
int um_os_reserve(size_t nbytes, void **out);
/* Inaccessible again, and charged to nobody: takes the place of what is mapped there. pre: both are
 * multiples of the page there (of a hugetlb mapping: the huge page). */
int um_os_reserve_at(void *address, size_t nbytes);
/* Zeroed private memory at an address inside a reservation; huge_shift is 0, or the logarithm of a
 * hugetlb page's size. pre: both are multiples of the page. */
int um_os_map_at(void *address, size_t nbytes, unsigned huge_shift);
/* A file, at an address inside a reservation. pre: address and offset are multiples of the file's
 * page. */
int um_os_map_file_at(void *address, int fd, uint64_t offset, size_t nbytes, um_access access);
/* pre: the range was mapped by one of the above; both are multiples of the page. */
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

/* One madvise. pre: the range is mapped. */
int um_os_advise(void *address, size_t nbytes, um_os_advice advice);
/* mincore: one byte a page, its lowest bit set when the page is in RAM. pre: the range is mapped.
 */
int um_os_residency(void *address, size_t nbytes, unsigned char *out_pages);
/* Neighbouring pages that this process has mapped. */
typedef struct um_os_page_run {
    uint64_t start, end; /* addresses */
    uint64_t huge;       /* 0, or they are parts of huge pages */
} um_os_page_run;

/* PAGEMAP_SCAN of an open /proc/self/pagemap: the first runs of a range, and how many bytes were
 * looked at to find them. pre: both are multiples of the page, capacity is at least 1. */
int um_os_scan_pages(int pagemap, const void *address, size_t nbytes, um_os_page_run *out,
                     size_t capacity, size_t *out_n, size_t *out_scanned_nbytes);
/* mlock2. pre: the range is mapped. */
int um_os_lock(void *address, size_t nbytes, int on_fault);
int um_os_unlock(void *address, size_t nbytes);

/* ---- NUMA ---- */

/* mbind, for pages that will be touched. pre: the range is mapped; numa->mode is not NONE. */
int um_os_bind(void *address, size_t nbytes, const um_numa *numa);
/* move_pages of this process: where n pages are (nodes NULL) or shall be. out_status[i] is the
 * node, or a negative errno. pre: n addresses, each inside a page. */
int um_os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status);

/* ---- files ---- */

/* One pread. 0 bytes read means the end of the file. */
int um_os_pread(int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes);
/* One read at the file's own position, for /proc. */
int um_os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes);
int um_os_file_nbytes(int fd, uint64_t *out);
/* The page size of a file's mappings: of hugetlbfs its own, else the base page. */
int um_os_file_page_bytes(int fd, size_t *out);
int um_os_open_read(const char *path, int *out_fd);
int um_os_close(int fd);
/* A second descriptor of the same file, closed on exec. */
int um_os_duplicate(int fd, int *out_fd);
/* An empty memfd that can be sealed and never be executed; huge_shift as above. */
int um_os_memfd(const char *name, unsigned huge_shift, int *out_fd);
int um_os_resize(int fd, uint64_t nbytes);
/* Seals a memfd against growing and shrinking, and with `write` against writing and more seals. */
int um_os_seal(int fd, int write);
/* Gives a range of a shared file's memory back. pre: multiples of the file's page. */
int um_os_punch_hole(int fd, uint64_t offset, uint64_t nbytes);

/* ---- file systems ---- */

/* A file system that is not made yet, by its type; its options; making it, and mounting it nowhere:
 * the result is its folder, and the file system goes with the last descriptor of that and the last
 * file in it. An option without a value is a flag. pre: of all but the first, a descriptor that the
 * first has made. */
int um_os_fs_open(const char *type, int *out_fd);
int um_os_fs_set(int fd, const char *key, const char *value);
int um_os_fs_create(int fd);
int um_os_fs_mount(int fd, int *out_fd);
/* The file system of a folder that um_os_fs_mount gave, for new options; giving it these. */
int um_os_fs_pick(int mount, int *out_fd);
int um_os_fs_reconfigure(int fd);

/* ---- threads ---- */

/* The CPUs this thread may run on, as a bit mask of mask_nbytes bytes (a multiple of a word). */
int um_os_get_affinity(void *mask, size_t mask_nbytes);
int um_os_set_affinity(const void *mask, size_t mask_nbytes);
/* A thread that runs fn(arg), and to which no signals come but those of its own faults: they are
 * for who began it. And waiting for its end. */
typedef struct um_os_thread {
    uint64_t handle;
} um_os_thread;
int um_os_thread_start(um_os_thread *out, void *(*fn)(void *), void *arg);
int um_os_thread_join(um_os_thread thread);
/* pthread_atfork: what is called before a fork, and behind it in the parent and in the child. */
int um_os_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));
/* Sleeps while *word is `value`, until it is woken, a signal comes, or the time is over
 * (ETIMEDOUT); EAGAIN: it is another one. And waking all of this process who sleep on it. */
int um_os_wait(const _Atomic uint32_t *word, uint32_t value, unsigned milliseconds);
int um_os_wake(const _Atomic uint32_t *word);

/* ---- signals: async-signal-safe ---- */

/* sigaction of SIGBUS; either may be NULL. */
int um_os_bus_action(const struct sigaction *action, struct sigaction *out_previous);
/* Sends SIGBUS to this thread. */
int um_os_raise_bus(void);
/* pthread_sigmask; out_previous may be NULL. */
int um_os_signal_mask(int how, const sigset_t *mask, sigset_t *out_previous);

/* The base page; cannot fail. */
size_t um_os_page_bytes(void);

#endif
