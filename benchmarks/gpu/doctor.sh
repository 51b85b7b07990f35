#!/usr/bin/env bash
# splitserve doctor on two GPUs: benchmarks/gpu/doctor.sh; about 2 minutes. Nothing should be wrong but where the wrong transport is planted.
set -o pipefail
OUT=${OUT:-benchmarks/results}; mkdir -p "$OUT"
C="${SPLITSERVE:-splitserve}"; URL=http://127.0.0.1:8012; STATUS=0
mark() { echo; echo "=== $* ($(date +%T))"; }
expect() { [ "$1" = "$2" ] || { echo "FAILED: exit status $1, not $2"; STATUS=1; }; }
[ -f /tmp/m/config.json ] || python3 -c "
from splitserve.models.demo.checkpoint import write_demo_config
write_demo_config('/tmp/m', shape='llama-3.1-8b')"

mark "this machine"
timeout 150 $C doctor --port 0; expect $? 0
mark "1P1D on two GPUs, Llama-3.1-8B shape"
setsid $C serve /tmp/m --prefill 1 --decode 1 --device cuda --dtype bfloat16 --load-format dummy --port 8012 > "$OUT/doctor-serve.log" 2>&1 &
SP=$!
until curl -sf -o /dev/null -m 1 $URL/ready; do kill -0 $SP 2>/dev/null || { tail -30 "$OUT/doctor-serve.log"; exit 1; }; sleep 0.2; done
timeout 60 $C doctor --against $URL; expect $? 0
timeout 60 $C doctor --against $URL --json > "$OUT/doctor.json"; python3 -c "import json; print(json.dumps(json.load(open('$OUT/doctor.json'))['probe'], indent=1))"
kill -INT $SP; wait $SP
mark "planted: UCX without cuda_ipc"
UCX_TLS=^cuda_ipc timeout 150 $C doctor --port 0 | grep -A2 "^problem\|hand-over"; expect "${PIPESTATUS[0]}" 1
exit $STATUS
