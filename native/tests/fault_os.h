/* Makes the library's Nth system call fail, and looks at what a failed call may not change.
 *
 * The linker replaces every call of a function of os.h by its __wrap_ twin in fault_os.c
 * (--wrap), which fails or calls the real one. The library knows nothing of it. */
#ifndef UM_FAULT_OS_H
#define UM_FAULT_OS_H

#include "test.h"

/* Calls that read the huge page size. When they fail, a block is only aligned differently. */
#define HARMLESS_HUGE_PAGE " um__os_open_read um__os_read um__os_close "
/* A thread that cannot be pinned works all the same. */
#define HARMLESS_THREADS " um__os_get_affinity um__os_set_affinity um__os_thread_join "

/* From now on the nth call fails with os_errno, once; the first call is 1, and 0 means none.
 * Counting starts anew. Calls that end something (close, join) do it and then report the failure,
 * as the kernel does. */
void fault_os_fail_nth(unsigned n, int os_errno);
/* Undoes all that the functions of this file have set, as main.c does before each test. */
void fault_os_reset(void);
/* The number of calls since fault_os_fail_nth, including the failed one: of all functions, and of
 * one. */
unsigned fault_os_calls(void);
unsigned fault_os_calls_of(const char *function);
/* The function of os.h that was made to fail, or NULL. */
const char *fault_os_failed(void);
/* How many threads were pinned to this CPU alone, since fault_os_fail_nth. */
unsigned fault_os_pinned_to(unsigned cpu);
/* Every read returns at most this many bytes; 0: no limit. */
void fault_os_limit_read(size_t nbytes);
/* Every scan of pages returns at most this many runs; 0: no limit. */
void fault_os_limit_runs(size_t n);
/* From now on this path opens as a file with this text; NULL: as the real file. The pointer is
 * kept, the text is not copied. */
void fault_os_file(const char *path, const char *text);
/* From now on this function answers move_pages; NULL: the kernel does. */
typedef int (*fault_os_move_pages_fn)(size_t n, void *const *pages, const int *nodes,
                                      int *out_status);
void fault_os_move_pages(fault_os_move_pages_fn answer);
/* The nth heap allocation returns NULL, once; the first is 1, and 0 means none. Counting starts
 * anew. */
void fault_os_fail_nth_alloc(unsigned n);
unsigned fault_os_allocs(void);
/* How many heap allocations the library holds. */
int64_t fault_os_n_held(void);

/* Remembers the mappings, the open files and the ledger of this process, and whether they are still
 * the same: the difference is printed. */
void os_state_begin(void);
bool os_state_unchanged(void);
/* Makes the C library map and cache what it needs for n threads that run at once, so that mappings
 * can be compared around a call that starts threads. */
void os_state_settle_threads(unsigned n);
/* The permissions of the mapping that contains an address, such as "rw-p"; "" when there is
 * none. */
const char *os_state_permissions(const void *address);

/* Pages as characters: "." is not mapped, "-" without access, "?" of different bytes. Any other
 * page is shown as the byte that fills it: as a digit, or as itself if it is a letter. */
const char *os_state_pages(const void *address, size_t n_pages);
#define CHECK_PAGES(address, text) CHECK_STR(os_state_pages(address, strlen(text)), text)

/* An operation that may fail at any of its system calls, and must leave no trace then. */
typedef struct fault_case {
    um_status (*run)(void *context, um_error *err);
    void (*undo)(void *context); /* undoes run; NULL when there is nothing to undo */
    void *context;
    const void *outputs; /* what run fills, and a failed run leaves */
    size_t outputs_nbytes;
    const char *harmless;   /* functions that may fail without an error, " name name ", or NULL */
    bool reads_into_memory; /* a read may fail for want of memory: UM_E_NOMEM */
} fault_case;

/* Runs it with the Nth call failing, for N = 1, 2, ... until it runs without a fault: with an errno
 * that means no memory and with another one, with an err and without. */
void fault_os_check_each(const fault_case *c);
#define CHECK_EACH_FAULT_AT(run, undo, context, outputs, nbytes, harmless)                         \
    fault_os_check_each(&(fault_case){run, undo, context, outputs, nbytes, harmless, false})
#define CHECK_EACH_FAULT(run, undo, context, output, harmless)                                     \
    CHECK_EACH_FAULT_AT(run, undo, context, &(output), sizeof(output), harmless)

#endif
