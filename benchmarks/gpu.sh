#!/usr/bin/env bash
# All that one GPU can tell, in less than 8 minutes: benchmarks/gpu.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" benchmarks/gpu.py "$@"
