"""Fine-tuning: the data sets, their rows, the chat template; preference pairs; distillation."""

from tests.test_utils.chats import THINKING, assistant, sums, tokenizer_folder, user, write_lines
from tests.test_utils.flag_effects.rows import Probe, changes, gives, keeps, row
from tests.test_utils.flag_effects.tokenizers import WITHOUT, ask

MODEL = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chat_tokenizer}"
FILE = "--data-path {chats} --seq-length 96 --max-position-embeddings 96 --split 1"
STORE = "--mock-data --logits-save-dir {stored}"
DISTILL = "--mock-data --export-kd-teacher-load {checkpoint}"
PAIRS, BINARY = "--dpo --mock-data --dpo-reference-load {checkpoint}", "--data-path --split"
REFERENCES = "megatron.training.start.companions:build_companion"
HUB = "{hf}"
TEMPLATED = "--tokenizer-type SFTTokenizer --tokenizer-model {chat_tokenizer}"


def write(folder):
    """Name in braces -> path."""
    (folder / "thinking.jinja").write_text(THINKING)
    (folder / "kd.yaml").write_text("logit_kl_temperature: 4.0\nskip_lm_loss: false\nkd_loss_scale: 0.5\n")
    from megatron.training.data.stored_logits import StoredLogits

    StoredLogits.create(folder / "stored", "fp16", 64, (4, 2, 3)).finish(folder / "stored")
    return {
        "stored": folder / "stored",
        "kd": folder / "kd.yaml",
        "chats": write_lines(folder / "chats.jsonl", sums(20)),
        "chat_tokenizer": tokenizer_folder(folder / "chat_tokenizer"),
        "template": folder / "thinking.jinja",
    }


def data_set(cfg):
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.data.datasets import select_data_set

    kind, config = select_data_set(cfg, build_tokenizer(cfg.tokenizer))
    return kind, config


def epoch_rows(cfg):
    """Rows of an epoch of the training data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    kind, config = data_set(cfg)
    return BlendedMegatronDatasetBuilder(kind, [None, 0, 0], lambda: True, config).build()[0]


def sequences_per_row(cfg):
    """Largest number of conversations in a row."""
    rows = epoch_rows(cfg)
    return max(len(rows.row_sequences(row)) for row in range(len(rows)))


def answer(tokenizer):
    return tokenizer.render_chat([user("a"), assistant("b")], add_generation_prompt=False)


def new_store(cfg):
    """Format and entries per token of the folder that storing creates."""
    from megatron.core.config.distillation import DistillationConfig
    from megatron.training.start.store_logits import create_store

    if cfg.group(DistillationConfig).logits_save_dir is None:
        return None
    sizes = create_store(cfg, 64).sizes
    return sizes["dtype"], sizes["top_k"]


def stored_size(cfg):
    from megatron.core.config.distillation import DistillationConfig
    from megatron.training.tasks.distillation import open_stored

    stored = open_stored(cfg.group(DistillationConfig), 64)
    return stored and tuple(stored.values.shape)


ROWS = [
    Probe("--sft", lambda cfg: (data_set(cfg)[0].__name__, cfg.documents.reset_attention_mask), ("SFTDataset", True),
          base=f"{MODEL} {FILE}", without=WITHOUT),
    Probe("--no-sft-packing", sequences_per_row, 1, base=f"--sft {MODEL} {FILE}", without=WITHOUT),
    Probe("--chat-template {template}", ask(answer), without=WITHOUT, base=MODEL,
          expect="<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n"),
    Probe("--dpo", lambda cfg: (data_set(cfg)[0].__name__, cfg.documents.reset_attention_mask),
          ("PreferenceDataset", True), base=f"{MODEL} {FILE} --seq-length 48 --load-hf {HUB}", without=WITHOUT),
    row("--dpo-beta 0.5", changes("weights"), keeps("initial"), base=PAIRS, without=BINARY),
    row("--dpo-loss ipo", changes("weights"), keeps("initial"), base=PAIRS, without=BINARY),
    row("--dpo-label-smoothing 0.2", changes("weights"), keeps("initial"), base=PAIRS, without=BINARY),
    row("--dpo-reference-load {hf}", changes("weights"), keeps("initial"), without=BINARY,
        base="--dpo --mock-data --pretrained-checkpoint {checkpoint}"),
    row("--dpo-reference model", gives(lambda run: run.called["build_companion"], 1), without=BINARY,
        base="--dpo --mock-data --pretrained-checkpoint {checkpoint} --lora-rank 2", count=(REFERENCES,)),
    row("--export-kd-teacher-load {checkpoint}", changes("weights"), keeps("initial"), base="--mock-data",
        without=BINARY),
    row("--export-kd-cfg {kd}", changes("weights"), keeps("initial"), base=DISTILL, without=BINARY),
    row("--kd-loss reverse-kl", changes("weights"), keeps("initial"), base=DISTILL, without=BINARY),
    row("--kd-temperature 3", changes("weights"), keeps("initial"), base=DISTILL, without=BINARY),
    row("--kd-loss-scale 2", changes("weights"), keeps("initial"), base=f"{DISTILL} --kd-lm-loss-weight 1",
        without=BINARY),
    row("--kd-lm-loss-weight 1", changes("weights"), keeps("initial"), base=DISTILL, without=BINARY),
    row("--kd-layer-pairs 1:2:mse", changes("weights"), keeps("initial"), base=DISTILL, without=BINARY),
    row("--kd-layer-loss-scale 2", changes("weights"), keeps("initial"), base=f"{DISTILL} --kd-layer-pairs 1:2",
        without=BINARY),
    Probe("--logits-save-dir {stored}_1 --logits-save-top-k 3", new_store, ("fp16", 3), base="--mock-data",
          without=BINARY),
    Probe("--logits-save-top-k 5", new_store, ("fp16", 5), base=f"{STORE}_2 --logits-save-top-k 3", without=BINARY),
    Probe("--logits-save-dtype bf16", new_store, ("bf16", 3), base=f"{STORE}_3 --logits-save-top-k 3",
          without=BINARY),
    Probe("--logits-load-dir {stored}", stored_size, (4, 2, 3), base="--mock-data", without=BINARY),
    Probe("--sft-tokenizer-prompt-format identity", ask(answer), "ab", base=TEMPLATED, without=WITHOUT),
]  # fmt: skip
