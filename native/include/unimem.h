/* unimem: the memory layer for LLM inference. Public C API; the comments are the manual.
 *
 * Caveats first
 *   - What a tape hands out is not zeroed, and is invalid after um_tape_clear or a um_tape_rewind
 * behind it.
 *   - um_tape_take, um_grid_take and um_grid_give may run in any number of threads at once.
 * um_tape_clear and um_tape_rewind may not run beside a user of what they take back; that is the
 * caller's order to keep.
 *   - A um_kv, and a um_paged with all of its sequences, has one writer. Readers may read tokens
 * that are there while the writer appends.
 *   - Nothing here aborts, prints or logs. Nothing but the ledger is global.
 *
 * Conventions
 *   - Every function that can fail returns um_status and, when it is not UM_OK, leaves its outputs
 * and the object as they were. `err` may be NULL; otherwise it is filled when the call fails, and
 * untouched when it does not.
 *   - Structs are the caller's memory; their fields are read through functions, or directly where
 * marked "read".
 *   - Sizes are bytes unless the name says n_*.
 */
#ifndef UNIMEM_H
#define UNIMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
/* C++ (and Cython's C++ mode) sees the atomics as plain words of the same size; they are written by
 * C only. */
#define UM_ATOMIC(type) type
extern "C" {
#else
#define UM_ATOMIC(type) _Atomic(type)
#endif

#if defined(__GNUC__)
#define UM_API __attribute__((visibility("default")))
#define UM_CHECKED __attribute__((warn_unused_result))
#else
#define UM_API
#define UM_CHECKED
#endif

#define UM_VERSION_MAJOR 0
#define UM_VERSION_MINOR 1
#define UM_VERSION_PATCH 0

/* ---- status ---- */

typedef enum um_status {
    UM_OK = 0,
    UM_E_INVALID, /* an argument is outside what the call accepts */
    UM_E_FULL,    /* capacity is used up: err has limit, used, asked */
    UM_E_NOMEM,   /* the system has no memory: err has os_errno */
    UM_E_OS,      /* the system refused: err has os_errno and the call's name */
    UM_E_FORMAT,  /* a file breaks a rule of its format: err has rule and offset */
    UM_E_IO, /* a file cannot be read, or is shorter than it was: err has os_errno (0: it is short)
              */
    UM_E_STATE, /* not in this state: closed, frozen, nothing reserved */
    UM_E_BUSY   /* in use */
} um_status;

typedef struct um_error {
    um_status status;
    int os_errno;     /* of the call that failed, or 0 */
    uint64_t limit;   /* UM_E_FULL: what there is at most */
    uint64_t used;    /* UM_E_FULL: what is taken */
    uint64_t asked;   /* UM_E_FULL, UM_E_NOMEM: what was asked for */
    uint64_t offset;  /* UM_E_FORMAT: byte offset in the file */
    const char *what; /* static text: the argument, the system call, or the rule; never NULL after a
                         failure */
} um_error;

/* The name of a status, such as "UM_E_FULL". */
UM_API const char *um_status_name(um_status status);

/* ---- ledger ---- */

/* What memory is for. Every mapping that unimem makes is entered in exactly one category. */
typedef enum um_category {
    UM_CAT_OTHER = 0,
    UM_CAT_WEIGHTS,
    UM_CAT_SCRATCH,
    UM_CAT_HISTORY,
    UM_CAT_STAGING,
    UM_CAT_DIAGNOSTICS,
    UM_CAT_LOGITS,
    UM_CAT_TOKENS, /* ids, positions and row numbers: what an engine reads for each token */
    UM_CAT_COUNT
} um_category;

typedef struct um_ledger_row {
    uint64_t n_mappings;       /* mappings that exist now */
    uint64_t mapped_bytes;     /* their sizes, whole pages */
    uint64_t high_water_bytes; /* the largest mapped_bytes has been */
} um_ledger_row;

typedef struct um_counters {
    uint64_t n_os_calls;      /* system calls made by this library since it was loaded */
    uint64_t n_allocations;   /* heap allocations made by this library since it was loaded */
    uint64_t allocated_bytes; /* bytes asked for by those */
} um_counters;

/* errors: UM_E_INVALID for an unknown category. */
UM_API um_status um_ledger_read(um_category category, um_ledger_row *out, um_error *err);
UM_API void um_counters_read(um_counters *out);
/* "weights", "scratch", ...; NULL for an unknown category. */
UM_API const char *um_category_name(um_category category);

/* The most that is mapped in each category between two moments. Any threads may have such marks at
 * the same time, one within another or not; each costs a mapping that comes or grows one comparison
 * more, and nothing else anything. */
#define UM_MAX_MARKS 64

/* Begins with what is mapped now. *out is its number. errors: UM_E_FULL (UM_MAX_MARKS are there).
 */
UM_API um_status um_marks_begin(unsigned *out, um_error *err);
/* The most in each category so far. pre: the number is of marks that have begun. */
UM_API void um_marks_read(unsigned marks, uint64_t out[UM_CAT_COUNT]);
/* The number may come again. pre: as above. */
UM_API void um_marks_end(unsigned marks);

/* ---- block ---- */

typedef enum um_pages {
    UM_PAGES_AUTO = 0, /* THP for blocks that reserve at least one huge page, else the base page */
    UM_PAGES_4K,       /* base pages, never huge */
    UM_PAGES_THP,      /* transparent huge pages, by MADV_HUGEPAGE */
    UM_PAGES_2M,       /* hugetlb pages of 2 MiB, from the pool that the administrator filled */
    UM_PAGES_1G        /* hugetlb pages of 1 GiB */
} um_pages;

#define UM_MAX_NODES 1024

typedef enum um_numa_mode {
    UM_NUMA_NONE = 0, /* the process's policy: usually the node of the thread that touches first */
    UM_NUMA_BIND,     /* only these nodes: a page that they have no room for is not given */
    UM_NUMA_INTERLEAVE, /* page by page over these nodes */
    UM_NUMA_WEIGHTED,   /* the same, by the kernel's weights of the nodes (Linux 6.9) */
    UM_NUMA_PREFERRED   /* these nodes, and others when they have no room */
} um_numa_mode;

typedef struct um_numa {
    um_numa_mode mode;
    uint64_t
        nodes[UM_MAX_NODES / 64]; /* bit n % 64 of word n / 64: node n; none for UM_NUMA_NONE */
} um_numa;

typedef enum um_lock {
    UM_LOCK_NONE = 0,
    UM_LOCK_NOW,    /* all pages are brought in and stay in RAM */
    UM_LOCK_ONFAULT /* a page stays in RAM from its first touch on (mlock2, MLOCK_ONFAULT) */
} um_lock;

typedef enum um_sharing {
    UM_SHARING_NONE = 0, /* private, anonymous */
    UM_SHARING_MEMFD,    /* a memfd of the block's own, sealed against growing and shrinking */
    UM_SHARING_FD /* an open, empty, writable file of the caller's, such as one in /dev/shm */
} um_sharing;

typedef enum um_access {
    UM_ACCESS_READ = 0, /* shared, read-only */
    UM_ACCESS_PRIVATE,  /* writable, copy-on-write, the file never changes */
    UM_ACCESS_SHARED    /* writable, and what is written is the file's */
} um_access;

typedef enum um_advice {
    UM_ADVICE_WILLNEED = 0,
    UM_ADVICE_SEQUENTIAL,
    UM_ADVICE_RANDOM,
    UM_ADVICE_DONTNEED, /* of private anonymous memory this would be its contents: refused there */
    UM_ADVICE_HUGEPAGE,
    UM_ADVICE_NOHUGEPAGE
} um_advice;

/* What the kernel says of a range, read back from it and never echoed from the request. Of shared
 * memory and files, in RAM is what this process has mapped there. A hugetlb page cannot leave RAM
 * and always counts as locked; how many processes share one the kernel does not say, so that
 * pss_bytes counts it whole. */
typedef struct um_placement {
    um_pages pages; /* UM_PAGES_2M or UM_PAGES_1G: of hugetlb. UM_PAGES_THP when the range holds
                       huge pages, or would when touched; else UM_PAGES_4K */
    uint64_t page_bytes;     /* the page size `pages` stands for */
    uint64_t resident_bytes; /* in RAM */
    uint64_t pss_bytes;      /* in RAM, a page shared by n processes counted 1/n */
    uint64_t huge_bytes;     /* in RAM, in huge pages of any kind */
    uint64_t locked_bytes;   /* in RAM and locked there */
    uint64_t swapped_bytes;
    uint64_t node_bytes[UM_MAX_NODES]; /* in RAM, on each node */
} um_placement;

/* How um_block_map shall map. All zeros are the defaults. */
typedef struct um_block_options {
    um_pages pages;
    um_category category;
    um_numa numa;
    um_sharing sharing;
    int fd;                /* of UM_SHARING_FD; it may be closed afterwards */
    size_t reserve_nbytes; /* address space kept for um_block_commit; 0: just nbytes */
    size_t mirror_nbytes;  /* of a memfd: each piece of so many bytes is mapped twice, back to back,
                              so that what wraps around its end is contiguous; 0: once */
    const char *name;      /* of the memfd, as in /proc/PID/maps; NULL: "unimem" */
} um_block_options;

typedef struct um_block {
    void *base;    /* read. A multiple of the page size asked for; never changes */
    size_t nbytes; /* read. Usable bytes from the base on, up to the first gap: whole pages; of a
                      file: the request */
    size_t requested_nbytes;
    um_pages requested_pages;
    um_category category;
    um_numa numa;
    um_lock lock;
    um_sharing sharing;
    um_access access;
    size_t mirror_nbytes; /* read. 0, or the block's memory is mirrored: see um_block_map */
    size_t step_nbytes;   /* read. Commit and release work in whole steps: the page, huge or not */
    size_t reserved_nbytes; /* read. Address space from the base on, whole steps */
    size_t committed_nbytes;
    uint64_t *committed; /* a bit a step; NULL while exactly [0, nbytes) is committed */
    uint64_t *overlaid;  /* a bit a step that is a file's; NULL: none was (um_block_overlay) */
    void *map_base;      /* what is really mapped, guard pages included */
    size_t map_nbytes;
    int fd; /* read. Of shared memory; -1 otherwise */
    int is_file;
    int is_cache_hidden; /* of a file: its pages are UM_PAGE_UNKNOWN where they are not mapped */
} um_block;

/* Maps nbytes of zeroed memory between two inaccessible guard pages, so that the range is a mapping
 * of its own in /proc/self/smaps. The NUMA policy is set before anything is touched; nothing is
 * touched here: see um_block_warm. For shared memory the policy belongs to the memory, and holds
 * for every process that maps it; shared memory is left out of a forked child.
 * With mirror_nbytes m, nbytes bytes of memory (a multiple of m, and m one of the page) take twice
 * as much address space: the ith piece lies at base + 2 * i * m, and once more m behind that. In
 * the file the last piece comes first. `nbytes`, `reserved_nbytes`, `committed_nbytes` and every
 * offset of such a block are of address space; the ledger and um_placement count its memory once.
 * Huge pages are had where m is whole ones, and asked for only by name. It does not grow, and is
 * not released; see um_block_discard. errors: UM_E_INVALID (nbytes 0 or too large to round,
 * reserve_nbytes below nbytes, unknown option, a mirror of memory that is no memfd, or that is not
 * whole pages or pieces, a NUMA mode without nodes or nodes without one, a name above 249 bytes, a
 * file that is not empty or has pages of another size), UM_E_NOMEM (also: the hugetlb pool is too
 * small), UM_E_OS. */
UM_API um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                              um_error *err);

/* Maps nbytes of the open file fd from offset (a multiple of the base page; in hugetlbfs, of the
 * file's). The fd may be closed
 * afterwards. nbytes must lie inside the file as it is now. A file that shrinks later makes
 * touching the lost pages fatal: callers that cannot trust the file use um_file_read, or
 * um_guard_run. One that grows again reads as zeros there: only a checksum notices. errors:
 * UM_E_INVALID (offset not a multiple of the page, nbytes 0, range outside the file), UM_E_NOMEM,
 * UM_E_OS. */
UM_API um_status um_block_map_file(um_block *out, int fd, uint64_t offset, size_t nbytes,
                                   um_access access, um_category category, um_error *err);

/* Maps the whole of shared memory that another block, here or in another process, has made: fd is
 * that block's, or one of a file in /dev/shm; it may be closed afterwards. access is READ or
 * SHARED. What is reserved and not committed there is committed here. errors: UM_E_INVALID (access,
 * an empty file), UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_attach(um_block *out, int fd, um_access access, um_category category,
                                 um_error *err);

/* Makes a sealed copy of the first nbytes of `block`: shared memory that nobody can write, grow or
 * shrink any more, mapped read-only. Its pages are in RAM. errors: as um_block_map, UM_E_INVALID
 * for options that reserve more or name a file, and where nothing is committed at the base, UM_E_IO
 * where pages of a mapped file are lost. */
UM_API um_status um_block_copy_sealed(um_block *out, const um_block *block,
                                      const um_block_options *options, um_error *err);

/* Makes [offset, offset + nbytes) usable, rounded outwards to whole steps, inside what is reserved.
 * What is committed there already stays as it is. Nothing moves. New memory is zeroed, and placed
 * and locked as the block is. errors: UM_E_INVALID (outside the reserved range, a mapped file),
 * UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_commit(um_block *block, size_t offset, size_t nbytes, um_error *err);

/* Gives the memory of the whole steps inside [offset, offset + nbytes) back: it is inaccessible
 * then, and RSS and commit charge have fallen by what it was. *out_nbytes (may be NULL) is how much
 * was committed there. Other processes see zeros in shared memory that was released. errors:
 * UM_E_INVALID (outside the reserved range, a mapped file, memory that may only be read),
 * UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_release(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                                  um_error *err);

/* Forgets what the whole steps inside [offset, offset + nbytes) hold: their pages go back to the
 * system, and they read as zeros, in both images of mirrored memory. They stay committed: touching
 * them takes pages again. *out_nbytes (may be NULL) is how many bytes of memory were covered. What
 * was a file's (um_block_overlay) is the block's own then; should there be no memory for that, it
 * is no longer committed. errors: UM_E_INVALID (outside the reserved range or not committed, a
 * mapped file, memory that may only be read or is locked, hugetlb memory, which the pool would go
 * on keeping for the block), UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_discard(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                                  um_error *err);

/* Commits [offset, offset + nbytes) as a private, copy-on-write mapping of the open file fd from
 * file_offset on; the file never changes, and fd may be closed afterwards. Until it is released or
 * discarded the range is the file's: it is not placed as the block is, and um_block_warm reads it,
 * so that nothing is copied. A file that shrinks later takes its pages with it, those that were
 * written as well: touching them is fatal, but under um_guard_run. errors: UM_E_INVALID (a block
 * that is shared, a mapped file, of huge pages or locked; not multiples of the step; outside the
 * reserved range, or committed there; a range outside the file), UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_overlay(um_block *block, size_t offset, int fd, uint64_t file_offset,
                                  size_t nbytes, um_error *err);

/* Whether all of [offset, offset + nbytes) is committed. */
UM_API int um_block_is_committed(const um_block *block, size_t offset, size_t nbytes);
/* Whether any of it is a file's (um_block_overlay), so that a page there may be lost. */
UM_API int um_block_is_overlaid(const um_block *block, size_t offset, size_t nbytes);

/* Locks what is committed, and from now on what will be; UM_LOCK_NONE unlocks. errors: UM_E_INVALID
 * (unknown lock), UM_E_NOMEM (also: past the memlock limit, or a page cannot be had), UM_E_OS. */
UM_API um_status um_block_lock(um_block *block, um_lock lock, um_error *err);

/* Brings [offset, offset + nbytes) into RAM with n_threads threads (at least 1), each pinned to a
 * CPU of its own: cpus[i] for the ith (negative: anywhere), or CPUs that this thread may run on
 * where cpus is NULL; then one thread is the caller's, and not pinned. Memory that may be written
 * is made writable-resident; files, and memory that may only be read, are read. Contents do not
 * change. errors: UM_E_INVALID (also a range that is not committed), UM_E_NOMEM, UM_E_IO (the file
 * is shorter than the range; os_errno is 0), UM_E_OS. */
UM_API um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                               const int *cpus, um_error *err);

/* Asks the kernel to put what is resident into huge pages now (MADV_COLLAPSE, Linux 6.1), shared
 * memory included, and spreads it anew where the NUMA policy interleaves: the kernel gathers it.
 * hugetlb memory is left as it is. errors: UM_E_NOMEM (no huge page is free, or the memory cgroup
 * has no room for one), UM_E_OS (the kernel cannot; pages of 4K were asked for). */
UM_API um_status um_block_collapse(um_block *block, um_error *err);

/* errors: UM_E_INVALID (unknown advice; DONTNEED of memory that is no file, or of a file that is
 * written privately), UM_E_OS. */
UM_API um_status um_block_advise(um_block *block, um_advice advice, um_error *err);

/* Reads the placement of the whole block from the kernel. errors: UM_E_OS, UM_E_IO. */
UM_API um_status um_block_verify(const um_block *block, um_placement *out, um_error *err);

/* Moves resident pages that lie elsewhere than the block's NUMA policy says to where it says, page
 * by page (move_pages). Pages that were interleaved stay where they are, wherever the kernel began;
 * with THP a huge page is moved as a whole. *out_nbytes (may be NULL) is how much was elsewhere and
 * could not be moved: their node is full, a device uses them, or other processes map them, too.
 * errors: UM_E_INVALID (the block has no policy), UM_E_NOMEM, UM_E_OS, UM_E_IO (as for verify). */
UM_API um_status um_block_repair(um_block *block, uint64_t *out_nbytes, um_error *err);

/* How many bytes of [offset, offset + nbytes) are in RAM, in whole pages: for memory that shares
 * its block with other things. Of a file whose page cache is hidden from this user, those that are
 * mapped here are counted. errors: UM_E_INVALID, UM_E_OS. */
UM_API um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                                   uint64_t *out_bytes, um_error *err);

enum {
    UM_PAGE_IN_RAM = 1,  /* of a file: in the page cache, wherever it is mapped */
    UM_PAGE_MAPPED = 2,  /* in RAM, and this process has touched it */
    UM_PAGE_HUGE = 4,    /* mapped here as a part of a huge page */
    UM_PAGE_LOCKED = 8,  /* mapped here, and locked by um_block_lock or being hugetlb memory */
    UM_PAGE_UNKNOWN = 16 /* not mapped here, and whether it is in RAM the kernel does not tell */
};

/* Tells of each base page that [offset, offset + nbytes) touches where it is: a byte a page of
 * UM_PAGE_* and, unless it is NULL, the node of each that is mapped here, -1 for the others. After
 * a failure these hold anything.
 * UNKNOWN are, since Linux 5.2, pages of a file that this process neither owns nor may write, and
 * pages of a file in hugetlbfs. Before Linux 6.7, of all huge pages only those of hugetlb memory
 * are HUGE. Memory that was read and never written is the kernel's page of zeros, which counts as
 * any other. A process that may not read its own /proc/self/pagemap, as after a change of its user,
 * is told of no page that it is MAPPED, nor what goes with that.
 * errors: UM_E_INVALID (outside the block, or not committed), UM_E_NOMEM, UM_E_OS. */
UM_API um_status um_block_pages(const um_block *block, size_t offset, size_t nbytes,
                                uint8_t *out_pages, int16_t *out_nodes, um_error *err);

/* Gives the memory back; the struct is zeroed. A zeroed block is left alone. errors: UM_E_OS. */
UM_API um_status um_block_unmap(um_block *block, um_error *err);

/* For a child after a fork: memory that was left out of it is struck off the ledger, its descriptor
 * is closed, and the struct is zeroed, without touching the addresses. */
UM_API void um_block_forget(um_block *block);

/* The base page size, and the huge page size of THP (0 where the kernel has none). */
UM_API size_t um_page_bytes(void);
UM_API size_t um_huge_page_bytes(void);

/* ---- file ---- */

/* Reads exactly nbytes at offset into out, in as many reads as it takes.
 * errors: UM_E_IO (os_errno 0 when the file ends before; err->used says how many bytes came). */
UM_API um_status um_file_read(int fd, uint64_t offset, void *out, size_t nbytes, um_error *err);

/* ---- tmpfs ---- */

/* Makes a file system in memory of at most nbytes, which is mounted nowhere: *out_fd is its folder,
 * for openat and /proc/PID/fd. It goes with the last descriptor of the folder, and the memory of a
 * file with the last that has it open or mapped. huge: its files have huge pages where memory has,
 * whatever shmem_enabled says. errors: UM_E_INVALID (nbytes 0), UM_E_NOMEM, UM_E_OS (also: EPERM
 * without CAP_SYS_ADMIN in the user namespace, ENOSYS before Linux 5.2). */
UM_API um_status um_tmpfs_open(int *out_fd, uint64_t nbytes, int huge, um_error *err);
/* Makes the file system read-only, in all its mounts: who has the folder cannot undo it without the
 * rights that it took. errors: UM_E_OS (EBUSY: a file in it is open for writing). */
UM_API um_status um_tmpfs_seal(int fd, um_error *err);

/* ---- load ---- */

/* A range of a file, and the memory that it is read into. */
typedef struct um_load_part {
    int fd;          /* open until um_load_end */
    uint64_t offset; /* in the file; of a direct load a multiple of 4096, as `to` is */
    void *to;
    size_t nbytes; /* of a direct load there is room for it rounded up to 4096 */
} um_load_part;

typedef struct um_load_options {
    unsigned n_threads;    /* at least 1, each with one read under way */
    const int *cpus;       /* as for um_block_warm; here every thread is a new one, and pinned */
    size_t request_nbytes; /* of one read; 0: chosen */
    int direct;            /* the files were opened with O_DIRECT */
} um_load_options;

typedef struct um_load um_load;

/* Begins to read the parts, in their order, in threads of its own, to which no signals come. No two
 * of them fill one huge page (of THP) together. It is for one thread of this process: not for a
 * forked child, which has none of the threads. errors: UM_E_INVALID (no threads, a CPU above 8191,
 * a part that is not aligned for a direct load, sizes that overflow), UM_E_NOMEM, UM_E_OS (a thread
 * cannot be started; none is left then). */
UM_API um_status um_load_start(um_load **out, const um_load_part *parts, size_t n_parts,
                               const um_load_options *options, um_error *err);
/* Waits until all is read or a read has failed, but at most so many milliseconds, and not beyond a
 * signal to this thread. *out_nbytes is how much is in memory by now, *out_running whether a thread
 * is still reading. */
UM_API void um_load_wait(um_load *load, unsigned milliseconds, uint64_t *out_nbytes,
                         int *out_running);
/* Begins no more reads, waits for those under way, and frees the load; then the memory holds
 * everything, or this is the failure that came first. A load that was ended before it was finished
 * is no failure. *out_part (may be NULL) is the part that the failure is of. errors: UM_E_IO
 * (os_errno 0: the file ends before the part does), UM_E_NOMEM (there was no memory at `to`). */
UM_API um_status um_load_end(um_load *load, size_t *out_part, um_error *err);

/* ---- guard ---- */

typedef void um_guarded(void *context);

/* Runs `run`, which touches [base, base + nbytes) of a mapped file. A page there that cannot be
 * had, for the file was truncated or cannot be read (SIGBUS), ends it at once, as longjmp does: it
 * takes no locks and no memory, and what it writes is half done then. It ends in no other way than
 * by returning.
 *
 * Any number of threads may run guarded, and runs may be nested: a page of an outer range ends the
 * inner run, too. Meanwhile a handler for SIGBUS is installed; the last run to end takes it away.
 * Signals that are not of such a page, or were sent, go to whoever handled them before, as the
 * kernel would have called him, and those who install or restore handlers meanwhile find them so
 * afterwards. A handler that is installed while a run is under way is the first to hear of a fault
 * in it; each run that begins puts ours on top again. A thread that blocks SIGBUS does not while it
 * runs. A forked child may run guarded at once; a thread that is cancelled inside of a run leaves
 * the handler installed, and that goes on as before.
 *
 * um_kv_append, um_kv_append_all and um_kv_read may be run so: one that is ended has changed
 * nothing. A run costs five system calls, or two while others run. errors: UM_E_IO (os_errno 0),
 * UM_E_NOMEM, UM_E_OS (also EBUSY: more than 16 different actions for SIGBUS were met in this
 * process); `run` was not called then, but for UM_E_IO. */
UM_API um_status um_guard_run(const void *base, size_t nbytes, um_guarded *run, void *context,
                              um_error *err);
/* memcpy from a mapped file, guarded. errors: as um_guard_run. */
UM_API um_status um_guard_copy(void *out, const void *from, size_t nbytes, um_error *err);

/* ---- tape ---- */

/* A bump allocator over memory that somebody else owns. One compare-and-exchange a take. */
typedef struct um_tape {
    unsigned char *base;     /* read */
    size_t total;            /* read */
    UM_ATOMIC(size_t) used;  /* bytes from the base to the end of the last take */
    UM_ATOMIC(size_t) kept;  /* clear and rewind stop here */
    UM_ATOMIC(size_t) peak;  /* the largest `used` that a clear or rewind has undone */
    UM_ATOMIC(size_t) limit; /* no take passes it: total, or less while frozen */
    UM_ATOMIC(uint64_t) n_takes;
    UM_ATOMIC(int) frozen;
} um_tape;

/* errors: UM_E_INVALID (base NULL, total 0). */
UM_API um_status um_tape_init(um_tape *tape, void *base, size_t total, um_error *err);

/* Takes nbytes at an address that is a multiple of align (a power of two). nbytes may be 0.
 * errors: UM_E_INVALID (align), UM_E_FULL, UM_E_STATE (frozen). */
UM_API um_status um_tape_take(um_tape *tape, size_t nbytes, size_t align, void **out,
                              um_error *err);

UM_API void um_tape_clear(um_tape *tape);        /* back to what is kept; O(1), zeroes nothing */
UM_API void um_tape_keep(um_tape *tape);         /* what is taken so far stays */
UM_API size_t um_tape_mark(const um_tape *tape); /* to be given to um_tape_rewind */
/* Back to a mark, or to what is kept when that is more. errors: UM_E_INVALID (a mark above what is
 * used). */
UM_API um_status um_tape_rewind(um_tape *tape, size_t mark, um_error *err);
/* From now on no take passes `limit` bytes (0: no take at all): it fails with UM_E_STATE.
 * errors: UM_E_INVALID (limit above total). */
UM_API um_status um_tape_freeze(um_tape *tape, size_t limit, um_error *err);
UM_API void um_tape_thaw(um_tape *tape);
UM_API int um_tape_frozen(const um_tape *tape);
UM_API size_t um_tape_used(const um_tape *tape);
UM_API size_t um_tape_kept(const um_tape *tape);
UM_API size_t um_tape_high_water(const um_tape *tape); /* the largest used has ever been */
UM_API uint64_t um_tape_n_takes(const um_tape *tape);
UM_API int um_tape_owns(const um_tape *tape, const void *address);

/* ---- grid ---- */

/* Cells of one size over a tape, taken and given back in any order. Lock-free: the free list's head
 * carries a tag, so that a cell that was taken and given back in between is noticed. */
typedef struct um_grid {
    unsigned char *base;        /* read */
    size_t cell_bytes;          /* read: the request rounded up to the alignment */
    uint32_t n_cells;           /* read */
    UM_ATOMIC(uint32_t) * next; /* free list links, beside the cells or elsewhere */
    UM_ATOMIC(uint64_t)
    head; /* tag << 32 | index of the first free cell, UINT32_MAX when there is none */
    UM_ATOMIC(uint32_t) n_free;
} um_grid;

/* The bytes a grid needs of a tape, alignment included. errors: UM_E_INVALID (0, or a product that
 * overflows). */
UM_API um_status um_grid_bytes(size_t cell_bytes, uint32_t n_cells, size_t *out, um_error *err);
/* Takes cells and links from the tape; cells are aligned to 64 bytes. errors: UM_E_INVALID,
 * UM_E_FULL, UM_E_STATE (frozen). */
UM_API um_status um_grid_init(um_grid *grid, um_tape *tape, size_t cell_bytes, uint32_t n_cells,
                              um_error *err);
/* The same with cells that the CPU cannot reach, such as a GPU's: their address, a multiple of 64,
 * is only reckoned with. Room for n_cells of cell_bytes, rounded up to multiples of 64, and, at
 * `links`, for n_cells uint32_t; the caller keeps both. errors: UM_E_INVALID. */
UM_API um_status um_grid_init_apart(um_grid *grid, void *cells, void *links, size_t cell_bytes,
                                    uint32_t n_cells, um_error *err);
/* errors: UM_E_FULL. */
UM_API um_status um_grid_take(um_grid *grid, uint32_t *out_id, um_error *err);
/* errors: UM_E_INVALID (no such cell), UM_E_STATE (the cell is free already). */
UM_API um_status um_grid_give(um_grid *grid, uint32_t id, um_error *err);
UM_API void *um_grid_cell(const um_grid *grid, uint32_t id); /* NULL for no such cell */
UM_API uint32_t um_grid_n_available(const um_grid *grid);

/* ---- conversion ---- */

/* UM_Q8_0 is ggml's: blocks of 32 values, a float16 scale and 32 int8 (ggml-common.h, block_q8_0).
 */
typedef enum um_dtype { UM_F32 = 0, UM_F16, UM_BF16, UM_Q8_0 } um_dtype;

/* Values in a block (1 for the floats), and bytes of a block; 0 for an unknown type. */
UM_API size_t um_dtype_block_values(um_dtype type);
UM_API size_t um_dtype_block_bytes(um_dtype type);
/* Copies n elements from one type to another; ranges must not overlap, and both pointers are
 * aligned for their type (not more; UM_Q8_0: 2). Rounds to nearest even; a NaN stays a NaN, and
 * denormals and infinities are kept whatever the thread's floating-point mode is. To UM_Q8_0 as
 * ggml's reference (quantize_row_q8_0_ref). The fastest code that this CPU runs is chosen on the
 * first call. errors: UM_E_INVALID (unknown type; n not whole blocks). */
UM_API um_status um_convert(void *out, um_dtype out_type, const void *in, um_dtype in_type,
                            size_t n, um_error *err);
/* The code in use: "scalar", "avx2", "avx512", "neon". */
UM_API const char *um_convert_isa(void);

/* ---- kv ---- */

/* K and V of all layers of one stream (optionally a batch) in storage that somebody else owns.
 *
 * A lane is K or V of one layer of one stream: rows of n_kv_heads * head_dim values, one a token.
 * Lane ((layer * 2 + v) * batch + stream) begins at base + lane * lane_stride. A plain cache holds
 * its tokens in rows one after the other, from any row on. A ring (window != 0) holds the token of
 * position p in row p % n_rows, and its lanes are mirrored (um_block_options): rows n_rows to
 * 2 * n_rows are rows 0 to n_rows again.
 *
 * Tokens have positions, from 0 on, which nothing changes. The cache holds those from a first one
 * up to um_kv_next_position; of these a ring shows the last `window` only. A token that some layers
 * lack is not counted. Beside a reader of a ring, the writer may append as many tokens as there are
 * rows beyond the window before what the reader was shown is overwritten. */
typedef struct um_kv_spec {
    uint32_t n_layers, n_kv_heads, head_dim, batch;
    uint64_t max_seq_len; /* tokens that it holds at most; of a ring: not less than the window */
    uint64_t window;      /* 0, or a ring of the last so many tokens */
    um_dtype type;        /* UM_Q8_0: head_dim is a multiple of 32 */
} um_kv_spec;

/* Where the lanes are. */
typedef struct um_kv_storage {
    void *base;           /* aligned to 64 bytes */
    size_t lane_stride;   /* bytes; a multiple of 64, room for all rows (of a ring: twice) */
    uint64_t n_rows;      /* rows of a lane; of a ring, not below the window */
    uint64_t usable_rows; /* rows [0, usable_rows) may be written now; of a ring, n_rows */
} um_kv_storage;

/* Copies bytes between two places of a lane, which may overlap. */
typedef um_status um_kv_mover(void *context, void *to, const void *from, size_t nbytes);

typedef struct um_kv {
    um_kv_spec spec;              /* read */
    unsigned char *base;          /* read */
    size_t row_bytes;             /* read: one token of K (or V) in one layer of one stream */
    size_t lane_stride;           /* read */
    uint64_t n_rows;              /* read */
    uint64_t usable_rows;         /* read; see um_kv_set_usable */
    uint64_t shift;               /* of a plain cache: position p is in row p - shift */
    UM_ATOMIC(uint64_t) first;    /* no token before this position is held */
    UM_ATOMIC(uint64_t) reserved; /* rows reserved and not committed */
    UM_ATOMIC(uint64_t) * end;    /* of each layer, the position behind its last token */
    UM_ATOMIC(uint64_t) * top;    /* of each layer, the highest `end` so far: what lies n_rows of a
                                     ring below was overwritten */
    um_kv_mover *mover;           /* see um_kv_set_mover */
    void *mover_context;
} um_kv;

/* The bytes of one row; and the bytes that fixed storage needs: max_seq_len rows a lane, lanes
 * rounded up to 64 bytes, one behind the other. errors: UM_E_INVALID (a dimension 0, a product that
 * overflows, unknown type, head_dim that is not whole blocks, window above max_seq_len). */
UM_API um_status um_kv_row_bytes(const um_kv_spec *spec, size_t *out, um_error *err);
UM_API um_status um_kv_storage_bytes(const um_kv_spec *spec, size_t *out, um_error *err);
/* An empty cache. Allocates a few words a layer: um_kv_free. errors: as um_kv_row_bytes, and
 * UM_E_INVALID (storage that breaks what is said of it above), UM_E_NOMEM. */
UM_API um_status um_kv_init(um_kv *kv, const um_kv_spec *spec, const um_kv_storage *storage,
                            um_error *err);
UM_API void um_kv_free(um_kv *kv); /* the storage is left alone; a zeroed kv is, too */

/* Where row 0 of a lane is, of K (v = 0) or V (v = 1); NULL for no such lane. Never changes. */
UM_API void *um_kv_lane(const um_kv *kv, uint32_t layer, int v, uint32_t stream);
/* The row of a position. */
UM_API uint64_t um_kv_row(const um_kv *kv, uint64_t position);

/* The order of the rows given to um_kv_append, and read by um_kv_read. */
typedef enum um_kv_order {
    UM_KV_TOKEN_MAJOR = 0, /* [n, heads, head_dim], batch 1: how a matrix product leaves them */
    UM_KV_HEAD_MAJOR       /* [batch, heads, n, head_dim]: how attention code holds them */
} um_kv_order;

/* Appends n tokens to one layer, k and v aligned for `type` (not UM_Q8_0 unless the cache's): a
 * memcpy, or a conversion when `type` is not the cache's. n may be 0. A ring forgets what is
 * before its rows: of more than n_rows tokens it takes the last. errors: UM_E_INVALID (layer, type,
 * TOKEN_MAJOR with batch > 1), UM_E_FULL (err->what "kv": max_seq_len is reached; "rows": the rows
 * are used up, and um_kv_set_usable or um_kv_move makes room), UM_E_STATE (rows are reserved). No
 * row is appended then. */
UM_API um_status um_kv_append(um_kv *kv, uint32_t layer, const void *k, const void *v,
                              um_dtype type, um_kv_order order, uint64_t n, um_error *err);
/* Appends one token to all layers, k and v [n_layers, heads, head_dim]; batch 1. errors: as
 * um_kv_append, and UM_E_STATE when layers differ in length. */
UM_API um_status um_kv_append_all(um_kv *kv, const void *k, const void *v, um_dtype type,
                                  um_error *err);

/* The two halves of um_kv_append, for one who writes the rows of a layer himself: begin says in
 * which row the first of n tokens goes (of more than a ring has rows for, the first of those that
 * it takes), end that they are there. errors: as um_kv_append. */
UM_API um_status um_kv_append_begin(const um_kv *kv, uint32_t layer, uint64_t n, uint64_t *out_row,
                                    um_error *err);
UM_API void um_kv_append_end(um_kv *kv, uint32_t layer, uint64_t n);

/* For engines that write rows themselves: reserve says from which row on n rows may be written in
 * every layer (in a ring they may go on into the mirror, or be taken % n_rows); commit makes the
 * first n of them visible in all layers at once; rollback drops the reservation, and tokens that
 * not all layers hold. What a ring's reserved rows held is lost with reserve. errors: UM_E_FULL (as
 * um_kv_append; a ring: more than n_rows), UM_E_STATE (reserve: rows are reserved, or layers
 * differ; commit: nothing is reserved), UM_E_INVALID (reserve of nothing; commit of more than was
 * reserved). */
UM_API um_status um_kv_reserve(um_kv *kv, uint64_t n, uint64_t *out_row, um_error *err);
UM_API um_status um_kv_commit(um_kv *kv, uint64_t n, um_error *err);
UM_API void um_kv_rollback(um_kv *kv);

UM_API uint64_t um_kv_seq_len(const um_kv *kv); /* tokens that all layers hold, and a ring shows */
UM_API uint64_t um_kv_next_position(const um_kv *kv);  /* the position behind the last of these */
UM_API uint64_t um_kv_first_position(const um_kv *kv); /* of these: next_position - seq_len */
/* The first position that every layer still has; a crop may bring a ring's back to the window. */
UM_API uint64_t um_kv_oldest_position(const um_kv *kv);
/* The tokens that one layer holds (and a ring shows): the position of the first, and how many.
 * 0 for no such layer. */
UM_API uint64_t um_kv_layer_len(const um_kv *kv, uint32_t layer, uint64_t *out_first_position);

/* Copies n tokens of K or V of a layer, from `position` on, to out [batch, heads, n, head_dim],
 * converted to `type` (not UM_Q8_0 unless the cache's). errors: UM_E_INVALID (layer, type, tokens
 * that the layer does not hold). */
UM_API um_status um_kv_read(const um_kv *kv, uint32_t layer, int v, uint64_t position, uint64_t n,
                            void *out, um_dtype type, um_error *err);

/* Keeps the first n of the seq_len tokens: next_position goes back by what is dropped. A ring then
 * shows the `window` tokens before that again, if they are still there. errors: UM_E_INVALID (n
 * above seq_len; what "overwritten": a ring lacks what it would have to show, and err->limit is the
 * smallest n that works), UM_E_STATE (layers differ, rows reserved). */
UM_API um_status um_kv_crop(um_kv *kv, uint64_t n, um_error *err);
/* Keeps the first keep_first and the last n of the seq_len tokens, all of them where that is more,
 * and next_position as it is. No byte is moved, but for keep_first tokens: these are copied to the
 * rows before the last n, and have the positions there. errors: UM_E_INVALID (keep_first of a
 * ring), UM_E_STATE (as crop). */
UM_API um_status um_kv_trim(um_kv *kv, uint64_t n, uint64_t keep_first, um_error *err);
/* No tokens, nothing reserved; the next position is 0. */
UM_API void um_kv_clear(um_kv *kv);

/* ---- kv: for the owner of the storage ---- */

/* Rows [0, n) can be written from now on. errors: UM_E_INVALID (a ring; above n_rows; below the end
 * of the tokens or of what is reserved). */
UM_API um_status um_kv_set_usable(um_kv *kv, uint64_t n, um_error *err);
/* Moves the tokens of a plain cache so that the first lies in `row`; an empty one goes on there.
 * errors: UM_E_INVALID (a ring, rows that are not usable), UM_E_STATE (rows are reserved). */
UM_API um_status um_kv_move(um_kv *kv, uint64_t row, um_error *err);
/* Whether the storage is memory of this process matters only to um_kv_append, um_kv_append_all and
 * um_kv_read, and where tokens move: um_kv_trim with keep_first, and um_kv_move. These call `mover`
 * (NULL: memmove) for each lane; what it returns beside UM_OK they return: then all lengths and
 * positions are as before, but rows that tokens were to go to may have been written, and tokens
 * that were in these are lost. So a mover fails before its first byte, or gives the cache up. */
UM_API void um_kv_set_mover(um_kv *kv, um_kv_mover *mover, void *context);
/* Declares that the rows hold n tokens whose next position is next_position, instead of what they
 * held: of a plain cache rows [0, n), of a ring where they belong. errors: UM_E_INVALID (n above
 * next_position, max_seq_len, usable rows or window). */
UM_API um_status um_kv_adopt(um_kv *kv, uint64_t next_position, uint64_t n, um_error *err);

/* ---- paged kv ---- */

/* K and V of many sequences, in blocks of tokens that they share, in storage that somebody else
 * owns.
 *
 * A block is one piece of memory with block_tokens tokens of all layers: [n_layers, 2, n_kv_heads,
 * block_tokens, head_dim], K before V, at base + id * block_bytes. So copy-on-write is one memcpy,
 * and the tokens of a head lie one behind the other: gathering and attention read runs of
 * block_tokens rows, not of one. With strides this is [n_blocks, block_tokens, n_kv_heads,
 * head_dim] for each layer, as kernels with block tables take it.
 *
 * A sequence is a table of block ids. A block that sequences share is not written: the one that
 * appends to it gets a copy first. When no sequence holds a block any more it is free or, where it
 * is cached (um_paged_cache), evictable: it keeps its tokens until a block is needed and none is
 * free. Then the one that has been evictable for longest is taken, and is not cached any more; what
 * a sequence gives back is evicted from its end on. Whoever keeps an index of cached blocks asks
 * um_paged_is_cached when it finds one. A cached block is uncached, too, when the only sequence
 * that holds it was cropped into it and appends. */
typedef struct um_paged_spec {
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t n_blocks, block_tokens; /* n_blocks: below 2^31 - 1 */
    um_dtype type;                   /* UM_Q8_0: head_dim is a multiple of 32 */
} um_paged_spec;

typedef struct um_paged_block um_paged_block; /* what is known of a block */

typedef struct um_paged {
    um_paged_spec spec;   /* read */
    unsigned char *base;  /* read */
    size_t head_bytes;    /* read: K (or V) of one head of one token */
    size_t lane_bytes;    /* read: K (or V) of one layer in a block */
    size_t block_bytes;   /* read: a multiple of 64 */
    uint32_t n_free;      /* read: blocks that hold nothing */
    uint32_t n_evictable; /* read: blocks that are cached, and that no sequence holds */
    um_paged_block *blocks;
} um_paged;

typedef struct um_paged_seq {
    um_paged *paged;
    uint32_t n_blocks;         /* read: entries of the table */
    int32_t *table;            /* read: block ids; with room for all, so that it never moves */
    UM_ATOMIC(uint64_t) * len; /* of each layer, in tokens */
} um_paged_seq;

/* The bytes that n_blocks blocks need. errors: UM_E_INVALID (a dimension 0, a product that
 * overflows, too many blocks, unknown type, head_dim that is not whole blocks). */
UM_API um_status um_paged_storage_bytes(const um_paged_spec *spec, size_t *out, um_error *err);
/* A pool of free blocks over storage of that many bytes, aligned to 64. Allocates a few words a
 * block: um_paged_free. errors: as um_paged_storage_bytes; UM_E_INVALID (storage), UM_E_NOMEM. */
UM_API um_status um_paged_init(um_paged *paged, const um_paged_spec *spec, void *storage,
                               um_error *err);
/* The sequences are of no use then; the storage is left alone. A zeroed paged is, too. */
UM_API void um_paged_free(um_paged *paged);

/* Where K (v = 0) or V (v = 1) of a layer lies in a block; NULL for no such thing. */
UM_API void *um_paged_lane(const um_paged *paged, uint32_t block, uint32_t layer, int v);
/* How many sequences hold a block; 0 for no such block. */
UM_API uint32_t um_paged_n_holders(const um_paged *paged, uint32_t block);
UM_API uint32_t um_paged_n_in_use(const um_paged *paged); /* blocks that sequences hold */

UM_API int um_paged_is_cached(const um_paged *paged, uint32_t block);
/* Caches a block that a sequence holds. errors: UM_E_INVALID (no such block), UM_E_STATE (no
 * sequence holds it). */
UM_API um_status um_paged_cache(um_paged *paged, uint32_t block, um_error *err);
/* Undoes it: where no sequence holds the block, it is free then. */
UM_API void um_paged_uncache(um_paged *paged, uint32_t block);

/* A sequence that begins with these n_blocks blocks: full ones that are held or cached, in the
 * order of their tokens; 0 for an empty one. All that it will ever allocate is allocated here:
 * um_paged_seq_free. errors: UM_E_INVALID (no such block, or one that is free), UM_E_NOMEM. */
UM_API um_status um_paged_seq_init(um_paged_seq *out, um_paged *paged, const int32_t *blocks,
                                   uint32_t n_blocks, um_error *err);
/* A sequence with the same tokens in the same blocks: a copy of the table. errors: UM_E_STATE
 * (layers differ in length), UM_E_NOMEM. */
UM_API um_status um_paged_seq_fork(um_paged_seq *out, const um_paged_seq *seq, um_error *err);
UM_API void um_paged_seq_clear(um_paged_seq *seq); /* no tokens; gives all blocks back */
UM_API void um_paged_seq_free(um_paged_seq *seq);  /* clears it first; a zeroed seq is left alone */

UM_API uint64_t um_paged_seq_len(const um_paged_seq *seq); /* tokens that all layers hold */
UM_API uint64_t um_paged_layer_len(const um_paged_seq *seq, uint32_t layer);
/* Whether the next append to this layer copies a shared block. */
UM_API int um_paged_will_copy(const um_paged_seq *seq, uint32_t layer);

/* Appends n tokens to one layer, otherwise as um_kv_append with batch 1. errors: UM_E_INVALID
 * (layer, type, order), UM_E_FULL (blocks: limit n_blocks, used those that sequences hold, asked
 * those that the call needs, a copy of a shared block included). Nothing is changed then. */
UM_API um_status um_paged_append(um_paged_seq *seq, uint32_t layer, const void *k, const void *v,
                                 um_dtype type, um_kv_order order, uint64_t n, um_error *err);
/* Appends one token to all layers, k and v [n_layers, heads, head_dim]. errors: as um_paged_append,
 * and UM_E_STATE when layers differ in length. */
UM_API um_status um_paged_append_all(um_paged_seq *seq, const void *k, const void *v, um_dtype type,
                                     um_error *err);

/* Tokens that are being appended. */
typedef struct um_paged_pending {
    um_paged_seq *seq;
    const void *rows[2]; /* K and V */
    um_dtype type;
    um_kv_order order;
    uint32_t layer, n_layers;
    uint64_t at, n;
    uint32_t first_block; /* where the first token goes: the table's, or one that takes its place */
} um_paged_pending;

/* An append in three steps, for those whose lock guards the pool, and should not be held while
 * tokens are copied. The first step takes blocks and is the only one that fails, the second writes
 * where nobody reads yet, and the last one shows the tokens. Between the first and the last this
 * sequence is left alone, except that it may be gathered from; k and v stay as they are. With other
 * sequences of the pool all may be done beside the second step, but not beside the others. errors:
 * as um_paged_append, and um_paged_append_all. */
UM_API um_status um_paged_append_begin(um_paged_pending *out, um_paged_seq *seq, uint32_t layer,
                                       const void *k, const void *v, um_dtype type,
                                       um_kv_order order, uint64_t n, um_error *err);
UM_API um_status um_paged_append_all_begin(um_paged_pending *out, um_paged_seq *seq, const void *k,
                                           const void *v, um_dtype type, um_error *err);
UM_API void um_paged_append_write(const um_paged_pending *pending);
UM_API void um_paged_append_end(const um_paged_pending *pending);

UM_API void um_paged_rollback(um_paged_seq *seq); /* drops tokens that not all layers hold */
/* Keeps the first n tokens, and gives back the blocks behind them. errors: UM_E_INVALID (there are
 * fewer), UM_E_STATE (layers differ in length). */
UM_API um_status um_paged_crop(um_paged_seq *seq, uint64_t n, um_error *err);

/* Copies the first n tokens of K or V of a layer to out [heads, n, head_dim], heads head_stride
 * bytes apart, converted to `type` (not UM_Q8_0 unless the cache's). May run beside the writer,
 * unless that one crops, clears or frees this very sequence. errors: UM_E_INVALID (layer, type,
 * tokens that the layer does not hold, a head_stride below what n tokens need). */
UM_API um_status um_paged_gather(const um_paged_seq *seq, uint32_t layer, int v, uint64_t n,
                                 void *out, size_t head_stride, um_dtype type, um_error *err);

#ifdef __cplusplus
}
#endif
#endif
