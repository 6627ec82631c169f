"""Families of Hugging Face models in whole runs: from folders as the hub has them, on one rank and on two."""

import json

import pytest
import torch

from tests.functional_tests.test_conversion import RUN, run
from tests.test_utils.foreign_models import MIXTURES, MODELS, VOCAB, build
from tests.test_utils.foreign_variants import VARIANTS
from tests.test_utils.gpt_runs import losses

transformers = pytest.importorskip("transformers", reason="pip install transformers: it makes the folders")

from safetensors.torch import load_file  # noqa: E402

from megatron.export.hf import load_hf, save_hf  # noqa: E402
from megatron.tools.checkpoint import convert  # noqa: E402

EVERY = {**MODELS, **MIXTURES, **VARIANTS}
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
EXPERT = ["--expert-model-parallel-size", "2"]
LAYOUTS = {
    "arcee-biases": TENSOR, "deepseek-v2-groups": EXPERT, "ernie4.5-biases": TENSOR, "glm-without-biases": PIPELINE,
    "glm4-yarn": TENSOR, "glm4-moe-normed-queries-groups": EXPERT, "gpt-bigcode": PIPELINE,
    "granite": PIPELINE, "nemotron-biases": TENSOR,
    "olmo3": PIPELINE, "seed-oss": TENSOR, "smollm3": PIPELINE, "stablelm": TENSOR, "starcoder2": TENSOR,
}  # fmt: skip


def as_on_the_hub(name, folder):
    """A folder of several files in bf16, with an index and settings of generation."""
    model = build(EVERY[name]).bfloat16()
    model.generation_config = transformers.GenerationConfig(temperature=0.6, do_sample=True, top_p=0.9)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists() and (folder / "generation_config.json").exists()
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_hub_folder_trains_on_two_ranks_as_on_one_and_is_exported(gloo_pool, name, tmp_path):
    folder = as_on_the_hub(name, tmp_path / "hub")
    argv = [*RUN[:-3], "--mock-data", "--load-hf", str(folder), "--save-hf-interval", "2", "--save-interval", "2"]
    argv += ["--log-interval", "1", "--train-iters", "2", "--hidden-dropout", "0", "--attention-dropout", "0"]
    for layout, more in (("one", []), ("two", LAYOUTS[name])):
        for code, errors in gloo_pool.run(run, 1 + bool(more), [*argv, *more, "--save", str(tmp_path / layout)]):
            assert code == 0, errors
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    one, two = (tmp_path / item / "hf" / "iter_0000002" for item in ("one", "two"))
    actual, expected = (load_hf(item).tensors for item in (two, one))
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key].read(), value.read(), rtol=1e-7, atol=1e-9)
    before, after = (json.loads((item / "config.json").read_text()) for item in (folder, two))
    assert (after["model_type"], after["architectures"]) == (before["model_type"], before["architectures"])
    assert before["vocab_size"] == after["vocab_size"] == VOCAB
    reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(two, output_loading_info=True)
    assert not any(report.values()), report


def kimi_k2(folder):
    """A folder as Kimi publishes it: DeepSeek-V3 under another name, with code files that nothing here runs."""
    build(EVERY["deepseek-v3"]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text("raise SystemExit")
    return folder


def test_kimi_k2_computes_as_deepseek_v3_and_keeps_its_name(tmp_path, capsys):
    folder = kimi_k2(tmp_path / "hub")
    places = ["--load-dir", str(folder), "--save-dir", str(tmp_path / "native")]
    assert convert.main(["--loader", "hf", "--saver", "native", *places]) == 0
    assert "in fp32: equal" in capsys.readouterr().err
    save_hf(load_hf(folder), tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["model_type"] == "kimi_k2"
    save_hf(load_hf(folder), tmp_path / "renamed", family="deepseek_v3")
    first, *remaining = (load_file(tmp_path / item / "model.safetensors") for item in ("hub", "kept", "renamed"))
    for other in remaining:
        assert first.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in first.items())
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "renamed", output_loading_info=True)
    assert not any(report.values()), report
