"""What only a GPU can show, and runs there alone: texts by its own arithmetic, and how often the host waits, by torch's own count."""

import warnings

import pytest
import torch

from hf_specdec import integration
from hf_specdec.caches import CACHE
from tests.conformance.builders import VARIANTS, make
from tests.helpers import build, padded, perturbed, tiny_llama
from tests.test_pretend_gpu import BETWEEN, CASES, ONLY_ON_THE_HOST, ROWS, modules_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = [name for name in VARIANTS if name not in ONLY_ON_THE_HOST or name.startswith("online")]


def on_gpu(name, variants=VARIANTS):
    """A target and a draft of it on the GPU."""
    target = tiny_llama(1)
    draft = make(name, target, variants) if isinstance(name, str) else name(target)
    for module in [target, *modules_of(draft)]:
        module.to("cuda")
    return target, draft


def call(target, draft, rows, **options):
    inputs = {name: value.to("cuda") for name, value in padded(rows).items()}
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, **options}
    return integration.generate(target, **inputs, **options, speculative={"seed": 3}, assistant_model=draft, num_assistant_tokens=5,
                                return_dict_in_generate=True, use_cache=False)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plain_generates(name):
    target, draft = on_gpu(name)
    out = call(target, draft, ROWS)
    inputs = {key: value.to("cuda") for key, value in padded(ROWS).items()}
    assert torch.equal(out.sequences, target.generate(**inputs, do_sample=False, max_new_tokens=20, pad_token_id=0))


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_text_repeats_with_its_seed(name):
    texts = [call(*on_gpu(name), ROWS, do_sample=True, top_p=0.9).sequences for _ in range(2)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_a_round(name):
    make_draft, options = CASES[name]
    found = []
    call(*on_gpu(make_draft), ROWS[:1], **options)  # kernels are loaded by now
    for new in (6, 22):
        target, draft = on_gpu(make_draft)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                out = call(target, draft, ROWS[:1], max_new_tokens=new, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [f"{own.filename.rpartition('/')[2]}:{own.lineno}" for own in seen if "synchronizing CUDA operation" in str(own.message)]
        found.append((len(waits), len(out.speculation.rounds), waits))
    waits, rounds = (second - first for first, second in zip(found[0][:2], found[1][:2]))
    assert rounds and (name in BETWEEN or waits == rounds * (2 if name in ("ngram_recycling", "mixture") else 1)), found[1][2]


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_gives_plain_generates_text_and_goes_on_in_either(name):
    """Plain generate with the same cache, and without one: streams and copies are the device's own here."""
    model, inputs = tiny_llama(1).to("cuda"), {key: value.to("cuda") for key, value in padded(ROWS[:1]).items()}
    options = dict(do_sample=False, max_new_tokens=60, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    expected = model.generate(**inputs, **options).sequences
    theirs = model.generate(**inputs, **options, cache_implementation=name)
    for draft in (None, perturbed(model, 0.02)):
        out = integration.generate(model, **inputs, **options, cache_implementation=name, speculative=True, assistant_model=draft, num_assistant_tokens=5)
        assert torch.equal(out.sequences, expected) and torch.equal(theirs.sequences, expected)
        for own, other in zip(out[CACHE].layers, theirs[CACHE].layers):
            assert own.keys.device == other.keys.device and own.device == other.device
            torch.testing.assert_close(own.keys[:, :, : expected.shape[1] - 1], other.keys[:, :, : expected.shape[1] - 1], atol=2e-3, rtol=0)
    if name == "offloaded":
        again = dict(input_ids=torch.cat([expected, inputs["input_ids"]], dim=1))
        wanted = model.generate(**again, **options).sequences
        for goes_on in (model.generate, lambda **given: integration.generate(model, **given, speculative=True)):
            cache = integration.generate(model, **inputs, **options, cache_implementation=name, speculative=True)[CACHE]
            assert torch.equal(goes_on(**again, **options, **{CACHE: cache}).sequences, wanted)


def test_an_offloaded_cache_takes_two_layers_of_the_device():
    """At most, beside the weights and a pass; a cache that is not offloaded takes all eight."""
    model = build("llama", vocab_size=61, hidden_size=256, intermediate_size=64, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192).to("cuda")
    ids, taken = torch.randint(1, 60, (1, 6000), generator=torch.Generator().manual_seed(0)).to("cuda"), {}
    for name in ("dynamic", "offloaded"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        integration.generate(model, ids, do_sample=False, max_new_tokens=30, pad_token_id=0, eos_token_id=None, cache_implementation=name, prefill_chunk_size=256, speculative=True)
        taken[name] = torch.cuda.max_memory_allocated() - before
    assert taken["dynamic"] - taken["offloaded"] > 3 * 2 * 6000 * 256 * 4
