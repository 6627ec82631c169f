"""Wrong flags, tokenizers and data files are named in one message; a rejected start builds no index."""

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError
from megatron.data.indexed_writer import IndexedDatasetBuilder
from megatron.training.arguments import parse_args, validate_args
from megatron.training.config.resolve import resolve
from megatron.training.rules.inputs import check_inputs
from tests.test_utils.tiny_tokenizers import bert_vocab, byte_level_bpe

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --seq-length 32 --lr 1e-3 "
    "--micro-batch-size 2 --train-iters 10 --vocab-file vocab.txt --data-path documents --eval-iters 0 "
)
ALL = {"bert": TINY, "t5": TINY + "--decoder-seq-length 16 --tokenizer-type BertWordPieceCase ", "gpt": TINY}
DEFAULTS = {"bert": "BertWordPieceLowerCase", "t5": "BertWordPieceCase", "gpt": "ByteLevelTokenizer"}
NO_PAIRS = "fewer than 2 sentence(s); its documents were not split into sentences"
NO_FILES = "no data set at none"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Vocabularies with and without [MASK]; documents; sentences, and such as are too long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nomask.txt").write_text(Path(bert_vocab("vocab.txt")).read_text().replace("[MASK]\n", ""))
    for name, lengths in {"documents": [9], "long": [600, 9], "sentences": [5, 9]}.items():
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=np.uint16)
        for _ in range(40):
            builder.add_document(np.full(sum(lengths), 5), lengths)
        builder.finalize(f"{name}.idx")


def refusal(family, text):
    argv = (ALL[family] + text).split()
    with pytest.raises(ConfigError) as caught:
        validate_args(parse_args(argv, model_family=family, args_defaults={"tokenizer_type": DEFAULTS[family]}), 1)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("family, text, expected", [
    ("bert", "--mask-prob 0.01 --vocab-file nomask.txt", ["--mask-prob 0.01", "nomask.txt lacks [MASK]", NO_PAIRS]),
    ("bert", "--mask-prob 7 --vocab-file nomask.txt", ["--mask-prob 7", "nomask.txt lacks [MASK]", NO_PAIRS]),
    ("bert", "--hiden-size 7 --data-path none sentences", ["--hiden-size: unknown", NO_FILES]),
    ("bert", "--num-attention-heads 3 --data-path long", ["--hidden-size 16", "39 have a sentence of"]),
    ("bert", "--mask-prob 0.01 --full-validation --data-path 1 sentences 2 sentences",
     ["--mask-prob", "a full pass of"]),
    ("bert", "--vocab-file none.txt --data-path none", ["--vocab-file none.txt", NO_FILES]),
    ("bert", "--tokenizer-type GPT2BPETokenizer --merge-file vocab.txt", ["no cls, sep and mask tokens", NO_PAIRS]),
    ("t5", "--decoder-seq-length 2 --vocab-file nomask.txt --data-path none",
     ["--decoder-seq-length 2", "lacks [MASK]", NO_FILES]),
    ("t5", "--num-attention-heads 3 --vocab-extra-ids 5 --tokenizer-special-tokens <a> --seq-length 512 "
     "--decoder-seq-length 128 --max-position-embeddings 512",
     ["--hidden-size 16", "the tokenizer has 5 sentinels, but a sample has about 18 spans"]),
    ("t5", "--vocab-extra-ids 1 --mask-prob 0.3 --data-path none", ["--vocab-extra-ids 1: is less", NO_FILES]),
    ("gpt", "--hidden-size 15 --data-path sentences", ["--hidden-size 15", "holds sentences"]),
])  # fmt: skip
def test_flags_tokenizer_and_data_are_rejected_in_one_message(tmp_path, family, text, expected):
    actual = refusal(family, text)
    assert all(sum(part in line for line in actual) == 1 for part in expected), actual
    assert len(actual) == len(expected), actual
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_separate_validation_data_that_is_missing_hides_nothing_of_the_training_data():
    text = TINY.replace("--data-path documents --eval-iters 0", "--train-data-path none --eval-interval 5")
    with pytest.raises(ConfigError) as caught:
        validate_args(parse_args(text.split(), model_family="bert", args_defaults={
            "tokenizer_type": DEFAULTS["bert"]}), 1)  # fmt: skip
    assert [problem.flag for problem in caught.value.problems] == ["--valid-data-path", "no"]


def test_lengths_that_are_missing_stop_no_other_check():
    text = TINY.replace("--max-position-embeddings 32 --seq-length 32", "")
    with pytest.raises(ConfigError) as caught:
        argv = f"{text} --vocab-extra-ids 3 --data-path none".split()
        validate_args(parse_args(argv, model_family="t5", args_defaults={"tokenizer_type": DEFAULTS["t5"]}), 1)
    flags = [problem.flag for problem in caught.value.problems]
    assert flags == ["--max-position-embeddings", "--seq-length", "--decoder-seq-length", "no"]


@pytest.mark.parametrize("text", [
    "--mask-prob 0.01 --dry-run", "--mask-prob 0.01 --data-path none --mock-data", "--mask-prob 0.01 --split 0,1,0",
    "--mask-prob 0.01 --data-path sentences",
])  # fmt: skip
def test_valid_or_unread_files_are_not_changed(text):
    assert all(line.startswith("--") for line in refusal("bert", text))


def test_settings_of_a_checkpoint_come_before_all_questions():
    assert refusal("bert", "--use-checkpoint-args --load x --hiden-size 7 --data-path none") == [
        "--hiden-size: unknown flag; did you mean --hidden-size or --ffn-hidden-size?"
    ]


@pytest.mark.parametrize("family", ALL)
def test_check_inputs_returns_the_tokenizer_without_building_an_index(family, tmp_path):
    data = "documents" if family == "gpt" else "sentences"
    argv = (ALL[family] + f"--data-path {data}").split()
    parsed = parse_args(argv, model_family=family, args_defaults={"tokenizer_type": DEFAULTS[family]})
    cfg = validate_args(parsed, 1)
    assert check_inputs(cfg, (20, 0, 0)).tokenizer_type == DEFAULTS[family]
    assert check_inputs(cfg, (20, 0, 0), tokenizer=False) is None
    assert not (tmp_path / data).exists(), "no index is built"
    other = validate_args(parse_args(argv[:-1] + ["none"], model_family=family, args_defaults={
        "tokenizer_type": DEFAULTS[family]}), 1)  # fmt: skip
    assert check_inputs(other, (20, 0, 0), files=False) is not None
    with pytest.raises(UserError, match=NO_FILES):
        check_inputs(other, (20, 0, 0))


@pytest.mark.parametrize("path, fix", [
    ("corpus.jsonl", "--input corpus.jsonl --output-prefix corpus --append-eod ...; then use corpus_text_document"),
    ("folder/corpus.txt.gz", "--input folder/corpus.txt.gz --output-prefix folder/corpus --append-eod"),
    ("documents.bin", "no data set at documents.bin: leave out .bin: documents"),
    ("documents.idx", "leave out .idx: documents"),
    (".", "is a folder; give the path of a data set without .bin and .idx, such as ./documents or ./long"),
    ("folder", "is a folder; give the path of a data set without .bin and .idx"),
])  # fmt: skip
def test_data_path_that_is_no_prefix_is_rejected_with_the_fix(path, fix):
    Path("folder").mkdir()
    for name in ("corpus.jsonl", "folder/corpus.txt.gz"):
        Path(name).write_text("text")
    message = " ".join(refusal("gpt", f"--hidden-size 15 --data-path {path}"))
    assert fix in message


@pytest.mark.parametrize("name, meant", [
    ("AutoTokenizer", "HuggingFaceTokenizer"), ("LlamaTokenizerFast", "HuggingFaceTokenizer"),
    ("tiktoken", "TikTokenizer"), ("huggingfacetokenizer", "HuggingFaceTokenizer"),
])  # fmt: skip
def test_tokenizer_types_of_other_libraries_name_the_type_to_use(name, meant):
    [message] = refusal("gpt", f"--tokenizer-type {name}")
    assert message.startswith(f"--tokenizer-type {name}: must be one of ") and message.rstrip("?").endswith(meant)


@pytest.mark.parametrize("family, program", [("gpt", "pretrain_gpt.py"), ("bert", "pretrain_bert.py"),
                                             ("t5", "pretrain_t5.py")])  # fmt: skip
def test_a_layout_without_a_launcher_names_the_command_that_starts_it(family, program, monkeypatch):
    for flags, ranks in (("--tensor-model-parallel-size 2", 2), ("--context-parallel-size 3", 3)):
        (message,) = (item for item in refusal(family, flags) if item.startswith("world size 1"))
        assert message.endswith(f"start {ranks} ranks, or a multiple: torchrun --nproc_per_node={ranks} {program} ...")
    monkeypatch.setenv("WORLD_SIZE", "1")
    result = refusal(family, "--tensor-model-parallel-size 2")
    assert any(item.endswith("start a multiple of 2 ranks") for item in result)


def test_experts_without_a_launcher_name_the_command_that_starts_them():
    experts = "--num-experts 4 --moe-ffn-hidden-size 8 --expert-model-parallel-size 4"
    assert refusal("gpt", experts)[0].endswith("torchrun --nproc_per_node=4 pretrain_gpt.py ...")


@pytest.mark.parametrize("size, is_rejected", [(1, True), (2, False)])
def test_mock_data_needs_two_tokens(size, is_rejected):
    flags = f"--mock-data --hidden-size 15 --tokenizer-type NullTokenizer --vocab-size {size}"
    expected = "--vocab-size 1: is too small for --mock-data, whose token ids start at 1; use at least 2"
    assert (expected in refusal("gpt", flags)) is is_rejected


def test_a_tokenizer_folder_whose_files_link_out_is_rejected_where_checkpoints_hold_copies(tmp_path):
    (tmp_path / "folder").mkdir()
    byte_level_bpe(tmp_path / "folder" / "tokenizer.json")
    (tmp_path / "folder" / "vocab.txt").symlink_to(tmp_path / "nomask.txt")
    line = f"{TINY} --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'folder'}"
    argv = line.replace("--data-path documents ", "").split()
    assert check_inputs(resolve(parse_args(argv), 1), (0, 0, 0)).vocab_size
    with pytest.raises(UserError, match="vocab.txt: is a link out of its folder, to .*nomask.txt; replace it"):
        check_inputs(resolve(parse_args([*argv, "--save", "out"]), 1), (0, 0, 0))
