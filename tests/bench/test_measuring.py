"""What `tune` times: passes of so many tokens, also where layers carry states, which cannot be cropped."""

import pytest
from transformers import CONFIG_MAPPING

from hf_specdec.bench import measuring
from hf_specdec.bench.measuring import PASSES, WIDTHS, Text, measure_costs, ranks_of
from hf_specdec.bench.tuning import RANKS
from hf_specdec.caches import GOES_ON

from ..architectures import STATEFUL
from ..helpers import VOCAB, build, prompts, repetitive, tiny_llama

KINDS = [family.name for family in STATEFUL if family.name in ("Qwen3.5 (text)", "LFM2", "Zaya") and family.kind in CONFIG_MAPPING and GOES_ON]


@pytest.mark.parametrize("kind", ["Llama", *KINDS])
def test_the_passes_that_are_timed_are_as_wide_as_they_are_said_to_be(kind, monkeypatch):
    model = tiny_llama() if kind == "Llama" else next(family for family in STATEFUL if family.name == kind).model("eager", 0)
    model.config.get_text_config().max_position_embeddings = 1024  # room for the passes
    widths, (row,), timed = [], repetitive(40, seed=1), []
    model.register_forward_pre_hook(lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    score = measuring.CachedModel.score

    def scored(self, rows, *proposal):
        before = len(widths)
        logits = score(self, rows, *proposal)
        timed.append(widths[before:])
        return logits

    monkeypatch.setattr(measuring.CachedModel, "score", scored)
    monkeypatch.setattr(measuring, "decoding_seconds", lambda *args: ([], 1.0))
    costs = measure_costs(model, [Text(row[:20], row[20:], 1.0)], 0.0, lambda *_: None)
    assert timed == [[39], *([width] for width in WIDTHS * measuring.REPETITIONS)] and costs.widths == WIDTHS
    rest = len(widths) - len(timed)  # untimed: what states were told
    assert rest == 0 if kind != "Zaya" else 0 < rest < PASSES and sum(widths) == sum(map(sum, timed)) + rest


@pytest.mark.parametrize("room", [12, 22, 40])
def test_a_draft_model_is_right_of_nothing_behind_its_own_context(room):
    (row,) = prompts(30, seed=2)
    texts = [Text(row[:20], row[20:], 1.0)]
    sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)
    whole = build("gpt2", 0, n_positions=64, **sizes)
    draft = build("gpt2", 0, n_positions=room, **sizes)
    draft.load_state_dict(whole.state_dict() | {"transformer.wpe.weight": whole.transformer.wpe.weight[:room]})
    (ranks,), (expected,) = (ranks_of(model, texts, lambda *_: None).texts for model in (draft, whole))
    known = max(room - 20, 0)
    assert ranks == (*expected[:known], *[RANKS] * (9 - known))[:9]
