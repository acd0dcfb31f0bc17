"""`load`: a model of a compressed checkpoint, this package's or one of those that others publish."""

from __future__ import annotations

import copy

import torch

from ..folders import check_model_folder, from_whole
from ..hints import check_path, first_line, what
from ..method import METHOD
from .blocks import BlocksConfig, is_blocks
from .published import PublishedConfig, published, writer
from .swap import dequantize as make_dense

# arguments of from_pretrained that say where the config is, too
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
_OF_MODEL = ("dtype", "torch_dtype", "attn_implementation", "quantization_config")  # what a config has, too, and from_pretrained reads otherwise


def load(auto_class, folder, dequantize: bool = False, **kwargs):
    """`auto_class.from_pretrained(folder, **kwargs)` for a compressed checkpoint, dense if `dequantize`. Those that others have written are read as they are, bit for bit, and
    everything else of them in tiles: experts in MXFP4 as gpt-oss has them (on a CPU: on a GPU from_pretrained has kernels for them), and Linear layers in MXFP8, MXFP6 or
    MXFP4 of compressed-tensors, Model Optimizer, Quark and AutoRound, whose libraries are not needed. These may say that activations are rounded, too: here they are not.

    Raises ValueError for a folder that holds no MX checkpoint, for one that is damaged or lacks weights, and for one with layers that are in another format, or compute
    something else than a product.
    """
    from transformers import AutoConfig

    if not hasattr(auto_class, "from_pretrained"):
        raise TypeError(f"auto_class: expected a class with from_pretrained, such as AutoModelForCausalLM, got {what(auto_class)}.")
    check_model_folder(check_path("folder", folder) / (kwargs.get("subfolder") or ""))
    where = {name: kwargs[name] for name in _WHERE if name in kwargs}
    try:
        config = copy.deepcopy(kwargs.pop("config", None))
        if config is None:  # as from_pretrained does, which is handed a config here: what is left are the model's own arguments
            own = {name: each for name, each in kwargs.items() if name not in (*_WHERE, *_OF_MODEL)}
            config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **where, **own)
            kwargs = {name: each for name, each in kwargs.items() if name not in own or name in unused}
    except (OSError, ValueError) as error:
        raise ValueError(f"folder={str(folder)!r}: no model's config can be read there ({first_line(error)}). Name a folder that a compressed model was saved to.") from error
    if is_blocks(config):
        if kwargs.pop("quantization_config", None) is not None:
            raise ValueError(f"quantization_config: the experts of {folder} were published in MXFP4, and are read as they are; leave it out, or for a dense model call "
                             f"{auto_class.__name__}.from_pretrained with Mxfp4Config(dequantize=True).")
        if dequantize:
            raise ValueError(f"{folder}: its experts are MXFP4 of transformers' own kind; for a dense model call "
                             f"{auto_class.__name__}.from_pretrained with quantization_config=Mxfp4Config(dequantize=True).")
        del config.quantization_config
        return from_whole(f"folder={str(folder)!r}", auto_class, folder, config=config, quantization_config=BlocksConfig(), **kwargs)
    if (origin := published(config)) is not None:
        if kwargs.pop("quantization_config", None) is not None:
            raise ValueError(f"quantization_config: the weights of {folder} are in MX formats of {writer(origin)}, and are read as they are; leave it out.")
        del config.quantization_config
        model = from_whole(f"folder={str(folder)!r}", auto_class, folder, config=config, quantization_config=PublishedConfig(origin), **kwargs)
        return make_dense(model) if dequantize else model
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method != METHOD:
        found = "no quantisation" if method is None else f"quantisation by {getattr(method, 'value', method)!r}"
        raise ValueError(f"{folder} is not an MX checkpoint: its config has {found}. Load it with {auto_class.__name__}.from_pretrained; "
                         "for a dense model, quantization_config=MXConfig() compresses it on the way.")
    config.quantization_config = {**(stored if isinstance(stored, dict) else stored.to_dict()), "dequantize": dequantize}
    return from_whole(f"folder={str(folder)!r}", auto_class, folder, config=config, **kwargs)


def read(name: str, auto_class, folder, config, **kwargs):
    """A checkpoint of any kind, whose config this is (None: it has none): by `load`, if it was published in MX formats that are read as they are. name: of the folder, in errors."""
    as_it_is = config is not None and (published(config) is not None or is_blocks(config) and not torch.cuda.is_available())
    return load(auto_class, folder, **kwargs) if as_it_is else from_whole(name, auto_class, folder, **kwargs)
