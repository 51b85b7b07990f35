"""Strain: how near gaps are to their objective, those beside chunks of prompts by their own length."""

import math

import pytest

from splitserve.router.placement.strain import MAX_CHUNK_STRAIN, gap_strain, interrupted, strain_of


def test_a_time_strains_its_objective_without_bound() -> None:
    assert strain_of(5.0, 10.0) == 1.0 and strain_of(9.0, 10.0) == pytest.approx(9.0)
    assert strain_of(10.0, 10.0) == math.inf and strain_of(1.0, 0.0) == math.inf


def test_gaps_beside_chunks_count_by_their_own_length() -> None:
    """A quarter of the time for chunks of 4 seconds: a chunk for every second step of 6 seconds."""
    strain = gap_strain(0, (0.0, 6.0), 0.25, 4.0, 15.0)
    assert strain == pytest.approx(0.5 * strain_of(6.0, 15.0) + 0.5 * strain_of(10.0, 15.0))
    assert strain > strain_of(8.0, 15.0)  # of the mean gap


def test_a_chunk_adds_no_more_than_the_bound_even_over_the_objective() -> None:
    assert interrupted(5.0, 4.0, 0.01, 10.0) == interrupted(5.0, 7.0, 0.01, 10.0) == 0.01 * MAX_CHUNK_STRAIN
    assert interrupted(9.99, 7.0, 0.5, 10.0) == 0.5 * MAX_CHUNK_STRAIN
    assert interrupted(11.0, 7.0, 0.5, 10.0) == 0.0  # infinite without a chunk
    assert gap_strain(3, (5.0, 10.0), 0.0, 0.0, 10.0) == math.inf


def test_what_an_output_adds_to_the_others_counts_for_each_of_them() -> None:
    alone, beside = (gap_strain(running, (4.0, 5.0), 0.0, 0.0, 10.0) for running in (0, 3))
    assert beside - alone == pytest.approx(3 * (strain_of(4.5, 10.0) - strain_of(4.0, 10.0)))
