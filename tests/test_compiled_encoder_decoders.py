"""Compiled passes of the decoders of encoder-decoder models: the same texts. Torch traces the models, and the C++ compiler is left out."""

import warnings

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import T5ForConditionalGeneration

import hf_specdec
from hf_specdec import compiled, integration, mx, passes
from hf_specdec.block import Block
from hf_specdec.drafts import ModelDraft
from tests.encoder_decoders import MAX_NEW, family, plain, seeds, source, sources
from tests.helpers import FULL, OLD_TORCH, perturbed

NAMES = ["T5", "BART", "Whisper", "Marian", "Pegasus", "mBART"]
MORE = ["T5 v1.1 (gated)", "Blenderbot", "Blenderbot (small)", "LongT5", "M2M100", "mT5", "Pegasus-X", "PLBart", "UMT5",
        "TrOCR (sinusoidal)", "Donut", "ViT and GPT-2", "ViT and RoBERTa", "Pix2Struct", "Florence-2", "BERT twice", "Wav2Vec2 and mBART"]
NOT = ["LED", "MVP", "TrOCR", "UDOP"]


@pytest.fixture(autouse=True)
def functional(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})


@pytest.fixture
def strict():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without compile=True")
        yield


def speculate(model, inputs, draft=None, compile=True, k=4, **options):
    options = {"max_new_tokens": MAX_NEW, "do_sample": False, "num_beams": 1, "return_dict_in_generate": True, **options}
    return integration.generate(model, **inputs, assistant_model=draft, speculative={"seed": 0, "compile": compile}, num_assistant_tokens=k, **options).sequences


def target(name, attn="eager"):
    return family(name).model(attn, seeds(name, 1)[0])


@pytest.mark.share(1)
@pytest.mark.parametrize("name", NAMES + MORE if FULL else NAMES)
def test_greedy_texts_are_those_of_plain_generate(name, strict):
    model, inputs = target(name), source(family(name).kind, 3)
    draft = ModelDraft(perturbed(model, 0.03))
    assert torch.equal(speculate(model, inputs, draft), plain(model, inputs))
    assert compiled._functions[model].made


def test_sampled_texts_are_those_of_uncompiled_passes(strict):
    model, inputs = target("BART"), source("bart", 3)
    draft = ModelDraft(perturbed(model, 0.03))
    texts = [speculate(model, inputs, draft, compile, do_sample=True, temperature=0.8) for compile in (False, True, "model")]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_sources_of_every_length_share_functions_and_those_with_padding_have_others(strict):
    model, padded = target("T5"), {"input_ids": torch.tensor([[5, 6, 7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    counts = []
    for inputs in (source("t5", 3, 12), source("t5", 4, 9), source("t5", 4, 9) | {"attention_mask": torch.ones((1, 9), dtype=torch.long)}, padded):
        hf_specdec.warmup(model, None, {"num_assistant_tokens": 4}, max_length=100)
        assert torch.equal(speculate(model, inputs), plain(model, inputs))
        counts.append(len(compiled._functions[model].made))
    assert counts[:3] == [3, 3, 3] and 3 < counts[3] <= 6
    assert all(len(_debug_get_cache_entry_list(run.__wrapped__.__code__)) == 1 for run in compiled._functions[model].made.values())


def test_sources_of_every_length_share_functions_on_a_gpu(strict, monkeypatch):
    """By what is told to the compiler of shapes there: a graph is for one number of slots."""
    told, alone, count = Block.sizes, passes.alone, []
    monkeypatch.setattr(Block, "sizes", lambda self, slots, rows: told(self, False, rows))
    monkeypatch.setattr(passes, "alone", lambda *args, **kwargs: count.append(args) or alone(*args, **kwargs))
    model = target("BART")
    for length in (12, 9, 30, 17):
        inputs = source("bart", 3, length)
        assert torch.equal(speculate(model, inputs), plain(model, inputs))
    assert len(count) == len(compiled._functions[model].made) == 3  # one for each width of a pass


def test_a_text_may_end_with_the_last_position_of_its_decoder(strict):
    model, inputs = target("BART"), source("bart", 3)
    texts = [run(model, inputs, max_new_tokens=127) for run in (plain, speculate)]
    assert torch.equal(*texts)


@pytest.mark.skipif(OLD_TORCH, reason="this torch traces no products of tiles")
def test_weights_in_tiles_compile(strict):
    for name in ("T5", "Whisper"):
        attn = "eager" if name == "T5" and not T5ForConditionalGeneration._supports_sdpa else "sdpa"  # older versions of transformers
        model, inputs = mx.to_tiles(target(name, attn)), source(family(name).kind, 3)
        assert torch.equal(speculate(model, inputs), plain(model, inputs))


def test_warming_up_compiles_what_a_call_needs(strict):
    for name in ("T5", "Whisper"):
        model, inputs = target(name), source(family(name).kind, 3)
        assert hf_specdec.warmup(model, None, {"num_assistant_tokens": 4}, max_length=100) == 3
        made = dict(compiled._functions[model].made)
        assert torch.equal(speculate(model, inputs), plain(model, inputs))
        assert compiled._functions[model].made == made


def test_batches_go_on_uncompiled_and_one_row_is_compiled_afterwards():
    model, inputs = target("T5"), sources("t5", 3, 2)
    with pytest.warns(UserWarning, match="runs without compile=True: it counts the positions of all rows of a batch alike"):
        assert torch.equal(speculate(model, inputs), plain(model, inputs))
    inputs = source("t5", 3)
    assert torch.equal(speculate(model, inputs), plain(model, inputs)) and compiled._functions[model].made


@pytest.mark.parametrize("name", NOT)
def test_a_decoder_that_torch_cannot_trace_goes_on_uncompiled_and_says_so_once(name):
    model, inputs = target(name), source(family(name).kind, 3)
    text = plain(model, inputs)
    with pytest.warns(UserWarning, match="target: .* runs without compile=True: torch.compile says"):
        assert torch.equal(speculate(model, inputs), text)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without compile=True")
        assert torch.equal(speculate(model, inputs), text)
