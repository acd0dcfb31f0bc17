"""The loop on a stand-in for a GPU (tests/pretend_gpu.py): no operation mixes devices, texts are those of the host, and numbers come to the host
once a round; none goes to the device by a way that makes the host wait.

What only a GPU can show (kernels, streams, captured graphs, time) is not seen here.
"""

from copy import deepcopy

import pytest
import torch
from transformers import LogitsProcessorList, TextStreamer

from hf_specdec import integration, mx
from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft, ModelTreeDraft, PromptLookupDraft, SuffixAutomatonDraft
from tests import encoder_decoders
from tests.architectures import FAMILIES
from tests.conformance.builders import VARIANTS, make
from tests.helpers import padded, perturbed, small_vocabulary_llama, speculate, tiny_llama, word_tokenizer
from tests.seeing import FAMILIES as SEEING
from tests.pretend_gpu import GpuTensor, PretendGpu

ROWS = [[1, 2, 3, 1, 2], [4, 3], [5, 4, 5, 4, 5, 4, 5]]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
ONLY_ON_THE_HOST = {"online", "online, a feature tree",  # learn: the stand-in has no gradients
                    "tree", "tree, wide", "tree, with replacement", "tree, point masses", "cascade, over a tree that is drawn"}  # drafts of tests, which draw there  # fmt: skip


@pytest.fixture
def gpu():
    with PretendGpu() as pretended:
        yield pretended


def modules_of(thing, seen: set | None = None):
    """The modules that a draft holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        yield thing
        return
    ours = type(thing).__module__.startswith(("hf_specdec", "tests")) and hasattr(thing, "__dict__")
    for part in thing if isinstance(thing, (list, tuple)) else thing.values() if isinstance(thing, dict) else vars(thing).values() if ours else ():
        yield from modules_of(part, seen)


def call(gpu, target, rows, draft=None, k=4, seed=3, draft_device=None, **options):
    """Ours, all of it on the stand-in."""
    gpu.put(target)
    for module in modules_of(draft):
        gpu.put(module, draft_device)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    return integration.generate(target, **gpu.put(padded(rows)), **options, speculative={"seed": seed}, assistant_model=draft, num_assistant_tokens=k)


def both(gpu, draft=lambda target: None, rows=ROWS, k=4, target=lambda: small_vocabulary_llama(2, vocab=12), **options):
    """Texts of the host and of the stand-in."""
    host = target()
    device = target()
    expected = speculate(host, rows, draft(host), k, seed=3, **{"max_new_tokens": 12, "pad_token_id": 0, **options}).sequences.tolist()
    out = call(gpu, device, rows, draft(device), k, **options)
    return getattr(out, "sequences", out).held.tolist(), expected


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ONLY_ON_THE_HOST])
def test_every_draft_gives_the_hosts_text(gpu, name, sampled):
    ours, expected = both(gpu, lambda target: make(name, target, VARIANTS), **sampled)
    assert ours == expected


OPTIONS = {
    "plain sampling": dict(do_sample=True), "top-k": dict(do_sample=True, top_k=3), "min-p": dict(do_sample=True, min_p=0.1), "typical": dict(do_sample=True, typical_p=0.7),
    "epsilon": dict(do_sample=True, epsilon_cutoff=0.05), "repetition penalty": dict(repetition_penalty=1.4), "least length": dict(min_new_tokens=6, eos_token_id=3),
    "end": dict(eos_token_id=[3, 7]), "bad words": dict(bad_words_ids=[[2], [3, 4]]), "no repeat": dict(no_repeat_ngram_size=2), "bias": dict(sequence_bias=[[[5], 3.0]]),
    "suppressed": dict(suppress_tokens=[1, 2]), "forced": dict(forced_eos_token_id=3), "allowed": dict(prefix_allowed_tokens_fn=lambda row, ids: [1, 2, 3] if ids[-1] % 2 else [4, 5]),
}  # fmt: skip


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", ["model", "model_tree", "prompt_lookup"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_generate(gpu, name, draft):
    ours, expected = both(gpu, lambda target: make(draft, target, VARIANTS), **OPTIONS[name])
    assert ours == expected


every_config = pytest.mark.parametrize("config", [
    {"record_probs": True}, {"acceptance": "block"}, {"acceptance": "spectr"}, {"acceptance": "coupled"}, {"acceptance": "typical"}, {"acceptance": "threshold"}, {"lenience": 0.5},
    {"draft_stop": "confidence"}, {"draft_stop": "expected_gain"}, {"draft_stop": "heuristic"}, {"num_assistant_tokens": "auto"},
], ids=str)  # fmt: skip


def texts_under(gpu, config, kind=ModelDraft):
    """Of the host and of the stand-in, sampled."""
    texts = []
    for put in (lambda thing: thing, gpu.put):
        target = small_vocabulary_llama(2, vocab=12)
        draft = put(perturbed(target, 0.1))
        given = {"seed": 3, "num_assistant_tokens": 4, **config}
        out = integration.generate(put(target), **put(padded(ROWS)), max_new_tokens=12, pad_token_id=0, do_sample=True, speculative=given, assistant_model=kind(draft),
                                  return_dict_in_generate=True)  # fmt: skip
        assert out.speculation.to_json()
        texts.append(out.sequences.tolist())
    return texts


@pytest.mark.share(1 / 2)
@every_config
def test_options_of_the_config(gpu, config):
    host, device = texts_under(gpu, config)
    assert host == device


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [ModelDraft, ModelTreeDraft])
@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_draft_on_another_device(gpu, device, kind, sampled):
    host = small_vocabulary_llama(2, vocab=12)
    expected = speculate(host, ROWS, kind(perturbed(host, 0.1)), 4, seed=3, max_new_tokens=12, pad_token_id=0, **sampled).sequences.tolist()
    target = small_vocabulary_llama(2, vocab=12)
    small = perturbed(target, 0.1)
    gpu.put(target)
    draft = kind(small if device == "cpu" else gpu.put(small, device))
    out = integration.generate(target, **gpu.put(padded(ROWS)), max_new_tokens=12, pad_token_id=0, **{"do_sample": False, **sampled}, speculative={"seed": 3},
                              assistant_model=draft, num_assistant_tokens=4)  # fmt: skip
    assert out.held.tolist() == expected


def test_a_target_on_the_host_with_a_draft_on_the_device(gpu):
    target = small_vocabulary_llama(2, vocab=12)
    expected = speculate(target, ROWS, None, 4, max_new_tokens=12, pad_token_id=0).sequences
    out = integration.generate(target, **padded(ROWS), max_new_tokens=12, pad_token_id=0, do_sample=False, assistant_model=gpu.put(perturbed(target, 0.1)), num_assistant_tokens=4)
    assert type(out) is torch.Tensor and torch.equal(out, expected)


def test_what_comes_back_is_on_the_device(gpu):
    target = small_vocabulary_llama(2, vocab=12)
    out = call(gpu, target, ROWS, ModelDraft(perturbed(target, 0.1)), return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert all(isinstance(part, GpuTensor) for part in (out.sequences, *out.scores, *out.logits, *(layer.keys for layer in out[CACHE].layers)))
    more = torch.cat([out.sequences, gpu.put(torch.tensor([[5], [6], [7]]))], dim=1)
    mask = torch.cat([gpu.put(padded(ROWS)["attention_mask"]), torch.ones((3, 13), dtype=torch.long, device="cuda")], dim=1)
    again = integration.generate(target, more, attention_mask=mask, **{CACHE: out[CACHE]}, max_new_tokens=5, pad_token_id=0, do_sample=False)
    assert torch.equal(again, target.generate(more, attention_mask=mask, max_new_tokens=5, pad_token_id=0, do_sample=False))


def test_a_streamer_and_several_texts_of_a_prompt(gpu, capsys):
    target, tokenizer = gpu.put(tiny_llama(1)), word_tokenizer(range(64))
    ids = gpu.put(torch.tensor(ROWS[:1]))
    given = dict(max_new_tokens=12, pad_token_id=0, do_sample=False)
    text = integration.generate(target, ids, streamer=TextStreamer(tokenizer, skip_prompt=True), **given)
    assert capsys.readouterr().out and torch.equal(text, target.generate(ids, **given))
    assert torch.equal(integration.generate(target, ids, num_return_sequences=2, do_sample=True, top_k=1, max_new_tokens=12, pad_token_id=0), text.repeat(2, 1))


@pytest.mark.parametrize("name", ["LLaVA", "Gemma 3"])
def test_beams_that_are_shown_images(gpu, name):
    family = next(line for line in SEEING if line.name == name)
    target, inputs, given = family.model(), family.prompts(2), dict(num_beams=3, max_new_tokens=8, pad_token_id=0)
    text = target.generate(**inputs, **given)
    target = gpu.put(deepcopy(target))
    out = integration.generate(target, **gpu.put(inputs), **given, num_assistant_tokens=3)
    assert torch.equal(out.held, text)


@pytest.mark.share(2)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("draft", [lambda target: PromptLookupDraft(), lambda target: ModelDraft(perturbed(target))], ids=["lookup", "model"])
def test_beams(gpu, draft, sampled):
    target = tiny_llama(1)
    given = dict(num_beams=3, max_new_tokens=8, eos_token_id=3, pad_token_id=0, do_sample=sampled)
    torch.manual_seed(4)
    out = call(gpu, target, ROWS, draft(target), seed=None, **given)
    torch.manual_seed(4)
    assert torch.equal(out, target.generate(**gpu.put(padded(ROWS)), **given))


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "BLOOM", "GPT-Neo", "Falcon (ALiBi)", "Qwen3.5", "Mamba 2"])
def test_families(gpu, name):
    family = next((line for line in FAMILIES if line.name.startswith(name)), None)
    if family is None:
        pytest.skip(f"transformers has no {name} that generates from its cache")
    target = family.model("eager")
    out = call(gpu, target, ROWS, ModelDraft(perturbed(target)))
    assert torch.equal(out, target.generate(**gpu.put(padded(ROWS)), max_new_tokens=12, pad_token_id=0, do_sample=False))


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", ["T5", "BART", "Whisper", "Marian"])
def test_encoder_decoders(gpu, name):
    line = encoder_decoders.family(name)
    model, inputs = line.model(seed=1), encoder_decoders.sources(line.kind)
    draft = perturbed(model, 0.03)
    expected = encoder_decoders.speculate(model, inputs, ModelDraft(draft), 4).sequences.tolist()
    gpu.put(model)
    out = encoder_decoders.speculate(model, gpu.put(inputs), ModelDraft(gpu.put(draft)), 4)
    assert out.sequences.held.tolist() == expected


def test_embeddings_as_the_prompt_and_processors_that_keep_a_state(gpu):
    from tests.generate.test_stateful_processors import InContainers

    target = gpu.put(tiny_llama(1))
    ids = gpu.put(torch.tensor(ROWS[:1]))
    embeds, given = target.get_input_embeddings()(ids), dict(max_new_tokens=8, pad_token_id=0, do_sample=False)
    assert torch.equal(integration.generate(target, inputs_embeds=embeds, **given), target.generate(inputs_embeds=embeds, **given))
    from transformers import SynthIDTextWatermarkLogitsProcessor

    def watermark():
        host = SynthIDTextWatermarkLogitsProcessor(3, [654, 400, 836], 2**10, 0, 16, torch.device("cpu"))
        host.device, host.keys, host.sampling_table = ids.device, gpu.put(host.keys), gpu.put(host.sampling_table)
        return LogitsProcessorList([host])

    assert InContainers  # its arrays are the host's
    assert torch.equal(integration.generate(target, ids, logits_processor=watermark(), **given), target.generate(ids, logits_processor=watermark(), **given))


def test_mx_weights_without_a_kernel_for_the_device(gpu, monkeypatch):
    monkeypatch.setattr("hf_specdec.mx.ops.triton_runs", lambda *args: False, raising=False)
    target = mx.compress(tiny_llama(1), measure=False)
    expected = target.generate(**padded(ROWS), max_new_tokens=8, pad_token_id=0, do_sample=False)
    out = call(gpu, target, ROWS, max_new_tokens=8)
    assert out.held.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="cuda.*CPU"):
        mx.to_tiles(gpu.put(tiny_llama(1)))


# --- how often the host reads ---------------------------------------------------------------------------------------------


def waits_of_a_round(gpu, draft, rows=ROWS[:1], k=5, **options) -> tuple[dict[str, float], dict[str, float]]:
    """Copies that wait by place, per round, of calls of two lengths: to the host, and to the device."""
    counts, rounds = [], []
    for new in (6, 22):
        target = tiny_llama(1, attn="eager" if "output_attentions" in options else "sdpa")
        made = draft(target)
        gpu.put(target)
        for module in modules_of(made):
            gpu.put(module)
        inputs = gpu.put(padded(rows))
        with gpu.counted() as waits, gpu.counted("sent") as sent:
            out = integration.generate(target, **inputs, max_new_tokens=new, pad_token_id=0, **{"do_sample": False, **options}, speculative={"seed": 3}, assistant_model=made,
                                      num_assistant_tokens=k, return_dict_in_generate=True, use_cache=False)  # fmt: skip
        counts.append((waits, sent))
        rounds.append(len(out.speculation.rounds))
    return tuple({place: (count - first[place]) / (rounds[1] - rounds[0]) for place, count in second.items() if count > first[place]} for first, second in zip(*counts))


CASES = {"lookup": (lambda target: PromptLookupDraft(), {}), "automaton": (lambda target: SuffixAutomatonDraft(), {}), "model": (lambda target: ModelDraft(perturbed(target)), {}),
         "lookup, sampling": (lambda target: PromptLookupDraft(), SAMPLED), "model, sampling": (lambda target: ModelDraft(perturbed(target)), SAMPLED),
         "feature": (lambda target: make("feature", target, VARIANTS), {}), "feature_tree": (lambda target: make("feature_tree", target, VARIANTS), {}),
         "shared_kv": (lambda target: make("shared_kv", target, VARIANTS), {}), "dflash": (lambda target: make("dflash", target, VARIANTS), {}),
         "model tree": (lambda target: ModelTreeDraft(perturbed(target)), {}), "model tree, sampling": (lambda target: ModelTreeDraft(perturbed(target)), SAMPLED),
         "ngram, sampling": (lambda target: make("ngram, drawn", target, VARIANTS), SAMPLED), "cascade, sampling": (lambda target: make("cascade", target, VARIANTS), SAMPLED),
         "guidance": (lambda target: ModelDraft(perturbed(target)), {"guidance_scale": 1.5}), "guidance, trees": (lambda target: ModelTreeDraft(perturbed(target)), {"guidance_scale": 1.5}),
         "states": (lambda target: ModelDraft(perturbed(target)), {"output_hidden_states": True}), "attentions": (lambda target: ModelDraft(perturbed(target)), {"output_attentions": True}),
         "both, trees": (lambda target: ModelTreeDraft(perturbed(target)), {"output_hidden_states": True, "output_attentions": True}),
         "ngram_recycling": (lambda target: make("ngram_recycling", target, VARIANTS), {}), "mixture": (lambda target: make("mixture", target, VARIANTS), {})}


BETWEEN = ("cascade, sampling", "ngram, sampling")  # decide on the host in between


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_a_round(gpu, name):
    """For numbers from the device, but for n-gram recycling, which reads the likeliest successors of every place, too; and for none that go there."""
    draft, options = CASES[name]
    waits, sent = waits_of_a_round(gpu, draft, **options)
    assert not sent
    if name not in BETWEEN:
        assert sum(waits.values()) == (2 if name in ("ngram_recycling", "mixture") else 1), waits
        assert sum(count for place, count in waits.items() if place.startswith("proposal.py")) == 1


def test_the_stand_in_refuses_what_cuda_refuses(gpu):
    here, there, host = torch.arange(3, device="cuda"), torch.arange(3, device="cuda:1"), torch.arange(3)
    for mixed in (lambda: here + host, lambda: here + there, lambda: host[here], lambda: torch.cat([here, host]), lambda: torch.where(here > 0, here, host), lambda: here.float() @ host.float()):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        here.numpy()
    assert (here + torch.tensor(1)).tolist() == [1, 2, 3] and here[host].device == here.device  # as CUDA has it: numbers, and indices on the host


def test_the_stand_in_counts_copies_to_the_host(gpu):
    here = torch.arange(3, device="cuda")
    for copy in (lambda: here.tolist(), lambda: here.sum().item(), lambda: here.cpu(), lambda: bool(here.any()), lambda: here.nonzero(), lambda: here[here > 0], lambda: here.to("cpu"),
                 lambda: torch.equal(here, here), lambda: int(here[0])):
        with gpu.counted() as waits:
            copy()
        assert sum(waits.values()) == 1
    with gpu.counted() as waits:
        here + 1, here.to(here.device), torch.cat([here, here]), here.argmax(), here.float().softmax(-1)
    assert not waits


def test_the_stand_in_counts_copies_to_the_device(gpu):
    here, host = torch.arange(3, device="cuda"), torch.arange(3)
    for copy in (lambda: host.to("cuda:0"), lambda: torch.tensor([1], device="cuda"), lambda: here[host], lambda: here[[0, 1]],
                 lambda: here.new_tensor([1]), lambda: torch.tensor(1).to("cuda:0")):
        with gpu.counted("sent") as sent:
            copy()
        assert sum(sent.values()) == 1
    with gpu.counted("sent") as sent:
        host.pin_memory().to("cuda:0", non_blocking=True), here + 1, here + torch.tensor(1), torch.zeros(3, device="cuda"), here[0], here[:, None]
    assert not sent


def test_what_beams_look_at_and_a_static_cache(gpu):
    model, inputs = tiny_llama(attn="eager"), padded(ROWS)
    given = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    shown, static = dict(given, num_beams=3, output_hidden_states=True, output_attentions=True), dict(given, cache_implementation="static")
    expected, other = model.generate(**inputs, **shown), model.generate(**inputs, **static)
    model, inputs = gpu.put(model), gpu.put(inputs)
    out = integration.generate(model, **inputs, **shown, num_assistant_tokens=4)
    for own, wanted in zip(out.attentions, expected.attentions):
        torch.testing.assert_close(own[1].held[:, :, -1], wanted[1][:, :, -1], atol=1e-5, rtol=0)
    out = integration.generate(model, **inputs, **static, num_assistant_tokens=4)
    assert torch.equal(out.sequences.held, other.sequences) and out[CACHE].layers[0].keys.device.type == "cuda"
