"""Host overhead: CPU milliseconds per round of a toy (2 layers, width 64, 4 drafted tokens), against its bare forwards.

    python benchmarks/overhead.py

The toy is so small that the loop is what costs. Bare forwards are the stock models called directly with a `DynamicCache`:
per round 4 draft steps of one token and one target pass over 5, at the same context lengths, nothing else. Draft and target
are unrelated, so that nearly every round commits one token. One thread, processor time, the contestants take turns.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_specdec import enable
from hf_specdec.bench.arms import generation_settings
from hf_specdec.bench.meter import measured
from hf_specdec.bench.terminal import counting
from hf_specdec.compat import CACHE

K, VOCABULARY, PROMPT = 4, 256, 16
Measure = Callable[[], float]


def toy(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def bare(target, draft, prompt: torch.Tensor, rounds: int) -> float:
    """Milliseconds per round inside the forwards alone."""
    caches, total = {id(model): DynamicCache() for model in (target, draft)}, 0.0
    for model in (target, draft):
        model(input_ids=prompt, **{CACHE: caches[id(model)]}, use_cache=True)
    one, block = prompt[:, :1], prompt[:, : K + 1]
    for _ in range(rounds):
        for model, ids in [(draft, one)] * K + [(target, block)]:
            begin = time.process_time()
            model(input_ids=ids, **{CACHE: caches[id(model)]}, use_cache=True)
            total += time.process_time() - begin
        caches[id(draft)].crop(-(K - 1))
        caches[id(target)].crop(-K)
    return 1000 * total / rounds


def engine(target, run: Callable[[], None]) -> float:
    """Milliseconds per target pass of a whole call, the prompt pass left out of both."""
    with measured(target, clock="cpu") as cost:
        run()
    return 1000 * (cost.seconds - cost.target.seconds[0]) / (len(cost.target.seconds) - 1)


def contestants(target, draft, prompt: torch.Tensor, tokens: int, folder: str) -> dict[str, Measure]:
    call = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": tokens,
        "pad_token_id": 0,
    }

    def stock():
        with generation_settings(
            draft, num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        ):
            target.generate(**call, assistant_model=draft)

    def ours():
        target.generate(**call, assistant_model=draft, speculative=True, num_assistant_tokens=K)

    measures = {
        "bare forwards": lambda: bare(target, draft, prompt, tokens),
        "hf_specdec": lambda: engine(target, ours),
        "transformers": lambda: engine(target, stock),
    }
    if find_spec("flashspec"):
        measures["flashspec"] = _flashspec(target, draft, prompt, tokens)
    if find_spec("economize"):
        measures["economize"] = _economize(target, draft, folder, prompt, tokens)
    return measures


def _flashspec(target, draft, prompt: torch.Tensor, tokens: int) -> Measure:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    config = FlashSpecConfig(
        device="cpu",
        compile=False,
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=K),
    )
    drafter = HuggingFaceDrafter("draft", "cpu", draft.dtype, temperature=0.0, model=draft)
    made = SpeculativeEngine(config, [drafter], TargetModel("target", torch.device("cpu"), target.dtype, model=target))
    return lambda: engine(target, lambda: made.generate(prompt, max_new_tokens=tokens))


def _economize(target, draft, folder: str, prompt: torch.Tensor, tokens: int) -> Measure:
    """Its target pass is not the module's forward: rounds come from its log, the prompt pass from a call for one token."""
    import economize
    from economize.techniques.draft_model import DraftModelConfig

    draft.save_pretrained(folder)
    twin = copy.deepcopy(target)
    efficient = economize.apply(twin, DraftModelConfig(model=folder), decoding=economize.DecodeConfig(cycle_length=K + 1))

    def run() -> float:
        begin = time.process_time()
        efficient.decode(prompt[0], 1)
        middle = time.process_time()
        result = efficient.decode(prompt[0], tokens)
        return 1000 * (time.process_time() - middle - (middle - begin)) / len(result.acceptance)

    return run


def main(tokens: int = 200, repetitions: int = 15, out: Path | None = None):
    """Print CPU milliseconds per round and their ratio to the bare forwards, medians over the repetitions."""
    torch.set_num_threads(1)
    target, draft = enable(toy(0)), toy(1)
    prompt = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as folder:
        measures = contestants(target, draft, prompt, tokens, folder)
    for measure in measures.values():
        measure()
    times: dict[str, list[float]] = {name: [] for name in measures}
    with counting("Measuring", repetitions * len(measures)) as step:
        for name, measure in itertools.chain.from_iterable([list(measures.items())] * repetitions):
            times[name].append(measure())
            step(name)
    base = times["bare forwards"]
    table = Table(
        "",
        "ms per round",
        "over bare forwards",
        title=f"torch {torch.__version__}, transformers {transformers.__version__}, 1 thread",
    )
    result = {}
    for name, own in times.items():
        result[name] = {
            "ms": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, base)),
            "all_ms": own,
        }
        table.add_row(name, f"{result[name]['ms']:.2f}", f"{result[name]['ratio']:.2f}x")
    Console(highlight=False).print(table)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
