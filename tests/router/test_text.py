"""Detokenisation, stop strings, and the tokenizer's files."""

import asyncio
import json
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_harness import EOS, write_model_dir
from splitserve.common.errors import CheckpointError
from splitserve.protocol.request import FinishReason
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.formats import ChatFormat
from splitserve.router.http.schema import CompletionRequest
from splitserve.router.placement.placer import Limits
from splitserve.router.text.chat_template import ChatTemplate, ChatTemplateError
from splitserve.router.text.choice import Choice, Texts
from splitserve.router.text.constraints import Constraints
from splitserve.router.text.detokenizer import StopStrings, WindowDetokenizer
from splitserve.router.text.preparation import Preparation
from splitserve.router.text.processes.grammar_checker import GrammarChecker
from splitserve.router.text.processes.renderer import Renderer
from splitserve.router.text.tokenizer import ModelTokenizer
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable
from waiting import PATIENCE_SECONDS


def render_chat(model, messages):
    """As a rendering process does."""
    found = model.chat_template
    return ChatTemplate(found.source, found.special_tokens, 1000).render(messages)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return write_model_dir(model_dir)


@given(ids=st.lists(st.integers(0, 299), max_size=150), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_pieces_together_are_the_whole_text_for_any_tokens(tokenizer, ids, sizes):
    detokenizer = WindowDetokenizer(tokenizer)
    text, rest = "", ids
    for size in sizes * 20:
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
    text += detokenizer.push(rest) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet="aé漢😀 \ufffd", max_size=100))
def test_no_piece_shows_half_a_character(tokenizer, text):
    detokenizer = WindowDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text).ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "".join(pieces).count("\ufffd") <= text.count("\ufffd")


def test_an_incomplete_character_shows_at_the_end_only(tokenizer):
    detokenizer = WindowDetokenizer(tokenizer)
    half = tokenizer.encode("\U0001f9a9").ids[:2]  # not in the training text: single bytes
    assert detokenizer.push(half) == "" and detokenizer.flush() == "\ufffd"


def _reference_stop(text, stops):
    """The text before the stop string that is completed first; None if there is none."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1),
)
def test_stop_strings_cut_at_the_same_place_however_the_text_arrives(text, stops, sizes):
    checker = StopStrings(stops)
    shown, rest = "", text
    for size in sizes * 30:
        shown += checker.push(rest[:size])
        rest = rest[size:]
        # Nothing that belongs to a stop string may ever have been shown.
        assert (_reference_stop(text, stops) or text).startswith(shown) or _reference_stop(text, stops) == ""
    expected = _reference_stop(text, stops)
    assert checker.stopped == (expected is not None)
    assert shown + checker.flush() == (text if expected is None else expected)


REPEATING = st.builds(
    lambda unit, count, end: unit * count + end,
    st.text(alphabet="ab", min_size=1, max_size=3),
    st.integers(1, 40),
    st.text(alphabet="abc", max_size=2),
)
"""Long strings whose beginnings recur within them: much is held back, and stop strings end within each other."""


@given(
    units=st.lists(REPEATING, max_size=6),
    stops=st.lists(REPEATING, min_size=1, max_size=16),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_long_stop_strings_hold_back_their_beginnings_and_nothing_else(units, stops, sizes):
    text = "".join(units)
    expected = _reference_stop(text, stops)
    checker = StopStrings(stops)
    shown, end, turn = "", 0, 0
    while end < len(text) and not checker.stopped:
        begin, end, turn = end, end + sizes[turn % len(sizes)], turn + 1
        shown += checker.push(text[begin:end])
        so_far = text[:end]
        assert checker.stopped == (_reference_stop(so_far, stops) is not None)
        if not checker.stopped:
            beginnings = {stop[:count] for stop in stops for count in range(len(stop))}
            assert so_far[len(shown) :] == max((each for each in beginnings if so_far.endswith(each)), key=len)
            assert so_far.startswith(shown)
    assert shown + checker.flush() == (text if expected is None else expected)


def test_only_a_possible_beginning_is_held_back():
    checker = StopStrings(["END"])
    assert checker.push("abE") == "ab" and checker.push("x") == "Ex" and checker.push("EN") == ""
    assert checker.flush() == "EN"


def test_a_choice_counts_the_end_token_and_does_not_show_it(tokenizer):
    ids = tokenizer.encode("The quick").ids
    choice = Choice(WindowDetokenizer(tokenizer), [])
    piece = choice.push([*ids, tokenizer.token_to_id(EOS)], FinishReason.STOP)
    assert piece.text == "The quick" and choice.num_tokens == len(ids) + 1 == len(piece.token_ids)
    visible_end = Choice(WindowDetokenizer(tokenizer), [])
    assert visible_end.push(ids, FinishReason.STOP).text == tokenizer.decode(ids[:-1])


@given(text=st.text(alphabet="ab é€🙂", min_size=1, max_size=12), size=st.integers(1, 4))
def test_a_choice_without_stop_strings_has_the_text_and_all_tokens(tokenizer, text, size):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    choice = Choice(ByteLevelDetokenizer(TokenTable(lambda token_id: tokenizer.id_to_token(token_id) or "")), [])
    pieces = [choice.push(ids[begin : begin + size], None) for begin in range(0, len(ids), size)]
    assert choice.finish_reason is None
    pieces.append(choice.push([], FinishReason.LENGTH))
    assert "".join(piece.text for piece in pieces) == text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == ids
    assert (choice.num_tokens, choice.finish_reason) == (len(ids), FinishReason.LENGTH)


def test_a_stop_string_ends_a_choice_at_its_token_however_tokens_are_packed(tokenizer):
    ids = tokenizer.encode("The quick brown fox").ids
    packed = Choice(WindowDetokenizer(tokenizer), ["k b"]).push(ids, FinishReason.LENGTH)
    single = Choice(WindowDetokenizer(tokenizer), ["k b"])
    text, num_tokens = "", 0
    for token_id in ids:
        piece = single.push([token_id], None)
        text += piece.text
        num_tokens += len(piece.token_ids)
        if piece.finish_reason:
            break
    assert packed.text == text == "The quic" and packed.finish_reason is FinishReason.STOP
    assert len(packed.token_ids) == num_tokens < len(ids)


def test_a_stop_string_completed_by_the_last_flush_counts(tokenizer):
    half = tokenizer.encode("\U0001f9a9").ids[:2]
    piece = Choice(WindowDetokenizer(tokenizer), ["\ufffd"]).push(half, FinishReason.LENGTH)
    assert piece.text == "" and piece.finish_reason is FinishReason.STOP


def test_what_ended_a_choice_is_shown_on_request(tokenizer):
    ids = tokenizer.encode("The quick brown fox").ids
    for packed in ([ids], [[token_id] for token_id in ids]):
        choice = Choice(WindowDetokenizer(tokenizer), ["k b"], include_stop=True)
        assert "".join(choice.push(some, None).text for some in packed if not choice.finish_reason) == "The quick b"
    end = tokenizer.token_to_id(EOS)
    ended, cut = [*ids, end], (FinishReason.STOP, FinishReason.LENGTH)

    def special() -> WindowDetokenizer:
        return WindowDetokenizer(tokenizer, skip_special_tokens=False)

    assert Choice(WindowDetokenizer(tokenizer), [], include_stop=True).push(ended, cut[0]).text == "The quick brown fox"
    assert Choice(special(), [], include_stop=True).push(ended, cut[0]).text == f"The quick brown fox{EOS}"
    assert Choice(special(), []).push(ended, cut[0]).text == "The quick brown fox"
    assert Choice(special(), []).push([end, *ids], cut[1]).text == f"{EOS}The quick brown fox"


def test_stop_strings_have_no_effect_before_min_tokens(tokenizer):
    ids = tokenizer.encode("ab ab ab ab").ids
    for min_tokens in range(len(ids) + 1):
        choice = Choice(WindowDetokenizer(tokenizer), ["b"], min_tokens=min_tokens)
        piece = choice.push(ids, FinishReason.LENGTH)
        before = tokenizer.decode(ids[:min_tokens])
        assert piece.text.startswith(before) and len(piece.token_ids) >= min_tokens
        assert "b" not in piece.text.removeprefix(before)


def test_chat_template_and_end_tokens(model_dir, tokenizer):
    model = ModelTokenizer(model_dir)
    prompt = render_chat(model, [{"role": "user", "content": "hé"}])
    assert prompt == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert model.encode(prompt, add_special_tokens=False).ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert model.eos_token_ids == (tokenizer.token_to_id(EOS),)
    with pytest.raises(ChatTemplateError, match="refused by template"):
        render_chat(model, [{"role": "user", "content": "refuse"}])


def test_template_files_helpers_and_sandbox(tmp_path):
    write_model_dir(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    template = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}!{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": "<s>"}}))
    model = ModelTokenizer(tmp_path)
    assert model.eos_token_ids == (7,)
    assert render_chat(model, [{"a": "é"}, {"b": 1}]) == '<s>{"a": "é"}{"b": 1}!4'
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ none + 1 }}", "{{ messages[9].x }}"):
        (tmp_path / "chat_template.jinja").write_text(attack)
        with pytest.raises(ChatTemplateError):
            render_chat(ModelTokenizer(tmp_path), [])


def test_bos_is_added_to_prompts_as_the_post_processor_says(tmp_path):
    from tokenizers import Tokenizer, processors

    write_model_dir(tmp_path)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
    raw.save(str(tmp_path / "tokenizer.json"))
    model = ModelTokenizer(tmp_path)
    assert model.encode("a", add_special_tokens=True).ids == [0, *model.encode("a", add_special_tokens=False).ids]


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable"):
        ModelTokenizer(tmp_path)
    write_model_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="can't be compiled"):
        render_chat(ModelTokenizer(tmp_path), [])
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        ModelTokenizer(tmp_path)


def test_a_model_without_a_template_says_so(tmp_path):
    write_model_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    renderer = Renderer(ModelTokenizer(tmp_path).chat_template)
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        asyncio.run(renderer.render([]))


def test_long_texts_of_few_tokens_are_not_refused(tmp_path):
    word = "x" * 100
    tokenizer = write_model_dir(tmp_path)
    tokenizer.add_tokens([word])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    constraints = Constraints(GrammarChecker(tmp_path, [1]), [1])
    preparation = Preparation(ModelTokenizer(tmp_path), Renderer(None), constraints)
    request = CompletionRequest(model="tiny", prompt=word * 500)
    prompts = asyncio.run(preparation.completion(request, Limits(1024, 1024, 1000)))
    preparation.close()
    assert list(prompts[0].token_ids) == [tokenizer.token_to_id(word)] * 500


def test_prompts_do_not_wait_behind_texts_that_are_only_converted(tmp_path, monkeypatch):
    write_model_dir(tmp_path)
    tokenizer, may_go_on = ModelTokenizer(tmp_path), threading.Event()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *text, **options: may_go_on.wait() and encode(*text, **options))
    preparation = Preparation(tokenizer, Renderer(None), Constraints(GrammarChecker(tmp_path, [1]), [1]))

    async def run():
        text = "fox " * 200
        converted = [preparation.tokens_of(text, add_special_tokens=True, most=9000) for _ in range(4)]
        waiting = [asyncio.create_task(each) for each in converted]
        await asyncio.sleep(0.01)
        request = CompletionRequest(model="tiny", prompt=text)
        async with asyncio.timeout(PATIENCE_SECONDS):
            [prompt] = await preparation.completion(request, Limits(4096, 4096, 1000))
        assert not any(each.done() for each in waiting)
        may_go_on.set()
        assert await asyncio.gather(*waiting) == [list(prompt.token_ids)] * 4

    try:
        asyncio.run(run())
    finally:
        may_go_on.set()
        preparation.close()


def test_a_grammar_that_is_too_long_after_reasoning_is_refused(tmp_path):
    constraints = Constraints(GrammarChecker(tmp_path, [1]), [1])
    with pytest.raises(ApiError, match="131073 characters; at most 131072") as refused:
        asyncio.run(constraints.checked("x" * 131_073, "structured_outputs"))
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs")


def test_events_of_texts_are_those_of_their_pieces_whatever_is_in_them():
    """Quotation marks, commas and backslashes at the ends of texts, too: JSON separates texts by these."""
    chosen = random.Random(1)
    form = ChatFormat("m")
    for _ in range(300):
        written = ["".join(chosen.choices('",\\[]{}:a\n é', k=chosen.randint(1, 4))) for _ in range(8)]
        texts = Texts(written, list(range(8)))
        assert form.texts(0, texts) == b"".join(form.chunk(0, piece, {}) for piece in texts.pieces())


@pytest.mark.parametrize("kind", ["byte-level", "window"])
def test_texts_are_the_pieces_of_tokens_one_by_one(tokenizer, kind):
    """Whole characters and parts of them, however many tokens come at once; so are the events made of them."""

    def choice():
        if kind == "window":
            return Choice(WindowDetokenizer(tokenizer), [])
        return Choice(ByteLevelDetokenizer(TokenTable(lambda token_id: tokenizer.id_to_token(token_id) or "")), [])

    ids = tokenizer.encode("The quick 東京は 😀 brown fox").ids
    for size in (1, 2, 5, len(ids)):
        for return_token_ids in (False, True):
            one, other = choice(), choice()
            form = ChatFormat("m", return_token_ids=return_token_ids)
            assert one.is_plain
            for begin in range(0, len(ids), size):
                part = ids[begin : begin + size]
                texts = one.push_texts(part)
                pieces = [other.push((token_id,), None) for token_id in part]
                assert list(texts.pieces()) == pieces
                assert form.texts(0, texts) == b"".join(form.chunk(0, piece, {}) for piece in pieces)
            assert one.num_tokens == other.num_tokens == len(ids)
            assert one.push((), FinishReason.LENGTH) == other.push((), FinishReason.LENGTH)
    assert not Choice(WindowDetokenizer(tokenizer), ["stop"]).is_plain
