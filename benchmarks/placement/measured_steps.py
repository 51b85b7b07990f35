"""Seconds of a GPU's steps as measured, where a line through them all is not near enough: any part of a prompt costs a
step more than a millisecond, and the step is padded to the size of a CUDA graph."""

from bisect import bisect_left
from collections.abc import Sequence

from splitserve.protocol.placement.step_model import StepWork

H100_BESIDE_TOKENS = (0, 80, 160, 240, 320, 448, 576)
"""Prompt tokens in a step that decodes: those of CUDA graphs, and none."""
H100_BESIDE_SECONDS = (0.0, 1.4e-3, 2.3e-3, 3.5e-3, 5.4e-3, 7.9e-3, 10.2e-3)
"""Seconds that they add to a decode step of 16, 32 or 64 sequences, from position 1,152 of a prompt."""
H200_BESIDE_TOKENS = (0, 80, 160, 240, 320, 448)
H200_BESIDE_SECONDS = (0.0, 1.5e-3, 3.6e-3, 5.0e-3, 6.6e-3, 9.3e-3)
"""The same of 32 to 64 sequences."""
H200_SEQUENCES = (1, 8, 16, 32, 48, 64, 80, 96)
H200_DECODE_SECONDS = (3.89e-3, 4.24e-3, 4.26e-3, 4.38e-3, 4.47e-3, 4.35e-3, 5.07e-3, 5.00e-3, 5.00e-3)
"""Seconds of a decode step of up to so many sequences, and of more, beyond those for its context: products of more
than 64 rows take other kernels."""


class H100Steps:
    """Steps of an 8B model in bf16 on an H100: ``splitserve bench engine --shape llama-3.1-8b --batch 1 4 16 32 64
    --context 2304 --mixed 16x80 ... --prefill 320 640 2048 4096`` (1128T031010, 1128T031643), within 5% for 16
    sequences or more and prompts of these sizes. For fewer sequences real steps take up to 10% longer. Pairs within a
    prompt's part count twice: up to 0.3 ms.

    Decode steps take 5.4 ms for one sequence, 12.25 for 64; prompts alone 10.2 ms for 320 tokens, 49 for 2,048 and 101
    for 4,096.
    """

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        num_decodes, context, num_tokens, num_pairs = work
        if not num_decodes:
            return max(6e-3, 3.5e-3 + 20.5e-6 * num_tokens + 1.6e-9 * num_pairs)
        seconds = 5.4e-3 + 4.66e-8 * context
        if num_tokens:
            seconds += _padded(H100_BESIDE_TOKENS, H100_BESIDE_SECONDS, num_tokens)
            seconds += 1.6e-9 * max(0.0, num_pairs - 1152 * num_tokens)
        return seconds


class H200Steps:
    """Steps of the same model on an H200, likewise (1129T091727; 8 sequences are from 1129T091535, and parts of prompts
    of 240 tokens or more from 1129T081902, of another H200). Prompts alone are from 1123T155513: 11 to 12 ms for 512
    tokens, 48 for 2,048, 97 for 4,096, 211 for 8,192.

    Decode steps of 2,304 tokens of context take 4.0 ms for one sequence, 8.9 for 64, 10.7 for 80 and 14.0 for 128;
    served ones can take up to 9% longer.
    """

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        num_decodes, context, num_tokens, num_pairs = work
        if not num_decodes:
            return max(5e-3, 0.8e-3 + 22.6e-6 * num_tokens + 6e-10 * num_pairs)
        seconds = H200_DECODE_SECONDS[bisect_left(H200_SEQUENCES, num_decodes)] + 3.05e-8 * context
        if num_tokens:
            seconds += _padded(H200_BESIDE_TOKENS, H200_BESIDE_SECONDS, num_tokens)
            seconds += 6e-10 * max(0.0, num_pairs - 1152 * num_tokens)
        return seconds


def _padded(sizes: Sequence[int], seconds: Sequence[float], number: float) -> float:
    """Return the seconds of the next larger size; above the largest, 20.5 us more for each one more."""
    at = bisect_left(sizes, number)
    return seconds[at] if at < len(sizes) else seconds[-1] + 20.5e-6 * (number - sizes[-1])
