"""Vocabularies of another size than the target's: padded otherwise, pruned, or in part another one. Only ids that both have are drafted."""

from __future__ import annotations

import torch

from .. import compat
from .base import Draft


def fitted(logits: torch.Tensor, vocab_size: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [.., vocab_size] from those of the tokens `ids`, int64 [n], each below vocab_size, or of the tokens 0 .. n - 1: [.., n]. Minus
    infinity for the others, so that they are never drafted; what lies beyond is cut off."""
    if ids is None and logits.shape[-1] >= vocab_size:
        return logits[..., :vocab_size]
    if ids is None:
        return torch.nn.functional.pad(logits.float(), (0, vocab_size - logits.shape[-1]), value=-torch.inf)
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return every.index_copy_(-1, ids.to(logits.device), logits)


def readable(rows: list[list[int]], own: int, vocab_size: int) -> list[list[int]]:
    """The rows, of tokens below vocab_size, for a model that has `own` tokens: ids beyond are replaced, which makes a worse guess, not a wrong
    output."""
    return rows if own >= vocab_size else [[min(token, own - 1) for token in row] for row in rows]


def check_vocabulary(draft: Draft, traits: compat.ModelTraits) -> None:
    """ValueError if the vocabularies of draft and target, or of a draft inside, differ in size by more than padding."""
    for part in draft.parts:
        check_vocabulary(part, traits)
    own = getattr(getattr(draft, "traits", None), "vocab_size", traits.vocab_size)
    if min(own, traits.vocab_size) >= 0.9 * max(own, traits.vocab_size):
        return
    whole = getattr(draft, "whole", None)  # the model whose own layers draft
    now = own if whole is None else compat.traits_of(whole, "target").vocab_size
    if now != own:
        raise ValueError(f"assistant_model: {type(draft).__name__} was made when its model had {own} tokens, and it has been resized to {now} since. "
                         "Make the draft anew after resize_token_embeddings.")
    raise ValueError(f"assistant_model has a vocabulary of {own} tokens, the target one of {traits.vocab_size}: not the same "
                     f"tokenizer. Speculative decoding needs a draft with the target's tokenizer (padded otherwise? resize_token_embeddings({traits.vocab_size})); one with another is "
                     f"translated where both are passed to generate(), tokenizer= and assistant_tokenizer=, and as a TranslatedDraft(model, tokenizer, draft_tokenizer).")


def check_owners(target, draft, tokenizers: tuple, sizes: tuple[int, int]) -> None:
    """ValueError where the two tokenizers plainly belong to the other model, by their names or by their `sizes`, or one has many more tokens than its model."""
    models = [compat.unwrap(model) for model in (target, draft)]
    rooms = [compat.traits_of(model, "model").vocab_size for model in models]
    names, owners = [getattr(one, "name_or_path", "") for one in tokenizers], [model.config.name_or_path for model in models]
    by_name = all(names) and names[0] != names[1] and names == owners[::-1]
    by_size = not (all(names) and names == owners) and any(map(int.__gt__, sizes, rooms)) and not any(map(int.__gt__, sizes, rooms[::-1]))
    said = f"tokenizer has {sizes[0]} tokens and the target {rooms[0]}, assistant_tokenizer (draft_tokenizer of a TranslatedDraft) {sizes[1]} and the draft model {rooms[1]}"
    if by_name or by_size:
        raise ValueError(f"tokenizer and assistant_tokenizer are exchanged: {said}. Pass the target's as tokenizer=, the draft model's as assistant_tokenizer=.")
    if any(0.9 * size > room for size, room in zip(sizes, rooms)):
        raise ValueError(f"tokenizer, assistant_tokenizer: one of them is not its model's: {said}. Pass those that the two models were loaded with.")
