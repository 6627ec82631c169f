"""Families of encoders of Hugging Face's, both ways, against the package ``transformers`` itself.

As ``test_hf_families.py`` does for decoders: a tiny random model is saved there, read by ``load_hf``, built from
nothing but the settings of its ``config.json`` and compared in logits, loss and every gradient; written by ``save_hf``
it is the same bytes.
"""

import json
import re

import pytest
import torch

from tests.test_utils.foreign_comparison import assert_close
from tests.test_utils.foreign_masked_models import ANSWER, build, compare_losses, flags_of, random_arrays
from tests.test_utils.foreign_masked_models import CONVERTED as FAMILIES
from tests.test_utils.foreign_models import LENGTH, VOCAB
from tests.test_utils.hf_folders import as_on_the_hub, random_model, weights_in

transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")

from safetensors.torch import load_file, save_file  # noqa: E402

from megatron.core.config.errors import UserError  # noqa: E402
from megatron.core.models.t5.model import T5Model  # noqa: E402
from megatron.core.sharding.lazy_tensor import LazyTensor  # noqa: E402
from megatron.export.hf import load_hf, save_hf  # noqa: E402
from megatron.tools.checkpoint import convert, verify  # noqa: E402

ENCODERS = ["bert", "megatron-bert", "modern-bert", "distilbert"]
CONVERTED = list(FAMILIES)


def our_model(settings):
    """Return the model of a command line with only these settings."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.tasks.language_model import task_class

    kind = settings["model_family"]
    line = f"--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1 --seq-length {LENGTH}"
    line += f" --decoder-seq-length {ANSWER}" if kind == "t5" else ""
    cfg = parse_args(line.split(), needs_data=False, model_family=kind).with_settings(**settings)

    class WithoutTokenizer(task_class(kind)):
        vocab_size = settings["vocab_size"]

    return WithoutTokenizer(validate_args(cfg, 1)).model_provider().eval()


def fill(native, interchange):
    """Load as a checkpoint would be: every tensor of the model, by its global name and shape."""
    from megatron.core import parallel_state
    from megatron.core.sharding.sharded_tensor import module_tensors

    stored = module_tensors(native, groups=parallel_state.get_process_groups(), prefix="model.")
    assert {item.name for item in stored.values()} == set(interchange.tensors)
    for tensor in stored.values():
        assert tensor.global_shape == interchange.tensors[tensor.name].shape
        with torch.no_grad():
            tensor.local.copy_(interchange.tensors[tensor.name].read())


@pytest.mark.parametrize("name", CONVERTED)
def test_logits_loss_and_gradients_of_a_loaded_folder_equal_those_of_transformers(name, tmp_path):
    foreign, arrays = build(FAMILIES[name]), random_arrays(FAMILIES[name])
    foreign.save_pretrained(tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    native = our_model(model.settings)
    fill(native, model)
    compare_losses(FAMILIES[name], native, foreign, arrays)
    # their gradients, saved as if they were weights, are read by the same tables
    with torch.no_grad():
        for parameter in foreign.parameters():
            parameter.copy_(parameter.grad)
    foreign.save_pretrained(tmp_path / "gradients")
    gradients = load_hf(tmp_path / "gradients").tensors
    for key, parameter in native.named_parameters():
        expected = gradients[f"model.{key}"].read()
        expected = expected.reshape(-1, *parameter.shape[1:])
        rows = torch.arange(len(expected))
        if key == "embedding.word_embeddings.weight":  # HF does not update the row of padding
            rows = rows[rows != FAMILIES[name].padding]
        assert_close(f"gradient of {key}", parameter.grad[rows], expected[rows])


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_round_trip_keeps_every_byte_and_transformers_loads_it(name, dtype, tmp_path):
    foreign = build(FAMILIES[name]).to(dtype)
    foreign.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (as_on_the_hub(tmp_path / "theirs") / "model.safetensors.index.json").is_file()
    save_hf(load_hf(tmp_path / "theirs"), tmp_path / "again")
    assert verify.main([str(tmp_path / "again"), *(["--decoder-seq-length", "8"] if FAMILIES[name].is_t5 else [])]) == 0
    before, after = (weights_in(tmp_path / item) for item in ("theirs", "again"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and value.shape == after[key].shape, key
        assert torch.equal(value.view(-1).view(torch.uint8), after[key].view(-1).view(torch.uint8)), key
    repeated, report = type(foreign).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
    pairs = {key: (value, repeated.config.to_dict().get(key)) for key, value in foreign.config.to_dict().items()}
    assert not {key: pair for key, pair in pairs.items() if pair[0] not in (None, pair[1]) and key != "_name_or_path"}
    tokens = random_arrays(FAMILIES[name])["tokens"]
    models = (repeated, type(foreign).from_pretrained(tmp_path / "theirs"))
    more = {"decoder_input_ids": tokens} if FAMILIES[name].is_t5 else {}
    actual, expected = (model.eval()(input_ids=tokens, **more).to_tuple()[0] for model in models)
    assert torch.equal(actual, expected)


def test_files_of_the_published_bert_have_older_names_and_copies(tmp_path):
    build(FAMILIES["bert"]).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    today = {key: value.read().clone() for key, value in load_hf(tmp_path / "theirs").tensors.items()}
    retained = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in load_file(file).items()}  # fmt: skip
    retained["cls.predictions.decoder.weight"] = retained["bert.embeddings.word_embeddings.weight"].clone()
    retained["cls.predictions.decoder.bias"] = retained["cls.predictions.bias"].clone()
    retained["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(retained, file, {"format": "pt"})
    older = load_hf(tmp_path / "theirs")
    assert older.tensors.keys() == today.keys()
    assert all(torch.equal(older.tensors[key].read(), value) for key, value in today.items())
    retained["cls.predictions.decoder.bias"] += 1
    save_file(retained, file, {"format": "pt"})
    with pytest.raises(UserError, match="cls.predictions.decoder.bias: differs from cls.predictions.bias"):
        load_hf(tmp_path / "theirs")


MLM = "cls.predictions.transform.dense.weight"
ORDER, POOLER = "cls.seq_relationship.weight", "bert.pooler.dense.weight"
WITHOUT_HEADS = [
    ("bert", "BertModel", {}, {MLM, ORDER}), ("bert", "BertModel", {"add_pooling_layer": False}, {MLM, ORDER, POOLER}),
    ("bert", "BertForMaskedLM", {}, {ORDER, POOLER}), ("bert", "BertForNextSentencePrediction", {}, {MLM}),
    ("megatron-bert", "MegatronBertModel", {}, {MLM, ORDER}),
    ("megatron-bert", "MegatronBertModel", {"add_pooling_layer": False}, {MLM, ORDER, POOLER}),
    ("megatron-bert", "MegatronBertForMaskedLM", {}, {ORDER, POOLER}),
    ("megatron-bert", "MegatronBertForNextSentencePrediction", {}, {MLM}),
    ("distilbert", "DistilBertModel", {}, {"vocab_transform.weight"}),
    ("modern-bert", "ModernBertModel", {}, {"head.dense.weight"}),
    ("roberta", "RobertaModel", {}, {"lm_head.dense.weight"}),
    ("xlm-roberta", "XLMRobertaModel", {"add_pooling_layer": False}, {"lm_head.dense.weight"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "architecture", "options", "absent"), WITHOUT_HEADS)
def test_an_encoder_without_heads_begins_with_random_ones(name, architecture, options, absent, tmp_path):
    kind = getattr(transformers, architecture)
    foreign = kind(build(FAMILIES[name]).config, **options).eval()
    foreign.save_pretrained(tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    if name != "modern-bert":  # published files hold these integers
        (base,) = (key.split("word_")[0] for key in weights if key.endswith(".word_embeddings.weight"))
        weights = {f"{base}position_ids": torch.arange(64)[None], **weights}
        save_file(weights, tmp_path / "theirs" / "model.safetensors")
    model = load_hf(tmp_path / "theirs")
    note = model.notes[-1]
    heads = {key for _, _, _, keys in WITHOUT_HEADS for key in keys}
    assert {key for key in heads if re.search(rf"(?<![\w.]){key}", note)} == absent
    dense = model.tensors["model.lm_head.dense.weight"].read()
    assert absent <= {ORDER, POOLER} or float(dense.std()) == pytest.approx(0.02, rel=0.1)
    save_hf(model, tmp_path / "again")
    repeated, report = getattr(transformers, FAMILIES[name].architecture).from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert not any(report.values()), report
    prefix = "" if hasattr(foreign, repeated.base_model_prefix) else f"{repeated.base_model_prefix}."
    written = repeated.state_dict()
    without_pooler = "roberta" in name  # the masked model lacks it
    for key, value in foreign.state_dict().items():
        assert (without_pooler and "pooler" in key) or torch.equal(value, written[prefix + key])
    native, arrays = our_model(model.settings), random_arrays(FAMILIES[name])
    fill(native, model)
    types = arrays["types"] if "model.embedding.tokentype_embeddings.weight" in model.tensors else None
    more = {} if types is None else {"token_type_ids": types}
    expected = repeated.eval()(input_ids=arrays["tokens"], attention_mask=arrays["real"].long(), **more).to_tuple()[0]
    actual = native(arrays["tokens"], arrays["real"], types)[0][..., :VOCAB]
    assert_close("logits", actual[arrays["real"]], expected[arrays["real"]])


def test_comparison_of_a_conversion_gives_both_models_the_heads_that_the_folder_lacks(tmp_path, capsys):
    transformers.BertModel(build(FAMILIES["bert"]).config).save_pretrained(tmp_path / "theirs")
    folders = ["--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "ours")]
    assert convert.main(["--loader", "hf", "--saver", "native", *folders]) == 0
    assert "logits against transformers, 64 tokens in fp32: equal" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "lost"), [
    ("bert", "bert.pooler.dense.bias"), ("bert", "cls.seq_relationship.weight"), ("bert", "cls.predictions.bias"),
    ("bert", "cls.predictions.transform.LayerNorm.weight"), ("distilbert", "vocab_layer_norm.bias"),
    ("modern-bert", "head.norm.weight"),
])  # fmt: skip
def test_a_head_with_some_of_its_tensors_is_damaged(name, lost, tmp_path):
    build(FAMILIES[name]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({key: value for key, value in weights.items() if key != lost}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{lost} is missing"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", ENCODERS)
def test_random_encoder_weights_round_trip(name, tmp_path):
    native = random_model(flags_of(FAMILIES[name]), VOCAB, model_family="bert")
    # a model without pairs of texts is BertForMaskedLM where nothing else is asked for
    save_hf(native, tmp_path / "theirs", family=name if name == "distilbert" else None)
    repeated = load_hf(tmp_path / "theirs")
    assert all(torch.equal(repeated.tensors[key].read(), value.read()) for key, value in native.tensors.items())
    assert not (tmp_path / "theirs" / "generation_config.json").exists()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[name].architecture]
    getattr(transformers, FAMILIES[name].architecture).from_pretrained(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["bert", "megatron-bert"])
def test_a_bert_trained_without_pairs_is_the_masked_model_there(name, tmp_path):
    flags = [*flags_of(FAMILIES[name]), "--bert-no-binary-head"]
    exported = random_model(flags, VOCAB, model_family="bert")
    save_hf(exported, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    masked = FAMILIES[name].architecture.replace("PreTraining", "MaskedLM")
    assert config["architectures"] == [masked] and config["type_vocab_size"] == 1
    foreign, report = getattr(transformers, masked).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values()), report
    repeated = load_hf(tmp_path / "theirs")
    assert repeated.tensors.keys() == exported.tensors.keys() and not repeated.settings["bert_binary_head"]
    assert all(torch.equal(repeated.tensors[key].read(), value.read()) for key, value in exported.tensors.items())
    native, arrays = our_model(repeated.settings), random_arrays(FAMILIES[name])
    fill(native, repeated)
    inputs = {"input_ids": arrays["tokens"], "attention_mask": arrays["real"].long()}
    logits = foreign.eval()(**inputs).logits
    result = native(arrays["tokens"], arrays["real"])[0][..., :VOCAB]
    assert_close("logits", result[arrays["real"]], logits[arrays["real"]])
    file = tmp_path / "theirs" / "model.safetensors"
    retained = load_file(file)
    retained["bert.embeddings.token_type_embeddings.weight"] += 1
    save_file(retained, file, {"format": "pt"})
    with pytest.raises(UserError, match="token_type_embeddings.weight: is not zero"):
        load_hf(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["t5-v1.1", "mt5", "mt5-relu"])
def test_a_t5_without_an_output_layer_in_its_files_begins_with_the_embedding(name, tmp_path):
    """``transformers`` 5 ties a fresh T5 1.1 or mT5, does not scale it, and writes no output layer."""
    kind = getattr(transformers, FAMILIES[name].architecture)
    settings = {**FAMILIES[name].settings, "vocab_size": VOCAB, "decoder_start_token_id": 0}
    kind(kind.config_class(**settings)).save_pretrained(tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    assert any("begins as a copy of shared.weight" in note for note in model.notes)
    words = model.tensors["model.embedding.word_embeddings.weight"].read()
    assert torch.equal(model.tensors["model.lm_head.output_layer.weight"].read(), words)
    save_hf(model, tmp_path / "again")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    model.tensors["model.lm_head.output_layer.weight"] = LazyTensor.of(words + 1)
    save_hf(model, tmp_path / "trained")
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(trained["lm_head.weight"], words + 1) and trained.keys() - before.keys() == {"lm_head.weight"}


def test_comparison_with_transformers_sees_swapped_inputs_of_encoder_and_decoder(tmp_path, monkeypatch):
    build(FAMILIES["t5"]).save_pretrained(tmp_path / "theirs")
    line = ["--loader", "hf", "--saver", "safetensors", "--load-dir", str(tmp_path / "theirs"), "--save-dir"]
    assert convert.main([*line, str(tmp_path / "right")]) == 0
    forward = T5Model.forward
    monkeypatch.setattr(T5Model, "forward", lambda model, first, second, mask: forward(model, second, first, mask))
    assert convert.main([*line, str(tmp_path / "swapped")]) == 1
    assert convert.main([*line, str(tmp_path / "swapped")]) == 1
    results = {path.name for path in tmp_path.iterdir()}  # a failed result does not stay under its name
    assert results == {"theirs", "right", "swapped.different", "swapped.different1"}


def test_a_t5_with_a_bias_after_its_shared_output_layer_has_no_family(tmp_path):
    flags = [item for item in flags_of(FAMILIES["t5"]) if item != "--scale-decoder-outputs"]
    with pytest.raises(UserError, match="t5: scale_decoder_outputs is False, a shared output layer is scaled"):
        save_hf(random_model(flags, VOCAB, model_family="t5"), tmp_path / "theirs")


def test_a_t5_trained_without_dropout_of_attention_is_exported(tmp_path):
    """HF has one dropout rate; here attention dropout is often 0 for the fast kernels. Weights depend on neither."""
    flags = [*flags_of(FAMILIES["t5-v1.1"]), "--attention-dropout", "0", "--hidden-dropout", "0.2"]
    save_hf(random_model(flags, VOCAB, model_family="t5"), tmp_path)
    assert transformers.T5Config.from_pretrained(tmp_path).dropout_rate == 0.2
