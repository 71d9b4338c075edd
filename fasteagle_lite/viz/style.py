"""The look of lanes and trees, in light and dark: one accent, and every difference also shown by shape.

Colours are custom properties; an ancestor with class `dark` (Gradio's body) switches them.  Put `CSS` once on a page.
"""

CSS = """
:root {
  --fe-page: #faf9f6; --fe-card: #ffffff; --fe-well: #f6f4f0; --fe-line: #e4e0d9; --fe-strong-line: #8a827a;
  --fe-ink: #1c1917; --fe-soft: #57514c; --fe-accent: #0f766e; --fe-tint: #d5efeb; --fe-on-accent: #ffffff;
  --fe-warn: #9a3412; --fe-warn-tint: #fdf0e3;
  --fe-sans: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans Arabic", sans-serif;
  --fe-mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.dark {
  --fe-page: #141312; --fe-card: #1d1b1a; --fe-well: #171615; --fe-line: #36322f; --fe-strong-line: #857d76;
  --fe-ink: #f3f1ee; --fe-soft: #b9b1a9; --fe-accent: #5eead4; --fe-tint: #17443f; --fe-on-accent: #06302b;
  --fe-warn: #fdba74; --fe-warn-tint: #33241a;
}

.fe-lanes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 270px), 1fr)); gap: 0 16px; }
/* Lanes share their rows, so that figures stay level when a title wraps. */
.fe-lane {
  display: grid; grid-row: span 7; grid-template-rows: subgrid; min-width: 0; margin: 0 0 16px; padding: 18px 18px 14px;
  background: var(--fe-card); border: 1px solid var(--fe-line); border-radius: 14px; color: var(--fe-ink);
}
.fe-lane header { display: flex; justify-content: space-between; align-items: baseline; gap: 8px; }
.fe-lane h3 { margin: 0; font-size: 15px; font-weight: 600; line-height: 1.4; color: var(--fe-ink); }
.fe-kind { margin: 0; font-size: 13px; line-height: 1.5; color: var(--fe-soft); }
.fe-state { flex: none; font-size: 12.5px; color: var(--fe-soft); }
.fe-running::before {
  content: ""; display: inline-block; width: 7px; height: 7px; margin-right: 6px; border-radius: 50%;
  background: var(--fe-accent); vertical-align: 1px;
}
.fe-big { margin: 10px 0 0; font-size: 44px; font-weight: 650; line-height: 1.05; letter-spacing: -0.03em;
  font-variant-numeric: tabular-nums; color: var(--fe-ink); }
.fe-big.fe-faster { color: var(--fe-accent); }
.fe-big small { display: block; margin-top: 5px; font-size: 13.5px; line-height: 1.4; font-weight: 400; letter-spacing: 0; color: var(--fe-soft); }
.fe-gauge { height: 5px; margin: 14px 0 12px; border-radius: 3px; background: var(--fe-line); overflow: hidden; }
.fe-gauge > div { height: 100%; border-radius: 3px; background: var(--fe-soft); }
.fe-faster ~ .fe-gauge > div { background: var(--fe-accent); }
.fe-figures { display: grid; grid-template-columns: repeat(3, auto); gap: 0 12px; margin: 0 0 12px; }
.fe-figures div { display: flex; flex-direction: column-reverse; }
.fe-figures dt { font-size: 12px; line-height: 1.4; color: var(--fe-soft); }
.fe-figures dd { margin: 0; font-size: 17px; font-weight: 600; font-variant-numeric: tabular-nums; }
/* A reversed column keeps the newest line in sight without a script, and still lets a reader scroll up. */
.fe-text {
  display: flex; flex-direction: column-reverse; height: 250px; overflow-y: auto; padding: 10px 12px;
  border-radius: 10px; background: var(--fe-well); font-size: 15px; line-height: 1.75;
}
.fe-text p { flex: 1 0 auto; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-family: var(--fe-sans); }
.fe-text:focus-visible { outline: 2px solid var(--fe-accent); }
.fe-draft { background: var(--fe-tint); text-decoration: underline solid var(--fe-accent) 2px; text-underline-offset: 4px; }
.fe-bonus { text-decoration: underline dotted var(--fe-strong-line) 2px; text-underline-offset: 4px; }
.fe-end { font-family: var(--fe-mono); font-size: 0.75em; color: var(--fe-soft); }
.fe-hint { color: var(--fe-soft); }
.fe-verdict { margin: 10px 0 0; min-height: 1.5em; font-size: 14px; line-height: 1.5; color: var(--fe-soft); }
.fe-same { font-weight: 600; color: var(--fe-accent); }
.fe-differs { font-weight: 600; color: var(--fe-warn); }
.fe-legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0; font-size: 13.5px; line-height: 1.6; color: var(--fe-soft); }
.fe-legend b { font-weight: 500; color: var(--fe-ink); }

.fe-round { margin: 0 0 10px; font-size: 14.5px; line-height: 1.6; color: var(--fe-soft); font-variant-numeric: tabular-nums; }
.fe-round strong { font-weight: 600; color: var(--fe-ink); }
.fe-canvas { display: flex; margin: 0 0 12px; contain: inline-size; height: 340px; overflow: auto; padding: 12px; border-radius: 10px; background: var(--fe-well); }
.fe-canvas:focus-visible { outline: 2px solid var(--fe-accent); }
.fe-tree { flex: none; margin: auto 0; font-family: var(--fe-mono); font-size: 13px; }
.fe-tree text { fill: var(--fe-ink); text-anchor: middle; white-space: pre; }
.fe-tree .fe-note { font-family: var(--fe-sans); font-size: 11px; fill: var(--fe-soft); }
.fe-tree rect { fill: var(--fe-card); stroke: var(--fe-strong-line); stroke-width: 1.25; }
.fe-tree path { fill: none; stroke: var(--fe-strong-line); stroke-width: 1.25; }
.fe-tree .fe-accepted rect { fill: var(--fe-tint); stroke: var(--fe-accent); stroke-width: 2.25; }
.fe-tree .fe-accepted .fe-note { fill: var(--fe-accent); font-weight: 600; }
.fe-tree .fe-rejected rect { fill: none; stroke-dasharray: 4 4; }
.fe-tree .fe-rejected text { fill: var(--fe-soft); }
.fe-tree .fe-root rect { fill: var(--fe-line); stroke: var(--fe-line); }
.fe-tree .fe-bonus rect { stroke: var(--fe-ink); stroke-width: 1.75; }
.fe-tree .fe-bonus { text-decoration: none; }
.fe-tree path.fe-to-accepted { stroke: var(--fe-accent); stroke-width: 2.5; }
.fe-tree path.fe-to-rejected { stroke-dasharray: 4 4; }
.fe-tree path.fe-to-bonus { stroke: var(--fe-ink); stroke-width: 1.75; }
.fe-key { display: inline-block; width: 24px; height: 13px; margin-right: 6px; border: 1.5px solid var(--fe-strong-line); border-radius: 4px; vertical-align: -2px; }
.fe-key.fe-accepted { background: var(--fe-tint); border: 2px solid var(--fe-accent); }
.fe-key.fe-rejected { border-style: dashed; }
.fe-key.fe-root { background: var(--fe-line); border-color: var(--fe-line); }
.fe-key.fe-bonus { border-color: var(--fe-ink); border-radius: 8px; }
@media (max-width: 480px) { .fe-text { height: 190px; } .fe-canvas { height: 300px; } }
"""
