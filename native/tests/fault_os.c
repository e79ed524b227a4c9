/* See fault_os.h. */
#include "fault_os.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/stats.h"
#include "os/os.h"
#include "os/ring.h"

/* ---- the Nth call ---- */

/* A function of os.h, and what the error of its failure must name. */
typedef struct call {
    const char *function, *kernel_name;
} call;

enum { MAX_LOGGED = 1 << 16, MAX_CPUS = 8192 };

static _Atomic unsigned n_calls, fail_at;
static _Atomic int fail_errno;
static const call *_Atomic calls[MAX_LOGGED]; /* in order */
static _Atomic size_t read_limit, run_limit;
static _Atomic unsigned n_allocs, fail_alloc_at;
static _Atomic int64_t n_held;
static _Atomic unsigned n_pinned[MAX_CPUS];

void fault_os_fail_nth(unsigned n, int os_errno) {
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++) {
        atomic_store(&n_pinned[cpu], 0);
    }
    atomic_store(&n_calls, 0);
    atomic_store(&fail_errno, os_errno);
    atomic_store(&fail_at, n);
}

unsigned fault_os_calls(void) {
    return atomic_load(&n_calls);
}

unsigned fault_os_calls_of(const char *function) {
    unsigned found = 0, n = fault_os_calls();
    for (unsigned i = 0; i < n && i < MAX_LOGGED; i++) {
        found += strcmp(calls[i]->function, function) == 0;
    }
    return found;
}

static const call *failed_call(void) {
    unsigned n = atomic_load(&fail_at);
    return n != 0 && n <= fault_os_calls() && n <= MAX_LOGGED ? calls[n - 1] : NULL;
}

const char *fault_os_failed(void) {
    const call *failed = failed_call();
    return failed != NULL ? failed->function : NULL;
}

unsigned fault_os_pinned_to(unsigned cpu) {
    return atomic_load(&n_pinned[cpu]);
}

void fault_os_limit_read(size_t nbytes) {
    atomic_store(&read_limit, nbytes);
}

void fault_os_limit_runs(size_t n) {
    atomic_store(&run_limit, n);
}

static size_t limited_runs(size_t n) {
    size_t limit = atomic_load(&run_limit);
    return limit != 0 && n > limit ? limit : n;
}

void fault_os_fail_nth_alloc(unsigned n) {
    atomic_store(&n_allocs, 0);
    atomic_store(&fail_alloc_at, n);
}

unsigned fault_os_allocs(void) {
    return atomic_load(&n_allocs);
}

/* The errno that this call must fail with, or 0. */
static int fault(const call *now) {
    unsigned n = atomic_fetch_add(&n_calls, 1) + 1;
    if (n <= MAX_LOGGED) {
        calls[n - 1] = now;
    }
    return n == atomic_load(&fail_at) ? atomic_load(&fail_errno) : 0;
}

#define DECLARE(name, kernel_name, params)                                                         \
    static const call call_of_##name = {#name, kernel_name};                                       \
    int __real_##name params;                                                                      \
    int __wrap_##name params;

#define WRAP(name, kernel_name, params, args)                                                      \
    DECLARE(name, kernel_name, params)                                                             \
    int __wrap_##name params {                                                                     \
        int failed = fault(&call_of_##name);                                                       \
        return failed != 0 ? failed : __real_##name args;                                          \
    }

#define WRAP_ENDING(name, kernel_name, params, args)                                               \
    DECLARE(name, kernel_name, params)                                                             \
    int __wrap_##name params {                                                                     \
        int failed = fault(&call_of_##name), real = __real_##name args;                            \
        return failed != 0 ? failed : real;                                                        \
    }

WRAP(um__os_reserve, "mmap", (size_t nbytes, void **out), (nbytes, out))
WRAP(um__os_reserve_at, "mmap", (void *address, size_t nbytes), (address, nbytes))
WRAP(um__os_map_at, "mmap", (void *address, size_t nbytes, unsigned huge_shift),
     (address, nbytes, huge_shift))
WRAP(um__os_map_file_at, "mmap",
     (void *address, int fd, uint64_t offset, size_t nbytes, um_access access),
     (address, fd, offset, nbytes, access))
WRAP(um__os_unmap, "munmap", (void *address, size_t nbytes), (address, nbytes))
WRAP(um__os_advise, "madvise", (void *address, size_t nbytes, um__os_advice advice),
     (address, nbytes, advice))
WRAP(um__os_residency, "mincore", (void *address, size_t nbytes, unsigned char *out_pages),
     (address, nbytes, out_pages))
WRAP(um__os_scan_pages, "ioctl",
     (int pagemap, const void *address, size_t nbytes, um__page_run *out, size_t capacity,
      size_t *out_n, size_t *out_scanned_nbytes),
     (pagemap, address, nbytes, out, limited_runs(capacity), out_n, out_scanned_nbytes))
WRAP(um__os_lock, "mlock2", (void *address, size_t nbytes, int on_fault),
     (address, nbytes, on_fault))
WRAP(um__os_unlock, "munlock", (void *address, size_t nbytes), (address, nbytes))
WRAP(um__os_bind, "mbind", (void *address, size_t nbytes, const um_numa *numa),
     (address, nbytes, numa))
WRAP(um__os_file_page_bytes, "fstatfs", (int fd, size_t *out), (fd, out))
WRAP(um__os_duplicate, "fcntl", (int fd, int *out_fd), (fd, out_fd))
WRAP(um__os_memfd, "memfd_create", (const char *name, unsigned huge_shift, int *out_fd),
     (name, huge_shift, out_fd))
WRAP(um__os_resize, "ftruncate", (int fd, uint64_t nbytes), (fd, nbytes))
WRAP(um__os_seal, "fcntl", (int fd, int write), (fd, write))
WRAP(um__os_punch_hole, "fallocate", (int fd, uint64_t offset, uint64_t nbytes),
     (fd, offset, nbytes))
WRAP(um__os_file_nbytes, "fstat", (int fd, uint64_t *out), (fd, out))
WRAP(um__os_open_direct, "open", (int fd, int *out_fd), (fd, out_fd))
WRAP_ENDING(um__os_close, "close", (int fd), (fd))
WRAP(um__os_ring_setup, "io_uring", (unsigned n, um__ring_params *params, int *out_fd),
     (n, params, out_fd))
WRAP(um__os_ring_map, "io_uring", (int fd, uint64_t offset, size_t nbytes, void **out),
     (fd, offset, nbytes, out))
WRAP(um__os_ring_enter, "io_uring", (int fd, unsigned n, unsigned n_least), (fd, n, n_least))
WRAP(um__os_fs_open, "fsopen", (const char *type, int *out_fd), (type, out_fd))
WRAP(um__os_fs_set, "fsconfig", (int fd, const char *key, const char *value), (fd, key, value))
WRAP(um__os_fs_create, "fsconfig", (int fd), (fd))
WRAP(um__os_fs_mount, "fsmount", (int fd, int *out_fd), (fd, out_fd))
WRAP(um__os_fs_pick, "fspick", (int mount, int *out_fd), (mount, out_fd))
WRAP(um__os_fs_reconfigure, "fsconfig", (int fd), (fd))
WRAP(um__os_get_affinity, "sched_", (void *mask, size_t mask_nbytes), (mask, mask_nbytes))
WRAP(um__os_thread_start, "pthread", (um__os_thread * out, void *(*fn)(void *), void *arg),
     (out, fn, arg))
WRAP_ENDING(um__os_thread_join, "pthread", (um__os_thread thread), (thread))
WRAP(um__os_at_fork, "pthread_atfork",
     (void (*before)(void), void (*in_parent)(void), void (*in_child)(void)),
     (before, in_parent, in_child))
WRAP(um__os_bus_action, "sigaction",
     (const struct sigaction *action, struct sigaction *out_previous), (action, out_previous))
WRAP(um__os_raise_bus, "raise", (void), ())
WRAP(um__os_signal_mask, "pthread_sigmask", (int how, const sigset_t *mask, sigset_t *out_previous),
     (how, mask, out_previous))
WRAP(um__os_wait, "futex", (const _Atomic uint32_t *word, uint32_t value, unsigned milliseconds),
     (word, value, milliseconds))
WRAP_ENDING(um__os_wake, "futex", (const _Atomic uint32_t *word), (word))

DECLARE(um__os_set_affinity, "sched_", (const void *mask, size_t mask_nbytes))
int __wrap_um__os_set_affinity(const void *mask, size_t mask_nbytes) {
    unsigned n_bits = 0, last = 0;
    for (unsigned cpu = 0; cpu < MAX_CPUS && cpu < mask_nbytes * 8; cpu++) {
        if ((((const unsigned char *)mask)[cpu / 8] >> (cpu % 8) & 1) != 0) {
            n_bits++;
            last = cpu;
        }
    }
    if (n_bits == 1) {
        atomic_fetch_add(&n_pinned[last], 1);
    }
    int failed = fault(&call_of_um__os_set_affinity);
    return failed != 0 ? failed : __real_um__os_set_affinity(mask, mask_nbytes);
}

static size_t limited(size_t nbytes) {
    size_t limit = atomic_load(&read_limit);
    return limit != 0 && nbytes > limit ? limit : nbytes;
}

WRAP(um__os_pread, "pread", (int fd, void *out, size_t nbytes, uint64_t offset, size_t *out_nbytes),
     (fd, out, limited(nbytes), offset, out_nbytes))
WRAP(um__os_read, "read", (int fd, void *out, size_t nbytes, size_t *out_nbytes),
     (fd, out, limited(nbytes), out_nbytes))

/* What ends a read of a ring. */
static const call call_of_um__ring_take = {"um__ring_take", "a part"};
bool __real_um__ring_take(um__ring *ring, um__read_end *out);
bool __wrap_um__ring_take(um__ring *ring, um__read_end *out);
bool __wrap_um__ring_take(um__ring *ring, um__read_end *out) {
    if (!__real_um__ring_take(ring, out)) {
        return false;
    }
    int failed = fault(&call_of_um__ring_take);
    if (failed != 0) {
        out->os_errno = failed;
        out->nbytes = 0;
    }
    return true;
}

void __real_um__ring_put(um__ring *ring, uint32_t id, int fd, void *to, size_t nbytes,
                         uint64_t offset);
void __wrap_um__ring_put(um__ring *ring, uint32_t id, int fd, void *to, size_t nbytes,
                         uint64_t offset);
void __wrap_um__ring_put(um__ring *ring, uint32_t id, int fd, void *to, size_t nbytes,
                         uint64_t offset) {
    __real_um__ring_put(ring, id, fd, to, limited(nbytes), offset);
}

/* ---- invented answers ---- */

static struct invented_file {
    const char *path, *text;
} invented_files[16];

/* The file with this path that has a text, or a place for one, or NULL. */
static struct invented_file *invented(const char *path) {
    struct invented_file *free_place = NULL;
    for (struct invented_file *file = invented_files; file < invented_files + 16; file++) {
        if (file->text != NULL && strcmp(file->path, path) == 0) {
            return file;
        }
        free_place = free_place == NULL && file->text == NULL ? file : free_place;
    }
    return free_place;
}

static fault_os_move_pages_fn invented_move_pages;

void fault_os_file(const char *path, const char *text) {
    struct invented_file *file = invented(path);
    REQUIRE(file != NULL);
    *file = (struct invented_file){.path = path, .text = text};
}

void fault_os_move_pages(fault_os_move_pages_fn answer) {
    invented_move_pages = answer;
}

void fault_os_reset(void) {
    fault_os_fail_nth(0, 0);
    fault_os_fail_nth_alloc(0);
    fault_os_limit_read(0);
    fault_os_limit_runs(0);
    fault_os_move_pages(NULL);
    memset(invented_files, 0, sizeof invented_files);
}

DECLARE(um__os_open_read, "open", (const char *path, int *out_fd))
int __wrap_um__os_open_read(const char *path, int *out_fd) {
    int failed = fault(&call_of_um__os_open_read);
    if (failed != 0) {
        return failed;
    }
    const struct invented_file *file = invented(path);
    if (file == NULL || file->text == NULL) {
        return __real_um__os_open_read(path, out_fd);
    }
    size_t n = strlen(file->text);
    *out_fd = memfd_create("invented", MFD_CLOEXEC);
    REQUIRE(*out_fd >= 0);
    REQUIRE(write(*out_fd, file->text, n) == (ssize_t)n);
    REQUIRE(lseek(*out_fd, 0, SEEK_SET) == 0);
    return 0;
}

DECLARE(um__os_move_pages, "move_pages",
        (size_t n, void *const *pages, const int *nodes, int *out_status))
int __wrap_um__os_move_pages(size_t n, void *const *pages, const int *nodes, int *out_status) {
    int failed = fault(&call_of_um__os_move_pages);
    if (failed != 0) {
        return failed;
    }
    return invented_move_pages != NULL ? invented_move_pages(n, pages, nodes, out_status)
                                       : __real_um__os_move_pages(n, pages, nodes, out_status);
}

void *__real_um__heap_alloc(size_t n, size_t item_bytes);
void *__wrap_um__heap_alloc(size_t n, size_t item_bytes);
void *__wrap_um__heap_alloc(size_t n, size_t item_bytes) {
    bool failed = atomic_fetch_add(&n_allocs, 1) + 1 == atomic_load(&fail_alloc_at);
    void *p = failed ? NULL : __real_um__heap_alloc(n, item_bytes);
    if (p != NULL) {
        /* The heap rounds up: what reads behind its end does not find zeros there. */
        size_t nbytes = n * item_bytes;
        memset((char *)p + nbytes, 0xFF, malloc_usable_size(p) - nbytes);
        atomic_fetch_add(&n_held, 1);
    }
    return p;
}

void __real_um__heap_free(void *p);
void __wrap_um__heap_free(void *p);
void __wrap_um__heap_free(void *p) {
    atomic_fetch_sub(&n_held, p != NULL);
    __real_um__heap_free(p);
}

int64_t fault_os_n_held(void) {
    return atomic_load(&n_held);
}

/* ---- the state of the process ---- */

/* Reads all of /proc/self/maps. The buffers of the C library would change what is read. */
static void read_maps(char *out, size_t nbytes) {
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    size_t total = 0;
    ssize_t got = fd < 0 ? -1 : 1;
    while (got > 0 && total < nbytes - 1) {
        got = read(fd, out + total, nbytes - 1 - total);
        total += got > 0 ? (size_t)got : 0;
    }
    REQUIRE(got == 0);
    close(fd);
    out[total] = '\0';
}

/* Mappings that may change at any time and are not the library's: the test's stack and malloc heap,
 * and under a sanitizer all mappings that are not of a file. */
static bool is_of_the_test(const char *line) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    if (strchr(line, '/') == NULL) {
        return true;
    }
#endif
    return strstr(line, "[heap]") != NULL || strstr(line, "[stack]") != NULL;
}

static void drop_lines_of_the_test(char *maps) {
    char *to = maps;
    for (char *line = maps, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        bool dropped = is_of_the_test(line);
        *end = '\n';
        if (!dropped) {
            size_t n = (size_t)(end - line) + 1;
            memmove(to, line, n);
            to += n;
        }
    }
    *to = '\0';
}

/* Large, and static, since memory from malloc would be a new mapping. */
typedef struct os_state {
    um_ledger_row ledger[UM_CAT_COUNT];
    char files[256][64]; /* what each descriptor points to; "" for none */
    char maps[1 << 18];
} os_state;
static os_state state_then, state_now;

static void read_state(os_state *out) {
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        REQUIRE(um_ledger_read((um_category)i, &out->ledger[i], NULL) == UM_OK);
    }
    memset(out->files, 0, sizeof out->files);
    for (size_t fd = 0; fd < COUNT(out->files); fd++) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%zu", fd);
        if (readlink(path, out->files[fd], sizeof out->files[fd] - 1) < 0) {
            out->files[fd][0] = '\0';
        }
    }
    read_maps(out->maps, sizeof out->maps);
    drop_lines_of_the_test(out->maps);
}

/* Prints the lines of one text that are not in the other. */
static void print_lines_of(const char *text, const char *other, const char *mark) {
    char line[512];
    for (const char *at = text, *end; (end = strchr(at, '\n')) != NULL; at = end + 1) {
        snprintf(line, sizeof line, "%.*s", (int)(end - at + 1), at);
        if (strstr(other, line) == NULL) {
            fprintf(stderr, "%s %s", mark, line);
        }
    }
}

void os_state_begin(void) {
    read_state(&state_then);
}

bool os_state_unchanged(void) {
    const os_state *before = &state_then, *after = &state_now;
    bool same = true;
    read_state(&state_now);
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        if (memcmp(&before->ledger[i], &after->ledger[i], sizeof before->ledger[i]) != 0) {
            fprintf(stderr, "the ledger's row \"%s\" changed\n", um_category_name((um_category)i));
            same = false;
        }
    }
    for (size_t fd = 0; fd < COUNT(before->files); fd++) {
        if (strcmp(before->files[fd], after->files[fd]) != 0) {
            fprintf(stderr, "descriptor %zu was \"%s\" and is \"%s\"\n", fd, before->files[fd],
                    after->files[fd]);
            same = false;
        }
    }
    if (strcmp(before->maps, after->maps) != 0) {
        fprintf(stderr, "the mappings changed:\n");
        print_lines_of(before->maps, after->maps, "-");
        print_lines_of(after->maps, before->maps, "+");
        same = false;
    }
    return same;
}

static pthread_barrier_t all_run;

static void *run_once(void *arg) {
    pthread_barrier_wait(&all_run);
    return arg;
}

void os_state_settle_threads(unsigned n) {
    REQUIRE(pthread_barrier_init(&all_run, NULL, n) == 0);
    run_threads(n, run_once, NULL, 0);
    pthread_barrier_destroy(&all_run);
}

const char *os_state_permissions(const void *address) {
    static char maps[1 << 18], permissions[5];
    read_maps(maps, sizeof maps);
    for (char *line = maps; line != NULL && *line != '\0';) {
        char *rest;
        uintptr_t start = (uintptr_t)strtoull(line, &rest, 16);
        uintptr_t end = (uintptr_t)strtoull(rest + 1, &rest, 16);
        if ((uintptr_t)address >= start && (uintptr_t)address < end) {
            memcpy(permissions, rest + 1, 4);
            return permissions;
        }
        line = strchr(line, '\n');
        line += line != NULL;
    }
    return "";
}

const char *os_state_pages(const void *address, size_t n_pages) {
    static char text[64];
    size_t page_nbytes = um_page_bytes();
    REQUIRE(n_pages < sizeof text);
    for (size_t i = 0; i < n_pages; i++) {
        const unsigned char *at = (const unsigned char *)address + i * page_nbytes;
        const char *permissions = os_state_permissions(at);
        if (permissions[0] != 'r') {
            text[i] = permissions[0] == '-' ? '-' : '.';
        } else if (!is_filled(at, page_nbytes, at[0])) {
            text[i] = '?';
        } else {
            text[i] = (char)(at[0] < 10 ? '0' + at[0] : at[0]);
        }
    }
    text[n_pages] = '\0';
    return text;
}

/* ---- each call in turn ---- */

static um_status status_of(const fault_case *c, const char *function, int os_errno) {
    bool is_read = strcmp(function, "um__os_read") == 0 || strcmp(function, "um__os_pread") == 0;
    if (is_read && !(c->reads_into_memory && os_errno == ENOMEM)) {
        return UM_E_IO;
    }
    return os_errno == ENOMEM ? UM_E_NOMEM : UM_E_OS;
}

static bool is_harmless(const fault_case *c, const char *function) {
    char word[64];
    snprintf(word, sizeof word, " %s ", function);
    return c->harmless != NULL && strstr(c->harmless, word) != NULL;
}

/* Returns true when there was an Nth call to fail. */
static bool check_nth(const fault_case *c, unsigned n, int os_errno, bool with_err) {
    AUTO_FREE void *outputs = allocate(c->outputs_nbytes + 1);
    um_error err, untouched;
    memcpy(outputs, c->outputs, c->outputs_nbytes);
    test_err_pattern(&err);
    test_err_pattern(&untouched);
    os_state_begin();
    fault_os_fail_nth(n, os_errno);
    um_status status = c->run(c->context, with_err ? &err : NULL);
    const call *named = failed_call();
    const char *failed = fault_os_failed();
    fault_os_fail_nth(0, 0);

    bool good;
    if (failed == NULL || is_harmless(c, failed)) {
        good = CHECK(status == UM_OK) && CHECK(memcmp(&err, &untouched, sizeof err) == 0);
        if (status == UM_OK && c->undo != NULL) {
            c->undo(c->context);
        }
    } else {
        good = CHECK(status == status_of(c, failed, os_errno)) &&
               CHECK(memcmp(outputs, c->outputs, c->outputs_nbytes) == 0);
        if (good && with_err) {
            good = CHECK(err.status == status) && CHECK(err.os_errno == os_errno) &&
                   CHECK(strstr(err.what, named->kernel_name) != NULL);
        }
    }
    if (!(CHECK(os_state_unchanged()) && good)) {
        fprintf(stderr, "... when call %u (%s) fails with errno %d: %s\n", n,
                failed == NULL ? "none" : failed, os_errno, um_status_name(status));
    }
    return failed != NULL;
}

void fault_os_check_each(const fault_case *c) {
    static const int errnos[] = {ENOMEM, EPERM};
    /* One run without a fault, so that the high water of the ledger does not rise later. */
    CHECK(c->run(c->context, NULL) == UM_OK);
    if (c->undo != NULL) {
        c->undo(c->context);
    }
    for (int i = 0; i < 4; i++) {
        unsigned n = 1;
        while (check_nth(c, n, errnos[i % 2], i < 2)) {
            n++;
        }
        CHECK(n > 1);
    }
}
