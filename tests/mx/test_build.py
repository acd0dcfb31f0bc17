"""Where the compiled kernels come from: the cache, two processes at once, compilers that fail, and working without any."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import pytest
import torch

from hf_specdec.mx.kernels import build as built
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.linear import MXLinear

from ..helpers import without_a_home
from .reference import FULL

CC = next((found for found in map(shutil.which, ("cc", "gcc", "clang")) if found), None)
needs_a_compiler = pytest.mark.skipif(CC is None, reason="no C compiler here")
ROOT = Path(built.__file__).parents[3]  # what holds the package


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A library of one function that is compiled in no time, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.c").write_text('#include "tiny.h"\nint mx_abi(void) { return ABI; }\n')
    (folder / "tiny.h").write_text("#define ABI 99\n")
    monkeypatch.setattr(built, "SOURCES", folder)
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return folder


@pytest.fixture
def unloaded(monkeypatch):
    """The kernels as in a fresh process: neither loaded nor looked for."""
    for name in ("HF_SPECDEC_MX_KERNELS", "HF_SPECDEC_MX_PATH"):
        monkeypatch.delenv(name, raising=False)
    kept, library = dict(cpu._state), cpu.library
    library.cache_clear()
    cpu._state.update(path=None, forced=None, reason=None, library=None)
    yield
    library.cache_clear()
    cpu._state.update(kept)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def cached(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "kernels").iterdir())


def some_layer() -> tuple[MXLinear, torch.Tensor]:
    torch.manual_seed(0)
    return MXLinear.from_linear(torch.nn.Linear(96, 40)).requires_grad_(False), torch.randn(3, 96)


# --- the cache ----------------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert built.cache_dir() == tmp_path / "own" / "kernels"
    monkeypatch.delenv("HF_SPECDEC_CACHE")
    assert built.cache_dir() == tmp_path / "xdg" / "hf_specdec" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert built.cache_dir() == tmp_path / ".cache" / "hf_specdec" / "kernels"


@needs_a_compiler
def test_a_library_is_built_once_and_again_if_it_is_gone(sources, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'echo called >> {log}\nexec {CC} "$@"'))
    path = built.build()
    assert re.fullmatch(r"mx-[0-9a-f]{16}\.so", path.name) and cached(tmp_path / "cache") == [path.name]
    assert ctypes.CDLL(str(path)).mx_abi() == 99
    assert built.build() == path and log.read_text().split() == ["called"] * 2  # to compile the one source, and to link
    path.unlink()
    assert built.build() == path and path.is_file() and log.read_text().split() == ["called"] * 4


@needs_a_compiler
def test_whatever_goes_into_the_library_goes_into_its_name(sources, tmp_path, monkeypatch):
    names = [built.build().name]

    def other() -> bool:
        names.append(built.build().name)
        return names[-1] not in names[:-1]

    (sources / "tiny.c").write_text((sources / "tiny.c").read_text() + "int more;\n")
    assert other()
    (sources / "tiny.h").write_text("#define ABI 98\n")
    assert other()
    (sources / "second.c").write_text("int second;\n")
    assert other()
    monkeypatch.setattr(built, "FLAGS", (*built.FLAGS, "-DANY"))
    assert other()
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'exec {CC} "$@"'))
    assert other()
    assert len(cached(tmp_path / "cache")) == 6


@needs_a_compiler
def test_the_name_does_not_depend_on_where_the_sources_lie(sources, tmp_path, monkeypatch):
    name = built.build().name
    shutil.copytree(sources, tmp_path / "elsewhere")
    monkeypatch.setattr(built, "SOURCES", tmp_path / "elsewhere")
    assert built.build().name == name


BUILD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.SOURCES = pathlib.Path(sys.argv[2])
print(build.build())
"""


@needs_a_compiler
def test_two_processes_build_at_once_and_no_half_library_is_ever_there(sources, tmp_path):
    """The linker here writes half a file, waits until the other one has got as far, and links then."""
    slow = """
    for word in "$@"; do output=$word; done  # the last word, after -o
    if [ "${output%.so}" != "$output" ]; then
        printf half > "$output"
        touch "$STARTED.$$"
        for i in 1 2 3 4 5 6 7 8 9 10; do [ "$(ls "$STARTED".* | wc -l)" -ge 2 ] && break; sleep 0.5; done
    fi
    """
    environment = {**os.environ, "CC": script(tmp_path / "cc", f'{slow}\nexec {CC} "$@"'), "STARTED": str(tmp_path / "started")}
    run = [sys.executable, "-S", "-c", BUILD, built.__file__, str(built.SOURCES if FULL else sources)]
    both = [subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    while any(process.poll() is None for process in both):
        for path in (tmp_path / "cache" / "kernels").glob("*.so"):
            assert path.read_bytes()[:4] != b"half"
        time.sleep(0.02)
    printed = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(list(tmp_path.glob("started.*"))) == 2  # both did compile
    assert len(printed) == 1 and cached(tmp_path / "cache") == [Path(printed.pop()).name]
    ctypes.CDLL(str(tmp_path / "cache" / "kernels" / cached(tmp_path / "cache")[0]))


# --- failures -----------------------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails_is_quoted_in_full_and_leaves_nothing(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", script(tmp_path / "cc", "echo first; seq 1 500 >&2; echo 'no such instruction' >&2; exit 3"))
    with pytest.raises(built.BuildError) as caught:
        built.build()
    message = str(caught.value)
    assert str(tmp_path / "cc") in message and "exit code 3" in message and "first" in message
    assert "no such instruction" in message and all(f"\n{line}\n" in message for line in range(2, 500))
    assert cached(tmp_path / "cache") == []


TWO = {"mx.h": """
#if !defined(MX_NO_AVX_VNNI)
#define MX_AVX_VNNI
#endif
""", "vnni.c": """
#include "mx.h"
#ifdef MX_AVX_VNNI
int mx_vnni = 1;
#endif
""", "other.c": """
#include "mx.h"
#ifdef MX_AVX_VNNI
extern int mx_vnni;
int mx_abi(void) { return mx_vnni; }
#else
int mx_abi(void) { return 0; }
#endif
"""}


def old_assembler(path: Path) -> str:
    """A compiler that fails on the file with AVX-VNNI in it, as one does whose binutils are older than 2.36."""
    refuse = 'case "$*" in *-DMX_NO_AVX_VNNI*) ;; *vnni.c*) echo "Error: no such instruction: vpdpbusd" >&2; exit 1;; esac'
    return script(path, f'{refuse}\nexec {CC} "$@"')


@needs_a_compiler
@pytest.mark.parametrize("refused", [False, True])
def test_without_avx_vnni_where_the_assembler_does_not_know_it_and_nowhere_else(refused, sources, tmp_path, monkeypatch):
    for name, text in TWO.items():
        (sources / name).write_text(text)
    (sources / "tiny.c").unlink()
    monkeypatch.setenv("CC", old_assembler(tmp_path / "cc") if refused else CC)
    path = built.build()
    assert ctypes.CDLL(str(path)).mx_abi() == (not refused)
    assert built.build() == path and cached(tmp_path / "cache") == [path.name]
    if not refused:
        return
    (sources / "other.c").write_text("#error this cannot be\n")
    with pytest.raises(built.BuildError, match="this cannot be"):
        built.build()


@needs_a_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86_64 has AVX-VNNI")
def test_the_sources_go_together_without_avx_vnni(tmp_path):
    """What the header says of AVX-VNNI is all that names it."""
    for name in ("integers", "avx2_vnni"):
        subprocess.run([CC, *built.FLAGS, built.WITHOUT, "-c", str(built.SOURCES / f"{name}.c"), "-o", str(tmp_path / f"{name}.o")], check=True)
        assert b"avx2_vnni" not in (tmp_path / f"{name}.o").read_bytes().replace(b"avx2_vnni.c", b"")


@needs_a_compiler
@pytest.mark.parametrize("really", [False, True])
def test_an_install_goes_without_avx_vnni_where_the_assembler_does_not_know_it(really, tmp_path):
    checkout = ROOT.parent
    if not (checkout / "setup.py").is_file():
        pytest.skip("no checkout")
    folder = tmp_path / "src/hf_specdec/mx/kernels/csrc"
    folder.mkdir(parents=True)
    for name, text in TWO.items():
        (folder / name).write_text(text)
    if really:
        (folder / "other.c").write_text("#error this cannot be\n")
    shutil.copy(checkout / "setup.py", tmp_path)
    environment = {**os.environ, "CC": old_assembler(tmp_path / "cc"), "LDSHARED": f"{CC} -shared"}
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--build-lib", "out"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    libraries = list((tmp_path / "out").rglob("*.so"))
    assert "no such instruction" in done.stdout + done.stderr
    if really:
        assert "this cannot be" in done.stdout + done.stderr and not libraries
    else:
        assert done.returncode == 0 and ctypes.CDLL(str(libraries[0])).mx_abi() == 0


@needs_a_compiler
@pytest.mark.parametrize("source", sorted(path.name for path in built.SOURCES.glob("*.c") if FULL or "avx" not in path.name))
def test_nothing_that_newer_compilers_refuse(source):
    """From GCC 14 and Clang 16 on these are errors by themselves."""
    refused = [f"-Werror={name}" for name in ("implicit-function-declaration", "int-conversion", "implicit-int", "return-mismatch")]
    known = [flag for flag in refused if not subprocess.run([CC, flag, "-fsyntax-only", "-xc", os.devnull], capture_output=True).stderr]
    assert refused[0] in known
    done = subprocess.run([CC, "-fsyntax-only", "-std=gnu11", "-fopenmp", *known, str(built.SOURCES / source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_apples_compiler_is_told_of_openmp_in_its_own_way_and_takes_torchs_runtime(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError(path)))
    apple = runpy.run_path(built.__file__)
    assert apple["FLAGS"][-2:] == ("-Xclang", "-fopenmp") and apple["LINK"] == ("-shared", "-undefined", "dynamic_lookup")
    (runtime,) = cpu._openmp_runtimes()
    assert Path(runtime).parts[-3:] == ("torch", "lib", "libomp.dylib")


def test_this_system_links_with_nothing_of_apples():
    assert built.APPLE or ("-Xclang" not in built.FLAGS and built.LINK == ("-shared",))


@pytest.mark.parametrize(("path", "apple", "left_to_torch"), [
    ("portable", False, True), ("portable", True, True), ("neon", True, True), ("neon", False, False), ("avx2", True, False), ("amx", False, False),
])
def test_where_many_rows_are_left_to_torch(path, apple, left_to_torch, monkeypatch):
    monkeypatch.setattr(cpu, "APPLE", apple)
    monkeypatch.setattr(cpu, "kernel_path", lambda: cpu.PATHS.index(path))
    assert cpu.by_panels() == left_to_torch


@pytest.mark.parametrize(("checkout", "taken"), [(False, True), (True, False)])
def test_a_library_older_than_its_sources_is_stale_in_a_checkout_and_not_in_a_wheel(checkout, taken, tmp_path, monkeypatch):
    """pip unpacks a wheel's files one after the other, the library before its sources."""
    kernels = tmp_path / "root" / "src" / "hf_specdec" / "mx" / "kernels"
    (kernels / "csrc").mkdir(parents=True)
    if checkout:
        (tmp_path / "root" / "setup.py").touch()
    monkeypatch.setattr(built, "HERE", kernels)
    monkeypatch.setattr(built, "SOURCES", kernels / "csrc")
    assert built.packaged_library() is None
    library = kernels / f"_mx{sysconfig.get_config_var('EXT_SUFFIX')}"
    for path, when in ((library, 1000), (kernels / "csrc" / "mx.h", 1001)):
        path.touch()
        os.utime(path, (when, when))
    assert built.packaged_library() == (library if taken else None)
    os.utime(library, (1002, 1002))
    assert built.packaged_library() == library


@needs_a_compiler
def test_a_source_that_does_not_compile(sources, tmp_path):
    (sources / "tiny.c").write_text("#error this cannot be\n")
    with pytest.raises(built.BuildError, match="this cannot be"):
        built.build()
    assert cached(tmp_path / "cache") == []


def test_no_compiler(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(built.BuildError, match="no C compiler.*CC.*gcc"):
        built.build()


@needs_a_compiler
def test_a_cache_that_cannot_be_written(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(built.BuildError, match=str(tmp_path / "file")):
        built.build()


@needs_a_compiler
def test_a_user_without_a_home(sources, monkeypatch):
    without_a_home(monkeypatch)
    with pytest.raises(built.BuildError, match=r"Could not determine home directory\. Name a folder in \$HF_SPECDEC_CACHE"):
        built.build()


WITHOUT = """
import json, warnings
import torch
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.linear import MXLinear
cpu.packaged_library = lambda: None
torch.manual_seed(0)
linear, x = torch.nn.Linear(96, 40), torch.randn(3, 96)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    layer = MXLinear.from_linear(linear)
    same = [torch.allclose(layer(x), layer.to_linear(torch.float32)(x)) for _ in range(3)]
    near = (layer(x) - linear(x)).abs().max().item()
found = [str(warning.message) for warning in seen if "MX kernels" in str(warning.message)]
print(json.dumps({"same": same, "near": near, "found": found, "info": cpu.kernel_info(), "layout": layer.layout}))
"""


@pytest.mark.share(0)
def test_without_a_working_compiler_torch_multiplies_after_one_warning(tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_SPECDEC_MX")},
        "CC": script(tmp_path / "cc", "echo 'the disk is on fire' >&2; exit 1"),
        "HF_SPECDEC_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["same"] == [True] * 3 and report["near"] < 0.1 and report["layout"] == "stored"
    assert len(report["found"]) == 1 and "the disk is on fire" in report["found"][0] and "torch" in report["found"][0]
    info = report["info"]
    assert (info["path"], info["available"], info["library"]) == ("torch", [], None)
    assert "the disk is on fire" in info["reason"] == info["why"]


@needs_a_compiler
def test_a_library_of_another_version_is_not_used(sources, unloaded, monkeypatch):
    monkeypatch.setattr(cpu, "packaged_library", built.build)
    with pytest.warns(UserWarning, match="interface 99"):
        assert cpu.library() is None
    layer, x = some_layer()
    assert layer.layout == "stored" and layer(x).isfinite().all()


@needs_a_compiler
def test_a_packaged_library_is_taken_before_anything_is_built(sources, unloaded, monkeypatch):
    (sources / "tiny.h").write_text("#define ABI 97\n")
    path = built.build()
    monkeypatch.setattr(cpu, "packaged_library", lambda: path)
    monkeypatch.setattr(cpu, "build", lambda: pytest.fail("built"))
    with pytest.warns(UserWarning, match="interface 97"):
        assert cpu.library() is None


# --- the environment ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["off", "OFF", "0", "none"])
def test_the_kernels_can_be_switched_off(word, unloaded, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_MX_KERNELS", word)
    monkeypatch.setenv("HF_SPECDEC_MX_PATH", "portable")  # not asked then
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer, x = some_layer()
        torch.testing.assert_close(layer(x), layer.to_linear(torch.float32)(x))
    assert layer.layout == "stored"
    info = cpu.kernel_info()
    assert info["path"] == "torch" and "HF_SPECDEC_MX_KERNELS" in info["reason"]
    with pytest.raises(ValueError, match="'portable'.*HF_SPECDEC_MX_KERNELS"):
        cpu.set_kernel_path("portable")


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
def test_the_path_can_be_named_in_the_environment(unloaded, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_MX_PATH", "portable")
    assert cpu.kernel_info()["path"] == "portable" and cpu.kernel_info()["why"] == "forced"
    layer, x = some_layer()
    assert layer(x).isfinite().all()


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
def test_a_path_that_is_none_is_named_with_those_there_are(unloaded, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_MX_PATH", "nonsense")
    layer, x = some_layer()
    for ask in (lambda: layer(x), cpu.kernel_info):
        with pytest.raises(ValueError, match="'nonsense'.*portable.*neon.*avx2.*avx512f.*avx512_bf16"):
            ask()


class Old:
    """A processor with nothing but the portable path."""

    @staticmethod
    def mx_has_path(number: int) -> bool:
        return number == 0

    @staticmethod
    def mx_set_path(number: int) -> None:
        assert number == 0

    @staticmethod
    def mx_product_kind(number: int) -> int:
        return -1

    mx_integer_kind = mx_product_kind


@pytest.mark.parametrize("forced", [False, True])
def test_a_path_this_processor_lacks_is_refused(forced, unloaded, monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: Old)
    assert cpu.kernel_info()["available"] == ["portable"] and cpu.kernel_info()["path"] == "portable"
    cpu._state["path"] = None
    if not forced:
        monkeypatch.setenv("HF_SPECDEC_MX_PATH", "avx2")
    with pytest.raises(ValueError, match="'avx2' cannot run here.*instructions"):
        cpu.set_kernel_path("avx2") if forced else cpu.kernel_path()
