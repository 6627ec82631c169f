"""From flags to data sets: splits, blends, several validation sets, and rejected settings."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import EmptySplitError
from megatron.core.datasets.utils import Split, compile_helpers, get_blend_from_list
from megatron.data.index_format import IndexedDatasetError
from megatron.data.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[4]
SIZES = [200, 50, 30]  # documents of each source


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Three sources; every token of source i is in [100 i, 100 i + 99]."""
    folder, paths = tmp_path_factory.mktemp("blend"), []
    for number, count in enumerate(SIZES):
        generator = np.random.default_rng(number)
        lengths = generator.integers(1, 30, count)
        prefix = str(folder / f"source{number}")
        with IndexedDatasetBuilder(prefix + ".bin", np.uint16) as builder:
            builder.add_documents(100 * number + generator.integers(0, 100, lengths.sum()), lengths)
            builder.finalize(prefix + ".idx")
        paths.append(prefix)
    return paths


def build(sizes, **options):
    options = {"random_seed": 7, "sequence_length": 8, "tokenizer": SimpleNamespace(eod=0, vocab_size=300)} | options
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, GPTDatasetConfig(**options)).build()


def sources_of(data):
    return [int(data[i]["tokens"][0]) // 100 for i in range(len(data))]


def test_one_source_is_split_by_documents(prefixes):
    train, valid, test = build([10, 5, 2], blend=([prefixes[0]], None), split="8,1,1")
    assert [data.indices.tolist() for data in (train, valid, test)] == [
        list(range(160)),
        list(range(160, 180)),
        list(range(180, 200)),
    ]
    assert type(train) is GPTDataset and len(train) >= 10 and test.index_split is Split.test


def test_weights_decide_the_blend_and_each_sample_is_the_sources_next(prefixes):
    train, valid, test = build([300, 20, 0], blend=(prefixes, [1.0, 2.0, 5.0]), split="9,1,0")
    assert isinstance(train, BlendedDataset) and test is None
    drawn = sources_of(train)
    assert len(drawn) == 38 + 75 + 188  # each share rounded up
    for prefix in range(1, len(drawn)):
        for source, weight in enumerate((1 / 8, 2 / 8, 5 / 8)):
            assert abs(drawn[:prefix].count(source) - prefix * weight) <= 2
    selected = [0, 0, 0]
    for number, source in enumerate(drawn):
        sample = train[number]
        assert sample["dataset_id"] == source
        assert sample["tokens"].tobytes() == train.datasets[source][selected[source]]["tokens"].tobytes()
        selected[source] += 1
    assert {source.index_split for source in valid.datasets} == {Split.valid}


def test_a_weighted_blend_prepares_the_surplus_of_each_source(prefixes):
    train = build([1000, 0, 0], blend=(prefixes, [1.0, 1.0, 2.0]), split="1,0,0")[0]
    assert [source.num_samples for source in train.datasets] == [252, 252, 503]  # ceil(ceil(size * weight) * 1.005)


def test_without_weights_each_source_is_read_once(prefixes, caplog):
    train, _, _ = build([None, 0, 0], blend=(prefixes, None), split="1,0,0")
    assert len(train) == sum(len(source) for source in train.datasets)
    assert np.bincount(train.dataset_index).tolist() == [len(source) for source in train.datasets]
    short, _, _ = build([20, 0, 0], blend=(prefixes, None), split="1,0,0")
    assert len(short) == 20
    capped, _, _ = build([10**6, 0, 0], blend=(prefixes, None), split="1,0,0")
    assert len(capped) == len(train) and "1000000 samples asked for" in caplog.text


def test_splits_from_separate_sources(prefixes):
    blends = [get_blend_from_list(["1", prefixes[0], "3", prefixes[1]]), get_blend_from_list([prefixes[2]]), None]
    train, valid, test = build([100, 9, 5], blend_per_split=blends)
    assert sources_of(train).count(1) == 75 and set(sources_of(valid)) == {2} and test is None
    assert len(valid.indices) == SIZES[2] and valid.index_split is Split.valid


def test_several_validation_sets_stay_apart(prefixes):
    blends = [([prefixes[0]], None), (prefixes[1:], None), None]
    options = {"multiple_validation_sets": True, "full_validation": True}
    _, valid, _ = build([10, None, 0], blend_per_split=blends, **options)
    assert [set(sources_of(data)) for data in valid] == [{1}, {2}]
    assert all(data.num_epochs == 1 for data in valid)


def test_a_full_pass_of_weighted_sources_is_rejected(prefixes):
    with pytest.raises(ValueError, match="--full-validation"):
        build([10, None, 10], blend=(prefixes, [1.0, 1.0, 1.0]), split="8,1,1")


def test_samples_of_an_empty_split_are_rejected_in_one_line(prefixes):
    with pytest.raises(
        EmptySplitError, match=r"4 samples of valid asked of .*source2.* 0 documents.*--split \(now 989,1,10\)"
    ) as error:
        build([10, 4, 10], blend=([prefixes[2]], None), split="989,1,10")
    assert "\n" not in str(error.value)
    assert build([10, 0, 0], blend=([prefixes[2]], None), split="989,1,10")[1] is None


@pytest.mark.parametrize("weights", [None, [0.5, 0.5]])
@pytest.mark.parametrize("count", [1, 2])
def test_a_test_that_nobody_asked_for_is_left_out_with_one_line(prefixes, caplog, count, weights):
    """--eval-iters counts for both evaluations, and the default share of the test is 1 in 1000."""
    paths = prefixes[1:] if count == 2 else [prefixes[2]]
    blend = (paths, weights if count == 2 else None)
    train, valid, test = build([10, 10, 4], blend=blend, split="949,50,1")
    assert train is not None and valid is not None and test is None
    [line] = [message for message in caplog.messages if "no test evaluation" in message]
    assert "--split" in line and any(path in line for path in paths)


def test_named_test_data_without_a_sample_is_rejected(prefixes):
    blends = [([prefixes[0]], None), None, ([prefixes[2]], None)]
    with pytest.raises(EmptySplitError, match="of test asked of"):
        build([10, 0, None], blend_per_split=blends, sequence_length=5000)


@pytest.mark.parametrize("weights", [None, [0.5, 0.5]])
def test_shortages_of_all_splits_and_sources_are_reported_at_once(prefixes, weights):
    blends = [([prefixes[0], "none"], weights), ([prefixes[1], "missing"], weights), ([prefixes[0], "none"], weights)]
    with pytest.raises(IndexedDatasetError) as caught:
        build([10, 10, 10], blend_per_split=blends)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["no data set at none",
                                                                             "no data set at missing"]  # fmt: skip


def test_a_split_without_a_share_gives_no_data_and_says_so(prefixes, caplog):
    train, valid, test = build([10, 10, 10], blend=([prefixes[0]], None), split="100,0,0")
    assert train is not None and valid is None and test is None
    assert "no valid data: --split" in caplog.text and "no test data: --split" in caplog.text


def test_sources_without_a_sample_are_left_out_of_a_pass(prefixes, caplog):
    _, valid, _ = build([0, None, 0], blend=(prefixes, None), split="99,1,0")
    assert len(valid.datasets) == 1 and "left out of the valid blend" in caplog.text
    with pytest.raises(EmptySplitError, match="none of"):
        build([0, None, 0], blend=(prefixes[1:], None), split="999999,1,0")


def test_an_exhausted_source_is_rejected_by_flag(prefixes):
    datasets = build([None, 0, 0], blend=(prefixes, None), split="1,0,0")[0].datasets
    config = datasets[0].config
    with pytest.raises(
        ValueError, match=r"takes 250 samples of .*source1, which provides .*--mid-level-dataset-surplus"
    ):
        BlendedDataset(datasets, [0.25, 0.25, 0.5], 1000, config)


@pytest.mark.parametrize("weights", [[1e-6, 1.0, 1.0], [1.0, 1e-6, 1e-6]])
def test_extreme_weights_build(prefixes, weights):
    train = build([2000, 0, 0], blend=(prefixes, weights), split="1,0,0")[0]
    share = np.bincount(train.dataset_index, minlength=3) / len(train)
    np.testing.assert_allclose(share, np.array(weights) / sum(weights), atol=2 / 2000)


def test_builder_threads_do_not_change_the_data(prefixes):
    one = build([100, 0, 0], blend=(prefixes, [1.0, 2.0, 3.0]), split="1,0,0")[0]
    four = build([100, 0, 0], blend=(prefixes, [1.0, 2.0, 3.0]), split="1,0,0", num_dataset_builder_threads=4)[0]
    assert sources_of(one) == sources_of(four)
    assert all(one[i]["tokens"].tobytes() == four[i]["tokens"].tobytes() for i in range(len(one)))


def test_blend_indices_are_cached_by_their_known_names(prefixes, tmp_path):
    options = {"blend": (prefixes, [1.0, 2.0, 3.0]), "split": "1,0,0", "path_to_cache": str(tmp_path)}
    first, second = build([100, 0, 0], **options)[0], build([100, 0, 0], **options)[0]
    names = {path.name.split("-", 1)[1] for path in tmp_path.iterdir()}
    ends = ["description.txt", "dataset_index.npy", "dataset_sample_index.npy"]
    assert {f"BlendedDataset-train-{end}" for end in ends} <= names
    assert first.dataset_index.tobytes() == second.dataset_index.tobytes()
    assert second.dataset_index.dtype == np.int16 and second.dataset_sample_index.dtype == np.int64


def test_blends_of_other_weights_do_not_share_a_cache(prefixes, tmp_path):
    for weights in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]):
        options = {"blend": (prefixes, weights), "split": "1,0,0", "path_to_cache": str(tmp_path)}
        blend = build([120, 0, 0], **options)[0]
        assert np.bincount(blend.dataset_index).tolist() == [20 * weight for weight in weights]


def test_epochs_of_each_source_are_logged(prefixes, caplog):
    with caplog.at_level(logging.INFO):
        build([400, 0, 0], blend=(prefixes, [1.0, 1.0, 2.0]), split="1,0,0")
    assert "source2 gives 200 of 400 samples (weight 0.500000)" in caplog.text and "epochs" in caplog.text
    assert "30 documents" in caplog.text


def test_many_sources_are_summed_up_in_the_log(prefixes, caplog):
    with caplog.at_level(logging.INFO):
        build([400, 40, 0], blend=(prefixes * 20, None), split="99,1,0")
    train, left_out, valid = [record.getMessage() for record in caplog.records]
    assert train.startswith("train blend: 60 sources give 400 samples") and "epochs of each" in train
    assert left_out.startswith("40 of 60 sources left out of the valid blend: ")
    assert valid.startswith("valid blend: 20 sources give 40 samples")


def test_a_process_that_needs_no_data_opens_nothing():
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=(["nowhere"], None), split="1,0,0")
    assert BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: False, config).build() == [None] * 3


def test_wrong_configurations_are_rejected():
    base = {"random_seed": 1, "sequence_length": 8}
    for options, reason in (
        ({"blend": (["a"], None), "blend_per_split": [(["a"], None), None, None]}, "one source"),
        ({"split": "1,0,0", "blend_per_split": [(["a"], None), None, None]}, "--split"),
        ({"blend_per_split": [(["a"], None)]}, "one for each"),
        ({"blend": (["a", "b"], [1.0])}, "1 weights for 2 prefixes"),
        ({"blend": (["a"], [0.0])}, "above zero"),
        ({"blend": ([], None)}, "without prefixes"),
        ({"sequence_length": 0}, "--seq-length"),
    ):
        with pytest.raises(ValueError, match=reason):
            GPTDatasetConfig(**(base | options))


def test_a_missing_split_is_the_default_with_a_warning(caplog):
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=(["a"], None))
    assert config.split == "969, 30, 1" and "no --split given" in caplog.text
    assert GPTDatasetConfig(random_seed=1, sequence_length=8).mock


def test_data_sets_import_without_torch():
    program = (
        "import sys; from megatron.core.datasets import gpt_dataset, blended_megatron_dataset_builder;"
        "import json; print(json.dumps('torch' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(result.stdout) is False


def test_compile_helpers_only_reports(caplog):
    with caplog.at_level(logging.INFO):
        assert compile_helpers() is None
    assert "index builders" in caplog.text
