"""Log-probabilities of prompts as JSON: made in slices, whose answer is that of one piece."""

import json

import msgspec
import numpy as np
import pytest

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import FinishReason
from splitserve.router.http.formats import ChatFormat
from splitserve.router.output.catalog import choose_format
from splitserve.router.output.parts import Part, PartKind
from splitserve.router.output.splitter import Splitter
from splitserve.router.scores.choice_scores import ChoiceScores
from splitserve.router.scores.forms import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.choice import Choice, Piece
from splitserve.router.text.tokenizer import ModelTokenizer

NUM_TOP = 4


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return ModelTokenizer(model_dir)


def scored(num_tokens):
    """Tokens of a prompt, and log-probabilities of all but the first."""
    generator = np.random.default_rng(num_tokens)
    token_ids = generator.integers(0, 50, num_tokens).tolist()
    values = -generator.random((num_tokens - 1, 1 + NUM_TOP)).astype(np.float32)
    top_ids = np.array([generator.permutation(50)[:NUM_TOP] for _ in range(num_tokens - 1)]).reshape(-1, NUM_TOP)
    return token_ids, Logprobs.of(values, top_ids)


@pytest.mark.parametrize("num_tokens", [2, 99, 100, 101, 2500])
def test_slices_make_the_json_of_one_piece(tokenizer, num_tokens):
    token_ids, logprobs = scored(num_tokens)
    wanted = WantedScores(2, NUM_TOP, echo=True)
    form = CompletionLogprobs(tokenizer.texts, tokenizer.detokenizer())
    scores = ChoiceScores(wanted, token_ids, "prompt", form, tokenizer.texts, echo=form)
    num_slices = sum(1 for _ in scores.take_prompt(logprobs))
    assert num_slices >= num_tokens * (1 + NUM_TOP) // 500
    piece = scores.add(Piece("", (), None), None)
    found = json.loads(msgspec.json.encode([piece.logprobs, piece.prompt_logprobs]))
    whole = CompletionLogprobs(tokenizer.texts, tokenizer.detokenizer())
    first, rest = whole.of_first(token_ids[0]), whole.of(token_ids[1:], logprobs.narrowed(2))
    extension = [None, *prompt_logprobs(token_ids[1:], logprobs, tokenizer.texts)]
    assert found == json.loads(json.dumps([{name: first[name] + rest[name] for name in first}, extension]))
    assert piece.text == "prompt" and len(found[1]) == num_tokens


def test_a_prompt_of_one_token_has_no_log_probability(tokenizer):
    form = CompletionLogprobs(tokenizer.texts, tokenizer.detokenizer())
    scores = ChoiceScores(WantedScores(1, 1, echo=True), [7], "p", form, tokenizer.texts, echo=form)
    piece = scores.add(Piece("", (), None), None)
    assert piece.prompt_logprobs == [None] and piece.logprobs["token_logprobs"] == [None]


def test_of_a_hidden_output_nothing_is_shown_as_text_or_as_a_message(tokenizer):
    """``max_tokens`` 0: one token is drawn, whose text no answer has."""
    form = CompletionLogprobs(tokenizer.texts, tokenizer.detokenizer())
    scores = ChoiceScores(WantedScores(None, 1, hides_output=True), [7], "p", form, tokenizer.texts)
    piece = scores.add(Piece("drawn", (3,), None, [Part(PartKind.CONTENT, "drawn")]), None)
    assert not piece.text and not piece.token_ids and not piece.all_parts


def test_a_stream_has_the_log_probabilities_of_tokens_that_add_no_part(tokenizer):
    """Borders between reasoning, answer and calls, and white space there; the prompt's scores come first."""
    text = '<think>\nfox\n</think>\n\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompt_ids, of_prompt = scored(3)
    scores = ChoiceScores(WantedScores(1, 1), prompt_ids, "", ChatLogprobs(tokenizer.texts), tokenizer.texts)
    assert list(scores.take_prompt(of_prompt))
    splitter = Splitter(choose_format("qwen3", None, None, "m").with_tools, "", [])
    choice = Choice(tokenizer.detokenizer(), [], splitter=splitter)
    form, chunks = ChatFormat("m"), []
    for number, token_id in enumerate(token_ids, start=1):
        piece = choice.push([token_id], FinishReason.LENGTH if number == len(token_ids) else None)
        chunks.append(form.chunk(0, scores.add(piece, scored(2)[1]), {}))
    choices = [json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks]
    assert [len(each["logprobs"]["content"]) for each in choices] == [1] * len(token_ids)
    assert len(choices[0]["prompt_logprobs"]) == 3 and not any("prompt_logprobs" in each for each in choices[1:])
