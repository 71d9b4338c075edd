"""A round's draft tree as SVG: what the drafter proposed, what the target accepted, and the token it added itself."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..trace import Round

_ROW, _HEIGHT, _GAP, _EDGE = 50, 40, 34, 4  # pixels: a leaf's row, a node's box, between columns, around the picture
_LONGEST = 14  # columns of text that a label may take

LEGEND = (
    '<div class="fe-legend">'
    '<span><i class="fe-key fe-root"></i><b>root</b>: the last token of the text so far</span>'
    '<span><i class="fe-key fe-accepted"></i><b>✓ accepted</b>: the target agrees</span>'
    '<span><i class="fe-key fe-rejected"></i><b>✕ rejected</b>: drafted in vain</span>'
    '<span><i class="fe-key fe-bonus"></i><b>+ bonus</b>: the target’s own next token</span>'
    "</div>"
)


@dataclass(frozen=True)
class _Node:
    """A box of the picture.  kind: root, accepted, rejected or bonus; `probability` is None where the drafter has none."""

    text: str
    parent: int
    kind: str
    probability: float | None = None

    @property
    def note(self) -> str:
        mark = {"root": "root", "accepted": "✓", "rejected": "✕", "bonus": "+ bonus"}[self.kind]
        return mark if self.probability is None else f"{mark} {percent(self.probability)}"

    @property
    def title(self) -> str:
        name = {
            "root": "Root, the last token of the text so far",
            "accepted": "Accepted draft token",
            "rejected": "Rejected draft token",
            "bonus": "Bonus, the target's own next token",
        }[self.kind]
        chance = "" if self.probability is None else f", drafter probability {percent(self.probability)}"
        return f"{name}: “{visible(self.text)}”{chance}"


def percent(probability: float) -> str:
    return "<1%" if 0 < probability < 0.005 else f"{probability:.0%}"


def visible(text: str) -> str:
    """A label on one line: spaces and control characters are given a shape."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(chr(0x2400 + ord(c)) if c < " " else c for c in text)


def tree_svg(step: Round) -> str:
    """The whole tree of a round, root at the left; every node of the draft is in it, and the bonus if it was used."""
    nodes = _nodes(step)
    rows = _rows([node.parent for node in nodes])
    depths = [0]
    for node in nodes[1:]:
        depths.append(depths[node.parent] + 1)
    labels = [_short(visible(node.text)) for node in nodes]
    widths = [0.0] * (max(depths) + 1)
    for depth, label, node in zip(depths, labels, nodes, strict=True):
        widths[depth] = max(widths[depth], 8.0 * _columns(label) + 20, 6.2 * len(node.note) + 20)
    lefts = [_EDGE + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    middles = [_EDGE + _HEIGHT / 2 + _ROW * row for row in rows]

    edges, boxes = [], []
    for node, depth, label, y in zip(nodes, depths, labels, middles, strict=True):
        left, width = lefts[depth], widths[depth]
        if node.parent >= 0:
            x0, y0 = lefts[depth - 1] + widths[depth - 1], middles[node.parent]
            bend = (x0 + left) / 2
            curve = f"M{x0:.1f} {y0:.1f}C{bend:.1f} {y0:.1f} {bend:.1f} {y:.1f} {left:.1f} {y:.1f}"
            edges.append(f'<path class="fe-to-{node.kind}" d="{curve}"/>')
        radius = _HEIGHT / 2 if node.kind == "bonus" else 8
        boxes.append(
            f'<g class="fe-node fe-{node.kind}"><title>{escape(node.title)}</title>'
            f'<rect x="{left:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="{radius:g}"/>'
            f'<text x="{left + width / 2:.1f}" y="{y - 2:.1f}">{escape(label)}</text>'
            f'<text class="fe-note" x="{left + width / 2:.1f}" y="{y + 13:.1f}">{escape(node.note)}</text></g>'
        )
    width, height = lefts[-1] + widths[-1] + _EDGE, max(middles) + _HEIGHT / 2 + _EDGE
    name = f"Draft tree of round {step.index + 1}: {_counts(step)}"
    return (
        f'<svg class="fe-tree" role="img" aria-label="{escape(name)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def tree_html(step: Round) -> str:
    """The tree in a scrollable frame of fixed height, with the round's figures above and a legend below."""
    times = f"draft {1e3 * step.draft_seconds:.1f} ms, verify {1e3 * step.verify_seconds:.1f} ms"
    return (
        f'<p class="fe-round"><strong>Round {step.index + 1}</strong> · {_counts(step)} · {times}</p>'
        f'<div class="fe-canvas" tabindex="0" role="region" aria-label="Draft tree">{tree_svg(step)}</div>{LEGEND}'
    )


def _counts(step: Round) -> str:
    drafted, accepted = len(step.tokens) - 1, len(step.accepted)
    bonus = len(step.committed) - accepted
    effort = f" in {step.passes} pass{'' if step.passes == 1 else 'es'}" if step.passes else ""
    return (
        f"{drafted or 'nothing'} drafted{effort}, "
        f"{accepted} accepted + {bonus} bonus = {len(step.committed)} token{'' if len(step.committed) == 1 else 's'}"
    )


def _nodes(step: Round) -> list[_Node]:
    """The draft's nodes in their own order, then the bonus below the last accepted one."""
    drafted = bool(step.passes)  # a drafter without a neural pass has no probabilities
    nodes = [_Node(step.node_text[0], -1, "root")]
    for i in range(1, len(step.tokens)):
        kind = "accepted" if i in step.accepted else "rejected"
        nodes.append(_Node(step.node_text[i], step.parents[i], kind, math.exp(step.logprobs[i]) if drafted else None))
    if len(step.committed) > len(step.accepted):  # not so where an accepted token ended the text
        nodes.append(_Node(step.bonus_text, step.accepted[-1] if step.accepted else 0, "bonus"))
    return nodes


def _rows(parents: Sequence[int]) -> list[float]:
    """Vertical places: leaves on rows of their own from top to bottom, a parent halfway between its outer children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, leaves, stack = [0.0] * len(parents), 0, [0]
    while stack:
        node = stack.pop()
        stack += reversed(children[node])
        if not children[node]:
            rows[node], leaves = float(leaves), leaves + 1
    for node in reversed(range(len(parents))):  # children come after their parents
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return rows


def _columns(text: str) -> int:
    """Width in monospaced columns; emoji and CJK take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _short(text: str) -> str:
    return text if _columns(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
