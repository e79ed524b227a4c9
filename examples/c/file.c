/* The sizes of a llama, and the places of its tensors, from a GGUF file. */
#include "file.h"

#include <stdio.h>
#include <string.h>

um_status llama_refuse(um_error *err, const char *what) {
    if (err != NULL) {
        *err = (um_error){.status = UM_E_FORMAT, .what = what};
    }
    return UM_E_FORMAT;
}

static const um_gguf_kv *find_key(const llama_file *file, const char *key) {
    size_t nbytes = strlen(key);
    for (uint64_t i = 0; i < file->gguf.n_kv; i++) {
        const um_gguf_kv *kv = &file->gguf.kv[i];
        if (kv->key_nbytes == nbytes && memcmp(file->bytes + kv->key_offset, key, nbytes) == 0) {
            return kv;
        }
    }
    return NULL;
}

static um_status read_count(const llama_file *file, const char *key, uint32_t *out, um_error *err) {
    const um_gguf_kv *kv = find_key(file, key);
    if (kv == NULL || kv->type != UM_GGUF_UINT32) {
        return llama_refuse(err, key);
    }
    memcpy(out, file->bytes + kv->value_offset, sizeof *out);
    return *out > 0 && *out < 1u << 24 ? UM_OK : llama_refuse(err, key);
}

static um_status read_float(const llama_file *file, const char *key, float *out, um_error *err) {
    const um_gguf_kv *kv = find_key(file, key);
    if (kv == NULL || kv->type != UM_GGUF_FLOAT32) {
        return llama_refuse(err, key);
    }
    memcpy(out, file->bytes + kv->value_offset, sizeof *out);
    return *out > 0 ? UM_OK : llama_refuse(err, key);
}

static int is_llama(const llama_file *file) {
    const um_gguf_kv *kv = find_key(file, "general.architecture");
    return kv != NULL && kv->type == UM_GGUF_STRING && kv->value_nbytes == 5 &&
           memcmp(file->bytes + kv->value_offset, "llama", 5) == 0;
}

static um_status read_sizes(llama_file *file, um_error *err) {
    const struct {
        const char *key;
        uint32_t *out;
    } counts[] = {
        {"llama.block_count", &file->n_layers},
        {"llama.attention.head_count", &file->n_heads},
        {"llama.attention.head_count_kv", &file->n_kv_heads},
        {"llama.embedding_length", &file->hidden},
        {"llama.feed_forward_length", &file->inner},
        {"llama.vocab_size", &file->vocab},
        {"llama.context_length", &file->ctx},
        {"llama.rope.dimension_count", &file->head_dim},
    };
    um_status status = UM_OK;
    for (size_t i = 0; status == UM_OK && i < sizeof counts / sizeof *counts; i++) {
        status = read_count(file, counts[i].key, counts[i].out, err);
    }
    if (status == UM_OK) {
        status = read_float(file, "llama.attention.layer_norm_rms_epsilon", &file->eps, err);
    }
    if (status == UM_OK) {
        status = read_float(file, "llama.rope.freq_base", &file->freq_base, err);
    }
    if (status == UM_OK && (file->n_heads % file->n_kv_heads != 0 || file->head_dim % 2 != 0)) {
        status = llama_refuse(err, "heads that cannot be shared, or turned");
    }
    return status;
}

um_status llama_file_parse(llama_file *out, const void *bytes, uint64_t nbytes, um_error *err) {
    llama_file file = {.bytes = bytes, .nbytes = nbytes};
    um_status status = um_gguf_parse(&file.gguf, bytes, nbytes, nbytes, err);
    if (status != UM_OK) {
        return status;
    }
    status = is_llama(&file) ? read_sizes(&file, err) : llama_refuse(err, "general.architecture");
    if (status == UM_OK && find_key(&file, "llama.rope.scaling.type") != NULL) {
        status = llama_refuse(err, "llama.rope.scaling.type");
    }
    if (status == UM_OK) {
        *out = file;
    } else {
        um_gguf_free(&file.gguf);
    }
    return status;
}

void llama_file_free(llama_file *file) {
    um_gguf_free(&file->gguf);
}

const um_gguf_tensor *llama_find_tensor(const llama_file *file, const char *name) {
    size_t nbytes = strlen(name);
    for (uint64_t i = 0; i < file->gguf.n_tensors; i++) {
        const um_gguf_tensor *tensor = &file->gguf.tensors[i];
        if (tensor->name_nbytes == nbytes &&
            memcmp(file->bytes + tensor->name_offset, name, nbytes) == 0) {
            return tensor;
        }
    }
    return NULL;
}

/* ggml's number of a type as unimem's. */
static int type_of(uint32_t number, um_dtype *out) {
    static const struct {
        uint32_t number;
        um_dtype type;
    } types[] = {{0, UM_F32}, {1, UM_F16}, {8, UM_Q8_0}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i].number == number) {
            *out = types[i].type;
            return 1;
        }
    }
    return 0;
}

um_status llama_find_matrix(const llama_file *file, const char *name, size_t n_in, size_t n_out,
                            llama_matrix *out, um_error *err) {
    const um_gguf_tensor *tensor = llama_find_tensor(file, name);
    um_dtype type;
    if (tensor == NULL || tensor->ne[0] != n_in || tensor->ne[1] != n_out) {
        return llama_refuse(err, "a matrix is missing, or has another shape");
    }
    if (!type_of(tensor->type, &type)) {
        return llama_refuse(err, "a matrix that is not of F32, F16 or Q8_0");
    }
    size_t row_bytes = n_in / um_dtype_block_values(type) * um_dtype_block_bytes(type);
    *out = (llama_matrix){file->bytes + tensor->offset, type, n_in, n_out, row_bytes};
    return UM_OK;
}

um_status llama_find_norm(const llama_file *file, const char *name, const float **out,
                          um_error *err) {
    llama_matrix norm;
    um_status status = llama_find_matrix(file, name, file->hidden, 1, &norm, err);
    if (status == UM_OK && norm.type != UM_F32) {
        status = llama_refuse(err, "a norm that is not of F32");
    }
    if (status == UM_OK) {
        *out = (const float *)(const void *)norm.rows;
    }
    return status;
}

um_status llama_find_layer(const llama_file *file, uint32_t number, llama_layer *out,
                           um_error *err) {
    size_t hidden = file->hidden, q = (size_t)file->n_heads * file->head_dim,
           kv = (size_t)file->n_kv_heads * file->head_dim, inner = file->inner;
    const struct {
        const char *name;
        llama_matrix *out;
        size_t n_in, n_out;
    } matrices[] = {
        {"attn_q", &out->q, hidden, q},          {"attn_k", &out->k, hidden, kv},
        {"attn_v", &out->v, hidden, kv},         {"attn_output", &out->output, q, hidden},
        {"ffn_gate", &out->gate, hidden, inner}, {"ffn_up", &out->up, hidden, inner},
        {"ffn_down", &out->down, inner, hidden},
    };
    char name[64];
    um_status status = UM_OK;
    for (size_t i = 0; status == UM_OK && i < sizeof matrices / sizeof *matrices; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", number, matrices[i].name);
        status = llama_find_matrix(file, name, matrices[i].n_in, matrices[i].n_out, matrices[i].out,
                                   err);
    }
    if (status == UM_OK) {
        snprintf(name, sizeof name, "blk.%u.attn_norm.weight", number);
        status = llama_find_norm(file, name, &out->attn_norm, err);
    }
    if (status == UM_OK) {
        snprintf(name, sizeof name, "blk.%u.ffn_norm.weight", number);
        status = llama_find_norm(file, name, &out->ffn_norm, err);
    }
    return status;
}
