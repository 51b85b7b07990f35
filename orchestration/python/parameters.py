"""Parameters of requests as keyword arguments. Made by `python scripts/reference_pages.py`, not by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class Parameters(TypedDict, total=False):
    """Parameters of both methods."""

    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    bad_words: Sequence[str] | None
    min_tokens: int | None
    allowed_token_ids: Sequence[int] | None
    min_p: float | None
    metadata: Mapping[str, Any] | None
    prediction: Mapping[str, Any] | None
    prompt_cache_key: str | None
    prompt_cache_options: Mapping[str, Any] | None
    prompt_cache_retention: str | None
    safety_identifier: str | None
    service_tier: str | None
    user: str | None
    verbosity: str | None
    max_tokens: int | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    cache_salt: str | None
    priority: int | None
    request_class: str | None
    session_id: str | None
    return_route: bool | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    prompt_logprobs: int | None


class CompletionParameters(Parameters, total=False):
    """Parameters of `LLM.generate`."""

    logprobs: int | None
    top_logprobs: Literal[0] | None
    echo: bool | None


class ChatParameters(Parameters, total=False):
    """Parameters of `LLM.chat`."""

    max_completion_tokens: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    enable_thinking: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    logprobs: bool | None
    top_logprobs: int | None
    echo: Literal[False] | None
