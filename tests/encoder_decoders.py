"""The encoder-decoder families that the tests run: one line each, and what is run with a line."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, UdopForConditionalGeneration

from hf_specdec import integration
from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft
from tests.helpers import VOCAB, contrary, perturbed

_T5 = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
_BART = dict(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
             decoder_start_token_id=2, forced_eos_token_id=None)
_LED = dict(_BART, max_encoder_position_embeddings=128, max_decoder_position_embeddings=128, attention_window=8)
_GEMMA = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0,
              bos_token_id=2, eos_token_id=None, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
_UNTIED = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2, tie_word_embeddings=False)
_EYES = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
_SEAMLESS = dict(_BART, t2u_vocab_size=VOCAB, hidden_size=32, feature_projection_input_dim=16, speech_encoder_layers=2, speech_encoder_attention_heads=4,
                 speech_encoder_intermediate_size=48, num_adapter_layers=1, position_embeddings_type="relative", max_source_positions=128, conv_depthwise_kernel_size=3)
_ASR = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48, max_position_embeddings=128, head_dim=8)
_CONFORMER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_mel_bins=16, subsampling_factor=4, subsampling_conv_channels=8)
_MOONSHINE = dict(_UNTIED, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
                  decoder_num_attention_heads=4, max_position_embeddings=128)
_STREAMING = dict(_UNTIED, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)
_SPEECHT5 = dict(_BART, hidden_size=32, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, feat_extract_norm="layer",
                 num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, encoder_max_relative_position=20, max_text_positions=128)
_VIT = dict(model_type="vit", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8)
_WAV2VEC = dict(_SPEECHT5, model_type="wav2vec2", hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, do_stable_layer_norm=True)
_COMPOSED = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_BERT = dict(_COMPOSED, model_type="bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=128)
_PIX2STRUCT = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
                   text_config=dict(vocab_size=VOCAB, hidden_size=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None),
                   vision_config=dict(hidden_size=32, patch_embed_hidden_size=12, d_kv=8, d_ff=48, num_hidden_layers=2, num_attention_heads=4, seq_len=64))
_DAVIT = dict(model_type="florence_vision", depths=(1, 1), patch_size=(7, 3), patch_stride=(4, 2), patch_padding=(3, 1), patch_prenorm=(False, True), embed_dim=(16, 32),
              num_heads=(2, 4), num_groups=(2, 4), window_size=4, projection_dim=32)
_FLORENCE = dict(text_config=dict(_BART, model_type="bart"), vision_config=_DAVIT, image_token_id=60, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2)
_READS = dict(is_decoder=True, add_cross_attention=True)
_GPT2 = dict(_COMPOSED, **_READS, model_type="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=128)
_TROCR = dict(_COMPOSED, model_type="trocr", d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=128)
_MBART = dict(_BART, **_READS, model_type="mbart", is_encoder_decoder=False)
_WHISPER = dict(_BART, num_mel_bins=8, max_source_positions=20, max_target_positions=128)


@dataclass(frozen=True)
class Family:
    """kind: the model_type of transformers; positions: how its decoder counts them."""

    name: str
    kind: str
    settings: dict = field(default_factory=dict, hash=False)
    positions: str = "learned"

    def model(self, attn: str = "eager", seed: int = 0, spread: float = 0.3, **settings):
        torch.manual_seed(seed)
        auto = UdopForConditionalGeneration if self.kind == "udop" else AutoModelForImageTextToText if self.kind in IMAGES else AutoModelForSpeechSeq2Seq if self.kind in SOUNDS else AutoModelForSeq2SeqLM
        config = AutoConfig.for_model(self.kind, **copy.deepcopy({**self.settings, **settings}))
        model = (auto._from_config if self.kind == "udop" else auto.from_config)(config, attn_implementation=attn).float().eval()
        model.set_output_embeddings(copy.deepcopy(model.get_output_embeddings()))  # tied, it would repeat its last token
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:  # the decoder's last token has to count for more than the source, or the text is stuck
                    much, little = ("embed", "shared", "relative"), ("encoder_attn.out_proj", "EncDecAttention.o", "SelfAttention.o", "self_attn.out_proj", "attention.output.dense", "attn.c_proj", "attention.c_proj")
                    factor = 4 if any(part in name for part in much) else 0.4 if any(part in name for part in little) else 1
                    parameter.normal_(0.0, spread * factor)
        model.generation_config.do_sample = False
        return model


def composed(encoder: dict, decoder: dict) -> dict:
    """Settings of a model that is composed of two."""
    return dict(encoder=encoder, decoder=decoder, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2)


FAMILIES = [
    Family("T5", "t5", _T5, "relative bias"),
    Family("T5 v1.1 (gated)", "t5", {**_T5, "feed_forward_proj": "gated-gelu"}, "relative bias"),
    Family("BART", "bart", _BART),
    Family("Whisper", "whisper", _WHISPER),
    Family("Marian", "marian", _BART, "sinusoidal"),
    Family("Pegasus", "pegasus", _BART, "sinusoidal"),
    # more of the same kinds
    Family("Blenderbot", "blenderbot", _BART),
    Family("Blenderbot (small)", "blenderbot-small", _BART),
    Family("LED", "led", _LED),
    Family("LongT5", "longt5", _T5, "relative bias"),
    Family("M2M100", "m2m_100", _BART, "sinusoidal"),
    Family("mBART", "mbart", _BART),
    Family("mT5", "mt5", _T5, "relative bias"),
    Family("MVP", "mvp", _BART),
    Family("Pegasus-X", "pegasus_x", _BART, "sinusoidal"),
    Family("PLBart", "plbart", _BART),
    Family("UMT5", "umt5", _T5, "relative bias"),
    Family("BigBird-Pegasus", "bigbird_pegasus", dict(_BART, block_size=2, num_random_blocks=1)),
    Family("Switch Transformers", "switch_transformers", dict(_T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), "relative bias"),
    Family("SeamlessM4T", "seamless_m4t", _SEAMLESS, "sinusoidal"),
    Family("SeamlessM4T v2", "seamless_m4t_v2", _SEAMLESS, "sinusoidal"),
    Family("T5Gemma", "t5gemma", dict(_UNTIED, encoder=_GEMMA, decoder=_GEMMA), "rotary"),
    Family("T5Gemma 2", "t5gemma2", dict(_UNTIED, encoder=dict(text_config=_GEMMA, vision_config=_EYES, mm_tokens_per_image=4, vocab_size=VOCAB), decoder=_GEMMA), "rotary"),
    Family("Speech2Text", "speech_to_text", dict(_BART, conv_channels=16, input_feat_per_channel=8, max_source_positions=80, max_target_positions=128), "sinusoidal"),
    Family("SpeechT5", "speecht5", _SPEECHT5, "sinusoidal"),
    Family("Moonshine", "moonshine", _MOONSHINE, "rotary"),
    Family("Moonshine (streaming)", "moonshine_streaming", dict(_STREAMING, encoder_config=dict(_ASR, sliding_windows=[[4, 2], [4, 0]])), "rotary"),
    Family("Cohere ASR", "cohere_asr", dict(_UNTIED, **_ASR, encoder_config=_CONFORMER)),
    Family("Canary", "canary", dict(_UNTIED, decoder_config=dict(_ASR, vocab_size=VOCAB, pad_token_id=0, eos_token_id=None), encoder_config=_CONFORMER)),
    Family("TrOCR", "vision-encoder-decoder", composed(_VIT, _TROCR)),
    Family("TrOCR (sinusoidal)", "vision-encoder-decoder", composed(_VIT, dict(_TROCR, use_learned_position_embeddings=False)), "sinusoidal"),
    Family("Donut", "vision-encoder-decoder", composed(dict(_VIT, hidden_size=48), _MBART)),
    Family("ViT and GPT-2", "vision-encoder-decoder", composed(_VIT, _GPT2)),
    Family("ViT and BERT", "vision-encoder-decoder", composed(_VIT, dict(_BERT, **_READS))),
    Family("ViT and RoBERTa", "vision-encoder-decoder", composed(_VIT, dict(_BERT, **_READS, model_type="roberta"))),
    Family("Pix2Struct", "pix2struct", _PIX2STRUCT, "relative bias"),
    Family("UDOP", "udop", dict(_T5, image_size=32, patch_size=16, max_2d_position_embeddings=64), "relative bias"),
    Family("Florence-2", "florence2", _FLORENCE),
    Family("BERT twice", "encoder-decoder", composed(_BERT, dict(_BERT, **_READS))),
    Family("Wav2Vec2 and mBART", "speech-encoder-decoder", composed(_WAV2VEC, _MBART)),
    Family("Wav2Vec2 and GPT-2", "speech-encoder-decoder", composed(_WAV2VEC, _GPT2)),
]
TOO_OLD = {"cohere_asr"} if CACHE == "past_key_values" else set()  # before transformers 5.24, nan where an encoder is given padding
FAMILIES = [line for line in FAMILIES if line.kind in CONFIG_MAPPING and line.kind not in TOO_OLD]  # of the installed transformers
SOUNDS = {"whisper": ("input_features", 8, 40), "speech_to_text": ("input_features", 60, 8), "speecht5": ("input_values", 4000), "moonshine": ("input_values", 4000),
          "moonshine_streaming": ("input_values", 1600), "cohere_asr": ("input_features", 60, 16), "canary": ("input_features", 60, 16),
          "speech-encoder-decoder": ("input_values", 4000)}  # what is heard, and the shape of a row
IMAGES = {"vision-encoder-decoder": ("pixel_values", 3, 16, 16), "pix2struct": (), "florence2": ()}
REQUIRED = 6
REFUSED = [("FSMT", "fsmt", dict(_BART, langs=["a", "b"], src_vocab_size=VOCAB, tgt_vocab_size=VOCAB)),
           ("NLLB-MoE", "nllb-moe", dict(_BART, num_experts=2)),
           ("ProphetNet", "prophetnet", dict(_UNTIED, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, num_decoder_attention_heads=4)),
           ("Pop2Piano", "pop2piano", _T5)]  # fmt: skip
MAX_NEW = 24
DRAFTS = {
    "itself": ModelDraft,
    "adversarial": lambda target: ModelDraft(contrary(target)),
    "perturbed": lambda target: ModelDraft(perturbed(target, 0.03)),
    "lookup": lambda target: None,
}


def family(name: str) -> Family:
    return next(line for line in FAMILIES if line.name == name)


def refused(kind: str, **settings):
    """The model of a line of REFUSED."""
    auto = AutoModelForSpeechSeq2Seq if kind == "pop2piano" else AutoModelForSeq2SeqLM
    return auto.from_config(AutoConfig.for_model(kind, **settings))


def source(kind: str = "t5", seed: int = 0, length: int = 12) -> dict[str, torch.Tensor]:
    """What an encoder of that kind reads: one row of token ids without 0 to 2, or features."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "udop":
        boxes = torch.rand((1, length, 4), generator=generator).sort(-1).values
        return {**source(seed=seed, length=length), "bbox": boxes, "pixel_values": torch.randn((1, 3, 32, 32), generator=generator)}
    if kind == "florence2":
        text = torch.cat([torch.full((1, 17), 60), torch.randint(3, 60, (1, length), generator=generator)], dim=1)  # an image is 17 tokens
        return {"input_ids": text, "pixel_values": torch.randn((1, 3, 32, 32), generator=generator)}
    if kind == "pix2struct":
        places = torch.arange(14)
        patches = torch.randn((1, 14, 12), generator=generator)
        return {"flattened_patches": torch.cat([torch.stack([places // 4, places % 4], -1)[None].float(), patches], -1), "attention_mask": torch.ones(1, 14, dtype=torch.long)}
    if kind in SOUNDS or kind in IMAGES:
        name, *shape = (SOUNDS | IMAGES)[kind]
        return {name: torch.randn((1, *shape), generator=generator)}
    return {"input_ids": torch.randint(3, VOCAB, (1, length), generator=generator)}


def sources(kind: str = "t5", seed: int = 0, rows: int = 3) -> dict[str, torch.Tensor]:
    """Several rows of them, of unequal lengths, with padding (but for Whisper, which hears it)."""
    parts = [source(kind, seed + i, 12 - 2 * i) for i in range(rows)]
    if kind in SOUNDS:
        (name, *shape), mask = SOUNDS[kind], torch.ones((rows, SOUNDS[kind][1]), dtype=torch.long)
        for row in range(rows):
            mask[row, shape[0] - row * shape[0] // 8 :] = 0
        heard = {name: torch.cat([part[name] for part in parts])}
        return heard if kind == "whisper" else heard | {"attention_mask": mask}
    if kind in IMAGES and kind != "florence2":
        seen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for row, mask in enumerate(seen.get("attention_mask", ())):
            mask[len(mask) - row :] = 0
        return seen
    texts = [part["input_ids"][0] for part in parts]
    pad = torch.nn.utils.rnn.pad_sequence
    beside = {name: pad([part[name][0] for part in parts], batch_first=True) for name in ("bbox", "pixel_values") if name in parts[0]}
    return beside | {"input_ids": pad(texts, batch_first=True), "attention_mask": pad([torch.ones_like(text) for text in texts], batch_first=True)}


def plain(model, inputs: dict, **options) -> torch.Tensor:
    """The reference: transformers' own generate, int64 [1, decoder tokens]."""
    options = {"max_new_tokens": MAX_NEW, "do_sample": False, "num_beams": 1, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options).sequences


def speculate(model, inputs: dict, draft=None, k: int | str = 4, seed: int | None = None, **options):
    """Ours; returns the output object."""
    options = {"max_new_tokens": MAX_NEW, "do_sample": False, "num_beams": 1, "return_dict_in_generate": True, **options}
    return integration.generate(model, **inputs, assistant_model=draft, speculative={"seed": seed}, num_assistant_tokens=k, **options)


@lru_cache(maxsize=None)
def seeds(name: str, n: int, attn: str = "eager") -> list[int]:
    """The first n seeds with which the family's text is not stuck."""
    line, found = family(name), []
    for seed in range(60):
        if len(found) < n and len(set(plain(line.model(attn, seed), source(line.kind, seed))[0].tolist())) >= 6:
            found.append(seed)
    return found


def tied(model, inputs: dict) -> bool:
    """Whether the two likeliest tokens of some place are one for float32: which of them is ahead is then a matter of the pass's width."""
    logits = model.generate(**inputs, max_new_tokens=MAX_NEW, do_sample=False, num_beams=1, return_dict_in_generate=True, output_logits=True).logits
    best = torch.stack(logits).topk(2).values
    return bool((best[..., 0] - best[..., 1] < 1e-5).any())


def outcome(line: Family, attn: str, n: int = 1, ks=(4,), rows: int = 1) -> str:
    """"exact" if every kind of draft leaves n greedy texts, or batches of `rows`, as plain generate writes them and is accepted as often as it has to be;
    else what is wrong."""
    accepted = 0
    for seed in seeds(line.name, n, attn):
        model, inputs = line.model(attn, seed), source(line.kind, seed) if rows == 1 else sources(line.kind, seed, rows)
        text = plain(model, inputs)
        if tied(model, inputs):
            continue
        for name, make in DRAFTS.items():
            for k in ks:
                out = speculate(model, inputs, make(model), k)
                if not torch.equal(out.sequences, text):
                    return f"{name} draft, seed {seed}, k {k}: {out.sequences.tolist()} instead of {text.tolist()}"
                rate = out.speculation.acceptance_rate
                if rate != {"itself": 1.0, "adversarial": 0.0}.get(name, rate):
                    return f"{name} draft, seed {seed}, k {k}: acceptance rate {rate}"
                accepted += out.speculation.accepted if name in ("perturbed", "lookup") else 0
    return "exact" if accepted else "only the target itself was ever right, so little was shown"
