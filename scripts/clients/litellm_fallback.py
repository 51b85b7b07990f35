"""LiteLLM: answers, streams, and its fallback for prompts that are too long, which reads the error's message."""

import litellm
from steps import BASE_URL, MODEL, check, end, step

SERVER = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none"}
HELLO = [{"role": "user", "content": "Hello"}]
TOO_LONG = [{"role": "user", "content": "word " * 20_000}]

with step("completion"):
    whole = litellm.completion(**SERVER, messages=HELLO, temperature=0, max_tokens=12)
    text = whole.choices[0].message.content
    check(text and whole.usage.completion_tokens == 12, whole)
with step("stream"):
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in litellm.completion(**SERVER, messages=HELLO, temperature=0, max_tokens=12, stream=True)
    ]
    check("".join(pieces) == text and len(pieces) > 4, pieces)
with step("text completion"):
    found = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=BASE_URL, api_key="none", prompt="Hello", max_tokens=5
    )
    check(found.usage.completion_tokens == 5, found)
with step("a prompt that is too long is a context error"):
    try:
        litellm.completion(**SERVER, messages=TOO_LONG, max_tokens=4)
        check(False, "there was no error")
    except litellm.ContextWindowExceededError as error:
        check("maximum context length is" in str(error), error)
with step("the fallback for long prompts fires"):
    router = litellm.Router(
        model_list=[
            {"model_name": "short", "litellm_params": SERVER},
            {"model_name": "long", "litellm_params": {**SERVER, "mock_response": "from the fallback"}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    check(router.completion(model="short", messages=HELLO, max_tokens=4).usage.completion_tokens == 4, "no answer")
    answer = router.completion(model="short", messages=TOO_LONG, max_tokens=4)
    check(answer.choices[0].message.content == "from the fallback", answer)
end()
