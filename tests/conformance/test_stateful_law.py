"""The law under processors that keep a state: every text's own, as if the processor had been called on it token by token."""

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.drafts import ModelDraft, ModelTreeDraft, PromptLookupDraft, UniformDraft
from hf_specdec.kept import Kept
from tests.conformance import law
from tests.helpers import FULL, perturbed, small_vocabulary_llama

ROW, TOKENS, N = [1, 4, 2, 5, 1, 4], 3, 50_000 if FULL else 500


class Drift(LogitsProcessor):
    """Each call moves a bias by what the text ended with and by how sure the scores were."""

    def __init__(self):
        self.bias, self.calls = torch.zeros(law.VOCAB), []

    def __call__(self, input_ids, scores):
        self.calls.append(int(input_ids[0, -1]))
        self.bias[self.calls[-1]] += 0.5 + 0.1 * float(scores.softmax(-1).amax())
        self.bias[len(self.calls) % law.VOCAB] -= 0.8
        return scores + self.bias.to(scores.dtype)


@torch.no_grad()
def joint(model) -> dict[tuple[int, ...], float]:
    exact = copy.deepcopy(model).double()
    laws = {(): (1.0, Drift())}
    for _ in range(TOKENS):
        following = {}
        for text, (p, processor) in laws.items():
            ids = torch.tensor([[*ROW, *text]])
            own = copy.deepcopy(processor)
            chances = own(ids, exact(input_ids=ids, use_cache=False).logits[:, -1]).softmax(-1)[0].tolist()
            following |= {(*text, token): (p * chance, own) for token, chance in enumerate(chances)}
        laws = following
    return {text: p for text, (p, _) in laws.items()}


def p_value(draft, k: int) -> float:
    target = small_vocabulary_llama(2, law.VOCAB)
    found, _ = law.counts(target, [ROW], draft(target), N, TOKENS, k, chunk=N, logits_processor=LogitsProcessorList([Drift()]))
    return law.worst_p_value(found, [joint(target)], TOKENS)


DRAFTS = {"lookup": lambda target: PromptLookupDraft(), "uniform": lambda target: UniformDraft(), "model": lambda target: ModelDraft(perturbed(target, 0.3)),
          "model tree": lambda target: ModelTreeDraft(perturbed(target, 0.3))}


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_first_tokens_follow_the_law_of_the_processed_scores(draft):
    assert p_value(DRAFTS[draft], 3) > law.THRESHOLD


def test_a_processor_that_is_not_put_back_is_rejected(monkeypatch):
    monkeypatch.setattr(Kept, "put_back", lambda self: None)
    assert p_value(DRAFTS["model"], 3) < law.THRESHOLD
