"""Training on preference pairs inside a test."""


def with_tokenizer(kind):
    """A task with the tokenizer of its settings, which its frozen models need."""
    from megatron.core.tokenizers import build_tokenizer

    class WithTokenizer(kind):
        def __init__(self, cfg, tokenizer=None):
            super().__init__(cfg, tokenizer or build_tokenizer(cfg.tokenizer))

    return WithTokenizer
