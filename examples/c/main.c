/* llama MODEL.gguf N TOKEN...: appends N tokens to the given ones, and prints their numbers.
 *
 * All memory is taken and touched before the first token. After the prompt nothing is allocated and
 * no page faults; the counts are printed to stderr. */
#include "llama.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PROMPT = 4096 };

/* The three blocks, and the tapes over two of them. */
typedef struct memory {
    um_block weights, scratch, history;
    um_tape scratch_tape, history_tape;
} memory;

static um_status map_file(um_block *out, const char *path, um_error *err) {
    struct stat found;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &found) != 0) {
        *err = (um_error){.status = UM_E_IO, .what = "the model cannot be opened"};
        if (fd >= 0) {
            close(fd);
        }
        return UM_E_IO;
    }
    um_status status =
        um_block_map_file(out, fd, 0, (size_t)found.st_size, UM_ACCESS_READ, UM_CAT_WEIGHTS, err);
    close(fd);
    if (status == UM_OK) {
        status = um_block_warm(out, 0, out->nbytes, 1, NULL, err);
    }
    return status;
}

static um_status map_tape(um_block *block, um_tape *tape, size_t nbytes, um_category category,
                          um_error *err) {
    um_block_options options = {.category = category};
    um_status status = um_block_map(block, nbytes, &options, err);
    if (status == UM_OK) {
        status = um_block_warm(block, 0, block->nbytes, 1, NULL, err);
    }
    return status == UM_OK ? um_tape_init(tape, block->base, block->nbytes, err) : status;
}

static um_status map_all(memory *m, const llama_file *file, um_error *err) {
    size_t history;
    um_status status = llama_history_bytes(file, &history, err);
    if (status == UM_OK) {
        status =
            map_tape(&m->scratch, &m->scratch_tape, llama_scratch_bytes(file), UM_CAT_SCRATCH, err);
    }
    return status == UM_OK ? map_tape(&m->history, &m->history_tape, history, UM_CAT_HISTORY, err)
                           : status;
}

static um_status unmap_all(memory *m, um_error *err) {
    um_block *blocks[] = {&m->history, &m->scratch, &m->weights};
    um_status first = UM_OK;
    for (size_t i = 0; i < 3; i++) {
        um_status status = um_block_unmap(blocks[i], first == UM_OK ? err : NULL);
        first = first == UM_OK ? status : first;
    }
    return first;
}

static long count_faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Prints each token when it is known. The first one is computed before anything is counted: code
 * that has not run yet is not in memory either. */
static um_status go_on(llama *model, unsigned n, um_error *err) {
    um_counters before = {0}, after;
    long faults = 0;
    double begin = 0;
    for (unsigned i = 0; i < n; i++) {
        uint32_t token = llama_likeliest(model);
        printf("%u\n", token);
        um_status status = llama_forward(model, token, err);
        if (status != UM_OK) {
            return status;
        }
        if (i == 0) {
            um_counters_read(&before);
            begin = now();
            faults = count_faults();
        }
    }
    double seconds = now() - begin;
    faults = count_faults() - faults;
    um_counters_read(&after);
    if (n > 1) {
        fprintf(stderr, "%u tokens, %.1f us each: %ld page faults, %llu allocations, %llu calls\n",
                n - 1, 1e6 * seconds / (n - 1), faults,
                (unsigned long long)(after.n_allocations - before.n_allocations),
                (unsigned long long)(after.n_os_calls - before.n_os_calls));
    }
    return UM_OK;
}

static um_status talk(llama *model, unsigned n, int n_prompt, char **prompt, um_error *err) {
    um_status status = UM_OK;
    for (int i = 0; status == UM_OK && i < n_prompt; i++) {
        status = llama_forward(model, (uint32_t)strtoul(prompt[i], NULL, 10), err);
    }
    return status == UM_OK ? go_on(model, n, err) : status;
}

static um_status run(const char *path, unsigned n, int n_prompt, char **prompt, um_error *err) {
    memory m = {0};
    llama_file file = {0};
    llama model;
    um_status status = map_file(&m.weights, path, err);
    if (status == UM_OK) {
        status = llama_file_parse(&file, m.weights.base, m.weights.nbytes, err);
    }
    if (status == UM_OK) {
        status = map_all(&m, &file, err);
    }
    if (status == UM_OK) {
        status = llama_init(&model, &file, &m.scratch_tape, &m.history_tape, err);
    }
    if (status == UM_OK) {
        status = talk(&model, n, n_prompt, prompt, err);
        um_kv_free(&model.kv);
    }
    llama_file_free(&file);
    um_status unmapped = unmap_all(&m, status == UM_OK ? err : NULL);
    return status == UM_OK ? unmapped : status; // the first failure counts
}

int main(int argc, char **argv) {
    static char buffer[1 << 16]; // stdio would allocate one
    um_error err;
    if (argc < 4 || argc > MOST_PROMPT) {
        fprintf(stderr, "expected: llama MODEL.gguf N TOKEN...\n");
        return 2;
    }
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    if (run(argv[1], (unsigned)strtoul(argv[2], NULL, 10), argc - 3, argv + 3, &err) != UM_OK) {
        fprintf(stderr, "%s: %s\n", um_status_name(err.status), err.what);
        return 1;
    }
    return 0;
}
