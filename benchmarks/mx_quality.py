"""What each MX format and scale rule costs in quality, on the real SmolLM2-135M-Instruct in float32.

    python benchmarks/mx_quality.py [--text FILE] [--formats ...] [--rules ...] [--lm-head FORMAT] [--activations mxint8]
        [--calibrate FILE] [--json FILE]

Perplexity, KL divergence, top-1 agreement and the overlap sum min(p, q), which is the acceptance rate if the compressed copy
drafts for the original. Counts, not times: nothing else has to rest meanwhile.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

from hf_specdec import mx
from hf_specdec.bench.embedded import load_target
from hf_specdec.commands.compress import GENERATED, calibration_text
from hf_specdec.mx.formats import FORMATS, SCALE_RULES
from hf_specdec.mx.quality import sample_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file; the one shipped with the package without it")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rules", nargs="+", default=list(SCALE_RULES))
    parser.add_argument("--lm-head")
    parser.add_argument("--activations", help='"mxint8": with rounded inputs, the formats that go with it')
    parser.add_argument("--calibrate", help="a text file, or generated: as hf-specdec compress")
    parser.add_argument("--json")
    options = parser.parse_args()
    model, tokenizer = load_target(dtype="float32")
    text = options.text.read_text(encoding="utf-8") if options.text else sample_text()
    sequences = None
    if options.calibrate:
        sequences = calibration_text(model, tokenizer, None if options.calibrate == GENERATED else Path(options.calibrate).read_text(encoding="utf-8"))
    rows = []
    print("format       rule   SQNR dB  perplexity  nats    KL      top-1   overlap")
    for name in [name for name in options.formats if not options.activations or FORMATS[name].fits_int8]:
        for rule in options.rules:
            small = mx.compress(copy.deepcopy(model), name, scale_rule=rule, lm_head=options.lm_head, activations=options.activations, calibration=sequences)
            quality = mx.compare(model, small, tokenizer, text).to_dict()
            layers = [layer.sqnr_db for layer in small.mx_report.compressed]
            rows.append({"format": name, "rule": rule, "sqnr_db": sum(layers) / len(layers), **quality})
            print(line(rows[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def line(row: dict) -> str:
    return (
        f"{row['format']:12s} {row['rule']:6s} {row['sqnr_db']:7.1f} {row['perplexity_compressed']:11.3f} "
        f"{row['loss_difference']:+.4f}  {row['kl']:.4f}  {row['top1_agreement']:.1%}  {row['overlap']:.1%}"
    )


if __name__ == "__main__":
    main()
