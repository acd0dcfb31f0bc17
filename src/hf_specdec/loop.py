"""The loop: draft, verify, commit. Leviathan et al. 2023, Algorithm 1, for ragged batches, chains and trees alike."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from .acceptance.base import Acceptance
from .cached_model import CachedModel
from .distributions import Sampler
from .law import Law
from .drafts.base import Context, Draft
from .noise import Noise
from .proposal import Proposal, fetched
from .sequences import Sequences
from .trace import Round, SpeculationTrace, probabilities
from .uploads import upload


class SpeculativeLoop:
    """One call. The pieces are made by `integration`; this class only says in which order they act."""

    def __init__(self, target: CachedModel, draft: Draft, acceptance: Acceptance, sampler: Sampler, schedule, sequences: Sequences,
                 noise: Noise, context: Context, trace: SpeculationTrace, want_scores: bool = False, want_logits: bool = False,
                 want_cache: bool = False):
        self.target, self.draft, self.acceptance, self.sampler = target, draft, acceptance, sampler
        self.schedule, self.sequences, self.noise, self.context, self.trace = schedule, sequences, noise, context, trace
        self.want_scores, self.want_logits, self.want_cache = want_scores, want_logits, want_cache
        self.cached_rows: dict[int, list] = {}

    @torch.no_grad()
    def run(self, begin: Callable[[], object] = int) -> None:
        """begin: called once, when the draft has refused nothing."""
        with self.draft.in_use():
            self.draft.start(self.context)
            begin()
            while self.sequences.active:
                self.round()

    def round(self) -> None:
        """Draft, score all candidates in one target forward (the prompt pass, too, at first), commit a prefix and a token of its own."""
        begin = perf_counter()
        self.noise.round += 1
        rows = self.sequences.tokens
        room = self.target.room(rows, self.sequences.room())

        k = self.target.together(rows, self.schedule.next_k(self.draft.evidence(self.context), room))
        proposal = self.draft.propose(self.context, k)
        if not self.draft.trusted:
            Proposal.check(proposal, len(rows), self.context.vocab_size, self.draft.name)
            proposal = proposal.within([left - 1 for left in room])
        proposal = self.context.counted(proposal)
        drafted = perf_counter()

        logits = self.target.score(rows, proposal).to(self.context.device)
        verified = perf_counter()
        self.draft.observe(proposal, logits)

        law = self.sampler(logits, [size + 1 for size in proposal.sizes], self._prefix(proposal), proposal.tree.parents)
        coins = self.noise.coins(len(proposal.tree)) if self.acceptance.samples else None
        verdict = self.acceptance.verdict(proposal, law, None if coins is None else coins[:, 1:])
        token = verdict.token(None if coins is None else coins[:, 0])
        numbers = fetched(proposal, verdict, token)
        self.draft.commit(verdict)
        accepted = self._emit(proposal, verdict.on_path, token, law, self.target.raw(logits) if self.want_logits else logits, numbers)

        end = perf_counter()
        seconds = None if self.noise.round == 1 or self.target.new else self.context.agree(end - begin)
        self.schedule.observe(proposal.sizes, accepted, seconds, self.target.told)
        self.trace.clock(drafted - begin, verified - drafted, end - verified, self.target.seconds + self.draft.forward_seconds)

    def _prefix(self, proposal: Proposal):
        """prefix(b, i): row b up to and including node i, as `Sampler.text` has it."""
        device, ended, texts = self.sampler.device or self.context.device, [row.ended for row in self.sequences.active], {}
        def prefix(b: int, node: int) -> torch.Tensor | None:
            if b not in texts and not ended[b]:
                texts[b] = upload([self.sequences.tokens[b]], device), [0, *proposal.listed()[b]]
            return None if ended[b] else self.sampler.text(b, texts[b][0], [texts[b][1][step] for step in proposal.tree.path(node)], device)
        return prefix

    def _emit(self, proposal: Proposal, on_path: torch.Tensor, token: torch.Tensor, law: Law, logits: torch.Tensor, packed: list[list[int]]) -> list[int]:
        """Commit path and token to the rows and to the target's cache, drop the rows that are done; accepted tokens per row."""
        width = on_path.shape[1]
        probs = probabilities(proposal, on_path, token, law) if self.trace.config.get("record_probs") else None
        entries, accepted, advance, done = [], [], [], []
        for b, (row, numbers) in enumerate(zip(self.sequences.active, packed)):
            if row.ended:
                accepted, advance, done = [*accepted, 0], [*advance, 1], [*done, True]
                continue
            path = [node for node in range(1, width) if numbers[node]]
            tokens = [numbers[width + node - 1] for node in path] + [numbers[-1]]
            if tokens[-1] < 0:
                raise RuntimeError(f"row {row.index}: the target's probabilities are nan, or its processors have left no token. Nothing can be drawn.")
            nodes = [0, *path]
            scores = [law.scores[b, node].to(self.sequences.device, torch.float32, copy=True) for node in nodes] if self.want_scores else ()  # a view would keep all nodes
            raw = [logits[b, node].to(self.sequences.device, torch.float32, copy=True) for node in nodes] if self.want_logits else ()
            count, ended = self.sequences.append(row, tokens, len(path), scores, raw)
            entries.append(Round.of(row.index, proposal, b, path, tokens[:count], numbers[width:-1], probs))
            accepted.append(len(path))
            advance.append(min(count, len(nodes)))
            done.append(ended)
        self.trace.rounds.append(entries)
        self.target.commit(advance, proposal.tree, on_path)
        if any(done):
            self._part_with(done)
        return accepted

    def _part_with(self, done: list[bool]) -> None:
        """Drop the rows that are done; the others go on without them. Where the cache is wanted, the last token of a row that is not the longest
        is cached like every token before it: a row that ends before the others do stays for one round more."""
        active = self.sequences.active
        longest = max(len(row.drafted) for row in self.sequences.rows) if all(done) else self.sequences.max_new
        shorter = [b for b, row in enumerate(active) if done[b] and not row.ended and len(row.drafted) < longest]
        self.want_cache &= not self.target.beyond([active[b].tokens for b in shorter])
        if self.want_cache and shorter and all(done):
            self.target.feed([row.tokens[-1:] if b in shorter else [] for b, row in enumerate(active)])
            self.target.calls -= 1  # housekeeping, not a verification
        elif self.want_cache:
            for b in shorter:
                active[b].ended, done[b] = True, False
        for b, row in enumerate(active):
            if done[b] and self.want_cache:
                self.cached_rows[row.index] = self.target.row(b, row.tokens, last=all(done))
        rows = [b for b, ended in enumerate(done) if not ended]
        parts = [self.sequences, self.target, self.sampler, self.noise, self.draft]
        for part in parts if rows else parts[:1]:
            part.keep(rows)
        self.context.rows[:] = self.sequences.tokens
