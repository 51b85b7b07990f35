#!/usr/bin/env bash
# One mixed worker on one GPU through HTTP: benchmarks/gpu/serving.sh [start|loop|ttft|itl|busy|sweep]...; all of it takes 7 minutes.
# start: from the command to ready and to the first token, kernels built and not; ttft: at 1 request/s; itl: at 16 requests/s; busy: at 64 streams;
# sweep: prefill beside decode in smaller and larger chunks, and without CUDA graphs of steps with prefill. Llama-3.1-8B's shape, bfloat16, random weights.
set -o pipefail
OUT=${OUT:-benchmarks/results}; TREE=${TREE:-$PWD}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"; URL=http://127.0.0.1:8011
PARTS=${*:-start loop ttft itl busy sweep}
has() { case " $PARTS " in *" $1 "*) return 0;; esac; return 1; }
mark() { echo; echo "=== $* ($(date +%T))"; }
[ -f /tmp/m/config.json ] || python3 -c "
try:
    from splitserve.models.demo.checkpoint import write_demo_config as write
except ImportError:
    from splitserve.models.demo.checkpoint import write_demo_model as write
write('/tmp/m', shape='llama-3.1-8b')"

start() {  # start NAME OPTIONS...: until /ready says 200
  local name=$1; shift
  local begun=$(date +%s.%N)
  setsid $C serve /tmp/m --mixed 1 --device cuda --dtype bfloat16 --load-format dummy --port 8011 --profile-dir /tmp/prof "$@" > $OUT/serve-$name.log 2>&1 &
  SP=$!
  until curl -sf -o /dev/null -m 1 $URL/ready; do kill -0 $SP 2>/dev/null || { echo "the server died"; tail -30 $OUT/serve-$name.log; exit 1; }; sleep 0.1; done
  echo "$name: start to /ready $(python3 -c "import time; print(round(time.time() - $begun, 1))") s"
  sleep 0.5; grep -hE "ready after|the largest steps" $OUT/serve-$name.log | cut -c1-300
}
stop() { kill -INT $SP; for i in $(seq 100); do kill -0 $SP 2>/dev/null || break; sleep 0.1; done; grep -hE "a step took|WARNING|ERROR|Traceback" $OUT/serve-$1.log | cut -c1-220 | tail -8; }
bench() { $C bench serve --base-url $URL --model m --tokenizer /tmp/m --result-dir $OUT --num-warmups 2 "$@" 2>&1 | grep -vE "^(written to|requests/s|duration)" | tail -26; }
# Seeds differ, so that no run finds another's prompts cached.
ttft() { mark "TTFT at 1 req/s, 1024 in $*"; bench --request-rate 1 --arrival fixed --num-requests 20 --input-len 1024 --output-len 16 --seed $1; }
itl() { mark "ITL at 16 req/s, 1024 in / 128 out $*"; bench --request-rate 16 --num-requests 240 --input-len 1024 --output-len 128 --seed $1; }
busy() { mark "device busy at 64 streams $*"; bench --request-rate inf --max-concurrency 64 --num-requests 64 --input-len 896 --output-len 500 --profile-steps 150 --profile-after 4.0 --seed $1; }

if has start; then
  mark "start: kernels not built (unless carried), then built twice"
  timeout 400 $C bench up --prefill 0 --decode 0 --mixed 1 --no-ray --shape llama-3.1-8b --result-dir $OUT -- --device cuda --dtype bfloat16 --load-format dummy 2>&1 | tail -12
fi
if has loop; then mark "the host's share: engine loop and router of this machine, with a clock for a GPU"; timeout 90 $C bench engine-loop --repeat 2 --result-dir $OUT 2>&1 | tail -7; fi
if has ttft || has itl || has busy; then
  start serve
  has ttft && ttft 11
  has itl && itl 12
  has busy && busy 13
  has ttft && ttft 14
  stop serve
fi
if has sweep; then
  for tokens in 192 448; do
    start beside$tokens --max-prefill-tokens-beside-decode $tokens
    itl 2$tokens; ttft 3$tokens
    stop beside$tokens
  done
  start nomixed --no-capture-mixed-steps; itl 41; ttft 42; stop nomixed
fi
nvidia-smi --query-compute-apps=pid --format=csv | head -3
