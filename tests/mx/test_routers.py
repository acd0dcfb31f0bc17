"""Routers of experts in 16 bit: what a token's experts are does not depend on what shares its pass."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_specdec import mx
from hf_specdec.mx.beneath import put_beneath
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.routers import ROWS, SteadyRouter, routers, steady_dims

from .models import tiny

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no kernels here")
BFLOAT16 = torch.bfloat16


class Float32Router(torch.nn.Module):
    """One whose product torch computes otherwise for one, two and three rows than for many."""

    def __init__(self, experts: int = 8, size: int = 64):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, size, generator=torch.Generator().manual_seed(0)).to(BFLOAT16))

    def forward(self, hidden_states):
        scores = torch.nn.functional.linear(hidden_states.reshape(-1, 64).float(), self.weight.float()).softmax(-1)
        return scores, *scores.topk(2, dim=-1)


def steady(router) -> torch.nn.Module:
    made = copy.deepcopy(router)
    put_beneath(made, SteadyRouter, dims=steady_dims(router, 64, BFLOAT16))
    return made


@torch.no_grad()
def test_a_row_has_the_same_bits_at_every_number_of_rows():
    x, router = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(BFLOAT16), steady(Float32Router())
    assert router.dims == (2, 3)
    whole = router(x)
    for width in (1, 2, 3, 5, ROWS, ROWS + 1, 39):
        for first in (0, 40 - width):
            for part, all_of_it in zip(router(x[first : first + width]), whole):
                assert torch.equal(part, all_of_it[first : first + width])
    torch.testing.assert_close(whole[0], Float32Router()(x)[0])
    assert [tuple(part.shape) for part in router(x[None, :3])] == [(3, 8), (3, 2), (3, 2)]
    assert router(x[:0])[0].shape == (0, 8)


@torch.no_grad()
def test_routers_that_look_at_all_rows_or_give_something_else_are_left_alone():
    class AllRows(Float32Router):
        def forward(self, hidden_states):
            return (super().forward(hidden_states)[0].softmax(0),)

    class Counts(Float32Router):
        def forward(self, hidden_states):
            scores, _, chosen = super().forward(hidden_states)
            return scores, torch.bincount(chosen.flatten(), minlength=16)

    class Needs(Float32Router):
        def forward(self, hidden_states, state):
            return super().forward(hidden_states)[0] + state["bias"]

    assert [steady_dims(kind(), 64, BFLOAT16) for kind in (AllRows, Counts, Needs)] == [()] * 3


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_models_in_16_bit_get_them_and_lose_them_again(dtype):
    stock = tiny("qwen3_moe", dtype=dtype)
    kinds = {name: type(router) for name, router in routers(stock, ()).items()}
    assert set(kinds) == {f"model.layers.{i}.mlp.gate" for i in range(2)}
    for made in (mx.to_tiles(copy.deepcopy(stock)), mx.compress(copy.deepcopy(stock))):
        for model in (made, copy.deepcopy(made)):
            assert all(isinstance(model.get_submodule(name), SteadyRouter) == (dtype == BFLOAT16) for name in kinds)
        mx.dequantize(made)
        assert {name: type(made.get_submodule(name)) for name in kinds} == kinds
