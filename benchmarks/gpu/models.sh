#!/usr/bin/env bash
# Steps of models on one GPU: benchmarks/gpu/models.sh [PART]...; each part takes 1 to 7 minutes, and is skipped once it has passed ($OUT/done-PART).
# build: kernels of three models are compiled at once (FlashInfer's and Triton's take minutes), beside the first tests: on a fresh machine, first;
# experts-tests: kernels that differ from one GPU to another; flashinfer-tests: those with FlashInfer, which compiles for minutes;
# llama: greedy headlines of Llama-3.1-8B's shape; sampled: its other ways to draw; qwen3moe: Qwen3-30B-A3B in bf16; tune: its experts; tuned: with these;
# gptoss, deepseek, gemma, fp8: GPT-OSS-20B in MXFP4, DeepSeek-V2-Lite, Gemma-3-27B, Qwen3-30B-A3B in FP8 (blocks of 128 x 128); tunemore: experts of the others.
#   OUT, PYTHON, SPLITSERVE_COMMIT as in scripts/gpu-tests; REPEAT: rounds (3); MODES_OF_DRAWS: ways of "sampled". Packages beside the interpreter's: PYTHONPATH.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-python3}; REPEAT=${REPEAT:-3}
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
C() { timeout 420 "$PYTHON" -c 'import sys; from splitserve.orchestration.cli.main import main; sys.exit(main(sys.argv[1:]))' "$@"; }
# --no-busy where the profiler's seconds are worth more elsewhere
engine() { C bench engine --repeat "$REPEAT" --result-dir "$OUT" "$@"; }
tests() { SPLITSERVE_SLOW_TESTS=1 PYTHON=$PYTHON timeout 420 scripts/gpu-tests "$OUT" "$@"; }
moe() { engine --shape "$1" --batch 1 8 64 256 --context 1024 --prefill 1024 8192 --steps 20 --no-busy "${@:2}"; }

experts_tests() { tests -q --durations 8 -k "test_triton_experts or test_tune or test_transformers_model or (test_attention_backends and (triton or reference))"; }
flashinfer_tests() { tests -q --durations 8 -k "test_attention_backends and not triton and not reference and not test_odd_shapes"; }
small() { engine --shape "$1" --context 128 --steps 4 --repeat 1 --no-busy --result-dir "$OUT/build" "${@:2}"; }
build() {
  local pids=() pid failed=0
  mkdir -p "$OUT/build"
  small llama-3.1-8b --batch 1 8 24 64 256 --prefill 512 1024 8192 --sampling top-p logprobs penalties json > "$OUT/build/llama.log" 2>&1 & pids+=($!)
  small qwen3-30b-a3b --batch 1 8 64 256 --prefill 1024 8192 > "$OUT/build/qwen3moe.log" 2>&1 & pids+=($!)
  small gpt-oss-20b --batch 1 8 64 256 --prefill 1024 8192 > "$OUT/build/gptoss.log" 2>&1 & pids+=($!)
  if experts_tests > "$OUT/build/tests.log" 2>&1; then touch "$OUT/done-experts-tests"; else failed=1; fi
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  tail -n 12 "$OUT"/build/*.log | cut -c1-300
  return $failed
}
llama() {
  engine --shape llama-3.1-8b --batch 1 8 24 64 256 --context 1024 --case 64x8192 256x512 --prefill 512 1024 8192
}
sampled() { engine --shape llama-3.1-8b --batch 1 64 --context 1024 --prefill --no-busy --sampling ${MODES_OF_DRAWS:-top-p logprobs penalties json}; }
qwen3moe() { moe qwen3-30b-a3b; }
tune_experts() { C tune --operation experts --output "$OUT/tuned" "$@"; }
tune() { tune_experts --shape qwen3-30b-a3b --rows 1 8 64 256 8192; }
tuned() { SPLITSERVE_TUNED_DIR=$OUT/tuned moe qwen3-30b-a3b; }
gptoss() { moe gpt-oss-20b; }
deepseek() { moe deepseek-v2-lite; }
gemma() { moe gemma-3-27b; }
fp8() { moe qwen3-30b-a3b-fp8; }
tunemore() { tune_experts --shape qwen3-30b-a3b-fp8 gpt-oss-20b deepseek-v2-lite --rows 1 8 64 256; }

status=0
for part in ${*:-build experts-tests llama sampled qwen3moe tune tuned gptoss deepseek gemma fp8 flashinfer-tests tunemore}; do
  [ -e "$OUT/done-$part" ] && { echo "$part has passed already"; continue; }
  echo; echo "=== $part ($(date +%T))"; began=$SECONDS
  if "${part//-/_}" 2>&1 | tee "$OUT/models-$part.log" | grep --line-buffered -vE "^(written|$)"; then touch "$OUT/done-$part"; else status=1; echo "$part failed"; fi
  echo "=== $part took $((SECONDS - began)) s"
done
nvidia-smi --query-gpu=name,memory.used --format=csv,noheader
exit $status
