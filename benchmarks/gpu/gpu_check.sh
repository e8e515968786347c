#!/usr/bin/env bash
# All checks and timings of a machine with a GPU, within 25 minutes; benchmarks/gpu/gpu_check.py says what it does.
#   benchmarks/gpu/gpu_check.sh [--out DIR] [--dry-run] [STAGE ...]      PYTHON=python3 chooses the interpreter
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
arguments=()
while [ $# -gt 0 ]; do # a folder is named as the caller sees it
  case $1 in
    --out) arguments+=(--out "$(cd "$caller" && realpath -m "$2")"); shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
exec "$PYTHON" -m benchmarks.gpu.gpu_check ${arguments[@]+"${arguments[@]}"}
