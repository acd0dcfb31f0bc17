"""A tiny random model with a tokenizer of its own, saved to a folder as a hub model would be."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..helpers import perturbed


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


def tiny_model(seed: int = 0, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        **{
            **sizes,
            "vocab_size": 257,
            "max_position_embeddings": 1024,
            "eos_token_id": 256,
            "pad_token_id": 256,
            "bos_token_id": None,
            "initializer_range": 0.2,
            **settings,
        }
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_model(0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("draft")
    perturbed(tiny_model(0)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
