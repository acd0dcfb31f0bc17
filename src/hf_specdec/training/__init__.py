"""Training a draft for a target: prompts, the target's own answers, a draft made of the target's parts, losses, a resumable run.

    from hf_specdec import training
    training.prepare("data", model, tokenizer, tokens=1_000_000)          # the target writes, shard after shard
    training.train(model, tokenizer, "data", "drafter", training.RunConfig(loss="forward_kl"))
    draft = training.load_drafter("drafter", target)                      # goes into assistant_model

or `hf-specdec train`. Nothing in the decoding path imports this package.
"""

from .feature_trainer import FeatureRunConfig, FeatureTrainer
from .drafter import build as build_drafter
from .drafter import load as load_drafter
from .losses import LOSSES
from .pipeline import prepare, train
from .trainer import RunConfig, Trainer

__all__ = ["LOSSES", "FeatureRunConfig", "FeatureTrainer", "RunConfig", "Trainer", "build_drafter", "load_drafter", "prepare", "train"]
