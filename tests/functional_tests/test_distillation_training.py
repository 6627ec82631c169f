"""Distillation with the whole program: a loop of ``transformers``, planted errors, wrong input."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.training.data.stored_logits import StoredLogits
from tests.test_utils import layout_faults
from tests.test_utils.gpt_runs import VOCAB_SIZE, read_records, train, train_with_errors, write_dataset
from tests.test_utils.hf_folders import LLAMA, tiny_llama, weights_in

STEPS, BATCH = 10, 4
RUN = [
    *LLAMA, "--micro-batch-size", "2", "--global-batch-size", str(BATCH), "--train-iters", str(STEPS), "--lr", "1e-3",
    "--log-interval", "1", "--eval-iters", "0", "--lr-warmup-iters", "0", "--lr-decay-style", "constant",
    "--clip-grad", "0", "--weight-decay", "0", "--attention-dropout", "0", "--hidden-dropout", "0", "--split", "1",
]  # fmt: skip
LOSSES = {
    "forward": "--kd-temperature 2 --kd-lm-loss-weight 0.5",
    "reverse": "--kd-loss reverse-kl --kd-temperature 1.5 --kd-loss-scale 0.8 --kd-lm-loss-weight 0.1",
}
TP2, CP2, PP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "context", "pipeline-model"))
NAMES = ("distillation loss", "kd loss", "lm loss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a student (LLaMA) and of a wider, deeper teacher (Qwen3)."""
    transformers = pytest.importorskip("transformers")
    student, teacher = (tmp_path_factory.mktemp(name) / "hf" for name in ("student", "teacher"))
    tiny_llama(student, VOCAB_SIZE)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=80, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(teacher)
    return student, teacher


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("data") / "text"))


def flags_of(folders, data, loss=""):
    student, teacher = map(str, folders)
    return [*RUN, "--data-path", data, "--load-hf", student, "--export-kd-teacher-load", teacher, *loss.split()]


def faulty_train(rank, world_size, argv, fault):
    """A task of the pool: the program in fp64 under a planted ``fault``."""
    with getattr(layout_faults, fault)(rank):
        return train(rank, world_size, argv, True)


def records(pool, folder, ranks, flags, fault="no_fault"):
    assert set(pool.run(faulty_train, ranks, [*flags, "--save", str(folder)], fault)) == {0}
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]


def samples(flags):
    """Global batches of training: tokens, labels and loss masks, each [b, s]."""
    from megatron.training.arguments import parse_args, validate_args
    from tests.test_utils.flag_effects.sft import epoch_rows
    from tests.test_utils.gpt_runs import MODEL_FLAGS

    rows = epoch_rows(validate_args(parse_args([*MODEL_FLAGS, *flags]), 1, announce=False))
    for step in range(STEPS):
        batch = [rows[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        yield [torch.from_numpy(np.stack([row[name] for row in batch])) for name in ("tokens", "labels", "loss_mask")]


def loop(folders, flags, temperature, reverse, scale, lm_weight, top_k=None):
    """Ten steps in plain torch: return the losses of each, and the final weights. ``top_k``: the teacher's distribution
    has only its largest entries."""
    transformers = pytest.importorskip("transformers")
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders
    )
    optimizer, losses = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0), []
    for tokens, labels, mask in samples(flags):
        logits = student(tokens).logits
        with torch.no_grad():
            p = teacher(tokens).logits
            smallest = p.topk(top_k or VOCAB_SIZE).values[..., -1:]
            p = (p.masked_fill(p < smallest, -1e9) / temperature).log_softmax(-1)
        q = (logits / temperature).log_softmax(-1)
        first, second = (q, p) if reverse else (p, q)
        kd = temperature**2 * F.kl_div(second, first, reduction="none", log_target=True).sum(-1)
        lm = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        kd, lm = ((values * mask).sum() / mask.sum() for values in (kd, lm))
        loss = scale * kd + lm_weight * lm
        losses.append(dict(zip(NAMES, (loss.item(), kd.item(), lm.item()))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, student.state_dict()


SETTINGS = {"forward": (2.0, False, 1.0, 0.5), "reverse": (1.5, True, 0.8, 0.1)}


@pytest.mark.parametrize("name", LOSSES)
def test_training_equals_a_loop_of_transformers(gloo_pool, folders, data, tmp_path, name):
    flags = flags_of(folders, data, LOSSES[name])
    logged = records(gloo_pool, tmp_path, 1, [*flags, "--save-interval", "10", "--save-hf-interval", "10"])
    expected, weights = loop(folders, flags, *SETTINGS[name])
    assert len(logged) == STEPS and expected[0]["kd loss"] > 0.5
    for record, losses in zip(logged, expected, strict=True):
        for loss in NAMES:
            assert record[loss] == pytest.approx(losses[loss], rel=1e-6), (record["iteration"], loss)
    trained = weights_in(tmp_path / "hf" / f"iter_{STEPS:07d}")
    for weight in weights:
        np.testing.assert_allclose(trained[weight], weights[weight], atol=2e-6, err_msg=weight)


@pytest.mark.parametrize("fault", ["no_squared_temperature", "teacher_shifted_by_a_token"])
def test_planted_error_is_found(gloo_pool, folders, data, tmp_path, fault):
    flags = flags_of(folders, data, LOSSES["forward"])
    first = records(gloo_pool, tmp_path, 1, [*flags, "--train-iters", "1"], fault)[0]
    expected = loop(folders, flags, *SETTINGS["forward"])[0][0]
    assert first["lm loss"] == pytest.approx(expected["lm loss"], rel=1e-6)
    assert first["kd loss"] != pytest.approx(expected["kd loss"], rel=1e-4)


@pytest.mark.parametrize(
    "layout, ranks",
    [("", 1), ("--tensor-model-parallel-size 2 --sequence-parallel", 2), ("--pipeline-model-parallel-size 2", 2)],
    ids=["one rank", "TP 2 + SP", "PP 2"],
)
@pytest.mark.parametrize("kind", ["forward-kl", "reverse-kl"])
def test_a_teacher_that_is_the_student_gives_0(gloo_pool, folders, data, tmp_path, layout, ranks, kind):
    flags = [*flags_of((folders[0], folders[0]), data, f"--kd-loss {kind} {layout}"), "--train-iters", "1"]
    for record in records(gloo_pool, tmp_path, ranks, flags):
        for name in ("kd loss", "distillation loss", "grad_norm"):  # of logits that differ by rounding in fp64
            assert abs(record[name]) < 1e-12, name
        assert record["lm loss"] > 1


def test_validation_reports_the_divergence(gloo_pool, folders, data, tmp_path):
    flags = [*flags_of(folders, data), "--split", "9,1,0", "--eval-iters", "1", "--train-iters", "2"]
    records(gloo_pool, tmp_path, 1, [*flags, "--eval-interval", "2"])
    valid = [record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "valid"]
    assert valid[0]["kd loss"] == valid[0]["distillation loss"] > 0.5 and valid[0]["lm loss"] > 1


# ---- layers


# eps: a gradient of 5e-9 of one weight is rounding noise in fp32
LAYERS = (
    "--kd-layer-pairs 1:2:mse final:final --kd-layer-loss-scale 0.7 --kd-temperature 2 --eod-mask-loss --adam-eps 1e-5"
)


@pytest.fixture(scope="module")
def same_width(folders, tmp_path_factory):
    """The student, and a teacher of its width with three layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder := tmp_path_factory.mktemp("same_width") / "hf")
    return folders[0], folder


def layers_loop(folders, flags):
    """Ten steps in plain torch with the losses of :data:`LAYERS`, after the definitions of NVIDIA ModelOpt 0.47
    (``distill/plugins/megatron.py``): per token the mean of squares over channels, or 1 - cosine; mean over the pairs.
    Return (layer loss, divergence) of each step, and the final weights."""
    transformers = pytest.importorskip("transformers")
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    optimizer, losses = torch.optim.AdamW(models[0].parameters(), lr=1e-3, weight_decay=0, eps=1e-5), []
    for tokens, _, mask in samples(flags):
        student, teacher = (model(tokens, output_hidden_states=True) for model in models)
        x, y = student.hidden_states, [states.detach() for states in teacher.hidden_states]
        squares = (x[1] - y[2]).square().mean(-1)
        angles = 1 - (x[-1] * y[-1]).sum(-1) / (x[-1].norm(dim=-1) * y[-1].norm(dim=-1))
        q, p = ((output.logits / 2).log_softmax(-1) for output in (student, teacher))
        kl = 4 * F.kl_div(q, p.detach(), reduction="none", log_target=True).sum(-1)
        layer, kd = ((values * mask).sum() / mask.sum() for values in ((squares + angles) / 2, kl))
        losses.append((layer.item(), kd.item()))
        optimizer.zero_grad()
        (kd + 0.7 * layer).backward()
        optimizer.step()
    return losses, models[0].state_dict()


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


@pytest.mark.parametrize("more", ["", RECOMPUTE, "--micro-batch-size 4"])
def test_layer_losses_equal_a_loop_of_transformers(gloo_pool, same_width, data, tmp_path, more):
    flags = flags_of(same_width, data, f"{LAYERS} {more}")
    logged = records(gloo_pool, tmp_path, 1, [*flags, "--save-interval", "10", "--save-hf-interval", "10"])
    expected, weights = layers_loop(same_width, flags)
    for record, losses in zip(logged, expected, strict=True):
        assert (record["layer loss"], record["kd loss"]) == pytest.approx(losses, rel=1e-6), record["iteration"]
    trained = weights_in(tmp_path / "hf" / f"iter_{STEPS:07d}")
    for weight in weights:
        np.testing.assert_allclose(trained[weight], weights[weight], atol=2e-6, err_msg=weight)


def test_layer_losses_of_a_teacher_that_is_the_student_are_0(gloo_pool, folders, data, tmp_path):
    flags = flags_of((folders[0], folders[0]), data, "--kd-layer-pairs 1:1 2:2:mse final:final --train-iters 1")
    (record,) = records(gloo_pool, tmp_path, 1, flags)
    assert abs(record["layer loss"]) < 1e-12 and abs(record["grad_norm"]) < 1e-12


@pytest.mark.parametrize("fault", ["teacher_layer_shifted_by_a_token", "unmasked_layer_loss"])
def test_planted_error_of_layer_losses_is_found(gloo_pool, same_width, data, tmp_path, fault):
    flags = flags_of(same_width, data, f"{LAYERS} --train-iters 1")
    (record,) = records(gloo_pool, tmp_path, 1, flags, fault)
    expected = layers_loop(same_width, flags)[0][0]
    assert record["kd loss"] == pytest.approx(expected[1], rel=1e-6)
    assert record["layer loss"] != pytest.approx(expected[0], rel=1e-4)


def test_modelopt_names_pairs_of_layers(gloo_pool, same_width, data, tmp_path):
    (tmp_path / "kd.yaml").write_text(
        "intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.1, mse], "
        "[decoder.final_layernorm, decoder.final_layernorm]]\nkd_loss_alpha: 0.75\n"
    )
    first, second = (
        records(gloo_pool, tmp_path / name, 1, flags_of(same_width, data, f"{more} --train-iters 2"))
        for name, more in {
            "file": f"--export-kd-cfg {tmp_path / 'kd.yaml'}",
            "flags": "--kd-layer-pairs 1:2:mse final:final:cosine --kd-loss-scale 0.75 --kd-lm-loss-weight 0.25 "
            "--kd-layer-loss-scale 0.75",
        }.items()
    )
    for record, other in zip(first, second, strict=True):
        assert all(record[name] == other[name] for name in (*NAMES, "layer loss", "grad_norm"))


LAYER_PROBLEMS = {
    "--kd-layer-pairs 1:x": r"must be STUDENT:TEACHER.:cosine\|mse. with layers from 1 or final",
    "--kd-layer-pairs 1:2 1:2:cosine": "has a pair twice",
    "--kd-layer-pairs 3:1": "3:1:cosine: the student has layers 1 to 2, not 3",
    "--kd-layer-pairs 1:4:mse": "1:4:mse: the teacher has layers 1 to 3, not 4",
    f"--kd-layer-pairs 1:3 {PP2}": "1:3:cosine: is on pipeline stages 0 and 1; use a pair on one stage, such as 2:3",
    "--kd-layer-loss-scale 2": "has no effect without --kd-layer-pairs",
    "--export-kd-cfg {tmp}/kd.yaml": "intermediate_layer_pairs .'decoder.layers.0.mlp', 'decoder.layers.1'.: only",
    "--export-kd-cfg {tmp}/alpha.yaml": "kd_loss_alpha 0.5: must be at most 1, without skip_lm_loss and kd_loss_scale",
}


@pytest.mark.parametrize("flags", LAYER_PROBLEMS)
def test_pairs_of_layers_that_do_not_fit_end_the_run_with_one_message(gloo_pool, same_width, data, tmp_path, flags):
    (tmp_path / "kd.yaml").write_text("intermediate_layer_pairs: [[decoder.layers.0.mlp, decoder.layers.1]]")
    (tmp_path / "alpha.yaml").write_text("kd_loss_alpha: 0.5\nskip_lm_loss: false")
    argv = flags_of(same_width, data, flags.format(tmp=tmp_path))
    ranks = 2 if PP2 in flags else 1
    results = gloo_pool.run(train_with_errors, ranks, argv)
    ((code, text),) = gloo_pool.run(train_with_errors, 1, [*argv, "--dry-run", "--dry-run-world-size", str(ranks)])
    assert {code, *(code for code, _ in results)} == {2}
    for errors in (text, "".join(text for _, text in results)):
        assert len(re.findall(LAYER_PROBLEMS[flags], errors)) == 1, errors


def test_layers_of_another_width_are_rejected(gloo_pool, folders, data):
    ((code, text),) = gloo_pool.run(train_with_errors, 1, flags_of(folders, data, "--kd-layer-pairs 1:2"))
    assert code == 2 and "compares layers of one width; --hidden-size is 32, the teacher's 48" in text


# ---- stored log-probabilities


TEACHER = [
    "--num-layers", "3", "--hidden-size", "48", "--num-attention-heads", "4", "--ffn-hidden-size", "80",
    "--num-query-groups", "2", "--kv-channels", "16", "--qk-layernorm",
]  # fmt: skip
LAYOUTS = {
    "TP 2 + SP": (f"{TP2} --sequence-parallel", 2),
    "PP 2": (PP2, 2),
    "CP 2": (CP2, 2),
    "DP 2": ("--micro-batch-size 1 --use-distributed-optimizer", 2),
}


def store(pool, folders, data, place, ranks=1, flags="--logits-save-top-k 64 --logits-save-dtype fp32"):
    """Run the teacher; return the folder."""
    argv = [*RUN, *TEACHER, "--data-path", data, "--load-hf", str(folders[1]), "--logits-save-dir", str(place)]
    assert set(pool.run(faulty_train, ranks, [*argv, *flags.split()], "no_fault")) == {0}
    return place


@pytest.fixture(scope="module")
def stored(gloo_pool, folders, data, tmp_path_factory):
    """All entries of the teacher's distributions in fp32."""
    return store(gloo_pool, folders, data, tmp_path_factory.mktemp("stored") / "logits")


@pytest.fixture(scope="module")
def online(gloo_pool, folders, data, tmp_path_factory):
    return records(gloo_pool, tmp_path_factory.mktemp("online"), 1, flags_of(folders, data, LOSSES["forward"]))


def load_flags(folders, data, place, more=""):
    flags = [*RUN, "--data-path", data, "--load-hf", str(folders[0]), "--logits-load-dir", str(place)]
    return [*flags, *LOSSES["forward"].split(), *more.split()]


@pytest.mark.parametrize("name", ["one rank", *LAYOUTS])
def test_training_on_all_stored_entries_equals_a_teacher(gloo_pool, folders, data, stored, online, tmp_path, name):
    layout, ranks = LAYOUTS.get(name, ("", 1))
    logged = records(gloo_pool, tmp_path, ranks, load_flags(folders, data, stored, layout))
    for record, expected in zip(logged, online, strict=True):
        for loss in (*NAMES, "grad_norm"):
            assert record[loss] == pytest.approx(expected[loss], rel=2e-6), (record["iteration"], loss)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_stores_the_same_values(gloo_pool, folders, data, stored, tmp_path, name):
    layout, ranks = LAYOUTS[name]
    flags = f"--logits-save-top-k 8 --logits-save-dtype fp32 {layout}"
    actual = StoredLogits(store(gloo_pool, folders, data, tmp_path / "logits", ranks, flags))
    expected = StoredLogits(stored)
    torch.testing.assert_close(actual.values, expected.values[..., :8], rtol=1e-6, atol=1e-6)
    assert torch.equal(actual.ids, expected.ids[..., :8]) and torch.equal(actual.digests, expected.digests)
    assert actual.values.shape == (STEPS * BATCH, 32, 8) and not (tmp_path / "logits.partial").exists()


def test_largest_entries_equal_a_loop_of_transformers(gloo_pool, folders, data, tmp_path):
    place = store(gloo_pool, folders, data, tmp_path / "logits", 1, "--logits-save-top-k 5 --logits-save-dtype fp32")
    logged = records(gloo_pool, tmp_path / "run", 1, load_flags(folders, data, place))
    expected, _ = loop(folders, flags_of(folders, data), *SETTINGS["forward"], top_k=5)
    for record, losses in zip(logged, expected, strict=True):
        for loss in NAMES:
            assert record[loss] == pytest.approx(losses[loss], rel=2e-6), (record["iteration"], loss)


def test_validation_without_stored_entries_reports_the_language_model_loss(gloo_pool, folders, data, tmp_path):
    split = "--split 9,1,0 --train-iters 2 --eval-iters 1"
    place = store(gloo_pool, folders, data, tmp_path / "logits", 1, f"--logits-save-top-k 5 {split}")
    assert StoredLogits(place).values.dtype == torch.float16
    records(gloo_pool, tmp_path, 2, load_flags(folders, data, place, f"{split} --eval-interval 2 {PP2}"))
    valid = [record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "valid"]
    assert valid[0]["lm loss"] > 1 and "kd loss" not in valid[0]


STORED_PROBLEMS = {
    "--seed 7": "sample 0 has other tokens than were stored; use the data, --seed, --seq-length and loader",
    "--train-iters 20": "has 40 samples of 32 tokens, not sample 4[0-3] of 32; store more samples",
    "--logits-load-dir {tmp}": "holds no complete stored logits .*; write them with --logits-save-dir",
    "--logits-load-dir {damaged}": "holds no complete stored logits .values.bin has ",
    "--kd-loss reverse-kl": "--kd-loss reverse-kl: requires all entries of the teacher, not stored ones",
    "--use-varlen-dataset": "--use-varlen-dataset: is not supported with --logits-load-dir",
}


@pytest.mark.parametrize("flags", STORED_PROBLEMS)
def test_stored_values_that_do_not_fit_end_the_run_with_one_message(gloo_pool, folders, data, stored, tmp_path, flags):
    shutil.copytree(stored, tmp_path / "damaged")
    (tmp_path / "damaged" / "values.bin").write_bytes(b"1234")
    flags_text = flags.format(tmp=tmp_path, damaged=tmp_path / "damaged")
    ((code, text),) = gloo_pool.run(train_with_errors, 1, load_flags(folders, data, stored, flags_text))
    assert code == 2 and len(re.findall(STORED_PROBLEMS[flags], text)) == 1, text


def test_an_existing_folder_is_not_overwritten(gloo_pool, folders, data, stored, tmp_path):
    argv = [*RUN, *TEACHER, "--data-path", data, "--load-hf", str(folders[1]), "--logits-save-dir", str(stored)]
    results = gloo_pool.run(train_with_errors, 2, [*argv, "--logits-save-top-k", "4"])
    assert {code for code, _ in results} != {0} and StoredLogits(stored).values.shape[-1] == VOCAB_SIZE
    assert len([text for _, text in results if f"--logits-save-dir {stored}: it exists; choose another" in text]) == 1


# ---- wrong input


def tokenizer_of(folder, names):
    """Write a tokenizer of single characters; ``names``: token by id."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0])).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": names[-1]}))


def test_teacher_of_another_size_of_vocabulary_is_rejected(gloo_pool, folders, data, tmp_path):
    tiny_llama(tmp_path / "hf", VOCAB_SIZE + 3)
    flags = [*flags_of((folders[0], tmp_path / "hf"), data), "--save", str(tmp_path / "run")]
    results = gloo_pool.run(train_with_errors, 2, flags)
    assert {code for code, _ in results} == {2}
    (text,) = [text for _, text in results if "vocabulary" in text]
    assert f"{tmp_path / 'hf'}: has a vocabulary of 67, the student 64; --vocab-size pads a new student" in text
    assert not list((tmp_path / "run").glob("iter_*"))


def test_teacher_with_other_tokens_is_rejected(gloo_pool, folders, data, tmp_path):
    names = [chr(48 + index) for index in range(VOCAB_SIZE)]
    both = []
    for source, order in zip(folders, (names, [*names[:7], "é", *names[8:]])):
        shutil.copytree(source, tmp_path / source.parent.name)
        both.append(tmp_path / source.parent.name)
        tokenizer_of(both[-1], order)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(both[0])]
    ((code, text),) = gloo_pool.run(train_with_errors, 1, [*flags_of(both, data), *tokenizer])
    assert code == 2 and f"{both[1]}: its token 7 is 'é', the student's '7'; use a teacher" in text


def train_on_own_copy(rank, world_size, argv, folder, copy):
    """A task of the pool: the program, whose last rank reads ``copy`` in place of ``folder``."""
    return train_with_errors(rank, world_size, [copy if rank and word == folder else word for word in argv])


def changed_copy(folder, other, name):
    """Copy ``folder`` to ``other`` and flip a bit in the middle of its file ``name``."""
    shutil.copytree(folder, other)
    content = bytearray((other / name).read_bytes())
    content[len(content) // 2] ^= 1
    (other / name).write_bytes(content)
    return str(other)


@pytest.mark.parametrize("kind", ["student", "teacher", "stored"])
def test_ranks_with_other_weights_name_the_file(gloo_pool, folders, data, tmp_path, kind):
    argv, file = [*flags_of(folders, data), "--micro-batch-size", "1"], "model.safetensors"
    folder = folders[kind == "teacher"]
    if kind == "stored":
        folder, file = tmp_path / "stored", "values.bin"
        argv = [*argv[: argv.index("--export-kd-teacher-load")], "--micro-batch-size", "1"]
        save = [*argv, "--logits-save-dir", str(folder), "--logits-save-top-k", "4"]
        assert gloo_pool.run(train_with_errors, 1, save) == [(0, "")]
        argv += ["--logits-load-dir", str(folder)]
    copy = changed_copy(folder, tmp_path / "copy" / folder.name, file)
    results = gloo_pool.run(train_on_own_copy, 2, argv, str(folder), copy)
    assert [code for code, _ in results] == [2, 2]
    assert re.search(rf"{file}: rank 1 .* have different content; copy the same file to every host", results[0][1])
