/* Where parts of pieces lie: whole units, and the place that most of them have in their files. */
#include "test.h"
#include "unimem_pieces.h"

enum { N = 6 };

typedef struct plan {
    um_pieces_pool pools[2];
    uint32_t pool_of[N];
    um_pieces_range ranges[2 * N];
    um_pieces_spec spec;
} plan;

/* Pieces of two parts in pool 0; the first parts begin at these offsets. */
static void fill_plan(plan *p, const uint64_t first[N], const uint64_t second[N], size_t nbytes) {
    *p = (plan){.pools = {{.n_parts = 2, .part_nbytes = {nbytes, 100}}}};
    for (size_t i = 0; i < N; i++) {
        p->ranges[2 * i].offset = first[i];
        p->ranges[2 * i + 1].offset = second[i];
    }
    p->spec = (um_pieces_spec){.fds = (const int[]){-1},
                               .n_files = 1,
                               .pools = p->pools,
                               .n_pools = 1,
                               .n_pieces = N,
                               .pool_of = p->pool_of,
                               .ranges = p->ranges};
}

TEST(places) {
    static const uint64_t whole[N] = {0, 4096, 8192, 12288, 16384, 20480};
    static const uint64_t usual[N] = {32, 4128, 8224, 64, 4095, 32};
    static const uint64_t crooked[N] = {1, 4097, 8193, 12289, 16385, 20481};
    static const struct {
        const uint64_t *first, *second;
        size_t nbytes, offsets[2], stride;
    } cases[] = {
        {whole, whole, 8192, {0, 8192}, 12288},
        {whole, whole, 8193, {0, 12288}, 16384},
        {usual, whole, 8192, {32, 12288}, 16384}, /* one part begins at 4095: 3 units */
        {usual, usual, 8192, {32, 12320}, 20480},
        {crooked, whole, 4096, {0, 8192}, 12288}, /* no place that suits an array */
        {whole, crooked, 4096, {0, 4096}, 8192},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        plan p;
        fill_plan(&p, cases[i].first, cases[i].second, cases[i].nbytes);
        CHECK_OK(um_pieces_layout(&p.spec, &test_err));
        CHECK_EQ(p.pools[0].part_offset[0], cases[i].offsets[0]);
        CHECK_EQ(p.pools[0].part_offset[1], cases[i].offsets[1]);
        CHECK_EQ(p.pools[0].stride, cases[i].stride);
    }
}

TEST(pools_are_laid_out_by_themselves) {
    static const uint64_t first[N] = {0, 32, 0, 32, 0, 32}, second[N] = {0};
    plan p;
    fill_plan(&p, first, second, 1000);
    p.pools[1] = p.pools[0];
    p.spec.n_pools = 2;
    for (uint32_t i = 0; i < N; i++) {
        p.pool_of[i] = i % 2;
    }
    CHECK_OK(um_pieces_layout(&p.spec, &test_err));
    CHECK_EQ(p.pools[0].part_offset[0], 0);
    CHECK_EQ(p.pools[1].part_offset[0], 32);
}

TEST(refused) {
    static const uint64_t offsets[N] = {0};
    enum {
        NO_FILES,
        NO_POOLS,
        NO_PIECES,
        NO_PARTS,
        MANY_PARTS,
        EMPTY,
        HUGE,
        POOL,
        FILES,
        FAR,
        END
    };
    for (int i = 0; i < END; i++) {
        plan p, before;
        fill_plan(&p, offsets, offsets, 1000);
        p.spec.n_files = i == NO_FILES ? 0 : 1;
        p.spec.n_pools = i == NO_POOLS ? 0 : 1;
        p.spec.n_pieces = i == NO_PIECES ? 0 : N;
        p.pools[0].n_parts = i == NO_PARTS ? 0 : i == MANY_PARTS ? UM_PIECES_MAX_PARTS + 1 : 2;
        p.pools[0].part_nbytes[1] = i == EMPTY ? 0 : i == HUGE ? SIZE_MAX / 4 : 100;
        p.pool_of[N - 1] = i == POOL;
        p.ranges[2 * N - 1].file = i == FILES;
        p.ranges[2 * N - 1].offset = i == FAR ? UINT64_MAX : 0;
        before = p;
        CHECK_INVALID(um_pieces_layout(&p.spec, &test_err));
        CHECK(memcmp(&p, &before, sizeof p) == 0);
    }
}
