"""MX weights: `nn.Linear` weights in OCP Microscaling formats, packed in memory and decompressed inside the product.

    from hf_specdec import mx
    mx.compress(model)                                        # in place, MXFP6 E2M3
    model.save_pretrained(folder)
    model = mx.load(AutoModelForCausalLM, folder)             # or from_pretrained, once this is imported, or hf_specdec.enable

Importing this package registers the quantisation method "mx" (as `hf_specdec.enable` does) and the attention "hf_specdec_rows" with transformers.
"""

from . import passes as _passes  # noqa: F401  (registers itself)
from .choose import choose_formats as choose_formats
from .compress import compress
from .draft import draft_of as draft_of
from .formats import FORMATS as FORMATS
from .kernels.cpu import kernel_info
from .kernels.cpu import set_kernel_path as set_kernel_path
from .linear import MXLinear
from .loading import load
from .packed import quantize
from .quality import compare
from .config import MXConfig
from .row_invariant import row_invariant
from .swap import dequantize
from .tiles import to_tiles

__all__ = [
    "MXConfig",
    "MXLinear",
    "compare",
    "compress",
    "dequantize",
    "kernel_info",
    "load",
    "quantize",
    "row_invariant",
    "to_tiles",
]
