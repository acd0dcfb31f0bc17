"""What `hf-specdec serve` counts, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

PREFIX = "hf_specdec_"
KIND = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)  # seconds
COUNTERS = {"requests": "Requests by path and HTTP status.", "prompt_tokens": "Tokens of prompts.", "cached_prompt_tokens": "Tokens of prompts that were not read again.",
            "generation_tokens": "Tokens written.", "drafted_tokens": "Tokens drafted.", "accepted_tokens": "Drafted tokens that the target accepted.",
            "target_forwards": "Forward passes of the target, counted for every answer that had part in one.", "answers": "Answers written to their end."}
GAUGES = {"requests_running": "Answers that are being written.", "requests_waiting": "Requests that wait for their turn.",
          "acceptance_rate": "Accepted of all drafted tokens.", "block_efficiency": "Tokens written per forward pass of the target."}
HISTOGRAMS = {"request_seconds": "From a request's arrival to the end of its answer.", "first_token_seconds": "From a request's arrival to its answer's first token.",
              "queue_seconds": "From a request's arrival until its answer is begun."}


@dataclass
class Report:
    """What is known of one answer. came, begun, first, done: times; known: tokens of the prompt that were not read again; tokens: new ones."""

    came: float = field(default_factory=monotonic)
    begun: float | None = None
    first: float | None = None
    done: float | None = None
    prompt: int = 0
    known: int = 0
    tokens: list[int] = field(default_factory=list)

    def token(self, tokens: list[int]) -> None:
        self.first = self.first or monotonic()
        self.tokens += tokens


class Metrics:
    """Counters and histograms of a server; several threads add to them. state: called for {gauge: value}."""

    def __init__(self):
        self.lock, self.counts = Lock(), Counter()
        self.seconds = {name: [0] * (len(BUCKETS) + 1) for name in HISTOGRAMS}
        self.sums, self.state = Counter(), dict

    def requested(self, path: str, status: int) -> None:
        with self.lock:
            self.counts["requests", path, status] += 1

    def answered(self, report: Report, trace: Any) -> None:
        """trace: of speculation, or None."""
        drafted, accepted, forwards = (trace.proposed, trace.accepted, trace.target_calls) if trace is not None else (0, 0, len(report.tokens))
        with self.lock:
            self.counts.update(answers=1, prompt_tokens=report.prompt, cached_prompt_tokens=report.known, generation_tokens=len(report.tokens),
                               drafted_tokens=drafted, accepted_tokens=accepted, target_forwards=forwards)
            for name, end in (("request_seconds", report.done), ("first_token_seconds", report.first), ("queue_seconds", report.begun)):
                if end is not None:
                    self.seconds[name][bisect_left(BUCKETS, end - report.came)] += 1
                    self.sums[name] += end - report.came

    def text(self) -> str:
        """As Prometheus reads it."""
        with self.lock:
            counts, sums, seconds = self.counts.copy(), self.sums.copy(), {name: list(found) for name, found in self.seconds.items()}
        gauges = self.state() | {"acceptance_rate": _ratio(counts["accepted_tokens"], counts["drafted_tokens"]),
                                 "block_efficiency": _ratio(counts["generation_tokens"], counts["target_forwards"])}
        lines = []
        for name, said in COUNTERS.items():
            lines += _head(f"{name}_total", said, "counter")
            if name == "requests":
                found = sorted((key[1:], value) for key, value in counts.items() if type(key) is tuple)
                lines += [f'{PREFIX}{name}_total{{path="{path}",status="{status}"}} {value}' for (path, status), value in found]
            else:
                lines.append(f"{PREFIX}{name}_total {counts[name]}")
        for name, said in GAUGES.items():
            lines += [*_head(name, said, "gauge"), f"{PREFIX}{name} {gauges.get(name, 0)}"]
        for name, said in HISTOGRAMS.items():
            lines += _head(name, said, "histogram")
            below = 0
            for most, count in zip((*BUCKETS, "+Inf"), seconds[name]):
                below += count
                lines.append(f'{PREFIX}{name}_bucket{{le="{most}"}} {below}')
            lines += [f"{PREFIX}{name}_sum {sums[name]}", f"{PREFIX}{name}_count {below}"]
        return "\n".join(lines) + "\n"


def _head(name: str, said: str, kind: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {said}", f"# TYPE {PREFIX}{name} {kind}"]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
