"""Count how well the next layer's router foresees the experts that it will choose.

    python tools/expert_recall.py FOLDER

It is applied to the state of this layer, before its experts and after them. The mixture is the one
that bench/unimem_bench/trained_mixture.py trains into the folder, unless it is there. For each room
for experts it also says which share of the misses is foreseen, and what is read for nothing.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem_bench.suites.stream import ROOMS, TinyPieces
from unimem_bench.trained_mixture import TRAINED, _Trainer, trained_mixture

torch: Any = import_module("torch")  # which may be missing where types are checked

N_TOKENS, N_WARM = 1536, 256
MOST = 12  # experts that are foreseen at most
N, USED, LAYERS = TRAINED.experts, TRAINED.used, TRAINED.layers


def trainer(found: dict[str, NDArray[Any]]) -> _Trainer:
    """Return the trained model as it was while it was trained."""
    made = object.__new__(_Trainer)
    made.torch, made.F = torch, torch.nn.functional
    made.weights = {k: torch.from_numpy(v) for k, v in found.items() if v.dtype == np.float32}
    for i in range(LAYERS):
        for name in ("gate", "up"):
            key = f"blk.{i}.ffn_{name}_exps"
            made.weights[key] = made.weights[key].flatten(0, 1)
        key = f"blk.{i}.ffn_down_exps"
        made.weights[key] = made.weights[key].permute(1, 0, 2).flatten(1)
    return made


def foresee(model: _Trainer, x: Any, layer: int) -> NDArray[Any]:
    """Return the experts that a layer's router prefers for a state, the likeliest first."""
    y = model._norm(x, f"blk.{layer}.ffn_norm")
    scores = model.F.linear(y, model.weights[f"blk.{layer}.ffn_gate_inp"])
    return np.asarray(scores.topk(MOST, -1)[1][0])


def routes(model: _Trainer, tokens: Any) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return the experts used, by token and layer, and those foreseen for each layer but one."""
    used: list[NDArray[Any]] = []
    foreseen: dict[str, list[NDArray[Any]]] = {"before its experts": [], "after them": []}
    x = model.F.embedding(tokens[None], model.weights["token_embd"])
    for i in range(LAYERS):
        for name, states in foreseen.items():
            if name.startswith("before"):
                x = model._attend(x, f"blk.{i}")
            else:
                x, experts, _ = model._mix(x, f"blk.{i}")
                used.append(np.asarray(experts[0]))
            if i + 1 < LAYERS:
                states.append(foresee(model, x, i + 1))
    return np.stack(used, 1), {name: np.stack(each, 1) for name, each in foreseen.items()}


def count_misses(used: NDArray[Any], foreseen: NDArray[Any], room: int) -> tuple[float, float]:
    """Return the share of misses that is foreseen, and the reads for nothing for a miss."""
    n_misses = n_foreseen = n_wrong = 0
    n = LAYERS * N
    with tempfile.TemporaryDirectory() as name, TinyPieces(Path(name), n, n * room // 100) as cache:
        for token, layers in enumerate(used):
            for i, experts in enumerate(layers):
                ids = [i * N + int(each) for each in experts]
                if token >= N_WARM:
                    wanted = [i * N + int(each) for each in foreseen[token, i - 1, :USED]]
                    gone = {each for each in ids if cache.pieces.slot(each) is None}
                    read = {each for each in wanted if i and cache.pieces.slot(each) is None}
                    n_misses += len(gone)
                    n_foreseen += len(gone & read)
                    n_wrong += len(read - gone)
                cache.call(ids)
    return n_foreseen / n_misses, n_wrong / n_misses


def main() -> None:
    """Print what is counted."""
    found = trained_mixture(Path(sys.argv[1]))
    model = trainer(found)
    with torch.no_grad():
        parts = torch.from_numpy(found["tokens"][:N_TOKENS]).split(TRAINED.ctx)
        made = [routes(model, part) for part in parts]
    used = np.concatenate([each for each, _ in made])
    distinct = np.mean([len(set(used[:75, i].ravel())) for i in range(LAYERS)])
    print(f"{distinct:.1f} of {N} experts of a layer are used in 75 tokens")
    for name in made[0][1]:
        foreseen = np.concatenate([each[name] for _, each in made])
        for n in (USED // 2, USED, MOST):
            both = foreseen[:, :, :n, None] == used[:, 1:, None, :]
            print(f"{name}: {n} foreseen, recall {both.sum(-2).mean():.2f}")
        for room in ROOMS:
            right, wrong = count_misses(used, foreseen, room)
            print(f"  room {room} %: {right:.2f} of the misses, and {wrong:.2f} for nothing")


if __name__ == "__main__":
    main()
