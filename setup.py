"""Package metadata lives in pyproject.toml; this file only adds the optional C++ index builders.

Without a compiler or pybind11 the package installs all the same and uses the numpy twin in megatron/data/helpers.py.
"""

import hashlib
from pathlib import Path

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext

    extension = Pybind11Extension("megatron_data_helpers", ["megatron/data/helpers.cpp"], cxx_std=17)
    extension.extra_compile_args += ["-O3", "-ffp-contract=off"]  # no fused multiply-add: the twin has none
    # keep pybind11's check that the interpreter lock is held: Python objects touched without it corrupt memory
    extension.extra_compile_args += ["-UNDEBUG"]
    # a test compares this hash, so that an extension built from older source is not tested by mistake
    source = hashlib.sha256(Path("megatron/data/helpers.cpp").read_bytes()).hexdigest()
    extension.define_macros += [("SOURCE_SHA256", f'"{source}"')]
    extension.optional = True  # a failed build leaves the numpy twin
    extensions, commands = [extension], {"build_ext": build_ext}
except ImportError:
    extensions, commands = [], {}

setup(ext_modules=extensions, cmdclass=commands)
