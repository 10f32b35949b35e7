"""A client without a URL talks to the server that the commands of the same shell talk to."""

from __future__ import annotations

import pytest

from holdfast.cli.target import Target
from holdfast.client import Client


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8420"),
        ({"HOLDFAST_PORT": "8555"}, "http://127.0.0.1:8555"),
        ({"HOLDFAST_HOST": "::", "HOLDFAST_PORT": "8555"}, "http://[::1]:8555"),
        ({"HOLDFAST_PORT": "8555", "HOLDFAST_URL": "http://there:1"}, "http://there:1"),
    ],
)
def test_the_environment_names_the_server(variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_URL", "HOLDFAST_HOST", "HOLDFAST_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Client().url == url
    assert Target(url=variables.get("HOLDFAST_URL")).address == url
    assert Client("http://given:2").url == "http://given:2"
