"""The multi-token-prediction module that a checkpoint ships with (DeepSeek-V3, GLM-4-MoE and their kin; arXiv 2412.19437, section 2.2) as a feature
drafter. transformers leaves these weights out when it loads the model, and reads them with `MtpModel`, in the versions that have it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.feature import FeatureDraft
from ..hints import first_line
from ..registry import MTP
from . import shared


class Join(nn.Module):
    """The module's input [.., H] from a state and an embedding side by side [.., 2 H], each with a norm of its own."""

    def __init__(self, layer: nn.Module, states_first: bool):
        super().__init__()
        self.hnorm, self.enorm, self.eh_proj, self.states_first = layer.hnorm, layer.enorm, layer.eh_proj, states_first

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        state, embedded = both.chunk(2, dim=-1)
        parts = [self.hnorm(state), self.enorm(embedded)]
        return self.eh_proj(torch.cat(parts if self.states_first else parts[::-1], dim=-1))


def refuse(folder: Path, *_) -> FeatureDraft:
    """ValueError for a prediction module in a folder of its own, as speculators trains one further."""
    raise ValueError(f'{folder} holds a prediction module in a folder of its own (speculators_model_type "mtp"), which is not read. Pass load_drafter("{MTP}", target), which reads '
                     f"the one in the target's own checkpoint, where transformers knows it.")


def load(target: PreTrainedModel) -> FeatureDraft:
    """The first prediction module of the checkpoint that `target` was loaded from, which drafts token after token as a feature drafter does:
    it reads the target's last state and goes on from its own output. Embedding, head and dtype are the target's.

    Raises ValueError where the config speaks of none, where transformers has no `MtpModel`, where the checkpoint does not hold the weights,
    and for modules of another make (none or a shared final norm).
    """
    config = target.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        raise ValueError(f"{MTP}: the config of {type(target).__name__} speaks of no prediction module that transformers knows (num_mtp_layers).")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise ValueError(f"{MTP}: this version of transformers cannot read prediction modules; install 5.23 or later.") from None
    try:
        found = MtpModel.from_pretrained(target)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{MTP}: {config.name_or_path or 'the checkpoint'} holds no whole prediction module ({first_line(error)}).") from error
    if not found.use_post_norm or found.use_shared_post_norm:
        raise ValueError(f"{MTP}: the prediction module of {type(target).__name__} has no final norm of its own and does not map to the feature drafter.")
    one = copy.deepcopy(target.config.get_mtp_config())
    one.num_hidden_layers = one.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(one, name, None):
            setattr(one, name, getattr(one, name)[:1])
    draft, layer = shared.empty(target, one), found.layers[0].to(target.device, target.dtype)
    draft.base_model.layers[0], draft.base_model.norm = layer.mtp_block, layer.post_norm
    shared.share(draft, target, None)
    draft.feature_fuse = nn.Linear(1, 1, bias=False, device="meta")
    draft.feature_fuse.weight = nn.Parameter(torch.eye(config.hidden_size, dtype=target.dtype, device=target.device))
    draft.feature_join = Join(layer, bool(getattr(config, "mtp_hidden_states_first", False)))
    draft.reads, draft.scaled = (config.num_hidden_layers,), False
    return FeatureDraft(draft.eval(), target)
