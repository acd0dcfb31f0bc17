"""Uniform numbers as a function of (row seed, round, stream, index): every row has its own random stream, which does not
depend on its neighbours, on when they finish, or on the device."""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64, whose products wrap as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Noise:
    """seeds: one int per row, 0 <= seed < 2**63."""

    STREAMS = ("draft", "accept", "next")

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu"):
        self.device, self.round = device, 0
        seeds = torch.tensor(seeds, dtype=torch.long, device=device)
        self.keys = _mix(_mix(seeds + _GOLDEN) + _GOLDEN)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.keys = self.keys[torch.tensor(rows, device=self.keys.device)]

    def uniform(self, stream: str, n: int) -> torch.Tensor:
        """float64 [B, n] in [0, 1), multiples of 2**-53. Streams of different names and rounds are independent; a stream
        may carry a number ("draft:3"), and a draft inside another one has streams of its own ("draft:3/draft:0")."""
        *outer, stream = stream.split("/")
        label, keys = self._label(stream), self.keys
        for part in outer:
            keys = _mix(_mix(keys + torch.tensor(self._label(part) + 1, device=self.device) * _GOLDEN) + _GOLDEN)
        counter = torch.arange(n, dtype=torch.long, device=self.device) + (label << 16) + (self.round << 32)
        bits = _mix(_mix(keys[:, None] + counter * _GOLDEN) + keys[:, None])
        return _shift(bits, 11).double() * 2.0**-53

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
        seeds = torch.tensor(seeds, dtype=torch.long, device=device)
        self.keys = _mix(_mix(seeds * _GOLDEN) ^ _GOLDEN)
        self.known: list[dict[int, torch.Tensor]] = [{} for _ in seeds]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.keys, self.known = self.keys[torch.tensor(rows, device=self.keys.device)], [self.known[row] for row in rows]

    def __call__(self, row: int, position: int, vocab: int) -> torch.Tensor:
        """float32 [vocab]; of a larger vocabulary, the first entries are the same."""
        known = self.known[row]
        if position not in known or len(known[position]) < vocab:
            key = _mix(self.keys[row] + torch.tensor(position + 1, device=self.device) * _GOLDEN)
            bits = _mix(_mix(key + torch.arange(vocab, dtype=torch.long, device=self.device) * _GOLDEN) + key)
            uniform = _shift(bits, 11).double() * 2.0**-53 + 2.0**-54  # never 0 or 1
            known[position] = -(-uniform.log()).log().float()
            if len(known) > self.KEPT:
                known.pop(next(iter(known)))
        return known[position][:vocab]
