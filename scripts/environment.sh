# Sourced by quickstart.sh and run_tests.sh: sets PYTHON to an interpreter that can run the suite.
#
#   use_environment EXTRAS MODULE...    e.g. use_environment "mlm" tokenizers tiktoken
#
# 1. An interpreter ($PYTHON, else python3) that has torch 2.11 or newer and every MODULE is used as it is.
# 2. Otherwise a virtual environment .venv beside this repository gets what is missing; it sees the packages of an
#    interpreter that has torch already, so that a CUDA build is never downloaded twice.

has_modules() {  # INTERPRETER MODULE...
    "$1" - "${@:2}" <<'PY' 2>/dev/null
import importlib.util
import sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(1)
PY
}

has_torch() {  # INTERPRETER
    "$1" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

major, minor = (int(part) for part in version("torch").split(".")[:2])
sys.exit(0 if (major, minor) >= (2, 11) else 1)
PY
}

has_extension() { "$PYTHON" -c "import megatron_data_helpers" 2>/dev/null; }

build_extension() {  # the C++ index builders, if they are missing or older than their source; else numpy builds the indices
    local built reason output=""
    built=$("$PYTHON" -c 'import megatron_data_helpers as m; print(m.source_sha256)' 2>/dev/null) || built=""
    [ "$built" = "$("$PYTHON" -c 'import hashlib; print(hashlib.sha256(open("megatron/data/helpers.cpp", "rb").read()).hexdigest())')" ] && return
    output=$("$PYTHON" setup.py --quiet build_ext --inplace --force 2>&1) || true
    has_extension && return
    if ! has_modules "$PYTHON" pybind11; then
        reason="$PYTHON has no pybind11 (pip install pybind11)"
    elif ! command -v "${CXX:-c++}" >/dev/null; then
        reason="there is no C++ compiler ${CXX:-c++}"
    else
        reason=$(grep -m 1 -i error <<<"$output" || tail -n 1 <<<"$output")
    fi
    echo "note: numpy builds the indices of data sets (the same bytes, slower); no C++ builders: $reason"
}

use_environment() {
    local extras=$1 base
    shift
    base=${PYTHON:-$(command -v python3 || true)}
    if [ -z "$base" ] || ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: Python 3.10 or newer is needed; set PYTHON=/path/to/python" >&2
        exit 1
    fi
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    if has_torch "$base" && has_modules "$base" safetensors numpy "$@"; then
        PYTHON=$base
        echo "using $("$PYTHON" --version) with torch $("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))')"
        build_extension
        return
    fi
    local options=() versions=(-c constraints.txt)
    if has_torch "$base"; then options=(--system-site-packages) versions=(); fi  # its torch stays, whichever it is
    PYTHON="$PWD/.venv/bin/python"
    if ! { [ -x "$PYTHON" ] && has_torch "$PYTHON" && has_modules "$PYTHON" safetensors numpy "$@"; }; then
        echo "installing into .venv (once; interrupted, it continues when run again) …"
        "$base" -m venv "${options[@]}" .venv
        "$PYTHON" -m pip install --disable-pip-version-check --progress-bar on "${versions[@]}" -e ".[$extras]" 2> >(grep -v '^WARNING' >&2)
    fi
    build_extension
}
