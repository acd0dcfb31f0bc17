"""EAGLE-3 checkpoints of several layers, and of Qwen3's, against a forward written down here."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn.functional import linear

from hf_specdec import SpeculativeConfig, compiled, enable, passes, warmup
from hf_specdec.drafts import FeatureDraft, FeatureTreeDraft, MixtureDraft
from hf_specdec.drafts.feature_parallel import ParallelFeatureDraft
from hf_specdec.drafts.features import hidden_states
from hf_specdec.loading import loaded
from hf_specdec.training import load_drafter
from hf_specdec.training.export import export
from tests.conformance import law

from ..helpers import FULL, OLD_TORCH, generated, plain, small_vocabulary_llama, speculate, tiny_llama
from .test_published import HEADS, IDS, KV, ROWS, THETA, H, V, check_against, eagle, eagle3, layer, mlp, norm, part, random, rotated, write

D = H // HEADS


@pytest.fixture(scope="module")
def deep():
    return tiny_llama(3, num_hidden_layers=8)


def made(target, layers: int, normed: bool) -> dict[str, torch.Tensor]:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3(target).items()}
    for i in range(1, layers):
        tensors |= {f"layers.{i}.{name}": tensor + random(*tensor.shape) / 4 for name, tensor in (layer(H) | {"input_layernorm.weight": 1 + random(H)}).items()}
    return tensors | {f"layers.{i}.self_attn.{name}_norm.weight": 1 + random(D) for i in range(layers) for name in "qk" if normed}


def attention(x, w):
    """Causal, x [L, width]; queries and keys are normed head by head where there are weights for it."""
    q, k, v = (linear(x, w[f"self_attn.{name}_proj.weight"]).view(len(x), -1, D) for name in "qkv")
    if "self_attn.q_norm.weight" in w:
        q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
    q, k, v = rotated(q), rotated(k).repeat_interleave(HEADS // KV, dim=1), v.repeat_interleave(HEADS // KV, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), H), w["self_attn.o_proj.weight"])


def forward(target, tensors, embedded, states):
    """Next states [L, H] and logits [L, V]; states are those of three layers the first time."""
    x = linear(states, tensors["fc.weight"]) if states.shape[-1] == 3 * H else states
    for i in range(8):
        w = part(tensors, f"layers.{i}.")
        if w:
            normed = norm(x if i else embedded, w["input_layernorm.weight"])
            x = x + attention(normed if i else torch.cat([normed, norm(x, w["hidden_norm.weight"])], -1), w)
            x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    few = linear(norm(x, tensors["norm.weight"]), tensors["lm_head.weight"])
    return x, torch.full((len(x), V), -torch.inf).index_copy(1, torch.arange(len(few[0])) + tensors["d2t"], few)


@pytest.mark.parametrize(("layers", "normed", "said"), [
    (2, False, {}), (3, False, {"num_hidden_layers": 1}), (1, True, {"model_type": "qwen3"}), (2, True, {"model_type": "qwen3", "use_sliding_window": False}), (1, True, {}),
    (1, False, {"model_type": "qwen3"}), (1, False, {"model_type": "qwen2"})])  # fmt: skip
def test_eagle3_of_several_layers_and_of_qwen3s(deep, tmp_path, layers, normed, said):
    tensors = made(deep, layers, normed)
    folder = write(tmp_path, tensors, draft_vocab_size=31, head_dim=D, **said)
    check_against(forward, deep, tensors, folder, (1, 3, 4))
    out = speculate(deep, ROWS, load_drafter(folder, deep), 4)
    assert generated(out, ROWS) == plain(deep, ROWS) and out.speculation.proposed > 0


def test_as_speculators_writes_it(deep, tmp_path):
    """Its shape stands in transformer_layer_config."""
    tensors = made(deep, 2, True)
    folder = write(tmp_path, tensors, speculators_model_type="eagle3", model_type="speculator_model", hidden_size=None,
                   transformer_layer_config={"model_type": "qwen3", "hidden_size": H, "head_dim": D, "layer_types": ["full_attention"] * 2})
    check_against(forward, deep, tensors, folder, (1, 3, 4))


def test_windows_are_refused(deep, tmp_path):
    for i, said in enumerate(({"use_sliding_window": True}, {"layer_types": ["sliding_attention"]})):
        with pytest.raises(ValueError, match="sliding windows, which are not read"):
            load_drafter(write(tmp_path / str(i), made(deep, 1, True), model_type="qwen3", head_dim=D, **said), deep)
    llama = {"transformer_layer_config": {"model_type": "llama", "head_dim": D, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}}
    with pytest.raises(ValueError, match="sliding windows, which are not read"):
        load_drafter(write(tmp_path / "llama", made(deep, 2, False), speculators_model_type="eagle3", **llama), deep)


def test_rotary_embeddings_of_each_type_of_layers_and_of_parts_of_a_head(deep, tmp_path):
    """Speculators takes those of windows for all layers."""
    tensors, rope = made(deep, 1, True), {"rope_type": "default", "rope_theta": THETA}
    both = {"sliding_attention": rope, "full_attention": {**rope, "rope_theta": 7.0}}
    own = {"model_type": "qwen3", "hidden_size": H, "head_dim": D, "rope_theta": None, "rope_parameters": both}
    check_against(forward, deep, tensors, write(tmp_path / "both", tensors, speculators_model_type="eagle3", transformer_layer_config=own), (1, 3, 4))
    with pytest.raises(ValueError, match="partial_rotary_factor=0.25, which is not read"):
        own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        load_drafter(write(tmp_path / "part", tensors, model_type="qwen3", head_dim=D, rope_parameters=own), deep)


def test_a_prediction_module_of_speculators_is_refused_by_name(deep, tmp_path):
    with pytest.raises(ValueError, match='a folder of its own .*"mtp".*load_drafter\\("mtp", target\\)'):
        load_drafter(write(tmp_path, {"mtp_layers.0.input_proj.weight": torch.zeros(H, 2 * H)}, speculators_model_type="mtp"), deep)


def test_a_layer_that_is_not_whole_is_named(deep, tmp_path):
    tensors = made(deep, 2, False)
    del tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match="has no layers.1.mlp.up_proj.weight"):
        load_drafter(write(tmp_path, tensors), deep)


def test_eagle_of_qwen2_is_read(deep, tmp_path):
    biases = {f"layers.0.self_attn.{name}_proj.bias": random(H if name == "q" else KV * D) for name in "qkv"}
    draft = load_drafter(write(tmp_path, eagle(deep) | biases, model_type="qwen2"), deep)
    assert torch.equal(draft.model.base_model.layers[0].self_attn.v_proj.bias, biases["layers.0.self_attn.v_proj.bias"])
    assert generated(speculate(deep, ROWS, draft, 4), ROWS) == plain(deep, ROWS)


# --- P-EAGLE --------------------------------------------------------------------------------------------------------------------


class Whole(ParallelFeatureDraft):
    """log: of every round the rows, and the logits [B, K, V] of the block."""

    def start(self, context):
        super().start(context)
        self.log = []

    def _scores(self, context, tokens, k, step):
        logits = super()._scores(context, tokens, k, step)
        if step == 0:
            self.log.append(([list(row) for row in context.rows], list(k), self.block.clone()))
        return logits


def masked(target, layers: int = 2, normed: bool = False) -> dict[str, torch.Tensor]:
    return made(target, layers, normed) | {"mask_hidden": random(1, 1, 3 * H) * 5}


@torch.no_grad()
@pytest.mark.parametrize(("named", "normed"), [("mask_token_id", False), ("pard_token", True), ("ptd_token_id", False)])
def test_masked_places_compute_what_the_original_does(deep, tmp_path, named, normed):
    """One pass over the text, its first token left out, and K - 1 masks; every place sees what is before it."""
    tensors = masked(deep, normed=normed)
    found = load_drafter(write(tmp_path, tensors, head_dim=D, **{named: 4}), deep)
    assert type(found) is ParallelFeatureDraft
    draft, judged = Whole(found.model, deep), 0
    out = speculate(deep, ROWS, draft, 4, max_new_tokens=12)
    for rows, k, block in draft.log:
        for b, row in enumerate(rows):
            with hidden_states(deep, (1, 3, 4)) as seen:
                deep(input_ids=torch.tensor([row[:-1]]))
                states = seen()[0]
            embedded = deep.get_input_embeddings()(torch.tensor([*row[1:], *[4] * (k[b] - 1)]))
            known = torch.cat([states, *[tensors["mask_hidden"][0]] * (k[b] - 1)])
            expected = forward(deep, tensors, embedded, known)[1][len(row) - 2 :]
            torch.testing.assert_close(block[b, : k[b]], expected[: k[b]], atol=2e-4, rtol=2e-4)
            judged += k[b] > 1
    assert judged > 8 and generated(out, ROWS) == plain(deep, ROWS, max_new_tokens=12) and out.speculation.proposed > 0


@torch.no_grad()
@pytest.mark.parametrize("stop", ["constant", "confidence", "expected_gain"])
def test_its_text_is_the_targets_own(deep, tmp_path, stop):
    draft = load_drafter(write(tmp_path, masked(deep), mask_token_id=4), deep)
    for one in (draft, MixtureDraft(["suffix_automaton", draft], mode="choose")):
        for k in (1, 5, "auto"):
            out = speculate(deep, ROWS, one, k, max_new_tokens=16, speculative={"draft_stop": stop})
            assert generated(out, ROWS) == plain(deep, ROWS, max_new_tokens=16)
    out = speculate(deep, ROWS, FeatureTreeDraft(draft.model, deep), 4)  # token by token, too
    assert generated(out, ROWS) == plain(deep, ROWS)


def test_sampled_text_follows_the_targets_law(tmp_path):
    target, rows = small_vocabulary_llama(2, law.VOCAB, hidden_size=H, num_hidden_layers=3), [[1, 2, 3, 1, 2], [4, 3]]
    tensors = {name: tensor for name, tensor in masked(target).items() if name not in ("d2t", "t2d")}
    small = write(tmp_path, tensors | {"lm_head.weight": 2 * random(law.VOCAB, H)}, mask_token_id=4, vocab_size=law.VOCAB, **{IDS: [1, 2, 3]})
    found, traces = law.counts(target, rows, load_drafter(small, target), 40_000 if FULL else 1_200, 3, 4)
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > sum(trace.accepted for trace in traces) > 0


def test_masks_that_do_not_fit_are_refused(deep, tmp_path):
    for i, (tensors, said) in enumerate(((masked(deep), {}), (masked(deep), {"mask_token_id": V}), (masked(deep) | {"mask_hidden": random(1, 1, 2 * H)}, {"mask_token_id": 4}))):
        with pytest.raises(ValueError, match="mask_hidden needs 96 numbers, and config.json a mask_token_id of this target's vocabulary"):
            load_drafter(write(tmp_path / str(i), tensors, **said), deep)
    with pytest.raises(ValueError, match="has no masked places"):
        ParallelFeatureDraft(load_drafter(write(tmp_path / "plain", made(deep, 1, False)), deep).model, deep)


@pytest.mark.skipif(OLD_TORCH, reason="this torch compiles some functions once more")
def test_warming_up_compiles_what_its_calls_need(deep, tmp_path, monkeypatch):
    """Its masked places come on top of what was committed; token by token, there are none."""
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})
    torch._dynamo.reset()
    target, made = enable(copy.deepcopy(deep)), []
    draft = load_drafter(write(tmp_path, masked(target), mask_token_id=4), target)
    for one in (FeatureDraft(draft.model, target), draft):
        warmup(target, one, {"num_assistant_tokens": 7}, max_length=40)
        made.append(dict(compiled._functions[draft.model].made))
    assert [max(key[1] for key in functions) for functions in made] == [8, 16]
    speculate(target, ROWS[:1], draft, 7, speculative={"compile": True})
    assert compiled._functions[draft.model].made == made[1]


def test_a_config_names_it(deep, tmp_path):
    folder, model = str(write(tmp_path, masked(deep), mask_token_id=4)), enable(copy.deepcopy(deep))
    for name in ("feature_parallel", "feature", "feature_tree"):
        draft = loaded(SpeculativeConfig(draft=name, draft_source=folder), model)
        assert draft.name == name and isinstance(draft, ParallelFeatureDraft) == (name == "feature_parallel")


def test_its_export_says_that_vllm_is_to_draft_in_one_pass(deep, tmp_path):
    folder = write(tmp_path / "from", masked(deep), mask_token_id=4)
    assert export(str(folder), deep, tmp_path / "to", 5) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5, "parallel_drafting": True}


# --- EAGLE, as speculators writes it --------------------------------------------------------------------------------------------


def speculators(target, normed: bool, bias: bool) -> dict[str, torch.Tensor]:
    found = {f"transformer.{name}": tensor for name, tensor in layer(H).items()} | {"fusion_fc.weight": random(H, 2 * H)} | ({"fusion_fc.bias": random(H)} if bias else {})
    norms = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm") if normed else ()
    return found | {f"{name}.weight": 1 + random(H) for name in norms}


def write_speculators(folder, tensors, normed: bool, bias: bool):
    inner = {"model_type": "llama", "hidden_size": H, "intermediate_size": 40, "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 1, "rope_theta": 5000.0,
             "rms_norm_eps": 1e-5, "vocab_size": V}
    return write(folder, tensors, speculators_model_type="eagle", model_type="speculator_model", architectures=["EagleSpeculator", "LlamaDecoderLayer"], layernorms=normed,
                 fusion_bias=bias, transformer_layer_architecture="LlamaDecoderLayer", transformer_layer_config=inner)


def eagle_forward(target, tensors, embedded, states):
    """Next states [L, H] and logits [L, V]: speculators' `EagleSpeculator.forward`, written out."""
    w, normed = part(tensors, "transformer."), "embedding_layernorm.weight" in tensors
    embedded = norm(embedded, tensors["embedding_layernorm.weight"]) if normed else embedded
    x = linear(torch.cat([embedded, states], -1), tensors["fusion_fc.weight"], tensors.get("fusion_fc.bias"))
    x = x + attention(norm(x, w["input_layernorm.weight"]) if normed else x, w)
    x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    return x, target.lm_head(norm(x, tensors["pre_lm_head_layernorm.weight"]) if normed else x)


@pytest.mark.parametrize(("normed", "bias"), [(False, False), (False, True), (True, False), (True, True)])
def test_eagle_as_speculators_writes_it(deep, tmp_path, normed, bias):
    tensors = speculators(deep, normed, bias)
    folder = write_speculators(tmp_path, tensors, normed, bias)
    check_against(eagle_forward, deep, tensors, folder, (8,))
    found = load_drafter(folder, deep)
    for draft in (found, FeatureTreeDraft(found.model, deep)):
        out = speculate(deep, ROWS, draft, 4)
        assert generated(out, ROWS) == plain(deep, ROWS) and out.speculation.proposed > 0
    with pytest.raises(ValueError, match="vLLM reads EAGLE-3 alone"):
        export(str(folder), deep, tmp_path / "to")


def test_what_it_was_converted_from_is_read_too(deep, tmp_path):
    """SafeAILab's names, with the norms that speculators' converter knows."""
    tensors = speculators(deep, True, True)
    before = {"embedding_layernorm.weight": "embed_layernorm.weight", "transformer.input_layernorm.weight": "hidden_layernorm.weight", "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight"}
    old = {before.get(name) or name.replace("transformer.", "layers.0.").replace("fusion_fc.", "fc."): tensor for name, tensor in tensors.items()}
    check_against(eagle_forward, deep, tensors | {"fc.weight": tensors["fusion_fc.weight"]}, write(tmp_path, old), (8,))


@pytest.mark.parametrize(("lost", "message"), [
    ("fusion_fc.weight", "has no fusion_fc.weight"), ("fusion_fc.bias", "has no fusion_fc.bias"), ("embedding_layernorm.weight", "layernorms asks for embedding_layernorm.weight of 32"),
    ("pre_lm_head_layernorm.weight", "layernorms asks for pre_lm"), ("transformer.input_layernorm.weight", "has no layers.0.input_layernorm.weight"),
    ("transformer.mlp.up_proj.weight", "has no layers.0.mlp.up_proj.weight"),
])
def test_what_a_file_of_speculators_lacks_is_named(deep, tmp_path, lost, message):
    tensors = {name: tensor for name, tensor in speculators(deep, True, True).items() if name != lost}
    with pytest.raises(ValueError, match=message):
        load_drafter(write_speculators(tmp_path, tensors, True, True), deep)
