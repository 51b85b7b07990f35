#!/usr/bin/env bash
# Goodput of arrangements on two GPUs, arms side by side: benchmarks/gpu/goodput.sh [chunks|WORKLOAD]...; 8 minutes a call, then it goes on.
# chunks: chunk budgets of two mixed workers, on 2048/512; a workload: the best of them against 1P1D, both with each routing policy, and conditional.
# Llama-3.1-8B's shape, bfloat16, random weights, temperature 0.8, top-p 0.95. A second call with the same OUT continues where the first one ended.
set -uo pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"; CHUNKS=${CHUNKS:-2048}; SECONDS_OF_A_CALL=${SECONDS_OF_A_CALL:-440}
ends=$((SECONDS + SECONDS_OF_A_CALL))

goodput() {  # goodput NAME OPTIONS...: begins or continues the run of that name
  local folder=$OUT/$1 went_on=(); shift
  local left=$((ends - SECONDS)); [ $left -gt 30 ] || { echo "no time left: call again"; return 0; }
  [ -d "$folder" ] && went_on=(--continue "$(ls -d "$folder"/*/ | head -1)")
  mkdir -p "$folder"
  $C bench goodput --suite gpu --side-by-side --shape llama-3.1-8b --device cuda --dtype bfloat16 --load-format dummy --kv-memory 16GiB --temperature 0.8 \
    --top-p 0.95 --num-requests "${REQUESTS:-400}" --max-probes "${PROBES:-6}" --precision 0.15 --num-repeats 1 --max-seconds $left "$@" "${went_on[@]}" --result-dir "$folder"
}

for part in ${*:-chunks 2048/512 8192/64 chats}; do
  echo; echo "=== $part ($(date +%T))"
  if [ "$part" = chunks ]; then
    goodput chunks --workloads 2048/512 --first-rate 6 --arms 2M@512 2M@2048 2M@8192
  else
    goodput "${part//\//-}" --workloads "$part" --first-rate "${FIRST_RATE:-4}" \
      --arms "2M@$CHUNKS:least-loaded" "2M@$CHUNKS:prefix" 1P1D:least-loaded 1P1D:prefix 1P1D:cost
  fi
done
