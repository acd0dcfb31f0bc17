"""What is wrong on purpose has to be rejected by the test that the right thing passes."""

import pytest
import torch

from hf_specdec.drafts import Draft
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.conformance import law
from tests.helpers import FULL, perturbed, small_vocabulary_llama

ROW = [1, 2, 3, 1, 2]
N = 50_000 if FULL else 3_000


class ControlDraft(Draft):
    """Draws chains of K tokens from a fixed law, q = softmax(table[last token]), and may lie about it."""

    name = "control"

    def __init__(self, draw_at: float = 1.0, say: float = 1.0, argmax: bool = False, drop_below: float = 0.0, best_two: bool = False):
        self.draw_at, self.say, self.argmax, self.drop_below, self.best_two = draw_at, say, argmax, drop_below, best_two
        self.table = torch.randn(law.VOCAB, law.VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5

    def propose(self, context, k):
        if self.best_two:
            return self._siblings(context, k)
        last, tokens, laws = torch.tensor([row[-1] for row in context.rows]), [], []
        sizes = list(k)
        for step in range(max(k)):
            drawn_from = (self.table[last] / self.draw_at).softmax(-1)
            laws.append((self.table[last] / self.say).softmax(-1))
            coins = context.noise(f"draft:{step}", 1)
            last = drawn_from.argmax(-1) if self.argmax else (drawn_from.double().cumsum(-1) <= coins).sum(-1).clamp(max=law.VOCAB - 1)
            tokens.append(last)
            own = laws[-1].gather(1, last[:, None])[:, 0]
            sizes = [min(size, step) if q < self.drop_below else size for size, q in zip(sizes, own.tolist())]
        if not tokens:
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        return Proposal.chain(torch.stack(tokens, 1), torch.stack(laws, 1), sizes, self.name)

    def _siblings(self, context, k):
        """The two best tokens, each said to be a draw."""
        if not max(k):
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        q = self.table[torch.tensor([row[-1] for row in context.rows])].softmax(-1)
        return Proposal(Tree((0, 0)), q.topk(2).indices, torch.stack([q, q], 1), [min(2, own) for own in k], self.name)


def p_value(draft=None, **options) -> float:
    target = small_vocabulary_llama(2, law.VOCAB)
    draft = draft or perturbed(target, 0.1)
    found, _ = law.counts(target, [ROW], draft, N, 3, 3, **options)
    return law.worst_p_value(found, [law.joint(target, ROW, 3)], 3)


def test_an_honest_draft_passes():
    assert p_value(ControlDraft()) > law.THRESHOLD


def test_an_honest_draft_at_another_temperature_passes():
    assert p_value(ControlDraft(draw_at=0.5, say=0.5)) > law.THRESHOLD


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(
    "draft",
    [ControlDraft(argmax=True), ControlDraft(draw_at=0.5), ControlDraft(drop_below=0.3), ControlDraft(best_two=True)],
    ids=["argmax scored with softmax q", "drawn at T=0.5 and scored at T=1", "unlikely draws dropped", "the two best as siblings, scored with softmax q"],
)
def test_a_draft_that_lies_about_q_is_rejected(draft):
    assert p_value(draft) < law.THRESHOLD


def test_lenience_03_is_rejected():
    assert p_value(lenience=0.3) < law.THRESHOLD


def test_lenience_1_passes():
    assert p_value(lenience=1.0) > law.THRESHOLD


def test_the_law_of_another_model_is_rejected():
    target, other = small_vocabulary_llama(2, law.VOCAB), small_vocabulary_llama(3, law.VOCAB)
    found, _ = law.counts(target, [ROW], None, 2_000, 2, 3)
    assert law.worst_p_value(found, [law.joint(other, ROW, 2)], 2) < law.THRESHOLD


def test_one_impossible_token_among_many_is_rejected():
    target = small_vocabulary_llama(2, law.VOCAB)
    found = law.Counter({(a,): 100 for a in range(law.VOCAB)})
    possible = law.marginal(law.joint(target, ROW, 1, top_k=3), 1)
    assert law.p_value(found, possible) == 0.0
