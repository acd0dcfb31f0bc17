"""`warmup`: compile what `compile=True` will run, before it is needed."""

from __future__ import annotations

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from . import compat
from .assistants import kind_of
from .cached_model import CachedModel
from .compiled import WIDTHS
from .config import SpeculativeConfig
from .distributions import Sampler
from .drafts.base import Draft, Run
from .drafts.progress import progress
from .hints import check_int, what
from .kv_cache import FEWEST
from .passes import FEW
from .proposal import Proposal
from .registry import DRAFTS, load
from .seq2seq import Source
from .tap import Tap

READ = 45  # places of an encoder that are read
BEHIND = 8  # tokens that the first passes are behind: as many as it takes for a wrong mask to show


@torch.no_grad()
def warmup(model: PreTrainedModel, draft=None, config: SpeculativeConfig | dict | None = None, max_length: int = 512, batch: int = 1,
           nodes: int | None = None, sampling: dict | None = None, drafts: bool = True) -> int:
    """Compile the passes that calls with `compile=True` will need, with a progress bar on standard error; the number of passes made.

    model:      the target, after `enable(model)` if it is to be enabled: that changes the model's type, and for another type all is compiled anew.
    draft:      a draft model, or a `Draft` with models in it or one that reads the target's states.
    config:     of the calls: K (`max_auto_tokens` where it is "auto") says how wide the target's passes get.
    max_length: tokens of the longest text, prompt included. batch: rows at most; on a CPU all smaller numbers are compiled with them, but for functions of several steps.
    nodes:      drafted tokens per pass where the draft makes trees; None: K.
    sampling:   of the calls: what `generate` is told of it, such as {"do_sample": True, "top_k": 20}; the model's generation_config says the rest.
                A model drafts its K tokens in one function, which draws them; another temperature, top_p, min_p needs no other one.
    drafts:     False compiles the target's passes alone, as they are with that draft: those of several calls that share passes.

    Functions are kept with the model while it lives. What the compiler makes of them is kept by torch across processes
    ($TORCHINDUCTOR_CACHE_DIR, by default /tmp/torchinductor_<user>), and tracing alone is done again. Raises ValueError naming the argument
    for what is out of range, or as `generate` does for `sampling`, TypeError for what is no model; warns where a model does not compile.
    """
    if not isinstance(compat.unwrap(model), PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {what(model)}.")
    config = SpeculativeConfig.resolve(config or {})
    for name, value, most in (("max_length", max_length, 2**24), ("batch", batch, 2**16), ("nodes", 1 if nodes is None else nodes, WIDTHS[-1] - 1)):
        check_int(name, value, 1, most)
    if not isinstance(sampling or {}, dict):
        raise ValueError(f'sampling={sampling!r} must be a dict of arguments of generate, such as {{"do_sample": True, "top_k": 20}}.')
    if draft is not None and not isinstance(compat.unwrap(draft), (PreTrainedModel, Draft)):
        raise ValueError(f"draft: {type(draft).__name__} is no model and no draft; a draft that has a name alone has nothing to compile.")
    if (kind := kind_of(compat.unwrap(draft))) is not None:
        draft = load(DRAFTS, kind, "draft")(draft, model)
    k = config.max_auto_tokens if config.num_assistant_tokens == "auto" else config.num_assistant_tokens
    widest = next(width for width in WIDTHS if width > min(nodes or k, WIDTHS[-1] - 1))
    watching, runs = (draft.watching(), draft.models()) if isinstance(draft, Draft) else ((), [] if draft is None else [Run(draft, steps=True)])
    passes = _passes(Run(model, reads=watching), "target", widest, max_length, k, batch)
    sampler = _sampler(model, sampling or {})
    steps = k if sampler.traceable(model.device) is not None else 1
    passes += [each for run in runs if drafts for each in _passes(run, "assistant_model", _widest(run, k), max_length, steps, batch)]
    vocab = compat.traits_of(compat.unwrap(model), "target").vocab_size
    with progress("Compiling", passes) as items:
        for each in items:
            _compile(*each, vocab, sampler, config.compile or True)
    return len(passes)


def _sampler(model: PreTrainedModel, sampling: dict) -> Sampler:
    """What draws the tokens of a call `generate(**sampling)`."""
    def asked(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        return Sampler([list(logits_processor)], generation_config.do_sample)

    without = {"max_new_tokens": 1, "stop_strings": None}  # these would need a tokenizer
    if model.config.is_encoder_decoder:  # Whisper's own generate() would look for features
        return GenerationMixin.generate(compat.unwrap(model), encoder_outputs=_source(model, "target").outputs, custom_generate=asked, **without | sampling)
    token = torch.zeros((1, 1), dtype=torch.long, device=compat.device_of(model))
    return model.generate(token, attention_mask=token + 1, custom_generate=asked, **without | sampling)


def _widest(run: Run, k: int) -> int:
    """Places of a draft's widest pass. One that reads the target's states takes all that was committed in a round, and, unless it drafts one token after the other, what it drafts."""
    most = WIDTHS[1] if run.make is None else 1 + k if run.steps else 2 * k
    return next(width for width in WIDTHS if width >= min(most, WIDTHS[-1]))


def _passes(run: Run, role: str, widest: int, max_length: int, k: int, batch: int) -> list[tuple]:
    """(run, role, rows, places, slots, steps) of every pass up to `widest` places and `max_length` tokens; steps: how many passes over the same places
    the function makes."""
    slots = [FEWEST]
    while slots[-1] < max_length + widest:
        slots.append(2 * slots[-1])
    made = _blocks(run.model, role, widest, batch)
    made += [(batch, 1, 1 << i) for i in range(1, (k - 1).bit_length()) if 1 << i < k] if run.steps else []
    return [(run, role, rows, width, capacity, steps) for capacity in slots for rows, width, steps in made]


def _blocks(model: PreTrainedModel, role: str, widest: int, batch: int) -> list[tuple[int, int, int]]:
    """(rows, places, 1) of the passes that there are functions for."""
    of_one = [(1, width, 1) for width in WIDTHS if width <= widest]
    if batch == 1:
        return of_one
    if not CachedModel(model, 1, role, source=_source(model, role, batch), compile=True).compiled.any_rows:
        return [(batch, width, 1) for _, width, _ in of_one]
    kinds = {(width > 1, rows * width <= FEW): (rows, width, 1) for rows in range(batch, 1, -1) for width in range(widest, 0, -1)}
    return of_one + sorted(kinds.values())


def _compile(run: Run, role: str, batch: int, width: int, capacity: int, steps: int, vocab: int, sampler: Sampler, way: bool | str) -> None:
    """Run the pass once, behind a prompt."""
    cached = CachedModel(run.model, capacity, role, source=_source(run.model, role, batch), compile=way)
    if run.make is not None:
        cached.embed = lambda tokens: run.make(run.model, _blank(run, tokens.shape), tokens)
    cached.taps = [Tap(run.reads)] if run.reads else []
    cached.cache.plan.capacity = capacity
    text = torch.randint(cached.traits.vocab_size, (BEHIND + width,), generator=torch.Generator("cpu").manual_seed(0), device="cpu").tolist()
    rows = [text[: BEHIND + 1]] * batch
    cached.score([row[:-1] for row in rows])
    cached.commit([1] * batch)
    if steps > cached.compiled.most_steps():
        pass
    elif steps == 1:
        cached.score(rows, Proposal.from_lists([text[BEHIND + 1 :]] * batch, cached.device))
    else:
        root = torch.tensor(text[BEHIND:], device=cached.device).expand(batch, 1)
        uniform = torch.zeros((batch, steps), dtype=torch.float64)
        cached.several(root, [steps] * batch, vocab, sampler.traceable(cached.device), uniform, run.make and (run.make, _blank(run, (batch, 1))))
    cached.cache.release()


def _source(model: PreTrainedModel, role: str, batch: int = 1) -> Source | None:
    """What an encoder might have read, without padding, for a model that looks at it: its length does not matter."""
    if compat.traits_of(compat.unwrap(model), role).encoder == "none":
        return None
    states = torch.zeros((batch, READ, model.config.hidden_size), dtype=model.dtype, device=compat.device_of(model))
    return Source(model, None, None, BaseModelOutput(last_hidden_state=states), [])


def _blank(run: Run, shape: tuple[int, int]) -> torch.Tensor:
    return torch.zeros((*shape, run.width), dtype=run.model.dtype, device=run.model.device)
