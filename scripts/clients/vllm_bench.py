"""`vllm bench serve`: every request of its load is answered, streamed, on both endpoints."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import BASE_URL, CHECKPOINT, MODEL, check, end, step

NUM_PROMPTS = 16
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}

for backend, endpoint in ENDPOINTS.items():
    with step(f"bench serve --backend {backend}"), tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", backend, "--endpoint", endpoint,
            "--base-url", BASE_URL.removesuffix("/v1"), "--model", MODEL, "--tokenizer", CHECKPOINT,
            "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16", "--ignore-eos",
            "--num-prompts", str(NUM_PROMPTS), "--save-result", "--result-dir", folder, "--result-filename", "r.json",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        result = json.loads((Path(folder) / "r.json").read_text())
        check(result["completed"] == NUM_PROMPTS, result["completed"])
        check(result["total_output_tokens"] == 16 * NUM_PROMPTS, result["total_output_tokens"])
end()
