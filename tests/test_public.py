"""What is public: registered classes are of the right kind, nothing else can be asked for by name, every name says what it is, and
no module imports itself by way of others."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec import acceptance, drafts, registry

SOURCE = Path(hf_specdec.__file__).parent
BASES = {"DRAFTS": drafts.Draft, "ACCEPTANCE": acceptance.Acceptance}
ENTRIES = [(table, name) for table in BASES for name in getattr(registry, table)]
PACKAGES = [hf_specdec, drafts, acceptance]
PUBLIC = [(package, name) for package in PACKAGES for name in package.__all__]


def modules(folder: str) -> list:
    """The modules of a folder of the package, imported."""
    names = [path.stem for path in sorted((SOURCE / folder).glob("*.py")) if path.stem != "__init__"]
    return [importlib.import_module(f"hf_specdec.{folder}.{name}") for name in names]


# --- registries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_a_registered_name_is_a_class_of_the_right_kind_in_its_own_module(table, name):
    entry, base = getattr(registry, table)[name], BASES[table]
    kind = registry.load(getattr(registry, table), name, "name")
    assert issubclass(kind, base) and kind is not base
    assert f"{kind.__module__}:{kind.__name__}" == f"hf_specdec.{entry}"
    assert kind.__name__ in importlib.import_module(kind.__module__.rpartition(".")[0]).__all__


@pytest.mark.parametrize(("table", "folder"), [("DRAFTS", "drafts"), ("ACCEPTANCE", "acceptance")])
def test_every_draft_and_every_rule_is_registered(table, folder):
    """A public class that is not registered is a base of one that is."""
    known, base = getattr(registry, table), BASES[table]
    classes = {thing for module in modules(folder) for thing in vars(module).values() if isinstance(thing, type) and issubclass(thing, base)}
    public = {kind for kind in classes if not kind.__name__.startswith("_")}
    registered = {registry.load(known, name, "name") for name in known}
    assert registered <= public
    assert not [kind for kind in public - registered if not any(issubclass(other, kind) for other in registered)]


@pytest.mark.parametrize("name", ["os:system", "drafts.uniform:UniformDraft", "", "Model"])
@pytest.mark.parametrize("table", BASES)
def test_what_is_not_registered_cannot_be_asked_for(table, name):
    known = getattr(registry, table)
    with pytest.raises(ValueError, match="thing=.* is not known; choose one of") as caught:
        registry.load(known, name, "thing")
    assert all(repr(name) in str(caught.value) for name in known)


# --- names and docstrings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package.__name__}.{name}" for package, name in PUBLIC])
def test_what_is_public_is_there_and_says_what_it_is(package, name):
    thing = getattr(package, name)
    assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package.__name__}.{name}" for package, name in PUBLIC])
def test_every_public_method_says_what_it_does_here_or_in_its_base(package, name):
    thing = getattr(package, name)
    own = vars(thing) if isinstance(thing, type) else {}
    methods = [attribute for attribute in own if not attribute.startswith("_") and inspect.isroutine(getattr(thing, attribute))]
    assert all(inspect.getdoc(getattr(thing, attribute)) for attribute in methods if attribute not in ("to_dict", "from_dict"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_package_lists_every_name_once_and_beside_its_registry_at_most_ten(package):
    assert len(set(package.__all__)) == len(package.__all__)
    assert len(set(package.__all__) - set(getattr(package, "_CLASSES", ()))) <= 10


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="OracleDraft"):
        drafts.OracleDraft  # noqa: B018
    with pytest.raises(AttributeError, match="'hf_specdec' has no attribute 'speculate'"):
        hf_specdec.speculate  # noqa: B018


# --- cycles ---------------------------------------------------------------------------------------------------------------


FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").strip("."): path for path in SOURCE.rglob("*.py")}


def imported(module: str) -> set[str]:
    """Modules of the package that `module` imports at its top level."""
    found = set()
    parts = [*module.split("."), ""] if FILES[module].name == "__init__.py" and module else module.split(".")
    for node in ast.parse(FILES[module].read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*parts[: len(parts) - node.level], *filter(None, [node.module])]
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.add(whole if whole in FILES else ".".join(base))
    return found - {module}


def test_no_module_imports_itself_by_way_of_others():
    open_, done = [], set()

    def visit(module: str) -> None:
        assert module not in open_, f"a cycle: {' > '.join([*open_, module])}"
        if module in done:
            return
        open_.append(module)
        for other in imported(module):
            visit(other)
        done.add(open_.pop())

    assert {"loop", "drafts.model", ""} <= FILES.keys() and {"sequences", "drafts.base"} <= imported("loop") and "" not in imported("drafts.model")
    for module in FILES:
        visit(module)


def test_the_drafts_are_listed_before_they_are_imported():
    from hf_specdec import drafts

    assert set(drafts.__all__) <= set(dir(drafts)) and "PromptLookupDraft" in dir(drafts)
