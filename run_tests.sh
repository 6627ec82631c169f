#!/usr/bin/env bash
# Sets up the test environment and runs everything: lint, types, tests. Arguments go to pytest: ./run_tests.sh -k data
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh
use_environment mlm,dev tokenizers tiktoken sentencepiece matplotlib tensorboard pyarrow orjson zstandard yaml pytest hypothesis ruff mypy pybind11 transformers
if [ $# -eq 0 ]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m mypy
fi
OMP_NUM_THREADS=1 "$PYTHON" -m pytest "$@"
