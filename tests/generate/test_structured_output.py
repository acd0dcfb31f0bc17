"""Grammars of xgrammar, outlines and llguidance: the text of plain generate, whatever is drafted, in batches, too."""

import json
from functools import lru_cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec.drafts import ModelDraft, ModelTreeDraft, NGramRecyclingDraft
from tests.helpers import generated, perturbed, plain, speculate, tiny_llama

MAX_NEW = 48
SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["colour", "count", "flags", "name"],
    "properties": {"colour": {"enum": ["red", "green", "dark blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99},
                   "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "name": {"type": "string", "maxLength": 6}},
})  # fmt: skip
TEXTS = ['{"colour": "red", "count": 3} and {"colour": "green"', "What colour is it?"]


@lru_cache(maxsize=None)
def tokenizer():
    """Of bytes and the words of the schema: for a vocabulary of 49152 tokens outlines takes half a minute."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator([SCHEMA, *TEXTS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


@lru_cache(maxsize=None)
def target():
    return tiny_llama(1, vocab_size=len(tokenizer()), eos_token_id=tokenizer().eos_token_id, max_position_embeddings=512)


def rows() -> list[list[int]]:
    return [tokenizer()(text)["input_ids"] for text in TEXTS]


@lru_cache(maxsize=None)
def xgrammar_compiled():
    xgrammar = pytest.importorskip("xgrammar")
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=len(tokenizer()))).compile_json_schema(SCHEMA)


def by_xgrammar():
    from xgrammar.contrib.hf import LogitsProcessor

    return LogitsProcessor(xgrammar_compiled())


@lru_cache(maxsize=None)
def outlines_model():
    return pytest.importorskip("outlines").from_transformers(target(), tokenizer())


def by_outlines(backend: str, module: str):
    def make():
        pytest.importorskip(module)
        model = outlines_model()
        from outlines.backends import get_json_schema_logits_processor

        return get_json_schema_logits_processor(backend, model, SCHEMA)

    return make


GRAMMARS = {"xgrammar": lambda: (xgrammar_compiled(), by_xgrammar())[1], "outlines": by_outlines("outlines_core", "outlines_core"),
            "outlines with xgrammar": by_outlines("xgrammar", "xgrammar"), "outlines with llguidance": by_outlines("llguidance", "llguidance")}
DRAFTS = {"lookup": lambda target: None, "recycling": lambda target: NGramRecyclingDraft(), "model": lambda target: ModelDraft(perturbed(target, 0.2)),
          "model tree": lambda target: ModelTreeDraft(perturbed(target, 0.2))}
every_grammar = pytest.mark.parametrize("grammar", GRAMMARS)


def options(grammar: str, **more) -> dict:
    return {"logits_processor": LogitsProcessorList([GRAMMARS[grammar]()]), "max_new_tokens": MAX_NEW, "eos_token_id": tokenizer().eos_token_id, **more}


@pytest.mark.share(1 / 4)
@every_grammar
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_plain_generates(grammar, draft):
    expected = plain(target(), rows()[:1], **options(grammar))
    assert generated(speculate(target(), rows()[:1], DRAFTS[draft](target()), 5, **options(grammar)), rows()[:1]) == expected


@pytest.mark.share(4)
@every_grammar
def test_in_a_ragged_batch_too(grammar):
    expected = [plain(target(), [row], **options(grammar))[0] for row in rows()]
    assert generated(speculate(target(), rows(), ModelDraft(perturbed(target(), 0.2)), 5, **options(grammar)), rows()) == expected


@pytest.mark.share(1 / 4)
@every_grammar
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_what_is_sampled_is_of_the_grammar(grammar, draft):
    for seed in range(3):
        made = options(grammar, do_sample=True, max_new_tokens=90)
        tokens = generated(speculate(target(), rows()[:1], DRAFTS[draft](target()), 5, seed=seed, **made), rows()[:1])[0]
        text = tokenizer().decode(tokens, skip_special_tokens=True)
        if tokens[-1] == tokenizer().eos_token_id:  # xgrammar lets control characters be in strings
            assert set(json.loads(text, strict=False)) == {"colour", "count", "flags", "name"}
        else:
            assert text.lstrip().startswith("{")


def test_a_grammar_for_every_row():
    xgrammar = pytest.importorskip("xgrammar")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=len(tokenizer())))
    grammars = [xgrammar_compiled(), compiler.compile_regex(r"(yes|no|[a-z]{3} [0-9]{4})!")]
    made = [LogitsProcessorList([xgrammar.contrib.hf.LogitsProcessor(each)]) for each in (grammars, grammars[0], grammars[1])]
    expected = [plain(target(), [row], **options("xgrammar", logits_processor=each))[0] for row, each in zip(rows(), made[1:])]
    assert generated(speculate(target(), rows(), None, 5, **options("xgrammar", logits_processor=made[0])), rows()) == expected


def test_outlines_own_call_takes_speculative():
    outlines = pytest.importorskip("outlines")
    generator = outlines.Generator(outlines.from_transformers(hf_specdec.enable(target()), tokenizer()), outlines.types.Regex(r"(yes|no|[a-z]{3} [0-9]{4})!"))
    try:
        first, second = (generator(TEXTS[1], max_new_tokens=12, do_sample=False, speculative=True) for _ in range(2))
        assert first == second == generator(TEXTS[1], max_new_tokens=12, do_sample=False)
    finally:
        hf_specdec.disable(target())


def test_a_state_that_is_not_put_back_breaks_a_grammar(monkeypatch):
    from hf_specdec import call

    monkeypatch.setattr(call, "that_follow", lambda rows, prompts: rows)
    monkeypatch.setattr(call, "settle", lambda rows, written: None)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        speculate(target(), rows()[:1], ModelDraft(perturbed(target(), 0.2)), 5, **options("xgrammar"))


def test_the_model_alone_would_write_something_else():
    free = plain(target(), rows()[:1], max_new_tokens=MAX_NEW)
    assert torch.tensor(free).tolist() != plain(target(), rows()[:1], **options("xgrammar"))
