"""`evaluate` metric: acceptance rate, block efficiency and memory-bound speed-up of speculative generations.

    metric = evaluate.load("metrics/speculation")
    metric.compute(**metric.columns([out.speculation, ...]), c=draft_parameters / target_parameters)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import datasets
import evaluate

from hf_specdec.theory import memory_bound_speedup

_DESCRIPTION = "How often drafted tokens were accepted, and what that is worth: see the docstring of `_compute`."
_CITATION = """@inproceedings{leviathan2023fast, title={Fast Inference from Transformers via Speculative Decoding},
author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi}, booktitle={ICML}, year={2023}}
@article{goel2024direct, title={Direct Alignment of Draft Model for Speculative Decoding with Chat-Fine-Tuned LLMs},
author={Goel, Raghavv and others}, journal={arXiv:2403.00858}, year={2024}}"""
_INPUTS = """One example is one generated sequence; its entries are its rounds.
    proposed: tokens drafted in each round. accepted: of these, how many were committed. committed: tokens committed, the target's
    own included. c: the draft's parameters over the target's (0, the default, for a draft without a model).
"""


class Speculation(evaluate.Metric):
    """A local metric: nothing is downloaded."""

    def _info(self) -> evaluate.MetricInfo:
        rounds = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation=_CITATION, inputs_description=_INPUTS,
            features=datasets.Features({"proposed": rounds, "accepted": rounds, "committed": rounds}),
            reference_urls=["https://arxiv.org/abs/2211.17192", "https://arxiv.org/abs/2403.00858"],
        )  # fmt: skip

    @staticmethod
    def columns(traces: Iterable[Any]) -> dict[str, list[list[int]]]:
        """The three inputs from `SpeculationTrace`s, or from outputs that hold one, a lone one, too; one example for every row of every trace, and one for all
        beams of a search."""
        found: dict[str, list[list[int]]] = {"proposed": [], "accepted": [], "committed": []}
        lone = hasattr(traces, "speculation") or hasattr(traces, "rounds") or not isinstance(traces, Iterable)
        for trace in (getattr(one, "speculation", one) for one in ([traces] if lone else traces)):
            if not hasattr(trace, "rounds"):
                raise ValueError(f"traces: expected SpeculationTraces, out.speculation of generate(speculative=True, return_dict_in_generate=True), in a list; "
                                 f"got {type(trace).__name__}.")
            entries = [entry for entries in trace.rounds for entry in entries]
            for row in range(len(trace.new_tokens) or 1):
                for name, column in found.items():
                    column.append([getattr(entry, name) for entry in entries if entry.row == row])
        return found

    def _compute(self, proposed, accepted, committed, c: float = 0.0) -> dict[str, float | int | None]:
        """acceptance_rate: accepted / proposed. alpha: accepted / judged, a round being judged up to its first rejection (alpha of
        Leviathan et al. 2023); one that ends with the text, without a token of the target's own, has none. block_efficiency:
        tokens committed per target forward. mbsu: `theory.memory_bound_speedup`.
        """
        rounds = [entry for columns in zip(proposed, accepted, committed) for entry in self._rounds(*columns)]
        n = [sum(entry[i] for entry in rounds) for i in range(3)]
        judged = sum(a + (a < p and a < t) for p, a, t in rounds)
        efficiency = n[2] / len(rounds) if rounds else None
        return {
            "acceptance_rate": n[1] / n[0] if n[0] else None,
            "alpha": n[1] / judged if judged else None,
            "block_efficiency": efficiency,
            "mbsu": memory_bound_speedup(efficiency, n[0] / len(rounds), c) if rounds else None,
            "mean_k": n[0] / len(rounds) if rounds else None,
            "rounds": len(rounds),
            "new_tokens": n[2],
        }

    @staticmethod
    def _rounds(proposed, accepted, committed) -> list[tuple[int, int, int]]:
        if not len(proposed) == len(accepted) == len(committed):
            raise ValueError("proposed, accepted and committed of a sequence must have an entry for every round; use metric.columns(traces).")
        for p, a, t in zip(proposed, accepted, committed):
            if not 0 <= a <= p or not a <= t <= p + 1:
                raise ValueError(f"a round with {p} tokens proposed, {a} accepted and {t} committed cannot be.")
        return list(zip(proposed, accepted, committed))
