"""Run by test_dataset: `python -m tests.commands.dataset_kills SCENARIO FOLDER COUNT SEED`, with a model, its draft and in.jsonl in FOLDER.

One process imports everything once and forks the runs that are killed: at random moments, inside a write, or before a sync, each
time by 1 to 3 processes. Prints JSON: what the test has to look at.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import typer

from hf_specdec import enable
from hf_specdec.bench.embedded import load_target
from hf_specdec.commands.dataset import generate_dataset
from hf_specdec.commands.speculation import Work


def run(folder: Path, output: Path, prepare=lambda: None, place=(0, 1), **changes) -> int:
    """Fork a run; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(place[0]), WORLD_SIZE=str(place[1]), LOCAL_RANK="0")
        os.dup2(os.open(output.parent / f"{output.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        prepare()
        sampling = {"do_sample": True, "temperature": 0.9}
        settings = dict(target=str(folder / "target"), draft=str(folder / "draft"), k="auto", max_new_tokens=12, dtype="float32",
                        mx=None, raw=False, sampling=sampling, lenience=1.0, seed=3, tokens=True)
        generate_dataset(Work(**settings | changes), str(folder / "in.jsonl"), output, None, None, 3, False)
        code = 0
    except typer.Exit as exit:
        code = exit.exit_code
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lines(output: Path) -> list[str]:
    return sorted(line for path in output.glob("rows-*.jsonl") for line in path.read_text().splitlines(keepends=True))


def die_in_a_write(rng: random.Random):
    """A `prepare` after which the process kills itself within one of its next writes: part of the bytes arrive, or all, unsynced."""
    after, share, write = rng.randrange(1, 6), rng.random(), os.write

    def prepare():
        left = [after]

        def fatal(file, data):
            left[0] -= 1
            if left[0]:
                return write(file, data)
            write(file, bytes(data)[: int(share * (len(data) + 1))])
            os.kill(os.getpid(), signal.SIGKILL)

        os.write = fatal

    return prepare


def interrupted_after(writes: int):
    """Ctrl-C in the child itself, after so many writes: another process could be late for it."""
    write = os.write

    def prepare():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        left = [writes]

        def counted(file, data):
            written = write(file, data)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return written

        os.write = counted

    return prepare


def kills(folder: Path, count: int, rng: random.Random) -> dict:
    """Kill runs of one output until `count` have died in the middle; a complete output is compared, and the next one begun."""
    whole = folder / "whole"
    assert wait(run(folder, whole)) == 0
    expected, killed, equal, torn, number = lines(whole), 0, [], 0, 0
    while killed < count:
        number += 1
        output, complete = folder / f"killed-{number}", False
        while not complete:
            world = rng.randint(1, 3)
            moment = rng.uniform(0.0, 0.6) if rng.random() < 0.5 else None
            children = [run(folder, output, die_in_a_write(rng) if moment is None else lambda: None, (rank, world)) for rank in range(world)]
            if moment is not None:
                time.sleep(moment)
                for child in children:
                    os.kill(child, signal.SIGKILL)
            codes = [wait(child) for child in children]
            assert set(codes) <= {0, -signal.SIGKILL}, (codes, (output.parent / f"{output.name}.log").read_text())
            killed += -signal.SIGKILL in codes
            torn += any(path.read_bytes()[-1:] not in (b"", b"\n") for path in output.glob("rows-*.jsonl"))
            complete = not any(codes)
        equal.append(lines(output) == expected)
    return {"rows": len(expected), "killed": killed, "torn": torn, "outputs": number, "equal": equal}


def interrupts(folder: Path, count: int, rng: random.Random) -> dict:
    """Ctrl-C `count` times after a few rows each, then let it end."""
    whole, output, codes = folder / "whole", folder / "interrupted", []
    assert wait(run(folder, whole)) == 0
    for _ in range(count):
        codes.append(wait(run(folder, output, interrupted_after(3))))
    between = len(lines(output))
    last = wait(run(folder, output))
    log = (output.parent / f"{output.name}.log").read_text()
    return {"codes": codes, "between": between, "last": last, "equal": lines(output) == lines(whole), "log": log}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, folder, count, seed = sys.argv[1:]
    enable(load_target(f"{folder}/target")[0])  # so that the children find loaded what a run imports as it goes
    load_target(f"{folder}/draft")
    print(json.dumps({"kills": kills, "interrupts": interrupts}[scenario](Path(folder), int(count), random.Random(int(seed)))))
