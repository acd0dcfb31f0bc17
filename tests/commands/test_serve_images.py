"""`hf-specdec serve` of a model that reads images: the processor that it is loaded with, and answers over the wire."""

import base64
import copy
import dataclasses
import io
import json
import signal

import pytest
import torch
from transformers import AutoConfig, CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, ProcessorMixin

from hf_specdec.commands import serve
from hf_specdec.commands.answering import is_shown, without_marks

from ..bench.conftest import byte_tokenizer
from ..seeing import FAMILIES as seeing_families
from .test_serve import Answering, answering, asked, content, plain, serving, streamed, tiny_model

np, Image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
TEMPLATE = ("{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
            "<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(folder, model, processor) of a LLaVA."""
    folder, tokenizer = tmp_path_factory.mktemp("llava"), byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(image_processor=images, tokenizer=tokenizer, patch_size=4, vision_feature_select_strategy="default", chat_template=TEMPLATE,
                               num_additional_image_tokens=1)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    text = dict(model_type="llama", vocab_size=260, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=256, pad_token_id=256, bos_token_id=None, **sizes)
    vision = dict(model_type="clip_vision_model", image_size=16, patch_size=4, projection_dim=16, **sizes)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=16))
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder), processor.save_pretrained(folder)
    return str(folder), model.eval(), processor


def picture() -> tuple:
    """An image, and its address in a request."""
    image, data = Image.fromarray((np.random.RandomState(0).rand(20, 20, 3) * 255).astype("uint8")), io.BytesIO()
    image.save(data, "PNG")
    return image, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()}}


def test_a_server_reads_images_and_texts(seeing):
    pytest.importorskip("fastapi")
    name, model, processor = seeing
    image, sent = picture()
    text = {"type": "text", "text": "abcabc"}

    def wanted(*turns) -> str:
        inputs = processor.apply_chat_template(list(turns), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        return processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def request(*turns, **more) -> dict:
        return {"model": name, "messages": list(turns), "max_tokens": 20, "temperature": 0.0, **more}

    def turn(*parts, role: str = "user") -> dict:
        return {"role": role, "content": list(parts)}

    with serving(name) as (port, process):
        seen = wanted(turn({"type": "image", "image": image}, text))
        assert content(asked(port, "/v1/chat/completions", request(turn(sent, text)))) == seen
        assert streamed(asked(port, "/v1/chat/completions", request(turn(sent, text), stream=True))).rstrip("\ufffd") == seen.rstrip("\ufffd")
        turns = turn({"type": "text", "text": "abcabc" * 8}), turn({"type": "text", "text": "yes"}, role="assistant"), turn({"type": "text", "text": "and then?"})
        for several in (turns[:1], turns):
            assert content(asked(port, "/v1/chat/completions", request(*several))) == wanted(*several) != seen
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert said.count("block efficiency") == 4 and said.count("of them known") == 1, said


def test_the_processor_is_that_of_a_model_that_reads_images(seeing, tmp_path, capsys, monkeypatch):
    assert isinstance(serve.processor_of(seeing[0]), ProcessorMixin)
    tiny_model(0).save_pretrained(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name: pytest.fail("a hub is asked"))
    assert serve.processor_of("smollm2") is None
    monkeypatch.undo()
    assert serve.processor_of(str(tmp_path)) is None and serve.processor_of(str(tmp_path / "nowhere")) is None
    assert capsys.readouterr().err == ""


def test_without_a_processor_text_alone_is_read_and_said_so(seeing, tmp_path, capsys):
    _, model, processor = seeing
    config = json.loads(model.config.to_json_string()) | {"architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert serve.processor_of(str(tmp_path)) is None
    assert "its processor cannot be loaded" in (said := " ".join(capsys.readouterr().err.split())) and "text alone will be read" in said


def test_a_request_with_images_neither_takes_nor_leaves_a_cache():
    model, said = tiny_model(), []
    answer: Answering = answering(model, said=said)
    ids = torch.arange(20, 60)[None]
    model.generate, generate = None, model.generate
    answer.generate = lambda **kwargs: generate(**{name: value for name, value in kwargs.items() if name != "pixel_values"})
    for _ in range(2):
        out = answer(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.zeros(1, 3, 4, 4), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert not answer.kept and "known" not in said[-1]
    model.generate = generate
    assert torch.equal(out, plain(model, ids))


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
def test_a_text_whose_processor_says_that_it_is_text_is_kept(name):
    model, said = tiny_model(), []
    answer, ids = answering(model, said=said), torch.arange(20, 60)[None]
    for text in (ids, torch.cat([ids, ids[:, :5]], dim=1)):
        out = answer(input_ids=text, attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False, eos_token_id=None, **{name: torch.zeros_like(text)})
        assert torch.equal(out, plain(model, text))
    assert "(40 of them known)" in said[-1]
    marked = without_marks({"input_ids": ids, name: torch.ones_like(ids)})
    assert name in marked and is_shown(marked)


def test_a_prompt_that_is_read_in_both_directions_is_read_anew_at_every_turn():
    """What is known of a text goes by what came behind it, and zeros in its token_type_ids say so."""
    family = next(family for family in seeing_families if family.name == "PaliGemma")
    model = copy.deepcopy(dataclasses.replace(family, attn="eager").model())
    answer, ids, otherwise = answering(model), torch.tensor([[5, 9, 7, 12, 5, 9, 7, 3]]), 0
    for _ in range(3):
        marks = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids), "max_new_tokens": 8, "do_sample": False}
        wanted = model.generate(ids, **marks, speculative=False)
        assert torch.equal(answer(input_ids=ids, **marks), wanted)
        otherwise += not torch.equal(wanted, model.generate(ids, **{**marks, "token_type_ids": torch.ones_like(ids)}, speculative=False))
        ids = torch.cat([wanted, torch.tensor([[11, 12, 13]])], dim=1)
    assert otherwise
