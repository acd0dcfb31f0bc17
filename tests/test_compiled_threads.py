"""Compiled passes of one model in several threads: each goes by its own functions, whatever the others begin, end or compile meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_specdec import compiled
from hf_specdec.caches import GOES_ON
from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.layerwise import Layerwise, Made
from tests.helpers import plain, prompts, repetitive, tiny_llama
from tests.test_compiled_states import run, strict  # noqa: F401
from tests.test_layerwise import traced  # noqa: F401 (around every test)
from tests.test_states import model_of


def test_a_pass_keeps_its_functions_while_another_thread_begins_and_ends_one():
    layers, ran = list(tiny_llama(0, num_hidden_layers=3).model.layers), []

    def passing(name: str) -> Layerwise:
        own = Layerwise(layers, Made(), torch.device("cpu"))
        own._run = lambda i, layer, args, kwargs: ran.append((name, i))
        return own

    inside, end = threading.Event(), threading.Event()

    def other() -> None:
        with passing("other").running("key", None, 4):
            layers[1].forward()
            inside.set()
            end.wait(30)
            layers[1].forward()

    with ThreadPoolExecutor(1) as threads, passing("own").running("key", None, 4):
        theirs = threads.submit(other)
        assert inside.wait(30)
        layers[0].forward()
        end.set()
        theirs.result()
        layers[2].forward()
    assert ran == [("other", 1), ("own", 0), ("other", 1), ("own", 2)] and not any("forward" in vars(layer) for layer in layers)


def test_the_longer_of_two_passes_keeps_its_functions():
    layers, ran = list(tiny_llama(0, num_hidden_layers=3).model.layers), []
    own, other = (Layerwise(layers, Made(), torch.device("cpu")) for _ in range(2))
    own._run = lambda i, layer, args, kwargs: ran.append(i)
    begun, end = threading.Event(), threading.Event()

    def shorter() -> None:
        with other.running("key", None, 4):
            begun.set()
            end.wait(30)

    with ThreadPoolExecutor(1) as threads:
        theirs = threads.submit(shorter)
        assert begun.wait(30)
        with own.running("key", None, 4):
            end.set()
            theirs.result()
            for layer in layers:
                layer.forward()
    assert ran == [0, 1, 2] and not any("forward" in vars(layer) for layer in layers)


@pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")
@pytest.mark.parametrize("way", ["model", "layers"])
@pytest.mark.parametrize("first", [True, False], ids=["from the first pass on", "later"])
def test_torchs_flag_that_some_thread_compiles_is_not_taken_for_this_one(way, first, strict, monkeypatch):  # noqa: F811
    """torch 2.13 keeps it up for the whole process while any thread compiles."""
    target, rows = model_of("Qwen3.5 (text)"), repetitive(12) + prompts(7, seed=2)
    texts = plain(target, rows, max_new_tokens=20)
    if not first:
        assert run(target, rows, PromptLookupDraft(), way, max_new_tokens=20) == texts
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert run(target, rows, PromptLookupDraft(), way, max_new_tokens=20) == texts
    assert compiled._functions[target].made or compiled._by_layers[target].functions.made
