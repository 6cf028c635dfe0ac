"""The explorer as text; what it does is tested in a browser."""

import re

from fasterqk.pages._page import explorer_html


def test_nothing_in_the_page_asks_the_network():
    text = explorer_html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    outside = [
        address for address in re.findall(r"https?://[^\s\"'<>]+", text) if "www.w3.org" not in address
    ]
    assert outside == []
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*\"", text) == []


def test_the_page_is_small():
    assert len(explorer_html().encode("utf-8")) < 150_000


def test_every_parameterization_has_its_control():
    text = explorer_html()
    for name in ("FAFO", "FACO", "CAFO", "CACO"):
        assert f'name="model" value="{name}"' in text
