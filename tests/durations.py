"""What cases cost: `tests/durations.txt` has the seconds of one case of every function whose cases took more than a second together, on two slow cores.

    make test PYTEST_ARGS="-n 2 --dist worksteal --junitxml=out.xml"; python -m tests.durations out.xml     writes down what was measured anew
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("durations.txt")
LEAST = 1.0  # seconds of a function that are worth a line


def read() -> dict[str, float]:
    """Seconds of a case, by "tests/test_file.py::test_function"."""
    lines = (line.split() for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in lines}


def measured(report: Path) -> dict[str, list[float]]:
    """What pytest's --junitxml says that each function's cases took."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            found[f"{case.get('classname').replace('.', '/')}.py::{case.get('name').partition('[')[0]}"].append(float(case.get("time")))
    return found


def write(report: Path) -> None:
    """A function that the report does not have keeps its line."""
    known = read() if FILE.exists() else {}
    for name, seconds in measured(report).items():
        known.pop(name, None)
        if sum(seconds) > LEAST:
            known[name] = sum(seconds) / len(seconds)
    FILE.write_text("".join(f"{known[name]:.2f} {name}\n" for name in sorted(known)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
