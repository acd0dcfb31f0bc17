"""The families that read images or sounds beside their text: one line each, with the prompts that show them something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.helpers import VOCAB

IMAGE, VIDEO, START, END, FEW = 60, 59, 58, 57, 50  # ids of marks; text is below FEW
_NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
_TEXT = dict(_NONE, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=256, tie_word_embeddings=False)
_VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4, num_channels=3)


def text(kind: str, **settings) -> dict:
    return dict(_TEXT, model_type=kind, **settings)


def vision(kind: str, **settings) -> dict:
    return {**_VISION, "model_type": kind, **settings}


@dataclass(frozen=True)
class Family:
    """kind: the model_type of transformers. shows(n, generator): how many tokens each of n images has, and the inputs that show them. marks: names of
    inputs that say which tokens are an image's. ragged: whether it takes rows of different lengths."""

    name: str
    kind: str
    settings: dict = field(hash=False)
    shows: Callable[[int, torch.Generator], tuple[list[int], dict[str, Any]]]
    marks: tuple[str, ...] = ()
    ragged: bool = True
    spread: float = 0.3

    def model(self, attn: str = "sdpa", seed: int = 0):
        return _built(self, attn, seed)

    def prompts(self, rows: int, seed: int = 0, images: int = 1) -> dict[str, Any]:
        """Arguments of `generate`: left-padded rows of text around `images` images each."""
        generator = torch.Generator().manual_seed(seed)
        sizes, shown = self.shows(rows * images, generator)
        texts, left = [], iter(sizes)
        for b in range(rows):
            words = lambda n: torch.randint(1, FEW, (n,), generator=generator).tolist()  # noqa: E731
            row = words(3 + 2 * b)
            for _ in range(images):
                row += [START, *[IMAGE] * next(left), END, *words(3)]
            texts.append(row + words(2 + b))
        width = max(map(len, texts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in texts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in texts])
        marks = {name: (ids == IMAGE).long() for name in self.marks}
        return {"input_ids": ids, "attention_mask": mask, **marks, **shown}


@lru_cache(maxsize=None)
def _built(family: Family, attn: str, seed: int):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.kind, **family.settings)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation=attn).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, family.spread)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None
    return model


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _pictures(tokens: int, size: int = 16):
    return lambda n, generator: ([tokens] * n, {"pixel_values": _noise(generator, n, 3, size, size)})


def _tiles(tokens: int, size: int = 16):
    """Of one image a row, as Idefics has them."""
    return lambda n, generator: ([tokens] * n, {"pixel_values": _noise(generator, n, 1, 3, size, size)})


def _patches(width: int, merge: int = 2, channels: int = 3, per_patch: int | None = None):
    """Images of several shapes as rows of patches [patches, width]; an image takes as many positions as its longer side."""
    def shows(n, generator):
        grids = [((1, 4, 8), (1, 4, 4), (1, 8, 4))[i % 3] for i in range(n)]
        patches = sum(t * h * w for t, h, w in grids)
        return [t * h * w // merge**2 for t, h, w in grids], {"pixel_values": _noise(generator, patches, width), "image_grid_thw": torch.tensor(grids)}

    return shows


_UNTIED = dict(tie_word_embeddings=False)
_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN = dict(_IDS, text_config=dict(_TEXT, rope_parameters=_MROPE))
_EYE = dict(depth=2, num_heads=2, in_channels=3, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, intermediate_size=24)
_CLIP, _SIGLIP = vision("clip_vision_model", projection_dim=16), vision("siglip_vision_model")
_INDEX = dict(image_token_index=IMAGE, text_config=text("llama"))

FAMILIES = [
    Family("LLaVA", "llava", dict(_INDEX, vision_config=_CLIP), _pictures(16)),
    Family("Gemma 3", "gemma3", dict(_UNTIED, image_token_index=IMAGE, mm_tokens_per_image=4, vision_config=_SIGLIP,
                                     text_config=dict(_TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)),
           _pictures(4), ("token_type_ids",)),
    Family("Qwen2-VL", "qwen2_vl", dict(_QWEN, vision_config=dict(_EYE, embed_dim=16, hidden_size=32, mlp_ratio=2)), _patches(96), ("mm_token_type_ids",)),
    Family("Qwen2.5-VL", "qwen2_5_vl", dict(_QWEN, vision_config=dict(_EYE, hidden_size=16, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1])),
           _patches(96), ("mm_token_type_ids",)),
    Family("Qwen3-VL", "qwen3_vl", dict(_QWEN, vision_config=dict(_EYE, hidden_size=16, out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0])),
           _patches(96), ("mm_token_type_ids",)),
    Family("SmolVLM", "smolvlm", dict(image_token_id=IMAGE, scale_factor=2, vision_config=_VISION, text_config=text("llama")), _tiles(4)),
    Family("Idefics3", "idefics3", dict(image_token_id=IMAGE, scale_factor=2, vision_config=_VISION, text_config=text("llama")), _tiles(4)),
    Family("InternVL", "internvl", dict(image_token_id=IMAGE, image_seq_length=4, vision_config={**_VISION, "image_size": [16, 16], "patch_size": [4, 4]}, text_config=text("qwen2")), _pictures(4)),
]
