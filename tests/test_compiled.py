"""Compiled passes: fixed shapes, the same texts. All but one test have torch trace the models and leave out the C++ compiler.
HF_SPECDEC_FULL=1 takes more families, and writes every graph without mutation, as the compiler gets it."""

import gc
import shutil
import warnings
import weakref
from contextvars import copy_context
from dataclasses import replace

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, EpsilonLogitsWarper, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_specdec
from hf_specdec import compiled, passes
from hf_specdec.cached_model import CachedModel
from hf_specdec.compat import CACHE
from hf_specdec.distributions import Sampler
from hf_specdec.fixed_cache import Held, of_one_length
from hf_specdec.law import draw
from hf_specdec.schedule import AutoSchedule
from hf_specdec.drafts import CompressedDraft, EarlyExitDraft, MixtureDraft, ModelDraft, PromptLookupDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.training.shared import PrunedHead
from hf_specdec.tree import Tree
from tests.architectures import FAMILIES
from tests.conformance.builders import BUILDERS, VARIANTS, feature_drafter, make
from tests.helpers import FULL, OLD_TORCH, KnowingTreeDraft, enabled, generated, perturbed, plain, prompts, repetitive, speculate
from tests.test_cached_model import TREES, check_scores, proposal, take

NAMES = ["Llama", "Gemma 3 (text)", "GPT-2", "Mistral", "Llama 4 (text, chunked)", "Qwen3-MoE", "OPT"]
SHARE = NAMES if FULL else ["Llama", "Gemma 3 (text)"]
COMPILED = {"seed": 0, "compile": True}


def family(name: str):
    return next(line for line in FAMILIES if line.name == name)


def one_layer(name: str):
    own = family(name)
    return replace(own, settings=own.settings | {"num_hidden_layers": 1}).model("eager")


@pytest.fixture
def functional(monkeypatch):
    """torch.compile without its code generator: seconds instead of minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})


@pytest.fixture
def traced(functional, monkeypatch):
    """The graph runs as it was traced, which takes half as long."""
    if not FULL:
        monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})


def run(target, rows, draft, k=4, **options):
    out = speculate(target, rows, draft, k, speculative=COMPILED, **options)
    hf_specdec.disable(target)
    return generated(out, rows)


def compiled_once(model) -> bool:
    """Whether torch has one version of every function."""
    return all(len(_debug_get_cache_entry_list(function.__wrapped__.__code__)) == 1 for function in compiled._functions[model].made.values())


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", SHARE)
def test_greedy_texts_are_those_of_plain_generate(name, functional, strict):
    target, rows = family(name).model("eager"), repetitive(13) + prompts(7)
    texts = plain(target, rows, max_new_tokens=16)
    assert run(target, rows, PromptLookupDraft(), max_new_tokens=16) == texts
    assert compiled._functions[target].made


@pytest.mark.share(0)
def test_a_draft_model_and_a_tree_are_compiled_too(traced, strict):
    target, rows = family("Llama").model("eager"), prompts(9, 5)
    texts = plain(target, rows)
    draft = perturbed(target, 0.05)
    assert run(target, rows, ModelDraft(draft)) == texts
    assert {key[1] for key in compiled._functions[draft].made} == {1, 2, -2} and {1, 2} <= {key[1] for key in compiled._functions[target].made}
    assert run(target, rows, KnowingTreeDraft([row + text for row, text in zip(rows, texts)]), k=10) == texts
    assert run(target, rows[:1], EarlyExitDraft(target, 1)) == texts[:1]
    assert run(target, rows, CompressedDraft(target, perturbed(target))) == texts


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", ["feature", "mixture of two", *(["feature_tree, by confidence", "medusa", "parallel, tree", "pass", "online"] if FULL else [])])
def test_a_draft_that_reads_the_targets_states_is_compiled_and_sees_what_it_sees_without(name, traced, strict):
    target, rows = family("Llama").model("eager"), repetitive(13) + (prompts(7) if name == "feature" or FULL else [])
    if name == "mixture of two":
        drafter = feature_drafter(target)
        draft = MixtureDraft([FeatureDraft(drafter, target), make("medusa", target)], "merge")
    else:
        draft = make(name, target, BUILDERS | VARIANTS)
    without = speculate(target, rows, draft, 6, max_new_tokens=24)
    made = []
    for _ in range(2):
        draft = make(name, target, BUILDERS | VARIANTS) if name == "online" else draft  # that one has learned
        out = speculate(target, rows, draft, 6, max_new_tokens=24, speculative=COMPILED)
        assert generated(out, rows) == plain(target, rows, max_new_tokens=24)
        assert out.speculation.rounds == without.speculation.rounds
        made.append(set(compiled._functions[target].made))
    assert name == "online" or made[0] == made[1] and (name == "pass" or any(key[-1] for key in made[0]))  # the second call uses the functions of the first
    if name.startswith("feature"):
        assert {key[-1] for key in compiled._functions[draft.model].made} == {(draft.model.config.num_hidden_layers,)}
        assert name != "feature" or {-4} <= {key[1] for key in compiled._functions[draft.model].made}
    hf_specdec.disable(target)


def test_a_tree_on_the_targets_states_may_begin_with_one_token(traced, strict):
    """In the first round there are no states yet, and nothing to forget."""
    target, rows = one_layer("Llama"), prompts(1)
    assert run(target, rows, make("feature_tree", target), 2, max_new_tokens=4) == plain(target, rows, max_new_tokens=4)


@pytest.mark.skipif(not FULL, reason="make test-all")
def test_a_draft_whose_head_lacks_tokens_is_compiled_too(traced, strict):
    """They have minus infinity, which is nothing to compare by subtraction."""
    target, rows = family("Llama").model("eager"), prompts(9, 5)
    texts, draft, kept = plain(target, rows), perturbed(target, 0.05), torch.arange(0, target.config.vocab_size, 2)
    draft.lm_head = PrunedHead(draft.lm_head.weight[kept].detach().clone(), kept, target.config.vocab_size)
    assert run(target, rows, ModelDraft(draft)) == texts
    assert compiled._functions[draft].made


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("mode", "k"), [("choose", "auto"), ("merge", 4), *([("choose", 4), ("merge", "auto")] if FULL else [])])
def test_a_mixture_with_a_draft_model_is_compiled_too(mode, k, traced, strict):
    target, rows = family("Llama").model("eager"), repetitive(13) + prompts(7)
    texts, draft = plain(target, rows), perturbed(target, 0.05)
    out = speculate(target, rows, MixtureDraft([PromptLookupDraft(), ModelDraft(draft)], mode=mode), k, speculative={"compile": True})
    hf_specdec.disable(target)
    assert generated(out, rows) == texts and compiled._functions[target].made
    assert k == "auto" or compiled._functions[draft].made  # by the clock it may never be asked


@pytest.mark.parametrize("name", SHARE[1:2] if not FULL else NAMES[:4])
@pytest.mark.parametrize("tree", TREES[:2], ids=["chain", "tree"])
def test_what_lies_behind_the_text_is_never_seen(name, tree, traced, strict):
    """Slots beyond the committed ones hold huge numbers before every pass."""
    model, rows = family(name).model("eager"), prompts(9, 3, 14)
    cached = CachedModel(model, 60, compile=True)
    for round, leaves in enumerate(([len(tree), 0, 1], [0, len(tree), 2])):
        drafted = proposal(tree, 3, seed=round)
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, leaves)
        for layer in cached.cache.layers:
            for b, length in enumerate(cached.lengths):
                layer.keys[b, :, length:] = layer.values[b, :, length:] = 1e4
    check_scores(model, cached, rows, proposal(tree, 3, seed=9))


@pytest.mark.share(0)
@pytest.mark.parametrize("compile", ["model", "layers"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3 (text)", "Llama 4 (text, chunked)"])
def test_a_cache_that_grows_needs_no_other_functions(name, compile, traced, strict, monkeypatch):
    monkeypatch.setattr("hf_specdec.kv_cache.FEWEST", 32)
    monkeypatch.setattr("hf_specdec.kv_cache.SLACK", 4)
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = family(name).model("eager"), prompts(20)
    out = speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": compile}, max_new_tokens=60)
    hf_specdec.disable(target)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=60)
    made = compiled._by_layers[target].functions if compile == "layers" else compiled._functions[target]
    assert {own[1] for own in made.tried if isinstance(own[1], int)} >= {32, 64, 128} and len(made.made) == len(made.shapes) and not made.apart


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("compile", ["model", "layers"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3 (text)", *(NAMES[2:] if FULL else [])])
def test_one_function_serves_any_number_of_rows_and_tokens(name, compile, functional, strict, monkeypatch):
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = family(name).model("eager"), prompts(9, 3, 14, 5, 7)
    cached = CachedModel(target, 120, compile=compile)
    for kept in ([0, 1, 2, 3, 4], [1, 2, 4], [0, 2]):
        cached.keep(kept) if len(kept) < len(rows) else None
        rows = [rows[b] for b in kept]
        for tree in (Tree.chain(2), Tree((0, 0, 1, 1)), Tree(()), Tree.chain(11)):
            drafted = proposal(tree, len(rows), seed=len(rows))
            check_scores(target, cached, rows, drafted)
            take(cached, rows, drafted, [0] * len(rows))
    made = compiled._by_layers[target].functions if compile == "layers" else compiled._functions[target]
    blocks = [key for key in made.made if len(made.shapes[key]) == 3]
    assert blocks and not made.apart and all(len(_debug_get_cache_entry_list(made.made[key].__wrapped__.__code__)) == 1 for key in blocks)
    assert compile == "layers" or sorted(key[:3] for key in blocks) == [(2, 1, True), (2, 2, False), (2, 2, True)]


@pytest.mark.parametrize("compile", ["model", "layers"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3 (text)"])
def test_one_number_says_how_many_slots_there_are(name, compile, strict, monkeypatch):
    """Of all buffers and masks: torch makes a tensor of every number that it gives a compiled function."""
    torch._dynamo.reset()
    numbers = []

    def backend(graph, inputs):
        numbers.append([str(value.node.expr) for value in inputs if isinstance(value, torch.SymInt)])
        return graph

    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": backend})
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = family(name).model("eager"), prompts(20)
    monkeypatch.setattr(compiled.CompiledPasses, "start", lambda *given: None)  # the prompt's length is another number
    speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": compile}, max_new_tokens=8)
    hf_specdec.disable(target)
    assert numbers and all(len(set(given)) == 1 and len(given) <= 2 for given in numbers)  # two buffers and a mask a layer would be three numbers and more


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("compile", ["model", "layers"])
@pytest.mark.parametrize("name", ["Gemma 4 (text)", "Gemma 3n (text)"])
def test_layers_that_look_at_the_keys_of_others_are_compiled_too(name, compile, traced, strict, monkeypatch):
    """And so are prompts, once for all lengths."""
    monkeypatch.setattr(compiled, "FLAT", 0)
    target = family(name).model("eager")
    for length in (20, 9):
        rows = prompts(length)
        out = speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": compile}, max_new_tokens=12)
        hf_specdec.disable(target)
        assert generated(out, rows) == plain(target, rows, max_new_tokens=12)
    by_layers = compiled._by_layers[target]
    assert by_layers.functions.made and not by_layers.changes and (compile == "layers" or compiled._functions[target].made)


def test_prompts_that_do_not_compile_are_no_reason_for_other_passes(traced, strict, monkeypatch):
    """Layers of Dory run several times in a pass, which they cannot one by one."""
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = family("Dory").model("eager"), prompts(20)
    for _ in range(2):
        out = speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": "model"}, max_new_tokens=12)
        hf_specdec.disable(target)
        assert generated(out, rows) == plain(target, rows, max_new_tokens=12)
    assert compiled._functions[target].made and not compiled._refusals.get(target)


def test_an_argument_that_is_no_mask_may_have_another_length():
    def ask(keys, values, mask, cosines):
        return of_one_length([Held(keys, values)], None, mask, cosines), keys + values

    torch._dynamo.reset()
    run = torch.compile(ask, backend="eager", fullgraph=True, dynamic=True)
    for slots in (32, 48, 96):
        buffer, mask, cosines = torch.ones(1, 2, slots, 8), torch.ones(1, 1, 4, slots), torch.ones(1, 1, 4, 8)
        assert not run(buffer, buffer, mask, cosines)[0] and of_one_length([Held(buffer, buffer)], None, mask)
    assert len(_debug_get_cache_entry_list(ask.__code__)) == 1


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("compile", ["model", "layers"])
def test_a_model_that_asks_how_many_slots_there_are_gets_functions_for_each_number(compile, traced, strict, monkeypatch):
    def attention(module, query, key, value, attention_mask, **kwargs):
        few = key.shape[2] <= 40
        return sdpa_attention_forward(module, query if few else query * 1.0, key, value, attention_mask, **kwargs)

    AttentionInterface.register("asks_for_slots", attention)
    AttentionMaskInterface.register("asks_for_slots", sdpa_mask)
    monkeypatch.setattr("hf_specdec.kv_cache.FEWEST", 32)
    monkeypatch.setattr("hf_specdec.kv_cache.SLACK", 4)
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = one_layer("Llama") if compile == "model" else family("Llama").model("eager"), prompts(20)
    target.set_attn_implementation("asks_for_slots")
    texts = plain(target, rows, max_new_tokens=60)
    for _ in range(2):
        out = speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": compile}, max_new_tokens=60)
        hf_specdec.disable(target)
        assert generated(out, rows) == texts
    made = compiled._by_layers[target].functions if compile == "layers" else compiled._functions[target]
    assert made.apart and {own[1] for own in made.made if own[0] in made.apart} >= {64, 128}


def test_later_calls_use_the_functions_of_the_first_and_notice_another_dtype(traced, strict):
    target, rows = one_layer("Llama"), prompts(9)
    run(target, rows, PromptLookupDraft())
    before = dict(compiled._functions[target].made)
    run(target, rows, PromptLookupDraft())
    assert compiled._functions[target].made == before
    target.double()
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert len(compiled._functions[target].made) == 2 * len(before)


@pytest.mark.share(0)
def test_a_model_that_was_changed_between_calls_is_compiled_again(traced, strict):
    target, rows = family("Llama").model("eager"), prompts(9)
    before = run(target, rows, PromptLookupDraft())
    for layer in target.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()
    after = plain(target, rows)
    assert run(target, rows, PromptLookupDraft()) == run(target, rows, PromptLookupDraft()) == after != before


def test_later_calls_leave_nothing_in_the_context_of_their_caller(traced, strict):
    target, rows = one_layer("Llama"), prompts(9)
    run(target, rows, PromptLookupDraft())
    before = len(copy_context())
    run(target, rows, PromptLookupDraft())
    assert len(copy_context()) == before


def test_guards_are_evaluated_once_a_call(traced, strict, monkeypatch):
    target, rows = one_layer("Llama"), prompts(9)
    run(target, rows, PromptLookupDraft())
    calls = {}
    for key, function in compiled._functions[target].made.items():
        def counted(*given, key=key, function=function):
            calls[key] = calls.get(key, 0) + 1
            return function(*given)

        counted.__wrapped__ = function.__wrapped__
        compiled._functions[target].made[key] = counted
    run(target, rows, PromptLookupDraft())
    assert calls and set(calls.values()) == {1}


@pytest.mark.parametrize("why", ["hooks", "masks of its own", "cannot be traced", "wrong logits"])
def test_what_does_not_compile_runs_without_and_says_so(why, traced, monkeypatch):
    target, rows = (family("BLOOM").model("eager") if why == "masks of its own" else family("Llama").model("eager")), prompts(9)
    texts, draft = plain(target, rows), PromptLookupDraft()
    if why == "hooks":
        target.model.layers[0].register_forward_hook(lambda *_: None)
    if why == "cannot be traced":
        monkeypatch.setattr(compiled.FixedCache, "update", lambda self, *args, **kwargs: torch._dynamo.graph_break())
    if why == "wrong logits":
        monkeypatch.setattr(compiled.FixedCache, "update", lambda self, keys, values, *args, **kwargs: (keys, values))
    with pytest.warns(UserWarning, match="runs without compile=True"):
        assert run(target, rows, draft) == texts
    made = []
    monkeypatch.setattr(passes, "alone", lambda *args: made.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(target, rows, draft) == texts
    assert not made


def test_hooks_that_are_gone_are_no_reason_in_the_next_call(traced):
    target, rows = one_layer("Llama"), prompts(9)
    hook = target.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="forward hooks"):
        run(target, rows, PromptLookupDraft())
    assert not compiled._functions[target].made
    hook.remove()
    run(target, rows, PromptLookupDraft())
    assert compiled._functions[target].made


def test_hooks_that_transformers_leaves_behind_are_no_reason(traced):
    """It installs them in the first call with output_hidden_states=True, for good."""
    target, rows = one_layer("Llama"), prompts(9)
    target(torch.tensor(rows), output_hidden_states=True)
    texts = plain(target, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(target, rows, PromptLookupDraft()) == texts
    assert compiled._functions[target].made


def test_running_out_of_memory_is_no_reason_in_the_next_call(traced, monkeypatch):
    target, rows = one_layer("Llama"), prompts(9)
    texts = plain(target, rows)

    def full(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="torch.compile says MemoryError: no room"):
        patch.setattr(passes.Functions, "ask", full)
        assert run(target, rows, PromptLookupDraft()) == texts
    assert not compiled._functions[target].made
    assert run(target, rows, PromptLookupDraft()) == texts and compiled._functions[target].made


def test_a_refusal_dies_with_its_model(traced, monkeypatch):
    monkeypatch.setattr(compiled.FixedCache, "update", lambda self, *args, **kwargs: torch._dynamo.graph_break())
    target = family("Llama").model("eager")
    with pytest.warns(UserWarning, match="torch.compile says"):
        run(target, prompts(9), PromptLookupDraft())
    assert "torch.compile says" in next(iter(compiled._refusals[target]))
    alive = weakref.ref(target)
    del target
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_the_compiler_gives_the_same_texts():
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    target, rows = one_layer("Llama"), prompts(9)
    assert run(target, rows, PromptLookupDraft()) == plain(target, rows)
    assert compiled._functions[target].made


@torch.library.custom_op("hf_specdec_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)


@pytest.mark.parametrize(("function", "generated"), [
    (lambda x: x * 2, True), (doubled, False), (lambda x: torch.ops.hf_specdec_tests.doubled(x) + 1, False),
    (lambda x: torch.cond(x.sum() > 0, lambda x: torch.ops.hf_specdec_tests.doubled.default(x), lambda x: x + 1, (x,)), False),
], ids=["torch's own", "an operator", "its packet", "in a branch"])
def test_generated_cpp_calls_no_operators_of_other_libraries(function, generated, monkeypatch):
    """It crashes where one returns None, as LLM.int8's do."""
    seen = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: seen.append(options["cpp_wrapper"]) or graph)
    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(lambda x: function(x), fullgraph=True, **passes.options(torch.device("cpu"), 1))(torch.ones(3))
    assert seen == [generated]


@pytest.mark.share(0)
@pytest.mark.parametrize(("k", "widths"), [(3, (1, 4)), (4, (1, 4, 8))])  # 4: the function of two passes gets two of three coins
def test_warming_up_compiles_what_a_call_needs(k, widths, traced, strict):
    target, rows = enabled(family("Llama").model("eager")), repetitive(13)[:1]
    draft, config = perturbed(target, 0.05), {"num_assistant_tokens": k}
    assert hf_specdec.warmup(target, draft, config, max_length=100) == len(widths) + 3
    made = {model: dict(compiled._functions[model].made) for model in (target, draft)}
    assert {key[:2] for key in made[target]} == {(1, width) for width in widths} and {key[:2] for key in made[draft]} == {(1, 1), (1, 4), (1, -2)}
    assert run(target, rows, ModelDraft(draft), k=k) == plain(target, rows)
    assert all(compiled._functions[model].made == functions for model, functions in made.items()) and all(map(compiled_once, made))


@pytest.mark.share(0)
@pytest.mark.parametrize("sampling", [{"do_sample": True, "temperature": 0.9, "top_p": 0.9}, {"do_sample": True, "no_repeat_ngram_size": 2}, {}], ids=str)
def test_warming_up_for_sampling_compiles_what_draws(sampling, traced, strict):
    target, rows = enabled(family("Llama").model("eager")), repetitive(13)[:1]
    draft = perturbed(target, 0.05)
    if not sampling:
        target.generation_config.do_sample, target.generation_config.stop_strings = True, ["stop"]
    hf_specdec.warmup(target, draft, {"num_assistant_tokens": 3}, max_length=100, sampling=sampling or None)
    made = {model: dict(compiled._functions[model].made) for model in (target, draft)}
    assert any(key[1] < 0 for key in made[draft]) == ("no_repeat_ngram_size" not in sampling)
    target.generation_config.stop_strings = None
    run(target, rows, ModelDraft(draft), k=3, max_new_tokens=20, **{"do_sample": True, **sampling, **({"temperature": 0.6} if "temperature" in sampling else {})})
    assert all(compiled._functions[model].made == functions for model, functions in made.items()) and all(map(compiled_once, made))


@pytest.mark.skipif(OLD_TORCH, reason="this torch compiles some functions once more")
@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", ["feature", "prompt_lookup", *(["medusa", "cascade"] if FULL else [])])
def test_warming_up_for_a_draft_compiles_what_its_calls_need(name, traced, strict):
    target, rows = enabled(family("Llama").model("eager")), repetitive(13)[:1]
    draft = make(name, target)
    hf_specdec.warmup(target, draft, {"num_assistant_tokens": 3}, max_length=100)
    models = [target, *(run.model for run in draft.models())]
    made = [dict(compiled._functions[model].made) for model in models]
    assert run(target, rows, draft, k=3) == plain(target, rows)
    assert [dict(compiled._functions[model].made) for model in models] == made and all(made) and all(map(compiled_once, models))


@pytest.mark.skipif(OLD_TORCH, reason="this torch compiles some functions once more")
def test_warming_up_for_several_rows_compiles_what_smaller_numbers_need(traced, strict):
    target, rows = enabled(family("Llama").model("eager")), repetitive(13) + prompts(7, 4)
    assert hf_specdec.warmup(target, None, {"num_assistant_tokens": 3}, max_length=100, batch=3) == 4  # of one row 1 and 4 places, of several 1 and more
    made = dict(compiled._functions[target].made)
    texts = plain(target, rows, max_new_tokens=16)
    for end in {text[5] for text in texts}:  # rows end one by one
        assert run(target, rows, PromptLookupDraft(), k=3, max_new_tokens=16, eos_token_id=end) == plain(target, rows, max_new_tokens=16, eos_token_id=end)
    assert compiled._functions[target].made == made and compiled_once(target)


def test_warming_up_may_leave_the_draft_out(traced, strict):
    target = enabled(family("Llama").model("eager"))
    draft = make("feature", target)
    hf_specdec.warmup(target, draft, {"num_assistant_tokens": 3}, max_length=100, batch=2, drafts=False)
    assert all(key[-1] == draft.watching() for key in compiled._functions[target].made) and compiled._functions[target].made
    assert not any(run.model in compiled._functions for run in draft.models())


@torch.no_grad()
@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3 (text)", "GPT-2"])
def test_several_passes_in_one_function_draft_what_single_ones_do(name, traced, strict):
    model, rows, root = family(name).model("eager"), prompts(9, 5), torch.tensor([[3], [4]])

    def drafting(together: bool) -> tuple:
        cached = CachedModel(model, 60, compile=True)
        cached.score(rows)
        cached.commit([1, 1])
        if together:
            vocab, drawing, uniform = model.config.vocab_size, Sampler.greedy().traceable(model.device), torch.zeros(2, 5)
            (tokens, laws, states), none = (cached.several(root, k, vocab, drawing, uniform) for k in ([5, 2], [1, 1]))
            assert laws is None and states is None and none is None
        else:
            tokens, token = [], root
            for step in range(4):
                token = cached.extend(token, [1, int(step < 2)]).argmax(-1)
                tokens.append(token)
            tokens = torch.cat(tokens, dim=1)
        return tokens[0].tolist(), tokens[1, :2].tolist(), cached.lengths, cached.calls, cached.extend(torch.tensor([[5], [6]]), [1, 1])

    (*one, logits), (*other, reference) = drafting(True), drafting(False)
    assert one == other and torch.allclose(logits, reference, atol=1e-5)


WARPERS = {
    "none": [], "temperature": [TemperatureLogitsWarper(0.7)], "top_k": [TopKLogitsWarper(7)], "min_p": [MinPLogitsWarper(0.1)],
    "epsilon_cutoff": [EpsilonLogitsWarper(0.01)], "typical_p": [TypicalLogitsWarper(0.6)], "top_p": [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.75)],
}


@torch.no_grad()
@pytest.mark.share(0)
@pytest.mark.parametrize("name", WARPERS if FULL else ["none", "min_p", "typical_p", "top_p"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if FULL else [torch.float32])
def test_several_passes_in_one_function_draw_what_single_ones_do_from_the_same_laws(name, dtype, traced, strict):
    model, rows, root, uniform = family("Llama").model("eager").to(dtype), prompts(9, 5), torch.tensor([[3], [4]]), torch.rand(2, 4).double()
    sampler, vocab = Sampler([WARPERS[name]] * 2, do_sample=True), model.config.vocab_size - 3

    def cached() -> CachedModel:
        own = CachedModel(model, 60, compile=True)
        own.score(rows)
        own.commit([1, 1])
        return own

    tokens, laws, _ = cached().several(root, [4, 4], vocab, sampler.traceable(model.device), uniform)
    single, token = cached(), root
    for step in range(4):
        law = sampler(single.extend(token, [1, 1])[..., :vocab], [1, 1], lambda b, i: None).probs_at(torch.tensor([0, 0]))
        token = draw(law, uniform[:, step])[:, None]
        assert laws.dtype == law.dtype == torch.float32 and torch.allclose(laws[:, step], law, atol=1e-6)
        assert torch.equal(tokens[:, step], token[:, 0])


@pytest.mark.share(1 / 20)
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"eta_cutoff": 0.01}, {"no_repeat_ngram_size": 3}, {"draft_stop": "confidence"}], ids=str)
@pytest.mark.parametrize("lengths", [(7, 7), (9, 5)], ids=str)
@pytest.mark.parametrize("name", ["model", "feature"])
def test_sampled_texts_and_their_rounds_are_those_without_compiling(name, lengths, options, traced, strict):
    """Also where a draft's vocabulary is a smaller one, and where what it draws is not decided inside the function."""
    target, rows = family("Llama").model("eager"), prompts(*lengths)
    own = {name: options[name] for name in options if name == "draft_stop"}
    options = {name: options[name] for name in options if name not in own}
    smaller = perturbed(target, 0.05)
    smaller.resize_token_embeddings(target.config.vocab_size - 5)
    draft = FeatureDraft(feature_drafter(target), target) if name == "feature" else ModelDraft(smaller)
    for seed, temperature in enumerate((0.7, 1.2)):
        outs = [speculate(target, rows, draft, 5, do_sample=True, temperature=temperature, max_new_tokens=20,
                          speculative={"seed": seed, "compile": compile, **own}, **options) for compile in (False, True)]
        assert generated(outs[0], rows) == generated(outs[1], rows) and outs[0].speculation.rounds == outs[1].speculation.rounds
    hf_specdec.disable(target)
    made = sorted(key[1] for key in compiled._functions[draft.model].made if key[1] < 0)
    assert bool(made) == (not own and set(options) <= {"top_p"})


@pytest.mark.share(0)
def test_another_temperature_is_no_other_function_and_another_top_k_is(traced, strict):
    target, rows = family("Llama").model("eager"), prompts(9)
    draft, counts = perturbed(target, 0.05), []
    for options in ({"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.9, "top_k": 5}):
        speculate(target, rows, ModelDraft(draft), 3, speculative=COMPILED, do_sample=True, max_new_tokens=16, **options)
        counts.append(sum(key[1] < 0 for key in compiled._functions[draft].made))
    assert counts == [1, 1, 1, 2, 2]
    assert compiled_once(draft)
    hf_specdec.disable(target)


@pytest.mark.share(0)
@pytest.mark.parametrize("draft", [ModelDraft, lambda model: make("model_tree", model)], ids=["chain", "tree"])
def test_every_function_is_given_dense_tensors(draft, traced, strict, monkeypatch):
    """A function without guards reads them as they lay when it was traced: rows that all began at one slot shared their positions, and memory behind
    them was read for the positions of the second row."""
    target, rows, given = family("Llama").model("eager"), prompts(7, 7), []
    run_ = compiled.CompiledPasses._run
    monkeypatch.setattr(compiled.CompiledPasses, "_run", lambda self, *args: given.append(args[5:]) or run_(self, *args))
    run(target, rows, draft(perturbed(target, 0.05)))
    tensors = [part for parts in given for part in tree_leaves(parts) if torch.is_tensor(part)]
    assert len(given) > 4 and all(part.is_contiguous() for part in tensors)


@pytest.mark.share(0)
@pytest.mark.parametrize(("name", "limit"), [("GPT-2", "n_positions"), ("OPT", "max_position_embeddings")])
def test_a_row_at_the_end_of_the_drafts_context_gets_no_position_beyond_it(name, limit, traced, strict):
    own = family(name)
    target, draft = own.model("eager"), replace(own, settings=own.settings | {limit: 64}).model("eager")
    rows = prompts(60, 20)
    out = speculate(target, rows, ModelDraft(draft), 8, speculative=COMPILED, max_new_tokens=12)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=12) and not compiled._refusals.get(draft)
    assert {-4} <= {key[1] for key in compiled._functions[draft].made}
    hf_specdec.disable(target)


@pytest.mark.share(0)
@pytest.mark.parametrize("k", [[4], [4, 1]], ids=str)
def test_what_has_to_be_decided_after_every_token_is_drafted_step_by_step(k, traced, strict):
    target, rows = family("Llama").model("eager"), prompts(9, 5)[: len(k)]
    ways = {"greedy": ({}, True), "sampling": ({"do_sample": True}, True), "a processor": ({"no_repeat_ngram_size": 3}, False),
            "sampling, a processor": ({"do_sample": True, "no_repeat_ngram_size": 3}, False)}
    for options, together in ways.values():
        draft = perturbed(target, 0.05)
        speculate(target, rows, ModelDraft(draft), max(k), speculative=COMPILED, **options)
        assert (min(key[1] for key in compiled._functions[draft].made) < 0) == together
    hf_specdec.disable(target)


def test_a_function_of_several_passes_has_a_bounded_number_of_layers(monkeypatch):
    passes = compiled.CompiledPasses(family("Llama").model("eager"), "assistant_model")
    for layers, most in ((1, 64), (2, 32), (3, 16), (30, 2), (33, 1), (100, 1)):
        passes.model.config.num_hidden_layers = layers
        assert passes.most_steps() == most


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("kept", [("cpu",), ()], ids=["kept", "not kept"])
def test_buffers_go_from_call_to_call_and_what_was_returned_stays(kept, traced, strict, monkeypatch):
    """Where CUDA graphs know addresses; on a CPU nothing is kept."""
    monkeypatch.setattr(compiled, "KEPT", kept)
    target, rows, taken = family("Llama").model("eager"), repetitive(13)[:1], []
    take = compiled.FixedBuffers.take
    monkeypatch.setattr(compiled.FixedBuffers, "take", lambda *args: taken.append(take(*args)) or taken[-1])
    texts, outs = plain(target, rows), []
    for prompt in (rows, prompts(11), rows):
        out = speculate(target, prompt, PromptLookupDraft(), 4, speculative=COMPILED)
        assert generated(out, prompt) == plain(target, prompt)
        outs.append((out[CACHE], [layer.keys.clone() for layer in out[CACHE].layers]))
    assert len({part.data_ptr() for part in taken}) == (len(taken) // 3 if kept else len(taken)) and generated(out, rows) == texts
    assert all(torch.equal(layer.keys, keys) for cache, own in outs for layer, keys in zip(cache.layers, own))
    assert len(compiled._idle.get(target, {})) == (len(taken) // 3 if kept else 0)
    hf_specdec.disable(target)
    assert target not in compiled._idle


def test_two_calls_at_a_time_share_no_buffer(monkeypatch):
    monkeypatch.setattr(compiled, "KEPT", ("cpu",))
    model, like = family("Llama").model("eager"), torch.zeros(1)
    one, other = (compiled.FixedBuffers(model, "target").take("keys", (2, 3), like) for _ in range(2))
    assert one.data_ptr() != other.data_ptr()
    one.fill_(torch.nan)
    for buffer in (one, other):
        compiled.FixedBuffers(model, "target").give_back("keys", buffer)
    again = compiled.FixedBuffers(model, "target").take("keys", (2, 3), like)
    assert again is one and not again.any()
    assert compiled.FixedBuffers(model, "assistant_model").take("keys", (2, 3), like) is not other


def test_a_buffer_of_a_call_in_inference_mode_is_not_for_one_outside(monkeypatch):
    """torch refuses to write into it there."""
    monkeypatch.setattr(compiled, "KEPT", ("cpu",))
    model, like = family("Llama").model("eager"), torch.zeros(1)
    buffers = compiled.FixedBuffers(model, "target")
    with torch.inference_mode():
        inside = buffers.take("keys", (2, 3), like)
        buffers.give_back("keys", inside)
    outside = buffers.take("keys", (2, 3), like)
    buffers.give_back("keys", outside)
    assert inside.is_inference() and not outside.is_inference() and buffers.take("keys", (2, 3), like) is outside
    with torch.inference_mode():
        assert buffers.take("keys", (2, 3), like) is inside


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_every_pass_is_a_cuda_graph(dtype, strict):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    target, rows = family("Llama").model("sdpa").to("cuda", dtype), prompts(9)
    texts, draft = plain(target, rows), perturbed(target, 0.05)
    for _ in range(3):
        assert run(target, rows, ModelDraft(draft)) == texts or dtype != torch.float32
    assert min(key[1] for key in compiled._functions[draft].made) < 0 and not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize(("wrong", "name"), [({"max_length": 0}, "max_length"), ({"batch": True}, "batch"), ({"nodes": 64}, "nodes"),
                                             ({"draft": "prompt_lookup"}, "draft: str is no model"), ({"sampling": {"top_g": 3}}, "top_g"),
                                             ({"sampling": True}, "sampling"), ({"config": {"K": 3}}, "'K'")])
def test_warming_up_checks_its_arguments(wrong, name):
    with pytest.raises(ValueError, match=name):
        hf_specdec.warmup(family("Llama").model("eager"), **wrong)
    with pytest.raises(TypeError, match="model: expected a transformers model, got str"):
        hf_specdec.warmup("smollm2")


def test_a_round_that_had_to_be_compiled_first_is_no_measure_of_what_rounds_cost(traced, monkeypatch):
    seen, observe = [], AutoSchedule.observe

    def noting(self, proposed, accepted, seconds, told):
        seen.append((max(proposed), seconds))
        observe(self, proposed, accepted, seconds, told)

    monkeypatch.setattr(AutoSchedule, "observe", noting)
    speculate(family("Llama").model(), repetitive(12), k="auto", max_new_tokens=20, speculative={"compile": "model"})
    assert [width for width, seconds in seen[1:] if seconds is None] and [width for width, seconds in seen if seconds is not None]
    assert len([width for width, seconds in seen[1:] if seconds is None]) <= 4  # a function a width
