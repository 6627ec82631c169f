"""Hugging Face weights in runs of BERT and T5: loaded on two layouts, exported with a tokenizer that ``transformers``
reads with equal ids, rejected by the program of the other family."""

import json

import pytest
import torch

from megatron.core.tokenizers import build_tokenizer
from megatron.export.hf import load_hf, save_hf
from megatron.training.arguments import parse_args
from tests.test_utils import tiny_tokenizers
from tests.test_utils.gpt_runs import losses
from tests.test_utils.hf_folders import random_model, tiny_llama

RUN = [
    "--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2", "--train-iters", "2",
    "--eval-iters", "0", "--num-workers", "0", "--log-interval", "1", "--mock-data", "--save-interval", "2",
    "--save-hf-interval", "2",
]  # fmt: skip
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --max-position-embeddings 64"
T5 = f"{SIZES} --decoder-seq-length 16 --position-embedding-type relative --normalization RMSNorm --softmax-scale 1.0"
MODELS = {
    "bert": ("bert", f"{SIZES} --apply-residual-connection-post-layernorm --no-bias-gelu-fusion"),
    "bert without pairs": ("bert", f"{SIZES} --no-bias-gelu-fusion --bert-no-binary-head"),
    "t5 1.0": ("t5", f"{T5} --disable-bias-linear --relu --scale-decoder-outputs"),
    "t5 1.1": ("t5", f"{T5} --disable-bias-linear --geglu --untie-embeddings-and-output-weights"),
}
FAMILIES = {
    "distilbert": f"{MODELS['bert'][1]} --bert-no-binary-head --norm-epsilon 1e-12",
    "mt5": MODELS["t5 1.1"][1],
}
"""Families that are written only if they are asked for."""
MODELS |= {name: ("t5" if name == "mt5" else "bert", flags) for name, flags in FAMILIES.items()}
OWN = {"bert": [], "t5": ["--decoder-seq-length", "16"]}
WORDPIECE = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-extra-ids", "5"]
TEXT = "The quick<extra_id_1> foxes jump, the fox [MASK] jumps."


def run(rank, world_size, argv, kind):
    """The program of a kind of model with ``argv``; exit code and stderr."""
    import contextlib
    import io

    from megatron.training.run import run as run_program
    from megatron.training.tasks.language_model import task_class

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run_program(parse_args(argv, model_family=kind).with_settings(fp64=True), task_class(kind))
    return code, errors.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_trains_on_two_layouts_and_is_exported_with_its_tokenizer(gloo_pool, tmp_path, name, monkeypatch):
    kind, flags = MODELS[name]
    vocabulary = tiny_tokenizers.bert_vocab(tmp_path / "words.txt")
    model = random_model(flags.split(), 19, torch.float64, model_family=kind)
    save_hf(model, tmp_path / "hf", family=name if name in FAMILIES else None)
    argv = [*RUN, *OWN[kind], *WORDPIECE, "--vocab-file", vocabulary, "--load-hf", str(tmp_path / "hf")]
    for layout, ranks in (("one", 1), ("tp", 2)):
        more = ["--tensor-model-parallel-size", "2"] if ranks == 2 else []
        for code, errors in gloo_pool.run(run, ranks, [*argv, *more, "--save", str(tmp_path / layout)], kind):
            assert code == 0, errors
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "tp"), rel=1e-10)
    exported = tmp_path / "one" / "hf" / "iter_0000002"
    config, first = (json.loads((item / "config.json").read_text()) for item in (exported, tmp_path / "hf"))
    assert config["architectures"] == first["architectures"] and config["model_type"] == first["model_type"]
    assert load_hf(exported).tensors.keys() == load_hf(tmp_path / "hf").tensors.keys()
    # its tokenizer, and that of a run that goes on from the export
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    native = build_tokenizer(tiny_tokenizers.flags(WORDPIECE[1], vocab_file=vocabulary, vocab_extra_ids=5))
    foreign = transformers.AutoTokenizer.from_pretrained(exported)
    assert foreign(TEXT)["input_ids"] == [native.cls, *native.tokenize(TEXT), native.sep]
    assert (foreign.mask_token_id, foreign.pad_token_id, len(foreign)) == (native.mask, native.pad, native.vocab_size)
    repeated = [*RUN, *OWN[kind], "--load-hf", str(exported), "--save", str(tmp_path / "again")]
    ((code, errors),) = gloo_pool.run(run, 1, repeated, kind)
    assert code == 0, errors


def test_t5_shards_are_read_as_native_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    pieces = tmp_path / "pieces.model"
    tiny_tokenizers.sentence_piece_model(pieces, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    values = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(pieces), "vocab_extra_ids": 7}
    native = build_tokenizer(tiny_tokenizers.flags(**values))
    model = random_model(MODELS["t5 1.1"][1].split(), native.vocab_size, model_family="t5")
    model.settings |= values
    model.assets["tokenizer/pieces.model"] = pieces
    save_hf(model, tmp_path / "hf")
    foreign = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick brown fox <extra_id_1> jumps  over <extra_id_0> the lazy dog; Ω"
    assert foreign(text)["input_ids"] == [*native.tokenize(text), native.eos] and len(foreign) == native.vocab_size


@pytest.mark.parametrize(("kind", "said"), [
    ("bert", "holds a model of the family 'gpt' (trained by pretrain_gpt.py, pretrain_moe.py and pretrain_hybrid.py)"),
    ("t5", "holds a model of the family 'gpt' (trained by pretrain_gpt.py, pretrain_moe.py and pretrain_hybrid.py)"),
    ("gpt", "holds a model of the family 'bert' (trained by pretrain_bert.py), this run trains 'gpt'"),
])  # fmt: skip
def test_a_checkpoint_of_another_program_is_rejected(gloo_pool, tmp_path, kind, said):
    """Its own native checkpoint, by --load with and without --use-checkpoint-args, and by --pretrained-checkpoint."""
    from megatron.tools.checkpoint import convert

    if kind == "gpt":
        save_hf(random_model(MODELS["bert"][1].split(), 64, model_family="bert"), tmp_path / "hf")
    else:
        tiny_llama(tmp_path / "hf")
    places = ["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "native")]
    assert convert.main(["--saver", "native", *places, "--no-checking"]) == 0
    model = [*SIZES.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
    argv = [*RUN[:-2], *OWN.get(kind, []), *model, "--save", str(tmp_path / "out")]
    for more in (["--load"], ["--use-checkpoint-args", "--load"], ["--pretrained-checkpoint"]):
        ((code, errors),) = gloo_pool.run(run, 1, [*argv, *more, str(tmp_path / "native")], kind)
        assert code != 0 and said in errors and "Traceback" not in errors, errors
