"""Calls of several threads on one model: they take turns round by round, and rounds of those that can share a pass share one.

Every call runs its own loop, with its own draft, sampler, criteria and random stream, in a thread of its own; one of them runs at a time. Where all wait
for the target's logits, one pass scores what all of them propose (continuous batching): rows join and leave between rounds, so that no call
waits for the end of another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from .cached_model import CachedModel
from .drafts.base import Draft
from .media import Media
from .proposal import Proposal
from .tap import Tap, layers_of, show

APART = ("cascade", "dflash", "feature", "feature_parallel", "feature_tree", "horizontal_cascade", "jump_forward", "medusa", "mixture", "model", "model_tree", "ngram",
         "ngram_recycling", "parallel", "prediction", "prefixed", "prompt_lookup", "recycling", "retrieval", "sequential", "suffix_automaton", "translated",
         "uniform")  # drafts that neither read nor write the target's cache, but are told what its passes put out; others' calls make passes of their own, in turns
ON_CACHE = ("compressed", "early_exit")  # that read and write the target's cache: while its row is among others', they draft nothing
TOKENS = {"cpu": 16}  # of a pass that calls share, all rows together, up to which K "auto" goes; from there on the CPUs' kernels take longer with every token
WIDE = 256            # the same elsewhere
CHUNK = 512           # tokens of a prompt that are read before the other calls go on
_here = threading.local()


class Joint:
    """What the threads share. `monitor` is held by the one that runs.

    seats: of the calls that run. coming: calls that wait for the monitor.
    rows:  the targets that share passes, in the order of their rows in the cache of `shared`, which makes them.
    """

    def __init__(self):
        self.monitor, self.door = threading.Condition(), threading.Lock()
        self.seats: list[Seat] = []
        self.coming = 0
        self.rows: list[Member] = []
        self.shared: CachedModel | None = None

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """For the length of a call in this thread."""
        with self.door:
            self.coming += 1
        with self.monitor:
            with self.door:
                self.coming -= 1
            seat = _here.seat = Seat(self)
            self.seats.append(seat)
            try:
                yield
            finally:
                _here.seat = None
                self.seats.remove(seat)
                for member in [each for each in self.rows if each.seat is seat]:
                    self.leave(member)
                self.monitor.notify_all()

    def arrive(self, seat: Seat) -> None:
        """Wait until every other call waits, too; whoever finds that makes the pass for all."""
        seat.waits = True
        while seat.waits:
            if self.coming or not all(each.waits for each in self.seats):
                self.monitor.wait()
                continue
            self._pass()
            for each in self.seats:
                each.waits = False
            self.monitor.notify_all()

    def _pass(self) -> None:
        if not self.rows:
            return
        texts, drafted = zip(*(each.asked for each in self.rows))
        self.shared.lengths = [each.lengths[0] for each in self.rows]
        self.shared.cache.plan.limit = max(each.cache.plan.limit for each in self.rows)
        layers = layers_of([tap for each in self.rows for tap in each.taps])
        self.shared.taps = [Tap(layers)] if layers else []
        begin = perf_counter()
        try:
            logits = self.shared.score(list(texts), Proposal.from_lists(list(drafted), self.shared.device))
            answers = [logits[b : b + 1, : len(own) + 1] for b, own in enumerate(drafted)]
            self._show([len(own) + 1 for own in drafted])
        except Exception as error:  # of all of them: out of memory, say
            answers = [error] * len(texts)
        for each, answer in zip(self.rows, answers):
            each.answer, each.seconds, each.calls = answer, each.seconds + perf_counter() - begin, each.calls + 1

    def _show(self, widths: list[int]) -> None:
        """Tell the taps of every call of its row's part of the pass, the first widths[b] places."""
        for tap in self.shared.taps:
            (states, starts), = tap.take(len(widths))
            parts = dict(zip(tap.layers, states.chunk(len(tap.layers), dim=-1)))
            for b, each in enumerate(self.rows):
                show(each.taps, [parts[layer][b : b + 1, : widths[b]] for layer in layers_of(each.taps)], starts[b : b + 1])

    def join(self, member: Member) -> None:
        """Its row goes behind the others'."""
        if self.shared is None:
            self.shared = CachedModel(member.model, 0, "target", member.traits, compile=member.compiled is not None and member.compiled.way)
        self.shared.cache.add(member.cache)
        member.cache.release()
        self.rows.append(member)

    def part(self, member: Member) -> None:
        """It runs alone again, and its row goes back into its own cache."""
        layers = [(i, *(each[None] for each in part), 0) for i, part in enumerate(member.row(0)) if part is not None]
        self.leave(member)
        member.cache.load(layers, [list(range(member.lengths[0]))], member.device)

    def leave(self, member: Member) -> None:
        rows = [b for b, each in enumerate(self.rows) if each is not member]
        self.rows = [self.rows[b] for b in rows]
        if rows:
            self.shared.cache.keep(torch.tensor(rows, device=self.shared.device))
        else:
            self.shared = None


class Seat:
    """A call that takes part. waits: for the others."""

    def __init__(self, joint: Joint):
        self.joint, self.waits = joint, False


def seat() -> Seat | None:
    """That of the call which this thread runs."""
    return getattr(_here, "seat", None)


class Member(CachedModel):
    """The target of one call that takes part: its prompt is read in passes of its own; then, if others run and it can, its row joins theirs. One that is compiled, and one
    whose cache the draft writes, has it back when it runs alone again.

    free:  whether K may follow from how many calls there are, and a draft that branches propose chains.
    rests: whether the draft proposes nothing while the row is among others'.
    asked: the row's tokens, and those that are proposed. answer: their logits [1, N+1, V], or what has gone wrong.
    """

    def __init__(self, seat: Seat, draft: Draft, free: bool, model, limit: int, role: str, traits, source=None, compile: bool | str = False, place=None):
        super().__init__(model, limit, role, traits, source, compile, place)
        self.seat, self.free, self.asked, self.answer = seat, free, None, None
        drafts = list(draft.all())
        self.rests = any(each.name in ON_CACHE for each in drafts)
        kinds = all(each.name in (*APART, *ON_CACHE) for each in drafts) and (free or not (self.rests or any(each.may_branch for each in drafts)))
        self.joins = kinds and source is place is None and not (traits.states or traits.own_cache or traits.indexed or traits.encoder != "none" or self.cache.plan.aligned)

    @property
    def joined(self) -> bool:
        return self in self.seat.joint.rows

    @property
    def chains(self) -> bool:
        return self.joined or self.joins and len(self.seat.joint.seats) > 1

    @property
    def new(self) -> bool:
        """Whether the time of the last pass says nothing: others have been served in it."""
        return len(self.seat.joint.seats) > 1 or super().new

    def look(self, media: Media | None, chunk: int | None = None) -> None:
        super().look(media, chunk or (None if self.compiled is not None else CHUNK))

    def together(self, rows: list[list[int]], k: list[int]) -> list[int]:
        k, calls = super().together(rows, k), len(self.seat.joint.seats)
        if calls == 1 and self.joined and (self.rests or self.compiled is not None):
            self.seat.joint.part(self)
        if calls == 1 or not (self.free and self.joins):
            return k
        if self.rests:
            return [0] * len(k)
        return [min(own, max(TOKENS.get(self.device.type, WIDE) // calls - 1, 0)) for own in k]

    def score(self, rows: list[list[int]], proposal: Proposal | None = None) -> torch.Tensor:
        joint, chain = self.seat.joint, proposal is None or proposal.tree.is_chain
        if not self.joined and len(joint.seats) > 1 and chain and self._can_join(rows):
            joint.join(self)
        if not self.joined:
            joint.arrive(self.seat)
            return super().score(rows, proposal)
        self.asked, self.fresh = (rows[0], [] if proposal is None else proposal.listed()[0][: proposal.sizes[0]]), [1]
        joint.arrive(self.seat)
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _can_join(self, rows: list[list[int]]) -> bool:
        """Whether nothing but the root of a single row is left to be read, and nothing but text has been."""
        alone = self.joins and len(rows) == 1 and self.lengths == [len(rows[0]) - 1] and self.lengths[0] > 0
        return alone and self.media is None and not (self.sight or any(self.ahead) or self.per_token is not None or self.cache.seen)

    def feed(self, rows: list[list[int]]) -> None:
        if any(rows) and not self.joined:  # a part of a prompt
            self.seat.joint.arrive(self.seat)
        super().feed(rows)

    def row(self, b: int, tokens=(), last: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self.joined:
            return super().row(b, tokens, last)
        return self.seat.joint.shared.cache.row(self.seat.joint.rows.index(self), self.lengths[0], last=False)

    def release(self) -> None:
        if self.joined:
            self.seat.joint.leave(self)
        super().release()
