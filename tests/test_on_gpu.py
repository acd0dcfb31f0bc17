"""What only a GPU can show, and runs there alone: texts by its own arithmetic, and how often the host waits, by torch's own count."""

import warnings

import pytest
import torch

from hf_specdec import integration
from tests.conformance.builders import VARIANTS, make
from tests.helpers import padded, tiny_llama
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
