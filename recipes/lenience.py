"""Lenience: how acceptance rises as exactness is given up (Leviathan et al. 2023, A.5 and Table 5), l = 1, 0.5, 0.3, 0.1.

    python recipes/lenience.py --scale full                              SmolLM2-135M-Instruct; drafts: its own MXFP4 copy, an n-gram table
    python recipes/lenience.py --scale full --target ID --draft ID       a pair of your own, hub ids or folders
    python recipes/lenience.py --scale tiny                              a toy trained in seconds

l = 1 is exact. Below it outputs are LOSSY: sampling commits no token with a probability above p(x) / l, greedy decoding takes a drafted
token for the argmax where p(x) >= l max p.
"""

from __future__ import annotations

import argparse
import copy

from hf_specdec import mx
from hf_specdec.bench.embedded import EMBEDDED, load_model, load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.drafts import ModelDraft, NGramDraft
from hf_specdec.hints import first_line
from recipe_kit import RecipeError
from recipe_kit.corpus import documents, shipped_corpus
from recipe_kit.inputs import check_context, check_vocabulary, contents
from recipe_kit.memory import check_memory, size_of
from recipe_kit.pretraining import Plan, pretrain
from recipe_kit.study import PAPER, Material, Row, Study
from recipe_kit.study_cli import main
from transformers import AutoConfig, LlamaConfig

LENIENCES = (1.0, 0.5, 0.3, 0.1)
T5_SMALL = {False: (0.75, 0.75, 0.80, 0.87), True: (0.62, 0.71, 0.76, 0.84)}  # greedy: A.5, text; sampling: Table 5
COPY, NGRAM, GIVEN = "MXFP4 copy", "n-gram", "draft model"
TINY = Plan(steps=150, batch=16, length=48, rate=3e-3)


def rows(options: argparse.Namespace) -> list[Row]:
    return [Row(draft, sample, options.k, lenience, paper) for draft in _drafts(options) for sample in (True, False)
            for lenience, paper in zip(LENIENCES, T5_SMALL[sample])]  # fmt: skip


def _drafts(options: argparse.Namespace) -> list[str]:
    return [GIVEN] if options.draft else [COPY, NGRAM]


def names(options: argparse.Namespace) -> list[str]:
    return [prompt.id for prompt in load_prompts("shipped", limit=1)] if options.scale == "full" else ["held out 1", "held out 2"]


def material(options: argparse.Namespace, prompts: list[str]) -> Material:
    return (_full if options.scale == "full" else _tiny)(options, prompts)


def _full(options: argparse.Namespace, prompts: list[str]) -> Material:
    if options.target != EMBEDDED:
        _check_fit(options)
    try:
        target, tokenizer = load_target(options.target, options.dtype, options.device)
        draft = load_model(options.draft, options.dtype, options.device) if options.draft else None
    except (OSError, ValueError) as error:
        raise RecipeError(_what_to_do(options, error)) from error
    texts = {prompt.id: prompt for prompt in load_prompts("shipped")}
    ids = {name: list(texts[name].ids(tokenizer)) for name in prompts}
    check_context(target.config, ids, options.new_tokens)
    if draft is not None:
        check_vocabulary(options.draft, draft.config, target.config)
        return Material(target, {GIVEN: lambda greedy, seed: ModelDraft(draft)}, {GIVEN: draft}, ids)
    table = NGramDraft.from_texts(list(documents()), tokenizer, order=3, sample=True, min_order=1)
    return _own_copy(target, table, ids)


def _check_fit(options: argparse.Namespace) -> None:
    try:
        configs = [AutoConfig.from_pretrained(name) for name in (options.target, options.draft) if name]
    except (OSError, ValueError) as error:
        raise RecipeError(_what_to_do(options, error)) from error
    sizes = [size_of(config) for config in configs]
    check_memory(sizes[0], sizes[1] if options.draft else sizes[0], options.dtype.itemsize, 1024, True, options.device, "")


def _what_to_do(options: argparse.Namespace, error: Exception) -> str:
    return (f"{options.target}{f' or {options.draft}' if options.draft else ''} cannot be read ({first_line(error)}). Hub ids need a connection, and for a gated "
            "model its licence accepted on its page and `hf auth login`; or name folders: --target FOLDER --draft FOLDER.")


def _tiny(options: argparse.Namespace, prompts: list[str]) -> Material:
    corpus = shipped_corpus()
    config = LlamaConfig(vocab_size=len(corpus.tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=96, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    target = pretrain("target", config, corpus.train, TINY, options.device).to(options.dtype)
    table = NGramDraft.from_tokens([corpus.train], 3, vocab_size=len(corpus.tokenizer), sample=True, min_order=1)
    return _own_copy(target, table, corpus.prompts(prompts, 16))


def _own_copy(target, table: NGramDraft, prompts: dict[str, list[int]]) -> Material:
    own = mx.compress(copy.deepcopy(target), "mxfp4_e2m1", measure=False)
    drafts = {COPY: lambda greedy, seed: ModelDraft(own), NGRAM: lambda greedy, seed: table}
    return Material(target, drafts, {COPY: own}, prompts)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=EMBEDDED, help="full: hub id or folder of the target (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--draft", help="full: hub id or folder of a draft model instead of the two drafts of the recipe")


def check(options: argparse.Namespace) -> None:
    if options.scale != "full" and (options.draft or options.target != EMBEDDED):
        raise RecipeError(f"--target and --draft have no meaning at --scale {options.scale}.")


def settings(options: argparse.Namespace) -> dict:
    if options.scale != "full":
        return {}
    return {"target": options.target, "draft": options.draft} | contents(target=options.target, draft=options.draft)


RECIPE = Study(
    name="lenience",
    title="Lenience: acceptance against exactness",
    paper=f"{PAPER}, A.5 and Table 5: T5-XXL with T5-small, En-De",
    label={"full": "real weights, measured acceptance", "tiny": "a toy trained for seconds on the text of this package"},
    new_tokens={"full": 64, "tiny": 32},
    rows=rows, names=names, material=material, arguments=arguments, check=check, settings=settings,
    no_shape="random weights have no acceptance of their own, and how acceptance rises with lenience is what this recipe measures: ",
    remarks=("Rows with l < 1 are LOSSY: their text is not the target's own. At l < 1 a sampled token has at most 1 / l times its probability.",),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
