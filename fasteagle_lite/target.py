"""The target model: a Llama-family causal language model that scores a whole draft tree in one forward.

Weights come from transformers (safetensors folder or a loaded model); the forward is our own, because drafting needs
three things a stock model does not offer cheaply: a preallocated cache whose accepted rows can be moved, attention
along a tree, and the residual stream at three depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import UserError
from .linear import Linear, pack
from .llama import DecoderLayer, KVCache, LayerSpec, RMSNorm, Rope, Rows, attention_bias

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Output:
    """What one forward yields, for each of its rows.

    logits (B, T, vocab) in fp32 (only the last row after `prefill`), taps (B, T, 3h) the residual stream entering the
    three tapped layers, hidden (B, T, h) the normed state that the head reads.
    """

    logits: Tensor
    taps: Tensor
    hidden: Tensor


class Target(nn.Module):
    """A frozen Llama-family model.

    `config` is a transformers configuration.  `tokenizer` may be None for tests with random weights.  `fingerprint`
    names the weights (SHA-256 of the file they came from), so that a drafter trained for others is refused.
    """

    def __init__(
        self, config: Any, state: dict[str, Tensor], tokenizer: Any = None, *, name: str = "", fingerprint: str = ""
    ):
        super().__init__()
        self.spec = layer_spec(config)
        self.name, self.fingerprint, self.tokenizer = name, fingerprint, tokenizer
        self.folder: Path | None = None  # where the weights lie, if they came from a folder
        self.layer_count: int = config.num_hidden_layers
        self.vocab: int = config.vocab_size
        # Beyond a sliding window old keys would have to fade out of sight; we stop there instead.
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.context: int = min(config.max_position_embeddings, window or config.max_position_embeddings)
        eos = config.eos_token_id
        self.eos: frozenset[int] = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        # EAGLE-3's taps: the stream entering an early, the middle and a late layer.
        last = self.layer_count - 1
        self.tapped = tuple(sorted((min(2, last), self.layer_count // 2, max(last - 2, 0))))

        self.embedding = nn.Embedding(self.vocab, self.spec.hidden)
        self.rope = rope_of(config, self.context)
        self.layers = nn.ModuleList(DecoderLayer(self.spec) for _ in range(self.layer_count))
        self.norm = RMSNorm(self.spec.hidden, self.spec.eps)
        self.head = Linear(self.spec.hidden, self.vocab)
        self.load_state_dict(from_transformers(state, self.layer_count, self.spec), assign=True)
        self.requires_grad_(False).eval()

    @staticmethod
    def from_model(model: Any, tokenizer: Any = None, **names: str) -> Target:
        """Take over the weights of a loaded transformers model (shared, not copied)."""
        return Target(model.config, model.state_dict(), tokenizer, **names)

    @staticmethod
    def from_folder(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **names: str) -> Target:
        """Load a transformers folder: config.json, tokenizer files and one or more safetensors files."""
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoTokenizer

        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no model: it needs config.json and *.safetensors files.")
        state: dict[str, Tensor] = {}
        try:
            for file in files:
                state.update(load_file(file))
        except Exception as error:  # safetensors raises its own, undocumented types
            raise UserError(
                f"{file} is not a readable safetensors file ({error}). Delete it and fetch it again."
            ) from None
        state = {name: tensor.to(device, dtype) for name, tensor in state.items()}
        try:
            config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # transformers raises whatever its parsers meet
            raise UserError(f"The configuration or the tokenizer in {folder} cannot be read ({error!r}).") from None
        try:
            target = Target(config, state, tokenizer, **names)
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"The weights in {folder} do not fit its config.json ({reason}).") from None
        target.folder = folder
        return target.to(device).pack()

    def pack(self) -> Target:
        """Lay the weights out for few-row products; afterwards they cannot be read back, only multiplied with."""
        self.head.pack(keep_weight=True)  # drafters take the rows of their own vocabulary from it
        pack(self.layers)
        return self

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        return KVCache(self.layer_count, batch, self.spec, capacity, like=self.embedding.weight)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        depths: Tensor | None = None,
        mask: Tensor | None = None,
        last_logits_only: bool = False,
    ) -> Output:
        """Run tokens (B, T) behind the committed rows of `cache`; nothing is committed (call `cache.keep`).

        For a tree, `depths` (T,) gives each row's distance from the first one and `mask` (T, T) who sees whom; without
        them the rows are a plain continuation.
        """
        rows = tokens.shape[1]
        steps = torch.arange(rows, device=tokens.device) if depths is None else depths
        x = F.embedding(tokens, self.embedding.weight)
        shared = Rows(
            rope=self.rope(cache.length + steps),
            bias=attention_bias(mask, rows, cache.length + rows, x),
            cache=cache,
            start=cache.length,
        )
        taps = []
        for i, layer in enumerate(self.layers):
            taps += [x] * self.tapped.count(i)
            x = layer(x, shared, i)
        hidden = self.norm(x)
        logits = self.logits(hidden[:, -1:] if last_logits_only else hidden)
        return Output(logits, torch.cat(taps, dim=-1), hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Normed states (..., h) in any precision -> logits (..., vocab) in fp32."""
        logits: Tensor = self.head(hidden.to(self.embedding.weight.dtype)).float()
        return logits

    def encode_chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids of a one-turn chat, ready for the assistant's answer."""
        if not prompt.strip():
            raise UserError("The prompt is empty. Type a question or an instruction.")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("The prompt is not valid text: it holds bytes that are no UTF-8.") from None
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def layer_spec(config: Any) -> LayerSpec:
    """Read the shape of a supported transformers configuration; refuse any other by name."""
    if config.model_type not in SUPPORTED:
        raise UserError(
            f"Architecture {config.model_type!r} is not supported. This project runs {', '.join(SUPPORTED)} models."
        )
    if config.hidden_act != "silu":
        raise UserError(f"Activation {config.hidden_act!r} is not supported, only 'silu'.")
    bias = bool(getattr(config, "attention_bias", False))
    return LayerSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        eps=config.rms_norm_eps,
        qkv_bias=bias or config.model_type == "qwen2",
        output_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
    )


def rope_of(config: Any, positions: int) -> Rope:
    """The rotary table of a transformers configuration; the scaling formulas are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "default":
        return Rope.default(head_dim, parameters["rope_theta"], positions)
    if kind not in ("linear", "llama3"):
        raise UserError(f"Rotary scaling {kind!r} is not supported, only 'default', 'linear' and 'llama3'.")
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rope(frequencies, positions, scale)


def from_transformers(state: dict[str, Tensor], layers: int, spec: LayerSpec) -> dict[str, Tensor]:
    """Rename transformers' weights to ours; projections that read the same input become one matrix."""

    def joined(prefix: str, names: list[str], kind: str) -> Tensor:
        return torch.cat([state[f"{prefix}.{name}_proj.{kind}"] for name in names])

    ours = {"embedding.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    ours["head.weight"] = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    for i in range(layers):
        theirs, mine = f"model.layers.{i}", f"layers.{i}"
        ours[f"{mine}.attention_norm.weight"] = state[f"{theirs}.input_layernorm.weight"]
        ours[f"{mine}.mlp_norm.weight"] = state[f"{theirs}.post_attention_layernorm.weight"]
        groups = [
            ("attention.qkv", f"{theirs}.self_attn", ["q", "k", "v"], spec.qkv_bias),
            ("attention.output", f"{theirs}.self_attn", ["o"], spec.output_bias),
            ("mlp.gate_up", f"{theirs}.mlp", ["gate", "up"], spec.mlp_bias),
            ("mlp.down", f"{theirs}.mlp", ["down"], spec.mlp_bias),
        ]
        for name, prefix, parts, bias in groups:
            for kind in ["weight", "bias"] if bias else ["weight"]:
                ours[f"{mine}.{name}.{kind}"] = joined(prefix, parts, kind)
        if spec.qk_norm:
            for head in ("q_norm", "k_norm"):
                ours[f"{mine}.attention.{head}.weight"] = state[f"{theirs}.self_attn.{head}.weight"]
    return ours
