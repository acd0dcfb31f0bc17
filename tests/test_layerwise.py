"""Passes whose layers are run by one compiled function: the same texts, and the compiler sees a layer of each kind. torch traces, and the C++
compiler is left out. HF_SPECDEC_FULL=1 takes more families, and writes every graph without mutation, as the compiler gets it."""

import gc
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

import hf_specdec
from hf_specdec import compiled, fixed_cache, layerwise, parts, passes
from hf_specdec.cached_model import CachedModel
from hf_specdec.compat import CACHE
from hf_specdec.drafts import EarlyExitDraft, ModelDraft, PromptLookupDraft
from hf_specdec.drafts.feature import FeatureDraft
from tests.architectures import FAMILIES
from tests.conformance.builders import feature_drafter
from tests.helpers import FULL, OLD_TORCH, KnowingTreeDraft, enabled, generated, perturbed, plain, prompts, repetitive, speculate

NAMES = [line.name for line in FAMILIES] if FULL else ["Llama", "GPT-2", "Gemma 3 (text)", "Mistral", "Llama 4 (text, chunked)", "OPT"]
LAYERS = {"seed": 0, "compile": "layers"}
NOT_BY_LAYERS = ("DBRX", "Dory")


def family(name: str):
    return next(line for line in FAMILIES if line.name == name)


def built(name: str, **settings):
    return replace(family(name), settings={**family(name).settings, **settings}).model("sdpa")


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """The models of these tests have few layers, and are not compiled to machine code."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled, "FLAT", 0)
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager" if FULL else "eager"})


@pytest.fixture
def functional(monkeypatch):
    """The graphs are also written without mutation."""
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})


def run(target, rows, draft, k=4, speculative=LAYERS, **options):
    out = speculate(target, rows, draft, k, speculative=speculative, **options)
    hf_specdec.disable(target)
    return generated(out, rows)


def functions(model) -> list[str]:
    """What was compiled for the model's layers."""
    return sorted(function.__wrapped__.__name__.rsplit("_", 1)[0] for function in compiled._by_layers[model].functions.made.values())


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_plain_generate(name, functional, strict):
    if name in NOT_BY_LAYERS:
        pytest.skip("docs/performance.md, What does not compile")
    try:
        target = built(name)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        pytest.skip("its attention is not torch's sdpa")
    if why := fixed_cache.why_not_compiled(target):
        pytest.skip(why)
    rows = repetitive(30, 17) if family(name).ragged else repetitive(30)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert compiled._functions[target].made or functions(target)  # the former where no list of layers is known


def test_one_layer_of_a_kind_is_compiled(strict):
    target = built("Llama", num_hidden_layers=6)
    rows = repetitive(30)
    assert run(target, rows, PromptLookupDraft(), max_new_tokens=24) == plain(target, rows, max_new_tokens=24)
    assert set(functions(target)) == {"at_slots", "from_start"} and len(functions(target)) <= 1 + len(compiled.WIDTHS)
    assert counters["stats"]["unique_graphs"] == len(functions(target))


@pytest.mark.share(0)
def test_layers_that_differ_have_functions_of_their_own(strict):
    target = built("Gemma 3 (text)", num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)
    kinds = layerwise.kinds(list(target.model.layers))
    assert 1 < len(set(kinds)) < 6
    rows = repetitive(12)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)


def test_prompts_of_all_lengths_share_a_function(strict):
    target = built("Llama", num_hidden_layers=5)
    for length in (2, 5, 31, 61, 64, 100):
        rows = prompts(length)
        assert run(target, rows, PromptLookupDraft(), max_new_tokens=3) == plain(target, rows, max_new_tokens=3)
    assert functions(target).count("from_start") == 1
    starts = [f for f in compiled._by_layers[target].functions.made.values() if f.__wrapped__.__name__.startswith("from_start")]
    assert all(passes.unguarded(function) is not function for function in starts)  # never compiled for a second length


@pytest.mark.share(0)
def test_whole_passes_begin_with_prompts_by_layers(strict):
    target = built("Llama", num_hidden_layers=5)
    for length in (20, 33):
        rows = prompts(length)
        assert run(target, rows, PromptLookupDraft(), speculative={"seed": 0, "compile": "model"}) == plain(target, rows)
    assert functions(target) == ["from_start"] and compiled._functions[target].made


def test_ragged_prompts_have_another_one(strict):
    target = built("Llama", num_hidden_layers=5)
    rows = prompts(30, 11)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert functions(target).count("from_start") == 1
    rows = prompts(23, 23)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert functions(target).count("from_start") == 2


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("draft", ["model", "tree", "early_exit", "feature"])
def test_drafts_with_models_and_trees(draft, strict):
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    texts = plain(target, rows)
    drafts = {"model": lambda: ModelDraft(perturbed(target)), "tree": lambda: KnowingTreeDraft([row + text for row, text in zip(rows, texts)]), "early_exit": lambda: EarlyExitDraft(target, 2),
              "feature": lambda: FeatureDraft(feature_drafter(target), target)}
    assert run(target, rows, drafts[draft]()) == texts
    assert run(target, rows, PromptLookupDraft()) == texts  # and leaves the model as it was


def test_sampled_texts_are_those_without_compiling(strict):
    target, rows = built("Llama", num_hidden_layers=5), prompts(20, 20, 9)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    assert run(target, rows, PromptLookupDraft(), **options) == run(target, rows, PromptLookupDraft(), speculative={"seed": 0}, **options)


def test_the_layers_are_their_own_again_afterwards():
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    run(target, rows, PromptLookupDraft())
    assert not any("forward" in vars(layer) for layer in target.model.layers)


@pytest.mark.share(0)
def test_what_guards_look_at_is_looked_at_in_the_next_call(strict):
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    target.set_attn_implementation("eager")
    target.double()
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    for layer in target.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()
    for length in (20, 33):
        assert run(target, prompts(length), PromptLookupDraft()) == plain(target, prompts(length))
    assert set(functions(target)) == {"at_slots", "from_start"}


def test_another_thread_gets_the_models_own_layers():
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    texts, seen = plain(target, rows), []

    class Looking(PromptLookupDraft):
        def propose(self, context, k):
            lay = context.target.compiled.layerwise
            with lay.running("test", object(), 1):
                thread = threading.Thread(target=lambda: seen.append(plain(target, rows)))
                thread.start()
                thread.join()
            return super().propose(context, k)

    assert run(target, rows, Looking(), max_new_tokens=12) == [text[:12] for text in texts]
    assert seen and all(each == texts for each in seen)


def test_layers_that_compile_wrongly_are_not_used(monkeypatch):
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    texts = plain(target, rows)
    monkeypatch.setattr(fixed_cache.EmptyCache, "update", lambda self, keys, values, *args, **kwargs: (setattr(self, "states", (keys, values)), (keys, keys))[1])
    with pytest.warns(UserWarning, match="its logits are off"):
        assert run(target, rows, PromptLookupDraft()) == texts
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(target, rows, PromptLookupDraft()) == texts


@pytest.mark.share(0)
def test_layers_that_depend_on_their_number_are_found_out():
    """Nothing but the first comparison tells that a function made for one layer is wrong for the next."""
    target, rows = built("GPT-2", scale_attn_by_inverse_layer_idx=True, n_layer=6), prompts(20)
    texts = plain(target, rows)
    assert run(target, rows, PromptLookupDraft()) == texts


def test_a_model_whose_prompt_passes_are_windowed_only_when_long_is_right_either_way(strict):
    target = built("Mistral", num_hidden_layers=5, sliding_window=16)
    for length in (10, 40):
        rows = prompts(length)
        assert run(target, rows, PromptLookupDraft()) == plain(target, rows)


def test_few_layers_are_compiled_whole(monkeypatch, strict):
    monkeypatch.setattr(compiled, "FLAT", 2)
    target, rows = built("Llama", num_hidden_layers=2), prompts(20)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert target not in compiled._by_layers and compiled._functions[target].made


@pytest.mark.parametrize("compile", [1, "layer", None])
def test_the_option_is_checked(compile):
    with pytest.raises(ValueError, match="compile="):
        hf_specdec.SpeculativeConfig(compile=compile)


def test_warming_up_makes_all_that_a_call_needs(strict, monkeypatch):
    target, rows = enabled(built("Llama", num_hidden_layers=5)), prompts(20)
    hf_specdec.warmup(target, None, {"compile": "layers", "num_assistant_tokens": 4}, max_length=100)
    before = functions(target)
    monkeypatch.setattr(layerwise, "alone", lambda *args, **kwargs: pytest.fail("compiled after the warm-up"))
    out = target.generate(torch.tensor(rows), assistant_model=PromptLookupDraft(), speculative=LAYERS, num_assistant_tokens=4, max_new_tokens=20)
    assert len(out[0]) == 40 and functions(target) == before


def test_rows_of_one_model_at_two_places_at_a_time():
    """Two calls on one model: each pass finds its own cache, or the model's own layers."""
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    first, second = (CachedModel(target, 100, compile="layers") for _ in range(2))
    plainly = CachedModel(target, 100)
    for cached in (first, second, plainly):
        cached.score(rows)
        cached.commit([1])
    row = [rows[0] + [5]]
    a, b, c = first.score(row), second.score(row), plainly.score(row)
    torch.testing.assert_close(a, c)
    torch.testing.assert_close(b, c)


def test_what_was_compiled_dies_with_its_model():
    target, rows = built("Llama", num_hidden_layers=5), prompts(20)
    run(target, rows, PromptLookupDraft())
    alive = weakref.ref(target)
    del target
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


class AsksForTheLength(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) if x.shape[1] > 64 or x.shape[1] < 9 else torch.nn.functional.tanh(x)


@pytest.mark.share(0)
def test_prompts_whose_function_asks_for_their_length_are_soon_left_alone(strict):
    target, rows = built("Llama", num_hidden_layers=5), prompts(80)
    for layer in target.model.layers:
        layer.mlp.act_fn = AsksForTheLength()
    texts, graphs = plain(target, rows, max_new_tokens=4), []
    for _ in range(compiled.MOST_CHANGES + 6):
        assert run(target, rows, PromptLookupDraft(), max_new_tokens=4) == texts
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-3] > graphs[0], graphs


@pytest.mark.skipif(OLD_TORCH, reason="this torch does not compile the model: docs/performance.md")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_of_compressed_models_does_not_ask_for_the_length_of_a_prompt(dtype, strict):
    from hf_specdec import mx

    target = mx.to_tiles(built("Llama", num_hidden_layers=5).to(dtype))
    assert target.config._attn_implementation == "hf_specdec_few"
    for length in (20, 63, 65, 90):
        for _ in range(2):
            run(target, prompts(length), PromptLookupDraft(), max_new_tokens=3)
    made = [function for function in compiled._by_layers[target].functions.made.values() if function.__wrapped__.__name__.startswith("from_start")]
    assert len(made) == 1 and passes.unguarded(made[0]) is not made[0] and not compiled._by_layers[target].changes


def test_a_prompt_in_which_a_layer_runs_twice_is_left_alone():
    target = built("Llama", num_hidden_layers=5)
    layers, text = list(target.model.layers), torch.randn(1, layerwise.TRIAL, target.config.hidden_size)
    position = torch.arange(layerwise.TRIAL)[None]
    given = {"attention_mask": None, "position_ids": position, "position_embeddings": target.model.rotary_emb(text, position)}
    made = layerwise.Layerwise(layers, layerwise.Made(), torch.device("cpu"))
    cache = DynamicCache()
    with torch.no_grad(), pytest.raises(ValueError, match="more than once"), made.running("test", cache, None):
        layers[1](layers[0](text, **given, **{CACHE: cache}), **given, **{CACHE: cache})
        layers[0](text, **given, **{CACHE: cache})
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3 (text)"])
def test_the_modules_that_a_call_looks_through_are_torch_s_own(name):
    model = built(name)
    model.again, model.absent = model.get_input_embeddings(), None  # one that is there twice, and one that is not
    model.register_module("nothing", None)
    assert parts.modules(model) == list(model.modules())
