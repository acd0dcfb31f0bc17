"""A race: arms run one after the other, the replay follows the measured times, and the GIF lasts as long."""

import re
import sys
import time
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import viz
from hf_specdec.bench.embedded import load_target
from hf_specdec.cli import app
from hf_specdec.commands import race as command
from hf_specdec.hints import install
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import save
from hf_specdec.viz import canvas, gif
from hf_specdec.viz.races import RACE_NOTE, Lap
from tests.helpers import plain, speculate

from ..bench import conftest as saved

TOKENIZER = saved.byte_tokenizer()
target_folder = saved.target_folder


def quick() -> viz.Race:
    """Two arms whose times are known: 4 tokens in 2 seconds against 4 in 1."""
    slow = Lap("slow", [(0.5 * i, i, text, False) for i, text in enumerate("abcd", 1)], [1, 2, 3, 4], 2.0)
    fast = Lap("fast", [(0.5, 1, "a", False), (0.5, 2, "b", True), (1.0, 3, "c", True), (1.0, 4, "d", False)], [1, 2, 3, 4], 1.0)
    return viz.Race([slow, fast])


def printed(renderable, width: int = 100) -> str:
    console = Console(record=True, force_terminal=True, color_system="standard", width=width)
    console.print(renderable)
    return console.export_text(styles=True)


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# --- running --------------------------------------------------------------------------------------------------------------


def test_arms_run_one_after_the_other_and_each_is_timed_from_its_own_start():
    log = []

    def run(name):
        def decode(emit):
            log.append(f"{name} begins")
            time.sleep(0.05)
            emit("x", False)
            log.append(f"{name} ends")

        return decode

    warmed = viz.Arm("b", run("b"), warm=lambda: log.append("b warms up"))
    laps = viz.race([("a", run("a")), warmed], replay=False).laps
    assert log == ["a begins", "a ends", "b warms up", "b begins", "b ends"]
    assert [lap.label for lap in laps] == ["a", "b"]
    assert all(0.05 <= lap.pieces[0][0] <= lap.seconds for lap in laps)


def test_ids_are_decoded_and_characters_of_several_tokens_are_whole():
    ids = TOKENIZER("né🎉")["input_ids"]

    def run(emit):
        for token in ids:
            emit([token], [True])

    (lap,) = viz.race([("a", run)], TOKENIZER, replay=False).laps
    assert "".join(text for _, _, text, _ in lap.pieces) == "né🎉" and lap.tokens == ids and lap.count() == len(ids)


def test_a_racer_gets_the_tokens_of_generate_plain_or_speculative():
    model, ids = saved.tiny_model(0), TOKENIZER("abcabcabc")["input_ids"]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 256}
    hf_specdec.enable(model)
    arms = [viz.racer("plain", model, inputs, **options), viz.racer("ours", model, inputs, speculative=True, **options)]
    laps = viz.race(arms, TOKENIZER, replay=False).laps
    expected = plain(model, [ids], max_new_tokens=12, pad_token_id=256)[0]
    assert laps[0].tokens == laps[1].tokens == expected
    mask = speculate(model, [ids], None, "auto", max_new_tokens=12, pad_token_id=256).speculation.draft_mask
    assert any(drafted for _, _, _, drafted in laps[1].pieces) == bool(mask.any())
    assert not any(drafted for _, _, _, drafted in laps[0].pieces)


# --- what is shown --------------------------------------------------------------------------------------------------------


def test_a_frame_shows_what_had_come_by_then():
    race = quick()
    early, late = bare(printed(race.frame(0.6))), bare(printed(race.frame(2.0)))
    assert "ab" in early and "abc" not in early  # slow has a, fast has ab
    assert late.count("abcd") == 2 and "slow" in early and "fast" in early
    assert RACE_NOTE in " ".join(early.split()) and "one after the other" in RACE_NOTE


NAMES = ["plain generate of the target in bfloat16", "MXFP6", "MXFP6 with speculation", "MXFP6 with speculation, rounded activations"]


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_name_and_no_text_is_cut_however_narrow_the_terminal(width):
    race = viz.Race([Lap(name, [(0.1, 1, "0123456789" * 3, False)], [1], 1.0) for name in NAMES])
    lines = bare(printed(race.frame(1.0, width), width)).splitlines()
    names, words = " ".join(NAMES).split(), " ".join(lines).split()
    assert max(map(len, lines)) <= width and all(words.count(word) >= names.count(word) for word in names)
    frames = "".join(line for line in lines if line.startswith("│"))
    assert [frames.count(digit) for digit in "0123456789"] == [3 * len(NAMES)] * 10


def test_no_name_is_cut_in_a_picture():
    picture = gif.Picture(viz.Race([Lap(name, [(0.1, 1, "a", False)], [1], 1.0) for name in NAMES]))
    picture.figure.canvas.draw()
    boxes, whole = [axes.title.get_window_extent() for axes in picture.panels], picture.figure.bbox
    assert [axes.get_title().replace("\n", " ") for axes in picture.panels] == NAMES
    assert all(box.x0 >= last for box, last in zip(boxes, [whole.x0, *(box.x1 for box in boxes)])) and all(box.y1 <= whole.y1 for box in boxes)


def test_a_name_that_fits_stands_in_its_frame():
    first = bare(printed(quick().frame(2.0))).splitlines()[0]
    assert first.startswith("╭") and "slow" in first and "fast" in first


def test_tokens_per_second_stand_under_each_arm():
    race = quick()
    slow, fast = race.laps
    assert race.status(slow, 1.0) == "2.0 tokens/s, 2 tokens"
    assert race.status(fast, 0.5) == "4.0 tokens/s, 2 tokens"
    assert race.status(fast, 1.5) == "4.0 tokens/s, 4 tokens in 1.0 s"  # the first arm is not there yet
    assert race.status(fast) == "4.0 tokens/s, 4 tokens in 1.0 s, 2.00x, same tokens"
    fast.tokens[-1] = 9
    assert race.status(fast).endswith("other tokens") and race.status(slow) == "2.0 tokens/s, 4 tokens in 2.0 s"


def test_drafted_text_is_coloured_and_no_other():
    shown = printed(quick().frame(2.0))
    assert re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", shown) == ["bc"]


def test_long_text_is_wrapped_and_its_end_is_shown():
    lap = Lap("x", [(0.1, 1, "abcde\nfg漢", False), (0.2, 2, "漢hi", True)], [1, 2], 0.3)
    assert lap.screen(1, 4, 9) == [[("abcd", False)], [("e", False)], [("fg漢", False)], [("漢hi", True)]]
    assert lap.screen(1, 4, 2) == [[("fg漢", False)], [("漢hi", True)]]
    assert lap.screen(0.1, 4, 1) == [[("fg漢", False)]]


def test_a_models_text_is_neither_markup_nor_control():
    def run(emit):
        emit(TOKENIZER("[red]x[/red]\x1b]0;t\x07")["input_ids"])

    race = viz.race([("[b]label[/b]", run)], TOKENIZER, replay=False)
    shown = bare(printed(race.frame(9)))
    assert "[red]x[/red]<U+001B>]0;t<U+0007>" in shown and "[b]label[/b]" in shown


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_race_is_shown_whatever_the_locale_has(encoding, monkeypatch):
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    viz.race([("né", words("漢 ", "é"))])
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)
    assert ("Running né" in shown and "漢 é" in shown) if encoding == "utf-8" else (r"n\xe9" in shown and r"\u6f22 \xe9" in shown)


class Clock:
    def __init__(self):
        self.now, self.slept = 0.0, 0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + 1


def test_the_replay_takes_the_measured_time():
    clock, console = Clock(), Console(force_terminal=True, width=100, height=30, file=open("/dev/null", "w"))
    quick().replay(console, clock, clock.sleep)
    assert clock.now == pytest.approx(2.0, abs=0.06) and clock.slept == pytest.approx(40, abs=1)


def test_without_a_terminal_the_end_is_printed_once_and_nobody_waits():
    console, clock = Console(record=True, force_terminal=False, width=100), Clock()
    quick().replay(console, clock, clock.sleep)
    text = console.export_text()
    assert clock.slept == 0 and text.count("2.00x") == 1 and text.count("abcd") == 2


# --- the GIF --------------------------------------------------------------------------------------------------------------


def test_the_gif_lasts_as_long_as_the_race(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    with Image.open(quick().save_gif(tmp_path / "race.gif", fps=5)) as picture:
        lasting, pictures = [], []
        for number in range(picture.n_frames):
            picture.seek(number)
            lasting.append(picture.info["duration"] / 1000)
            pictures.append(picture.convert("RGB").tobytes())
        assert picture.format == "GIF" and picture.is_animated
    assert sum(lasting) == pytest.approx(2.0 + gif.HOLD, abs=0.4)
    assert len(set(pictures)) >= 4 and pictures[0] != pictures[-1]


def test_the_pictures_show_the_text_the_speeds_and_the_note():
    pytest.importorskip("matplotlib")
    race = quick()
    race.laps[1].label = "$fast"
    picture = gif.Picture(race)
    picture.draw(0.6)
    texts = [[text.get_text() for text in axes.texts] for axes in picture.figure.axes]
    assert texts == [["a", race.status(race.laps[0], 0.6)], ["a", "b", race.status(race.laps[1], 0.6)]]
    assert [len(axes.patches) for axes in picture.figure.axes] == [0, 1]
    picture.draw(2.0)
    assert [text.get_text() for text in picture.figure.axes[1].texts][:3] == ["a", "bc", "d"]
    assert RACE_NOTE in [text.get_text() for text in picture.figure.texts]
    assert picture.figure.axes[1].get_title() == "$fast"


def test_a_gif_is_whole_or_as_it_was(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = quick().save_gif(tmp_path / "race.gif", fps=5)
    before, draw = path.read_bytes(), gif.Picture.draw

    def until_ctrl_c(picture, now):
        if now > 0.5:
            raise KeyboardInterrupt
        draw(picture, now)

    monkeypatch.setattr(gif.Picture, "draw", until_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        quick().save_gif(path, fps=5)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_long_race_has_fewer_pictures_per_second():
    when, fps = gif.times(300.0, 10)
    assert len(when) < 1.1 * gif.MOST_FRAMES and fps == 0.5 and when[-1] == 300.0 and when[1] == 2.0


# --- bad input ------------------------------------------------------------------------------------------------------------


def words(*texts):
    return lambda emit: [emit(text) for text in texts]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: viz.race([], replay=False), "arms: give at least one"),
        (lambda: viz.race([("quiet", lambda emit: None)], replay=False), "'quiet' emitted nothing"),
        (lambda: viz.race([("ids", lambda emit: [emit([1, 2]), 1 / 0])], replay=False), "'ids' emits token ids: pass tokenizer="),  # at once
        (lambda: viz.racer("two", None, {"input_ids": [[1], [2]]}), "takes one prompt, these are 2"),
        (lambda: viz.racer("none", None, {"input_ids": [[1]]}), "model: expected a transformers model with generate.., got NoneType"),
        (lambda: viz.race([("never", lambda emit: 1 / 0)], 3, replay=False), "tokenizer=3 cannot decode"),
        (lambda: viz.race(3, replay=False), "arms: give Arms, .* 3 is neither"),
        (lambda: viz.race([3], replay=False), "arms: give Arms, or .label, run. pairs with a function run.emit.; 3 is neither"),
        (lambda: viz.race([("a", None)], replay=False), r"arms: .*\('a', None\) is neither"),
        (lambda: viz.racer("text", None, "abc"), "inputs: give what the tokenizer returns of one prompt, .* not str"),
        (lambda: viz.racer("ids", None, torch.ones(1, 3)), "inputs: .* not Tensor"),
        (lambda: quick().save_gif("race.gif", fps="x"), "fps='x'"),
        (lambda: quick().save_gif("race.mp4"), "must end in .gif"),
        (lambda: quick().save_gif("no/such/folder/race.gif"), "its folder does not exist"),
        (lambda: quick().save_gif("race.gif", fps=0), "fps=0"),
        (lambda: quick().save_gif("mine.gif"), "is no GIF"),
    ],
)
def test_bad_input_is_named(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.gif").write_text("notes")
    with pytest.raises(ValueError, match=message):
        call()


def test_without_matplotlib_a_gif_is_refused_before_anything_runs(target_folder, monkeypatch, tmp_path):
    canvas._kind.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    try:
        result = CliRunner().invoke(app, ["demo", "no/such/model", "--save-race", str(tmp_path / "race.gif")])
    finally:
        canvas._kind.cache_clear()
    assert result.exit_code == 2 and install("demo") in result.stderr


# --- the command ----------------------------------------------------------------------------------------------------------


def test_demo_race_shows_every_arm_and_saves_the_gif(target_folder, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "race.gif"
    settings = ["--prompt", "abcabcabc", "--max-new-tokens", "10", "--save-race", str(path)]
    result = CliRunner().invoke(app, ["demo", target_folder, *settings])
    assert result.exit_code == 0, result.output
    for words in ("baseline", "MXFP6", "MXFP6 + speculation", "tokens/s", "one after the other", "Written"):
        assert words in " ".join(result.stdout.split())
    assert path.read_bytes().startswith(b"GIF8")


def test_a_draft_that_reads_the_targets_states_races_with_those_of_the_packed_copy(target_folder, tmp_path):
    model, _ = load_target(target_folder)
    folder = save(build_drafter(model, [1], None, (0, 2)), tmp_path / "drafter", "the test's target")
    result = CliRunner().invoke(app, ["demo", target_folder, "--race", "--draft", str(folder), "--prompt", "abc", "--max-new-tokens", "6"])
    assert result.exit_code == 0 and "MXFP6 + speculation" in " ".join(result.stdout.split()), result.stderr


def test_models_too_large_to_be_copied_race_with_their_own_weights(target_folder, monkeypatch):
    monkeypatch.setattr(command, "MOST_PARAMETERS", 10)
    result = CliRunner().invoke(app, ["demo", target_folder, "--race", "--prompt", "abc", "--max-new-tokens", "6"])
    assert result.exit_code == 0 and "MX" not in result.stdout and "Timing" not in result.output


def test_without_kernels_the_race_says_what_is_left_out(target_folder, monkeypatch):
    from hf_specdec import mx

    monkeypatch.setattr(mx, "kernel_info", lambda: {"path": "torch", "reason": "no compiler"})
    result = CliRunner().invoke(app, ["demo", target_folder, "--race", "--prompt", "abc", "--max-new-tokens", "6"])
    assert result.exit_code == 0 and "Without MX weights: no compiler" in result.stdout and "same tokens" in " ".join(result.stdout.split())


@pytest.mark.parametrize("path", ["race.mp4", "no/such/folder/race.gif"])
def test_a_bad_name_for_the_gif_is_refused_before_anything_is_loaded(path):
    result = CliRunner().invoke(app, ["demo", "no/such/model", "--race", "--save-race", path])
    assert result.exit_code == 2 and path in result.stderr
