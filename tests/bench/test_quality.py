"""Quality checks: exact match, ROUGE, and pass@1 with code that fails, lies, hangs, eats memory and tries to get out."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from hf_specdec.bench import quality
from hf_specdec.bench.quality import Problem

TASK = Problem("add", 'def add(a, b):\n    """The sum."""\n', "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0\n", "add")
RIGHT = "    return a + b\n"


def isolation() -> str:
    try:
        quality.run_problem(TASK, RIGHT)
        return "namespace"
    except RuntimeError:
        return "audit"


@pytest.fixture(scope="module")
def run():
    kind = isolation()
    return lambda completion, **limits: quality.run_problem(TASK, completion, isolation=kind, **limits)


def test_exact_match_is_the_share_of_equal_outputs():
    assert quality.exact_match([[1, 2], [3]], [[1, 2], [4]]) == 0.5
    assert quality.exact_match(["a"], ["a"]) == 1
    with pytest.raises(ValueError, match="as many outputs"):
        quality.exact_match(["a"], [])


def test_rouge_of_texts_and_of_token_ids():
    pytest.importorskip("rouge_score")
    assert quality.rouge(["the cat sat"], ["the cat sat"]) == {"rouge1": 1, "rouge2": 1, "rougeL": 1}
    by_text = quality.rouge(["the cat sat down"], ["the cat lay down"])
    assert by_text["rouge1"] == by_text["rougeL"] == 0.75 and by_text["rouge2"] == pytest.approx(1 / 3)
    assert quality.rouge([[5, 6, 7, 9]], [[5, 6, 8, 9]]) == by_text  # an id is a word
    assert quality.rouge([[1]], [[2]])["rougeL"] == 0
    assert quality.rouge(["你好 世界"], ["你好 世界"])["rouge2"] == 1 and quality.rouge(["Grüße an alle"], ["grüße an mich"])["rouge1"] == pytest.approx(2 / 3)


def test_right_code_passes_and_wrong_code_fails(run):
    assert run(RIGHT).passed
    wrong = run("    return a - b\n")
    assert wrong.reason == "failed" and "AssertionError" in wrong.detail
    assert run("    return a +\n").reason == "failed"


@pytest.mark.parametrize("completion", [
    "    import sys; sys.exit(0)\n", "    import os; os._exit(0)\n", "    print('passed'); raise SystemExit\n",
])  # fmt: skip
def test_code_that_ends_before_the_test_does_has_not_passed(run, completion):
    assert run(completion).reason == "failed"


def test_code_that_hangs_or_sleeps_is_ended(run):
    begin = time.monotonic()
    assert run("    while True: pass\n", seconds=2).reason in ("timeout", "failed")  # the CPU limit may strike first
    assert run("    import time; time.sleep(60)\n", seconds=2).reason == "timeout"
    assert time.monotonic() - begin < 30


def test_code_that_eats_memory_fails(run):
    assert "MemoryError" in run("    x = bytearray(3 << 30)\n    return a + b\n", memory=512 << 20).detail


def test_code_that_writes_without_end_fails_and_fills_neither_memory_nor_disk(run):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = run("    text = 'x' * (1 << 20)\n    while True: print(text)\n", seconds=3)
    assert not flood.passed and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in KiB
    files = run("    for i in range(10**6): open(str(i), 'w').write('x')\n    return a + b\n")
    assert files.reason == "failed" and "no more than 100 files" in files.detail


def test_nothing_that_the_code_has_started_is_left(run):
    mark = f"import time; time.sleep({4000 + time.monotonic_ns() % 1000})"
    start = f"    from multiprocessing import util; import sys\n    util.spawnv_passfds(sys.executable.encode(), [sys.executable, '-I', '-c', {mark!r}], [])\n"
    for rest in ("    return a + b\n", "    raise ValueError\n", "    while True: pass\n"):  # no audit event comes of that way to start a process
        run(start + rest, seconds=2)
        deadline = time.monotonic() + 5
        while (pids := running(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not pids


def running(command: str) -> list[int]:
    """Processes, other than dead ones that nobody has asked after, with this among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
            found += [int(path.parent.name)] if command.encode() in path.read_bytes().split(b"\0") and state != "Z" else []
        except OSError:
            pass
    return found


@pytest.mark.parametrize("attempt", [
    "import socket; socket.socket().connect(('127.0.0.1', 9))",
    "import subprocess; subprocess.run(['/bin/true'])",
    "import os; os.system('true')",
    "import os; os.fork()",
    "import os; os.kill(os.getppid(), 0)",
    "import ctypes; ctypes.CDLL(None)",
    "open('{outside}', 'w')",
    "import os; os.remove('{outside}')",
])  # fmt: skip
def test_code_that_reaches_out_is_refused(run, attempt, tmp_path):
    outside = tmp_path / "kept"
    outside.write_text("kept")
    outcome = run(f"    {attempt.format(outside=outside)}\n    return a + b\n")
    assert outcome.reason == "failed" and "PermissionError" in outcome.detail
    assert outside.read_text() == "kept"


def test_code_may_write_in_its_own_folder_which_is_gone_afterwards(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("    open('mine', 'w').write('x')\n    return a + b\n").passed
    assert not list(tmp_path.iterdir())


def test_code_sees_nothing_of_the_environment(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("    import os; assert 'HF_TOKEN' not in os.environ\n    return a + b\n").passed


def test_where_the_network_cannot_be_left_nothing_is_run(monkeypatch, tmp_path):
    fake = tmp_path / "guard.py"
    fake.write_text(Path(quality.guard.__file__).read_text().replace("    import ctypes\n", "    return False\n", 1))
    monkeypatch.setattr(quality.guard, "__file__", str(fake))
    with pytest.raises(RuntimeError, match='isolation="audit"'):
        quality.run_problem(TASK, RIGHT)
    assert quality.run_problem(TASK, RIGHT, isolation="audit").passed
    with pytest.raises(ValueError, match="choose one of"):
        quality.run_problem(TASK, RIGHT, isolation="none")


def test_pass_at_1_cuts_the_completion_after_the_function():
    kind = isolation()
    share, outcomes = quality.pass_at_1([TASK] * 2, [RIGHT + "\ndef more():\n    raise", "    return 0\n"], isolation=kind)
    assert share == 0.5 and [outcome.passed for outcome in outcomes] == [True, False]


def test_a_file_of_tasks_is_read_or_refused_by_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "t", "prompt": "p", "test": "t", "entry_point": "f", "canonical_solution": "x"}\n')
    assert quality.load_problems(path) == [Problem("t", "p", "t", "f")]
    for text in ('{"task_id": "t"}', "nothing", '{"task_id": "t", "prompt": "p", "test": "t", "entry_point": "f()"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="tasks.jsonl:1"):
            quality.load_problems(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no task"):
        quality.load_problems(path)
