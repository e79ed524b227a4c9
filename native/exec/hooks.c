/* The functions that the library replaces, and its begin and end. The small paths are a comparison
 * and a jump: `um__next_now` is never NULL, and leads to the functions of `early` until the next
 * allocator is known. */
#include "exec.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOOK __attribute__((visibility("default"))) extern
#define RARELY(condition) __builtin_expect(!!(condition), 0)

extern char **environ;

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
    .usable_size = early_usable_size,
};

/* ---- the begin ---- */

static um__next found;

static bool find_next(void) {
    /* POSIX lets dlsym return functions; C has no such cast of pointers. */
    const struct {
        void *out;
        const char *name;
    } all[] = {
        {&found.malloc, "malloc"},
        {&found.calloc, "calloc"},
        {&found.realloc, "realloc"},
        {&found.free, "free"},
        {&found.memalign, "memalign"},
        {&found.aligned_alloc, "aligned_alloc"},
        {&found.posix_memalign, "posix_memalign"},
        {&found.usable_size, "malloc_usable_size"},
    };
    bool done = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        void *symbol = dlsym(RTLD_NEXT, all[i].name);
        memcpy(all[i].out, &symbol, sizeof symbol);
        done = done && symbol != NULL;
    }
    return done;
}

/* The first call precedes any second thread; a call while it runs is one of its own. */
static void begin(void) {
    static bool has_begun;
    if (has_begun) {
        return;
    }
    has_begun = true;
    if (!um__table_init() || !find_next()) {
        static const char text[] = "unimem exec: the C library lacks what this needs\n";
        ssize_t done = write(STDERR_FILENO, text, sizeof text - 1);
        (void)done;
        _Exit(127);
    }
    um__settings_read(&um__settings_now, getenv("UNIMEM_EXEC"));
    um__next_now = found;
}

/* Records where small allocations go, and whether the program's own calls arrive here: a program
 * may define malloc itself. */
static void look_around(void) {
    Dl_info info;
    void *next;
    memcpy(&next, &found.malloc, sizeof next);
    const char *path = dladdr(next, &info) != 0 ? info.dli_fname : NULL;
    void *used = dlsym(RTLD_DEFAULT, "malloc"), *own;
    void *(*ours)(size_t) = malloc;
    memcpy(&own, &ours, sizeof own);
    um__table_note_next(path, used == own);
}

static void begin_child(void) {
    um__later_in_child();
    um__table_in_child();
}

__attribute__((constructor)) static void start(void) {
    begin();
    if (um__settings_now.active) {
        look_around();
        pthread_atfork(um__table_lock, um__table_unlock, begin_child);
    }
}

/* ---- the end ---- */

/* Starts a program that reports on this process while it still exists. */
static void report(void) {
    static atomic_bool was_made;
    char *program = getenv("UNIMEM_EXEC_PYTHON"), *file = getenv("UNIMEM_EXEC_REPORT");
    if (program == NULL || file == NULL || um__settings_now.pid != um__sys_pid() ||
        atomic_exchange(&was_made, true)) {
        return;
    }
    char digits[16] = "", *pid = digits + sizeof digits - 1;
    for (int rest = um__sys_pid(); rest != 0; rest /= 10) {
        *--pid = (char)('0' + rest % 10);
    }
    unsetenv("LD_PRELOAD");
    unsetenv("UNIMEM_EXEC");
    char *words[] = {program, "-P", "-m", "unimem.cli.exec_report", pid, file, NULL};
    pid_t child;
    if (posix_spawn(&child, program, NULL, NULL, words, environ) == 0) {
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
        }
    }
}

__attribute__((constructor)) static void report_refusals(void) {
    if (um__settings_now.strict) {
        um__when_refused = report;
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
    if (RARELY(nbytes >= um__settings_now.min_bytes)) {
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
    if (RARELY(__builtin_mul_overflow(n, nbytes, &whole) || whole >= um__settings_now.min_bytes)) {
        return um__large_calloc(n, nbytes);
    }
    return um__next_now.calloc(n, nbytes);
}

HOOK void *realloc(void *address, size_t nbytes) {
    if (RARELY(nbytes >= um__settings_now.min_bytes || um__large_may_be_ours(address))) {
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
