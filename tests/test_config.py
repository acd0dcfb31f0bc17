"""`SpeculativeConfig` as data."""

import copy
import dataclasses
import inspect
import json
import pickle

import pytest

from hf_specdec import SpeculativeConfig
from hf_specdec.drafts import MixtureDraft

CONFIGS = [SpeculativeConfig(), SpeculativeConfig(num_assistant_tokens=5, draft="uniform", acceptance="greedy", lenience=0.25, seed=3, max_auto_tokens=9),
           SpeculativeConfig(seed=[1, 2, 3]), SpeculativeConfig(num_assistant_tokens=64, lenience=1)]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_survives_dict_json_and_file(config, tmp_path):
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path = config.save_pretrained(tmp_path / "new" / "folder")
    assert path.name == "speculative_config.json"
    assert SpeculativeConfig.from_pretrained(path) == SpeculativeConfig.from_pretrained(path.parent) == config


def test_a_config_is_frozen_and_can_be_a_key():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculativeConfig().lenience = 0.5
    assert len({SpeculativeConfig(), SpeculativeConfig(), SpeculativeConfig(seed=[1])}) == 2


@pytest.mark.parametrize("k", [1, 64, "auto"])
def test_the_ends_of_the_range_of_k_are_in_range(k):
    assert SpeculativeConfig(num_assistant_tokens=k).num_assistant_tokens == k


def test_the_default_is_exact():
    config = SpeculativeConfig()
    assert (config.lenience, config.acceptance, config.num_assistant_tokens, config.draft) == (1.0, "auto", "auto", "prompt_lookup")


def test_an_override_of_none_changes_nothing():
    given = SpeculativeConfig(num_assistant_tokens=3, lenience=0.5)
    assert SpeculativeConfig.resolve(given, num_assistant_tokens=None) == given
    assert SpeculativeConfig.resolve(given, lenience=0.7) == SpeculativeConfig(num_assistant_tokens=3, lenience=0.7)
    assert SpeculativeConfig.resolve(True) == SpeculativeConfig.resolve(None) == SpeculativeConfig()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="speculative_config.json: .*save_pretrained.*tune"):
        SpeculativeConfig.from_pretrained(tmp_path)


def test_the_constructor_says_its_arguments_and_copies_are_equal():
    assert list(inspect.signature(SpeculativeConfig).parameters) == [field.name for field in dataclasses.fields(SpeculativeConfig)]
    config = SpeculativeConfig(seed=3, draft_options={"branches": 2})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config


def test_what_is_no_path_no_dict_or_no_text_is_named(tmp_path):
    for value in (3, None, [], SpeculativeConfig):
        for call in (SpeculativeConfig.from_pretrained, SpeculativeConfig().save_pretrained):
            with pytest.raises(TypeError, match="^folder: expected a path, a str or a Path, got "):
                call(value)
        with pytest.raises(TypeError, match="^values: expected a dict of options, got "):
            SpeculativeConfig.from_dict(value)
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="file: not a JSON file .*Write it with SpeculativeConfig.save_pretrained"):
        SpeculativeConfig.from_pretrained(file)
    with pytest.raises(ValueError, match="^folder='.*file' is a file; name a folder"):
        SpeculativeConfig().save_pretrained(file)


@pytest.mark.parametrize("name", ["/no/such", "owner/name"])
def test_a_path_that_holds_no_drafter_is_not_taken_for_a_name(name):
    with pytest.raises(ValueError, match=f"draft='{name}': a path here is that of a drafter .*draft=\"model\" with draft_source='{name}'"):
        SpeculativeConfig(draft=name)


def test_a_slip_inside_a_mixture_is_recognised():
    with pytest.raises(ValueError, match=r"drafts: 'promt_lookup' is not known \(did you mean 'prompt_lookup'\?\)"):
        MixtureDraft(["promt_lookup", "recycling"])
