"""The explorer in a browser: sliders move the curves, a link restores the state, a phone has room."""

import pytest

from fasterqk.pages import write_explorer

ALL_LINES = "() => [...document.querySelectorAll('.chart .lines path')].map((path) => path.getAttribute('d'))"
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    return write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html")


@pytest.fixture(scope="module")
def shared(open_shared_page, explorer):
    return open_shared_page(explorer)


@pytest.fixture
def page(shared):
    """The explorer with its defaults; opening it anew for each test would take most of their time."""
    shared.click("#reset")
    assert link(shared) == ""
    return shared


def link(page):
    """The address after the page has taken in what happened last."""
    page.evaluate(NEXT_FRAME)
    return page.evaluate("location.hash")


def curves(page):
    page.evaluate(NEXT_FRAME)
    return page.evaluate(ALL_LINES)


def test_every_slider_moves_the_curves_by_keyboard(page):
    before = curves(page)
    for name in ["r", "loss", "M", "b", "m", "n", "start"]:
        numbers = page.inner_text("#models")
        slider = page.get_by_role("slider").and_(page.locator(f"#slider-{name}"))
        assert slider.evaluate("one => one.labels[0].textContent.trim()")
        spoken = slider.get_attribute("aria-valuetext")
        slider.press("ArrowLeft")
        after = curves(page)
        assert after != before, name
        assert all(line and "NaN" not in line for line in after), name
        assert page.inner_text("#models") != numbers, name
        assert slider.get_attribute("aria-valuetext") != spoken, name
        before = after


def test_every_choice_redraws(page):
    last = curves(page)
    for selector in [
        "input[value=FAFO]",
        "input[value=fixed]",
        "input[value=ratios]",
        "input[value=normalised]",
        "input[value=sign]",
        "input[value=laws]",
    ]:
        page.check(selector)
        now = curves(page)
        assert now != last, selector
        last = now
    for x in ["time", "mu", "q", "alpha", "loss"]:
        page.select_option("select[name=x]", x)
        page.select_option("select[name=y]", "alpha" if x != "alpha" else "mu")
        now = curves(page)
        assert now != last, x
        last = now


def test_the_optimizer_switch(page):
    """Sign descent is solved for CACO: it chooses that and locks the others; both laws can be compared."""
    page.check("input[value=FAFO]")
    before = page.inner_text(".sentence")
    page.check("input[value=sign]")
    assert link(page) == "#optimizer=sign"
    assert page.inner_text(".sentence") != before
    assert page.is_checked("input[value=CACO]")
    for model in ("FAFO", "FACO", "CAFO"):
        assert page.is_disabled(f"input[value={model}]")
    row = page.locator("#models tr.chosen")
    assert row.locator("th").inner_text() == "CACO, sign descent"
    assert len(page.locator("#models tr").all()) == 5
    page.check("input[value=laws]")
    assert link(page) == "#optimizer=sign&compare=laws"
    lines = page.locator("#chart-loss .lines path")
    assert lines.count() == 2
    assert page.locator(".for-laws").is_visible() and not page.locator(".for-models").is_visible()
    page.check("input[value=gradient_flow]")
    assert link(page) == "#compare=laws"
    assert page.is_enabled("input[value=FAFO]")


def test_a_link_asks_for_sign_descent_of_what_is_not_solved(open_page, explorer):
    """A link that nobody could have copied: the model gives way to the optimizer."""
    page = open_page(explorer, "#optimizer=sign&model=FAFO&r=10000&loss=1e-8")
    assert page.is_checked("input[value=CACO]")
    assert "NaN" not in page.inner_text("main") and "Infinity" not in page.inner_text("main")


def test_a_number_can_be_typed_and_nonsense_is_put_back(page):
    box = page.get_by_label("Ratio, as a number")
    box.fill("37")
    box.press("Enter")
    assert link(page) == "#r=37"
    box.fill("fast")
    box.press("Enter")
    curves(page)
    assert box.input_value() == "37"
    box.fill("1e99")
    box.press("Enter")
    assert link(page) == "#r=10000"


def test_dragging_the_wanted_attention_gives_the_ratio(page):
    sentence = page.inner_text(".verdict")
    handle = page.locator("#chart-ratio .draggable .handle")
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"], box["y"] + 100, steps=4)
    page.mouse.up()
    curves(page)
    assert page.inner_text(".verdict") != sentence
    target = float(page.get_by_label("Wanted attention, between 0 and 1").input_value())
    assert 0.2 < target < 0.8
    needed = page.evaluate(
        """target => {
          const task = {r: 10, M: 5, b: 50, m: 5, n: 50, query: "token", model: "CACO", start: 1e-3};
          return fasterqk.ratioForAttention(fasterqk.makeProblem(task), target, 1e-4);
        }""",
        target,
    )
    shown = page.locator("#models tr.chosen td").last.inner_text()
    assert float(shown) == pytest.approx(needed, rel=5e-3)
    assert f"r = {shown}" in page.text_content("#chart-ratio")


def test_dragging_the_loss(page):
    page.locator("#chart-loss").scroll_into_view_if_needed()
    box = page.locator("#chart-loss .draggable .handle").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"], steps=4)
    page.mouse.up()
    loss = float(link(page).removeprefix("#loss="))
    assert loss < 1e-5


def test_a_pointer_reads_the_values_of_the_lines(page):
    page.locator("#chart-loss").scroll_into_view_if_needed()
    box = page.locator("#chart-loss svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    reading = page.locator("#chart-loss .reading").text_content()
    assert all(model in reading for model in ["FAFO", "FACO", "CAFO", "CACO"])


def test_a_link_restores_the_state(page, open_page, explorer):
    page.click('[data-ratio="0.1"]')
    page.check("input[value=FACO]")
    page.check("input[value=ratios]")
    page.locator("#slider-M").press("End")
    page.locator("#slider-target").press("Home")
    page.select_option("select[name=x]", "loss")
    drawn = curves(page)
    fragment = link(page)
    assert "model=FACO" in fragment
    other = open_page(explorer, fragment)
    assert curves(other) == drawn
    assert other.inner_text("main") == page.inner_text("main")
    page.click("#reset")
    assert link(page) == ""
    assert curves(page) != drawn


def test_a_link_with_nonsense_shows_the_defaults(page):
    drawn = curves(page)
    page.evaluate("location.hash = '#r=100'")
    assert curves(page) != drawn
    page.evaluate("location.hash = '#r=x&M=-4e&model=%3Cscript%3E&query=2&loss='")
    assert curves(page) == drawn


def test_a_phone_does_not_scroll_sideways(open_page, explorer, phone):
    page = open_page(explorer, "#m=50&n=500&compare=ratios&r=0.0123", **phone)
    page.get_by_text("The task", exact=True).click()
    curves(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#slider-r").is_visible()


def test_the_four_names_are_explained_where_they_are_chosen(page):
    choice = page.locator("fieldset.models").inner_text()
    for word in ["Attention (query-key)", "Output (output-value)", "Factorized", "Collapsed"]:
        assert word in choice
    for name in ["FAFO", "FACO", "CAFO", "CACO"]:
        label = page.locator(f"label.{name.lower()}").first.inner_text()
        assert ("factorized" in label) == ("F" in name[::2])
        assert ("collapsed" in label) == ("C" in name[::2])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(open_page, explorer, scheme):
    page = open_page(explorer, color_scheme=scheme)
    colours = page.evaluate(
        """() => ["body", ".detail", "thead th", ".chart text", "#models th", ".legend span"].map((what) => {
          const style = getComputedStyle(document.querySelector(what));
          return what.startsWith(".chart") ? style.fill : style.color;
        })"""
    )
    card = page.evaluate("getComputedStyle(document.querySelector('main > section')).backgroundColor")
    for colour in colours:
        assert contrast(colour, card) > 4.5, (colour, card)


def contrast(first: str, second: str) -> float:
    """Contrast of two ``rgb(...)`` colours as the accessibility guidelines define it."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted([luminance(first), luminance(second)], reverse=True)
    return (light + 0.05) / (dark + 0.05)
