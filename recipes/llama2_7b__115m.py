"""Llama 2 7B Chat with a drafter of 115M parameters: an assistant's requests.

    python recipes/llama2_7b__115m.py --scale full --draft FOLDER       real weights; the target is gated, see below
    python recipes/llama2_7b__115m.py --scale shape --acceptance 0.8    the full shape, random weights, SIMULATED acceptance
    python recipes/llama2_7b__115m.py --scale tiny                      a toy, in seconds
    python recipes/llama2_7b__115m.py train --out FOLDER                trains the drafter (a GPU's work)
    python recipes/llama2_7b__115m.py train --scale tiny --out FOLDER   a trial of that, in minutes: the toy's drafter, for `smollm2`

The target's licence is accepted at https://huggingface.co/meta-llama/Llama-2-7b-chat-hf. The drafter (4 layers, width 1024, 8
heads, MLP 2816, Llama 2's tokenizer) is not published: `train` lets the target write text and trains it on that, stopped and gone on with at
any moment; whatever `hf-specdec train` takes (--tokens, --steps, --loss, --prompts ...) is passed on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from hf_specdec.bench.embedded import EMBEDDED
from recipe_kit import Recipe, RecipeError, main
from recipe_kit.inputs import check_folder
from recipe_kit.models import read
from transformers import LlamaConfig

PROMPTS = {
    "weather": "I am leaving for Oslo on Friday morning and stay until Sunday. What is the weather there usually like in late October, "
    "how cold do the nights get, and what should I pack if I want to spend most of Saturday outdoors?",
    "trip_guidance": "Plan a trip of three days through Lisbon for two adults and a child of six. We like viewpoints, tiles and the sea, "
    "do not want to rent a car, and need a break after lunch every day. Say for each day where to start and how to get there.",
    "restaurants": "Recommend how to choose a restaurant in Bologna for a dinner with eight people, two of them vegetarian and one allergic "
    "to nuts. We would like local dishes, a quiet room and a bill below 40 euros a person. What should I ask when I call?",
    "car_control": "You control a car. Turn on the heating of the driver's seat, set the temperature to 21 degrees, open the rear left "
    "window a little and dim the dashboard. List each command with its value, and explain what you would check before each.",
    "music_search": "Find music for a drive of two hours at night: calm, mostly instrumental, nothing before 1970, and no artist twice. "
    "Make a list in the order in which I should hear it, and say in one sentence each why it fits.",
    "flight_search": "I need to fly from Munich to Boston between the 3rd and the 6th of May and be back by the 14th, with one stop at "
    "most and one checked bag. Explain step by step how to search for it and how to compare the offers.",
}
DRAFT_MISSING = (
    "this recipe needs a drafter of about 115M parameters with Llama 2's tokenizer (LlamaConfig: 4 layers, hidden_size 1024, 8 heads, "
    "intermediate_size 2816, vocab_size 32000), which is not published. Train one, `python recipes/llama2_7b__115m.py train --out FOLDER`, and pass "
    "its folder: --draft FOLDER; or run "
    "--scale shape, which needs no weights."
)


def llama(width: int, layers: int, heads: int, mlp: int, vocabulary: int = 32000) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp,
        num_key_value_heads=heads, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


RECIPE = Recipe(
    name="llama2_7b__115m",
    title="Llama 2 7B Chat with a 115M drafter",
    target="meta-llama/Llama-2-7b-chat-hf",
    licence="https://huggingface.co/meta-llama/Llama-2-7b-chat-hf",
    draft_missing=DRAFT_MISSING,
    prompts=PROMPTS,
    prompt_tokens=128,
    new_tokens=896,
    chat=True,
    in_article=True,
    configs={
        "shape": lambda: (llama(4096, 32, 32, 11008), llama(1024, 4, 8, 2816)),
        "tiny": lambda: (llama(64, 3, 4, 96, 512), llama(32, 1, 2, 64, 512)),
    },
)


TINY = ("--prompts", str(Path(__file__).parent / "prompts" / "question.jsonl"), "--tokens", "500", "--new-tokens", "16", "--steps", "20",
        "--batch-tokens", "256")  # of `train --scale tiny`, where nothing else is said


def train(arguments: list[str]) -> int:
    """Train the drafter of this recipe's shape with the command line of the package; its exit status."""
    parser = argparse.ArgumentParser(prog="llama2_7b__115m train", epilog="Other options go to `hf-specdec train`.", allow_abbrev=False)
    parser.add_argument("--target", help=f"hub id or folder of the model that writes the text (default {RECIPE.target}; tiny: {EMBEDDED})")
    parser.add_argument("--out", type=Path, default=Path("recipes/out/llama2_115m"), help="the drafter's folder, for --draft")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: the drafter of the toy, trained for minutes, as a trial")
    options, others = parser.parse_known_args(arguments)
    tiny = options.scale == "tiny"
    target = options.target or (EMBEDDED if tiny else RECIPE.target)
    try:
        check_folder("out", options.out)
        vocabulary = read(RECIPE, target, "config").vocab_size
        _shape(options.out / "shape", llama(32, 1, 2, 64, vocabulary) if tiny else llama(1024, 4, 8, 2816, vocabulary))
    except (RecipeError, OSError) as error:
        print(f"llama2_7b__115m: {error}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "hf_specdec", "train", target, "--config", str(options.out / "shape"), "--out", str(options.out)]
    return subprocess.call([*command, *(TINY if tiny else ()), *others])


def _shape(folder: Path, config: LlamaConfig) -> None:
    """Write the drafter's config there; RecipeError for a folder that has another one."""
    if (folder / "config.json").exists():
        there = read(RECIPE, str(folder), "config")
        if any(getattr(there, name, None) != getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")):
            raise RecipeError(f"--out {folder.parent} holds a drafter of another shape ({folder / 'config.json'}): name another folder.")
    config.save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(train(sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(RECIPE))
