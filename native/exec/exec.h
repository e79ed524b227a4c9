/* The library that `unimem exec` loads before a program (LD_PRELOAD). It gives each large
 * allocation a mapping of its own, placed as was asked: pages, NUMA policy, lock, prefault. All
 * else goes to the allocator that the program would have had.
 *
 *     hooks.c      the functions of the C library that are replaced; begin and end of the process
 *     heap.c       malloc and its kind, over mappings and the next allocator
 *     ranges.c     mmap and its kind
 *     place.c      one mapping: where it lies, how it is placed, and its end
 *     prefault.c   touching it, by several threads, with an eye on the clock
 *     table.c      what is mapped now: the ledger that other processes read
 *     settings.c   what was asked for
 *     system.c     the system calls, which no hook sees
 *
 * A file calls only files below it. How a pointer is known: mappings of malloc's kind begin at
 * multiples of 2 MiB, where allocators put next to nothing. So `free` tests some bits of the
 * pointer, and looks into a table of 2 MiB slots only where they are 0: the small path has a
 * comparison and a jump, and neither a lock nor a load beyond the address of the next `free`. */
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

enum { UM_SLOT_BYTES = 2 << 20 };

/* ---- system.c: results as of the kernel; what fails returns NULL or -1, and sets errno ---- */

void *um_sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
int um_sys_unmap(void *at, size_t nbytes);
void *um_sys_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at);
int um_sys_advise(void *at, size_t nbytes, int advice);
int um_sys_bind(void *at, size_t nbytes, int mode, const uint64_t *nodes);
int um_sys_lock(void *at, size_t nbytes);
/* Makes a memfd of a size that others can only read, and maps it at an address. Returns its
 * descriptor, of a high number. */
int um_sys_share(void *at, size_t nbytes, const char *name);
/* CPU time of this thread: what the kernel does for it counts, other processes do not. */
uint64_t um_sys_cpu_ns(void);
int um_sys_pid(void);
/* When this process began, in ticks as of /proc/PID/stat; 0: not known. */
uint64_t um_sys_started(void);
/* Says how many bytes of a range are in RAM, and in huge pages. Returns -1 where the kernel does
 * not tell (before Linux 6.7). */
int um_sys_scan(void *at, size_t nbytes, uint64_t *out_resident, uint64_t *out_huge);

/* ---- settings.c ---- */

typedef enum um_exec_pages { UM_EXEC_AUTO, UM_EXEC_THP, UM_EXEC_2M, UM_EXEC_1G } um_exec_pages;

typedef struct um_settings {
    bool active; /* else everything goes its usual way */
    um_exec_pages pages;
    size_t page_bytes;
    size_t thp_bytes;   /* 0: there are no transparent huge pages */
    size_t min_bytes;   /* from which on an allocation is placed */
    size_t most_bytes;  /* beyond the machine's memory is sparse: left alone */
    int numa_mode;      /* the kernel's number, -1: none */
    uint64_t nodes[16]; /* a bit a node */
    bool lock, strict;
    bool report;             /* what ends is looked at */
    uint64_t prefault_bytes; /* how much may be prefaulted at a time; 0: nothing is */
    unsigned n_threads;      /* that prefault */
    int pid;                 /* the command's own process; its children have others */
    const char *text;        /* all of it, as it stands in the environment */
} um_settings;

extern um_settings um_settings_now;
/* Reads the settings from a text "1 key=value key=value", NULL or another version: not active. */
void um_settings_read(um_settings *out, const char *text);

/* ---- table.c ---- */

typedef enum um_via {
    UM_VIA_MALLOC,
    UM_VIA_CALLOC,
    UM_VIA_REALLOC,
    UM_VIA_ALIGNED,
    UM_VIA_MMAP
} um_via;

/* What was done to a mapping: bits of um_record.state. */
enum {
    UM_IS_HUGETLB = 1,
    UM_IS_ADVISED = 2,
    UM_IS_BOUND = 4,
    UM_IS_LOCKED = 8,
    UM_IS_PREFAULTED = 16,
    UM_IS_STALLED = 32,  /* the kernel took too long for huge pages */
    UM_IS_FALLBACK = 64, /* the pool of hugetlb pages had no room */
    UM_IS_KEPT = 128     /* the program has freed it, and the next allocation may have it */
};

typedef struct um_record {
    uint64_t address; /* 0: not in use */
    uint64_t nbytes;  /* mapped */
    uint64_t asked;   /* by the program; of a record not in use, the next such one */
    uint32_t via, state;
} um_record;

/* Mappings that have ended, added up by what they were asked to be. */
typedef struct um_ended {
    uint64_t n, asked, nbytes, resident, huge;
    uint32_t via, state;
} um_ended;

enum { UM_MOST_RECORDS = 65536, UM_MOST_ENDED = 64, UM_HEAD_BYTES = 8192, UM_TEXT_BYTES = 1024 };

typedef struct um_counts {
    uint64_t n_placed, placed_bytes, most_bytes; /* ever, now, and the most at a time */
    uint64_t n_fallback, n_stalled; /* without hugetlb pages; with small pages from some point on */
    uint64_t n_passed_on;           /* that no mapping was found for */
    uint64_t n_unbound, n_unlocked; /* where the kernel refused the policy or the lock */
    uint64_t prefaulted_bytes;      /* of what is mapped now */
} um_counts;

/* What others read, see src/unimem/accounting/placed.py. The first fields are those of the ledger
 * that unimem's engines show (src/unimem/accounting/published.py), in version 2. */
typedef struct um_table {
    char magic[8];
    uint32_t version, pid;
    uint64_t started;
    uint32_t n_records, record_nbytes, n_ended, malloc_is_ours;
    _Atomic uint64_t n_changes; /* odd: somebody writes */
    um_counts counts;
    char text[UM_TEXT_BYTES]; /* of the settings */
    char next[256];           /* the file of the next allocator */
    um_ended ended[UM_MOST_ENDED];
} um_table;

/* Memory for the table; no record yet. Returns false where there is none. */
bool um_table_init(void);
const um_table *um_table_now(void);
/* Says which file has the next allocator, and whether the program's own calls come here. Takes the
 * lock. */
void um_table_note_next(const char *path, bool malloc_is_ours);
/* Held while mappings are unmapped, so that no other thread enters the same addresses before. */
void um_table_lock(void);
void um_table_unlock(void);
/* Around a fork: the child has the records, in memory of its own, and shows nothing yet. */
void um_table_before_fork(void);
void um_table_in_parent(void);
void um_table_in_child(void);

/* All of these want the lock, unless they say other. */

/* Enters a mapping. Returns false where there is no room for it. */
bool um_table_add(um_record record);
/* Takes the mapping of malloc's kind that begins at an address out of the table. */
bool um_table_remove(void *address, um_record *out);
/* The record of malloc's kind at an address, or NULL; it stays the table's. */
um_record *um_table_find(void *address);
/* Changes what a record says; another address enters it there. */
bool um_table_change(um_record *record, um_record now);
/* Takes a range out of all records that it overlaps, which are cut. Returns whether some mapping of
 * mmap's kind was there, and the first such one. */
bool um_table_cut(uintptr_t address, size_t nbytes, um_record *out);
/* Whether some record of mmap's kind overlaps a range; gives the first. */
bool um_table_overlaps(uintptr_t address, size_t nbytes, um_record *out);
/* Whether a range lies in hugetlb pages of one mapping. Takes the lock itself. */
bool um_table_is_hugetlb(uintptr_t address, size_t nbytes);
um_counts *um_table_counts(void);
/* Around changes of counts alone. */
void um_table_begin(void);
void um_table_end(void);
void um_table_note_end(const um_record *record);
/* Whether a range may overlap a record of mmap's kind: false is certain. No lock. */
bool um_table_may_overlap(uintptr_t address, size_t nbytes);
/* Bytes that the program asked for at an address of malloc's kind; 0: it is none. No lock. */
size_t um_table_asked(const void *address, size_t *out_nbytes);
bool um_table_has(const void *address);

/* ---- prefault.c ---- */

/* Touches a range. Returns whether the kernel took too long for huge pages: the rest is in small
 * ones then. */
bool um_prefault(void *at, size_t nbytes, bool huge, unsigned n_threads);

/* ---- place.c ---- */

/* Maps and places memory of malloc's kind: at least nbytes, zeroed if *zeroed is set. NULL: the
 * next allocator shall have it, or with `strict` nobody (ENOMEM). */
void *um_place_take(size_t nbytes, size_t align, um_via via, bool *zeroed);
/* Ends what begins at an address. Returns false if it is none of ours. */
bool um_place_give(void *address);
/* Makes it larger or smaller, elsewhere if need be; its contents go with it. Returns NULL where
 * that cannot be done so: a copy can. */
void *um_place_resize(void *address, size_t nbytes);
/* Places what the kernel has mapped for the program, from its first byte on, or nothing. */
bool um_place_range(void *address, size_t nbytes, bool touch);
/* Maps a range at a multiple of align, in exactly these bytes. */
void *um_place_map(size_t nbytes, size_t align, int protection, int flags);
/* Says something of the command on standard error, once. */
void um_place_say(const char *text);

/* ---- heap.c: as the functions of the C library ---- */

typedef struct um_next {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void (*free)(void *);
    void *(*memalign)(size_t, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    size_t (*usable_size)(void *);
} um_next;

/* The allocator below. */
extern um_next um_next_now;
/* The large and the early. */
void *um_large_malloc(size_t nbytes);
void *um_large_calloc(size_t n, size_t nbytes);
void *um_large_realloc(void *address, size_t nbytes);
void um_large_free(void *address);
void *um_large_memalign(size_t align, size_t nbytes);
void *um_large_aligned_alloc(size_t align, size_t nbytes);
int um_large_posix_memalign(void **out, size_t align, size_t nbytes);
size_t um_large_usable_size(void *address);
/* Whether a pointer may begin a mapping of ours. */
static inline bool um_large_may_be_ours(const void *address) {
    return ((uintptr_t)address & (UM_SLOT_BYTES - 1)) == 0;
}

/* ---- ranges.c: as the functions of the C library ---- */

void *um_ranges_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
int um_ranges_unmap(void *at, size_t nbytes);
void *um_ranges_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at);
int um_ranges_advise(void *at, size_t nbytes, int advice);

#endif
