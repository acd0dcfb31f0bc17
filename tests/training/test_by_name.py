"""Drafters that a config names: by folder or by the name of one that comes with the package, as `draft` or as `draft_source`."""

from __future__ import annotations

import gc
import os
import shutil
import weakref

import pytest

import hf_specdec
from hf_specdec import SpeculativeConfig, loading, registry
from hf_specdec.training import build_drafter, drafter, load_drafter
from hf_specdec.training.heads import save as save_heads
from tests.conformance.builders import feature_drafter, medusa_heads
from tests.helpers import assert_unchanged, generated, new_tokens, padded, plain, prompts, snapshot, speculate, tiny_llama

ROWS = prompts(9, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind of draft -> the folder of a drafter for tiny_llama(3)."""
    target = tiny_llama(3)
    made = {name: tmp_path_factory.mktemp(name) for name in ("model", "feature", "medusa")}
    drafter.save(build_drafter(target, [1]), made["model"], "the test's target")
    drafter.save(feature_drafter(target), made["feature"], "the test's target")
    save_heads(medusa_heads(target), target.get_input_embeddings().weight, made["medusa"], "the test's target")
    return {name: str(folder) for name, folder in made.items()}


def sources(out) -> set[str]:
    return {entry.source for entries in out.speculation.rounds for entry in entries if entry.proposed}


@pytest.mark.share(2)
@pytest.mark.parametrize("as_draft", [True, False], ids=["draft", "draft_source"])
@pytest.mark.parametrize("kind", ["model", "feature", "medusa"])
def test_a_folder_is_loaded_for_the_target(kind, as_draft, folders, tmp_path):
    named = {"draft": folders[kind]} if as_draft else {"draft": kind, "draft_source": folders[kind]}
    SpeculativeConfig(num_assistant_tokens=3, **named).save_pretrained(tmp_path)
    config, target = SpeculativeConfig.from_pretrained(tmp_path), tiny_llama(3)
    before = snapshot(target)
    out = speculate(target, ROWS, None, 3, speculative=config)
    assert generated(out, ROWS) == plain(target, ROWS) and sources(out) == {kind} and out.speculation.config["draft"] == named["draft"]
    decoder = hf_specdec.SpeculativeDecoder(config=config)
    assert decoder.draft is None
    inputs = padded(ROWS)
    hf_specdec.disable(target)
    again = target.generate(**inputs, custom_generate=decoder, max_new_tokens=20, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert new_tokens(again, inputs) == plain(target, ROWS) and decoder.draft.name == kind
    assert_unchanged(target, before)


@pytest.mark.parametrize("kind", ["model", "feature"])
def test_a_folder_is_a_part_of_a_mixture_by_name(kind, folders):
    target = tiny_llama(3)
    options = {"drafts": ["suffix_automaton", folders[kind]], "mode": "choose"}
    out = speculate(target, ROWS, None, 3, speculative={"draft": "mixture", "draft_options": options})
    assert generated(out, ROWS) == plain(target, ROWS) and kind in sources(out)


@pytest.mark.parametrize(("kind", "draft", "options", "name", "most"), [
    ("model", "model_tree", {"tree": [2, 2]}, "model_tree", 6), ("feature", "feature_tree", {"tree": {"parents": [0, 0, 1]}}, "feature_tree", 3),
    ("medusa", "medusa", {"tree": [2, 2]}, "medusa", 6),
])
def test_options_go_into_the_draft_that_is_made_of_it(kind, draft, options, name, most, folders):
    target = tiny_llama(3)
    out = speculate(target, ROWS[:1], None, 2, speculative={"draft": draft, "draft_source": folders[kind], "draft_options": options})
    assert generated(out, ROWS[:1]) == plain(target, ROWS[:1]) and sources(out) == {name}
    assert max(entry.proposed for entries in out.speculation.rounds for entry in entries) == most


@pytest.mark.parametrize("draft", ["ngram", "retrieval"])
def test_a_file_that_cannot_be_read_is_named_with_its_argument(draft, tmp_path):
    (tmp_path / "broken").write_bytes(b"no tensors")
    for name in ("missing", "broken"):
        with pytest.raises(ValueError, match=f"draft_source='{tmp_path / name}': "):
            speculate(tiny_llama(3), ROWS, None, 3, speculative={"draft": draft, "draft_source": str(tmp_path / name)})


def test_a_target_that_does_not_fit_is_refused_by_name(folders):
    for config in ({"draft": "smollm2_drafter"}, {"draft": "smollm2_feature_drafter"}, {"draft": "model", "draft_source": "smollm2_drafter"},
                   {"draft": "feature", "draft_source": "smollm2_feature_drafter"}):
        with pytest.raises(ValueError, match="draft(_source)?='smollm2.*is a drafter for .*this target has another one"):
            speculate(tiny_llama(3), ROWS, None, 3, speculative=config)
    with pytest.raises(ValueError, match="is a drafter for the test's target"):
        speculate(tiny_llama(4), ROWS, None, 3, speculative={"draft": folders["feature"]})


@pytest.mark.parametrize(("config", "words"), [
    ({"draft": "smollm2"}, "draft='smollm2' is not known; .*smollm2_drafter.*smollm2_feature_drafter"),
    ({"draft": "smollm2_drafter", "draft_source": "x"}, "Leave draft_source out"),
    ({"draft": "feature", "draft_source": "{model}"}, "is a drafter for draft='model'"),
    ({"draft": "model", "draft_source": "{feature}"}, "is a drafter for draft='feature'"),
    ({"draft": "medusa", "draft_source": "{feature}"}, "is a drafter for draft='feature'"),
    ({"draft": "medusa", "draft_source": "no/such"}, "draft_source='no/such' holds no drafter"),
    ({"draft": "feature", "draft_source": "{feature}", "draft_options": {"tree": [2]}}, "FeatureDraft has no 'tree'"),
    ({"draft": "recycling", "draft_source": "{model}"}, "has no weights to load"),
])
def test_what_does_not_go_together_is_refused(config, words, folders):
    with pytest.raises(ValueError, match=words):
        speculate(tiny_llama(3), ROWS, None, 3, speculative={name: value.format(**folders) if isinstance(value, str) else value
                                                             for name, value in config.items()})


def test_the_names_are_known_without_the_training_package():
    assert {"smollm2_drafter", "smollm2_feature_drafter"} <= set(registry.shipped())
    assert SpeculativeConfig(draft="smollm2_feature_drafter").draft == "smollm2_feature_drafter"


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("kind", ["model", "feature", "medusa"])
def test_a_drafter_is_read_once_and_kept_as_long_as_its_target(kind, folders, monkeypatch, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / "drafter")
    reads, read = [], drafter.load
    monkeypatch.setattr(drafter, "load", lambda *given: reads.append(1) or read(*given))
    target, config = tiny_llama(3), {"draft": str(folder)}

    def text(target):
        return generated(speculate(target, ROWS, None, 3, speculative=config), ROWS)

    expected = plain(target, ROWS)
    assert text(target) == text(target) == expected and len(reads) == 1
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert text(target) == text(target) == expected and len(reads) == 2
    target.double()
    assert text(target) == text(target) == plain(target, ROWS) and len(reads) == 3
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("arguments", [("smollm2_drafter",), ("smollm2_drafter", None), ("smollm2_drafter", "gpt2"), (tiny_llama(), "smollm2_drafter"), (None, tiny_llama()), ("smollm2_drafter", type(tiny_llama()))],
                         ids=["name alone", "None", "name of a model", "the other way round", "no folder", "a class"])
def test_a_drafter_is_loaded_by_its_folder_and_its_target(arguments):
    with pytest.raises(TypeError, match=r"load_drafter\(folder, target\): pass a folder or a name, then the model"):
        load_drafter(*arguments)


def test_a_call_drafts_with_what_it_has_read_whatever_another_thread_keeps_meanwhile(folders, monkeypatch):
    class Contested(weakref.WeakKeyDictionary):
        def __setitem__(self, target, kept):
            super().__setitem__(target, ("read from elsewhere", tiny_llama(4)))

    monkeypatch.setattr(loading, "_kept", Contested())
    target = tiny_llama(3)
    out = speculate(target, ROWS, None, 3, speculative={"draft": folders["medusa"]})
    assert generated(out, ROWS) == plain(target, ROWS) and sources(out) == {"medusa"}
