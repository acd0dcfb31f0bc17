"""transformers' quantisation method "mx", known to it once it and `hf_specdec.enable` are both there: a folder of MX weights is then read as one.

What transformers gets is a stand-in for `mx.MXConfig`, which comes when the first such folder is read."""

from __future__ import annotations

import sys
from types import ModuleType

METHOD, QUANTISERS = "mx", "transformers.quantizers.auto"


def announce() -> None:
    """Have "mx" registered, if transformers has loaded its quantisers."""
    if QUANTISERS in sys.modules:
        _register(sys.modules[QUANTISERS])


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
