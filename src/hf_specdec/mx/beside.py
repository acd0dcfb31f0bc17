"""What a model with MX layers on a CPU gets beside them: attention over a few tokens, RMS norms and recurrences by kernels, routers filled up; and how it loses that again."""

from __future__ import annotations

from torch import nn

from .attention import use_for_few, use_own_attention
from .beneath import use_own_classes
from .norms import use_kernel_norms
from .recurrences import use_kernel_recurrences
from .routers import use_steady_routers


def use_kernels(model: nn.Module) -> None:
    use_for_few(model)
    use_kernel_norms(model)
    use_kernel_recurrences(model)
    use_steady_routers(model)


def use_none(model: nn.Module) -> None:
    """Undo `use_kernels`."""
    use_own_attention(model)
    use_own_classes(model)
