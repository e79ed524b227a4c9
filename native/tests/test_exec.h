/* Helpers for the tests of native/exec: system calls that fail on demand, and a fresh start. */
#ifndef UM_TEST_EXEC_H
#define UM_TEST_EXEC_H

#include <malloc.h>
#include <sys/mman.h>

#include "exec.h"
#include "os/kernel.h"
#include "test.h"

#ifndef UM_TEST_WITH_HOOKS
um__next um__next_now; /* hooks.c, which is not here, has it in the library */
#endif

/* The errno that each call fails with, from now on; 0: none. */
static _Atomic int map_errno, bind_errno, lock_errno, hugetlb_errno, populate_errno;
/* The step of the clock at each look, and how often the kernel was advised. */
static _Atomic uint64_t clock_step_ns, n_no_huge, n_advised, n_joined;
/* The clock, and the page faults, of which later.c asks. */
static _Atomic uint64_t now_ns, faults, n_begun;

void *__real_um__sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
void *__wrap_um__sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
int __real_um__sys_advise(void *at, size_t nbytes, int advice);
int __wrap_um__sys_advise(void *at, size_t nbytes, int advice);
int __wrap_um__sys_bind(void *at, size_t nbytes, int mode, const uint64_t *nodes);
int __real_um__sys_lock(void *at, size_t nbytes);
int __wrap_um__sys_lock(void *at, size_t nbytes);
uint64_t __wrap_um__sys_cpu_ns(void);
uint64_t __wrap_um__sys_now_ns(void);
uint64_t __wrap_um__sys_faults(void);
bool __wrap_um__sys_pool(size_t page_bytes, size_t *out_total, size_t *out_unused);
void __real_um__later_begin(void);
void __wrap_um__later_begin(void);

static void *fail_with(int number) {
    errno = number;
    return NULL;
}

void *__wrap_um__sys_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if (map_errno != 0 && nbytes >= 1 << 20 && at == NULL) {
        return fail_with(map_errno);
    }
    if (hugetlb_errno != 0 && (flags & MAP_HUGETLB) != 0) {
        return fail_with(hugetlb_errno);
    }
    if (populate_errno != 0 && (flags & MAP_HUGETLB) != 0) { /* the pool promises, in any case */
        flags &= MAP_PRIVATE | MAP_ANONYMOUS;
    }
    return __real_um__sys_map(at, nbytes, protection, flags, fd, offset);
}

int __wrap_um__sys_advise(void *at, size_t nbytes, int advice) {
    n_no_huge += advice == MADV_NOHUGEPAGE;
    n_advised += advice == MADV_HUGEPAGE;
    n_joined += advice == MADV_COLLAPSE;
    if (populate_errno != 0 && advice == MADV_POPULATE_WRITE) {
        fail_with(populate_errno);
        return -1;
    }
    return __real_um__sys_advise(at, nbytes, advice);
}

/* The kernel's own is tried by tests/numa, where there are nodes. */
int __wrap_um__sys_bind(void *at, size_t nbytes, int mode, const uint64_t *nodes) {
    (void)at, (void)nbytes, (void)mode, (void)nodes;
    return bind_errno == 0 ? 0 : (fail_with(bind_errno), -1);
}

int __wrap_um__sys_lock(void *at, size_t nbytes) {
    return lock_errno == 0 ? __real_um__sys_lock(at, nbytes) : (fail_with(lock_errno), -1);
}

uint64_t __wrap_um__sys_cpu_ns(void) {
    static _Atomic uint64_t now;
    return now += clock_step_ns;
}

uint64_t __wrap_um__sys_now_ns(void) {
    return now_ns;
}

uint64_t __wrap_um__sys_faults(void) {
    return faults;
}

/* A pool of 20 pages, 3 of them unused. */
bool __wrap_um__sys_pool(size_t page_bytes, size_t *out_total, size_t *out_unused) {
    *out_total = 20;
    *out_unused = 3;
    return page_bytes == 2 << 20;
}

/* The tests take its steps. */
void __wrap_um__later_begin(void) {
    n_begun++;
}

/* Begins with these settings. The table is made once. */
static inline void begin_with(const char *text) {
    static bool has_begun;
    map_errno = bind_errno = lock_errno = hugetlb_errno = populate_errno = 0;
    clock_step_ns = n_no_huge = n_advised = n_joined = n_begun = 0;
    now_ns += 10000000000U; /* what an earlier test has found is forgotten */
    um__settings_read(&um__settings_now, text);
    um__next_now = (um__next){.malloc = malloc,
                              .calloc = calloc,
                              .realloc = realloc,
                              .free = free,
                              .memalign = memalign,
                              .aligned_alloc = aligned_alloc,
                              .posix_memalign = posix_memalign,
                              .usable_size = malloc_usable_size};
    if (!has_begun) {
        has_begun = true;
        REQUIRE(um__table_init());
    }
}

static inline um__counts counts_now(void) {
    um__table_lock();
    um__counts counts = *um__table_counts();
    um__table_unlock();
    return counts;
}

#define THP_SETTINGS "1 pages=auto page=4096 thp=2097152 min=1048576"
#define MIB ((size_t)1 << 20)

#endif
