"""A flag that needs another one says so in one notice or error, and is silent with it."""

import pytest

from megatron.core.config.cli import flags_of
from megatron.training.arguments import parse_args
from megatron.training.config.flat import FlatConfig
from megatron.training.config.resolve import resolve
from megatron.training.notices import NEEDS, notices
from megatron.training.rules.run_all import check

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --lr 1e-3 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 100 --mock-data"
)
PAIRS = {
    "--save-interval 2": ["--save x"],
    "--save-retain-interval 2": ["--save x"],
    "--keep-last-checkpoints 2": ["--save x"],
    "--save-hf-interval 2": ["--save x --save-interval 2"],
    "--non-persistent-save-interval 2": ["--save x"],
    "--async-save": ["--save x"],
    "--max-failed-saves 5": ["--save x"],
    "--no-save-optim": ["--save x"],
    "--no-save-rng": ["--save x"],
    "--log-progress": ["--save x"],
    "--start-over": ["--save x"],
    "--async-save-staging-gb 2": ["--save x --async-save"],
    "--non-persistent-global-ckpt-dir y": ["--save x --non-persistent-save-interval 2", "--load x"],
    "--non-persistent-local-ckpt-dir y": ["--save x --non-persistent-save-interval 2", "--load x"],
    "--ckpt-step 2": ["--load x"],
    "--exit-on-missing-checkpoint": ["--load /"],
    "--finetune": ["--load x"],
    "--no-load-optim": ["--load x"],
    "--no-load-rng": ["--load x"],
    "--override-opt_param-scheduler": ["--load x"],
    "--use-checkpoint-opt_param-scheduler": ["--load x"],
    "--tensorboard-log-interval 2": ["--tensorboard-dir x", "--wandb-project x"],
    "--tensorboard-queue-size 2": ["--tensorboard-dir x"],
    "--log-timers-to-tensorboard": ["--tensorboard-dir x", "--wandb-project x"],
    "--no-log-loss-scale-to-tensorboard": ["--tensorboard-dir x", "--wandb-project x"],
    "--log-validation-ppl-to-tensorboard": ["--tensorboard-dir x", "--wandb-project x"],
    "--log-memory-to-tensorboard": ["--tensorboard-dir x", "--wandb-project x"],
    "--log-world-size-to-tensorboard": ["--tensorboard-dir x", "--wandb-project x"],
    "--wandb-exp-name x": ["--wandb-project x"],
    "--wandb-save-dir x": ["--wandb-project x"],
    "--wandb-entity x": ["--wandb-project x"],
    "--profile-step-start 3": ["--profile"],
    "--profile-step-end 30": ["--profile"],
    "--use-pytorch-profiler": ["--profile"],
    "--profile-ranks 0": ["--profile", "--record-memory-history"],
    "--memory-snapshot-path x": ["--record-memory-history"],
    "--manual-gc-interval 3": ["--manual-gc"],
    "--eval-interval 2 --eval-iters 0": ["--full-validation"],
    "--eval-tasks-interval 2": [],
    "--eval-tasks-limit 2": [],
    "--eval-tasks-path /": [],
    "--sample-interval 2": ["--sample-prompts x"],
}
"""Flag -> further flags with which it has an effect."""


def messages(text):
    """Notices and problems that name the first flag of ``text``."""
    inputs = parse_args(f"{RUN} {text}".split())
    resolved = resolve(inputs, 1)
    flag = text.split()[0]
    lines = [*notices(inputs, resolved), *map(str, check(resolved))]
    return [
        line for line in lines if line.startswith(flag) and ("no effect" in line or "need" in line or "requ" in line)
    ]


@pytest.mark.parametrize("flag", PAIRS)
def test_a_flag_that_needs_another_has_one_message(flag):
    (message,) = messages(flag)
    needed = {word for words in PAIRS[flag] for word in words.split() if word.startswith("--")}
    assert not needed or any(word in message for word in needed), message
    for words in PAIRS[flag]:
        assert messages(f"{flag} {words}") == []


def test_the_table_has_every_pair():
    names = {spec.field: spec.names[0] for spec in flags_of(FlatConfig)}
    assert {names[field] for field in NEEDS} <= {flag.split()[0] for flag in PAIRS}
