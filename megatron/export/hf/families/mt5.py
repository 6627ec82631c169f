"""mT5 (``MT5ForConditionalGeneration``): T5 1.1 with a separate output layer ``lm_head.weight`` that is not scaled.

``tie_word_embeddings`` has no effect: published files hold false, ``transformers`` 5 writes true."""

from dataclasses import replace

from megatron.export.hf.families import t5
from megatron.export.hf.settings import Choice, Fixed, Ignored

MT5 = replace(
    t5.T5,
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    models="mT5",
    limits=(),
    config=(
        *(rule for rule in t5.T5.config if rule not in (t5.HEAD, t5.ACTIVATION)),
        Choice("feed_forward_proj", t5.ACTIVATION.options, default="gated-gelu"),
        Fixed({"untie_embeddings_and_output_weights": True, "scale_decoder_outputs": False}),
        Ignored(("tie_word_embeddings",)),
    ),
)
