"""Supervised fine-tuning: the data set, its rows, the chat template."""

from tests.test_utils.chats import THINKING, assistant, sums, tokenizer_folder, user, write_lines
from tests.test_utils.flag_effects.rows import Probe
from tests.test_utils.flag_effects.tokenizers import WITHOUT, ask

MODEL = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chat_tokenizer}"
FILE = "--data-path {chats} --seq-length 96 --max-position-embeddings 96 --split 1"
TEMPLATED = "--tokenizer-type SFTTokenizer --tokenizer-model {chat_tokenizer}"


def write(folder):
    """Name in braces -> path."""
    (folder / "thinking.jinja").write_text(THINKING)
    return {
        "chats": write_lines(folder / "chats.jsonl", sums(20)),
        "chat_tokenizer": tokenizer_folder(folder / "chat_tokenizer"),
        "template": folder / "thinking.jinja",
    }


def data_set(cfg):
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.data.datasets import select_data_set

    kind, config = select_data_set(cfg, build_tokenizer(cfg.tokenizer))
    return kind, config


def sequences_per_row(cfg):
    """Largest number of conversations in a row."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    kind, config = data_set(cfg)
    rows = BlendedMegatronDatasetBuilder(kind, [None, 0, 0], lambda: True, config).build()[0]
    return max(len(rows.row_sequences(row)) for row in range(len(rows)))


def answer(tokenizer):
    return tokenizer.render_chat([user("a"), assistant("b")], add_generation_prompt=False)


ROWS = [
    Probe("--sft", lambda cfg: (data_set(cfg)[0].__name__, cfg.documents.reset_attention_mask), ("SFTDataset", True),
          base=f"{MODEL} {FILE}", without=WITHOUT),
    Probe("--no-sft-packing", sequences_per_row, 1, base=f"--sft {MODEL} {FILE}", without=WITHOUT),
    Probe("--chat-template {template}", ask(answer), without=WITHOUT, base=MODEL,
          expect="<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n"),
    Probe("--sft-tokenizer-prompt-format identity", ask(answer), "ab", base=TEMPLATED, without=WITHOUT),
]  # fmt: skip
