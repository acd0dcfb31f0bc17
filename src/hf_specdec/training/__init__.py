"""Training a draft for a target: prompts, the target's own answers, a draft made of the target's parts, losses, a resumable run.

    from hf_specdec import training
    training.prepare("data", model, tokenizer, tokens=1_000_000)          # the target writes, shard after shard
    training.train(model, tokenizer, "data", "drafter", training.RunConfig(loss="forward_kl"))
    draft = training.load_drafter("drafter", target)                      # goes into assistant_model

or `hf-specdec train`. Nothing in the decoding path imports this package. The names are imported when they are first asked for; training
needs the extra "train", loading a drafter does not.
"""

from importlib import import_module

_HOMES = {
    "LOSSES": ".losses:LOSSES",
    "FeatureRunConfig": ".feature_trainer:FeatureRunConfig",
    "FeatureTrainer": ".feature_trainer:FeatureTrainer",
    "RunConfig": ".trainer:RunConfig",
    "Trainer": ".trainer:Trainer",
    "build_drafter": ".drafter:build",
    "load_drafter": ".drafter:load",
    "prepare": ".pipeline:prepare",
    "train": ".pipeline:train",
}
__all__ = ["LOSSES", "FeatureRunConfig", "FeatureTrainer", "RunConfig", "Trainer", "build_drafter", "load_drafter", "prepare", "train"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    globals()[name] = value = getattr(import_module(module, __name__), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
