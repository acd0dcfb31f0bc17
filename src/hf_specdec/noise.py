"""Uniform numbers as a function of (row seed, round, stream, index): every row has its own random stream, which does not
depend on its neighbours, on when they finish, or on the device."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from .uploads import upload

Bits = TypeVar("Bits", np.ndarray, torch.Tensor)
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def _mix(x: Bits) -> Bits:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 [...], whose products wrap as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Bits, bits: int) -> Bits:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(x: int) -> int:
    """What an int64 would hold of x."""
    return (x + 2**63) % 2**64 - 2**63


class Noise:
    """seeds: one int per row, 0 <= seed < 2**63. The few numbers of a round are made on the host and go to `device` as they are."""

    STREAMS = ("draft", "accept", "next")
    AHEAD, FEWEST = 16, 8  # of the numbers of verdicts: rounds, and tokens at least

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.device, self.round = device, 0
        self.ahead: tuple[int, torch.Tensor] | None = None
        self.keys = _mix(_mix(np.array(seeds, dtype=np.int64) + _GOLDEN) + _GOLDEN)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.keys, self.ahead = self.keys[np.array(rows, dtype=np.int64)], None

    def uniform(self, stream: str, n: int) -> torch.Tensor:
        """float64 [B, n] in [0, 1), multiples of 2**-53. Streams of different names and rounds are independent; a stream
        may carry a number ("draft:3"), and a draft inside another one has streams of its own ("draft:3/draft:0")."""
        *outer, stream = stream.split("/")
        keys = self.keys
        for part in outer:
            keys = _mix(_mix(keys + np.array([self._label(part) + 1]) * _GOLDEN) + _GOLDEN)
        return self._numbers(keys, np.arange(n) + (self._label(stream) << 16) + (self.round << 32))

    def coins(self, n: int) -> torch.Tensor:
        """float64 [B, 1 + n]: the one number of "next" and the n of "accept" of a verdict. They are made for AHEAD rounds at once: it is not the numbers
        that take time."""
        turn, at = divmod(self.round, self.AHEAD)
        if self.ahead is None or self.ahead[0] != turn or self.ahead[1].shape[-1] <= n:
            places = np.arange(-1, max(n, self.FEWEST)) + (self.STREAMS.index("accept") << 16)
            places[0] = self.STREAMS.index("next") << 16
            every = places + (np.arange(turn * self.AHEAD, (turn + 1) * self.AHEAD)[:, None] << 32)
            self.ahead = turn, self._numbers(self.keys, every.ravel()).view(-1, *every.shape)
        return self.ahead[1][:, at, : n + 1]

    def _numbers(self, keys: np.ndarray, places: np.ndarray) -> torch.Tensor:
        bits = _mix(_mix(keys[:, None] + places * _GOLDEN) + keys[:, None])
        return upload(_shift(bits, 11) * 2.0**-53, self.device)

    def _label(self, stream: str) -> int:
        name, _, number = stream.partition(":")
        return self.STREAMS.index(name) + len(self.STREAMS) * int(number or 0)


class Gumbel:
    """Gumbel noise as a function of (row seed, position, token) alone: whoever draws at that place draws with the same numbers.

    seeds: one int per row, 0 <= seed < 2**63. position: that of the token to be drawn, counted from the row's first token.
    """

    KEPT = 24  # positions per row that are remembered: those that draft and target ask for in one round

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.device = device
        seeds = upload(seeds, device, torch.long)
        self.keys = _mix(_mix(seeds * _GOLDEN) ^ _GOLDEN)
        self.known: list[dict[int, torch.Tensor]] = [{} for _ in seeds]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.keys, self.known = self.keys[upload(rows, self.keys.device)], [self.known[row] for row in rows]

    def __call__(self, row: int, position: int, vocab: int) -> torch.Tensor:
        """float32 [vocab]; of a larger vocabulary, the first entries are the same."""
        known = self.known[row]
        if position not in known or len(known[position]) < vocab:
            key = _mix(self.keys[row] + _wrapped((position + 1) * _GOLDEN))
            bits = _mix(_mix(key + torch.arange(vocab, dtype=torch.long, device=self.device) * _GOLDEN) + key)
            uniform = _shift(bits, 11).double() * 2.0**-53 + 2.0**-54  # never 0 or 1
            known[position] = -(-uniform.log()).log().float()
            if len(known) > self.KEPT:
                known.pop(next(iter(known)))
        return known[position][:vocab]
