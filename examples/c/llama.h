/* A llama in plain C on unimem's memory: the place and lifetime of its data.
 *
 * - weights: the mapped file, without a copy.
 * - scratch: the table of layers, and one set of buffers that every layer of every token writes.
 * - history: the KV cache.
 *
 * Functions follow the conventions of unimem.h. One thread uses a llama. */
#ifndef LLAMA_H
#define LLAMA_H

#include <unimem.h>
#include <unimem_formats.h>

/* A GGUF file in memory, and the sizes of its model. */
typedef struct llama_file {
    const unsigned char *bytes;
    uint64_t nbytes;
    um_gguf gguf;
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, hidden, inner, vocab;
    uint32_t ctx; /* tokens of a conversation: of the file, or fewer if the caller lowers it */
    float eps, freq_base;
} llama_file;

typedef struct llama_matrix {
    const unsigned char *rows; /* [n_out, n_in] */
    um_dtype type;
    size_t n_in, n_out, row_bytes;
} llama_matrix;

typedef struct llama_layer {
    const float *attn_norm, *ffn_norm;
    llama_matrix q, k, v, output, gate, up, down;
} llama_layer;

typedef struct llama {
    llama_file file;
    llama_layer *layers;
    llama_matrix embedding, logits_of;
    const float *last_norm;
    float *x, *normed, *q, *k, *v, *mixed, *added, *gate, *up; /* of one token */
    float *row;    /* a row of a matrix, or of the cache, as float32 */
    float *turns;  /* [ctx, head_dim / 2, 2]: cosine and sine, of each position */
    float *scores; /* [ctx] */
    float *logits; /* read: [vocab], of the last token */
    um_kv kv;      /* read */
} llama;

/* Reads the header of a file that is in memory, and stays there. It allocates tables of the header:
 * call llama_file_free, also after llama_init.
 *
 * - UM_E_FORMAT: it is no GGUF file, or no llama that this code knows; err->what says why.
 * - UM_E_NOMEM: there is no heap memory. */
um_status llama_file_parse(llama_file *out, const void *bytes, uint64_t nbytes, um_error *err);
void llama_file_free(llama_file *file);

/* How much llama_init takes of each tape. */
size_t llama_scratch_bytes(const llama_file *file);
um_status llama_history_bytes(const llama_file *file, size_t *out, um_error *err);

/* Makes a llama with an empty conversation. Call um_kv_free(&out->kv).
 *
 * - UM_E_FORMAT: a tensor is missing, or has another shape or type.
 * - UM_E_FULL, UM_E_NOMEM: a tape has no room, or the heap has no memory. */
um_status llama_init(llama *out, const llama_file *file, um_tape *scratch, um_tape *history,
                     um_error *err);

/* Appends a token to the conversation, and computes the logits of what follows.
 *
 * - UM_E_INVALID: there is no such token.
 * - UM_E_FULL: the conversation has ctx tokens. */
um_status llama_forward(llama *model, uint32_t token, um_error *err);
/* Returns the token of the largest logit. */
uint32_t llama_likeliest(const llama *model);

#endif
