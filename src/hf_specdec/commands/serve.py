"""`hf-specdec serve`: a model behind the OpenAI API, decoded speculatively.

The server, its chat templates, tool calls and streams are transformers' own (`transformers serve`, one request at a time); what is ours is the model that
it is handed, and that a conversation is not read from its beginning at every turn.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import socket
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import typer
from transformers.cache_utils import DynamicLayer

from ..caches import CACHE, cached_tokens, counts_tokens
from ..config import SpeculativeConfig
from ..hints import first_line, many
from ..kinds import BOTH_WAYS
from .common import apply_mx
from .leaving import PROGRAM
from .logprobs import Tap, Tapped
from .speculation import Work

COMPILED = 2048  # tokens of the longest text that compiled passes are made for beforehand
ORDINARY = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "cache_implementation": None,
            "prompt_lookup_num_tokens": None, "assistant_early_exit": None}  # stock assisted decoding does not go on from a cache that lacks several tokens
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")


def serve(work: Work, host: str, port: int, tiles: bool, compile: bool, threads: int | None, keep: int) -> None:
    from .. import enable, warmup

    work.check()
    check_installed()
    if compile and torch.cuda.is_available():
        raise ValueError("--compile: on a CPU alone; a server's compiled passes have not been tried on a GPU.")
    check_port(host, port)
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
    if compile:
        warmup(model, draft, speculation, max_length=min(COMPILED, getattr(model.config.get_text_config(), "max_position_embeddings", COMPILED)))
    enable(model, speculative=speculation, assistant_model=draft)
    run(work.target, Answering(model, keep, say), processor, speculation, host, port)


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


# --- the model that the server is handed ------------------------------------------------------------------------------


@dataclasses.dataclass
class Conversation:
    """A text, as tokens, and the cache of all of them but the last, which says how many they are."""

    tokens: list[int]
    cache: Any

    def shared(self, ids: list[int]) -> int:
        """How many of the cached tokens `ids` begins with; its last one has to be read anew."""
        cached = self.tokens[: cached_tokens(self.cache)]
        return next((place for place, (one, other) in enumerate(zip(cached, ids[:-1])) if one != other), min(len(cached), len(ids) - 1))

    def cut(self, length: int) -> bool:
        """Take the tokens after `length` out of the cache; False where a layer does not hold them all, as windows and states do not."""
        if beyond := cached_tokens(self.cache) - length:
            if any(type(layer) is not DynamicLayer for layer in self.cache.layers):
                return False
            self.cache.crop(-beyond)
        return True


class Answering:
    """What takes the place of an enabled model's `generate`, for one call at a time: the part of a text that it has read or written before is not read again, and
    of every answer `say` is told what speculation did for it. keep: that many conversations, the last ones, are held in memory. A call's `tap` reads its logits."""

    def __init__(self, model, keep: int, say: Callable[[str], None]):
        self.model, self.generate, self.say = model, model.generate, say
        self.kept: deque[Conversation] = deque(maxlen=keep)

    def __call__(self, tap: Tap | None = None, **kwargs):
        ids, apart = kwargs["input_ids"][0].tolist(), self.model.config.model_type in BOTH_WAYS  # what it has read goes by what came behind, and marks say how
        kwargs = kwargs if apart else without_marks(kwargs)
        alone = not apart and not is_shown(kwargs) and is_alone(kwargs.get("generation_config"), self.model.generation_config)
        if tap is not None:
            if not is_alone(kwargs.get("generation_config"), self.model.generation_config):
                raise ValueError("logprobs: of a text that is decoded the ordinary way alone, without beams, say; leave out generation_config.")
            kwargs |= {"streamer": Tapped(kwargs.get("streamer"), tap)}
            self.tell(tap, kwargs["input_ids"], alone)
        cache, known = self.take(ids) if alone else (None, 0)
        try:
            out = self.generate(**kwargs | in_full(kwargs.get("generation_config"), tap is not None), **({CACHE: cache} if known else {}))
        except BaseException:  # a client has gone: the next turn finds what was known
            if known and (held := Conversation(ids, cache)).cut(known):
                self.kept.append(held)
            raise
        if tap is not None and out.logits:  # of plain generate(), which hands no streamer logits
            tap.read(out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits))
        if alone and (cache := getattr(out, CACHE, None)) is not None and counts_tokens(cache):  # one of states alone says nothing of its text
            self.kept.append(Conversation(out.sequences[0].tolist(), cache))
        self.say(line_of(out, len(ids), known))
        return out.sequences

    def tell(self, tap: Tap, ids: torch.Tensor, alone: bool) -> None:
        """Of a prompt ids [1, P] what the model gave its tokens; what was read for it is not read again."""
        if not tap.echo:
            return
        if self.model.config.model_type in BOTH_WAYS:
            raise ValueError("echo: without logprobs alone; this model reads a prompt in both directions, and gives its tokens none.")
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=True)
        tap.read_prompt(ids[0].tolist(), out.logits[0])
        if alone and (cache := getattr(out, CACHE, None)) is not None and counts_tokens(cache):
            self.kept.append(Conversation(ids[0].tolist(), cache))

    def take(self, ids: list[int]) -> tuple[Any, int]:
        """The cache of what `ids` begins with, and its number of tokens; (None, 0) for none, and where more than half of a conversation would be lost."""
        known, found = max(((each.shared(ids), place) for place, each in enumerate(self.kept)), default=(0, None))
        if not known or 2 * known < cached_tokens(self.kept[found].cache) or not self.kept[found].cut(known):
            return None, 0
        cache = self.kept[found].cache
        del self.kept[found]  # the answer's text takes its place
        return cache, known


def in_full(config: Any, logits: bool = False) -> dict[str, Any]:
    """The argument that has a call return its cache, and logits: in a copy of the config, beside which transformers wants no other, or without one by its name."""
    said = {"return_dict_in_generate": True} | ({"output_logits": True} if logits else {})
    if config is None:
        return said
    config = copy.copy(config)
    for name, value in said.items():
        setattr(config, name, value)
    return {"generation_config": config}


def is_alone(config: Any, own: Any) -> bool:
    """Whether a request, whose generation config may say anything, is for one text with a cache of the ordinary kind; what it leaves out the model's `own` says."""
    said = ((ordinary, *(getattr(each, name, None) for each in (config, own))) for name, ordinary in ORDINARY.items())
    return all(next((value for value in values if value is not None), ordinary) == ordinary for ordinary, *values in said)


def without_marks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A request without what says of every token that it is text (zeros in `token_type_ids`, say), as processors of models that read images do where there is none."""
    ids = kwargs["input_ids"]
    marks = {name for name, value in kwargs.items() if name.endswith("token_type_ids") and value is not None and value.shape == ids.shape and not value.any()}
    return {name: value for name, value in kwargs.items() if name not in marks}


def is_shown(kwargs: dict[str, Any]) -> bool:
    """Whether a request comes with more than text: images, say, for which tokens alone do not stand."""
    return any(hasattr(value, "dtype") for name, value in kwargs.items() if name not in ("input_ids", "attention_mask"))


def line_of(out: Any, prompt: int, known: int) -> str:
    """One line about an answer."""
    tokens = out.sequences.shape[1] - prompt
    text = f"{many(tokens, 'token')} to a prompt of {prompt}"
    if known:
        text += f" ({known} of them known)"
    if (trace := getattr(out, "speculation", None)) is None:
        return f"{text}, without speculation"
    rate = f"acceptance rate {trace.acceptance_rate:.0%}" if trace.proposed else "nothing was drafted"
    return f"{text}, {many(trace.target_calls, 'target forward')}, block efficiency {trace.block_efficiency:.2f}, {rate}"


# --- transformers' server ---------------------------------------------------------------------------------------------


def run(name: str, answering: Answering, processor, speculation: SpeculativeConfig, host: str, port: int) -> None:
    """Serve the model under `name` until Ctrl-C."""
    from transformers.cli.serve import Serve

    from .server import Around

    around = Around(answering.model, processor, speculation)
    answering.model.generate = answering

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
