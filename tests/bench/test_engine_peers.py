"""The comparison of engines with engines that are made up: the protocol, what is skipped, what counts."""

from __future__ import annotations

import json
import sys

import pytest
import typer

from .test_scripts import SCRIPTS, script

FAKE = """
import sys
sys.path.insert(0, {engines!r})
from serve import serve

def make(options):
    if options.get("mode") == "lookup":
        raise RuntimeError("no drafts here")
    print("an engine that talks")
    return {{"plain": lambda ids, n: [ids[-1] + i for i in range(n)]}}, {{"plain": options["weights"]}}, {{"fake": "1.0"}}

serve(make)
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """The script with one engine, "vllm", whose process is made up: it starts for plain decoding and does not for drafts."""
    module = script("engine_peers")
    (tmp_path / "vllm_worker.py").write_text(FAKE.format(engines=str(SCRIPTS / "engines")))
    monkeypatch.setattr(module, "WORKERS", tmp_path)
    return module


def test_engines_that_are_not_named_are_skipped_by_name(peers, target_folder, tmp_path, capsys):
    peers.main(bits=[16], prompt=["chat/1"], target=str(target_folder), max_new_tokens=4, repetitions=1, compiled=False, out=tmp_path / "peers.json")
    output, result = capsys.readouterr().out, json.loads((tmp_path / "peers.json").read_text())
    assert all(f"skipped: {name}" in output for name in ("llamacpp", "openvino", "vllm"))
    rows = result["groups"]["16 bit, chat"]
    assert {"stock bfloat16, plain", "ours bf16, plain, eager", "ours bf16, lookup, eager"} <= {name.removeprefix("16 bit: ") for name in rows}
    assert all(row["tokens_per_second"] > 0 for row in rows.values()) and rows[peers.BASE]["as_stock"] == 1


def test_an_engine_is_asked_over_the_pipe_and_one_that_fails_is_skipped_with_its_reason(peers, capsys):
    with peers.engine_arms({"vllm": sys.executable}, [16, 4], {"": 3}, {"threads": 1}) as (arms, versions):
        assert list(arms) == ["16 bit: vllm bfloat16, plain"] and versions == {"fake": "1.0"}
        tokens, seconds = arms["16 bit: vllm bfloat16, plain"]([5, 7], 3)
    assert tokens == [7, 8, 9] and seconds >= 0
    assert "skipped: vllm, bfloat16: RuntimeError: no drafts here" in capsys.readouterr().out


def test_an_interpreter_that_is_not_there_is_skipped(peers, capsys):
    with peers.engine_arms({"vllm": "/no/such/python"}, [16], {"": 3}, {}) as (arms, _):
        assert not arms
    assert "skipped: vllm, bfloat16" in capsys.readouterr().out


def test_a_looping_text_counts_for_no_contestant_with_so_many_bits(peers):
    assert peers.loops([1, 2, 3] + [4, 5] * 12) and peers.loops([9] * 24) and peers.loops(list(range(20)) * 3)
    assert not peers.loops(list(range(60))) and not peers.loops([9] * 23) and not peers.loops([4, 5] * 12 + [6])
    fine, loop = list(range(40)), [1] * 40
    found = {"chat/1": {peers.BASE: (fine, [2.0, 1.0, 3.0]), "16 bit: x, plain": (fine[:20] + loop[:20], [1.0]), "8 bit: x, plain": (fine, [1.0])},
             "chat/2": {peers.BASE: (fine, [4.0]), "16 bit: x, plain": (loop, [1.0]), "8 bit: x, plain": (fine, [1.0])}}
    result = peers.reduce(found, {"copying": [], "chat": ["chat/1", "chat/2"]})
    assert result["loops"] == {"16 bit": ["chat/2"], "8 bit": []} and result["groups"]["16 bit, copying"] == {}
    rows = result["groups"]["16 bit, chat"]
    assert rows[peers.BASE]["tokens_per_second"] == 20 and rows["16 bit: x, plain"]["as_stock"] == 0.5
    assert result["groups"]["8 bit, chat"][peers.BASE]["tokens_per_second"] == pytest.approx(80 / 6)


def test_calls_take_turns_and_the_first_round_does_not_count(peers):
    order = []
    arms = {name: lambda ids, n, name=name: (order.append(name) or [1] * n, float(n)) for name in "abc"}
    found = peers.measure(arms, {"chat/1": [5], "chat/2": [6]}, 4, 2)
    assert order == list("abcbcabcacabcababc") and found["chat/1"]["a"] == ([1] * 4, [4.0, 4.0])


@pytest.mark.parametrize("text", ["tgi=python", "python"])
def test_an_engine_that_is_not_known_is_refused(peers, text):
    with pytest.raises(typer.BadParameter, match="not one of llamacpp"):
        peers.pairs([text], "--engine")
    assert peers.pairs(["7", "vllm=3"], "--k") == {"": "7", "vllm": "3"}
