"""The place from which existing programs import these names."""

from megatron.core.enums import AttnBackend, AttnMaskType, AttnType, ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "ModelType"]
