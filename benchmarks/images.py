"""A model that reads an image with its prompt: plain generate, transformers' own prompt lookup, and ours, side by side.

    OMP_NUM_THREADS=2 python benchmarks/images.py [--images 4] [--new-tokens 96]

The shape of SmolVLM-256M: SmolLM2-135M-Instruct with its real weights reads 64 tokens an image from a vision tower of SmolVLM's size, whose weights are RANDOM and
whose output is made small: the picture says nothing, and what it costs is real. Prompts ask for a text again with changes (prompts.jsonl, "code_edit"). Time is of
whole calls, the image's pass included. float32; every text is compared with plain generate's of the same model, and the exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, SmolVLMConfig, SmolVLMForConditionalGeneration

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.embedded import embedded_folder
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.drafts import MixtureDraft

PER_IMAGE, SIDE = 64, 512
VISION = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=SIDE, patch_size=16)
MARK = "<empty_output>"  # a reserved token of SmolLM2 that stands for a place of an image
ARMS = {  # by name: whether the text model's weights are in the kernels' tiles, and what is added to generate's arguments
    "plain": (False, dict),
    "transformers' prompt lookup": (False, lambda: dict(prompt_lookup_num_tokens=10)),
    "prompt lookup": (False, lambda: dict(speculative=True)),
    "mixture": (False, lambda: dict(speculative=True, assistant_model=MixtureDraft())),
    "plain, tiles": (True, dict),
    "prompt lookup, tiles": (True, lambda: dict(speculative=True)),
    "mixture, tiles": (True, lambda: dict(speculative=True, assistant_model=MixtureDraft())),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=2)
    given = parser.parse_args()
    models, prompts = {tiles: made(tiles) for tiles in (False, True)}, asked(given)
    seconds, blocks, same = {name: [] for name in ARMS}, {name: [] for name in ARMS}, dict.fromkeys(ARMS, 0)
    for _ in range(given.repetitions):
        for inputs in prompts:
            plain = {}
            for name, (tiles, extra) in ARMS.items():
                begin = perf_counter()
                out = models[tiles].generate(**inputs, **extra(), max_new_tokens=given.new_tokens, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
                seconds[name].append(perf_counter() - begin)
                same[name] += torch.equal(out.sequences, plain.setdefault(tiles, out.sequences))
                if getattr(out, "speculation", None):
                    blocks[name].append(out.speculation.block_efficiency)
    report(given, seconds, blocks, same, [inputs["input_ids"].shape[1] for inputs in prompts])
    sys.exit(int(min(same.values()) < len(seconds["plain"])))


def made(tiles: bool):
    text = AutoModelForCausalLM.from_pretrained(str(embedded_folder()), dtype=torch.float32)
    mark = AutoTokenizer.from_pretrained(str(embedded_folder())).convert_tokens_to_ids(MARK)
    config = SmolVLMConfig(vision_config=VISION, text_config=text.config.to_dict(), image_token_id=mark, scale_factor=4, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config).eval()
    model.get_decoder().load_state_dict(text.model.state_dict())
    model.tie_weights()
    with torch.no_grad():
        model.model.connector.modality_projection.proj.weight.mul_(1e-3)
    model.generation_config.eos_token_id = text.generation_config.eos_token_id
    return hf_specdec.enable(mx.to_tiles(model) if tiles else model)


def asked(given: argparse.Namespace) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_folder()))
    pictures, found = torch.randn(1, given.images, 3, SIDE, SIDE), []
    for prompt in load_prompts("code_edit")[: given.prompts]:
        messages = [{"role": "user", "content": MARK * PER_IMAGE * given.images + "\n" + prompt.text}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        found.append({**inputs, "pixel_values": pictures})
    return found


def report(given: argparse.Namespace, seconds: dict, blocks: dict, same: dict, lengths: list[int]) -> None:
    table = Table(title=f"SmolVLM-256M's shape, {given.images} image(s), prompts of {lengths} tokens, {given.new_tokens} new, float32; "
                        "the text model's weights are real, the vision tower's RANDOM")
    for name in ("", "over plain", "tokens per forward", "= plain"):
        table.add_column(name)
    first = statistics.median(seconds["plain"])
    for name, own in seconds.items():
        block = f"{statistics.mean(blocks[name]):.2f}" if blocks[name] else ""
        table.add_row(name, f"{first / statistics.median(own):.2f}x", block, f"{same[name]}/{len(own)}")
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
