"""A race as an animated GIF, drawn with matplotlib."""

from __future__ import annotations

import os
import warnings
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import TYPE_CHECKING

from rich.cells import cell_len

from .canvas import new_figure
from .text import RACE_NOTE

if TYPE_CHECKING:
    from .races import Race

COLUMNS, ROWS = 40, 16
FONT = 8
CELL = 0.602 * FONT / 72  # inches: the width of a character in matplotlib's own monospace font
LINE = 1.35 * FONT / 72
MOST_FRAMES = 150
HOLD = 2.0  # seconds that the last picture stays


def check_path(path: str | Path) -> Path:
    """The path, if a GIF can be written there; ValueError or ImportError otherwise."""
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{str(path)!r}: the race is saved as a GIF; the name must end in .gif.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{str(path)!r}: its folder does not exist.")
    if path.exists() and not (path.is_file() and path.read_bytes()[:4] == b"GIF8"):
        raise ValueError(f"{str(path)!r} exists and is no GIF: name another file.")
    new_figure(1, 1)  # fails here, with the remedy, where matplotlib is missing
    return path


def times(seconds: float, fps: float) -> tuple[list[float], float]:
    """When the pictures are taken, and how many go into a second: fewer for a long race, so that it stays in real time."""
    fps = min(fps, MOST_FRAMES / seconds) if seconds > 0 else fps
    return [number / fps for number in range(int(seconds * fps) + 1)] + [seconds] * max(int(HOLD * fps), 1), fps


def save(race: Race, path: str | Path, fps: float = 10) -> Path:
    """Write the race's replay; about 150 pictures at most."""
    path = check_path(path)
    if not isinstance(fps, Real) or not 0 < fps <= 50:
        raise ValueError(f"fps={fps!r} must be above 0 and at most 50.")
    from matplotlib.animation import PillowWriter

    picture = Picture(race)
    when, fps = times(race.seconds, fps)
    writer = PillowWriter(fps=fps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # a box stands where the font lacks a character
        with TemporaryDirectory(dir=path.parent, prefix=".") as folder:  # the writer leaves what there is where it is interrupted
            partial = Path(folder) / path.name
            with writer.saving(picture.figure, str(partial), dpi=90):
                for now in when:
                    picture.draw(now)
                    writer.grab_frame()
            os.replace(partial, path)
    return path


class Picture:
    """One picture after the other, all in the same figure."""

    def __init__(self, race: Race):
        self.race, n = race, len(race.laps)
        names = [fill(lap.label, COLUMNS - 4, max_lines=2, placeholder=" ...") for lap in race.laps]
        width, height = n * (COLUMNS + 3) * CELL, (ROWS + (7 if any("\n" in name for name in names) else 6)) * LINE
        self.figure = new_figure(width, height)
        self.figure.set_layout_engine("none")
        self.panels, self.drawn = [], []
        for number, name in enumerate(names):
            place = ((number + 0.5 * 3 / (COLUMNS + 3)) / n, 4 * LINE / height, COLUMNS / (COLUMNS + 3) / n, ROWS * LINE / height)
            axes = self.figure.add_axes(place, xlim=(0, COLUMNS), ylim=(ROWS, 0), xticks=[], yticks=[])
            axes.set_title(name, fontsize=FONT + 1, fontweight="bold", parse_math=False)
            self.panels.append(axes)
        self.figure.text(0.5, 0.5 * LINE / height, RACE_NOTE, ha="center", fontsize=FONT - 1, color="#555555", wrap=True)

    def draw(self, now: float) -> None:
        """The state after so many seconds."""
        for artist in self.drawn:
            artist.remove()
        self.drawn = []
        for axes, lap in zip(self.panels, self.race.laps):
            for y, line in enumerate(lap.screen(now, COLUMNS - 1, ROWS)):
                self._line(axes, y, line)
            style = {"ha": "center", "va": "top", "fontsize": FONT - 0.5, "parse_math": False}
            self.drawn.append(axes.text(COLUMNS / 2, ROWS + 0.5, self.race.status(lap, now), **style))

    def _line(self, axes, y: int, line: list[tuple[str, bool]]) -> None:
        from matplotlib.patches import Rectangle

        x = 0.5
        for text, drafted in line:
            cells = cell_len(text)
            if drafted:
                self.drawn.append(axes.add_patch(Rectangle((x, y), cells, 1, color="#b6ecc3", linewidth=0)))
            style = {"family": "monospace", "fontsize": FONT, "va": "center_baseline", "parse_math": False}
            self.drawn.append(axes.text(x, y + 0.5, text, **style))
            x += cells
