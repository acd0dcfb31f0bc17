"""Compiled passes of models whose layers carry states: the same texts, and states that are made of what a function was told. torch traces, and the C++ compiler is left out."""

import random
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_specdec
from hf_specdec import compiled, fixed_cache, mx, passes
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import GOES_ON
from hf_specdec.drafts import ModelDraft, PromptLookupDraft
from hf_specdec.mx.kernels import cpu
from hf_specdec.proposal import Proposal
from hf_specdec.recurrences import Told
from tests.helpers import OLD_TORCH, ScriptedDraft, generated, perturbed, plain, prompts, repetitive, speculate
from tests.test_layerwise import traced  # noqa: F401 (around every test)
from tests.test_states import CONVOLUTIONS, CPU, HERE, RECURRENT, model_of

pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")
KINDS = ["Qwen3.5 (text)", "Mamba 2", "Falcon-H1", "LFM2", "Kimi Linear", "Granite 4 (hybrid)", "Nemotron-H", "OLMo (hybrid)", "Lara mini", "Inkling (text)", "Inkling 2 (text)"]
KINDS = [kind for kind in KINDS if kind in HERE]
every_kind = pytest.mark.parametrize("kind", KINDS)
WHOLE = {  # sizes of whole vectors, as those of models that are in use
    "qwen3_5_text": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=16,
                         linear_num_value_heads=16, linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"]),
    "granitemoehybrid": dict(hidden_size=64, shared_intermediate_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=16, mamba_d_head=8, mamba_d_state=16, layer_types=["mamba", "attention"]),
}
every_way = pytest.mark.parametrize("way", ["model", "layers"])


@pytest.fixture
def strict():
    """A model that falls back to eager passes would pass tests of compiled ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without compile=True")
        yield


def run(target, rows, draft, way, k=4, **options):
    out = speculate(target, rows, draft, k, speculative={"seed": 0, "compile": way}, **options)
    hf_specdec.disable(target)
    return generated(out, rows)


def made(model) -> int:
    """How many functions were compiled for a model."""
    by_layers = compiled._by_layers.get(model)
    return len(compiled._functions[model].made) + (len(by_layers.functions.made) if by_layers else 0)


@pytest.mark.share(1)
@every_way
@every_kind
def test_greedy_texts_are_those_of_plain_generate(kind, way, strict):
    target, rows = model_of(kind), prompts(12, 7, 9)
    for some, draft in ((rows[:1], perturbed(target)), (rows[:1] if kind.startswith("Inkling") else rows, None)):
        texts = plain(target, some, max_new_tokens=20)
        draft = draft or ScriptedDraft.knowing([row + text for row, text in zip(some, texts)], wrong=3)
        assert run(target, some, draft, way, max_new_tokens=20) == texts
    assert made(target)


@pytest.mark.share(1)
@every_way
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Nemotron-H"])  # which limits time steps in a text that it reads at once
@torch.no_grad()
def test_whatever_is_drafted_kept_and_forgotten_the_logits_are_those_of_the_whole_text(kind, way, strict):
    model, rng = model_of(kind), random.Random(kind)
    cached, text = CachedModel(model, 200, compile=way), prompts(7)[0]
    for step in range(12):
        drafted = [rng.randrange(1, 60) for _ in range((0, 3, 2, 0, 6, 3)[step % 6])]  # widths that fill a block, and others
        logits = cached.score([text], Proposal.from_lists([drafted], CPU))[0]
        whole = model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, whole[len(text) - 1 :], atol=2e-3, rtol=0)
        kept = len(drafted) if step % 3 == 1 else rng.randint(0, len(drafted))
        cached.commit([1 + kept])
        text += drafted[:kept]
        assert cached.lengths == [len(text)]
        if step % 4 == 3:
            cached.crop([len(text) - 1])
        text = [*text, rng.randrange(1, 60)]
    assert cached.compiled.usable and made(model)


@pytest.mark.parametrize("kind", [RECURRENT, CONVOLUTIONS, "Mamba 2"])
def test_sampling_processors_stopping_and_k_auto(kind, strict):
    target, rows = model_of(kind), repetitive(12) + prompts(9)
    eos = plain(target, rows, max_new_tokens=24)[0][17]
    for options in (dict(repetition_penalty=1.3), dict(eos_token_id=eos)):
        assert run(target, rows, PromptLookupDraft(), "model", max_new_tokens=24, **options) == plain(target, rows, max_new_tokens=24, **options)
    torch.manual_seed(0)
    drawn = run(target, rows, perturbed(target), "model", max_new_tokens=24, do_sample=True, temperature=0.7)
    torch.manual_seed(0)
    out = speculate(target, rows, perturbed(target), 4, max_new_tokens=24, do_sample=True, temperature=0.7, speculative={"seed": 0})
    assert drawn == generated(out, rows)
    hf_specdec.disable(target)
    assert run(target, rows, ModelDraft(perturbed(target)), "model", k="auto", max_new_tokens=24) == plain(target, rows, max_new_tokens=24)


@every_way
@pytest.mark.parametrize("kind", [RECURRENT, CONVOLUTIONS])
def test_later_calls_use_the_functions_of_the_first(kind, way, strict):
    target, rows = model_of(kind), prompts(12, 9, 14)
    texts = [plain(target, [row], max_new_tokens=16) for row in rows]
    draft = perturbed(target)
    for row in rows[:2]:
        run(target, [row], draft, way, k=3, max_new_tokens=16)
    before, frames = made(target), counters["stats"]["unique_graphs"]
    for row, text in zip(rows, texts):
        assert run(target, [row], draft, way, k=3, max_new_tokens=16) == text
    assert (made(target), counters["stats"]["unique_graphs"]) == (before, frames)


@pytest.mark.parametrize("kind", [RECURRENT, "Mamba 2"])
@torch.no_grad()
def test_a_state_is_made_where_it_is_asked_for_and_the_one_before_is_left_alone(kind):
    model, (row,) = model_of(kind), prompts(16)
    cached = CachedModel(model, 64, compile="model")
    cached.score([row[:5]])
    cached.commit([1])
    before = [{i: None if part is None else part.clone() for i, part in recurrent.items()} for _, recurrent in cached.states.kept[-1].states]
    cached.score([row[:6]], Proposal.from_lists([row[6:9]], CPU))  # the first pass of its function is compared with the same uncompiled
    cached.commit([1])
    cached.crop([5])
    cached.score([row[:6]], Proposal.from_lists([row[6:9]], CPU))
    assert cached.states.kept[-1].open and not any(isinstance(part, Told) for _, recurrent in cached.states.kept[-1].states for part in recurrent.values())
    for (_, kept), wanted in zip(cached.states.kept[0].states, before):
        assert all(torch.equal(part, wanted[i]) for i, part in kept.items() if part is not None)
    cached.commit([4])  # all of them
    assert cached.lengths == [9] and not cached.states.kept[-1].open
    whole = CachedModel(model, 64)
    whole.score([row[:9]])
    for (_, own), (_, theirs) in zip(cached.states.kept[-1].states, whole.states.kept[-1].states):
        for i, state in own.items():
            torch.testing.assert_close(state, theirs[i], atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_texts_of_unequal_length_are_read_anew_when_all_is_forgotten(strict):
    model = model_of(RECURRENT)
    cached = CachedModel(model, 64, "assistant_model", compile="model")
    for rows in (prompts(2, 9), prompts(3, 10, seed=1)):  # as after a draft's tokens of a text that has changed from its first on
        logits = cached.score(rows, Proposal.from_lists([[5, 7], [8, 9]], CPU))
        for own, row, drafted in zip(logits, rows, ([5, 7], [8, 9])):
            whole = model(input_ids=torch.tensor([row + drafted]), use_cache=False).logits[0]
            torch.testing.assert_close(own, whole[len(row) - 1 :], atol=2e-3, rtol=0)
        cached.crop([0, 0])
    assert cached.compiled.usable


@pytest.mark.parametrize("kind", [kind for kind in ("Mamba", "Zamba", "Zaya") if kind in HERE])
def test_states_that_do_not_follow_from_what_was_told_are_left_to_eager_passes(kind):
    model, (row,) = model_of(kind), prompts(12)
    with pytest.warns(UserWarning, match="target: .* runs without compile=True: it carries states that are made token by token"):
        assert run(model, [row], PromptLookupDraft(), True, max_new_tokens=12) == plain(model, [row], max_new_tokens=12)


@pytest.mark.parametrize("kind", [RECURRENT, CONVOLUTIONS, "Mamba 2"])
@pytest.mark.parametrize("wrong", ["inputs", "recurrent"])
def test_functions_that_take_wrong_states_are_not_used(kind, wrong, monkeypatch):
    """Though the logits of the pass itself are right."""
    model, (row,) = model_of(kind), prompts(12)
    keep, update = (getattr(fixed_cache.FixedStates, f"update_{name}_state") for name in ("conv", "recurrent"))

    def conv(self, states, state_idx=0, **kwargs):
        right = keep(self, states, state_idx)
        self.conv_states[state_idx] = right * 1.1
        return right

    def recurrent(self, states, state_idx=0, **kwargs):
        return update(self, states if isinstance(states, torch.Tensor) else Told((states.args[0] * 1.3, *states.args[1:]), states.options), state_idx)

    monkeypatch.setattr(fixed_cache.FixedStates, *(("update_conv_state", conv) if wrong == "inputs" else ("update_recurrent_state", recurrent)))
    if wrong == "recurrent" and kind != "Mamba 2":
        pytest.skip("queries say nothing of the state" if kind == RECURRENT else "it has none")
    with pytest.warns(UserWarning, match="runs without compile=True: compiled, its states are off by"):
        assert run(model, [row], PromptLookupDraft(), "model", max_new_tokens=16) == plain(model, [row], max_new_tokens=16)


def test_what_the_model_had_for_forwards_it_has_again():
    model, rows = model_of(RECURRENT), prompts(12)
    run(model, rows, perturbed(model), "layers", max_new_tokens=12)
    assert not [part for part in model.modules() if "forward" in vars(part)]


def test_warming_up_compiles_what_a_call_needs(strict):
    target, rows = model_of(RECURRENT), prompts(9)
    draft = perturbed(target)
    hf_specdec.enable(target)
    hf_specdec.warmup(target, draft, {"compile": "model", "num_assistant_tokens": 3}, max_length=64)
    before = made(target), made(draft)
    texts = plain(target, rows, max_new_tokens=20)
    ids = torch.tensor(rows)
    out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, speculative={"compile": "model"}, num_assistant_tokens=3, max_new_tokens=20,
                          do_sample=False)
    assert out[:, ids.shape[1] :].tolist() == texts and (made(target), made(draft)) == before


@pytest.mark.skipif(cpu.library() is None, reason="no kernels here")
@every_way
@pytest.mark.parametrize("kind", [kind for kind in (RECURRENT, "Granite 4 (hybrid)", CONVOLUTIONS, "Mamba 2") if kind in HERE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_do_the_states(dtype, kind, way, strict, monkeypatch):
    if OLD_TORCH and dtype == torch.bfloat16:
        pytest.skip("this torch does not compile 16-bit models")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": backend})
    model, rows = mx.to_tiles(model_of(kind).to(dtype)), prompts(14)
    out = run(model, rows, ScriptedDraft.knowing([rows[0] + plain(model, rows, max_new_tokens=20)[0]]), way, max_new_tokens=16)
    assert dtype == torch.bfloat16 or out == plain(model, rows, max_new_tokens=16)
    wanted = {RECURRENT: "mx_delta", CONVOLUTIONS: "mx_conv"}.get(kind, "mx_space")
    assert any(f"hf_specdec.{wanted}" in graph for graph in graphs) and not any("solve_triangular" in graph or "bchpn" in graph for graph in graphs)


@pytest.mark.skipif(cpu.library() is None or OLD_TORCH or shutil.which("g++") is None, reason="no kernels or no compiler here, or one that does not take 16-bit models")
@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind in CONFIG_MAPPING])
@torch.no_grad()
def test_machine_code_calls_the_kernels_and_a_token_has_the_same_bits_in_every_block(kind, strict, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "FLAT", 0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=64, pad_token_id=0, **WHOLE[kind]), dtype=torch.bfloat16).eval()
    for part in model.parameters():
        if part.ndim > 1:
            part.normal_(0, 0.2)
    cached, (row,), seen = CachedModel(mx.to_tiles(model), 64, compile="layers"), prompts(14), {}
    for width in (1, 4, 3, 1):
        for _ in range(2):  # the first pass of a function is compared with the same uncompiled, and that is what comes out
            cached.score([row[:5]])
            cached.commit([1])
            seen.setdefault(width, []).append(cached.score([row[:6]], Proposal.from_lists([row[6 : 5 + width]], CPU))[0, 0])
            cached.commit([1])
            seen.setdefault("behind", []).append(cached.score([row[:7]])[0, 0])
            cached.crop([0])
    assert all(torch.equal(logits, seen[1][-1]) for width in (4, 3, 1) for logits in seen[width][1:])
    assert all(torch.equal(logits, seen["behind"][-1]) for logits in seen["behind"][2:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in (RECURRENT, "Granite 4 (hybrid)", CONVOLUTIONS) if kind in HERE])
def test_on_a_gpu_texts_are_plain_generates(kind, strict, monkeypatch):
    monkeypatch.undo()
    target, rows = model_of(kind).to("cuda"), prompts(12, 9)
    texts, draft = plain(target, rows, max_new_tokens=20), perturbed(target)
    for _ in range(2):
        assert run(target, rows, draft, True, max_new_tokens=20) == texts


@every_way
def test_a_pass_of_another_thread_changes_nothing(way, strict):
    """For its time other functions stand in for the forwards of layers."""
    model, (row,) = model_of(RECURRENT), prompts(9)
    text, theirs = plain(model, [row], max_new_tokens=12), compiled.CompiledPasses(model, "target", "layers").layerwise
    with theirs.running("theirs", DynamicCache(), None), ThreadPoolExecutor(1) as threads:
        assert threads.submit(run, model, [row], ScriptedDraft.knowing([row + text[0]], wrong=3), way, max_new_tokens=12).result() == text
    assert compiled.CompiledPasses(model, "target", "layers").by_layers and made(model)


def test_a_model_that_the_caller_has_compiled():
    model, rows = model_of(RECURRENT), prompts(9)
    texts = plain(model, rows, max_new_tokens=4)
    model.compile(backend="eager")
    assert run(model, rows, perturbed(model), "model", max_new_tokens=4) == texts


def test_a_compiler_of_the_caller_is_none_of_ours():
    """Also while a pass of ours is made in another thread: states are states."""
    model = model_of(RECURRENT)
    ids = torch.tensor(prompts(9))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        whole = model(ids, use_cache=True)
        cached = CachedModel(model, 64, compile="model")
        cached.score(ids.tolist())
        for ours in (nullcontext(), cached.states.telling()):
            torch._dynamo.reset()
            with ours:
                out = torch.compile(model, backend="eager")(ids, use_cache=True)
            torch.testing.assert_close(out.logits, whole.logits, atol=1e-4, rtol=1e-4)
            assert all(torch.is_tensor(layer.recurrent_states[0]) for layer in out.past_key_values.layers if hasattr(layer, "recurrent_states"))
