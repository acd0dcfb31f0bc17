"""Modules that get a class of ours beneath their own: they keep name, parameters and hooks, and copies and pickles make the class again where kernels are."""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from .kernels import cpu


class Beneath:
    """mx_own: the module's own class; mx_more: what else the class beneath it holds, by names that no module has. mx_by_kernels: the module is as good as without
    where there are no kernels."""

    mx_by_kernels = True
    mx_own: type
    mx_more: tuple[tuple[str, object], ...]

    def __reduce_ex__(self, protocol):
        """Copies and pickles. A class above this one (a parametrisation's) sees to them itself."""
        if _is_lowest(self):
            return _blank, (self.mx_own, type(self).__bases__[0], self.mx_more), self.__dict__.copy()
        return super().__reduce_ex__(protocol)


@lru_cache(maxsize=None)
def beneath(own: type, base: type[Beneath], more: tuple[tuple[str, object], ...] = ()) -> type:
    """The class that stands for `own`, and does what `base` does."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__, "mx_own": own, "mx_more": more}
    return type(own.__name__, (base, own), names | dict(more))


def _blank(own: type, base: type[Beneath], more: tuple) -> nn.Module:
    made = own if base.mx_by_kernels and cpu.library() is None else beneath(own, base, more)
    return made.__new__(made)


def put_beneath(module: nn.Module, base: type[Beneath], **more) -> None:
    """Give a module the class that does what `base` does, and holds `more`."""
    module.__class__ = beneath(type(module), base, tuple(more.items()))


def use_own_classes(model: nn.Module) -> None:
    """Undo `put_beneath` in all of a model; a class that was put above ours since then stays."""
    for module in model.modules():
        if isinstance(module, Beneath) and _is_lowest(module):
            module.__class__ = module.mx_own


def _is_lowest(module: Beneath) -> bool:
    return type(module).__bases__[1:] == (module.mx_own,)
