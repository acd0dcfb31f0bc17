"""Batches of encoder-decoder models (Whisper, T5, BART, TrOCR): what speculation makes of them.

    OMP_NUM_THREADS=2 python benchmarks/encoder_decoders.py [--shape whisper whisper-small bart t5 trocr] [--batch 1 4] [--dtype float32] [--tiles] [--rate 0.8] [--k 3 7]
    OMP_NUM_THREADS=2 python benchmarks/encoder_decoders.py --kernels [...]    # the model as it is, in tiles and in MXFP6, over the first one's plain generate()
    OMP_NUM_THREADS=2 python benchmarks/encoder_decoders.py --compile --tiles --dtype bfloat16 --batch 1 [...]    # compiled passes over the same passes uncompiled

Shapes of whisper-base, whisper-small, bart-large, t5-base and trocr-base, random weights. Acceptance is SIMULATED: at each place a draft that costs nothing proposes the
target's own next token with probability --rate, else another one, for each row by itself. The cost of the passes is real. Plain generate and speculation take turns, with the encoder's
outputs given to both (decoding) and not (whole call); medians; every text is compared with plain generate's. In float32 the script ends with exit code 1 where one
differs.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, VisionEncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput

from hf_specdec import integration, mx, warmup
from hf_specdec.bench.simulated import SimulatedTable

_BART = dict(encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, d_model=1024, encoder_layers=12, decoder_layers=12)


def _whisper(width: int, layers: int) -> dict:
    heads = dict(encoder_attention_heads=width // 64, decoder_attention_heads=width // 64)
    return dict(d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, vocab_size=51_865, **heads)


SHAPES = {  # model_type, settings, tokens, frames or pixels a side that are read
    "whisper": ("whisper", _whisper(512, 6), 3000),
    "whisper-small": ("whisper", _whisper(768, 12), 3000),
    "bart": ("bart", dict(_BART, vocab_size=50_265), 256),
    "trocr": ("vision-encoder-decoder", dict(
        encoder=dict(model_type="vit", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, image_size=384, patch_size=16, qkv_bias=False),
        decoder=dict(model_type="trocr", d_model=1024, decoder_layers=12, decoder_attention_heads=16, decoder_ffn_dim=4096, vocab_size=50_265, cross_attention_hidden_size=768,
                     max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=None, decoder_start_token_id=2)), 384),
    "t5": ("t5", dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32_128), 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["whisper", "bart", "t5"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tiles", action="store_true", help="weights in the kernels' tiles")
    parser.add_argument("--kernels", action="store_true", help="the model as it is, in tiles and in MXFP6, over the plain generate() of the first")
    parser.add_argument("--compile", action="store_true", help="speculation with compiled passes over the same without, in turns")
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # which length counts, in every call
    if given.kernels:
        sys.exit(over_stock(given))
    if given.compile:
        sys.exit(over_uncompiled(given))
    table = Table(title=f"{given.dtype}{', tiles' if given.tiles else ''}, acceptance SIMULATED at {given.rate}; speed-up over plain generate()")
    for name in ("shape", "rows", *(f"K = {k}, decoding" for k in given.k), *(f"K = {k}, whole call" for k in given.k), "block efficiency", "= plain"):
        table.add_column(name)
    console, differ = Console(width=170), 0
    for name in given.shape:
        model = shaped(name, given)
        for batch in given.batch:
            console.print(f"{name}, {batch} rows ...")
            read = sources(name, model, batch)
            alone, blocks, same, texts = compared(model, {"encoder_outputs": encoded(model, read)}, given)
            whole, _, more, others = compared(model, read, given)
            differ += texts + others - same - more
            table.add_row(name, str(batch), *(f"{ratio:.2f}x" for ratio in alone + whole), " / ".join(blocks), f"{same + more}/{texts + others}")
    console.print(table)
    sys.exit(int(given.dtype == "float32" and differ > 0))


def shaped(name: str, given: argparse.Namespace):
    kind, settings, _ = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=None, eos_token_id=None, decoder_start_token_id=2, forced_eos_token_id=None, **settings)
    dtype = getattr(torch, given.dtype)
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    model = VisionEncoderDecoderModel(config).to(dtype).eval() if name == "trocr" else auto.from_config(config, dtype=dtype).eval()
    return mx.to_tiles(model) if given.tiles else model


def sources(name: str, model, batch: int) -> dict:
    """What the encoder reads: each text shorter than the one before."""
    size = SHAPES[name][2]
    if name.startswith("whisper"):
        return {"input_features": torch.randn((batch, model.config.num_mel_bins, size), dtype=model.dtype)}
    if name == "trocr":
        return {"pixel_values": torch.randn((batch, 3, size, size), dtype=model.dtype)}
    ids, mask = torch.randint(3, 1000, (batch, size)), torch.ones((batch, size), dtype=torch.long)
    for b in range(batch):
        ids[b, size - 8 * b :] = mask[b, size - 8 * b :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def encoded(model, read: dict) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=model.get_encoder()(**read)[0])


def compared(model, read: dict, given: argparse.Namespace) -> tuple[list[float], list[str], int, int]:
    """Per K plain generate's median seconds over ours, and the block efficiency; how many texts are plain generate's, and of how many."""
    seconds, blocks, same, texts = {k: [] for k in (0, *given.k)}, {}, 0, 0
    for repetition in range(given.repetitions):
        same, texts = map(sum, zip((same, texts), turn(model, read, given, repetition, seconds, blocks)))
    first = statistics.median(seconds[0])
    return [first / statistics.median(seconds[k]) for k in given.k], [f"{statistics.mean(own):.2f}" for own in blocks.values()], same, texts


def turn(model, read: dict, given: argparse.Namespace, seed: int, seconds: dict[int, list[float]], blocks: dict[int, list[float]]) -> tuple[int, int]:
    """Plain generate, as K = 0, and ours, once each; how many texts are plain generate's, and of how many."""
    settings = dict(do_sample=False, num_beams=1, max_new_tokens=given.new_tokens, min_new_tokens=given.new_tokens, return_dict_in_generate=True)
    begin, same, texts = perf_counter(), 0, 0
    plain = super(type(model), model).generate(**read, **settings) if model.config.model_type == "whisper" else model.generate(**read, **settings)
    seconds[0].append(perf_counter() - begin)
    for k in given.k:
        draft = SimulatedTable(plain.sequences[:, 1:].tolist(), given.rate, seed=seed)
        begin = perf_counter()
        out = integration.generate(model, **read, assistant_model=draft, num_assistant_tokens=k, **settings)
        seconds[k].append(perf_counter() - begin)
        same, texts = same + int((out.sequences == plain.sequences).all(-1).sum()), texts + len(out.sequences)
        blocks.setdefault(k, []).append(out.speculation.block_efficiency)
    return same, texts


def over_stock(given: argparse.Namespace) -> int:
    """A table of what tiles and MXFP6 make of it, with and without speculation; 1 where a text in float32 is not that of the same weights' plain generate."""
    table, console, differ = Table(title=f"{given.dtype}, acceptance SIMULATED at {given.rate}; speed-up over plain generate() of the model as it is"), Console(width=170), 0
    for name in ("shape", "rows", "weights", "encoder", *(f"{what}: plain / K = {' / '.join(map(str, given.k))}" for what in ("decoding", "whole call")), "= its plain"):
        table.add_column(name)
    for name in given.shape:
        stock = shaped(name, given)
        arms = {"as they are": stock, "tiles": mx.to_tiles(copy.deepcopy(stock)), "MXFP6, head MXINT8": mx.compress(copy.deepcopy(stock), lm_head="mxint8", measure=False)}
        for batch in given.batch:
            console.print(f"{name}, {batch} rows ...")
            read, first = sources(name, stock, batch), None
            found = {arm: ([], {k: [] for k in (0, *given.k)}, {k: [] for k in (0, *given.k)}) for arm in arms}
            right = {arm: (0, 0) for arm in arms}
            for repetition in range(given.repetitions):
                for arm, model in arms.items():
                    begin = perf_counter()
                    states = encoded(model, read)
                    found[arm][0].append(perf_counter() - begin)
                    for given_to, seconds in (({"encoder_outputs": states}, found[arm][1]), (read, found[arm][2])):
                        right[arm] = tuple(map(sum, zip(right[arm], turn(model, given_to, given, repetition, seconds, {}))))
            for arm, parts in found.items():
                medians = [[statistics.median(own) for own in (part.values() if isinstance(part, dict) else [part])] for part in parts]
                first = first or [own[0] for own in medians]
                ratios = [" / ".join(f"{base / own:.2f}x" for own in part) for base, part in zip(first, medians)]
                table.add_row(name, str(batch), arm, *ratios, "/".join(map(str, right[arm])))
                differ += right[arm][1] - right[arm][0]
    console.print(table)
    return int(given.dtype == "float32" and differ > 0)


def over_uncompiled(given: argparse.Namespace) -> int:
    """A table of what compiled passes make of speculation, the encoder's outputs given; 1 where a text in float32 is another one."""
    table, differ = Table(title=f"{given.dtype}{', tiles' if given.tiles else ''}, acceptance SIMULATED at {given.rate}; compiled over uncompiled"), 0
    for name in ("shape", "K", "warm-up, s", "uncompiled, ms", "compiled, ms", "speed-up: median (smallest to largest)", "= uncompiled"):
        table.add_column(name)
    settings = dict(do_sample=False, num_beams=1, max_new_tokens=given.new_tokens, min_new_tokens=given.new_tokens, return_dict_in_generate=True)
    for name in given.shape:
        model = shaped(name, given)
        read = {"encoder_outputs": encoded(model, sources(name, model, 1))}
        text = integration.generate(model, **read, **settings).sequences
        for k in given.k:
            def turn(compile: bool, seed: int, k=k) -> tuple[float, torch.Tensor]:
                draft, begin = SimulatedTable(text[:, 1:].tolist(), given.rate, seed=seed), perf_counter()
                out = integration.generate(model, **read, assistant_model=draft, num_assistant_tokens=k, speculative={"compile": compile}, **settings)
                return perf_counter() - begin, out.sequences

            begin, turns = perf_counter(), []
            warmup(model, None, {"num_assistant_tokens": k}, max_length=given.new_tokens + 1)
            first = perf_counter() - begin
            turn(False, 0), turn(True, 0)
            for seed in range(given.repetitions):
                turns.append((*turn(False, seed), *turn(True, seed)))
            same, ratios = sum(torch.equal(one, other) for _, one, _, other in turns), [own[0] / own[2] for own in turns]
            times = [f"{1e3 * statistics.median(own[i] for own in turns):.0f}" for i in (0, 2)]
            table.add_row(name, str(k), f"{first:.0f}", *times, f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x)", f"{same}/{len(turns)}")
            differ += len(turns) - same
    Console(width=170).print(table)
    return int(given.dtype == "float32" and differ > 0)


if __name__ == "__main__":
    main()
