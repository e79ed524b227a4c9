"""A small archive of ggml, as a source distribution of the package index has it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

FOLDER = "xllamacpp-1.2.33/thirdparty/llama.cpp"
FILE = "xllamacpp-1.2.33.tar.gz"
CMAKE = """\
set(GGML_VERSION_MAJOR 0)
set(GGML_VERSION_MINOR 27)
set(GGML_VERSION_PATCH 1)
"""
FILES = {
    f"{FOLDER}/ggml/CMakeLists.txt": CMAKE,
    f"{FOLDER}/ggml/include/ggml.h": "GGML_API void ggml_free(struct ggml_context * ctx);\n",
    f"{FOLDER}/ggml/src/ggml-backend-impl.h": "struct ggml_backend_buffer { void * context; };\n",
    f"{FOLDER}/LICENSE": "MIT\n",
    f"{FOLDER}/src/llama.cpp": "int llama;\n",
    "xllamacpp-1.2.33/LICENSE": "another\n",
}


def packed(files: Mapping[str, str]) -> bytes:
    """Return a tar.gz file with these files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()
