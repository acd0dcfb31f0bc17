"""A draft model with another tokenizer than the target's. Timor et al. 2025 (arXiv 2502.05202): tokens that both vocabularies have
where the target samples (token-level intersection), text that is tokenized again where it is greedy (universal assisted decoding)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .. import compat, parts
from ..config import MAX_ASSISTANT_TOKENS
from ..law import draw, likeliest
from ..proposal import Proposal
from ..uploads import upload
from .base import Context
from .inner import Holder, chains, common, refuse_encoder
from .vocabulary import check_owners, fitted, readable


class TranslatedDraft(Holder):
    """Drafts with `model`, whose `draft_tokenizer` is not the target's `tokenizer`.

    Greedy: the draft writes K tokens of its own, and their text, in the target's tokens, is proposed (at most K): point masses.
    Sampling: the draft draws among the tokens that both vocabularies spell the same (however they write a space), and the law over these is q, processors
    applied: exact, and the fewer tokens are shared, the less is accepted.
    Every round the row's text is decoded and tokenized anew, some 0.1 ms per hundred tokens.

    ValueError if the vocabularies share no token; as a call starts, if a tokenizer is plainly not its model's.
    """

    name = "translated"
    trusted = True
    WINDOW = 8

    def __init__(self, model: PreTrainedModel, tokenizer, draft_tokenizer):
        refuse_encoder(model, "model")
        self.model, self.tokenizer, self.draft_tokenizer = model, tokenizer, draft_tokenizer
        self.model_traits = compat.traits_of(compat.unwrap(model), "assistant_model")
        for role, one in (("tokenizer", tokenizer), ("draft_tokenizer", draft_tokenizer)):
            if not hasattr(one, "get_vocab"):
                raise TypeError(f"{role}: expected a tokenizer, got {type(one).__name__}.")
        vocabularies = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        self.sizes = tuple(max(one.values()) + 1 for one in vocabularies)  # asking for a vocabulary takes a tenth of a second
        ours, theirs = map(spelled, vocabularies)
        shared = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs.keys() if theirs[token] < self.model_traits.vocab_size)
        if not shared:
            raise ValueError("draft_tokenizer: shares no token with tokenizer; take a draft whose vocabulary overlaps the target's.")
        self.shared = torch.tensor(shared)  # int64 [n, 2]: the target's id, the draft's id

    def start(self, context: Context) -> None:
        if context.target is not None:
            check_owners(context.target.model, self.model, (self.tokenizer, self.draft_tokenizer), self.sizes)
        self.hold(self.model, self.model_traits, context, 2 * min(context.max_length, 2**20) + MAX_ASSISTANT_TOKENS)
        self.held: list[list[int]] = [[] for _ in context.rows]  # the draft's tokens that its cache holds, and maybe one more
        self.ids = self.shared[self.shared[:, 0] < context.vocab_size].to(context.device)
        self.own = dict(self.shared.tolist())

    def propose(self, context: Context, k: list[int]) -> Proposal:
        rows = [self._encoded(self.draft_tokenizer, self.tokenizer.decode(row)) or [0] for row in context.rows]
        rows = readable(rows, self.model_traits.vocab_size, 2**31)  # tokenizers may have more than their models
        most = self.model_traits.max_positions
        if most is not None:
            k = [max(min(own, most - max(map(len, rows))), 0) for own in k]  # all rows are in every pass
        if not any(k):
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        self.cached.crop([min(common(held, row), len(row) - 1) for held, row in zip(self.held, rows)])
        drawn, laws, written = [], [], []
        for step in range(max(k)):
            logits = self._logits(rows, written, k, step).to(context.device)
            if context.sampler.do_sample:
                laws.append(self._law(context, logits, drawn, k, step))
                drawn.append(draw(laws[-1], context.noise(f"draft:{step}", 1)[:, 0]))
                written.append([self.own.get(token, 0) for token in drawn[-1].tolist()])
            else:
                written.append(likeliest(logits[:, 0]).tolist())
        written = [list(own)[:n] for own, n in zip(zip(*written), k)]
        self.held = [row + own for row, own in zip(rows, written)]
        if context.sampler.do_sample:
            tokens = [own[:n] for own, n in zip(torch.stack(drawn, 1).tolist(), k)]
            return chains(tokens, [[law[b] for law in laws[:n]] for b, n in enumerate(k)], context, self.name)
        tokens = [self._translated(row, before, own, context.vocab_size)[:n] for row, before, own, n in zip(context.rows, rows, written, k)]
        return chains(tokens, None, context, self.name)

    def _logits(self, rows: list[list[int]], written: list[list[int]], k: list[int], step: int) -> torch.Tensor:
        """[B, 1, V of the draft] after the rows and what has been written."""
        if step == 0:
            logits = self.cached.score(rows)
            self.cached.commit([1] * len(rows))
            return logits
        return self.cached.extend(upload(written[-1], self.cached.device)[:, None], [int(step < own) for own in k])

    def _law(self, context: Context, logits: torch.Tensor, drawn: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        """float [B, V of the target]: the draft's law, processors applied, over the shared tokens."""
        scores = fitted(logits[..., self.ids[:, 1]].float(), context.vocab_size, self.ids[:, 0])

        def prefix(b: int, _: int) -> torch.Tensor | None:
            return context.text(b, [int(tokens[b]) for tokens in drawn])

        law = context.sampler(scores, [step < own for own in k], prefix, draft=True).probs_at(torch.zeros(len(k), dtype=torch.long, device=scores.device))
        nothing = ~(law.sum(-1, keepdim=True) > 0)  # the processors have left no shared token
        return torch.where(nothing, torch.nn.functional.one_hot(law.new_zeros(len(k), dtype=torch.long), law.shape[-1]), law)

    # --- text ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def _encoded(tokenizer, text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _translated(self, row: list[int], before: list[int], written: list[int], vocab_size: int) -> list[int]:
        """The target's tokens for what the draft wrote after `before`, which is the text of `row`. Both ends are cut out of a window of
        known text, since what a token looks like can depend on the one before it."""
        known = self.draft_tokenizer.decode(before[-self.WINDOW :])
        text = self.draft_tokenizer.decode(before[-self.WINDOW :] + written)
        text = text[len(known) :] if text.startswith(known) else self.draft_tokenizer.decode(written)
        text = text.partition("\ufffd")[0]  # half a character
        window = row[-self.WINDOW :]
        ids = self._encoded(self.tokenizer, self.tokenizer.decode(window) + text) if text else []
        ids = ids[len(window) :] if ids[: len(window)] == window else self._encoded(self.tokenizer, text) if text else []
        return ids[: next((i for i, token in enumerate(ids) if token >= vocab_size), len(ids))]

    # --- the life of a call -----------------------------------------------------------------------------------------

    def relative_cost(self, target: PreTrainedModel) -> float:
        return parts.bytes_per_token(self.model) / max(parts.bytes_per_token(target), 1)

    def keep(self, rows: list[int]) -> None:
        self.cached.keep(rows)
        self.held = [self.held[row] for row in rows]

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """The texts are compared at every `propose`."""

    def finish(self) -> None:
        self.held = []
        super().finish()

    def _stock_vocab_size(self) -> int:
        return len(self.tokenizer)


def spelled(vocabulary: dict[str, int]) -> dict[str, int]:
    """The ids by the text of their tokens: byte-level vocabularies write a character for every byte (the space is "Ġ"; GPT-2, Radford et al.
    2019), SentencePiece's "▁" for a space."""
    if sum(token.startswith("Ġ") for token in vocabulary) < sum(token.startswith("▁") for token in vocabulary):
        return {token.replace("▁", " "): id for token, id in vocabulary.items()}
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

    def text(token: str) -> str:
        try:
            return bytes(byte_of[character] for character in token).decode()
        except (KeyError, UnicodeDecodeError):  # another kind of vocabulary, or part of a character
            return token

    return {text(token): id for token, id in vocabulary.items()}
