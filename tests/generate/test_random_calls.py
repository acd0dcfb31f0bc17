"""Calls with random arguments: whatever is asked for together, the text and the scores are plain generate()'s, or the call is refused by name."""

import random
import traceback
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig

import hf_specdec
from tests.architectures import FAMILIES
from tests.conformance.builders import VARIANTS
from tests.helpers import VOCAB, enabled, padded, prompts, repetitive

LINES = [line for line in FAMILIES if line.branches and line.ragged and not line.window.startswith(("states", "own", "selected"))]
PACKAGE = Path(hf_specdec.__file__).parent
FOLLOW_BEAMS = ["none", "model", "model_tree", "ngram", "recycling", "suffix_automaton"]


class Less(LogitsProcessor):
    """Every seventh score of a row, which ones its text says, is less."""

    def __call__(self, ids, scores):
        scores = scores.clone()
        for row, own in zip(ids, scores):
            own[int(row.sum()) % 7 :: 7] -= 2.0
        return scores


class EndsWith(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, ids, scores, **kwargs):
        return ids[:, -1] == self.token


def token(draw) -> int:
    return draw.randrange(1, VOCAB)


OPTIONS = {
    "repetition_penalty": lambda draw: draw.choice([1.2, 0.8]), "no_repeat_ngram_size": lambda draw: draw.choice([1, 2, 3]),
    "bad_words_ids": lambda draw: [[token(draw) for _ in range(length)] for length in (1, 1, 2, 2)], "suppress_tokens": lambda draw: [token(draw) for _ in range(10)],
    "begin_suppress_tokens": lambda draw: [token(draw) for _ in range(20)], "forced_eos_token_id": token, "forced_bos_token_id": token,
    "min_new_tokens": lambda draw: draw.choice([2, 5, 30]), "min_length": lambda draw: draw.choice([10, 20]), "eos_token_id": lambda draw: [token(draw) for _ in range(draw.choice([1, 3, 8]))],
    "exponential_decay_length_penalty": lambda draw: (draw.choice([2, 5]), 1.5), "sequence_bias": lambda draw: [[[token(draw)], 2.0], [[4, 5], -3.0]], "renormalize_logits": lambda draw: True,
    "use_cache": lambda draw: False, "cache_implementation": lambda draw: draw.choice(["static", "dynamic"]), "stopping_criteria": lambda draw: [EndsWith(token(draw))],
    "logits_processor": lambda draw: [Less()], "prefix_allowed_tokens_fn": lambda draw: lambda row, ids: [(int(ids[-1]) * k + 3) % VOCAB for k in range(1, 9)],
    "guidance_scale": lambda draw: 1.5, "watermarking_config": lambda draw: WatermarkingConfig(bias=3.0), "encoder_repetition_penalty": lambda draw: 1.5,
    "encoder_no_repeat_ngram_size": lambda draw: 2, "output_scores": lambda draw: True, "output_logits": lambda draw: True,
    "output_hidden_states": lambda draw: True,
}  # fmt: skip


def call(draw, beams: int) -> tuple[list[list[int]], dict, dict]:
    """Prompts, arguments of any generate(), and those of a speculative one but the draft."""
    rows = draw.choice([repetitive, repetitive, prompts])(*draw.choices([1, 2, 3, 7, 13, 20, 31], k=draw.choice([1, 1, 2, 3, 4])), seed=draw.randrange(1000))
    options = {name: OPTIONS[name](draw) for name in draw.sample(list(OPTIONS), draw.choice([0, 1, 1, 2, 2, 3, 4]))}
    if beams > 1:
        rows = [row[: min(map(len, rows))] for row in rows]
        options |= dict(num_beams=beams, num_return_sequences=draw.choice([1, beams]), length_penalty=draw.choice([1.0, -1.0, 0.0]), early_stopping=draw.choice([True, False, "never"]))
    if "exponential_decay_length_penalty" in options:
        options.setdefault("eos_token_id", 7)
    ours = {"num_assistant_tokens": draw.choice(["auto", 1, 2, 3, 4, 7, 16]), "speculative": draw.choice([{}, {"draft_stop": "heuristic"}, {"record_probs": beams == 1}])}
    shared = dict(do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, max_new_tokens=draw.choice([1, 2, 5, 12, 20]))
    return rows, shared | options, ours


def references(model, rows: list[list[int]], options: dict) -> list | None:
    """What plain generate() makes: of beams together, which are of one length, else of every row alone, whose processors then see no padding. None where it raises."""
    groups = [rows] if "num_beams" in options else [[row] for row in rows]
    try:
        return [model.generate(**padded(group), **options) for group in groups]
    except Exception:
        return None


def assert_same_rows(out, rows: list[list[int]], wanted: list) -> None:
    """A row that ends before others is followed by padding."""
    width = max(map(len, rows))
    for b, (row, own) in enumerate(zip(rows, wanted)):
        text = own.sequences[0, len(row) :].tolist()
        assert out.sequences[b, width:].tolist() == text + [0] * (out.sequences.shape[1] - width - len(text))
        for name in ("scores", "logits"):
            for step, theirs in enumerate(getattr(own, name) or ()):
                torch.testing.assert_close(getattr(out, name)[step][b : b + 1], theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.share(1 / 4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(600))
def test_the_text_is_plain_generates_or_the_call_is_refused(seed):
    draw = random.Random(seed)
    beams, line = draw.choice([1, 1, 1, 1, 2, 3]), draw.choice(LINES)
    rows, options, ours = call(draw, beams)
    name = draw.choice(FOLLOW_BEAMS if beams > 1 else ["none", "none", *VARIANTS])
    model = enabled(line.model("eager", draw.randrange(3)))
    wanted = references(model, rows, options)
    try:
        draft = None if name == "none" else VARIANTS[name](model)
    except (ValueError, TypeError, AttributeError) as error:
        pytest.skip(f"no {name} of {line.name}: {error}")
    try:
        out = model.generate(**padded(rows), **options, **ours, assistant_model=draft)
    except Exception as error:
        refused = isinstance(error, ValueError) and Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(PACKAGE)
        assert refused or wanted is None
        pytest.skip(f"{name}: {error}")
    finally:
        hf_specdec.disable(model)
    if wanted is None:
        pytest.skip("plain generate() does not run it")
    if beams > 1:
        assert torch.equal(out.sequences, wanted[0].sequences)
    else:
        assert_same_rows(out, rows, wanted)


def test_a_rule_that_is_not_exact_is_seen():
    model, rows = enabled(LINES[0].model("eager")), repetitive(13, 7)
    options = dict(do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, max_new_tokens=20)
    out = model.generate(**padded(rows), **options, speculative={"lenience": 0.01}, num_assistant_tokens=4, assistant_model=VARIANTS["model, unrelated"](model))
    with pytest.raises(AssertionError):
        assert_same_rows(out, rows, references(model, rows, options))
