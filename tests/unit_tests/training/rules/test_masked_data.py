"""Tokenizers and lengths that no sample of BERT or T5 can be made with."""

import pytest

from megatron.training.arguments import parse_args
from megatron.training.config.resolve import resolve
from megatron.training.rules.run_all import check

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --data-path x --split 1,0,0 --eval-iters 0 "
)
WORDS = "--vocab-file vocab.txt --dry-run --tokenizer-type "


def problems(family, text, world_size=1):
    lengths = "--decoder-seq-length 16 " if family == "t5" else ""
    result = check(resolve(parse_args((TINY + lengths + text).split(), model_family=family), world_size))
    return [str(item) for item in result if "dry" not in str(item)]


@pytest.mark.parametrize("family, text, flag, reason", [
    ("bert", "GPT2BPETokenizer --merge-file m", "--tokenizer-type GPT2BPETokenizer", "no cls, sep and mask tokens"),
    ("bert", "ByteLevelTokenizer --bert-no-binary-head", "--tokenizer-type", "no cls, sep and mask tokens"),
    ("bert", "BertWordPieceCase --seq-length 4 --max-position-embeddings 4", "--seq-length 4", "at least 5"),
    ("bert", "BertWordPieceCase --seq-length 4 --mask-prob 0.4", "--seq-length 4", "leaves 1 token for text"),
    ("bert", "BertWordPieceCase --bert-num-tokentypes 1", "--bert-num-tokentypes 1", "is too small for pairs of texts"),
    ("bert", "BertWordPieceCase --mask-prob 0.03", "--mask-prob 0.03", "none of the 29 tokens of a sample; at least "
     "0.035"),
    ("t5", "BertWordPieceCase --seq-length 3", "--seq-length 3", "at least 4"),
    ("t5", "BertWordPieceCase --mask-prob 0.033", "--mask-prob 0.033", "at least 0.034"),
    ("t5", "BertWordPieceCase --mask-prob 0.44", "--decoder-seq-length 16", "about 13 masked tokens of a sample, 3 "
     "sentinels and a start token; at least 17; or"),
    ("t5", "BertWordPieceCase --vocab-extra-ids 1 --mask-prob 0.3", "--vocab-extra-ids 1", "about 3 spans"),
    ("t5", "BertWordPieceLowerCase", "--vocab-extra-ids", "LowerCase has no sentinels"),
    ("t5", "BertWordPieceCase --vocab-extra-ids 0", "--vocab-extra-ids 0", "--vocab-extra-ids 100"),
    ("t5", "NullTokenizer --vocab-size 99", "--tokenizer-type NullTokenizer", "does not support sentinels"),
    ("gpt", "TikTokenizer --tokenizer-model m --vocab-extra-ids 9", "--vocab-extra-ids 9", "does not support sent"),
])  # fmt: skip
def test_masked_data_rejects_settings_without_samples(family, text, flag, reason):
    (problem,) = problems(family, WORDS + text)
    assert flag in problem and reason in problem


@pytest.mark.parametrize("family, lengths", [("bert", ""), ("t5", "--decoder-seq-length 2 ")])
def test_random_samples_need_no_words_to_mask(family, lengths):
    text = TINY.replace("--data-path x --split 1,0,0", "--mock-data --tokenizer-type NullTokenizer --vocab-size 99")
    argv = (text + lengths + "--seq-length 4 --mask-prob 0.01").split()
    assert not check(resolve(parse_args(argv, model_family=family), 1))


def test_a_length_is_named_as_it_was_given():
    text = TINY.replace("--seq-length 32", "--encoder-seq-length 3") + "--decoder-seq-length 16 --vocab-extra-ids 9 "
    result = check(resolve(parse_args((text + WORDS + "BertWordPieceCase").split(), model_family="t5"), 1))
    assert any(str(item).startswith("--encoder-seq-length 3: leaves 1 token") for item in result)


@pytest.mark.parametrize("family, text, reason", [
    ("bert", "--attention-dropout 0.1", "which have no dropout; --attention-dropout 0"),
    ("t5", "", "is supported only by pretrain_bert.py and pretrain_vlm.py"),
    ("gpt", "", "is supported only by pretrain_bert.py and pretrain_vlm.py"),
])  # fmt: skip
def test_rows_of_several_samples_are_for_some_runs(family, text, reason):
    flags = f"NullTokenizer --vocab-size 99 --mock-data --attention-dropout 0 --use-packed-sequence {text}"
    (problem,) = (item for item in problems(family, WORDS + flags) if "packed" in item)
    assert reason in problem


@pytest.mark.parametrize("family, text", [
    ("bert", "BertWordPieceLowerCase"),
    ("bert", "SentencePieceTokenizer --tokenizer-model m --tokenizer-sentencepiece-legacy"),
    ("bert", "HuggingFaceTokenizer --tokenizer-model m --seq-length 5 --mask-prob 0.5"),
    ("bert", "BertWordPieceCase --mask-prob 0.035"),
    ("t5", "BertWordPieceCase --seq-length 4 --mask-prob 0.5"),
    ("t5", "BertWordPieceCase --mask-prob 0.42 --vocab-extra-ids 3"),
    ("t5", "BertWordPieceCase --mask-prob 0.3 --vocab-extra-ids 1 --tokenizer-special-tokens <extra_id_0>"),
    ("t5", "BertWordPieceCase"),
    ("t5", "BertWordPieceLowerCase --vocab-extra-ids 100"),
    ("t5", "BertWordPieceLowerCase --tokenizer-special-tokens <extra_id_0>"),
    ("t5", "HuggingFaceTokenizer --tokenizer-model m"),
    ("gpt", "GPT2BPETokenizer --merge-file m --seq-length 4"),
])  # fmt: skip
def test_rules_accept_tokenizers_that_only_their_files_decide(family, text):
    if family == "t5":
        pytest.importorskip("megatron.training.tasks.t5")
    assert problems(family, WORDS + text) == []
