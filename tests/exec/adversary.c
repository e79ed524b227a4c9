/* What an adversary did to a program under `unimem exec`, a case a word: it prints what is wrong,
 * and ends with 0 if nothing is. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <pthread.h>
#include <pwd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20, KEPT = 4 << 20 };
static const int RW = PROT_READ | PROT_WRITE, PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS;

/* Mappings of malloc's kind begin at multiples of 2 MiB. */
static int is_placed(const void *at) {
    return at != NULL && (uintptr_t)at % (2 << 20) == 0;
}

/* Reads a field of the mapping at an address from /proc/self/smaps: the rest of its line. */
static void field_of(const void *at, const char *name, char *out, size_t nbytes) {
    char line[512];
    FILE *file = fopen("/proc/self/smaps", "r");
    int is_it = 0;
    out[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        uintptr_t start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) {
            is_it = start <= (uintptr_t)at && (uintptr_t)at < end;
        } else if (is_it && strncmp(line, name, strlen(name)) == 0) {
            snprintf(out, nbytes, "%s", line + strlen(name));
        }
    }
    fclose(file);
}

/* ---- what is left of a change when memory is used again ---- */

static void *nowhere;

static int seal_off(void *at, size_t nbytes) {
    return mprotect(at, nbytes, PROT_READ);
}
static int seal_part(void *at, size_t nbytes) {
    return mprotect((char *)at + nbytes / 2, 4096, PROT_NONE);
}
static int set_key(void *at, size_t nbytes) {
    int key = pkey_alloc(0, PKEY_DISABLE_WRITE);
    return key < 0 ? 0 : pkey_mprotect(at, nbytes, RW, key);
}
static int lock_it(void *at, size_t nbytes) {
    return mlock(at, nbytes);
}
static int lock_all(void *at, size_t nbytes) {
    (void)at, (void)nbytes;
    return mlockall(MCL_CURRENT | MCL_ONFAULT);
}
static int unmap_part(void *at, size_t nbytes) {
    return munmap((char *)at + nbytes / 2, 8192);
}
static int replace_part(void *at, size_t nbytes) {
    int fd = memfd_create("adversary", 0);
    void *end = (char *)at + nbytes / 2;
    return ftruncate(fd, 8192) | (mmap(end, 8192, RW, MAP_SHARED | MAP_FIXED, fd, 0) != end);
}
static int move_part(void *at, size_t nbytes) {
    nowhere = mremap((char *)at + nbytes / 2, 8192, 8192, MREMAP_MAYMOVE | MREMAP_FIXED,
                     mmap(NULL, 8192, PROT_NONE, PRIVATE, -1, 0));
    return nowhere == MAP_FAILED;
}
static int bind_it(void *at, size_t nbytes) {
    unsigned long nodes[2] = {1};
    long (*bind)(void *, unsigned long, int, const unsigned long *, unsigned long, unsigned);
    extern long mbind(void *, unsigned long, int, const unsigned long *, unsigned long, unsigned)
        __attribute__((weak));
    bind = mbind; /* as of libnuma; unimem's library has it too */
    return bind == NULL ? 1 : (int)bind(at, nbytes, 2, nodes, 65, 0);
}
static int register_it(void *at, size_t nbytes) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register all = {.range = {(uintptr_t)at, nbytes},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    return fd < 0 ? 0 : ioctl(fd, UFFDIO_API, &api) | ioctl(fd, UFFDIO_REGISTER, &all);
}

static const struct {
    const char *name;
    int (*change)(void *, size_t);
    int advice; /* without a function */
} changes[] = {
    {"protect", seal_off, 0},
    {"protect_a_part", seal_part, 0},
    {"key", set_key, 0},
    {"lock", lock_it, 0},
    {"lock_all", lock_all, 0},
    {"unmap_a_part", unmap_part, 0},
    {"replace_a_part", replace_part, 0},
    {"move_a_part", move_part, 0},
    {"bind", bind_it, 0},
    {"register", register_it, 0},
    {"dontfork", NULL, MADV_DONTFORK},
    {"wipeonfork", NULL, MADV_WIPEONFORK},
    {"dontdump", NULL, MADV_DONTDUMP},
    {"mergeable", NULL, MADV_MERGEABLE},
    {"nohugepage", NULL, MADV_NOHUGEPAGE},
    {"random", NULL, MADV_RANDOM},
    {"sequential", NULL, MADV_SEQUENTIAL},
    {"guard", NULL, 102 /* MADV_GUARD_INSTALL */},
};

static int numa_mode_of(void *at) {
    int mode = -1;
    syscall(SYS_get_mempolicy, &mode, NULL, 0, at, 2 /* MPOL_F_ADDR */);
    return mode;
}

/* Memory that was changed and freed is like memory that never was. */
static int reuse(int i) {
    char fresh_flags[256], flags[256];
    char *fresh = malloc(KEPT), *at = malloc(KEPT);
    memset(fresh, 1, KEPT);
    memset(at, 1, KEPT);
    int wrong = changes[i].change != NULL ? changes[i].change(at, KEPT)
                                          : madvise(at, KEPT, changes[i].advice);
    if (wrong != 0 && (errno == EINVAL || (changes[i].change == lock_all && errno == ENOMEM))) {
        return 77; /* this kernel has no such thing, or the limit of locked memory is too low */
    }
    if (wrong != 0) {
        perror(changes[i].name);
        return 1;
    }
    free(at);
    if (changes[i].change == lock_all) {
        munlockall();
    }
    char *again = malloc(KEPT);
    field_of(fresh, "VmFlags:", fresh_flags, sizeof fresh_flags);
    field_of(again, "VmFlags:", flags, sizeof flags);
    if (strcmp(flags, fresh_flags) != 0 || numa_mode_of(again) != numa_mode_of(fresh)) {
        printf("%s: was%s, is%s", changes[i].name, fresh_flags, flags);
        return 1;
    }
    alarm(20);
    memset(again, 2, KEPT);
    pid_t child = fork();
    if (child == 0) {
        _exit(again[0] == 2 && again[KEPT / 2] == 2 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status != 0;
}

/* ---- the family ---- */

static int family(void) {
    void *aligned = NULL;
    int wrong = posix_memalign(&aligned, 64, 3 * MIB);
    void *all[] = {malloc(3 * MIB),
                   calloc(3, MIB),
                   realloc(NULL, 3 * MIB),
                   reallocarray(NULL, 3, MIB),
                   memalign(64, 3 * MIB),
                   aligned_alloc(64, 3 * MIB),
                   valloc(3 * MIB),
                   pvalloc(3 * MIB - 1),
                   aligned};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        wrong |= !is_placed(all[i]) || malloc_usable_size(all[i]) < 3 * MIB;
        free(all[i]);
    }
    return wrong;
}

/* Contents survive on the way through all sizes; whoever allocates. */
static int grow(void) {
    static const size_t sizes[] = {100, 900 << 10, 8 << 20, 900 << 10, 3 << 20, 200, 1 << 20};
    size_t was = 16;
    unsigned char *at = malloc(was);
    memset(at, 1, was);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        at = realloc(at, sizes[i]);
        size_t least = was < sizes[i] ? was : sizes[i];
        for (size_t j = 0; j < least; j++) {
            if (at[j] != i + 1) {
                printf("byte %zu of %zu was lost on the way to %zu\n", j, was, sizes[i]);
                return 1;
            }
        }
        was = sizes[i];
        memset(at, (int)i + 2, was);
    }
    free(at);
    return 0;
}

/* ---- growth ---- */

static long huge_kib(const void *at) {
    char text[64];
    field_of(at, "AnonHugePages:", text, sizeof text);
    return strtol(text, NULL, 10);
}

static int grow_to_huge_pages(void) {
    size_t most = 64 * MIB;
    char *at = malloc(MIB);
    for (size_t nbytes = MIB; nbytes < most; nbytes += MIB) {
        memset(at + nbytes - MIB, 1, MIB);
        at = realloc(at, nbytes + MIB);
    }
    char *mapped = mmap(NULL, MIB, RW, PRIVATE, -1, 0);
    mapped = mremap(mapped, MIB, most, MREMAP_MAYMOVE);
    memset(mapped, 1, most);
    printf("%ld %ld\n", huge_kib(at + most / 2) >> 10, huge_kib(mapped + most / 2) >> 10);
    return 0;
}

static int allocate_much(void) {
    return malloc(64 * MIB) == NULL;
}

/* ---- forks ---- */

/* The handlers are those of a library, which registers them before unimem's own begins. They wait
 * for a thread that allocates. */
static int fork_with_handlers(void) {
    alarm(20);
    pid_t child = fork();
    if (child == 0) {
        void *at = malloc(2 * MIB);
        _exit(is_placed(at) ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status != 0;
}

/* fork waits for the lock of all files, which a thread has that flushes them, and allocates. */
static volatile int is_flushing;
static pid_t flushed_child;

static ssize_t allocate_late(void *cookie, const char *text, size_t nbytes) {
    (void)cookie, (void)text;
    is_flushing = 1;
    usleep(200000); /* meanwhile, the other thread forks */
    free(realloc(memset(malloc(2 * MIB), 1, 2 * MIB), 4 * MIB));
    return (ssize_t)nbytes;
}

static void *fork_meanwhile(void *nothing) {
    while (!is_flushing) {
        usleep(1000);
    }
    flushed_child = fork();
    if (flushed_child == 0) {
        void *at = malloc(2 * MIB);
        _exit(is_placed(at) && getpwnam("root") != NULL ? 0 : 1);
    }
    return nothing;
}

static int fork_beside_a_flush(void) {
    cookie_io_functions_t functions = {.write = allocate_late};
    FILE *file = fopencookie(NULL, "w", functions);
    pthread_t other;
    int status = -1;
    alarm(60);
    fputs("text", file);
    pthread_create(&other, NULL, fork_meanwhile, NULL);
    fflush(NULL);
    pthread_join(other, NULL);
    waitpid(flushed_child, &status, 0);
    void *at = malloc(2 * MIB);
    return status != 0 || !is_placed(at);
}

/* ---- signals ---- */

static void leave(int number) {
    (void)number;
    _exit(0);
}

extern volatile int raises __attribute__((weak)); /* of a library, whose malloc raises a signal */

/* The handler ends the process within setenv, which has a lock of the C library. */
static int exit_in_setenv(void) {
    signal(SIGALRM, leave);
    raises = 1;
    setenv("ADVERSARY", "longer than nothing", 1);
    return 1;
}

static void allocate(int number) {
    (void)number;
    free(malloc(2 * MIB));
    munmap(mmap(NULL, 2 * MIB, RW, PRIVATE, -1, 0), 2 * MIB);
}

static void *disturb(void *thread) {
    for (int i = 0; i < 20000; i++) {
        pthread_kill(*(pthread_t *)thread, SIGUSR1);
    }
    return NULL;
}

/* A handler allocates, whatever it interrupts. */
static int allocate_in_handlers(void) {
    pthread_t self = pthread_self(), other;
    alarm(60);
    signal(SIGUSR1, allocate);
    pthread_create(&other, NULL, disturb, &self);
    for (int i = 0; i < 500; i++) {
        allocate(0);
    }
    pthread_join(other, NULL);
    return 0;
}

int main(int n, char **words) {
    const char *name = n > 1 ? words[1] : "";
    static const struct {
        const char *name;
        int (*run)(void);
    } cases[] = {{"family", family},
                 {"grow", grow},
                 {"grow_to_huge_pages", grow_to_huge_pages},
                 {"allocate_much", allocate_much},
                 {"fork_with_handlers", fork_with_handlers},
                 {"fork_beside_a_flush", fork_beside_a_flush},
                 {"exit_in_setenv", exit_in_setenv},
                 {"allocate_in_handlers", allocate_in_handlers}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(name, cases[i].name) == 0) {
            return cases[i].run();
        }
    }
    for (int i = 0; i < (int)(sizeof changes / sizeof changes[0]); i++) {
        if (strcmp(name, changes[i].name) == 0) {
            return reuse(i);
        }
        printf(n > 1 ? "" : "%s ", changes[i].name);
    }
    return n > 1 ? 2 : 0;
}
