"""A model family outside of ``megatron`` trains, and every tool that reads a description or a checkpoint knows it."""

import pickle

import pytest

from megatron.console import run_tool
from megatron.core.config.cli import ConfigError
from megatron.core.config.errors import UserError
from megatron.core.models.registry import find_program, get_family
from megatron.tools import verify_layout
from megatron.training import entry
from megatron.training.arguments import parse_args, validate_args
from megatron.training.report.dry_run import dry_run_report
from megatron.training.report.memory import estimate_memory
from tests.test_utils.gpt_runs import read_records
from tests.test_utils.layouts import FEW_STEPS, VOCAB_SIZE, Layout, Matrix
from tests.test_utils.toy_family.family import NumbersConfig

FAMILY = "tests.test_utils.toy_family.family"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --mock-data"
    " --vocab-size 16 --micro-batch-size 8 --global-batch-size 16 --train-iters 40 --lr 1e-2 --eval-iters 0"
    " --num-workers 0 --log-interval 10 --split 1,0,0 --attention-dropout 0 --hidden-dropout 0"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


def program(rank, world_size, argv):
    return entry.pretrain(FAMILY, "pretrain_numbers.py", argv)


def settings(text="", world_size=1):
    defaults = {"tokenizer_type": "NullTokenizer"}
    return validate_args(parse_args(f"{FLAGS} {text}".split(), args_defaults=defaults, model_family=FAMILY), world_size)


def losses(folder):
    return [item["lm loss"] for item in read_records(folder / "metrics.jsonl") if item["kind"] == "train"]


def run(pool, folder, *flags, ranks=1):
    argv = [*FLAGS.split(), "--save", str(folder), *map(str, flags)]
    assert pool.run(program, ranks, argv) == [0] * ranks
    return losses(folder)


def test_training_learns_resumes_bit_for_bit_and_answers(gloo_pool, tmp_path, capsys):
    result = run(gloo_pool, tmp_path / "whole")
    assert result[0] > 2 and result[-1] < 0.5  # 0.69 without the numbers
    parts = tmp_path / "parts"
    run(gloo_pool, parts, "--exit-interval", 20, "--save-interval", 20)
    run(gloo_pool, parts, "--load", parts)
    assert (parts / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    for number, answer in ((1, "1"), (-1, "0")):
        assert run_tool("generate", ["--load", str(parts), "--family", FAMILY, "--prompt", str(number)]) == 0
        assert capsys.readouterr().out.strip() == answer


def test_a_checkpoint_loads_on_another_layout_and_keeps_its_sizes(gloo_pool, tmp_path):
    first = run(gloo_pool, tmp_path, "--train-iters", 4, "--numbers-hidden-size", 8, "--lr-decay-iters", 40)
    load = "--load", tmp_path, "--use-checkpoint-args", "--train-iters", 6, "--lr-decay-iters", 40
    result = run(gloo_pool, tmp_path, *load, *f"{TP2} --sequence-parallel {PP2}".split(), ranks=4)
    assert result[:4] == first and result[-1] < result[0]


def test_other_families_and_sizes_are_rejected(gloo_pool, tmp_path, capfd):
    run(gloo_pool, tmp_path, "--train-iters", 1)
    argv = [*FLAGS.split(), "--load", str(tmp_path), "--numbers-num-layers", "3"]
    with pytest.raises(SystemExit):
        entry.pretrain(FAMILY, "pretrain_numbers.py", argv)
    assert "numbers_num_layers is 3, the checkpoint has 2" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        entry.pretrain("gpt", "pretrain_gpt.py", [*FLAGS.split(), "--load", str(tmp_path), "--tokenizer-type",
                                                  "NullTokenizer"])  # fmt: skip
    assert f"holds a model of the family '{FAMILY}' (trained by pretrain_numbers.py)" in capfd.readouterr().err


def test_the_description_equals_the_built_model():
    from megatron.training.tasks.language_model import task_class
    from megatron.training.verify.layout_trace import with_synthetic_data

    cfg = settings()
    task = with_synthetic_data(task_class(FAMILY), VOCAB_SIZE)(cfg)
    described = cfg.describe(VOCAB_SIZE)
    built = {name: tuple(param.spec.shape) for name, param in task.model_provider().named_parameters()}
    assert built == {param.name: param.shape for param in described.params() if not param.tied_to}
    encoder = [param for param in described.params() if param.name.startswith("numbers")]
    assert sum(param.numel for param in encoder) == 48 + 2 * 3_280 + 32 + 512


def test_the_dry_run_counts_both_transformers():
    cfg, larger = settings(f"{TP2} {PP2}", 4), settings(f"{TP2} {PP2} --numbers-num-layers 3", 4)
    report = dry_run_report(cfg)
    assert f"{cfg.describe(16).num_parameters:,}, of which" in report and "FLOPs per token" in report
    assert larger.describe(16).flops_per_sample > cfg.describe(16).flops_per_sample
    ranks = [estimate_memory(item, 16) for item in (cfg, larger)]
    assert ranks[1][0].weights > ranks[0][0].weights and ranks[1][-1].weights == ranks[0][-1].weights


def test_flags_rules_and_settings_belong_to_the_family():
    with pytest.raises(ConfigError, match="--context-parallel-size 2: is not supported by the encoder of numbers"):
        settings("--context-parallel-size 2", 2)
    with pytest.raises(ConfigError, match="--num-experts 8: is supported only by pretrain_gpt.py, pretrain_moe.py, "):
        settings("--num-experts 8")
    with pytest.raises(ConfigError, match="--numbers-count"):
        parse_args(["--numbers-count", "4"])
    cfg = settings("--numbers-count 5")
    assert pickle.loads(pickle.dumps(cfg)) == cfg and cfg.flat.numbers_count == 5
    other = cfg.with_settings(numbers_count=6)
    assert other.group(NumbersConfig).numbers_count == other.flat.values()["numbers_count"] == 6 and other != cfg
    sizes = {name: config.hidden_size for name, config in cfg.family.transformers(cfg).items()}
    assert sizes == {"numbers": 16, "decoder": 32}


def test_families_are_found_by_module():
    assert find_program(FAMILY) == (get_family(FAMILY), get_family(FAMILY).programs[0])
    for name in ("no.such.module", "tests.test_utils.layouts"):
        with pytest.raises(UserError, match=f"{name}: .*name a module that defines FAMILY"):
            get_family(name)


@pytest.fixture(scope="module")
def matrix(gloo_pool):
    result = Matrix(gloo_pool)
    yield result
    result.close()


DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
ROWS = [
    ("--use-distributed-optimizer --overlap-grad-reduce --micro-batch-size 2", 2),
    (f"{TP2} --micro-batch-size 4", 2),
    (f"{TP2} --sequence-parallel {PP2} --micro-batch-size 2", 4),
    ("--use-torch-fsdp2 --micro-batch-size 4", 2),
]


@pytest.mark.parametrize("layout, ranks", ROWS)
def test_every_layout_equals_one_rank(matrix, layout, ranks):
    verdict = matrix.verdict(Layout(DROPOUT, layout, ranks, steps=FEW_STEPS, family=FAMILY))
    assert verdict.equal, verdict.first


def test_verify_layout_knows_it(capsys):
    flags = f"{FLAGS} {TP2} --steps 2 --program {FAMILY}".split()
    assert verify_layout.main(flags) == 0
    assert "\nequal: " in capsys.readouterr().out
