"""What each code of each format means: against a table made of integers here, and against ml_dtypes."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.mx.formats import DEFAULT_FORMAT, DEFAULT_RULE, DENSE, FORMATS, SCALE_RULES, check_rule, get_format

from .reference import NAMES, RULES, TABLE, meaning

each_format = pytest.mark.parametrize("name", NAMES)
each_float = pytest.mark.parametrize("name", [name for name in NAMES if name != "mxint8"])


def test_there_are_these_formats_and_rules():
    assert set(FORMATS) == set(NAMES) and set(SCALE_RULES) == set(RULES)
    assert DEFAULT_FORMAT == "mxfp6_e2m3" and DEFAULT_RULE == "even"


@each_format
def test_every_code_means_what_the_specification_says(name):
    bits = TABLE[name][0]
    values = FORMATS[name].values
    assert values.dtype == torch.float32 and len(values) == 2**bits
    for code, value in enumerate(values.tolist()):
        wanted = meaning(name, code)
        if wanted is not None:
            assert value == float(wanted), (name, code)
            assert torch.signbit(values[code]) == (code >= 2 ** (bits - 1)), (name, code)  # the negative zero, too


def test_the_codes_that_are_no_numbers():
    e4m3, e5m2 = FORMATS["mxfp8_e4m3"].values, FORMATS["mxfp8_e5m2"].values
    assert e4m3.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF] and not e4m3.isinf().any()
    assert e5m2.isnan().nonzero().flatten().tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert e5m2[0x7C] == float("inf") and e5m2[0xFC] == float("-inf")
    for name in ("mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"):
        assert FORMATS[name].values.isfinite().all()


@each_float
def test_every_code_means_what_ml_dtypes_says(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import numpy as np

    short = name.rpartition("_")[2]
    bits = TABLE[name][0]
    dtype = getattr(ml_dtypes, f"float{bits}_{short}" + ("" if short == "e5m2" else "fn"))
    theirs = torch.from_numpy(np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32))
    ours = FORMATS[name].values
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


@each_format
def test_the_limits_are_those_of_the_table(name):
    bits, exponent_bits, bias, largest, value, emax = TABLE[name]
    fmt = FORMATS[name]
    assert (fmt.bits, fmt.exponent_bits, fmt.max_code, fmt.emax) == (bits, exponent_bits, largest, emax)
    assert fmt.max == float(value) and 2.0**emax <= fmt.max < 2.0 ** (emax + 1)
    assert fmt.is_integer == (name == "mxint8") and not fmt.is_dense
    if bias is not None:
        assert fmt.bias == bias and fmt.emin == 1 - bias
    positive = [meaning(name, code) for code in range(1, largest + 1)]
    assert fmt.step == float(min(positive))


@pytest.mark.parametrize("name, wanted", [("mxfp8_e4m3", 8.25), ("mxfp8_e5m2", 8.25), ("mxfp6_e3m2", 6.25), ("mxfp6_e2m3", 6.25),
                                          ("mxfp4_e2m1", 4.25), ("mxint8", 8.25), ("bf16", 16), ("fp32", 32)])  # fmt: skip
def test_bits_per_weight(name, wanted):
    assert get_format(name).bits_per_weight == wanted


@pytest.mark.parametrize("name, bits, dtype", [("bf16", 16, torch.bfloat16), ("fp32", 32, torch.float32)])
def test_dense_formats_are_no_mx_formats_but_have_names(name, bits, dtype):
    fmt = get_format(name)
    assert name not in FORMATS and fmt is DENSE[name]
    assert fmt.is_dense and fmt.bits == bits and fmt.dtype == dtype and not fmt.is_integer


@each_format
def test_a_format_is_found_by_its_name_and_by_itself(name):
    assert get_format(name) is FORMATS[name] and get_format(FORMATS[name]) is FORMATS[name]


@pytest.mark.parametrize("name", ["mxfp5", "MXFP6_E2M3", "", None, 6, ["mxint8"]])
def test_an_unknown_format_is_refused_with_the_names_there_are(name):
    with pytest.raises(ValueError) as caught:
        get_format(name)
    assert repr(name) in str(caught.value) and all(known in str(caught.value) for known in [*NAMES, *DENSE])


@pytest.mark.parametrize("rule", ["round", "EVEN", "", None])
def test_an_unknown_rule_is_refused_with_the_names_there_are(rule):
    with pytest.raises(ValueError) as caught:
        check_rule(rule)
    assert repr(rule) in str(caught.value) and all(known in str(caught.value) for known in RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_known_rule_is_handed_back(rule):
    assert check_rule(rule) == rule
