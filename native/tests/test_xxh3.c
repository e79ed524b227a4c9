/* XXH3: every code against known hashes and against each other, and what is copied. */
#include "test.h"
#include "values/xxh3.h"

enum { MOST = 5000, LARGE = 1 << 19, HASH = 16 };

static void fill(uint8_t *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)(i % 251);
    }
}

TEST(known_hashes) {
    /* Made by xxHash 0.8.4, of bytes i modulo 251. */
    static const struct {
        size_t n;
        const char *hash;
    } cases[] = {
        {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
        {3, "e3b55f57945a17cf5f4299fc161c9cbb"},    {4, "eb70bf5fc779e9e6a6111d53e80a3db5"},
        {8, "e1e4432a62217fe4cfd50c61c8bb98c1"},    {9, "16c769d83e4aebce907931979dca3746"},
        {16, "72950631827607e2842812cc870dcae2"},   {17, "685bc458b37d057fc06e233df7729217"},
        {32, "25e7c9b3424ceed2457d9566b6fcd697"},   {33, "02175c3aabb00637e08d84951339de86"},
        {64, "9c6e140a465545e590c1971ddb04ce74"},   {65, "ebedf05eeadc28f11aee64a1615de88f"},
        {96, "c57556e9ccb97efa6e53ab55b4f5558b"},   {97, "9b09227e063da5a25b3284a61f91e97d"},
        {128, "14792fc3af88dc6c05321a0b64d67b41"},  {129, "dd5e74ac6b45f54ebc30b63382b09a3b"},
        {159, "e34482de7831e5f6aea9455053a8845b"},  {160, "4e95c1cd6dc7bb85c67fcd13c31b09f4"},
        {240, "65b5be86da5540e7c92b68e16f83bbb6"},  {241, "1da1cb61bcb8a2a102e8cd95421c6d02"},
        {1023, "4325711b0ed4d742d3d91d80ac495685"}, {1024, "d0ac1f7b93bf57b9e5d78bafa45b2aa5"},
        {1025, "2882ebca04ec915ce95c42288f28186e"}, {4096, "e12cd72144990fe57135ffa504f1bc71"},
        {4999, "7c4a8f1ccb43935f8a4f79968ef221ef"},
    };
    static uint8_t in[MOST];
    fill(in, MOST);
    for (size_t i = 0; i < COUNT(cases); i++) {
        uint8_t hash[HASH];
        char text[2 * HASH + 1];
        um_copy_hashed(NULL, in, cases[i].n, 0, hash);
        for (size_t j = 0; j < HASH; j++) {
            snprintf(text + 2 * j, 3, "%02x", hash[j]);
        }
        CHECK_STR(text, cases[i].hash);
    }
}

/* Copies n bytes with zeros by all codes; returns whether all is right. */
static int all_agree(const uint8_t *in, uint8_t *out, size_t n, size_t n_zeros) {
    uint8_t hash[HASH], first[HASH];
    um__copy_hashed(um__xxh3_code_at(0), NULL, in, n, n_zeros, first);
    for (size_t i = 0; um__xxh3_code_at(i) != NULL; i++) {
        memset(out, 0xee, n + UM__STRIPE);
        um__copy_hashed(um__xxh3_code_at(i), out, in, n, n_zeros, hash);
        if (memcmp(hash, first, HASH) != 0 || memcmp(out, in, n) != 0 ||
            !is_filled(out + n, UM__STRIPE, 0xee)) {
            return 0;
        }
    }
    return 1;
}

TEST(every_code_copies_and_hashes) {
    static _Alignas(UM__STRIPE) uint8_t in[LARGE + MOST], out[LARGE + MOST], zeros[2 * MOST];
    fill(in, sizeof in);
    size_t n_wrong = 0;
    for (size_t n = 0; n < MOST; n += n < 300 ? 1 : 37) {
        uint8_t hash[HASH], whole[HASH];
        n_wrong += !all_agree(in + n % 7, out + n % 5, n, 0) || !all_agree(in, out, n, n % 64);
        memcpy(zeros, in, n);
        memset(zeros + n, 0, MOST);
        um_copy_hashed(NULL, zeros, n + n / 2, 0, whole);
        um_copy_hashed(NULL, in, n, n / 2, hash);
        n_wrong += memcmp(hash, whole, HASH) != 0;
    }
    for (size_t i = 0; i < 3; i++) { /* past the caches, or not */
        n_wrong += !all_agree(in + 1, out + i, LARGE + 100 * i, 100 * i);
    }
    CHECK_EQ(n_wrong, 0);
}
