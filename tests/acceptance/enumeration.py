"""Block verification enumerated: the coin of the last prefix decides first, so that patterns go from the end to the start."""

from __future__ import annotations

import itertools

import torch

from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.test_enumeration import ALMOST_ONE, World, acceptance_probability, add_outcomes


def block(rule, world: World, draft_law, n: int, tokens: int, stop=lambda row: False, point_mass: bool = False) -> tuple[dict, float]:
    """Law of the first `tokens` tokens when chains of n tokens, drawn from draft_law(tokens so far, node) and ended after a token where
    stop(tokens so far) says so, are judged; and the expected number of accepted tokens."""
    rows = drawn(draft_law, n, stop)
    proposal, law = chains(world, draft_law, [row for row, _ in rows], n, point_mass)
    left, out, expected = torch.tensor([weight for _, weight in rows], dtype=torch.float64), {}, 0.0
    for last in range(n, -1, -1):
        coins = torch.full((len(rows), n), ALMOST_ONE, dtype=torch.float64)
        chance = acceptance_probability(rule, proposal, law, coins, last) if last else torch.ones_like(left)
        coins[:, last - 1 : last] = 0.0
        verdict, share = rule.verdict(proposal, law, coins), left * chance
        assert bool((verdict.on_path.sum(-1)[share > 1e-15] == last + 1).all())
        add_outcomes(out, verdict, proposal.tokens, share, world, tokens)
        expected, left = expected + float(share.sum()) * last, left * (1 - chance)
    return out, expected


def drawn(draft_law, n: int, stop) -> list[tuple[tuple[int, ...], float]]:
    rows, done = [((), 1.0)], []
    for node in range(1, n + 1):
        rows = [((*row, x), weight * q) for row, weight in rows for x, q in enumerate(draft_law(row, node).tolist()) if q > 0]
        done += [item for item in rows if stop(item[0])]
        rows = [item for item in rows if not stop(item[0])]
    return done + rows


def chains(world: World, draft_law, rows: list[tuple[int, ...]], n: int, point_mass: bool):
    """The proposal, padded to n tokens, and the target's laws."""
    padded = [[*row, *[0] * (n - len(row))] for row in rows]
    probs = torch.stack([torch.stack([draft_law(tuple(row[: node - 1]), node) for node in range(1, n + 1)]) for row in padded])
    proposal = Proposal(Tree.chain(n), torch.tensor(padded), None if point_mass else probs, [len(row) for row in rows])
    return proposal, world.law(proposal.tree, proposal.tokens)


def token_wise_expectation(world: World, draft_law, n: int) -> float:
    """Expected accepted tokens of speculative sampling: sum over i of the sum over drafts of prod min(p, q)."""
    total = 0.0
    for i in range(1, n + 1):
        for row in itertools.product(range(world.vocab), repeat=i):
            total += float(torch.stack([torch.minimum(world.laws[row[:j]][row[j]], draft_law(row[:j], j + 1)[row[j]]) for j in range(i)]).prod())
    return total
