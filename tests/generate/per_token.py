"""What the tests of `output_hidden_states` and `output_attentions` share."""

import pytest

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
