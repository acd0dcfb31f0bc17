"""Writes docs/SUPPORTED.md, the matrix of supported families, from what really ran: `python -m tests.architecture_matrix [FILE]`."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_specdec
from hf_specdec import integration
from hf_specdec.drafts import MixtureDraft
from tests import encoder_decoders, seeing
from tests.architectures import ATTENTION, FAMILIES, OWN_WAYS, REFUSED, Family, offers, outcome
from tests.helpers import build, perturbed

HEAD = """# Supported families

Made by `python -m tests.architecture_matrix` on transformers {transformers}, torch {torch}, in float32 on random models. "exact":
greedy text equal to plain `generate` token for token, drafted by prompt lookup and by a perturbed copy of the model (for trees: by
a tree of ten tokens). But for those of "own cache", the cache is the package's own; a caller's is read, and [handed back](usage.md#what-comes-back).

{count}

Llama 4 with `attn_temperature_tuning` counts positions itself from `floor_scale` (8192) on: where `max_length` comes near it, batches and
trees are refused; batch 1 with chains is exact at any length. Doge is refused where `max_length` comes near its `keep_window_size`,
and Moshi where it comes near its `sliding_window`.
Models that read images or sounds, too, are run on texts here; what they are shown beside them is [further down](#images-videos-and-sounds).

"states": layers that carry a state from token to token (state-space models, linear attention, short convolutions), alone or beside attention. They need transformers
5.17 or newer (Mamba, Mamba 2, Falcon-Mamba, RecurrentGemma: 5.24), and take no trees. A caller's cache goes in and out with one row, unless there are states alone, which do not say how many
tokens they have seen, or plain generate keeps them in the model's modules (RecurrentGemma).

"own cache": the cache is plain generate's, because what is kept of a text is of a kind of its own (keys compressed by groups, keys of an indexer beside states, layers
that run several times), or what the model makes itself (MiniMax, RWKV, xLSTM, CPM-Ant), or there is none and the text is read again in every pass, as in plain generate (OpenAI GPT).
Passes go on from a copy; after a rejection the one before takes its place, and what was accepted is read again in front of the next candidates.
They need transformers 5.24, and take chains; as a draft, one row. A caller's cache goes in and out with one row, but for those that make it themselves. Of those that are refused in ragged
batches, prompts of one length work (RWKV: with `use_cache=False`); xLSTM's ragged text is plain generate's of the same batch, where it reads padding as text.

"selected": an indexer picks the keys that are attended to; a caller's cache is refused, and none is handed back.

| family | model_type | masks | attention | batch 1 | ragged batch | tree |
| --- | --- | --- | --- | --- | --- | --- |
"""

ENCODER_DECODERS = """
## Encoder-decoder models

With chains; drafted by a copy of the model, by one that is always wrong, by a perturbed copy with an encoder of its own, and
by lookup in the decoder's text and, where the vocabulary is shared, in the source. Beam search is that of plain generate, too; trees are refused.

| family | model_type | decoder positions | attention | batch 1 | ragged batch |
| --- | --- | --- | --- | --- | --- |
"""


SHOWN = """
## Images, videos and sounds

Prompts with one image (video, sound) a row, and their text; drafted by prompt lookup, by a perturbed copy of the model, which is shown the same, and, as trees in the batch, by
`MixtureDraft()` (but for models that carry states). Other model types that are given such inputs are refused by name. Not with them: a caller's filled cache (a later turn of text alone goes on
from one).

| family | model_type | shown | batch 1 | ragged batch |
| --- | --- | --- | --- | --- |
"""


def shown_line(family: seeing.Family) -> str:
    model, columns = family.model(), []
    for rows in (1, 3):
        if rows > 1 and not family.ragged:
            columns.append("refused")
            continue
        inputs = family.prompts(rows)
        wanted = model.generate(**inputs, max_new_tokens=20)
        drafts = [None, *([perturbed(model, 0.02)] if seeing.drafts_for(model, rows) else []), *([MixtureDraft()] if rows > 1 and family.trees else [])]
        found = [integration.generate(model, **inputs, max_new_tokens=20, assistant_model=draft, num_assistant_tokens=4) for draft in drafts]
        columns.append("exact" if all(torch.equal(own, wanted) for own in found) else "DIFFERS")
    shown = ", ".join(sorted(name for name in family.prompts(1) if name not in ("input_ids", "attention_mask", *family.marks)))
    return f"| {family.name} | `{family.kind}` | {shown} | {' | '.join(columns)} |\n"


def encoder_decoder_line(family: encoder_decoders.Family) -> str:
    columns = []
    for rows in (1, 3):
        results = {attn: encoder_decoders.outcome(family, attn, rows=rows) for attn in ATTENTION if offers(family, attn)}
        words = set(results.values())
        columns.append(words.pop() if len(words) == 1 else "; ".join(f"{attn}: {result}" for attn, result in results.items()))
    return f"| {family.name} | `{family.kind}` | {family.positions} | {', '.join(results)} | {' | '.join(columns)} |\n"


def cell(result: str) -> str:
    return "refused" if result.startswith("refused") else result


def line(family: Family) -> tuple[str, list[str]]:
    """One row of the table, and the reasons of what was refused in it."""
    attentions = [attn for attn in ATTENTION if offers(family, attn)]
    columns, reasons = [], []
    for batch, tree in ((1, False), (3, False), (3 if family.trees else 1, True)):
        results = {attn: outcome(family, attn, batch, tree) for attn in attentions}
        reasons += [result for result in results.values() if result.startswith("refused")]
        words = {cell(result) for result in results.values()}
        columns.append(words.pop() if len(words) == 1 else "; ".join(f"{attn}: {cell(result)}" for attn, result in results.items()))
    masks = family.window or "causal"
    return f"| {family.name} | `{family.kind}` | {masks} | {', '.join(attentions)} | {' | '.join(columns)} |", reasons


def refusal(kind: str, settings: dict, make=partial(build, attn="eager")) -> str:
    try:
        hf_specdec.enable(make(kind, **settings))
    except ValueError as error:
        return str(error)
    return "NOT REFUSED"


def count(lines: list[str]) -> str:
    """How many of the model types that AutoModelForCausalLM knows are in the table, and how they came out. lines: of the table, as FAMILIES."""
    found: dict[str, list[list[str]]] = {}
    for family, text in zip(FAMILIES, lines):
        found.setdefault(family.kind, []).append(text.strip("| ").split(" | ")[4:])
    known, refused = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), {kind for _, kind, _ in REFUSED + OWN_WAYS}
    exact = {kind for kind in known & found.keys() if all(cells[0] == "exact" for cells in found[kind])}
    ragged = {kind for kind in exact if all(cells[1] == "exact" for cells in found[kind])}
    everywhere = {kind for kind in ragged if all(cells == ["exact"] * 3 for cells in found[kind])}
    others = sorted(known - exact - refused)
    return (f"Of the {len(known)} model types of `AutoModelForCausalLM`, {len(exact)} are exact at batch 1, {len(ragged)} of them in ragged batches, too, "
            f"{len(everywhere)} of these with trees, and {len(known & refused - exact)} are refused (below). Not run: {', '.join(f'`{kind}`' for kind in others)}.")


def main(path: str = "docs/SUPPORTED.md") -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    lines, reasons = [], {}
    for done, family in enumerate(FAMILIES, start=1):
        text, why = line(family)
        lines.append(text)
        reasons.update({reason.removeprefix("refused: "): family.name for reason in why})
        print(f"\r{done}/{len(FAMILIES)} {family.name:<40}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    text = HEAD.format(transformers=transformers.__version__, torch=torch.__version__, count=count(lines)) + "\n".join(lines)
    text += "\n" + ENCODER_DECODERS + "".join(map(encoder_decoder_line, encoder_decoders.FAMILIES))
    text += SHOWN + "".join(map(shown_line, seeing.FAMILIES))
    text += "\n## Refused, with these words\n\n| family | message |\n| --- | --- |\n"
    text += "".join(f"| {family} | {reason} |\n" for reason, family in reasons.items())
    text += "".join(f"| {name} | {refusal(kind, settings)} |\n" for name, kind, settings in REFUSED + OWN_WAYS)
    text += "".join(f"| {name} | {refusal(kind, settings, encoder_decoders.refused)} |\n" for name, kind, settings in encoder_decoders.REFUSED)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
