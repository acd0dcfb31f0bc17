"""How to make every registered draft for a test target. A draft that has a line in the registry and none here fails by name."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from hf_specdec.drafts import (
    CascadeDraft, CompressedDraft, EarlyExitDraft, HorizontalCascadeDraft, JumpForwardDraft, LookaheadDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramDraft,
    NGramRecyclingDraft, PromptLookupDraft, RecyclingDraft, RetrievalDraft, SuffixAutomatonDraft, TranslatedDraft, UniformDraft,
)
from hf_specdec.drafts.dflash import DFlashDraft
from hf_specdec.drafts.layout import Layout, Markov, Refiner, Selector
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_parallel import ParallelFeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.drafts.online import OnlineDraft
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.drafts.pass_draft import PassDraft
from hf_specdec.drafts.prefixed import PrefixedDraft
from hf_specdec.drafts.sequential import SequentialDraft
from hf_specdec.drafts.shared_kv import SharedKVDraft
from hf_specdec.training import build_drafter
from hf_specdec.training.heads import build as build_heads
from hf_specdec.training.hydra import HydraHeads, prefixed
from hf_specdec.training.look_ahead import build as build_look_ahead
from hf_specdec.training.mlp_speculator import MLPSpeculator
from hf_specdec.training.parallel import build as build_block
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree
from tests.helpers import TreeDraft, perturbed, word_tokenizer


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


def early_exit(target, share: bool = True):
    """All layers but the last; of a target with one layer, that one. `share` False: the layers of a copy, which is not the target."""
    return EarlyExitDraft(target if share else perturbed(target, 0.0), max(target.config.num_hidden_layers - 1, 1))


def translated(target):
    """A draft model whose tokenizer has the target's words in another order, and a few that are missing."""
    vocab = target.config.vocab_size
    return TranslatedDraft(perturbed(target, 0.1), word_tokenizer(range(vocab)), word_tokenizer([*range(1, vocab, 2), *range(0, vocab - 1, 2)]))


def medusa_heads(target, heads: int = 4):
    """Heads that say something of their own each."""
    made = build_heads(target, heads)
    torch.manual_seed(0)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    made.rates = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1], [0.2, 0.1]]
    return made


def block_drafter(target, tokens: int = 4, ids=None):
    """A block drafter whose places say something of their own each."""
    count = target.config.num_hidden_layers
    made = build_block(target, tokens, 2, tuple(dict.fromkeys((0, count))), 3, ids)
    torch.manual_seed(0)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    made.rates = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1], [0.2, 0.1]][:tokens]
    return made


def hydra_heads(target, heads: int = 4):
    """Heads that read the root and the drafted tokens."""
    like, config = target.get_input_embeddings().weight, target.config.get_text_config()
    torch.manual_seed(5)
    made = HydraHeads(heads, 2, like.shape[1], config.vocab_size, target.get_input_embeddings(), config.num_hidden_layers)
    return made.to(like.device, like.dtype).requires_grad_(False)


def prefixed_heads(target):
    """Such heads on a layer of attention, as Hydra++ has it."""
    torch.manual_seed(6)
    return PrefixedDraft(prefixed("the tests", hydra_heads(target), target), target)


def mlp_speculator(target, n: int = 4, **settings):
    """Random, of a width of its own."""
    like, config = target.get_input_embeddings().weight, target.config.get_text_config()
    torch.manual_seed(7)
    made = MLPSpeculator(n, like.shape[1], 12, config.vocab_size, config.num_hidden_layers, **settings)
    for part in made.ln:
        part.weight.data.fill_(1.0), part.bias.data.fill_(0.1)
    return made.to(like.device, like.dtype).requires_grad_(False)


def look_ahead(target, n: int = 3):
    """Look-ahead embeddings that differ."""
    made = build_look_ahead(target, n)
    torch.manual_seed(0)
    made.embeddings.data += 0.5 * torch.randn_like(made.embeddings)
    made.rates = [[1.0, 0.0], [0.4, 0.2], [0.3, 0.1], [0.2, 0.1]][: n + 1]
    return made


def assistant(model_type: str, spread: float = 0.3, **settings):
    """An assistant of transformers with random weights; skips where the version has none of the kind."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type](**settings)
    kind = AutoModel if model_type == "muse_glimmer_assistant" else AutoModelForCausalLM
    torch.manual_seed(0)
    made = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread)
    return made


def of_heads(target, kinds=("sliding_attention", "full_attention"), window: int = 8, **settings):
    """An assistant that reads keys and values as the target has them."""
    config = target.config.get_text_config()
    heads = dict(num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, global_head_dim=config.head_dim)
    text = dict(heads, model_type="gemma4_text", vocab_size=config.vocab_size, hidden_size=24, intermediate_size=32, num_hidden_layers=len(kinds), layer_types=list(kinds),
                sliding_window=window, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=len(kinds), pad_token_id=None, bos_token_id=None,
                eos_token_id=None)
    return assistant("gemma4_assistant", **{"text_config": text, "backbone_hidden_size": config.hidden_size, **settings})


class ReadsOneLayer(SharedKVDraft):
    """Of a target whose config names no types of layers, the last one stands for all."""

    def _layers(self, target):
        return dict.fromkeys(self.model.config.get_text_config().layer_types, target.config.get_text_config().num_hidden_layers - 1)


def masked_places(target, block: int = 5, window: int = 6, **settings):
    """An assistant that fills masked places from the states of the target's layers."""
    config = target.config.get_text_config()
    return assistant("muse_glimmer_assistant", **dict(
        hidden_size=config.hidden_size, intermediate_size=32, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, sliding_window=window, block_size=block, mask_token_id=1, target_layer_ids=list(range(config.num_hidden_layers)), bos_token_id=None, eos_token_id=None,
        pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4}) | settings)


def masked_text(target):
    """A feature drafter with masked places behind the text, as P-EAGLE has them."""
    model = feature_drafter(target)
    torch.manual_seed(4)
    model.mask_token, model.mask_states = 1, torch.randn(model.feature_fuse.weight.shape[1])
    return ParallelFeatureDraft(model, target)


def selecting(target) -> Layout:
    """As DFlash 2 has it: tokens are chosen one after another among each place's likeliest."""
    config = target.config.get_text_config()
    torch.manual_seed(8)
    selector = Selector(config.vocab_size, config.hidden_size, 5, min(6, config.vocab_size - 1)).requires_grad_(False)
    return Layout(frozenset({"sliding_attention"}), 5, 1.5, None, 0.8, 20.0, selector)


def stepping(target) -> Layout:
    """As DSpark has it: the first token at the root's place, each with a bias by the one before."""
    config = target.config.get_text_config()
    torch.manual_seed(9)
    return Layout(selector=Markov(config.vocab_size, config.hidden_size, 5, "rnn").requires_grad_(False), first=0)


def refining(target) -> Layout:
    """As XPress has it: a token's bias is mixed of what the places before it say."""
    config = target.config.get_text_config()
    torch.manual_seed(7)
    refiner = Refiner(config.vocab_size, config.hidden_size, 5, 7, masked_places(target).config.block_size).requires_grad_(False)
    refiner.mix_l.normal_()
    return Layout(selector=refiner, from_root=True)


# name in the registry -> target -> draft
BUILDERS = {
    "cascade": lambda target: CascadeDraft(perturbed(target, 0.1), PromptLookupDraft()),
    "compressed": lambda target: CompressedDraft(target, perturbed(target, 0.1)),
    "dflash": lambda target: DFlashDraft(masked_places(target)),
    "early_exit": early_exit,
    "feature": lambda target: FeatureDraft(feature_drafter(target), target),
    "feature_parallel": masked_text,
    "feature_tree": lambda target: FeatureTreeDraft(feature_drafter(target), target, (4, 2, 1), "independent"),
    "horizontal_cascade": lambda target: HorizontalCascadeDraft(ModelDraft(perturbed(target, 0.1)), PromptLookupDraft()),
    "jump_forward": lambda target: JumpForwardDraft(),
    "lookahead": lambda target: LookaheadDraft(),
    "mixture": lambda target: MixtureDraft(branches=1),
    "medusa": lambda target: MedusaDraft(medusa_heads(target), target),
    "model": lambda target: ModelDraft(perturbed(target, 0.1)),
    "model_tree": lambda target: ModelTreeDraft(perturbed(target, 0.1), siblings="independent"),
    "ngram": ngram,
    "ngram_recycling": lambda target: NGramRecyclingDraft(branches=1),
    "online": lambda target: OnlineDraft(ModelDraft(perturbed(target, 0.1)), target, every=3, lr=1e-2),
    "parallel": lambda target: ParallelDraft(block_drafter(target), target),
    "pass": lambda target: PassDraft(look_ahead(target), target),
    "prefixed": prefixed_heads,
    "prompt_lookup": lambda target: PromptLookupDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "retrieval": lambda target: RetrievalDraft.from_tokens(corpus(target.config.vocab_size), target.config.vocab_size, branches=1, min_match=1),
    "sequential": lambda target: SequentialDraft(hydra_heads(target), target),
    "shared_kv": lambda target: ReadsOneLayer(of_heads(target)),
    "suffix_automaton": lambda target: SuffixAutomatonDraft(),
    "translated": translated,
    "uniform": lambda target: UniformDraft(),
}

# the same, and what else a proposal can look like
VARIANTS = {
    **BUILDERS,
    "cascade, of models, twice": lambda target: CascadeDraft(
        perturbed(target, 0.05), CascadeDraft(perturbed(target, 0.1), ModelDraft(perturbed(target, 0.2)), tokens=2), tokens=3),
    "cascade, over a tree that is drawn": lambda target: CascadeDraft(perturbed(target, 0.1), TreeDraft()),
    "compressed, a cache of its own": lambda target: CompressedDraft(perturbed(target, 0.0), perturbed(target, 0.1)),
    "dflash, markov": lambda target: DFlashDraft(masked_places(target), layout=stepping(target)),
    "dflash, refined": lambda target: DFlashDraft(masked_places(target), layout=refining(target)),
    "dflash, selected": lambda target: DFlashDraft(masked_places(target), layout=selecting(target)),
    "dflash, tree": lambda target: DFlashDraft(masked_places(target), tree=(3, 2)),
    "early_exit, a cache of its own": lambda target: early_exit(target, share=False),
    "horizontal_cascade, drawn, then drawn": lambda target: HorizontalCascadeDraft(
        ngram(target, sample=True), ModelDraft(perturbed(target, 0.1)), after=1),
    "mixture, tree": lambda target: MixtureDraft(),
    "ngram_recycling, tree": lambda target: NGramRecyclingDraft(read_prompt=True),
    "retrieval, tree": lambda target: RetrievalDraft.from_tokens(corpus(target.config.vocab_size), target.config.vocab_size, min_match=1),
    "mixture, a model in the tree": lambda target: MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target, 0.1)), "recycling"], tokens=2),
    "mixture, one chosen": lambda target: MixtureDraft([SuffixAutomatonDraft(), ModelDraft(perturbed(target, 0.1))], mode="choose"),
    "model, in bfloat16": lambda target: ModelDraft(perturbed(target, 0.1).to(torch.bfloat16)),
    "model, the target itself": lambda target: ModelDraft(target),
    "model, unrelated": lambda target: ModelDraft(perturbed(target, 3.0)),
    "model_tree, without replacement": lambda target: ModelTreeDraft(perturbed(target, 0.1), Tree((0, 0, 1, 1, 2, 0, 3))),
    "model_tree, point masses": lambda target: ModelTreeDraft(perturbed(target, 0.1), (3, 2), siblings="likeliest"),
    "model_tree, by confidence": lambda target: ModelTreeDraft(perturbed(target, 0.1), DynamicTree(nodes=7, width=2, branches=3)),
    "feature_tree, by confidence": lambda target: FeatureTreeDraft(feature_drafter(target), target),
    "feature_tree, without replacement": lambda target: FeatureTreeDraft(feature_drafter(target), target, Tree((0, 0, 1, 1, 2, 0, 3)), "distinct"),
    "medusa, tree by rates": lambda target: MedusaDraft(medusa_heads(target), target, 7),
    "medusa, by confidence": lambda target: MedusaDraft(medusa_heads(target), target, DynamicTree(nodes=7, width=2, branches=3)),
    "online, a feature tree": lambda target: OnlineDraft(
        FeatureTreeDraft(feature_drafter(target), target, (3, 2), "independent"), target, every=2, lr=1e-2),
    "parallel, a pruned head": lambda target: ParallelDraft(block_drafter(target, ids=torch.arange(0, target.config.vocab_size, 2)), target),
    "parallel, tree": lambda target: ParallelDraft(block_drafter(target), target, (3, 2)),
    "pass, tree": lambda target: PassDraft(look_ahead(target), target, 7),
    "sequential, an MLP speculator": lambda target: SequentialDraft(mlp_speculator(target, tied=True, scaled=True), target),
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
