"""tools/checkpoint/convert.py: every pair of formats keeps every bit, and what does not fit ends in one message."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing import CheckpointReader
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.files import Target, read_safetensors
from megatron.export.hf import load_hf, save_hf
from megatron.export.interchange import Interchange
from megatron.export.native import load_native, load_safetensors, save_safetensors
from megatron.tools.checkpoint import convert, formats, verify
from tests.test_utils.hf_folders import LLAMA, random_model, tiny_llama

ROOT = Path(__file__).resolve().parents[4]
QUERY = "model.decoder.layers.0.self_attention.linear_qkv.weight"
OUTPUT = "model.output_layer.weight"
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Equal weights in four formats."""
    folder = tmp_path_factory.mktemp("formats")
    tiny_llama(folder / "hf", dtype=torch.bfloat16)
    converted(folder / "hf", folder / "native", "native")
    converted(folder / "native", folder / "safetensors", "safetensors")
    converted(folder / "native", folder / "megatron_torch_dist", "megatron_torch_dist")
    return folder


def converted(source, target, saver, *flags):
    """The folder that the tool makes."""
    places = ["--load-dir", str(source), "--save-dir", str(target)]
    assert convert.main(["--saver", saver, *places, "--no-checking", *flags]) == 0
    return target


def refused(source, target, *flags, saver="native"):
    """The message of a conversion that leaves no target."""
    with pytest.raises(UserError) as caught:
        converted(source, target, saver, *flags)
    assert not target.exists()
    return str(caught.value)


def values(interchange):
    read = {name: tensor.read() for name, tensor in interchange.tensors.items()}
    return {name: (tensor.dtype, tensor.double().numpy().tobytes()) for name, tensor in read.items()}


@pytest.mark.parametrize("saver", formats.SAVERS)
@pytest.mark.parametrize("loader", formats.SAVERS)
def test_every_pair_of_formats_keeps_every_bit(folders, tmp_path, loader, saver):
    converted(folders / loader, tmp_path / "out", saver, "--loader", loader)
    kind, actual = formats.open_checkpoint(str(tmp_path / "out"), "auto")
    assert kind == saver
    assert values(actual) == values(load_hf(folders / "hf"))


def test_a_model_with_experts_keeps_every_bit_and_gets_the_counters_that_others_lack(tmp_path):
    sigmoid = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    model = random_model([*LLAMA, *EXPERTS, *sigmoid], 64)
    with Target(tmp_path / "start") as target:
        save_safetensors(model, target)
        target.publish()
    folder = converted(tmp_path / "start", tmp_path / "native", "native")
    counter = "model.decoder.layers.1.mlp.router.last_choices"
    for saver in ("megatron_torch_dist", "native", "safetensors", "native"):
        folder = converted(folder, folder / saver, saver)
        result = formats.open_checkpoint(folder, saver)[1]
        read = {name: tensor.read() for name, tensor in result.tensors.items()}
        assert all(torch.equal(read[name], tensor.read()) for name, tensor in model.tensors.items())
        assert (counter in read) == (saver != "megatron_torch_dist")
    half = formats.open_checkpoint(converted(folder, tmp_path / "half", "native", "--dtype", "bf16"), "native")[1]
    assert half.tensors[counter].dtype == torch.int64 and half.tensors[QUERY].dtype == torch.bfloat16
    assert half.tensors["model.decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32


@pytest.mark.parametrize(("family", "flags"), [
    ("gpt", "--geglu"), ("gpt", "--multi-latent-attention --kv-lora-rank 12"), ("bert", "--bert-no-binary-head"),
])  # fmt: skip
def test_other_networks_keep_every_bit_without_a_flag(tmp_path, family, flags):
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
    model = random_model(f"{sizes} --position-embedding-type rope {flags}".split(), 64, model_family=family)
    with Target(tmp_path / "start") as target:
        save_safetensors(model, target)
        target.publish()
    folder = tmp_path / "start"
    for saver in ("native", "megatron_torch_dist", "native"):
        folder = converted(folder, folder / saver, saver)
    assert values(formats.open_checkpoint(folder, "native")[1]) == values(model)


def test_mixtral_comes_over_and_goes_back(tmp_path):
    save_hf(random_model([*LLAMA, *EXPERTS], 64), tmp_path / "hf")
    folder = converted(tmp_path / "hf", tmp_path / "native", "native")
    back = converted(folder, tmp_path / "back", "hf")
    assert (back / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert load_native(folder / "release").tensors["model.decoder.layers.0.mlp.router.last_choices"].shape == (4,)


def test_a_release_has_checksums_a_tracker_and_all_settings_of_the_model(folders):
    reader = CheckpointReader(folders / "native" / "release")
    reader.verify()
    assert (folders / "native" / "latest_checkpointed_iteration.txt").read_text() == "release"
    args = reader.objects["args"]
    assert (args["num_layers"], args["swiglu"], args["position_embedding_type"]) == (2, True, "rope")
    assert args["vocab_size"] == 64 and args["untie_embeddings_and_output_weights"]
    assert "num_layers" not in args["explicit"], "nobody gave it"


def test_a_tokenizer_goes_along_and_settings_name_the_place_where_it_will_be(folders, tmp_path):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    template = "additional_chat_templates/tool_use.jinja"
    (tmp_path / "hf" / template).parent.mkdir()
    (tmp_path / "hf" / template).write_text("T")
    native = converted(tmp_path / "hf", tmp_path / "native", "native")
    args = CheckpointReader(native / "release").objects["args"]
    assert args["tokenizer_type"] == "HuggingFaceTokenizer"
    assert args["tokenizer_model"] == str(native / "release" / "tokenizer")
    assert (native / "release" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert (native / "release" / "tokenizer" / template).read_text() == "T"
    repeated = converted(native, tmp_path / "again", "hf")
    assert (repeated / "tokenizer.json").read_text() == "{}" and (repeated / template).read_text() == "T"


def test_a_setting_names_the_file_of_the_tokenizer_that_goes_along(tmp_path):
    assets = {name: tmp_path / name for name in ("tokenizer/vocab.json", "hf/merges.txt")}
    named = {"vocab_file": "/old/vocab.json", "merge_file": "/old/merges.txt", "tokenizer_model": None}
    assert convert.copied_tokenizer(Interchange(named, {}, assets=assets), tmp_path) == {
        "vocab_file": f"{tmp_path}/tokenizer/vocab.json", "merge_file": f"{tmp_path}/tokenizer",
    }  # fmt: skip


def test_files_are_of_bounded_size(folders, tmp_path):
    out = converted(folders / "native", tmp_path / "out", "safetensors", "--max-shard-size", "0.00001")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 15_000 for path in files)
    assert values(load_safetensors(out)) == values(load_native(folders / "native" / "release"))


def test_weights_can_be_cast_on_the_way(folders, tmp_path):
    out = converted(folders / "native", tmp_path / "out", "hf", "--dtype", "fp32")
    assert {tensor.dtype for tensor in read_safetensors(out / "model.safetensors").values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_spellings_of_megatron_lms_tool_are_taken(folders, tmp_path, capsys):
    flags = ["--loader", "mcore", "--model-type", "GPT", "--target-tensor-parallel-size", "2"]
    converted(folders / "native", tmp_path / "out", "core", *flags, "--true-vocab-size", "64")
    errors = capsys.readouterr().err
    assert "--target-tensor-parallel-size: no effect" in errors
    assert f"{folders / 'native'}: format native, 15 tensors, 0.000 GB" in errors
    CheckpointReader(tmp_path / "out" / "release").verify()


def test_training_state_goes_along_and_is_left_out_where_asked(folders, tmp_path):
    model = random_model(LLAMA, 64)
    moments = {name.replace("model.", f"optimizer.{kind}.", 1): tensor
               for kind in ("exp_avg", "exp_avg_sq") for name, tensor in model.tensors.items()}  # fmt: skip
    model.tensors |= moments
    state = {"consumed_train_samples": 24, "consumed_valid_samples": 0, "floating_point_operations": 1.0,
             "iteration": 3, "skipped_iterations": 0, "skipped_train_samples": 0}  # fmt: skip
    model.objects = {"iteration": 3, "train_state": state, "optimizer": {"step": 3, "grad_scaler": {}}}
    with Target(tmp_path / "state") as target:
        convert.completed(model, [], "hf", "model")
        convert.write(model, "native", target, 0, 10**9, allow_non_finite=False)
    result = load_native(tmp_path / "state" / "iter_0000003")
    assert result.objects["train_state"] == state and result.tensors.keys() == model.tensors.keys()
    weights = converted(tmp_path / "state", tmp_path / "weights", "native", "--no-optimizer")
    assert not any(name.startswith("optimizer.") for name in CheckpointReader(weights / "release").names)
    model.objects = {"iteration": 0, "more": 1}
    with Target(tmp_path / "untrained") as target:
        convert.write(model, "native", target, 0, 10**9, allow_non_finite=False)
    repeated = CheckpointReader(converted(tmp_path / "untrained", tmp_path / "again", "native") / "release")
    assert "more" not in repeated.objects and not any(name.startswith("optimizer.") for name in repeated.names)
    del model.tensors["optimizer.exp_avg.output_layer.weight"]
    with pytest.raises(UserError, match=r"optimizer\.exp_avg\.output_layer\.weight is missing, expected \[64, 32\]"):
        convert.completed(model, [], "hf", "model")


@pytest.mark.parametrize("main", [[], ["main_param"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "removed", ["exp_avg.output_layer.weight", "momentum_buffer.decoder.layers.0.mlp.linear_fc2.weight"]
)
def test_state_of_muon_for_matrices_and_adam_for_others_is_complete(removed, main):
    model = random_model(LLAMA, 64)
    for name, tensor in list(model.tensors.items()):
        matrix = "layers" in name and len(tensor.shape) > 1
        for kind in (*main, *(["momentum_buffer"] if matrix else ["exp_avg", "exp_avg_sq"])):
            model.tensors[name.replace("model.", f"optimizer.{kind}.", 1)] = tensor
    convert.completed(model, [], "hf", "model")
    del model.tensors[f"optimizer.{removed}"]
    with pytest.raises(UserError, match=re.escape(f"optimizer.{removed} is missing, expected")):
        convert.completed(model, [], "hf", "model")


# ---- what does not fit


@pytest.fixture
def plain(folders, tmp_path):
    """Writes the weights, changed by a function of their table, as safetensors without settings."""

    def write(change=lambda tensors: None):
        result = load_native(folders / "native" / "release")
        change(result.tensors)
        with Target(tmp_path / "plain") as target:
            save_safetensors(result, target)
            target.publish()
        (tmp_path / "plain" / "settings.json").unlink()
        return tmp_path / "plain"

    return write


def test_settings_that_a_format_does_not_know_are_flags(plain, folders, tmp_path):
    out = converted(plain(), tmp_path / "out", "native", "--", *LLAMA)
    assert values(load_native(out / "release")) == values(load_native(folders / "native" / "release"))


def test_without_these_flags_all_that_are_missing_are_named(plain, tmp_path):
    message = refused(plain(), tmp_path / "out")
    assert "--num-layers" in message and "--num-attention-heads" in message


def test_a_renamed_tensor_is_named_with_the_one_that_is_missing(plain, tmp_path):
    def rename(tensors):
        tensors["model.decoder.layers.0.attention.qkv.weight"] = tensors.pop(QUERY)

    message = refused(plain(rename), tmp_path / "out", *LLAMA)
    assert f"{QUERY} is missing, expected [2, 32, 32]" in message
    assert "model.decoder.layers.0.attention.qkv.weight [2, 32, 32] is not expected" in message


def test_another_shape_is_named_with_the_expected_one(plain, tmp_path):
    def cut(tensors):
        tensors[QUERY] = LazyTensor.of(tensors[QUERY].read()[:, :16].contiguous())

    assert f"{QUERY} has shape [2, 16, 32], expected [2, 32, 32]" in refused(plain(cut), tmp_path / "out", *LLAMA)


def test_integers_are_not_blend_weights(plain, tmp_path):
    def count(tensors):
        tensors[QUERY] = LazyTensor.of(tensors[QUERY].read().int())

    assert f"{QUERY} holds torch.int32, expected floating point" in refused(plain(count), tmp_path / "out", *LLAMA)


def test_tied_weights_for_an_untied_model_name_the_flag(plain, tmp_path):
    message = refused(plain(lambda tensors: tensors.pop(OUTPUT)), tmp_path / "out", *LLAMA)
    assert f"{OUTPUT} is missing" in message and "leave out --untie-embeddings-and-output-weights" in message


def test_untied_weights_for_a_tied_model_name_the_flag(plain, tmp_path):
    message = refused(plain(), tmp_path / "out", *LLAMA[:-1])
    assert f"{OUTPUT} [64, 32] is not expected" in message and "add --untie-embeddings-and-output-weights" in message


def test_another_vocabulary_is_named(plain, tmp_path):
    message = refused(plain(), tmp_path / "out", *LLAMA, "--vocab-size", "65")
    assert "--vocab-size is 65, there it is 64" in message


def test_flags_that_contradict_a_formats_settings_are_named_with_both_values(folders, tmp_path):
    message = refused(folders / "hf", tmp_path / "out", "--num-layers", "3")
    assert "--num-layers is 3, there it is 2" in message


def test_another_architecture_is_rejected(folders, tmp_path):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mamba"}))
    assert "mamba" in refused(tmp_path / "hf", tmp_path / "out")


def test_a_truncated_file_is_named_with_its_tensor(folders, tmp_path):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refused(tmp_path / "hf", tmp_path / "out")
    assert "model.safetensors: truncated: tensor " in message


def test_a_missing_shard_is_named(folders, tmp_path):
    out = converted(folders / "native", tmp_path / "sharded", "safetensors", "--max-shard-size", "0.00001")
    sorted(out.glob("*.safetensors"))[2].unlink()
    assert "model-00003-of-" in refused(out, tmp_path / "out")


def test_a_damaged_native_checkpoint_is_found_while_it_is_read(folders, tmp_path):
    shutil.copytree(folders / "native", tmp_path / "native")
    path = tmp_path / "native" / "release" / "model_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    assert "is damaged (its checksum does not match)" in refused(tmp_path / "native", tmp_path / "out", saver="hf")


@pytest.mark.parametrize("saver", formats.SAVERS)
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_copy_of_a_tokenizer_is_never_exported(folders, tmp_path, saver, damage):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"content": "<|im_end|>"}')
    native = converted(tmp_path / "hf", tmp_path / "native", "native")
    copy = native / "release" / "tokenizer" / "tokenizer.json"
    copy.write_text('{"content": "<|im_enc|>"}') if damage == "changed" else copy.unlink()
    assert "tokenizer/tokenizer.json" in refused(native, tmp_path / "out", saver=saver)


def test_existing_target_is_rejected_and_not_changed(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        converted(folders / "hf", tmp_path / "out", "native")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    converted(folders / "hf", tmp_path / "empty", "native")


def test_a_folder_that_is_being_written_is_rejected_on_both_sides(warm_python, folders, tmp_path):
    with Target(tmp_path / "out", "another conversion") as target:
        target.write("model.safetensors", {"a": LazyTensor.of(torch.ones(3))}, {})
        assert "an unfinished conversion" in refused(target.folder, tmp_path / "copy")
        command = "import sys; from megatron.export.files import Target; Target(sys.argv[1], 'mine')"
        assert "another process is making it" in run_python(warm_python, command, tmp_path / "out").stderr


def test_a_folder_of_no_known_format_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    assert "matches none of the formats" in refused(tmp_path / "in", tmp_path / "out")
    assert "there is no such folder" in refused(tmp_path / "nothing", tmp_path / "out")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "in" / name).write_text("{}")
    expected = f"{tmp_path}/in: contains adapters of PEFT only; import them with megatron lora import"
    assert expected in refused(tmp_path / "in", tmp_path / "out")
    with pytest.raises(UserError, match=expected):
        verify.main([str(tmp_path / "in")])


# ---- interruptions

KILLED = """
import os, signal, sys
from megatron.export import files
from megatron.tools.checkpoint import convert
write, left = files._write, [int(sys.argv[1])]
def dying(file, name, tensor):
    for checksum in write(file, name, tensor):
        yield checksum
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
files._write = dying
sys.exit(convert.main(sys.argv[2:]))
"""
LIMITED = """
import resource, sys
from megatron import console
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
sys.exit(console.run_tool('convert', sys.argv[1:]))
"""


def run_python(python, program, *arguments):
    command = [python, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("saver", ["native", "hf"])
def test_a_killed_conversion_leaves_no_target_and_goes_on(warm_python, folders, tmp_path, capsys, saver):
    flags = ["--saver", saver, "--load-dir", str(folders / "native"), "--save-dir", str(tmp_path / "out"),
             "--max-shard-size", "0.00001", "--no-checking"]  # fmt: skip
    assert run_python(warm_python, KILLED, 9, *flags).returncode == -9
    assert not (tmp_path / "out").exists()
    hidden = tmp_path / ".out.converting"
    complete = [json.loads(line)[0] for line in (tmp_path / ".out.converting.journal").read_text().splitlines()[1:]]
    assert len(complete) > 1
    times = {name: (hidden / name).stat().st_mtime_ns for name in complete}
    damaged = hidden / complete[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert convert.main(flags) == 0
    assert "were complete already" in capsys.readouterr().err
    after = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in complete}
    assert [name for name in complete if after[name] != times[name]] == complete[:1]  # the damaged one was made anew
    assert values(formats.open_checkpoint(str(tmp_path / "out"), saver)[1]) == values(load_hf(folders / "hf"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_conversion_to_the_same_folder_restarts(warm_python, folders, tmp_path, capsys):
    flags = ["--load-dir", str(folders / "native"), "--save-dir", str(tmp_path / "out"), "--max-shard-size", "0.00001"]
    assert run_python(warm_python, KILLED, 9, "--saver", "native", *flags).returncode == -9
    assert convert.main(["--saver", "native", "--dtype", "fp32", *flags]) == 0
    assert "were complete already" not in capsys.readouterr().err
    result = load_native(tmp_path / "out" / "release")
    assert {tensor.dtype for tensor in result.tensors.values()} == {torch.float32}


def test_changed_source_is_converted_again(folders, tmp_path, monkeypatch, capsys):
    shutil.copytree(folders / "safetensors", tmp_path / "in")
    flags = ["--max-shard-size", "0.00001"]

    def interrupted(progress, name, size):
        progress.counted.add(name)
        if len(progress.counted) > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(formats.CopyProgress, "count", interrupted)
        converted(tmp_path / "in", tmp_path / "out", "safetensors", *flags)
    changed = load_safetensors(tmp_path / "in")
    tensors = {name: LazyTensor.of(tensor.read() + 1) for name, tensor in changed.tensors.items()}
    shutil.rmtree(tmp_path / "in")
    with Target(tmp_path / "in") as target:
        save_safetensors(Interchange(changed.settings, tensors), target)
        target.publish()
    capsys.readouterr()
    result = load_safetensors(converted(tmp_path / "in", tmp_path / "out", "safetensors", *flags))
    assert "were complete already" not in capsys.readouterr().err
    assert all(result.tensors[name].read().equal(tensor.read()) for name, tensor in tensors.items())


def test_no_space_is_one_message_and_no_target(warm_python, folders, tmp_path):
    places = ["--load-dir", folders / "hf", "--save-dir", tmp_path / "out"]
    result = run_python(warm_python, LIMITED, "--saver", "native", *places)
    assert result.returncode == 2 and "no space" in result.stderr and "repeat the command" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


def test_too_little_space_is_rejected_before_anything_is_copied(folders, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = refused(folders / "hf", tmp_path / "out")
    assert "0.00 GB are free there" in message


@pytest.mark.parametrize(("family", "own"), [("gpt", "and a --save"), ("t5", "and --decoder-seq-length N and a")])
def test_next_command_names_settings_that_weights_do_not_state(family, own):
    assert own in convert.how_to_load("weights", Interchange({"model_family": family}, {}))


def test_a_copy_ends_with_its_bytes_seconds_and_rate(monkeypatch, capsys):
    clock = iter([100.0, 104.0, 104.0])  # seconds at the start, after the tensor, at the end
    monkeypatch.setattr(formats.time, "monotonic", lambda: next(clock))
    progress = formats.CopyProgress("converted", 3 * 10**9)
    progress.skip(10**9)
    progress.count("weight", 2 * 10**9)
    progress.finish()
    expected = "converted 2.000 GB in 4.0 s, 0.50 GB/s; 1.000 GB were complete already\n"
    assert capsys.readouterr().err.endswith(expected)
