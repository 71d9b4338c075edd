"""Tiny random models, a byte-level tokenizer and drafters that draft whatever a test wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fasteagle_lite.drafters.autoregressive import AutoregressiveDrafter
from fasteagle_lite.drafters.base import Drafter, NoDrafter
from fasteagle_lite.drafters.cascade import CascadeDrafter
from fasteagle_lite.drafters.checkpoint import Model, new_model, save_checkpoint
from fasteagle_lite.drafters.lookup import LookupDrafter
from fasteagle_lite.sampling import Sampling, draw
from fasteagle_lite.store import fingerprint
from fasteagle_lite.target import Target
from fasteagle_lite.tree import DraftTree, TreeConfig
from fasteagle_lite.verify import Verdict, walk

VOCAB = 23  # of the models without a tokenizer
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.4,  # large, so that random logits are far from ties
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TREES = [
    (name, kind)
    for name, kinds in (
        ("cascade", ("chain", "backbone", "best_first")),
        ("autoregressive", ("chain", "dynamic")),
        ("lookup", ("chain",)),
    )
    for kind in kinds
]


def hf_model(config: Any = None, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights; norms and biases, which start trivial, are random too."""
    config = config or LlamaConfig(**({"vocab_size": VOCAB} | SIZES | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def tokenizer() -> Any:
    """A token a byte (ids 0 .. 255 in the byte-level alphabet's order), ChatML marks behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHAT
    )


def talking_model(seed: int = 0, **changes: Any) -> Any:
    """A random model whose vocabulary is the tokenizer's."""
    return hf_model(seed=seed, **({"vocab_size": 259, "eos_token_id": 257, "max_position_embeddings": 512} | changes))


def talking_target(seed: int = 0, **changes: Any) -> Target:
    return Target.from_model(talking_model(seed, **changes), tokenizer(), name="tiny", fingerprint="f" * 64)


def save_target(folder: Path, seed: int = 0) -> Path:
    """A target folder, as `--target` takes it."""
    talking_model(seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_drafters(target: Target, target_folder: Path, folder: Path) -> Path:
    """Checkpoints of both neural drafters, as `--checkpoints` takes them."""
    for name in ("cascade", "autoregressive"):
        save_checkpoint(drafter_model(name, target), "tiny", fingerprint(target_folder), folder / name, {})
    return folder


def drafter_model(name: str, target: Target, seed: int = 1) -> Model:
    """A drafter with random weights whose vocabulary lacks every second token."""
    torch.manual_seed(seed)
    sizes = {"ffn": 16, "markov_rank": 4, "layers": 3} if name == "cascade" else {"ffn": 16}
    model = new_model(name, target, torch.arange(1, target.vocab, 2), **sizes)
    if name == "cascade":
        torch.nn.init.normal_(model.markov_out.weight)
    return model.requires_grad_(False).eval()


def drafter(name: str, models: dict[str, Model], target: Target, tree: TreeConfig) -> Drafter:
    if name == "none":
        return NoDrafter()
    if name == "lookup":
        return LookupDrafter(tree)
    return {"cascade": CascadeDrafter, "autoregressive": AutoregressiveDrafter}[name](models[name], target, tree)


def greedy_reference(model: Any, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """transformers' own greedy output."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def sampled_reference(model: Any, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """Plain sampling from transformers' logits; the token at index i is drawn with the noise of position i."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        tokens.append(draw(logits, sampling, len(tokens)))
    return tokens[len(prompt) :]


def reference(model: Any, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    return (
        greedy_reference(model, prompt, count) if sampling.greedy else sampled_reference(model, prompt, count, sampling)
    )


class Scripted(Drafter):
    """Drafts what `make(tokens, room)` returns and remembers everything it was told."""

    name = "scripted"

    def __init__(self, make: Callable[[list[int], int], DraftTree]):
        self.make = make

    def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
        self.tokens, self.taps = list(tokens), taps

    def draft(self, room: int) -> DraftTree:
        return self.make(self.tokens, room)

    def commit(self, tokens: list[int], taps: Tensor) -> None:
        self.tokens += tokens
        self.taps = torch.cat([self.taps, taps])


def random_tree(rng: np.random.Generator, root: int, room: int, vocab: int, truth: list[int], hit: float) -> DraftTree:
    """A tree of random shape and tokens, except that a node on the true path tends (`hit`) to be continued truly.

    `truth` are the tokens that will follow the root; siblings are always different tokens.
    """
    tokens, parents, depths = [root], [-1], [0]
    true_nodes = {0}
    for _ in range(int(rng.integers(0, 14))):
        # Half of the nodes go below the last one, so that trees get deep as well as wide.
        parent = len(tokens) - 1 if rng.random() < 0.5 else int(rng.integers(len(tokens)))
        depth = depths[parent] + 1
        if depth > room:
            continue
        truly = parent in true_nodes and depth <= len(truth) and rng.random() < hit
        token = truth[depth - 1] if truly else int(rng.integers(vocab))
        if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        if parent in true_nodes and depth <= len(truth) and token == truth[depth - 1]:
            true_nodes.add(len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


def chain(tokens: list[int]) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (0.0,) * len(tokens))


def adversary(kind: str, prompt: list[int], truth: list[int], vocab: int, seed: int = 0) -> Scripted:
    """Drafters no one would train.  `truth` is the output that the target is going to give behind `prompt`."""
    rng = np.random.default_rng(seed)

    def ahead(tokens: list[int]) -> list[int]:
        return truth[len(tokens) - len(prompt) :]

    makers = {
        "random": lambda tokens, room: random_tree(rng, tokens[-1], room, vocab, [], 0.0),
        "mixed": lambda tokens, room: random_tree(rng, tokens[-1], room, vocab, ahead(tokens), 0.8),
        "constant": lambda tokens, room: chain([tokens[-1], *[3] * min(room, 5)]),
        "wrong": lambda tokens, room: chain([tokens[-1], *[(t + 1) % vocab for t in ahead(tokens)[: min(room, 5)]]]),
        "oracle": lambda tokens, room: chain([tokens[-1], *ahead(tokens)[: min(room, 5)]]),
        "buried oracle": lambda tokens, room: _buried(tokens[-1], ahead(tokens)[: min(room, 5)], vocab),
    }
    return Scripted(makers[kind])


def _buried(root: int, truth: list[int], vocab: int) -> DraftTree:
    """The true path behind a wrong older sibling at every depth, so that accepted rows never lie where they belong."""
    tokens, parents, node = [root], [-1], 0
    for token in truth:
        tokens += [(token + 1) % vocab, token]
        parents += [node, node]
        node = len(tokens) - 1
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


ADVERSARIES = ("random", "mixed", "constant", "wrong", "oracle", "buried oracle")


def chi_square_p(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of Pearson's test; rare cells (fewer than five expected) are pooled.  An impossible cell must stay empty."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum()).astype(float)
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def warp_reference(logits: list[float], sampling: Sampling) -> np.ndarray:
    """Probabilities after temperature, top-k and top-p, written as the definitions read."""
    probs = np.exp(np.array(logits, dtype=np.float64) / sampling.temperature)
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
        probs /= probs.sum()
    kept, mass = set(), 0.0
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.add(i)
        mass += probs[i]
    probs[[i for i in order if i not in kept]] = 0
    return probs / probs.sum()


def first_child_accepted(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
    """A verifier that takes the first drafted token on trust."""
    if len(tree) > 1:
        logits = logits.clone()
        logits[0] = -torch.inf
        logits[0, tree.tokens[1]] = 0.0
    return walk(tree, logits, sampling, position)


def bonus_from_the_root(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
    verdict = walk(tree, logits, sampling, position)
    return Verdict(verdict.path, draw(logits[0], sampling, position + len(verdict.path) + 1))
