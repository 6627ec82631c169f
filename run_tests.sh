#!/usr/bin/env bash
# Sets up the test environment and runs everything: lint, types, tests. Arguments go to pytest: ./run_tests.sh -k data
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh
use_environment mlm,dev tokenizers tiktoken sentencepiece matplotlib tensorboard pyarrow orjson zstandard yaml pytest hypothesis ruff mypy pybind11 transformers
export OMP_NUM_THREADS=1
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"

"$PYTHON" -m ruff check .
# Types and unit tests run beside whole programs, which leave cores idle; what they print follows at the end.
output=$(mktemp)
set -m  # a process group of its own, so that an interrupt ends it with all its children
{ "$PYTHON" -m mypy && "$PYTHON" -m pytest tests/unit_tests; } >"$output" 2>&1 &
beside=$!
set +m
trap 'kill -- -$beside 2>/dev/null || true; rm -f "$output"' EXIT
failed=0
"$PYTHON" -m pytest --ignore tests/unit_tests || failed=$?
wait $beside || failed=$?
cat "$output"
exit $failed
