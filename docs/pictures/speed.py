#!/usr/bin/env python3
"""Draws docs/pictures/speed.svg from the tables of docs/performance/attention.md: speed.py [--check]

The numbers, their card and their date stand in that page alone. With --check it fails if the
picture differs from the tables. It needs nothing but Python.
"""
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLES = HERE.parent / "performance/attention.md"
PICTURE = HERE / "speed.svg"
CASES = [
    "D64 causal B4 H64 S4096",
    "D128 causal B4 H32 S4096",
    "D256 causal B4 H16 S4096",
    "D512 causal B4 H8 S4096",
    "D512 causal, 8 query heads : 1, S16384",
    "D256 window 512, 8 : 1, S16384",
]
PANELS = [
    ("Forward", "## Forward in bf16 on an H200", 4, 5),
    ("Backward", "## Backward in bf16 on an H200", 2, None),
]
COLORS = {"attention-cube": "#1f6feb", "best peer": "#9aa4b2", "Burn's own (f16)": "#d29922"}
LABEL, WIDTH, BAR, GAP, FULL = 270, 880, 13, 14, 800


def number(cell):
    return float(cell.split()[0]) if cell else None


def rows(heading, peer, burn):
    """The table below `heading`: TFLOP/s of single launches here, of the best peer and of Burn."""
    section = TABLES.read_text(encoding="utf8").split(heading + "\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| D")
    ]
    table = {row[0]: row for row in cells}
    for case in CASES:
        row = table[case]
        speeds = {"attention-cube": number(row[1]), "best peer": number(row[peer])}
        speeds["Burn's own (f16)"] = number(row[burn]) if burn else None
        yield case, {name: speed for name, speed in speeds.items() if speed}


def text(x, y, content, extra=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {extra}>{escape(content)}</text>'


def draw():
    parts, y = [], 30
    title = "Attention on one NVIDIA H200, bf16, 2026-11-22, TFLOP/s (longer is faster)"
    parts.append(text(16, y, title, 'font-size="15" font-weight="600"'))
    x = 16
    for name, color in COLORS.items():
        parts.append(f'<rect x="{x}" y="{y + 14}" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 18, y + 25, name))
        x += 150
    y += 44
    for panel, heading, peer, burn in PANELS:
        y += 16
        parts.append(text(16, y, panel, 'font-weight="600"'))
        y += 10
        for case, speeds in rows(heading, peer, burn):
            middle = y + BAR * len(speeds) / 2 + 4
            parts.append(text(LABEL - 10, middle, case, 'text-anchor="end"'))
            for name, speed in speeds.items():
                length = speed / FULL * (WIDTH - LABEL - 60)
                parts.append(
                    f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 1}" '
                    f'fill="{COLORS[name]}"/>'
                )
                parts.append(text(LABEL + length + 6, y + BAR - 3, f"{speed:g}", 'font-size="11"'))
                y += BAR
            y += GAP - 4
    height = y + 10
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#24292f"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f"<g {style}>\n{body}\n</g>\n</svg>\n"
    )


def main():
    picture = draw()
    if "--check" in sys.argv[1:]:
        found = PICTURE.read_text(encoding="utf8") if PICTURE.exists() else ""
        sys.exit(found != picture and f"{PICTURE} is not what its tables say; run {__file__}")
    PICTURE.write_text(picture, encoding="utf8")


if __name__ == "__main__":
    main()
