"""Published drafters of DFlash's kind: synthetic checkpoints in the published layouts, against a small forward written down here."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from hf_specdec import SpeculativeConfig, enable, mx
from hf_specdec.assistants import auto_class
from hf_specdec.drafts import DFlashDraft, MixtureDraft
from hf_specdec.loading import loaded
from hf_specdec.training import load_drafter
from hf_specdec.training.drafter import is_drafter
from tests.architectures import FAMILIES

from .dflash_checkpoints import BLOCK, CONFIGS, H, READS, SPARKS, SPECULATORS, TWO, V, XPRESS, ZLAB, block, checkpoint, first_place, jacobi, laws, path, write
from ..helpers import Logged, build, generated, plain, repetitive, speculate, tiny_llama

pytestmark = pytest.mark.skipif("muse_glimmer_assistant" not in CONFIG_MAPPING, reason="this version of transformers has no assistant of the kind")
every_layout = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class BlockLog(Logged, DFlashDraft):
    pass


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, num_hidden_layers=4)


# --- what is drafted --------------------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("rows", [repetitive(13), [*repetitive(13), *repetitive(7, seed=4), *repetitive(9, seed=2)]], ids=["alone", "ragged"])
def test_tokens_are_those_that_the_checkpoint_says(target, tmp_path, config, rows):
    drafts_as_published(target, tmp_path, config, rows)


@every_layout
def test_targets_that_scale_their_embeddings(tmp_path, config):
    """The masked places get what the drafter was trained on: the embeddings as the target's own module gives them, but for DFlash 2 and speculators, who take the weights."""
    gemma = build("gemma", 3, vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    drafts_as_published(gemma, tmp_path, config, repetitive(13))


def drafts_as_published(target, tmp_path, config, rows):
    tensors = checkpoint(config)
    loaded = load_drafter(write(tmp_path, config, tensors), target)
    draft = BlockLog(loaded.model, layout=loaded.layout)
    assert is_drafter(tmp_path) and isinstance(loaded, DFlashDraft)
    assert generated(speculate(target, rows, draft, BLOCK, max_new_tokens=18), rows) == plain(target, rows, max_new_tokens=18)
    drafted = [(row, proposal.listed()[b][: proposal.sizes[b]]) for committed, proposal in draft.log for b, row in enumerate(committed) if proposal.sizes[b]]
    assert len(drafted) > 10
    for row, own in drafted:
        assert own == path(config, tensors, *block(target, config, tensors, row), row)[: len(own)]


@every_layout
def test_a_chain_is_drawn_where_the_target_samples(target, tmp_path, config):
    """Each token from the law that is reported of it: of its place, or, after the one before it, what the selector says."""
    tensors = checkpoint(config)
    loaded = load_drafter(write(tmp_path, config, tensors), target)
    draft, rows = BlockLog(loaded.model, layout=loaded.layout), repetitive(13)
    speculate(target, rows, draft, BLOCK - 1, max_new_tokens=18, do_sample=True, temperature=1.3, top_k=0, seed=5)
    judged = 0
    for committed, proposal in draft.log:
        for b, row in enumerate(committed):
            drafted = proposal.listed()[b][: proposal.sizes[b]]
            for i, scores in enumerate(laws(config, tensors, *block(target, config, tensors, row), row, drafted[:-1]) if drafted else ()):
                torch.testing.assert_close(proposal.probs[b, i], (scores / 1.3).softmax(-1), atol=1e-4, rtol=1e-3)
                judged += 1
    assert judged > 20


@pytest.mark.parametrize("config", XPRESS.values(), ids=XPRESS)
def test_what_is_drafted_is_what_the_authors_passes_end_at(target, config):
    """The n-th pass over all places settles the n-th token."""
    tensors, changed = checkpoint(config), 0
    for seed in range(8):
        row = [5, *torch.randint(0, V, (9,), generator=torch.Generator().manual_seed(seed)).tolist()]
        known = block(target, config, tensors, row)
        tokens, places = path(config, tensors, *known, row), BLOCK - first_place(config)
        for passes in range(1, places + 1):
            assert jacobi(config, tensors, *known, row, passes)[:passes] == tokens[:passes]
        changed += jacobi(config, tensors, *known, row, 1) != tokens
    assert changed


@every_layout
@pytest.mark.parametrize("make", [lambda draft: draft, lambda draft: DFlashDraft(draft.model, tree=(3, 2), layout=draft.layout), lambda draft: MixtureDraft([draft, "prompt_lookup"], mode="choose")],
                         ids=["chain", "tree", "mixture"])  # fmt: skip
def test_the_text_is_the_targets_own(target, tmp_path, config, make):
    draft, rows = make(load_drafter(write(tmp_path, config, checkpoint(config)), target)), [*repetitive(13), *repetitive(7, seed=4)]
    out = speculate(target, rows, draft, 4, max_new_tokens=16)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=16) and out.speculation.drafted


@pytest.mark.parametrize("name", ["Qwen3.5", "Gemma 3 ", "GPT-OSS"])
def test_targets_of_other_families(tmp_path, name):
    """Hybrids with states, scaled embeddings, mixtures of experts: what the drafter reads are the states that transformers shows."""
    family = next((line for line in FAMILIES if line.name.startswith(name.strip())), None)
    if family is None:
        pytest.skip(f"transformers has no {name} that generates from its cache")
    model = family.model("eager")
    text = model.config.get_text_config()
    own = {**TWO, "hidden_size": text.hidden_size, "num_target_layers": text.num_hidden_layers, "vocab_size": text.vocab_size}
    if (text.hidden_size, text.vocab_size) != (H, V):
        pytest.skip("the checkpoint of these tests is of another width")
    own["dflash_config"] = {**TWO["dflash_config"], "target_layer_ids": [0, text.num_hidden_layers - 1]}
    rows = [*repetitive(13), *repetitive(7, seed=4)]
    out = speculate(model, rows, load_drafter(write(tmp_path, own, checkpoint(TWO)), model), 4, max_new_tokens=12)
    assert generated(out, rows) == plain(model, rows, max_new_tokens=12) and out.speculation.drafted


def test_its_layers_go_into_tiles_and_mx_formats(target, tmp_path):
    draft, rows = load_drafter(write(tmp_path, TWO, checkpoint(TWO)), target), repetitive(13)
    mx.to_tiles(draft.model)
    assert any(isinstance(part, mx.MXLinear) for part in draft.model.modules())
    assert generated(speculate(target, rows, draft, 4, max_new_tokens=12), rows) == plain(target, rows, max_new_tokens=12)


# --- what does not map --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, message", [
    ({**ZLAB, "hidden_size": 64}, "width 64 with 4 layers; this one has width 32 and 4 layers"),
    ({**ZLAB, "num_target_layers": 36}, "with 36 layers"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 9]}}, r"states of layers \[0, 9\] of its target; this target has 4"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 1}}, r"states of layers \[\]"),
    ({**ZLAB, "dflash_config": {"target_layer_ids": READS}}, "names no mask_token_id"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 99, "target_layer_ids": READS}}, "masks places by the token 99"),
    ({**ZLAB, "num_hidden_layers": 3}, "has no layers.2"),
    ({**ZLAB, "intermediate_size": 48}, "mlp.*has shape"),
    ({**SPECULATORS, "speculators_model_type": "dflash_other"}, "another kind than DFlash.*dflash_other"),
    ({**SPECULATORS, "projector_type": "domino"}, "another kind.*domino"),
    ({**ZLAB, "shift_label": True}, "another kind.*at another place"),
    ({**SPARKS["DSpark, rnn"], "architectures": ["Gemma4DSparkModel"]}, "another kind.*Gemma4DSparkModel"),
    ({**ZLAB, "architectures": ["Qwen3XPressModel"]}, "has no down_g.weight"),
    ({**ZLAB, "architectures": ["Qwen3XPressModel"], "xpress_mixer_format": "folded"}, "xpress_mixer_format=folded, which is not read"),
    ({**ZLAB, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5, which is not read"),
    ({**ZLAB, "block_size": 1}, "model: .* has block_size=1, so that no place behind the root's is left"),
    ({**ZLAB, "rope_is_neox_style": False}, "rope_is_neox_style=False, which is not read"),
    ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "use_swa": True}}, "use_swa=True, which is not read"),
], ids=range(18))  # fmt: skip
def test_what_does_not_map_is_named(target, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, config, checkpoint(ZLAB)), target)


def test_a_config_names_it_with_options_of_its_own(target, tmp_path):
    """The layout stays with what is made anew."""
    folder, rows = str(write(tmp_path, TWO, checkpoint(TWO))), repetitive(13)
    model = enable(copy.deepcopy(target))
    for given in ({"draft": "dflash", "draft_source": folder}, {"draft": "dflash", "draft_source": folder, "draft_options": {"tree": (3, 2)}}):
        draft = loaded(SpeculativeConfig(**given), model)
        assert draft.layout.selector is not None and draft.may_branch == ("draft_options" in given)
        assert generated(model.generate(torch.tensor(rows), speculative={**given, "num_assistant_tokens": 4}, max_new_tokens=8, do_sample=False), rows) == plain(target, rows, max_new_tokens=8)


def test_a_hub_id_without_its_prefix_and_the_checkpoints_own_code_are_told_the_way(target):
    with pytest.raises(ValueError, match="z-lab/some holds a DFlash drafter; name it hub:z-lab/some"):
        auto_class(AutoConfig.for_model("qwen3", dflash_config={}, name_or_path="z-lab/some"))

    class DFlashDraftModel(type(target)):
        def forward(self, position_ids, noise_embedding=None, target_hidden=None, **kwargs):
            raise AssertionError

    with pytest.raises(ValueError, match=r"assistant_model: DFlashDraftModel is a DFlash drafter in code of its own. Pass load_drafter\("):
        speculate(target, repetitive(13), DFlashDraftModel(target.config), 3)


def test_a_head_of_another_block_size_is_refused(target, tmp_path):
    config, tensors = XPRESS["XPress"], checkpoint(XPRESS["XPress"])
    with pytest.raises(ValueError, match=r"mix_l has shape \[6, 4, 4\]; its config and this target make it \[6, 5, 5\]"):
        load_drafter(write(tmp_path, config, tensors | {"xpress_head.mix.L": torch.zeros(6, 4, 4)}), target)


def test_what_xpress_begins_with_does_not_count(target, tmp_path):
    """Neither the number of passes, nor a selector whose choices are the first ones, nor what the config says of convolutions that its backbone does not have."""
    config, tensors = XPRESS["XPress of speculators"], checkpoint(XPRESS["XPress of speculators"])
    selector = {f"candidate_selector.{name}": tensor for name, tensor in (("predecessor_codebook", torch.randn(V, 3)), ("successor_codebook", torch.randn(V, 3)),
                                                                       ("hidden_projection.weight", torch.randn(3, H)))}  # fmt: skip
    more = {**config, "num_jacobi_passes": 1, "xpress_backbone": "dflash", "conv_kernel_size": 2, "conv_group_size": 4, "xpress_selector": True}
    drafts, rows, told = [load_drafter(write(tmp_path / str(i), *made), target) for i, made in enumerate([(config, tensors), (more, tensors | selector)])], repetitive(13), []
    for draft in drafts:
        draft = BlockLog(draft.model, layout=draft.layout)
        speculate(target, rows, draft, BLOCK - 1)
        told.append([proposal.listed() for _, proposal in draft.log])
    assert told[0] == told[1] and any(told[0])


def test_vllms_own_word_for_a_first_token_behind_the_root(target, tmp_path):
    config = {**SPARKS["DSpark, vanilla"], "dspark_bonus_anchor": True}
    assert load_drafter(write(tmp_path, config, checkpoint(config)), target).layout.first == 1


def test_a_markov_head_of_another_kind_is_refused(target, tmp_path):
    config = {**SPARKS["DSpark, rnn"], "markov_head_type": "other"}
    with pytest.raises(ValueError, match="markov_head_type 'other' is none of"):
        load_drafter(write(tmp_path / "other", config, checkpoint(SPARKS["DSpark, rnn"])), target)


def test_a_markov_head_of_fewer_or_more_tokens_drafts_those_that_it_and_the_target_have(target, tmp_path):
    for vocab in (V - 6, V + 3):
        tensors = {f"markov_head.markov_w{i}.weight": torch.randn(vocab, 6) for i in (1, 2)}
        loaded = load_drafter(write(tmp_path / str(vocab), SPARKS["DSpark, vanilla"], checkpoint(SPARKS["DSpark, vanilla"]) | tensors), target)
        draft, rows = BlockLog(loaded.model, layout=loaded.layout), repetitive(13)
        assert generated(speculate(target, rows, draft, BLOCK), rows) == plain(target, rows)
        assert max(token for _, proposal in draft.log for token in proposal.listed()[0]) < min(vocab, V)


def test_pickles_are_not_opened_and_foreign_tensors_are_named(target, tmp_path):
    with pytest.raises(ValueError, match="does not map: layers.0.extra"):
        load_drafter(write(tmp_path / "more", ZLAB, checkpoint(ZLAB) | {"layers.0.extra.weight": torch.zeros(2)}), target)
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is a pickle"):
        load_drafter(tmp_path, target)
