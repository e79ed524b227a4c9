/* The library that `unimem exec` loads before a program (LD_PRELOAD). Each large allocation gets a
 * mapping of its own, placed as asked: pages, NUMA policy, lock, prefault. All else goes to the
 * allocator that the program would have had.
 *
 *     hooks.c      the functions of the C library that are replaced; begin and end of the process
 *     heap.c       malloc and its kind, over mappings and the next allocator
 *     ranges.c     mmap and its kind
 *     place.c      one mapping: where it lies, how it is placed, and its end
 *     later.c      joining small pages into huge ones, once the program has started
 *     prefault.c   touching it, by several threads, with an eye on the clock
 *     table.c      what is mapped now: the ledger that other processes read
 *     index.c      its records by address
 *     settings.c   what was asked for
 *     system.c     the system calls, which no hook sees
 *
 * A file calls only files below it. Mappings of malloc's kind begin at multiples of 2 MiB, where
 * allocators put next to nothing. So `free` tests some bits of the pointer, and looks into a table
 * of 2 MiB slots only if they are 0: the small path has a comparison and a jump, no lock, and no
 * load but the address of the next `free`. */
#ifndef UM_EXEC_H
#define UM_EXEC_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { UM__SLOT_BYTES = 2 << 20 };

/* ---- system.c: as the kernel; a failure returns NULL or -1, and sets errno ---- */

void *um__sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
int um__sys_unmap(void *at, size_t nbytes);
void *um__sys_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at);
int um__sys_advise(void *at, size_t nbytes, int advice);
int um__sys_bind(void *at, size_t nbytes, int mode, const uint64_t *nodes);
int um__sys_lock(void *at, size_t nbytes);
/* Makes a memfd that other processes can only read, and maps it. Returns its descriptor, a high
 * number. */
int um__sys_share(void *at, size_t nbytes, const char *name);
/* Returns the CPU time of this thread, with the kernel's work for it. */
uint64_t um__sys_cpu_ns(void);
/* Returns the time of a clock that never goes back. */
uint64_t um__sys_now_ns(void);
/* Sleeps. Unlike nanosleep, it never ends a thread that was cancelled. */
void um__sys_rest(long ns);
/* Reads a pool of hugetlb pages: all, and those that are neither used nor promised. */
bool um__sys_pool(size_t page_bytes, size_t *out_total, size_t *out_unused);
/* Returns how many page faults this process has had. */
uint64_t um__sys_faults(void);
int um__sys_pid(void);
/* Returns when this process began, in ticks as of /proc/PID/stat; 0 if that is not known. */
uint64_t um__sys_started(void);
/* Blocks all signals of this thread; returns those that were blocked before. */
uint64_t um__sys_block_signals(void);
void um__sys_restore_signals(uint64_t before);
/* Writes to standard error. Unlike write, it never ends a thread that was cancelled. */
void um__sys_print(const char *text);
/* Counts the bytes of a range in RAM, and in huge pages. Returns -1 before Linux 6.7. */
int um__sys_scan(void *at, size_t nbytes, uint64_t *out_resident, uint64_t *out_huge);

/* ---- settings.c ---- */

typedef enum um__pages { UM__AUTO, UM__THP, UM__2M, UM__1G } um__pages;

typedef struct um__settings {
    bool active; /* else nothing is placed */
    um__pages pages;
    size_t page_bytes;
    size_t thp_bytes;   /* 0: there are no transparent huge pages */
    size_t min_bytes;   /* the smallest mapping that is placed */
    size_t heap_bytes;  /* the smallest allocation of malloc's kind; SIZE_MAX: all are left alone */
    size_t most_bytes;  /* beyond the machine's memory is sparse: left alone */
    int numa_mode;      /* the kernel's number, -1: none */
    uint64_t nodes[16]; /* a bit a node */
    bool lock, strict;
    bool report;             /* mappings that end are recorded */
    bool trial;              /* a host may have taken free memory: huge pages are tried first */
    bool touch_pool;         /* the pool may break its promise: its pages are touched at once */
    uint64_t prefault_bytes; /* the most that is prefaulted at a time */
    unsigned n_threads;      /* that prefault */
    int pid;                 /* of the command's own process */
    const char *text;        /* all settings, as the environment has them */
} um__settings;

extern um__settings um__settings_now;
/* Reads the settings from "1 key=value key=value"; NULL or another version: not active. */
void um__settings_read(um__settings *out, const char *text);

/* ---- records ---- */

typedef enum um__via { UM__MALLOC, UM__CALLOC, UM__REALLOC, UM__ALIGNED, UM__MMAP } um__via;

/* What was done to a mapping: bits of um__record.state. Above them is the number of the allocation,
 * in the order that the program made them. */
enum {
    UM__IS_HUGETLB = 1,
    UM__IS_ADVISED = 2,
    UM__IS_BOUND = 4,
    UM__IS_LOCKED = 8,
    UM__IS_PREFAULTED = 16,
    UM__IS_STALLED = 32,  /* the kernel took too long to find huge pages */
    UM__IS_FALLBACK = 64, /* the pool of hugetlb pages had no room */
    UM__IS_KEPT = 128,    /* freed, and kept for the next allocation */
    UM__IS_CHANGED = 256, /* by the program, in a way that outlives free: it is not kept */
    UM__IS_DUE = 512,     /* its small pages are still to be joined */
    UM__IS_OWED = 1024,   /* freed while a thread forked: it ends after that */
    UM__NUMBER_SHIFT = 12
};

typedef struct um__record {
    uint64_t address; /* 0: not in use */
    uint64_t nbytes;  /* mapped */
    uint64_t asked;   /* by the program; of a record not in use, the next such record */
    uint32_t via, state;
} um__record;

/* Mappings that have ended, added up by kind and size. */
typedef struct um__ended {
    uint64_t n, asked, nbytes, resident, huge;
    uint32_t via, state;
} um__ended;

enum {
    UM__MOST_RECORDS = 65536,
    UM__MOST_ENDED = 64,
    UM__HEAD_BYTES = 8192,
    UM__TEXT_BYTES = 1024
};

typedef struct um__counts {
    uint64_t n_placed, placed_bytes, most_bytes; /* ever, now, and the most at a time */
    uint64_t n_fallback, n_stalled; /* without hugetlb pages; with small pages from some point on */
    uint64_t n_passed_on;           /* to the next allocator, without a mapping */
    uint64_t n_unbound, n_unlocked; /* the kernel refused the policy, or the lock */
    uint64_t prefaulted_bytes;      /* of present mappings */
} um__counts;

/* ---- index.c: wants the table's lock ---- */

bool um__index_init(const um__record *of);
/* Enters a record by its number, and takes it out. */
void um__index_add(uint32_t number);
void um__index_remove(uint32_t number);
/* Returns the first record that ends behind an address, or 0. */
uint32_t um__index_first(uintptr_t address);
/* Returns how many records a search passes on its way to one. */
unsigned um__index_depth(uint32_t number);

/* ---- table.c ---- */

/* The table that other processes read (src/unimem/accounting/exec_table.py). Its first fields are
 * those of version 2 of the ledger that engines show (src/unimem/accounting/published.py). */
typedef struct um__table {
    char magic[8];
    uint32_t version, pid;
    uint64_t started;
    uint32_t n_records, record_nbytes, n_ended, malloc_is_ours;
    _Atomic uint64_t n_changes; /* odd while it is written */
    um__counts counts;
    char text[UM__TEXT_BYTES]; /* of the settings */
    char next[256];            /* the file of the next allocator */
    um__ended ended[UM__MOST_ENDED];
} um__table;

/* Makes an empty table. Returns false if there is no memory. */
bool um__table_init(void);
const um__table *um__table_now(void);
/* Records which file has the next allocator, and whether the program's own calls arrive here. Takes
 * the lock. */
void um__table_note_next(const char *path, bool malloc_is_ours);
/* Held while mappings are unmapped, so that no other thread enters the same addresses first. No
 * signal of this thread is handled meanwhile: a handler may allocate, or end the process.
 * Returns false if another thread still forks after a while: then only states and counts may
 * change, since the child gets the records as they are. */
bool um__table_lock(void);
/* The same without waiting for a fork: for who looks, and changes states and counts. */
void um__table_look(void);
void um__table_unlock(void);
/* Around a fork, in its thread. The lock is not held meanwhile: fork waits for locks of the C
 * library, and a thread that has one of them may allocate. The child gets the records, which it
 * does not show yet. */
void um__table_before_fork(void);
void um__table_after_fork(void);
void um__table_in_child(void);

/* These want the lock, unless they say otherwise. */

/* Enters a mapping, in the place of those of mmap's kind that went unseen. Returns false if there
 * is no room, or a thread forks. */
bool um__table_add(um__record record);
/* Removes the mapping of malloc's kind that begins at an address. */
bool um__table_remove(void *address, um__record *out);
/* Returns the record of malloc's kind at an address, or NULL. */
um__record *um__table_find(const void *address);
/* Changes a record, also its address. */
bool um__table_change(um__record *record, um__record now);
/* Changes the state of a record that the program may look up meanwhile: it stays where it is. */
void um__table_set_state(um__record *record, uint32_t state);
/* Cuts a range out of all records of mmap's kind that it overlaps; marks those of malloc's kind as
 * changed, and while a thread forks, all. */
void um__table_cut(uintptr_t address, size_t nbytes);
/* Returns whether a record of mmap's kind overlaps a range, and the first. */
bool um__table_overlaps(uintptr_t address, size_t nbytes, um__record *out);
/* Marks records of malloc's kind that a range overlaps as changed. Takes the lock itself. */
void um__table_note_change(uintptr_t address, size_t nbytes);
/* Returns whether a range lies in hugetlb pages of one mapping. Takes the lock itself. */
bool um__table_is_hugetlb(uintptr_t address, size_t nbytes);
/* Returns a record with a bit of its state set, or NULL. */
um__record *um__table_any(uint32_t state);
um__counts *um__table_counts(void);
/* Around a change of counts alone. */
void um__table_begin(void);
void um__table_end(void);
void um__table_note_end(const um__record *record);
/* Returns whether a range may overlap a record; false is certain. No lock. */
bool um__table_may_overlap(uintptr_t address, size_t nbytes);
/* Returns what the program asked for at an address of malloc's kind, or 0. No lock. */
size_t um__table_asked(const void *address, size_t *out_nbytes);

/* ---- prefault.c ---- */

/* Touches a range; false: the kernel refused a page. *out_stalled: huge pages were slow: the
 * rest has small ones, and the advice to stay so. */
bool um__prefault(void *at, size_t nbytes, bool huge, unsigned n_threads, bool *out_stalled);

/* ---- later.c ---- */

/* Starts the thread that joins small pages, unless it runs. It ends when there are none. */
void um__later_begin(void);
/* Does a part of its work. Returns the nanoseconds to wait before the next; 0: nothing is left. */
uint64_t um__later_step(void);
/* A forked child has no such thread. */
void um__later_in_child(void);

/* ---- place.c ---- */

/* Maps and places memory of malloc's kind: at least nbytes, zeroed if *zeroed is set; NULL if that
 * fails. */
void *um__place_take(size_t nbytes, size_t align, um__via via, bool *zeroed);
/* Ends the mapping that begins at an address. Returns false if it is not ours. */
bool um__place_give(void *address);
/* Ends what was freed while a thread forked. */
void um__place_settle(void);
/* Resizes a mapping, and moves it if need be; NULL: a copy is needed. */
void *um__place_resize(void *address, size_t nbytes);
/* Places a mapping that has grown. */
void um__place_again(um__record *record);
/* Places a mapping of the program's, all of it or nothing. */
bool um__place_range(void *address, size_t nbytes, bool touch);
/* Maps exactly nbytes at a multiple of align. */
void *um__place_map(size_t nbytes, size_t align, int protection, int flags);
/* Called when `strict` has refused memory; NULL: nothing is. */
extern void (*um__when_refused)(void);
/* Prints a line for the command on standard error, once. */
void um__place_say(const char *text);

/* ---- heap.c: as the functions of the C library ---- */

typedef struct um__next {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void (*free)(void *);
    void *(*memalign)(size_t, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    void *(*valloc)(size_t);
    void *(*pvalloc)(size_t);
    size_t (*usable_size)(void *);
} um__next;

/* The allocator below. */
extern um__next um__next_now;
/* For large allocations, and those before the next allocator is known. */
void *um__large_malloc(size_t nbytes);
void *um__large_calloc(size_t n, size_t nbytes);
void *um__large_realloc(void *address, size_t nbytes);
void um__large_free(void *address);
void *um__large_memalign(size_t align, size_t nbytes);
void *um__large_aligned_alloc(size_t align, size_t nbytes);
int um__large_posix_memalign(void **out, size_t align, size_t nbytes);
size_t um__large_usable_size(void *address);
/* Returns whether a pointer may begin a mapping of ours. */
static inline bool um__large_may_be_ours(const void *address) {
    return ((uintptr_t)address & (UM__SLOT_BYTES - 1)) == 0;
}

/* ---- ranges.c: as the functions of the C library ---- */

void *um__ranges_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
int um__ranges_unmap(void *at, size_t nbytes);
void *um__ranges_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at);
int um__ranges_advise(void *at, size_t nbytes, int advice);

#endif
