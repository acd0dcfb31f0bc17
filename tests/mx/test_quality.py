"""`mx.compare`: its numbers against their definitions in float64, its windows, its memory, and bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_specdec import mx
from hf_specdec.mx import quality
from hf_specdec.mx.quality import QualityReport, compare, sample_text

from ..bench.conftest import byte_tokenizer
from ..encoder_decoders import family
from ..helpers import VOCAB, perturbed, speculate
from .models import SIZE, allocated, tiny

IDS = torch.randint(1, VOCAB, (100,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def pair():
    model = tiny()
    return model, mx.compress(copy.deepcopy(model), "mxfp4_e2m1")


def by_definition(model, other, ids, window) -> dict:
    """All numbers in float64, position by position."""
    found = {"loss": [], "other": [], "kl": [], "agree": [], "overlap": []}
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        with torch.no_grad():
            ps, qs = (torch.softmax(m(input_ids=part[None]).logits[0].double(), -1) for m in (model, other))
        for p, q, label in zip(ps, qs, part[1:]):
            found["loss"].append(-float(p[label].log()))
            found["other"].append(-float(q[label].log()))
            found["kl"].append(sum(float(a * (a.log() - b.log())) for a, b in zip(p, q)))
            found["agree"].append(float(p.argmax() == q.argmax()))
            found["overlap"].append(sum(min(float(a), float(b)) for a, b in zip(p, q)))
    return {name: sum(values) / len(values) for name, values in found.items()} | {"count": len(found["loss"])}


@pytest.mark.parametrize("window, chunk", [(16, 128), (40, 7), (100, 1), (33, 32)])
def test_the_numbers_are_those_of_their_definitions(pair, window, chunk, monkeypatch):
    monkeypatch.setattr(quality, "CHUNK", chunk)
    report, expected = compare(*pair, IDS, window=window), by_definition(*pair, IDS, window)
    assert report.tokens == expected["count"] and report.windows == math.ceil(100 / window) - (100 % window == 1)
    assert report.perplexity == pytest.approx(math.exp(expected["loss"]), rel=1e-5)
    assert report.perplexity_compressed == pytest.approx(math.exp(expected["other"]), rel=1e-5)
    assert report.loss_difference == pytest.approx(expected["other"] - expected["loss"], abs=1e-5)
    assert report.kl == pytest.approx(expected["kl"], rel=1e-4) and report.top1_agreement == pytest.approx(expected["agree"])
    assert report.overlap == pytest.approx(expected["overlap"], rel=1e-5)


def test_a_model_and_itself_agree_and_better_formats_are_nearer(pair):
    model = pair[0]
    alike = compare(model, model, IDS)
    assert alike.kl == 0 and alike.top1_agreement == 1 and alike.overlap == pytest.approx(1, abs=1e-6) and alike.loss_difference == 0
    reports = [compare(model, mx.compress(copy.deepcopy(model), f), IDS) for f in ("mxfp4_e2m1", "mxfp6_e2m3", "mxint8")]
    assert [r.kl for r in reports] == sorted((r.kl for r in reports), reverse=True) and reports[2].kl > 0
    assert [r.overlap for r in reports] == sorted(r.overlap for r in reports)


def test_the_overlap_is_the_acceptance_rate_of_the_compressed_draft():
    model = tiny(seed=4)
    draft = mx.compress(copy.deepcopy(model), "mxfp4_e2m1")
    rows = [IDS[i : i + 12].tolist() for i in range(0, 64, 8)]
    out = speculate(model, rows, draft, k=1, max_new_tokens=80, do_sample=True, top_k=0, seed=5)
    texts = out.sequences[:, 12:]
    parts = [compare(model, draft, torch.cat([torch.tensor(row), text])) for row, text in zip(rows, texts)]
    overlap, trials = sum(part.overlap for part in parts) / len(parts), out.speculation.proposed
    assert trials > 250 and abs(out.speculation.acceptance_rate - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / trials) + 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_compared_in_float32(dtype):
    model = tiny(dtype=dtype)
    report = compare(model, mx.compress(copy.deepcopy(model)), IDS)
    assert 0 < report.kl < 1 and report.overlap > 0.5 and math.isfinite(report.perplexity)


def test_a_tokenizer_reads_the_text_and_the_shipped_one_without_it():
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=257)
    other = perturbed(model)
    text = "The table has thirty-one rows, and somebody corrected the twelfth one in red ink."
    assert compare(model, other, tokenizer, text) == compare(model, other, tokenizer(text)["input_ids"])
    shipped = compare(model, other, tokenizer, max_tokens=300)
    assert shipped == compare(model, other, tokenizer, sample_text(), max_tokens=300)
    assert shipped.tokens == 297 and shipped.windows == 3  # windows of 128, the model's context
    assert 6000 < len(sample_text().encode()) < 10000 and "def " in sample_text()


def test_it_is_a_table_for_people_and_a_dict_for_programs(pair):
    report = compare(*pair, IDS, window=50, max_tokens=60)
    assert report.tokens == 49 + 9 and QualityReport(**report.to_dict()) == report
    for text in (str(report), report._repr_html_()):
        assert f"{report.perplexity:.4f}" in text and f"{report.kl:.5f}" in text and "58 in 2 windows" in text
    assert report._repr_html_().startswith("<table>") and "KL(original || compressed)" in str(report)


def test_dropout_is_off_and_modes_are_left_as_they_were(pair):
    model = tiny(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert compare(model, pair[1], IDS) == compare(*pair, IDS)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_does_not_grow_with_the_text():
    model = tiny(vocab_size=4000)
    ids = torch.arange(1, 1281) % 3999
    one, _ = allocated(lambda: compare(model, model, ids[:128], window=128))
    ten, _ = allocated(lambda: compare(model, model, ids, window=128))
    assert ten < 1.5 * one


def test_an_encoder_decoder_is_refused_by_name():
    """It has read the whole text when it predicts the first token of it."""
    model = family("BART").model(d_model=64)
    with pytest.raises(ValueError, match="model: BartForConditionalGeneration is an encoder-decoder"):
        mx.compare(model, model, [3, 4, 5, 6])


def test_bad_input(pair):
    model, other = pair
    tokenizer = byte_tokenizer()
    for words, arguments in {
        "window=1 ": (IDS, None, 100, 1),
        "window='x' must be an int": (IDS, None, 100, "x"),
        "window=2.5 must be an int": (IDS, None, 100, 2.5),
        "max_tokens='x' must be an int": (IDS, None, "x"),
        "window=129 must .* context of 128": (IDS, None, 100, 129),
        "max_tokens=1 ": (IDS, None, 1),
        "the text has 1 tokens": (IDS[:1],),
        "the text has 0 tokens": (tokenizer, ""),
        "text is given, and token ids": (IDS, "text"),
        "one row of integers": (IDS.reshape(2, 50),),
        "one row of integers, not torch.float32": (IDS.float(),),
    }.items():
        with pytest.raises(ValueError, match=words):
            compare(model, other, *arguments)
    with pytest.raises(TypeError, match="text must be a string"):
        compare(model, other, tokenizer, ["a", "b"])
    for wrong, name in (("smollm2", "str"), (None, "NoneType"), (["a"], "list"), (type(tokenizer), "the class")):
        with pytest.raises(TypeError, match=f"tokenizer_or_ids: expected a tokenizer or token ids, got {name}"):
            compare(model, other, wrong)
    with pytest.raises(TypeError, match="no place for 'tokenizer' .did you mean 'tokenizer_or_ids'"):
        compare(model, other, tokenizer=tokenizer)
    for models, name in ((("smollm2", other), "model: "), ((model, None), "compressed: ")):
        with pytest.raises(TypeError, match=f"{name}expected a transformers model"):
            compare(*models, IDS)
    with pytest.raises(ValueError, match="token ids from 3 to 70; the model's go from 0 to 60"):
        compare(model, other, [3, 70])
    with pytest.raises(ValueError, match="vocabularies have 61 and 67 tokens"):
        compare(model, tiny(vocab_size=67), IDS)
    broken = tiny(**SIZE)
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the compressed model predicts NaN"):
        compare(model, broken, IDS)
    with pytest.raises(ValueError, match="the original model predicts NaN"):
        compare(broken, model, IDS)
