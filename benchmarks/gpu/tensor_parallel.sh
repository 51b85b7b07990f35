#!/usr/bin/env bash
# Tensor parallelism on two or more GPUs: all-reduce, decode and prefill by number of ranks, tokens. Less than 8 minutes on two GPUs.
set -o pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"
N=$(python3 -c "import torch; print(torch.cuda.device_count())"); R="2"; [ "$N" -ge 4 ] && R="2 4"
nvidia-smi topo -m | head -8
for n in $R; do timeout 90 $C bench all-reduce --ranks $n --result-dir $OUT 2>&1 | tail -18; done
timeout 150 $C bench tensor-parallel --ranks 1 $R --shape llama-3.1-8b --batch 1 64 --prefill 1024 8192 --steps 60 --result-dir $OUT 2>&1 | tee $OUT/tp.log | grep -v "^INFO\|took" | tail -40
# tokens: float32 must be equal, bfloat16 may differ in places
python3 -c "from splitserve.models.demo.checkpoint import write_demo_model as w; w('/tmp/tiny')"
for d in float32 bfloat16; do timeout 100 $C bench tensor-parallel --ranks 1 $R --model /tmp/tiny --dtype $d --batch 4 --context 64 --prefill 200 --steps 24 --result-dir $OUT 2>&1 | grep -v "^INFO\|took" | tail -6; done
