"""What messages about arguments and missing packages say."""

from importlib import metadata

import pytest

from hf_specdec import hints


class Installed:
    def __init__(self, source: str | None):
        self.source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.source


@pytest.mark.parametrize(("source", "said"), [
    (None, "pip install 'hf-specdec[train]'"),
    ('{"url": "file:///somewhere", "dir_info": {}}', "pip install '.[train]' in a checkout of hf_specdec"),
])
def test_an_extra_is_installed_from_where_the_package_came(source, said, monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(source))
    assert hints.install("train") == said


def test_a_package_that_is_only_on_the_path_has_its_extras_in_a_checkout(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert hints.install("demo") == "pip install '.[demo]' in a checkout of hf_specdec"
