"""The recipes as modules: they stand outside the package, beside what they share."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="session")
def recipes():
    """Name -> module of every recipe."""
    sys.path.insert(0, str(FOLDER))
    modules = {}
    for path in sorted(FOLDER.glob("*.py")):
        spec = spec_from_file_location(f"recipe_{path.stem}", path)
        modules[path.stem] = module_from_spec(spec)
        spec.loader.exec_module(modules[path.stem])
    yield modules
    sys.path.remove(str(FOLDER))


@pytest.fixture
def run(recipes, tmp_path, capsys):
    """run(name, *arguments) -> (exit status, standard output, standard error), written into tmp_path."""

    def call(name: str, *arguments: str) -> tuple[int, str, str]:
        status = recipes[name].main(recipes[name].RECIPE, [*arguments, "--out", str(tmp_path)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
