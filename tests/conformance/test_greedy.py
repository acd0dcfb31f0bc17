"""Greedy equality in float32, counted: (architecture, seed, draft, K, batch) cases against plain batch-1 generate, 0 mismatches."""

import pytest

import hf_specdec
from hf_specdec.drafts import CascadeDraft, ModelDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from tests.architectures import FAMILIES
from tests.conformance.builders import early_exit, ngram
from tests.helpers import FULL, KnowingTreeDraft, build, contrary, generated, perturbed, plain, prompts, repetitive, speculate

NAMES = ["Llama", "Mistral", "GPT-2", "Gemma 3 (text)", "Qwen3-MoE", "BLOOM", "GPT-NeoX", "Falcon (rotary)", "OPT", "Phi-3 (sliding)",
         "Gemma 2", "Llama 4 (text, chunked)", "GPT-BigCode (one K/V head)", "Cohere2"]
SEEDS = (0, 1, 2, 3)
KS = (1, 4, 7)
DRAFTS = {
    "itself": ModelDraft,
    "adversarial": lambda target: ModelDraft(contrary(target)),
    "perturbed": lambda target: ModelDraft(perturbed(target, 0.05)),
    "small and random": lambda target: ModelDraft(build("llama", 9, vocab_size=target.config.vocab_size, hidden_size=16, intermediate_size=16,
                                                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)),
    "lookup": lambda target: PromptLookupDraft(),
    "ngram": ngram,
    "uniform": lambda target: UniformDraft(),
    "automaton": lambda target: SuffixAutomatonDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "early exit": early_exit,
    "cascade": lambda target: CascadeDraft(perturbed(target, 0.05), PromptLookupDraft()),
}
BATCHES = ([0], [0, 1, 2])
LINES = [family for family in FAMILIES if family.name in NAMES]
TABLE = [(family, seed) for seed in SEEDS for family in LINES]
SHARE = [(family, 0) for family in LINES[:2]]
NEW = 24 if FULL else 14
ALL_BUT_TREES = len(DRAFTS) * len(KS) * len(BATCHES)


def mismatches(family, seed: int) -> tuple[int, list, dict]:
    """Cases run, those that differ from plain generate, and the acceptance rate per draft."""
    target, rows = family.model("eager", seed), repetitive(13, seed=seed) + prompts(2, 7, seed=seed + 9)
    texts, run, wrong, rates = plain(target, rows, max_new_tokens=NEW), 0, [], {}
    for name, make in DRAFTS.items():
        draft, accepted, proposed = make(target), 0, 0
        for batch in BATCHES if family.ragged else BATCHES[:1]:
            for k in KS:
                out = speculate(target, [rows[i] for i in batch], draft, k, max_new_tokens=NEW)
                accepted, proposed, run = accepted + out.speculation.accepted, proposed + out.speculation.proposed, run + 1
                if generated(out, [rows[i] for i in batch]) != [texts[i] for i in batch]:
                    wrong.append((family.name, seed, name, k, len(batch)))
        rates[name] = accepted / max(proposed, 1)
    hf_specdec.disable(target)
    return run, wrong, rates


def test_the_full_table_has_2000_cases():
    assert sum(ALL_BUT_TREES if family.ragged else ALL_BUT_TREES // 2 for family, _ in TABLE) >= 2_000


@pytest.mark.filterwarnings("ignore:assistant_model")
@pytest.mark.parametrize(("family", "seed"), TABLE if FULL else SHARE, ids=lambda value: getattr(value, "name", value))
def test_every_draft_and_k_gives_plain_generates_text(family, seed):
    run, wrong, rates = mismatches(family, seed)
    assert run == ALL_BUT_TREES if family.ragged else ALL_BUT_TREES // 2
    assert wrong == []
    assert rates["itself"] == 1.0
    assert rates["adversarial"] == 0.0
    assert rates["perturbed"] > 0.05


TREES = {"binary": (0, 0, 1, 1, 2, 2), "bushy": (0, 0, 0, 1, 1, 2, 2, 5, 5, 7), "a chain and a stray": (0, 1, 2, 0), "siblings only": (0, 0, 0, 0)}


@pytest.mark.share(2)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", NAMES if FULL else ["Llama", "Llama 4 (text, chunked)"])
def test_every_tree_gives_plain_generates_text(name, rows, parents):
    family = next(line for line in FAMILIES if line.name == name)
    if not family.trees:
        pytest.skip(f"{name} makes its own masks and takes no tree; tests/test_architectures.py tests the refusal")
    target, batch = family.model("eager"), [(repetitive(13) + prompts(2, 7, seed=9))[i] for i in rows]
    texts = plain(target, batch, max_new_tokens=NEW)
    draft = KnowingTreeDraft([row + text for row, text in zip(batch, texts)], parents)
    out = speculate(target, batch, draft, k=len(parents), max_new_tokens=NEW)
    assert generated(out, batch) == texts
    assert out.speculation.accepted > 0
