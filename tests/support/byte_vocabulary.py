"""The bytes of a byte-level tokenizer's tokens."""

from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return each token's bytes by id; None for special tokens."""
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    of_char = _bytes_of_chars()
    return [
        None if token_id in special else bytes(of_char[char] for char in tokenizer.id_to_token(token_id))
        for token_id in range(tokenizer.get_vocab_size())
    ]


def _bytes_of_chars() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2 defined it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
