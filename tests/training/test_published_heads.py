"""Heads that know the tokens before (Hydra, Hydra++, IBM's MLP speculators) and those of Medusa-2, in the published layouts, against forwards written down here."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, linear, silu
from transformers import AutoModelForCausalLM

from hf_specdec import SpeculativeConfig, enable
from hf_specdec.drafts import MixtureDraft, OnlineDraft
from hf_specdec.drafts.features import hidden_states
from hf_specdec.drafts.prefixed import PrefixedDraft
from hf_specdec.drafts.sequential import SequentialDraft
from hf_specdec.loading import loaded
from hf_specdec.training import load_drafter
from hf_specdec.training.drafter import is_drafter
from hf_specdec.training.export import export
from tests.conformance import law

from .. import encoder_decoders
from ..conformance.builders import feature_drafter, hydra_heads, prefixed_heads
from ..helpers import FULL, build, generated, plain, small_vocabulary_llama, speculate, tiny_llama
from .test_published import CONFIG, KV, ROWS, THETA, H, I, V, attention, layer, medusa, mlp, norm, part, random

HEADS, LAYERS = 4, 3


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, num_hidden_layers=3, intermediate_size=I, num_attention_heads=4, num_key_value_heads=KV, rms_norm_eps=1e-5,
                      rope_parameters={"rope_type": "default", "rope_theta": THETA})


def save(folder, tensors, config, name="model.safetensors"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({own: tensor.clone().contiguous() for own, tensor in tensors.items()}, folder / name)
    return folder


def judged(draft, target, k=HEADS, new=14):
    """(row as committed, the tokens drafted after it, logits [V]) of everything that the draft said, in ragged batches."""
    log, scores = [], type(draft)._scores

    class Watched(type(draft)):
        def _scores(self, context, tokens, k, step):
            logits = scores(self, context, tokens, k, step)
            told = [one.tolist() for one in tokens]
            log.extend((list(row), [one[b] for one in told], logits[b, 0].clone()) for b, row in enumerate(context.rows) if step < k[b])
            return logits

    draft.__class__ = Watched
    out = speculate(target, ROWS, draft, k, max_new_tokens=new)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=new) and out.speculation.proposed > 0
    assert {len(drafted) for _, drafted, _ in log} == set(range(k))
    return log


def states_of(target, row, read):
    """[L - 1, H]: the root has not been read."""
    with hidden_states(target, (read,)) as seen:
        target(input_ids=torch.tensor([row[:-1]]))
        return seen()[0]


# --- Hydra ----------------------------------------------------------------------------------------------------------------------


def hydra(target, arch: str = "mlp", grounded: bool = True) -> dict[str, torch.Tensor]:
    """As its `hydra_head.state_dict()` is: what follows a head's first block is the same block, again and again; the target's embedding is there, too."""
    torch.manual_seed(2)
    embedding, step = target.get_input_embeddings().weight.detach().clone(), 1 if arch == "mlp" else 2  # dropouts between
    found = {"input_embed_fn.weight": embedding}
    for i in range(HEADS):
        wide = (i + 2) * H if grounded else H
        first = {"linear.weight": random(H, wide), "linear.bias": random(H)} | ({"res_connection.weight": random(H, wide), "res_connection.bias": random(H)} if grounded else {})
        again = {"linear.weight": random(H, H), "linear.bias": random(H)} if grounded else first
        for j in range(LAYERS):
            found |= {f"hydra_mlp.{i}.{step * j + step - 1}.{name}": tensor for name, tensor in (again if j else first).items()}
        place = f"hydra_lm_head.{i}" + ("" if arch == "mlp" else ".1")
        found |= {f"{place}.weight": random(V, H), f"{place}.bias": random(V)}
    if arch == "prefix-mlp":
        block = layer(H) | {"input_layernorm.weight": 1 + random(H), "self_attn.rotary_emb.inv_freq": torch.ones(4)}
        found |= {f"prefix_embeding_layer.layers.0.{name}": tensor for name, tensor in block.items()}
        found |= {"prefix_embeding_layer.norm.weight": 1 + random(H), "prefix_embeding_layer.embed_tokens.weight": random(V, H)}
    return found


def write_hydra(folder, tensors, arch: str = "mlp", **config):
    about = {"hydra_num_heads": HEADS, "hydra_num_layers": LAYERS, "hydra_head_arch": arch, "grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "x"}
    return save(folder, tensors, about | config, "hydra_lm_head.safetensors")


def prefix(tensors, states):
    """A layer of Llama, then its final norm."""
    w = part(tensors, "prefix_embeding_layer.layers.0.")
    x = states + attention(norm(states, w["input_layernorm.weight"]), w)
    x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    return norm(x, tensors["prefix_embeding_layer.norm.weight"])


def hydra_logits(target, tensors, arch, grounded, state, tokens):
    """[V] of the head after the root and the drafted tokens, which `tokens` are."""
    i, step = len(tokens) - 1, 1 if arch == "mlp" else 2
    x = torch.cat([state, *target.get_input_embeddings()(torch.tensor(tokens))]) if grounded else state
    for j in range(LAYERS):
        w = part(tensors, f"hydra_mlp.{i}.{step * j + step - 1}.")
        way = linear(x, w["res_connection.weight"], w["res_connection.bias"]) if grounded and not j else x
        x = way + silu(linear(x, w["linear.weight"], w["linear.bias"]))
    place = f"hydra_lm_head.{i}" + ("" if arch == "mlp" else ".1")
    return linear(x, tensors[f"{place}.weight"], tensors[f"{place}.bias"])


@torch.no_grad()
@pytest.mark.parametrize(("arch", "grounded", "offset"), [("mlp", True, 0), ("mlp", True, 1), ("mlp", False, 0), ("prefix-mlp", True, 0), ("prefix-mlp", True, 2), ("prefix-mlp", False, 0)])
def test_hydra_heads_compute_what_the_original_does(target, tmp_path, arch, grounded, offset):
    tensors = hydra(target, arch, grounded)
    folder = write_hydra(tmp_path, tensors, arch, grounded_heads=grounded, hidden_state_offset=offset)
    draft = load_drafter(folder, target)
    assert type(draft) is (SequentialDraft if arch == "mlp" else PrefixedDraft) and is_drafter(folder)
    assert draft.layers == (3 - (offset + 1 if offset else 0),)
    for row, drafted, logits in judged(draft, target):
        states = states_of(target, row, draft.layers[0])
        whole = target(input_ids=torch.tensor([row[:-1]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(states, whole[-(offset + 1)][0])  # which the original takes
        state = (prefix(tensors, states) if arch == "prefix-mlp" else states)[-1]
        torch.testing.assert_close(logits, hydra_logits(target, tensors, arch, grounded, state, [row[-1], *drafted]), atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_one_copy_of_the_blocks_that_are_one_is_enough(target, tmp_path, arch):
    """As safetensors' save_model leaves them."""
    tensors, later = hydra(target, arch), (".2.",) if arch == "mlp" else (".5.",)
    few = {name: tensor for name, tensor in tensors.items() if not (name.startswith("hydra_mlp.") and name[11:14] in later)}
    assert len(few) < len(tensors)
    whole, cut = (load_drafter(write_hydra(tmp_path / str(len(own)), own, arch), target) for own in (tensors, few))
    whole, cut = ((draft.heads if arch == "mlp" else draft.model.heads).state_dict() for draft in (whole, cut))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_text_is_the_targets_own_in_mixtures_and_under_every_rule_that_ends_a_draft(target, tmp_path, arch):
    folder = write_hydra(tmp_path, hydra(target, arch), arch)
    draft = load_drafter(folder, target)
    for one, k, stop in ((draft, 1, "constant"), (draft, 9, "confidence"), (draft, "auto", "expected_gain"), (MixtureDraft(["suffix_automaton", draft], mode="choose"), 5, "constant"),
                         (MixtureDraft(["suffix_automaton", draft]), 5, "constant")):
        out = speculate(target, ROWS, one, k, max_new_tokens=16, speculative={"draft_stop": stop})
        assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=16)
        assert one is not draft or max(entry.proposed for entries in out.speculation.rounds for entry in entries) <= HEADS


@pytest.mark.parametrize("kind", ["hydra", "hydra++", "mlp speculator"])
def test_sampled_text_follows_the_targets_law(tmp_path, kind):
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    draft = {"hydra": lambda: SequentialDraft(hydra_heads(target), target), "mlp speculator": lambda: load_drafter(
        save(tmp_path, speculator(3, False, 16, law.VOCAB), ABOUT | {"emb_dim": 16, "vocab_size": law.VOCAB, "n_predict": 3}), target)}.get(kind, lambda: prefixed_heads(target))()
    found, traces = law.counts(target, rows, draft, 40_000 if FULL else 1_200, 3, 3)
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > sum(trace.accepted for trace in traces) > 0


class Lying(SequentialDraft):
    """Says of its tokens that they were drawn uniformly."""

    def propose(self, context, k):
        proposal = super().propose(context, k)
        proposal.probs = None if proposal.probs is None else torch.full_like(proposal.probs, 1 / context.vocab_size)
        return proposal


def test_one_that_lies_about_its_law_is_found_out():
    target = small_vocabulary_llama(2, law.VOCAB)
    heads = hydra_heads(target)
    for output in heads.hydra_lm_head:
        output.bias.data[0] += 3.0
    p = [law.worst_p_value(law.counts(target, [[1, 2, 3, 1, 2]], draft, 3_000, 3, 3)[0], [law.joint(target, [1, 2, 3, 1, 2], 3)], 3)
         for draft in (SequentialDraft(heads, target), Lying(heads, target))]
    assert p[0] > law.THRESHOLD > p[1]


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(("change", "config", "message"), [
    (lambda t: without(t, "hydra_lm_head.3.bias"), {}, "has no hydra_lm_head.3.bias"),
    (lambda t: without(t, "hydra_mlp.2.0.res_connection.weight"), {}, "has no hydra_mlp.2.0.res_connection.weight"),
    (lambda t: t, {"hydra_num_heads": 5}, r"has no hydra_lm_head.4.bias \("),
    (lambda t: t, {"hydra_num_heads": 3}, "does not map: hydra_lm_head.3.bias"),
    (lambda t: t, {"hydra_num_heads": 0}, "have to be above 0"),
    (lambda t: t, {"hydra_head_arch": "eagle-attn"}, "'eagle-attn' is not read; mlp and prefix-mlp are"),
    (lambda t: t, {"hidden_state_offset": 3}, "beyond this target's 3 layers"),
    (lambda t: t | {"hydra_lm_head.0.weight": torch.zeros(V + 1, H)}, {}, "hydra_lm_head.0.weight has shape"),
    (lambda t: t | {"input_embed_fn.weight": torch.zeros(V, H)}, {}, "embedding of another model"),
    (lambda t: t | {"more": torch.zeros(1)}, {}, "does not map: more"),
])
def test_hydra_checkpoints_that_do_not_fit_are_refused(target, tmp_path, change, config, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(write_hydra(tmp_path, change(hydra(target)), **config), target)


def test_a_prefix_that_is_not_whole_and_one_for_another_family_are_refused(target, tmp_path):
    tensors = hydra(target, "prefix-mlp")
    with pytest.raises(ValueError, match="has no norm.weight"):
        load_drafter(write_hydra(tmp_path / "a", without(tensors, "prefix_embeding_layer.norm.weight"), "prefix-mlp"), target)
    folder = write_hydra(tmp_path / "b", without(tensors, "input_embed_fn.weight"), "prefix-mlp")
    with pytest.raises(ValueError, match="is one of Llama's; the target is a gpt2"):
        load_drafter(folder, build("gpt2", 0, vocab_size=V, n_embd=H, n_layer=3, n_head=2))
    with pytest.raises(ValueError, match="pass a ModelDraft or a FeatureDraft"):
        OnlineDraft(load_drafter(write_hydra(tmp_path / "c", tensors, "prefix-mlp"), target), target)


def test_damaged_files_and_pickles_are_named(target, tmp_path):
    folder = write_hydra(tmp_path / "a", hydra(target))
    file = folder / "hydra_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_drafter(folder, target)
    file.rename(folder / "hydra_lm_head.pt")
    with pytest.raises(ValueError, match="is a pickle.*contiguous clone"):
        load_drafter(folder, target)


def test_what_are_no_such_heads_is_refused(target):
    for make in (lambda: SequentialDraft(target, target), lambda: PrefixedDraft(feature_drafter(target), target)):
        with pytest.raises(ValueError, match="are no heads that go on from token to token"):
            make()
    model = encoder_decoders.family("T5").model("eager", 0)
    with pytest.raises(ValueError, match="decoder-only"):
        encoder_decoders.speculate(model, encoder_decoders.source(), SequentialDraft(hydra_heads(target), target), 2)
    other = tiny_llama(3)
    draft = SequentialDraft(hydra_heads(other), other)
    other.bfloat16()
    with pytest.raises(ValueError, match="own weights are torch.float32.*uses are torch.bfloat16"):
        speculate(other, ROWS, draft, 4)


def test_a_config_names_them(target, tmp_path):
    for arch, name in (("mlp", "sequential"), ("prefix-mlp", "prefixed")):
        folder = str(write_hydra(tmp_path / arch, hydra(target, arch), arch))
        assert loaded(SpeculativeConfig(draft=name, draft_source=folder), target).name == name
        with pytest.raises(ValueError, match=f"is a drafter for draft='{name}'"):
            loaded(SpeculativeConfig(draft="feature", draft_source=folder), target)
        with pytest.raises(ValueError, match="vLLM's engine runs no heads that read the tokens before"):
            export(folder, target, tmp_path / f"{arch} for vLLM")


# --- IBM's MLP speculators --------------------------------------------------------------------------------------------------------

INNER = 24
ABOUT = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": H, "inner_dim": INNER, "vocab_size": V, "n_predict": HEADS,
         "top_k_tokens_per_head": [4, 3, 2, 2], "n_candidates": 5}


def speculator(n: int = HEADS, tied: bool = False, wide: int = H, vocab: int = V, inner: int = INNER) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    found = {}
    for i in range(n):
        found |= {f"emb.{i}.weight": random(vocab, inner) * 6, f"proj.{i}.weight": random(inner, inner if i else wide), f"head.{i}.weight": random(vocab, inner) * 6,
                  f"ln.{i}.weight": 1 + random(inner), f"ln.{i}.bias": random(inner)}
    one = {f"{name}.{i}.{rest}": f"{name}.{int(name == 'proj' and i > 0)}.{rest}" for i in range(n) for name, rest in
           (("emb", "weight"), ("proj", "weight"), ("head", "weight"), ("ln", "weight"), ("ln", "bias"))}
    return {f"speculator.{name}": found[one[name]] if tied else tensor for name, tensor in found.items()}


def speculator_logits(tensors, scaled, state, tokens):
    """[V] after the root and the drafted tokens, which `tokens` are: fms-extras' generate_suffixes, written out."""
    weight = 0.5 ** (0.5 / HEADS)
    if scaled:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    for i, token in enumerate(tokens):
        z = tensors[f"speculator.emb.{i}.weight"][token] * math.sqrt(1 - weight**2) * math.sqrt(INNER / 2)
        x = linear(state, tensors[f"speculator.proj.{i}.weight"]) * weight + z
        x = x / (x.pow(2).mean() + 1e-6).sqrt() * tensors[f"speculator.ln.{i}.weight"] + tensors[f"speculator.ln.{i}.bias"]
        state = gelu(x)
    return linear(state, tensors[f"speculator.head.{len(tokens) - 1}.weight"])


@torch.no_grad()
@pytest.mark.parametrize(("tied", "scaled", "one_copy"), [(False, False, False), (False, True, False), (True, True, False), (True, False, True)])
def test_mlp_speculators_compute_what_the_original_does(target, tmp_path, tied, scaled, one_copy):
    tensors, kept = speculator(tied=tied), ("emb.0", "proj.0", "proj.1", "head.0", "ln.0")
    held = {name: tensor for name, tensor in tensors.items() if not one_copy or any(own in name for own in kept)}
    folder = save(tmp_path, held, ABOUT | {"tie_weights": tied, "scale_input": scaled})
    draft = load_drafter(folder, target)
    assert type(draft) is SequentialDraft and is_drafter(folder) and len({id(p) for p in draft.heads.parameters()}) == (6 if tied else 5 * HEADS)
    for row, drafted, logits in judged(draft, target):
        state = states_of(target, row, 3)[-1]
        torch.testing.assert_close(logits, speculator_logits(tensors, scaled, state, [row[-1], *drafted]), atol=2e-4, rtol=2e-4)


def test_a_vocabulary_may_be_padded_otherwise(target, tmp_path):
    for own in (V - 3, V + 3):
        draft = load_drafter(save(tmp_path / str(own), speculator(vocab=own), ABOUT | {"vocab_size": own}), target)
        out = speculate(target, [[V - 1, 5, V - 2], [7, 8]], draft, 4)
        assert generated(out, [[V - 1, 5, V - 2], [7, 8]]) == plain(target, [[V - 1, 5, V - 2], [7, 8]]) and out.speculation.proposed > 0


@pytest.mark.parametrize(("change", "config", "message"), [
    (lambda t: without(t, "speculator.ln.2.bias"), {}, "has no ln.2.bias"),
    (lambda t: t, {"n_predict": 5}, "has no emb.4.weight"),
    (lambda t: t, {"n_predict": 3}, "does not map: emb.3.weight"),
    (lambda t: t, {"n_predict": "four"}, "have to be above 0"),
    (lambda t: t, {"emb_dim": 2 * H}, "was made for a target of width 64"),
    (lambda t: t, {"vocab_size": 2 * V}, "with 122 tokens; this one has width 32 and 61 tokens"),
    (lambda t: t, {"inner_dim": 0}, "emb.0.weight has shape"),
    (lambda t: t, {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "of the kind ArcticLSTM"),
])
def test_mlp_speculators_that_do_not_fit_are_refused(target, tmp_path, change, config, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(save(tmp_path, change(speculator()), ABOUT | config), target)


# --- Medusa-2 -------------------------------------------------------------------------------------------------------------------


def test_heads_in_one_checkpoint_with_their_model_are_read(target, tmp_path):
    """Medusa's 1.0 layout: a whole model, and its config with medusa_num_heads."""
    heads = {f"medusa_head.{name}": tensor for name, tensor in medusa().items()}
    folder = save(tmp_path / "whole", target.state_dict() | heads, target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "medusa_num_heads": 3, "medusa_num_layers": 1})
    own = enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    draft, states = load_drafter(folder, own), torch.randn(5, H)
    tensors = medusa()
    for i in range(3):
        x = states + silu(linear(states, tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"]))
        torch.testing.assert_close(draft.heads(states)[:, i], linear(x, tensors[f"{i}.1.weight"]))
    out = speculate(own, ROWS, draft, 3)
    assert generated(out, ROWS) == plain(own, ROWS) and out.speculation.proposed > 0
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
        other = tiny_llama(3, **{key: getattr(target.config, key) for key in ("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")})
        other.load_state_dict(target.state_dict() | {name: target.state_dict()[name] * 1.1})
        with pytest.raises(ValueError, match=f"trained together with the model beside them .Medusa-2., and {name} of the target is another"):
            load_drafter(folder, other)
    with pytest.raises(ValueError, match=r"no medusa_head\.\* in its safetensors"):
        load_drafter(save(tmp_path / "cut", target.state_dict(), CONFIG | {"medusa_num_heads": 3}), target)
