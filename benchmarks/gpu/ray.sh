#!/usr/bin/env bash
# GPU workers that Ray has placed, against the same ones without Ray: benchmarks/gpu/ray.sh [placed|served]...; 5 minutes on two GPUs.
# placed: a cluster on Ray from nothing, one GPU for each worker, a hand-over between them; served: the hand-over bench, on Ray and without.
set -o pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"
PARTS=${*:-placed served}
has() { case " $PARTS " in *" $1 "*) return 0;; esac; return 1; }
mark() { echo; echo "=== $* ($(date +%T))"; }
export SPLITSERVE_STATE_DIR=$(mktemp -d)
python3 -c "import ray; print('ray', ray.__version__)" || exit 1

if has placed; then
  mark "placed: 1P1D on Ray, random weights"
  python3 -c "from pathlib import Path; from splitserve.models.demo.checkpoint import write_demo_config; print(write_demo_config(Path('$SPLITSERVE_STATE_DIR/model'), shape='llama-3.1-8b'))"
  cat > $SPLITSERVE_STATE_DIR/spec.yaml <<Y
name: gpus
model: {path: $SPLITSERVE_STATE_DIR/model, served_name: demo, load_format: dummy, max_model_len: 8192}
pools:
- {name: fill, role: prefill, device: cuda, memory: {kv: 8GiB}}
- {name: gen, role: decode, device: cuda, memory: {kv: 8GiB}}
router: {port: 0, policy: least-loaded}
Y
  time timeout 180 $C up --ray local --spec $SPLITSERVE_STATE_DIR/spec.yaml 2>&1 | tail -30
  $C status; nvidia-smi --query-compute-apps=pid,gpu_uuid,used_memory --format=csv
  URL=$($C status --json | python3 -c "import json, sys; print(json.load(sys.stdin)['url'])")
  curl -s $URL/v1/completions -H 'content-type: application/json' -d "{\"model\": \"demo\", \"prompt\": [$(seq -s, 10 4009)], \"max_tokens\": 8, \"temperature\": 0, \"ignore_eos\": true, \"return_route\": true}"; echo
  $C logs 2>&1 | grep -i "reads from\|transport\|device\|GPU\|WARN\|ERROR" | tail -20
  time $C down
fi

if has served; then
  mark "served: hand-overs on Ray and without"
  timeout 300 $C bench handover --served --device cuda --ray local --prompt-tokens 1024 4096 8192 --chunk-tokens 2048 --kv-memory 16384MiB --repeats 30 --save --result-dir $OUT 2>&1 | tail -40
fi
rm -rf "$SPLITSERVE_STATE_DIR"
