"""Peers outside: the same target and prompts through transformers' own `generate`, as a yardstick for plain decoding."""

from __future__ import annotations

from typing import Any

import torch

from .decode import clock
from .errors import UserError
from .target import Target

NAME = "transformers generate"


class TransformersPeer:
    """Greedy `generate` of the same weights, on the same device, in the same dtype."""

    def __init__(self, target: Target):
        from transformers import AutoModelForCausalLM

        if target.folder is None:
            raise UserError("The target was not loaded from a folder, so transformers cannot load it for comparison.")
        self.target = target
        self.model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=target.embedding.weight.dtype)
        self.model.to(target.device).eval()

    def generate(self, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[tuple[int, ...], float]:
        """The new tokens, and the seconds a token took after the first one (which pays for the prompt)."""
        times: list[float] = []

        def stamp(*_: object) -> bool:
            times.append(clock(self.target.device))
            return False

        ids = torch.tensor([prompt], device=self.target.device)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "use_cache": True}
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[stamp], **options)
        tokens = tuple(out[0, len(prompt) :].tolist())
        return tokens, (times[-1] - times[0]) / max(1, len(times) - 1)
