"""`MXLinear`: a Linear layer whose weights stay packed in memory and are decompressed inside the product."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import nn

from ..hints import what
from .codec import round_to_integers
from .formats import BLOCK, DEFAULT_FORMAT, DEFAULT_RULE, SCALE_NAN, Format, check_activations, get_format
from .kernels import cpu, gpu, weights
from .ops import PLANES, STORED, TILES, multiply_dense, mx_tiles, product
from .packed import PackedMatrix, check_own, quantize

_turning = Lock()  # two threads that call a fresh layer at once must not both put its bytes into tiles


class MXMatrix(nn.Module):
    """`y = x @ W^T + b` with W in an MX format: what `MXLinear` is, and the experts of a mixture, which tools that look for Linear layers must not take for one.

    `weight` is uint8 `[out_features, in_features * bits / 8]` and `weight_scale` uint8 `[out_features, in_features / 32]`.
    They are saved in the stored order (least significant bit first). In use they lie as the kernels read them (`layout`): on a
    CPU in tiles, in the same memory; on a GPU in planes, and `weight` is empty then. A row of x gives the same bits at every number of rows
    (up to 64, without `alike`, where `cpu.by_panels`). activations "mxint8": each block of 32 inputs of x is rounded to MXINT8 before an integer product.
    """

    alike = False
    _activations: str | None = None

    def __init__(self, in_features, out_features, bias=True, format=DEFAULT_FORMAT, device=None, dtype=None, activations=None):
        nn.Module.__init__(self)
        self.format: Format = get_format(format)
        if in_features % BLOCK:
            raise ValueError(f"in_features={in_features} is no multiple of the MX block of {BLOCK}.")
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.weight_scale = (self._bytes(torch.zeros(shape, dtype=torch.uint8, device=device)) for shape in self._shapes())
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None)
        self.layout = STORED
        self._forget()
        self.activations = activations

    @property
    def activations(self) -> str | None:
        """None: x is multiplied as it is; "mxint8": rounded. Setting it raises ValueError for other names, and where the format does not go with it."""
        return self._activations

    @activations.setter
    def activations(self, name: str | None) -> None:
        self._activations = check_activations(name, self.format)
        self._known = self._place = None

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=False)

    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the codes and of the scales, in the stored order."""
        columns = 0 if self.format.is_dense else self.in_features // BLOCK
        return (self.out_features, self.in_features * self.format.bits // 8), (self.out_features, columns)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format=DEFAULT_FORMAT, scale_rule: str = DEFAULT_RULE, activations=None) -> MXMatrix:
        """The layer, compressed. It keeps the bias as it is; `linear` is left alone. Raises what `quantize` raises."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected an nn.Linear, got {what(linear)}; mx.compress takes a whole model.")
        weight = linear.weight.detach()
        return cls.from_packed(quantize(weight.clone() if get_format(format).is_dense else weight, format, scale_rule), linear, activations)

    @classmethod
    def from_packed(cls, packed: PackedMatrix, linear: nn.Linear, activations=None) -> MXMatrix:
        """A layer with these weights, and the bias and mode of `linear`. The matrix's memory becomes the layer's."""
        layer = cls(linear.in_features, linear.out_features, bias=False, format=packed.format, device="meta", activations=activations)
        layer.bias = linear.bias
        layer.set_packed(packed)
        return layer.train(linear.training)

    def set_packed(self, packed: PackedMatrix) -> None:
        """Take over the codes and scales of a matrix of this layer's shape and format: its memory is the layer's from now on."""
        self._check_packed(packed)
        self.weight, self.weight_scale = self._bytes(packed.codes.contiguous()), self._bytes(packed.scales.contiguous())
        self.layout = STORED
        self._forget()
        self.prepare()

    def prepare(self) -> MXMatrix:
        """Put the bytes into the order of the kernels, if there are any: once, in place. `forward` does it otherwise, but not
        while a compiler traces it."""
        if self.weight.device.type == "cpu":
            self._cpu_kernel()
        elif self.layout == STORED and self.weight.is_cuda and gpu.has_kernel(self.format):
            self._planes = gpu.to_planes(self.packed())
            self.weight.data, self.weight_scale.data = self.weight.new_empty(0), self.weight.new_empty(0)
            self.layout = PLANES
        return self

    def _check_packed(self, packed: PackedMatrix) -> None:
        codes, scales = self._shapes()
        bytes_ = all(part.dtype == torch.uint8 for part in (packed.codes, packed.scales))
        if packed.format != self.format or not bytes_ or (packed.codes.shape, packed.scales.shape) != (codes, scales):
            raise ValueError(
                f"a {self.format.name} matrix of shape {(self.out_features, self.in_features)} is wanted, with uint8 codes "
                f"{codes} and scales {scales}; got {packed.format.name} with {packed.codes.dtype} codes {tuple(packed.codes.shape)} and "
                f"{packed.scales.dtype} scales {tuple(packed.scales.shape)}."
            )

    # ---- the weights, as numbers and as stored ----

    def packed(self) -> PackedMatrix:
        """Codes and scales in the stored order; copies, if the layer holds them otherwise."""
        if self.layout == PLANES:
            return gpu.from_planes(self._planes, self.format)
        codes, scales = self.weight.detach(), self.weight_scale.detach()
        if self.layout == TILES:
            codes, scales = self._reordered(codes, scales, back=True)
        return PackedMatrix(codes, scales, self.format)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights `[out_features, in_features]` in `dtype`."""
        kernel = self._cpu_kernel() if dtype in cpu.DTYPES else None
        return self.packed().dequantize(dtype) if kernel is None else kernel.dequantize(dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """A dense layer with these weights in `dtype` and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantize(dtype))
        linear.bias = self.bias
        return linear.train(self.training)

    # ---- the product ----

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., out_features]` from `x [..., in_features]`, float32, bfloat16 or float16, on the weights' device."""
        self._check_input(x)
        device = "cpu" if x.is_cpu else x.device.type
        if (x.is_cpu or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        if type(x) is not torch.Tensor or torch.jit.is_tracing():  # a trace, or a tensor that is none: addresses mean nothing there
            return product(x, self)
        if torch.compiler.is_compiling():
            by_place = self._place is not None and not torch.compiler._is_exporting_flag  # not by its function, which torch 2.11 takes for True in every trace
            if by_place and not torch.is_grad_enabled() and not (cpu.by_panels() and x.numel() > cpu.WIDE * self.in_features):
                return mx_tiles(x, *self._place, self.out_features)
            return product(x, self)
        if torch.is_grad_enabled() and (x.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return product(x, self.prepare())
        kernel = self._cpu_kernel()
        if kernel is not None:
            return kernel(x, self.alike)
        self.prepare()
        if self.layout == PLANES:
            return product(x, self)
        return multiply_dense(round_to_integers(x) if self.activations else x, self._dense(x.dtype), self.bias)

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dtype not in cpu.DTYPES:
            raise TypeError(f"x is {x.dtype}; MX layers take float32, bfloat16 or float16: convert it with x.to(dtype).")
        if x.device != self._parameters["weight"].device:  # half a microsecond faster than self.weight
            raise ValueError(f"x is on {x.device} and the MX weights are on {self.weight.device}: move one of them.")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has {x.shape[-1] if x.dim() else 'no'} features; this layer takes {self.in_features}.")

    def _cpu_kernel(self) -> cpu.Kernel | None:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        key = (weight.data_ptr(), None if bias is None else (bias.data_ptr(), bias.is_inference() or bias._version))
        if self._known is not None and self._known[0] == key and (bias is None or self._known[2] is None or torch.equal(self._known[2], bias)):
            return self._known[1]
        check_own(self._known and self._known[0][0], self.weight)
        kernel = None
        if self.weight.device.type == "cpu" and cpu.library() is not None and not self._has_specials():
            self._to_tiles()
            kernel = cpu.Kernel(
                self.format.name, self.format.bits, self.out_features, self.in_features,
                self.weight, self.weight_scale, self._tail, bias, self.activations is not None,
            )  # fmt: skip
        copied = None if bias is None or kernel is None or bias.dtype == torch.float32 else bias.detach().clone()  # `.data` changes it without a trace
        self._known, self._place = (key, kernel, copied), None if kernel is None else (kernel.bytes[None], 0)
        return kernel

    def _has_specials(self) -> bool:
        """Codes that no kernel looks up: NaN scales, infinities and NaNs, and the integer -128. `quantize` makes none."""
        if self.layout == TILES:
            return False  # looked for before
        if bool((self.weight_scale == SCALE_NAN).any()):
            return True
        if self.format.bits != 8:
            return False
        magnitude = self.weight & 0x7F
        if self.format.is_integer:
            return bool((self.weight == 0x80).any())
        return bool((magnitude > self.format.max_code).any())

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights in `dtype`, kept: for machines without kernels."""
        if self._kept is None or self._kept.dtype != dtype or self._kept.device != self.weight.device:
            self._kept = self.packed().dequantize(dtype)
        return self._kept

    @staticmethod
    def gather(layers: Sequence[MXMatrix]) -> None:
        """Put what the kernels know of the layers into one table: a compiled pass then has one input for all of them, and may make the
        products of one x at once."""
        layers = [layer for layer in layers if layer._cpu_kernel() is not None]
        if len({id(layer._place[0]) for layer in layers}) > 1:
            table = torch.stack([layer._known[1].bytes for layer in layers])
            for i, layer in enumerate(layers):
                layer._place = table, i

    # ---- tiles ----

    def _to_tiles(self) -> None:
        with _turning:
            if self.layout == STORED:
                self._turn()

    def _turn(self) -> None:
        full = self.out_features // cpu.ROWS * cpu.ROWS
        codes, scales = self.weight.detach(), self.weight_scale.detach()
        if full < self.out_features:
            missing = full + cpu.ROWS - self.out_features
            rows = [torch.cat([part[full:], part.new_zeros(missing, part.shape[1])]) for part in (codes, scales)]
            self._tail = weights.tile(*rows, self.format.bits)
        tiled = self._reordered(codes, scales)
        codes.copy_(tiled[0])
        scales.copy_(tiled[1])
        self.layout = TILES

    def to_stored(self) -> None:
        """Put the bytes back into the stored order."""
        packed = self.packed()
        if self.layout == TILES:
            self.weight.detach().copy_(packed.codes)
            self.weight_scale.detach().copy_(packed.scales)
        elif self.layout == PLANES:
            self.weight.data, self.weight_scale.data = packed.codes, packed.scales
        self.layout = STORED
        self._forget()

    def _reordered(self, codes, scales, back: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies with the full groups of 16 rows in the other order; what is left of them stays as it is."""
        full = self.out_features // cpu.ROWS * cpu.ROWS
        head = weights.tile(codes[:full], scales[:full], self.format.bits, back) if full else (codes[:0], scales[:0])
        return torch.cat([head[0], codes[full:]]), torch.cat([head[1], scales[full:]])

    def _forget(self) -> None:
        self._tail = self._planes = self._known = self._kept = self._place = None

    # ---- what torch does to modules ----

    def _apply(self, fn, recurse=True):
        probe = self.weight.new_empty(0)
        if fn(probe).device != probe.device:
            self.to_stored()
        self._known = self._kept = self._place = None
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.prepare()  # later, the bytes that are handed out would change their order
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != STORED:
            packed = self.packed()
            destination[prefix + "weight"], destination[prefix + "weight_scale"] = packed.codes, packed.scales

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        given = {name: state_dict[prefix + name] for name in ("weight", "weight_scale") if prefix + name in state_dict}
        wrong = [f"{prefix}{name} is {part.dtype}, the layer's is torch.uint8: this is no MX layer's state" for name, part in given.items()
                 if part.dtype != torch.uint8]
        if wrong:  # torch would round the numbers to bytes
            errors += wrong
            return
        self.to_stored()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if local_metadata.get("assign_to_params_buffers"):  # the caller's own tensors, which are not to change their order
            own = (part.detach().clone(memory_format=torch.contiguous_format) for part in (self.weight, self.weight_scale))
            self.weight, self.weight_scale = map(self._bytes, own)
        self.prepare()

    def __getstate__(self):
        """Copies and pickles are in the stored order: tiles and planes are this machine's."""
        state = {**self.__dict__, "_known": None, "_kept": None, "_place": None}
        if self.layout != STORED:
            packed = self.packed()
            own = {"weight": self._bytes(packed.codes), "weight_scale": self._bytes(packed.scales)}
            state |= {"_parameters": {**self._parameters, **own}, "layout": STORED, "_tail": None, "_planes": None}
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.prepare()

    def extra_repr(self) -> str:
        rounded = f", activations={self.activations}" if self.activations else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, format={self.format.name}{rounded}"


class MXLinear(MXMatrix, nn.Linear):
    """An `nn.Linear` whose weights are in an MX format (`MXMatrix`)."""
