/* The forward pass. Products read each row of a matrix as float32: the values of F16 and Q8_0 rows
 * are written to one small buffer first, which stays in the cache of the CPU. */
#include "llama.h"
#include "file.h"

#include <math.h>
#include <string.h>

/* ---- memory ---- */

static size_t largest(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t q_size(const llama_file *file) {
    return (size_t)file->n_heads * file->head_dim;
}

static size_t kv_size(const llama_file *file) {
    return (size_t)file->n_kv_heads * file->head_dim;
}

/* The longest row that is read as float32. */
static size_t row_size(const llama_file *file) {
    return largest(largest(file->hidden, file->inner), q_size(file));
}

/* The buffers of a llama, and how many floats each has. */
typedef struct place {
    float **out;
    size_t n;
} place;

enum { N_BUFFERS = 13 };

static void list_buffers(llama *model, const llama_file *file, place out[N_BUFFERS]) {
    const place buffers[N_BUFFERS] = {
        {&model->x, file->hidden},
        {&model->normed, file->hidden},
        {&model->q, q_size(file)},
        {&model->k, kv_size(file)},
        {&model->v, kv_size(file)},
        {&model->mixed, q_size(file)},
        {&model->added, file->hidden},
        {&model->gate, file->inner},
        {&model->up, file->inner},
        {&model->row, row_size(file)},
        {&model->turns, (size_t)file->ctx * file->head_dim},
        {&model->scores, file->ctx},
        {&model->logits, file->vocab},
    };
    memcpy(out, buffers, sizeof buffers);
}

size_t llama_scratch_bytes(const llama_file *file) {
    llama model;
    place buffers[N_BUFFERS];
    size_t nbytes = file->n_layers * sizeof(llama_layer) + 64;
    list_buffers(&model, file, buffers);
    for (size_t i = 0; i < N_BUFFERS; i++) {
        nbytes += buffers[i].n * sizeof(float) + 64; // each begins a cache line
    }
    return nbytes;
}

static um_kv_spec spec_of(const llama_file *file) {
    return (um_kv_spec){.n_layers = file->n_layers,
                        .n_kv_heads = file->n_kv_heads,
                        .head_dim = file->head_dim,
                        .batch = 1,
                        .max_seq_len = file->ctx,
                        .type = UM_F16,
                        .v_type = UM_F16};
}

um_status llama_history_bytes(const llama_file *file, size_t *out, um_error *err) {
    um_kv_spec spec = spec_of(file);
    return um_kv_storage_bytes(&spec, out, err);
}

static um_status take_cache(llama *model, um_tape *history, um_error *err) {
    um_kv_spec spec = spec_of(&model->file);
    um_kv_storage storage = {.n_rows = spec.max_seq_len, .usable_rows = spec.max_seq_len};
    size_t nbytes;
    um_status status = um_kv_storage_bytes(&spec, &nbytes, err);
    if (status == UM_OK) {
        storage.lane_stride = storage.v_lane_stride = nbytes / spec.n_layers / 2;
        status = um_tape_take(history, nbytes, 64, &storage.base, err);
    }
    return status == UM_OK ? um_kv_init(&model->kv, &spec, &storage, err) : status;
}

static um_status take_scratch(llama *model, um_tape *scratch, um_error *err) {
    place buffers[N_BUFFERS];
    void *taken;
    um_status status =
        um_tape_take(scratch, model->file.n_layers * sizeof(llama_layer), 64, &taken, err);
    if (status == UM_OK) {
        model->layers = taken;
    }
    list_buffers(model, &model->file, buffers);
    for (size_t i = 0; status == UM_OK && i < N_BUFFERS; i++) {
        status = um_tape_take(scratch, buffers[i].n * sizeof(float), 64, &taken, err);
        if (status == UM_OK) {
            *buffers[i].out = taken;
        }
    }
    return status;
}

static um_status find_weights(llama *model, um_error *err) {
    const llama_file *file = &model->file;
    size_t hidden = file->hidden, vocab = file->vocab;
    int has_output = llama_find_tensor(file, "output.weight") != NULL;
    um_status status =
        llama_find_matrix(file, "token_embd.weight", hidden, vocab, &model->embedding, err);
    model->logits_of = model->embedding;
    if (status == UM_OK && has_output) {
        status = llama_find_matrix(file, "output.weight", hidden, vocab, &model->logits_of, err);
    }
    if (status == UM_OK) {
        status = llama_find_norm(file, "output_norm.weight", &model->last_norm, err);
    }
    for (uint32_t i = 0; status == UM_OK && i < file->n_layers; i++) {
        status = llama_find_layer(file, i, &model->layers[i], err);
    }
    // A tensor that is left over, such as a bias, would be missing in the sums.
    if (status == UM_OK && file->gguf.n_tensors != 2 + 9ull * file->n_layers + (has_output != 0)) {
        status = llama_refuse(err, "tensors that this example does not know");
    }
    return status;
}

/* Rotary embedding: all angles are known before the first token. */
static void find_turns(llama *model) {
    size_t n = model->file.head_dim;
    for (size_t i = 0; i < n; i += 2) {
        float rate = powf(model->file.freq_base, -(float)i / (float)n);
        for (size_t position = 0; position < model->file.ctx; position++) {
            model->turns[position * n + i] = cosf((float)position * rate);
            model->turns[position * n + i + 1] = sinf((float)position * rate);
        }
    }
}

um_status llama_init(llama *out, const llama_file *file, um_tape *scratch, um_tape *history,
                     um_error *err) {
    llama model = {.file = *file};
    um_status status = take_scratch(&model, scratch, err);
    if (status == UM_OK) {
        status = find_weights(&model, err);
    }
    if (status == UM_OK) {
        status = take_cache(&model, history, err);
    }
    if (status == UM_OK) {
        find_turns(&model);
        *out = model;
    }
    return status;
}

/* ---- sums ---- */

static float dot(const float *a, const float *b, size_t n) {
    float sums[8] = {0}, sum = 0; // eight sums, which a compiler may make at once
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (size_t j = 0; j < 8; j++) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    for (size_t j = 0; j < 8; j++) {
        sum += sums[j];
    }
    return sum;
}

/* Returns a row as float32: where it is, or in the buffer. */
static const float *as_floats(const void *row, um_dtype type, size_t n, float *buffer) {
    if (type == UM_F32) {
        return row;
    }
    um_status status = um_convert(buffer, UM_F32, row, type, n, NULL);
    (void)status; // it fails for types and lengths only, which were checked
    return buffer;
}

static void multiply(llama *model, const llama_matrix *m, const float *x, float *out) {
    for (size_t i = 0; i < m->n_out; i++) {
        out[i] =
            dot(as_floats(m->rows + i * m->row_bytes, m->type, m->n_in, model->row), x, m->n_in);
    }
}

static void add(float *x, const float *more, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] += more[i];
    }
}

static void normalize(const llama *model, const float *weight, float *out) {
    size_t n = model->file.hidden;
    float scale = 1 / sqrtf(dot(model->x, model->x, n) / (float)n + model->file.eps);
    for (size_t i = 0; i < n; i++) {
        out[i] = model->x[i] * scale * weight[i];
    }
}

/* ---- layers ---- */

static void turn(const llama *model, uint64_t position, float *heads, size_t n) {
    size_t head_dim = model->file.head_dim;
    for (size_t i = 0; i < n; i += 2) {
        const float *by = &model->turns[position * head_dim + i % head_dim];
        float a = heads[i], b = heads[i + 1];
        heads[i] = a * by[0] - b * by[1];
        heads[i + 1] = a * by[1] + b * by[0];
    }
}

static void soften(float *scores, size_t n) {
    float most = scores[0], sum = 0;
    for (size_t i = 1; i < n; i++) {
        most = fmaxf(most, scores[i]);
    }
    for (size_t i = 0; i < n; i++) {
        scores[i] = expf(scores[i] - most);
        sum += scores[i];
    }
    for (size_t i = 0; i < n; i++) {
        scores[i] /= sum;
    }
}

/* Mixes the values of all tokens, for one head of the query. */
static void attend(llama *model, uint32_t layer, uint32_t head) {
    const llama_file *file = &model->file;
    const um_kv *kv = &model->kv;
    size_t n = file->head_dim, first = head / (file->n_heads / file->n_kv_heads) * n * 2;
    const unsigned char *k = um_kv_lane(kv, layer, 0, 0), *v = um_kv_lane(kv, layer, 1, 0);
    uint64_t n_tokens = um_kv_layer_len(kv, layer, NULL);
    const float *q = model->q + head * n;
    float *mixed = model->mixed + head * n;
    for (uint64_t t = 0; t < n_tokens; t++) {
        const float *key = as_floats(k + t * kv->row_bytes + first, UM_F16, n, model->row);
        model->scores[t] = dot(key, q, n) / sqrtf((float)n);
    }
    soften(model->scores, n_tokens);
    memset(mixed, 0, n * sizeof *mixed);
    for (uint64_t t = 0; t < n_tokens; t++) {
        const float *value = as_floats(v + t * kv->v_row_bytes + first, UM_F16, n, model->row);
        for (size_t i = 0; i < n; i++) {
            mixed[i] += model->scores[t] * value[i];
        }
    }
}

static um_status compute_layer(llama *model, uint32_t number, um_error *err) {
    const llama_layer *layer = &model->layers[number];
    const llama_file *file = &model->file;
    uint64_t position = um_kv_layer_len(&model->kv, number, NULL); // nothing is trimmed
    if (position == file->ctx) {                                   // the cache knows what to say
        return um_kv_append(&model->kv, number, model->k, model->v, UM_F32, UM_KV_TOKEN_MAJOR, 1,
                            err);
    }
    normalize(model, layer->attn_norm, model->normed);
    multiply(model, &layer->q, model->normed, model->q);
    multiply(model, &layer->k, model->normed, model->k);
    multiply(model, &layer->v, model->normed, model->v);
    turn(model, position, model->q, q_size(file));
    turn(model, position, model->k, kv_size(file));
    um_status status =
        um_kv_append(&model->kv, number, model->k, model->v, UM_F32, UM_KV_TOKEN_MAJOR, 1, err);
    if (status != UM_OK) {
        return status;
    }
    for (uint32_t head = 0; head < file->n_heads; head++) {
        attend(model, number, head);
    }
    multiply(model, &layer->output, model->mixed, model->added);
    add(model->x, model->added, file->hidden);
    normalize(model, layer->ffn_norm, model->normed);
    multiply(model, &layer->gate, model->normed, model->gate);
    multiply(model, &layer->up, model->normed, model->up);
    for (size_t i = 0; i < file->inner; i++) {
        model->gate[i] *= model->up[i] / (1 + expf(-model->gate[i]));
    }
    multiply(model, &layer->down, model->gate, model->added);
    add(model->x, model->added, file->hidden);
    return UM_OK;
}

um_status llama_forward(llama *model, uint32_t token, um_error *err) {
    const llama_matrix *m = &model->embedding;
    if (token >= m->n_out) {
        if (err != NULL) {
            *err = (um_error){.status = UM_E_INVALID, .what = "token"};
        }
        return UM_E_INVALID;
    }
    const float *x = as_floats(m->rows + token * m->row_bytes, m->type, m->n_in, model->row);
    memcpy(model->x, x, m->n_in * sizeof *x);
    for (uint32_t i = 0; i < model->file.n_layers; i++) {
        um_status status = compute_layer(model, i, err);
        if (status != UM_OK) {
            um_kv_rollback(&model->kv); // a token counts in all layers, or in none
            return status;
        }
    }
    normalize(model, model->last_norm, model->normed);
    multiply(model, &model->logits_of, model->normed, model->logits);
    return UM_OK;
}

uint32_t llama_likeliest(const llama *model) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < model->file.vocab; i++) {
        best = model->logits[i] > model->logits[best] ? i : best;
    }
    return best;
}
