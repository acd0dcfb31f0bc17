"""transformers' quantisation method "mx", known from `import hf_specdec` on: a folder of MX weights is then read as one, whoever reads it.

Nothing heavy is imported for that. What transformers gets is a stand-in for `mx.MXConfig`, which comes when the first such folder is read; and it
gets it when it loads its own quantisers, where it has not yet."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

METHOD, QUANTISERS = "mx", "transformers.quantizers.auto"


class _Finder:
    """Finds transformers' quantisers as they are found anyway, and has the stand-in registered once they have run."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == QUANTISERS else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = run_and_register
        return spec


def announce() -> None:
    """Have "mx" registered now, or as soon as transformers has something to register it with."""
    if QUANTISERS in sys.modules:
        _register(sys.modules[QUANTISERS])
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def make_way() -> None:
    """For the real config: take the stand-in out."""
    known = sys.modules[QUANTISERS].AUTO_QUANTIZATION_CONFIG_MAPPING
    if getattr(known.get(METHOD), "stands_in", False):
        del known[METHOD]


def _register(quantisers: ModuleType) -> None:
    class MXConfig(quantisers.QuantizationConfigMixin):
        """Stands for `hf_specdec.mx.MXConfig`."""

        stands_in = True

        @classmethod
        def from_dict(cls, values, **options):
            from .registry import LOADERS, load

            return load(LOADERS, "mx", "quant_method").from_dict(values, **options)

    if METHOD not in quantisers.AUTO_QUANTIZATION_CONFIG_MAPPING:
        quantisers.register_quantization_config(METHOD)(MXConfig)
