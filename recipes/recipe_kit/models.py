"""The two models of a recipe: from the hub or a folder, or of the same shape with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hf_specdec.hints import first_line

from .inputs import check_context, check_vocabulary
from .memory import Size, check_memory, size_of, untied
from .recipe import Recipe, RecipeError, text_prompts, token_prompts

PERIOD = 2**22 - 3  # odd, so that no two rows of a matrix are alike
OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc_out", "c_proj", "o", "wo")


@dataclass
class Pair:
    """Both models, ready to run, and the prompts as token ids."""

    target: Any
    draft: Any
    prompts: dict[str, list[int]]


def make_pair(recipe: Recipe, options, names: list[str]) -> Pair:
    """Check that the memory suffices, then load or build. RecipeError says what is missing."""
    tokens = recipe.prompt_tokens + options.new_tokens + options.k
    if options.scale == "full":
        _check_draft(recipe, options)
        config = read(recipe, options.target, "config")
        draft = read(recipe, _folder(options.draft), "config") if options.draft else None
        if draft is not None:
            check_vocabulary(options.draft, draft, config)
    else:
        config, draft = recipe.configs[options.scale]()
        if options.layers:
            config.num_hidden_layers = min(options.layers, config.num_hidden_layers)
    sizes: list[Size | None] = [size_of(config), None if draft is None or callable(draft) else size_of(draft)]
    check_memory(*sizes, options.dtype.itemsize, tokens, options.phases, options.device)
    if options.scale == "full":
        tokenizer = read(recipe, options.target, "tokenizer")
        prompts = text_prompts(recipe, names, tokenizer)
    else:
        prompts = token_prompts(names, recipe.prompt_tokens, config.vocab_size)
    check_context(config, prompts, options.new_tokens)
    if options.scale == "full":
        return _loaded(recipe, options, prompts)
    target = random_model(config, options.dtype, options.device)
    return Pair(target, draft(target) if callable(draft) else draft and random_model(draft, options.dtype, options.device), prompts)


def compressed(model, in_place: bool, activations: str | None = None):
    """The model with MXFP6 weights; unless in place, a copy that shares with it all that is not compressed. activations: as `mx.compress` has it."""
    from hf_specdec import mx
    from hf_specdec.bench.arms import twin

    return mx.compress(model if in_place else twin(model), measure=False, activations=activations)


def weight_bytes(model) -> int:
    """Bytes of a model's weights as they lie in memory, packed ones as packed."""
    report = getattr(model, "mx_report", None)
    packed = {layer.name: layer.bytes_after for layer in report.compressed} if report else {}
    dense = {id(p): p for name, p in model.named_parameters(remove_duplicate=False) if name.rpartition(".")[0] not in packed}
    return sum(p.numel() * p.element_size() for p in dense.values()) + sum(packed.values())


# --- random weights -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def random_model(config, dtype: torch.dtype, device: torch.device):
    """A model of that shape at the real cost. Its blocks are one random stretch repeated and speak softly, its head is the
    embedding moved on by one token (a tied one repeats the last token): every greedy token is clear-cut, so that rounding cannot part two outputs."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.initialization import no_init_weights

    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with device, no_init_weights():
        model = untied(auto.from_config(config, dtype=dtype))
    generator = torch.Generator(device).manual_seed(0)
    stretch = torch.empty(PERIOD, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding or parameter is head:
            continue
        if parameter.dim() < 2:
            parameter.fill_(0 if name.endswith("bias") else 1)
            continue
        _tile(parameter.view(-1), stretch)
        if name.split(".")[-2] in OUTPUTS:
            parameter.mul_(0.02)
    embedding.normal_(0, 1, generator=generator)
    if head is not embedding:
        head.copy_(embedding.roll(1, 0)).mul_(config.hidden_size**-0.5)
    return model.requires_grad_(False).eval()


def _tile(flat: torch.Tensor, stretch: torch.Tensor) -> None:
    for start in range(0, flat.numel(), stretch.numel()):
        part = flat[start : start + stretch.numel()]
        part.copy_(stretch[: part.numel()])


# --- real weights -------------------------------------------------------------------------------------------------------


def _folder(draft: str) -> str:
    """A shipped drafter's folder; any other name as it is."""
    from hf_specdec.training.drafter import SHIPPED, shipped

    return str(SHIPPED / draft) if draft in shipped() else draft


def _check_draft(recipe: Recipe, options) -> None:
    if recipe.lookup or options.draft:
        folder = Path(options.draft or "")
        is_path = options.draft and (folder.is_absolute() or options.draft.startswith(".") or folder.is_dir())
        if is_path and not (folder / "config.json").is_file():
            raise RecipeError(f"--draft {folder}: there is no model in this folder (no config.json).")
        return
    raise RecipeError(f"--draft is missing: {recipe.draft_missing}")


def read(recipe: Recipe, name: str, what: str, **kwargs):
    """A config, tokenizer or model of the hub or a folder; RecipeError with what to do where that fails."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hf_specdec.bench.embedded import EMBEDDED, embedded_folder
    from hf_specdec.bench.terminal import working

    kind = {"config": AutoConfig, "tokenizer": AutoTokenizer, "model": AutoModelForCausalLM}[what]
    try:
        source = str(embedded_folder()) if name == EMBEDDED else name
        if what != "model":
            return kind.from_pretrained(source, **kwargs)
        with working(f"Loading {name} ..."):
            return kind.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise RecipeError(_what_to_do(recipe, name, what, error)) from error


def _what_to_do(recipe: Recipe, name: str, what: str, error: BaseException) -> str:
    text = f"{name}: the {what} cannot be read ({first_line(error)})"
    if recipe.licence and name == recipe.target:
        return (f"{text}. {name} is gated: accept its licence at {recipe.licence} with a Hugging Face account, wait for the "
                f"confirmation, then log in with `hf auth login` or set HF_TOKEN; or name a folder with the weights: --target FOLDER.")
    flag = "--target" if name != recipe.draft else "--draft"
    return f"{text}. It needs a connection to huggingface.co, or a folder with the weights: {flag} FOLDER."


def _loaded(recipe: Recipe, options, prompts: dict[str, list[int]]) -> Pair:
    from hf_specdec.training.drafter import is_drafter
    from hf_specdec.training.drafter import load as load_drafter

    placed = {"dtype": options.dtype}
    if options.device.type != "cpu":
        if find_spec("accelerate") is None:
            raise RecipeError("loading straight to the GPU (device_map) needs the package accelerate: pip install accelerate")
        placed["device_map"] = options.device_map or str(options.device)
    target = read(recipe, options.target, "model", **placed).eval()
    if options.draft and is_drafter(options.draft):
        try:
            return Pair(target, load_drafter(options.draft, target), prompts)
        except ValueError as error:
            raise RecipeError(f"--draft {options.draft}: {error}") from error
    draft = read(recipe, options.draft, "model", **placed).eval() if options.draft else None
    return Pair(target, draft, prompts)
