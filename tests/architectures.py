"""The families that the tests run: one line each. `tests/test_architectures.py` decodes with every line, and
`python -m tests.architecture_matrix` writes down what ran."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from functools import lru_cache

import torch
from transformers import CONFIG_MAPPING, CTRLLMHeadModel

import hf_specdec
from hf_specdec import compat
from hf_specdec.bench.simulated import SimulatedTable
from hf_specdec.caches import CACHE, GOES_ON
from tests.helpers import VOCAB, KnowingTreeDraft, build, generated, padded, perturbed, plain, prompts, repetitive, speculate

_LLAMA = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128)
_HEADS = dict(_LLAMA, num_key_value_heads=4)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)
_ROTARY = dict(_GPT2, rotary_dim=4)
_UNTIED = dict(tie_word_embeddings=False)
_WINDOW = dict(sliding_window=8)
_HYBRID = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_MOE = dict(num_local_experts=4, num_experts_per_tok=2)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_SHARED = dict(_LLAMA, **_WINDOW, num_hidden_layers=4, head_dim=8, layer_types=["sliding_attention", "full_attention"] * 2,
               hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2)
_LATENT = dict(_HEADS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
               num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)


@dataclass(frozen=True)
class Family:
    """kind: the model_type of transformers. ragged: whether it takes a batch of rows of different lengths. branches: whether its masks are ours to make.
    spread: standard deviation of the random weights, such that its text is neither stuck nor at a tie. window: what is special about its masks.
    trees: whether it takes them. padding: whether plain generate reads that of a batch as text."""

    name: str
    kind: str
    settings: dict = field(default_factory=dict, hash=False)
    ragged: bool = True
    branches: bool = True
    spread: float = 0.3
    window: str = ""
    padding: bool = False

    @property
    def trees(self) -> bool:
        return self.branches and self.window not in ("states", "own cache")

    def model(self, attn: str = "sdpa", seed: int = 0):
        return build(self.kind, seed, attn, self.spread, **self.settings)


FAMILIES = [
    # the ones that have to work
    Family("Llama", "llama", _LLAMA),
    Family("Mistral", "mistral", {**_LLAMA, **_WINDOW}, window="sliding"),
    Family("Qwen2", "qwen2", _LLAMA),
    Family("Qwen2 (windowed layers)", "qwen2", {**_LLAMA, **_WINDOW, "use_sliding_window": True, "max_window_layers": 1}, window="hybrid"),
    Family("Qwen3", "qwen3", {**_LLAMA, "head_dim": 8}),
    Family("Qwen3-MoE", "qwen3_moe", {**_LLAMA, **_EXPERTS, "head_dim": 8}),
    Family("Gemma 2", "gemma2", {**_LLAMA, **_HYBRID, **_UNTIED, "head_dim": 8, "query_pre_attn_scalar": 8}, window="hybrid"),
    Family("Gemma 3 (text)", "gemma3_text", {**_LLAMA, **_HYBRID, **_UNTIED, "head_dim": 8, "query_pre_attn_scalar": 8}, window="hybrid"),
    Family("Phi", "phi", {**_HEADS, "partial_rotary_factor": 0.5}),
    Family("Phi-3", "phi3", _LLAMA),
    Family("Phi-3 (sliding)", "phi3", {**_LLAMA, **_WINDOW}, window="sliding"),
    Family("GPT-NeoX", "gpt_neox", {**_HEADS, "rotary_pct": 0.5}),
    Family("GPT-2", "gpt2", _GPT2),
    Family("GPT-J", "gptj", _ROTARY),
    Family("CodeGen", "codegen", _ROTARY),
    Family("GPT-BigCode (one K/V head)", "gpt_bigcode", {**_GPT2, "multi_query": True}),
    Family("GPT-BigCode (many K/V heads)", "gpt_bigcode", {**_GPT2, "multi_query": False}),
    Family("Moshi", "moshi", dict(_HEADS, ffn_dim=48, audio_vocab_size=8)),
    Family("OPT", "opt", dict(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                              max_position_embeddings=128, word_embed_proj_dim=32)),
    Family("BLOOM", "bloom", dict(_UNTIED, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), branches=False, window="ALiBi"),
    Family("MPT", "mpt", dict(_UNTIED, vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=128), branches=False, window="ALiBi"),
    Family("Falcon (rotary)", "falcon", {**_HEADS, "alibi": False, "num_key_value_heads": None}),
    Family("Falcon (new decoder)", "falcon", {**_HEADS, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Family("Falcon (ALiBi)", "falcon", {**_HEADS, "alibi": True}, branches=False, window="ALiBi"),
    Family("StableLM", "stablelm", _LLAMA),
    Family("OLMo2", "olmo2", _LLAMA),
    Family("Granite", "granite", {**_LLAMA, "attention_multiplier": 0.35}),
    Family("Cohere", "cohere", {**_LLAMA, "logit_scale": 1.0}),
    Family("StarCoder2", "starcoder2", {**_LLAMA, "sliding_window": None}),
    Family("StarCoder2 (sliding)", "starcoder2", {**_LLAMA, **_WINDOW}, window="sliding"),
    # more of the same kinds
    Family("Apertus", "apertus", _LLAMA),
    Family("Arcee", "arcee", _LLAMA),
    Family("BioGPT", "biogpt", {**_HEADS, **_UNTIED}),
    Family("Cohere2", "cohere2", {**_LLAMA, **_HYBRID, "logit_scale": 1.0}, window="hybrid"),
    Family("CTRL", "ctrl", dict(_UNTIED, vocab_size=VOCAB, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=128),
           branches=CTRLLMHeadModel._supports_sdpa),  # transformers 5.10 has only the code that makes its own masks
    Family("DeepSeek-V2", "deepseek_v2", {**_LATENT, "head_dim": 8}),
    Family("DeepSeek-V3", "deepseek_v3", _LATENT),
    Family("DiffLlama", "diffllama", _LLAMA),
    Family("ERNIE 4.5", "ernie4_5", _LLAMA),
    Family("EXAONE 4", "exaone4", {**_LLAMA, **_HYBRID}, window="hybrid"),
    Family("Gemma", "gemma", {**_LLAMA, **_UNTIED, "head_dim": 8}),
    Family("Gemma 3n (text)", "gemma3n_text", {**_SHARED, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
                                               "altup_num_inputs": 2, "laurel_rank": 8}, spread=0.2, window="hybrid"),
    Family("Gemma 3n", "gemma3n", dict(
        vision_config=dict(hidden_size=16, vocab_size=4, vocab_offset=VOCAB), audio_config=dict(
            hidden_size=32, conf_num_hidden_layers=1, conf_num_attention_heads=4, input_feat_size=8, vocab_size=4, vocab_offset=VOCAB + 4),
        text_config={**_SHARED, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2, "laurel_rank": 8}), spread=0.05, window="hybrid"),
    Family("Gemma 4 (text)", "gemma4_text", _SHARED, spread=0.2, window="hybrid"),
    Family("GLM", "glm", {**_LLAMA, "head_dim": 8}),
    Family("GLM-4", "glm4", {**_LLAMA, "head_dim": 8}),
    Family("GLM-4-MoE", "glm4_moe", {**_LLAMA, **_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    Family("GPT-Neo (local layers)", "gpt_neo", dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                                                     attention_types=[[["global", "local"], 1]], window_size=8,
                                                     max_position_embeddings=128), branches=False, window="own masks"),
    Family("GPT-NeoX-Japanese", "gpt_neox_japanese", {**_HEADS, "rotary_pct": 1.0, "intermediate_multiple_size": 2}),
    Family("GPT-OSS", "gpt_oss", {**_LLAMA, **_HYBRID, **_MOE, "head_dim": 8}, window="hybrid"),
    Family("Granite-MoE", "granitemoe", {**_LLAMA, **_MOE, "attention_multiplier": 0.35}),
    Family("Helium", "helium", {**_LLAMA, "head_dim": 8}),
    Family("Hunyuan", "hunyuan_v1_dense", {**_LLAMA, "head_dim": 8}),
    Family("Llama 4 (text, chunked)", "llama4_text", {**_LLAMA, **_MOE, "head_dim": 8, "attention_chunk_size": 8,
                                                      "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}, window="chunked"),
    Family("Ministral", "ministral", {**_LLAMA, **_HYBRID, "head_dim": 8}, window="hybrid"),
    Family("Mixtral", "mixtral", {**_LLAMA, **_MOE, **_WINDOW}, window="sliding"),
    Family("Nemotron", "nemotron", {**_LLAMA, "head_dim": 8}),
    Family("OLMo", "olmo", _LLAMA),
    Family("OLMo3", "olmo3", {**_LLAMA, **_HYBRID}, window="hybrid"),
    Family("OLMoE", "olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("Persimmon", "persimmon", _HEADS),
    Family("Phi-MoE", "phimoe", {**_LLAMA, **_MOE, **_WINDOW}, window="sliding", spread=0.2),
    Family("Qwen2-MoE", "qwen2_moe", {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    Family("Seed-OSS", "seed_oss", {**_LLAMA, "head_dim": 8}),
    Family("SmolLM3", "smollm3", {**_LLAMA, "no_rope_layers": [1, 0]}),
    Family("XGLM", "xglm", dict(_UNTIED, vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=128)),
    # new in transformers 5.24, of which Dory passes several times through its middle layers
    Family("Dory", "dory", {**_LLAMA, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1,
                            "n_recurrent_loops": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}, window="hybrid"),
    Family("Apertus 1.5 (text)", "apertus1p5_text", _LLAMA),
    Family("Apertus 1.5 (text, writes 50 tokens)", "apertus1p5_text", {**_LLAMA, "output_vocab_size": 50}),
    Family("EXAONE", "exaone", _LLAMA),
    Family("Sarvam MLA", "sarvam_mla", _LATENT),
    Family("Sarvam-MoE", "sarvam_moe", {**_LLAMA, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
]

# the other model types that AutoModelForCausalLM knows
_TOKENS = dict(bos_token_id=1, pad_token_id=0)  # where a config wants them
_ROUTED = dict(_LLAMA, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1)
_BERT = dict(_HEADS, is_decoder=True, max_position_embeddings=128)
_ROBERTA = dict(_BERT, pad_token_id=1, **_UNTIED)
_DECODER = dict(_TOKENS, vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=128,
                decoder_start_token_id=1, forced_eos_token_id=None)
_EYE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14)
_UNSPECIAL = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
_GEMMA = dict(_SHARED, **_UNSPECIAL, **_UNTIED, num_kv_shared_layers=0, num_hidden_layers=2, layer_types=_HYBRID["layer_types"], global_head_dim=8)
_ROTARY_PER_LAYER = dict.fromkeys(_HYBRID["layer_types"], {"rope_type": "default", "rope_theta": 1e4})
_INDEXED = dict(_LATENT, index_head_dim=8, index_n_heads=16, index_topk=8)
_DOTS = dict(_INDEXED, head_dim=16, moe_shared_expert_intermediate_size=16, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=16,
             swa_kv_lora_rank=16, swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=8)
_VISION_DOTS = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_local_experts=2,
                    adapter_in_dim=32, adapter_out_dim=32, per_layer_config={})
_AUDIO_DOTS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, downsample_hidden_size=8, adapter_input_size=32,
                   adapter_out_dim=32)
FAMILIES += [
    Family("AFMoE", "afmoe", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8, "num_dense_layers": 1}, window="hybrid"),
    Family("Aria (text)", "aria_text", {**_LLAMA, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0}),
    Family("A.X K1", "axk1", _LATENT),
    Family("A.X K2", "axk2", _INDEXED, window="selected"),
    Family("Beam", "beam", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8}, window="hybrid"),
    Family("BitNet", "bitnet", _LLAMA),
    Family("Cohere2-MoE", "cohere2_moe", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8, "logit_scale": 1.0}, window="hybrid"),
    Family("Cohere Compass (text)", "cohere_compass_text", {**_LLAMA, **_HYBRID, **_UNTIED, "rope_parameters": _ROTARY_PER_LAYER}, window="hybrid"),
    Family("CWM", "cwm", {**_LLAMA, **_HYBRID, **_TOKENS, "head_dim": 8}, spread=0.4, window="hybrid"),
    Family("DBRX", "dbrx", dict(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=128,
                                attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4), ffn_config=dict(ffn_hidden_size=32, hidden_size=32, moe_top_k=2))),
    Family("DeepSeek-V3.2", "deepseek_v32", _INDEXED, window="selected"),
    Family("Doge", "doge", _LLAMA),
    Family("dots1", "dots1", {**_ROUTED, **_HYBRID}, window="hybrid"),
    Family("dots.3", "dots3_note", {"text_config": {**_DOTS, "head_dim": 16, "layer_types": ["indexed_attention"] * 2, **_UNSPECIAL},
                                    "vision_config": _VISION_DOTS, "audio_config": _AUDIO_DOTS}, window="selected"),
    Family("dots.3 (text)", "dots3_note_text", {**_DOTS, **_WINDOW, "layer_types": ["sliding_attention", "indexed_attention"]}, window="selected"),
    Family("dots.3 (text, without selection)", "dots3_note_text", {**_DOTS, **_HYBRID, "use_dsa": False}, window="hybrid"),
    Family("Emu3", "emu3", {"bos_token_id": 1, "vq_config": dict(embed_dim=8, num_embeddings=8, base_channels=32, channel_multiplier=[1], num_res_blocks=1),
                            "text_config": {**_LLAMA, **_TOKENS, "eos_token_id": None}}),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", {**_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
                                             "moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    Family("EXAONE-MoE", "exaone_moe", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8, "first_k_dense_replace": 1}, window="hybrid"),
    Family("FlexOlmo", "flex_olmo", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("Flint", "flint", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8}, window="hybrid"),
    Family("Fuyu", "fuyu", {**_HEADS, "text_config": {**_HEADS, "model_type": "persimmon", **_UNSPECIAL}}),
    Family("Gemma 3", "gemma3", {"text_config": {**_LLAMA, **_HYBRID, **_UNTIED, **_UNSPECIAL, "head_dim": 8, "query_pre_attn_scalar": 8},
                                 "vision_config": _EYE, "mm_tokens_per_image": 4, **_UNTIED}, window="hybrid"),
    Family("Gemma 4", "gemma4", {"text_config": _GEMMA, "vision_config": {**_EYE, "num_key_value_heads": 4, "head_dim": 8,
           "position_embedding_size": 16}, "audio_config": None, **_UNTIED}, spread=0.2, window="hybrid"),
    Family("Gemma 4 Unified", "gemma4_unified", {"text_config": _GEMMA, "vision_config": dict(mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=32),
                                                 "audio_config": dict(audio_embed_dim=32), **_UNTIED}, spread=0.2, window="hybrid"),
    Family("Gemma 4 Unified (text)", "gemma4_unified_text", _GEMMA, window="hybrid"),
    Family("GIT", "git", {**_HEADS, "vision_config": _EYE}, spread=0.5),
    Family("GLM-4-MoE Lite", "glm4_moe_lite", _LATENT),
    Family("GLM-MoE-DSA", "glm_moe_dsa", {**_INDEXED, "indexer_types": ["full", "shared"]}, spread=0.4, window="selected"),
    Family("GOT-OCR2", "got_ocr2", {"text_config": {**_LLAMA, "model_type": "qwen2", **_UNSPECIAL},
                                    "vision_config": dict(hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=32, image_size=64)}),
    Family("GPT-SW3", "gpt-sw3", _GPT2),
    Family("Granite SWA", "granite_swa", {**_LLAMA, **_HYBRID, "attention_multiplier": 0.35}, window="hybrid"),
    Family("Granite-MoE SWA", "granitemoe_swa", {**_LLAMA, **_MOE, **_HYBRID, "attention_multiplier": 0.35}, window="hybrid"),
    Family("Granite-MoE (shared)", "granitemoeshared", {**_LLAMA, **_MOE, "attention_multiplier": 0.35, "shared_intermediate_size": 16}),
    Family("HRM (text)", "hrm_text", {**_LLAMA, "head_dim": 8}),
    Family("Hunyuan-MoE", "hunyuan_v1_moe", {**_LLAMA, "head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    Family("HY v3", "hy_v3", {**_LLAMA, **_EXPERTS, "head_dim": 8, "num_shared_experts": 1, "first_k_dense_replace": 1}),
    Family("HY v4", "hy_v4", {**_INDEXED, "indexer_types": ["full", "shared"]}, window="selected"),
    Family("HyperCLOVA X", "hyperclovax", _LLAMA),
    Family("InternLM3", "internlm3", _LLAMA),
    Family("IQuestCoder", "iquestcoder", _LLAMA),
    Family("Jais 2", "jais2", _LLAMA),
    Family("JetMoE", "jetmoe", {**_LLAMA, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Kolibri 1", "kolibri1", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8}, window="hybrid"),
    Family("Laguna", "laguna", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8, "shared_expert_intermediate_size": 16}, window="hybrid"),
    Family("Llama 4 (chunked)", "llama4", {"text_config": {**_LLAMA, **_MOE, **_UNSPECIAL, "head_dim": 8, "attention_chunk_size": 8,
                                                           "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}, "vision_config": _EYE}, window="chunked"),
    Family("LongCat-Flash", "longcat_flash", {**_LATENT, "head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2,
                                              "num_layers": 2}),
    Family("Mellum", "mellum", {**_LLAMA, **_EXPERTS, **_HYBRID, "head_dim": 8}, window="hybrid"),
    Family("MiMo-V2-Flash", "mimo_v2_flash", {**_LLAMA, **_HYBRID, **_EXPERTS, "head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}, window="hybrid"),
    Family("MiniCPM3", "minicpm3", _LATENT),
    Family("MiniMax-M2", "minimax_m2", {**_LLAMA, **_MOE, "head_dim": 8}),
    Family("MiniMax-M3 (text, dense)", "minimax_m3_vl_text", {**_LLAMA, **_MOE, "head_dim": 8, "rotary_dim": 4, "dense_intermediate_size": 48,
                                                              "shared_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"]}),
    Family("Ministral 3", "ministral3", {**_LLAMA, "head_dim": 8}),
    Family("Mllama", "mllama", {"text_config": {**_LLAMA, **_TOKENS, "eos_token_id": None, "num_hidden_layers": 3, "cross_attention_layers": [1],
                                                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                                "vision_config": {**_EYE, "num_global_layers": 1, "intermediate_layers_indices": [1], "vision_output_dim": 64}}),
    Family("ModernBERT (decoder)", "modernbert-decoder", {**_HEADS, **_TOKENS, "cls_token_id": 1, "sep_token_id": 1, "local_attention": 16,
                                                          "layer_types": _HYBRID["layer_types"], **_UNTIED}, window="hybrid"),
    Family("MOSS-Transcribe", "moss_transcribe_diarize", {"text_config": {**_LLAMA, "head_dim": 8, **_UNSPECIAL},
                                                          "audio_config": dict(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48)}),
    Family("NanoChat", "nanochat", _LLAMA),
    Family("Phi-4 Multimodal", "phi4_multimodal", {
        **_LLAMA, **_UNSPECIAL, "original_max_position_embeddings": 128, "vision_config": {**_EYE, "crop_size": 28},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "audio_config": dict(hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=4, ext_pw_out_channel=32,
                             depthwise_separable_out_channel=32, nemo_conv_channels=32)}),
    Family("Solar Open", "solar_open", {**_ROUTED, "n_group": 1, "topk_group": 1}),
    Family("VaultGemma", "vaultgemma", {**_LLAMA, **_HYBRID, **_UNTIED, "head_dim": 8, "query_pre_attn_scalar": 8}, window="hybrid"),
    Family("Youtu", "youtu", _LATENT),
    Family("BERT (as a decoder)", "bert", _BERT, spread=0.6),
    Family("BERT Generation", "bert-generation", _BERT, spread=0.6),
    Family("BigBird (as a decoder)", "big_bird", _BERT, spread=1.0),
    Family("CamemBERT (as a decoder)", "camembert", _ROBERTA, spread=1.6),
    Family("Data2Vec (as a decoder)", "data2vec-text", _ROBERTA, spread=1.0),
    Family("ELECTRA (as a decoder)", "electra", {**_BERT, "embedding_size": 32}, spread=0.6),
    Family("ERNIE (as a decoder)", "ernie", _BERT, spread=0.6),
    Family("Megatron-BERT (as a decoder)", "megatron-bert", _BERT, spread=0.6),
    Family("RemBERT (as a decoder)", "rembert", {**_BERT, "input_embedding_size": 32, "output_embedding_size": 32}, spread=1.0),
    Family("RoBERTa (as a decoder)", "roberta", _ROBERTA, spread=1.0),
    Family("RoBERTa-PreLayerNorm (as a decoder)", "roberta-prelayernorm", _ROBERTA, spread=0.6),
    Family("RoCBert (as a decoder)", "roc_bert", {**_BERT, "enable_pronunciation": False, "enable_shape": False, "shape_vocab_size": 9,
                                                  "pronunciation_vocab_size": 9}, spread=1.0),
    Family("RoFormer (as a decoder)", "roformer", {**_BERT, "embedding_size": 32}, ragged=False, branches=False, spread=0.6),
    Family("XLM-RoBERTa (as a decoder)", "xlm-roberta", _ROBERTA, spread=1.6),
    Family("XLM-RoBERTa-XL (as a decoder)", "xlm-roberta-xl", _ROBERTA, spread=0.6),
    Family("X-MOD (as a decoder)", "xmod", {**_ROBERTA, "languages": ["en"], "default_language": "en"}, spread=1.0),
    Family("BART (its decoder)", "bart", _DECODER, branches=False, spread=0.6),
    Family("BigBird-Pegasus (its decoder)", "bigbird_pegasus", _DECODER, branches=False),
    Family("Blenderbot (its decoder)", "blenderbot", _DECODER, branches=False),
    Family("Blenderbot (small, its decoder)", "blenderbot-small", _DECODER, branches=False, spread=0.6),
    Family("Marian (its decoder)", "marian", _DECODER, branches=False, spread=0.6),
    Family("mBART (its decoder)", "mbart", _DECODER, branches=False),
    Family("MVP (its decoder)", "mvp", _DECODER, branches=False, spread=0.6),
    Family("Pegasus (its decoder)", "pegasus", _DECODER, branches=False),
    Family("PLBart (its decoder)", "plbart", _DECODER, branches=False, spread=0.6),
    Family("TrOCR", "trocr", _DECODER, branches=False, spread=0.6),
    Family("Whisper (its decoder)", "whisper", {**_DECODER, "max_target_positions": 128}, branches=False),
]

_DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
_KIMI = dict(_HEADS, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, num_experts_per_tok=2, num_local_experts=4, moe_intermediate_size=16)
_SSM = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
_SHORT = dict(layer_types=["conv", "full_attention"])
_INKLING = dict(_LLAMA, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4, rel_extent=32,
                moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
_STEPS = dict(time_step_min=0.5, chunk_size=8)  # a limit that matters: transformers heeds it in prompts, and not in decoding
_NEMOTRON = dict(_LLAMA, **_STEPS, head_dim=8, layers_block_type=["mamba", "attention", "mlp"], ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2)
_ZAMBA2 = dict(_HEADS, **_STEPS, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8,
               num_mem_blocks=1, adapter_rank=4, attention_head_dim=16)
_VISION = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[])
# layers that carry states from token to token
STATEFUL = [
    Family("Qwen3.5 (text)", "qwen3_5_text", {**_LLAMA, **_DELTA, "head_dim": 8}),
    Family("Qwen3.5-MoE (text)", "qwen3_5_moe_text", {**_LLAMA, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16}),
    Family("Qwen3.5", "qwen3_5", {"text_config": {**_LLAMA, **_DELTA, **_UNSPECIAL, "head_dim": 8}, "vision_config": _VISION}),
    Family("Qwen3.5-MoE", "qwen3_5_moe", {"text_config": {**_LLAMA, **_DELTA, **_EXPERTS, **_UNSPECIAL, "head_dim": 8, "shared_expert_intermediate_size": 16},
                                          "vision_config": _VISION}),
    Family("Qwen3-Next", "qwen3_next", {**_LLAMA, **_DELTA, **_EXPERTS, "head_dim": 8}),
    Family("Granite 4 (hybrid)", "granitemoehybrid", {**_LLAMA, **_MOE, **_SSM, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]}),
    Family("Falcon-H1", "falcon_h1", {**_LLAMA, **_SSM, "mamba_d_ssm": 64}),
    Family("LFM2", "lfm2", {**_LLAMA, **_SHORT, "block_auto_adjust_ff_dim": False}),
    Family("LFM2-MoE", "lfm2_moe", {**_LLAMA, **_EXPERTS, **_SHORT, "num_dense_layers": 1}),
    Family("LFM3", "lfm3", {**_LLAMA, **_SHORT, "head_dim": 8}),
    Family("LFM3 (sliding)", "lfm3", {**_LLAMA, **_WINDOW, "head_dim": 8, "layer_types": ["conv", "sliding_attention"]}),
    Family("Mamba 2", "mamba2", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8)),
    Family("Nemotron-H", "nemotron_h", _NEMOTRON),
    Family("Zamba 2", "zamba2", _ZAMBA2),
    Family("Bamba", "bamba", {**_LLAMA, **_SSM, "attn_layer_indices": [1]}),
    Family("Kimi Linear", "kimi_linear", {**_KIMI, "layer_types": _DELTA["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4}),
    Family("OLMo (hybrid)", "olmo_hybrid", {**_LLAMA, **_DELTA}),
    Family("Ling (hybrid)", "bailing_hybrid", {**_KIMI, "head_dim": 8, "n_group": 2, "topk_group": 1, "layer_group_size": 2}),
    Family("Inkling (text)", "inkling_text", _INKLING),
    Family("Inkling 2 (text)", "inkling2_text", {**_INKLING, "unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1}),
    Family("Lara mini", "lara_mini", _LLAMA),
    Family("Mamba", "mamba", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)),
    Family("Falcon-Mamba", "falcon_mamba", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=8)),
    Family("Jamba", "jamba", dict(_LLAMA, **_MOE, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1)),
    Family("Zamba", "zamba", dict(_HEADS, num_hidden_layers=4, mamba_d_state=8, mamba_dt_rank=4, n_mamba_heads=2, attention_head_dim=16,
                                  layer_types=["linear_attention", "hybrid"] * 2)),
    Family("RecurrentGemma", "recurrent_gemma", dict(_HEADS, num_hidden_layers=3, num_key_value_heads=1, lru_width=32, attention_window_size=8), spread=0.45),
    Family("Zaya", "zaya", {**_LLAMA, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 16}, spread=0.6),
]
STATEFUL = [family for family in STATEFUL if family.kind not in ("mamba", "mamba2", "falcon_mamba", "recurrent_gemma") or CACHE == "cache"]  # before 5.24 their cache has
# another name, or none
FAMILIES += [replace(family, ragged=not family.kind.startswith("inkling"), window="states") for family in STATEFUL if GOES_ON]
# those whose cache is of a kind of their own: groups, blocks and windows that texts of this length fill and outgrow
_QWEN4 = dict(_LLAMA, **_EXPERTS, head_dim=8, shared_expert_intermediate_size=16, hc_lowrank=4, ngram_vocab_size_base=64, split_ngram_parts=1,
              **{**_DELTA, "layer_types": ["linear_attention", "indexed_attention"]}, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
              indexer_compress_ratio=4)
_QWEN4_SEEING = {name: size for name, size in _VISION.items() if name != "deepstack_visual_indexes"}
OWN_CACHES = [
    Family("DeepSeek-V4", "deepseek_v4", dict(_LLAMA, num_hidden_layers=3, head_dim=8, q_lora_rank=16, o_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2,
                                              moe_intermediate_size=16, index_head_dim=8, index_n_heads=8, index_topk=2, sliding_window=8,
                                              layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
                                              compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8})),
    Family("MiniMax-M3 (text, sparse)", "minimax_m3_vl_text", dict(_LLAMA, **_MOE, head_dim=8, rotary_dim=4, shared_intermediate_size=16, index_head_dim=8,
                                                                   index_n_heads=2, index_block_size=4, index_topk_blocks=2,
                                                                   layer_types=["full_attention", "minimax_m3_sparse"])),
    Family("Qwen4-Exp", "qwen4_exp", {"text_config": dict(_QWEN4, **_UNSPECIAL), "vision_config": _QWEN4_SEEING}),
    Family("Qwen4-Exp (text)", "qwen4_exp_text", dict(_QWEN4, ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=2, eos_token_id=VOCAB)),
    Family("GLM-5.3 Flash", "glm5_next", {"vision_config": dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=24, out_hidden_size=32,
                                                                projection_intermediate_size=24), "text_config": dict(
        _INDEXED, linear_head_dim=8, linear_num_heads=4, n_group=1, qk_rope_head_dim=0, index_kpool=4, mlp_layer_types=["dense", "sparse"], indexer_types=["full", "full"], hc_mult=2,
        layer_types=["linear_attention", "indexed_attention"], **_UNSPECIAL)}),
    Family("Inkling 2 (loop, text)", "inkling2_loop_text", dict(_INKLING, unpadded_vocab_size=VOCAB, n_layers_per_attn_res_block=1)),
    Family("MiniMax", "minimax", dict(_LLAMA, **_MOE, head_dim=8, block_size=8, layer_types=_DELTA["layer_types"])),
    Family("RWKV", "rwkv", dict(vocab_size=VOCAB, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=512)),
    Family("xLSTM", "xlstm", dict(vocab_size=VOCAB, hidden_size=128, embedding_dim=128, num_hidden_layers=2, num_blocks=2, num_heads=2), padding=True),
    Family("CPM-Ant", "cpmant", dict(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2, prompt_length=3, prompt_types=3), spread=0.6),
    Family("OpenAI GPT", "openai-gpt", dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512)),
]
if torch.__version__ < "2.8":  # whose scatter takes no int32, which their own code gives it
    OWN_CACHES = [family for family in OWN_CACHES if not family.kind.startswith(("glm5", "qwen4"))]
_LEVEL = ("deepseek_v4", "minimax", "minimax_m3_vl_text", "rwkv")  # of which plain generate itself reads no padding, or no rows, as texts
FAMILIES += [replace(family, ragged=family.kind not in _LEVEL, window="own cache") for family in OWN_CACHES if CACHE == "cache"]
FAMILIES = [line for line in FAMILIES if line.kind in CONFIG_MAPPING]  # of the installed transformers
FAMILIES = [line for line in FAMILIES if line.kind not in ("axk2", "cohere_compass_text") or CACHE == "cache"]  # before 5.24 the first is refused, and the other's
# own code fails with this config
_TOO_OLD = [line for line in FAMILIES if line.kind in compat._OWN_WAYS]
FAMILIES = [line for line in FAMILIES if line not in _TOO_OLD]

# What cannot be rolled back: (name, model_type, settings)
REFUSED = [] if CACHE == "cache" else [("RecurrentGemma", "recurrent_gemma", dict(_HEADS, lru_width=32))]
REFUSED += [(family.name, family.kind, family.settings) for family in STATEFUL if not GOES_ON]
REFUSED += [(family.name, family.kind, family.settings) for family in OWN_CACHES if CACHE != "cache" and not family.kind.startswith(("cpmant", "glm5", "openai", "qwen4"))]  # whose config was another, or which is below
_BYTES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, hidden_size_global=32)
_PART = dict(_GEMMA, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2)
# What reads its text in a way of its own
OWN_WAYS = [
    ("BLT", "blt", dict(encoder_hash_byte_group_vocab=8, patcher_config=_BYTES, encoder_config=_BYTES, decoder_config=_BYTES, global_config=_BYTES)),
    ("Gemma 4 (assistant)", "gemma4_assistant", dict(text_config=_PART, backbone_hidden_size=32)),
    ("Gemma 4 Unified (assistant)", "gemma4_unified_assistant", dict(text_config=_PART, backbone_hidden_size=32)),
    ("ProphetNet (its decoder)", "prophetnet", dict(_UNSPECIAL, vocab_size=VOCAB, hidden_size=32, num_decoder_layers=1, num_decoder_attention_heads=4,
                                                    decoder_ffn_dim=48, decoder_start_token_id=1)),
    ("Reformer", "reformer", dict(vocab_size=VOCAB, hidden_size=32, feed_forward_size=48, num_attention_heads=4, attention_head_size=8,
                                  axial_pos_embds=False, attn_layers=["local"], is_decoder=True)),
    ("XLM", "xlm", dict(_UNSPECIAL, vocab_size=VOCAB, emb_dim=32, n_layers=1, n_heads=4)),
    ("XLNet", "xlnet", dict(vocab_size=VOCAB, d_model=32, n_layer=1, n_head=4, d_inner=48)),
]
OWN_WAYS += [(line.name, line.kind, line.settings) for line in (*_TOO_OLD, *(line for line in OWN_CACHES if line.kind in ("cpmant", "openai-gpt") and CACHE != "cache"))]
REFUSED, OWN_WAYS = ([line for line in lines if line[1] in CONFIG_MAPPING] for lines in (REFUSED, OWN_WAYS))


# --- what is run with a line ------------------------------------------------------------------------------------------

ATTENTION = ("eager", "sdpa")
ROWS = prompts(5, seed=2) + repetitive(14) + prompts(3, seed=1)
MAX_NEW = 22
SEEDS = (0,)


def offers(family, attn: str) -> bool:
    """Whether transformers has this attention for the family."""
    try:
        family.model(attn)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return False
    return True


@lru_cache(maxsize=4)
def reference(name: str, attn: str, seed: int = 0):
    """The model of a line, and what plain generate makes of each of ROWS alone."""
    model = next(family for family in FAMILIES if family.name == name).model(attn, seed)
    return model, plain(model, ROWS, max_new_tokens=MAX_NEW)


def outcome(family: Family, attn: str, batch: int, tree: bool = False, seed: int = 0) -> str:
    """"exact" if lookups, a perturbed copy of the model (or, with `tree`, a tree of tokens) draft text equal to plain generate's;
    "refused: ..." with the reason; anything else is the difference."""
    model, texts = reference(family.name, attn, seed)
    if batch > 1 and family.padding:
        texts = generated(model.generate(**padded(ROWS), max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=0), ROWS)
    finished = [row + text for row, text in zip(ROWS, texts)]
    writes = getattr(model.config, "output_vocab_size", None) or VOCAB
    chain = KnowingTreeDraft(finished, parents=(0, 1, 2, 3), vocab=writes) if family.window in ("states", "own cache") else None  # their texts repeat nothing
    drafts = {"tree": KnowingTreeDraft(finished, vocab=writes)} if tree else {"lookup" if chain is None else "knowing": chain, "model": perturbed(model)}
    if family.window == "own cache" and batch > 1 and not tree:  # such a model drafts for one row
        drafts["model"] = SimulatedTable(texts, 0.7, seed)
    calls = [[0], [1], [2]] if batch == 1 else [[0, 1, 2]]
    try:
        for name, draft in drafts.items():
            accepted = 0
            for call in calls:
                out = speculate(model, [ROWS[i] for i in call], draft, k=10 if tree else 4, max_new_tokens=MAX_NEW)
                accepted += out.speculation.accepted
                text = generated(out, [ROWS[i] for i in call])
                if text != [texts[i] for i in call]:
                    return f"{name} draft: {text} instead of {[texts[i] for i in call]}"
            if not accepted:
                return f"{name} draft: nothing was accepted, so nothing was shown"
    except ValueError as error:
        return f"refused: {error}"
    finally:
        hf_specdec.disable(model)
    return "exact"
