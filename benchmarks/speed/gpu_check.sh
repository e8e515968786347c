#!/usr/bin/env bash
# One command for a machine with a GPU, under 8 minutes: native kernel tests against their references, no sync
# and no allocation, a CUDA graph, a memory check, then the benchmark suite; one table at the end, and in OUT_DIR
# the numbers as JSON and a picture of them. Nothing but torch, triton and numpy has to be there: what is missing
# is skipped by name. Without a GPU it runs to its end and says what it skipped.
#   PYTHON=python3 benchmarks/speed/gpu_check.sh [OUT_DIR]
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT_DIR=${1:-.cache/gpu_check}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT_DIR"
declare -a SUMMARY
failed=0

note() { # name, verdict, remark
  SUMMARY+=("$(printf '%-36s %-8s %s' "$1" "$2" "$3")")
  printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$OUT_DIR/verdicts.tsv"
}
step() { # name, seconds, command...: runs it, keeps the verdict
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  # All steps together have 470 seconds.
  limit=$((SECONDS + limit > 470 ? (SECONDS < 460 ? 470 - SECONDS : 10) : limit))
  echo "==> $name"
  timeout "$limit" "$@" || status=$?
  case $status in
    0) note "$name" passed "$((SECONDS - start)) s" ;;
    5) note "$name" SKIPPED "no test selected" ;; # pytest's code for it
    124) failed=1; note "$name" FAILED "not done after $limit s" ;;
    *) failed=1; note "$name" FAILED "exit code $status, $((SECONDS - start)) s" ;;
  esac
}
skip() { # name, why
  echo "==> $1: SKIPPED ($2)"
  note "$1" SKIPPED "$2"
}
missing() { # modules...: those that are not installed
  "$PYTHON" -c 'import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None], sep=", ")' "$@"
}

: >"$OUT_DIR/verdicts.tsv"
"$PYTHON" - <<'PY' || { echo "the core of gpu-align needs torch, triton and numpy"; exit 1; }
import json
from benchmarks.speed.workload import machine
print(json.dumps(machine(), indent=1))
PY
has_gpu() { "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
TESTS=("$PYTHON" -m pytest -q -p no:cacheprovider)
without=$(missing pytest hypothesis)

if ! has_gpu; then
  skip "native kernel tests" "no GPU; make test runs them under the interpreter"
  skip "no sync, no allocation, CUDA graph" "no GPU"
  skip "sync debug mode: error" "no GPU"
  skip "compute-sanitizer" "no GPU"
elif [ -n "$without" ]; then
  for name in "native kernel tests" "no sync, no allocation, CUDA graph"; do skip "$name" "not installed: $without"; done
else
  step "native kernel tests" 180 "${TESTS[@]}" tests/gpu_align/ops tests/gpu_align/test_drafter*.py tests/gpu_align/test_capture.py
  step "no sync, no allocation, CUDA graph" 60 "${TESTS[@]}" -m gpu tests/gpu_align
fi
if has_gpu; then
  step "sync debug mode: error" 60 "$PYTHON" -m benchmarks.speed.gpu_smoke --sync-error
  if command -v compute-sanitizer >/dev/null; then
    step "compute-sanitizer" 90 compute-sanitizer --error-exitcode 1 "$PYTHON" -m benchmarks.speed.gpu_smoke
  else
    skip "compute-sanitizer" "not installed"
  fi
fi
step "step times" 120 "$PYTHON" -m benchmarks.speed.step_time --json "$OUT_DIR/step_time.json"

without=$(missing pytest pytest_benchmark rapidfuzz)
if [ -n "$without" ]; then
  skip "benchmark suite" "not installed: $without"
else
  rm -f "$OUT_DIR/bench.json"
  step "benchmark suite" 240 "${TESTS[@]}" benchmarks/speed --benchmark-only --benchmark-json "$OUT_DIR/bench.json" \
    --benchmark-columns=median,iqr,rounds
fi
without=$(missing matplotlib)
if [ -n "$without" ]; then
  skip "picture" "not installed: $without"
elif [ ! -s "$OUT_DIR/bench.json" ]; then
  skip "picture" "no benchmark was run"
else
  step "picture" 60 "$PYTHON" -m benchmarks.speed.plot "$OUT_DIR/bench.json" "$OUT_DIR/bench.png"
fi

"$PYTHON" - "$OUT_DIR" <<'PY'
import json, pathlib, sys
from benchmarks.speed.workload import machine
out = pathlib.Path(sys.argv[1])
rows = [line.split("\t") for line in (out / "verdicts.tsv").read_text().splitlines()]
verdicts = [dict(zip(("check", "verdict", "remark"), row)) for row in rows]
(out / "gpu_check.json").write_text(json.dumps({"machine": machine(), "checks": verdicts}, indent=1) + "\n")
PY
rm -f "$OUT_DIR/verdicts.tsv"
echo
printf '%s\n' "${SUMMARY[@]}"
echo "numbers in $OUT_DIR, $SECONDS s in all"
exit $failed
