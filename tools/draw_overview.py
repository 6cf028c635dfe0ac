"""Draw the README's picture from a results folder: one sentence, read by both arms.

fasterqk-lab reproduce table-agreement --out out && python tools/draw_overview.py out docs/images/overview.svg
"""

import argparse
import html
import json
from pathlib import Path

from fasterqk.files import write_text

WIDTH, MARGIN, LETTER, GAP = 860, 24, 8.4, 10
ACCENT, INK, PAPER, MUTED = "#0072B2", "#1b1b1f", "#ffffff", "#6a6a72"
WORDS = {"baseline": "equal learning rates", "faster QK": "query-key learns 30 times faster"}


def draw_arm(name: str, example: dict, top: float) -> str:
    """One row of tokens, each on a block as dark as the attention it gets."""
    arm = example["arms"][name]
    weights = arm["layers"]["attention"]
    relevant = sum(w for w, r in zip(weights, example["relevance"], strict=True) if r)
    heading = f"{WORDS[name]}: {relevant:.0%} of the attention on the subject"
    parts = [f'<text x="{MARGIN}" y="{top}" fill="{INK}" font-weight="600">{html.escape(heading)}</text>']
    x = float(MARGIN)
    for token, weight, relevance in zip(example["tokens"], weights, example["relevance"], strict=True):
        word = "…" if token == "[read]" else token
        size = LETTER * len(word) + GAP
        dark = weight > 0.55
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 12}" width="{size:.1f}" height="28" rx="5" fill="{ACCENT}" '
            f'fill-opacity="{weight:.3f}"/><text x="{x + size / 2:.1f}" y="{top + 31}" text-anchor="middle" '
            f'fill="{PAPER if dark else INK}">{html.escape(word)}</text>'
        )
        if relevance:
            line = f'x1="{x + 3:.1f}" x2="{x + size - 3:.1f}" y1="{top + 45}" y2="{top + 45}"'
            parts.append(f'<line {line} stroke="{ACCENT}" stroke-width="3"/>')
        x += size + 2
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the README's picture")
    parser.add_argument("out", type=Path, help="results folder of `fasterqk-lab reproduce table-agreement`")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--example", type=int, default=6, help="which example (default: 6)")
    arguments = parser.parse_args()
    text = (arguments.out / "examples" / "table-agreement-paper.json").read_text(encoding="utf-8")
    example = json.loads(text)["examples"][arguments.example]
    label, height = example["label"], 210
    note = (
        f"Is the verb that follows singular or plural? The underlined subject decides ({label}). "
        "Both models are right; one of them looks."
    )
    picture = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"
 font-family="system-ui, sans-serif" font-size="15" role="img" aria-label="{html.escape(note)}">
<rect width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>
{draw_arm("baseline", example, 36)}
{draw_arm("faster QK", example, 114)}
<text x="{MARGIN}" y="{height - 18}" fill="{MUTED}" font-size="13">{html.escape(note)}</text>
</svg>
"""
    write_text(arguments.picture, picture)


if __name__ == "__main__":
    main()
