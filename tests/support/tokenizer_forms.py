"""Tokenizers of the usual forms, with small vocabularies, and random texts that are hard to cut into words."""

import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from splitserve.models.demo.tokenizer import LLAMA_TOKENS, QWEN_TOKENS, train_tokenizer
from splitserve.router.text.tokens.file import TokenizerFile, load_tokenizer

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FRAGMENTS = (
    *(" the", " prefill", " worker's", "don't", " I'LL", " a", "B", " 12345", "7", " x1y2", "été", " naïve", "e\u0301"),
    *(" (see", " 3.14", " -", " «a»", " a\n", "\n b", " c\x00"),
    *(" ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\x1f", "\x85", "\u3000", "\u200b", "\x00"),
    *(".", ", ", "! ", "->", " //", "=", '"', "'", " 's", "(", ")"),
    *("中文", "한", "🙂", "👩‍👩‍👧", "\u0301", " ß", "İ", "ǅ"),
    *("<|im_start|>", "<|im_end|>", " <|im_end|> ", "<|endoftext|>x", "<|im_", "|>", "<|eot_id|>", "<|begin_of_text|>"),
)


def with_expression(expression: str) -> Tokenizer:
    """A byte-level tokenizer that cuts texts into the matches of an expression."""
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
    tokenizer = with_expression(GPT_4)
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


WITH_WORDS = {
    "demo": lambda: train_tokenizer(1000, QWEN_TOKENS, seed=0),
    "llama": _llama,
    "gpt-2": _gpt_2,
    "gpt-4": lambda: with_expression(GPT_4),
    "gpt-4o": lambda: with_expression(GPT_4O),
    "NFC": _normalized,
}
WITHOUT_WORDS = {
    "metaspace": _metaspace,
    # An alternative that takes a space after a letter: no text may be cut there.
    "another expression": lambda: with_expression(r"\p{L}+ \p{L}+|\s+|\S+"),
}


def random_texts(seed: int, count: int, most_fragments: int = 60) -> list[str]:
    """Texts of up to so many fragments."""
    chosen = random.Random(seed)
    return ["".join(chosen.choices(FRAGMENTS, k=chosen.randrange(most_fragments))) for _ in range(count)]


def saved(tokenizer: Tokenizer, folder: Path) -> tuple[Tokenizer, TokenizerFile]:
    """Write a tokenizer's file, and return what a router reads there."""
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(path)
