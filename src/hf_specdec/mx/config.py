"""`MXConfig`: how a model is compressed, as it is passed to `from_pretrained` and saved with the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..hints import check_bool
from ..method import METHOD, make_way
from .calibration import token_ids
from .experts import ExpertWeights
from .formats import DEFAULT_FORMAT, DEFAULT_RULE, check_activations, check_rule, get_format
from .interface import take_loading_options
from .linear import MXMatrix
from .plan import Choice, check_layer_formats, check_skip, fitting, recorded

VERSION = 3  # of what is saved, at most: the packing and the names of the tensors; 2 is written for formats by layer alone, 3 for packed experts alone
EXPERTS = 3  # the version from which experts are packed

make_way()


@take_loading_options
@register_quantization_config(METHOD)
class MXConfig(QuantizationConfigMixin):
    """How a model's Linear layers are compressed; the arguments are those of `mx.compress`.

    `dequantize=True` gives a dense model of a compressed checkpoint, which all else is read from.

    calibration: token ids as `mx.compress` takes them, kept as int64 `[1, n]`. The layers are then compressed when all weights are there, not each as it is read,
    so that memory must hold the dense model. Nothing of it is saved with the model.

    Raises ValueError for unknown formats, rules and options, for a checkpoint that a newer version of this package has written, and for calibration that is empty
    or goes with `dequantize`; TypeError for calibration that is no sequences of token ids. Whether they are the model's is asked before its weights are read.
    """

    def __init__(
        self,
        format: str = DEFAULT_FORMAT,
        scale_rule: str = DEFAULT_RULE,
        skip: Iterable[str] = (),
        lm_head: str | None = None,
        dequantize: bool = False,
        activations: str | None = None,
        version: int = 1,
        layer_formats: Mapping[str, str] | Iterable | None = None,
        calibration: Iterable | None = None,
        **unknown,
    ):
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"version={version!r} is no version of MX checkpoints; this package writes {VERSION}.")
        if version > VERSION:
            raise ValueError(
                f"This checkpoint has MX format version {version}; this package reads up to {VERSION}. Upgrade hf-specdec."
            )
        unknown.pop("quant_method", None)
        if unknown:
            known = "format, scale_rule, skip, lm_head, dequantize, activations, layer_formats, calibration"
            raise ValueError(f"MXConfig has no option {', '.join(map(repr, unknown))}. It has: {known}.")
        self.quant_method = METHOD
        self.format = get_format(format).name
        self.scale_rule = check_rule(scale_rule)
        self.skip = list(check_skip(skip))
        self.lm_head = None if lm_head is None else get_format(lm_head, "lm_head").name
        check_bool("dequantize", dequantize)
        self.dequantize = dequantize
        self.activations = check_activations(activations, format)
        self.layer_formats = {name: own.name for name, own in check_layer_formats(layer_formats).items()}
        self.version = version if version == EXPERTS else 2 if self.layer_formats else 1
        self.calibration = None if calibration is None else token_ids(calibration)
        if self.dequantize and calibration is not None:
            raise ValueError("calibration has no meaning with dequantize=True, which reads a compressed checkpoint: leave one of them out.")

    def look(self, model, files: Iterable, device_map) -> None:
        """Find out from a checkpoint of another library's what becomes of each layer."""

    def holds(self, choice: Choice) -> bool:
        """Whether such a checkpoint has this layer's codes and scales."""
        return False

    def await_bytes(self, name: str, layer: MXMatrix) -> None:
        """Give a layer that it has parameters of the types that it has them in."""

    def check_stored(self, model, files: Iterable) -> None:
        """ValueError for tensors of a checkpoint that are not what `conversions` takes."""

    def converters(self, given: list) -> list:
        """How tensors of a checkpoint become a model's, in the place of transformers' way (`given`)."""
        return given

    def conversions(self) -> list:
        """How tensors of a checkpoint that other names are stored under become this package's."""
        return []

    def note(self, choices: list[Choice]) -> None:
        """What a model's layers make of this is what is saved. Experts among what is compressed are what older versions of this package cannot read."""
        self.skip = recorded(choices, self.skip)
        self.layer_formats = {name: self.layer_formats[name] for name in fitting(choices, self.layer_formats)}
        experts = any(isinstance(choice.module, ExpertWeights) and choice.format is not None for choice in choices)
        self.version = EXPERTS if experts or self.version == EXPERTS else 2 if self.layer_formats else 1

    def to_dict(self) -> dict:
        """What is saved, so no calibration; `layer_formats` as a list of pairs, because transformers sorts the keys of dicts."""
        left_out = {"dequantize", "calibration", "origin", "stored"} | {name for name in ("activations", "layer_formats") if not getattr(self, name)}
        kept = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return kept | ({"layer_formats": list(map(list, self.layer_formats.items()))} if self.layer_formats else {})

    def get_loading_attributes(self) -> dict:
        return {"dequantize": self.dequantize} | ({} if self.calibration is None else {"calibration": self.calibration})
