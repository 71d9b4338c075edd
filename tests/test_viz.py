"""The pictures: structure, marks and escaping.  Everything is parsed, so that broken markup fails too."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from fasteagle_lite.trace import Round, Trace, speedup
from fasteagle_lite.viz.lanes import LaneView, lanes_html, marked_text
from fasteagle_lite.viz.style import CSS
from fasteagle_lite.viz.tree import percent, tree_html, tree_svg, visible

HOSTILE = ["<script>alert(1)</script>", "${alert(1)}", "`x`", "{{x}}", '"><b a="', "a & b", "مرحبا", "🦅🐌"]
SCHEMES = re.findall(r"^(?::root|\.dark) \{(.*?)\}", CSS, flags=re.S | re.M)  # light, dark

#     0 ─┬─ 1 ─┬─ 3 ── 5        1 and 4 are accepted, the bonus hangs below 4
#        └─ 2  └─ 4
ROUND = Round(
    index=6,
    tokens=(10, 11, 12, 13, 14, 15),
    parents=(-1, 0, 0, 1, 1, 3),
    logprobs=(0.0, math.log(0.5), math.log(0.25), math.log(0.4), math.log(0.3), math.log(0.001)),
    node_text=(" root", " one", "two", "three", "four", "\n"),
    passes=1,
    accepted=(1, 4),
    bonus=99,
    bonus_text=" bonus",
    committed=(11, 14, 99),
    text=(" one", "four", " bonus"),
    draft_seconds=0.004,
    verify_seconds=0.015,
    rest_seconds=0.001,
)


def trace(*rounds: Round, **changes: Any) -> Trace:
    return Trace(**({"lane": "cascade", "prompt": "?", "prompt_tokens": (1,), "rounds": rounds} | changes))


def parsed(markup: str) -> ET.Element:
    return ET.fromstring(f"<div>{markup}</div>")


def nodes(markup: str) -> list[ET.Element]:
    return [g for g in parsed(markup).iter("g") if "fe-node" in g.get("class", "")]


def words(element: ET.Element) -> str:
    return "".join(element.itertext())


def test_every_node_and_the_bonus_are_drawn_with_their_kind():
    drawn = [(g.get("class", "").split()[1], g.findall("text")[0].text) for g in nodes(tree_svg(ROUND))]
    assert drawn == [
        ("fe-root", "␣root"),
        ("fe-accepted", "␣one"),
        ("fe-rejected", "two"),
        ("fe-rejected", "three"),
        ("fe-accepted", "four"),
        ("fe-rejected", "⏎"),
        ("fe-bonus", "␣bonus"),
    ]


def test_kinds_differ_in_words_and_probabilities_are_shown():
    notes = [g.findall("text")[1].text for g in nodes(tree_svg(ROUND))]
    assert notes == ["root", "✓ 50%", "✕ 25%", "✕ 40%", "✓ 30%", "✕ <1%", "+ bonus"]
    assert "Accepted draft token: “four”, drafter probability 30%" in [
        g.findtext("title") for g in nodes(tree_svg(ROUND))
    ]


def test_every_edge_leads_from_parent_to_child():
    svg = parsed(tree_svg(ROUND))
    boxes = [
        {k: float(g.find("rect").get(k)) for k in ("x", "y", "width", "height")}  # type: ignore[union-attr, arg-type]
        for g in nodes(tree_svg(ROUND))
    ]
    ends = []
    for path in svg.iter("path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.get("d", ""))]
        ends.append((tuple(numbers[:2]), tuple(numbers[-2:])))
    expected = [
        ((boxes[p]["x"] + boxes[p]["width"], boxes[p]["y"] + 20), (boxes[n]["x"], boxes[n]["y"] + 20))
        for n, p in enumerate((*ROUND.parents, 4))
        if p >= 0
    ]
    for (a, b), (c, d) in zip(ends, expected, strict=True):
        assert a == pytest.approx(c, abs=0.2) and b == pytest.approx(d, abs=0.2)


def test_boxes_lie_inside_the_picture_and_never_overlap():
    wide = replace(ROUND, tokens=tuple(range(40)), parents=(-1, *(i // 3 for i in range(39))),
                   logprobs=(0.0,) * 40, node_text=tuple(f"token {i}" * (i % 4) for i in range(40)), accepted=(), committed=(99,))  # fmt: skip
    svg = parsed(tree_svg(wide)).find("svg")
    assert svg is not None
    boxes = [[float(r.get(k, "")) for k in ("x", "y", "width", "height")] for r in svg.iter("rect")]
    assert len(boxes) == 41
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= float(svg.get("width", "")) and y + h <= float(svg.get("height", ""))
        for x2, y2, w2, h2 in boxes[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_no_bonus_where_an_accepted_token_ended_the_text():
    ended = replace(ROUND, committed=(11, 14), text=(" one", "four"))
    assert "fe-bonus" not in tree_svg(ended)
    assert "2 accepted + 0 bonus = 2 tokens" in tree_html(ended)


def test_plain_decoding_is_a_root_and_a_bonus():
    plain = replace(ROUND, tokens=(10,), parents=(-1,), logprobs=(0.0,), node_text=("a",), passes=0, accepted=(),
                    committed=(99,), text=("b",))  # fmt: skip
    assert [g.get("class") for g in nodes(tree_svg(plain))] == ["fe-node fe-root", "fe-node fe-bonus"]
    assert "nothing drafted, 0 accepted + 1 bonus = 1 token ·" in words(parsed(tree_html(plain)))


def test_a_drafter_without_a_network_has_no_probabilities():
    assert "%" not in words(parsed(tree_svg(replace(ROUND, passes=0))))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_shown_as_it_is_and_never_becomes_markup(text):
    step = replace(ROUND, node_text=(text,) * 6, bonus_text=text, text=(text, "", "."))
    tree = parsed(tree_html(step))
    assert f"“{visible(text)}”" in words(tree)
    lanes = parsed(lanes_html([LaneView("<i>", "", trace(step)), LaneView(text, text, trace(step))], 9))
    assert words(lanes).count(text) >= 4
    for element in (*tree.iter(), *lanes.iter()):
        assert element.tag not in ("script", "b a") and not any(name.startswith("on") for name in element.attrib)


def test_tokens_are_marked_by_origin_and_whitespace_is_kept():
    spans = list(parsed(marked_text(trace(replace(ROUND, text=(" one\n", "", "  bonus"))))))
    assert [(s.get("class"), s.text) for s in spans] == [("fe-draft", " one\n"), ("fe-bonus", "  bonus")]
    assert re.search(r"\.fe-text p \{[^}]*white-space: pre-wrap", CSS)


def test_the_last_token_of_an_ended_text_is_set_apart():
    spans = list(parsed(marked_text(trace(replace(ROUND, text=("a", "b", "<|end|>")), finish="eos"))))
    assert [(s.get("class"), s.text) for s in spans][-1] == ("fe-end", "<|end|>")


def figures(markup: str, lane: int) -> str:
    return words(list(parsed(markup).iter("article"))[lane])


def test_speed_is_relative_to_plain_and_slower_is_said():
    plain = trace(replace(ROUND, accepted=(), committed=(11,), text=("a",)))  # 1 token in 20 ms
    fast = trace(ROUND)  # 3 tokens in 20 ms
    slow = trace(replace(ROUND, accepted=(), committed=(11,), text=("a",), draft_seconds=0.024))
    assert speedup(plain, fast) == pytest.approx(3.0)
    page = lanes_html([LaneView("plain", "", plain), LaneView("fast", "", fast), LaneView("slow", "", slow)], 96)
    assert "1.00×the reference" in figures(page, 0)
    assert "3.00×" in figures(page, 1) and "slower" not in figures(page, 1)
    assert "0.50×slower than plain" in figures(page, 2)
    assert "150.0" in figures(page, 1) and "3.00" in figures(page, 1)


def test_gauges_end_where_a_lane_met_the_end_of_the_text():
    done, behind = trace(ROUND, ROUND, finish="eos"), trace(ROUND, finish="stopped")
    page = lanes_html([LaneView("plain", "", behind, running=True), LaneView("done", "", done)], 96)
    assert re.findall(r"width:([\d.]+)%", page) == ["50.0", "100.0"]
    assert "width:3.1%" in lanes_html([LaneView("plain", "", behind, running=True)], 96)


def test_before_the_first_round_there_is_no_figure():
    page = lanes_html([LaneView("plain", "", trace(finish="stopped"), running=True)] * 2, 96)
    assert "–" in figures(page, 0) and "running" in figures(page, 0) and "×" not in figures(page, 0)


@pytest.mark.parametrize(
    ("view", "verdict"),
    [
        ({"compared": True}, "✓ identical to plain"),
        ({}, "✓ identical so far"),
        ({"difference": 11, "compared": True}, "✕ differs from plain at token 12"),
    ],
)
def test_verdicts(view, verdict):
    plain, other = trace(ROUND), trace(replace(ROUND, index=7))
    page = lanes_html([LaneView("plain", "", plain), LaneView("other", "", other, **view)], 96)
    assert figures(page, 1).endswith(verdict)
    assert "✓" not in figures(page, 0)


def test_both_colour_schemes_define_the_same_variables_and_use_no_other():
    light, dark = (set(re.findall(r"(--fe-[\w-]+):", scheme)) for scheme in SCHEMES)
    used = set(re.findall(r"var\((--fe-[\w-]+)\)", CSS))
    assert used <= light and {name for name in light if name not in ("--fe-sans", "--fe-mono")} == dark


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize(
    ("front", "back"),
    [("ink", "card"), ("ink", "well"), ("ink", "tint"), ("soft", "card"), ("soft", "page"), ("soft", "well"),
     ("accent", "card"), ("accent", "tint"), ("on-accent", "accent"), ("ink", "warn-tint"), ("warn", "card"), ("ink", "line")],
)  # fmt: skip
def test_contrast(scheme, front, back):
    """WCAG AA asks 4.5 of text."""
    colours = dict(re.findall(r"--fe-([\w-]+): (#\w{6})", SCHEMES[scheme]))
    low, high = sorted((_luminance(colours[front]), _luminance(colours[back])))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_percent():
    assert [percent(p) for p in (0.0, 0.001, 0.5, 1.0)] == ["0%", "<1%", "50%", "100%"]


def test_visible():
    assert visible(" a\n\t\x00") == "␣a⏎⇥␀"
