"""Runs of sent blocks against a model that keeps each block on its own."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from splitserve.router.placement import sent_blocks
from splitserve.router.placement.sent_blocks import SentBlocks

BITS = [1, 2, 4]


@dataclass
class Model:
    """The blocks of one worker, the least recently used one first, and those that it hasn't computed."""

    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    awaited: set[bytes] = field(default_factory=set)

    def note(self, chain: Sequence[bytes], most: int) -> list[bytes]:
        new = [block for block in chain if block not in self.sent]
        self.awaited.update(new)
        for block in reversed(chain):
            self.sent[block] = None
            self.sent.move_to_end(block)
        while len(self.sent) > most:
            self.take([next(iter(self.sent))])
        return new

    def take(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.sent.pop(block, None)
            self.awaited.discard(block)


class Prompts:
    """Prompts that share beginnings, as chains: a block's name is that of the block before it, and one letter."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.chains = [self._grow([]) for _ in range(4)]

    def one(self) -> list[bytes]:
        """Return a new prompt, a known one, one that is longer, or one that ends or parts within a known one."""
        chain = self.chosen.choice(self.chains)
        if self.chosen.random() < 0.5:
            begin = chain[: self.chosen.randrange(len(chain) + 1)] if self.chosen.random() < 0.5 else chain
            chain = self._grow(begin)
            self.chains = [*self.chains, chain][-12:]
        return chain if self.chosen.random() < 0.8 else chain[: self.chosen.randrange(len(chain) + 1)]

    def some(self) -> list[bytes]:
        """Return some blocks of a prompt, often its end."""
        chain = self.one()
        if self.chosen.random() < 0.5:
            return chain[self.chosen.randrange(len(chain) + 1) :][::-1]
        return [block for block in chain if self.chosen.random() < 0.3]

    def told(self) -> list[bytes]:
        """Return blocks of several prompts in one list, as another router tells them."""
        return list(dict.fromkeys([*self.some(), *self.some(), *self.one()]))

    def _grow(self, begin: list[bytes]) -> list[bytes]:
        chain = list(begin)
        for _ in range(self.chosen.randrange(1, 9)):
            chain.append((chain[-1] if chain else b"") + self.chosen.choice([b"x", b"y"]))
        return chain


def check(blocks: SentBlocks, models: dict[int, Model], chain: list[bytes]) -> None:
    """Compare all that can be asked, about one prompt."""
    assert len(blocks) == len(set().union(*(model.sent for model in models.values())))
    holders: list[int] = []
    for end, mask in blocks.stretches(chain):
        assert end > len(holders)
        holders += [mask] * (end - len(holders))
    for bit, model in models.items():
        assert blocks.last(bit, 10_000) == list(model.sent), "the order of use differs"
        assert blocks.last(bit, 3) == list(model.sent)[-3:]
        assert blocks.num_blocks(bit) == len(model.sent)
        assert [bool(mask & bit) for mask in holders] == [block in model.sent for block in chain]
        held = next((number for number, block in enumerate(chain) if block not in model.sent), len(chain))
        computed = next((number for number, block in enumerate(chain[:held]) if block in model.awaited), held)
        assert blocks.num_computed(bit, chain[:held]) == computed


@pytest.mark.parametrize("seed", range(40))
def test_runs_agree_with_blocks(seed: int) -> None:
    prompts, blocks = Prompts(seed), SentBlocks()
    chosen, models = prompts.chosen, {bit: Model() for bit in BITS}
    room = {bit: chosen.choice([5, 20, 100, 10_000]) for bit in BITS}
    for _ in range(400):
        bit, act = chosen.choice(BITS), chosen.random()
        model = models[bit]
        if act < 0.5:
            for each in {bit, chosen.choice(BITS)}:
                chain = prompts.one()
                assert blocks.note(each, chain, room[each]) == models[each].note(chain, room[each])
        elif act < 0.6:
            chain = prompts.told()
            assert blocks.note(bit, chain, room[bit]) == model.note(chain, room[bit])
        elif act < 0.8:
            chain = prompts.one()
            blocks.note_computed(bit, chain)
            model.awaited -= set(chain)
        elif act < 0.99:
            gone = prompts.some()
            blocks.take(bit, gone)
            model.take(gone)
        else:
            blocks.forget(bit)
            models[bit] = Model()
        check(blocks, models, prompts.one())
    for bit in BITS:
        blocks.forget(bit)
    assert not len(blocks) and not blocks._uses, "nothing is left of workers that have gone"


def num_runs(blocks: SentBlocks) -> int:
    return len(set(map(id, blocks._runs.values())))


def test_a_conversation_stays_a_few_runs() -> None:
    """Each turn adds an output, which decode has first, and a question."""
    blocks, chain = SentBlocks(), [b"0"]
    for number in range(1, 100):
        chain += [b"%d question %d" % (number, part) for part in range(3)]
        blocks.note(1, chain, 10_000)
        blocks.note(2, chain, 10_000)
        blocks.note_computed(1, chain)
        chain += [b"%d answer %d" % (number, part) for part in range(3)]
        blocks.note(2, chain, 10_000)
        assert num_runs(blocks) <= 3
    assert blocks.last(2, 10_000) == chain[::-1]


def test_prompts_that_begin_alike_do_not_join_what_they_split(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, split = SentBlocks(), list[int]()
    original = SentBlocks._split

    def count(self: SentBlocks, run: Any, at: int) -> Any:
        split.extend([at] if at else [])
        return original(self, run, at)

    monkeypatch.setattr(SentBlocks, "_split", count)
    begin = [b"system %d" % part for part in range(5)]
    prompts = [begin + [b"%d %d" % (own, part) for part in range(9)] for own in range(3)]
    for _ in range(10):
        for chain in prompts:
            blocks.note(1, chain, 10_000)
            blocks.note_computed(1, chain)
    assert len(split) <= len(prompts) and num_runs(blocks) == 1 + len(prompts)


def test_lost_blocks_are_taken_by_stretches() -> None:
    hashes = [bytes([number]) for number in range(6)]
    assert sent_blocks._places(hashes, {hashes[4], hashes[5]}) == [(4, 6)]
    assert sent_blocks._places(hashes, {hashes[0], hashes[1], hashes[3], hashes[5]}) == [(0, 2), (3, 4), (5, 6)]
