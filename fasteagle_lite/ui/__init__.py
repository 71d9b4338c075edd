"""The page: one Gradio app around a loaded engine."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from ..engine import Engine
from .race_tab import build_race
from .theme import CSS, HEAD, theme

__all__ = ["build", "launch"]

_HEADER = (
    "<h1>FastEagle Lite</h1><p>A language model writes one token a pass, but can check many: drafters guess ahead, the "
    "model verifies, and the text stays exactly its own. Race them here.</p>"
)


def build(engine: Engine) -> gr.Blocks:
    """The app, not started.  Visitors share the engine's weights and nothing else."""
    with gr.Blocks(title="FastEagle Lite", analytics_enabled=False) as demo:
        gr.HTML(_HEADER, apply_default_css=False, elem_id="fe-header")
        with gr.Tabs(elem_id="fe-tabs"), gr.Tab("Race", id="race"):
            build_race(engine)
        gr.HTML(_footnote(engine), apply_default_css=False, elem_id="fe-foot")
    return demo


def launch(engine: Engine, **options: Any) -> gr.Blocks:
    """Build the app and start its server; `options` go to `gr.Blocks.launch`, which blocks a script until Ctrl+C."""
    defaults: dict[str, Any] = {
        "theme": theme(),
        "css": CSS,
        "head": HEAD,
        "footer_links": ["api", "settings"],
        "run_history": False,  # it would write every frame of every race into the visitor's browser
        "ssr_mode": False,  # measured without: one process, no node
    }
    # Queue positions are told again every second: one told once, before the browser listens, is never seen.
    demo = build(engine).queue(max_size=32, status_update_rate=1)
    demo.launch(**defaults | options)
    return demo


def _footnote(engine: Engine) -> str:
    e = engine.environment
    return (
        f"<p>Target: {escape(e['target'])}, {e['dtype']}, on {escape(e['device'])}, {e['threads']} "
        f"thread{'' if e['threads'] == 1 else 's'}. Lanes take turns, never run at once; each clock counts its own rounds, "
        "and the prompt is read once for all.</p>"
    )
