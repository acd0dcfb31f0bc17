"""Progress where the stream is no terminal: lines now and then, with the time that is left."""

import io

import pytest
from rich.console import Console

from hf_specdec.bench import terminal


@pytest.fixture
def clock(monkeypatch):
    """Seconds that stand still until they are moved."""
    seconds = [100.0]
    monkeypatch.setattr(terminal, "now", lambda: seconds[0])
    return seconds


def lines(console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_a_line_comes_with_every_tenth_and_where_the_last_is_half_a_minute_old(clock):
    console = Console(file=io.StringIO())
    with terminal.counting("Tokens written", 500_000, console=console) as count:
        count.start(1000)
        for seconds, done in ((10, 2000), (20, 3000), (31, 4100), (40, 5000), (100, 60_000)):
            clock[0] = 100.0 + seconds
            count.reach(done, "a note" if done == 60_000 else "")
        clock[0] = 1000.0
        count.reach(500_000)
    assert lines(console) == ["Tokens written 4,100 of 500,000, about 83 min left", "Tokens written 60,000 of 500,000, about 12 min left (a note)",
                              "Tokens written 500,000 of 500,000, took 15 min"]


def test_what_was_done_before_does_not_count_for_the_pace(clock):
    console = Console(file=io.StringIO())
    with terminal.counting("Training", 100, 50, console) as count:
        clock[0] += 40
        count.reach(50)  # nothing new yet
        clock[0] += 40
        count.reach(60)
    assert lines(console) == ["Training 50 of 100, 40 s so far", "Training 60 of 100, about 5 min left"]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (9000, "2.5 h")])
def test_durations_are_rounded_for_people(seconds, words):
    assert terminal.duration(seconds) == words


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_bar_keeps_its_figures_on_a_narrow_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with terminal.counting("Sampling with negative control, a draft that lies about q", 200, console=console) as count:
        count(steps=64)
    assert " 64/200 0:00:0" in console.file.getvalue()
