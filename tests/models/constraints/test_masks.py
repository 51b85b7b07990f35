"""Masks against brute force on a small vocabulary, and the state of a grammar as a function of the output."""

import itertools
import random
import re

import pytest
import torch

from byte_vocabulary import token_bytes
from splitserve.common.grammars import GRAMMAR_LIMITS
from splitserve.kernels.reference.sampling import mask_logits
from splitserve.kernels.sampling import FORBIDDEN
from splitserve.models.constraints.grammars import ConstraintError, Grammars
from splitserve.models.constraints.masks import HostMasks, MaskMaker
from splitserve.models.constraints.progress import Progress
from splitserve.models.demo.tokenizer import QWEN_TOKENS, train_tokenizer
from splitserve.protocol.sampling_features import Constraint

VOCAB_SIZE = 520  # more than the tokenizer's, as padded embeddings have it


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(512, QWEN_TOKENS, 0)


@pytest.fixture(scope="module")
def grammars(tokenizer, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("model")
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return Grammars(model_dir, VOCAB_SIZE)


@pytest.fixture(scope="module")
def ends(tokenizer):
    return (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def mask_after(grammars, constraint, output_ids):
    progress = Progress(constraint, grammars)
    progress.advance(output_ids)
    assert not progress.error
    return MaskMaker(pin_memory=False).make([progress.matcher], VOCAB_SIZE)


def allowed_after(grammars, constraint, output_ids):
    bits = mask_after(grammars, constraint, output_ids)
    logits = torch.zeros(1, VOCAB_SIZE)
    mask_logits(logits, torch.tensor([0]), bits)
    return set((logits[0] == 0).nonzero().squeeze(1).tolist())


LANGUAGES = {
    "choices": ("start: " + " | ".join(f'"{word}"' for word in ("the", "then", "the cat", "é", "a")), None),
    "regex": ("start: /(ab|a)(c|bc){1,2}/", r"(ab|a)(c|bc){1,2}"),
    "optional": ("start: /t?h?e?/", r"t?h?e?"),
    "rules": ('start: x ("," x)?\nx: "a" | "b" "b"', r"(a|bb)(,(a|bb))?"),
}


def words_of(name):
    grammar, pattern = LANGUAGES[name]
    if pattern is None:
        return {word.encode() for word in re.findall('"(.*?)"', grammar)}
    texts = ("".join(chars) for n in range(7) for chars in itertools.product("abcthe,", repeat=n))
    return {text.encode() for text in texts if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_those_of_brute_force(name, tokenizer, grammars, ends):
    """A token is allowed where some word continues with it, an end token where the text is a word. Where the next byte
    is the only possible one, the tokens that the tokenizer would use for the forced text may be the only ones."""
    words, pieces = words_of(name), token_bytes(tokenizer)
    constraint = Constraint(LANGUAGES[name][0], ends)
    chooser = random.Random(name)
    for _ in range(12):
        output, text = [], b""
        while True:
            following = {i for i, p in enumerate(pieces) if p and any(word.startswith(text + p) for word in words)}
            expected = following | (set(ends) if text in words else set())
            allowed = allowed_after(grammars, constraint, output)
            is_forced = text not in words and len({pieces[i][0] for i in following}) == 1
            assert allowed == expected or (is_forced and allowed and allowed < expected), (text, output)
            if not following:
                break
            output.append(chooser.choice(sorted(allowed & following)))
            text += pieces[output[-1]]
        assert text in words


def test_after_the_end_only_end_tokens_are_allowed(tokenizer, grammars, ends):
    """With ignore_eos an output goes on after its end token."""
    constraint = Constraint('start: "ab"', ends)
    output = encode(tokenizer, "ab")
    progress, maker = Progress(constraint, grammars), MaskMaker(pin_memory=False)
    for token_id in output:
        progress.advance([token_id])
    for _ in range(3):
        assert allowed_after(grammars, constraint, output) == set(ends)
        assert torch.equal(maker.make([progress.matcher], VOCAB_SIZE), mask_after(grammars, constraint, output))
        output.append(ends[1])
        progress.advance([ends[1]])
        assert not progress.error


def test_masks_made_by_several_threads_are_those_of_one(tokenizer, grammars, ends):
    constraint = Constraint('start: "abcdefgh" "xyz"?', ends)
    text = encode(tokenizer, "abcdefgh")
    matchers = []
    for number in range(3 * len(text)):
        progress = Progress(constraint, grammars)
        progress.advance(text[: number % (len(text) + 1)])
        matchers.append(progress.matcher)
    expected = MaskMaker(pin_memory=False).make(matchers, VOCAB_SIZE)
    assert torch.equal(MaskMaker(pin_memory=False, num_threads=2).make(matchers, VOCAB_SIZE), expected)
    assert len({tuple(row) for row in expected.tolist()}) > 1


def test_a_state_is_a_function_of_the_output(tokenizer, grammars, ends):
    schema = '{"grammars":[{"json_schema":{"type":"object"}}]}'
    for marker in ((), tuple(encode(tokenizer, "</think>"))):
        constraint = Constraint(schema, ends, marker)
        output = (encode(tokenizer, "I think. </thin") + list(marker) if marker else []) + encode(
            tokenizer, '{"name": [1, 2.5, "é"]}'
        )
        step_by_step = Progress(constraint, grammars)
        for number, token_id in enumerate(output):
            replayed = Progress(constraint, grammars)
            replayed.advance(output[:number])
            assert replayed.position == step_by_step.position
            assert (replayed.matcher is None) == (step_by_step.matcher is None)
            if replayed.matcher is not None:
                assert replayed.matcher.compute_bitmask() == step_by_step.matcher.compute_bitmask()
            step_by_step.advance([token_id])
        assert step_by_step.matcher.is_accepting()


def test_a_grammar_begins_after_the_first_occurrence_of_its_marker(grammars, ends):
    constraint = Constraint('start: "a"', ends, (7, 7, 8))
    assert constraint.begin([7, 8, 7, 7]) is None
    assert constraint.begin([7, 7, 7, 8, 9, 7, 7, 8]) == 4
    assert constraint.begin([7, 7, 8], num_searched=2) == 3
    progress = Progress(constraint, grammars)
    for token_id in (ends[0], 7, 7):
        progress.advance([token_id])
        assert progress.matcher is None and not progress.error
    progress.advance([8])
    assert progress.matcher is not None


@pytest.mark.parametrize(
    ("grammar", "output", "message"),
    [
        ("start: missing", "", "can't be compiled"),
        ('start: "a"', "b", "doesn't match"),
        ("start: /(a|b)*a(a|b){60}/", "ab", ""),
    ],
)
def test_errors_end_the_state(grammar, output, message, tokenizer, grammars, ends):
    progress = Progress(Constraint(grammar, ends), grammars)
    progress.advance(encode(tokenizer, output))
    assert message in progress.error and "\n" not in progress.error
    assert bool(progress.error) == bool(message)
    assert (progress.matcher is None) == bool(message)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_grammar_that_becomes_too_complex_is_an_error(grammars, ends, tokenizer, monkeypatch, num_threads):
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_items_in_row", 60)
    progress = Progress(Constraint('start: e\ne: e e | "a" | "aa" | "aaa"', ends), grammars)
    maker = MaskMaker(pin_memory=False, num_threads=num_threads)
    others = [grammars.new_matcher(Constraint('start: "b"', ends)) for _ in range(9)]
    for _ in range(200):
        progress.advance(encode(tokenizer, "a"))
        if progress.matcher is None:
            break
        maker.make([*others, progress.matcher], VOCAB_SIZE)
        progress.check()
    assert not any(other.is_error() for other in others)
    assert "max is 60" in progress.error


def test_end_tokens_outside_the_vocabulary_are_refused(grammars):
    with pytest.raises(ConstraintError, match="outside the vocabulary of 520"):
        grammars.new_matcher(Constraint('start: "a"', (520,)))


def test_compiled_grammars_are_kept_within_a_bound(tmp_path, tokenizer, ends):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    few = Grammars(tmp_path, VOCAB_SIZE, max_grammars=2)
    for word in ("a", "b", "a", "c", "d"):
        assert few.new_matcher(Constraint(f'start: "{word}"', ends)).compute_ff_bytes() == word.encode()
        assert few.num_compiled <= 2


def test_masks_on_the_host_equal_those_of_tensor_operations():
    generator = torch.Generator().manual_seed(0)
    vocab_size = 1000
    logits = torch.randn((5, vocab_size), generator=generator)
    rows = torch.tensor([3, 0, 4])
    bits = torch.zeros((3, 32), dtype=torch.int32)
    bits[0] = torch.randint(-(2**31), 2**31 - 1, (32,), generator=generator, dtype=torch.int64).int()
    bits[1] = -1
    bits[2, 31] = 1 << 7  # token 999 alone
    expected = logits.clone()
    mask_logits(expected, rows, bits)
    HostMasks().apply(logits, rows.tolist(), bits)
    assert torch.equal(logits, expected)
    assert (logits[4] != FORBIDDEN).nonzero().tolist() == [[999]]
    assert (logits[1] != FORBIDDEN).all() and (logits[0] != FORBIDDEN).all()
