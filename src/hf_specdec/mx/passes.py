"""Passes over a model whose products are these kernels': one team of threads for the whole pass, products of one input made at once, and,
where they are compiled, no Python between them."""

from __future__ import annotations

import ctypes
import operator
import threading
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .. import compat
from ..parts import decoder_layers, modules, text_part
from ..passes import ADDITIONS, PassAddition
from .attention import EAGER_NAME, FEW, FEW_NAME, NAME
from .kernels import attention as kernel
from .kernels import cpu
from .linear import MXMatrix
from .ops import mx_tiles, mx_tiles2, mx_tiles3

TOKENS = 16  # of a pass in which torch's own operators have no use for threads, and whose compiled loops (`passes.FEW`) have none
GRAIN = 1 << 15  # numbers up to which torch runs an operator of one number in, one out on one thread anyway
CROWDED, THREADS = 1024, 4  # tokens of a pass, and threads, up to which all of it is the team's where threads have to be woken for each of torch's loops
LARGE = 1 << 19  # weights of a dense layer that want all threads
TOGETHER = {2: mx_tiles2, 3: mx_tiles3}
HANDLE, INT = "AtenTensorHandle", "int64_t"
SHIMS = {
    "mx_tiles": [HANDLE] * 2 + [INT] * 2,
    "mx_tiles2": [HANDLE] * 2 + [INT] * 4,
    "mx_tiles3": [HANDLE] * 2 + [INT] * 6,
    "mx_experts": [HANDLE] * 2 + [INT] * 2 + [HANDLE, INT],
    "rows_attention": [HANDLE] * 3 + [HANDLE + "*", "double", "int32_t", "double", HANDLE + "*"],
    "mx_delta": [HANDLE] * 5 + [HANDLE + "*", "int32_t"],
    "mx_space": [HANDLE] * 5 + [HANDLE + "*"] * 2,
    "mx_conv": [HANDLE] * 2 + [HANDLE + "*", "int32_t"],
}
OUTPUTS = {"mx_tiles2": 2, "mx_tiles3": 3, "mx_delta": 2, "mx_space": 2}


class Crowd(threading.local):
    """Whether other work keeps this thread from its core, by Linux's own books; never where there are none.

    SHARE: of the time since it was last asked, waited for a core. LEAST: nanoseconds to go by.
    """

    BOOKS, SHARE, LEAST = Path("/proc/thread-self/schedstat"), 0.1, 20_000_000

    def __init__(self):
        self.before, self.answer = (0, 0), False

    def __call__(self) -> bool:
        try:
            ran, waited = map(int, self.BOOKS.read_text().split()[:2])
        except (OSError, ValueError):
            return False
        waiting, total = waited - self.before[1], ran + waited - sum(self.before)
        if total >= self.LEAST:
            self.before, self.answer = (ran, waited), waiting > self.SHARE * total
        return self.answer


class KernelPasses(PassAddition):
    def __init__(self):
        self.crowded = Crowd()

    def runner(self, model, compiled, prompt=False):
        config = model.config.get_text_config()
        if config._attn_implementation not in (NAME, FEW_NAME, EAGER_NAME) or model.device.type != "cpu" or torch.get_num_threads() < 2 or cpu.library() is None:
            return None
        parts = _read_by_text(model)
        ours = any(isinstance(part, MXMatrix) for part in parts)
        dense = any(_is_large(part) for part in parts)
        most = 0 if prompt else TOKENS if compiled else max(TOKENS, min(2 * GRAIN // getattr(config, "hidden_size", GRAIN), FEW))
        if compiled == prompt and torch.get_num_threads() <= THREADS and not cpu.by_panels():
            most = max(most, self._slow_loops(model.dtype))
        return (most, cpu.together) if ours and not dense else None

    def _slow_loops(self, dtype: torch.dtype) -> int:
        """Tokens of a pass up to which torch's loops on several threads take longer than on one: other work displaces the threads, or OpenMP lets them sleep between two
        loops, as it does where those of another Python thread, idle or not, make them more than there are cores."""
        if self.crowded():
            return CROWDED
        if threading.current_thread() is threading.main_thread():
            return 0
        return CROWDED if kernel.for_any_number(dtype) else 2 * FEW

    def prepare(self, model):
        """One table of products for every decoder layer, which may be compiled alone, and one for the rest."""
        if cpu.library() is not None:
            cpu.kernel_path()  # chosen before anything is traced, and told to the library
        try:
            blocks = decoder_layers(compat.unwrap(model))[1]
        except ValueError:
            blocks = []
        seen: set[int] = set()
        for part in (*blocks, model):
            own = [layer for layer in modules(part) if isinstance(layer, MXMatrix) and id(layer) not in seen]
            seen.update(map(id, own))
            MXMatrix.gather(own)

    def rewrite(self, graph):
        merge_products(graph)

    def options(self):
        return {} if c_interface() is None else {"aot_inductor.custom_ops_to_c_shims": c_interface()}


def _read_by_text(model) -> list[nn.Module]:
    """The modules that a pass over text runs: what reads images is not for a team to wait for."""
    name, text = text_part(compat.unwrap(model))
    head = compat.unwrap(model).get_output_embeddings() if name else None
    return [*modules(text if name else model), *([] if head is None else modules(head))]


def _is_large(part: nn.Module) -> bool:
    """Whether torch multiplies by a large matrix of this module's own (a dense layer's, or that of experts)."""
    if isinstance(part, (MXMatrix, nn.Embedding)):
        return False
    return any(own is not None and own.dim() > 1 and own.numel() > LARGE and not name.endswith("_bias") for name, own in part._parameters.items())  # experts' biases


def merge_products(graph: GraphModule) -> None:
    """Products of the same tensor, up to three, become one operator: queries, keys and values, or the two halves of a gated MLP."""
    of: dict[tuple[Node, Node], list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is mx_tiles:
            of.setdefault(node.args[:2], []).append(node)
    for (x, table), nodes in of.items():
        for at in range(0, len(nodes), max(TOGETHER)):
            group = nodes[at : at + max(TOGETHER)]
            if len(group) in TOGETHER:
                _merge(graph, x, table, group)
    graph.graph.lint()
    graph.recompile()


def _merge(graph: GraphModule, x: Node, table: Node, nodes: list[Node]) -> None:
    places, features = zip(*(node.args[2:] for node in nodes))
    with graph.graph.inserting_before(nodes[0]):
        whole = graph.graph.call_function(TOGETHER[len(nodes)], (x, table, *places, *features))
        for i, node in enumerate(nodes):
            part = graph.graph.call_function(operator.getitem, (whole, i))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.graph.erase_node(node)


@lru_cache(maxsize=1)
def c_interface() -> dict | None:
    """The operators that generated C++ may call in the library (csrc/shims.c), with their declarations; None where torch has no such
    way, or the library is not there."""
    from torch._inductor import list_options

    if "aot_inductor.custom_ops_to_c_shims" not in list_options() or cpu.library() is None or not _give_torch():
        return None
    return {
        getattr(torch.ops.hf_specdec, name).default: [
            f"int32_t aoti_torch_cpu_{name}({', '.join([*arguments, *[HANDLE + '*'] * OUTPUTS.get(name, 1)])})"
        ]
        for name, arguments in SHIMS.items()
    }


def _give_torch() -> bool:
    """Tell the library where torch's C interface is."""
    try:
        torch_cpu = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        names = ("get_data_ptr", "get_dim", "get_sizes", "get_strides", "get_dtype", "empty_strided")
        functions = [ctypes.cast(getattr(torch_cpu, f"aoti_torch_{name}"), ctypes.c_void_p).value for name in names]
        kinds = ("dtype_float32", "dtype_bfloat16", "dtype_float16", "dtype_bool", "dtype_int64", "device_type_cpu")
        numbers = [getattr(torch_cpu, f"aoti_torch_{kind}")() for kind in kinds]
    except (OSError, AttributeError, StopIteration):
        return False
    cpu.library().mx_torch((ctypes.c_void_p * 6)(*functions), (ctypes.c_int32 * 6)(*numbers))
    return True


ADDITIONS.append(KernelPasses())
