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

has_extension() { "$PYTHON" -c "import megatron.data.helpers_cpp" 2>/dev/null; }

build_extension() {  # the C++ index builders; the numpy twin serves where there is no compiler or no pybind11
    has_extension && return
    "$PYTHON" setup.py --quiet build_ext --inplace >build_ext.log 2>&1 || true
    if has_extension; then rm -f build_ext.log; return; fi
    echo "note: no C++ index builders (compiler or pybind11 missing, see build_ext.log); numpy gives the same bytes"
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
    local options=()
    has_torch "$base" && options=(--system-site-packages)
    PYTHON="$PWD/.venv/bin/python"
    if ! { [ -x "$PYTHON" ] && has_torch "$PYTHON" && has_modules "$PYTHON" safetensors numpy "$@"; }; then
        echo "installing into .venv (a minute or two, once) …"
        "$base" -m venv "${options[@]}" .venv
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" 2> >(grep -v '^WARNING' >&2)
    fi
    build_extension
}
