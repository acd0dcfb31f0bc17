"""Feature drafters: they see the target's states, go on from their own as they were trained to, and change nothing of the output."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.features import hidden_states, start_blind
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.training import FeatureRunConfig, FeatureTrainer, build_drafter, load_drafter
from hf_specdec.training.drafter import begin, save
from hf_specdec.training.feature_trainer import FeatureStudent
from hf_specdec.training.features import make_features, read_features
from hf_specdec.training.shards import Shard, shard_files

from ..architectures import FAMILIES
from ..conformance.builders import block_drafter, medusa_heads
from ..helpers import generated, plain, prompts, speculate, tiny_llama
from ..pretend_gpu import PretendGpu
from .watched import Watched

READS = (0, 1, 2)


def made(target, head=None, seed=0):
    draft = build_drafter(target, [1], head, READS)
    torch.manual_seed(seed)
    for linear in (draft.feature_fuse, draft.feature_join):
        linear.weight.data += 0.1 * torch.randn_like(linear.weight)
    return draft


def test_the_states_are_those_of_the_named_layers():
    ids, target = torch.tensor([[5, 6, 7, 8]]), tiny_llama(3)
    with hidden_states(target, READS) as seen:
        target(input_ids=ids)
    assert not target.base_model._forward_hooks and not target.model.layers[0]._forward_hooks
    expected = target(input_ids=ids, output_hidden_states=True).hidden_states
    states = seen()
    torch.testing.assert_close(states[..., 64:], target.base_model(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(states[..., :32], expected[1])


@pytest.mark.parametrize("name", ["OPT", "Llama 4 (text, chunked)"])
def test_states_are_read_where_base_model_does_not_run_or_is_the_model_itself(name):
    target = next(family for family in FAMILIES if family.name == name).model()
    ids, count = torch.tensor([[5, 6, 7, 8]]), target.config.num_hidden_layers
    with hidden_states(target, (0, count)) as seen:
        logits = target(input_ids=ids).logits
    torch.testing.assert_close(target.get_output_embeddings()(seen()[..., 32:]), logits)
    rows = prompts(9, 4)
    text = generated(speculate(target, rows, MedusaDraft(medusa_heads(target), target), 4, max_new_tokens=12), rows)
    assert text == plain(target, rows, max_new_tokens=12)


def test_layers_with_several_states_per_token_are_refused_before_any_pass():
    target = next(family for family in FAMILIES if family.name == "Gemma 3n (text)").model()
    calls = []
    target.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="Gemma3nForCausalLM put out several states per token"):
        speculate(target, prompts(9), ParallelDraft(block_drafter(target), target), 4, max_new_tokens=6)
    assert not calls


def test_states_of_shards_are_kept_and_made_once(target, data, tmp_path):
    path = shard_files(data)[0]
    make_features([path], target, READS, tmp_path)
    kept = (tmp_path / path.name).stat().st_mtime_ns
    make_features([path], target, READS, tmp_path)
    assert (tmp_path / path.name).stat().st_mtime_ns == kept
    shard, states = Shard.load(path), read_features(tmp_path / path.name)
    a, b = int(shard.starts[2]), int(shard.starts[3])
    with torch.no_grad(), hidden_states(target, READS) as seen:
        target(input_ids=shard.tokens[a:b].long()[None])
    torch.testing.assert_close(states[a:b].float(), seen()[0].bfloat16().float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("change", ["text", "target", "layers", "cut", "silent"])
def test_states_of_other_text_another_target_or_other_layers_are_made_anew(target, data, tmp_path, change):
    path, kept = tmp_path / "000000.safetensors", tmp_path / "states" / "000000.safetensors"
    first, second = (Shard.load(file) for file in shard_files(data)[:2])
    first.save(path)
    make_features([path], target, READS, kept.parent)
    before, layers = read_features(kept).clone(), (1, 2) if change == "layers" else READS
    if change == "text":
        second.save(path)
    elif change == "cut":
        kept.write_bytes(kept.read_bytes()[:-100])
    elif change == "silent":  # of a version that said nothing but the layers
        save_file({"states": before + 1}, kept, metadata={"layers": "[0, 1, 2]"})
    make_features([path], tiny_llama(4) if change == "target" else target, layers, kept.parent)
    expected = second if change == "text" else first
    assert read_features(kept).shape == (len(expected.tokens), 32 * len(layers))
    assert torch.equal(read_features(kept), before) == (change in ("cut", "silent"))


@pytest.mark.parametrize("rows", [[[5, 6, 7, 8]], [[5, 6, 7, 8, 9, 10], [11, 12, 13], [3]]], ids=["one", "ragged"])
def test_drafting_computes_what_training_computed(target, rows):
    """Every step of every round against the unrolled student on the same tokens."""
    model, unroll = hf_specdec.enable(tiny_llama(3)), 3
    draft = Watched(made(model), model)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    model.generate(input_ids=ids, attention_mask=mask, assistant_model=draft, speculative={"num_assistant_tokens": unroll, "seed": 0},
                   max_new_tokens=12, do_sample=False, pad_token_id=0)
    student, checked = FeatureStudent(draft.model, False, unroll), 0
    prompts = {tuple(row[:1]): len(row) for row in rows}
    for step, committed, drafted, logits in draft.log:
        for b, row in enumerate(committed):
            if step >= prompts[tuple(row[:1])] + 12 - len(row) - 1:
                continue  # no room for it: the row is padded
            tokens = torch.tensor([row + [one[b] for one in drafted]])
            with torch.no_grad(), hidden_states(model, READS) as seen:
                model(input_ids=tokens)
                states = seen()
            with torch.no_grad():
                expected = student(tokens, states, torch.tensor([tokens.shape[1] - 1]))[step][0]
            if tokens.shape[1] - 1 > step:
                torch.testing.assert_close(logits[b, 0], expected, atol=2e-4, rtol=2e-4)
                checked += 1
    assert checked >= 9


@pytest.mark.parametrize("head", [None, torch.arange(0, 61, 2)], ids=["whole", "pruned"])
@pytest.mark.parametrize("k", [1, 4, "auto"])
def test_greedy_output_is_the_targets_own_in_a_ragged_batch(head, k):
    model = hf_specdec.enable(tiny_llama(3))
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13], [0, 0, 0, 0, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1]])
    new = 25 if k != "auto" else 80  # a draft as large as its target is tried seldom
    settings = dict(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=[30, 31, 7])
    out = model.generate(**settings, assistant_model=FeatureDraft(made(model, head), model), return_dict_in_generate=True,
                         speculative={"num_assistant_tokens": k, "seed": 0})
    assert torch.equal(out.sequences, model.generate(**settings)) and out.speculation.proposed > 0
    assert not model.base_model._forward_hooks and not model.base_model._forward_pre_hooks


def test_conversation_goes_on_from_a_cache(target):
    model = hf_specdec.enable(tiny_llama(3))
    ids = torch.tensor([[5, 6, 7, 8]])
    first = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=0, return_dict_in_generate=True, speculative=True)
    longer = torch.cat([first.sequences, torch.tensor([[3, 4]])], dim=1)
    settings = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    expected = model.generate(input_ids=longer, **settings)
    found = model.generate(input_ids=longer, **{CACHE: first[CACHE]}, assistant_model=FeatureDraft(made(model), model),
                           speculative={"num_assistant_tokens": 3}, **settings)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", ["bf16", "mxint8"])
def test_it_is_stored_with_what_it_reads(target, tmp_path, format):
    draft = made(target, torch.arange(40))
    save(draft, tmp_path, "tiny", format)
    again = load_drafter(tmp_path, target)
    assert isinstance(again, FeatureDraft) and again.layers == READS
    found, expected = again.model.feature_fuse(torch.ones(1, 96)), draft.feature_fuse(torch.ones(1, 96))
    torch.testing.assert_close(found, expected, atol=0.2, rtol=0.1)
    settings = dict(input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    out = hf_specdec.enable(target).generate(**settings, assistant_model=again, speculative={"num_assistant_tokens": 3}, return_dict_in_generate=True)
    assert torch.equal(out.sequences, target.generate(**settings)) and out.speculation.proposed > 0


def test_a_run_learns_and_goes_on_after_a_stop(target, data, tmp_path):
    config = FeatureRunConfig(reads=READS, head=None, steps=120, batch_tokens=256, lr=1e-2, warmup=3, precision="float32", format="bf16", unroll=2)
    trainer = FeatureTrainer(target, data, tmp_path, config, "tiny")
    before = trainer.measure()
    trainer.run(every=60)
    after = trainer.measure()
    assert after["sampling_acceptance"] > before["sampling_acceptance"] + 0.05, (before, after)  # greedy: 81 tokens, too few to tell
    assert len(after["greedy_by_step"]) == 2
    trainer.finish()
    assert FeatureTrainer(target, data, tmp_path, config, "tiny").progress.step == 120
    assert isinstance(load_drafter(tmp_path, target), FeatureDraft)


def test_in_the_first_steps_it_may_learn_the_first_token_alone(target, data, tmp_path):
    settings = dict(reads=READS, head=None, steps=4, batch_tokens=256, precision="float32", unroll=3)
    both, one, short = (FeatureTrainer(target, data, tmp_path / str(i), FeatureRunConfig(**settings | change), "tiny")
                        for i, change in enumerate(({}, {"single": 1}, {"unroll": 1})))
    batch = both._batch()
    with torch.no_grad():
        assert float(one._loss(batch)) == float(short._loss(batch)) != float(both._loss(batch))
    one.progress.step = 1
    with torch.no_grad():
        assert float(one._loss(batch)) == float(both._loss(batch))


def test_a_run_begins_with_a_drafter_that_reads_nothing(target, tmp_path):
    """At first the states make no difference, whatever they are."""
    blind = build_drafter(target, [0])
    for p in blind.model.layers.parameters():
        p.data += 0.1 * torch.randn_like(p)
    draft = begin(build_drafter(target, [1], None, READS), load_drafter(save(blind, tmp_path, "tiny", "mxint8"), target))
    torch.testing.assert_close(draft.model.layers[0].mlp.up_proj.weight, blind.model.layers[0].mlp.up_proj.weight, atol=0.02, rtol=0.02)
    tokens, where = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([2, 3, 4])
    with torch.no_grad():
        logits = [FeatureStudent(draft, False, 2)(tokens, torch.randn(1, 5, 96), where) for _ in range(2)]
    torch.testing.assert_close(logits[0], logits[1])


def test_it_begins_blind_where_its_weights_are():
    draft = build_drafter(tiny_llama(3), [0], None, READS)
    with PretendGpu() as gpu:
        start_blind(gpu.put(draft))
        assert draft.feature_join.weight.device.type == "cuda"


def test_a_run_goes_on_from_another_feature_drafter(target, data, tmp_path):
    other = made(target)
    save(other, tmp_path / "first", "tiny", "bf16")
    config = FeatureRunConfig(reads=READS, layers=(1,), head=None, steps=1, batch_tokens=256, precision="float32", begin=str(tmp_path / "first"))
    draft = FeatureTrainer(target, data, tmp_path / "next", config, "tiny").draft
    torch.testing.assert_close(draft.feature_join.weight, other.feature_join.weight, atol=0.01, rtol=0.01)
    torch.testing.assert_close(draft.feature_fuse.weight, other.feature_fuse.weight, atol=0.01, rtol=0.01)
    with pytest.raises(ValueError, match="begin"):
        begin(build_drafter(target, [0, 1], None, READS), FeatureDraft(other, target))
    with pytest.raises(ValueError, match="begin='nowhere'"):
        FeatureTrainer(target, data, tmp_path / "next", FeatureRunConfig(begin="nowhere"), "tiny")


def test_a_model_that_reads_no_states_is_refused(target):
    with pytest.raises(ValueError, match="reads no hidden states"):
        FeatureDraft(build_drafter(target, [1]), target)


def test_under_stock_decoding_it_proposes_nothing_and_leaves_no_hooks():
    model = tiny_llama(3)
    draft, ids = FeatureDraft(made(model), model), torch.tensor([[5, 6, 7, 8]])
    for longer in (ids, torch.cat([ids, ids], dim=1)):
        assert torch.equal(draft.get_candidates(longer)[0], longer)
    assert not model.base_model._forward_hooks and not draft.model.base_model._forward_hooks
