"""Is the quality unchanged? Exact match, ROUGE, and pass@1 of generated Python, which is run in a limited process of its own.

Nothing a model wrote is ever run in this process.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..hints import install
from . import guard
from .prompts import json_lines, read_text

ISOLATION = ("namespace", "audit")
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ", "\n```")  # what follows a finished function
FIELDS = ("task_id", "prompt", "test", "entry_point")


def exact_match(ours: Sequence, plain: Sequence) -> float:
    """Share of outputs that are equal, of outputs in the same order (texts, or lists of token ids)."""
    if len(ours) != len(plain) or not len(ours):
        raise ValueError(f"exact_match compares as many outputs on both sides, at least one: {len(ours)} and {len(plain)} were given.")
    return sum(a == b for a, b in zip(ours, plain)) / len(ours)


def rouge(ours: Sequence[str | Sequence[int]], plain: Sequence[str | Sequence[int]]) -> dict[str, float]:
    """Mean F-measures "rouge1", "rouge2", "rougeL" (Lin 2004), computed by the package rouge_score. Words are those of a text, with its own
    tokenizer where all texts are ASCII and as letters of any script that stand together where one is not, or the ids of a list of token ids.
    ImportError, with the remedy, without the package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError(f"ROUGE needs the package rouge_score: {install('quality')}") from None
    if len(ours) != len(plain) or not len(ours):
        raise ValueError(f"rouge compares as many outputs on both sides, at least one: {len(ours)} and {len(plain)} were given.")
    names = ["rouge1", "rouge2", "rougeL"]
    on_ids = not isinstance(ours[0], str)
    own = _Words(r"\S+") if on_ids else None if all(map(str.isascii, [*ours, *plain])) else _Words(r"\w+")  # its own drops other letters
    scorer = RougeScorer(names, tokenizer=own)
    pairs = [tuple(" ".join(map(str, side)) if on_ids else side for side in pair) for pair in zip(plain, ours)]
    scores = [scorer.score(*pair) for pair in pairs]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in names}


class _Words:
    """What rouge_score takes for a tokenizer: whatever the pattern finds."""

    def __init__(self, pattern: str):
        self.pattern = re.compile(pattern)

    def tokenize(self, text: str) -> list[str]:
        return self.pattern.findall(text.lower())


# --- pass@1 ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A task of HumanEval (Chen et al. 2021): a prompt that ends in a function's docstring, and a test that defines check(f)."""

    task_id: str
    prompt: str
    test: str
    entry_point: str


@dataclass(frozen=True)
class Outcome:
    """reason: "passed", "failed" (an error, a wrong result or an early exit), "timeout"; detail: the last line it wrote."""

    task_id: str
    reason: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.reason == "passed"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def load_problems(path: str | Path) -> list[Problem]:
    """The tasks of a JSONL file of HumanEval; ValueError naming file, line and field otherwise."""
    problems = []
    for number, record in json_lines(read_text(Path(path), "tasks").split("\n"), path):
        try:
            fields = {name: record[name] for name in FIELDS}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a task of HumanEval ({error}); a line has {', '.join(FIELDS)}.") from None
        if not all(isinstance(value, str) for value in fields.values()) or not fields["entry_point"].isidentifier():
            raise ValueError(f"{path}:{number}: {', '.join(FIELDS)} must be texts, and entry_point a name.")
        problems.append(Problem(**fields))
    if not problems:
        raise ValueError(f"{path} holds no task.")
    return problems


def function_of(completion: str) -> str:
    """The completion up to where the next thing at the margin begins."""
    ends = [place for end in ENDS if (place := completion.find(end)) >= 0]
    return completion[: min(ends)] if ends else completion


def run_problem(problem: Problem, completion: str, seconds: int = 10, memory: int = 2**30, isolation: str = "namespace") -> Outcome:
    """Run prompt + completion + test in a process of its own, in a temporary folder, under `bench.guard`.

    seconds: of wall and of CPU time. memory: bytes of address space. isolation: "namespace" (Linux; no network at all), or "audit"
    for systems that allow no namespaces (network refused in Python only). RuntimeError, with the remedy, where namespaces cannot be
    had. The process group is killed at the end, whatever happens, also on Ctrl-C.
    """
    if isolation not in ISOLATION:
        raise ValueError(f"isolation={isolation!r} is not known; choose one of {list(ISOLATION)}.")
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="hf_specdec_pass1_") as folder, tempfile.TemporaryFile() as written:  # a file: its size is limited, too
        candidate = Path(folder) / "candidate.py"
        candidate.write_text(f"{problem.prompt}{completion}\n\n{problem.test}\n\ncheck({problem.entry_point})\n", encoding="utf-8")
        command = [sys.executable, "-I", "-S", "-B", guard.__file__, str(candidate), str(seconds), str(memory), isolation]
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": ""}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=written, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True)
        try:
            process.communicate(f"{nonce}\n".encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(problem.task_id, "timeout", f"more than {seconds} s")
        finally:
            _end(process)
        written.seek(0)
        output = written.read().decode(errors="replace")
    if process.returncode == guard.NO_NAMESPACE:
        raise RuntimeError('this system allows no network namespace, so generated code could reach the network: run as root in a container, '
                           'or pass isolation="audit", which refuses sockets in Python only.')
    lines = output.strip().splitlines()
    passed = process.returncode == 0 and bool(lines) and lines[-1] == nonce
    return Outcome(problem.task_id, "passed" if passed else "failed", "" if passed else lines[-1][:200] if lines else "no output")


def _end(process: subprocess.Popen) -> None:
    """Kill the process and all that it has started."""
    with suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pass_at_1(problems: Iterable[Problem], completions: Iterable[str], step: Callable[[], None] = lambda: None, **limits) -> tuple[float, list[Outcome]]:
    """(share that passes, outcomes); one completion for each problem, cut by `function_of`. limits: those of `run_problem`.
    step() is called after each."""
    outcomes = []
    for problem, completion in zip(problems, completions, strict=True):
        outcomes.append(run_problem(problem, function_of(completion), **limits))
        step()
    if not outcomes:
        raise ValueError("pass_at_1 needs at least one problem.")
    return sum(outcome.passed for outcome in outcomes) / len(outcomes), outcomes
