#!/usr/bin/env bash
# Writes requirements.lock: every package of the extras with its hashes, for Python 3.10 to 3.13. Needs uv.
# torch and what its CUDA builds pin (nvidia-*, exact versions) are not in it: their files differ between CPU and CUDA.
# constraints.txt has torch's version; TORCH_NEEDS is what every build of it needs otherwise.
set -euo pipefail
TORCH_NEEDS="filelock typing-extensions>=4.10.0 setuptools>=77.0.3 sympy>=1.13.3 networkx>=2.5.1 jinja2 fsspec>=0.8.5"
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'torch ; python_version < "3"' >"$work/without_torch"
printf '%s\n' $TORCH_NEEDS >"$work/torch_needs.in"
{
    echo "# Written by scripts/lock.sh: dependencies of all extras with hashes, without torch."
    echo "# pip install -c constraints.txt torch && pip install --no-deps --require-hashes -r requirements.lock"
    grep '^triton==' constraints.txt >"$work/triton"
    uv pip compile --quiet pyproject.toml "$work/torch_needs.in" --all-extras --universal --python-version 3.10 \
        --constraint "$work/triton" --override "$work/without_torch" --generate-hashes --no-annotate --no-header
} >"$work/lock"
mv "$work/lock" requirements.lock
