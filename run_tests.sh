#!/usr/bin/env bash
# Sets up the test environment and runs everything: lint, types, tests. Arguments go to pytest: ./run_tests.sh -k data
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh
use_environment mlm,dev tokenizers tiktoken sentencepiece matplotlib tensorboard pyarrow orjson zstandard yaml pytest xdist hypothesis ruff mypy pybind11 transformers
export OMP_NUM_THREADS=1
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"

"$PYTHON" -m ruff check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$PYTHON" -m mypy >"$types" 2>&1 &  # beside the tests, which leave cores idle
failed=0
"$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder || failed=$?
wait $! || failed=$?
cat "$types"
exit $failed
