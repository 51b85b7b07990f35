"""LangChain's ChatOpenAI: answers, streams, a loop of tool calls, structured output."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import BASE_URL, MODEL, ONE_OF_TWO, TOOL, check, end, need, step

model = ChatOpenAI(base_url=BASE_URL, model=MODEL, api_key="none", temperature=0, max_tokens=16)


@tool
def look(where: Literal["up", "down"]) -> str:
    """Look in a direction."""
    return f"There is nothing {where} there."


class Verdict(BaseModel):
    """A verdict."""

    answer: Literal["yes", "no"]


with step("invoke"):
    whole = model.invoke("Hello")
    check(isinstance(whole.content, str) and whole.content, whole)
    check(whole.usage_metadata["output_tokens"] == 16, whole.usage_metadata)
with step("stream"):
    pieces = [piece.content for piece in model.stream("Hello")]
    check(len(pieces) > 4 and "".join(pieces) == whole.content, pieces)
with step("batch"):
    texts = [answer.content for answer in model.batch(["Hello", "Hello", "Good evening"])]
    check(texts[0] == texts[1] == whole.content != texts[2], texts)
with step("a loop of tool calls"):
    need("chat/completions", tools=[TOOL], tool_choice="required")
    messages = [HumanMessage("Is there anything up there?")]
    longer = ChatOpenAI(base_url=BASE_URL, model=MODEL, api_key="none", temperature=0, max_tokens=256)
    bound = longer.bind_tools([look], tool_choice="required", strict=True, parallel_tool_calls=False)
    asked = bound.invoke(messages)
    check(asked.tool_calls and not asked.invalid_tool_calls, asked)
    for call in asked.tool_calls:
        check(call["name"] == "look" and call["args"]["where"] in ("up", "down"), call)
    results = [look.invoke(call) for call in asked.tool_calls]
    check(all(isinstance(result, ToolMessage) for result in results), results)
    answer = model.bind_tools([look]).invoke([*messages, asked, *results])
    check(answer.content or answer.tool_calls, answer)
with step("tool calls in a stream"):
    need("chat/completions", tools=[TOOL], tool_choice="required")
    gathered = None
    for piece in bound.stream(messages):
        gathered = piece if gathered is None else gathered + piece
    check(gathered is not None and gathered.tool_calls, gathered)
    check(
        [call["args"] for call in gathered.tool_calls] == [call["args"] for call in asked.tool_calls],
        (gathered.tool_calls, asked.tool_calls),
    )
with step("structured output"):
    schema = {"name": "verdict", "schema": ONE_OF_TWO, "strict": True}
    need("chat/completions", response_format={"type": "json_schema", "json_schema": schema})
    longer = ChatOpenAI(base_url=BASE_URL, model=MODEL, api_key="none", temperature=0, max_tokens=256)
    verdict = longer.with_structured_output(Verdict, method="json_schema").invoke("Yes or no?")
    check(verdict.answer in ("yes", "no"), verdict)
end()
