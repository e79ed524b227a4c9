# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A llama in Cython on unimem's memory, whose loops run in threads without the interpreter's lock.

examples/c has the same in C, with comments on what the steps are. Weights stay where the file is
mapped; the buffers of a token lie on a tape; the KV cache grows as tokens come.
"""
import numpy as np
import unimem

from cython.parallel cimport prange, threadid
from libc.math cimport exp, sqrt
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from unimem cimport KVCache, Tape
from unimem cimport native as um

cdef struct Matrix:
    const char *rows  # [n_out, n_in]
    um.um_dtype type
    size_t n_in, n_out, row_bytes

cdef struct Layer:
    const float *attn_norm
    const float *ffn_norm
    Matrix q, k, v, output, gate, up, down

cdef dict TYPES = {"f32": um.UM_F32, "f16": um.UM_F16, "q8_0": um.UM_Q8_0}


cdef Matrix matrix_of(dict tensors, str name) except *:
    cdef Matrix m
    tensor = tensors.pop(name)
    if tensor.type not in TYPES:
        raise ValueError(f"{name}: expected {', '.join(TYPES)}, got {tensor.type}")
    m.rows, m.type = <const char *><uintptr_t>tensor.address, TYPES[tensor.type]
    m.n_in, m.n_out = tensor.ne[0], tensor.ne[1] if len(tensor.ne) > 1 else 1
    m.row_bytes = tensor.nbytes // m.n_out
    return m


cdef const float *norm_of(dict tensors, str name) except NULL:
    cdef Matrix m = matrix_of(tensors, name)
    if m.type != um.UM_F32:
        raise ValueError(f"{name}: expected f32")
    return <const float *>m.rows


cdef inline float dot(const float *a, const float *b, size_t n) noexcept nogil:
    cdef float sums[8]
    cdef float total = 0
    cdef size_t i, j
    memset(sums, 0, sizeof(sums))
    for i in range(0, n - n % 8, 8):
        for j in range(8):
            sums[j] += a[i + j] * b[i + j]
    for i in range(n - n % 8, n):
        total += a[i] * b[i]
    for j in range(8):
        total += sums[j]
    return total


cdef inline const float *as_floats(const void *row, um.um_dtype type, size_t n,
                                   float *room) noexcept nogil:
    """A row as float32: where it is, or in the room."""
    if type == um.UM_F32:
        return <const float *>row
    um.um_convert(room, um.UM_F32, row, type, n, NULL)
    return room


cdef void normalize(const float *x, const float *weight, float eps, size_t n,
                    float *out) noexcept nogil:
    cdef float scale = 1 / sqrt(dot(x, x, n) / n + eps)
    cdef size_t i
    for i in range(n):
        out[i] = x[i] * scale * weight[i]


cdef void soften(float *scores, uint64_t n) noexcept nogil:
    cdef float most = scores[0], total = 0
    cdef uint64_t i
    for i in range(1, n):
        most = max(most, scores[i])
    for i in range(n):
        scores[i] = exp(scores[i] - most)
        total += scores[i]
    for i in range(n):
        scores[i] /= total


cdef class Llama:
    """One conversation with a llama, of tensors of F32, F16 and Q8_0. For one thread.

    Parameters
    ----------
    weights : unimem.Weights
        Opened, and open as long as this is used.
    threads : int, default 1
        Threads that share each product.
    """

    cdef readonly object weights
    cdef readonly KVCache kv
    cdef readonly Tape scratch
    cdef int threads
    cdef size_t hidden, inner, n_heads, n_kv_heads, head_dim, n_layers, ctx, row_size
    cdef float eps
    cdef Layer *layers
    cdef Matrix embedding, logits_of
    cdef const float *last_norm
    cdef float *x
    cdef float *normed
    cdef float *q
    cdef float *k
    cdef float *v
    cdef float *mixed
    cdef float *added
    cdef float *gate
    cdef float *up
    cdef float *turns  # [ctx, head_dim]
    cdef float *rooms  # [threads, row_size]
    cdef float *scores  # [threads, ctx]
    cdef float[::1] logits

    def __init__(self, weights, int threads=1):
        meta, d = weights.metadata, unimem.ModelDims.from_weights(weights)
        if meta["general.architecture"] != "llama" or "llama.rope.scaling.type" in meta:
            raise ValueError(f"expected a plain llama, got {weights}")
        self.weights, self.threads = weights, max(threads, 1)
        self.hidden, self.inner, self.ctx = d.hidden_size, d.intermediate_size, d.max_seq_len
        self.n_heads, self.n_kv_heads = d.num_attention_heads, d.num_kv_heads
        self.head_dim, self.n_layers = d.head_dim, d.num_layers
        self.row_size = max(self.hidden, self.inner, self.n_heads * self.head_dim)
        self.eps = meta["llama.attention.layer_norm_rms_epsilon"]
        self.take(d.vocab_size)
        self.find(dict(weights.tensors))
        rates = meta.get("llama.rope.freq_base", 1e4) ** -(np.arange(0, d.head_dim, 2) / d.head_dim)
        turns = np.exp(1j * np.outer(np.arange(d.max_seq_len), rates)).astype("complex64")
        cdef const float[:, ::1] found = turns.view("float32")
        memcpy(self.turns, &found[0, 0], self.ctx * self.head_dim * sizeof(float))
        self.kv = unimem.KVCache.for_dims(d, grow=True)
        self.scratch.freeze()  # from now on, taking raises

    cdef int take(self, size_t vocab) except -1:
        """Take all buffers; the places are in the order of their sizes."""
        cdef size_t q = self.n_heads * self.head_dim, kv = self.n_kv_heads * self.head_dim, i
        cdef float **places[12]
        cdef size_t *sizes = [
            self.hidden, self.hidden, q, kv, kv, q, self.hidden, self.inner, self.inner,
            self.ctx * self.head_dim, self.threads * self.row_size, self.threads * self.ctx]
        places[:] = [&self.x, &self.normed, &self.q, &self.k, &self.v, &self.mixed, &self.added,
                     &self.gate, &self.up, &self.turns, &self.rooms, &self.scores]
        cdef size_t total = self.n_layers * sizeof(Layer) + (vocab + 16) * sizeof(float) + 14 * 64
        for i in range(12):
            total += sizes[i] * sizeof(float)
        self.scratch = unimem.Tape(total, name="llama", warm=True)
        self.layers = <Layer *>self.scratch.take_raw(self.n_layers * sizeof(Layer))
        self.logits = self.scratch.take_floats(vocab)
        for i in range(12):
            places[i][0] = <float *>self.scratch.take_raw(sizes[i] * sizeof(float))
        return 0

    cdef int find(self, dict tensors) except -1:
        """Find all weights, and refuse others."""
        cdef Layer *layer
        self.embedding = self.logits_of = matrix_of(tensors, "token_embd.weight")
        if "output.weight" in tensors:
            self.logits_of = matrix_of(tensors, "output.weight")
        self.last_norm = norm_of(tensors, "output_norm.weight")
        for i in range(self.n_layers):
            layer, blk = &self.layers[i], f"blk.{i}"
            layer.attn_norm = norm_of(tensors, f"{blk}.attn_norm.weight")
            layer.ffn_norm = norm_of(tensors, f"{blk}.ffn_norm.weight")
            layer.q = matrix_of(tensors, f"{blk}.attn_q.weight")
            layer.k = matrix_of(tensors, f"{blk}.attn_k.weight")
            layer.v = matrix_of(tensors, f"{blk}.attn_v.weight")
            layer.output = matrix_of(tensors, f"{blk}.attn_output.weight")
            layer.gate = matrix_of(tensors, f"{blk}.ffn_gate.weight")
            layer.up = matrix_of(tensors, f"{blk}.ffn_up.weight")
            layer.down = matrix_of(tensors, f"{blk}.ffn_down.weight")
        if tensors:
            raise ValueError(f"expected no other tensors, got {', '.join(tensors)}")
        return 0

    cdef void multiply(self, const Matrix *m, const float *x, float *out) noexcept nogil:
        cdef Py_ssize_t i
        cdef float *room
        for i in prange(<Py_ssize_t>m.n_out, schedule="static", num_threads=self.threads):
            room = self.rooms + threadid() * self.row_size
            out[i] = dot(as_floats(m.rows + i * m.row_bytes, m.type, m.n_in, room), x, m.n_in)

    cdef void turn(self, uint64_t position, float *heads, size_t n) noexcept nogil:
        cdef const float *by
        cdef float a, b
        cdef size_t i
        for i in range(0, n, 2):
            by = self.turns + position * self.head_dim + i % self.head_dim
            a, b = heads[i], heads[i + 1]
            heads[i], heads[i + 1] = a * by[0] - b * by[1], a * by[1] + b * by[0]

    cdef void attend(self, uint32_t layer) noexcept nogil:
        """Each thread has heads of its own, and room for their scores."""
        cdef uint64_t n = 0
        cdef const char *k = <const char *>self.kv.rows(layer, False, &n)
        cdef const char *v = <const char *>self.kv.rows(layer, True, &n)
        cdef Py_ssize_t head
        for head in prange(<Py_ssize_t>self.n_heads, schedule="static", num_threads=self.threads):
            self.attend_head(head, k, v, n, self.scores + threadid() * self.ctx,
                             self.rooms + threadid() * self.row_size)

    cdef void attend_head(self, size_t head, const char *k, const char *v, uint64_t n,
                          float *scores, float *room) noexcept nogil:
        cdef size_t size = self.head_dim, row = self.kv.kv.row_bytes, i
        cdef size_t first = head // (self.n_heads // self.n_kv_heads) * size * 2
        cdef float *mixed = self.mixed + head * size
        cdef const float *value
        cdef uint64_t t
        for t in range(n):
            scores[t] = dot(as_floats(k + t * row + first, um.UM_F16, size, room),
                            self.q + head * size, size) / sqrt(<float>size)
        soften(scores, n)
        memset(mixed, 0, size * sizeof(float))
        for t in range(n):
            value = as_floats(v + t * row + first, um.UM_F16, size, room)
            for i in range(size):
                mixed[i] += scores[t] * value[i]

    cdef int compute(self, uint32_t number, uint64_t position) except -1 nogil:
        cdef Layer *layer = &self.layers[number]
        cdef size_t i
        normalize(self.x, layer.attn_norm, self.eps, self.hidden, self.normed)
        self.multiply(&layer.q, self.normed, self.q)
        self.multiply(&layer.k, self.normed, self.k)
        self.multiply(&layer.v, self.normed, self.v)
        self.turn(position, self.q, self.n_heads * self.head_dim)
        self.turn(position, self.k, self.n_kv_heads * self.head_dim)
        self.kv.append_rows(number, self.k, self.v, um.UM_F32, 1)
        self.attend(number)
        self.multiply(&layer.output, self.mixed, self.added)
        for i in range(self.hidden):
            self.x[i] += self.added[i]
        normalize(self.x, layer.ffn_norm, self.eps, self.hidden, self.normed)
        self.multiply(&layer.gate, self.normed, self.gate)
        self.multiply(&layer.up, self.normed, self.up)
        for i in range(self.inner):
            self.gate[i] *= self.up[i] / (1 + exp(-self.gate[i]))
        self.multiply(&layer.down, self.gate, self.added)
        for i in range(self.hidden):
            self.x[i] += self.added[i]
        return 0

    cdef int forward(self, size_t token, uint64_t position) except -1 nogil:
        cdef const Matrix *m = &self.embedding
        cdef uint32_t i
        memcpy(self.x, as_floats(m.rows + token * m.row_bytes, m.type, m.n_in, self.rooms),
               self.hidden * sizeof(float))
        for i in range(self.n_layers):
            self.compute(i, position)
        normalize(self.x, self.last_norm, self.eps, self.hidden, self.normed)
        self.multiply(&self.logits_of, self.normed, &self.logits[0])
        return 0

    def prefill(self, tokens):
        """Compute tokens; return the logits [vocab] of the last one, in the one logits vector.

        Raises
        ------
        ValueError
            There is no such token.
        unimem.CacheFull
            There is no room for one more.
        """
        cdef uint64_t position
        cdef size_t token
        for token in tokens:
            if token >= self.embedding.n_out:
                raise ValueError(f"expected ids below {self.embedding.n_out}, got {token}")
            position = self.kv.next_position
            if position == self.ctx:
                raise unimem.CacheFull(f"{self.ctx} tokens are all", self.ctx, self.ctx, 1)
            try:
                with nogil:
                    self.forward(token, position)
            except BaseException:
                self.kv.rollback()  # a token counts in all layers, or in none
                raise
        return np.asarray(self.logits)

    def generate(self, tokens, int n):
        """Return the n likeliest tokens that go on with these."""
        found, logits = [], self.prefill(tokens)
        for _ in range(n):
            token = int(logits.argmax())
            found.append(token)
            self.prefill([token])
        return found

    def close(self):
        """Give the memory back, but for that of logits which are still there."""
        self.kv.close()
        self.logits = None
        self.scratch.close()
