"""Complete runs with multi-token prediction: they resume, on the same layout and on another one."""

import numpy as np
import pytest

from tests.test_utils.gpt_runs import losses, read_records, train, write_dataset

FLAGS = ["--mtp-num-layers", "2", "--log-interval", "1"]
PP2 = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "numbers")
    return ["--data-path", str(dataset), "--split", "80,10,10", *FLAGS]


def test_a_run_resumes_bit_for_bit_and_on_another_layout(gloo_pool, data, tmp_path):
    """The copy of the embedding on the last stage is in no checkpoint, and filled from it."""
    folders = {name: tmp_path / name for name in ("whole", "parts", "elsewhere")}

    def run(ranks, name, *more):
        codes = gloo_pool.run(train, ranks, [*data, "--save", str(folders[name]), *more], True)
        assert codes == [0] * ranks

    run(2, "whole", *PP2)
    run(2, "parts", *PP2, "--exit-interval", "4")
    run(1, "elsewhere", "--num-layers", "4", "--load", str(folders["parts"]))
    run(2, "parts", *PP2, "--load", str(folders["parts"]))
    assert (folders["whole"] / "metrics.jsonl").read_bytes() == (folders["parts"] / "metrics.jsonl").read_bytes()
    np.testing.assert_allclose(losses(folders["elsewhere"]), losses(folders["whole"])[4:], rtol=1e-9)
    later = [[item[name] for name in ("lm loss", "mtp_1 loss", "mtp_2 loss")]
             for item in read_records(folders["whole"] / "metrics.jsonl") if item["kind"] == "train"]  # fmt: skip
    assert np.all(np.array(later[-1]) < np.array(later[0]))  # every depth learns


def test_a_checkpoint_without_depths_is_rejected(gloo_pool, data, tmp_path):
    plain = [item for item in data if item not in FLAGS[:2]]
    assert gloo_pool.run(train, 1, [*plain, "--save", str(tmp_path)]) == [0]
    assert gloo_pool.run(train, 1, [*data, "--load", str(tmp_path), "--save", str(tmp_path / "other")]) != [0]
