"""Peers: the same target, draft, prompts and precision through stock transformers, economize, flashspec and hf_specdec.

    pip install --no-deps economize==0.3.2 flashspec==0.3.1 pydantic
    python benchmarks/peers.py --draft FOLDER --clock cpu --threads 1            # batch 1
    python benchmarks/peers.py --draft FOLDER --clock cpu --threads 1 --batch 5  # ragged batch of 5
    python benchmarks/peers.py --draft FOLDER --dtype bfloat16 --compile         # on a GPU: with CUDA graphs, and beside gpt-fast's way of decoding

A peer that is not installed, or cannot run the case (flashspec has no attention mask, hence no ragged batch), is left out by
name. Every output is compared with plain greedy generation of the same process.
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_specdec import enable
from hf_specdec.bench.arms import Answer, Arm, eos_tokens, generate_arm, kernel_arms, new_tokens, padded, standard_arms, twin
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.report import print_report, save_json, save_plot
from hf_specdec.bench.runner import plan, run_benchmark
from hf_specdec.bench.terminal import counting
from hf_specdec.commands.bench import WIDTH, in_tiles, that_compile, warm
from hf_specdec.commands.common import load_draft, parse_k

LOOKUP_K, DRAFT_K = 10, 5


def economize_arms(model, draft_folder: str | None) -> list[Arm]:
    """Prompt lookup, a draft model, and the hybrid of the two, each on a twin that shares the target's weights."""
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    techniques = {"lookup": (LookupConfig(), LOOKUP_K)}
    if draft_folder is not None:
        own = DraftModelConfig(model=draft_folder)
        techniques["draft model"] = (own, DRAFT_K)
        techniques["hybrid"] = (HybridConfig(fallback=own, max_drafts=DRAFT_K), LOOKUP_K)
    arms = []
    for name, (config, k) in techniques.items():
        decoding = economize.DecodeConfig(cycle_length=k + 1)
        efficient = economize.apply(twin(model), config, decoding=decoding)

        def run(prompts: list[list[int]], max_new_tokens: int, efficient=efficient, decoding=decoding) -> Answer:
            inputs = padded(model, prompts)
            out = efficient.generate(
                inputs.pop("input_ids"),
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                decoding=decoding,
                pad_token_id=model.generation_config.pad_token_id,
            )
            return Answer(new_tokens(model, out, inputs["attention_mask"].shape[1]))

        arms.append(Arm(f"economize {name}", run, k=k))
    return arms


def flashspec_arms(model, draft) -> list[Arm]:
    """Prompt lookup, a draft model at a fixed gamma, and the default strategy (a composite of the two). Batch 1 only."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

    def engine(drafters, gamma: int, **config):
        settings = FlashSpecConfig(
            device=str(model.device), compile=False, sampling=SamplingConfig(temperature=0.0, gamma=gamma), **config
        )
        return SpeculativeEngine(settings, drafters, TargetModel("target", model.device, model.dtype, model=model))

    def drafter():
        return HuggingFaceDrafter("draft", model.device, draft.dtype, temperature=0.0, model=draft)

    alone = {"drafter_strategy": "bandit", "bandit": BanditConfig(n_arms=1)}
    engines = {"lookup": engine([NgramDrafter()], LOOKUP_K, **alone)}
    if draft is not None:
        engines["draft model"] = engine([drafter()], DRAFT_K, **alone)
        engines["default"] = engine([drafter()], DRAFT_K)
    arms = []
    for name, made in engines.items():

        def run(prompts: list[list[int]], max_new_tokens: int, made=made) -> Answer:
            ids = torch.tensor(prompts, device=model.device)
            tokens = (
                made.generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=eos_tokens(model)).output_ids[0].tolist()
            )
            return Answer([list(itertools.takewhile(lambda token: token >= 0, tokens))])

        arms.append(Arm(f"flashspec {name}", run, draft, max_batch=1))
    return arms


def fixed_arms(model, draft, k: int | str, compile: bool) -> list[Arm]:
    """Ours at the peers' own fixed K beside K "auto"."""
    arms = standard_arms(model, draft, k, stock_k=DRAFT_K, lookup_k=LOOKUP_K, compile=compile)
    if k == "auto":
        what, ours = (", compiled" if compile else ""), {"speculative": {"compile": compile and "model"}, "compiled": compile}
        arms.append(generate_arm(f"ours lookup, K {LOOKUP_K}{what}", model, k=LOOKUP_K, num_assistant_tokens=LOOKUP_K, **ours))
        if draft is not None:
            drafts = {"assistant_model": draft, "num_assistant_tokens": DRAFT_K}
            arms.append(generate_arm(f"ours draft model, K {DRAFT_K}{what}", model, draft, DRAFT_K, **drafts, **ours))
    return arms


def main(
    target: str = "smollm2",
    draft: Annotated[str | None, typer.Option(help="Folder of the draft model.")] = None,
    k: str = "auto",
    prompts: str = "shipped",
    limit: int | None = None,
    max_new_tokens: int = 100,
    repetitions: int = 3,
    batch: int = 1,
    dtype: str = "float32",
    clock: str = "wall",
    threads: int | None = None,
    out: Path | None = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Ours also with the same weights in the kernels' tiles.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Ours compiled, and plain generate compiled over a static cache; peers run as they are.")] = False,
):
    """Measure every peer that is installed."""
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(highlight=False, width=max(Console().width, WIDTH))
    model, tokenizer = load_target(target, dtype)
    assistant = load_draft(draft, dtype, model, tokenizer)
    arms, makers = (
        fixed_arms(enable(model), assistant, parse_k(k), compile),
        {"economize": lambda: economize_arms(model, draft), "flashspec": lambda: flashspec_arms(model, assistant)},
    )
    pairs = [(model, assistant)]
    if kernels:
        pairs.append(in_tiles(target, draft, dtype))
        arms += kernel_arms(*pairs[1], parse_k(k), compile)
    chosen = load_prompts(prompts, limit)
    if compile:
        longest = max((prompt.ids(tokenizer) for prompt in chosen), key=len)
        warm(pairs, parse_k(k), batch, len(longest) + max_new_tokens)
        arms = that_compile(arms, [longest] * batch, max_new_tokens)
    for name, make in makers.items():
        if find_spec(name) is None:
            console.print(f"skipped: {name} is not installed (pip install --no-deps {name})")
        else:
            arms += make()
    with counting("Measuring", plan(chosen, arms, batch, repetitions)) as step:
        report = run_benchmark(
            model,
            tokenizer,
            chosen,
            arms,
            max_new_tokens=max_new_tokens,
            repetitions=repetitions,
            batch=batch,
            clock=clock,
            step=step,
        )
    print_report(report, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        save_json(report, out / f"peers_batch{batch}.json")
        save_plot(report, out / f"peers_batch{batch}.png")


if __name__ == "__main__":
    typer.run(main)
