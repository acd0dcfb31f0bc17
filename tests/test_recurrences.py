"""Layers whose recurrent functions are known: chunks that fit a block, states after fewer tokens, and a model that is left as it was."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_specdec
from hf_specdec import checkpoint
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import GOES_ON
from hf_specdec.proposal import Proposal
from hf_specdec.recurrences import Block, Recurrences, _chunk, after
from tests.helpers import enabled, generated, perturbed, plain, prompts, speculate
from tests.test_states import CONVOLUTIONS, CPU, HERE, KINDS, RECURRENT, UNKNOWN, model_of

pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")
KNOWN = [kind for kind in (*KINDS, "Granite 4 (hybrid)", "Jamba", "OLMo (hybrid)", "Lara mini") if kind not in (CONVOLUTIONS, UNKNOWN) and kind in HERE]
SEVERAL = {  # two layers of a kind
    "qwen3_5_text": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2,
                         linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "granitemoehybrid": dict(hidden_size=32, shared_intermediate_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                             num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, layer_types=["mamba", "attention", "mamba"]),
    "mamba2": dict(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=2),
}
every_kind = pytest.mark.parametrize("kind", KNOWN)


def forwards(model) -> list:
    return [part for part in model.modules() if "forward" in vars(part)]


@every_kind
@torch.no_grad()
def test_the_state_after_some_tokens_of_a_block_is_that_of_a_text_that_ends_there(kind):
    model, rows = model_of(kind), prompts(9, 9, 9)
    cached = CachedModel(model, 64)
    cached.score([row[:4] for row in rows])
    cached.commit([1, 1, 1])
    cached.score([row[:5] for row in rows], Proposal.from_lists([row[5:] for row in rows], CPU))
    cached.commit([1, 3, 5])
    assert cached.lengths == [5, 7, 9]
    for b, (row, length) in enumerate(zip(rows, cached.lengths)):
        alone = CachedModel(model, 64)
        alone.score([row[:length]])
        for (_, own), (_, theirs) in zip(cached.states.kept[-1].states, alone.states.kept[-1].states):
            for i, state in own.items():
                torch.testing.assert_close(state[b], theirs[i][0], atol=2e-4, rtol=1e-3)


@every_kind
@torch.no_grad()
def test_a_cut_may_be_followed_by_another(kind):
    """A draft inside a cascade goes back once more; nothing of the block at all is what was before it."""
    model, (row,) = model_of(kind), prompts(12)
    cached = CachedModel(model, 64, "assistant_model")
    cached.score([row[:5]])
    cached.commit([1])
    before = [dict(recurrent) for _, recurrent in cached.states.kept[-1].states]
    cached.score([row[:6]], Proposal.from_lists([row[6:11]], CPU))
    cached.commit([6])
    for length in (10, 8, 7):
        cached.crop([length])
        assert cached.lengths == [length]
        logits = cached.score([row[: length + 1]])[0, -1]
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([row[: length + 1]]), use_cache=False).logits[0, -1], atol=2e-3, rtol=0)
        cached.crop([length])
    cached.crop([5])
    for own, states in zip(before, cached.states.kept[-1].states):
        assert all(torch.equal(own[i], state) for i, state in states[1].items() if state is not None)


@every_kind
def test_the_model_is_left_as_it_was_whatever_happens(kind):
    model, (row,) = model_of(kind), prompts(12)
    speculate(model, [row], perturbed(model), k=3, max_new_tokens=12)
    assert not forwards(model)

    def stop(module, args, output):
        raise KeyboardInterrupt

    handle = Recurrences(model).forwards.popitem()[0].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        speculate(model, [row], k=3, max_new_tokens=12)
    handle.remove()
    assert not forwards(model)
    hf_specdec.disable(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert plain(copied, [row], max_new_tokens=12) == plain(model, [row], max_new_tokens=12)


@every_kind
def test_hooks_of_a_layer_fire_in_every_pass(kind):
    model, (row,) = model_of(kind), prompts(12)
    seen, layer, draft = [], next(iter(Recurrences(model).forwards)), perturbed(model)
    layer.register_forward_hook(lambda module, args, output: seen.append(module))
    out = speculate(model, [row], draft, k=3, max_new_tokens=12)
    assert len(seen) >= len(out.speculation.rounds) and set(seen) == {layer}


def test_threads_share_a_model():
    model, rows = enabled(model_of(RECURRENT)), prompts(12, 15, 9, 20, 11, 8)
    expected = [plain(model, [row], max_new_tokens=20) for row in rows]

    def run(b):
        ids, options = torch.tensor([rows[b]]), dict(speculative=True, num_assistant_tokens=3) if b % 2 else {}
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **options)[0, len(rows[b]) :].tolist()

    with ThreadPoolExecutor(4) as threads:
        assert [[text] for text in threads.map(run, range(len(rows)))] == expected
    assert not forwards(model)


@pytest.mark.parametrize("kind", [kind for kind in ("Qwen3.5 (text)", "Mamba 2", "Granite 4 (hybrid)", "Kimi Linear") if kind in HERE])
def test_no_block_is_filled_up_to_a_chunk(kind, monkeypatch):
    model, (row,), sizes = model_of(kind), prompts(12), []
    names = vars(sys.modules[type(model).__module__])
    (name,) = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "chunk_kimi_delta_attention"} & set(names)
    original = names[name]

    def seen(first, *args, **kwargs):
        sizes.append((first.shape[1], kwargs.get("chunk_size")))
        return original(first, *args, **kwargs)

    monkeypatch.setitem(names, name, seen)
    wrong = perturbed(model, 0.5)
    assert generated(speculate(model, [row], wrong, k=4, max_new_tokens=12), [row]) == plain(model, [row], max_new_tokens=12)
    ours = [pair for pair in sizes if pair[1] is not None and pair[0] < 12]
    assert ours and {length for length, _ in ours} >= {1, 5} and all(chunk == min(length, 8 if kind not in ("Qwen3.5 (text)", "Kimi Linear") else 64) for length, chunk in ours)


def test_chunks_are_as_long_as_a_block_or_fill_up_as_few_tokens_as_can_be():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [_chunk(length, 64, cpu) for length in (1, 8, 32, 33, 64, 65, 200)] == [1, 8, 32, 17, 32, 22, 29]
    assert [_chunk(length, 256, gpu) for length in (1, 8, 16, 17, 200, 256, 1000)] == [16, 16, 16, 32, 256, 256, 256]
    assert _chunk(8, 8, gpu) == 8


@pytest.mark.parametrize("kind", [kind for kind in ("Qwen3.5 (text)", "Mamba") if kind in HERE])
def test_a_layer_with_a_forward_of_its_own_is_left_alone(kind):
    """As accelerate gives it to those that it moves: of a delta rule tokens are fed once more, and Mamba 1 is refused."""
    model, (row,) = model_of(kind), prompts(12)
    layer = next(iter(Recurrences(model).forwards))
    layer.forward = layer.forward
    with pytest.raises(ValueError, match="model: Mamba.*forward") if kind == "Mamba" else nullcontext():
        out = speculate(model, [row], perturbed(model), k=3, max_new_tokens=24)
        assert generated(out, [row]) == plain(model, [row], max_new_tokens=24)
        assert forwards(model) == [layer]


@torch.no_grad()
def test_other_passes_of_the_model_are_as_ever():
    model, ids = model_of(RECURRENT), torch.tensor(prompts(12))
    expected, recurrences = model(input_ids=ids, use_cache=False).logits, Recurrences(model)
    with recurrences.reading(Block({}, kept=True)), ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(lambda: torch.no_grad()(model)(input_ids=ids, use_cache=False).logits).result(), expected)
    assert not forwards(model)


@pytest.mark.parametrize("kind", [kind for kind in SEVERAL if kind != "mamba2" or "Mamba 2" in HERE])
@pytest.mark.parametrize("compile", [False, "model"])
@torch.no_grad()
def test_layers_that_are_read_as_one_have_the_states_of_each(kind, compile, monkeypatch):
    """As on a GPU, where every call takes a few microseconds."""
    monkeypatch.setattr("hf_specdec.passes.options", lambda device, places, whole=True: {"backend": "eager"})
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, rows = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=64, pad_token_id=0, **SEVERAL[kind])).eval(), prompts(9, 9)
    cached = CachedModel(model, 64, compile=compile)
    for _ in range(2):  # the first pass of a function is an eager one
        cached.score([row[:4] for row in rows])
        cached.commit([1, 1])
        cached.score([row[:5] for row in rows], Proposal.from_lists([row[5:] for row in rows], CPU))
        (_, makes), calls = cached.states.kept[-1].block, []
        cached.crop([0, 0])
    apart = [make and make([3, 1]) for make in makes]
    assert sum(make is not None for make in makes) == 2
    monkeypatch.setattr(checkpoint, "ON_HOST", ())
    monkeypatch.setattr(checkpoint, "after", lambda *args: (calls.append(args), after(*args))[1])
    for own, theirs in zip(checkpoint.states_after(makes, [3, 1]), apart):
        assert (own is None) == (theirs is None)
        if own is not None:
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1
    assert all(state is make.args[-1] for state, make in zip(checkpoint.states_after(makes, [0, 0]), makes) if make)
