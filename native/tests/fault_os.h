/* Makes the library's Nth system call fail, and looks at what a failed call may not change.
 *
 * The linker replaces every call of a function of os.h by its __wrap_ twin in fault_os.c
 * (--wrap), which fails or calls the real one. The library knows nothing of it. */
#ifndef UM_FAULT_OS_H
#define UM_FAULT_OS_H

#include <stdbool.h>
#include <stddef.h>

#include "unimem.h"

/* Calls that find the huge page size: without it a block only lies differently. */
#define HARMLESS_HUGE_PAGE " um_os_open_read um_os_read um_os_close "

/* From now on the nth call (from 1 on; 0: none) fails with os_errno, once. Counting starts anew.
 * The calls that end something (close, join) do it and then report the failure, as the kernel
 * does. */
void fault_os_fail_nth(unsigned n, int os_errno);
/* The calls since fault_os_fail_nth, the failed one included: all, and those of one function. */
unsigned fault_os_calls(void);
unsigned fault_os_calls_of(const char *function);
/* The function of os.h that was made to fail, or NULL when none was. */
const char *fault_os_failed(void);
/* How many threads were pinned to this CPU alone since fault_os_fail_nth. */
unsigned fault_os_pinned_to(unsigned cpu);
/* Every read gives at most this many bytes; 0: no limit. */
void fault_os_limit_read(size_t nbytes);
/* Every scan of pages gives at most this many runs; 0: no limit. */
void fault_os_limit_runs(size_t n);
/* From now on this path opens as a file with this text, which is kept by address; NULL: as it is.
 */
void fault_os_file(const char *path, const char *text);
/* From now on this answers move_pages in place of the kernel; NULL: the kernel does. */
typedef int (*fault_os_move_pages_fn)(size_t n, void *const *pages, const int *nodes,
                                      int *out_status);
void fault_os_move_pages(fault_os_move_pages_fn answer);
/* The nth heap allocation (from 1 on; 0: none) gives NULL, once. Counting starts anew. */
void fault_os_fail_nth_alloc(unsigned n);
unsigned fault_os_allocs(void);

/* The mappings, the open files and the ledger of this process. Large: keep it static, since memory
 * from malloc would itself be a new mapping. */
typedef struct os_state {
    um_ledger_row ledger[UM_CAT_COUNT];
    char files[256][64]; /* what each descriptor points to; "" for none */
    char maps[1 << 18];
} os_state;
void os_state_read(os_state *out);
/* Prints the difference when there is one. */
bool os_state_same(const os_state *before, const os_state *after);
/* Lets the C library make and cache what it maps for n threads that run at once, so that mappings
 * can be compared around a call that starts threads. */
void os_state_settle_threads(unsigned n);
/* The permissions of the mapping that holds an address, such as "rw-p"; "" when there is none. */
const char *os_state_permissions(const void *address);

/* An operation that may fail at any of its system calls, and has to leave no trace when it does. */
typedef struct fault_case {
    um_status (*run)(void *context, um_error *err);
    void (*undo)(void *context); /* what run did; NULL when it leaves nothing */
    void *context;
    const void *outputs; /* what run fills, and a run that fails does not */
    size_t outputs_nbytes;
    bool reads_into_memory; /* which a read may find no room in: UM_E_NOMEM */
    const char *harmless;   /* the functions whose failure does not matter, " name name " */
} fault_case;

/* Runs it with the Nth call failing, for N = 1 and so on until it runs without a fault; with an
 * errno that means no memory and with one that does not, with an err and without. */
void fault_os_check_each(const fault_case *c);

#endif
