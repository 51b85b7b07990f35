"""The model directory's tokenizer and chat template, without torch: ``tokenizers`` and a sandboxed jinja2.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json. Safe to use
from several threads. ``encode`` takes time in proportion to the text and releases the GIL for most of it, so long
texts belong into a thread pool.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from splitserve.errors import CheckpointError, SplitserveError
from splitserve.router.text import Detokenizer

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(SplitserveError):
    """A conversation that the model's chat template doesn't accept, or a model without a template."""


class ModelTokenizer:
    """What the router needs of a model directory. Raises :class:`CheckpointError` for files that can't be used."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        config = _read_json(model_dir / "tokenizer_config.json")
        self._special_tokens = _special_tokens(config)
        self._template = _load_chat_template(model_dir, config)
        self.eos_token_ids = self._find_eos_token_ids(model_dir)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens`` lets the post-processor add what it adds (a BOS, if any)."""
        # The batch call is the one that releases the GIL; "fast" leaves out offsets, which nobody reads here.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins. Encode it without special tokens.

        Raises :class:`ChatTemplateError`.
        """
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

    def _find_eos_token_ids(self, model_dir: Path) -> tuple[int, ...]:
        """Ids that end a sequence: generation_config.json rules, then config.json, then the tokenizer's EOS token."""
        config = _read_json(model_dir / "config.json")
        text_config = config.get("text_config")
        sources = [_read_json(model_dir / "generation_config.json"), config]
        if isinstance(text_config, dict):
            sources.append(text_config)
        for source in sources:
            found = source.get("eos_token_id")
            ids = found if isinstance(found, list) else [found]
            if all(type(token_id) is int for token_id in ids) and ids:
                return tuple(ids)
        token_id = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the model directory must hold the tokenizer's tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{path} is not a usable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _load_chat_template(model_dir: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    path = model_dir / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template of {model_dir} can't be compiled: {error}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
