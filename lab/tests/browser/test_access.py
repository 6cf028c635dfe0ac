"""Both pages for everybody: room on a phone, contrast, order of headings, texts for pictures, keyboard."""

from itertools import pairwise

import pytest

from fasterqk.pages import write_explorer
from fasterqk_lab.compare import STANDS, VERDICTS
from fasterqk_lab.figures import (
    plotting,
    save_document,
    save_dtaps,
    save_examples,
    save_figure,
    save_table,
)
from fasterqk_lab.page import write_page

ARMS = ["baseline", "faster QK"]
WIDTHS = [390, 1280]
SCHEMES = ["light", "dark"]

# Every visible text whose contrast with what is painted behind it is too low, as [text, contrast].
FAINT = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      layers.push(parse(getComputedStyle(one).backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const luminance = (color) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = color.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, noscript, .masked, option") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = over(parse(element.closest("svg") ? style.fill : style.color), ground);
    const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found.push([text.slice(0, 40), element.outerHTML.slice(0, 60), contrast]);
  }
  return found;
}"""

HEADINGS = "all => all.filter((one) => one.checkVisibility()).map((one) => Number(one.tagName[1]))"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A results folder with everything that a report shows, and long tables."""
    out = tmp_path_factory.mktemp("results")

    def interval(mean, half_width=0.02, n=5):
        return {"mean": mean, "half_width": half_width, "n": n}

    for name, title, stands, difference in [
        ("table-hatexplain-paper", "HateXplain, one layer", "more", interval(0.3)),
        ("table-kvqa-paper", "Generated key-value questions", "open", interval(-0.1, None, 1)),
    ]:
        effect = {
            "arm": "faster QK",
            "score": "mrta",
            "at": "level",
            "loss": 0.05,
            "null": 0.4,
            "ratio": 30,
            "p": 0.01,
        }
        effect |= {"ratio": 30, "before": interval(0.4), "after": interval(0.7), "difference": difference}
        effects = [{**effect, "stands": stands, "levels": 0.9, "progress": [0.2, 0.3]}]
        save_document(out, "effects", name, {"title": title, "setting": "5 seeds", "effects": effects})
    # Other scores have charts of their own.
    effects = [{**effect, "arm": stands, "score": "sufficiency_5", "stands": stands} for stands in STANDS]
    save_document(
        out, "effects", "faithfulness", {"title": "Faithfulness", "setting": "5 seeds", "effects": effects}
    )
    weights = {"baseline": [0.25, 0.25, 0.25, 0.25], "faster QK": [0.05, 0.8, 0.1, 0.05]}
    readings = {
        arm: {
            "prediction": "bad",
            "probability": 0.7,
            "layers": {"attention": row},
            "heads": {"attention": [row, row[::-1]]},
        }
        for arm, row in weights.items()
    }
    example = {
        "tokens": ["some", "hurtful", "words", "[read]"],
        "relevance": [0, 1, 0, 0],
        "label": "bad",
        "read": 3,
    }
    save_examples(
        out,
        "table-hatexplain-paper",
        title="HateXplain, one layer: where it looks",
        arms=ARMS,
        sensitive=True,
        examples=[{**example, "arms": readings}],
    )
    columns = [{"key": "metric", "label": "metric"}] + [
        {"key": f"c{k}", "label": f"a column {k} with a long name"} | ({"source": "paper"} if k > 6 else {})
        for k in range(12)
    ]
    rows = [
        {"metric": "comprehensiveness, mean over k (AOPC)"} | {f"c{k}": interval(0.5) for k in range(12)}
    ] * 40
    save_table(
        out, "table-hatexplain-paper-end", title="A long table", caption="ACMC.", columns=columns, rows=rows
    )
    with plotting() as plt:
        figure, axes = plt.subplots(figsize=(11.5, 3))
        axes.plot([1, 2], [3, 4], label="FAFO")
        axes.set(xlabel="ratio", ylabel="attention", title="(a) attention")
        save_figure(figure, out, "fig4", title="Figure 4", caption="FAFO.", rows=[{"x": 1}], see="It rises.")
    table = {"mean": [[1.0, 2.0], [0.0, 97.0]], "standard_deviation": None, "edges": (0, 0.5, 1)}
    save_dtaps({"arm": table}, out, "table-hatexplain-paper-dtap", title="DTAP", caption="Percent.")
    shared = {"where": "Table 1", "effect": "+0.10 ± 0.02, n = 5", "remark": "MRTA."}
    shared |= {"experiment": "table-main", "group": "depth"}
    claims = [{"claim": f"Claim {k}", "verdict": verdict} | shared for k, verdict in enumerate(VERDICTS)]
    save_document(out, "claims", "paper", {"title": "Claims", "claims": claims})
    return write_page(out)


@pytest.fixture(scope="module")
def pages(report, tmp_path_factory):
    return {
        "report": report,
        "explorer": write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html"),
    }


@pytest.fixture(scope="module")
def opened(open_shared_page, pages):
    """Every page at every width in every scheme, opened once, everything unfolded."""
    found = {}

    def get(name, width, scheme):
        key = name, width, scheme
        if key not in found:
            page = open_shared_page(
                pages[name], viewport={"width": width, "height": 844}, color_scheme=scheme
            )
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            page.locator(".examples > button").evaluate_all("all => all.forEach((one) => one.click())")
            page.evaluate(
                "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            found[key] = page
        return found[key]

    return get


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "explorer"])
def test_all_text_stands_out_and_nothing_is_wider_than_the_screen(opened, name, width, scheme):
    page = opened(name, width, scheme)
    assert page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["report", "explorer"])
def test_headings_go_down_one_level_at_a_time(opened, name):
    levels = opened(name, 1280, "light").locator("h1, h2, h3, h4, h5, h6").evaluate_all(HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels


def test_pictures_are_described_and_not_by_their_title(opened):
    page = opened("report", 1280, "light")
    for figure in page.locator("figure:has(img)").all():
        alt = figure.locator("img").get_attribute("alt")
        assert len(alt) > 20
        assert alt.strip(".") not in figure.locator("h3").inner_text()
    assert "attention against ratio" in page.locator("#figure-fig4 img").get_attribute("alt")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "explorer"])
def test_nothing_scrolls_that_the_keyboard_cannot_reach(opened, name, width):
    page = opened(name, width, "light")
    unreachable = page.evaluate(
        """() => [...document.querySelectorAll("*")].filter((one) => {
          const style = getComputedStyle(one);
          const scrolls = one.scrollWidth > one.clientWidth + 1 && /auto|scroll/.test(style.overflowX);
          return scrolls && one.tabIndex < 0;
        }).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert unreachable == []


def test_what_scrolls_can_be_reached_and_scrolled_by_keyboard(opened):
    page = opened("report", 390, "light")
    places = page.locator(".scroll")
    assert places.count() >= 3
    for place in places.all():
        assert place.get_attribute("tabindex") == "0"
        assert place.get_attribute("aria-label")
    table = page.locator("#table-table-hatexplain-paper-end .scroll")
    table.focus()
    page.keyboard.press("ArrowRight")
    moved = table.evaluate(
        """(one) => one.scrollLeft || new Promise((done) => {
          one.addEventListener("scroll", () => done(one.scrollLeft), { once: true });
        })"""
    )
    assert moved > 0


def test_a_wide_table_shows_its_names_a_number_and_a_hint_on_a_phone(opened):
    page = opened("report", 390, "light")
    table = page.locator("#table-table-hatexplain-paper-end")
    box = table.locator(".scroll").bounding_box()
    number = table.locator("tbody tr").first.locator("td").nth(1).bounding_box()
    assert number["x"] + number["width"] <= box["x"] + box["width"]
    assert table.locator(".hint").is_visible()
    assert table.locator("tbody tr").count() == 40
    assert table.locator("tbody tr").last.is_visible()  # not cut: the page scrolls, not a box inside it


def test_the_first_screen_holds_the_answer_the_example_and_the_chart(open_page, report):
    page = open_page(report, viewport={"width": 1280, "height": 800})
    answer = page.locator(".answer").inner_text()
    assert answer.endswith(
        "puts more attention on the relevant words in HateXplain; open in Key-value questions."
    )
    for part in [".answer", ".glance img", "[data-glance] .words >> nth=1"]:
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 800, part
    words = page.locator("[data-glance]")
    assert "hurtful" not in words.inner_text()
    assert "hurtful" not in words.inner_html()
    words.get_by_role("button").press("Enter")
    assert "hurtful" in words.inner_text()


def test_a_head_can_be_chosen(opened):
    page = opened("report", 1280, "light")
    viewer = page.locator("[data-examples]")
    shades = "all => all.map((one) => Number(one.style.getPropertyValue('--weight')))"
    words = viewer.locator(".pane").nth(1).locator(".words span")
    assert words.evaluate_all(shades).index(1) == 1
    viewer.get_by_label("head").select_option("2")
    assert words.evaluate_all(shades).index(1) == 2
    viewer.get_by_label("head").select_option("all, mean")


def test_everything_is_unfolded_for_print(open_page, report):
    page = open_page(report)
    table = page.locator("#table-table-hatexplain-paper-end table")
    assert not table.is_visible()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert table.is_visible()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert not table.is_visible()


def test_a_picture_follows_the_scheme(opened):
    """The picture is drawn on the card itself: no white slab on a dark page."""
    page = opened("report", 1280, "dark")
    picture = page.locator("#figure-fig4 img")
    assert picture.evaluate("one => getComputedStyle(one).backgroundColor") == "rgba(0, 0, 0, 0)"
    pixels = picture.evaluate(
        """async (one) => {
          await one.decode();
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [400, 100];
          const context = canvas.getContext("2d");
          context.drawImage(one, 0, 0, 400, 100);
          const { data } = context.getImageData(0, 0, 400, 100);
          const sum = [0, 0];
          for (let k = 0; k < data.length; k += 4) {
            if (data[k + 3] <= 128) continue;
            sum[0] += data[k] + data[k + 1] + data[k + 2];
            sum[1] += 3;
          }
          return [data[3], sum[0] / sum[1]];
        }"""
    )
    assert pixels[0] == 0  # the corner is transparent
    assert pixels[1] > 128  # and what is drawn is light
