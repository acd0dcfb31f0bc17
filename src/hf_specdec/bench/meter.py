"""What one measured call costs: seconds, forwards of the two models, time outside of them, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import torch

from .. import devices
from ..trace import SpeculationTrace

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Forwards:
    """Outermost forward passes of one model: seconds and tokens per row of each, in order."""

    seconds: list[float] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def mean(self) -> float:
        """Seconds per forward, prompt pass (the first one) excluded; nan without one."""
        later = self.seconds[1:]
        return sum(later) / len(later) if later else float("nan")


@dataclass
class Cost:
    """One call. seconds by the clock chosen; target, draft: empty where the models are not called as modules. by_loop: whether the target's
    passes are those that our loop has timed (`read`)."""

    seconds: float = 0.0
    target: Forwards = field(default_factory=Forwards)
    draft: Forwards = field(default_factory=Forwards)
    peak_memory: int | None = None
    by_loop: bool = False

    def read(self, trace: SpeculationTrace) -> None:
        """Take the target's passes, with their masks, from the loop's own clock, and one proposal and the root for a width: for compiled passes, which
        module hooks would undo. Of the draft model and of what is outside of both nothing is known then."""
        self.by_loop = True
        self.target.seconds = [verify for _, verify, _ in trace.round_seconds]
        self.target.widths = [1 + max(entry.proposed for entry in entries) for entries in trace.rounds]

    @property
    def outside(self) -> float:
        """Share of the time outside the models' forwards, the prompt pass left out of both; nan where not measured."""
        if self.by_loop:
            return float("nan")
        forwards, prompt = sum(self.target.seconds) + sum(self.draft.seconds), sum(self.target.seconds[:1])
        return (self.seconds - forwards) / (self.seconds - prompt) if self.target.seconds else float("nan")


@contextmanager
def measured(target, draft=None, clock: str = "wall", hooks: bool = True):
    """Yields a `Cost` that is complete when the block ends; without `hooks` on the models it has no forwards.

    On a GPU the forwards are launched, not awaited, so that only the total is a time there.
    """
    cost, now = Cost(), CLOCKS[clock]
    with ExitStack() as stack:
        for model, forwards in ((target, cost.target), (draft, cost.draft)):
            if model is not None and hooks:
                stack.enter_context(_watched(model, forwards, now))
        _reset_peak(target)
        synchronize(target)
        begin = now()
        yield cost
        synchronize(target)
        cost.seconds = now() - begin
        cost.peak_memory = _peak(target)


@contextmanager
def _watched(model, forwards: Forwards, now: Callable[[], float]):
    begun: list[float] = []

    def before(module, args, kwargs):
        given = [part for part in (kwargs.get("decoder_input_ids"), *args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if part is not None]
        forwards.widths.append(given[0].shape[1] if given else 0)
        begun.append(now())

    def after(module, args, output):
        forwards.seconds.append(now() - begun.pop())

    handles = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def synchronize(model) -> None:
    """Wait until the model's device has done what it was told."""
    devices.synchronize(model.device)


def _reset_peak(model) -> None:
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    elif sys.platform == "linux":
        with suppress(OSError), open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")  # the high-water mark of this process starts again


def _peak(model) -> int | None:
    """Bytes: allocated on the GPU, or resident in this process."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device)
    if sys.platform == "linux":
        with open("/proc/self/status") as handle:
            return next(int(line.split()[1]) * 1024 for line in handle if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
