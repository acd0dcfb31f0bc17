"""The stored order of codes, against one big integer a row."""

from __future__ import annotations

import random

import pytest
import torch

from hf_specdec.mx.packing import pack, unpack

from .reference import stored

each_width = pytest.mark.parametrize("bits", [4, 6, 8])


def some_codes(rows: int, columns: int, bits: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2**bits) for _ in range(columns)] for _ in range(rows)]


@each_width
@pytest.mark.parametrize("rows, columns", [(1, 32), (3, 96), (17, 4096), (0, 64)])
def test_a_row_is_its_codes_from_the_lowest_bit_on(bits, rows, columns):
    codes = some_codes(rows, columns, bits)
    packed = pack(torch.tensor(codes, dtype=torch.uint8).view(rows, columns), bits)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, columns * bits // 8) and packed.is_contiguous()
    assert torch.equal(packed, stored(codes, bits).view(packed.shape))


@each_width
@pytest.mark.parametrize("rows, columns", [(1, 32), (3, 96), (17, 4096), (0, 64)])
def test_unpack_undoes_pack(bits, rows, columns):
    codes = torch.tensor(some_codes(rows, columns, bits, seed=1), dtype=torch.uint8).view(rows, columns)
    back = unpack(pack(codes, bits), bits)
    assert back.dtype == torch.uint8 and torch.equal(back, codes)


@each_width
def test_pack_undoes_unpack(bits):
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (5, 32 * bits // 8), dtype=torch.uint8, generator=generator)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


@each_width
def test_every_code_at_every_place_of_a_block(bits):
    """One code among zeros: nothing of it spills over, whatever it is and wherever it stands."""
    codes = torch.zeros(32 * 2**bits, 32, dtype=torch.uint8)
    place, code = torch.arange(32 * 2**bits) % 32, torch.arange(32 * 2**bits) // 32
    codes[torch.arange(len(codes)), place] = code.to(torch.uint8)
    assert torch.equal(pack(codes, bits), stored(codes.tolist(), bits))
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@each_width
def test_rows_that_do_not_lie_together_are_packed_alike(bits):
    codes = torch.tensor(some_codes(32, 64, bits), dtype=torch.uint8)
    assert torch.equal(pack(codes.T, bits), pack(codes.T.contiguous(), bits))
    assert torch.equal(pack(codes[::2, 32:], bits), stored(codes[::2, 32:].tolist(), bits))


def test_four_bits_and_six_bits_written_out():
    assert pack(torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x0F]]
    six = torch.tensor([[0b000001, 0b000010, 0b100100, 0b111000]], dtype=torch.uint8)
    assert pack(six, 6).tolist() == [[0b10000001, 0b01000000, 0b11100010]]
