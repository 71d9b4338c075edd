"""Text while it arrives: nothing lost, nothing shown before its character is whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny

from fasteagle_lite.engine import Engine
from fasteagle_lite.text import Detokenizer

TEXTS = [
    "Plain ASCII, nothing else.",
    "Grüße aus Köln, naïve café",
    "مرحبا بالعالم، كيف حالك؟",
    "日本語のテキスト",
    "😀🚀👩‍🚀🏳️‍🌈 emoji, joined by ZWJ",
    "mixed 😀é日 😀",
    "line\nbreak\ttab  two spaces ",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str, tokenizer: Any) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_appears_with_its_last_byte(tokenizer: Any) -> None:
    assert pieces(tokenizer, tokenizer.encode("a😀é")) == ["a", "", "", "", "😀", "", "é", ""]


def test_a_character_cut_off_appears_at_the_end(tokenizer: Any) -> None:
    tokens = tokenizer.encode("a😀")[:-1]
    shown = pieces(tokenizer, tokens)
    assert shown == ["a", "", "", "", "\ufffd"]
    assert "".join(shown) == tokenizer.decode(tokens)


def test_special_tokens_are_shown(tokenizer: Any) -> None:
    assert pieces(tokenizer, [*tokenizer.encode("a"), 257]) == ["a", "<|im_end|>", ""]


@pytest.mark.parametrize("seed", range(20))
def test_byte_garbage_never_holds_text_back_for_long(seed: int, tokenizer: Any) -> None:
    """Whatever the bytes, what is held back are three replacement characters at most, and a readable end is shown."""
    rng = random.Random(seed)
    end = tokenizer.encode("the end", add_special_tokens=False)
    tokens = [rng.randrange(256) for _ in range(200)]
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for i, token in enumerate(tokens[:60], start=1):
        shown += detokenizer.push(token)
        text = tokenizer.decode(tokens[:i])
        assert text.startswith(shown)
        assert set(text[len(shown) :]) <= {"\ufffd"} and len(text) - len(shown) <= 3
    for token in tokens[60:]:
        detokenizer.push(token)
    assert "".join(map(detokenizer.push, end)).endswith("the end")
    assert detokenizer.flush() == ""


def test_a_stray_byte_does_not_swallow_the_emoji_behind_it(tokenizer: Any) -> None:
    emoji = tokenizer.encode("😀")
    assert "".join(pieces(tokenizer, [emoji[0], *emoji])) == "\ufffd😀"


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_byte_garbage_join_to_its_text(seed: int, tokenizer: Any) -> None:
    rng = random.Random(seed)
    parts = ["😀", "é", "\ufffd", "a", "日"]
    tokens = []
    for _ in range(60):
        some = tokenizer.encode(rng.choice(parts), add_special_tokens=False)
        tokens += some if rng.random() < 0.7 else some[: rng.randrange(1, 4)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_labels_of_single_tokens(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.one(token) for token in tokenizer.encode("a b")] == ["a", " ", "b"]
    assert detokenizer.one(tokenizer.encode("😀")[0]) == "\ufffd"
    assert detokenizer.push(tokenizer.encode("c")[0]) == "c"  # labels leave the running text alone


def test_without_a_tokenizer_tokens_read_as_numbers() -> None:
    assert pieces(None, [5, 17]) == [" 5", " 17", ""]
    assert Detokenizer(None).one(5) == "5"


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_real_pieces_join_to_the_text(text: str, real_engine: Engine) -> None:
    tokenizer = real_engine.target.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
