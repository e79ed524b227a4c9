"""Asks a `Llama` of llama-cpp-python, with `LlamaStoreCache` or without: for llama_prefixes.py.

``PYTHON tools/llama_binding.py JSON`` in a Python that has llama-cpp-python; `paths` are where
unimem and what it needs are found.
"""

from __future__ import annotations

import importlib
import json
import site
import sys
import time
from typing import Any


def main(model: str, prompt: str, store: str, paths: list[str], threads: int = 2) -> None:
    """Print the answer, and the seconds of its parts, in JSON."""
    for path in paths:
        site.addsitedir(path)  # an editable install is found by its .pth file
    llama_cpp: Any = importlib.import_module("llama_cpp")
    llama = llama_cpp.Llama(
        model, n_ctx=4096, n_threads=threads, n_threads_batch=threads, seed=1, verbose=False
    )
    found: dict[str, Any] = {"version": llama_cpp.__version__, "taken": 0.0, "n_taken": 0}

    def ask() -> str:
        answer = llama.create_completion(prompt, max_tokens=24, temperature=0)
        text = answer["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    if not store:
        tokens = llama.tokenize(prompt.encode())
        begin = time.perf_counter()
        llama.eval(tokens)
        found["prefill"] = time.perf_counter() - begin
        llama.reset()
        found["text"] = ask()
    else:
        import unimem
        from unimem.llama_cpp import LlamaStoreCache

        class Timed(LlamaStoreCache):
            def __getitem__(self, key: Any) -> Any:
                begin = time.perf_counter()
                state = super().__getitem__(key)
                llama.load_state(state)
                found["taken"], found["n_taken"] = time.perf_counter() - begin, state.n_tokens
                return state

        with unimem.KVStore(store, ram_bytes=0) as opened:
            llama.set_cache(Timed(llama, opened))
            found["text"] = ask()
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
