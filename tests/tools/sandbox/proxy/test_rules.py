"""Rules of hosts: what is named is allowed, and a target is read in one way only."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.tools.sandbox.proxy.rules import HostRules, ProxyTarget, parse_authority


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        (
            "example.org",
            ["example.org:443", "example.org:80", "EXAMPLE.org.:443"],
            ["a.example.org:443", "xample.org:80"],
        ),
        ("*.example.org", ["a.example.org:443", "a.b.example.org:80"], ["example.org:443", "aexample.org:443"]),
        ("example.org:8443", ["example.org:8443"], ["example.org:443", "example.org:80"]),
        ("example.org:*", ["example.org:1", "example.org:65535"], ["example.com:1"]),
        ("*", ["anything.test:443", "1.1.1.1:80", "[2606:4700::1111]:443"], ["anything.test:22"]),
        ("*:8080", ["anything.test:8080"], ["anything.test:443"]),
        ("1.1.1.1", ["1.1.1.1:443"], ["1.1.1.2:443", "1.1.257:443", "16843009:443"]),
        ("[2606:4700::1111]:443", ["[2606:4700:0::1111]:443"], ["[2606:4700::1112]:443", "[2606:4700::1111]:80"]),
        ("2606:4700::1111", ["[2606:4700::1111]:80"], ["[2606:4700::1112]:80"]),
        ("Bücher.example", ["xn--bcher-kva.example:443"], ["bucher.example:443"]),
    ],
)
def test_a_rule_allows_its_hosts_and_ports_only(rule: str, allowed: list[str], refused: list[str]) -> None:
    rules = HostRules([rule])
    for text in allowed:
        rules.check(parse_authority(text, None))
    for text in refused:
        with pytest.raises(ToolFailed, match="is not allowed"):
            rules.check(parse_authority(text, None))


def test_a_refusal_names_the_host_and_those_that_are_allowed() -> None:
    with pytest.raises(ToolFailed, match=r"host evil\.test is not allowed; allowed: a\.test, \*\.b\.test"):
        HostRules(["a.test", "*.b.test"]).check(ProxyTarget("evil.test", 443))
    with pytest.raises(ToolFailed, match="allowed: none"):
        HostRules([]).check(ProxyTarget("evil.test", 443))
    with pytest.raises(ToolFailed, match="and 20 more"):
        HostRules([f"h{number}.test" for number in range(30)]).check(ProxyTarget("evil.test", 443))
    with pytest.raises(ToolFailed, match=r"port 22 of a\.test is not allowed; allowed ports: 80, 443"):
        HostRules(["a.test"]).check(ProxyTarget("a.test", 22))


@pytest.mark.parametrize(
    "rule",
    [
        "",
        ":443",
        "a.test:",
        "a.test:0",
        "a.test:65536",
        "a.test:http",
        "http://a.test",
        "a.test/x",
        "a b",
        "*.",
        "**",
        "*.*",
        "a.*",
        "a..b",
        "user@a.test",
        "[::1",
        "[::1%lo]",
        "fe80::1%lo",
        "-a.test",
        "a.test:+80",
        "a.test:٨٠",
    ],
)
def test_an_invalid_rule_is_refused(rule: str) -> None:
    with pytest.raises(ConfigurationError):
        HostRules([rule])


def test_too_many_rules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="257"):
        HostRules(["a.test"] * 257)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "a.test:",
        "a.test:0",
        "a.test:080000",
        "a.test:-1",
        "a.test:8 0",
        "a.test:٨٠",
        "a.test:80:80",
        "[::1]80",
        "[::1",
        "[::1%25lo]:80",
        "[1.1.1.1]:80",
        "user@a.test:80",
        "a.test\t:80",
        "a\x00.test:80",
        "a/b:80",
        "①②⑦.⓪.⓪.①:80",
        "127。0。0。1:80",
        "ⓔxample.org:80",
        "a..test:80",
        ".test:80",
        "a" * 64 + ":80",
        "a." * 127 + "aa:80",
    ],
)
def test_a_target_that_is_not_strictly_one_is_refused(text: str) -> None:
    with pytest.raises(ToolFailed):
        parse_authority(text, 80)


def test_a_target_has_one_spelling() -> None:
    assert parse_authority("EXAMPLE.org.", 80) == ProxyTarget("example.org", 80)
    assert parse_authority("[2606:4700:0:0::1111]:443", None).authority == "[2606:4700::1111]:443"
    with pytest.raises(ToolFailed, match="no port"):
        parse_authority("example.org", None)
