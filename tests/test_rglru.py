"""RecurrentGemma, whose plain generate keeps its states in its modules: what is read over several tokens, what is drawn, what is refused. (test_states and its neighbours run
it with the others.)"""

import itertools

import pytest
import torch

from hf_specdec.caches import CACHE
from hf_specdec.cached_model import CachedModel
from hf_specdec.proposal import Proposal
from hf_specdec.recurrences import READERS, blocks
from hf_specdec.rglru import KIND
from tests.architectures import STATEFUL
from tests.helpers import VOCAB, KnowingTreeDraft, build, enabled, generated, padded, perturbed, plain, prompts, speculate, tiny_llama

FAMILY = next((family for family in STATEFUL if family.kind == "recurrent_gemma"), None)
pytestmark = pytest.mark.skipif(FAMILY is None, reason="its blocks are given no cache before transformers 5.24")
PLAIN = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def kept_in_modules(model) -> list:
    return [part for block in blocks(model, KIND).values() for part in (block.conv1d_state, block.rg_lru.recurrent_states)]


def far_from_whole(model, text: list[int], drafted: list[int]) -> float:
    """By how much the logits of a pass over drafted tokens differ from those of a pass over the whole text."""
    cached = CachedModel(model, 100)
    cached.score([text[:-1]])
    cached.commit([1])
    logits = cached.score([text], Proposal.from_lists([drafted], torch.device("cpu")))[0]
    return float((logits - model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 :]).abs().max())


@torch.no_grad()
def test_blocks_of_several_tokens_are_read_as_a_text_is_and_not_so_by_transformers_own_code(monkeypatch):
    model, text = FAMILY.model("eager", 0), prompts(15, seed=1)[0]
    assert far_from_whole(model, text[:9], text[9:]) < 1e-4
    monkeypatch.delitem(READERS, KIND)
    assert far_from_whole(model, text[:9], text[9:]) > 0.05


def test_nothing_is_left_in_its_modules_nor_taken_from_them():
    model, (one, other) = enabled(FAMILY.model("eager", 0)), prompts(1, 9, seed=1)
    speculate(model, [other], perturbed(model), k=4, max_new_tokens=12)
    assert kept_in_modules(model) == [None] * 4
    wanted = plain(model, [one], max_new_tokens=20, use_cache=False)
    plain(model, [other], max_new_tokens=9)  # behind which plain generate would begin a text of one token
    before = [part.clone() for part in kept_in_modules(model)]
    assert generated(speculate(model, [one], perturbed(model), k=4, max_new_tokens=20), [one]) == wanted
    assert all(map(torch.equal, before, kept_in_modules(model)))


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_of_plain_generate_within_its_window_and_beyond(seed):
    model = FAMILY.model("sdpa", seed)
    for row in prompts(2, 8, 40, seed=seed):
        text = plain(model, [row], max_new_tokens=30)[0]
        for draft in (KnowingTreeDraft([row + text], parents=(0, 1, 2, 3, 4), vocab=VOCAB), perturbed(model, 0.05)):
            out = speculate(model, [row], draft, k=5, max_new_tokens=30)
            assert generated(out, [row]) == [text] and out.speculation.accepted
    target, row = tiny_llama(seed), prompts(9, seed=seed)
    assert generated(speculate(target, row, model, k=4, max_new_tokens=20), row) == plain(target, row, max_new_tokens=20)


@torch.no_grad()
def laws(model, row: list[int], vocab: int, most: int = 3) -> torch.Tensor:
    """Of every text of `most` tokens behind `row`, how likely it is, float64 [vocab ** most]."""
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=most)))
    law = model(input_ids=torch.cat([torch.tensor([row]).expand(len(texts), -1), texts], dim=1), use_cache=False).logits[:, len(row) - 1 : -1].double().softmax(-1)
    return law.gather(-1, texts[..., None]).prod(dim=1)[:, 0]


def test_what_is_sampled_has_the_law_of_the_target_and_not_that_of_the_draft():
    vocab, n, row = 4, 1500, [1, 3, 2, 2, 0, 1, 3, 1, 0, 2]
    model = enabled(build("recurrent_gemma", 0, "eager", 0.3, **{**FAMILY.settings, "vocab_size": vocab}))
    draft = perturbed(model, 0.4)
    out = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), num_return_sequences=n, max_new_tokens=3, speculative={"num_assistant_tokens": 2, "seed": 5},
                         assistant_model=draft, return_dict_in_generate=True, **{**PLAIN, "do_sample": True, "top_k": 0})
    places = (out.sequences[:, len(row) :] * torch.tensor([vocab**2, vocab, 1])).sum(-1)
    seen, freedom = torch.bincount(places, minlength=vocab**3).double(), vocab**3 - 1
    off = [float(((seen - n * law) ** 2 / (n * law)).sum()) for law in (laws(model, row, vocab), laws(draft, row, vocab))]
    assert 0 < out.speculation.accepted < out.speculation.proposed
    assert off[0] < freedom + 4 * (2 * freedom) ** 0.5 < off[1]


def test_its_cache_is_neither_taken_nor_handed_back():
    model, inputs = enabled(FAMILY.model("eager", 0)), padded(prompts(9))
    first = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, **PLAIN)
    with pytest.raises(ValueError, match=f"{CACHE}: the DynamicCache of a model that keeps its states in its modules cannot be continued.*pass the whole text"):
        model.generate(first.sequences, max_new_tokens=4, speculative=True, **{CACHE: first[CACHE]}, **PLAIN)
    assert CACHE not in model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, speculative=True, **PLAIN)


def test_beams_are_those_without_a_cache_and_asked_for_so():
    model, inputs = enabled(FAMILY.model("eager", 1)), padded(prompts(9, seed=1))
    ours = dict(speculative=True, assistant_model=perturbed(model), **PLAIN)
    with pytest.raises(ValueError, match="num_beams=3: plain generate.* keeps the states of RecurrentGemmaForCausalLM in its modules.*use_cache=False"):
        model.generate(**inputs, num_beams=3, max_new_tokens=20, **ours)
    wanted = model.generate(**inputs, num_beams=3, max_new_tokens=20, use_cache=False, **PLAIN)
    assert torch.equal(model.generate(**inputs, num_beams=3, max_new_tokens=20, use_cache=False, **ours), wanted)


def test_guidance_is_refused():
    model = enabled(FAMILY.model("eager", 0))
    with pytest.raises(ValueError, match="guidance_scale=1.5: guidance of RecurrentGemmaForCausalLM, which reads a text otherwise"):
        model.generate(**padded(prompts(9)), guidance_scale=1.5, max_new_tokens=4, speculative=True, **PLAIN)
