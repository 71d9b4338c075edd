"""The page's own look: system fonts (no request leaves the machine), warm neutrals, one accent."""

from __future__ import annotations

import gradio as gr

from ..viz.style import CSS as VIZ_CSS

_FONT = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SF Mono", "Cascadia Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

CSS = (
    VIZ_CSS
    + """
body { background: var(--fe-page) !important; }
.gradio-container { max-width: 1240px !important; margin: 0 auto !important; }
.gradio-container main { padding: 28px 20px 40px; }
.gradio-container .html-container { padding: 0; }
.gradio-container .form { border: 0; background: none; box-shadow: none; }
#fe-header h1 { margin: 0; font-size: 34px; font-weight: 700; letter-spacing: -0.03em; line-height: 1.2; color: var(--fe-ink); }
#fe-header p { max-width: 70ch; margin: 8px 0 0; font-size: 17px; line-height: 1.55; color: var(--fe-soft); }
#fe-ask, #fe-trees { gap: 14px; padding: 18px; background: var(--fe-card); border: 1px solid var(--fe-line); border-radius: 14px; }
#fe-prompt, #fe-tree-controls .block { padding: 0; border: 0 !important; box-shadow: none; background: none; overflow: visible !important; }
#fe-prompt textarea { font-size: 17px; line-height: 1.5; padding: 12px 14px; }
#fe-actions { align-items: center; gap: 10px; }
#fe-examples { flex: 1 1 300px; flex-wrap: wrap; gap: 8px; }
#fe-examples button { flex: none; width: auto; padding: 5px 14px; border: 1px solid var(--fe-line); border-radius: 999px;
  background: none; color: var(--fe-soft); font-weight: 500; font-size: 14px; }
#fe-examples button:hover { border-color: var(--fe-accent); color: var(--fe-accent); }
#fe-run, #fe-stop { flex: 0 0 auto; }
.gradio-container button:focus-visible, .gradio-container input:focus-visible { outline: 2px solid var(--fe-accent); outline-offset: 2px; }
#fe-settings { border-radius: 14px; }
.fe-status, .fe-notice { margin: 0; min-height: 1.6em; font-size: 16px; line-height: 1.6; color: var(--fe-soft); }
.fe-notice { padding: 12px 16px; border-left: 4px solid var(--fe-warn); border-radius: 8px; background: var(--fe-warn-tint); color: var(--fe-ink); }
#fe-status { min-height: 26px; }
.fe-empty { padding: 30px 28px 32px; border: 1px dashed var(--fe-line); border-radius: 14px; color: var(--fe-soft); }
.fe-empty h3 { margin: 0 0 20px; font-size: 19px; font-weight: 600; line-height: 1.4; color: var(--fe-ink); }
.fe-empty ol { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); gap: 18px 28px; margin: 0; padding: 0; list-style: none; counter-reset: step; }
.fe-empty li { font-size: 15.5px; line-height: 1.6; counter-increment: step; }
.fe-empty li b { display: block; margin-bottom: 2px; font-size: 16px; color: var(--fe-ink); }
.fe-empty li b::before { content: counter(step) "  "; color: var(--fe-accent); }
.fe-empty-tree { margin: 0; font-size: 15px; color: var(--fe-soft); }
.dark #fe-tree-controls { --neutral-200: var(--fe-line); }
#fe-tree-controls .form { gap: 18px 32px; }
#fe-tree-controls input[type="range"]::-webkit-slider-thumb { background: var(--fe-accent); }
#fe-tree-controls input[type="range"]::-moz-range-thumb { background: var(--fe-accent); }
#fe-foot p { margin: 0; font-size: 13.5px; line-height: 1.6; color: var(--fe-soft); }
@media (max-width: 480px) {
  .gradio-container main { padding: 18px 0 32px; }
  #fe-ask, #fe-trees, .fe-empty { padding: 14px; }
  #fe-header h1 { font-size: 28px; }
  #fe-header p { font-size: 16px; }
  #fe-run { flex: 1 1 auto; }
}
"""
)

# Gradio's text box submits on Enter only.
HEAD = """<script>
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.closest("#fe-prompt")) {
    document.querySelector("#fe-run").click();
  }
});
</script>"""


def theme() -> gr.themes.Base:
    """Gradio's base theme in the colours of `viz.style`."""
    values = {
        "body_background_fill": "var(--fe-page)",
        "body_text_color": "var(--fe-ink)",
        "body_text_color_subdued": "var(--fe-soft)",
        "background_fill_primary": "var(--fe-card)",
        "background_fill_secondary": "var(--fe-well)",
        "block_background_fill": "var(--fe-card)",
        "block_border_color": "var(--fe-line)",
        "block_label_text_color": "var(--fe-soft)",
        "block_title_text_color": "var(--fe-soft)",
        "block_info_text_color": "var(--fe-soft)",
        "border_color_primary": "var(--fe-line)",
        "border_color_accent": "var(--fe-accent)",
        "color_accent": "var(--fe-accent)",
        "color_accent_soft": "var(--fe-tint)",
        "input_background_fill": "var(--fe-well)",
        "input_border_color": "var(--fe-line)",
        "input_border_color_focus": "var(--fe-accent)",
        "input_placeholder_color": "var(--fe-soft)",
        "link_text_color": "var(--fe-accent)",
        "slider_color": "var(--fe-accent)",
        "checkbox_background_color": "var(--fe-card)",
        "checkbox_background_color_selected": "var(--fe-accent)",
        "checkbox_border_color": "var(--fe-strong-line)",
        "checkbox_border_color_selected": "var(--fe-accent)",
        "checkbox_label_background_fill": "var(--fe-well)",
        "checkbox_label_background_fill_selected": "var(--fe-tint)",
        "checkbox_label_border_color": "var(--fe-line)",
        "checkbox_label_text_color": "var(--fe-ink)",
        "checkbox_label_text_color_selected": "var(--fe-ink)",
        "button_primary_background_fill": "var(--fe-accent)",
        "button_primary_background_fill_hover": "var(--fe-accent)",
        "button_primary_text_color": "var(--fe-on-accent)",
        "button_primary_border_color": "var(--fe-accent)",
        "button_secondary_background_fill": "var(--fe-well)",
        "button_secondary_text_color": "var(--fe-ink)",
        "button_secondary_border_color": "var(--fe-line)",
    }
    known = gr.themes.Base.set.__code__.co_varnames
    both = values | {f"{name}_dark": value for name, value in values.items() if f"{name}_dark" in known}
    both["checkbox_background_color_selected_dark"] = "#0f766e"  # Gradio's check mark is white in both schemes
    return gr.themes.Base(font=_FONT, font_mono=_MONO, radius_size="lg").set(**both)
