"""Weights of other formats in whole runs: loaded on any layout, exported with checkpoints, and converted back."""

import json

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing import CheckpointReader
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.core.tokenizers import build_tokenizer
from megatron.export.files import Target
from megatron.export.hf import load_hf, save_hf
from megatron.export.native import save_safetensors
from megatron.tools.checkpoint import convert, verify
from megatron.training.arguments import parse_args
from tests.test_utils import tiny_tokenizers
from tests.test_utils.gpt_runs import losses, train_with_errors
from tests.test_utils.hf_folders import LLAMA, as_on_the_hub, random_model, tiny_llama, weights_in

RUN = [
    "--seq-length", "32", "--tokenizer-type", "NullTokenizer", "--micro-batch-size", "2", "--global-batch-size", "8",
    "--lr", "1e-2", "--train-iters", "3", "--eval-iters", "0", "--num-workers", "0", "--log-interval", "1",
    "--mock-data",
]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "hf")


def train_as_given(rank, world_size, argv):
    """:func:`run` in the precision of the flags."""
    return run(rank, world_size, argv, fp64=False)


def run(rank, world_size, argv, fp64=True):
    """Run ``pretrain_gpt.py`` with only ``argv``; return exit code and stderr."""
    import contextlib
    import io

    from megatron.training.run import run as run_program
    from megatron.training.tasks.gpt import GPTTask

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run_program(parse_args(argv).with_settings(fp64=fp64), GPTTask)
    return code, errors.getvalue()


@pytest.fixture(scope="module")
def one_rank(gloo_pool, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    argv = [*RUN, "--load-hf", str(llama), "--save", str(folder), "--save-interval", "1", "--save-hf-interval", "3"]
    assert gloo_pool.run(run, 1, argv) == [(0, "")]
    return folder


@pytest.mark.parametrize("layout", [
    ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ["--pipeline-model-parallel-size", "2"],
    ["--use-distributed-optimizer"],
    ["--use-torch-fsdp2"],
], ids=lambda flags: flags[0])  # fmt: skip
def test_weights_of_hugging_face_train_on_any_layout_as_on_one_rank(gloo_pool, llama, one_rank, tmp_path, layout):
    argv = [*RUN, "--load-hf", str(llama), "--save", str(tmp_path), *layout]
    for code, errors in gloo_pool.run(run, 2, argv):
        assert code == 0, errors
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-10)


MIXTURE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu --normalization RMSNorm"
    " --max-position-embeddings 64 --disable-bias-linear --add-qkv-bias --position-embedding-type rope --num-experts 4"
    " --untie-embeddings-and-output-weights --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-pre-softmax"
    " --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-aux-loss-coeff 0.01"
)
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags, layout, ranks",
    [
        (LLAMA, TP2, 2),
        (LLAMA, f"{TP4} --sequence-parallel", 4),  # two ranks share each key and value head
        (LLAMA, f"{TP2} --use-torch-fsdp2", 4),
        (MIXTURE.split(), f"{TP4} --sequence-parallel --expert-tensor-parallel-size 1 {EP2}", 4),
        (MIXTURE.split(), f"--expert-tensor-parallel-size 2 {EP2}", 4),
    ],
    ids=["tp2", "tp4", "tp2-fsdp2", "tp4-etp1-ep2", "etp2-ep2"],
)  # fmt: skip
def test_every_layout_exports_the_bits_that_it_loaded(gloo_pool, tmp_path, flags, layout, ranks):
    """The export follows an iteration that changes no weight; random weights distinguish every row of every tensor."""
    save_hf(random_model(flags, 64), tmp_path / "source")
    iteration = ["--train-iters", "1", "--iterations-to-skip", "1"]
    exports = ["--save", str(tmp_path), "--save-interval", "1", "--save-hf-interval", "1"]
    argv = [*RUN, "--load-hf", str(tmp_path / "source"), *exports, *iteration, *layout.split()]
    for code, errors in gloo_pool.run(train_as_given, ranks, argv):
        assert code == 0, errors
    source, exported = weights_in(tmp_path / "source"), weights_in(tmp_path / "hf" / "iter_0000001")
    assert source.keys() == exported.keys()
    assert [name for name, tensor in source.items() if not torch.equal(tensor, exported[name])] == []


def test_a_converted_checkpoint_trains_as_the_folder_itself(gloo_pool, llama, one_rank, tmp_path):
    places = ["--load-dir", str(llama), "--save-dir", str(tmp_path / "native")]
    assert convert.main(["--loader", "hf", "--saver", "native", *places, "--no-checking"]) == 0
    start = ["--pretrained-checkpoint", str(tmp_path / "native"), "--use-checkpoint-args"]
    ((code, errors),) = gloo_pool.run(run, 1, [*RUN, *start, "--save", str(tmp_path / "run")])
    assert code == 0, errors
    assert losses(tmp_path / "run") == losses(one_rank)


def test_exports_equal_the_checkpoint(one_rank):
    assert [path.name for path in (one_rank / "hf").iterdir()] == ["iter_0000003"]
    exported = load_hf(one_rank / "hf" / "iter_0000003")
    stored = CheckpointReader(one_rank / "iter_0000003")
    assert exported.tensors.keys() == {name for name in stored.names if name.startswith("model.")}
    assert all(exported.tensors[name].read().equal(stored.read(name)) for name in exported.tensors)


def test_repeated_command_resumes_from_its_checkpoint(gloo_pool, llama, one_rank, tmp_path):
    argv = [*RUN, "--load-hf", str(llama), "--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    assert gloo_pool.run(run, 1, [*argv, "--exit-interval", "2"])[0][0] == 0
    assert gloo_pool.run(run, 1, argv)[0][0] == 0
    assert losses(tmp_path) == losses(one_rank)


def test_flags_that_contradict_the_folder_are_rejected_with_both_values(gloo_pool, llama):
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, ["--load-hf", str(llama), "--num-layers", "3"])
    assert code != 0 and "--num-layers is 3, there it is 2" in errors


def test_a_folder_without_a_model_is_rejected_by_the_name_of_the_flag(gloo_pool):
    ((code, errors),) = gloo_pool.run(train_with_errors, 1, ["--load-hf", "/nowhere"])
    assert code != 0 and "--load-hf /nowhere: there is no such folder; check the path" in errors


def test_a_folder_that_does_not_fit_its_config_is_rejected(gloo_pool, llama, tmp_path):
    folder = tiny_llama(tmp_path / "hf")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 65}))
    ((code, errors),) = gloo_pool.run(run, 1, [*RUN, "--load-hf", str(folder)])
    assert code == 2 and "embed_tokens" in errors and "Traceback" not in errors


@pytest.mark.parametrize(("flags", "kind"), [([], "llama"), (["--hf-family", "mistral"], "mistral")])
def test_a_model_of_random_weights_becomes_llama_or_the_selected_family(tmp_path, capfd, flags, kind):
    """Six families can represent it; ``transformers`` computes the same logits with each."""
    with Target(tmp_path / "model") as target:
        save_safetensors(random_model(LLAMA, 64), target)
        target.publish()
    words = ["--saver", "hf", "--load-dir", str(tmp_path / "model"), "--save-dir", str(tmp_path / "hf"), *flags]
    assert convert.main(words) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (kind, [f"{kind.capitalize()}ForCausalLM"])
    messages = capfd.readouterr().err
    assert f"hf: complete, format hf, model_type {kind}" in messages and "equal; largest" in messages


@pytest.mark.parametrize(("flags", "message"), [
    ("--saver native --hf-family llama", "--hf-family llama: is the type of a new Hugging Face folder; use --saver hf"),
    ("--saver hf --hf-family qwen2 --original-dir {llama}", "qwen2: is the type of .*; remove --original-dir"),
    ("--saver hf --hf-family lama", "lama: no family that can be converted; known: arcee, "),
    ("--saver hf --hf-family gemma2", "no Hugging Face family has a model of these settings. not gemma2: "),
])  # fmt: skip
def test_a_family_that_cannot_be_written_is_rejected(llama, tmp_path, flags, message):
    words = ["--load-dir", str(llama), "--save-dir", str(tmp_path / "hf"), *flags.format(llama=llama).split()]
    with pytest.raises(UserError, match=message):
        convert.main(words)
    assert not (tmp_path / "hf").exists()


def test_the_flags_of_the_folder_give_the_same_model(llama):
    settings = load_hf(llama).settings
    cfg = parse_args(LLAMA, needs_data=False)
    assert {name: getattr(cfg.flat, name) for name in cfg.explicit} == {name: settings[name] for name in cfg.explicit}


# ---- exports as other programs take them


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A repository of the hub: shards with their index, a tokenizer, ``generation_config.json``, other files."""
    folder = tmp_path_factory.mktemp("hub")
    tokens = ("<unk>", "<begin>", "<end>", "<pad>")
    definition = tiny_tokenizers.byte_level_bpe(folder / "tokenizer.json", vocab_size=300, special=tokens)
    names = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    words = build_tokenizer(tiny_tokenizers.flags("HuggingFaceTokenizer", tokenizer_model=definition)).vocab_size
    save_hf(random_model(LLAMA, words), folder / "weights", max_shard_bytes=40_000)
    for path in (folder / "weights").iterdir():
        path.rename(folder / path.name)
    (folder / "weights").rmdir()
    (folder / "generation_config.json").unlink()
    return as_on_the_hub(folder)


def check_export(folder, files):
    """The folder has these files and no others, is whole, and says how text begins and ends."""
    assert {path.name for path in folder.iterdir()} == files
    assert verify.main([str(folder)]) == 0
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in ids} == ids
    generation = json.loads((folder / "generation_config.json").read_text())
    assert {name: generation[name] for name in (*ids, "temperature")} == {**ids, "temperature": 0.6}


FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_run_from_a_folder_of_the_hub_is_exported(gloo_pool, hub, tmp_path):
    tokenizer = RUN.index("--tokenizer-type")
    exports = ["--save", str(tmp_path), "--save-interval", "1", "--save-hf-interval", "1", "--train-iters", "1"]
    argv = [*RUN[:tokenizer], *RUN[tokenizer + 2 :], "--load-hf", str(hub), *exports]
    ((code, errors),) = gloo_pool.run(run, 1, argv)
    assert (code, errors) == (0, "")
    check_export(tmp_path / "hf" / "iter_0000001", FILES)
    places = ["--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "converted")]
    assert convert.main(["--saver", "hf", *places]) == 0  # from the run's own checkpoint
    check_export(tmp_path / "converted", FILES)


def test_a_checkpoint_that_holds_other_files_of_its_tokenizers_folder_is_exported_without_them(hub, tmp_path):
    """Checkpoints of earlier versions hold every JSON file of the folder, the index of its weights too."""
    model = load_hf(hub)
    model.assets = {f"tokenizer/{path.name}": path for path in hub.iterdir() if path.suffix == ".json"}
    assert "tokenizer/model.safetensors.index.json" in model.assets
    model.settings |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(hub)}
    save_hf(model, tmp_path / "export")
    check_export(tmp_path / "export", FILES)


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer"])
def test_generate_ends_at_the_end_token_of_an_export(kind, tmp_path, monkeypatch):
    """A model whose logits are all zero gives token 0, which ends text in both tokenizers; without one nothing does."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    values = {"vocab_size": 600} if kind == "NullTokenizer" else {}
    if kind == "HuggingFaceTokenizer":
        values = {"tokenizer_model": tiny_tokenizers.byte_level_bpe(tmp_path / "tokenizer.json")}
    elif kind == "GPT2BPETokenizer":
        values = dict(zip(("vocab_file", "merge_file"), tiny_tokenizers.gpt2_files(tmp_path)))
    tokenizer = build_tokenizer(tiny_tokenizers.flags(kind, **values))
    model = random_model(LLAMA, tokenizer.vocab_size)
    zeros = torch.zeros_like(model.tensors["model.decoder.final_layernorm.weight"].read())
    model.tensors["model.decoder.final_layernorm.weight"] = LazyTensor.of(zeros)
    model.settings |= {"tokenizer_type": kind, **values}
    save_hf(model, tmp_path / "export")
    foreign = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    generated = foreign.generate(torch.tensor([[5, 7]]), max_new_tokens=6, do_sample=False)[0].tolist()
    ends = kind != "NullTokenizer"
    assert generated == [5, 7, *[0] * (1 if ends else 6)] and (not ends or tokenizer.eod == 0)


def test_an_export_that_fails_ends_the_run_with_an_error(gloo_pool, llama, tmp_path):
    (tmp_path / "hf").write_text("in the way of the folder of exports")
    argv = [*RUN, "--load-hf", str(llama), "--save", str(tmp_path), "--save-interval", "2", "--save-hf-interval", "2"]
    ((code, errors),) = gloo_pool.run(run, 1, argv)
    assert code == 1 and len(losses(tmp_path)) == 3
    (line,) = errors.splitlines()
    assert line.startswith("error: --save-hf-interval: iter_0000002 was not converted: ") and str(tmp_path) in line
