"""Grok-2's tokenizer in its published form and in ours say the same, token by token."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno.engine import tokenizer
from fenno.errors import UsageError

TEXT = Path(__file__).read_text(encoding="utf-8")
ODD = [
    "",
    " ",
    "\n",
    "  \n\n \t x",
    "don't SHE'LL I'VE 'sx",
    "1234567890 3.14 ٣٤٥ Ⅷ",
    "naïve Ünïcödé 中文字 日本語テキスト 한국어 עברית",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \u200d\ufeff\u0000\u2028",
    "a\r\nb\rc\n\n\nd",
    "def f(x):\n    return x**2  # <|none|>",
    "Human: hi<|separator|>\n\nAssistant:",
    "<|pad|><|eos|> <|control7|><|control705|><|reserved_3|><|hidden|>",
    "______======//////",
    "\u00a0\u3000 wide",
]


def learn(text: str, count: int) -> list[bytes]:
    """The tokens that byte-pair encoding learns from `text`: a vocabulary with merges that depend on each other."""
    words = [[bytes([byte]) for byte in word.encode()] for word in text.split(" ")]
    made: list[bytes] = []
    while len(made) < count:
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        (left, right), _ = pairs.most_common(1)[0]
        made.append(left + right)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    return list(dict.fromkeys(made))


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    corpus = (TEXT + "".join(ODD)).replace("<|", "< |")
    tokens = [bytes([byte]) for byte in range(256)] + learn(corpus, 400) + [" 中文".encode(), "🙂".encode(), b"unreachable-token"]
    special = ["<|pad|>", "<|separator|>", "<|eos|>", "<|reserved_3|>", "<|control7|>", "<|named|>", "<|hidden|>"]
    return {
        "regular_tokens": [{"bytes": [*token], "token": 10 + rank} for rank, token in enumerate(dict.fromkeys(tokens))],
        "special_tokens": [{"bytes": [*text.encode()], "token": rank} for rank, text in enumerate(special)],
        "default_allowed_special": [[*b"<|named|>"]],
        "word_split": "V1",
    }


@pytest.fixture(scope="module")
def both(published: dict[str, Any]) -> tuple[Any, Any]:
    tiktoken, tokenizers = pytest.importorskip("tiktoken"), pytest.importorskip("tokenizers")
    theirs = tiktoken.Encoding(
        name="grok",
        pat_str=tokenizer.SPLITS["V1"],
        mergeable_ranks={bytes(item["bytes"]): item["token"] for item in published["regular_tokens"]},
        special_tokens={bytes(item["bytes"]).decode(): item["token"] for item in published["special_tokens"]},
    )
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.files(published)["tokenizer.json"]))
    return theirs, ours


def same(both: tuple[Any, Any], text: str) -> None:
    theirs, ours = both
    allowed = {"<|pad|>", "<|separator|>", "<|eos|>", "<|reserved_3|>", "<|control7|>", "<|named|>"}
    tokens = theirs.encode(text, allowed_special=allowed, disallowed_special=())
    assert ours.encode(text, add_special_tokens=False).ids == tokens
    assert ours.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", [*ODD, TEXT], ids=lambda text: ascii(text[:12]))
def test_odd_strings_have_the_same_tokens(both: tuple[Any, Any], text: str) -> None:
    same(both, text)


@given(text=st.lists(st.one_of(st.text(), st.sampled_from(ODD + TEXT.split(" ")))).map(" ".join))
def test_any_string_has_the_same_tokens(both: tuple[Any, Any], text: str) -> None:
    same(both, text)


def test_prepare_writes_what_is_missing_and_keeps_what_is_there(published: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.tok.json").write_text(json.dumps(published))
    written = tokenizer.prepare(tmp_path)
    assert [path.name for path in written] == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 1]}
    (tmp_path / "generation_config.json").write_text("{}")
    assert [path.name for path in tokenizer.prepare(tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "generation_config.json").read_text() == "{}"


def test_the_chat_template_writes_a_chat_as_grok_2_was_taught(published: dict[str, Any]) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(tokenizer.files(published)["tokenizer_config.json"]["chat_template"])
    chat = [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "hi\n"},
        {"role": "assistant", "content": " yes"},
    ]
    text = template.render(messages=chat, add_generation_prompt=True)
    assert text == "System: be brief<|separator|>\n\nHuman: hi<|separator|>\n\nAssistant:  yes<|separator|>\n\nAssistant:"
    assert not template.render(messages=chat[:1], add_generation_prompt=False).endswith("Assistant:")


def test_what_is_no_such_tokenizer_is_refused(published: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tokenizer.tok.json"):
        tokenizer.prepare(tmp_path)
    (tmp_path / "folder" / "tokenizer.tok.json").mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot be read: .*Is a directory"):
        tokenizer.prepare(tmp_path / "folder")
    for wrong, says in (
        ({**published, "word_split": "V9"}, "V9"),
        ({**published, "special_tokens": []}, "has no <|eos|>"),
        ({"model": {}}, "special_tokens"),
    ):
        (tmp_path / "tokenizer.tok.json").write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=says.replace("|", r"\|")):
            tokenizer.prepare(tmp_path)
    with pytest.raises(UsageError, match="there is no tokenizer.tok.json in .*tokenizer.tok.json"):
        tokenizer.prepare(tmp_path / "tokenizer.tok.json")
