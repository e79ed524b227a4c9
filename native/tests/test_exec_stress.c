/* Sixteen threads that allocate, as any program under `unimem exec` may. */
#include "test_exec.h"

#include "stress.h"

enum { N_SHARED = 64 };

/* Memory that one thread allocates and another one frees. */
static _Atomic(unsigned char *) shared[N_SHARED];

static void pass_on(worker *w) {
    size_t nbytes = any_of(w, 3) == 0 ? 100 : (1 + any_of(w, 5)) * MIB;
    unsigned char *fresh =
        any_of(w, 2) == 0 ? um__large_malloc(nbytes) : um__large_calloc(1, nbytes);
    CHECK(fresh != NULL && um__large_usable_size(fresh) >= nbytes);
    fresh[0] = fresh[nbytes - 1] = (unsigned char)w->number;
    unsigned char *old = atomic_exchange(&shared[any_of(w, N_SHARED)], fresh);
    if (old != NULL && any_of(w, 2) == 0) {
        unsigned char first = old[0];
        old = um__large_realloc(old, (1 + any_of(w, 6)) * MIB);
        CHECK(old != NULL && old[0] == first);
    }
    um__large_free(old);
}

static void map_ranges(worker *w) {
    size_t nbytes = (2 + any_of(w, 4)) * MIB;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    unsigned char *at = um__ranges_map(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(at != MAP_FAILED);
    at[0] = at[nbytes - 1] = (unsigned char)w->number;
    CHECK(um__ranges_unmap(at + MIB, MIB) == 0); /* a hole */
    CHECK(at[0] == w->number);
    CHECK(um__ranges_advise(at, MIB, MADV_DONTNEED) == 0);
    CHECK(um__ranges_unmap(at, nbytes) == 0);
}

static void allocate_anything(worker *w) {
    pass_on(w);
    map_ranges(w);
    if (w->number == 0) {
        CHECK(counts_now().placed_bytes <= counts_now().most_bytes);
    }
}

TEST(all_threads_allocate) {
    begin_with(THP_SETTINGS);
    uint64_t before = counts_now().placed_bytes;
    stress(allocate_anything);
    for (size_t i = 0; i < N_SHARED; i++) {
        um__large_free(atomic_exchange(&shared[i], NULL));
    }
    CHECK(counts_now().placed_bytes - before <= 64 * MIB); /* what is freed is kept within bounds */
}
