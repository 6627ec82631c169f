"""Make Triton's interpreter three times as fast. It replaces the functions of ``triton.language`` at every call of a
device function, and restores them only after the launch of a kernel; here they are replaced once per process."""

from types import SimpleNamespace

from megatron.core.fusions.installed_triton import tl, triton

if triton is not None and triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # Triton adds its functions to modules of kernels, and ranks compare the functions of modules that are not Triton's
    interpreter._patch_lang.__module__ = interpreter.__name__
