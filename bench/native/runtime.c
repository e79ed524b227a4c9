/* The runtime of examples/c, once on memory of unimem and once on memory of malloc: the loops are
 * the same, and so are the tape and the cache over it. */
#include "runtime.h"

#include "llama.h"
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WEIGHTS, SCRATCH, HISTORY, N_PARTS };

struct bench_runtime {
    int on_heap;
    um_block blocks[N_PARTS]; /* of unimem */
    void *heap[N_PARTS];      /* of malloc */
    um_tape tapes[N_PARTS];
    llama_file file;
    llama model;
};

static um_status refuse(int os_errno) {
    errno = os_errno == 0 ? EIO : os_errno;
    return UM_E_IO;
}

static um_status read_on_heap(bench_runtime *r, int fd, size_t nbytes) {
    size_t done = 0;
    r->heap[WEIGHTS] = malloc(nbytes);
    if (r->heap[WEIGHTS] == NULL) {
        return refuse(ENOMEM);
    }
    while (done < nbytes) {
        ssize_t n = read(fd, (char *)r->heap[WEIGHTS] + done, nbytes - done);
        if (n <= 0) {
            return refuse(n < 0 ? errno : EIO);
        }
        done += (size_t)n;
    }
    return llama_file_parse(&r->file, r->heap[WEIGHTS], nbytes, NULL);
}

static um_status map_weights(bench_runtime *r, int fd, size_t nbytes) {
    um_block *block = &r->blocks[WEIGHTS];
    um_status status =
        um_block_map_file(block, fd, 0, nbytes, UM_ACCESS_READ, UM_CAT_WEIGHTS, NULL);
    if (status == UM_OK) {
        status = um_block_warm(block, 0, nbytes, 1, NULL, NULL);
    }
    return status == UM_OK ? llama_file_parse(&r->file, block->base, nbytes, NULL) : status;
}

static um_status open_weights(bench_runtime *r, const char *path) {
    struct stat found;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return refuse(errno);
    }
    um_status status = fstat(fd, &found) == 0 ? UM_OK : refuse(errno);
    if (status == UM_OK) {
        size_t nbytes = (size_t)found.st_size;
        status = r->on_heap ? read_on_heap(r, fd, nbytes) : map_weights(r, fd, nbytes);
    }
    close(fd);
    return status;
}

/* Makes a tape whose memory is touched. */
static um_status make_tape(bench_runtime *r, int part, size_t nbytes) {
    um_block_options options = {.category = part == HISTORY ? UM_CAT_HISTORY : UM_CAT_SCRATCH};
    um_block *block = &r->blocks[part];
    if (r->on_heap) {
        nbytes = (nbytes + 63) / 64 * 64;
        r->heap[part] = aligned_alloc(64, nbytes);
        if (r->heap[part] == NULL) {
            return refuse(ENOMEM);
        }
        memset(r->heap[part], 0, nbytes);
        return um_tape_init(&r->tapes[part], r->heap[part], nbytes, NULL);
    }
    um_status status = um_block_map(block, nbytes, &options, NULL);
    if (status == UM_OK) {
        status = um_block_warm(block, 0, block->nbytes, 1, NULL, NULL);
    }
    return status == UM_OK ? um_tape_init(&r->tapes[part], block->base, block->nbytes, NULL)
                           : status;
}

bench_runtime *bench_runtime_open(const char *path, int on_heap) {
    size_t history;
    bench_runtime *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return NULL;
    }
    r->on_heap = on_heap;
    errno = EINVAL;
    um_status status = open_weights(r, path);
    if (status == UM_OK) {
        status = llama_history_bytes(&r->file, &history, NULL);
    }
    if (status == UM_OK) {
        status = make_tape(r, SCRATCH, llama_scratch_bytes(&r->file));
    }
    if (status == UM_OK) {
        status = make_tape(r, HISTORY, history);
    }
    if (status == UM_OK) {
        status = llama_init(&r->model, &r->file, &r->tapes[SCRATCH], &r->tapes[HISTORY], NULL);
    }
    if (status != UM_OK) {
        int why = errno;
        bench_runtime_close(r);
        errno = why;
        return NULL;
    }
    return r;
}

void bench_runtime_close(bench_runtime *r) {
    um_kv_free(&r->model.kv);
    llama_file_free(&r->file);
    for (int part = 0; part < N_PARTS; part++) {
        um_status status = um_block_unmap(&r->blocks[part], NULL);
        (void)status; // of a process that ends soon
        free(r->heap[part]);
    }
    free(r);
}

double bench_runtime_talk(bench_runtime *r, uint32_t first, size_t n, uint32_t *out) {
    um_kv_clear(&r->model.kv);
    um_status status = llama_forward(&r->model, first, NULL);
    double begin = bench_cpu_now();
    for (size_t i = 0; status == UM_OK && i < n; i++) {
        out[i] = llama_likeliest(&r->model);
        status = llama_forward(&r->model, out[i], NULL);
    }
    double seconds = bench_cpu_now() - begin;
    if (status != UM_OK) {
        errno = EINVAL;
        return -1;
    }
    return seconds;
}
