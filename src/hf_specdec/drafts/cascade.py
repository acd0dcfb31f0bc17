"""The vertical cascade: a draft model that is itself accelerated by another draft. Leviathan et al. 2023, section 6; Chen et al. 2023
(arXiv 2312.11462).

The middle model is to the inner draft what the target is to this one: it scores the inner draft's tokens in one pass, the same rules
accept and correct them. What comes out follows the middle model's own law, and that law, known at every token, is q.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .. import compat, parts
from ..acceptance.greedy import GreedyMatching
from ..acceptance.sampling import SpeculativeSampling
from ..config import MAX_ASSISTANT_TOKENS
from ..hints import check_int
from ..probe import check_trees
from ..proposal import Proposal, fetched
from ..uploads import upload
from .base import Context, Draft, Run
from .inner import Holder, Inner, chains, refuse_encoder
from .vocabulary import fitted, readable


class CascadeDraft(Holder):
    """Drafts K tokens that follow the law of `model`, in fewer than K of its passes.

    model:  the middle model, with the target's tokenizer.
    draft:  what drafts for it, a `Draft`, another cascade included. Unless it is the package's own, every proposal is checked:
            a ValueError names the draft if its probabilities do not sum to 1 or the like.
    tokens: drafted for the middle model per pass.
    """

    name = "cascade"
    trusted = True

    def __init__(self, model: PreTrainedModel, draft: Draft, tokens: int = 4):
        if not isinstance(draft, Draft):
            raise TypeError(f"draft: expected a draft, got {type(draft).__name__}; make a model one with ModelDraft(model).")
        check_int("tokens", tokens, 1, MAX_ASSISTANT_TOKENS)
        refuse_encoder(model, "model")
        self.model, self.draft, self.tokens, self.parts = model, draft, tokens, (draft,)
        self.traits = compat.traits_of(compat.unwrap(model), "model")

    def watching(self) -> tuple[int, ...]:
        """None of the target's: the draft inside reads the states of the model between them."""
        return ()

    def models(self) -> list[Run]:
        return [Run(self.model, reads=self.draft.watching()), *super().models()]

    def start(self, context: Context) -> None:
        self.hold(self.model, self.traits, context, context.max_length + 2 * MAX_ASSISTANT_TOKENS, "model")
        check_trees(self.draft, self.model, self.traits, context.max_length, "model")
        self.rule = (SpeculativeSampling if context.sampler.do_sample else GreedyMatching)()
        self.cached.look(context.media and context.media.for_draft(self.model))
        if self.draft.reads_prompt:
            self.cached.reader = lambda firsts, logits: self.draft.read(firsts, self._fit(logits))
        self.inner = Inner(self.draft, context, target=self.cached)

    def evidence(self, context: Context) -> list[int]:
        return [0 if self._left(context) > 0 else -1] * len(context.rows)

    def _left(self, context: Context) -> int:
        """Tokens that the middle model's context still has for the longest row; the others are fed in the same passes."""
        most = self.traits.max_positions
        return 2**31 if most is None else max(most - max(map(len, context.rows)), 0)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        left = [min(own, self._left(context)) for own in k]
        same = self.inner.follow(context.rows)
        self.cached.crop([min(n, len(row) - 1) for n, row in zip(same, context.rows)])
        tokens, laws = [[] for _ in k], [[] for _ in k]
        self.inner.turn = 0
        while any(len(own) < n for own, n in zip(tokens, left)):
            self._round(context, [n - len(own) for own, n in zip(tokens, left)], tokens, laws)
            self.inner.turn += 1
        return chains(tokens, laws if context.sampler.do_sample else None, context, self.name)

    def _round(self, context: Context, left: list[int], tokens: list[list[int]], laws: list[list[torch.Tensor]]) -> None:
        """One pass of the middle model: at least one token for every row that has some left to draft."""
        rows, draft = self.inner.rows, self.draft
        proposal = self.inner.propose([max(min(self.tokens, n - 1), 0) for n in left])
        logits = self._fit(self.cached.score(self._known(rows), self._known_only(proposal)))
        draft.observe(proposal, logits)
        law = context.sampler(logits, [size + 1 if n else 0 for size, n in zip(proposal.sizes, left)], lambda b, node: self._prefix(proposal, b, node),
                              proposal.tree.parents, draft=True)
        samples = self.rule.samples
        verdict = self.rule.verdict(proposal, law, self.inner.noise("accept", len(proposal.tree)) if samples else None)
        token = verdict.token(self.inner.noise("next", 1)[:, 0] if samples else None).clamp(min=0)
        numbers = fetched(proposal, verdict, token)
        draft.commit(verdict)
        advance = []
        for b, (on_path, drafted, last, n) in enumerate(zip(verdict.paths(), proposal.listed(), (row[-1] for row in numbers), left)):
            path = [node for node in range(1, len(on_path)) if on_path[node]] if n else []
            taken = [*(drafted[node - 1] for node in path), last][: n]
            if n and self.rule.samples:
                laws[b] += law.scores[b, upload([0, *path], token.device)].float().softmax(-1)
            rows[b] += taken
            tokens[b] += taken
            advance.append(len(taken))
        self.cached.commit(advance, proposal.tree, verdict.on_path)

    def _prefix(self, proposal: Proposal, b: int, node: int) -> torch.Tensor | None:
        return self.inner.context.text(b, [proposal.listed()[b][step - 1] for step in proposal.tree.path(node)])

    # --- vocabularies padded to different sizes -----------------------------------------------------------------------

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The middle model's logits in the target's vocabulary: ids that it does not have are impossible."""
        return fitted(logits.to(self.inner.context.device), self.inner.context.vocab_size)

    def _known(self, rows: list[list[int]]) -> list[list[int]]:
        return readable(rows, self.traits.vocab_size, self.inner.context.vocab_size)

    def _known_only(self, proposal: Proposal) -> Proposal:
        return Proposal(proposal.tree, proposal.tokens.clamp(max=self.traits.vocab_size - 1), None, proposal.sizes)

    # --- the life of a call -----------------------------------------------------------------------------------------

    def relative_cost(self, target: PreTrainedModel) -> float:
        """By size, for a middle model that is not accelerated at all: at most."""
        return parts.bytes_per_token(self.model) / max(parts.bytes_per_token(target), 1)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.cached.keep(rows)
        self.inner.keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """The rows are compared at every `propose`, whatever happened to them."""

    def finish(self) -> None:
        self.inner = None
        super().finish()

    def _stock_vocab_size(self) -> int:
        return self.traits.vocab_size
