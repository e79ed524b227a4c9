/* A conversation with a llama, timed. */
#ifndef BENCH_RUNTIME_H
#define BENCH_RUNTIME_H

#include "memory.h"

typedef struct bench_runtime bench_runtime;

/* Opens a model: mapped by unimem, or read into memory of malloc, as all else is then. NULL with
 * errno set: it cannot be had; EINVAL: it is no model that the example computes. */
BENCH_EXPORT bench_runtime *bench_runtime_open(const char *path, int on_heap);
BENCH_EXPORT void bench_runtime_close(bench_runtime *runtime);
/* Begins a new conversation with a token, and computes the n likeliest that follow. Returns CPU
 * seconds of this thread for these, or -1 with errno set. */
BENCH_EXPORT double bench_runtime_talk(bench_runtime *runtime, uint32_t first, size_t n,
                                       uint32_t *out);

#endif
