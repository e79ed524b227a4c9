/* Paged KV memory: random calls against a model in which no sequence shares anything. */
#include "paged_pool.h"

enum { N_SEQS = 5, N_BLOCKS = 14, MOST_TOKENS = N_BLOCKS * 5 };

typedef struct model {
    bool there;
    uint64_t len[2];
    uint32_t tokens[2][MOST_TOKENS];
} model;

static void check_model(pool *p, um_paged_seq *seqs, const model *models) {
    uint32_t holders[N_BLOCKS] = {0}, n_held = 0, n_cached = 0;
    for (int i = 0; i < N_SEQS; i++) {
        if (!models[i].there) {
            continue;
        }
        uint64_t longest =
            models[i].len[0] > models[i].len[1] ? models[i].len[0] : models[i].len[1];
        CHECK_EQ(seqs[i].n_blocks, (longest + 4) / 5);
        for (uint32_t layer = 0; layer < 2; layer++) {
            check_tokens(&seqs[i], layer, models[i].tokens[layer], models[i].len[layer]);
        }
        for (uint32_t j = 0; j < seqs[i].n_blocks; j++) {
            holders[block_of(&seqs[i], j)]++;
        }
    }
    for (uint32_t block = 0; block < N_BLOCKS; block++) {
        CHECK_EQ(um_paged_n_holders(&p->paged, block), holders[block]);
        n_held += holders[block] != 0;
        n_cached += holders[block] == 0 && um_paged_is_cached(&p->paged, block);
    }
    CHECK_EQ(um_paged_n_in_use(&p->paged), n_held);
    CHECK_EQ(p->paged.n_evictable, n_cached);
    CHECK_EQ(p->paged.n_free, N_BLOCKS - n_held - n_cached);
}

static void append_random(pool *p, um_paged_seq *seq, model *m, uint64_t *random) {
    uint32_t layer = (uint32_t)(test_random(random) % 2), tokens[MOST_TOKENS];
    uint64_t n = test_random(random) % 9, len = m->len[layer];
    for (uint64_t i = 0; i < n; i++) {
        tokens[i] = (uint32_t)(test_random(random) % 2000);
    }
    uint64_t needed = (len + n + 4) / 5;
    uint64_t asked = needed > seq->n_blocks ? needed - seq->n_blocks : 0;
    asked += n != 0 && um_paged_will_copy(seq, layer) != 0;
    um_kv_order order = test_random(random) % 2 ? UM_KV_TOKEN_MAJOR : UM_KV_HEAD_MAJOR;
    if (asked > N_BLOCKS - um_paged_n_in_use(&p->paged)) {
        CHECK_FULL(UM_PAGED_FULL, append(seq, layer, tokens, n, UM_F32, order), N_BLOCKS,
                   um_paged_n_in_use(&p->paged), asked);
        return;
    }
    CHECK_OK(append(seq, layer, tokens, n, UM_F32, order));
    for (uint64_t i = 0; i < n; i++) {
        m->tokens[layer][len + i] = tokens[i];
    }
    m->len[layer] = len + n;
}

static void fork_random(um_paged_seq *seqs, model *models, int from, int to) {
    if (models[from].len[0] != models[from].len[1]) {
        CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNEVEN,
                     um_paged_seq_fork(&seqs[to], &seqs[from], &test_err));
        return;
    }
    if (models[to].there) {
        um_paged_seq_free(&seqs[to]);
    }
    seqs[to] = fork_of(&seqs[from]);
    models[to] = models[from];
}

/* Caches a block whose tokens all layers hold, or removes any block from the cache. */
static void cache_random(pool *p, const um_paged_seq *seq, uint64_t *random) {
    uint64_t n_full = um_paged_seq_len(seq) / 5;
    if (test_random(random) % 4 == 0) {
        um_paged_uncache(&p->paged, (uint32_t)(test_random(random) % (N_BLOCKS + 1)));
    } else if (n_full != 0) {
        uint32_t block = block_of(seq, (uint32_t)(test_random(random) % n_full));
        CHECK_OK(um_paged_cache(&p->paged, block, &test_err));
    }
}

TEST(random_operations) {
    um_dtype types[] = {UM_F32, UM_F16, UM_BF16, UM_Q8_0};
    static model models[N_SEQS];
    for (uint64_t run = 0; run < 8; run++) {
        uint64_t random = run;
        AUTO_POOL p = make_pool(spec_of(types[run % 4], N_BLOCKS));
        um_paged_seq seqs[N_SEQS] = {0};
        memset(models, 0, sizeof models);
        for (int step = 0; step < 400; step++) {
            int i = (int)(test_random(&random) % N_SEQS);
            model *m = &models[i];
            if (!m->there) {
                seqs[i] = make_seq(&p);
                *m = (model){.there = true};
            }
            uint64_t shorter = m->len[0] < m->len[1] ? m->len[0] : m->len[1];
            switch (test_random(&random) % 12) {
            case 0:
                um_paged_seq_free(&seqs[i]);
                m->there = false;
                break;
            case 1:
                um_paged_rollback(&seqs[i]);
                m->len[0] = m->len[1] = shorter;
                break;
            case 2:
                if (m->len[0] == m->len[1]) {
                    m->len[0] = m->len[1] = test_random(&random) % (shorter + 1);
                    CHECK_OK(um_paged_crop(&seqs[i], m->len[0], &test_err));
                } else {
                    CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNEVEN,
                                 um_paged_crop(&seqs[i], 0, &test_err));
                }
                break;
            case 3:
                fork_random(seqs, models, i, (i + 1) % N_SEQS);
                break;
            case 4:
            case 5:
                cache_random(&p, &seqs[i], &random);
                break;
            default:
                append_random(&p, &seqs[i], m, &random);
            }
            check_model(&p, seqs, models);
        }
        for (int i = 0; i < N_SEQS; i++) {
            um_paged_seq_free(&seqs[i]);
        }
    }
}
