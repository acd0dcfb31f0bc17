"""Two processes that run one model together write what one process does, whatever their clocks and generators say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_specdec
from hf_specdec.lockstep import agreement, alone, in_stages, shared_by_processes
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import save
from tests.helpers import build, padded, perturbed, tiny_llama
from tests.sharing import CALL, ROWS, SIZES, TWO

EVEN = 62  # what two processes can share
SHARED = {"built": "target: several processes run it together", "max_time": "max_time=9.0: the processes", "compress": "model: several processes run this",
          "sampled beams": "num_beams=2 with do_sample=True: the processes"}
REFUSED = {
    "tp": SHARED,
    "ep": SHARED,
    "pp": SHARED | {"early_exit": "target: its layers lie in several processes", "drafter": "target: a drafter shares its embedding",
                    "feature drafter": "target: a drafter shares"},
}


def model_for(how: str):
    if how != "ep":
        return tiny_llama(vocab_size=EVEN)
    return build("qwen3_moe", 0, spread=0.3, vocab_size=EVEN, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128)


def saved(folder: Path, how: str) -> Path:
    target = model_for(how)
    target.save_pretrained(folder / "target")
    perturbed(target).save_pretrained(folder / "draft")
    save(build_drafter(target, [0], torch.arange(40)), folder / "drafter", "tiny")
    save(build_drafter(target, [0], None, (1, 2)), folder / "features", "tiny")
    return folder


@pytest.mark.parametrize("how", [how if how == "tp" or f"{how}_size" in SIZES else pytest.param(how, marks=pytest.mark.skip(f"this transformers has no {how}_size")) for how in REFUSED])
def test_both_processes_write_what_one_does(how, tmp_path):
    models = saved(tmp_path, how)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.sharing", how, str(models)]
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(hf_specdec.__file__).parents[1]), str(root)]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                                "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=170, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((models / f"{how}{rank}.json").read_text()) for rank in range(2))
    assert one == other  # texts, sampled ones too, and how many tokens were drafted in every round
    target = model_for(how)
    wanted = {len(rows): target.generate(**padded(rows), **CALL).tolist() for rows in (ROWS, TWO)}
    for name, found in one.items():
        if name in REFUSED[how]:
            assert str(found).startswith(REFUSED[how][name]), found
        elif name == "beams":
            assert found[0] == target.generate(**padded(ROWS), **CALL, num_beams=2).tolist()
        elif name != "sampled" and (how, name) != ("pp", "plain of 2"):  # transformers 5.24 takes padding for text there
            assert found[0] == wanted[len(found[0])], name
    assert any(sum(drafted) for name in ("model", "mixture", "sampled") for drafted in one[name][1])


def test_a_process_alone_agrees_with_itself():
    model = tiny_llama()
    assert agreement([model]) is alone and agreement([model], max_time=1.0) is alone and alone(0.5) == 0.5
    assert not shared_by_processes(model) and not in_stages(model)
