"""The shape of the package: imports point one way, transformers' insides stay in few files, importing is free of side effects, and
files stay small. Read from the source, nothing is run but one import."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec import registry
from tests import durations

SOURCE = Path(hf_specdec.__file__).parent
LEAVES = {"__main__", "bench", "cli", "commands", "mx", "viz", "training"}
# what may be imported by what comes after it; modules of one line know nothing of each other
LINES = [
    {"uploads", "devices", "lockstep", "rglru", "recurrences", "fixed_cache", "positions", "kinds", "signatures", "steps"},
    {"tree", "registry", "theory", "noise", "compat", "kv_cache", "draft_stop", "head", "parts", "passes", "method", "memory", "budget", "round_cost",
     "law", "nucleus", "lazy_law", "caches", "states", "media", "checkpoint", "block", "hints", "flash", "assistants", "folders"},
    {"proposal", "sequences", "tree_shapes", "distributions", "config", "schedule", "trace", "seq2seq", "tap", "masks", "layerwise", "kept", "own_cache", "hidden_states", "attentions", "beam_states", "offloaded_cache", "quantised_cache"},
    {"compiled", "following", "lengths", "outputs", "per_token", "elsewhere"},
    {"forward"},
    {"cached_model", "acceptance.base", "acceptance.primitive"},
    {"probe", "acceptance.*", "drafts.base"},
    {"drafts.growth", "drafts.earning", "drafts.inner", "drafts.progress", "drafts.mapped", "drafts.datastore", "drafts.vocabulary", "drafts.one_by_one", "drafts.layout"},
    {"drafts.*", "acceptance"},
    {"drafts", "loop", "arguments", "loading", "guidance", "joint"},
    {"call", "warm", "stock_drafts"},
    {"beam", "standing"},
    {"adapters"},
    {"integration"},
    {""},
]
WITHIN = {("compat", "assistants"), ("compat", "caches"), ("compat", "flash"), ("media", "compat"), ("media", "caches"), ("states", "kv_cache"), ("states", "checkpoint"), ("rglru", "recurrences"), ("lazy_law", "law"), ("lazy_law", "nucleus"), ("drafts.feature_tree", "drafts.feature"), ("drafts.feature_parallel", "drafts.feature"), ("drafts.feature_parallel", "drafts.features"), ("drafts.feature_tree", "drafts.model_tree"), ("drafts.feature", "drafts.features"),
          ("drafts.feature", "drafts.model"), ("drafts.ngram", "drafts.ngram_table"), ("drafts", "drafts.base"),
          ("drafts.model_tree", "drafts.model"), ("acceptance.coupled", "acceptance.greedy"), ("acceptance.block", "acceptance.sampling"),
          ("acceptance.spectr", "acceptance.sampling"), ("acceptance.typical", "acceptance.threshold"), ("drafts.mixture", "drafts.choosing"), ("drafts.mixture", "drafts.merging"),
          ("drafts.early_exit", "drafts.target_cache"), ("drafts.compressed", "drafts.target_cache"), ("drafts.target_cache", "drafts.model"), ("drafts.translated", "drafts.model"), ("drafts.datastore", "drafts.progress"),
          ("drafts.datastore", "drafts.mapped"), ("drafts.retrieval", "drafts.ngram"), ("drafts.medusa", "drafts.last_states"), ("drafts.shared_kv", "drafts.last_states"), ("drafts.dflash", "drafts.last_states"), ("drafts.dflash", "drafts.one_pass"), ("drafts.last_states", "drafts.features"),
          ("drafts.medusa", "drafts.one_pass"), ("drafts.parallel", "drafts.medusa"), ("drafts.pass_draft", "drafts.one_pass"),
          ("drafts.sequential", "drafts.last_states"), ("drafts.prefixed", "drafts.feature"), ("drafts.prefixed", "drafts.sequential"),
          ("drafts.online", "drafts.feature"), ("drafts.online", "drafts.features"), ("drafts.online", "drafts.model")}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
TRUNK = [name for name in FILES if name.split(".")[0] not in LEAVES]


def of_each(modules):
    """A test of one module as one test of them all, which takes a fraction of the time: it names those that fail."""

    def decorated(test):
        def over_all():
            wrong = []
            for module in modules:
                try:
                    test(module)
                except AssertionError as error:
                    wrong.append(f"{module or 'hf_specdec'}: {error}")
            assert not wrong, "\n".join(wrong)

        over_all.__name__, over_all.__doc__ = test.__name__, test.__doc__
        return over_all

    return decorated


every_trunk_module, every_module = of_each(TRUNK), of_each(FILES)


@lru_cache(maxsize=None)
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def nodes(module: str, *kinds):
    return [node for node in ast.walk(tree_of(module)) if isinstance(node, kinds)]


def runs_on_import(module: str) -> list[ast.ImportFrom | ast.Import]:
    """Imports at the top of the file, those for type checkers and those inside functions left out."""
    found = []
    for statement in tree_of(module).body:
        found += [node for node in ast.walk(statement) if isinstance(node, (ast.Import, ast.ImportFrom))] if isinstance(statement, ast.Try) else []
        found += [statement] if isinstance(statement, (ast.Import, ast.ImportFrom)) else []
    return found


def own_imports(module: str, top_only: bool = True) -> set[str]:
    """Modules of the package that `module` imports."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in runs_on_import(module) if top_only else nodes(module, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hf_specdec").lstrip(".") for alias in node.names if alias.name.split(".")[0] == "hf_specdec"}
        elif node.level:
            base = package.split(".") if package else []
            base = base[: len(base) - node.level + 1] + (node.module.split(".") if node.module else [])
            found |= {".".join([*base, alias.name]) if ".".join([*base, alias.name]) in FILES else ".".join(base) for alias in node.names}
        elif (node.module or "").split(".")[0] == "hf_specdec":
            found.add(node.module.removeprefix("hf_specdec").lstrip("."))
    return found


def line_of(module: str) -> int:
    for number, names in enumerate(LINES):
        if module in names:
            return number
    group = module.rpartition(".")[0] + ".*"
    return next((number for number, names in enumerate(LINES) if group in names), -1)


@every_trunk_module
def test_a_trunk_module_has_its_place_in_the_order(module):
    assert line_of(module) >= 0, f"{module} has no line in LINES"


@every_trunk_module
def test_imports_point_one_way(module):
    upward = {other for other in own_imports(module) if line_of(other) >= line_of(module) and (module, other) not in WITHIN}
    assert not upward


@every_trunk_module
def test_the_trunk_never_imports_a_leaf(module):
    assert not {other for other in own_imports(module, top_only=False) if other.split(".")[0] in LEAVES}


def test_imports_go_no_deeper_than_the_lines_allow():
    @lru_cache(maxsize=None)
    def depth(module: str) -> int:
        return 1 + max((depth(other) for other in own_imports(module) if other in FILES and other != module), default=0)

    assert max(depth(module) for module in TRUNK) <= 10


def test_every_registry_entry_names_what_is_there():
    for table in (registry.DRAFTS, registry.ACCEPTANCE, registry.LOADERS):
        for entry in table.values():
            module, _, name = entry.partition(":")
            assert name in {node.name for node in nodes(module, ast.ClassDef, ast.FunctionDef)}


# --- transformers' insides ----------------------------------------------------------------------------------------------------

INSIDES = {"compat": {"logits_process"}, "own_cache": {"cache_utils"}, "kv_cache": {"cache_utils"}, "caches": {"cache_utils"}, "fixed_cache": {"cache_utils"}, "states": {"cache_utils"}}
DEEP = {"cache_utils", "masking_utils", "logits_process", "stopping_criteria", "candidate_generator", "modeling_utils", "modeling_attn_mask_utils", "utils",
        "configuration_utils", "integrations", "models"}


@every_trunk_module
def test_insides_of_transformers_are_imported_in_few_files(module):
    used = set()
    for node in nodes(module, ast.ImportFrom):
        if (node.module or "").split(".")[0] == "transformers":
            used |= set(node.module.split(".")[1:]) | {alias.name for alias in node.names}
    for node in nodes(module, ast.Import):
        used |= {part for alias in node.names if alias.name.split(".")[0] == "transformers" for part in alias.name.split(".")[1:]}
    assert used & DEEP <= INSIDES.get(module, set())


# private names of transformers and torch that are read elsewhere, each for want of a public one, or of one that every call has the time for
READ_ELSEWHERE = {"call": {"_pad_token_tensor"}, "compiled": {"_forward_hooks", "_forward_pre_hooks"},
                  "layerwise": {"_parameters", "_buffers", "_modules"}, "parts": {"_modules"},
                  "media": {"_prepare_position_ids_for_generation", "_expand_inputs_for_generation"}}


@lru_cache(maxsize=1)
def own_names() -> set[str]:
    own = {name for other in FILES for node in nodes(other, ast.FunctionDef, ast.ClassDef) for name in [node.name]}
    own |= {node.attr for other in FILES for node in nodes(other, ast.Attribute) if isinstance(node.ctx, ast.Store)}
    return own | {node.target.id for other in FILES for node in nodes(other, ast.AnnAssign) if isinstance(node.target, ast.Name)}


@every_trunk_module
def test_private_names_of_other_packages_are_used_in_compat_only(module):
    private = {node.attr for node in nodes(module, ast.Attribute) if node.attr.startswith("_") and not node.attr.startswith("__")}
    foreign = private - own_names() - {"_asdict"}
    assert module == "compat" or foreign <= READ_ELSEWHERE.get(module, set())


# --- safety -------------------------------------------------------------------------------------------------------------------

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "joblib", "subprocess"}
MAY_START_PROCESSES = {"bench", "mx"}  # the benchmark asks git, the kernels are compiled


@every_module
def test_nothing_is_evaluated_unpickled_or_run(module):
    called = {node.func.id for node in nodes(module, ast.Call) if isinstance(node.func, ast.Name)}
    imported = {alias.name.split(".")[0] for node in nodes(module, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes(module, ast.ImportFrom) if not node.level}
    allowed = {"subprocess"} if module.split(".")[0] in MAY_START_PROCESSES else set()
    assert not called & FORBIDDEN_CALLS and not imported & FORBIDDEN_MODULES - allowed


@every_module
def test_torch_load_and_numpy_pickles_are_not_used(module):
    text = FILES[module].read_text()
    assert "torch.load" not in text and "allow_pickle=True" not in text


@every_module
def test_trust_remote_code_is_never_set_for_the_user(module):
    for call in nodes(module, ast.Call):
        for keyword in call.keywords:
            assert not (keyword.arg == "trust_remote_code" and isinstance(keyword.value, ast.Constant) and keyword.value.value)


# --- importing ----------------------------------------------------------------------------------------------------------------

IMPORT = """
import sys
import torch, transformers
from transformers import DynamicCache, GenerationMixin, LogitsProcessor, PreTrainedModel, StoppingCriteria, StopStringCriteria
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import CandidateGenerator, GenerateDecoderOnlyOutput, logits_process
before, generate, state = set(sys.modules), GenerationMixin.generate, torch.get_rng_state()
import hf_specdec
hf_specdec.enable
assert GenerationMixin.generate is generate and torch.equal(torch.get_rng_state(), state), "a side effect"
print("\\n".join(sorted(set(sys.modules) - before)))
"""


@lru_cache(maxsize=None)
def loaded() -> list[str]:
    """Modules that the public names load beside transformers' own."""
    return after(IMPORT)


def after(program: str) -> list[str]:
    """The words that a Python of its own prints."""
    environment = {"PYTHONPATH": str(SOURCE.parent), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": sys.pycache_prefix or ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_has_no_side_effects_and_loads_no_leaf():
    assert "hf_specdec.integration" in loaded()
    assert not [name for name in loaded() if name.startswith("hf_specdec.") and name.split(".")[1] in LEAVES]


@pytest.mark.parametrize("name", ["triton", "matplotlib", "typer", "rich", "datasets", "scipy", "torch._inductor", "torch.utils.cpp_extension", "setuptools"])
def test_importing_loads_neither_compilers_nor_what_only_leaves_need(name):
    assert not [module for module in loaded() if module == name or module.startswith(name + ".")]


@pytest.mark.parametrize("module", ["hf_specdec", "hf_specdec.cli"])
def test_importing_the_package_or_its_command_line_loads_no_model_library(module):
    found = set(after(f"import sys, {module}\nprint(*sys.modules)"))
    assert module in found and not found & {"torch", "transformers", "numpy", "safetensors", "hf_specdec.integration"}


def test_the_public_names_are_listed_before_they_are_loaded():
    assert set(hf_specdec.__all__) <= set(after("import hf_specdec\nprint(*dir(hf_specdec))"))
    assert after("import hf_specdec\nprint(hf_specdec.SpeculativeConfig(), hf_specdec.__version__)")[-1] == hf_specdec.__version__


@pytest.mark.share(1 / 5)
@pytest.mark.parametrize("part", ["acceptance", "drafts", "mx", "theory", "training", "viz"])
def test_a_part_with_public_names_is_an_attribute_and_loaded_when_first_asked_for(part):
    program = f"import sys, hf_specdec\nassert '{part}' in dir(hf_specdec) and 'hf_specdec.{part}' not in sys.modules\nprint(hf_specdec.{part}.__name__)"
    assert after(program) == [f"hf_specdec.{part}"]


def test_importing_loads_no_draft_before_it_is_asked_for():
    assert not set(loaded()) & {"hf_specdec." + entry.partition(":")[0] for entry in registry.DRAFTS.values()}


# --- budgets ------------------------------------------------------------------------------------------------------------------


@every_module
def test_a_file_has_at_most_300_lines(module):
    assert len(FILES[module].read_text().splitlines()) <= 300


@every_module
def test_a_function_has_at_most_60_lines(module):
    assert not [node.name for node in nodes(module, ast.FunctionDef) if node.end_lineno - node.lineno >= 60]


@every_module
def test_a_module_exports_at_most_10_names(module):
    exported = [node.value for node in nodes(module, ast.Assign) for target in node.targets if isinstance(target, ast.Name) and target.id == "__all__"]
    assert all(len(value.elts) <= 10 for value in exported if isinstance(value, ast.List))


def test_the_loop_fits_its_budget_and_the_median_file_120_lines():
    lengths = sorted(len(path.read_text().splitlines()) for path in FILES.values())
    assert len(FILES["loop"].read_text().splitlines()) <= 130
    assert lengths[len(lengths) // 2] <= 120


@every_module
def test_every_file_says_first_what_it_is(module):
    assert ast.get_docstring(tree_of(module))


def test_the_tests_whose_time_is_written_down_are_there():
    root = Path(__file__).parents[1]
    functions = {path: {node.name for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}
                 for path in {name.partition("::")[0] for name in durations.read()}}  # fmt: skip
    assert not [name for name in durations.read() if name.partition("::")[2] not in functions[name.partition("::")[0]]]
