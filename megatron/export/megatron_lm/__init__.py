"""Conversion of Megatron-LM checkpoints (``torch`` and ``torch_dist``) from and to ``Interchange``.

``torch`` (``mp_rank_…/model_optim_rng.pt``) and ``torch_dist`` (``__R_C.distcp``) hold pickles; these are only ever
read by ``export/unpickler.py``, which builds tensors and plain data and calls nothing. ``names.py`` is the one table of
names and splits."""

from megatron.export.megatron_lm.torch_dist import load_megatron_torch_dist
from megatron.export.megatron_lm.torch_format import load_megatron_torch
from megatron.export.megatron_lm.writer import save_megatron_torch_dist

__all__ = ["load_megatron_torch", "load_megatron_torch_dist", "save_megatron_torch_dist"]
