"""Models whose cache is of a kind of their own: what is put back after a rejection, what comes out and goes in, what is refused."""

import copy
import random
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

import hf_specdec
from hf_specdec import mx
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import CACHE, MADE, PADDING_READ
from hf_specdec.drafts import CascadeDraft, EarlyExitDraft, NGramRecyclingDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.own_cache import OwnCache, Snapshots, copied
from hf_specdec.proposal import Proposal
from hf_specdec.training import build_drafter
from tests.architectures import OWN_CACHES
from tests.helpers import VOCAB, KnowingTreeDraft, enabled, generated, perturbed, plain, prompts, speculate, tiny_llama

HERE = {family.name: family for family in OWN_CACHES if family.kind in CONFIG_MAPPING and CACHE == "cache"}
pytestmark = pytest.mark.skipif(not HERE, reason="this transformers has none of these models")
every_kind = pytest.mark.parametrize("kind", HERE)
every_kind_given = pytest.mark.parametrize("kind", [name for name, family in HERE.items() if family.kind not in MADE])
every_kind_made = pytest.mark.parametrize("kind", [name for name, family in HERE.items() if family.kind in MADE])
PLAIN = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
CPU = torch.device("cpu")


def tensors(part) -> list[torch.Tensor]:
    """All that layers hold."""
    if isinstance(part, torch.Tensor):
        return [part]
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else getattr(part, "__dict__", {}).values()
    return [] if isinstance(part, type) else [tensor for one in inside for tensor in tensors(one)]


def token_by_token(model, text: list[int], begin: int) -> torch.Tensor:
    """Logits after the first `begin` tokens, and after every one that follows, as plain generate comes to them; of a model that is given its text anew beside its cache."""
    cache, logits = DynamicCache(config=model.config), []
    for end in range(begin, len(text) + 1):
        logits.append(model(input_ids=torch.tensor([text[:end]]), use_cache=True, **{CACHE: cache}).logits[0, -1])
    return torch.stack(logits)


@pytest.mark.share(2)
@every_kind
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_whatever_is_drafted_kept_and_forgotten_the_logits_are_those_of_the_whole_text(kind, seed):
    model, rng = HERE[kind].model("eager", seed), random.Random(seed)
    cached, text = CachedModel(model, 300), prompts(rng.randint(2, 30), seed=seed)[0]
    begin = len(text)
    assert isinstance(cached.cache, OwnCache) and isinstance(cached.states, Snapshots)
    for _ in range(14):
        drafted = [rng.randrange(1, VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 7]))]
        logits = cached.score([text], Proposal.from_lists([drafted], CPU))[0]
        wanted = token_by_token(model, text + drafted, begin)[len(text) - begin :] if kind == "CPM-Ant" else model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 :]
        torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=0)
        kept = rng.randint(0, len(drafted))
        cached.commit([1 + kept])
        assert cached.lengths[0] <= len(text) + kept and len(cached.states.kept) == 1
        text += drafted[:kept]
        if rng.random() < 0.3 and cached.lengths[0] == len(text):  # as a draft does: one token a time, some of which do not stand
            for token in (5, 6, 7):
                cached.extend(torch.tensor([[token]]), [1])
            cached.crop([len(text) + 1])
            cached.crop([len(text)])
        text += [rng.randrange(1, VOCAB)]


@every_kind
@torch.no_grad()
def test_a_pass_changes_nothing_of_what_was_held_before_it(kind):
    cached = CachedModel(HERE[kind].model("eager", 0), 100)
    states, cache, seen = cached.states, cached.cache, []
    for width in (23, 1, 6, 1, 1, 9):
        before = [part.clone() for _, layers in states.kept for part in tensors(layers)]
        with states.during([0], width):
            cached.run(input_ids=torch.arange(width)[None] % VOCAB, use_cache=True, **{CACHE: cache})
        after = [part for _, layers in states.kept[:-1] for part in tensors(layers)]
        assert len(after) == len(before) and all(torch.equal(own, other) for own, other in zip(before, after))
        seen.append(len(before))
    assert seen[0] == 0 and all(seen[1:])


@torch.no_grad()
def test_keys_and_values_of_the_layers_before_lie_in_those_of_the_layers_after():
    """One copy of a long text is held, not one for every pass that may be taken back."""
    cache = OwnCache(tiny_llama().config, 100)
    states = Snapshots(cache)
    for width in (50, 3, 2):
        with states.during([0], width):
            for index in range(len(cache.layers)):
                cache.update(torch.randn(1, 2, width, 8), torch.randn(1, 2, width, 8), index)
    (_, first), (_, second), (_, last) = states.kept
    assert [layers[0].get_seq_length() for layers in (first, second, last)] == [50, 53, 55]
    assert len({layers[0].keys.untyped_storage().data_ptr() for layers in (first, second, last)}) == 1


def test_copies_of_layers_share_no_lists_with_them():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    own = copied(cache.layers)[0]
    own.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert isinstance(own, DynamicLayer) and (own.get_seq_length(), cache.layers[0].get_seq_length()) == (5, 3)


@pytest.mark.share(2)
@every_kind
@pytest.mark.parametrize("seed", range(6))
def test_texts_are_those_of_plain_generate_whoever_drafts(kind, seed):
    rng = random.Random(seed)
    model, row, most = HERE[kind].model("eager", seed), prompts(rng.randint(2, 30), seed=seed)[0], rng.randint(10, 80)
    text = plain(model, [row], max_new_tokens=most)[0]
    knowing = KnowingTreeDraft([row + text], parents=tuple(range(rng.randint(2, 7))), vocab=VOCAB)
    for draft in (knowing, perturbed(model, 0.05), CascadeDraft(perturbed(model, 0.02), KnowingTreeDraft([row + text], parents=(0, 1, 2), vocab=VOCAB)), None):
        out = speculate(model, [row], draft, k=rng.randint(1, 9), max_new_tokens=most)
        assert generated(out, [row]) == [text]
        assert draft is not knowing or out.speculation.accepted > 0


@every_kind
def test_such_a_model_drafts_for_another(kind):
    target, row = tiny_llama(), prompts(9, seed=3)[0]
    out = speculate(target, [row], HERE[kind].model("eager", 0), k=4, max_new_tokens=20)
    assert generated(out, [row]) == plain(target, [row], max_new_tokens=20) and out.speculation.rounds[0][0].source == "model"


@every_kind_given
@pytest.mark.parametrize("ours", [(True, True), (True, False), (False, True)], ids=["ours, ours", "ours, stock", "stock, ours"])
def test_a_cache_comes_back_and_goes_in(kind, ours):
    model, row = enabled(HERE[kind].model("eager", 0)), prompts(14, seed=1)[0]
    ids = torch.tensor([row])
    whole = model.generate(ids, max_new_tokens=40, **PLAIN)
    draft = KnowingTreeDraft([whole[0].tolist()], parents=(0, 1, 2, 3), vocab=VOCAB)
    ways = [dict(speculative={"num_assistant_tokens": 4}, assistant_model=draft) if own else {} for own in ours]
    first = model.generate(ids, max_new_tokens=17, return_dict_in_generate=True, **PLAIN, **ways[0])
    cache = first[CACHE]
    assert cache.get_seq_length() == len(row) + 16
    held = copy.deepcopy(cache)
    for given in (cache, held):
        mask = torch.ones_like(first.sequences)  # transformers takes 0s in a text for padding otherwise
        out = model.generate(first.sequences, attention_mask=mask, max_new_tokens=23, return_dict_in_generate=True, **{CACHE: given}, **PLAIN, **ways[1])
        assert torch.equal(out.sequences, whole) and out[CACHE].get_seq_length() == len(row) + 39


@every_kind_made
def test_what_a_model_makes_itself_is_neither_taken_nor_handed_back(kind):
    model, row = enabled(HERE[kind].model("eager", 0)), prompts(14, seed=1)[0]
    for pad in (0, 3):
        ids, mask = torch.tensor([[0] * pad + row]), torch.tensor([[0] * pad + [1] * len(row)])
        read = ids if HERE[kind].kind in PADDING_READ else ids[:, pad:]
        wanted = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=20, **PLAIN)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=20, speculative=True, return_dict_in_generate=True, **PLAIN)
        assert torch.equal(out.sequences[:, -20:], wanted[:, -20:]) and CACHE not in out


def test_cpm_ant_reads_its_padding_token_by_itself_and_is_refused_without_its_cache():
    family = HERE.get("CPM-Ant") or pytest.skip("this transformers does not have it")
    model, row = enabled(family.model("eager", 0)), prompts(9, seed=1)[0]
    cached, drafted = CachedModel(model, 40), [5, 0, 7, 0, 0, 3]
    with torch.no_grad():
        logits = cached.score([row], Proposal.from_lists([drafted], CPU))[0]
        torch.testing.assert_close(logits, token_by_token(model, row + drafted, 9), atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="use_cache=False: without its cache CpmAntForCausalLM lets every token look at those behind it.*Drop it"):
        model.generate(torch.tensor([row]), max_new_tokens=4, speculative=True, use_cache=False, **PLAIN)


@torch.no_grad()
def test_cpm_ant_would_see_what_is_drafted_behind_a_token(monkeypatch):
    """As the package keeps it from doing."""
    family = HERE.get("CPM-Ant") or pytest.skip("this transformers does not have it")
    model, text = family.model("eager", 0), prompts(14, seed=1)[0]

    def off() -> float:
        cached = CachedModel(model, 40)
        cached.score([text[:9]])
        cached.commit([1])
        logits = cached.score([text[:10]], Proposal.from_lists([text[10:]], CPU))[0]
        return float((logits - token_by_token(model, text, 9)[1:]).abs().max())

    assert off() < 1e-3
    monkeypatch.setattr("hf_specdec.own_cache._causal", lambda encoder: nullcontext())
    assert off() > 0.05


def test_the_cache_of_minimax_is_refused_by_name():
    family = HERE.get("MiniMax") or pytest.skip("this transformers does not have it")
    model = enabled(family.model("eager", 0))
    first = model.generate(torch.tensor(prompts(14, seed=1)[:1]), max_new_tokens=2, return_dict_in_generate=True, **PLAIN)
    with pytest.raises(ValueError, match=f"{CACHE}: the MiniMaxCache of a model that makes its cache itself.*Leave it out, and pass the whole text"):
        model.generate(first.sequences, max_new_tokens=20, speculative=True, **{CACHE: first[CACHE]}, **PLAIN)


def test_minimax_that_begins_with_a_layer_without_attention_knows_how_long_its_text_is():
    """transformers asks the first layer, and is told 0: in a pass over several tokens their masks would hide the text."""
    family = HERE.get("MiniMax") or pytest.skip("this transformers does not have it")
    for kinds in (["linear_attention", "linear_attention", "full_attention"], ["linear_attention"] * 2, ["full_attention", "linear_attention"]):
        model, row = replace(family, settings={**family.settings, "layer_types": kinds, "num_hidden_layers": len(kinds)}).model("eager", 0), prompts(20, seed=1)[0]
        text = plain(model, [row], max_new_tokens=30, use_cache=False)[0]
        for draft in (KnowingTreeDraft([row + text], parents=(0, 1, 2, 3), vocab=VOCAB), perturbed(model, 0.05)):
            out = speculate(model, [row], draft, k=4, max_new_tokens=30)
            assert generated(out, [row]) == [text] and out.speculation.accepted


def test_rwkv_whose_weights_are_halved_in_place_keeps_these_in_full():
    family = HERE.get("RWKV") or pytest.skip("this transformers does not have it")
    row = prompts(14, seed=1)[0]
    for change, every, dense in ((mx.compress, 1, True), (mx.compress, 0, False), (mx.to_tiles, 1, True)):
        model = change(replace(family, settings={**family.settings, "rescale_every": every}).model("eager", 0))
        halved = model.rwkv.blocks[0].attention.output, model.rwkv.blocks[1].feed_forward.value
        assert [type(module) is torch.nn.Linear for module in halved] == [dense] * 2
        text = plain(model, [row], max_new_tokens=20)[0]
        assert generated(speculate(model, [row], KnowingTreeDraft([row + text], parents=(0, 1, 2, 3), vocab=VOCAB), k=4, max_new_tokens=20), [row]) == [text]


def test_openai_gpt_says_where_its_text_has_outgrown_it():
    family = HERE.get("OpenAI GPT") or pytest.skip("this transformers does not have it")
    model, row = enabled(replace(family, settings={**family.settings, "n_positions": 24}).model("eager", 0)), prompts(14, seed=1)[0]
    ids = torch.tensor([row])
    text = model.generate(ids, max_new_tokens=11, **PLAIN)
    assert torch.equal(model.generate(ids, max_new_tokens=11, speculative={"num_assistant_tokens": 7}, assistant_model=perturbed(model, 0.02), **PLAIN), text)
    with pytest.raises(ValueError, match="max_new_tokens: a text has outgrown the 24 positions"):
        model.generate(ids, max_new_tokens=12, speculative=True, **PLAIN)


@every_kind_given
def test_a_padded_row_is_read_without_its_padding_and_its_cache_neither_taken_nor_handed_back(kind):
    model, row = enabled(HERE[kind].model("eager", 0)), prompts(14, seed=1)[0]
    ids, mask = torch.tensor([[0] * 3 + row]), torch.tensor([[0] * 3 + [1] * len(row)])
    wanted = model.generate(torch.tensor([row]), max_new_tokens=20, **PLAIN)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=20, speculative=True, return_dict_in_generate=True, **PLAIN)
    assert torch.equal(out.sequences[:, 3:], wanted) and CACHE not in out
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=1, return_dict_in_generate=True, **PLAIN)
    with pytest.raises(ValueError, match=f"{CACHE}: .*padded row of a model whose cache is of its own kind.*Leave it out"):
        mask = torch.tensor([[0] * 3 + [1] * (len(row) + 1)])
        model.generate(stock.sequences, attention_mask=mask, max_new_tokens=20, speculative=True, **{CACHE: stock[CACHE]}, **PLAIN)


@every_kind
def test_prompts_in_pieces_and_sampling(kind):
    model, row = enabled(HERE[kind].model("eager", 0)), prompts(14, seed=1)[0]
    ids = torch.tensor([row])
    whole = model.generate(ids, max_new_tokens=20, **PLAIN)
    assert torch.equal(model.generate(ids, max_new_tokens=20, speculative=True, prefill_chunk_size=4, **PLAIN), whole)
    one, other = (model.generate(ids, max_new_tokens=20, speculative={"seed": 3}, **{**PLAIN, "do_sample": True}) for _ in range(2))
    assert torch.equal(one, other)


@every_kind
def test_compressed_weights_and_tiles(kind):
    row = prompts(14, seed=1)[0]
    for change in (mx.compress, mx.to_tiles):
        if kind == "OpenAI GPT" and change is mx.compress:
            with pytest.raises(ValueError, match="Conv1D, which is not supported"):
                change(HERE[kind].model("eager", 0))
            continue
        model = change(HERE[kind].model("eager", 0))
        text = plain(model, [row], max_new_tokens=20)[0]
        draft = KnowingTreeDraft([row + text], parents=(0, 1, 2, 3), vocab=VOCAB)
        assert generated(speculate(model, [row], draft, k=4, max_new_tokens=20), [row]) == [text]


@every_kind
@pytest.mark.parametrize("what", ["tree", "early exit"])
def test_what_does_not_go_along_one_text_is_refused_by_name(kind, what):
    model = enabled(HERE[kind].model("eager", 0))
    ids, name = torch.tensor(prompts(9, seed=1)[:1]), type(model).__name__
    calls = {"tree": lambda: model.generate(ids, speculative=True, assistant_model=NGramRecyclingDraft(), **PLAIN), "early exit": lambda: EarlyExitDraft(model, 1)}
    words = {"tree": "cache of its own kind, along one text, which branches of a tree cannot share. Propose chains", "early exit": "use another draft"}
    with pytest.raises(ValueError, match=words[what]) as error:
        calls[what]()
    assert name in str(error.value)


@every_kind
def test_drafters_made_of_a_layer_or_refused_by_name(kind):
    """Qwen4-Exp and DeepSeek-V4 put out several states per token, which drafters read no more than Gemma 3n's; what a drafter without attention has read cannot be asked."""
    model, row = HERE[kind].model("eager", 0), prompts(11)[0]
    if type(model.config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip("there is no such model that reads text alone")
    kinds = {"Qwen4-Exp": ("none of them is attention.*Name one that is", r"\(hc_count\)"), "Qwen4-Exp (text)": ("none of them is attention", r"\(hc_count\)"),
             "MiniMax": ("none of them is attention",), "CPM-Ant": ("", "takes no inputs_embeds"), "RWKV": ("RwkvForCausalLM has two layers or more",), "xLSTM": ("no list of its 1 layers found", "no list of its 1 layers"),
             "DeepSeek-V4": ("of another kind than layer 0 .*Train heads", r"\(hc_mult\)")}
    for reads, words in zip_longest(((), (0, 1, 2)), kinds.get(kind, ()), fillvalue=""):
        if words:
            with pytest.raises(ValueError, match=words):
                build_drafter(model, [0], None, reads)
        else:
            drafter = build_drafter(model, [0, 1] if kind in ("MiniMax", "RWKV") else [0], None, reads)
            out = speculate(model, [row], FeatureDraft(drafter, model) if reads else drafter, k=3, max_new_tokens=24)
            assert generated(out, [row]) == plain(model, [row], max_new_tokens=24) and out.speculation.proposed


@every_kind
def test_compiled_passes_are_given_up_once_and_said_so(kind):
    model, row = enabled(HERE[kind].model("eager", 0)), prompts(14, seed=1)[0]
    ids = torch.tensor([row])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = model.generate(ids, max_new_tokens=20, speculative={"compile": True}, **PLAIN)
    assert sum("runs without compile=True" in str(one.message) for one in said) == 1
    assert torch.equal(out, model.generate(ids, max_new_tokens=20, **PLAIN))


def test_moshi_is_refused_where_a_text_outgrows_its_window():
    config = CONFIG_MAPPING["moshi"](vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, ffn_dim=48, audio_vocab_size=8,
                                     sliding_window=300)
    model = hf_specdec.enable(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(ValueError, match=r"target: MoshiForCausalLM .*sliding_window.*max_length at 44 or below \(here 47\).*speculative=False"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=44, speculative=True, **PLAIN)
