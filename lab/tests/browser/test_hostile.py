"""Hostile texts in names of folders, models, arms and blocks, in links and in documents: none is run."""

import json

import markdown
import pytest
import torch
from tests.browser.chromium import HOSTILE

from fasterqk.pages import write_explorer
from fasterqk.stability import LogitReading, Logits
from fasterqk.stability._monitor import page
from fasterqk_lab.figures import save_table
from fasterqk_lab.page import write_page
from fasterqk_lab.paper import experiment_page

NUL = f"{HOSTILE}\0{HOSTILE}"
# A file system takes every sign but the slash, and 255 bytes.
NAME = "\u202e<script>window.broken = true<script><img src=x onerror='window.broken=1'>{{1}}${1} onload="


def report(folder):
    """A results folder of a hostile name, with a hostile table and title."""
    folder.mkdir()
    columns = [{"key": NUL, "label": NUL}]
    save_table(folder, "table1", title=NUL, caption=NUL, columns=columns, rows=[{NUL: NUL}])
    return write_page(folder, title=NUL)


def monitor(folder):
    readings = {NUL: LogitReading(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))}
    history = [Logits(step, readings, {NUL: 0}, {NUL: 0.5}) for step in (1, 2)]
    (folder.parent / "monitor.html").write_text(page(history, 50.0), encoding="utf-8")
    return folder.parent / "monitor.html"


def documents(folder):
    """A page of the documentation, made from a results folder; Markdown passes HTML on."""
    report(folder)
    (folder / "figures").mkdir()
    about = dict.fromkeys(("title", "alt", "see", "caption"), NUL)
    (folder / "figures" / "fig4.json").write_text(json.dumps(about))
    (folder / "figures" / "fig4.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    text = experiment_page("figure", "fig4", folder, folder / "images")
    html = markdown.markdown(text.replace("images/fig4.svg", "data:,"), extensions=["tables", "attr_list"])
    (folder / "docs.html").write_text(f"<!doctype html><meta charset=utf-8>{html}", encoding="utf-8")
    return folder / "docs.html"


@pytest.mark.parametrize("make", [report, monitor, documents], ids=lambda make: make.__name__)
def test_no_text_is_run(make, tmp_path, open_page):
    opened = open_page(make(tmp_path / NAME))
    opened.mouse.move(300, 300)
    assert opened.evaluate("window.broken") is None
    assert "window.broken = true" in opened.inner_text("body")
    assert opened.locator("img[src=x], [onload], [onerror]").count() == 0


def test_a_link_to_the_explorer_runs_nothing(tmp_path, open_page):
    path = write_explorer(tmp_path / "explorer.html")
    opened = open_page(path, f"#M={HOSTILE}&query={HOSTILE}&{HOSTILE}={HOSTILE}")
    assert opened.evaluate("window.broken") is None
    assert opened.locator("img").count() == 0
