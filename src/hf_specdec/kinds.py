"""What is known of model types by their names: those of an encoder and a decoder that work, and those whose passes are others than they seem."""

from __future__ import annotations

OWN_MASK = {"bloom", "mpt", "gpt_neo"}
OWN_WAYS = {"blt": "groups its text into patches anew in every pass",
            "xlm": "gives one next token per pass, at a mask token that it puts behind the text",
            "xlnet": "gives one next token per pass, before which its whole text looks at itself in both directions",
            "reformer": "goes on from what it keeps one token at a time, and hashes a whole text by all that is in it (LSH attention)",
            "prophetnet": "reads one token at a time from a cache, and gives a token other logits among several",
            "fsmt": "masks nothing in a pass with a cache, so that a token would see those drafted behind it",
            "idefics": "is shown its images anew with every token",
            **dict.fromkeys(("kyutai_speech_to_text", "voxtral_realtime"), "hears another piece of the sound with every token"),
            **dict.fromkeys(("kosmos-2.5", "kosmos_2_text_model"), "counts positions by what is in its cache, padding included, from behind the number of its padding token"),
            "nllb-moe": "routes tokens by a mask that it reads across rows, and by how many a pass has (moe_eval_capacity_token_fraction)",
            **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), "writes several codebooks by a generate of its own")}
OWN_WAYS_BEFORE = {  # transformers 5.24
    **dict.fromkeys(("big_bird", "doge", "megatron-bert", "rembert", "roformer"), "may read its prompt in both directions before transformers 5.24"),
    "cpmant": "puts a prompt of its own before every pass",
    "moshi": "keeps its window by a cache that forgets",
    "git": "may make its positions itself before transformers 5.24",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), "keeps keys of its own beside the cache before transformers 5.24"),
}
BOTH_WAYS = {"paligemma"}  # read a prompt that nothing is cached of in both directions, at least where its token_type_ids are 0, and what follows as others do
ONE_MASK = {"paligemma"}  # take no masks by types of layers: where there are several, the model makes them itself
HANDS_ON = {"moss_transcribe_diarize", "vibevoice_asr"}  # their text model's positions, among arguments that they do not name
OWN_MASK_BEFORE_SDPA = {"ctrl"}  # takes a 4-D mask since it has sdpa attention; transformers 5.10 reads a 2-D one only
COMPOSED = frozenset({"encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"})  # of an encoder and a decoder that are models by themselves
READ_BESIDE = {"florence2": {"pixel_values"}, "udop": {"bbox", "pixel_values", "visual_bbox"}}  # what encoders read beside a text
READ_BEFORE = {"florence2"}  # by the model, in front of its encoder
ENCODER_DECODERS = COMPOSED | frozenset(
    "bart bigbird_pegasus blenderbot blenderbot-small canary cohere_asr florence2 led longt5 m2m_100 marian mbart moonshine moonshine_streaming mt5 mvp pegasus "
    "pegasus_x pix2struct plbart seamless_m4t seamless_m4t_v2 speech_to_text speecht5 switch_transformers t5 t5gemma t5gemma2 udop umt5 whisper".split())
GO_ON = frozenset(  # from a state over several tokens as they do token by token
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 nemotron_h "
    "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma zamba zamba2 zaya".split())
WRITES_LIKE = {  # where nothing but text has positions
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3", "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "glm_ocr_text": "glm4", "granite_docling_text": "granite", "granite4_vision_text": "granite", "molmo2_text": "qwen3",
    "emu3_text_model": "llama", "paddleocr_vl_text": "llama", "hunyuan_vl_text": "hunyuan_v1_dense"}
HARD_CODED = {"glm_ocr_text": {"attention_bias": False}, "qwen3_vl_moe_text": {"norm_topk_prob": True}, "qwen3_omni_moe_text": {"norm_topk_prob": True}}  # whatever the config says
GUIDED_OTHERWISE = frozenset(  # whose passes that guide plain generate() read a text otherwise than its others: count positions otherwise, or lose the cache, its states or the mask
    "bamba camembert data2vec-text falcon_mamba granite4_vision mamba recurrent_gemma roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split())
COUNTS_BY_MASK = {"opt"}  # where it is given no positions, others count padding, too
LOOKS_AT_PADDING = {"git", "roformer"}  # where they are given no positions
