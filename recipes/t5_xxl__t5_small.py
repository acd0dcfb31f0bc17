"""T5-XXL with T5-small, base and large: En-De translation and CNN/DM summaries (Leviathan et al. 2023, Tables 2 and 3).

    python recipes/t5_xxl__t5_small.py --scale full --task en-de                real weights from the hub, measured acceptance
    python recipes/t5_xxl__t5_small.py --scale shape --task cnn-dm              the full shapes, random weights, SIMULATED acceptance
    python recipes/t5_xxl__t5_small.py --scale shape --target-config xl         the same with a smaller target
    python recipes/t5_xxl__t5_small.py --scale tiny                             a toy, in seconds

The paper's models are T5 v1.1 checkpoints fine-tuned on either task, and were never published. The full scale runs the original T5 in
their place, whose published checkpoints were trained on both tasks among others: google-t5/t5-11b and google-t5/t5-small, base, large.
T5 v1.1 from the hub (google/t5-v1_1-xxl) is not fine-tuned on anything: name your own fine-tuned pair with --target and --draft.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path

from hf_specdec.drafts import ModelDraft, NGramDraft
from hf_specdec.hints import first_line
from recipe_kit import RecipeError
from recipe_kit.inputs import check_vocabulary, contents
from recipe_kit.memory import check_memory, free_bytes, needed_bytes, size_of
from recipe_kit.models import random_model
from recipe_kit.recipe import token_prompts
from recipe_kit.running import simulated
from recipe_kit.study import PAPER, Material, Row, Study
from recipe_kit.study_cli import main
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

SMALL, BASE, LARGE, BIGRAM, UNIGRAM = "T5-small", "T5-base", "T5-large", "bigram", "unigram"
# (draft, T) -> alpha (Table 3), gamma and measured speed-up (Table 2), c (Table 4)
TABLES = {
    "en-de": {
        (SMALL, 0): (0.75, 7, 3.4, 0.02), (BASE, 0): (0.80, 7, 2.8, 0.04), (LARGE, 0): (0.82, 7, 1.7, 0.11), (BIGRAM, 0): (0.20,),
        (UNIGRAM, 0): (0.08,), (SMALL, 1): (0.62, 7, 2.6, 0.02), (BASE, 1): (0.68, 5, 2.4, 0.04), (LARGE, 1): (0.71, 3, 1.4, 0.11),
        (BIGRAM, 1): (0.19,), (UNIGRAM, 1): (0.07,),
    },
    "cnn-dm": {
        (SMALL, 0): (0.65, 5, 3.1, 0.02), (BASE, 0): (0.73, 5, 3.0, 0.04), (LARGE, 0): (0.74, 3, 2.2, 0.11), (BIGRAM, 0): (0.23,),
        (UNIGRAM, 0): (0.13,), (SMALL, 1): (0.53, 5, 2.3, 0.02), (BASE, 1): (0.55, 3, 2.2, 0.04), (LARGE, 1): (0.56, 3, 1.7, 0.11),
        (BIGRAM, 1): (0.16,), (UNIGRAM, 1): (0.08,),
    },
}  # fmt: skip
PREFIX = {"en-de": "translate English to German: ", "cnn-dm": "summarize: "}
SOURCE_TOKENS = {"en-de": 32, "cnn-dm": 512}
HUB = {SMALL: "google-t5/t5-small", BASE: "google-t5/t5-base", LARGE: "google-t5/t5-large"}
TARGET = "google-t5/t5-11b"
# T5 v1.1: width, layers of either side, heads, MLP
SHAPES = {"small": (512, 8, 6, 1024), "base": (768, 12, 12, 2048), "large": (1024, 24, 16, 2816), "xl": (2048, 24, 32, 5120), "xxl": (4096, 24, 64, 10240)}
TEXTS = {
    "en-de": [
        "The bridge across the river will be closed from Monday, and the buses will take the longer way through the old town.",
        "She had promised to write as soon as the ship reached the harbour, but no letter came before the end of the winter.",
        "The committee has decided to repeat the experiment, because two of the five measurements cannot be explained.",
        "Please keep the receipt: without it, the goods can only be exchanged and not paid back.",
    ],
    "cnn-dm": [
        "A fire broke out in a paper mill on the edge of the town late on Tuesday. More than eighty firefighters worked through the night, and "
        "by the morning the flames were under control. Nobody was hurt, said the fire chief, because the night shift had left the building a "
        "few minutes before. The cause is not known yet. The mill has two hundred workers, and its owner said that production would stand "
        "still for several weeks. People in the houses nearby were asked to keep their windows closed until the evening.",
        "The city council has voted to plant four thousand trees along its main roads over the next five years. The plan, which was opposed by "
        "shop owners who fear for parking places, passed with a majority of three votes. Work is to start in the autumn near the railway "
        "station. The mayor said that in last summer's heat the stones of the square had reached fifty degrees. A third of the money comes "
        "from the state, and the rest from a fee on building permits. The shop owners said that they would go to court.",
    ],
}


def t5(width: int, layers: int, heads: int, mlp: int, vocabulary: int = 32128) -> T5Config:
    return T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=64 if width >= 512 else 16, d_ff=mlp, num_layers=layers, num_heads=heads,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def rows(options: argparse.Namespace) -> list[Row]:
    """Without --k the n-gram tables draft one token: at their acceptance a second one would be judged in vain."""
    found = []
    for (draft, temperature), (alpha, *rest) in TABLES[options.task].items():
        if draft in options.drafts and not (options.scale == "shape" and temperature):
            gamma, speed_up, c = rest or (1, None, None)
            ks = range(3, 8) if options.all_k and rest else [options.k or gamma]
            found += [Row(draft, bool(temperature), k, 1.0, alpha, gamma if rest else None, c, speed_up) for k in ks]
    return found


def names(options: argparse.Namespace) -> list[str]:
    return [f"{options.task} {number}" for number in range(1, (len(_texts(options)) if options.scale == "full" else 2) + 1)]


def _texts(options: argparse.Namespace) -> list[str]:
    if options.text is None:
        return TEXTS[options.task]
    lines = [line.strip() for line in _lines(options.text, "--text") if line.strip()]
    if not lines:
        raise RecipeError(f"--text {options.text}: there is no text in it; one source a line.")
    return lines


def _lines(path: Path | None, flag: str) -> list[str]:
    try:
        return [] if path is None else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{flag} {path}: not a UTF-8 text file ({error}). Save it as UTF-8.") from error


def material(options: argparse.Namespace, prompts: list[str]) -> Material:
    return {"full": _full, "shape": _shape, "tiny": _tiny}[options.scale](options, prompts)


# --- random weights -----------------------------------------------------------------------------------------------------


def _shape(options: argparse.Namespace, prompts: list[str]) -> Material:
    configs = {name: t5(*SHAPES[name.removeprefix("T5-")]) for name in (SMALL, BASE, LARGE) if name in options.drafts}
    target = t5(*SHAPES[options.target_config])
    _check_memory(options, target, configs)
    made = {name: random_model(config, options.dtype, options.device) for name, config in configs.items()}
    rates = {name: TABLES[options.task][name, 0][0] if options.acceptance is None else options.acceptance for name in options.drafts}
    drafts = {name: partial(simulated, made.get(name), rate) for name, rate in rates.items()}
    note = "rates SIMULATED: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    note += f"; target: the shape of T5 v1.1 {options.target_config}" + (", NOT the paper's" if options.target_config != "xxl" else "")
    return Material(random_model(target, options.dtype, options.device), drafts, made, token_prompts(prompts, SOURCE_TOKENS[options.task], 32000), [note])


def _check_memory(options: argparse.Namespace, target: T5Config, drafts: dict[str, T5Config]) -> None:
    """RecipeError before anything is built, naming the largest target that fits beside the drafts asked for."""
    tokens = SOURCE_TOKENS[options.task] + options.new_tokens + 64
    beside = sum(needed_bytes(size_of(config), None, options.dtype.itemsize, tokens, True) for config in drafts.values())
    free = free_bytes(options.device)
    fits = [name for name, shape in SHAPES.items() if free is None or
            beside + needed_bytes(size_of(t5(*shape)), None, options.dtype.itemsize, tokens, True) <= free]  # fmt: skip
    if options.target_config in fits:
        return
    remedy = f", or --target-config {fits[-1]}, the largest that fits" if fits else ""
    check_memory(size_of(target), None, options.dtype.itemsize, tokens, True, options.device, remedy)
    raise RecipeError(f"too little memory: the target fits, and the drafts need {beside / 1e9:.1f} GB more. Take fewer with --drafts{remedy}.")


def _tiny(options: argparse.Namespace, prompts: list[str]) -> Material:
    target, *drafts = (random_model(t5(*shape, 96), options.dtype, options.device)
                       for shape in ((64, 3, 4, 96), (32, 1, 2, 48), (40, 1, 2, 48), (48, 2, 2, 64)))  # fmt: skip
    models = {name: model for name, model in zip((SMALL, BASE, LARGE), drafts) if name in options.drafts}
    return _measured(options, target, models, [[*range(96), *range(96)]], token_prompts(prompts, 12, 96))


# --- real weights -------------------------------------------------------------------------------------------------------


def _full(options: argparse.Namespace, prompts: list[str]) -> Material:
    ids = {name: options.draft if name == SMALL and options.draft else HUB[name] for name in HUB if name in options.drafts}
    configs = {name: _read(AutoConfig, hub, options) for name, hub in {"target": options.target, **ids}.items()}
    for name, hub in ids.items():
        check_vocabulary(hub, configs[name], configs["target"])
    tokens = SOURCE_TOKENS[options.task] + options.new_tokens + 64
    sizes = {name: size_of(config) for name, config in configs.items()}
    beside = sum(needed_bytes(size, None, options.dtype.itemsize, tokens, True) for name, size in sizes.items() if name != "target")
    free = free_bytes(options.device)
    check_memory(sizes["target"], None, options.dtype.itemsize, tokens, True, options.device, ", or a smaller target with --target")
    if free is not None and beside + needed_bytes(sizes["target"], None, options.dtype.itemsize, tokens, True) > free:
        raise RecipeError(f"too little memory: the target fits, and the drafts need {beside / 1e9:.1f} GB more. Take fewer with --drafts.")
    tokenizer = _read(AutoTokenizer, options.target, options)
    models = {name: _read(AutoModelForSeq2SeqLM, hub, options, dtype=options.dtype).to(options.device).eval() for name, hub in ids.items()}
    target = _read(AutoModelForSeq2SeqLM, options.target, options, dtype=options.dtype).to(options.device).eval()
    counted = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in _lines(options.table_text, "--table-text")]
    sources = {name: tokenizer(PREFIX[options.task] + text)["input_ids"] for name, text in zip(prompts, _texts(options))}
    return _measured(options, target, models, counted, sources)


def _measured(options: argparse.Namespace, target, models: dict, counted: list[list[int]], prompts: dict) -> Material:
    drafts = {name: (lambda greedy, seed, model=model: ModelDraft(model)) for name, model in models.items()}
    for name, order in ((BIGRAM, 2), (UNIGRAM, 1)):
        if name in options.drafts:
            table = NGramDraft.from_tokens(copy.deepcopy(counted), order, vocab_size=target.config.vocab_size, sample=True, min_order=1)
            drafts[name] = lambda greedy, seed, table=table: table
    sizes = ", ".join(f"{name} {sum(p.numel() for p in model.parameters()):,}" for name, model in {"target": target, **models}.items())
    return Material(target, drafts, models, prompts, [f"parameters: {sizes}."])


def _read(kind, name: str, options: argparse.Namespace, **kwargs):
    try:
        return kind.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        flag = "--target" if name == options.target else "--draft"
        raise RecipeError(f"{name} cannot be read ({first_line(error)}). It needs a connection to "
                          f"huggingface.co, or a folder with config, weights and tokenizer: {flag} FOLDER. --scale shape needs no weights.") from error


# --- the command line ---------------------------------------------------------------------------------------------------


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=list(TABLES), default="en-de", help="whose rows of the tables (default en-de)")
    add("--drafts", nargs="+", choices=(SMALL, BASE, LARGE, BIGRAM, UNIGRAM),
        help=f"default: {SMALL}, and the n-gram tables where there is text to count; full, shape and tiny can do all five")
    add("--all-k", action="store_true", help="draft models: K = 3 to 7 instead of the paper's K of the row")
    add("--target-config", choices=list(SHAPES), help="shape: a smaller T5 v1.1 as the target (default xxl)")
    add("--acceptance", type=float, help="shape: the rate SIMULATED for every draft (default: the paper's alpha of each)")
    add("--target", help=f"full: hub id or folder of the target (default {TARGET}; the paper's own was not published)")
    add("--draft", help=f"full: hub id or folder in the place of {HUB[SMALL]}")
    add("--text", type=Path, help="full: a file with one source a line, without the task's prefix, such as the test set of WMT or CNN/DM")
    add("--table-text", type=Path, help="full: text of the output's kind (German, or summaries) that the n-gram tables are counted on")


def check(options: argparse.Namespace) -> None:
    full = options.scale == "full"
    for name in ("target", "draft", "text", "table_text"):
        if getattr(options, name) and not full:
            raise RecipeError(f"--{name.replace('_', '-')} has no meaning at --scale {options.scale}.")
    if options.target_config and options.scale != "shape":
        raise RecipeError(f"--target-config has no meaning at --scale {options.scale}" + ("; name the model with --target." if full else "."))
    if options.acceptance is not None and (options.scale != "shape" or not 0 <= options.acceptance <= 1):
        raise RecipeError(f"--acceptance {options.acceptance}: a rate in 0..1, for --scale shape.")
    for name in ("text", "table_text"):
        if getattr(options, name) and not getattr(options, name).is_file():
            raise RecipeError(f"--{name.replace('_', '-')} {getattr(options, name)}: there is no such file.")
    tables = [BIGRAM, UNIGRAM] if not full or options.table_text else []
    if full and options.drafts and not options.table_text and {BIGRAM, UNIGRAM} & set(options.drafts):
        raise RecipeError("--drafts bigram, unigram: at --scale full they are counted on a text of the output's kind; give one with --table-text.")
    if options.k and options.all_k:
        raise RecipeError("--k and --all-k: give one of them.")
    options.drafts = options.drafts or [SMALL, *tables]
    options.target, options.target_config = options.target or TARGET, options.target_config or "xxl"


def settings(options: argparse.Namespace) -> dict:
    kept = {"full": ("target", "draft"), "shape": ("target_config", "acceptance"), "tiny": ()}[options.scale]
    paths = {name: str(getattr(options, name)) for name in ("text", "table_text") if getattr(options, name)}
    inputs = {name: getattr(options, name) for name in ("target", "draft", "text", "table_text")} if options.scale == "full" else {}
    return {name: getattr(options, name) for name in ("task", "drafts", "all_k", *kept)} | paths | contents(**inputs)


RECIPE = Study(
    name="t5_xxl__t5_small",
    title="T5-XXL with smaller T5 drafts: En-De and CNN/DM",
    paper=f"{PAPER}, Tables 2, 3 and 4: T5-XXL on TPU v4",
    label={
        "full": "real weights, which are not the paper's; measured acceptance",
        "shape": "full shape, random weights, acceptance SIMULATED",
        "tiny": "a toy with random weights: its acceptance is measured and says nothing of T5",
    },
    new_tokens={"full": 128, "shape": 16, "tiny": 24},
    rows=rows, names=names, material=material, arguments=arguments, check=check, settings=settings,
    k=None, dtypes={"full": "bfloat16", "shape": "bfloat16"}, variant=lambda options: f"_{options.task}",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
