"""Assistants that families of models ship with (Gemma 4, Muse Glimmer): found by what they take, drafting what transformers has them draft, in ragged batches, too."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import candidate_generator as stock

from hf_specdec import SpeculativeConfig, assistants, enable, integration, mx, passes, warmup
from hf_specdec.bench.arms import standard_arms
from hf_specdec.commands.common import load_draft
from hf_specdec.compat import CACHE
from hf_specdec.drafts import CascadeDraft, DFlashDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft, SharedKVDraft, TranslatedDraft
from hf_specdec.loading import as_draft, loaded
from tests import seeing
from tests.architectures import FAMILIES
from tests.conformance import law
from tests.conformance.builders import VARIANTS, make, masked_places, of_heads
from tests.helpers import OLD_TORCH, VOCAB, Logged, build, generated, perturbed, plain, prompts, repetitive, speculate, tiny_llama, word_tokenizer

ALIKE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, head_dim=8, global_head_dim=8,
             sliding_window=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
ROWS = {"alone": repetitive(13), "ragged": [*repetitive(13), *prompts(5, seed=4), *repetitive(9, seed=2)]}
every_batch = pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
needs_stock = pytest.mark.skipif(not hasattr(stock, "DFlashTokenCandidateGenerator"), reason="this version of transformers has no assistants of both kinds")


class KeptLog(Logged, SharedKVDraft):
    pass


class BlockLog(Logged, DFlashDraft):
    pass


def gemma(shared: int = 2, seed: int = 0, **settings):
    """A text model whose last `shared` of four layers have no keys and values of their own."""
    return build("gemma4_text", seed, **{**ALIKE, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": shared, **settings})


def pairs():
    """(target, assistant) of either kind."""
    target = tiny_llama(3, num_hidden_layers=3)
    return {"shared_kv": lambda: ((model := gemma()), of_heads(model)), "dflash": lambda: (target, masked_places(target))}


every_kind = pytest.mark.parametrize("kind", assistants.KINDS)


# --- what they draft --------------------------------------------------------------------------------------------------


@torch.no_grad()
def stock_of_shared_kv(target, model, row: list[int], k: int) -> list[int]:
    """What transformers has a Gemma 4 assistant draft after a prompt pass over all of the row but the root."""
    seen = target(input_ids=torch.tensor([row[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    generator = stock.SinglePositionMultiTokenCandidateGenerator(assistant_model=model, target_model_input_embeddings=target.get_input_embeddings(),
                                                                 generation_config=GenerationConfig(max_length=999), input_ids=torch.tensor([row]), model_kwargs={})
    generator.num_assistant_tokens = k
    ids, _ = generator.get_candidates(torch.tensor([row]), {}, seen, False, len(row) - 2)
    return ids[0, len(row) :].tolist()


@torch.no_grad()
def stock_of_dflash(target, model, row: list[int], k: int) -> list[int]:
    generator = stock.DFlashTokenCandidateGenerator(model, target.get_input_embeddings(), target.get_output_embeddings(), GenerationConfig(max_length=999))
    ids = torch.tensor([row])
    seen = target(input_ids=ids[:, :-1], **generator.model_kwargs_overrides)  # by other numbers on transformers 5.17
    found, _ = generator.get_candidates(ids, {"position_ids": torch.arange(len(row))[None], "attention_mask": torch.ones_like(ids)}, seen, False, 0)
    return found[0, len(row) :].tolist()[:k]


@needs_stock
@every_batch
@pytest.mark.parametrize("shared", [0, 2])
def test_tokens_are_those_of_transformers_generator_on_the_targets_keys_and_values(shared, rows):
    target = gemma(shared)
    draft = KeptLog(of_heads(target))
    out = speculate(target, rows, draft, 4, max_new_tokens=24)  # beyond the window
    drafted = [(row, proposal.listed()[b]) for committed, proposal in draft.log for b, row in enumerate(committed) if proposal.sizes[b]]
    assert len(drafted) > 15 and all(own == stock_of_shared_kv(target, draft.model, row, len(own)) for row, own in drafted)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=24)


@needs_stock
@every_batch
def test_tokens_are_those_of_transformers_generator_on_the_targets_states(rows):
    target = tiny_llama(3, num_hidden_layers=3)
    draft = BlockLog(masked_places(target, window=6, target_layer_ids=[0, 2]))
    out = speculate(target, rows, draft, 4, max_new_tokens=24)
    drafted = [(row, proposal.listed()[b]) for committed, proposal in draft.log for b, row in enumerate(committed) if proposal.sizes[b]]
    assert len(drafted) > 15 and all(own == stock_of_dflash(target, draft.model, row, len(own)) for row, own in drafted)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=24)


@needs_stock
def test_an_embedding_of_its_own_norm_takes_masks_without_it():
    family = next(family for family in seeing.FAMILIES if family.name == "Muse Glimmer")
    target, inputs = family.model(), family.prompts(1)
    draft = BlockLog(masked_places(target, mask_token_id=2, target_layer_ids=[1]))
    out = integration.generate(target, **inputs, max_new_tokens=16, assistant_model=draft, num_assistant_tokens=4)
    assert out.tolist() == target.generate(**inputs, max_new_tokens=16).tolist()
    first = draft.model.config.mask_token_id
    context = SimpleNamespace(rows=[[5]])
    draft.embedding = target.get_input_embeddings()
    torch.testing.assert_close(draft._noise(context)[0, :2], draft.embedding.weight[[5, first]])


# --- the text ---------------------------------------------------------------------------------------------------------


@every_kind
@every_batch
def test_a_call_takes_the_assistant_itself_and_gives_plain_generates_text(kind, rows):
    target, model = pairs()[kind]()
    out = speculate(target, rows, model, 4, max_new_tokens=20)
    assert out.speculation.config["draft"] == kind and out.speculation.drafted and out.speculation.draft_calls
    assert generated(out, rows) == plain(target, rows, max_new_tokens=20)


@every_kind
def test_a_row_that_ends_leaves_the_others_theirs(kind):
    target, model = pairs()[kind]()
    rows = ROWS["ragged"]
    texts = plain(target, rows, max_new_tokens=20)
    common = Counter(token for text in texts for token in text[2:14])
    ends = next(token for token, _ in common.most_common() if len({text.index(token) if token in text else 20 for text in texts}) > 1)
    out = speculate(target, rows, model, 4, max_new_tokens=20, eos_token_id=ends)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=20, eos_token_id=ends)


@pytest.mark.parametrize("inside", ["mixture", "cascade", "mixture of both"])
@every_kind
def test_inside_another_draft_the_text_stays(kind, inside):
    target, model = pairs()[kind]()
    own = as_draft(model, SpeculativeConfig())
    draft = {"mixture": lambda: MixtureDraft([own, "recycling"]), "cascade": lambda: CascadeDraft(perturbed(target, 0.0), own, tokens=2),
             "mixture of both": lambda: MixtureDraft([own, ModelDraft(perturbed(target, 0.1))], mode="choose")}
    rows = ROWS["ragged"]
    assert generated(speculate(target, rows, draft[inside](), 4, max_new_tokens=20), rows) == plain(target, rows, max_new_tokens=20)


@every_kind
def test_a_chat_goes_on_from_its_cache(kind):
    target, model = pairs()[kind]()
    ids = torch.tensor(repetitive(13))
    first = integration.generate(target, input_ids=ids, assistant_model=model, max_new_tokens=8, num_assistant_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
    expected = target.generate(longer, max_new_tokens=12)
    out = integration.generate(target, input_ids=longer, assistant_model=model, max_new_tokens=12, num_assistant_tokens=3, return_dict_in_generate=True, **{CACHE: first[CACHE]})
    assert out.sequences.tolist() == expected.tolist() and out.speculation.drafted


@every_kind
def test_an_assistant_in_another_dtype_drafts(kind):
    target, model = pairs()[kind]()
    rows = ROWS["ragged"]
    out = speculate(target, rows, copy.deepcopy(model).to(torch.bfloat16), 4, max_new_tokens=16)
    assert out.speculation.drafted and generated(out, rows) == plain(target, rows, max_new_tokens=16)


@every_kind
def test_target_and_assistant_may_be_compressed(kind):
    target, model = (copy.deepcopy(each) for each in pairs()[kind]())
    mx.to_tiles(target)
    mx.compress(model, measure=False)
    rows = ROWS["ragged"]
    out = speculate(target, rows, model, 4, max_new_tokens=16)
    assert out.speculation.drafted and generated(out, rows) == plain(target, rows, max_new_tokens=16)


@every_kind
def test_an_assistant_with_an_adapter_drafts_as_it_does_with_the_adapter_merged(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    target, model = pairs()[kind]()
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    logs = [{"shared_kv": KeptLog, "dflash": BlockLog}[kind](one) for one in (wrapped, copy.deepcopy(wrapped).merge_and_unload())]
    rows = ROWS["ragged"]
    for draft in (wrapped, *logs):
        assert generated(speculate(target, rows, draft, 4, max_new_tokens=16), rows) == plain(target, rows, max_new_tokens=16)
    first, second = ([proposal.listed() for _, proposal in log.log] for log in logs)
    assert first == second and any(map(any, first))


@every_kind
def test_a_draft_that_stops_early_and_k_auto_leave_the_text_alone(kind):
    target, model = pairs()[kind]()
    rows = ROWS["ragged"]
    ways = [dict(draft_stop="heuristic"), dict(draft_stop="confidence")]
    for way in ways:
        assert generated(speculate(target, rows, model, "auto", speculative=way, max_new_tokens=24), rows) == plain(target, rows, max_new_tokens=24)


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4 Unified"])
def test_a_prompt_that_shows_an_image_is_drafted_behind(name):
    families = [family for family in seeing.FAMILIES if family.name == name]
    if not families:
        pytest.skip("not in this version of transformers")
    target = families[0].model()
    config = target.config.get_text_config()
    model = of_heads(target, kinds=config.layer_types[:2], window=config.sliding_window)
    for n in (1, 2):
        inputs = families[0].prompts(n)
        out = integration.generate(target, **inputs, max_new_tokens=16, assistant_model=model, num_assistant_tokens=3, return_dict_in_generate=True)
        assert out.speculation.drafted and out.sequences.tolist() == target.generate(**inputs, max_new_tokens=16).tolist()


@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, top_k=4)], ids=["as it is", "warped"])
def test_sampled_text_follows_the_law_of_a_target_that_shares_its_keys(options):
    small = dict(vocab_size=law.VOCAB, vocab_size_per_layer_input=law.VOCAB, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    target = gemma(spread=0.5, **small)
    rows, n = [[1, 2, 3, 1, 2], [4]], 600
    found, traces = law.counts(target, rows, SharedKVDraft(of_heads(target)), n, 3, 2, **options)
    assert law.worst_p_value(found, [law.joint(target, row, 3, **options) for row in rows], 3) > law.THRESHOLD
    assert 0.02 < sum(trace.accepted for trace in traces) / sum(trace.proposed for trace in traces) < 0.98


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.share(1)
@pytest.mark.usefixtures("strict")
@every_kind
def test_after_warming_up_a_call_compiles_nothing(kind, monkeypatch):
    from torch._dynamo.utils import counters

    if OLD_TORCH and kind == "shared_kv":
        pytest.skip("this torch does not trace Gemma 4: docs/performance.md")
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})  # seconds instead of minutes
    target, model = pairs()[kind]()
    enable(target)
    config = {"num_assistant_tokens": 3, "compile": "model"}
    warmup(target, model, config, max_length=64)
    before = counters["stats"]["unique_graphs"]
    rows = repetitive(13)
    out = speculate(target, rows, model, 3, speculative={"compile": "model"}, max_new_tokens=20)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=20) and out.speculation.drafted
    assert counters["stats"]["unique_graphs"] == before


# --- by name, from disk -----------------------------------------------------------------------------------------------


@every_kind
def test_a_folder_is_read_as_the_assistant_that_it_holds(kind, tmp_path):
    target, model = pairs()[kind]()
    model.save_pretrained(tmp_path)
    for draft in ("model", kind):
        found = loaded(SpeculativeConfig(draft=draft, draft_source=str(tmp_path)), target)
        assert as_draft(found, SpeculativeConfig(draft=draft, draft_source=str(tmp_path))).name == kind
    rows = ROWS["ragged"]
    out = speculate(target, rows, None, 3, speculative={"draft": kind, "draft_source": str(tmp_path)}, max_new_tokens=12)
    assert out.speculation.drafted and generated(out, rows) == plain(target, rows, max_new_tokens=12)
    other = next(own for own in assistants.KINDS if own != kind)
    with pytest.raises(ValueError, match=f"{type(model).__name__} (fills no masked places|reads no keys and values) "):
        speculate(target, rows, None, 3, speculative={"draft": other, "draft_source": str(tmp_path)})


@needs_stock
@every_kind
def test_the_command_line_loads_it_and_the_bench_sets_it_beside_transformers_own(kind, tmp_path):
    target, model = pairs()[kind]()
    model.save_pretrained(tmp_path)
    draft = load_draft(str(tmp_path), "float32", target, None)
    assert draft.name == kind
    arms = {arm.name: arm.run([repetitive(13)[0]], 12).tokens for arm in standard_arms(enable(target), draft, 3)}
    name = {"shared_kv": "stock draft model", "dflash": "stock assistant"}[kind]
    assert arms[name] == arms[f"ours {kind}"] == arms["plain generate"]


@every_kind
def test_a_dict_may_name_the_kind_of_the_assistant_beside_it_and_give_its_options(kind):
    target, model = pairs()[kind]()
    rows, options = ROWS["ragged"], {"shared_kv": {}, "dflash": {"tree": (3, 2)}}[kind]
    way = {"draft": kind, "draft_options": options}
    out = speculate(target, rows, model, 4, speculative=way, max_new_tokens=12)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=12) and out.speculation.config["draft_options"] == options
    assert generated(speculate(enable(target, speculative=way, assistant_model=model), rows, None, 4, speculative=None, max_new_tokens=12), rows) == generated(out, rows)
    for other in {*assistants.KINDS, "mixture"} - {kind}:
        with pytest.raises(ValueError, match=f"{type(model).__name__} and speculative=.*{other}.* are two drafts"):
            speculate(target, rows, model, 4, speculative={"draft": other})


# --- what is refused --------------------------------------------------------------------------------------------------


def test_no_other_model_is_taken_for_one():
    assert assistants.kind_of(tiny_llama()) is None and assistants.kind_of(None) is None
    with pytest.raises(ValueError, match="LlamaForCausalLM reads no keys and values of a target.*ModelDraft"):
        SharedKVDraft(tiny_llama())
    with pytest.raises(ValueError, match="LlamaForCausalLM fills no masked places.*ModelDraft"):
        DFlashDraft(tiny_llama())


@pytest.mark.parametrize("into", [
    ModelDraft, ModelTreeDraft, lambda model: CascadeDraft(model, PromptLookupDraft()), lambda model: TranslatedDraft(model, word_tokenizer(range(VOCAB)), word_tokenizer(range(9))),
])
@every_kind
def test_an_assistant_is_not_taken_for_a_model_that_reads_text(kind, into):
    with pytest.raises(ValueError, match=r"model: (Gemma4Assist|MuseGlimmer).* reads no text, but what a target has made of it: .*SharedKVDraft\(model\) or DFlashDraft"):
        into(pairs()[kind]()[1])


@pytest.mark.parametrize(("other", "words"), [
    (lambda: gemma(hidden_size=40), "reads states of width 40, and those of Gemma4ForCausalLM have 32"),
    (lambda: gemma(head_dim=16, global_head_dim=16), "reads sliding_attention layers with 2 key heads of 16, and Gemma4ForCausalLM has 2 key heads of 8"),
    (lambda: gemma(num_key_value_heads=1), "reads sliding_attention layers with 1 key heads of 8, and Gemma4ForCausalLM has 2 key heads of 8"),
])
def test_an_assistant_of_another_target_is_refused_before_any_work(other, words):
    target = gemma()
    with pytest.raises(ValueError, match=f"assistant_model: Gemma4AssistantForCausalLM {words}: it was made for another model"):
        speculate(target, ROWS["alone"], of_heads(other()), 3)


def test_a_target_whose_layers_are_of_one_kind_has_no_keys_for_it():
    with pytest.raises(ValueError, match="reads sliding_attention layers with 2 key heads of 8, and LlamaForCausalLM has none"):
        speculate(tiny_llama(), ROWS["alone"], of_heads(tiny_llama()), 3)
    target = build("qwen3", **{**ALIKE, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match="reads sliding_attention layers with any heads, and Qwen3ForCausalLM has none"):
        speculate(target, ROWS["alone"], of_heads(target, kinds=("full_attention",)), 3)


def test_an_assistant_of_full_layers_alone_drafts():
    target = gemma()
    out = speculate(target, ROWS["ragged"], of_heads(target, kinds=("full_attention",)), 3)
    assert out.speculation.drafted and generated(out, ROWS["ragged"]) == plain(target, ROWS["ragged"])


@pytest.mark.parametrize("other", [dict(hidden_size=16), dict(num_hidden_layers=5)], ids=["width", "layers"])
def test_masked_places_of_another_target_are_refused_before_any_work(other):
    model = masked_places(tiny_llama(3, **other))
    with pytest.raises(ValueError, match="MuseGlimmerAssistantModel reads states of width .* and LlamaForCausalLM has 2 layers of width 32: it was made for another model"):
        speculate(tiny_llama(3), ROWS["alone"], model, 3)


def test_a_mask_that_the_target_has_no_embedding_of_is_refused_before_any_work():
    with pytest.raises(ValueError, match=f"MuseGlimmerAssistantModel masks places by the token {VOCAB}, of which LlamaForCausalLM has no embedding: it was made for another"):
        speculate(tiny_llama(), ROWS["alone"], masked_places(tiny_llama(), mask_token_id=VOCAB), 3)


def test_a_mixture_with_another_law_is_refused():
    with pytest.raises(ValueError, match="assistant_ensemble_weight=0.5: .*lenience"):
        integration.generate(tiny_llama(), torch.tensor([[5, 6, 7]]), assistant_model=tiny_llama(), assistant_ensemble_weight=0.5)


def test_builders_make_both_kinds_for_the_batteries():
    assert {name for name in VARIANTS if name.split(",")[0] in assistants.KINDS} == {"shared_kv", "dflash", "dflash, markov", "dflash, refined", "dflash, selected", "dflash, tree"}
    assert make("dflash, tree", tiny_llama(), VARIANTS).may_branch


def test_layers_that_the_target_leaves_out_are_refused_by_name():
    """Mllama runs those that look at images where one is shown alone."""
    target = next(family for family in FAMILIES if family.name == "Mllama").model("eager")
    with pytest.raises(ValueError, match="assistant_model: .*look at images, without which they do not run"):
        speculate(target, [[5, 6, 7, 8]], DFlashDraft(masked_places(target)))
    rows = [[5, 6, 7, 8]]
    out = speculate(target, rows, DFlashDraft(masked_places(target, target_layer_ids=[0, 2])))
    assert generated(out, rows) == plain(target, rows)
