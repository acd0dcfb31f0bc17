"""What the tests of `output_hidden_states` and `output_attentions` share."""

import copy

import pytest
import torch

from hf_specdec.caches import CACHE
from hf_specdec.drafts import MixtureDraft, NGramRecyclingDraft
from tests.helpers import enabled, padded, perturbed

ROWS = [[1, 2, 3, 1, 2, 7, 8], [4, 3], [5, 4, 5, 4, 5, 4, 5]]
SHARED = dict(max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
alone_and_in_a_batch = pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "batch"])
each_draft = pytest.mark.parametrize("draft", [lambda model: None, lambda model: perturbed(model, 0.02), lambda model: MixtureDraft(), lambda model: NGramRecyclingDraft()],
                                     ids=["lookup", "model", "mixture", "tree"])  # fmt: skip


def both(wanted: dict, model, rows, draft=None, k=4, **more):
    """What a speculative call returns and what plain generate does, and the mask of their prompts [B, P]."""
    inputs = padded(rows)
    theirs = enabled(model).generate(**inputs, **wanted | more)
    ours = model.generate(**inputs, **wanted | more, speculative=True, assistant_model=draft, num_assistant_tokens=k)
    return ours, theirs, inputs["attention_mask"]


def with_rows_that_end(wanted: dict, model):
    """As `both`, of rows one of which ends before the others, and how many tokens each gets."""
    free = enabled(model).generate(**padded(ROWS), **wanted).sequences[:, len(ROWS[0]) :]
    end = int(free[1, 5])
    lengths = [(row.tolist() + [end]).index(end) + 1 for row in free]
    assert min(lengths) < max(lengths)
    return *both(wanted, model, ROWS, perturbed(model, 0.02), eos_token_id=end), lengths


def behind_a_filled_cache(wanted: dict, model):
    """As `both`, of a call that goes on from the cache of another with three tokens more."""
    first = enabled(model).generate(**padded(ROWS[:1]), **wanted)
    ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    own, mask = copy.deepcopy(first[CACHE]), torch.ones_like(ids)
    theirs = model.generate(ids, attention_mask=mask, **{CACHE: first[CACHE]}, **wanted)
    return model.generate(ids, attention_mask=mask, **{CACHE: own}, **wanted, speculative=True, assistant_model=perturbed(model, 0.02)), theirs, mask


def behind_embeddings(wanted: dict, model):
    """As `both`, of a prompt of embeddings."""
    embeds = enabled(model).get_input_embeddings()(torch.tensor(ROWS[:1]))
    theirs = model.generate(inputs_embeds=embeds, **wanted)
    return model.generate(inputs_embeds=embeds, **wanted, speculative=True, num_assistant_tokens=4), theirs, torch.ones(1, 7)
