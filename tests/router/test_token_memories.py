"""Tokens of prompts and texts of outputs through the memories equal those of the tokenizer itself."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve.models.demo.tokenizer import QWEN_TOKENS, train_tokenizer
from splitserve.protocol.token_ids import from_bytes
from splitserve.router.text.processes.word_process import tokens_of
from splitserve.router.text.tokens import words
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable
from splitserve.router.text.tokens.encoder import SegmentMemory, TextEncoder
from splitserve.router.text.tokens.words import WordMemory, cuts_before_words, slices
from tokenizer_forms import WITH_WORDS, WITHOUT_WORDS, random_texts, saved


def _encoded(encoder: TextEncoder, text: str, *, add_special_tokens: bool) -> list[int]:
    encoding = encoder.encode(text, add_special_tokens=add_special_tokens, check=lambda _: None)
    return asyncio.run(encoding).tolist()


@pytest.mark.parametrize("name", [*WITH_WORDS, *WITHOUT_WORDS])
def test_tokens_are_those_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = (WITH_WORDS | WITHOUT_WORDS)[name]()
    assert cuts_before_words(tokenizer) == (name in WITH_WORDS)
    with ThreadPoolExecutor(1) as pool:
        encoder = TextEncoder(*saved(tokenizer, tmp_path), pool)
        for text in random_texts(seed=1, count=300):
            for add_special_tokens in (False, True):
                expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
                for _ in range(2):  # the second time from the memory
                    assert _encoded(encoder, text, add_special_tokens=add_special_tokens) == expected, repr(text)


@pytest.mark.parametrize("name", WITH_WORDS)
def test_tokens_by_words_are_those_of_the_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "SLICE_CHARS", 32)
    tokenizer, memory = WITH_WORDS[name](), WordMemory()
    for text in random_texts(seed=1, count=300):
        for _ in range(2):  # the second time from the memory
            parts = [tokens_of(part, tokenizer, memory) for part in slices(text)]
            token_ids = from_bytes(b"".join(parts)).tolist()
            assert token_ids == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


def test_words_of_the_last_two_generations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 4)
    memory = WordMemory()

    def unknown(text: str) -> list[str]:
        """Return what isn't known of a text, whose words become known; the tokens of each are its length."""
        lookup = memory.look_up(text)
        tokens = memory.complete(lookup, [[len(each)] for each in lookup.unknown])
        assert sum(from_bytes(tokens)) == len(text)
        return list(lookup.unknown)

    assert unknown("a the prefill, 12") == ["a", " the", " prefill,", " 12"]
    assert unknown("a decode worker") == [" decode", " worker"]
    assert unknown("a 12  x decode") == [" 12  x"], "a is of the old generation; 12 and x aren't cut"
    assert unknown("b c d e") == ["b", " c", " d", " e"]
    assert unknown("b decode the") == [" the"], "the generation of the first text is gone"


def test_the_memory_of_segments_is_bounded() -> None:
    memory, tokens = SegmentMemory(10_000, {"": b"", "<|end|>": b"e"}), b"t" * 40
    texts = [chr(97 + number) * 200 for number in range(20)]
    for text in texts:
        memory.put(text, tokens)
        assert memory.recall([texts[0], "", "<|end|>"]) == [tokens, b"", b"e"], "used last, and those that are fixed"
    assert memory.recall([texts[1], texts[-1], "unknown"]) == [None, tokens, None]
    memory.put("a" * 5000, tokens)
    assert memory.recall(["a" * 5000, texts[-1]]) == [None, tokens], "one text doesn't take the others' place"


@pytest.mark.parametrize("skips_special", [True, False])
def test_texts_of_tokens_are_those_of_the_decoder(skips_special: bool) -> None:
    tokenizer = train_tokenizer(600, QWEN_TOKENS, seed=0)
    tokenizer.add_tokens([" été ", "中 "])
    added = tokenizer.get_added_tokens_decoder()
    hidden = [token.content for token in added.values() if token.special] if skips_special else []
    table = TokenTable(lambda token_id: tokenizer.id_to_token(token_id) or "", hidden)
    chosen = random.Random(2)
    size = tokenizer.get_vocab_size()
    for _ in range(500):
        # Single bytes come first in the vocabulary: mostly invalid UTF-8, cut characters, repeated starts.
        ids = [chosen.choice((chosen.randrange(256), chosen.randrange(size + 3))) for _ in range(chosen.randrange(12))]
        detokenizer = ByteLevelDetokenizer(table)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skips_special)
