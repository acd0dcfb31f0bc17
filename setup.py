"""The one thing that pyproject.toml cannot say: the MX kernels, a plain C library that is built where there is a compiler.

Optional: without it the package installs all the same, and the kernels are compiled at first use, or torch multiplies.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "src/hf_specdec/mx/kernels/csrc"
OPENMP = ["-Xclang", "-fopenmp"] if platform.system() == "Darwin" else ["-fopenmp"]
kernels = Extension(
    "hf_specdec.mx.kernels._mx",
    sources=sorted(glob(f"{FOLDER}/*.c")),
    depends=glob(f"{FOLDER}/*.h"),
    extra_compile_args=["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", *OPENMP],  # as in mx/kernels/build.py
    optional=True,  # OpenMP is not linked: the runtime that torch brings is bound when the library is loaded
)


class AllCores(build_ext):
    """Compiles several sources of an extension at a time, which takes half of the time on two cores. Where that fails, once more without
    AVX-VNNI, which binutils before 2.36 do not assemble."""

    def build_extension(self, ext):
        one_by_one = self.compiler.compile

        def at_once(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return sum(pool.map(lambda source: one_by_one([source], **options), sources), [])

        def compile_all(sources, macros=None, **options):
            try:
                return at_once(sources, macros=macros, **options)
            except CompileError:
                return at_once(sources, macros=[*(macros or ()), ("MX_NO_AVX_VNNI", None)], **options)  # as in mx/kernels/build.py

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = one_by_one


setup(ext_modules=[kernels], cmdclass={"build_ext": AllCores})
