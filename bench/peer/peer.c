/* What Python cannot call by ctypes without knowing llama.cpp's structs: the compiler reads their
 * layouts in llama.h. All other functions of llama.h are called as they are. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "gguf.h"
#include "llama.h"

/* As `PeerOptions` in bench/unimem_bench/llama_cpp.py; a negative number is llama.cpp's default. */
struct peer_options {
    int32_t repack;    /* weights that its CPU backend multiplies faster in another order */
    int32_t load_mode; /* llama_load_mode */
    int32_t vocab_only;
    int32_t n_ctx;
    int32_t n_ubatch;
    int32_t n_threads;
    int32_t flash; /* attention */
    int32_t type_k;
    int32_t type_v;
    int32_t keeps_all; /* whether sliding layers keep tokens that they no longer see */
    int32_t n_streams;
    int32_t lazy;         /* llama_lazy_mode */
    int32_t sees_experts; /* whether peer_experts counts; that slows it down */
};

size_t peer_options_nbytes(void) {
    return sizeof(struct peer_options);
}

/* The name of llama.cpp's version, as "b11549". */
const char *peer_version(void) {
    return LLAMA_NAME;
}

struct llama_model *peer_load(const char *path, const struct peer_options *options) {
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    if (options->repack >= 0)
        params.use_extra_bufts = options->repack != 0;
    if (options->load_mode >= 0)
        params.load_mode = (enum llama_load_mode)options->load_mode;
    if (options->lazy >= 0)
        params.lazy_mode = (enum llama_lazy_mode)options->lazy;
    if (options->vocab_only >= 0)
        params.vocab_only = options->vocab_only != 0;
    return llama_model_load_from_file(path, params);
}

#define MOST_LAYERS 256
#define MOST_EXPERTS 1024

/* The experts that were used, by layer. */
static uint8_t experts[MOST_LAYERS][MOST_EXPERTS];

/* Is asked for each tensor before it is computed, and called with those that it wants to see. */
static bool see_experts(struct ggml_tensor *tensor, bool ask, void *data) {
    int layer;
    (void)data;
    if (sscanf(tensor->name, "ffn_moe_topk-%d", &layer) != 1 || layer >= MOST_LAYERS)
        return !ask;
    for (int64_t row = 0; !ask && row < tensor->ne[1]; row++) {
        const int32_t *used = (const void *)((const char *)tensor->data + row * tensor->nb[1]);
        for (int64_t i = 0; i < tensor->ne[0]; i++)
            if (used[i] >= 0 && used[i] < MOST_EXPERTS)
                experts[layer][used[i]] = 1;
    }
    return true;
}

/* Returns how many different experts were used so far, in all layers together. */
int32_t peer_experts(void) {
    int32_t n = 0;
    for (int layer = 0; layer < MOST_LAYERS; layer++)
        for (int expert = 0; expert < MOST_EXPERTS; expert++)
            n += experts[layer][expert];
    return n;
}

struct llama_context *peer_begin(struct llama_model *model, const struct peer_options *options) {
    struct llama_context_params params = llama_context_default_params();
    if (options->n_ctx >= 0)
        params.n_ctx = (uint32_t)options->n_ctx;
    if (options->n_ubatch >= 0)
        params.n_ubatch = (uint32_t)options->n_ubatch;
    if (options->n_threads >= 0)
        params.n_threads = params.n_threads_batch = options->n_threads;
    if (options->flash >= 0)
        params.flash_attn_type = (enum llama_flash_attn_type)options->flash;
    if (options->type_k >= 0)
        params.type_k = (enum ggml_type)options->type_k;
    if (options->type_v >= 0)
        params.type_v = (enum ggml_type)options->type_v;
    if (options->keeps_all >= 0)
        params.swa_full = options->keeps_all != 0;
    if (options->n_streams >= 0) {
        params.n_seq_max = (uint32_t)options->n_streams;
        params.kv_unified = true;
    }
    if (options->sees_experts > 0)
        params.cb_eval = see_experts;
    return llama_init_from_model(model, params);
}

/* Computes tokens behind those that the context has. Returns 0, or what llama_decode says. */
int peer_decode(struct llama_context *context, int32_t *tokens, int32_t n) {
    int32_t most = (int32_t)llama_n_batch(context);
    for (int32_t begin = 0; begin < n; begin += most) {
        int32_t count = n - begin < most ? n - begin : most;
        int status = llama_decode(context, llama_batch_get_one(tokens + begin, count));
        if (status)
            return status;
    }
    return 0;
}

int peer_quantize(const char *source, const char *target, int32_t ftype, int32_t n_threads) {
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (enum llama_ftype)ftype;
    params.nthread = n_threads;
    return (int)llama_model_quantize(source, target, &params);
}

/* Reads the header of a file; gguf_free gives it back. */
struct gguf_context *peer_gguf(const char *path) {
    return gguf_init_from_file(path, (struct gguf_init_params){.no_alloc = true, .ctx = NULL});
}
