"""What a number of bits per weight gets in quality, by who gets them: formats by layer, chosen or by rule, on the real SmolLM2-135M-Instruct in float32.

    python benchmarks/mx_bits.py [--bits 4.6 5 5.5] [--calibrate FILE] [--text FILE] [--random 3] [--json FILE]

Beside MXFP4 and MXFP6 throughout: the formats that `mx.choose_formats` gives, of two formats and of three, and the same number of bits in MXFP6 given to the layers
`down_proj` first, to the first and last blocks first, to `v_proj` and then `down_proj` (which llama.cpp's mixed 4-bit formats favour), to
`k_proj` and `v_proj` and then those blocks, or to layers in a random order. All of them rounded with calibration, once for each layer and format.
Losses and divergences, not times: nothing else has to rest meanwhile.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path

from hf_specdec import mx
from hf_specdec.bench.arms import twin
from hf_specdec.bench.embedded import load_target
from hf_specdec.commands.compress import GENERATED, calibration_text
from hf_specdec.mx.choose import allot, costs, rounded
from hf_specdec.mx.formats import get_format
from hf_specdec.mx.plan import plan
from hf_specdec.mx.quality import sample_text
from hf_specdec.mx.swap import replace

FORMATS = [get_format(name) for name in ("mxfp4_e2m1", "mxfp6_e2m3", "mxint8")]
BITS = [each.bits_per_weight for each in FORMATS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", nargs="+", type=float, default=[4.6, 5.0, 5.5])
    parser.add_argument("--calibrate", default=GENERATED, help="a text file, or generated: as hf-specdec compress")
    parser.add_argument("--text", type=Path, help="a text file to measure on; the one shipped with the package without it")
    parser.add_argument("--random", type=int, default=3, help="so many random orders")
    parser.add_argument("--json")
    options = parser.parse_args()
    model, tokenizer = load_target(dtype="float32")
    text = options.text.read_text(encoding="utf-8") if options.text else sample_text()
    sequences = calibration_text(model, tokenizer, None if options.calibrate == GENERATED else Path(options.calibrate).read_text(encoding="utf-8"))
    forms = rounded(model, plan(model, FORMATS[0], (), None), FORMATS, sequences, "even")
    found = costs(model, forms, sequences)
    rows = []
    print("bits   formats chosen by        expected KL  loss     KL      same top token")
    for name, places in contestants(model, found, options):
        quality = mx.compare(model, with_forms(model, forms, places), tokenizer, text)
        rows.append({"chosen_by": name, "bits": mean_bits(model, places), "expected_kl": sum(found[layer][at] for layer, at in places.items()), **quality.to_dict()})
        print("{bits:.3f}  {chosen_by:22s}  {expected_kl:.4f}       {loss_difference:+.4f}  {kl:.4f}  {top1_agreement:.1%}".format(**rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"costs": found, "rows": rows}, indent=1), encoding="utf-8")


def contestants(model, found: dict[str, list[float]], options):
    """Names, and each layer's place in `FORMATS`."""
    names, sizes = list(found), {name: model.get_submodule(name).weight.numel() for name in found}
    blocks = {name: int(name.split(".")[2]) for name in names}
    outer = sorted(names, key=lambda name: min(blocks[name], max(blocks.values()) - blocks[name]))
    down = sorted(outer, key=lambda name: not name.endswith("down_proj"))
    yield FORMATS[0].name, dict.fromkeys(names, 0)
    for bits in options.bits:
        for count in (2, 3):
            yield f"costs, {count} formats", allot({name: own[:count] for name, own in found.items()}, sizes, BITS[:count], bits)
        orders = {"down_proj first": down, "outer blocks first": outer}
        orders["v, then down_proj"] = sorted(down, key=lambda name: not name.endswith("v_proj"))
        orders["k and v, then outer"] = sorted(outer, key=lambda name: not name.endswith(("k_proj", "v_proj")))
        orders |= {f"at random ({seed})": random.Random(seed).sample(names, len(names)) for seed in range(options.random)}
        for name, order in orders.items():
            yield name, fill(order, sizes, bits)
    yield FORMATS[1].name, dict.fromkeys(names, 1)


def fill(order: list[str], sizes: dict[str, int], bits: float) -> dict[str, int]:
    """MXFP6 for those that come first, as long as the bits last."""
    left, places = (bits - BITS[0]) * sum(sizes.values()), dict.fromkeys(order, 0)
    for name in order:
        price = (BITS[1] - BITS[0]) * sizes[name]
        if price <= left:
            places[name], left = 1, left - price
    return places


def with_forms(model, forms, places: dict[str, int]):
    """A copy of the model, with shared tensors, whose layers have these formats."""
    small = twin(model)
    for name, at in places.items():
        replace(small, name, copy.deepcopy(forms[name][at]))
    return small


def mean_bits(model, places: dict[str, int]) -> float:
    sizes = {name: model.get_submodule(name).weight.numel() for name in places}
    return sum(BITS[at] * sizes[name] for name, at in places.items()) / sum(sizes.values())


if __name__ == "__main__":
    main()
