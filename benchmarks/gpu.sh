#!/usr/bin/env bash
# All that one GPU can tell, in less than 8 minutes: benchmarks/gpu.py.
set -euo pipefail
cd "$(dirname "$0")/.."
here=python3
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then
  here=.venv/bin/python # as README installs
fi
exec env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-$here}" benchmarks/gpu.py "$@"
