"""The model card that lies beside a drafter's weights; every figure in it comes from the run's provenance."""

from __future__ import annotations

from typing import Any

from ..drafters.checkpoint import Model, own_state
from ..store import DEFAULT_NAME

TITLES = {
    "cascade": "FastEagle cascade drafter (arXiv 2509.20416)",
    "autoregressive": "EAGLE-3-style autoregressive drafter (arXiv 2503.01840)",
}


def total(provenance: dict[str, Any] | None, key: str) -> float:
    """`visits` or `seconds` of a run and of those it went on from."""
    return provenance[key] + total(provenance.get("started_from"), key) if provenance else 0


def model_card(model: Model, provenance: dict[str, Any]) -> str:
    """Markdown for README.md of a checkpoint folder."""
    parameters = sum(v.numel() for v in own_state(model).values() if v.is_floating_point())
    name = provenance["target"]["name"]
    base = "HuggingFaceTB/SmolLM2-135M-Instruct" if name == DEFAULT_NAME else name
    corpus, config, environment = provenance["corpus"], provenance["config"], provenance["environment"]
    rows = [
        f"| {h['visits']:,} | " + " | ".join(f"{x:.3f}" for x in h["agreement"]) + " |" for h in provenance["history"]
    ]
    depths = range(1, config["depths"] + 1)
    return "\n".join(
        [
            "---",
            "license: apache-2.0",
            f"base_model: {base}",
            "---",
            "",
            f"# {TITLES[model.kind]}",
            "",
            f"Drafts for `{name}` (fingerprint `{provenance['target']['fingerprint'][:16]}`) in FastEagle Lite.",
            f"{parameters / 1e6:.1f} M weights of its own in half precision; embedding and head rows are the target's.",
            "",
            f"Trained on {corpus['response_tokens']:,} response tokens in {corpus['sequences']:,} sequences written by the target",
            f"itself (SHA-256 `{corpus['sha256'][:16]}`), {total(provenance, 'visits'):,} token visits in {total(provenance, 'seconds') / 60:.0f} minutes",
            f"on {environment['device']}, {environment['threads']} thread(s), {environment['dtype']} products, torch {environment['torch']}.",
            "",
            "Held-out top-1 agreement with the target, by depth of the draft (teacher-forced):",
            "",
            "| visits | " + " | ".join(f"depth {d}" for d in depths) + " |",
            "|---" * (len(depths) + 1) + "|",
            *rows,
            "",
            "Reproduce with:",
            "",
            "```",
            provenance["command"],
            "```",
            "",
            "A drafter can only make the target faster, not change what it says: every token is verified by the target.",
            "The answers, and their faults, are those of a language model of 135 million parameters.",
            "",
        ]
    )
