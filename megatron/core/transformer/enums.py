"""Import path of Megatron-LM for the enums of attention and models."""

from megatron import serve_other_names
from megatron.core.enums import AttnBackend, AttnMaskType, AttnType, ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "ModelType"]

serve_other_names(__name__)
