"""What each of two processes does that run one model together: `python -m torch.distributed.run --nproc-per-node 2 -m tests.sharing HOW FOLDER`.

HOW is tp, pp or ep, as sizes of transformers' DistributedConfig are called; FOLDER holds `target` and `draft`. Clocks and torch's generators differ between the two."""

from __future__ import annotations

import inspect
import json
import random
import sys
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import beam, loop, mx
from hf_specdec.drafts import EarlyExitDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft, earning
from hf_specdec.training import build_drafter, load_drafter
from tests.helpers import padded, repetitive

try:
    from transformers.distributed import DistributedConfig

    SIZES = inspect.signature(DistributedConfig).parameters
except ImportError:
    SIZES = {}

ROWS, TWO = repetitive(14), repetitive(14, 9)
CALL = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def drafts(target, folder: Path, load) -> dict:
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()
    return {
        "prompt_lookup": lambda: PromptLookupDraft(),
        "model": lambda: draft,
        "tree": lambda: ModelTreeDraft(draft),
        "mixture": lambda: MixtureDraft([PromptLookupDraft(), ModelDraft(draft)]),
        "a draft that they share": lambda: load(folder / "draft"),
        "the target itself": lambda: target,
        "early_exit": lambda: EarlyExitDraft(target, 1),
        "drafter": lambda: load_drafter(folder / "drafter", target),
        "feature drafter": lambda: load_drafter(folder / "features", target),
        "built": lambda: build_drafter(target, [0], None),
    }


def attempt(run) -> list | str:
    try:
        return run()
    except ValueError as error:
        return str(error)


def main(how: str, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = torch.distributed.get_rank()
    random.seed(rank)
    torch.manual_seed(rank)
    for module in (loop, earning, beam):
        module.perf_counter = lambda: perf_counter() * (1 + 3 * rank) + 0.01 * rank * random.random()

    def load(place: Path):
        sizes = {f"{how}_size": 2} | ({"tp_size": 2} if how == "ep" else {})
        shared = {"distributed_config": DistributedConfig(**sizes)} if f"{how}_size" in SIZES else {"tp_plan": "auto"}  # older versions
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **shared).eval()

    def generate(rows: list[list[int]], **more) -> list:
        out = target.generate(**padded(rows), **{**CALL, "speculative": True, **more}, return_dict_in_generate=True)
        return [out.sequences.tolist(), [[entry.proposed for entry in entries] for entries in out.speculation.rounds]]

    target = hf_specdec.enable(load(folder / "target"))
    results = {f"plain of {len(rows)}": attempt(lambda: [target.generate(**padded(rows), **CALL).tolist(), []]) for rows in (ROWS, TWO)}
    for name, make in drafts(target, folder, load).items():
        results[name] = attempt(lambda: generate(ROWS, assistant_model=make()))
    results["compiled"] = attempt(lambda: generate(ROWS, speculative={"compile": True}))
    results["rows"] = attempt(lambda: generate(TWO, speculative={"draft": "mixture"}))
    results["beams"] = attempt(lambda: generate(ROWS, num_beams=2))
    results["sampled beams"] = attempt(lambda: generate(ROWS, num_beams=2, do_sample=True))
    results["sampled"] = attempt(lambda: generate(TWO, do_sample=True, assistant_model=drafts(target, folder, load)["model"]()))
    results["max_time"] = attempt(lambda: generate(ROWS, max_time=9.0))
    results["compress"] = attempt(lambda: mx.compress(target))
    (folder / f"{how}{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()  # who ends first closes connections that the other may still be reading from
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
