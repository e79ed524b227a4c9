"""Fetch vLLM's sources, whose definitions of secondary tiers tests/test_vllm.py reads.

    python tools/vllm_sources.py VERSION FOLDER

The wheel has half a gigabyte, the sources 50 MB. Before pip keeps sources, it asks their build for
metadata, which would need torch; so a replacement gives a name and a version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BUILD = """
import os
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.mkdir(os.path.join(folder, "vllm-{0}.dist-info"))
    with open(os.path.join(folder, "vllm-{0}.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: vllm\\nVersion: {0}\\n")
    return "vllm-{0}.dist-info"
"""


def main(version: str, folder: Path) -> None:
    """Fetch them, unless they are there."""
    mark = folder / f".{version}"
    if mark.exists():
        return
    with tempfile.TemporaryDirectory() as name:
        build = Path(name, "build/setuptools")
        build.mkdir(parents=True)
        (build / "__init__.py").touch()
        (build / "build_meta.py").write_text(BUILD.format(version))
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--no-binary", "vllm", "--no-build-isolation", "--dest", name, f"vllm=={version}"]
        subprocess.run(pip, check=True, env=os.environ | {"PYTHONPATH": str(build.parent)})
        with tarfile.open(Path(name, f"vllm-{version}.tar.gz")) as archive:
            for member in archive:
                parts = Path(member.name).parts[1:]
                file = archive.extractfile(member) if member.name.endswith(".py") else None
                if file is not None and parts[0] == "vllm" and ".." not in parts:
                    folder.joinpath(*parts).parent.mkdir(parents=True, exist_ok=True)
                    folder.joinpath(*parts).write_bytes(file.read())
    mark.touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
