"""Where the compiled kernels come from: built with the package, else at first use by the system's compiler into a cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
APPLE = platform.system() == "Darwin"  # whose compiler knows OpenMP, but not the option, nor its runtime: torch brings one
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", *(("-Xclang",) if APPLE else ()), "-fopenmp")
WITHOUT = "-DMX_NO_AVX_VNNI"  # which binutils before 2.36 do not assemble, where GCC may be new enough to write it
LINK = ("-shared", *(("-undefined", "dynamic_lookup") if APPLE else ()))


class BuildError(RuntimeError):
    """No compiler, or one that failed: the message holds all that it printed."""


def cache_dir() -> Path:
    """$HF_SPECDEC_CACHE, else hf_specdec under $XDG_CACHE_HOME or ~/.cache; the libraries lie in its folder `kernels`."""
    own = os.environ.get("HF_SPECDEC_CACHE")
    try:
        base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise BuildError(f"there is no place for them: {error} Name a folder in $HF_SPECDEC_CACHE.") from error
    return base / "kernels"


def packaged_library() -> Path | None:
    """The library that was built when the package was installed, if it was; in a checkout, where sources change, if it is newer than they are. Installed, both come
    from one wheel, and their times say in which order they were unpacked."""
    path = HERE / f"_mx{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    checkout = (HERE.parents[3] / "setup.py").is_file()
    if not path.is_file() or checkout and path.stat().st_mtime < max(source.stat().st_mtime for source in SOURCES.iterdir()):
        return None
    return path


def compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang. Raises BuildError where there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
    raise BuildError("there is no C compiler: neither $CC nor cc, gcc or clang was found")


def build() -> Path:
    """Compile the sources, unless the cache has them as they are now, and return the library's path.

    A compiler that fails is asked once more, without AVX-VNNI. Atomic: the library is written under another name and moved into place,
    so that processes can build at the same time. Raises BuildError with the compiler's whole message.
    """
    command = [compiler(), *FLAGS]
    target = cache_dir() / f"mx-{_fingerprint(command)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            try:
                objects = _compile(command, Path(folder))
            except BuildError:
                objects = _compile([*command, WITHOUT], Path(folder))
            fresh = Path(folder) / target.name
            _run([*command, *LINK, *objects, "-o", str(fresh)])
            os.replace(fresh, target)
    except OSError as error:
        raise BuildError(f"the kernels could not be built in {target.parent}: {error}") from error
    return target


def _compile(command: list[str], folder: Path) -> list[str]:
    """All sources, several at a time; none is still being compiled when this returns or raises."""
    sources = sorted(SOURCES.glob("*.c"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: _run([*command, "-c", str(source), "-o", made]), sources, objects))
    return objects


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr}{done.stdout}")


def _fingerprint(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join([platform.machine(), command[0], *FLAGS]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
