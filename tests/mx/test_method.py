"""A folder of MX weights is read as one where `hf_specdec.enable` is there, and what was read otherwise is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import method, mx

from ..helpers import padded, prompts, speculate, tiny_llama
from .models import mx_layers, tiny

SOURCE = Path(hf_specdec.__file__).parents[1]
LOAD = 'model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\nassert "hf_specdec.mx" in sys.modules\n'
PRINT = 'print(sum(type(part).__name__ == "MXLinear" for part in model.modules()), type(model.config.quantization_config).__module__)'
ORDERS = {
    "in a call of enable": "import sys, hf_specdec\nfrom transformers import AutoModelForCausalLM\n"
                           "model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(sys.argv[1]))\n",
    "after a model": "import sys\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM\nimport hf_specdec\n" + LOAD,
    "enable first": "import sys, hf_specdec\nfrom transformers import AutoModelForCausalLM\nhf_specdec.enable\n" + LOAD,
    "beside mx": "import sys, hf_specdec\nfrom hf_specdec import mx\nfrom transformers import AutoModelForCausalLM\n" + LOAD,
    "before mx": "import sys, hf_specdec\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM\nimport hf_specdec.mx\n" + LOAD,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mx")
    mx.compress(tiny()).save_pretrained(path)
    return path


@pytest.mark.share(1 / 5)
@pytest.mark.parametrize("order", ORDERS)
def test_a_folder_is_read_as_one_after_importing_the_package_alone(order, folder):
    done = subprocess.run([sys.executable, "-c", ORDERS[order] + PRINT, str(folder)], capture_output=True, text=True, cwd=SOURCE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["14", "hf_specdec.mx.config"] and "Unknown quantization type" not in done.stderr


def test_the_stand_in_is_registered_once_and_makes_way_for_the_config():
    known = sys.modules[method.QUANTISERS].AUTO_QUANTIZATION_CONFIG_MAPPING
    method.announce()
    assert known["mx"] is mx.MXConfig
    method.make_way()
    assert known["mx"] is mx.MXConfig


def unread(folder):
    """A model that was read by a transformers that does not know the method."""
    known = sys.modules[method.QUANTISERS].AUTO_QUANTIZATION_CONFIG_MAPPING
    config = known.pop("mx")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    finally:
        known["mx"] = config


def test_a_model_whose_mx_weights_were_not_read_as_such_is_refused(folder):
    model = unread(folder)
    words = "LlamaForCausalLM was saved with MX weights and loaded without them: import hf_specdec.mx before from_pretrained, and load it again"
    assert not mx_layers(model)
    with pytest.raises(ValueError, match=f"^model: {words}"):
        hf_specdec.enable(model)
    with pytest.raises(ValueError, match=f"^target: {words}"):
        model.generate(**padded(prompts(5)), custom_generate=hf_specdec.SpeculativeDecoder(), max_new_tokens=2)
    with pytest.raises(ValueError, match=f"^assistant_model: {words}"):
        speculate(tiny_llama(), prompts(5), model)


@pytest.mark.parametrize("change", [mx.compress, lambda model: mx.dequantize(mx.compress(model)), copy.deepcopy], ids=["compressed", "dequantised", "dense"])
def test_a_model_that_has_what_its_config_says_is_not_refused(change):
    model = change(tiny())
    assert hf_specdec.enable(model).generate(torch.tensor(prompts(5)), max_new_tokens=2, speculative=True).shape[1] <= 7
