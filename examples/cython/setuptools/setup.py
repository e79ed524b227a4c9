"""The extension module llama, built with setuptools."""

from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

import unimem

library = Path(unimem.get_library())
extension = Extension(
    "llama",
    ["llama.pyx"],
    include_dirs=[unimem.get_include(), np.get_include()],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
    extra_compile_args=["-O3", "-fopenmp"],
    # Found where unimem is installed now; in a wheel of yours, "-Wl,-rpath,$ORIGIN/unimem/lib".
    extra_link_args=["-fopenmp", str(library), f"-Wl,-rpath,{library.parent}"],
)
setup(ext_modules=cythonize([extension]))
