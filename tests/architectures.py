"""The families that the tests run: one line each. `tests/test_architectures.py` decodes with every line, and
`python -m tests.architecture_matrix` writes down what ran."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from functools import lru_cache

from transformers import CONFIG_MAPPING, CTRLLMHeadModel
from transformers.cache_utils import LinearAttentionLayer

import hf_specdec
from hf_specdec.caches import CACHE
from tests.helpers import VOCAB, KnowingTreeDraft, build, generated, perturbed, plain, prompts, repetitive, speculate

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
    """kind: the model_type of transformers. ragged: whether it takes a batch of rows of different lengths. spread: standard
    deviation of the random weights, such that its text is neither stuck nor at a tie. window: what is special about its masks."""

    name: str
    kind: str
    settings: dict = field(default_factory=dict, hash=False)
    ragged: bool = True
    spread: float = 0.3
    window: str = ""

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
    Family("OPT", "opt", dict(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                              max_position_embeddings=128, word_embed_proj_dim=32)),
    Family("BLOOM", "bloom", dict(_UNTIED, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), ragged=False, window="ALiBi"),
    Family("MPT", "mpt", dict(_UNTIED, vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=128), ragged=False, window="ALiBi"),
    Family("Falcon (rotary)", "falcon", {**_HEADS, "alibi": False, "num_key_value_heads": None}),
    Family("Falcon (new decoder)", "falcon", {**_HEADS, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Family("Falcon (ALiBi)", "falcon", {**_HEADS, "alibi": True}, ragged=False, window="ALiBi"),
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
           ragged=CTRLLMHeadModel._supports_sdpa),  # transformers 5.10 has only the code that makes its own masks
    Family("DeepSeek-V2", "deepseek_v2", {**_LATENT, "head_dim": 8}),
    Family("DeepSeek-V3", "deepseek_v3", _LATENT),
    Family("DiffLlama", "diffllama", _LLAMA),
    Family("ERNIE 4.5", "ernie4_5", _LLAMA),
    Family("EXAONE 4", "exaone4", {**_LLAMA, **_HYBRID}, window="hybrid"),
    Family("Gemma", "gemma", {**_LLAMA, **_UNTIED, "head_dim": 8}),
    Family("Gemma 3n (text)", "gemma3n_text", {**_SHARED, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
                                               "altup_num_inputs": 2, "laurel_rank": 8}, spread=0.2, window="hybrid"),
    Family("Gemma 4 (text)", "gemma4_text", _SHARED, spread=0.2, window="hybrid"),
    Family("GLM", "glm", {**_LLAMA, "head_dim": 8}),
    Family("GLM-4", "glm4", {**_LLAMA, "head_dim": 8}),
    Family("GLM-4-MoE", "glm4_moe", {**_LLAMA, **_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    Family("GPT-Neo (local layers)", "gpt_neo", dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                                                     attention_types=[[["global", "local"], 1]], window_size=8,
                                                     max_position_embeddings=128), ragged=False, window="own masks"),
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

_DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
_KIMI = dict(_HEADS, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, num_experts_per_tok=2, num_local_experts=4, moe_intermediate_size=16)
_SSM = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
_SHORT = dict(layer_types=["conv", "full_attention"])
_INKLING = dict(_LLAMA, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4, rel_extent=32,
                moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
_NEMOTRON = dict(_LLAMA, head_dim=8, layers_block_type=["mamba", "attention", "mlp"], ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2)
_ZAMBA2 = dict(_HEADS, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8,
               num_mem_blocks=1, adapter_rank=4, attention_head_dim=16)
# layers that carry states from token to token
STATEFUL = [
    Family("Qwen3.5 (text)", "qwen3_5_text", {**_LLAMA, **_DELTA, "head_dim": 8}),
    Family("Qwen3.5-MoE (text)", "qwen3_5_moe_text", {**_LLAMA, **_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16}),
    Family("Qwen3-Next", "qwen3_next", {**_LLAMA, **_DELTA, **_EXPERTS, "head_dim": 8}),
    Family("Granite 4 (hybrid)", "granitemoehybrid", {**_LLAMA, **_MOE, **_SSM, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]}),
    Family("Falcon-H1", "falcon_h1", {**_LLAMA, **_SSM, "mamba_d_ssm": 64}),
    Family("LFM2", "lfm2", {**_LLAMA, **_SHORT, "block_auto_adjust_ff_dim": False}),
    Family("LFM2-MoE", "lfm2_moe", {**_LLAMA, **_EXPERTS, **_SHORT, "num_dense_layers": 1}),
    Family("LFM3", "lfm3", {**_LLAMA, **_SHORT, "head_dim": 8}),
    Family("LFM3 (sliding)", "lfm3", {**_LLAMA, **_WINDOW, "head_dim": 8, "layer_types": ["conv", "sliding_attention"]}),
    Family("Mamba 2", "mamba2", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8)),
    Family("Bamba", "bamba", {**_LLAMA, **_SSM, "attn_layer_indices": [1]}),
    Family("Kimi Linear", "kimi_linear", {**_KIMI, "layer_types": _DELTA["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4}),
    Family("OLMo (hybrid)", "olmo_hybrid", {**_LLAMA, **_DELTA}),
    Family("Ling (hybrid)", "bailing_hybrid", {**_KIMI, "head_dim": 8, "n_group": 2, "topk_group": 1, "layer_group_size": 2}),
    Family("Inkling (text)", "inkling_text", _INKLING),
    Family("Inkling 2 (text)", "inkling2_text", {**_INKLING, "unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1}),
    Family("Lara mini", "lara_mini", _LLAMA),
    Family("Zaya", "zaya", {**_LLAMA, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 16}, spread=0.6),
]
GOES_ON = hasattr(LinearAttentionLayer, "activate_past_recording")  # since transformers 5.17 models go on from a state over several tokens
STATEFUL = [family for family in STATEFUL if family.kind != "mamba2" or CACHE == "cache"]  # before 5.24 its forward has a name of its own for its cache
FAMILIES += [replace(family, ragged=False, window="states") for family in STATEFUL if GOES_ON]
FAMILIES = [line for line in FAMILIES if line.kind in CONFIG_MAPPING]  # of the installed transformers

# What cannot be rolled back: (name, model_type, settings)
REFUSED = [
    ("Mamba", "mamba", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)),
    ("RWKV", "rwkv", dict(vocab_size=VOCAB, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=64)),
    ("RecurrentGemma", "recurrent_gemma", dict(_HEADS, lru_width=32)),
    ("Jamba", "jamba", dict(_LLAMA, **_MOE, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1)),
    ("Nemotron-H", "nemotron_h", _NEMOTRON),
    ("Zamba 2", "zamba2", _ZAMBA2),
    ("MiniMax", "minimax", dict(_LLAMA, **_MOE, head_dim=8, block_size=8, layer_types=_DELTA["layer_types"])),
]
REFUSED += [(family.name, family.kind, family.settings) for family in STATEFUL if not GOES_ON]
REFUSED = [line for line in REFUSED if line[1] in CONFIG_MAPPING]


# --- what is run with a line ------------------------------------------------------------------------------------------

ATTENTION = ("eager", "sdpa")
ROWS = prompts(5, seed=2) + repetitive(14) + prompts(3, seed=1)
MAX_NEW = 22
SEEDS = (0,)


def offers(family: Family, attn: str) -> bool:
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
    finished = [row + text for row, text in zip(ROWS, texts)]
    writes = getattr(model.config, "output_vocab_size", None) or VOCAB
    chain = KnowingTreeDraft(finished, parents=(0, 1, 2, 3), vocab=writes) if family.window == "states" else None  # their texts repeat nothing
    drafts = {"tree": KnowingTreeDraft(finished, vocab=writes)} if tree else {"lookup" if chain is None else "knowing": chain, "model": perturbed(model)}
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
