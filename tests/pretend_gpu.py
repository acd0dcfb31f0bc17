"""A stand-in for a GPU: tensors that are on the host, say that they are on "cuda:0" or "cuda:1", refuse what CUDA refuses of tensors on several devices, and
count what would make the host wait. PretendGpu("mps") stands for Apple's, and refuses numbers of float64, too.

    with PretendGpu() as gpu:
        model = gpu.put(model)                  # in place
        ids = gpu.put(ids)
        with gpu.counted() as waits:            # "file:line" of every copy to the host
            ...
        with gpu.counted("sent") as waits:      # and of every copy from there, but those out of pinned memory
            ...
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.repeat_interleave,
         aten.is_nonzero, aten.item}  # fmt: skip
KINDS = ("cuda", "mps")
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class GpuTensor(torch.Tensor):
    """`held` is what it holds, on the host."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device):
        if device.type == "mps" and held.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.")
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, layout=held.layout,
                                                   device="meta", requires_grad=False)  # fmt: skip
        made.held, made.on = held, device
        return made

    @property
    def device(self) -> torch.device:
        return self.on

    @property
    def is_cuda(self) -> bool:
        return self.on.type == "cuda"

    @property
    def is_mps(self) -> bool:
        return self.on.type == "mps"

    @property
    def is_meta(self) -> bool:
        return False

    def tolist(self):
        _active().waits[_place()] += 1
        return self.held.tolist()

    def numpy(self, **kwargs):
        raise TypeError(f"can't convert {self.on} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    __array__ = numpy

    def __repr__(self):
        return f"GpuTensor({self.held}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _active().run(func, args, kwargs or {})


def _active() -> "PretendGpu":
    assert PretendGpu.active is not None, "a tensor of a pretended GPU outlives it"
    return PretendGpu.active


def _device(given) -> torch.device | None:
    if given is None:
        return None
    device = torch.device(given)
    return torch.device(device.type, device.index or 0) if device.type in KINDS else device


class _FromNumbers(TorchFunctionMode):
    """What is made of numbers is made on the host and copied: torch's own way asks for a build with CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:  # without an index, torch asks the devices of the kind, of which there are none
            args = tuple(_device(value) if isinstance(value, (str, torch.device)) else value for value in args)
            kwargs |= {"device": _device(kwargs["device"])} if kwargs.get("device") is not None else {}
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], GpuTensor):
            whole = args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = tuple(_sent(torch.tensor(part) if len(part) else torch.empty(0, dtype=torch.long), args[0].device) if isinstance(part, (list, range)) else part for part in whole)
            return func(args[0], parts if isinstance(args[1], tuple) else parts[0], *args[2:])
        device = args[0].device if func is torch.Tensor.new_tensor else kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) or _device(device) is None or _device(device).type not in KINDS:
            return func(*args, **kwargs)
        if func is torch.as_tensor and isinstance(args[0], torch.Tensor):
            return args[0].to(**kwargs)
        data, given = args[-1], {"dtype": args[0].dtype} if func is torch.Tensor.new_tensor else {}
        made = torch.tensor(data, **given | {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")})
        return _sent(made, device)


def _sent(made: torch.Tensor, device) -> GpuTensor:
    _active().sent[_place()] += 1
    return GpuTensor(made, _device(device))


class PretendGpu(TorchDispatchMode):
    """waits: places in the package, or else in transformers or torch, where the host would wait for numbers. sent: the same of copies to the device out of
    memory that is not pinned, which wait, too."""

    active: "PretendGpu | None" = None

    def __init__(self, kind: str = "cuda"):
        super().__init__()
        self.kind, self.last = kind, torch.device(kind, 0)  # of the last operation: what torch makes inside of one is there, too
        self.made: dict[int, tuple] = {}
        self.waits, self.sent, self.patches = Counter(), Counter(), ExitStack()

    def __enter__(self):
        PretendGpu.active = self
        for name in ("_lazy_init", "synchronize", "empty_cache"):
            self.patches.enter_context(patch.object(torch.cuda, name, lambda *args, **kwargs: None))
        self.patches.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        self.patches.enter_context(patch.object(torch.cuda, "mem_get_info", lambda *args: (1 << 36, 1 << 36)))
        self.patches.enter_context(_FromNumbers())
        return super().__enter__()

    def __exit__(self, *error):
        done = super().__exit__(*error)
        self.patches.close()
        PretendGpu.active = None
        return done

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    @contextmanager
    def counted(self, of: str = "waits"):
        before = getattr(self, of).copy()
        found = Counter()
        yield found
        found.update(getattr(self, of) - before)

    def put(self, thing, device: str | None = None):
        """A tensor, a dict of tensors, or a module, in place."""
        device = device or f"{self.kind}:0"
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                self._put_module(module, _device(device))
            return thing
        if isinstance(thing, dict):
            return type(thing)({name: self.put(value, device) for name, value in thing.items()})
        return GpuTensor(thing, _device(device))

    def _put_module(self, module: torch.nn.Module, device: torch.device) -> None:
        for name, value in module._parameters.items():
            if value is not None and not isinstance(value, GpuTensor):
                if id(value) not in self.made:  # tied ones stay tied
                    self.made[id(value)] = value, torch.nn.Parameter(GpuTensor(value.detach(), device), requires_grad=False)
                module._parameters[name] = self.made[id(value)][1]
        for place in (module._buffers, vars(module)):
            for name, value in place.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
                    place[name] = GpuTensor(value, device)
                for part in value if isinstance(value, (list, tuple)) else ():
                    if isinstance(part, torch.nn.Module):  # parts of the target that a draft shares
                        self.put(part, str(device))

    # --- one operation ------------------------------------------------------------------------------------------------------

    def run(self, func, args, kwargs):
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        devices = {value.device for value in tensors if isinstance(value, GpuTensor)}
        assert all(isinstance(value, GpuTensor) or value.device.type == "cpu" for value in tensors), f"{func} made something past this stand-in"
        wanted = self.last if getattr(kwargs.get("device"), "type", None) == "meta" else _device(kwargs.get("device"))
        self.last = next(iter(devices), self.last)
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.to) or packet is aten.copy_:
            return self._copied(func, args, kwargs, wanted)
        if not devices and (wanted is None or wanted.type not in KINDS):
            return func(*args, **kwargs)
        if packet is aten.scalar_tensor and getattr(kwargs.get("device"), "type", None) == "meta":  # torch's own, of a number among tensors
            return func(*args, **{**kwargs, "device": "cpu"})
        self._check(packet, tensors, devices)
        if packet in WAITS or packet in INDEXING and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            self.waits[_place()] += 1
        if packet in INDEXING and devices:
            self.sent.update(_place() for index in args[1] if index is not None and not isinstance(index, GpuTensor) and index.dim() > 0)
        on = wanted or next(iter(devices))
        return self._wrapped(func, args, kwargs, on)

    def _check(self, packet, tensors: list[torch.Tensor], devices: set[torch.device]) -> None:
        others = [value for value in tensors if not isinstance(value, GpuTensor) and value.dim() > 0]
        if packet in INDEXING and isinstance(tensors[0], GpuTensor):
            others = [value for value in others if value.dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8)]
        if len(devices) > 1 or others and devices:
            where = sorted(map(str, devices)) + ["cpu"] * bool(others)
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(where)}! ({packet})")

    def _copied(self, func, args, kwargs, wanted):
        source = args[1] if func.overloadpacket is aten.copy_ else args[0]
        to = args[0].device if func.overloadpacket is aten.copy_ else wanted or source.device
        if source.device.type in KINDS and to.type == "cpu":
            self.waits[_place()] += 1
        elif source.device.type == "cpu" and to.type in KINDS and not (kwargs.get("non_blocking") and hasattr(source, "pinned")):
            self.sent[_place()] += 1
        return self._wrapped(func, args, kwargs, to)

    @staticmethod
    def _wrapped(func, args, kwargs, on: torch.device):
        given = {id(value): value for value in tree_flatten((args, kwargs))[0] if isinstance(value, GpuTensor)}
        held = {id(value.held): value for value in given.values()}
        bare = tree_map(lambda value: value.held if isinstance(value, GpuTensor) else torch.device("cpu") if isinstance(value, torch.device) else value, (args, kwargs))
        if isinstance(bare[1].get("device"), str):
            bare[1]["device"] = "cpu"
        bare[1].pop("pin_memory", None)
        out = func(*bare[0], **bare[1])
        if on.type not in KINDS:
            return out
        return tree_map(lambda value: held.get(id(value)) if id(value) in held else GpuTensor(value, on) if isinstance(value, torch.Tensor) else value, out)


def _place() -> str:
    """The innermost line of the package that leads here, or else of transformers."""
    frames = [frame for frame in reversed(traceback.extract_stack()) if "pretend_gpu" not in frame.filename and not frame.filename.endswith("/uploads.py")]
    for part in ("hf_specdec", "transformers"):
        for frame in frames:
            if f"/{part}/" in frame.filename:
                return f"{frame.filename.rpartition(f'/{part}/')[2]}:{frame.lineno} {frame.line}"
    return f"{frames[0].filename}:{frames[0].lineno}"
