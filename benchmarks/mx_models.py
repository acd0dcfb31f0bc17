"""Decoding a whole model with MX weights against bfloat16, on a CPU: real SmolLM2-135M, and Llama shapes with random weights.

    python benchmarks/mx_models.py smollm2 [--tokens 48]         generate(), every arm in turn
    python benchmarks/mx_models.py 1b | 7b [--rows 1 2 4 8]      one forward of that many tokens, every arm in turn
    python benchmarks/mx_models.py memory                        the 7B shape in MXFP6 alone: peak memory of the process

Medians, and ratios to bfloat16 of the same run. The Llama shapes have one random block of weights repeated: their cost is
that of the real model, their text means nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import mx
from hf_specdec.bench.arms import twin
from hf_specdec.compat import CACHE
from hf_specdec.mx import MXLinear

SHAPES = {
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4),
    "7b": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
}
ARMS = {
    "bf16": None,
    "mxfp6": dict(),
    "mxfp6, head bf16": dict(lm_head="bf16"),
    "mxfp6, head mxint8": dict(lm_head="mxint8"),
    "mxfp6 x mxint8, head mxint8": dict(lm_head="mxint8", activations="mxint8"),
    "mxfp4": dict(format="mxfp4_e2m1"),
    "bf16 tiles": dict(format="bf16", lm_head="bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("smollm2", "1b", "7b", "memory"))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4, 8))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=None)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        result = {"smollm2": smollm2, "memory": memory}.get(options.what, shape)(options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def smollm2(options) -> dict:
    from hf_specdec.bench.embedded import load_target

    model, tokenizer = load_target(dtype="bfloat16")
    models = arms(model, options.arms or list(ARMS))
    prompt = tokenizer("The history of the steam engine begins", return_tensors="pt")
    n = options.tokens
    runs = {
        name: lambda m=m: m.generate(**prompt, do_sample=False, min_new_tokens=n, max_new_tokens=n) for name, m in models.items()
    }
    return table(runs, options.repetitions, f"generate, {n} tokens")


def shape(options) -> dict:
    """Forwards of a few tokens on top of a cache of 64: what decoding and verification cost."""
    names = options.arms or (list(ARMS) if options.what == "1b" else ["bf16", "mxfp6, head bf16"])
    models = arms(random_llama(options.what), names)
    results = {}
    for rows in options.rows:
        runs = {name: forward(model, rows) for name, model in models.items()}
        results[rows] = table(runs, options.repetitions, f"{options.what}: forward of {rows} tokens")
    for name in models:
        first = results[options.rows[0]][name]
        print(f"{name}: c(M)/c(1) = " + ", ".join(f"{results[m][name] / first:.2f} at {m}" for m in options.rows))
    return results


def forward(model, rows: int):
    cache = model(torch.arange(1, 65)[None], use_cache=True)[CACHE]
    tokens = torch.arange(1, rows + 1)[None]

    def run():
        model(tokens, **{CACHE: cache}, use_cache=True)
        cache.crop(-rows)

    return run


def arms(model, names: list[str]) -> dict:
    """The model in bfloat16 and compressed in each way; what is not compressed is shared."""
    models = {}
    for name in names:
        if ARMS[name] is None:
            models[name] = model
            continue
        models[name] = mx.compress(twin(model), measure=False, **ARMS[name])
    return models


def table(runs: dict, repetitions: int, title: str) -> dict:
    seconds = {name: [] for name in runs}
    for i in range(repetitions + 1):
        for name in random.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    print(title)
    for name, value in medians.items():
        print(f"  {name:20s} {value * 1e3:9.1f} ms   {base / value:5.2f}x", flush=True)
    return medians


def random_llama(size: str):
    """bfloat16 weights: one random block, repeated."""
    config = LlamaConfig(**SHAPES[size], vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    block = (torch.randn(2**22) * 0.02).bfloat16()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.ones(parameter.shape, dtype=torch.bfloat16)
                if parameter.dim() > 1:
                    flat = value.view(-1)
                    for start in range(0, flat.numel(), block.numel()):
                        flat[start : start + block.numel()] = block[: flat.numel() - start]
                module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
        if hasattr(module, "inv_freq"):
            module.__init__(config)
    return model.eval()


def memory(options) -> dict:
    """The 7B shape with its Linear layers in MXFP6 from the start, and what the process needed at most."""
    import resource

    config = LlamaConfig(**SHAPES["7b"], vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            layer = MXLinear(module.in_features, module.out_features, bias=False)
            layer.weight.random_(0, 256)
            layer.weight_scale.fill_(118)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.prepare())
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fill = torch.ones if parameter.dim() == 1 else torch.zeros
                module._parameters[name] = torch.nn.Parameter(fill(parameter.shape, dtype=torch.bfloat16), requires_grad=False)
        if hasattr(module, "inv_freq"):
            module.__init__(config)
    gc.collect()
    out = model.eval().generate(torch.arange(1, 33)[None], max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"7b shape, MXFP6 but for the head: {out.shape[1] - 32} tokens generated, peak memory {peak:.2f} GiB")
    return {"peak_gib": peak}


if __name__ == "__main__":
    main()
