"""Hashes of prompts through the memory of earlier ones equal those that are made anew."""

import random
from array import array

import pytest

from splitserve.protocol.block_hash import extend_hashes
from splitserve.router.placement import known_chains
from splitserve.router.placement.known_chains import KnownChains

ROOTS = [b"r" * 16, b"s" * 16]


def hashed(root: bytes, token_ids: array, block_size: int) -> list[bytes]:
    chain: list[bytes] = []
    extend_hashes(chain, root, token_ids, block_size)
    return chain


@pytest.mark.parametrize("max_spans", [1, 3, 1000])
def test_hashes_are_those_of_the_tokens(max_spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_chains, "SPAN_TOKENS", 8)
    monkeypatch.setattr(known_chains, "MAX_SPANS", max_spans)
    chosen, known = random.Random(3), KnownChains()
    for _ in range(2000):  # prompts with few tokens begin alike
        token_ids = array("i", [chosen.randrange(2) for _ in range(chosen.randrange(60))])
        root, block_size = chosen.choice(ROOTS), chosen.choice([2, 4, 16])
        expected = hashed(root, token_ids, block_size)
        chain = expected[: chosen.choice([0, 0, 0, 1, 4, 99])]
        known.extend(chain, root, token_ids, block_size)
        assert chain == expected


def test_the_next_turn_hashes_only_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    num_known = []

    def extend(chain: list[bytes], root: bytes, token_ids: array, block_size: int) -> None:
        num_known.append(len(chain))
        extend_hashes(chain, root, token_ids, block_size)

    monkeypatch.setattr(known_chains, "extend_hashes", extend)
    first = array("i", range(3000))
    turn = first + array("i", range(500))
    known = KnownChains()
    for token_ids in (first, turn):
        chain: list[bytes] = []
        known.extend(chain, ROOTS[0], token_ids, 16)
        assert chain == hashed(ROOTS[0], token_ids, 16)
    assert num_known == [0, 3000 // 512 * 512 // 16]
