"""ggml and its CPU backend, for unimem: `unimem_ggml.binding` has the functions."""
