"""The target against transformers' own models: logits, taps, trees; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from fasteagle_lite.engine import Engine
from fasteagle_lite.errors import UserError
from fasteagle_lite.target import Target, layer_spec

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE),
    "llama tied": lambda: LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama biases": lambda: LlamaConfig(**BASE, attention_bias=True, mlp_bias=True),
    "llama attention bias": lambda: LlamaConfig(**BASE, attention_bias=True),
    "llama3 rope": lambda: LlamaConfig(**BASE, rope_parameters=LLAMA3_ROPE),
    "linear rope": lambda: LlamaConfig(**BASE, rope_parameters=LINEAR_ROPE),
    "llama theta": lambda: LlamaConfig(**BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "mistral": lambda: MistralConfig(**BASE, head_dim=16, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=16, use_sliding_window=False),
}


def in_chunks(target: Target, tokens: list[int], sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps of all tokens, run chunk after chunk."""
    cache, outputs, at = target.new_cache(len(tokens)), [], 0
    for size in sizes:
        outputs.append(target(torch.tensor([tokens[at : at + size]]), cache))
        cache.keep(list(range(size)))
        at += size
    assert at == len(tokens) == cache.length
    return torch.cat([o.logits for o in outputs], 1), torch.cat([o.taps for o in outputs], 1)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_taps_are_those_of_transformers(kind: str, packed: bool) -> None:
    model = tiny.hf_model(CONFIGS[kind]())
    tokens = torch.randint(0, 97, (100,)).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens]), output_hidden_states=True)
    target = Target.from_model(model)
    if packed:
        target.pack()
    logits, taps = in_chunks(target, tokens, [70, 1, 7, 22])  # above and below the fused attention's threshold
    assert (logits - theirs.logits).abs().max() < 1e-4
    wanted = torch.cat([theirs.hidden_states[i] for i in target.tapped], -1)
    assert (taps - wanted).abs().max() < 1e-4


def test_a_batch_is_its_rows_one_by_one(target: Target) -> None:
    tokens = torch.randint(0, tiny.VOCAB, (3, 9))
    together = target(tokens, target.new_cache(9, batch=3))
    for i in range(3):
        alone = target(tokens[i : i + 1], target.new_cache(9))
        assert torch.allclose(together.logits[i], alone.logits[0], atol=1e-5)


def test_last_logits_only_leaves_taps_whole(target: Target) -> None:
    tokens = torch.randint(0, tiny.VOCAB, (1, 9))
    every, last = (target(tokens, target.new_cache(9), last_logits_only=only) for only in (False, True))
    assert last.logits.shape == (1, 1, tiny.VOCAB)
    assert torch.allclose(last.logits[0, 0], every.logits[0, -1], atol=1e-5)
    assert torch.equal(last.taps, every.taps)


def test_the_head_reads_hidden(target: Target) -> None:
    out = target(torch.randint(0, tiny.VOCAB, (1, 9)), target.new_cache(9))
    assert torch.allclose(target.head(out.hidden), out.logits, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_forward_is_every_path_run_alone(target: Target, seed: int) -> None:
    rng = np.random.default_rng(seed)
    context = rng.integers(0, tiny.VOCAB, 11).tolist()
    tree = tiny.random_tree(rng, 5, 6, tiny.VOCAB, [], 0.0)
    while len(tree) < 6:
        tree = tiny.random_tree(rng, 5, 6, tiny.VOCAB, [], 0.0)
    cache = target.new_cache(40)
    target(torch.tensor([context]), cache)
    cache.keep(list(range(len(context))))
    out = target(torch.tensor([tree.tokens]), cache, depths=torch.tensor(tree.depths), mask=tree.mask())
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        alone = target(torch.tensor([context + path]), target.new_cache(40))
        assert torch.allclose(out.logits[0, node], alone.logits[0, -1], atol=1e-4)
        assert torch.allclose(out.taps[0, node], alone.taps[0, -1], atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (4, (1, 2, 2)), (2, (0, 1, 1)), (1, (0, 0, 0))]
)
def test_taps_are_early_middle_late(layers: int, taps: tuple[int, ...]) -> None:
    model = tiny.hf_model(num_hidden_layers=layers, hidden_size=8, intermediate_size=8)
    target = Target.from_model(model)
    assert target.tapped == taps
    assert target(torch.tensor([[1, 2]]), target.new_cache(2)).taps.shape == (1, 2, 24)


def test_a_sliding_window_ends_the_context() -> None:
    assert Target.from_model(tiny.hf_model(MistralConfig(**BASE, sliding_window=50))).context == 50


@pytest.mark.parametrize("config", [GPT2Config(), GemmaConfig()], ids=["gpt2", "gemma"])
def test_other_architectures_are_refused_by_name(config: Any) -> None:
    with pytest.raises(UserError, match=f"{config.model_type}.*llama, mistral, qwen2, qwen3"):
        layer_spec(config)


def test_other_activations_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="gelu"):
        layer_spec(LlamaConfig(**BASE, hidden_act="gelu"))


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_other_rope_scalings_are_refused_by_name(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match=kind):
        Target.from_model(tiny.hf_model(LlamaConfig(**BASE, rope_parameters=rope)))


@pytest.mark.parametrize("eos", [None, 7, [7, 9]])
def test_end_tokens_may_be_none_one_or_several(eos: Any) -> None:
    target = Target.from_model(tiny.hf_model(eos_token_id=eos))
    assert target.eos == frozenset([] if eos is None else [7] if eos == 7 else [7, 9])


def test_a_chat_is_encoded_with_the_template() -> None:
    target = tiny.talking_target()
    assert target.tokenizer.decode(target.encode_chat("Grüße 😀", system="Be brief.")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 😀<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(UserError, match="empty"):
        tiny.talking_target().encode_chat(prompt)


def test_a_folder_gives_the_model_that_was_saved(target_folder: Path) -> None:
    target = Target.from_folder(target_folder)
    tokens = target.encode_chat("Hi")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(target_folder)(torch.tensor([tokens])).logits
    assert (target(torch.tensor([tokens]), target.new_cache(64)).logits - theirs).abs().max() < 1e-4


PROMPT = "Explain why 🚀 and 👩‍🚀 are different emoji, in two sentences."


@pytest.fixture(scope="module")
def real_model(real_engine: Engine) -> Any:
    """transformers' model of the converted default target."""
    return AutoModelForCausalLM.from_pretrained(real_engine.target.folder, dtype=torch.float32).eval()


@pytest.mark.real
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_real_logits(packed: bool, real_engine: Engine, real_model: Any) -> None:
    target = real_engine.target if packed else Target.from_model(real_model)
    tokens = real_engine.target.encode_chat(PROMPT)
    with torch.no_grad():
        theirs = real_model(torch.tensor([tokens])).logits
    logits, _ = in_chunks(target, tokens, [len(tokens) - 9, 8, 1])
    # Logits reach 30 here: transformers' own attention kernels differ from each other, and from fp64, by 0.6e-4 to 1.1e-4.
    # oneDNN sums in yet another order, so the packed weights get twice the room.
    assert (logits - theirs).abs().max() < (2e-4 if packed else 1e-4)


@pytest.mark.real
def test_real_greedy(real_engine: Engine, real_model: Any) -> None:
    target = real_engine.target
    tokens = target.encode_chat(PROMPT)
    wanted = tiny.greedy_reference(real_model, tokens, 40, eos=next(iter(target.eos)))
    cache, got, fresh = target.new_cache(len(tokens) + 40), [], tokens
    while len(got) < 40 and not target.eos & set(got):
        logits = target(torch.tensor([fresh]), cache, last_logits_only=True).logits
        cache.keep(list(range(len(fresh))))
        fresh = [int(logits[0, -1].argmax())]
        got += fresh
    assert got == wanted
