"""Draw the diagrams of this folder: ``python docs/diagrams/draw.py``. A test compares them with what this writes.

Each lies on a card of its own and follows the system's light or dark mode, so it can be read on any page.
"""

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; text-anchor: middle; fill: #1f2430 }
.small { font-size: 11.5px; fill: #4c5463 } .head { font-weight: 600; font-size: 14px }
.card { fill: #fbfcfe; stroke: #d5dae3 } .line { fill: none; stroke: #5b6474; stroke-width: 1.4 }
.tip { fill: #5b6474 } .state { stroke-dasharray: 5 4 }
.token { fill: #eceff4; stroke: #9aa3b2 } .memory { fill: #d6f0dd; stroke: #3d8f57 }
.attention { fill: #d9e6fb; stroke: #4a76b8 } .join { fill: #fde8cf; stroke: #bb7a2a }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf1 } .small { fill: #b4bcca } .card { fill: #1d212b; stroke: #3a4150 }
  .line { stroke: #9aa3b2 } .tip { fill: #9aa3b2 }
  .token { fill: #323846; stroke: #78829a } .memory { fill: #1f4a2d; stroke: #58b377 }
  .attention { fill: #223e68; stroke: #6f9be0 } .join { fill: #59401c; stroke: #d99a4a }
}
"""


def box(x, y, width, height, kind, *lines):
    """A box with a line of text or two: the first in the middle of it, the second small."""
    middle = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    texts = [
        label(x + width / 2, middle + 16 * number, line, "small" if number else "plain")
        for number, line in enumerate(lines)
    ]
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([shape, *texts])


def arrow(*points, state=False):
    path = " ".join(f"{x},{y}" for x, y in points)
    dashed = " state" if state else ""
    return f'<polyline class="line{dashed}" points="{path}" marker-end="url(#tip)"/>'


def label(x, y, text, kind="small"):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def drawing(width, height, title, *parts):
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0,0.6 L8,4 L0,7.4 z"/></marker></defs>'
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            marker,
            card,
            *parts,
            "</svg>",
            "",
        ]
    )


def memory():
    return drawing(
        460, 366, "A neural memory: a key and its value are written into a small net, queries are answered",
        box(180, 14, 100, 30, "token", "token x"),
        *[arrow((230, 44), (230, 62), (x, 62), (x, 84)) for x in (59, 163, 277, 396)],
        box(14, 84, 90, 30, "token", "key k"), box(118, 84, 90, 30, "token", "value v"),
        box(222, 84, 110, 30, "token", "gates θ η α"), box(346, 84, 100, 30, "token", "query q"),  # noqa: RUF001
        arrow((59, 114), (59, 152)), arrow((163, 114), (163, 152)), arrow((277, 114), (277, 222)),
        arrow((396, 114), (396, 222)),
        box(14, 152, 194, 30, "join", "surprise ½ |M(k) - v|²"),
        arrow((163, 182), (163, 222)), arrow((59, 222), (59, 182)),
        box(14, 222, 80, 46, "memory", "memory", "before"),
        arrow((94, 245), (120, 245)),
        box(120, 222, 216, 46, "join", "one step of gradient descent", "step θ, momentum η, forgetting α"),  # noqa: RUF001
        arrow((336, 245), (362, 245)),
        box(362, 222, 84, 46, "memory", "memory", "after"),
        arrow((382, 268), (382, 294), (59, 294), (59, 268), state=True),
        label(208, 312, "carried to the next token: its size never grows"),
        arrow((421, 268), (421, 322)),
        box(346, 322, 100, 30, "token", "answer M(q)"),
    )  # fmt: skip


def panel(name, words, *parts):
    return drawing(200, 336, f"{name}: {words}", label(100, 26, name, "head"), label(100, 43, words), *parts)


def mac():
    return panel(
        "MAC", "memory as a context",
        box(50, 56, 100, 28, "token", "segment x"),
        arrow((74, 84), (74, 106)), arrow((134, 84), (134, 168)),
        box(14, 106, 106, 30, "memory", "memory: ask"), arrow((74, 136), (74, 168)),
        box(14, 168, 172, 42, "attention", "attention", "persistent, retrieved, x"),
        arrow((74, 210), (74, 234)), arrow((168, 210), (168, 284)),
        box(14, 234, 142, 28, "memory", "memory: write, ask"), arrow((74, 262), (74, 284)),
        box(50, 284, 136, 34, "join", "gate y ⊗ M(y)"),
    )  # fmt: skip


def mag():
    return panel(
        "MAG", "memory as a gate",
        box(50, 56, 100, 28, "token", "tokens x"),
        arrow((70, 84), (70, 134)), arrow((136, 84), (136, 134)),
        box(12, 134, 86, 46, "attention", "window", "attention"),
        box(106, 134, 82, 46, "memory", "memory", "write, ask"),
        arrow((70, 180), (70, 234)), arrow((136, 180), (136, 234)),
        box(32, 234, 136, 34, "join", "gate y ⊗ M(x)"),
    )  # fmt: skip


def mal():
    return panel(
        "MAL", "memory as a layer",
        box(50, 56, 100, 28, "token", "tokens x"), arrow((90, 84), (90, 114)),
        box(32, 114, 110, 42, "memory", "memory", "write, ask"), arrow((90, 156), (90, 184)),
        arrow((140, 84), (140, 98), (170, 98), (170, 197), (106, 197)),
        '<circle class="join" cx="90" cy="197" r="13"/>', label(90, 202, "+", "head"),
        arrow((90, 210), (90, 234)),
        box(32, 234, 116, 42, "attention", "window", "attention"),
    )  # fmt: skip


def lmm():
    return panel(
        "LMM", "the memory alone",
        box(50, 56, 100, 28, "token", "tokens x"), arrow((100, 84), (100, 134)),
        box(32, 134, 136, 46, "memory", "memory", "write, ask"), arrow((100, 180), (100, 234)),
        box(50, 234, 100, 28, "token", "answers M(q)"),
    )  # fmt: skip


DIAGRAMS = {"memory": memory, "mac": mac, "mag": mag, "mal": mal, "lmm": lmm}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
