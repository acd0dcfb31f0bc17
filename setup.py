"""The one thing that pyproject.toml cannot say: the MX kernels, a plain C library that is built where there is a compiler.

Optional: without it the package installs all the same, and the kernels are compiled at first use, or torch multiplies.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/hf_specdec/mx/kernels/csrc"
kernels = Extension(
    "hf_specdec.mx.kernels._mx",
    sources=sorted(glob(f"{FOLDER}/*.c")),
    depends=glob(f"{FOLDER}/*.h"),
    extra_compile_args=["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fopenmp"],  # as in mx/kernels/build.py
    optional=True,  # OpenMP is not linked: the runtime that torch brings is bound when the library is loaded
)
setup(ext_modules=[kernels])
