"""`hf-specdec serve`: a model behind the OpenAI API, decoded speculatively.

The server, its chat templates, tool calls and streams are transformers' own (`transformers serve`); what is ours is the model that it is handed,
that a conversation is not read from its beginning at every turn, and that requests share the model's passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from importlib.util import find_spec
from typing import Any

import torch
import typer

from ..caches import IN_MODULES
from ..config import SpeculativeConfig
from ..hints import first_line
from .answering import Answering, twins
from .common import apply_mx
from .leaving import PROGRAM
from .speculation import Work

COMPILED = 2048  # tokens of the longest text that compiled passes are made for beforehand
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")


@dataclasses.dataclass(frozen=True)
class Door:
    """Where the server listens, and to whom. batch: answers that are written at a time; queue: requests that may wait beside them; key: of clients, or None; cors: origins
    whose pages may ask."""

    host: str
    port: int
    batch: int = 8
    queue: int = 64
    key: str | None = None
    cors: tuple[str, ...] = ()

    def check(self) -> None:
        if self.key is not None and (not self.key or not self.key.isascii() or not self.key.isprintable()):
            raise ValueError("--api-key: expected printable ASCII characters, one or more; a header holds no others.")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ValueError(f"--cors {origin}: an origin is http://HOST or https://HOST, with a port if it has one, or * for all.")
        check_port(self.host, self.port)


def serve(work: Work, door: Door, tiles: bool, compile: bool, threads: int | None, keep: int) -> None:
    from .. import enable, warmup

    work.check()
    check_installed()
    if compile and torch.cuda.is_available():
        raise ValueError("--compile: on a CPU alone; a server's compiled passes have not been tried on a GPU.")
    door.check()
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer, processor = loaded(work.target, work.dtype)
    if processor.chat_template is None:
        say(f"{work.target}: its tokenizer has no chat template; of the API, /v1/completions alone will answer.")
    apply_mx(model, work.mx, work.target)
    if tiles and work.mx is None:
        to_tiles(model)
    _, draft = work.load_draft(enable(model), tokenizer)
    speculation = dataclasses.replace(work.speculation, compile=compile or work.speculation.compile)
    if model.config.model_type in IN_MODULES and door.batch > 1:
        say(f"{work.target} keeps its states in its modules; it writes one answer at a time.")
        door = dataclasses.replace(door, batch=1)
    if compile:
        longest = min(COMPILED, getattr(model.config.get_text_config(), "max_position_embeddings", COMPILED))
        warmup(model, draft, speculation, max_length=longest)
        if door.batch > 1:
            warmup(model, draft, speculation, max_length=longest, batch=door.batch, drafts=False)
    enable(model, speculative=speculation, assistant_model=draft)
    run(work.target, Answering(model, keep, say, twins(draft, door.batch)), processor, speculation, door)


def loaded(name: str, dtype) -> tuple[Any, Any, Any]:
    """(model, tokenizer, what makes its inputs of a conversation): of a model that reads images, its processor; else the tokenizer."""
    from ..bench.embedded import load_model, load_target

    processor = processor_of(name)
    if processor is None:
        model, tokenizer = load_target(name, dtype)
        return model, tokenizer, tokenizer
    return load_model(name, dtype, images=True), processor.tokenizer, processor


def processor_of(name: str) -> Any:
    """The processor of a model that reads images; None where there is none, and, with a line about it, where it cannot be loaded."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoProcessor, ProcessorMixin

    from ..bench.embedded import EMBEDDED

    if name == EMBEDDED:
        return None
    try:
        if type(AutoConfig.from_pretrained(name)) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return None
    except (OSError, ValueError):  # of which the model's loader says what is wrong
        return None
    try:
        processor = AutoProcessor.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        say(f"{name}: its processor cannot be loaded ({first_line(error)}); text alone will be read.")
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


def check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"serve needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: pip install 'hf-specdec[serve]'")


def check_port(host: str, port: int) -> None:
    """OSError, before anything is loaded, for an address where no server can listen."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise OSError(f"--port {port}: no server can listen there on {host} ({error.strerror or error}); name another one, or another --host.") from error


def to_tiles(model) -> None:
    """The weights of a dense model on a CPU in the kernels' tiles; others as they are."""
    from ..mx import to_tiles as tiled

    if model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float32) and getattr(model.config, "quantization_config", None) is None:
        tiled(model)


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # where nobody reads them, lines cost no answer
        typer.echo(f"{PROGRAM}: {line}", err=True)


# --- transformers' server ---------------------------------------------------------------------------------------------


def run(name: str, answering: Answering, processor, speculation: SpeculativeConfig, door: Door) -> None:
    """Serve the model under `name` until Ctrl-C, or a SIGTERM that lets begun answers end."""
    from transformers.cli.serve import Serve

    from .server import Around

    around = Around(name, answering, processor, speculation, door)
    answering.model.generate = answering
    host, port = door.host, door.port

    class Server(Serve):
        def start_server(self) -> None:
            """What `Serve` calls, with non_blocking, when all is made: in place of loading `name` itself, it takes the model that is there."""
            manager = self._model_manager
            own = manager.process_model_name(name)

            def named(asked: str, **kwargs):
                if asked != own:
                    raise ValueError(f"this server has {name} alone.")
                return processor

            manager._load_model, manager._load_processor = (lambda *args, **kwargs: answering.model), named
            manager.force_model, manager.model_timeout = name, -1  # it alone, and for good
            manager.load_model_and_processor(own)
            around.lay(self)
            say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends it)")
            self.server.run()

    Server(host=host, port=port, log_level="error", non_blocking=True)
