/* unimem: the memory layer for LLM inference. The public C API; the comments are the manual.
 *
 * Memory of a tape is not zeroed. It is invalid after um_tape_clear, and after a um_tape_rewind to
 * a mark before it. No function aborts, prints or logs. The only global state is the ledger, the
 * counters, and the handlers of um_guard_run.
 *
 * Threads: these calls may run at once on one object; all others need it for themselves. Fields
 * that are "read" belong to the thread that changes the object.
 *
 * - The ledger, counters, marks, um_convert, um_copy_hashed, um_rotate, um_file_read,
 *   um_guard_*: any.
 * - um_block: calls that take a const um_block, um_block_warm, um_block_warm_to_write,
 *   um_block_advise, um_block_collapse and um_block_repair. Beside them one thread may call
 *   um_block_commit, um_block_release, um_block_discard, um_block_overlay or um_block_lock; the
 *   others may then fail if their steps go away.
 * - um_tape: any. No thread may use memory that um_tape_clear or um_tape_rewind takes back.
 * - um_grid: um_grid_take, um_grid_give, um_grid_cell and um_grid_n_available.
 * - um_kv, um_paged: one writer and readers, see unimem_kv.h. um_load: one thread. um_pieces: see
 *   unimem_pieces.h.
 *
 * Example
 *
 *     static um_status append_token(um_tape *tape, um_error *err) {
 *         um_kv_spec spec = {.n_layers = 1, .n_kv_heads = 2, .head_dim = 4, .batch = 1,
 *                            .max_seq_len = 16, .type = UM_F16, .v_type = UM_F16};
 *         um_kv_storage storage = {.n_rows = 16, .usable_rows = 16};
 *         float k[8] = {1}, v[8] = {2};
 *         size_t nbytes;
 *         um_kv kv;
 *         um_status status = um_kv_storage_bytes(&spec, &nbytes, err);
 *         if (status == UM_OK) {
 *             storage.lane_stride = storage.v_lane_stride = nbytes / 2; // a lane each
 *             status = um_tape_take(tape, nbytes, 64, &storage.base, err);
 *         }
 *         if (status == UM_OK) {
 *             status = um_kv_init(&kv, &spec, &storage, err);
 *         }
 *         if (status == UM_OK) {
 *             status = um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, err);
 *             um_kv_free(&kv);
 *         }
 *         return status;
 *     }
 *
 *     static int run_example(void) {
 *         um_block_options options = {.category = UM_CAT_HISTORY};
 *         um_error err;
 *         um_block block;
 *         um_tape tape;
 *         um_status status = um_block_map(&block, 1 << 20, &options, &err);
 *         if (status == UM_OK) {
 *             status = um_tape_init(&tape, block.base, block.nbytes, &err);
 *             if (status == UM_OK) {
 *                 status = append_token(&tape, &err);
 *             }
 *             um_status unmapped = um_block_unmap(&block, status == UM_OK ? &err : NULL);
 *             status = status == UM_OK ? unmapped : status; // the first failure counts
 *         }
 *         if (status != UM_OK) {
 *             fprintf(stderr, "%s: %s\n", um_status_name(err.status), err.what);
 *         }
 *         return status != UM_OK;
 *     }
 *
 * Conventions
 *
 * - Every function that can fail returns a um_status. After a failure its outputs and the object
 *   are as before the call. Its comment lists each status with its causes; UM_E_NOMEM, there is no
 *   memory, and UM_E_OS, a system call failed, need none.
 * - `err` may be NULL. A call that fails fills it, a call that succeeds leaves it alone.
 * - The caller owns the memory of structs. Read a field directly if its comment says "read"; use
 *   functions for all others.
 * - Sizes are in bytes, unless the name begins with n_. "pre:" names a condition that is not
 *   checked.
 */
#ifndef UNIMEM_H
#define UNIMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
/* C++ and Cython see atomics as plain words of the same size. Only C writes them. */
#define UM_ATOMIC(type) type
extern "C" {
#else
#define UM_ATOMIC(type) _Atomic(type)
#endif

#if defined(__GNUC__)
#define UM_API __attribute__((visibility("default")))
/* The compiler warns if a caller ignores the result. */
#define UM_CHECKED __attribute__((warn_unused_result))
#else
#define UM_API
#define UM_CHECKED
#endif

#define UM_VERSION_MAJOR 0
#define UM_VERSION_MINOR 1
#define UM_VERSION_PATCH 0
/* The number of the binary interface, as in libunimem.so.0: programs built with another one have to
 * be built again. */
#define UM_SOVERSION 0

/* Returns the version of the library, such as "0.1.0". The macros are of this header. */
UM_API const char *um_version(void);

/* ---- status ---- */

typedef enum um_status {
    UM_OK = 0,
    UM_E_INVALID, /* an argument is outside what the call accepts */
    UM_E_FULL,    /* capacity is used up: err has limit, used, asked */
    UM_E_NOMEM,   /* the system has no memory: err has os_errno */
    UM_E_OS,      /* the system refused: err has os_errno and the name of the call */
    UM_E_FORMAT,  /* a file breaks a rule of its format: err has the rule and the offset */
    UM_E_IO,      /* a file cannot be read (err has os_errno), or has become shorter (0) */
    UM_E_STATE,   /* the object is in the wrong state: closed, frozen, nothing reserved */
    UM_E_BUSY     /* the object is in use */
} um_status;

/* Why a call failed, where a caller may want to act on it: the comment of each function names the
 * details that it sets. A number never gets another meaning. */
typedef enum um_detail {
    UM_DETAIL_NONE = 0, /* the status says it all */

    UM_MARKS_FULL = 0x100, /* UM_E_FULL: UM_MAX_MARKS marks have begun */

    UM_BLOCK_NO_POLICY = 0x200, /* UM_E_OS, UM_E_NOMEM: the kernel refused the NUMA policy */
    UM_BLOCK_PAST_FILE,         /* UM_E_INVALID: the range passes the end of the file */

    UM_TAPE_FULL = 0x300, /* UM_E_FULL: the tape has no room */
    UM_TAPE_FROZEN,       /* UM_E_STATE: the tape is frozen */

    UM_GRID_FULL = 0x400, /* UM_E_FULL: no cell is free */
    UM_GRID_FREE,         /* UM_E_STATE: the cell is free already */

    UM_HEADER_FULL = 0x500, /* UM_E_FULL: the header is longer than the bytes given */

    UM_KV_FULL = 0x600, /* UM_E_FULL: max_seq_len is reached, or a ring has fewer rows */
    UM_KV_ROWS,         /* UM_E_FULL: the usable rows are used up */
    UM_KV_OVERWRITTEN,  /* UM_E_INVALID: a ring has overwritten tokens that it would have to show */
    UM_KV_RESERVED,     /* UM_E_STATE: rows are reserved */
    UM_KV_UNRESERVED,   /* UM_E_STATE: no rows are reserved */
    UM_KV_UNEVEN,       /* UM_E_STATE: layers differ in length */

    UM_PAGED_FULL = 0x700, /* UM_E_FULL: there are not enough blocks */
    UM_PAGED_UNHELD,       /* UM_E_STATE: no sequence holds the block */
    UM_PAGED_UNEVEN,       /* UM_E_STATE: layers differ in length */

    UM_PIECES_FULL = 0x800, /* UM_E_FULL: the pool has fewer slots than the call has pieces */
    UM_PIECES_HELD,         /* UM_E_BUSY: holders keep the slots */
    UM_PIECES_INTERRUPTED,  /* UM_E_OS: a signal interrupted the wait for reads */
    UM_PIECES_FORKED        /* UM_E_STATE: a forked child has none of the reads */
} um_detail;

typedef struct um_error {
    um_status status;
    um_detail detail;
    int os_errno;     /* of the system call that failed, or 0 */
    uint64_t limit;   /* UM_E_FULL: the capacity */
    uint64_t used;    /* UM_E_FULL: what is taken of it */
    uint64_t asked;   /* UM_E_FULL, UM_E_NOMEM: what the call asked for */
    uint64_t offset;  /* UM_E_FORMAT, UM_E_IO of um_pieces: the place in the file */
    const char *what; /* static text for people, which may change: the argument, the system call or
                         the rule. Never NULL */
} um_error;

/* Returns the name of a status, such as "UM_E_FULL". */
UM_API const char *um_status_name(um_status status);

/* ---- ledger ---- */

/* What memory is for. The ledger has every mapping of unimem in exactly one category. */
typedef enum um_category {
    UM_CAT_OTHER = 0,
    UM_CAT_WEIGHTS,
    UM_CAT_SCRATCH,
    UM_CAT_HISTORY,
    UM_CAT_STAGING,
    UM_CAT_DIAGNOSTICS,
    UM_CAT_LOGITS,
    UM_CAT_TOKENS, /* what an engine reads for each token: ids, positions and row numbers */
    UM_CAT_COUNT
} um_category;

typedef struct um_ledger_row {
    uint64_t n_mappings;       /* mappings that exist now */
    uint64_t mapped_bytes;     /* their sizes, in whole pages */
    uint64_t high_water_bytes; /* the largest value of mapped_bytes so far */
} um_ledger_row;

/* Totals since the library was loaded. */
typedef struct um_counters {
    uint64_t n_os_calls;      /* system calls of this library */
    uint64_t n_allocations;   /* heap allocations of this library */
    uint64_t allocated_bytes; /* bytes that these asked for */
} um_counters;

/* Reads the ledger's row of a category. UM_E_INVALID: the category is unknown. */
UM_API UM_CHECKED um_status um_ledger_read(um_category category, um_ledger_row *out, um_error *err);
UM_API void um_counters_read(um_counters *out);
/* Returns the name of a category, such as "weights"; NULL for an unknown category. */
UM_API const char *um_category_name(um_category category);

/* Marks record the most that is mapped in each category between two moments. Any threads may have
 * marks at the same time, nested or not. Each costs one comparison for every mapping that is made
 * or grows. */
#define UM_MAX_MARKS 64

/* Begins marks with what is mapped now. *out is their number. UM_E_FULL: UM_MARKS_FULL. */
UM_API UM_CHECKED um_status um_marks_begin(unsigned *out, um_error *err);
/* Reads the most in each category so far. pre: the marks have begun and not ended. */
UM_API void um_marks_read(unsigned marks, uint64_t out[UM_CAT_COUNT]);
/* Ends marks, and frees their number. pre: as for um_marks_read. */
UM_API void um_marks_end(unsigned marks);

/* ---- block ---- */

/* Each function of this section that returns a status may also fail with UM_E_NOMEM: there is no
 * memory; or UM_E_OS: a system call failed. */

typedef enum um_pages {
    UM_PAGES_AUTO = 0, /* THP if the block reserves at least one huge page, else base pages */
    UM_PAGES_4K,       /* base pages, never huge */
    UM_PAGES_THP,      /* transparent huge pages, by MADV_HUGEPAGE */
    UM_PAGES_2M,       /* hugetlb pages of 2 MiB, from the pool that the administrator filled */
    UM_PAGES_1G        /* hugetlb pages of 1 GiB */
} um_pages;

#define UM_MAX_NODES 1024

typedef enum um_numa_mode {
    UM_NUMA_NONE = 0,   /* the policy of the process: usually the node of the first touch */
    UM_NUMA_BIND,       /* these nodes only: a page for which they have no room is refused */
    UM_NUMA_INTERLEAVE, /* page by page over these nodes */
    UM_NUMA_WEIGHTED,   /* the same, by the kernel's weights of the nodes (Linux 6.9) */
    UM_NUMA_PREFERRED   /* these nodes, and others if these have no room */
} um_numa_mode;

typedef struct um_numa {
    um_numa_mode mode;
    uint64_t nodes[UM_MAX_NODES / 64]; /* node n: bit n % 64 of word n / 64. UM_NUMA_NONE: no bit */
} um_numa;

typedef enum um_lock {
    UM_LOCK_NONE = 0,
    UM_LOCK_NOW,    /* all pages are brought into RAM and stay there */
    UM_LOCK_ONFAULT /* a page stays in RAM from its first touch on (mlock2, MLOCK_ONFAULT) */
} um_lock;

typedef enum um_sharing {
    UM_SHARING_NONE = 0, /* private, anonymous */
    UM_SHARING_MEMFD,    /* a memfd of the block's own, sealed against growing and shrinking */
    UM_SHARING_FD        /* an open, empty, writable file of the caller's, as in /dev/shm */
} um_sharing;

typedef enum um_access {
    UM_ACCESS_READ = 0, /* shared, read-only */
    UM_ACCESS_PRIVATE,  /* writable, copy-on-write; the file never changes */
    UM_ACCESS_SHARED    /* writable; the file changes, too */
} um_access;

typedef enum um_advice {
    UM_ADVICE_WILLNEED = 0,
    UM_ADVICE_SEQUENTIAL,
    UM_ADVICE_RANDOM,
    UM_ADVICE_DONTNEED, /* refused for private anonymous memory, which would lose its contents */
    UM_ADVICE_HUGEPAGE,
    UM_ADVICE_NOHUGEPAGE
} um_advice;

/* What the kernel says of a range, never an echo of the request. A page of a file or of shared
 * memory counts as in RAM if this process has mapped it. A hugetlb page cannot leave RAM and counts
 * as locked; pss_bytes counts it whole, since the kernel does not say how many processes share
 * it. */
typedef struct um_placement {
    um_pages pages;          /* 2M, 1G: hugetlb. THP: has huge pages, or would when touched. 4K */
    uint64_t page_bytes;     /* the page size that `pages` stands for */
    uint64_t resident_bytes; /* in RAM */
    uint64_t pss_bytes;      /* in RAM; a page that n processes share counts 1/n */
    uint64_t huge_bytes;     /* in RAM, in huge pages of any kind */
    uint64_t locked_bytes;   /* in RAM and locked there */
    uint64_t swapped_bytes;
    uint64_t node_bytes[UM_MAX_NODES]; /* in RAM, on each node */
} um_placement;

/* How um_block_map maps. All zeros are the defaults. */
typedef struct um_block_options {
    um_pages pages;
    um_category category;
    um_numa numa;
    um_sharing sharing;
    int fd;                /* of UM_SHARING_FD; the caller may close it after the call */
    size_t reserve_nbytes; /* address space to keep for um_block_commit; 0: nbytes */
    size_t mirror_nbytes;  /* of a memfd: the size of the pieces that are mapped twice; 0: none */
    size_t mirror_other_nbytes; /* the other size, if pieces have two; 0: all are alike */
    size_t mirror_run;          /* the number of pieces of one size in a row, if they have two */
    const char *name;           /* of the memfd, as /proc/PID/maps shows it; NULL: "unimem" */
} um_block_options;

typedef struct um_block {
    void *base;    /* read. A multiple of the page size asked for; never changes */
    size_t nbytes; /* read. Usable bytes up to the first gap: whole pages; of a file, the request */
    size_t requested_nbytes;
    um_pages requested_pages;
    um_category category;
    um_numa numa;
    um_lock lock;
    um_sharing sharing;
    um_access access;
    size_t mirror_nbytes;       /* read. The size of mirrored pieces, or 0: see um_block_map */
    size_t mirror_other_nbytes; /* read. Of every other run of pieces; the same if all are alike */
    size_t mirror_run;          /* read. Pieces of a run */
    size_t step_nbytes;     /* read. Commit and release work in whole steps: pages, huge or not */
    size_t reserved_nbytes; /* read. Address space from the base on, whole steps */
    size_t committed_nbytes;
    uint64_t *committed; /* a bit for each step; NULL: exactly [0, nbytes) is committed */
    uint64_t *overlaid;  /* a bit for each step that is a file's (um_block_overlay); NULL: none */
    void *map_base;      /* the start of the mapping, guard pages included */
    size_t map_nbytes;
    int fd; /* read. Of shared memory; -1 otherwise */
    int is_file;
    int is_cache_hidden; /* of a file: pages that are not mapped are UM_PAGE_UNKNOWN */
} um_block;

/* Maps nbytes of zeroed memory between two inaccessible guard pages, which make it a mapping of its
 * own in /proc/self/smaps.
 *
 * The NUMA policy is set before any page is touched; the call touches none (see um_block_warm). The
 * policy of shared memory holds for every process that maps it. A forked child has no shared
 * memory.
 *
 * A mirror maps each piece of m bytes (mirror_nbytes) twice, back to back, so that a range that
 * wraps around the end of a piece is contiguous. It takes twice the address space:
 *
 * - nbytes is a multiple of m. Piece i lies at base + 2 * i * m, and again m bytes behind that. In
 *   the file the last piece comes first.
 * - With mirror_other_nbytes, runs of mirror_run pieces of m bytes and of as many of the other size
 *   alternate, and nbytes is whole pairs of runs. Each piece lies behind both images of the one
 *   before it, and again behind itself.
 * - nbytes, reserved_nbytes, committed_nbytes and all offsets of the block are of address space.
 *   The ledger and um_placement count the memory once.
 * - Huge pages have to be asked for by name, and all pieces be multiples of their size.
 * - The block neither grows nor is released: see um_block_discard.
 *
 * Errors:
 *
 * - UM_E_INVALID: nbytes is 0 or too large; reserve_nbytes is below nbytes; an option is unknown; a
 *   name is longer than 249 bytes; a NUMA mode without nodes, or nodes without a mode; a mirror of
 *   no memfd, or not of whole pages or pieces; a file that is not empty, or has pages of another
 *   size.
 * - UM_E_NOMEM: also if the hugetlb pool is too small. A cgroup or a cpuset may refuse a page of it
 *   later, at its first touch (SIGBUS): um_block_warm finds out.
 * - UM_E_NOMEM, UM_E_OS, with UM_BLOCK_NO_POLICY: the kernel refused the NUMA policy. */
UM_API UM_CHECKED um_status um_block_map(um_block *out, size_t nbytes,
                                         const um_block_options *options, um_error *err);

/* Maps nbytes of the open file fd from offset on. The caller may close fd after the call.
 *
 * Touching a page that the file loses when it shrinks is fatal: use um_guard_run or um_file_read if
 * the file cannot be trusted. If the file grows again, the page reads as zeros: only a checksum
 * notices.
 *
 * - UM_E_INVALID: offset is not a multiple of the page (of hugetlbfs: its page), or nbytes is 0.
 * - UM_E_INVALID, UM_BLOCK_PAST_FILE: the range passes the end of the file. */
UM_API UM_CHECKED um_status um_block_map_file(um_block *out, int fd, uint64_t offset, size_t nbytes,
                                              um_access access, um_category category,
                                              um_error *err);

/* Maps the whole shared memory of another block, of this or another process.
 *
 * fd is the descriptor of that block, or of a file in /dev/shm; the caller may close it after the
 * call. Memory that the other block reserves and has not committed is committed here. UM_E_INVALID:
 * access is neither READ nor SHARED, or the file is empty. */
UM_API UM_CHECKED um_status um_block_attach(um_block *out, int fd, um_access access,
                                            um_category category, um_error *err);

/* Makes a sealed copy of the first nbytes of `block`, with its pages in RAM: shared memory, mapped
 * read-only, that no process can write, grow or shrink any more.
 *
 * - UM_E_INVALID: as um_block_map; options reserve more or name a file; nothing is committed at the
 *   base of the block.
 * - UM_E_IO: the block is a mapped file that has lost pages. */
UM_API UM_CHECKED um_status um_block_copy_sealed(um_block *out, const um_block *block,
                                                 const um_block_options *options, um_error *err);

/* Makes [offset, offset + nbytes) of the reserved range usable, rounded outwards to whole steps.
 * Committed memory stays as it is. New memory is zeroed, and placed and locked like the block.
 * UM_E_INVALID: the range is outside the reserved range, or the block is a mapped file. */
UM_API UM_CHECKED um_status um_block_commit(um_block *block, size_t offset, size_t nbytes,
                                            um_error *err);

/* Gives back the memory of the whole steps inside [offset, offset + nbytes).
 *
 * The range is inaccessible afterwards, and RSS and commit charge are lower by its memory. Other
 * processes read zeros in released shared memory. *out_nbytes (may be NULL) is how much was
 * committed. UM_E_INVALID: the range is outside the reserved range; the block is a mapped file or
 * read-only. */
UM_API UM_CHECKED um_status um_block_release(um_block *block, size_t offset, size_t nbytes,
                                             size_t *out_nbytes, um_error *err);

/* Forgets the contents of the whole steps inside [offset, offset + nbytes).
 *
 * Their pages go back to the system. The steps stay committed and read as zeros, in both images of
 * mirrored memory. *out_nbytes (may be NULL) is how many bytes of memory were covered. Steps of a
 * file (um_block_overlay) become the block's own; without memory for that, they are no longer
 * committed. UM_E_INVALID: the range is outside the reserved range or not committed; the block is a
 * mapped file, locked, read-only, or hugetlb memory, whose pages the pool would keep for it. */
UM_API UM_CHECKED um_status um_block_discard(um_block *block, size_t offset, size_t nbytes,
                                             size_t *out_nbytes, um_error *err);

/* Commits [offset, offset + nbytes) as a copy-on-write mapping of a file from file_offset on.
 *
 * The file never changes, and the caller may close fd after the call. The range is the file's until
 * it is released or discarded: it is not placed like the block, and um_block_warm reads it, so that
 * no page is copied. Touching a page that the file loses when it shrinks is fatal outside of
 * um_guard_run, even if the page was written.
 *
 * - UM_E_INVALID: the block is shared, locked, a mapped file, or of huge pages; an argument is not
 *   a multiple of the step; the range is outside the reserved range, or committed.
 * - UM_E_INVALID, UM_BLOCK_PAST_FILE: the range passes the end of the file. */
UM_API UM_CHECKED um_status um_block_overlay(um_block *block, size_t offset, int fd,
                                             uint64_t file_offset, size_t nbytes, um_error *err);

/* Returns whether all of [offset, offset + nbytes) is committed. */
UM_API int um_block_is_committed(const um_block *block, size_t offset, size_t nbytes);
/* Returns whether any part is a file's (um_block_overlay), which may lose pages. */
UM_API int um_block_is_overlaid(const um_block *block, size_t offset, size_t nbytes);

/* Locks memory that is committed now or later. UM_LOCK_NONE unlocks.
 *
 * - UM_E_INVALID: the lock is unknown.
 * - UM_E_NOMEM: the memlock limit is reached, or the system has no page. */
UM_API UM_CHECKED um_status um_block_lock(um_block *block, um_lock lock, um_error *err);

/* Brings [offset, offset + nbytes) into RAM with n_threads threads. Contents do not change.
 *
 * Pages of writable memory become writable; files and read-only memory are read. Thread i is pinned
 * to CPU cpus[i], or to none if that is negative. If cpus is NULL, the threads share the CPUs that
 * this thread may run on; a single thread is then the caller's, and not pinned.
 *
 * - UM_E_INVALID: n_threads is 0, or the range is not committed.
 * - UM_E_IO: the file is shorter than the range (os_errno is 0). */
UM_API UM_CHECKED um_status um_block_warm(um_block *block, size_t offset, size_t nbytes,
                                          unsigned n_threads, const int *cpus, um_error *err);

/* As um_block_warm, and pages of files become writable, too, so that no first write faults.
 *
 * No byte is written, and concurrent writes stay. Pages of UM_ACCESS_PRIVATE are copied; those of
 * UM_ACCESS_SHARED are written back to the disk, and the next write to each then faults.
 * UM_E_INVALID: also if the block is read-only. */
UM_API UM_CHECKED um_status um_block_warm_to_write(um_block *block, size_t offset, size_t nbytes,
                                                   unsigned n_threads, const int *cpus,
                                                   um_error *err);

/* Asks the kernel to put resident pages into huge pages now (MADV_COLLAPSE, Linux 6.1), those of
 * shared memory too. hugetlb memory is left alone. The kernel gathers memory on one node, so the
 * call spreads an interleaved block again.
 *
 * - UM_E_NOMEM: no huge page is free, or the memory cgroup has no room for one.
 * - UM_E_OS: the kernel cannot do it, or the block was to have pages of 4K. */
UM_API UM_CHECKED um_status um_block_collapse(um_block *block, um_error *err);

/* Advises the kernel (madvise) about all committed memory. UM_E_INVALID: the advice is unknown, or
 * DONTNEED would lose what was written, as of memory without a file, or of a file that is written
 * privately. */
UM_API UM_CHECKED um_status um_block_advise(um_block *block, um_advice advice, um_error *err);

/* Begins to read a part of a mapped file into the page cache, and does not wait (MADV_WILLNEED).
 *
 * It is a hint: a part that the kernel refuses is read when it is touched. pre: the range is in the
 * block. */
UM_API void um_block_will_need(const um_block *block, size_t offset, size_t nbytes);

/* Reads the placement of the whole block from the kernel. UM_E_OS, UM_E_IO: a file of /proc cannot
 * be opened, or not be read. */
UM_API UM_CHECKED um_status um_block_verify(const um_block *block, um_placement *out,
                                            um_error *err);

/* Moves resident pages that break the block's NUMA policy to the right nodes (move_pages).
 *
 * Interleaved pages stay, whichever node the kernel began with. A transparent huge page moves as a
 * whole. For a mapped file, the caller sets block->numa before; pages of the page cache move that
 * this process has mapped, and what is interleaved are the page cache's pieces of up to a huge
 * page. *out_nbytes (may be NULL) is how much stays on a wrong node, because the right one is full,
 * a device uses the page, or other processes map it, too.
 *
 * - UM_E_INVALID: the block has no policy.
 * - UM_E_IO: as um_block_verify. */
UM_API UM_CHECKED um_status um_block_repair(um_block *block, uint64_t *out_nbytes, um_error *err);

/* Counts the bytes of [offset, offset + nbytes) that are in RAM, in whole pages. If the page cache
 * of a file is hidden from this user, pages that this process has mapped count. UM_E_INVALID: the
 * range is outside the block. */
UM_API UM_CHECKED um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                                              uint64_t *out_bytes, um_error *err);

enum {
    UM_PAGE_IN_RAM = 1,  /* of a file: in the page cache, whether mapped or not */
    UM_PAGE_MAPPED = 2,  /* in RAM, and this process has touched it */
    UM_PAGE_HUGE = 4,    /* mapped here as a part of a huge page */
    UM_PAGE_LOCKED = 8,  /* mapped here, and locked by um_block_lock or as hugetlb memory */
    UM_PAGE_UNKNOWN = 16 /* not mapped here, and the kernel does not tell if it is in RAM */
};

/* Reads the state of each base page that [offset, offset + nbytes) touches.
 *
 * out_pages gets a byte of UM_PAGE_* for each page. out_nodes (may be NULL) gets the node of each
 * page that is mapped here, and -1 for the others. After a failure both hold anything.
 *
 * - UNKNOWN (since Linux 5.2): pages of a file that this process neither owns nor may write, and
 *   pages of a file in hugetlbfs.
 * - HUGE: before Linux 6.7, known of hugetlb memory only.
 * - MAPPED, and what depends on it: not known to a process that may not read its own
 *   /proc/self/pagemap, as after a change of its user.
 * - Memory that was read and never written is the kernel's page of zeros, which counts as any
 *   other.
 *
 * Errors:
 *
 * - UM_E_INVALID: the range is outside the block, or not committed. */
UM_API UM_CHECKED um_status um_block_pages(const um_block *block, size_t offset, size_t nbytes,
                                           uint8_t *out_pages, int16_t *out_nodes, um_error *err);

/* Gives the memory back and zeroes the struct. A zeroed block is left alone. */
UM_API UM_CHECKED um_status um_block_unmap(um_block *block, um_error *err);

/* Forgets a block whose memory a forked child does not have: strikes off the ledger's entry, closes
 * the descriptor, and zeroes the struct. The addresses are not touched. */
UM_API void um_block_forget(um_block *block);

/* Returns the base page size. */
UM_API size_t um_page_bytes(void);
/* Returns the huge page size of THP; 0 if the kernel has none. */
UM_API size_t um_huge_page_bytes(void);

/* ---- file ---- */

/* Reads exactly nbytes of a file at offset, in as many reads as it takes. UM_E_IO: the file cannot
 * be read, or is too short (os_errno is 0). err->used bytes were read. */
UM_API UM_CHECKED um_status um_file_read(int fd, uint64_t offset, void *out, size_t nbytes,
                                         um_error *err);

/* ---- tmpfs ---- */

/* Makes a file system in memory of at most nbytes, which is mounted nowhere.
 *
 * *out_fd is its folder, for openat and /proc/PID/fd. The file system goes with the last descriptor
 * of the folder, and the memory of a file with its last descriptor or mapping. With `huge`, files
 * have huge pages if memory has them, whatever shmem_enabled says.
 *
 * - UM_E_INVALID: nbytes is 0. UM_E_NOMEM.
 * - UM_E_OS. EPERM: CAP_SYS_ADMIN is missing in the user namespace. ENOSYS: before Linux 5.2. */
UM_API UM_CHECKED um_status um_tmpfs_open(int *out_fd, uint64_t nbytes, int huge, um_error *err);
/* Makes the file system read-only in all its mounts. Undoing it takes the rights that opening took.
 * UM_E_OS. EBUSY: a file in it is open for writing. */
UM_API UM_CHECKED um_status um_tmpfs_seal(int fd, um_error *err);

/* ---- load ---- */

/* A range of a file, and the memory to read it into. */
typedef struct um_load_part {
    int fd;          /* stays open until um_load_end */
    uint64_t offset; /* in the file; for a direct load, a multiple of 4096, like `to` */
    void *to;
    size_t nbytes; /* for a direct load, `to` has room for nbytes rounded up to 4096 */
} um_load_part;

typedef struct um_load_options {
    unsigned n_threads;    /* at least 1; each has one read under way */
    const int *cpus;       /* as for um_block_warm, but every thread is new and pinned */
    size_t request_nbytes; /* of one read; 0: chosen */
    int direct;            /* the files were opened with O_DIRECT */
} um_load_options;

typedef struct um_load um_load;

/* Begins to read the parts, in their order, in threads of its own.
 *
 * The threads receive no signals, and no two of them fill one transparent huge page together. A
 * forked child may not use the load: it has none of the threads.
 *
 * - UM_E_INVALID: there are no threads, a CPU is above 8191, a part is not aligned for a direct
 *   load, or sizes overflow.
 * - UM_E_NOMEM. UM_E_OS: a thread cannot be started; none is left then. */
UM_API UM_CHECKED um_status um_load_start(um_load **out, const um_load_part *parts, size_t n_parts,
                                          const um_load_options *options, um_error *err);
/* Waits until all is read, a read has failed, the time is over, or a signal interrupts this thread.
 * *out_nbytes is how much has been read; *out_running, whether a thread is still reading. */
UM_API void um_load_wait(um_load *load, unsigned milliseconds, uint64_t *out_nbytes,
                         int *out_running);
/* Ends and frees the load: begins no more reads, and waits for those under way.
 *
 * On success the memory holds everything, or the load was ended before it was finished. Otherwise
 * the status is of the first failure, and *out_part (may be NULL) is the part that failed.
 *
 * - UM_E_IO: a file cannot be read, or ends before the part does (os_errno is 0).
 * - UM_E_NOMEM: there was no memory at `to`. */
UM_API UM_CHECKED um_status um_load_end(um_load *load, size_t *out_part, um_error *err);

/* ---- guard ---- */

typedef void um_guarded(void *context);

/* Calls `run`, which touches [base, base + nbytes) of a mapped file, and survives lost pages.
 *
 * If the file was truncated or cannot be read, touching its page (SIGBUS) ends `run` at once, as
 * longjmp does. So `run` takes no locks and allocates no memory, and its writes may be half done.
 * It ends in no other way than by returning.
 *
 * - Any number of threads may run guarded. Runs may be nested: a lost page of an outer range ends
 *   the inner run, too.
 * - A handler for SIGBUS is installed during runs; the last run to end removes it. Signals that
 *   were sent, or are not of such a page, go to the previous handler as the kernel would call it.
 *   Code that installs or restores handlers meanwhile finds them afterwards as it left them.
 * - A handler that is installed during a run gets faults in it first. Each new run puts ours on
 *   top.
 * - A thread that blocks SIGBUS does not block it while it runs.
 * - A forked child may run guarded at once. A thread that is cancelled inside of a run leaves the
 *   handler installed, which passes signals on as before.
 * - um_kv_append, um_kv_append_all and um_kv_read may be run so: one that is ended changes nothing.
 * - A run costs five system calls, or two while others run.
 *
 * Errors; `run` was called for UM_E_IO only:
 *
 * - UM_E_IO: a page was lost (os_errno is 0).
 * - UM_E_NOMEM. UM_E_OS. EBUSY: this process has had more than 16 different actions for SIGBUS. */
UM_API UM_CHECKED um_status um_guard_run(const void *base, size_t nbytes, um_guarded *run,
                                         void *context, um_error *err);
/* Copies from a mapped file like memcpy, guarded. UM_E_IO, UM_E_NOMEM, UM_E_OS: as um_guard_run. */
UM_API UM_CHECKED um_status um_guard_copy(void *out, const void *from, size_t nbytes,
                                          um_error *err);

/* ---- tape ---- */

/* A bump allocator over memory of the caller's. A take costs one compare-and-exchange. */
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

/* Makes an empty tape over `total` bytes at `base`. UM_E_INVALID: base is NULL, or total is 0. */
UM_API UM_CHECKED um_status um_tape_init(um_tape *tape, void *base, size_t total, um_error *err);

/* Takes nbytes (may be 0) at an address that is a multiple of align.
 *
 * - UM_E_INVALID: align is not a power of two.
 * - UM_E_FULL: UM_TAPE_FULL. UM_E_STATE: UM_TAPE_FROZEN. */
UM_API UM_CHECKED um_status um_tape_take(um_tape *tape, size_t nbytes, size_t align, void **out,
                                         um_error *err);

UM_API void um_tape_clear(um_tape *tape);        /* goes back to what is kept; zeroes nothing */
UM_API void um_tape_keep(um_tape *tape);         /* keeps what is taken so far */
UM_API size_t um_tape_mark(const um_tape *tape); /* returns the place for um_tape_rewind */
/* Goes back to a mark, or to what is kept if that is more. UM_E_INVALID: the mark is above
 * `used`. */
UM_API UM_CHECKED um_status um_tape_rewind(um_tape *tape, size_t mark, um_error *err);
/* Freezes the tape: takes that would pass `limit` bytes (0: all takes) fail with UM_E_STATE.
 * UM_E_INVALID: limit is above total. */
UM_API UM_CHECKED um_status um_tape_freeze(um_tape *tape, size_t limit, um_error *err);
UM_API void um_tape_thaw(um_tape *tape);
UM_API int um_tape_frozen(const um_tape *tape);
UM_API size_t um_tape_used(const um_tape *tape);
UM_API size_t um_tape_kept(const um_tape *tape);
UM_API size_t um_tape_high_water(const um_tape *tape); /* the largest `used` so far */
UM_API uint64_t um_tape_n_takes(const um_tape *tape);
UM_API int um_tape_owns(const um_tape *tape, const void *address);

/* ---- grid ---- */

/* Cells of one size over a tape, taken and given back in any order, without locks. */
typedef struct um_grid {
    unsigned char *base;        /* read */
    size_t cell_bytes;          /* read: the request rounded up to the alignment */
    uint32_t n_cells;           /* read */
    UM_ATOMIC(uint32_t) * next; /* free list links, beside the cells or elsewhere */
    UM_ATOMIC(uint64_t) head;   /* tag << 32 | index of the first free cell, UINT32_MAX: none */
    UM_ATOMIC(uint32_t) n_free;
} um_grid;

/* Computes the bytes that a grid needs of a tape, alignment included. UM_E_INVALID: a number is 0,
 * or the product overflows. */
UM_API UM_CHECKED um_status um_grid_bytes(size_t cell_bytes, uint32_t n_cells, size_t *out,
                                          um_error *err);
/* Takes cells and links from the tape. Cells are aligned to 64 bytes.
 *
 * - UM_E_INVALID: as um_grid_bytes.
 * - UM_E_FULL, UM_E_STATE: as um_tape_take. */
UM_API UM_CHECKED um_status um_grid_init(um_grid *grid, um_tape *tape, size_t cell_bytes,
                                         uint32_t n_cells, um_error *err);
/* Makes a grid of cells that the CPU cannot reach, such as a GPU's.
 *
 * The address of the cells, a multiple of 64, is used in arithmetic only. It has room for n_cells
 * of cell_bytes, rounded up to a multiple of 64; `links` has room for n_cells uint32_t. Both stay
 * the caller's. UM_E_INVALID: as um_grid_bytes; an address is NULL or not aligned. */
UM_API UM_CHECKED um_status um_grid_init_apart(um_grid *grid, void *cells, void *links,
                                               size_t cell_bytes, uint32_t n_cells, um_error *err);
/* Takes a free cell. *out_id is its number. UM_E_FULL: UM_GRID_FULL. */
UM_API UM_CHECKED um_status um_grid_take(um_grid *grid, uint32_t *out_id, um_error *err);
/* Gives a cell back. UM_E_INVALID: there is no such cell. UM_E_STATE: UM_GRID_FREE. */
UM_API UM_CHECKED um_status um_grid_give(um_grid *grid, uint32_t id, um_error *err);
UM_API void *um_grid_cell(const um_grid *grid, uint32_t id); /* NULL for no such cell */
UM_API uint32_t um_grid_n_available(const um_grid *grid);

/* ---- conversion ---- */

/* The types from UM_Q8_0 on are ggml's blocks of 32 values, such as block_q8_0: a float16 scale and
 * 32 int8. */
typedef enum um_dtype {
    UM_F32 = 0,
    UM_F16,
    UM_BF16,
    UM_Q8_0,
    UM_Q4_0,
    UM_Q4_1,
    UM_Q5_0,
    UM_Q5_1,
    UM_IQ4_NL,
    UM_DTYPE_COUNT
} um_dtype;

typedef struct um_dtype_info {
    const char *name;                   /* such as "q8_0" */
    uint32_t block_values, block_bytes; /* of a float: 1, and the bytes of a value */
    uint32_t ggml_type;                 /* ggml's number */
} um_dtype_info;
/* Returns the facts of a type; NULL for an unknown type. */
UM_API const um_dtype_info *um_dtype_describe(um_dtype type);
/* Returns the values in a block: 1 for the floats, 0 for an unknown type. */
UM_API size_t um_dtype_block_values(um_dtype type);
/* Returns the bytes of a block; 0 for an unknown type. */
UM_API size_t um_dtype_block_bytes(um_dtype type);
/* Copies n values from one type to another.
 *
 * The ranges must not overlap. Both pointers are aligned for their type (blocks: to 2 bytes).
 * Values are rounded to nearest even. A NaN stays a NaN. Denormals and infinities are kept,
 * whatever the floating-point mode of the thread is. Blocks are as ggml's reference makes them
 * (quantize_row_q8_0_ref and those beside it); what it leaves open for UM_IQ4_NL is zero.
 * UM_E_INVALID: a type is unknown, or n is not whole blocks. */
UM_API UM_CHECKED um_status um_convert(void *out, um_dtype out_type, const void *in,
                                       um_dtype in_type, size_t n, um_error *err);
/* Returns the code in use, the fastest that this CPU runs: "scalar", "avx2", "avx512" or "neon". */
UM_API const char *um_convert_isa(void);
/* Copies nbytes bytes, and in the same pass hashes them with n_zeros zeros behind them: XXH3 of 128
 * bits with seed 0. out is NULL for the hash alone. out_hash gets 16 bytes, the canonical form. The
 * ranges must not overlap. From 256 KiB on, an out that is aligned to 64 bytes is written past the
 * CPU's caches. */
UM_API void um_copy_hashed(void *out, const void *in, size_t nbytes, size_t n_zeros,
                           uint8_t *out_hash);

#ifdef __cplusplus
}
#endif

#include "unimem_kv.h"

#endif
