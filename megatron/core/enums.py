"""Names shared by the library and its configuration. Torch-free."""

from enum import Enum

from megatron import serve_other_names


class ModelType(Enum):
    """The shape of a model, as the shared training loop needs it."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


class AttnBackend(str, Enum):
    """Attention kernels; members equal their names, so ``cfg.attention_backend == "flash"`` works."""

    flash = "flash"
    fused = "fused"
    unfused = "unfused"
    local = "local"
    auto = "auto"


class AttnMaskType(Enum):
    """Positions that a query may attend to."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class AttnType(Enum):
    """Source of keys and values."""

    self_attn = 1
    cross_attn = 2


serve_other_names(__name__)
