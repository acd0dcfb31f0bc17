"""`hf-specdec`: see it work, use it, prove it on your own pair of models, measure and tune it, compress a model, train a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .commands.common import check_sampling, draft_name
from .commands.leaving import PROGRAM, guarded
from .commands.options import MX, Cors, DType, Draft, K, Key, KOfConfig, MaxBatch, MaxNewTokens, MaxQueue, Prompts, Target, Threads
from .config import MAX_ASSISTANT_TOKENS

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def program(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False):
    pass


@app.command(short_help="Watch an answer being drafted and checked, and what that gains.")
@guarded
def demo(
    target: Target = "smollm2",
    draft: Draft = None,
    k: K = "auto",
    max_new_tokens: MaxNewTokens = 160,
    dtype: DType = "float32",
    prompt: Annotated[str | None, typer.Option(help="Your own question; without it, a code edit that is shipped.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed runs of each way of decoding.")] = 3,
    race: Annotated[bool, typer.Option("--race", help="Show a race instead: each way of decoding runs alone, then all are replayed side by side.")] = False,
    save_race: Annotated[Path | None, typer.Option("--save-race", help="As --race, and write the replay to this .gif file.")] = None,
):
    """Stream an answer with its drafted tokens coloured, then time plain generate and speculation side by side."""
    from .commands.demo import demo as run

    run(target, draft, prompt, k, max_new_tokens, repetitions, dtype, race, save_race)


@app.command()
@guarded
def generate(
    target: Target,
    draft: Draft = None,
    k: KOfConfig = None,
    config: Annotated[Path | None, typer.Option("--config", help="Folder with a speculative_config.json, which tune or save_pretrained has written; options override it.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    dtype: DType = "float32",
    prompt: Annotated[str | None, typer.Option(help="The prompt; without it and --file, standard input is read.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of decoding greedily.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample: above 0, lower is closer to greedy; the model's own without it.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample: the k likeliest tokens alone, 0 for all; the model's own without it.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample: the likeliest tokens that make up this probability, 0 to 1; the model's own without it.")] = None,
    min_p: Annotated[float | None, typer.Option(help="With --sample: no token below this share of the likeliest's probability, 0 to 1; the model's own without it.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: tokens that were there before get less likely; the model's own without it.")] = None,
    lenience: Annotated[
        float | None, typer.Option(help="In (0, 1], 1 without it: below 1 the output is no longer exact (Leviathan et al. 2023, A.5).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled run repeatable; without it a random one, with --dataset 0.")] = None,
    mx: MX = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, tokens and trace as JSON.")] = False,
    dataset: Annotated[
        str | None, typer.Option(help="Answer every row of a .jsonl, .json, .csv or .parquet file, or of hub:NAME[:SPLIT].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --dataset: a folder for JSONL shards; the same command again resumes.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="With --dataset: the prompt's column; without it, the first of prompt, turns, messages, text.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --dataset: prompts decoded together; 8 without it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --dataset: that many rows from the first on; all without it.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --dataset: write token ids, too.")] = False,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="With --dataset: record empty or too long prompts instead of refusing them.")
    ] = False,
):
    """Answer one prompt, or every prompt of a data set, speculatively."""
    from .commands.dataset import check_options, generate_dataset
    from .commands.generate import generate as run
    from .commands.speculation import Work

    alone = {"--prompt": prompt, "--file": file, "--json": as_json}
    check_options(dataset, output, alone, {"--column": column, "--batch": batch, "--limit": limit, "--tokens": tokens, "--skip-invalid": skip_invalid})
    warpers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in warpers.items() if value is not None}
    if given and not sample:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} has no meaning without --sample.")
    penalty = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    check_sampling(given | penalty)
    sampling = {"do_sample": sample, **given, **penalty}
    work = Work(target, draft, k, max_new_tokens, dtype, mx, raw, sampling, lenience, seed, tokens, config)
    if dataset is not None:
        generate_dataset(work, dataset, output, column, limit, batch or 8, skip_invalid)
    else:
        run(work, prompt, file, as_json)


@app.command(short_help="Serve a model by the OpenAI API.")
@guarded
def serve(
    target: Target = "smollm2",
    draft: Draft = None,
    k: KOfConfig = None,
    config: Annotated[Path | None, typer.Option("--config", help="Folder with a speculative_config.json, which tune or save_pretrained has written.")] = None,
    dtype: DType = "auto",
    mx: MX = None,
    tiles: Annotated[bool, typer.Option("--tiles/--no-tiles", help="On a CPU: the weights as they are in the kernels' tiles, or as torch has them.")] = True,
    compile: Annotated[bool, typer.Option("--compile", help="On a CPU: compiled passes (torch.compile), made before the first request in some half a minute.")] = False,
    threads: Threads = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    keep: Annotated[int, typer.Option(min=0, help="Conversations whose keys and values stay in memory, so that the next turn does not read them again.")] = 2,
    max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 64,
    api_key: Key = None,
    cors: Cors = None,
):
    """Serve a model by the OpenAI API (transformers' own server): chat completions, completions and responses, streamed or not, several at a time."""
    from .commands.serve import Door, serve as run
    from .commands.speculation import Work

    work = Work(target, draft, k, 1, dtype, mx, False, {}, None, None, False, config)
    run(work, Door(host, port, max_batch, max_queue, api_key, tuple(cors or ())), tiles, compile, threads, keep)


@app.command(short_help="Prove on your own models that the output stays the same.")
@guarded
def verify(
    target: Target,
    draft: Draft = None,
    k: K = "5",
    prompts: Prompts = "shipped",
    max_new_tokens: MaxNewTokens = 48,
    dtype: DType = "float32",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 3,
    samples: Annotated[int, typer.Option(help="Sampled continuations of each chi-square test, 200 or more.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the sampled continuations.")] = 0,
):
    """Prove on your own models that speculation does not change the output.

    Exit code 0 if it does not, 1 if it does, 2 for bad arguments.
    """
    from .commands.verify import verify as run

    if not run(target, draft, prompts, limit, k, max_new_tokens, samples, seed, dtype):
        raise typer.Exit(1)


@app.command(short_help="Measure it against plain and stock assisted generation.")
@guarded
def bench(
    target: Target = "smollm2",
    draft: Draft = None,
    k: K = "auto",
    prompts: Prompts = "shipped",
    max_new_tokens: MaxNewTokens = 100,
    dtype: DType = "float32",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category, at most; all without it.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed runs of each way of decoding.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: seconds of processor time, for a machine that is shared.")
    ] = "wall",
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and bench.png; nothing is written without it.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Folder that tune has written: measure its choice as well, beside what tune predicted.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="This package with compiled passes (torch.compile); compiling is not measured.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also plain generate and this package on mx's CPU kernels, with the same weights.")] = False,
):
    """Measure plain generate, stock assisted generation and this package ("ours") in turns, on the same prompts."""
    from .commands.bench import bench as run

    run(target, draft, prompts, limit, k, max_new_tokens, repetitions, batch, dtype, clock, threads, out, config, compile, kernels)


@app.command(short_help="Find the fastest draft and K for your prompts and machine.")
@guarded
def tune(
    target: Target = "smollm2",
    draft: Annotated[list[str] | None, typer.Option("--draft", callback=draft_name, help="A draft to try beside those without weights, as --draft of bench takes it. Repeatable.")] = None,
    prompts: Prompts = "shipped",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category, at most; 2 without it, with --quick 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=2, help="Length of each answer in tokens, at most; 96 without it, with --quick 32.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and shorter answers, a sixth of the tokens: 1 to 2 minutes for smollm2 on 2 CPU cores.")] = False,
    dtype: DType = "float32",
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for speculative_config.json (for generate --config) and tune.json; nothing is written without it.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Measure the choice afterwards, against plain generate.")] = False,
):
    """Find the draft, and the K or the tree, that is fastest on your prompts and this machine."""
    from .commands.tune import tune as run

    run(target, draft or [], prompts, limit, max_new_tokens, dtype, threads, out, check, quick)


@app.command(short_help="Store a model's weights in an MX format, 4 to 8 bits each.")
@guarded
def compress(
    target: Target,
    format: Annotated[
        str, typer.Option("--format", help="Of the weights: mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3, mxfp8_e5m2, mxfp4_e2m1, mxint8, bf16 or fp32.")
    ] = "mxfp6_e2m3",
    layer_format: Annotated[
        list[str] | None, typer.Option("--layer-format", help="PATTERN=FORMAT: what these modules, named as those of --skip, get instead. Repeatable; the last one that fits counts.")
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", help="Bits per weight on average: layers that need it get more than --format, by what the text of --calibrate shows; none does without it.")
    ] = None,
    scale_rule: Annotated[str, typer.Option("--scale-rule", help="How the scale of a block of 32 weights is rounded: even, floor, ceil or mse.")] = "even",
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Leave these modules dense: a name, its last part, or a pattern. Repeatable.")] = None,
    lm_head: Annotated[str | None, typer.Option("--lm-head", help="A format for the output head; dense without it.")] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", help="mxint8: the layers' inputs are rounded to it, and passes over several tokens get faster; not rounded without it.")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option("--calibrate", help="A text file, or generated (text that the model writes itself): weights are rounded so that the layers' outputs on it change little; each to nearest without it.")
    ] = None,
    dtype: DType = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="A new or empty folder for model and tokenizer; this or --report is needed.")] = None,
    layout: Annotated[str, typer.Option("--layout", help="Of --out: mx, this package's, or compressed-tensors, which others read, too (mxfp4_e2m1, mxfp6_e2m3, mxfp8_e4m3).")] = "mx",
    report: Annotated[bool, typer.Option("--report", help="Measure perplexity, KL divergence and agreement with the original.")] = False,
    text: Annotated[Path | None, typer.Option("--text", help="With --report: the file of text to measure on; a shipped one without it.")] = None,
    every_layer: Annotated[bool, typer.Option("--all", help="List every layer; without it, layers that are alike share a line.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found to this JSON file.")] = None,
):
    """Store a model's weights in an MX format: 4 to 8 bits each, read without unpacking them first."""
    from .commands.compress import compress as run

    run(target, format, scale_rule, skip or [], lm_head, activations, dtype, out, report, text, every_layer, json_file, calibrate, layer_format or [], bits, layout)


@app.command(short_help="Train a draft on text that the target writes itself.")
@guarded
def train(
    target: Target = "smollm2",
    out: Annotated[Path, typer.Option("--out", help="Folder of the drafter; the same command again goes on where it was stopped.")] = Path("drafter"),
    data: Annotated[Path | None, typer.Option("--data", help="Folder of training text, OUT/data without it; what it lacks of --tokens is made.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of training text, prompts included; it is made in whole shards of 48 texts, so there may be more.")] = 500_000,
    prompts: Annotated[str | None, typer.Option(help="A .txt or .jsonl file, a folder that datasets wrote, or hub:NAME[:SPLIT]; without it the target makes them up.")] = None,
    column: Annotated[str | None, typer.Option(help="With --prompts: the prompt's column; without it, the first of prompt, text, instruction and turns.")] = None,
    features: Annotated[bool, typer.Option("--features", help="A drafter that reads the target's hidden states (EAGLE-3).")] = False,
    eagle3: Annotated[bool, typer.Option("--eagle3", help="As --features, in EAGLE-3's own form, which vLLM loads: one layer, stored in bf16.")] = False,
    config: Annotated[str | None, typer.Option("--config", help="A draft of its own: a new model of this config.json (a folder, a hub id), with the target's vocabulary.")] = None,
    distill: Annotated[str | None, typer.Option("--distill", help="A draft of its own: this model (a folder, a hub id), taught further (DistillSpec).")] = None,
    begin: Annotated[str | None, typer.Option("--begin", help="Go on from the weights of this drafter with as many layers, its folder or name.")] = None,
    single: Annotated[int, typer.Option(min=0, help="With --features: that many first steps learn the next token alone, at a third of the cost.")] = 0,
    heads: Annotated[int, typer.Option(min=0, max=16, help="Train that many heads on the last hidden state (Medusa) instead; 0 for none.")] = 0,
    joint: Annotated[int, typer.Option(min=0, max=16, help="As --heads, but a copy of the target learns, too (Medusa-2): this makes ANOTHER MODEL, in OUT/target; 0 for none.")] = 0,
    lora: Annotated[int, typer.Option(min=0, max=1024, help="With --joint: the rank of adapters through which the copy learns; 0 for all its layers.")] = 0,
    parallel: Annotated[int, typer.Option(min=0, max=16, help="Train a drafter that fills that many masked places in one pass (DFlash) instead; 0 for none.")] = 0,
    look_ahead: Annotated[int, typer.Option(min=0, max=16, help="Train that many look-ahead embeddings for the target itself (PaSS) instead; 0 for none.")] = 0,
    layers: Annotated[str | None, typer.Option(help="Numbers of the target's layers that the draft starts from; without it 0,-1 (first and last), with --features -1.")] = None,
    head: Annotated[int, typer.Option(min=0, help="How many tokens, the most frequent ones, the draft's output head keeps; 0 for all.")] = 8192,
    loss: Annotated[str, typer.Option(help="cross_entropy, forward_kl, reverse_kl, tvd, tvd++ or acceptance; several with commas between them train a draft each.")] = "forward_kl",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 2000,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of text in each step.")] = 4096,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-3,
    on_policy: Annotated[int, typer.Option(min=0, help="Tokens that the half-trained draft writes and the target judges; 0 for none.")] = 0,
    format: Annotated[str, typer.Option("--format", help="How the draft's weights are stored: bf16 or a format of compress --format.")] = "mxint8",
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer in the training text in tokens, at most.")] = 160,
    seed: Annotated[int, typer.Option(help="Of the training text and of the run.")] = 0,
):
    """Train a draft for a target on text that the target writes itself."""
    from .commands.train import train as run

    run(target, out, data, tokens, prompts, column, layers, head, loss, steps, batch_tokens, lr, on_policy, format, new_tokens, seed, features,
        {"--heads": heads, "--joint": joint, "--parallel": parallel, "--look-ahead": look_ahead}, lora, eagle3, begin, single,
        {option: name for option, name in {"--config": config, "--distill": distill}.items() if name is not None})


@app.command(short_help="Write a draft in the layout that vLLM loads.")
@guarded
def export(
    draft: Annotated[str, typer.Argument(help="The draft: prompt_lookup, a drafter's name or folder, a published checkpoint, a model's folder or hub id.")],
    out: Annotated[Path, typer.Option("--out", help="A new or empty folder.")],
    target: Annotated[str, typer.Option("--target", help="The model that the draft is for: smollm2, a folder, or a hub id.")] = "smollm2",
    k: Annotated[int | None, typer.Option("--k", min=1, max=MAX_ASSISTANT_TOKENS, help="Tokens drafted per round; without it 4, or as many as there are heads, or places of a block.")] = None,
    dtype: DType = "bfloat16",
):
    """Write a target's draft as a vLLM speculative_config, with weights in the layout that vLLM loads."""
    from .commands.export import export as run

    run(draft, target, out, k, dtype)


if __name__ == "__main__":
    app(prog_name=PROGRAM)
