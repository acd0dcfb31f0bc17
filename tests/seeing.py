"""The families that read images or sounds beside their text: one line each, with the prompts that show them something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

from hf_specdec import compat
from hf_specdec.kinds import BOTH_WAYS
from tests.helpers import VOCAB
from tests.timm_stand_in import without_timm

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
    inputs that say which tokens are an image's. trees: whether it takes them. ragged: whether it takes rows that
    are not equally long. attn: of its attentions one that the type has.
    token: the id that stands for what is shown, a sound or a video, too."""

    name: str
    kind: str
    settings: dict = field(hash=False)
    shows: Callable[[int, torch.Generator], tuple[list[int], dict[str, Any]]]
    marks: tuple[str, ...] = ()
    trees: bool = True
    ragged: bool = True
    spread: float = 0.3
    attn: str = "sdpa"
    token: int = IMAGE

    def model(self, seed: int = 0):
        return _built(self, seed)

    def prompts(self, rows: int, seed: int = 0, images: int = 1) -> dict[str, Any]:
        """Arguments of `generate`: left-padded rows of text around `images` images each."""
        generator = torch.Generator().manual_seed(seed)
        sizes, shown = self.shows(rows * images, generator)
        texts, left = [], iter(sizes)
        for b in range(rows):
            words = lambda n: torch.randint(1, FEW, (n,), generator=generator).tolist()  # noqa: E731
            row = words(3 + 2 * b)
            for _ in range(images):
                row += [START, *[self.token] * next(left), END, *words(3)]
            texts.append(row + words(2 + b))
        width = max(map(len, texts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in texts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in texts])
        if "aspect_ratio_mask" in shown:  # one image a row
            seen = ((ids == self.token).cumsum(1) > 0).long()
            shown = {name: value[:rows] for name, value in shown.items()}
            shown["cross_attention_mask"] = seen[:, :, None, None] * shown["aspect_ratio_mask"][:, None]
        marks = {name: (ids == self.token) * (0 if self.kind in BOTH_WAYS else 2 if "pixel_values_videos" in shown else 1) for name in self.marks}
        return {"input_ids": ids, "attention_mask": mask, **marks, **shown}


@lru_cache(maxsize=None)
def _built(family: Family, seed: int):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.kind, **family.settings)
    auto = next(auto for auto in (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM) if type(config) in auto._model_mapping)
    with without_timm(config):
        model = auto.from_config(config, attn_implementation=family.attn).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, family.spread)
        for name, buffer in model.named_buffers():
            if name.endswith("codebook.embed"):  # made of zeros
                buffer.normal_(0.0, 0.1)
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:  # of layers that look at an image, which begin with none of it
                parameter.fill_(0.8)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None
    return model


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _pictures(tokens: int, size: int = 16, **more: int):
    """more: side lengths of the same images in other sizes, by the names of these inputs."""
    def shows(n, generator):
        return [tokens] * n, {name: _noise(generator, n, 3, side, side) for name, side in {"pixel_values": size, **more}.items()}

    return shows


def _tiles(tokens: int, size: int = 16):
    """Of one image a row, as Idefics has them."""
    return lambda n, generator: ([tokens] * n, {"pixel_values": _noise(generator, n, 1, 3, size, size)})


def _sized(tokens: int, size: tuple[int, int] = (16, 16), tiles: int = 0):
    """With the sizes of the images, which LLaVA-NeXT cuts into tiles of 16 x 16."""
    def shows(n, generator):
        shape = (n, tiles, 3, 16, 16) if tiles else (n, 3, *size)
        return [tokens] * n, {"pixel_values": _noise(generator, *shape), "image_sizes": torch.tensor([size] * n)}

    return shows


def _patches(*shape: int, merge: int = 2, breaks: int = 0, ends: int = 0, **more: int):
    """Images of several shapes as rows of patches [patches, *shape], whose tokens may have one more for each of their rows (breaks) and around them (ends);
    to the models that have axes for it an image takes as many positions as its longer side. more: inputs that say a number for every image."""
    def shows(n, generator):
        grids = [((1, 4, 8), (1, 4, 4), (1, 8, 4))[i % 3] for i in range(n)]
        patches, counts = sum(t * h * w for t, h, w in grids), {name: torch.tensor([value] * n) for name, value in more.items()}
        tokens = [t * h // merge * (w // merge + breaks) + ends for t, h, w in grids]
        return tokens, {"pixel_values": _noise(generator, patches, *shape), "image_grid_thw": torch.tensor(grids), **counts}

    return shows


def _gemma4(n, generator):
    places = torch.tensor([[x, y] for y in range(4) for x in range(4)])
    return [4] * n, {"pixel_values": _noise(generator, n, 16, 48), "image_position_ids": places.repeat(n, 1, 1)}


def _lfm2(n, generator):
    shapes, mask = torch.tensor([[4, 4]] * n), torch.ones(n, 16).long()
    return [4] * n, {"pixel_values": _noise(generator, n, 16, 48), "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _video(n, generator):
    return [8] * n, {"pixel_values_videos": _noise(generator, n * 32, 96), "video_grid_thw": torch.tensor([[2, 4, 4]] * n), "second_per_grid_ts": torch.ones(n)}


def _films(tokens: int, width: int, frames: int = 1):
    """As rows of patches [patches, width], 16 of a frame."""
    def shows(n, generator):
        grids = torch.tensor([[frames, 4, 4]] * n)
        return [tokens] * n, {"pixel_values_videos": _noise(generator, n * frames * 16, width), "video_grid_thw": grids}

    return shows


def _clips(tokens: int, size: int = 16):
    """Of two frames each."""
    return lambda n, generator: ([tokens] * n, {"pixel_values_videos": _noise(generator, n, 2, 3, size, size)})


def _gemma4_unified(n, generator):
    places = torch.tensor([[x, y] for y in range(2) for x in range(2)])
    return [4] * n, {"pixel_values": _noise(generator, n, 4, 192), "image_position_ids": places.repeat(n, 1, 1)}


def _strips(tokens: int):
    """Of 16 patches side by side each."""
    return lambda n, generator: ([tokens] * n, {"pixel_values": _noise(generator, 1, 3, 4, 64 * n), "target_sizes": torch.tensor([[4, 4]] * n)})


def _molmo(n, generator):
    pooled = torch.arange(16).reshape(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    places, grids = torch.cat([pooled + 16 * i for i in range(n)]), torch.tensor([[2, 2, 0, 0]] * n)
    return [4] * n, {"pixel_values": _noise(generator, n, 16, 48), "image_token_pooling": places, "image_grids": grids}


def _omni(n, generator):
    return [4] * n, {"pixel_values": _noise(generator, n * 16, 48), "image_grid_hw": torch.tensor([[4, 4]] * n)}


def _inkling(n, generator):
    """As one patch for every token."""
    grids = [((1, 2, 2), (1, 2, 4))[i % 2] for i in range(n)]
    tokens = [t * h * w for t, h, w in grids]
    return tokens, {"pixel_values": _noise(generator, sum(tokens), 8, 8, 3), "image_grid_thw": torch.tensor(grids)}


def _phi4(n, generator):
    """Of one tile and the whole image each."""
    shown = {"image_pixel_values": _noise(generator, n, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * n)}
    return [13] * n, {**shown, "image_attention_mask": torch.ones(n, 2, 4, 4).long()}


def _phi4_sound(n, generator):
    return [2] * n, {"audio_input_features": _noise(generator, n, 16, 8), "audio_embed_sizes": torch.tensor([2] * n)}


def _wave(tokens: int, *shape: int, dtype: torch.dtype = torch.long):
    """Sounds as they are, with a mask of theirs."""
    return lambda n, generator: ([tokens] * n, {"input_values": _noise(generator, n, *shape), "padding_mask": torch.ones(n, shape[-1], dtype=dtype)})


def _moss(n, generator):
    masks = {name: torch.ones(n, 16).long() for name in ("input_features_mask", "padding_mask")}
    return [2] * n, {"input_features": _noise(generator, n, 8, 16), **masks}


def _mllama(n, generator):
    """Of one tile or two; the tokens from the mark on look at it."""
    ids = [1 + i % 3 for i in range(n)]
    tiles = torch.tensor([[[1, int(one > 1)]] for one in ids])
    return [1] * n, {"pixel_values": _noise(generator, n, 1, 2, 3, 16, 16), "aspect_ratio_ids": torch.tensor(ids)[:, None], "aspect_ratio_mask": tiles}


def _docling(n, generator):
    return [4] * n, {"pixel_values": _noise(generator, n, 1, 3, 16, 16), "pixel_attention_mask": torch.ones(n, 1, dtype=torch.bool)}


def _sounds(tokens: int, *shape: int, mask: str = "", width: int = 0, dtype: torch.dtype = torch.long):
    """mask: the name of a mask of `width` numbers a sound, as many as it is long where none is given."""
    def shows(n, generator):
        masks = {mask: torch.ones(n, width or shape[-1], dtype=dtype)} if mask else {}
        return [tokens] * n, {"input_features": _noise(generator, n, *shape), **masks}

    return shows


def _waves(tokens: int, length: int):
    """Loud, since an encoder of small weights leaves little of it."""
    return lambda n, generator: ([tokens] * n, {"input_values": 100 * _noise(generator, n, 1, length), "padding_mask": torch.ones(n, length, dtype=torch.long)})


def _chunks(n, generator):
    return [2] * n, {"input_features": _noise(generator, n, 8, 16), "chunk_sample_lengths": torch.tensor([2 * 1280] * n)}


_UNTIED = dict(tie_word_embeddings=False)
_IMAGE, _TOKENS, _AXES = dict(_UNTIED, image_token_index=IMAGE), dict(_UNTIED, image_token_id=IMAGE), ("mm_token_type_ids",)
_IDS = dict(_TOKENS, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_BY_AXES = dict(_TEXT, rope_parameters=_MROPE)
_QWEN = dict(_IDS, text_config=_BY_AXES)
_EYE = dict(depth=2, num_heads=2, in_channels=3, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, intermediate_size=24)
_OUT = dict(_EYE, hidden_size=16, out_hidden_size=32)
_SEEN = dict(_OUT, num_position_embeddings=64)
_CLIP, _SIGLIP, _PIXTRAL = vision("clip_vision_model", projection_dim=16), vision("siglip_vision_model", vision_use_head=False), vision("pixtral")
_SAM = vision("sam_vision_model", output_channels=16, mlp_dim=24, image_size=64, window_size=2, global_attn_indexes=[1])
_INDEX = dict(image_token_index=IMAGE, text_config=text("llama"))
_HYBRID = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8)
_SHORT = dict(layer_types=["conv", "full_attention"])
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_LATENT = dict(_ROUTED, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1)
_GLM = dict(_TOKENS, video_token_id=VIDEO, image_start_token_id=START, image_end_token_id=END, video_start_token_id=56, video_end_token_id=55)
_GLM_TEXT, _GLM_EYE = dict(_TEXT, rope_parameters=dict(_MROPE, partial_rotary_factor=1.0)), dict(_OUT, image_size=16)
_GEMMA4 = dict(_TEXT, **_HYBRID, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, global_head_dim=8, use_bidirectional_attention="vision")
_COHERE = text("cohere2", **_HYBRID, logit_scale=1.0)
_VQ = dict(embed_dim=8, num_embeddings=8, latent_channels=32, base_channels=32, num_res_blocks=1)
_GRID = [[16, 32], [32, 16]]
_TO_VIDEO = dict(_INDEX, video_token_index=VIDEO, vision_config=_CLIP)
_MINICPM = dict(_TOKENS, video_token_id=VIDEO, insert_layer_id=0, text_config=text("qwen3_5_text", **_DELTA), vision_config=dict(_VISION, insert_layer_id=0))
_MUSE = dict(_TOKENS, video_token_id=VIDEO, out_hidden_size=64, projector_hidden_size=16,
             vision_config=dict(_VISION, pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16))
_DENSE_FIRST = dict(_ROUTED, mlp_layer_types=["dense", "sparse"])
_OMNI = dict(_UNTIED, audio_start_token_id=55, audio_end_token_id=54, vision_start_token_id=START, vision_end_token_id=END)
_AUDIO, _FEATURES = dict(_UNTIED, audio_token_id=IMAGE), "input_features_mask"
_EAR = dict(num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, d_model=16)
_HEAR = dict(num_mel_bins=8, max_source_positions=8, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
_FORMER = dict(model_type="blip_2_qformer", num_hidden_layers=1, intermediate_size=24, cross_attention_frequency=1)
_MAMBA = dict({name: value for name, value in _TEXT.items() if name != "num_hidden_layers"}, layers_block_type=["mamba", "attention", "mlp"], chunk_size=8,
              ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2)
_WINDOWED = dict(window_size=16, fullatt_block_indexes=[1])
_LLAMA4 = dict(
    _IMAGE, boi_token_index=START, eoi_token_index=END,
    vision_config=dict(_VISION, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16, intermediate_size=64),
    text_config=dict(_TEXT, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=8, no_rope_layers=[1, 0],
                     layer_types=["chunked_attention", "full_attention"]))
_TIMM = dict(model_type="timm_wrapper", architecture="a stand-in")
_PERCEPTION = dict(_TOKENS, video_token_id=VIDEO, projector_pooling_ratio=2, text_config=text("llama"), vision_config=dict(_TIMM, model_args={"embed_dim": 16}))
_SPARSE = dict(_LATENT, n_group=1, index_topk=8, index_n_heads=16, index_head_dim=8, mlp_layer_types=["dense", "sparse"])
_MISTRAL4 = text("mistral4", **{**_LATENT, "head_dim": 16}, rope_parameters=dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
    partial_rotary_factor=0.5))
_COMPASS = dict(_IDS, text_config=dict(_TEXT, **_HYBRID, rope_parameters={kind: _MROPE for kind in _HYBRID["layer_types"]}), vision_config=dict(
    _SEEN, deepstack_visual_indexes=[0]))
_CLOVA = dict(_TOKENS, video_token_id=VIDEO, text_config=text("hyperclovax"), vision_config=dict(_OUT, **_WINDOWED, model_type="qwen2_5_vl_vision"))
_GLM46 = dict(_GLM, text_config=dict(_GLM_TEXT, model_type="glm4v_text"), vision_config=dict(_GLM_EYE, model_type="glm4v_vision"))
_DOTS = dict(_TOKENS, video_token_id=VIDEO, audio_token_id=56,
             text_config={**_TEXT, **_SPARSE, "head_dim": 16, "layer_types": ["indexed_attention"] * 2, "moe_shared_expert_intermediate_size": 16},
             vision_config=dict(_VISION, moe_intermediate_size=16, num_local_experts=2, adapter_in_dim=16, adapter_out_dim=32, per_layer_config={},
                                mlp_layer_types=["dense", "sparse"]),
             audio_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, feature_size=8, downsample_hidden_size=8,
                               adapter_input_size=16, adapter_out_dim=32))
_HY4 = dict(_TOKENS, video_token_id=VIDEO, vision_config=dict(_VISION, out_hidden_size=32, max_image_size=16), text_config={
    **_TEXT, **_SPARSE, "indexer_types": ["full", "shared"], "hc_mult": 2, "rope_parameters": _MROPE})
_APERTUS = dict(_TOKENS, audio_token_id=56, image_token_offset=30, audio_token_offset=38, text_config=_TEXT, vision_config=dict(
    codebook_size=8, embed_dim=8, latent_channels=8, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, attn_resolutions=[], resolution=16),
    audio_config=dict(num_filters=4, upsampling_ratios=[2, 2], hidden_size=16, codebook_size=8, codebook_dim=16, num_lstm_layers=1))
_GLM5 = dict(_GLM, vision_config=dict(_OUT, image_size=16, projection_intermediate_size=24), text_config={
    **_TEXT, **_SPARSE, "qk_rope_head_dim": 0, "index_kpool": 4, "indexer_types": ["full", "full"], "layer_types": ["linear_attention", "indexed_attention"],
    "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2})

# versions of transformers before which plain generate does not take these inputs, or which ours need for the family
SINCE = {**dict.fromkeys(("ViP-LLaVA", "Aria", "Granite 4 Vision", "Fuyu", "Qwen4-Exp", "Qwen4-Exp (video)", "MiniMax-M3-VL", "MiniMax-M3-VL (video)", "Video-LLaVA", "GLM-5.3 Flash", "GLM-5.3 Flash (video)"), (5, 24)),
         **dict.fromkeys(("EXAONE 4.5", "Emu3", "Granite Speech", "Granite Speech Plus", "Phi-4 Multimodal (sound)", "Qwen2.5-Omni", "Qwen3-Omni", "Qwen3.5", "Qwen3.5-MoE",
                          "Qwen3.5 (video)", "LFM2-VL", "MiniCPM-V 4.6"), (5, 17))}
FAILS = {"Llama 4": (5, 24)}  # the version in which plain generate itself fails: Llama 4 asks its text model for an output that this has not
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
_GEMMA3N = dict(
    image_token_id=IMAGE, audio_token_id=56, boi_token_id=START, eoi_token_id=END, vision_soft_tokens_per_image=4, audio_soft_tokens_per_image=4,
    text_config=dict(_TEXT, model_type="gemma3n_text", intermediate_size=[64] * 2, activation_sparsity_pattern=[0.0] * 2, layer_types=["sliding_attention", "full_attention"],
                     sliding_window=8, altup_num_inputs=2, laurel_rank=8, num_kv_shared_layers=0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB),
    vision_config=dict(hidden_size=16, vocab_size=4, vocab_offset=51), audio_config=dict(hidden_size=32, conf_num_hidden_layers=1, conf_num_attention_heads=4, input_feat_size=8,
                                                                                       vocab_size=6, vocab_offset=55))
_MLLAMA = dict(image_token_index=IMAGE, text_config={**_TEXT, "bos_token_id": 1, "num_hidden_layers": 3, "cross_attention_layers": [1],
                                                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, vision_config=dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, attention_heads=2, image_size=16, patch_size=4, num_global_layers=1, intermediate_layers_indices=[1],
    vision_output_dim=32, max_num_tiles=2, supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]]))
_PALIGEMMA = dict(_IMAGE, projection_dim=32, vision_config=dict(_SIGLIP, projection_dim=32))
_PHI4 = dict(_TEXT, original_max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
             vision_config=dict(_VISION, crop_size=16, image_token_id=IMAGE), audio_config=dict(
                 hidden_size=16, intermediate_size=24, num_blocks=2, num_attention_heads=2, input_size=8, ext_pw_out_channel=16, depthwise_separable_out_channel=16,
                 nemo_conv_channels=8, audio_token_id=56))
_QWEN4 = dict(_IDS, vision_config=_SEEN, text_config=dict(
    _BY_AXES, **_EXPERTS, **{**_DELTA, "layer_types": ["linear_attention", "indexed_attention"]}, shared_expert_intermediate_size=16, hc_lowrank=4, ngram_vocab_size_base=64,
    split_ngram_parts=1, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4))
_MINIMAX = dict(_IMAGE, video_token_index=VIDEO, projector_hidden_size=16, vision_config={**_VISION, "hidden_size": 24}, text_config=dict(
    _TEXT, num_local_experts=4, num_experts_per_tok=2, rotary_dim=4, shared_intermediate_size=16, index_head_dim=8, index_n_heads=2, index_block_size=4, index_topk_blocks=2,
    layer_types=["full_attention", "minimax_m3_sparse"]))
_INKLING = dict(_TEXT, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4, rel_extent=32, moe_intermediate_size=16,
                n_routed_experts=4, num_experts_per_tok=2, unpadded_vocab_size=VOCAB, n_layers_per_attn_res_block=1)
_VIBE = dict(model_type="vibevoice_acoustic_tokenizer_encoder", num_filters=4, downsampling_ratios=[2, 2], depths=[1, 1, 1], kernel_size=3, hidden_size=8, vae_std=0.0)
_STACKED = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
_STACKED_EAR = dict(_STACKED, num_mel_bins=8, subsampling_factor=2)
_ALONE = dict(trees=False, ragged=False)
LINES = [
    Family("LLaVA", "llava", dict(_INDEX, vision_config=_CLIP), _pictures(16)),
    Family("Gemma 3", "gemma3", dict(_UNTIED, image_token_index=IMAGE, mm_tokens_per_image=4, vision_config=_SIGLIP,
                                     text_config=dict(_TEXT, **_HYBRID, query_pre_attn_scalar=8)), _pictures(4), ("token_type_ids",)),
    Family("Gemma 3n", "gemma3n", _GEMMA3N, _pictures(4)),
    Family("Qwen2-VL", "qwen2_vl", dict(_QWEN, vision_config=dict(_EYE, embed_dim=16, hidden_size=32, mlp_ratio=2)), _patches(96), _AXES),
    Family("Qwen2.5-VL", "qwen2_5_vl", dict(_QWEN, vision_config=dict(_OUT, **_WINDOWED)), _patches(96), _AXES),
    Family("Qwen3-VL", "qwen3_vl", dict(_QWEN, vision_config=dict(_SEEN, deepstack_visual_indexes=[0])), _patches(96), _AXES),
    Family("SmolVLM", "smolvlm", dict(image_token_id=IMAGE, scale_factor=2, vision_config=_VISION, text_config=text("llama")), _tiles(4)),
    Family("Idefics3", "idefics3", dict(image_token_id=IMAGE, scale_factor=2, vision_config=_VISION, text_config=text("llama")), _tiles(4)),
    Family("InternVL", "internvl", dict(image_token_id=IMAGE, image_seq_length=4, vision_config={**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
           text_config=text("qwen2")), _pictures(4)),
    Family("Qwen3-VL-MoE", "qwen3_vl_moe", dict(_QWEN, text_config=dict(_BY_AXES, **_EXPERTS), vision_config=dict(_SEEN, deepstack_visual_indexes=[0])),
           _patches(96), _AXES),
    Family("Qwen3.5", "qwen3_5", dict(_QWEN, text_config=dict(_BY_AXES, **_DELTA), vision_config=_SEEN), _patches(96), _AXES, trees=False),
    Family("Qwen3.5-MoE", "qwen3_5_moe", dict(_QWEN, text_config=dict(_BY_AXES, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16), vision_config=_SEEN),
           _patches(96), _AXES, trees=False),
    Family("Gemma 4", "gemma4", dict(_IDS, audio_token_id=56, audio_config=None, text_config=_GEMMA4, vision_config=dict(
        _VISION, num_key_value_heads=2, head_dim=8, position_embedding_size=8, pooling_kernel_size=2)), _gemma4, _AXES),
    Family("Mistral 3", "mistral3", dict(_IMAGE, text_config=text("mistral"), vision_config=_PIXTRAL), _sized(4)),
    Family("LLaVA (Pixtral)", "llava", dict(_INDEX, vision_config=_PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"), _sized(16)),
    Family("LLaVA-NeXT", "llava_next", dict(_INDEX, vision_config=_CLIP, image_grid_pinpoints=_GRID), _sized(52, (16, 32), tiles=3)),
    Family("LLaVA-OneVision", "llava_onevision", dict(_IMAGE, video_token_index=VIDEO, text_config=text("qwen2"), vision_config=_SIGLIP,
                                                      image_grid_pinpoints=_GRID), _sized(52, (16, 32), tiles=3)),
    Family("ViP-LLaVA", "vipllava", dict(_INDEX, vision_config=_CLIP, vision_feature_layer=[-1, -2]), _pictures(16)),
    Family("GLM-4.1V", "glm4v", dict(_GLM, text_config=_GLM_TEXT, vision_config=_GLM_EYE), _patches(96), _AXES),
    Family("GLM-4.5V", "glm4v_moe", dict(_GLM, text_config=dict(_GLM_TEXT, **_ROUTED), vision_config=_GLM_EYE), _patches(96), _AXES),
    Family("GLM-4.6V", "glm46v", _GLM46, _patches(96), _AXES),
    Family("GLM-OCR", "glm_ocr", dict(_GLM, text_config=_GLM_TEXT, vision_config=_GLM_EYE), _patches(96), _AXES),
    Family("PaddleOCR-VL", "paddleocr_vl", dict(_QWEN, vision_config=dict(_VISION, spatial_merge_size=2)), _patches(3, 4, 4), _AXES),
    Family("VideoLLaMA 3", "video_llama_3", dict(_TOKENS, video_token_id=VIDEO, text_config=text("qwen2"), vision_config=_VISION),
           _patches(48, image_merge_sizes=2)),
    Family("LFM2-VL", "lfm2_vl", dict(_TOKENS, projector_hidden_size=16, text_config=text("lfm2", **_SHORT, block_auto_adjust_ff_dim=False),
                                      vision_config=vision("siglip2_vision_model", num_patches=16)), _lfm2, trees=False),
    Family("LFM3-VL", "lfm3_vl", dict(_IDS, projector_hidden_size=16, text_config=text("lfm3", **_SHORT), vision_config=dict(
        _VISION, **_SHORT, in_channels=3, num_key_value_heads=2)), _patches(96), trees=False),
    Family("GOT-OCR2", "got_ocr2", dict(_IMAGE, text_config=text("qwen2"), vision_config=dict(_SAM, model_type="got_ocr2_vision")), _pictures(16, 64),
           attn="eager"),
    Family("Aya Vision", "aya_vision", dict(_IMAGE, text_config=_COHERE, vision_config=_SIGLIP), _pictures(4)),
    Family("Command A Vision", "cohere2_vision", dict(_TOKENS, alignment_intermediate_size=32, text_config=_COHERE, vision_config=_SIGLIP), _pictures(4),
           spread=0.6),
    Family("Idefics2", "idefics2", dict(image_token_id=IMAGE, text_config=text("mistral"), vision_config=_VISION, perceiver_config=dict(
        hidden_size=32, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=2, resampler_head_dim=8, num_key_value_heads=1)), _tiles(4)),
    Family("DeepSeek-VL", "deepseek_vl", dict(_TOKENS, text_config=text("llama"), vision_config=_SIGLIP), _pictures(16)),
    Family("DeepSeek-VL (hybrid)", "deepseek_vl_hybrid", dict(_TOKENS, text_config=text("llama"), vision_config=_SIGLIP, high_res_vision_config=_SAM),
           _pictures(16, high_res_pixel_values=64)),
    Family("Ovis2", "ovis2", dict(_TOKENS, visual_indicator_token_ids=[START, END, 51, 52, 53], hidden_size=32, vocab_size=VOCAB, text_config=text("qwen2"),
                                  vision_config=dict(_VISION, vocab_size=20)), _pictures(16)),
    Family("LightOnOCR", "lighton_ocr", dict(_TOKENS, text_config=text("qwen3"), vision_config=_PIXTRAL), _sized(4)),
    Family("HunyuanOCR", "hunyuan_vl", dict(
        _TOKENS, im_start_id=START, im_end_id=END, im_newline_id=56, vision_config=dict(_VISION, out_hidden_size=32, max_image_size=16),
        text_config=dict(_TEXT, rope_parameters=dict(_MROPE, mrope_section=[1, 1, 1, 1]))), _patches(48, breaks=1, ends=2), _AXES),
    Family("Janus", "janus", dict(_TOKENS, text_config=text("llama"), vision_config=dict(_VISION, projection_dim=32, mlp_ratio=2.0, num_image_tokens=16),
                                  vq_config=dict(_VQ, channel_multiplier=[1], projection_dim=32, image_token_embed_dim=32)), _pictures(16)),
    Family("Aria", "aria", dict(_IMAGE, projector_patch_to_query_dict={16: 4}, text_config=dict(_TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
                                vision_config=vision("idefics3_vision")), _pictures(4)),
    Family("Chameleon", "chameleon", dict(_TEXT, vq_config=dict(_VQ, resolution=16, channel_multiplier=[1, 1]), vocabulary_map={
        "<image>": IMAGE, **{f"IMGIMG{letter}Z": 40 + i for i, letter in enumerate("ABCDEFGH")}}), _pictures(64)),
    Family("Emu3", "emu3", dict(
        bos_token_id=1, text_config=dict(_TEXT, bos_token_id=1), vq_config=dict(codebook_size=8, embed_dim=8, base_channels=32, channel_multiplier=[1, 1, 1],
                                                                                num_res_blocks=1, hidden_size=32, attn_resolutions=[]),
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": 56, **{f"<|visual token {i:06d}|>": 40 + i for i in range(8)}}), _sized(20)),
    Family("ERNIE 4.5 VL", "ernie4_5_vl_moe", dict(_GLM, vision_config=dict(_EYE, hidden_size=16), text_config=dict(
        _TEXT, rope_parameters=dict(_MROPE, mrope_section=[1, 1, 2]), moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=[16, 8])),
        _patches(48), ("mm_token_type_ids", "moe_mm_token_type_ids")),
    Family("Kimi K2.5", "kimi_k25", dict(_IDS, projection_hidden_size=16, text_config=text("deepseek_v3", **_LATENT), vision_config=dict(
        _VISION, pos_emb_height=4, pos_emb_width=4)), _patches(3, 4, 4)),
    Family("MiniCPM-V 4.6", "minicpmv4_6", _MINICPM, _strips(1), trees=False),
    Family("MiniCPM-V 4.7", "minicpmv4_7", dict(_MINICPM, image_start_id=START, image_end_id=END, slice_start_id=56, slice_end_id=55, newline_id=54), _strips(1),
           trees=False),
    Family("Molmo 2", "molmo2", dict(
        _UNTIED, image_start_token_id=START, image_end_token_id=END, image_patch_id=IMAGE, low_res_image_start_token_id=56, frame_start_token_id=55,
        frame_end_token_id=54, text_config=dict(_TEXT, additional_vocab_size=4),
        vision_config=dict(_VISION, image_size=[16, 16], num_position_embeddings=16, num_key_value_heads=2, head_dim=8),
        adapter_config=dict(vision_feature_layer=[0, 1], hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8, intermediate_size=24,
                            text_hidden_size=32)), _molmo, _AXES),
    Family("Qianfan-OCR", "qianfan_ocr", dict(_TOKENS, image_seq_length=4, text_config=text("qwen3"), vision_config={
        **_VISION, "image_size": [16, 16], "patch_size": [4, 4]}), _pictures(4)),
    Family("DeepSeek-OCR 2", "deepseek_ocr2", dict(
        _TOKENS, text_config={**_TEXT, **_DENSE_FIRST, "max_position_embeddings": 512, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
        vision_config=dict(sam_config=dict(_SAM, model_type="deepseek_ocr2_sam_vision_model", downsample_channels=[16, 16]), encoder_config=dict(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))), _pictures(145, 64)),
    Family("Granite 4 Vision", "granite4_vision", dict(
        _IMAGE, text_config=_TEXT, vision_config={**_CLIP, "hidden_size": 64}, qformer_config=dict(_FORMER, use_qformer_text_input=False),
        image_grid_pinpoints=_GRID, downsample_rate="1/2", deepstack_layer_map=[[-1, 0]], spatial_target_layers=[1]), _sized(14, (16, 32), tiles=3)),
    Family("Granite Docling", "granite_docling", dict(
        _TOKENS, pad_token_id=0, text_config=dict(_TEXT, embedding_multiplier=1.0, attention_multiplier=0.35, residual_multiplier=1.0),
        vision_config=dict(_VISION, out_hidden_size=32, scale_factor=2, deepstack_visual_indexes=[0])), _docling),
    Family("Step 3.7", "step3p7", dict(_TOKENS, text_config=dict(_TEXT, **_HYBRID, **_DENSE_FIRST, share_expert_dim=16),
                                       vision_config=dict(_VISION, mlp_ratio=1.5, max_position_embeddings=16)), _pictures(1)),
    Family("Muse Glimmer", "muse_glimmer", dict(_MUSE, text_config=dict(_TEXT, **_HYBRID, layer_rope_theta=[10000.0, 0])), _patches(96)),
    Family("Muse Spark", "muse_spark", dict(
        _MUSE, audio_token_id=56, audio_config=dict(patch_sizes=[4, 4], hidden_sizes=[8, 8], depths=[1, 1], num_hidden_layers=2, out_hidden_size=32),
        text_config=dict(_TEXT, **_HYBRID, layer_rope_theta=[10000.0, 0], num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                         moe_hidden_size=16)), _patches(96)),
    Family("Fuyu", "fuyu", dict(_TOKENS, patch_size=4, text_config=text("persimmon")), lambda n, g: ([6] * n, {"pixel_values": _noise(g, n, 6, 48)})),
    Family("Qwen2.5-Omni", "qwen2_5_omni_thinker", dict(
        _OMNI, audio_token_index=56, image_token_index=IMAGE, video_token_index=VIDEO, text_config=_BY_AXES, vision_config=dict(_OUT, **_WINDOWED),
        audio_config=dict(_EAR, n_window=4, output_dim=32, max_source_positions=16)), _patches(96)),
    Family("Qwen3-Omni", "qwen3_omni_moe_thinker", dict(
        _OMNI, audio_token_id=56, image_token_id=IMAGE, video_token_id=VIDEO, text_config=dict(_BY_AXES, **_EXPERTS),
        vision_config=dict(_SEEN, deepstack_visual_indexes=[0]),
        audio_config=dict(_EAR, n_window=4, output_dim=32, max_source_positions=16, downsample_hidden_size=8)), _patches(96)),
    Family("Nemotron-H Omni", "nemotron_h_omni", dict(
        image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=56, projector_hidden_size=16, vision_hidden_size=16, force_image_size=16, audio_config=None,
        text_config=dict(_MAMBA, model_type="nemotron_h"), vision_config=dict(
            model_type="radio", torch_dtype="float32", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2.0, patch_size=4, image_size=16,
            max_img_size=16, num_cls_tokens=1, num_registers=1, video_temporal_patch_size=2)), _omni, trees=False),
    Family("EXAONE 4.5", "exaone4_5", dict(_TOKENS, video_token_id=VIDEO, text_config=text("exaone4", **_HYBRID),
                                           vision_config=dict(_OUT, **_WINDOWED, num_key_value_heads=1)), _patches(96)),
    Family("Gemma 4 Unified", "gemma4_unified", dict(
        _IDS, audio_token_id=56, audio_config=None, text_config={name: value for name, value in _GEMMA4.items() if "per_layer" not in name},
        vision_config=dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=32)), _gemma4_unified, _AXES),
    Family("Llama 4", "llama4", _LLAMA4, _pictures(4)),
    Family("LLaVA-NeXT-Video", "llava_next_video", dict(_TO_VIDEO, image_grid_pinpoints=_GRID), _sized(52, (16, 32), tiles=3)),
    Family("Video-LLaVA", "video_llava", _TO_VIDEO, _pictures(16)),
    Family("FastVLM", "fast_vlm", dict(_IMAGE, text_config=text("qwen2"), vision_config=dict(_TIMM, hidden_size=16)), _pictures(4)),
    Family("Perception LM", "perception_lm", _PERCEPTION, _tiles(4, 32), spread=0.4),
    Family("Mistral Small 4", "mistral3", dict(_IMAGE, text_config=_MISTRAL4, vision_config=_PIXTRAL), _sized(4)),
    Family("Mistral Large 4", "mistral_large4", dict(_IMAGE, vision_config=_PIXTRAL, text_config={
        **_TEXT, **_SPARSE, "no_rope_layers": [1, 0], "indexer_types": ["full", "shared"]}), _sized(4)),
    Family("Cohere Compass", "cohere_compass", _COMPASS, _patches(96), _AXES),
    Family("HyperCLOVA X Vision", "hyperclovax_vision_v2", _CLOVA, _patches(96)),
    Family("MiniCPM-OCR", "minicpm_ocr", _MINICPM, _strips(4), trees=False),
    Family("PP-Chart2Table", "pp_chart2table", dict(_IMAGE, text_config=text("qwen2"), vision_config=dict(_SAM, model_type="pp_chart2table_vision")),
           _pictures(16, 64), attn="eager"),
    Family("GLM-GA", "glmga", _GLM46, _patches(96), _AXES),
    Family("Apertus 1.5", "apertus1p5", _APERTUS, _sized(16, (8, 8)), spread=0.5, attn="eager"),
    Family("dots.3", "dots3_note", _DOTS, _patches(48)),
    Family("Hy4-VL", "hy_v4_vl", _HY4, _patches(48, breaks=1), _AXES, attn="eager"),
    Family("GLM-5.3 Flash", "glm5_next", _GLM5, _patches(96), trees=False),
    Family("PaliGemma", "paligemma", dict(_PALIGEMMA, text_config=text("gemma")), _pictures(16), ("token_type_ids",)),
    Family("PaliGemma 2", "paligemma", dict(_PALIGEMMA, text_config=text("gemma2", **_HYBRID, query_pre_attn_scalar=8)), _pictures(16), ("token_type_ids",), trees=False,
           attn="eager"),
    Family("Phi-4 Multimodal", "phi4_multimodal", _PHI4, _phi4),
    Family("Mllama", "mllama", _MLLAMA, _mllama),
    Family("Qwen4-Exp", "qwen4_exp", _QWEN4, _patches(96), _AXES, trees=False),
    Family("MiniMax-M3-VL", "minimax_m3_vl", _MINIMAX, _patches(96), **_ALONE),
    Family("Inkling 2", "inkling2", dict(
        _TOKENS, text_config=_INKLING, vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
                                                          posemb_grid_size=8, projection_hidden_dim=16, text_hidden_size=32)), _inkling, **_ALONE, attn="eager"),
    # videos
    Family("Qwen2-VL (video)", "qwen2_vl", dict(_QWEN, vision_config=dict(_EYE, embed_dim=16, hidden_size=32, mlp_ratio=2)), _films(4, 96), _AXES, token=VIDEO),
    Family("Qwen3-VL (video)", "qwen3_vl", dict(_QWEN, vision_config=dict(_SEEN, deepstack_visual_indexes=[0])), _films(4, 96), _AXES, token=VIDEO),
    Family("Qwen3.5 (video)", "qwen3_5", dict(_QWEN, text_config=dict(_BY_AXES, **_DELTA), vision_config=_SEEN), _films(4, 96), _AXES, trees=False, spread=0.4, token=VIDEO),
    Family("Qwen2.5-VL (video)", "qwen2_5_vl", dict(_QWEN, vision_config=dict(_OUT, **_WINDOWED)), _video, _AXES, token=VIDEO),
    Family("LLaVA-NeXT-Video (video)", "llava_next_video", dict(_TO_VIDEO, image_grid_pinpoints=_GRID), _clips(8), token=VIDEO),
    Family("Video-LLaVA (video)", "video_llava", _TO_VIDEO, _clips(34), token=VIDEO),
    Family("Perception LM (video)", "perception_lm", _PERCEPTION, _clips(8, 32), spread=0.4, token=VIDEO),
    Family("Cohere Compass (video)", "cohere_compass", _COMPASS, _films(4, 96), _AXES, token=VIDEO),
    Family("HyperCLOVA X Vision (video)", "hyperclovax_vision_v2", _CLOVA, _films(4, 96), token=VIDEO),
    Family("GLM-GA (video)", "glmga", _GLM46, _films(4, 96), _AXES),
    Family("dots.3 (video)", "dots3_note", _DOTS, _films(4, 48), token=VIDEO),
    Family("Hy4-VL (video)", "hy_v4_vl", _HY4, _films(12, 48, frames=2), _AXES, attn="eager", token=VIDEO),
    Family("GLM-5.3 Flash (video)", "glm5_next", dict(_GLM5, image_start_token_id=56, image_end_token_id=55, video_start_token_id=START, video_end_token_id=END),
           _films(4, 96), trees=False),
    Family("Qwen4-Exp (video)", "qwen4_exp", _QWEN4, _films(4, 96), _AXES, trees=False, token=VIDEO),
    Family("MiniMax-M3-VL (video)", "minimax_m3_vl", _MINIMAX, _films(4, 96), **_ALONE, token=VIDEO),
    # sounds
    Family("Qwen2-Audio", "qwen2_audio", dict(audio_token_index=IMAGE, text_config=text("qwen2"), audio_config=dict(
        _EAR, model_type="qwen2_audio_encoder", max_source_positions=8)), _sounds(4, 8, 16, mask="feature_attention_mask")),
    Family("Gemma 3n (sound)", "gemma3n", _GEMMA3N, _sounds(4, 32, 8, mask="input_features_mask", width=32, dtype=torch.bool), token=56),
    Family("Voxtral", "voxtral", dict(_AUDIO, text_config=text("llama"), audio_config=_HEAR), _sounds(2, 8, 16)),
    Family("Granite Speech", "granite_speech", dict(
        _UNTIED, audio_token_index=IMAGE, has_lora_adapter=False, window_size=4, downsample_rate=2, text_config=text("granite", attention_multiplier=0.35),
        encoder_config=dict(input_dim=8, num_layers=2, hidden_dim=16, num_heads=2, dim_head=8, output_dim=8, context_size=8, max_pos_emb=16,
                            conv_kernel_size=3), projector_config=dict(_FORMER, hidden_size=16, num_attention_heads=2, encoder_hidden_size=16)),
        _sounds(4, 8, 8, mask=_FEATURES, width=4, dtype=torch.bool)),
    Family("Audio Flamingo 3", "audioflamingo3", dict(_AUDIO, text_config=text("qwen2"), audio_config=_HEAR), _sounds(4, 8, 16, mask=_FEATURES)),
    Family("Music Flamingo", "musicflamingo", dict(_AUDIO, audio_bos_token_id=START, audio_eos_token_id=END, text_config=text("qwen2"),
                                                   audio_config=dict(_HEAR, model_type="audioflamingo3_encoder")), _sounds(4, 8, 16, mask=_FEATURES)),
    Family("GLM-ASR", "glmasr", dict(_AUDIO, text_config=text("llama"), audio_config=_HEAR), _sounds(2, 8, 16, mask=_FEATURES)),
    Family("Qwen3-ASR", "qwen3_asr", dict(_AUDIO, pad_token_id=0, eos_token_id=1, timestamp_token_id=56, text_config=text("qwen3"), audio_config=dict(
        _EAR, n_window_infer=100, output_dim=32, downsample_hidden_size=8)), _sounds(13, 8, 100, mask=_FEATURES)),
    Family("Fun-ASR-Nano", "fun_asr_nano", dict(
        _AUDIO, text_config=text("qwen3"), audio_config=dict(num_mel_bins=4, num_stacked_frames=2, hidden_size=16, num_attention_heads=2, intermediate_size=24,
                                                             num_hidden_layers=2, num_timestamp_prediction_layers=1, fsmn_kernel_size=3),
        adaptor_config=dict(hidden_size=32, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1, projector_hidden_size=16)),
        _sounds(4, 4, 8, mask=_FEATURES, width=4)),
    Family("Apertus 1.5 (sound)", "apertus1p5", _APERTUS, _waves(4, 16), spread=0.5, attn="eager", token=56),
    Family("dots.3 (sound)", "dots3_note", _DOTS, _chunks, token=56),
    Family("Phi-4 Multimodal (sound)", "phi4_multimodal", _PHI4, _phi4_sound, spread=0.4, token=56),
    Family("Granite Speech Plus", "granite_speech_plus", dict(
        _UNTIED, audio_token_index=IMAGE, has_lora_adapter=False, window_size=4, downsample_rate=2, text_config=text("granite", attention_multiplier=0.35),
        encoder_config=dict(input_dim=8, num_layers=2, hidden_dim=16, num_heads=2, dim_head=8, output_dim=8, context_size=8, max_pos_emb=16, conv_kernel_size=3,
                            cat_hidden_layers=[1]), projector_config=dict(_FORMER, hidden_size=16, num_attention_heads=2, encoder_hidden_size=32)),
        _sounds(4, 8, 8, mask=_FEATURES, width=4, dtype=torch.bool)),
    Family("MOSS-Transcribe", "moss_transcribe_diarize", dict(_AUDIO, text_config=text("qwen3"), audio_chunk_size=16, audio_config=_HEAR), _moss),
    Family("OmniASR", "omniasr", dict(_AUDIO, text_config=text("llama"), audio_config=dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, conv_dim=[8, 16], conv_kernel=[2, 2], conv_stride=[2, 2],
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0)), _wave(4, 1, 16)),
    Family("Nemotron 3.5 Transcribe", "nemo_speechlm", dict(
        audio_token_id=IMAGE, text_config=dict(_MAMBA, model_type="nemotron_h"), word_timestamp_config=dict(_STACKED, num_hidden_layers=1, vocab_size=20, blank_token_id=19),
        audio_config=dict(asr_config=_STACKED_EAR, diarization_config=dict(
            model_type="nemotron3_diarization", audio_config=_STACKED_EAR, streaming_config=dict(num_speakers=2, subsampling_factor=2),
            head_config=dict(hidden_size=16, num_speakers=2, audio_hidden_size=16, subsampling_factor=2)))), _sounds(4, 8, 8, mask=_FEATURES), trees=False),
    Family("VibeVoice-ASR", "vibevoice_asr", dict(
        audio_token_id=IMAGE, audio_bos_token_id=START, audio_eos_token_id=END, acoustic_tokenizer_chunk_size=64, text_config=text("qwen2"),
        acoustic_tokenizer_encoder_config=_VIBE, semantic_tokenizer_encoder_config=dict(_VIBE, hidden_size=16)), _wave(4, 1, 16, dtype=torch.bool), attn="eager"),
]
FAMILIES = [family for family in LINES  # of the installed transformers
            if family.kind in CONFIG_MAPPING and VERSION >= SINCE.get(family.name, VERSION) and VERSION != FAILS.get(family.name)
            and (torch.__version__ >= "2.8" or family.kind not in ("glm5_next", "qwen4_exp"))]  # whose own code gives scatter int32


def drafts_for(model, rows: int) -> bool:
    """Whether such a model drafts for so many rows."""
    return rows == 1 or not compat.traits_of(model, "target").own_cache
