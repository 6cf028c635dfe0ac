"""Draw the README's picture from a results folder: one sentence, read by both arms.

fasterqk-lab reproduce table-agreement --out out && python tools/draw_overview.py out docs/images/overview.svg
"""

import argparse
import html
import json
from pathlib import Path

from fasterqk.files import write_text

# Type of 18 in a picture 640 wide: 20 pixels at 700, 11 on a phone.
WIDTH, MARGIN, TYPE, LETTER, GAP, LINE = 640, 20, 18, 9.6, 13, 36
ACCENT, INK, PAPER, MUTED = "#0072B2", "#1b1b1f", "#ffffff", "#5c5c64"
WORDS = {"baseline": "equal rates", "faster QK": "faster QK, ratio 30"}


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    settings = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{settings}>{html.escape(words)}</text>'


def block(x: float, y: float, width: float, weight: float) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="28" rx="5"'
    return f'<rect {size} fill="{ACCENT}" fill-opacity="{weight:.3f}"/>'


def draw_arm(name: str, example: dict, top: float) -> tuple[list[str], float]:
    """The tokens, each on a block as dark as the attention it gets, and where the next arm begins."""
    weights = example["arms"][name]["layers"]["attention"]
    relevant = sum(w for w, r in zip(weights, example["relevance"], strict=True) if r)
    heading = f"{WORDS[name]}: {relevant:.0%} of the attention on the subject"
    parts, x, y = [text(MARGIN, top, heading, fill=INK, font_weight=600)], float(MARGIN), top + 14
    for token, weight, relevance in zip(example["tokens"], weights, example["relevance"], strict=True):
        word = "…" if token == "[read]" else token
        width = LETTER * len(word) + GAP
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        color = PAPER if weight > 0.55 else INK
        parts += [
            block(x, y, width, weight),
            text(x + width / 2, y + 20, word, fill=color, text_anchor="middle"),
        ]
        if relevance:
            line = f'x1="{x + 3:.1f}" x2="{x + width - 3:.1f}" y1="{y + 31:.1f}" y2="{y + 31:.1f}"'
            parts.append(f'<line {line} stroke="{ACCENT}" stroke-width="3"/>')
        x += width + 2
    return parts, y + 64


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the README's picture")
    parser.add_argument("out", type=Path, help="results folder of `fasterqk-lab reproduce table-agreement`")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--example", type=int, default=6, help="which example (default: 6)")
    arguments = parser.parse_args()
    document = (arguments.out / "examples" / "table-agreement-paper.json").read_text(encoding="utf-8")
    example = json.loads(document)["examples"][arguments.example]
    notes = [
        f"Is the verb that follows (…) singular or plural? The subject decides: {example['label']}.",
        "Both models answer correctly; one of them looks at the subject.",
    ]
    first, below = draw_arm("baseline", example, 34)
    second, below = draw_arm("faster QK", example, below)
    scale, x = [text(MARGIN, below, "attention:", fill=MUTED, font_size=15)], MARGIN + 84.0
    for weight in (0, 0.25, 0.5, 0.75, 1):
        ink = PAPER if weight > 0.55 else INK
        scale += [
            block(x, below - 19, 50, weight),
            text(x + 25, below, f"{weight:.0%}", fill=ink, font_size=14, text_anchor="middle"),
        ]
        x += 52
    scale.append(text(x + 12, below, "underlined: the subject", fill=MUTED, font_size=15))
    explained = [
        text(MARGIN, below + 32 + 22 * row, note, fill=MUTED, font_size=15) for row, note in enumerate(notes)
    ]
    height = below + 70
    lines = "\n".join([*first, *second, *scale, *explained])
    picture = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height:.0f}"
 font-family="system-ui, sans-serif" font-size="{TYPE}" role="img"
 aria-label="{html.escape(" ".join(notes))}">
<rect width="{WIDTH}" height="{height:.0f}" rx="10" fill="{PAPER}"/>
{lines}
</svg>
"""
    write_text(arguments.picture, picture)


if __name__ == "__main__":
    main()
