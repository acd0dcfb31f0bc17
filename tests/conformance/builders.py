"""How to make every registered draft for a test target. A draft that has a line in the registry and none here fails by name."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts import ModelDraft, ModelTreeDraft, NGramDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.training import build_drafter
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree
from tests.helpers import TreeDraft, perturbed


def corpus(vocab: int, seed: int = 0) -> list[list[int]]:
    """Documents of random tokens, long enough to know every pair and many triples."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (40 * vocab,), generator=generator).tolist() for _ in range(3)]


def ngram(target, **options):
    vocab = target.config.vocab_size
    return NGramDraft.from_tokens(corpus(vocab), order=3, vocab_size=vocab, min_order=1, **options)


def feature_drafter(target):
    """The target's last layer on the states of its first and last: right some of the time."""
    count = target.config.num_hidden_layers
    draft = build_drafter(target, [count - 1], None, (0, count))
    torch.manual_seed(0)
    for linear in (draft.feature_fuse, draft.feature_join):
        linear.weight.data += 0.1 * torch.randn_like(linear.weight)
    return draft


# name in the registry -> target -> draft
BUILDERS = {
    "feature": lambda target: FeatureDraft(feature_drafter(target), target),
    "feature_tree": lambda target: FeatureTreeDraft(feature_drafter(target), target, (4, 2, 1), "independent"),
    "model": lambda target: ModelDraft(perturbed(target, 0.1)),
    "model_tree": lambda target: ModelTreeDraft(perturbed(target, 0.1), siblings="independent"),
    "ngram": ngram,
    "prompt_lookup": lambda target: PromptLookupDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "suffix_automaton": lambda target: SuffixAutomatonDraft(),
    "uniform": lambda target: UniformDraft(),
}

# the same, and what else a proposal can look like
VARIANTS = {
    **BUILDERS,
    "model, in bfloat16": lambda target: ModelDraft(perturbed(target, 0.1).to(torch.bfloat16)),
    "model, the target itself": lambda target: ModelDraft(target),
    "model, unrelated": lambda target: ModelDraft(perturbed(target, 3.0)),
    "model_tree, without replacement": lambda target: ModelTreeDraft(perturbed(target, 0.1), Tree((0, 0, 1, 1, 2, 0, 3))),
    "model_tree, point masses": lambda target: ModelTreeDraft(perturbed(target, 0.1), (3, 2), siblings="likeliest"),
    "model_tree, by confidence": lambda target: ModelTreeDraft(perturbed(target, 0.1), DynamicTree(nodes=7, width=2, branches=3)),
    "feature_tree, by confidence": lambda target: FeatureTreeDraft(feature_drafter(target), target),
    "feature_tree, without replacement": lambda target: FeatureTreeDraft(feature_drafter(target), target, Tree((0, 0, 1, 1, 2, 0, 3)), "distinct"),
    "ngram, drawn": lambda target: ngram(target, sample=True),
    "recycling, tree": lambda target: RecyclingDraft(branches=3),
    "suffix_automaton, tree and texts": lambda target: SuffixAutomatonDraft(corpus(target.config.vocab_size), branches=3),
    "tree": lambda target: TreeDraft(),
    "tree, with replacement": lambda target: TreeDraft(replacement=True),
    "tree, point masses": lambda target: TreeDraft(point_mass=True),
    "tree, wide": lambda target: TreeDraft((0, 0, 0, 1, 2, 3)),
}


def make(name: str, target, builders=BUILDERS):
    if name not in builders:
        pytest.fail(f"draft {name!r} is in the registry and has no builder; add one to tests/conformance/builders.py.")
    return builders[name](target)
