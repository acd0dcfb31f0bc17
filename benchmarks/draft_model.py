"""A draft model of 1/9 of the target's cost and of any agreement, without training either: real forwards, simulated agreement.

The target has the shape of SmolLM2-135M (30 layers x 576, vocabulary 49,152); its first two layers hold a random draft (2 layers
x 192) in a corner, and the other 28 add noise on top. The less noise, the more often target and draft agree. The text is
meaningless, the cost of every forward is not. Plain generate, stock assisted generation and ours run interleaved, same draft,
same K, outputs compared.

    python benchmarks/draft_model.py --noise 0.02 --k 5 --batch 1
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.arms import generate_arm, standard_arms
from hf_specdec.bench.report import print_report
from hf_specdec.bench.runner import run_benchmark

VOCABULARY, HEAD = 49152, 64


@dataclass(frozen=True)
class Tokens:
    """A prompt that is token ids already; stands where `bench.prompts.Prompt` does."""

    row: tuple[int, ...]
    category: str = "random tokens"

    def ids(self, tokenizer=None) -> list[int]:
        return list(self.row)


def llama(width: int, layers: int, heads: int, kv: int, mlp: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=mlp, head_dim=HEAD, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def nested_pair(noise: float, seed: int = 0) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """(target, draft): without noise the target computes exactly what the draft computes."""
    torch.manual_seed(seed)
    draft, target = llama(192, 2, 3, 3, 512), llama(576, 30, 9, 3, 1536)
    for name, parameter in draft.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.0 if "embed" in name else 0.15)
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(noise / 0.02)  # 0.02 is the standard deviation of a new Linear
    corner = {192: slice(0, 192), 512: slice(0, 512), VOCABULARY: slice(None)}
    into = dict(target.named_parameters())
    queries = torch.cat([torch.arange(HEAD) + 3 * HEAD * head for head in range(3)])  # query head 3 h reads key head h
    for name, source in draft.named_parameters():
        place = into[name]
        if "norm" in name:
            place[:192] = source / 3**0.5  # the mean square is now taken over 576 entries, 384 of them zero
            continue
        if source.shape != (1,):
            place.zero_()
        rows, columns = (corner[size] for size in source.shape)
        if "q_proj" in name:
            rows = queries
        elif "o_proj" in name:
            columns = queries
        place[rows, columns] = source
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.02, help="0: target and draft always agree")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--kernels", action="store_true", help="also with the weights of both models, the same numbers, in mx's layout")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    target, draft = (model.to(getattr(torch, arguments.dtype)) for model in nested_pair(arguments.noise))
    hf_specdec.enable(target)
    generator = torch.Generator().manual_seed(1)
    lengths = [48 + 16 * (i % 4) for i in range(arguments.prompts)]
    prompts = [Tokens(tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist())) for length in lengths]
    arms = [arm for arm in standard_arms(target, draft, arguments.k) if "lookup" not in arm.name]
    arms.append(generate_arm("ours draft model, auto", target, draft, None, assistant_model=draft, speculative=True))
    if arguments.kernels:
        fast_target, fast_draft = (mx.to_tiles(copy.deepcopy(m)) for m in (target, draft))
        arms.append(generate_arm("plain, kernels", fast_target, None, None))
        arms.append(generate_arm("ours draft model, kernels", fast_target, fast_draft, arguments.k,
                                 assistant_model=fast_draft, speculative=True, num_assistant_tokens=arguments.k))
    report = run_benchmark(target, None, prompts, arms, max_new_tokens=arguments.max_new_tokens,
                           repetitions=arguments.repetitions, batch=arguments.batch)
    print_report(report, Console())
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
