/* The hooks of `unimem exec`, by names of their own beside the allocator of this program: what they
 * pass on and what they place, and sixteen threads that call them. CMakeLists.txt has the names,
 * and the settings, which are read before main. */
#define UM_TEST_WITH_HOOKS
#include "test_exec.h"

#include <sys/wait.h>

#include "stress.h"

void *hook_malloc(size_t nbytes);
void hook_free(void *address);
void *hook_calloc(size_t n, size_t nbytes);
void *hook_realloc(void *address, size_t nbytes);
void *hook_reallocarray(void *address, size_t n, size_t nbytes);
void *hook_memalign(size_t align, size_t nbytes);
void *hook_aligned_alloc(size_t align, size_t nbytes);
void *hook_valloc(size_t nbytes);
void *hook_pvalloc(size_t nbytes);
int hook_posix_memalign(void **out, size_t align, size_t nbytes);
size_t hook_malloc_usable_size(void *address);
void hook_free_sized(void *address, size_t nbytes);
void hook_free_aligned_sized(void *address, size_t align, size_t nbytes);
void *hook_mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);
void *hook_mmap64(void *at, size_t nbytes, int protection, int flags, int fd, off64_t offset);
int hook_munmap(void *at, size_t nbytes);
void *hook_mremap(void *at, size_t nbytes, size_t new_nbytes, int flags, ...);
int hook_madvise(void *at, size_t nbytes, int advice);

enum { SMALL = 1000, N_SHARED = 64 };

static const int ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS;

/* The program's own malloc does not arrive at the hooks, which leave the allocator alone then. */
static void place_the_heap(void) {
    CHECK(um__settings_now.heap_bytes == SIZE_MAX || um__settings_now.heap_bytes == MIB);
    um__settings_now.heap_bytes = um__settings_now.min_bytes;
}

TEST(large_allocations_are_placed_and_small_ones_are_passed_on) {
    REQUIRE(um__settings_now.min_bytes == MIB);
    place_the_heap();
    void *aligned = NULL;
    CHECK_EQ(hook_posix_memalign(&aligned, 64, 2 * MIB), 0);
    void *large[] = {hook_malloc(2 * MIB),
                     hook_calloc(2, MIB),
                     hook_realloc(NULL, 2 * MIB),
                     hook_reallocarray(NULL, 2, MIB),
                     hook_memalign(64, 2 * MIB),
                     hook_aligned_alloc(64, 2 * MIB),
                     hook_valloc(2 * MIB),
                     hook_pvalloc(2 * MIB - 1),
                     aligned};
    CHECK_EQ(hook_posix_memalign(&aligned, 64, SMALL), 0);
    void *small[] = {hook_malloc(SMALL),
                     hook_calloc(2, SMALL),
                     hook_realloc(NULL, SMALL),
                     hook_reallocarray(NULL, 2, SMALL),
                     hook_memalign(64, SMALL),
                     hook_aligned_alloc(64, 1024),
                     hook_valloc(SMALL),
                     hook_pvalloc(SMALL),
                     aligned};
    for (size_t i = 0; i < COUNT(large); i++) {
        CHECK(um__table_find(large[i]) != NULL && hook_malloc_usable_size(large[i]) >= 2 * MIB);
        CHECK(um__table_find(small[i]) == NULL && hook_malloc_usable_size(small[i]) >= SMALL);
    }
    hook_free_sized(large[0], 2 * MIB);
    hook_free_aligned_sized(large[5], 64, 2 * MIB);
    large[0] = large[5] = NULL;
    for (size_t i = 0; i < COUNT(large); i++) {
        hook_free(large[i]);
        hook_free(small[i]);
    }
    CHECK(hook_calloc(SIZE_MAX, 2) == NULL);
    errno = 0;
    CHECK(hook_reallocarray(NULL, SIZE_MAX, 2) == NULL && errno == ENOMEM);
}

TEST(ranges_are_placed_resized_and_given_back) {
    uint64_t before = counts_now().placed_bytes;
    unsigned char *at = hook_mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED);
    CHECK_EQ(counts_now().placed_bytes - before, 2 * MIB);
    at[0] = 7;
    at = hook_mremap(at, 2 * MIB, 4 * MIB, MREMAP_MAYMOVE);
    REQUIRE(at != MAP_FAILED && at[0] == 7);
    CHECK_EQ(hook_madvise(at, 4 * MIB, MADV_DONTNEED), 0);
    CHECK_EQ(at[0], 0);
    CHECK_EQ(hook_munmap(at, 4 * MIB), 0);
    CHECK_EQ(counts_now().placed_bytes, before);
}

/* ---- threads ---- */

/* Memory that one thread allocates and another one frees. */
static _Atomic(unsigned char *) shared[N_SHARED];

static size_t any_size(worker *w) {
    return any_of(w, 2) == 0 ? 1 + any_of(w, SMALL) : (1 + any_of(w, 4)) * MIB;
}

static unsigned char *any_memory(worker *w, size_t nbytes) {
    void *aligned = NULL;
    switch (any_of(w, 4)) {
    case 0:
        return hook_calloc(1, nbytes);
    case 1:
        CHECK_EQ(hook_posix_memalign(&aligned, 4096, nbytes), 0);
        return aligned;
    case 2:
        return hook_memalign(64, nbytes);
    default:
        return hook_malloc(nbytes);
    }
}

static void allocate_anything(worker *w) {
    size_t nbytes = any_size(w);
    unsigned char *fresh = any_memory(w, nbytes);
    CHECK(fresh != NULL && hook_malloc_usable_size(fresh) >= nbytes);
    fresh[0] = fresh[nbytes - 1] = (unsigned char)w->number;
    unsigned char *old = atomic_exchange(&shared[any_of(w, N_SHARED)], fresh);
    if (old != NULL && any_of(w, 2) == 0) {
        unsigned char first = old[0];
        old = hook_realloc(old, any_size(w));
        CHECK(old != NULL && old[0] == first);
    }
    hook_free(old);
}

static void map_anything(worker *w) {
    size_t nbytes = (2 + any_of(w, 3)) * MIB;
    unsigned char *at = hook_mmap64(NULL, nbytes, PROT_READ | PROT_WRITE, ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    at[0] = (unsigned char)w->number;
    at = hook_mremap(at, nbytes, nbytes + MIB, MREMAP_MAYMOVE);
    CHECK(at != MAP_FAILED && at[0] == w->number);
    CHECK_EQ(hook_madvise(at, MIB, MADV_DONTNEED), 0);
    CHECK_EQ(hook_munmap(at, nbytes + MIB), 0);
}

/* A child, whose other threads are gone in the middle of their calls, allocates as well. */
static void fork_once(void) {
    pid_t pid = fork();
    if (pid == 0) {
        void *large = hook_malloc(2 * MIB);
        bool placed = large != NULL && um__table_find(large) != NULL;
        hook_free(large);
        _exit(placed ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void call_anything(worker *w) {
    allocate_anything(w);
    map_anything(w);
    if (w->number == 0 && any_of(w, 20) == 0) {
        fork_once();
    }
}

TEST(all_threads_call_the_hooks) {
    place_the_heap();
    stress(call_anything);
    for (size_t i = 0; i < N_SHARED; i++) {
        hook_free(atomic_exchange(&shared[i], NULL));
    }
    CHECK(counts_now().placed_bytes <= 64 * MIB); /* what is freed is kept within bounds */
}
