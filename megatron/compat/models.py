"""Language models as programs construct them: the fields of their settings one by one, in Megatron-LM's order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature

from megatron.compat.group_collection import ProcessGroupCollection, differing_groups
from megatron.core.config.cli import ConfigError, Problem
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.bert import model as bert
from megatron.core.models.common.settings import LanguageModelSettings
from megatron.core.models.gpt import model as gpt
from megatron.core.models.t5 import model as t5

Init = Callable[..., None]


def takes_fields(order: str) -> Callable[[Init], Init]:
    """Decorate a constructor with a parameter ``settings``, so that callers pass the fields of
    :class:`LanguageModelSettings` one by one, next to its other arguments. ``order`` names the arguments that may be
    positional, in Megatron-LM's order; all others are keywords. ``inspect.signature`` shows all of them."""

    def wrap(init: Init) -> Init:
        fields = signature(LanguageModelSettings).parameters
        slots = {**fields, **signature(init).parameters}
        del slots["settings"]
        first = [slots.pop(name).replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *order.split())]
        rest = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in slots.values()]
        accepted = Signature([*first, *rest])

        @wraps(init)
        def wrapped(*args: object, **kwargs: object) -> None:
            named = accepted.bind(*args, **kwargs).arguments
            shared = {name: named.pop(name) for name in fields if name in named}
            init(**named, settings=LanguageModelSettings(**shared))

        wrapped.__signature__ = accepted  # type: ignore[attr-defined]
        return wrapped

    return wrap


_construct_gpt = takes_fields(
    "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process parallel_output "
    "fp16_lm_cross_entropy share_embeddings_and_output_weights position_embedding_type rotary_percent rotary_base "
    "rope_scaling rope_scaling_factor seq_len_interpolation_factor mtp_block_spec"
)(gpt.GPTModel.__init__)


class GPTModel(gpt.GPTModel):
    """GPT with Megatron-LM's arguments. ``pg_collection`` has to hold the groups of ``parallel_state``."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        scatter_embedding_sequence_parallel: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        **named: object,
    ) -> None:
        if not scatter_embedding_sequence_parallel:
            reason = "embeddings of whole sequences on each rank are not available"
            raise ConfigError([Problem("scatter_embedding_sequence_parallel", reason, False, "remove it")])
        if pg_collection is not None and (names := differing_groups(pg_collection)):
            reason = f"the groups {', '.join(names)} are not those of parallel_state"
            raise ConfigError([Problem("pg_collection", reason, fix="ProcessGroupCollection.use_mpu_process_groups()")])
        _construct_gpt(self, config, *args, **named)

    __init__.__signature__ = signature(_construct_gpt)  # type: ignore[attr-defined]


class BertModel(bert.BertModel):
    """BERT with Megatron-LM's arguments."""

    __init__ = takes_fields(
        "config num_tokentypes transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
        "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
        "rotary_percent seq_len_interpolation_factor add_binary_head vp_stage"
    )(bert.BertModel.__init__)


_construct_t5 = takes_fields(
    "config encoder_config transformer_encoder_layer_spec transformer_decoder_layer_spec vocab_size "
    "max_sequence_length pre_process post_process fp16_lm_cross_entropy parallel_output "
    "share_embeddings_and_output_weights position_embedding_type rotary_percent seq_len_interpolation_factor "
    "relative_attention_num_buckets relative_attention_max_distance vp_stage"
)(t5.T5Model.__init__)


class T5Model(t5.T5Model):
    """T5 with Megatron-LM's arguments. Without ``encoder_config`` (before 0.9) encoder and decoder share one."""

    def __init__(
        self, config: TransformerConfig, encoder_config: TransformerConfig | None = None, *args: object, **named: object
    ) -> None:
        _construct_t5(self, config, encoder_config or config, *args, **named)

    __init__.__signature__ = signature(_construct_t5)  # type: ignore[attr-defined]
