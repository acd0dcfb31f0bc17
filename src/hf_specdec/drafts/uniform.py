"""A draft that knows nothing: tokens drawn uniformly from the vocabulary. Leviathan et al. 2023, section 3.6: even this is exact."""

from __future__ import annotations

import torch

from ..proposal import Proposal
from .base import Context, Draft


class UniformDraft(Draft):
    """q(x) = 1 / V for every x, so about one token in V is accepted: a baseline and a test of exactness, not a way to be fast.

    vocab_size: only needed to serve stock assisted decoding (`get_candidates`), which does not tell it; tokens are then drawn
                from torch's global generator.
    """

    name = "uniform"
    trusted = True
    cost_ratio = 0.0

    def __init__(self, vocab_size: int | None = None):
        if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
            raise ValueError(f"vocab_size={vocab_size!r} must be the size of the target's vocabulary, or None.")
        self.vocab_size = vocab_size

    def prior(self, strength: int) -> tuple[float, float]:
        return 0.0, 0.0

    def propose(self, context: Context, k: list[int]) -> Proposal:
        """tokens int64 [B, max k]; probs is a view of one number when sampling, None when greedy (tokens are compared alone)."""
        n, vocab = max(k, default=0), context.vocab_size
        tokens = (context.noise("draft", n) * vocab).long().clamp(max=vocab - 1).to(context.device)
        probs = None
        if context.sampler.do_sample:
            probs = torch.full((1, 1, 1), 1 / vocab, dtype=torch.float32, device=context.device).expand(len(k), n, vocab)
        return Proposal.chain(tokens, probs, list(k), self.name)

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        """transformers' `CandidateGenerator` protocol. Without logits stock decoding compares tokens, which is exact."""
        if self.vocab_size is None:
            raise ValueError("UniformDraft(vocab_size=...) has to be given for stock assisted decoding.")
        shape = (input_ids.shape[0], self.num_assistant_tokens)
        return torch.cat([input_ids, torch.randint(self.vocab_size, shape, device=input_ids.device)], dim=1), None
