"""The model directory's tokenizer, without torch, and the source of its chat template.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json, each within
bounds (:mod:`splitserve.common.model_files`). Safe to use from several threads. ``encode`` takes time in proportion to
the text and releases the GIL for most of it, so long texts belong in a thread pool.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tokenizers import Encoding

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.common.model_files import (
    GENERATION_CONFIG,
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    end_token_ids,
    read_json_object,
    read_text,
)
from splitserve.router.scores.token_texts import TokenTexts
from splitserve.router.text.detokenizer import Detokenizer, WindowDetokenizer
from splitserve.router.text.processes.renderer import TemplateSource
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable
from splitserve.router.text.tokens.encoder import TextEncoder
from splitserve.router.text.tokens.file import load_tokenizer

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer:
    """Tokenizer, end tokens and chat template of a model directory. Unusable files raise :class:`CheckpointError`.

    ``chat_template``: path of a file that replaces the model's template, "" for none.
    """

    def __init__(self, model_dir: Path, chat_template: str = "") -> None:
        self._tokenizer, self._file = load_tokenizer(model_dir / "tokenizer.json")
        config = _read_json(model_dir / "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)
        self.texts = TokenTexts(self._tokenizer)
        self._special_tokens = _special_tokens(config)
        if chat_template:
            self.chat_template: TemplateSource | None = _template_in(Path(chat_template), self._special_tokens)
        else:
            self.chat_template = _chat_template(model_dir, config, self._special_tokens)
        own = config.get("response_template")
        self.response_template: dict[str, Any] | None = own if isinstance(own, dict) else None
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.eos_token_ids = self._find_eos_token_ids(model_dir)
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._all = TokenTable(self.string_of)
        self._visible = TokenTable(self.string_of, hidden=self.special_texts.values())

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """Return the tokens of ``text``: ``ids`` builds a list of them, ``len`` counts them without a list. With
        ``add_special_tokens`` the post-processor adds its special tokens (a BOS, if any)."""
        # Only the batch call releases the GIL; "fast" leaves out offsets, which aren't needed here.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def string_of(self, token_id: int) -> str:
        """Return the token as the vocabulary has it; "" for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def encoder(self, pool: Executor) -> TextEncoder:
        """Return what finds the tokens of prompts; ``pool`` encodes long texts where its child process can't."""
        return TextEncoder(self._tokenizer, self._file, pool)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._visible if skip_special_tokens else self._all)
        return WindowDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def _find_eos_token_ids(self, model_dir: Path) -> tuple[int, ...]:
        """Return the ids that end a sequence: of generation_config.json, else config.json, else the tokenizer's EOS."""
        config = _read_json(model_dir / "config.json", MAX_CONFIG_BYTES)
        generation = _read_json(model_dir / GENERATION_CONFIG, MAX_CONFIG_BYTES)
        text_config = config.get("text_config")
        text_config = text_config if isinstance(text_config, dict) else {}
        vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
        if not isinstance(vocab_size, int):  # the workers check it; here it is only a bound
            vocab_size = None
        for name, source in (("generation_config", generation), ("config", config), ("config", text_config)):
            if ids := end_token_ids(source.get("eos_token_id"), vocab_size, f"{name}.json"):
                return ids
        token_id = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)


def _read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    try:
        return read_json_object(path, max_bytes)
    except FileNotFoundError:
        return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _template_in(path: Path, special_tokens: Mapping[str, str]) -> TemplateSource:
    try:
        source = read_text(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"--chat-template: there is no file {path}") from None
    return TemplateSource(source, special_tokens, f"the chat template in {path}")


def _chat_template(
    model_dir: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> TemplateSource | None:
    path = model_dir / "chat_template.jinja"
    try:
        source: Any = read_text(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        path = model_dir / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [(entry.get("name"), entry.get("template")) for entry in source if isinstance(entry, dict)]
        source = next((template for name, template in named if name == "default"), None)
    if not isinstance(source, str):
        return None
    if len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{path}: chat_template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are supported"
        )
    return TemplateSource(source, special_tokens, f"the chat template of {model_dir}")
