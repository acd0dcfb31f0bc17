"""Memory: no growth over 1,000 calls of generate(), no more cache slots per row than the longest row plus N drafted tokens.

    python benchmarks/memory.py

A tiny target with a tiny draft, ragged batches of three, prompts and lengths that vary from call to call.
"""

from __future__ import annotations

import gc
import random

import psutil
import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import enable
from hf_specdec.bench.arms import padded
from hf_specdec.bench.terminal import counting
from hf_specdec.compat import CACHE

VOCABULARY, WARM_UP = 128, 100


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class Slots:
    """Watches the cache of every target pass: the most slots per row it had beyond what the call can need."""

    def __init__(self, model):
        self.allowed, self.largest_excess, self.seen = 0, -(10**9), 0
        model.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, module, args, kwargs, output) -> None:
        slots = kwargs[CACHE].layers[0].keys.shape[2]
        self.seen += 1
        self.largest_excess = max(self.largest_excess, slots - self.allowed)


def main(calls: int = 1000, k: int = 7):
    """Exit code 1 if memory grows or a cache is too large."""
    torch.set_num_threads(1)
    target, draft, chance, process = enable(tiny(0)), tiny(1), random.Random(0), psutil.Process()
    slots, resident, objects = Slots(target), [], []
    with counting("Generating", WARM_UP + calls) as step:
        for number in range(WARM_UP + calls):
            prompts = [[chance.randrange(2, VOCABULARY) for _ in range(chance.randrange(1, 60))] for _ in range(3)]
            new = chance.randrange(2, 40)
            slots.allowed = max(map(len, prompts)) + new + k
            assistant = (draft, None)[number % 2]
            target.generate(
                **padded(target, prompts),
                max_new_tokens=new,
                do_sample=number % 4 < 2,
                assistant_model=assistant,
                speculative=True,
                num_assistant_tokens=k,
            )
            if number >= WARM_UP and (number - WARM_UP) % (calls // 10) == 0 or number == WARM_UP + calls - 1:
                gc.collect()
                resident.append(process.memory_info().rss)
                objects.append(len(gc.get_objects()))
            step()
    console = Console(highlight=False)
    console.print(
        f"resident memory after {WARM_UP} calls {resident[0] / 1e6:.1f} MB, {calls} calls later {resident[-1] / 1e6:.1f} MB "
        f"(largest {max(resident) / 1e6:.1f} MB); objects {objects[0]} and {objects[-1]}"
    )
    console.print(
        f"cache slots per row over {slots.seen} target passes: at most the longest row + N {slots.largest_excess:+d}"
    )
    grew = resident[-1] - resident[0] > 0.01 * resident[0] or objects[-1] - objects[0] > 0.01 * objects[0]
    raise typer.Exit(1 if grew or slots.largest_excess > 0 else 0)


if __name__ == "__main__":
    typer.run(main)
