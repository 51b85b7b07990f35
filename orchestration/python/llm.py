"""Offline batches: :class:`LLM`."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import index as whole
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

import msgspec
from tqdm import tqdm

from splitserve.common.errors import ConfigError
from splitserve.orchestration.python.batch import Answer, Batch
from splitserve.orchestration.python.keywords import spec_of
from splitserve.orchestration.python.parameters import ChatParameters, CompletionParameters
from splitserve.orchestration.python.results import (
    ChatCompletion,
    Completion,
    Message,
    PromptError,
    outputs_of,
    usage_of,
)
from splitserve.orchestration.python.server import Server, wants_progress
from splitserve.orchestration.python.settings import Settings
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.protocol.request import Role

BATCH_DEADLINE_SECONDS = 86400.0  # of a request, unless the spec's file has one: no client waits for an offline batch
_ROUNDS_IN_FLIGHT = 2  # requests in flight for each that can run, so that no worker waits for the next one

# Iterables that are neither lists of prompts or messages nor token ids.
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)

Prompt = str | Sequence[int]
Result = TypeVar("Result")


class LLM:
    """A model for offline batches, served by a cluster in this process's children; a context manager.

    >>> with LLM("/models/Qwen3-0.6B", prefill=1, decode=1) as llm:
    ...     for result in llm.generate(["Once upon a time"], max_tokens=32):
    ...         print(result.outputs[0].text)

    The arguments are those of :func:`splitserve.launch`; also ``concurrency``: requests in flight at once, None: twice
    as many as can run. ``progress`` applies to the start and to each batch.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        spec: str | os.PathLike[str] | None = None,
        prefill: int = 0,
        decode: int = 0,
        mixed: int = 0,
        concurrency: int | None = None,
        progress: bool | None = None,
        log_level: str = "warning",
        log_folder: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        found = _patient(spec_of(model, spec, {"prefill": prefill, "decode": decode, "mixed": mixed}, settings))
        most = found.router.max_requests_in_flight
        if concurrency is not None and not 1 <= concurrency <= most:
            raise ConfigError(f"concurrency must be between 1 and {most}, got {concurrency}")
        self._concurrency = min(most, concurrency or _ROUNDS_IN_FLIGHT * _num_running(found))
        self._progress = progress
        self._server = Server(found, progress=progress, log_level=log_level, log_folder=log_folder)

    @property
    def server(self) -> Server:
        """The cluster; its endpoint takes requests of other clients, too."""
        return self._server

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        return_errors: Literal[False] = False,
        progress: bool | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        return_errors: Literal[True],
        progress: bool | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> list[Completion | PromptError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        return_errors: bool = False,
        progress: bool | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> list[Completion] | list[Completion | PromptError]:
        """Continue each prompt, a text or token ids; return the results in the order of the prompts.

        ``parameters`` are those of ``POST /v1/completions``, the same for all prompts. The first failure ends the batch
        and is raised as a :class:`PromptError`, which names the prompt's index; with ``return_errors`` the other
        prompts go on, and the errors stand where the results would.

        Raises :class:`TypeError` for prompts of a wrong type, for parameters that this method sets itself, such as
        ``stream``, and for values that JSON doesn't have, also with ``return_errors``.
        """
        _check_parameters("generate", parameters)
        wanted = _as_prompts(prompts)
        bodies = [{"prompt": prompt, **parameters} for prompt in wanted]
        answers = self._run("completions", bodies, return_errors, progress)
        return cast(list[Completion], _results(Completion, wanted, answers))

    @overload
    def chat(
        self,
        chats: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        return_errors: Literal[False] = False,
        progress: bool | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> list[ChatCompletion]: ...
    @overload
    def chat(
        self,
        chats: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        return_errors: Literal[True],
        progress: bool | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> list[ChatCompletion | PromptError]: ...

    def chat(
        self,
        chats: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        return_errors: bool = False,
        progress: bool | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> list[ChatCompletion] | list[ChatCompletion | PromptError]:
        """Answer each chat, a list of messages, with the model's chat template; see :meth:`generate`.

        ``parameters`` are those of ``POST /v1/chat/completions``.
        """
        _check_parameters("chat", parameters)
        wanted = _as_chats(chats)
        bodies = [{"messages": messages, **parameters} for messages in wanted]
        answers = self._run("chat/completions", bodies, return_errors, progress)
        return cast(list[ChatCompletion], _results(ChatCompletion, wanted, answers))

    def _run(
        self, path: str, bodies: Sequence[Mapping[str, Any]], return_errors: bool, progress: bool | None
    ) -> list[Answer | PromptError]:
        self._server.check_alive()
        shown = wants_progress(self._progress if progress is None else progress)
        with tqdm(total=len(bodies), desc=self._server.model, unit="prompt", disable=not shown) as bar:
            batch = Batch(
                f"{self._server.base_url}/{path}",
                self._server.api_key,
                concurrency=self._concurrency,
                check_alive=self._server.check_alive,
                on_answer=cast(Callable[[], object], bar.update),
                keep_going=return_errors,
            )
            return batch.run([{"model": self._server.model, "return_token_ids": True, **body} for body in bodies])

    def close(self) -> None:
        """End the cluster; returns when its processes are gone. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()


def _results(
    kind: Callable[..., Result], given: Sequence[object], answers: Sequence[Answer | PromptError]
) -> list[Result | PromptError]:
    """Return the answers as results of what was given, errors as they are."""
    return [
        answer
        if isinstance(answer, PromptError)
        else kind(each, outputs_of(answer), usage_of(answer), answer.get("splitserve"))
        for each, answer in zip(given, answers, strict=True)
    ]


def _patient(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` with a deadline for batches, unless it has a deadline."""
    if spec.protocol.request_deadline_seconds is not msgspec.UNSET:
        return spec
    protocol = msgspec.structs.replace(spec.protocol, request_deadline_seconds=BATCH_DEADLINE_SECONDS)
    return msgspec.structs.replace(spec, protocol=protocol)


def _num_running(spec: ClusterSpec) -> int:
    """Return how many requests can run at once. A device that isn't known yet counts as a GPU."""
    engines = [(pool.count, spec.engine_config(pool)) for pool in spec.pools if pool.role is not Role.PREFILL]
    return sum(count * each.on("cpu" if each.device == "cpu" else "cuda").max_num_seqs for count, each in engines) or 1


def _check_parameters(method: str, parameters: Mapping[str, object]) -> None:
    """Raise :class:`TypeError` for parameters of the HTTP API that ``method`` sets itself, or that JSON can't
    express."""
    for name, value in parameters.items():
        try:
            msgspec.json.encode(value)
            json.dumps(msgspec.to_builtins(value), allow_nan=False)  # the line before writes null for NaN
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name} must be a value of JSON, got {_brief(value)}: {error}") from None
    if parameters.get("stream"):
        raise TypeError(
            f"stream must be False or left out, got {_brief(parameters['stream'])}: LLM.{method} returns whole "
            "answers; to stream, send the request with an OpenAI client to llm.server.base_url"
        )
    if not parameters.get("return_token_ids", True):
        raise TypeError(
            f"return_token_ids must be True or left out, got {_brief(parameters['return_token_ids'])}: the results of "
            f"LLM.{method} have the token ids"
        )
    for name in ("prompt", "messages"):
        if name in parameters:
            raise TypeError(f"{name} must be left out: the first argument of LLM.{method} is what the model answers")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Return the prompts one by one. Raises :class:`TypeError` for anything but texts and token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, _NO_LISTS) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a text, token ids, or a list of texts or token ids, got {_brief(prompts)}")
    each = list(prompts)
    if each and not isinstance(each[0], str) and not _has_length(each[0]):
        return [_as_prompt(0, cast(Prompt, each))]
    return [_as_prompt(index, cast(Prompt, prompt)) for index, prompt in enumerate(each)]


def _has_length(value: object) -> bool:
    """Return whether a value is a sequence; an element of a tensor or an array has a ``__len__`` that raises."""
    try:
        len(cast(Sequence[object], value))
    except TypeError:
        return False
    return True


def _as_prompt(index: int, prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    try:
        if not isinstance(prompt, _NO_LISTS):
            return [whole(token_id) for token_id in prompt]
    except TypeError:
        pass
    raise TypeError(f"prompt {index} must be a text or token ids, got {_brief(prompt)}")


def _as_chats(chats: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return the chats one by one. Raises :class:`TypeError` for anything but messages and lists of them."""
    if isinstance(chats, _NO_LISTS) or not isinstance(chats, Iterable):
        raise TypeError(f"chats must be a list of messages, or a list of such lists, got {_brief(chats)}")
    each = list(chats)
    found = (
        [cast(Sequence[Message], each)]
        if each and isinstance(each[0], Mapping)
        else cast(list[Sequence[Message]], each)
    )
    for index, messages in enumerate(found):
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(
                f"chat {index} must be a list of messages like {{'role': 'user', 'content': 'Hello'}}, "
                f"got {_brief(messages)}"
            )
    return found


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}... ({type(value).__name__})"
