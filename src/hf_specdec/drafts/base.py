"""What every draft is: something that proposes tokens for the rows of a batch.

A draft reads the `Context` (the committed tokens, live) and returns a `Proposal`. It may keep a cache or a table of its
own. It does not know the target's cache, the acceptance rule or when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from transformers.generation import CandidateGenerator

from ..hints import by_name
from ..proposal import Proposal, Verdict

if TYPE_CHECKING:
    from ..cached_model import CachedModel
    from ..distributions import Sampler
    from ..draft_stop import StopRule
    from ..media import Media
    from ..seq2seq import Source

_in_use: WeakValueDictionary[int, Draft] = WeakValueDictionary()  # by id; no attribute, for a copy of one that is in use is not in use
Guess = tuple[int, Hashable | None, float]


class Run(NamedTuple):
    """A model as a draft runs it, for `warmup` to compile.

    make:  makes the inputs of a pass, make(model, states [B, L, width], tokens [B, L]) -> [B, L, H]; None: its own embedding.
    reads: the layers whose states are read.
    steps: whether it drafts one token after the other.
    """

    model: Any
    make: Callable | None = None
    width: int = 0
    reads: tuple[int, ...] = ()
    steps: bool = False


@dataclass
class Context:
    """A draft's view of the call. `rows` changes as tokens are committed; everything else stays.

    rows:       token ids of every active row, prompt included, padding excluded. The last one is the root: committed, but
                not yet seen by the target's cache. Where the cache is returned, a row that has ended is there once more, its k 0.
    max_length: most tokens a row can ever hold (prompt + new).
    vocab_size: V of the target; every proposed id is below it.
    device:     where the proposal's tensors have to be.
    sampler:    turns logits into the law that the target samples from (temperature, top-k, ...); a draft that samples uses
                it for its own logits, so that q resembles p. `sampler.do_sample` is False for greedy decoding.
    noise:      noise(stream, n) -> float64 [B, n] in [0, 1): fresh uniform numbers for this round, per row, a function of
                (row seed, round, stream, index) alone. Drafts use streams named "draft...".
    source:     what the target's encoder has read, if it has one.
    stop:       when a draft that `stops` ends before K; None: at K.
    target:     the target's `CachedModel`, for a draft that runs the target's own layers on the target's own cache; None
                where there is no loop of ours.
    timed:      False where a run has to repeat exactly: decide nothing by measured time.
    stock:      stock assisted decoding asks: it takes chains, and shows no states.
    outer:      the context that a draft inside another one was made of; its own rows may run ahead of that one's.
    media:      what the prompts show beside their text; None for nothing.
    barred:     rows whose text, as far as it runs ahead, the target cannot write.
    agree:      agree(value) -> the number that all processes which run the models together go on with; for what time or chance decides.
    """

    rows: list[list[int]]
    max_length: int
    vocab_size: int
    device: torch.device
    sampler: Sampler
    noise: Callable[[str, int], torch.Tensor]
    source: Source | None = None
    stop: StopRule | None = None
    target: CachedModel | None = None
    timed: bool = True
    stock: bool = False
    outer: Context | None = None
    media: Media | None = None
    barred: set[int] = field(default_factory=set)
    agree: Callable[[float], float] = float

    @property
    def chains(self) -> bool:
        """Whether chains alone are taken: by stock assisted decoding, and by passes that calls share."""
        return self.stock or self.target is not None and self.target.chains

    def text(self, b: int, drafted: list[int]) -> torch.Tensor | None:
        """Row b and what is drafted after it, as `Sampler.text` has them: what is not committed counts as drafted."""
        root, barred = self, b in self.barred
        while root.outer is not None:
            root = root.outer
            barred = barred or b in root.barred
        row, known = self.rows[b], len(root.rows[b])
        return None if barred else self.sampler.text(b, row[:known], row[known:] + drafted, self.device)

    def allows(self, b: int, drafted: list[int]) -> bool:
        """Whether the target can write these tokens after row b: none before the last ends the text, and no processor that looks at prefixes
        rules one out."""
        if not self.sampler.needs_prefix:
            return True
        texts = (self.text(b, drafted[:i]) for i in range(len(drafted)))
        return all(text is not None and bool(self.sampler.leaves(b, text, self.vocab_size)[token]) for text, token in zip(texts, drafted))

    def counted(self, proposal: Proposal) -> Proposal:
        """The proposal without what the decoder of an encoder-decoder would see at another place than it will have."""
        if self.source is None or self.source.blank is None:
            return proposal
        fresh = [row[length:] for row, length in zip(self.rows, self.target.lengths or [0] * len(self.rows))]
        drafted = [[*row, self.source.blank] for row in proposal.listed()]
        return proposal.within([0 if self.source.blank in own else row.index(self.source.blank) + 1 for own, row in zip(fresh, drafted)])

    def of(self, part: int) -> Context:
        """For part number `part` of a draft that is made of several: the same rows, live, and random streams of its own."""
        return replace(self, noise=lambda stream, n: self.noise(f"draft:{part}/{stream}", n))

    @property
    def compiles(self) -> bool | str:
        """Whether the passes of models are compiled, and how (`SpeculativeConfig.compile`)."""
        return self.target is not None and self.target.compiled is not None and self.target.compiled.way

    @property
    def texts(self) -> list[list[int]]:
        """The rows, each behind the text that the target's encoder has read, if any: where a lookup may look."""
        return [read + row for read, row in zip(self.source.tokens, self.rows)] if self.source and self.source.tokens else self.rows


class Draft(CandidateGenerator):
    """Base class. A new draft overrides `propose`, and `start`, `evidence`, `observe`, `commit`, `keep` where it has a
    state.

    name:         the word shown in the trace.
    cost_ratio:   c of Leviathan et al. 2023: cost of drafting one token / cost of one target step, None = not known.
    trusted:      True spares the checks of every proposal (ids in range, laws that sum to 1); the package's own drafts say
                  so, because the conformance tests check them.
    may_branch:   whether it may propose trees, and not chains alone: what takes no trees is refused before any work.
    stops:        whether the draft, or one inside it that is shown `Context.stop`, drafts token by token and heeds it.
    reads_pass:   whether `commit` is about the nodes of the target's pass, whoever proposed them, as `observe` is; of a draft inside
                  another one it is else about the nodes of its own proposal, where it made one. True of a draft with others inside.
    reads_prompt: whether `read` wants the target's logits over the prompt.
    learns_in_stock: whether `observe` is called under stock assisted decoding, too, which calls no `commit`.
    parts:        the drafts inside this one.
    calls, forward_seconds: forwards of a draft model in this call and the time in them, its prompt pass included.
    """

    name = "draft"
    cost_ratio: float | None = None
    trusted = False
    may_branch = False
    stops = False
    reads_pass = False
    reads_prompt = False
    learns_in_stock = False
    parts: tuple[Draft, ...] = ()
    calls = 0
    forward_seconds = 0.0

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = by_name(cls.__init__)

    def start(self, context: Context) -> None:
        """Called once, before the first round; the rows are the prompts."""

    def evidence(self, context: Context) -> list[int]:
        """Per row, how strong the case for drafting is before anything is drafted: -1 nothing to propose, else a small
        number; acceptance is measured per number (the length of the match, for lookups)."""
        return [0] * len(context.rows)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        """At most k[b] candidate tokens for row b. More than that, up to 256 nodes, are judged as well, but what lies deeper than the row has room for is cut off."""
        raise NotImplementedError(f"{type(self).__name__} has no propose(context, k), which every draft defines.")

    def most_nodes(self, k: int) -> int:
        """How many nodes `propose` returns at most where K is k."""
        return max([k, *(part.most_nodes(k) for part in self.parts)])

    def prior(self, strength: int) -> tuple[float, float]:
        """Acceptance rates expected of that evidence before anything is measured: of the first drafted token, and of a token whose forerunners were accepted."""
        return 0.7, 0.7

    def schedule(self, most: int, timed: bool) -> Any:
        """What decides on K where it is "auto", at most `most`, by the clock if `timed`, with the methods of `schedule.FixedSchedule`; None: `schedule.AutoSchedule`."""
        return None

    def watching(self) -> tuple[int, ...]:
        """The target's layers whose hidden states the draft, or one inside it, reads, ascending; their count stands for what comes after the final norm."""
        return tuple(sorted({layer for part in self.parts for layer in part.watching()}))

    def models(self) -> list[Run]:
        """Every model that the draft, or one inside it, runs."""
        return [each for part in self.parts for each in part.models()]

    def relative_cost(self, target) -> float | None:
        """c before anything is timed; `target` is the target model."""
        return self.cost_ratio

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        """Called after every target pass, before the rows grow: the target's own logits [B, N+1, V], unprocessed, after the root and after every proposed token (read them, do not change them). For drafts that learn from them."""

    def read(self, firsts: list[int], logits: torch.Tensor) -> None:
        """Called in the prompt pass, before `observe`, where `reads_prompt`: the target's logits [B, n, V] after n places of the
        prompts, of which the first is position firsts[b] of row b; what lies beyond the row's end is padding. The drafts inside are told."""
        for part in self.parts:
            if part.reads_prompt:
                part.read(firsts, logits)

    def commit(self, verdict: Verdict) -> None:
        """Called after every verification, before the rows grow. Drafts that can read all they need from `context.rows`
        at the next `propose` leave it alone."""

    def keep(self, rows: list[int]) -> None:
        """Only these rows (indices into the present batch) go on."""

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """Only the first lengths[b] tokens of row b stand; the rows have been cut already. For a draft inside another one, which lets it go on from tokens that may not be committed. Starting again is always right, and slow for a long text."""
        self.start(context)

    # --- one token at a time, for trees that several drafts grow together (`growth.Grower`) ---------------------------

    def place(self, b: int) -> Any:
        """Where row b stands after `evidence`, in whatever form `guesses` and `step` understand; None: nothing to say."""
        return None

    def guesses(self, place: Any) -> list[Guess]:
        """(token, kind, rate): the likeliest next tokens, at most 8. How often guesses of a kind are right is measured; `rate` is what to expect before, and of kind None what counts."""
        return []

    def step(self, place: Any, token: int) -> Any:
        """The place that `token` leads to, or None."""
        return None

    def all(self) -> Iterator[Draft]:
        """This draft and those inside it, at every depth."""
        yield self
        for part in self.parts:
            yield from part.all()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of a call, at the end of which the draft is `finish`ed. ValueError if it, or one inside it, is in another one, or is inside it twice."""
        ours: dict[int, Draft] = {}
        for draft in self.all():
            if id(draft) in ours:
                raise ValueError(f"assistant_model: one and the same {type(draft).__name__} is in this {type(self).__name__} twice. Make two of it.")
            if id(draft) in _in_use:
                raise ValueError(f"assistant_model: this {type(draft).__name__} is in use by another call. Give every thread, and a call inside a call, a draft of its own (copy.deepcopy makes one).")
            ours[id(draft)] = draft
        try:
            _in_use.update(ours)
            yield
        finally:
            for own in ours:
                _in_use.pop(own, None)  # what Ctrl-C keeps here goes with the draft: another one at its address is free
            self.finish()

    def finish(self) -> None:
        """The call is over, also after an error or Ctrl-C: release everything that belongs to it, then call this one."""
        self._stock = self._stock_proposal = None

    # --- the same object under stock assisted decoding --------------------------------------------------------------

    num_assistant_tokens = 5
    _stock: Context | None = None
    _stock_proposal: Proposal | None = None

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """transformers' `CandidateGenerator` protocol, batch 1, greedy: input_ids [1, L] -> ([1, L + n], None)."""
        from ..distributions import Sampler  # the trunk above is enough for a draft's own work

        if input_ids.shape[0] != 1:
            raise ValueError("get_candidates serves stock assisted decoding, which has batch size 1.")
        row = input_ids[0].tolist()
        stock = self._stock
        if stock is None or row[: len(stock.rows[0])] != stock.rows[0]:
            self._stock = stock = Context([row], 2**31, self._stock_vocab_size(), input_ids.device, Sampler.greedy(), _no_noise, stock=True)
            self.start(stock)
        else:
            stock.rows[0].extend(row[len(stock.rows[0]):])
        k = [0 if evidence < 0 else self.num_assistant_tokens for evidence in self.evidence(stock)]
        self._stock_proposal = proposal = self.propose(stock, k)
        return torch.cat([input_ids, proposal.tokens[:, : proposal.sizes[0]]], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int) -> None:
        """Stock assisted decoding shows its logits here; they follow the tokens of the last `get_candidates`. What was committed is seen there."""
        if self.learns_in_stock and scores is not None:
            self.observe(self._stock_proposal, scores)

    def _stock_vocab_size(self) -> int:
        return min((part._stock_vocab_size() for part in self.parts), default=2**31)


def _no_noise(stream: str, n: int) -> torch.Tensor:
    raise ValueError("this draft draws tokens at random; stock assisted decoding has no place for its probabilities.")
