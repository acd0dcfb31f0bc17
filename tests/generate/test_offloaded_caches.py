"""Offloaded caches: the text is plain generate's, a device holds two layers' keys and values at most, and what comes back is what transformers would have left.

On a stand-in for a GPU, whose copies run as late as the order of its streams allows: what reads too soon reads something else.
"""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_specdec import integration
from hf_specdec.caches import CACHE
from hf_specdec.drafts import EarlyExitDraft, NGramRecyclingDraft
from hf_specdec.offloaded_cache import Host, Lane, OffloadedLayer
from tests.architectures import FAMILIES
from tests.encoder_decoders import FAMILIES as READERS, sources
from tests.generate.test_static_caches import KINDS, ROWS, SHARED
from tests.helpers import padded, perturbed, small_vocabulary_llama, tiny_llama
from tests.pretend_gpu import GpuTensor, PretendGpu

NAMES = ["offloaded", "offloaded_static", "offloaded_hybrid"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Stream:
    """Copies that have been asked for and have not run."""

    active: "Stream | None" = None
    current: dict = {}

    def __init__(self, device=None):
        self.waiting = []

    def synchronize(self):
        while self.waiting:
            self.waiting.pop(0)()

    def wait_stream(self, other):
        other.synchronize()

    @classmethod
    def of(cls, device=None):
        return cls.active or cls.current.setdefault(str(device), cls())

    @classmethod
    @contextmanager
    def running(cls, stream):
        cls.active, before = stream, cls.active
        yield
        cls.active = before


class LateGpu(PretendGpu):
    """Copies between the host and a device that need not block run when something waits for their stream."""

    def __enter__(self):
        for name, stands in (("Stream", Stream), ("current_stream", Stream.of), ("stream", Stream.running)):
            self.patches.enter_context(patch.object(torch.cuda, name, stands))
        self.patches.enter_context(patch.object(Stream, "current", {}))
        super().__enter__()
        self.patches.enter_context(patch.object(torch.cuda, "synchronize", lambda *_: [stream.synchronize() for stream in Stream.current.values()]))
        return self

    def _copied(self, func, args, kwargs, wanted):
        late = func.overloadpacket is torch.ops.aten.copy_ and (kwargs.get("non_blocking") or args[2:] == (True,))
        into, source = args[:2] if late else (None, None)
        if not late or isinstance(into, GpuTensor) == isinstance(source, GpuTensor):
            return super()._copied(func, args, kwargs, wanted)
        if isinstance(into, GpuTensor):
            Stream.of(into.device).waiting.append(lambda: into.held.copy_(source))
        else:
            taken = source.held.clone()
            Stream.of(source.device).waiting.append(lambda: into.copy_(taken))
        return into


@pytest.fixture
def gpu():
    with LateGpu() as pretended:
        yield pretended


def ours(gpu, model, inputs, draft=None, **options):
    gpu.put(model)
    if isinstance(draft, torch.nn.Module):
        gpu.put(draft)
    speculative = {"seed": 3} if options.get("do_sample") else True
    return integration.generate(model, **gpu.put(dict(inputs)), **SHARED | options, speculative=speculative, assistant_model=draft, num_assistant_tokens=4)


def on_host(part: torch.Tensor) -> torch.Tensor:
    return part.held if isinstance(part, GpuTensor) else part


def same_numbers(one, other, mask: torch.Tensor) -> None:
    """Of an offloaded cache and one that is not: the first of its layers that it offloads is on the device, the others are the host's, and all are read on the device."""
    length, first = int(on_host(torch.as_tensor(one.get_seq_length()))), True
    shown = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1).bool()
    assert type(one) is type(other) and one.offloading and length == int(other.get_seq_length())
    for own, theirs in zip(one.layers, other.layers):
        assert type(own) is type(theirs) and own.device.type == "cuda"
        stays = one.only_non_sliding and own.is_sliding
        assert (own.keys.device.type, own.values.device.type) == (("cuda", "cuda") if first or stays else ("cpu", "cpu"))
        first &= stays
        held = min(length, own.keys.shape[2], theirs.keys.shape[2])
        for part, wanted in ((own.keys, theirs.keys), (own.values, theirs.values)):
            last, wanted = (one[:, :, : min(length, one.shape[2])][:, :, -held:] for one in (on_host(part), wanted))  # ours may have recorded more than a window
            kept = shown[:, None, length - held :, None]
            torch.testing.assert_close(last * kept, wanted * kept, atol=2e-3, rtol=0)


DRAFTS = {"lookup": lambda model: None, "model": lambda model: perturbed(model, 0.02), "tree": lambda model: NGramRecyclingDraft(), "early exit": lambda model: EarlyExitDraft(model, 1)}


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "batch"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", NAMES)
def test_by_name(gpu, kind, rows, draft, name):
    model, inputs = KINDS[kind](), padded(rows)
    like = {"offloaded": {}}.get(name, {"cache_implementation": "static"})
    theirs = copy.deepcopy(model).generate(**inputs, **SHARED, **like)
    out = ours(gpu, model, inputs, DRAFTS[draft](model), cache_implementation=name)
    assert out.sequences.held.tolist() == theirs.sequences.tolist() and out.speculation.proposed
    same_numbers(out[CACHE], theirs[CACHE], inputs["attention_mask"])


STEPS = {"arrive": (Lane, "arrive"), "settle": (Lane, "settle"), "wait": (Stream, "wait_stream"), "window": (Host, "__init__")}


@pytest.mark.parametrize("step", STEPS)
def test_what_leaves_out_a_step_is_seen(gpu, step):
    """A negative control: without any of the waits, or with a window of two tokens, numbers are others, of the text or of the cache that comes back."""
    kind, name = STEPS[step]
    if step == "window":
        new = lambda self, device, windows, before=Host.__init__: before(self, device, dict.fromkeys(range(2), 2))  # noqa: E731
    elif step == "wait":  # of a lane for what the device writes
        new = lambda self, other, before=Stream.wait_stream: before(self, other) if self in Stream.current.values() else None  # noqa: E731
    else:
        new = lambda self: None  # noqa: E731
    for seed in range(4):
        model, inputs = tiny_llama(seed), padded(ROWS)
        theirs = model.generate(**inputs, **SHARED)
        with patch.object(kind, name, new):
            out = ours(gpu, model, inputs, NGramRecyclingDraft(), cache_implementation="offloaded")
        try:
            assert out.sequences.held.tolist() == theirs.sequences.tolist()
            same_numbers(out[CACHE], theirs[CACHE], inputs["attention_mask"])
        except AssertionError:
            return
    pytest.fail("nothing is seen of it")


def test_sampled_and_in_beams(gpu):
    kind, inputs = lambda: small_vocabulary_llama(2, vocab=12), padded(ROWS)
    for options in (dict(do_sample=True), dict(num_beams=3)):
        expected = integration.generate(kind(), **inputs, **SHARED | options, speculative={"seed": 3} if "do_sample" in options else True, num_assistant_tokens=4).sequences
        assert ours(gpu, kind(), inputs, **options, cache_implementation="offloaded").sequences.held.tolist() == expected.tolist()


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda config: DynamicCache(offloading=True), lambda config: DynamicCache(config=config, offloading=True),
                                  lambda config: DynamicCache(config=config, offloading=True, offload_only_non_sliding=True),
                                  lambda config: StaticCache(config=config, max_cache_len=80, offloading=True)], ids=["alike", "dynamic", "no windows", "static"])  # fmt: skip
def test_a_caller_s_own_is_filled_and_continued(gpu, kind, make):
    model, inputs = KINDS[kind](), padded(ROWS[:1])
    plain, cache = copy.deepcopy(model), make(model.config)
    first = ours(gpu, model, inputs, **{CACHE: cache})
    assert first[CACHE] is cache and first.sequences.held.tolist() == plain.generate(**inputs, **SHARED).sequences.tolist()
    again = dict(input_ids=torch.cat([first.sequences.held, torch.tensor([[9, 8, 7]])], dim=1))
    expected = plain.generate(**again, **SHARED)
    out = ours(gpu, model, again, perturbed(plain, 0.02), **{CACHE: cache})
    assert out.sequences.held.tolist() == expected.sequences.tolist() and int(on_host(torch.as_tensor(cache.get_seq_length()))) == expected.sequences.shape[1] - 1


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("line", [line for line in FAMILIES if line.window == "states" and not line.name.startswith("Inkling")], ids=lambda line: line.name)
def test_of_models_that_carry_states(gpu, line):
    model, inputs = line.model("eager"), padded(ROWS[:1])
    expected = model.generate(**inputs, **SHARED).sequences
    try:
        out = ours(gpu, model, inputs, cache_implementation="offloaded")
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"the stand-in: {error}")
    assert out.sequences.held.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_of_encoder_decoders(gpu, name):
    line = next(line for line in READERS if line.name == name)
    model, inputs = line.model(), sources(line.kind)
    theirs = copy.deepcopy(model).generate(**inputs, **SHARED)
    out = ours(gpu, model, inputs, perturbed(model, 0.02), cache_implementation="offloaded")
    assert out.sequences.held.tolist() == theirs.sequences.tolist()
    same_numbers(out[CACHE].self_attention_cache, theirs[CACHE].self_attention_cache, torch.ones(3, 1).long())


def test_a_device_holds_what_two_layers_may_see(gpu):
    """And sends the tokens of a window alone, where a layer has one."""
    model, inputs, sent, most = KINDS["Gemma 3"](), padded(ROWS[:1]), [], []
    before = Lane.send

    def send(self, parts, begin, end):
        sent.append(end - begin)
        return before(self, parts, begin, end)

    def update(self, *args, own=OffloadedLayer.update, **kwargs):
        seen = own(self, *args, **kwargs)
        most.append(sum(layer.sent is not None for layer in self.host.layers.values()))
        assert not isinstance(self.keys, GpuTensor) and isinstance(seen[0], GpuTensor)
        return seen

    with patch.object(Lane, "send", send), patch.object(OffloadedLayer, "update", update):
        ours(gpu, model, inputs, cache_implementation="offloaded")
    assert max(most) == 1 and max(sent[::2]) <= 6 < max(sent[1::2])


def test_on_the_host_it_is_where_it_is():
    """A model on the CPU: nothing is copied, and a cache of the caller's own comes back as it is."""
    model, inputs, cache = tiny_llama(), padded(ROWS), DynamicCache(offloading=True)
    with patch.object(Lane, "send", None):
        out = integration.generate(model, **inputs, **SHARED, **{CACHE: cache}, speculative=True)
        by_name = integration.generate(model, **inputs, **SHARED, cache_implementation="offloaded", speculative=True)
    expected = model.generate(**inputs, **SHARED).sequences
    assert torch.equal(out.sequences, expected) and torch.equal(by_name.sequences, expected)
    assert out[CACHE] is cache and by_name[CACHE].offloading and cache.get_seq_length() == expected.shape[1] - 1
