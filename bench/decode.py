"""Decode and prefill speed of unimem's decoder and of llama.cpp, alternating in one run.

Both run the same GGUF files: random weights in the shape of TinyLlama 1.1B, as Q8_0 and as Q4_K_M,
made once by llama.cpp's own quantizer. Both use the same number of threads, the same context, flash
attention and an f16 KV cache, and begin with the same 128 tokens. Each lives in a process of its
own that sleeps while the other one computes. The two copies of ggml must have been built with the
same instruction sets and both with tinyBLAS, or nothing is measured.

The peer is llama-cpp-python, built from source; README.md beside this file says how.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Bench, ratios

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("unimem", "llama.cpp", "llama.cpp-mapped")
FTYPES = {"q8_0": 7, "q4_k_m": 15}  # numbers of llama.cpp's llama_ftype
N_PROMPT, N_DECODE, N_CTX = 128, 8, 512

MAX_IDLE_SHARE = 0.02


class Worker:
    """A side in its own process."""

    def __init__(self, kind: str, python: Path, model: Path, threads: int) -> None:
        self.kind = kind
        self.idle_s = self.idle_cpu_s = 0.0
        # Two threads that may run anywhere may run on one core.
        bound = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.sides", kind, str(model), str(threads), str(N_CTX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | bound,
            text=True,
        )

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Send one request, wait for its answer; then the worker sleeps again."""
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None
        assert answers is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps({"do": do, **details}), file=to, flush=True)
            line = answers.readline()
        if not line:
            raise SystemExit(self._epitaph(self._process.wait()))
        answer: dict[str, Any] = json.loads(line)
        self.idle_s += answer["wait_s"]
        self.idle_cpu_s += answer["wait_cpu_s"]
        return answer

    def _epitaph(self, status: int) -> str:
        text = f"the {self.kind} side died with status {status}; see its error above"
        if status == -signal.SIGILL:
            text += (
                ". It met an illegal instruction: on CPUs with AMX some versions of GCC compile "
                "ggml's AMX code wrongly; bench/README.md has the flags that help"
            )
        return text

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()


class Conversation:
    """Measurements of one side, which walks through the context like the others do."""

    def __init__(self, worker: Worker, prompt: list[int]) -> None:
        self._worker = worker
        self._prompt = prompt
        self._length = N_CTX

    def prefill(self) -> float:
        """Start anew with the prompt; tokens/s."""
        self._length = len(self._prompt)
        return len(self._prompt) / float(
            self._worker.ask("prefill", tokens=self._prompt)["seconds"]
        )

    def decode(self) -> float:
        """Make the next few tokens; tokens/s."""
        if self._length + N_DECODE > N_CTX:
            self.prefill()
        self._length += N_DECODE
        return N_DECODE / float(self._worker.ask("decode", n=N_DECODE)["seconds"])


def main() -> int:
    bench = Bench("decode", __doc__)
    option = bench.parser.add_argument
    option(
        "--peer-python",
        type=Path,
        default=os.environ.get("UNIMEM_PEER_PYTHON", ROOT / "build" / "peer" / "bin" / "python"),
        help="the Python that has llama-cpp-python (also UNIMEM_PEER_PYTHON)",
    )
    option("--threads", type=int, default=2)
    option(
        "--models",
        type=Path,
        default=ROOT / "build" / "bench",
        help="folder for the model files, 2 GB; missing ones are made",
    )
    option("--model", type=Path, help="measure this GGUF file instead")
    options = bench.parse()
    if not options.peer_python.exists():
        bench.parser.error(
            f"no llama.cpp to compare with: {options.peer_python} is not there. Build it with "
            "'make bench-peer', or name the Python that has llama-cpp-python with --peer-python"
        )
    cores = len(os.sched_getaffinity(0))
    if options.threads > cores:
        bench.parser.error(f"--threads {options.threads}: this process may use {cores} CPUs")
    models = [options.model] if options.model else make_models(options.models, options.peer_python)
    for model in models:
        measure(bench, model)
    return bench.finish()


def make_models(folder: Path, peer_python: Path) -> list[Path]:
    """Make the files that are missing: random weights as F16, quantized by llama.cpp."""
    files = {folder / f"tinyllama-{name}.gguf": ftype for name, ftype in FTYPES.items()}
    missing = [file for file in files if not file.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "tinyllama-f16.gguf"
        print(f"making {', '.join(file.name for file in missing)}, some minutes", flush=True)
        write = [sys.executable, ROOT / "tests" / "models" / "make.py", source]
        subprocess.run([*map(str, write), "llama", "1.1b", "f16"], check=True)
        for file in missing:
            part = file.with_suffix(".part")
            quantize = [peer_python, "-m", "bench.sides", "quantize", source, part]
            subprocess.run([*map(str, quantize), str(files[file])], cwd=ROOT, check=True)
            part.rename(file)
        source.unlink()
    return list(files)


def measure(bench: Bench, model: Path) -> None:
    """Compare all sides on one file."""
    options = bench.options
    with ExitStack() as stack:
        workers = {}
        for kind in KINDS:
            python = Path(sys.executable) if kind == "unimem" else options.peer_python
            workers[kind] = Worker(kind, python, model, options.threads)
            stack.callback(workers[kind].close)
        facts = {kind: worker.ask("facts") for kind, worker in workers.items()}
        require_equal_builds(facts)
        bench.facts[model.stem] = {
            "file_bytes": model.stat().st_size,
            "threads": options.threads,
            "ctx": N_CTX,
            "ggml": {kind: fact["ggml"] for kind, fact in facts.items()},
            "anonymous_bytes": {kind: fact["anonymous_bytes"] for kind, fact in facts.items()},
            "features": facts["unimem"]["features"],
        }
        prompt = [1, *np.random.default_rng(7).integers(3, 259, N_PROMPT - 1).tolist()]
        talks = {kind: Conversation(worker, prompt) for kind, worker in workers.items()}
        compare(
            bench, f"{model.stem}: prefill of {N_PROMPT}", talks, Conversation.prefill, 11, 0.85
        )
        compare(bench, f"{model.stem}: decode", talks, Conversation.decode, 61, 0.97)
        overhead(bench, model, workers["unimem"], prompt)
        bench.facts[model.stem]["agreement"] = agreement(workers, prompt)
        require_idle(workers)


def compare(
    bench: Bench,
    title: str,
    talks: dict[str, Conversation],
    what: Callable[[Conversation], float],
    rounds: int,
    limit: float,
) -> None:
    """One table of speeds, with the claim about the two ratios."""
    sides = {kind: (lambda talk=talk: what(talk)) for kind, talk in talks.items()}
    speeds = bench.compare(title, sides, unit="tokens/s", rounds=rounds, warmup=2)
    for peer in KINDS[1:]:
        bench.at_least(title, f"unimem / {peer}", ratios(speeds["unimem"], speeds[peer]), limit)


def overhead(bench: Bench, model: Path, worker: Worker, prompt: list[int]) -> None:
    """Time around the compute call, in percent of a token's."""
    worker.ask("prefill", tokens=prompt)
    shares = worker.ask("overhead", n=64)["shares"]
    percent = [share * 100 for share in shares]
    title = f"{model.stem}: Python around the compute"
    bench.show(title, {"unimem": percent}, unit="% of a token's time")
    bench.at_most(title, "around the compute, %", percent, 0.25)


def agreement(workers: dict[str, Worker], prompt: list[int]) -> dict[str, Any]:
    """Largest difference of the logits after the prompt, and how many greedy tokens agree."""
    logits, tokens = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, worker in workers.items():
            file = Path(folder, f"{kind}.npy")
            worker.ask("prefill", tokens=prompt, save=str(file))
            logits[kind] = np.load(file)
            tokens[kind] = worker.ask("decode", n=64)["tokens"]
    ours = logits["unimem"]
    result = {}
    for peer in KINDS[1:]:
        difference = float(np.abs(ours - logits[peer]).max() / logits[peer].std())
        same = [a == b for a, b in zip(tokens["unimem"], tokens[peer], strict=True)]
        n_same = same.index(False) if False in same else len(same)
        print(
            f"  against {peer}: largest logit difference {difference:.2g} of their deviation, "
            f"greedy tokens agree for {n_same} of {len(same)}"
        )
        result[peer] = {"logit_difference": difference, "greedy_tokens_equal": n_same}
    return result


def require_equal_builds(facts: dict[str, dict[str, Any]]) -> None:
    """End the run if the two copies of ggml were not built alike."""
    ours, theirs = facts["unimem"]["features"], facts["llama.cpp"]["features"]
    different = [
        f"{name}: unimem {ours.get(name, '0')}, llama.cpp {theirs.get(name, '0')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name, "0") != theirs.get(name, "0")
    ]
    if different:
        raise SystemExit(
            "The two builds of ggml differ, so their speeds say nothing. "
            f"{'; '.join(different)}. Build both on this machine, as bench/README.md says."
        )
    if ours.get("LLAMAFILE") != "1":
        raise SystemExit("Both builds of ggml lack tinyBLAS: build with -DGGML_LLAMAFILE=ON.")


def require_idle(workers: dict[str, Worker]) -> None:
    """End the run if a side took CPU time from the others while it had nothing to do."""
    for worker in workers.values():
        share = worker.idle_cpu_s / worker.idle_s
        print(f"  {worker.kind} waiting: {share:.2%} of a CPU")
        if share > MAX_IDLE_SHARE:
            raise SystemExit(
                f"the {worker.kind} side used {share:.0%} of a CPU while it waited; "
                "the others' figures are worth nothing"
            )


if __name__ == "__main__":
    raise SystemExit(main())
