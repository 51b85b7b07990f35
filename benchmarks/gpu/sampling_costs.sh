#!/usr/bin/env bash
# Decode steps by their way to draw, on one GPU: benchmarks/gpu/sampling_costs.sh [TREE]...; 20 s a tree and round once kernels are built.
# TREE: checkouts to compare, one after the other in each round (this one); the first call on a fresh machine compiles kernels for a minute or two.
# Greedy, top-p with top-k, logprobs, penalties, a JSON schema at batch 1 and 64, Llama-3.1-8B's shape, random weights: one table of all rounds, and of the kernels
# that a step has beyond a greedy one.   OUT, PYTHON as in scripts/gpu-tests; ROUNDS (3); MODES; SHAPE; BATCHES. Packages beside the interpreter's: PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-python3}; ROUNDS=${ROUNDS:-3}; SHAPE=${SHAPE:-llama-3.1-8b}; BATCHES=${BATCHES:-1 64}
MODES=${MODES:-top-p logprobs penalties json}; status=0

engine() {  # engine TREE OPTIONS...: one process of that checkout, its result in a folder of its own
  local name; name=$(basename "$(realpath "$1")"); mkdir -p "$OUT/$name"
  PYTHONPATH=$(realpath "$1")/src${PYTHONPATH:+:$PYTHONPATH} timeout 300 "$PYTHON" -c \
    'import sys; from splitserve.orchestration.cli.main import main; sys.exit(main(sys.argv[1:]))' \
    bench engine --shape "$SHAPE" --batch $BATCHES --context 1024 --prefill --no-busy --sampling $MODES --result-dir "$OUT/$name" "${@:2}" \
    >> "$OUT/$name.log" 2>&1 || { echo "$name failed:"; tail -n 15 "$OUT/$name.log" | cut -c1-300; status=1; }
}

for tree in "${@:-.}"; do engine "$tree" --profile; done  # builds what is missing, before anything is compared
for round in $(seq "$ROUNDS"); do
  for tree in "${@:-.}"; do engine "$tree"; done
  echo "round $round done ($(date +%T))"
done

for tree in "${@:-.}"; do basename "$(realpath "$tree")"; done | "$PYTHON" -c '
import json, pathlib, statistics, sys
out = pathlib.Path(sys.argv[1])
print(f"{chr(39)}beyond{chr(39)}: median of the rounds, and their least and most; the device is busy for less where it waits for the host")
print("{:16} {:>5} {:10} {:>8} {:>8} {:>16} {:>8}".format("tree", "batch", "sampling", "step ms", "beyond", "least, most", "busy ms"))
kernels = []
for name in map(str.strip, sys.stdin):
    found = [next(iter(json.loads(path.read_text())["models"].values())) for path in sorted((out / name).glob("engine-*.json"))]
    profiles = next((each["profiles"] for each in reversed(found) if each["profiles"]), {})
    rounds = [each["decode"] for each in found if not each["profiles"]]
    for figures in zip(*rounds):
        batch, mode = figures[0]["batch"], figures[0]["sampling"]
        beyond = [100 * each["beyond_greedy"] for each in figures]
        step = statistics.median(each["step_ms"] for each in figures)
        case = "decode {}x{}".format(batch, figures[0]["context"])
        greedy = {each["kernel"]: each["after_us"] for each in profiles.get(case, ())}
        own = {each["kernel"]: each["after_us"] for each in profiles.get(case if mode == "greedy" else f"{case} {mode}", ())}
        span = "{:.1f}, {:.1f}%".format(min(beyond), max(beyond))
        print(f"{name:16} {batch:5} {mode:10} {step:8.3f} {statistics.median(beyond):7.1f}% {span:>16} {sum(own.values()) / 1e3:8.3f}")
        more = sorted(((us - greedy.get(kernel, 0.0), kernel) for kernel, us in own.items()), reverse=True)[:9]
        kernels += [f"{name} {batch} {mode}: +{us:.1f} us {kernel}" for us, kernel in more if us >= 1.5]
print("\n".join(["", "kernels beyond a greedy step, microseconds a step:", *kernels]))
' "$OUT"
nvidia-smi --query-gpu=name,memory.used --format=csv,noheader
exit $status
