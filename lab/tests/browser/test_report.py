"""The report in a browser: silent, sortable, and deaf to markup hidden in data."""

import json

import pytest
from tests.browser.chromium import HOSTILE

from fasterqk_lab.figures import save_document, save_examples, save_table
from fasterqk_lab.page import write_page

SCRIPT = "<script>window.broken = true</script>"
IMAGE = HOSTILE
ARMS = ["r = 1", f"r = 10 {SCRIPT}", "r = 100"]


def example(tokens, weights, label="yes"):
    reading = {"prediction": IMAGE, "probability": 0.75}
    return {
        "tokens": tokens,
        "relevance": [0, 1, *[0] * (len(tokens) - 2)],
        "label": label,
        "arms": {arm: {**reading, "layers": {"layer 1": weights, "rollout": weights[::-1]}} for arm in ARMS},
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A results folder with everything a report can show, every text of it hostile."""
    out = tmp_path_factory.mktemp("results")
    (out / "figures").mkdir()
    for name in ["fig4", "fig2"]:
        picture = (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 4"><script>window.broken = true</script>'
            '<rect id="same" width="10" height="4" onload="window.broken = true"/></svg>'
        )
        (out / "figures" / f"{name}.svg").write_text(picture)
        about = {"title": f"{name} {SCRIPT}", "caption": IMAGE}
        (out / "figures" / f"{name}.json").write_text(json.dumps(about))
    interval = {"mean": 0.5, "half_width": 0.01, "n": 5}
    save_table(
        out,
        "table1",
        title=f"Table {SCRIPT}",
        caption=IMAGE,
        columns=[
            {"key": "arm", "label": f"arm {IMAGE}"},
            {"key": "value", "label": "value"},
            {"key": "paper", "label": "paper", "source": "paper"},
        ],
        rows=[
            {"arm": "b", "value": 10.0, "paper": None},
            {"arm": SCRIPT, "value": 9.0, "paper": 1},
            {"arm": "a", "value": interval, "paper": 2},
        ],
    )
    values = dict.fromkeys(("before", "after", "difference"), interval)
    effects = [
        {"arm": arm, "score": score, "at": SCRIPT, "null": 0.1, "stands": "open", **values}
        for arm in ARMS[1:]
        for score in ("mrta", SCRIPT)
    ]
    document = {"title": f"Agreement {SCRIPT}", "setting": IMAGE, "effects": effects}
    save_document(out, "effects", "table1-agreement", document)
    for name, sensitive in [("words", False), ("hurtful", True)]:
        save_examples(
            out,
            name,
            title=f"Examples {SCRIPT}",
            caption=IMAGE,
            sensitive=sensitive,
            arms=ARMS,
            examples=[
                example(["Ġone", SCRIPT, IMAGE], [0.2, 0.7, 0.1]),
                example(["second", "##ary", "example"], [0.1, 0.1, 0.8], label=SCRIPT),
            ],
        )
    return write_page(out)


@pytest.fixture(scope="module")
def page(open_shared_page, report):
    return open_shared_page(report)


def test_hostile_texts_are_texts(page):
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 3  # the two figures and the chart of effects
    scripts = page.locator("script").evaluate_all("all => all.map((one) => one.id || one.type)")
    assert scripts == ["data", ""]
    assert page.locator("h3", has_text=SCRIPT).count() >= 5
    assert IMAGE in page.locator("figure.table figcaption").inner_text()
    assert SCRIPT in page.locator("#table-table1 td").nth(3).inner_text()


def test_chapters_stand_in_the_order_of_the_paper(page):
    titles = page.locator("main > section > h2").all_inner_texts()
    assert titles == ["Figure 2", "Figure 4", "Tables", "Hurtful", "Words"]
    assert page.locator("nav a").all_inner_texts() == titles
    widths = page.locator("figure.figure img").evaluate_all("all => all.map((one) => one.naturalWidth)")
    assert all(width > 0 for width in widths)


def column(page, number):
    return page.locator(f"#table-table1 tbody td:nth-child({number})").all_inner_texts()


def test_a_click_on_a_column_sorts_by_value(page):
    page.locator("#table-table1 thead button").nth(1).click()
    assert column(page, 2) == ["0.500 ± 0.010", "9", "10"]
    page.locator("#table-table1 thead button").nth(1).click()
    assert column(page, 2) == ["10", "9", "0.500 ± 0.010"]
    head = page.locator("#table-table1 thead th").nth(1)
    assert head.get_attribute("aria-sort") == "descending"
    # A missing cell stays last whichever way the column is sorted.
    for _ in range(2):
        page.locator("#table-table1 thead button").nth(2).press("Enter")
        assert column(page, 3)[-1] == "–"
    page.locator("#table-table1 thead button").nth(0).click()
    assert column(page, 1) == [SCRIPT, "a", "b"]


def test_a_table_can_be_copied(page):
    # A page from a file may not read the clipboard, so what it writes is caught on the way.
    page.evaluate(
        """() => Object.defineProperty(navigator, "clipboard", {
          value: {writeText: async (text) => { window.copied = text; }}, configurable: true})"""
    )
    page.locator("#table-table1 .copy").click()
    page.get_by_text("Copied", exact=True).wait_for()
    lines = [line.split("\t") for line in page.evaluate("window.copied").split("\n")]
    assert lines[0][1] == "value"
    assert sorted(line[1] for line in lines[1:]) == ["0.500 ± 0.010", "10", "9"]


def test_the_picker_shows_an_example_a_layer_and_two_arms(page):
    viewer = page.locator("[data-examples=words]")
    words = viewer.locator(".pane").first.locator(".words span")
    assert [text.strip() for text in words.all_inner_texts()] == ["one", SCRIPT, IMAGE]
    assert words.nth(1).get_attribute("class") == "relevant"

    def shades():
        return words.evaluate_all("all => all.map((one) => Number(one.style.getPropertyValue('--weight')))")

    assert shades() == pytest.approx([0.1 / 0.7, 1, 0.2 / 0.7], abs=1e-3)  # rollout is shown first
    viewer.get_by_label("attention of").select_option("layer 1")
    assert shades() == pytest.approx([0.2 / 0.7, 1, 0.1 / 0.7], abs=1e-3)
    assert viewer.locator(".pane h4").all_inner_texts() == ARMS[:2]
    viewer.get_by_label("against").select_option("r = 100")
    assert viewer.locator(".pane h4").all_inner_texts() == [ARMS[0], ARMS[2]]
    assert "70% of its attention on relevant tokens" in viewer.locator(".said").first.inner_text()
    viewer.get_by_label("next example").click()
    assert viewer.locator(".words").first.inner_text() == "secondary example"
    assert SCRIPT in viewer.locator(".facts").inner_text()
    viewer.get_by_label("next example").click()
    assert SCRIPT in viewer.locator(".words").first.inner_text()
    viewer.get_by_label("example", exact=True).select_option("1")
    assert viewer.locator(".words").first.inner_text() == "secondary example"
    assert page.evaluate("window.broken") is None


def test_sensitive_examples_wait_for_a_click(page):
    viewer = page.locator("[data-examples=hurtful]")
    assert viewer.locator(".words").count() == 0
    assert "secondary" not in viewer.inner_text()
    viewer.get_by_role("button", name="Show them").click()
    assert viewer.locator(".pane").count() == 2


def test_a_phone_does_not_scroll_sideways(open_page, report, phone):
    page = open_page(report, color_scheme="dark", **phone)
    page.get_by_role("button", name="Show them").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
