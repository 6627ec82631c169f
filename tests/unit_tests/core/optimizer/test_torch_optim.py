"""The optimizer against ``torch.optim``: a small language model, ten steps, settings as a command line gives them."""

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.schedules.learning_rate import get_optimizer_param_scheduler
from megatron.training.arguments import parse_args, validate_args

STEPS = 10
SIZES = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    " --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --lr-decay-style constant"
)
RUNS = {
    "adam": "--lr 0.01",
    "adam-rate": "--lr 0.05",
    "adam-betas": "--lr 0.01 --adam-beta1 0.7 --adam-beta2 0.9",
    "adam-first-beta-only": "--lr 0.01 --adam-beta1 0.0",
    "adam-eps": "--lr 0.01 --adam-eps 0.1",
    "adam-decay": "--lr 0.01 --weight-decay 0.7",
    "adam-without-decay": "--lr 0.01 --weight-decay 0",
    "adam-clipped": "--lr 0.01 --clip-grad 0.05 --adam-eps 0.01",
    "adam-below-the-norm": "--lr 0.01 --clip-grad 1000 --adam-eps 0.01",
    "adam-without-clipping": "--lr 0.01 --clip-grad 0 --adam-eps 0.01",
    "adam-decoupled-rate": "--lr 0.01 --decoupled-lr 0.002 --weight-decay 0.3",
    "sgd": "--optimizer sgd --lr 0.1",
    "sgd-momentum": "--optimizer sgd --lr 0.1 --sgd-momentum 0.5",
    "sgd-without-momentum": "--optimizer sgd --lr 0.1 --sgd-momentum 0",
    "sgd-decay": "--optimizer sgd --lr 0.1 --weight-decay 0.3",
    "sgd-clipped": "--optimizer sgd --lr 0.1 --clip-grad 0.05",
    "sgd-decoupled-rate": "--optimizer sgd --lr 0.1 --decoupled-lr 0.02",
}


class LanguageModel(nn.Module):
    """Embedding, layer with a norm and biases, output layer: one parameter of every kind that settings distinguish."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.word_embeddings = nn.Embedding(11, 6)
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.output_layer = nn.Linear(6, 11, bias=False)
        self.to(dtype)

    def forward(self, tokens):
        return self.output_layer(self.norm(self.layer(self.word_embeddings(tokens)).tanh()))


def loss_of(model, step):
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def torch_optimizer(settings, model):
    """Return the ``torch.optim`` equivalent of the flags: matrices decay, embedding and output have a separate rate."""
    groups = []
    for name, parameter in model.named_parameters():
        ends = name in ("word_embeddings.weight", "output_layer.weight")
        rate = settings.decoupled_lr if ends and settings.decoupled_lr is not None else settings.lr
        decay = settings.weight_decay * (parameter.dim() > 1)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.sgd_momentum)
    betas = settings.adam_beta1, settings.adam_beta2
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("run", RUNS)
def test_ten_steps_equal_those_of_torch(run, dtype, tolerance):
    cfg = validate_args(parse_args([*SIZES.split(), *RUNS[run].split()], needs_data=False), 1)
    local, foreign = LanguageModel(dtype), LanguageModel(dtype)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), local)
    optimizer, plain = get_megatron_optimizer(cfg.optimizer, [ddp]), torch_optimizer(cfg.flat, foreign)
    scheduler = get_optimizer_param_scheduler(cfg.flat, optimizer)
    for step in range(STEPS):
        scheduler.set_samples(step)
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        ddp.finish_grad_sync()
        norm = optimizer.step()[1]
        plain.zero_grad()
        loss_of(foreign, step).backward()
        expected_norm = nn.utils.clip_grad_norm_(foreign.parameters(), cfg.optimizer.clip_grad or torch.inf)
        plain.step()
        assert float(norm) == pytest.approx(expected_norm.item(), rel=tolerance)
        for (name, mine), yours in zip(local.named_parameters(), foreign.parameters()):
            error = (mine - yours).abs().max() / yours.abs().max()
            assert error <= tolerance, f"{name} after step {step + 1} is off by {error:.1e}"


def test_every_run_is_another_optimizer():
    """A setting that did not matter here would be compared in vain."""
    weights = set()
    for flags in RUNS.values():
        cfg = validate_args(parse_args([*SIZES.split(), *flags.split()], needs_data=False), 1)
        model = LanguageModel(torch.float64)
        plain = torch_optimizer(cfg.flat, model)
        for step in range(STEPS):
            plain.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.clip_grad or torch.inf)
            plain.step()
        weights.add(sum(parameter.double().pow(3).sum().item() for parameter in model.parameters()))
    same = {"adam-below-the-norm", "adam-without-clipping"}  # neither clips
    assert len(weights) == len(RUNS) - len(same) + 1
