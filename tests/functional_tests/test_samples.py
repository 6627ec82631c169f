"""--sample-prompts: texts of the model under training in every output, on the layouts in which it generates; the
training does not change."""

import re

import pytest

from megatron.console import run_tool
from megatron.training.observe.metrics import read_metrics
from tests.functional_tests.test_conversion import run
from tests.test_utils.tiny_tokenizers import byte_level_bpe

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32"
    " --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 5 --eval-iters 1 --eval-interval 3"
    " --num-workers 0 --log-interval 1 --mock-data --position-embedding-type rope --attention-dropout 0.1"
    " --hidden-dropout 0.1"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-load-balancing-type none"
    " --disable-bias-linear"
)
PROMPTS = ["Once upon", "<b>Night</b> &"]
SAMPLES = ["--sample-prompts", *PROMPTS, "--sample-tokens", "9"]


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_bpe(folder / "tokenizer.json", 400)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return [*RUN.split(), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


@pytest.fixture(scope="module")
def one_rank(gloo_pool, argv, tmp_path_factory):
    """The samples of one rank."""
    folder = tmp_path_factory.mktemp("one")
    assert gloo_pool.run(run, 1, [*argv, *SAMPLES, "--save", str(folder)]) == [(0, "")]
    return samples_in(folder)


def samples_in(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "sample"]


@pytest.mark.parametrize("layout", [
    "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", EXPERTS,
], ids=lambda flags: flags.split()[0])  # fmt: skip
def test_texts_do_not_change_the_training_or_with_the_layout(gloo_pool, argv, one_rank, tmp_path, layout):
    argv = [*argv, *layout.split()]
    for name, more in {"with": SAMPLES, "without": []}.items():
        result = gloo_pool.run(run, 2, [*argv, *more, "--save", str(tmp_path / name)])
        assert [code for code, _ in result] == [0, 0], result
    written, plain = ((tmp_path / name / "metrics.jsonl").read_bytes().splitlines() for name in ("with", "without"))
    assert [line for line in written if b'"kind": "sample"' not in line] == plain
    result = samples_in(tmp_path / "with")
    assert [(x["iteration"], x["number"], x.get("final", False)) for x in result] == [
        (3, 1, False), (3, 2, False), (5, 1, True), (5, 2, True)
    ]  # fmt: skip
    assert layout == EXPERTS or result == one_rank


def test_texts_are_those_of_the_checkpoint_and_appear_in_every_output(gloo_pool, argv, tmp_path, capfd):
    flags = ["--sample-interval", "2", "--sample-temperature", "0.7", "--seed", "7", "--save", str(tmp_path)]
    flags += ["--tensorboard-dir", str(tmp_path / "board"), "--save-interval", "4"]
    assert gloo_pool.run(run, 1, [*argv, *SAMPLES, *flags], False) == [(0, "")]
    result = samples_in(tmp_path)
    assert [x["iteration"] for x in result[::2]] == [2, 4, 5]
    assert [x.get("cut") for x in result] == [True] * 4 + [None, True]  # the fifth is a complete document
    assert [x["prompt"] for x in result[:2]] == PROMPTS and len({x["text"] for x in result}) > 2

    arguments = ["--load", str(tmp_path), "--ckpt-step", "4", "--max-new-tokens", "9", "--temperature", "0.7"]
    capfd.readouterr()
    for seed, sample in enumerate(result[2:4], 7):
        words = [*arguments, "--top-p", "0", "--seed", str(seed), "--prompt", sample["prompt"]]
        assert run_tool("generate", words) == 0
        assert sample["prompt"] + sample["text"] in capfd.readouterr().out

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    texts = events.Tensors("sample 2/text_summary")
    assert [text.step for text in texts] == [2, 4, 5]
    assert texts[0].tensor_proto.string_val[0].decode().startswith("    <b>Night</b> &")
    page = (tmp_path / "report.html").read_text()
    section = re.search('<section id="samples">.*?</section>', page, re.DOTALL)[0]
    assert "&lt;b&gt;Night&lt;/b&gt; &amp;" in section and "<b>Night" not in section
    assert section.count("<dt>iteration 4</dt>") == 2


def test_a_continued_run_writes_the_bytes_of_an_uninterrupted_one(gloo_pool, argv, tmp_path):
    files = []
    for name, parts in {"once": [[]], "twice": [["--exit-interval", "3"], []]}.items():
        folder = str(tmp_path / name)
        flags = ["--sample-interval", "3", "--save", folder, "--load", folder]
        for part in parts:
            assert gloo_pool.run(run, 1, [*argv, *SAMPLES, *flags, *part]) == [(0, "")]
        files.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert files[0] == files[1]


def test_unusable_prompts_and_layouts_end_the_start_with_one_message(gloo_pool, argv, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    long, context = "word " * 40, ["--context-parallel-size", "2"]
    wrong = [
        (["--sample-prompts", f"@{tmp_path}/missing"], "missing: cannot be read (No such file or directory)"),
        (["--sample-prompts", f"@{tmp_path}/empty"], "the file has no prompt"),
        (["--sample-prompts", long], "leaves no room for text in --seq-length 32"),
        (["--sample-prompts", "1 2", "--tokenizer-type", "NullTokenizer", "--vocab-size", "2"], "outside --vocab-size"),
        (["--sample-interval", "2"], "requires --sample-prompts"),
        ([*SAMPLES, *context], "--sample-prompts Once upon <b>Night</b> &: is not supported with"),
    ]
    for flags, message in wrong:
        result = gloo_pool.run(run, 2, [*argv, *flags])
        assert [code for code, _ in result] == [2, 2]
        assert sum(message in errors for _, errors in result) == 1, result
