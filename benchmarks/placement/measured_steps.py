"""Seconds of a GPU's steps as measured, where a line through them all is not near enough: any part of a prompt costs a
step more than a millisecond, and the step is padded to the size of a CUDA graph."""

from bisect import bisect_left

from splitserve.protocol.placement.step_model import StepWork

BESIDE_TOKENS = (0, 80, 160, 240, 320, 448, 576)
"""Prompt tokens in a step that decodes: those of CUDA graphs, and none."""
BESIDE_SECONDS = (0.0, 1.4e-3, 2.3e-3, 3.5e-3, 5.4e-3, 7.9e-3, 10.2e-3)
"""Seconds that they add to a decode step of 16, 32 or 64 sequences, from position 1,152 of a prompt."""


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
            seconds += _beside(num_tokens) + 1.6e-9 * max(0.0, num_pairs - 1152 * num_tokens)
        return seconds


class H200Steps:
    """Steps of the same model on an H200 as they took while requests were served: 8.0 ms for 49 sequences of 2,304
    tokens, 10.1 for 72 (1129T053128, 1129T053631); alone, without HTTP, they take up to 9% less. Prompts alone as in
    ``splitserve bench engine`` (1123T155513): 11 to 12 ms for 512 tokens, 48 for 2,048, 97 for 4,096, 211 for 8,192.

    Prompts beside outputs weren't measured alone. They add what they add on an H100, which has the same
    multiprocessors, and 0.6 ms, which is fitted: with it two mixed workers miss the objectives at the rates of those
    two runs.
    """

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        num_decodes, context, num_tokens, num_pairs = work
        if not num_decodes:
            return max(5e-3, 0.8e-3 + 22.6e-6 * num_tokens + 6e-10 * num_pairs)
        seconds = 4.2e-3 + 1.1e-5 * num_decodes + 3e-8 * context
        if num_tokens:
            seconds += 0.6e-3 + _beside(num_tokens) + 6e-10 * max(0.0, num_pairs - 1152 * num_tokens)
        return seconds


def _beside(num_tokens: float) -> float:
    at = bisect_left(BESIDE_TOKENS, num_tokens)
    if at < len(BESIDE_TOKENS):
        return BESIDE_SECONDS[at]
    return BESIDE_SECONDS[-1] + 20.5e-6 * (num_tokens - BESIDE_TOKENS[-1])
