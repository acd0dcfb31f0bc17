"""The names that a config or a command line may use. A new draft or rule is one line here.

Each entry is "module:Class" under `hf_specdec`; nothing is imported before it is asked for, and nothing outside this
table can be asked for by name.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

DRAFTS = {
    "cascade": "drafts.cascade:CascadeDraft",
    "compressed": "drafts.compressed:CompressedDraft",
    "dflash": "drafts.dflash:DFlashDraft",
    "early_exit": "drafts.early_exit:EarlyExitDraft",
    "feature": "drafts.feature:FeatureDraft",
    "feature_parallel": "drafts.feature_parallel:ParallelFeatureDraft",
    "feature_tree": "drafts.feature_tree:FeatureTreeDraft",
    "horizontal_cascade": "drafts.horizontal:HorizontalCascadeDraft",
    "jump_forward": "drafts.jump_forward:JumpForwardDraft",
    "lookahead": "drafts.lookahead:LookaheadDraft",
    "medusa": "drafts.medusa:MedusaDraft",
    "mixture": "drafts.mixture:MixtureDraft",
    "model": "drafts.model:ModelDraft",
    "model_tree": "drafts.model_tree:ModelTreeDraft",
    "ngram": "drafts.ngram:NGramDraft",
    "ngram_recycling": "drafts.ngram_recycling:NGramRecyclingDraft",
    "online": "drafts.online:OnlineDraft",
    "parallel": "drafts.parallel:ParallelDraft",
    "pass": "drafts.pass_draft:PassDraft",
    "prefixed": "drafts.prefixed:PrefixedDraft",
    "prompt_lookup": "drafts.prompt_lookup:PromptLookupDraft",
    "recycling": "drafts.recycling:RecyclingDraft",
    "retrieval": "drafts.retrieval:RetrievalDraft",
    "sequential": "drafts.sequential:SequentialDraft",
    "shared_kv": "drafts.shared_kv:SharedKVDraft",
    "suffix_automaton": "drafts.suffix_automaton:SuffixAutomatonDraft",
    "translated": "drafts.translated:TranslatedDraft",
    "uniform": "drafts.uniform:UniformDraft",
}

ACCEPTANCE = {
    "block": "acceptance.block:BlockVerification",
    "coupled": "acceptance.coupled:CoupledSampling",
    "greedy": "acceptance.greedy:GreedyMatching",
    "spectr": "acceptance.spectr:KSequentialSelection",
    "speculative_sampling": "acceptance.sampling:SpeculativeSampling",
    "threshold": "acceptance.threshold:ThresholdAcceptance",
    "typical": "acceptance.typical:TypicalAcceptance",
}

# of packages that the core does not import, for weights that a config names
LOADERS = {
    "compressed": "mx.draft:draft_of",
    "drafter": "training.drafter:load",
    "is_drafter": "training.drafter:is_drafter",
    "mx": "mx.config:MXConfig",
    "read": "mx.loading:read",
}

MTP = "mtp"  # in the place of a drafter's name: the prediction module of the target's own checkpoint
SHIPPED = Path(__file__).parent / "training" / "shipped"  # drafters that come with the package


def shipped() -> list[str]:
    """Names of the drafters that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/drafter.json"))


def load(table: dict[str, str], name: str, argument: str):
    """The class or function registered under `name`; ValueError naming `argument` and the known names otherwise."""
    if name not in table:
        raise ValueError(f"{argument}={name!r} is not known; choose one of {sorted(table)}.")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(f"{__package__}.{module}"), attribute)
