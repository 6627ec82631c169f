"""A model family outside of ``megatron``: an encoder of numbers, and a GPT that reads its result."""
