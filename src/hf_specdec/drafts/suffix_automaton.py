"""The suffix automaton draft: what followed the longest suffix of a row that has occurred before, found in constant time per token.

SAM decoding (Hu et al. 2024, arXiv 2411.10666), SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975); the automaton itself is that
of Blumer et al. 1985, built online. Proposals are point masses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, nlargest

from ..hints import check_int
from ..proposal import Proposal
from ..tree import Tree
from .base import Context, Draft, Guess
from .growth import Branches, together

SEPARATOR = -1  # between texts; no row has it, so no match crosses it
AFTER_FIRST = (1.0, 0.2, 0.1, 0.05)  # of the most frequent continuation's rate, that of the next ones
Node = tuple[int, int]  # (parent, token); parents count from 1, 0 is the root


class SuffixAutomaton:
    """All substrings of a text that grows token by token.

    A state is the set of substrings that end at the same places; state 0 is the empty one. Per state: the length of the longest of
    them, the state of its longest suffix that also ends elsewhere (`links`), the states that one token more leads to (`nexts`), how
    often (`counts`) and where last (`ends`, a number of tokens) it occurs. An occurrence is noted in at most WALK states, the
    longest first, which keeps the time per token constant: only text that repeats itself over and over has more of them.

    match: (length, state, end) of the longest suffix of the text that has occurred before, and where it last did; (0, 0, 0) if none.
    """

    WALK = 64

    def __init__(self):
        self.text: list[int] = []
        self.last, self.match = 0, (0, 0, 0)
        self.lengths, self.links, self.counts, self.ends = [0], [-1], [0], [0]
        self.nexts: list[dict[int, int]] = [{}]

    def append(self, token: int) -> None:
        """One token more: amortised constant time."""
        self.text.append(token)
        links, nexts = self.links, self.nexts
        new, state = self._state(len(self.text), 0, {}, 1, len(self.text)), self.last
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        if state >= 0:
            links[new] = self._suffix(state, token)
        self.last = new
        self._note(links[new])

    def _state(self, length: int, link: int, nexts: dict[int, int], count: int, end: int) -> int:
        for column, value in ((self.lengths, length), (self.links, link), (self.nexts, nexts), (self.counts, count), (self.ends, end)):
            column.append(value)
        return len(self.links) - 1

    def _suffix(self, state: int, token: int) -> int:
        """The state of the longest substring of `state` and `token`, split off where longer ones share its state."""
        known, length = self.nexts[state][token], self.lengths[state] + 1
        if self.lengths[known] == length:
            return known
        clone = self._state(length, self.links[known], dict(self.nexts[known]), self.counts[known], self.ends[known])
        self.links[known] = clone
        while state >= 0 and self.nexts[state].get(token) == known:
            self.nexts[state][token] = clone
            state = self.links[state]
        return clone

    def _note(self, state: int) -> None:
        """The suffixes of the text, from that of `state` down, occur once more; the first is the match."""
        self.match = (self.lengths[state], state, self.ends[state]) if state else (0, 0, 0)
        for _ in range(self.WALK):
            if not state:
                break
            self.counts[state] += 1
            self.ends[state] = len(self.text)
            state = self.links[state]

    def follow(self, length: int, state: int, token: int) -> tuple[int, int]:
        """The longest suffix that this text holds of another one, of which `length` tokens match in `state`, after one token more."""
        while state and token not in self.nexts[state]:
            state = self.links[state]
            length = self.lengths[state]
        state = self.nexts[state].get(token, 0)
        return (length + 1, state) if state else (0, 0)

    def repeat(self, end: int, k: int) -> list[int]:
        """k tokens from position `end` on; where they run into the present, the text is taken to go on repeating itself."""
        period = self.text[end : end + k]
        return (period * (k // len(period) + 1))[:k]

    def likely(self, state: int, size: int, branches: int, vocab_size: int) -> list[Node]:
        """The `size` likeliest nodes of the tree of what followed `state`, at most `branches` after each, weighted by how often
        they did; the likelier first. Where the text ends, a shorter suffix goes on."""
        nodes: list[Node] = []
        ahead: list[tuple] = []  # (-probability, serial, parent, token, state)
        serial, probability = 0, 1.0
        while len(nodes) < size:
            state, options = self._options(state, vocab_size)
            total = sum(weight for weight, *_ in options)
            for weight, _, token, after in nlargest(branches, options):
                serial += 1
                heappush(ahead, (-probability * weight / total, serial, len(nodes), token, after))
            if not ahead:
                break
            probability, _, parent, token, state = heappop(ahead)
            probability = -probability
            nodes.append((parent, token))
        return nodes

    def _options(self, state: int, vocab_size: int) -> tuple[int, list[tuple]]:
        """(count, last end, token, state) of all that followed `state`, or the longest of its suffixes that anything followed."""
        while state:
            options = [(self.counts[after], self.ends[after], token, after) for token, after in self.nexts[state].items()
                       if 0 <= token < vocab_size]
            if options:
                return state, options
            state = self.links[state]
        return 0, []


class _Row:
    """A row's own automaton, and where the row stands in the shared one."""

    def __init__(self, shared: SuffixAutomaton | None):
        self.own, self.shared, self.place = SuffixAutomaton(), shared, (0, 0)

    def read(self, row: list[int]) -> None:
        """Take in what has been committed since."""
        for token in row[len(self.own.text) :]:
            self.own.append(token)
            if self.shared is not None:
                self.place = self.shared.follow(*self.place, token)

    @property
    def match(self) -> int:
        """Length of the longest match; the row's own text goes before another that matches as well."""
        return max(self.own.match[0], self.place[0])

    def nodes(self, size: int, branches: int, vocab_size: int) -> list[Node]:
        length, state, end = self.own.match
        if self.place[0] > length:
            return self.shared.likely(self.place[1], size, branches, vocab_size)
        if branches > 1:
            return self.own.likely(state, size, branches, vocab_size)
        return list(enumerate(self.own.repeat(end, size)))


class SuffixAutomatonDraft(Draft):
    """Proposes what followed the longest suffix of the row that has occurred before, however long it is: in the row (its last
    occurrence), or in `texts` if they match longer (its most frequent continuation). At most n * n + 1 tokens for a match of n.

    texts:     earlier conversations or the like, each a sequence of token ids; `add` adds one later. All rows and calls share them.
    branches:  1 proposes a chain. More propose a tree of K tokens: the likeliest continuations, at most `branches` after each
               token, weighted by how often they occurred. The rows of a batch then share the shape that most of them want, so
               that what is drawn for a row depends on its neighbours (its law does not).
    min_match: shortest match that counts.
    """

    name = "suffix_automaton"
    trusted = True
    cost_ratio = 0.0

    def __init__(self, texts: Iterable[Sequence[int]] = (), branches: int = 1, min_match: int = 1):
        for name, value, most in (("branches", branches, 16), ("min_match", min_match, 2**31)):
            check_int(name, value, 1, most)
        self.branches, self.min_match, self.may_branch = branches, min_match, branches > 1
        self.shared: SuffixAutomaton | None = None
        self.rows: list[_Row] = []
        for text in texts:
            self.add(text)

    def add(self, text: Sequence[int]) -> None:
        """One more text, as token ids; between two calls of `generate`."""
        if isinstance(text, str) or not all(type(token) is int and token >= 0 for token in text):
            raise ValueError("texts: expected token ids, a list of ints of at least 0 per text; tokenize texts with the target's tokenizer.")
        self.shared = self.shared or SuffixAutomaton()
        for token in (*text, SEPARATOR):
            self.shared.append(token)

    def start(self, context: Context) -> None:
        self.rows = [_Row(self.shared) for _ in context.rows]

    def evidence(self, context: Context) -> list[int]:
        """Per row: -1 without a match, else its length, grouped (1, 2, 3, 4-5, 6-9, 10-19, 20 and more)."""
        for row, tokens in zip(self.rows, context.texts):
            row.read(tokens)
        return [_group(row.match) if row.match >= self.min_match else -1 for row in self.rows]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        trees = [row.nodes(min(own, row.match**2 + 1), self.branches, context.vocab_size) if own and row.match >= self.min_match else []
                 for row, own in zip(self.rows, k)]
        if self.branches == 1 or context.chains:
            return Proposal.from_lists([_first_branch(nodes) for nodes in trees], context.device, self.name, context.vocab_size)
        return together([Branches(nodes) for nodes in trees], context.vocab_size, context.device, self.name, k)

    def place(self, b: int) -> tuple | None:
        """The row's automaton, and length and state of the match in it and in the texts."""
        row = self.rows[b]
        return (row.own, *row.own.match[:2], *row.place) if row.match >= self.min_match else None

    def guesses(self, place: tuple) -> list[Guess]:
        automaton, length, state, length_in_texts, state_in_texts = place
        if length_in_texts > length:
            automaton, length, state = self.shared, length_in_texts, state_in_texts
        found, options = automaton._options(state, 2**31)
        group = _group(length if found == state else automaton.lengths[found])
        return [(token, (group, rank), self.prior(group)[0] * AFTER_FIRST[rank])
                for rank, (_, _, token, _) in enumerate(nlargest(len(AFTER_FIRST), options))]

    def step(self, place: tuple, token: int) -> tuple:
        automaton, length, state, *in_texts = place
        in_texts = self.shared.follow(*in_texts, token) if self.shared is not None else (0, 0)
        return (automaton, *automaton.follow(length, state, token), *in_texts)

    def prior(self, strength: int) -> tuple[float, float]:
        return {1: (0.26, 0.6), 2: (0.56, 0.75), 3: (0.66, 0.8), 4: (0.74, 0.85), 6: (0.82, 0.9)}.get(strength, (0.93, 0.95))

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def finish(self) -> None:
        self.rows = []
        super().finish()


def _group(n: int) -> int:
    return next((least for least in (20, 10, 6, 4) if n >= least), n or -1)


def _first_branch(nodes: list[Node]) -> list[int]:
    """The tokens of the likeliest path of a tree."""
    return [nodes[node - 1][1] for node in Tree(tuple(parent for parent, _ in nodes)).first_branch]
