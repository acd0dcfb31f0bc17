"""`draft="compressed"`: the copy is made once, kept as long as the target lives, and made anew when it would be another one."""

import gc
import weakref
from threading import Thread

import pytest
import torch

import hf_specdec
from hf_specdec import SpeculativeDecoder, loading, mx
from hf_specdec.commands.common import load_draft
from hf_specdec.commands.writer import draft_weights
from hf_specdec.drafts import CompressedDraft
from hf_specdec.mx import draft as made_by
from hf_specdec.mx.linear import MXLinear
from tests.drafts.test_compressed import BY_NAME, ROWS, named
from tests.helpers import assert_unchanged, generated, padded, perturbed, plain, snapshot, speculate, tiny_llama


@pytest.fixture
def copies(monkeypatch):
    """The copies that are made, as references that do not keep them."""
    made, original = [], made_by.draft_of

    def noted(*arguments, **options):
        draft = original(*arguments, **options)
        made.append(weakref.ref(draft.model))
        return draft

    noted.__wrapped__ = original
    monkeypatch.setattr(made_by, "draft_of", noted)
    return made


@pytest.mark.parametrize("way", [lambda model: model, mx.to_tiles, lambda model: mx.compress(model, "mxint8")], ids=["dense", "tiles", "MX"])
def test_by_name_the_copy_is_made_once_and_goes_with_the_target(way, copies):
    target = way(tiny_llama(3))
    before = snapshot(hf_specdec.enable(target))
    assert all(named(target, rows) == plain(target, rows) for rows in (ROWS, ROWS[:1], ROWS[1:]))
    assert len(copies) == 1 and copies[0]() is not None
    assert_unchanged(target, before)
    whole = weakref.ref(target)
    del target
    gc.collect()
    assert whole() is None and copies[0]() is None


@pytest.mark.filterwarnings("ignore")
def test_by_name_a_target_that_accelerate_has_dispatched_goes_too():
    accelerate = pytest.importorskip("accelerate")
    target = accelerate.dispatch_model(tiny_llama(3), {"": "cpu"}, force_hooks=True)
    assert named(target) == plain(target, ROWS)
    whole = weakref.ref(target)
    del target
    gc.collect()
    assert whole() is None


def test_by_name_without_enabling():
    target = tiny_llama(3)
    inputs, options = padded(ROWS), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, custom_generate=SpeculativeDecoder(config=BY_NAME)), expected)
    assert torch.equal(target.generate(**inputs, **options), expected)


def test_the_options_are_those_of_draft_of_and_other_ones_make_another_copy(copies):
    target, expected = tiny_llama(3), plain(tiny_llama(3), ROWS)
    both = {"o_proj": "mxint8", "*.layers.0.*": "mxfp8_e4m3"}
    each = [{}, {"format": "mxfp4_e2m1"}, {"lm_head": None}, {"skip": ["o_proj"]}, {"layer_formats": both}, {"layer_formats": dict(list(both.items())[::-1])}, {"activations": "mxint8"}]
    for options in each:
        assert named(target, options=options) == named(target, options=options) == expected and len(copies) == 1
        held = {name: part.format.name for name, part in copies[-1]().named_modules() if isinstance(part, MXLinear)}
        assert held == {name: part.format.name for name, part in mx.draft_of(target, **options).model.named_modules() if isinstance(part, MXLinear)}
        copies.pop()


def test_a_target_that_was_cast_since_gets_another_copy(copies):
    target = tiny_llama(3)
    named(target)
    target.to(torch.bfloat16)
    assert [len(text) for text in named(target)] == [20] * 3 and len(copies) == 2 and copies[1]().dtype == torch.bfloat16
    gc.collect()
    assert copies[0]() is None
    target.to(torch.float32)
    assert named(target) == plain(target, ROWS) and len(copies) == 3


def test_settings_of_a_target_that_do_not_make_it_another_model_may_change(copies):
    target = tiny_llama(3)
    named(target)
    target.config.pad_token_id, target.config.use_cache, target.generation_config.pad_token_id = 0, True, 0
    assert named(target) == plain(target, ROWS)
    target.config.eos_token_id = 5
    assert generated(speculate(target, ROWS, CompressedDraft(target, perturbed(tiny_llama(3), 0.1)), 3), ROWS) == plain(target, ROWS)


def test_a_target_that_was_resized_since_gets_another_copy():
    target = tiny_llama(3)
    named(target)
    target.resize_token_embeddings(80)
    assert named(target) == plain(target, ROWS)


def test_two_threads_with_a_target_each():
    targets, found = [tiny_llama(3), mx.to_tiles(tiny_llama(4))], {}
    expected = [plain(target, ROWS) for target in targets]
    threads = [Thread(target=lambda i=i: found.update({i: [named(targets[i]) for _ in range(3)]})) for i in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {i: [text] * 3 for i, text in enumerate(expected)}


@pytest.mark.parametrize(("options", "words"), [
    ({"bits": 4}, "draft_options: .* has no 'bits'; it has .*'format'"), ({"target": 4}, "has no 'target'"), ({"format": "mxfp3"}, "draft='compressed'.*format='mxfp3'"),
    ({"format": 4}, "draft='compressed'.*format=4"), ({"skip": "mlp"}, "draft='compressed'.*skip"), ({"skip": ["*"], "lm_head": None}, "draft='compressed'.*no layer that can be compressed"),
], ids=str)  # fmt: skip
def test_options_that_draft_of_does_not_take_are_refused(options, words):
    target = tiny_llama(3)
    with pytest.raises(ValueError, match=words):
        named(target, options=options)
    assert named(target) == plain(target, ROWS)


def test_options_beside_a_draft_that_was_passed_are_refused():
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="draft_options=.*assistant_model replaces"):
        speculate(target, ROWS, mx.draft_of(target), 3, speculative=BY_NAME)


def test_a_call_drafts_with_the_copy_it_has_made_whatever_another_thread_keeps_meanwhile(monkeypatch):
    class Contested(weakref.WeakKeyDictionary):
        def __setitem__(self, target, kept):
            super().__setitem__(target, ("made another way", None))

    monkeypatch.setattr(loading, "_copies", Contested())
    target = tiny_llama(3)
    for _ in range(2):
        assert named(target) == plain(target, ROWS)


# --- in a mixture by name ---------------------------------------------------------------------------------------------

TWO = {"draft": "mixture", "num_assistant_tokens": 4, "draft_options": {"drafts": ["suffix_automaton", "compressed"], "mode": "choose"}}


def test_a_mixture_by_name_takes_the_copy_and_calls_share_it(copies):
    target = hf_specdec.enable(tiny_llama(3))
    texts = plain(target, ROWS)
    for rows, wanted in ((ROWS, texts), (ROWS[:1], texts[:1])):
        out = target.generate(**padded(rows), max_new_tokens=20, do_sample=False, pad_token_id=0, speculative=TWO, return_dict_in_generate=True)
        assert generated(out, rows) == wanted
    assert len(copies) == 1 and "compressed" in {round.source for rows in out.speculation.rounds for round in rows}


@pytest.mark.parametrize(("drafts", "words"), [(["nothing"], "drafts.*nothing"), (["suffix_automaton", "model"], "'model' has to be made first"), ("compressed", "expected a list"),
                                               ([], "at least one")])
def test_what_a_mixture_by_name_cannot_be_made_of_is_refused(drafts, words):
    target = hf_specdec.enable(tiny_llama(3))
    with pytest.raises(ValueError, match=words):
        target.generate(**padded(ROWS), max_new_tokens=4, pad_token_id=0, speculative={"draft": "mixture", "draft_options": {"drafts": drafts}})


def test_several_drafts_on_the_command_line_are_a_mixture_that_chooses():
    target = hf_specdec.enable(tiny_llama(3))
    draft = load_draft("prompt_lookup+compressed+suffix_automaton", "float32", target, None)
    assert [part.name for part in draft.parts] == ["prompt_lookup", "compressed", "suffix_automaton"] and draft.mode == "choose"
    assert draft_weights("prompt_lookup+compressed", draft) is not None
    for name in ("compressed+", "+compressed", "compressed+compressed"):
        with pytest.raises(ValueError, match=r"--draft .*takes the names of two drafts or more, each once"):
            load_draft(name, "float32", target, None)
    with pytest.raises(ValueError, match=r'for the command line.*draft="mixture" with draft_options=.*"suffix_automaton", "compressed"'):
        hf_specdec.SpeculativeConfig(draft="suffix_automaton+compressed")
    with pytest.raises(ValueError, match="--draft compresed: did you mean compressed"):
        load_draft("prompt_lookup+compresed", "float32", target, None)
