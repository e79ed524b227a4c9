/* Paged KV memory: an input is a program of calls, which runs beside a model in which no sequence
 * shares anything. The block tables that a program hands in have any numbers. */
#include "fuzz.h"

#include "unimem.h"

enum { N_SEQS = 4, MAX_BLOCKS = 12, MAX_BLOCK_TOKENS = 8, MAX_TOKENS = 96, N_LAYERS = 2 };
enum { N_HEADS = 2, DIM = 2, MAX_APPENDED = 15 };

/* ---- the program ---- */

typedef struct program {
    const uint8_t *bytes;
    size_t nbytes, at;
} program;

static uint32_t next(program *p) {
    return p->at < p->nbytes ? p->bytes[p->at++] : 0;
}

/* ---- the model ---- */

typedef struct model {
    bool there;
    uint64_t len[N_LAYERS];
    float rows[N_LAYERS][2][MAX_TOKENS][N_HEADS][DIM];
} model;

typedef struct world {
    um_paged paged;
    um_paged_spec spec;
    um_paged_seq seqs[N_SEQS];
    model models[N_SEQS];
    bool is_full[MAX_BLOCKS]; /* of blocks that are held or cached: as they were last held */
} world;

/* float16 represents all of them. */
static float value_of(uint32_t token, uint32_t layer, int v, uint32_t head, uint32_t i) {
    float value = (float)(token + 256 * layer + 512 * (uint32_t)v + 1024 * head);
    return i == 0 ? value : -value;
}

/* Gathers a layer into memory of its exact size. */
static float *gather(const um_paged_seq *seq, uint32_t layer, int v, uint64_t n) {
    float *out = malloc(n * N_HEADS * DIM * sizeof *out);
    PROMISED(out != NULL);
    um_status status = um_paged_gather(seq, layer, v, n, out, n * DIM * sizeof *out, UM_F32, NULL);
    PROMISED(status == UM_OK);
    return out;
}

static void check_tokens(const world *w, int i) {
    const model *m = &w->models[i];
    for (uint32_t layer = 0; m->there && layer < N_LAYERS; layer++) {
        uint64_t n = m->len[layer];
        PROMISED(um_paged_layer_len(&w->seqs[i], layer) == n);
        for (int v = 0; v < 2; v++) {
            float *found = gather(&w->seqs[i], layer, v, n);
            for (uint64_t t = 0; t < n * N_HEADS; t++) {
                const float *row = m->rows[layer][v][t % n][t / n];
                PROMISED(memcmp(found + t * DIM, row, DIM * sizeof *row) == 0);
            }
            free(found);
        }
    }
}

static uint64_t shorter_of(const model *m) {
    return m->len[0] < m->len[1] ? m->len[0] : m->len[1];
}

/* Each block is held, evictable or free, and the tables say by how many sequences. */
static void check_blocks(world *w) {
    uint32_t holders[MAX_BLOCKS] = {0}, n_held = 0, n_evictable = 0, n = w->spec.n_blocks;
    for (int i = 0; i < N_SEQS; i++) {
        const um_paged_seq *seq = &w->seqs[i];
        for (uint32_t j = 0; w->models[i].there && j < seq->n_blocks; j++) {
            PROMISED(seq->table[j] >= 0);
            uint32_t block = (uint32_t)seq->table[j];
            PROMISED(block < n);
            bool is_full = (j + 1) * w->spec.block_tokens <= shorter_of(&w->models[i]);
            w->is_full[block] = is_full || (holders[block] != 0 && w->is_full[block]);
            holders[block]++;
        }
    }
    for (uint32_t block = 0; block < n; block++) {
        PROMISED(um_paged_n_holders(&w->paged, block) == holders[block]);
        n_held += holders[block] != 0;
        n_evictable += holders[block] == 0 && um_paged_is_cached(&w->paged, block);
    }
    PROMISED(um_paged_n_in_use(&w->paged) == n_held);
    PROMISED(w->paged.n_evictable == n_evictable);
    PROMISED(w->paged.n_free == n - n_held - n_evictable);
}

/* ---- the calls ---- */

static bool layers_differ(const model *m) {
    return m->len[0] != m->len[1];
}

/* K or V of n tokens from a number on, as an append takes them. */
static float *make_rows(uint32_t token, uint32_t n, uint32_t layer, uint32_t n_layers, int v,
                        um_kv_order order) {
    float *rows = malloc(n_layers * n * N_HEADS * DIM * sizeof *rows), *out = rows;
    PROMISED(rows != NULL);
    for (uint32_t l = layer; l < layer + n_layers; l++) {
        for (uint32_t at = 0; at < n * N_HEADS; at++) {
            bool by_head = order == UM_KV_HEAD_MAJOR;
            uint32_t head = by_head ? at / n : at % N_HEADS, t = by_head ? at % n : at / N_HEADS;
            for (uint32_t i = 0; i < DIM; i++) {
                *out++ = value_of((token + t) % 256, l, v, head, i);
            }
        }
    }
    return rows;
}

static void note_tokens(model *m, uint32_t token, uint32_t n, uint32_t layer) {
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t j = 0; j < 2 * N_HEADS * DIM; j++) {
            uint32_t v = j / (N_HEADS * DIM), head = j / DIM % N_HEADS, i = j % DIM;
            m->rows[layer][v][m->len[layer] + t][head][i] =
                value_of((token + t) % 256, layer, (int)v, head, i);
        }
    }
    m->len[layer] += n;
}

/* Appends n tokens to one layer, or one token to all. */
static void append(world *w, int i, program *p, bool to_all) {
    um_paged_seq *seq = &w->seqs[i];
    model *m = &w->models[i];
    uint32_t layer = to_all ? 0 : next(p) % N_LAYERS, n_layers = to_all ? N_LAYERS : 1;
    uint32_t token = next(p), n = to_all ? 1 : next(p) % (MAX_APPENDED + 1);
    um_kv_order order = !to_all && token % 2 ? UM_KV_TOKEN_MAJOR : UM_KV_HEAD_MAJOR;
    float *k = make_rows(token, n, layer, n_layers, 0, order);
    float *v = make_rows(token, n, layer, n_layers, 1, order);
    uint32_t per_block = w->spec.block_tokens;
    uint64_t needed = (m->len[layer] + n + per_block - 1) / per_block;
    uint64_t asked = needed > seq->n_blocks ? needed - seq->n_blocks : 0;
    asked += n != 0 && um_paged_will_copy(seq, layer) != 0;
    bool is_full = asked > w->spec.n_blocks - um_paged_n_in_use(&w->paged);
    um_status expected = to_all && layers_differ(m) ? UM_E_STATE : is_full ? UM_E_FULL : UM_OK;
    um_status status = to_all ? um_paged_append_all(seq, k, v, UM_F32, NULL)
                              : um_paged_append(seq, layer, k, v, UM_F32, order, n, NULL);
    PROMISED(status == expected);
    for (uint32_t l = layer; status == UM_OK && l < layer + n_layers; l++) {
        note_tokens(m, token, n, l);
    }
    free(k);
    free(v);
}

static void fork_to(world *w, int from, int to) {
    um_paged_seq made;
    um_status status = um_paged_seq_fork(&made, &w->seqs[from], NULL);
    PROMISED(status == (layers_differ(&w->models[from]) ? UM_E_STATE : UM_OK));
    if (status == UM_OK) {
        um_paged_seq_free(&w->seqs[to]);
        w->seqs[to] = made;
        w->models[to] = w->models[from];
    }
}

/* Begins a sequence with any table of full blocks and of numbers that are wrong. What its blocks
 * hold is its tokens. */
static void begin_with_table(world *w, int i, program *p) {
    static const int32_t wrong[] = {-1, INT32_MIN, INT32_MAX, MAX_BLOCKS};
    int32_t table[MAX_BLOCKS + 2];
    uint32_t n = next(p) % (MAX_BLOCKS + 2);
    bool valid = n <= w->spec.n_blocks, all_full = true, seen[MAX_BLOCKS] = {false};
    for (uint32_t j = 0; j < n; j++) {
        uint32_t number = next(p), block = number % w->spec.n_blocks;
        table[j] = number < 0xf0 ? (int32_t)block : wrong[number % 4];
        all_full = all_full && (number >= 0xf0 || w->is_full[block]);
        valid = valid && number < 0xf0 && !seen[block] &&
                (um_paged_n_holders(&w->paged, block) != 0 || um_paged_is_cached(&w->paged, block));
        seen[block] = seen[block] || number < 0xf0;
    }
    if (valid && !all_full) {
        return; /* the caller's duty */
    }
    um_paged_seq made;
    PROMISED(um_paged_seq_init(&made, &w->paged, table, n, NULL) == (valid ? UM_OK : UM_E_INVALID));
    if (!valid) {
        return;
    }
    model *m = &w->models[i];
    um_paged_seq_free(&w->seqs[i]);
    w->seqs[i] = made;
    m->there = true;
    m->len[0] = m->len[1] = (uint64_t)n * w->spec.block_tokens;
    for (uint32_t j = 0; j < N_LAYERS * 2; j++) {
        uint64_t len = m->len[0];
        float *found = gather(&made, j / 2, (int)(j % 2), len);
        for (uint64_t t = 0; t < len * N_HEADS; t++) {
            memcpy(m->rows[j / 2][j % 2][t % len][t / len], found + t * DIM, DIM * sizeof *found);
        }
        free(found);
    }
}

static void crop(world *w, int i, uint64_t n) {
    model *m = &w->models[i];
    um_status expected = layers_differ(m) ? UM_E_STATE : n > m->len[0] ? UM_E_INVALID : UM_OK;
    PROMISED(um_paged_crop(&w->seqs[i], n, NULL) == expected);
    if (expected == UM_OK) {
        m->len[0] = m->len[1] = n;
    }
}

static void cache_block(world *w, uint32_t block) {
    um_status expected = block >= w->spec.n_blocks                   ? UM_E_INVALID
                         : um_paged_n_holders(&w->paged, block) == 0 ? UM_E_STATE
                                                                     : UM_OK;
    PROMISED(um_paged_cache(&w->paged, block, NULL) == expected);
}

static void run_step(world *w, program *p) {
    uint32_t step = next(p);
    int i = (int)(step / 16 % N_SEQS);
    um_paged_seq *seq = &w->seqs[i];
    model *m = &w->models[i];
    if (!m->there) {
        PROMISED(um_paged_seq_init(seq, &w->paged, NULL, 0, NULL) == UM_OK);
        *m = (model){.there = true};
    }
    switch (step % 16) {
    case 0:
        um_paged_seq_clear(seq);
        m->len[0] = m->len[1] = 0;
        break;
    case 1:
        um_paged_rollback(seq);
        m->len[0] = m->len[1] = shorter_of(m);
        break;
    case 2:
        crop(w, i, next(p) % (MAX_TOKENS + 2));
        break;
    case 3:
    case 4:
        fork_to(w, i, (i + 1) % N_SEQS);
        break;
    case 5:
        um_paged_uncache(&w->paged, next(p) % (MAX_BLOCKS + 2));
        break;
    case 6:
        cache_block(w, next(p) % (MAX_BLOCKS + 2));
        break;
    case 7:
        begin_with_table(w, i, p);
        break;
    case 8:
    case 9:
        append(w, i, p, true);
        break;
    default:
        append(w, i, p, false);
    }
    check_blocks(w);
    check_tokens(w, i);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    static world w;
    program p = {bytes, nbytes, 0};
    uint32_t sizes = next(&p), types = next(&p);
    memset(w.seqs, 0, sizeof w.seqs);
    memset(w.is_full, 0, sizeof w.is_full);
    w.spec = (um_paged_spec){.n_layers = N_LAYERS,
                             .n_kv_heads = N_HEADS,
                             .head_dim = DIM,
                             .n_blocks = 1 + sizes % MAX_BLOCKS,
                             .block_tokens = 1 + sizes / 16 % MAX_BLOCK_TOKENS,
                             .type = types % 2 ? UM_F16 : UM_F32,
                             .v_type = types % 4 / 2 ? UM_F16 : UM_F32};
    size_t storage_nbytes = 0;
    PROMISED(um_paged_storage_bytes(&w.spec, &storage_nbytes, NULL) == UM_OK);
    void *storage = aligned_alloc(64, storage_nbytes);
    PROMISED(storage != NULL);
    memset(storage, 0, storage_nbytes);
    PROMISED(um_paged_init(&w.paged, &w.spec, storage, NULL) == UM_OK);
    while (p.at < nbytes) {
        run_step(&w, &p);
    }
    for (int i = 0; i < N_SEQS; i++) {
        check_tokens(&w, i);
        um_paged_seq_free(&w.seqs[i]);
        w.models[i].there = false;
    }
    check_blocks(&w);
    um_paged_free(&w.paged);
    free(storage);
    return 0;
}
