"""A GPT-like decoder of 97M parameters on LM1B, with a 6M draft, a bigram and a unigram table (Leviathan et al. 2023, Table 3).

    python recipes/gpt_97m__6m.py --scale full --dataset NAME --work FOLDER     trains both models (hours on a GPU), then measures; resumable
    python recipes/gpt_97m__6m.py --scale full --text FILE --target FOLDER --draft FOLDER      models that are there already
    python recipes/gpt_97m__6m.py --scale shape                                 the full shapes, random weights, SIMULATED acceptance
    python recipes/gpt_97m__6m.py --scale tiny                                  trains a toy pair in seconds; its acceptance is real

The paper's models are not published. Target: 12 layers, width 768, 12 heads, MLP 3072; draft: 2 layers, width 256, 4 heads, MLP 1024;
GELU, BERT's tokenization with 8k tokens. LM1B as plain text is at https://www.statmt.org/lm-benchmark; copies of it are on the hub.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from hf_specdec.drafts import ModelDraft, NGramDraft
from hf_specdec.hints import first_line
from recipe_kit import RecipeError
from recipe_kit.corpus import Corpus, build_corpus, documents, kept_tokenizer, shipped_corpus
from recipe_kit.inputs import check_context, check_folder, contents
from recipe_kit.memory import check_memory, size_of
from recipe_kit.models import random_model
from recipe_kit.pretraining import Plan, pretrain
from recipe_kit.recipe import token_prompts
from recipe_kit.running import simulated
from recipe_kit.study import PAPER, Material, Row, Study
from recipe_kit.study_cli import main
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

MODEL, BIGRAM, UNIGRAM = "6M draft", "bigram", "unigram"
TABLE_3 = {(MODEL, 0): 0.88, (MODEL, 1): 0.89, (BIGRAM, 0): 0.05, (BIGRAM, 1): 0.05, (UNIGRAM, 0): 0.03, (UNIGRAM, 1): 0.03}
PROMPT_TOKENS = 16
POSITIONS = 256
TINY = Plan(steps=120, batch=16, length=48, rate=3e-3)


def gpt(width: int, layers: int, heads: int, vocabulary: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_inner=4 * width, n_positions=POSITIONS,
        activation_function="gelu", tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def configs(scale: str, vocabulary: int) -> tuple[GPT2Config, GPT2Config]:
    """Target and draft."""
    if scale == "tiny":
        return gpt(64, 3, 4, vocabulary), gpt(32, 1, 4, vocabulary)
    return gpt(768, 12, 12, vocabulary), gpt(256, 2, 4, vocabulary)


def rows(options: argparse.Namespace) -> list[Row]:
    """The n-gram tables draft one token: at their acceptance a second one would be judged in vain."""
    return [Row(draft, bool(temperature), options.k if draft == MODEL else 1, paper=alpha)
            for (draft, temperature), alpha in TABLE_3.items() if not (options.scale == "shape" and temperature)]  # fmt: skip


def names(options: argparse.Namespace) -> list[str]:
    return [f"held out {number}" for number in range(1, (8 if options.scale == "full" else 4) + 1)]


def material(options: argparse.Namespace, prompts: list[str]) -> Material:
    return {"full": _full, "shape": _shape, "tiny": _tiny}[options.scale](options, prompts)


def _shape(options: argparse.Namespace, prompts: list[str]) -> Material:
    both = configs("shape", 8000)
    check_memory(*map(size_of, both), options.dtype.itemsize, POSITIONS, True, options.device, "")
    target, draft = (random_model(config, options.dtype, options.device) for config in both)
    rates = {name: TABLE_3[name, 0] for name in (MODEL, BIGRAM, UNIGRAM)} | {MODEL: options.acceptance}
    drafts = {name: partial(simulated, draft if name == MODEL else None, rate) for name, rate in rates.items()}
    note = "rates SIMULATED: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return Material(target, drafts, {MODEL: draft}, token_prompts(prompts, PROMPT_TOKENS, 8000), [note])


def _tiny(options: argparse.Namespace, prompts: list[str]) -> Material:
    corpus = shipped_corpus()
    pair = [pretrain(name, config, corpus.train, TINY, options.device).to(options.dtype)
            for name, config in zip(("target", "draft"), configs("tiny", len(corpus.tokenizer)))]  # fmt: skip
    return _measured(corpus, *pair, prompts)


def _full(options: argparse.Namespace, prompts: list[str]) -> Material:
    texts = partial(documents, options.text, options.dataset, options.column, options.documents)
    if options.target:
        tokenizer, pair = _folder(options.target, "--target"), _loaded(options)
        return _measured(build_corpus(texts, tokenizer), *pair, prompts)
    sizes = [size_of(config) for config in configs("full", 8000)]
    check_memory(sizes[0], sizes[1], 16, POSITIONS * 64, True, options.device, "")  # weights, gradients and two moments, in float32
    tokenizer = kept_tokenizer(texts, 8000, options.work, options.source)
    corpus = build_corpus(texts, tokenizer, options.work, options.source)
    plan = Plan(options.steps, batch=options.batch)
    pair = [pretrain(name, config, corpus.train, plan, options.device, options.work / name)
            for name, config in zip(("target", "draft"), configs("full", len(tokenizer)))]  # fmt: skip
    return _measured(corpus, *(model.to(options.dtype) for model in pair), prompts)


def _measured(corpus: Corpus, target, draft, prompts: list[str]) -> Material:
    """Tables counted on the text that the models were trained on; prompts from text that was held out."""
    tables = {name: NGramDraft.from_tokens([corpus.train], order, vocab_size=target.config.vocab_size, sample=True, min_order=1)
              for name, order in ((BIGRAM, 2), (UNIGRAM, 1))}  # fmt: skip
    drafts = {name: lambda greedy, seed, table=table: table for name, table in tables.items()}
    drafts[MODEL] = lambda greedy, seed: ModelDraft(draft)
    sizes = " and ".join(f"{sum(p.numel() for p in model.parameters()):,}" for model in (target, draft))
    notes = [f"{sizes} parameters; tables counted on {len(corpus.train):,} tokens."]
    return Material(target, drafts, {MODEL: draft}, corpus.prompts(prompts, PROMPT_TOKENS), notes)


def _loaded(options: argparse.Namespace) -> list:
    found = [_folder(folder, flag, AutoConfig) for folder, flag in ((options.target, "--target"), (options.draft, "--draft"))]
    for config, wanted, flag in zip(found, configs("full", 8000), ("--target", "--draft")):
        sizes = [(getattr(one, "hidden_size", None), getattr(one, "num_hidden_layers", None)) for one in (config, wanted)]
        if sizes[0] != sizes[1]:
            raise RecipeError(f"{flag}: a model of width and layers {sizes[0]}; this recipe's has {sizes[1]}.")
    if found[0].vocab_size != found[1].vocab_size:
        raise RecipeError(f"--draft: a vocabulary of {found[1].vocab_size} against the target's {found[0].vocab_size}: they need one tokenizer.")
    check_context(found[0], {"": [0] * PROMPT_TOKENS}, options.new_tokens)
    check_memory(*map(size_of, found), options.dtype.itemsize, POSITIONS, True, options.device, "")
    return [_folder(folder, flag, AutoModelForCausalLM, dtype=options.dtype).to(options.device).eval()
            for folder, flag in ((options.target, "--target"), (options.draft, "--draft"))]  # fmt: skip


def _folder(name: str, flag: str, kind=AutoTokenizer, **kwargs):
    try:
        return kind.from_pretrained(name, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(f"{flag} {name}: cannot be read ({first_line(error)}). Name a folder with config, weights and tokenizer, or leave "
                          "--target and --draft out to train them.") from error


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--acceptance", type=float, help="shape: the rate SIMULATED for the 6M draft (default: the paper's 0.88); the tables have the paper's")
    add("--text", type=Path, nargs="+", help="full: text files (UTF-8), a document a line")
    add("--dataset", help="full: a data set of the hub, NAME[:SPLIT], or a local parquet, csv or jsonl file")
    add("--column", default="text", help="full: its column (default text)")
    add("--documents", type=int, default=1_000_000, help="full: read at most so many (default 1,000,000)")
    add("--work", type=Path, default=Path("recipes/out/gpt_97m__6m"), help="full: folder of the tokenizer, the tokens and the checkpoints")
    add("--steps", type=int, default=20_000, help="full: training steps (default 20,000)")
    add("--batch", type=int, default=256, help="full: stretches of 128 tokens a step (default 256)")
    add("--target", help="full: a trained target instead of training one")
    add("--draft", help="full: a trained draft")


def check(options: argparse.Namespace) -> None:
    full = options.scale == "full"
    for name in ("text", "dataset", "target", "draft"):
        if getattr(options, name) and not full:
            raise RecipeError(f"--{name} has no meaning at --scale {options.scale}.")
    if options.acceptance is not None and (options.scale != "shape" or not 0 <= options.acceptance <= 1):
        raise RecipeError(f"--acceptance {options.acceptance}: a rate in 0..1, for --scale shape.")
    options.acceptance = TABLE_3[MODEL, 0] if options.acceptance is None else options.acceptance
    if full and not (options.text or options.dataset):
        raise RecipeError("--scale full needs text: --text FILE ... or --dataset NAME (LM1B in the paper). --scale shape needs none.")
    if full and bool(options.target) != bool(options.draft):
        raise RecipeError("--target and --draft go together: both are trained here, or neither.")
    if options.text and options.dataset:
        raise RecipeError("--text and --dataset: give one of them.")
    for name in ("steps", "batch", "documents"):
        if getattr(options, name) < 1:
            raise RecipeError(f"--{name} {getattr(options, name)}: must be 1 or more.")
    if PROMPT_TOKENS + options.new_tokens > POSITIONS:
        raise RecipeError(f"--new-tokens {options.new_tokens}: the models have {POSITIONS} positions, {PROMPT_TOKENS} of them for the prompt.")
    if full:
        check_folder("work", options.work)
        options.source = _source(options)


def _source(options: argparse.Namespace) -> dict:
    """Which text: its names, and what is under them."""
    missing = [path for path in options.text or [] if not path.is_file()]
    if missing:
        raise RecipeError(f"--text {missing[0]}: there is no such file.")
    text = [str(path) for path in options.text or []]
    named = {"text": text, "dataset": options.dataset, "column": options.column, "documents": options.documents}
    return named | contents(text=options.text, dataset=(options.dataset or "").partition(":")[0])


def settings(options: argparse.Namespace) -> dict:
    kept = {"full": ("steps", "batch", "target", "draft"), "shape": ("acceptance",), "tiny": ()}[options.scale]
    found = {name: getattr(options, name) for name in kept}
    return found | options.source | contents(target=options.target, draft=options.draft) if options.scale == "full" else found


RECIPE = Study(
    name="gpt_97m__6m",
    title="GPT-like decoder, 97M with 6M, bigram and unigram drafts",
    paper=f"{PAPER}, Table 3: GPT-like (97M) on LM1B",
    label={
        "full": "models trained on the text given",
        "shape": "full shape, random weights, acceptance SIMULATED",
        "tiny": "a toy pair trained for seconds on the text of this package",
    },
    new_tokens={"full": 96, "shape": 64, "tiny": 48},
    rows=rows, names=names, material=material, arguments=arguments, check=check, settings=settings,
    k_of=" by the 6M draft; the tables draft 1, whatever is given",
    remarks=("K is --k for the 6M draft and 1 for the tables: at their acceptance a second token would be judged in vain.",),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
