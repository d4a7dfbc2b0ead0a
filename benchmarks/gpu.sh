#!/usr/bin/env bash
# All that one GPU can tell, in less than 8 minutes: benchmarks/gpu.py.
set -euo pipefail
cd "$(dirname "$0")/.."
here=.venv/bin/python # as README installs
[ -x "$here" ] || here=python3
exec env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-$here}" benchmarks/gpu.py "$@"
