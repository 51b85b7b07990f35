"""Strain: how near a time is to its objective. Pure.

A time t strains an objective T by t / (T - t): hardly while it is far below T, without bound where nothing is left.
Gaps beside chunks of prompts are longer than the others; each gap counts for itself, since the mean of all hides them.
"""

import math

MAX_CHUNK_STRAIN = 1.5
"""What a chunk adds at most to the strain of a gap. Workers size chunks so that the gap stays within its objective, as
long as steps alone take less than 0.7 of it; what is over the objective counts as harm."""


def strain_of(seconds: float, objective: float) -> float:
    """Return the strain of a time that has an objective; infinite without one, or where nothing of it is left."""
    return seconds / (objective - seconds) if seconds < objective else math.inf


def gap_strain(
    num_decoding: int, steps: tuple[float, float], share: float, chunk_seconds: float, objective: float
) -> float:
    """Return the mean strain of a request's gaps on a worker, and that which it adds to the gaps of ``num_decoding``
    others.

    ``steps``: seconds of a decode step there without the request, and with it; ``share``: that of the worker's time
    which prompts take; ``chunk_seconds``: what one of their chunks adds to a step.
    """
    before, after = steps
    own = _mean_strain(after, share, chunk_seconds, objective)
    if num_decoding and own < math.inf:
        between = _mean_strain((before + after) / 2, share, chunk_seconds, objective)
        own += num_decoding * (between - _mean_strain(before, share, chunk_seconds, objective))
    return own


def interrupted(step: float, chunk_seconds: float, long_share: float, objective: float) -> float:
    """Return what chunks of a prompt add to the mean strain of gaps of ``step`` seconds, for ``long_share`` of them."""
    short = strain_of(step, objective)
    if not long_share or short == math.inf:
        return 0.0
    long = strain_of(step + chunk_seconds, objective)
    return long_share * min(long - short, MAX_CHUNK_STRAIN)


def _mean_strain(step: float, share: float, chunk_seconds: float, objective: float) -> float:
    """Return the mean strain of gaps, of which so many are longer that the chunks take ``share`` of the time."""
    short = strain_of(step, objective)
    if not (share and chunk_seconds):
        return short
    num_chunks = share * step / ((1.0 - share) * chunk_seconds)  # for each step
    return short + interrupted(step, chunk_seconds, min(1.0, num_chunks), objective)
