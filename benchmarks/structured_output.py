"""Answers held to a JSON schema by xgrammar: plain generate, stock prompt lookup and ours, interleaved in one process.

    python benchmarks/structured_output.py --out structured.json

Batch 1, greedy, three texts to be written as lists of objects and three as one object, whole calls with their prompt pass. Beside each arm stands the check: how many texts are plain
generate's, and how many are JSON of the schema. An arm that fails says with what. Needs `pip install xgrammar`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.terminal import counting
from hf_specdec.drafts import JumpForwardDraft, MixtureDraft

LISTS = {"people": {"first_name": "string", "last_name": "string", "age": "integer", "city": "string", "occupation": "string"},
         "books": {"title": "string", "author": "string", "year": "integer", "publisher": "string"},
         "orders": {"order_number": "integer", "customer_name": "string", "product_name": "string", "quantity": "integer"}}
ONE = {"invoice": {"invoice_number": "string", "customer_name": "string", "total_amount": "number", "currency": "string", "due_date": "string", "is_paid": "boolean"},
       "flight": {"departure_city": "string", "arrival_city": "string", "departure_date": "string", "number_of_passengers": "integer", "cabin_class": "string"},
       "patient": {"patient_name": "string", "age": "integer", "symptoms": "string", "temperature_celsius": "number", "follow_up_required": "boolean"}}
KEYS = LISTS | ONE
TEXTS = {
    "people": "Anna Schulz, 31, is a baker in Berlin. Tom Miller, 45, works as a teacher in Hamburg. Maria Rossi, aged 28, is a nurse in Rome.",
    "books": "Emma was written by Jane Austen and came out in 1815 with John Murray. Dracula, by Bram Stoker, was published by Constable in 1897. "
             "Ulysses by James Joyce was published in 1922 by Sylvia Beach.",
    "orders": "Order 4711: John Smith bought 3 lamps. Order 4712: Mary Jones bought 12 chairs. Order 4715: Ali Khan bought 1 table.",
    "invoice": "Invoice 2024-117 to Miller & Sons over 1250.50 euros is due on 1 March 2024 and has not been paid.",
    "flight": "Book a flight for two from Hamburg to Lisbon on 3 May in business class.",
    "patient": "Mr. Jones, 52, has had a cough and a temperature of 38.4 since Monday. He should come again in a week.",
}
WITHOUT = "suffix_automaton", "ngram_recycling"
ARMS = {
    "plain": lambda tokenizer: {},
    "stock lookup": lambda tokenizer: dict(prompt_lookup_num_tokens=7),
    "lookup": lambda tokenizer: dict(speculative=True),
    "mixture without jump-forward": lambda tokenizer: dict(speculative=True, assistant_model=MixtureDraft(WITHOUT)),
    "mixture": lambda tokenizer: dict(speculative={"draft": "mixture"}),
    "mixture, jump-forward knows the tokenizer": lambda tokenizer: dict(speculative=True, assistant_model=MixtureDraft([*WITHOUT, JumpForwardDraft(tokenizer)])),
}


def schema(kind: str) -> str:
    fields = KEYS[kind]
    item = {"type": "object", "properties": {name: {"type": of} for name, of in fields.items()}, "required": [*fields], "additionalProperties": False}
    return json.dumps(item if kind in ONE else {"type": "object", "properties": {kind: {"type": "array", "items": item}}, "required": [kind], "additionalProperties": False})


def request(tokenizer, kind: str) -> dict:
    keys = ", ".join(KEYS[kind])
    asked = f"{TEXTS[kind]} Extract the facts as JSON with the keys {keys}." if kind in ONE else \
        f"{TEXTS[kind]} Write all {kind} as JSON: an object with the key {kind}, a list of objects with {keys}."
    return tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=True, return_tensors="pt")


def valid(text: str, kind: str) -> bool:
    try:
        found = json.loads(text)
        return all(set(item) == set(KEYS[kind]) for item in ([found] if kind in ONE else found[kind]))
    except (ValueError, KeyError):
        return False


def measure(model, tokenizer, tokens: int, repetitions: int) -> dict:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size))
    seconds, found, failed, rates = {arm: {kind: [] for kind in TEXTS} for arm in ARMS}, {}, {}, {}
    with counting("structured output", len(TEXTS) * (repetitions + 1)) as bar:
        for kind in TEXTS:
            grammar, inputs = compiler.compile_json_schema(schema(kind)), request(tokenizer, kind)
            for turn in range(repetitions + 1):
                for arm, make in ARMS.items():
                    options = make(tokenizer)
                    processor, begin = xgrammar.contrib.hf.LogitsProcessor(grammar), perf_counter()
                    try:
                        done = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, logits_processor=[processor], return_dict_in_generate=True, **options)
                    except Exception as error:  # the peer's own
                        failed[arm] = f"{type(error).__name__} {error}".strip()
                        continue
                    if turn:
                        seconds[arm][kind].append(perf_counter() - begin)
                    found[arm, kind] = done.sequences[0, inputs["input_ids"].shape[1] :]
                    rates.setdefault((arm, kind), []).append(getattr(done, "speculation", None) and done.speculation.block_efficiency)
                bar()
    return {arm: {"failed": failed[arm]} if arm in failed else {
        **{f"speed-up, {name}": statistics.geometric_mean([statistics.median(seconds["plain"][kind]) / statistics.median(seconds[arm][kind]) for kind in kinds])
           for name, kinds in (("lists", LISTS), ("objects", ONE))},
        **{f"tokens per pass, {name}": statistics.mean(rates[arm, kind][-1] or 1.0 for kind in kinds) for name, kinds in (("lists", LISTS), ("objects", ONE))},
        "same": sum(torch.equal(found[arm, kind], found["plain", kind]) for kind in TEXTS),
        "valid": sum(valid(tokenizer.decode(found[arm, kind], skip_special_tokens=True), kind) for kind in TEXTS)} for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiles", action="store_true", help="the weights in the order of the CPU kernels, for all arms")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model, tokenizer = load_target(dtype=given.dtype)
    if given.tiles:
        mx.to_tiles(model)
    table = measure(hf_specdec.enable(model), tokenizer, given.max_new_tokens, given.repetitions)
    shown = Table("", "lists, over plain", "single objects, over plain", "tokens per pass", "texts plain generate's", "JSON of the schema")
    for arm, row in table.items():
        cells = [f"fails: {row['failed']}"] if "failed" in row else [
            f"{row['speed-up, lists']:.2f}x", f"{row['speed-up, objects']:.2f}x", f"{row['tokens per pass, lists']:.2f}, {row['tokens per pass, objects']:.2f}",
            f"{row['same']} of {len(TEXTS)}", f"{row['valid']} of {len(TEXTS)}"]
        shown.add_row(arm, *cells)
    Console().print(shown)
    if given.out:
        given.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
