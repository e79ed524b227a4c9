/* The interface of file.c to llama.c. Tensors stay in the file's memory. */
#ifndef LLAMA_FILE_H
#define LLAMA_FILE_H

#include "llama.h"

/* Fills err, and returns UM_E_FORMAT. */
um_status llama_refuse(um_error *err, const char *what);
/* Returns NULL for no such tensor. */
const um_gguf_tensor *llama_find_tensor(const llama_file *file, const char *name);
um_status llama_find_matrix(const llama_file *file, const char *name, size_t n_in, size_t n_out,
                            llama_matrix *out, um_error *err);
um_status llama_find_norm(const llama_file *file, const char *name, const float **out,
                          um_error *err);
um_status llama_find_layer(const llama_file *file, uint32_t number, llama_layer *out,
                           um_error *err);

#endif
