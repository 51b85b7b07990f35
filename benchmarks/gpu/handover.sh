#!/usr/bin/env bash
# KV hand-over between two or more GPUs: benchmarks/gpu/handover.sh [smoke|transfer|served|families|turns|chaos|isolation]...; the first three take less than 9 minutes.
# smoke: does memory travel, by what, how fast; transfer: threads, splits, block sizes, pairs of ranks; served: latency
# through a cluster; families: experts, windows and latent caches, and a mixed worker's tokens beside theirs; turns:
# prefixes that prefill reads from decode, float32 for equal tokens, 4 minutes; chaos: workers
# that die on GPUs, bfloat16 with CUDA graphs, 5 minutes; isolation: ITL beside prompts, against mixed workers, sampled, 9 minutes; three workers of 40 GB on each GPU.
set -o pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"
N=$(python3 -c "import torch; print(torch.cuda.device_count())")
PARTS=${*:-smoke transfer served}
has() { case " $PARTS " in *" $1 "*) return 0;; esac; return 1; }
mark() { echo; echo "=== $* ($(date +%T))"; }

if has smoke; then
  mark "smoke: does a GPU's memory travel to another's, by what, how fast"
  nvidia-smi topo -m | head -$((N + 2)); nvidia-smi nvlink -s -i 0 2>/dev/null | head -6
  readlink /proc/self/ns/pid; python3 -c "import torch; print(torch.__version__, torch.cuda.device_count(), [torch.cuda.can_device_access_peer(0, i) for i in range(1, torch.cuda.device_count())])"
  timeout 60 $C bench handover --device cuda --prompt-tokens 1024 4096 --threads 1 2 --repeats 8 --save --result-dir $OUT 2>&1 | tee $OUT/smoke.log | tail -20
  python3 - $OUT <<'P'
import glob, json, sys
for f in sorted(glob.glob(sys.argv[1] + "/handover-*.json")):
    for r in json.load(open(f))["results"][:1]:
        print("transport", r["transport"], "link GB/s per thread", round(r["link_gb_per_second"], 1))
P
  if ! grep -q "share" $OUT/smoke.log; then
    mark "smoke failed: what UCX says (also in $OUT/ucx.log.gz)"
    UCX_LOG_LEVEL=debug UCX_PROTO_INFO=y UCX_LOG_FILE=/tmp/ucx-%p.log timeout 60 $C bench handover --device cuda --prompt-tokens 256 --threads 1 --repeats 1 2>&1 | tail -20
    grep -h -i "cuda_ipc\|cuda-ipc\|WARN\|ERROR\|cma" /tmp/ucx-*.log | cut -c1-220 | sort | uniq -c | sort -rn | head -60
  fi
  mark "what UCX chose"
  UCX_PROTO_INFO=y UCX_LOG_FILE=/tmp/ucxp-%p.log timeout 60 $C bench handover --device cuda --prompt-tokens 256 --threads 1 --repeats 1 > /dev/null 2>&1
  grep -h -A7 "remote memory read" /tmp/ucxp-*.log | cut -c36- | sort | uniq -c | sort -rn | head -24; cat /tmp/ucxp-*.log /tmp/ucx-*.log 2>/dev/null | gzip | head -c 8000000 > $OUT/ucx.log.gz
fi

if has transfer; then
  mark "transfer: threads, split sizes, poll intervals, on one prompt of 4096 tokens"
  timeout 100 $C bench handover --device cuda --prompt-tokens 4096 --threads 1 2 3 4 6 8 --split-size 8MiB 64MiB --repeats 20 --save --result-dir $OUT 2>&1 | tee $OUT/threads.log | sed -n '/^prompt/,$p'
  for us in 20 100 300; do timeout 60 $C bench handover --device cuda --prompt-tokens 4096 --threads 4 --poll-us $us --repeats 20 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p' | sed "s/^/poll $us us: /"; done
  mark "transfer: prompt lengths, block sizes, fresh and shuffled, and the naive arm"
  timeout 150 $C bench handover --device cuda --prompt-tokens 512 1024 4096 8192 --block-size 16 32 64 128 --naive --repeats 15 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p'
  mark "transfer: put together by the source, or straight into place"
  timeout 90 $C bench handover --device cuda --prompt-tokens 1024 4096 --block-size 16 64 --path auto direct gathered mapped --repeats 15 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p'
  mark "transfer: pairs of ranks (they share GPUs where there are too few)"
  timeout 150 $C bench handover --device cuda --prompt-tokens 1024 4096 --tp 1:2 2:1 2:2 4:2 2:4 --repeats 15 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p'
  timeout 120 $C bench handover --device cuda --prompt-tokens 1024 4096 --tp 2:1 4:2 2:4 --path mapped --copy-streams 1 2 --repeats 15 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p'
  timeout 120 $C bench handover --device cuda --prompt-tokens 4096 --tp 1:2 2:1 --path auto mapped staged gathered layers --repeats 10 --save --result-dir $OUT 2>&1 | sed -n '/^prompt/,$p'
fi

if has served; then
  mark "served: first token to decode ready, with and without overlap"
  timeout 200 $C bench handover --served --device cuda --prompt-tokens 1024 4096 8192 --chunk-tokens 2048 --kv-memory 16384MiB --repeats 60 --save --result-dir $OUT 2>&1 | tail -30
fi

if has families; then
  for shape in ${FAMILIES:-deepseek-v2-lite gpt-oss-20b qwen3-30b-a3b}; do
    mark "families: $shape as 1P1D, and its tokens against a mixed worker's"
    timeout 240 $C bench handover --served --against-mixed --device cuda --shape $shape --attention-backend triton --prompt-tokens 1024 4096 --chunk-tokens 2048 --kv-memory 6GiB --repeats 8 --save --result-dir $OUT 2>&1 | tail -7
  done
fi

if has turns; then
  for dtype in float32 bfloat16; do
    mark "turns: later turns of conversations, prefixes read from decode or computed, $dtype"
    timeout 200 $C bench placement --cases turns --device cuda --dtype $dtype --requests 10 --save --result-dir $OUT 2>&1 | tail -6
  done
fi

if has chaos; then
  mark "chaos: kills, freezes and drains of 2P2D on these GPUs"
  timeout 460 $C bench chaos --device cuda --dtype bfloat16 --cuda-graphs --cases 24 --duration ${CHAOS_SECONDS:-300} --warm-up 10 --pause-seconds 4 --no-check-times --save --result-dir $OUT 2>&1 | tail -50
fi

if has isolation; then
  I=($C bench isolation --shape llama-3.1-8b --device cuda --dtype bfloat16 --load-format dummy --kv-memory 20GiB --temperature 0.8 --top-p 0.95)
  I+=(--arrangements 1P1D conditional '2 mixed' --side-by-side --rounds ${ROUNDS:-5} --seconds 12 --stream-rate 0 --save --result-dir "$OUT" ${ISOLATION_OPTIONS:-})
  mark "isolation: 16 requests/s of 1024 in, 128 out"
  timeout 330 "${I[@]}" --prompt-rate 16 --prompt-input-len 1024 --prompt-output-len 128 2>&1 | tee "$OUT/isolation-16.log" | sed -n '/^ *workers/,$p'
  mark "isolation: 3 requests/s of 8192 in, 64 out"
  timeout 330 "${I[@]}" --prompt-rate 3 --prompt-input-len 8192 --prompt-output-len 64 2>&1 | tee "$OUT/isolation-3.log" | sed -n '/^ *workers/,$p'
fi
