"""Lanes as HTML: the text so far, each token marked by where it came from, the figures and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..trace import Trace, speedup

LEGEND = (
    '<div class="fe-legend"><span><span class="fe-draft">accepted draft</span>: the drafter guessed it, the target agreed'
    '</span><span><span class="fe-bonus">bonus</span>: the target’s own token, one in every round</span></div>'
)


@dataclass(frozen=True)
class LaneView:
    """A lane as far as it has got.

    `difference` is the index of the first token that is not plain decoding's; None while there is none.  `compared` says
    that both outputs are whole, so that None means identical and not just identical so far.
    """

    title: str
    note: str
    trace: Trace
    running: bool = False
    difference: int | None = None
    compared: bool = False


def lanes_html(lanes: Sequence[LaneView], max_new_tokens: int) -> str:
    """All lanes side by side; the first one is plain decoding, the reference."""
    plain = lanes[0].trace
    # Once a lane has met the end of the text, that is where the gauges end.
    length = max((len(lane.trace.tokens) for lane in lanes if lane.trace.finish == "eos"), default=max_new_tokens)
    return f'<div class="fe-lanes">{"".join(_lane(lane, plain, length) for lane in lanes)}</div>{LEGEND}'


def marked_text(trace: Trace) -> str:
    """The output with a mark around every token; a token that completes no character yet has no piece and no mark."""
    marked = [
        f'<span class="fe-{origin}">{escape(piece)}</span>'
        for step in trace.rounds
        for origin, piece in zip(step.origins, step.text, strict=True)
        if piece
    ]
    if trace.finish == "eos" and trace.rounds[-1].text[-1]:
        marked[-1] = f'<span class="fe-end" title="end of the text">{escape(trace.rounds[-1].text[-1])}</span>'
    return "".join(marked)


def _lane(lane: LaneView, plain: Trace, length: int) -> str:
    trace, is_plain = lane.trace, lane.trace is plain
    ratio = speedup(plain, trace)
    faster = "" if ratio is None or is_plain or ratio <= 1 else " fe-faster"
    number = "–" if ratio is None else f"{ratio:.2f}×"
    relation = "the reference" if is_plain else "slower than plain" if ratio and ratio < 1 else "the speed of plain"
    share = min(1.0, len(trace.tokens) / length)
    state = "running" if lane.running else {"eos": "done", "length": "done", "stopped": "stopped"}[trace.finish]
    figures = (
        (f"{trace.tokens_per_second:.1f}", "tokens/s", "Tokens a second, on the lane's own clock"),
        (f"{trace.tau:.2f}", "tokens/round τ", "Mean accepted length τ: committed tokens a round, the bonus included"),
        (f"{len(trace.rounds):,}", "rounds", "Forward passes of the target"),
    )
    return (
        f'<article class="fe-lane" aria-label="{escape(lane.title)}" data-state="{state}">'
        f'<header><h3>{escape(lane.title)}</h3><span class="fe-state fe-{state}">{state}</span></header>'
        f'<p class="fe-kind">{escape(lane.note)}</p>'
        f'<p class="fe-big{faster}">{number}<small>{relation}</small></p>'
        f'<div class="fe-gauge" role="img" aria-label="{len(trace.tokens)} of {length} tokens">'
        f'<div style="width:{share:.1%}"></div></div><dl class="fe-figures">'
        + "".join(f'<div title="{title}"><dt>{name}</dt><dd>{value}</dd></div>' for value, name, title in figures)
        + f'</dl><div class="fe-text" tabindex="0" role="region" aria-label="Text of {escape(lane.title)}">'
        f'<p dir="auto">{marked_text(trace)}</p></div>{_verdict(lane, is_plain)}</article>'
    )


def _verdict(lane: LaneView, is_plain: bool) -> str:
    if is_plain:
        return '<p class="fe-verdict">the tokens that every lane must give</p>'
    if lane.difference is not None:
        return f'<p class="fe-verdict fe-differs">✕ differs from plain at token {lane.difference + 1:,}</p>'
    if lane.compared:
        return '<p class="fe-verdict fe-same">✓ identical to plain</p>'
    return f'<p class="fe-verdict">{"✓ identical so far" if lane.trace.rounds else ""}</p>'
