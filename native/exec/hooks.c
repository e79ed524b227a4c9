/* The functions that the library replaces, and its begin and end. The small paths are a comparison
 * and a jump: `um__next_now` is never NULL, and leads to the functions of `early` until the next
 * allocator is known. */
#include "exec.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default"))) extern
#define RARELY(condition) __builtin_expect(!!(condition), 0)

extern char **environ;

typedef void handler(void);

/* ---- before the next allocator is known ---- */

static void begin(void);
static void *early_malloc(size_t nbytes);

/* Begins, and returns whether the next allocator is still unknown: finding it may itself allocate.
 * Each such allocation is a mapping of its own, which is freed as all others are. */
static bool is_early(void) {
    begin();
    return um__next_now.malloc == early_malloc;
}

static void *early_memalign(size_t align, size_t nbytes) {
    if (!is_early()) {
        return um__large_memalign(align, nbytes);
    }
    size_t page = 4096, whole = (nbytes + page) / page * page;
    align = align < UM__SLOT_BYTES ? UM__SLOT_BYTES : align;
    void *address =
        um__place_map(whole, align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    um__record record = {
        .address = (uintptr_t)address, .nbytes = whole, .asked = whole, .via = UM__MALLOC};
    um__table_lock();
    bool done = address != NULL && um__table_add(record);
    um__table_unlock();
    return done ? address : NULL;
}

static void *early_malloc(size_t nbytes) {
    return is_early() ? early_memalign(1, nbytes) : um__large_malloc(nbytes);
}

static void *early_calloc(size_t n, size_t nbytes) {
    size_t whole;
    if (!is_early()) {
        return um__large_calloc(n, nbytes);
    }
    return __builtin_mul_overflow(n, nbytes, &whole) ? NULL : early_memalign(1, whole);
}

static void *early_realloc(void *address, size_t nbytes) {
    begin();
    return um__large_realloc(address, nbytes);
}

static void early_free(void *address) {
    if (!is_early()) {
        um__large_free(address);
    }
}

static int early_posix_memalign(void **out, size_t align, size_t nbytes) {
    if (!is_early()) {
        return um__large_posix_memalign(out, align, nbytes);
    }
    *out = early_memalign(align, nbytes);
    return *out == NULL ? ENOMEM : 0;
}

static void *early_aligned_alloc(size_t align, size_t nbytes) {
    return is_early() ? early_memalign(align, nbytes) : um__large_aligned_alloc(align, nbytes);
}

static void *early_valloc(size_t nbytes) {
    return is_early() ? early_memalign(1, nbytes) : um__next_now.valloc(nbytes);
}

static void *early_pvalloc(size_t nbytes) {
    return is_early() ? early_memalign(1, nbytes) : um__next_now.pvalloc(nbytes);
}

static size_t early_usable_size(void *address) {
    return is_early() ? 0 : um__large_usable_size(address);
}

um__next um__next_now = {
    .malloc = early_malloc,
    .calloc = early_calloc,
    .realloc = early_realloc,
    .free = early_free,
    .memalign = early_memalign,
    .aligned_alloc = early_aligned_alloc,
    .posix_memalign = early_posix_memalign,
    .valloc = early_valloc,
    .pvalloc = early_pvalloc,
    .usable_size = early_usable_size,
};

/* ---- the begin ---- */

static um__next found;
static int (*register_next)(handler *, handler *, handler *, void *);
static const char *next_file = ""; /* that has the next malloc */

static char **environment; /* of a report; NULL: none is made */
static void copy_environment(void);
static void report(void);

/* Returns whether calls of a name arrive here: a program may define it itself. A program that takes
 * the address of a function has an undefined symbol of it. */
static bool arrives(const char *name) {
    static const int HERE;
    Dl_info info, here;
    void *symbol = dlsym(RTLD_DEFAULT, name), *details = NULL;
    if (symbol == NULL || dladdr1(symbol, &info, &details, RTLD_DL_SYMENT) == 0 ||
        dladdr(&HERE, &here) == 0) {
        return false;
    }
    const ElfW(Sym) *entry = details;
    return info.dli_fbase == here.dli_fbase || (entry != NULL && entry->st_shndx == SHN_UNDEF);
}

/* Finds the next functions. *out_is_whole: all of malloc's kind are the C library's, and calls of
 * them arrive here. Memory of one allocator must never reach another one. */
static bool find_next(bool *out_is_whole) {
    /* POSIX lets dlsym return functions; C has no such cast of pointers. */
    const struct {
        void *out;
        const char *name;
    } all[] = {
        {&register_next, "__register_atfork"}, /* which only the C library has */
        {&found.malloc, "malloc"},
        {&found.calloc, "calloc"},
        {&found.realloc, "realloc"},
        {&found.free, "free"},
        {&found.memalign, "memalign"},
        {&found.aligned_alloc, "aligned_alloc"},
        {&found.posix_memalign, "posix_memalign"},
        {&found.valloc, "valloc"},
        {&found.pvalloc, "pvalloc"},
        {&found.usable_size, "malloc_usable_size"},
    };
    Dl_info libc, info;
    *out_is_whole = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        void *symbol = dlsym(RTLD_NEXT, all[i].name);
        memcpy(all[i].out, &symbol, sizeof symbol);
        if (symbol == NULL || dladdr(symbol, i == 0 ? &libc : &info) == 0) {
            return false;
        }
        if (i == 1) {
            next_file = info.dli_fname;
        }
        *out_is_whole &= i == 0 || (info.dli_fbase == libc.dli_fbase && arrives(all[i].name));
    }
    return true;
}

/* The first call precedes any second thread; a call while it runs is one of its own. */
static void begin(void) {
    static bool has_begun;
    bool is_whole;
    if (has_begun) {
        return;
    }
    has_begun = true;
    if (!um__table_init() || !find_next(&is_whole)) {
        um__sys_print("unimem exec: the C library lacks what this needs\n");
        _Exit(127);
    }
    um__settings_read(&um__settings_now, getenv("UNIMEM_EXEC"));
    if (!is_whole) {
        um__settings_now.heap_bytes = SIZE_MAX;
        /* No thread is started where an allocator maps under its lock: that calls calloc. */
        um__settings_now.trial = false;
        um__settings_now.n_threads = 1;
    }
    copy_environment();
    um__next_now = found;
}

static void begin_child(void) {
    um__table_in_child();
    um__later_in_child();
    um__place_settle();
}

static void go_on(void) {
    um__table_after_fork();
    um__place_settle();
}

/* Registers once, before anyone else registers a handler: the table rests last before a fork, and
 * first goes on. Other handlers may allocate, and wait for threads that do. */
static void guard_forks(void) {
    static bool is_guarded;
    begin();
    if (!is_guarded && um__settings_now.active) {
        is_guarded = true;
        register_next(um__table_before_fork, go_on, begin_child, NULL);
    }
}

/* What pthread_atfork calls. */
HOOK int __register_atfork(handler *prepare, handler *parent, handler *child, void *owner);
HOOK int __register_atfork(handler *prepare, handler *parent, handler *child, void *owner) {
    guard_forks();
    return register_next(prepare, parent, child, owner);
}

__attribute__((constructor)) static void start(void) {
    guard_forks();
    if (!um__settings_now.active) {
        return;
    }
    um__when_refused = um__settings_now.strict ? report : NULL;
    bool is_ours = um__settings_now.heap_bytes != SIZE_MAX;
    um__table_note_next(next_file, is_ours);
    if (!is_ours && um__settings_now.pid == um__sys_pid()) {
        um__sys_print("unimem exec: this program has an allocator of its own, which is left alone: "
                      "only its mappings are placed (mmap)\n");
    }
}

/* ---- the end ---- */

/* Copies the environment for the program that reports, without what preloads this library: at the
 * end, a handler of a signal may have interrupted a change of it. */
static void copy_environment(void) {
    const char *gone[] = {"LD_PRELOAD=", "UNIMEM_EXEC="};
    size_t n = 0, nbytes = 0;
    if (um__settings_now.pid != um__sys_pid() || getenv("UNIMEM_EXEC_PYTHON") == NULL ||
        getenv("UNIMEM_EXEC_REPORT") == NULL) {
        return;
    }
    for (char **each = environ; *each != NULL; each++) {
        n++;
        nbytes += strlen(*each) + 1;
    }
    size_t room = (n + 1) * sizeof(char *);
    char **copies = um__sys_map(NULL, room + nbytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copies == NULL) {
        return;
    }
    char *text = (char *)copies + room;
    environment = copies;
    for (char **each = environ; *each != NULL; each++) {
        if (strncmp(*each, gone[0], strlen(gone[0])) != 0 &&
            strncmp(*each, gone[1], strlen(gone[1])) != 0) {
            *copies++ = strcpy(text, *each);
            text += strlen(text) + 1;
        }
    }
}

static char *copy_of(const char *name) {
    char **each = environment;
    while (strncmp(*each, name, strlen(name)) != 0) {
        each++;
    }
    return *each + strlen(name);
}

/* Starts a program that reports on this process while it still exists. A handler of a signal may
 * come here: nothing waits for a lock. */
static void report(void) {
    static atomic_bool was_made;
    if (environment == NULL || um__settings_now.pid != um__sys_pid() ||
        atomic_exchange(&was_made, true)) {
        return;
    }
    char *program = copy_of("UNIMEM_EXEC_PYTHON="), *file = copy_of("UNIMEM_EXEC_REPORT=");
    char digits[16] = "", *pid = digits + sizeof digits - 1;
    for (int rest = um__sys_pid(); rest != 0; rest /= 10) {
        *--pid = (char)('0' + rest % 10);
    }
    char *words[] = {program, "-P", "-m", "unimem.cli.exec_report", pid, file, NULL};
    pid_t child;
    if (posix_spawn(&child, program, NULL, NULL, words, environment) == 0) {
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
        }
    }
}

__attribute__((destructor)) static void end(void) {
    report();
}

HOOK _Noreturn void _exit(int status) {
    report();
    for (;;) {
        syscall(SYS_exit_group, status);
    }
}

HOOK _Noreturn void _Exit(int status) {
    _exit(status);
}

/* ---- malloc and its kind ---- */

HOOK void *malloc(size_t nbytes) {
    if (RARELY(nbytes >= um__settings_now.heap_bytes)) {
        return um__large_malloc(nbytes);
    }
    return um__next_now.malloc(nbytes);
}

HOOK void free(void *address) {
    if (RARELY(um__large_may_be_ours(address))) {
        if (address != NULL) {
            um__large_free(address);
        }
        return;
    }
    um__next_now.free(address);
}

HOOK void *calloc(size_t n, size_t nbytes) {
    size_t whole;
    if (RARELY(__builtin_mul_overflow(n, nbytes, &whole) || whole >= um__settings_now.heap_bytes)) {
        return um__large_calloc(n, nbytes);
    }
    return um__next_now.calloc(n, nbytes);
}

HOOK void *realloc(void *address, size_t nbytes) {
    if (RARELY(nbytes >= um__settings_now.heap_bytes || um__large_may_be_ours(address))) {
        return um__large_realloc(address, nbytes);
    }
    return um__next_now.realloc(address, nbytes);
}

HOOK void *reallocarray(void *address, size_t n, size_t nbytes) {
    size_t whole;
    if (__builtin_mul_overflow(n, nbytes, &whole)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(address, whole);
}

HOOK void *memalign(size_t align, size_t nbytes) {
    return um__large_memalign(align, nbytes);
}

HOOK void *aligned_alloc(size_t align, size_t nbytes) {
    return um__large_aligned_alloc(align, nbytes);
}

HOOK int posix_memalign(void **out, size_t align, size_t nbytes) {
    return um__large_posix_memalign(out, align, nbytes);
}

HOOK void *valloc(size_t nbytes) {
    return RARELY(nbytes >= um__settings_now.heap_bytes)
               ? um__large_memalign(um__settings_now.page_bytes, nbytes)
               : um__next_now.valloc(nbytes);
}

HOOK void *pvalloc(size_t nbytes) { /* rounds up to whole pages, as every mapping is */
    return RARELY(nbytes >= um__settings_now.heap_bytes)
               ? um__large_memalign(um__settings_now.page_bytes, nbytes)
               : um__next_now.pvalloc(nbytes);
}

HOOK size_t malloc_usable_size(void *address) {
    return um__large_usable_size(address);
}

/* C23 has these. A C library must not see memory that it did not hand out. */
HOOK void free_sized(void *address, size_t nbytes);
HOOK void free_sized(void *address, size_t nbytes) {
    (void)nbytes;
    free(address);
}

HOOK void free_aligned_sized(void *address, size_t align, size_t nbytes);
HOOK void free_aligned_sized(void *address, size_t align, size_t nbytes) {
    (void)align;
    (void)nbytes;
    free(address);
}

/* ---- mmap and its kind ---- */

HOOK void *mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return um__ranges_map(at, nbytes, protection, flags, fd, offset);
}

HOOK void *mmap64(void *at, size_t nbytes, int protection, int flags, int fd, off64_t offset) {
    return um__ranges_map(at, nbytes, protection, flags, fd, offset);
}

HOOK int munmap(void *at, size_t nbytes) {
    return um__ranges_unmap(at, nbytes);
}

HOOK void *mremap(void *at, size_t nbytes, size_t new_nbytes, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    void *new_at = va_arg(rest, void *); /* unused without MREMAP_FIXED */
    va_end(rest);
    return um__ranges_remap(at, nbytes, new_nbytes, flags, new_at);
}

HOOK int madvise(void *at, size_t nbytes, int advice) {
    return um__ranges_advise(at, nbytes, advice);
}

/* What a program does to memory of malloc's kind must not be left when it is used again. */

static void note_change(void *at, size_t nbytes) {
    um__table_note_change((uintptr_t)at, nbytes);
}

HOOK int mprotect(void *at, size_t nbytes, int protection) {
    note_change(at, nbytes);
    return (int)syscall(SYS_mprotect, at, nbytes, protection);
}

HOOK int pkey_mprotect(void *at, size_t nbytes, int protection, int key) {
    note_change(at, nbytes);
    return (int)syscall(SYS_pkey_mprotect, at, nbytes, protection, key);
}

HOOK int mlock(const void *at, size_t nbytes) {
    note_change((void *)(uintptr_t)at, nbytes);
    return (int)syscall(SYS_mlock, at, nbytes);
}

HOOK int mlock2(const void *at, size_t nbytes, unsigned flags) {
    note_change((void *)(uintptr_t)at, nbytes);
    return (int)syscall(SYS_mlock2, at, nbytes, flags);
}

HOOK int munlock(const void *at, size_t nbytes) {
    note_change((void *)(uintptr_t)at, nbytes);
    return (int)syscall(SYS_munlock, at, nbytes);
}

HOOK int mlockall(int flags) {
    note_change(NULL, SIZE_MAX);
    return (int)syscall(SYS_mlockall, flags);
}

HOOK int munlockall(void) {
    note_change(NULL, SIZE_MAX);
    return (int)syscall(SYS_munlockall);
}

/* Of libnuma. */
HOOK long mbind(void *at, unsigned long nbytes, int mode, const unsigned long *nodes,
                unsigned long most, unsigned flags);
HOOK long mbind(void *at, unsigned long nbytes, int mode, const unsigned long *nodes,
                unsigned long most, unsigned flags) {
    note_change(at, nbytes);
    return syscall(SYS_mbind, at, nbytes, mode, nodes, most, flags);
}

HOOK int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (request == UFFDIO_REGISTER) {
        const struct uffdio_register *asked = argument;
        note_change((void *)(uintptr_t)asked->range.start, asked->range.len);
    }
    return (int)syscall(SYS_ioctl, fd, request, argument);
}
