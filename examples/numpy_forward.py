"""A forward pass in NumPy on unimem's memory: the place and lifetime of each value of a runtime.

weights: the model. float32 stays where the file is mapped; q8_0 is dequantized here, once.
scratch: one set of buffers, overwritten by every layer of every token, and the logits.
history: the KV cache, one row longer with every token.

All memory is taken at start-up. From then on every operation writes into an existing buffer
(``out=``): no value is allocated, and nothing moves. Run it to read a story.
"""

import numpy as np

import unimem as um
from unimem.engine import embedded_model
from unimem.engine.text.tokenizer import Tokenizer

NAMES = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
NAMES += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])  # a block: its scale, and 32 values of a byte


def layout_for(weights: um.Weights) -> um.Layout:
    """Make the three tapes for a model with its full context."""
    d = um.ModelDims.from_weights(weights)
    values = weights.by_type().get("q8_0", 0) // Q8_0.itemsize * 32
    turns = d.max_seq_len * d.head_dim  # of rotary embedding; the bytes added are for numbers
    history = um.plan(weights, ctx=d.max_seq_len, kv_dtype="f32").history_bytes
    return um.Layout(4 * (values + turns) + 64, um.ForwardScratch.bytes_needed(d) + 128, history)


def as_float32(tensor: um.Tensor, tape: um.Tape) -> np.ndarray:
    """View a tensor in the mapped file, or dequantize it onto the tape."""
    if tensor.type == "f32":
        return tensor.as_array()
    blocks = tensor.as_array().view(Q8_0)
    values = tape.take((*blocks.shape, 32))
    np.multiply(blocks["qs"], blocks["d"][..., None], out=values, dtype=np.float32)
    return values.reshape(tensor.shape)


class Llama:
    """A plain llama and one conversation, on a layout that is borrowed. For one thread."""

    def __init__(self, weights: um.Weights, layout: um.Layout) -> None:
        meta, tape = weights.metadata, layout.weights
        if meta["general.architecture"] != "llama" or weights.by_type().keys() - {"f32", "q8_0"}:
            raise ValueError(f"expected a llama of f32 and q8_0: {weights}")
        self.layout, self.dims = layout, um.ModelDims.from_weights(weights)
        d, head = self.dims, self.dims.head_dim
        t = {name: as_float32(tensor, tape) for name, tensor in weights.tensors.items()}
        self.layers = [{n: t[f"blk.{i}.{n}.weight"] for n in NAMES} for i in range(d.num_layers)]
        self.embedding, self.last_norm = t["token_embd.weight"], t["output_norm.weight"]
        self.output = t.get("output.weight", self.embedding)
        # NumPy would convert numbers to arrays each time.
        c = tape.take(4)
        c[:] = meta["llama.attention.layer_norm_rms_epsilon"], 1 / d.hidden_size, head**-0.5, 0.5
        self.eps, self.per_hidden, self.scale, self.half = (c[i, ...] for i in range(4))
        # Rotary embedding turns pairs of values, as a product of complex numbers does.
        rates = meta.get("llama.rope.freq_base", 1e4) ** -(np.arange(0, head, 2) / head)
        self.turns = tape.take((d.max_seq_len, head // 2), np.complex64)
        self.turns[:] = np.exp(1j * np.outer(np.arange(d.max_seq_len), rates))

        self.buffers = b = um.ForwardScratch(d, tape=layout.scratch)
        self.number, self.chosen = layout.scratch.take(()), layout.scratch.take((), np.intp)
        layout.scratch.keep()
        # Several heads of queries share one of keys and values: [kv heads, queries, head_dim].
        self.q, self.mixed = (x.reshape(d.num_kv_heads, -1, head) for x in (b.q, b.attention))
        self.k, self.v = (x.reshape(1, -1, head) for x in (b.k, b.v))
        self.kv = um.KVCache.for_dims(d, dtype="f32", tape=layout.history)
        layout.attach(self.kv)
        layout.freeze()  # from now on, taking memory raises

    def prefill(self, tokens: list[int]) -> np.ndarray:
        """Compute tokens; return the logits [vocab] of the last one, in the one logits vector."""
        b, used, limit = self.buffers, self.kv.seq_len, self.dims.max_seq_len
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.dims.vocab_size:
            raise ValueError(f"expected ids below {self.dims.vocab_size}, got {tokens}")
        if used + len(tokens) > limit:
            raise um.CacheFull(f"{limit - used} more tokens fit", limit, used, len(tokens))
        for token in tokens:
            self._forward(token)
        self._normalize(b.residual, self.last_norm, out=b.normalized)
        return np.matmul(self.output, b.normalized, out=b.logits)

    def generate_next_token(self) -> int:
        """Append the likeliest token, and compute its logits."""
        if self.kv.is_empty:
            raise RuntimeError("there are no logits to choose by: prefill tokens first")
        token = int(np.argmax(self.buffers.logits, out=self.chosen))
        self.prefill([token])
        return token

    def generate(self, tokens: list[int], n: int) -> list[int]:
        """Begin a new conversation, and return n tokens that go on with it."""
        self.layout.clear_talk()
        self.prefill(tokens)
        return [self.generate_next_token() for _ in range(n)]

    def _forward(self, token: int) -> None:
        b, turn = self.buffers, self.turns[self.kv.seq_len]
        np.copyto(b.residual, self.embedding[token])
        for i, w in enumerate(self.layers):
            self._normalize(b.residual, w["attn_norm"], out=b.normalized)
            np.matmul(w["attn_q"], b.normalized, out=b.q)
            np.matmul(w["attn_k"], b.normalized, out=b.k)
            np.matmul(w["attn_v"], b.normalized, out=b.v)
            for pairs in self.q.view(np.complex64), self.k.view(np.complex64):
                np.multiply(pairs, turn, out=pairs)
            self.kv.append(i, self.k, self.v)
            self._attend(*self.kv.layer(i))
            np.matmul(w["attn_output"], b.attention, out=b.projected)
            np.add(b.residual, b.projected, out=b.residual)
            self._normalize(b.residual, w["ffn_norm"], out=b.ffn_normalized)
            np.matmul(w["ffn_gate"], b.ffn_normalized, out=b.gate)
            np.matmul(w["ffn_up"], b.ffn_normalized, out=b.up)
            # gate * sigmoid(gate) is h + h * tanh(h), where h is half of gate.
            np.multiply(b.gate, self.half, out=b.gate)
            np.tanh(b.gate, out=b.gated)
            np.multiply(b.gated, b.gate, out=b.gated)
            np.add(b.gated, b.gate, out=b.gated)
            np.multiply(b.gated, b.up, out=b.gated)
            np.matmul(w["ffn_down"], b.gated, out=b.ffn_out)
            np.add(b.residual, b.ffn_out, out=b.residual)

    def _normalize(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        mean = np.matmul(x, x, out=self.number)
        mean *= self.per_hidden
        mean += self.eps
        np.divide(x, np.sqrt(mean, out=mean), out=out)
        out *= weight

    def _attend(self, keys: np.ndarray, values: np.ndarray) -> None:
        scores = self.buffers.scores[: keys.shape[2]]  # of [1, kv heads, tokens, head_dim]
        for k, v, queries, mixed in zip(keys[0], values[0], self.q, self.mixed, strict=True):
            for q, out in zip(queries, mixed, strict=True):
                np.matmul(k, q, out=scores)
                scores *= self.scale
                scores -= np.max(scores, out=self.number)
                np.exp(scores, out=scores)
                scores /= np.sum(scores, out=self.number)
                np.matmul(scores, v, out=out)


if __name__ == "__main__":
    with um.open_weights(embedded_model()) as weights, layout_for(weights) as layout:
        llama, tokenizer = Llama(weights, layout), Tokenizer.from_metadata(weights.metadata)
        prompt, addresses = tokenizer.encode("Once upon a time"), llama.buffers.addresses()
        print(tokenizer.decode([*prompt, *llama.generate(prompt, 149)]).strip())
        still = addresses == llama.buffers.addresses()
        print(f"{llama.buffers.peak_scratch_bytes:,} bytes of scratch; no buffer moved: {still}")
