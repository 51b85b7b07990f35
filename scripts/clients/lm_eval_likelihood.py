"""lm-eval's local-completions: log-likelihoods of a task of ours, against those of its hf backend."""

import os
from pathlib import Path
from typing import Any

from steps import BASE_URL, CHECKPOINT, MODEL, check, end, need, step

MOST_APART = 1e-3
TASKS = Path(__file__).parent / "tasks"
TASK = "splitserve_endings"
SERVED = {
    "model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": CHECKPOINT, "tokenizer_backend": "huggingface",
    "num_concurrent": 4, "max_retries": 1, "max_length": 1024,
}  # fmt: skip
LOCAL = {"pretrained": CHECKPOINT, "dtype": "float32", "device": "cpu", "max_length": 1024}

os.environ.setdefault("OPENAI_API_KEY", "none")


def likelihoods(model: str, arguments: dict[str, Any]) -> dict[tuple[int, int], tuple[float, bool]]:
    """Return log-likelihood and greediness of each ending, by document and choice."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.chdir(TASKS)  # the task's data file is relative to this folder
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[TASK], task_manager=manager, log_samples=True, bootstrap_iters=0,
        batch_size=1,
    )  # fmt: skip
    return {
        (sample["doc_id"], index): (float(response[0][0]), str(response[0][1]) == "True")
        for sample in results["samples"][TASK]
        for index, response in enumerate(sample["resps"])
    }


with step("log-likelihoods equal those of the hf backend"):
    need("completions", echo=True, logprobs=1)
    ours, theirs = likelihoods("local-completions", SERVED), likelihoods("hf", LOCAL)
    check(ours.keys() == theirs.keys() and len(ours) == 24, (len(ours), len(theirs)))
    apart = max(abs(ours[key][0] - theirs[key][0]) for key in ours)
    print(f"{len(ours)} log-likelihoods, at most {apart:.2e} apart; smallest {min(each for each, _ in ours.values())}")
    check(apart <= MOST_APART, f"log-likelihoods are {apart} apart")
    check(all(ours[key][1] == theirs[key][1] for key in ours), "greediness differs")
end()
