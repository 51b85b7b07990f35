#!/usr/bin/env bash
# KV in pinned host memory on one GPU: benchmarks/gpu/tiers.sh [copies|served]...; all of it takes less than 4 minutes.
# copies: scattered blocks against one plain copy, both directions at once;
# served: two workers side by side, with and without a host tier: hits, paces beside loads, misses, what fits. Llama-3.1-8B's shape, random weights.
set -o pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"
PARTS=${*:-copies served}
has() { case " $PARTS " in *" $1 "*) return 0;; esac; return 1; }
mark() { echo; echo "=== $* ($(date +%T))"; }
show() { grep -vE "^(written|$)" | tail -${1:-20}; }
nvidia-smi --query-gpu=name,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader
grep -H . /sys/devices/system/node/node*/cpulist; grep -E "MemAvailable|Hugepagesize|Mlocked" /proc/meminfo; ulimit -l

if has copies; then
  mark "copies: blocks of 512 KiB to 8 MiB (an 8 MiB block is 64 tokens of Llama-3.1-8B); goals: shares >= 0.90, both_ratio >= 1.5"
  timeout 100 $C bench tier-copies --device cuda --memory 4096MiB --block-memory 512KiB 2048KiB 8192KiB --rounds 7 --result-dir $OUT 2>&1 | show 12
  mark "copies: small blocks, by copy engine and by kernel"
  timeout 60 $C bench tier-copies --device cuda --memory 512MiB --block-memory 16KiB 64KiB 256KiB --rounds 5 --result-dir $OUT 2>&1 | show 12
fi

if has served; then
  mark "served: goals: hits >= 7 times as soon at 4096 tokens and >= 12 at 32768; ITL beside loads <= 1.05; without reuse and where all fits >= 0.99"
  timeout 200 $C bench tiers --shape llama-3.1-8b --device cuda --dtype bfloat16 --load-format dummy --threads 0 \
    --kv-memory 5120MiB --host-kv-memory 28672MiB --parts hits pace no_reuse fits --hit-tokens 4096 32768 --hit-rounds 2 \
    --pace-streams 16 --pace-tokens 4096 --pace-rounds 30 --fresh-requests 16 --fresh-tokens 1024 --output-tokens 16 --rounds 8 --result-dir $OUT 2>&1 | show 40
fi
nvidia-smi --query-compute-apps=pid --format=csv | head -3
