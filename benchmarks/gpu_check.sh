#!/usr/bin/env bash
# One command for a machine with a GPU: native kernel tests, the GPU-only tests, a memory check, then the
# step times; one table at the end. Without a GPU it runs to its end and says what it skipped.
#   PYTHON=python3 benchmarks/gpu_check.sh [OUT_DIR]
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT_DIR=${1:-benchmarks/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT_DIR"
declare -a SUMMARY
failed=0

step() { # name, command...: runs it, keeps the verdict
  local name=$1 start=$SECONDS
  shift
  echo "==> $name"
  if "$@"; then verdict=passed; else verdict=FAILED; failed=1; fi
  SUMMARY+=("$(printf '%-44s %-8s %4ss' "$name" "$verdict" $((SECONDS - start)))")
}
skip() { # name, why
  echo "==> $1: SKIPPED ($2)"
  SUMMARY+=("$(printf '%-44s %-8s %s' "$1" SKIPPED "$2")")
}

"$PYTHON" - <<'PY' || { echo "the core of gpu-align needs torch, triton and numpy"; exit 1; }
import platform, torch, triton, numpy
print(f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, numpy {numpy.__version__}")
print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
PY
has_gpu() { "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
has() { "$PYTHON" -c "import sys, importlib.util as u; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))" "$@"; }

if ! has_gpu; then
  skip "native kernel tests" "no GPU; 'make test' runs them under the interpreter"
  skip "no sync, no allocation, CUDA graph" "no GPU"
  skip "compute-sanitizer" "no GPU"
elif ! has pytest hypothesis; then
  skip "native kernel tests" "pytest or hypothesis is not installed"
  skip "no sync, no allocation, CUDA graph" "pytest or hypothesis is not installed"
else
  step "native kernel tests" timeout 300 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu_align/ops tests/gpu_align/test_drafter.py
  step "no sync, no allocation, CUDA graph" timeout 120 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/gpu_align
  if command -v compute-sanitizer >/dev/null; then
    step "compute-sanitizer" timeout 120 compute-sanitizer --error-exitcode 1 "$PYTHON" -m pytest -q -p no:cacheprovider \
      tests/gpu_align/test_drafter.py -k "test_insertion or test_empty_batch"
  else
    skip "compute-sanitizer" "not installed"
  fi
fi
step "step times" timeout 240 "$PYTHON" -m benchmarks.step_time --json "$OUT_DIR/step_time.json"

echo
printf '%s\n' "${SUMMARY[@]}"
exit $failed
