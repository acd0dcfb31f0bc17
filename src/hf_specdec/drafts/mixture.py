"""Several drafts at once: the one that is expected to earn most per millisecond, or all of them in one tree."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import MAX_ASSISTANT_TOKENS, instead_of
from ..hints import check_int, meant, what
from ..proposal import Proposal
from ..registry import DRAFTS, load
from .base import Context, Draft
from .choosing import Choose
from .earning import Experience, PlannedSchedule
from .growth import together
from .inner import Composed
from .merging import Merge

MODES = ("merge", "choose")


def _made(name: str) -> Draft:
    if name not in DRAFTS and (slip := meant(name, DRAFTS)):
        raise ValueError(f"drafts: {name!r} is not known{slip}.")
    draft = load(DRAFTS, name, "drafts")
    try:
        return draft()
    except TypeError as error:
        raise ValueError(f"drafts: {name!r} has to be made first: put {draft.__name__}(...) into the list.") from error


class MixtureDraft(Composed):
    """Several drafts; what each earns is measured during the call, and what calls without a seed have measured is where the next one on the
    same target with as many rows begins: keep the object.

    drafts: drafts, or names of registered ones; by default the suffix automaton, n-gram recycling and, of use under a grammar alone, jump-forward.
    mode:   "merge": every round all drafts together fill one tree of K tokens, the likeliest first (SpecInfer, Miao et al. 2023, merges
            drafts in a prefix tree). Drafts that know `guesses` are asked token by token; of any other the whole proposal takes part,
            at most `tokens` of it. What a model has drawn at random is a branch of its own, judged after the guesses, with the law it
            was drawn from: a guess that happens to be the same token is judged before it, and the residual knows.
            "choose": per round and row, the one draft with the most expected tokens per expected time of the round. Estimates of
            drafts that cost nothing are kept up by what they would have proposed. With K "auto" those of them that know `guesses` (the suffix
            automaton; not prompt lookup) go on where a costly draft's chain ends. In a call with a seed no time is measured.
    branches: most guesses tried after each token ("merge"); 1 makes a chain of the likeliest.
    tokens: most tokens asked of a draft that does not know `guesses` ("merge").

    With K "auto" the tokens expected in a batch count by how far they bring its slowest row (`budget.progress`).
    What is chosen depends on committed tokens and measured times alone, never on a coin of a token still to be judged; what goes on after drawn
    tokens depends on those, too, as each of a chain's tokens may on the ones before. In "merge" the
    rows of a batch share one shape of tree, so what is drawn for a row depends on its neighbours (its law does not).
    """

    name = "mixture"
    trusted = True
    learns_in_stock = True

    def __init__(self, drafts: Sequence[Draft | str] = ("suffix_automaton", "ngram_recycling", "jump_forward"), mode: str = "merge", tokens: int = 5,
                 branches: int = 8):
        if isinstance(drafts, Draft):
            raise TypeError("drafts: expected a list of drafts; put them into one: MixtureDraft([first, second]).")
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} must be one of {list(MODES)}.")
        for name, value, most in (("tokens", tokens, MAX_ASSISTANT_TOKENS), ("branches", branches, 16)):
            check_int(name, value, 1, most)
        if not isinstance(drafts, Sequence) or isinstance(drafts, str) or not len(drafts):
            raise ValueError("drafts: expected a list of at least one draft (or names of registered drafts).")
        made = tuple(_made(draft) if isinstance(draft, str) else draft for draft in drafts)
        wrong = [draft for draft in made if not isinstance(draft, Draft)]
        if wrong:
            raise TypeError(f"drafts: expected drafts, got {what(wrong[0])}.{instead_of(wrong[0]) or ' Make a model one with ModelDraft(model).'}")
        if len({id(draft) for draft in made}) < len(made):
            raise ValueError("drafts: the same object is in the list twice; make two.")
        super().__init__(made)
        self.mode, self.tokens, self.branches = mode, tokens, branches
        whole = [draft for draft in made if mode == "choose" or type(draft).place is Draft.place]  # the others are asked token by token
        self.may_branch = mode == "merge" and branches > 1 or any(draft.may_branch for draft in whole)
        self.experience: Experience | None = None

    # --- the life of a call -----------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        self.context = context
        self.lengths = [len(row) for row in context.rows]
        self.contexts = [context.of(d) for d in range(len(self.parts))]  # each draws from streams of its own
        for draft, own in zip(self.parts, self.contexts):
            draft.start(own)
        self.way = (Merge if self.mode == "merge" else Choose)(self, context)

    def evidence(self, context: Context) -> list[int]:
        self.way.learn([row[length:] for row, length in zip(context.rows, self.lengths)])
        self.lengths = [len(row) for row in context.rows]
        self.forget_asked()
        return self.way.evidence([draft.evidence(own) for draft, own in zip(self.parts, self.contexts)])

    def propose(self, context: Context, k: list[int]) -> Proposal:
        rows, sources = self.way.propose(context, k)
        return together(rows, context.vocab_size, context.device, sources)

    @property
    def asked_now(self) -> set[int]:
        """The drafts that have proposed something in this round."""
        return {d for d, proposal in enumerate(self.asked) if proposal is not None}

    def ask(self, d: int, k: list[int]) -> Proposal:
        """Draft d's proposal, checked unless the draft is the package's own."""
        draft = self.parts[d]
        proposal = draft.propose(self.contexts[d], k)
        if not draft.trusted:
            Proposal.check(proposal, len(k), self.context.vocab_size, draft.name)
        self.asked[d] = proposal
        return proposal

    def keep(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.way.keep(rows)
        super().keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.way.forget()
        self.lengths = list(lengths)
        self.forget_asked()
        for draft, own in zip(self.parts, self.contexts):
            draft.rewind(own, lengths)

    def finish(self) -> None:
        self.context = self.way = None
        self.contexts = []
        super().finish()

    # --- what is asked of it between ----------------------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        return any(draft.stops for draft in self.parts)

    def prior(self, strength: int) -> tuple[float, float]:
        return 0.4, 0.6

    def schedule(self, most: int, timed: bool) -> PlannedSchedule:
        return PlannedSchedule(self, most)

    def relative_cost(self, target) -> float:
        return max(draft.relative_cost(target) or 0.0 for draft in self.parts)
