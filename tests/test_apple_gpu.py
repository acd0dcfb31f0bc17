"""The loop on a stand-in for Apple's GPUs ("mps", tests/pretend_gpu.py), which have no numbers of float64: what is drawn is drawn on the host, by the host's numbers.

What only such a GPU can show (its kernels, time) is not seen here.
"""

import pytest
import torch
from transformers import WatermarkLogitsProcessor

from hf_specdec import integration
from hf_specdec.acceptance import speculative_sample
from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft, ModelTreeDraft
from tests import encoder_decoders
from tests.conformance.builders import VARIANTS, make
from tests.helpers import padded, perturbed, small_vocabulary_llama, speculate, tiny_llama
from tests.pretend_gpu import GpuTensor, PretendGpu
from tests.test_pretend_gpu import CASES, ONLY_ON_THE_HOST, OPTIONS, ROWS, SAMPLED, both, call, every_config, texts_under, waits_of_a_round


@pytest.fixture
def gpu():
    with PretendGpu("mps") as pretended:
        yield pretended


def test_the_stand_in_has_no_float64(gpu):
    here = torch.arange(3, device="mps")
    assert here.device.type == "mps" and here.is_mps and not here.is_cuda
    for wide in (lambda: here.double(), lambda: torch.zeros(2, dtype=torch.float64, device="mps"), lambda: torch.ones(2, dtype=torch.float64).to("mps"),
                 lambda: here.float().cumsum(-1, dtype=torch.float64)):
        with pytest.raises(TypeError, match="float64"):
            wide()


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ONLY_ON_THE_HOST])
def test_every_draft_gives_the_hosts_text(gpu, name, sampled):
    ours, expected = both(gpu, lambda target: make(name, target, VARIANTS), **sampled)
    assert ours == expected


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True}], ids=["", "sampled"])
@pytest.mark.parametrize("draft", ["model", "model_tree", "prompt_lookup"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_generate(gpu, name, draft, sampled):
    ours, expected = both(gpu, lambda target: make(draft, target, VARIANTS), **{**OPTIONS[name], **sampled})
    assert ours == expected


@pytest.mark.share(1 / 2)
@every_config
@pytest.mark.parametrize("kind", [ModelDraft, ModelTreeDraft])
def test_options_of_the_config(gpu, config, kind):
    if kind is ModelTreeDraft and config.get("draft_stop") in ("confidence", "expected_gain"):
        pytest.skip("trees have no such end")
    host, device = texts_under(gpu, config, kind)
    assert host == device


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("target_on, draft_on", [("mps", "cpu"), ("cpu", "mps")])
def test_a_draft_on_another_device(gpu, target_on, draft_on, sampled):
    def put(thing, on):
        return gpu.put(thing) if on == "mps" else thing

    host = small_vocabulary_llama(2, vocab=12)
    expected = speculate(host, ROWS, ModelDraft(perturbed(host, 0.1)), 4, seed=3, max_new_tokens=12, pad_token_id=0, **sampled).sequences.tolist()
    target = small_vocabulary_llama(2, vocab=12)
    small = put(perturbed(target, 0.1), draft_on)
    out = integration.generate(put(target, target_on), **put(padded(ROWS), target_on), max_new_tokens=12, pad_token_id=0, **{"do_sample": False, **sampled}, speculative={"seed": 3},
                              assistant_model=small, num_assistant_tokens=4)  # fmt: skip
    assert out.tolist() == expected


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_what_comes_back_is_on_the_device(gpu, sampled):
    target = tiny_llama(1)
    out = call(gpu, target, ROWS, ModelDraft(perturbed(target, 0.1)), return_dict_in_generate=True, output_scores=True, output_logits=True, **sampled)
    parts = (out.sequences, *out.scores, *out.logits, *(layer.keys for layer in out[CACHE].layers))
    assert len(parts) > 20 and all(isinstance(part, GpuTensor) for part in parts)


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_processors_run_where_the_target_is(gpu, sampled):
    """A watermark's generator gives other numbers on another device, and a caller's own processor may hold tensors that are there."""
    seen = []

    class Watched(WatermarkLogitsProcessor):
        def __init__(self):
            pass

        def __call__(self, input_ids, scores):
            seen.append((input_ids.device.type, scores.device.type))
            return scores + torch.zeros(1, device="mps")

    target = tiny_llama(1)
    call(gpu, target, ROWS, ModelDraft(perturbed(target, 0.1)), logits_processor=[Watched()], **sampled)
    assert set(seen) == {("mps", "mps")}


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoder_decoders_sample(gpu, name):
    line = encoder_decoders.family(name)
    model, inputs = line.model(seed=1), encoder_decoders.sources(line.kind)
    draft = perturbed(model, 0.03)
    given = dict(do_sample=True, top_k=8, seed=3)
    expected = encoder_decoders.speculate(model, inputs, ModelDraft(draft), 4, **given).sequences.tolist()
    gpu.put(model)
    out = encoder_decoders.speculate(model, gpu.put(inputs), ModelDraft(gpu.put(draft)), 4, **given)
    assert out.sequences.held.tolist() == expected


def test_the_primitive(gpu):
    p, q = (gpu.put(torch.rand(64, 9).softmax(-1)) for _ in range(2))
    x = q.argmax(-1)
    found, accepted = speculative_sample(p, q, x)
    assert found.device == p.device and bool((found[accepted] == x[accepted]).all()) and 0 <= int(found.min()) <= int(found.max()) < 9


def test_compiled_passes_are_left_out_with_a_word(gpu):
    target = tiny_llama(1)
    expected = target.generate(**padded(ROWS), max_new_tokens=8, pad_token_id=0, do_sample=False).tolist()
    with pytest.warns(UserWarning, match="without compile=True.*mps"):
        out = integration.generate(gpu.put(target), **gpu.put(padded(ROWS)), max_new_tokens=8, pad_token_id=0, do_sample=False, speculative={"compile": True})
    assert out.tolist() == expected


@pytest.mark.parametrize("name", ["lookup", "model", "lookup, sampling"])
def test_the_host_waits_once_a_round(gpu, name):
    draft, options = CASES[name]
    waits, _ = waits_of_a_round(gpu, draft, **options)
    assert sum(waits.values()) == 1, waits
