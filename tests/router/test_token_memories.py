"""Tokens of prompts and texts of outputs through the memories equal those of the tokenizer itself."""

import asyncio
import random
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from splitserve.models.demo.tokenizer import LLAMA_TOKENS, QWEN_TOKENS, train_tokenizer
from splitserve.router.text.tokens import words
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable
from splitserve.router.text.tokens.encoder import SegmentMemory, TextEncoder
from splitserve.router.text.tokens.words import SLICE_CHARS, WordMemory, cuts_before_words

_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FRAGMENTS = (
    *(" the", " prefill", " worker's", "don't", " I'LL", " a", "B", " 12345", "7", " x1y2", "été", " naïve", "e\u0301"),
    *(" (see", " 3.14", " -", " «a»", " a\n", "\n b", " c\x00"),
    *(" ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\x1f", "\x85", "\u3000", "\u200b", "\x00"),
    *(".", ", ", "! ", "->", " //", "=", '"', "'", " 's", "(", ")"),
    *("中文", "한", "🙂", "👩‍👩‍👧", "\u0301", " ß", "İ", "ǅ"),
    *("<|im_start|>", "<|im_end|>", " <|im_end|> ", "<|endoftext|>x", "<|im_", "|>", "<|eot_id|>", "<|begin_of_text|>"),
)


def _with_expression(expression: str) -> Tokenizer:
    tokenizer = train_tokenizer(1000, QWEN_TOKENS, seed=0)
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def _llama() -> Tokenizer:
    tokenizer = train_tokenizer(1000, LLAMA_TOKENS, seed=0)
    bos = LLAMA_TOKENS.bos
    assert bos is not None
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _normalized() -> Tokenizer:
    tokenizer = _with_expression(_GPT_4)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _gpt_2() -> Tokenizer:
    tokenizer = train_tokenizer(1000, QWEN_TOKENS, seed=0)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3}, [("▁", "a")], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


_WITH_WORDS = {
    "demo": lambda: train_tokenizer(1000, QWEN_TOKENS, seed=0),
    "llama": _llama,
    "gpt-2": _gpt_2,
    "gpt-4": lambda: _with_expression(_GPT_4),
    "gpt-4o": lambda: _with_expression(_GPT_4O),
    "NFC": _normalized,
}
_WITHOUT_WORDS = {
    "metaspace": _metaspace,
    # An alternative that takes a space after a letter: no text may be cut there.
    "another expression": lambda: _with_expression(r"\p{L}+ \p{L}+|\s+|\S+"),
}


def _texts(seed: int, count: int) -> list[str]:
    chosen = random.Random(seed)
    return ["".join(chosen.choices(_FRAGMENTS, k=chosen.randrange(60))) for _ in range(count)]


def _encoded(encoder: TextEncoder, text: str, *, add_special_tokens: bool) -> list[int]:
    encoding = encoder.encode(text, add_special_tokens=add_special_tokens, check=lambda _: None)
    return asyncio.run(encoding).tolist()


@pytest.mark.parametrize("name", [*_WITH_WORDS, *_WITHOUT_WORDS])
def test_tokens_are_those_of_the_tokenizer(name: str) -> None:
    tokenizer = (_WITH_WORDS | _WITHOUT_WORDS)[name]()
    assert cuts_before_words(tokenizer) == (name in _WITH_WORDS)
    with ThreadPoolExecutor(1) as pool:
        encoder = TextEncoder(tokenizer, pool)
        for text in _texts(seed=1, count=300):
            for add_special_tokens in (False, True):
                expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
                for _ in range(2):  # the second time from the memory
                    assert _encoded(encoder, text, add_special_tokens=add_special_tokens) == expected, repr(text)


def test_long_texts_are_encoded_in_parts_and_beside_the_loop() -> None:
    tokenizer = _with_expression(_GPT_4)
    broken = " ".join(f"w{number} the worker, the router;" for number in range(4000))
    unbroken = "中文" * 4000
    assert len(broken) > 4 * SLICE_CHARS
    with ThreadPoolExecutor(1) as pool:
        encoder = TextEncoder(tokenizer, pool)
        for text in (broken, unbroken, broken + unbroken, broken):
            assert _encoded(encoder, text, add_special_tokens=False) == tokenizer.encode(text).ids


def test_too_long_a_text_is_given_up_early() -> None:
    tokenizer = _with_expression(_GPT_4)
    counts: list[int] = []

    def check(count: int) -> None:
        counts.append(count)
        if count > 100:
            raise ValueError

    with ThreadPoolExecutor(1) as pool:
        encoder = TextEncoder(tokenizer, pool)
        text = " ".join("the worker" for _ in range(20 * SLICE_CHARS))
        with pytest.raises(ValueError):
            asyncio.run(encoder.encode(text, add_special_tokens=False, check=check))
    assert len(counts) == 1, "after its first part"


def test_words_of_the_last_two_generations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 4)
    memory = WordMemory()

    def unknown(text: str) -> list[str]:
        """Return what isn't known of a text, whose words become known; the tokens of each are its length."""
        lookup = memory.look_up(text)
        tokens = memory.complete(lookup, [[len(each)] for each in lookup.unknown])
        assert sum(tokens) == len(text)
        return list(lookup.unknown)

    assert unknown("a the prefill, 12") == ["a", " the", " prefill,", " 12"]
    assert unknown("a decode worker") == [" decode", " worker"]
    assert unknown("a 12  x decode") == [" 12  x"], "a is of the old generation; 12 and x aren't cut"
    assert unknown("b c d e") == ["b", " c", " d", " e"]
    assert unknown("b decode the") == [" the"], "the generation of the first text is gone"


def test_the_memory_of_segments_is_bounded() -> None:
    memory, tokens = SegmentMemory(max_bytes=10_000), array("i", range(10))
    texts = [chr(97 + number) * 200 for number in range(20)]
    for text in texts:
        memory.put(text, tokens)
        assert memory.get(texts[0]) == tokens, "used last"
    assert memory.get(texts[1]) is None
    assert memory.get(texts[-1]) == tokens


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
