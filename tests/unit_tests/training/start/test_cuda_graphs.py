"""A recorded micro-batch gives the bits of plain execution: losses and gradients, over changing data and loss factors.

On a CPU the replay calls the recorded function again, or (``tests/test_utils/tape.py``) the operations that were
recorded, on the tensors that they had then.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from megatron.compat.training_utils import to_device
from megatron.core.attention import packed_seq_params
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8.recipe import fp8_stacks
from megatron.core.fp8.scales import ScaleHistory
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.loss_weights import LossWeights
from megatron.core.pipeline_parallel.microbatches import run_without_pipeline
from megatron.core.statistics import StatisticsSum
from megatron.core.tensor_parallel.grouped_linear import GroupedProducts
from megatron.core.transformer.moe.experts import GroupedExperts
from megatron.training.data.loader import BatchReader, KeyedDataset, collate
from megatron.training.start.cuda_graphs import GraphedForwardBackward
from megatron.training.tasks.language_model import task_class
from megatron.training.verify.layout_trace import with_synthetic_data
from tests.test_utils.layouts import MODEL, VOCAB_SIZE, configure
from tests.test_utils.tape import record_tape, run_as_on_a_device
from tests.unit_tests.core.transformer.moe.test_host_reads import multiply, weight_gradient

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 50, 16, 2, 3


def make_model(**overrides):
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **overrides)
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config), vocab_size=VOCAB, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True, groups=SINGLE_PROCESS,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(None, ddp, model, groups=SINGLE_PROCESS)


def batches(step):
    generator = torch.Generator().manual_seed(step)
    for index in range(MICRO_BATCHES):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(),
            "loss_mask": (tokens[:, 1:] > 3).float(), "position_ids": torch.arange(LENGTH).repeat(BATCH, 1),
            "sample_index": torch.arange(BATCH) + (step * MICRO_BATCHES + index) * BATCH,
        }  # fmt: skip


def forward_step(data_iterator, model, device):
    batch = to_device(next(data_iterator), device)
    output = model(
        batch["tokens"], batch["position_ids"], labels=batch["labels"], sample_index=batch["sample_index"]
    )

    def loss_func(output):
        return {"lm loss": ((output * batch["loss_mask"]).sum(), batch["loss_mask"].sum())}

    return output, loss_func


def train(model, forward_backward, device, steps=4, task=None, first=0):
    """Return logged values, gradients and weights of each step from ``first``."""
    step_of_task = partial(forward_step, device=device) if task is None else task.forward_step
    outcome = []
    weights = LossWeights(("lm loss",), device) if task is None else task.loss_weights
    for step in range(first, first + steps):
        model.zero_grad_buffer()
        weights.set(torch.full((len(weights),), 1 / (7.0 + step)))
        results = forward_backward(
            forward_step_func=step_of_task, data_iterator=batches(step) if task is None else samples(task, step),
            model=[model], num_microbatches=MICRO_BATCHES, loss_weights=weights,
            seq_length=LENGTH, micro_batch_size=BATCH,
        )  # fmt: skip
        model.finish_grad_sync()
        for result in results:
            outcome += result.logged.values()
        with torch.no_grad():
            for param in model.parameters():
                outcome.append(param.main_grad.clone())
                param.sub_(0.1 * param.main_grad)
    return outcome


def assert_equal_bits(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected))


def test_replays_equal_plain_execution():
    device, recorded = torch.device("cpu"), []
    expected = train(make_model(), run_without_pipeline, device)
    graphed = GraphedForwardBackward(
        run_without_pipeline, device, warmup_steps=2, record=lambda run, stream: recorded.append(run) or run
    )
    assert_equal_bits(train(make_model(), graphed, device), expected)
    assert len(recorded) == 1


def test_each_set_of_shapes_is_recorded_once(monkeypatch):
    device, model, recorded = torch.device("cpu"), make_model(), []
    graphed = GraphedForwardBackward(
        run_without_pipeline, device, warmup_steps=0, record=lambda run, stream: recorded.append(run) or run
    )

    def run(length, dtype=torch.float32):
        cut = [{name: value[:, :length] if value.dim() > 1 else value for name, value in batch.items()}
               | {"loss_mask": batch["loss_mask"][:, :length].to(dtype)} for batch in batches(1)]  # fmt: skip
        return graphed(
            forward_step_func=partial(forward_step, device=device), data_iterator=iter(cut), model=[model],
            num_microbatches=MICRO_BATCHES, loss_weights=LossWeights(("lm loss",), device),
        )  # fmt: skip

    first = [result.logged["lm loss"] for result in run(LENGTH)]
    run(8)
    assert_equal_bits([result.logged["lm loss"] for result in run(LENGTH)], first)
    assert len(recorded) == 2
    monkeypatch.setattr("megatron.training.start.cuda_graphs.MOST_RECORDINGS", 2)
    with pytest.raises(ValueError, match="tokens .2, 4. .*and 2 other forms .*tokens .2, 8.*remove the flag"):
        run(4)
    with pytest.raises(ValueError, match="loss_mask .2, 16. torch.float64, .*and 2 other forms"):
        run(LENGTH, torch.float64)


def test_replays_wait_for_weights_and_do_not_reduce_gradients(monkeypatch):
    device, model, events = torch.device("cpu"), make_model(), []
    monkeypatch.setattr(DistributedDataParallel, "finish_updates", lambda self: events.append("weights"))
    monkeypatch.setattr(DistributedDataParallel, "no_sync", lambda self: events.append("no sync") or nullcontext())

    def record(run, stream):
        outputs = run()
        return lambda: events.append("replay") or outputs

    train(model, GraphedForwardBackward(run_without_pipeline, device, warmup_steps=0, record=record), device, steps=2)
    replays = ["replay"] * MICRO_BATCHES
    assert events == ["weights", "weights", "no sync", *replays, "weights", *replays]  # the second one by the forward


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [{"params_dtype": torch.float32}, {"bf16": True}])
def test_cuda_graphs_equal_plain_execution_bit_for_bit(precision):
    """With dropout on; unfused attention, since cuDNN's backward pass does not repeat its own bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    choices = {**precision, "attention_backend": "unfused"}
    expected = train(make_model(**choices), run_without_pipeline, device)
    graphed = GraphedForwardBackward(
        run_without_pipeline, device, warmup_steps=3, stream=torch.cuda.Stream(device)
    )
    assert_equal_bits(train(make_model(**choices), graphed, device), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [LENGTH, 128], ids=["flash", "cuDNN"])
def test_cuda_graphs_with_fused_attention_agree(length, monkeypatch):
    monkeypatch.setitem(globals(), "LENGTH", length)
    device = torch.device("cuda", torch.cuda.current_device())
    choices = {"bf16": True, "attention_dropout": 0.0}
    expected = train(make_model(**choices), run_without_pipeline, device)
    graphed = GraphedForwardBackward(
        run_without_pipeline, device, warmup_steps=3, stream=torch.cuda.Stream(device)
    )
    for actual, requested in zip(train(make_model(**choices), graphed, device), expected):
        torch.testing.assert_close(actual, requested, rtol=3e-2, atol=3e-3)


def samples(task, step):
    """Return micro-batches with padding; some have no valid token."""
    data, size = KeyedDataset(task.train_valid_test_datasets_provider((0, 0, 0))[0]), task.cfg.training.micro_batch_size
    starts = range(step * MICRO_BATCHES * size, (step + 1) * MICRO_BATCHES * size, size)
    created = (collate([data[index, index] for index in range(start, start + size)]) for start in starts)
    result = BatchReader(created, task.batches.counts, reads_ahead=True).take(MICRO_BATCHES)[0]
    return task.batches.split(result, MICRO_BATCHES, size)["data_iterator"]


def task_and_model(family, flags, precision="fp32"):
    sizes = "--num-layers 2 --hidden-size 64 --micro-batch-size 4"
    cfg = configure([*MODEL, *sizes.split(), *flags.split()], 1, precision, family)
    task = with_synthetic_data(task_class(family), VOCAB_SIZE)(cfg)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return task, DistributedDataParallel(None, ddp, task.model_provider(), groups=SINGLE_PROCESS)


def train_task(family, flags, precision="fp32", *, graphs=None):
    """Return the result of :func:`train`, without graphs or with the options of ``graphs``."""
    task, model = task_and_model(family, flags, precision)
    device, run = next(model.parameters()).device, run_without_pipeline
    if graphs is not None:
        task.cfg = task.cfg.with_settings(cuda_graph_impl="local")  # a CPU rejects the flag
        run = GraphedForwardBackward(run, device, warmup_steps=2, **graphs)
    return train(model, run, device, steps=4, task=task)


DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
T5 = "--decoder-num-layers 2 --decoder-seq-length 16"
RELATIVE = f"{T5} --position-embedding-type relative --relative-attention-num-buckets 8"
MODERN = "--position-embedding-type rope --window-size 4,4 --window-attn-skip-freq 2 --swiglu --embed-layernorm"
PADDED = [
    ("bert", DROPOUT),
    ("bert", NO_DROPOUT),
    ("bert", f"{MODERN} {NO_DROPOUT} --bert-no-binary-head"),
    ("bert", f"--micro-batch-size 8 {NO_DROPOUT}"),
    ("t5", f"{T5} {DROPOUT}"),
    ("t5", f"{T5} {NO_DROPOUT}"),
    ("t5", f"{RELATIVE} {DROPOUT}"),
]


EXPERTS = f"--num-experts 8 --swiglu --moe-z-loss-coeff 1e-3 {DROPOUT} --moe-router-load-balancing-type"
LOSSES = "--moe-aux-loss-coeff 0.1"
WITH_EXPERTS = [
    f"{EXPERTS} seq_aux_loss {LOSSES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    f"{EXPERTS} global_aux_loss {LOSSES} --moe-shared-expert-intermediate-size 64 --moe-input-jitter-eps 1e-2",
    f"{EXPERTS} aux_loss {LOSSES} --moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
    f"{EXPERTS} none --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    f"{EXPERTS} sinkhorn --moe-router-topk 1",
    f"{EXPERTS} quantile_balancing --disable-bias-linear",
]


def train_with_state(flags, precision="fp32", *, family="gpt", graphs=None):
    """Return the result of :func:`train_task` and the statistics of each step; end steps of fp8 scales."""
    task, model = task_and_model(family, flags, precision)
    device, run = next(model.parameters()).device, run_without_pipeline
    if graphs is not None:
        run = GraphedForwardBackward(run, device, warmup_steps=2, **graphs)
    sums, outcome = StatisticsSum([model], SINGLE_PROCESS), []
    for step in range(5):
        outcome += train(model, run, device, steps=1, task=task, first=step)
        for totals in sums(device).values():
            outcome += totals.values()
        for state in fp8_stacks(model).values():
            state.end_step(SINGLE_PROCESS)
    return outcome


@pytest.mark.parametrize("flags", WITH_EXPERTS)
def test_replays_of_experts_equal_plain_execution(flags, monkeypatch):
    monkeypatch.setattr(GroupedExperts, "products", GroupedProducts(multiply, weight_gradient))
    run_as_on_a_device(monkeypatch)
    expected = train_with_state(flags, "fp64")
    assert_equal_bits(train_with_state(flags, "fp64", graphs={"record": record_tape}), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", WITH_EXPERTS)
def test_cuda_graphs_of_experts_equal_plain_execution_bit_for_bit(flags):
    flags += " --attention-backend unfused --bf16"
    stream = torch.cuda.Stream(torch.cuda.current_device())
    assert_equal_bits(train_with_state(flags, "bf16", graphs={"stream": stream}), train_with_state(flags, "bf16"))


FP8 = "--fp8-format hybrid --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 1 --fp8-recipe"
IN_FP8 = [
    ("gpt", f"{FP8} tensorwise {DROPOUT}"),
    ("gpt", f"{FP8} delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max {NO_DROPOUT}"),
    ("gpt", f"{FP8} blockwise --swiglu --disable-bias-linear --micro-batch-size 8 {NO_DROPOUT}"),
    ("gpt", f"{FP8} tensorwise --first-last-layers-bf16 --no-fp8-wgrad --num-layers 4 {NO_DROPOUT}"),
    ("t5", f"{FP8} tensorwise {T5} {NO_DROPOUT}"),
]


@pytest.mark.parametrize("family, flags", IN_FP8)
def test_replays_in_fp8_equal_plain_execution(family, flags, monkeypatch):
    run_as_on_a_device(monkeypatch)
    monkeypatch.setattr(packed_seq_params, "is_on_host", lambda x: False)
    expected = train_with_state(flags, "fp64", family=family)
    assert_equal_bits(train_with_state(flags, "fp64", family=family, graphs={"record": record_tape}), expected)


def test_a_matrix_without_delayed_scale_is_not_recorded(monkeypatch):
    monkeypatch.setattr(ScaleHistory, "notice_scales", lambda self: None)
    with pytest.raises(UserError, match=r"cuda-graph-warmup-steps: layers.0.* has no delayed fp8 scale"):
        train_with_state(IN_FP8[1][1], "fp64", graphs={"record": record_tape})


@pytest.mark.gpu
@pytest.mark.parametrize("family, flags", IN_FP8)
def test_cuda_graphs_in_fp8_equal_plain_execution_bit_for_bit(family, flags):
    flags += " --attention-backend unfused --bf16"
    stream = torch.cuda.Stream(torch.cuda.current_device())
    result = train_with_state(flags, "bf16", family=family, graphs={"stream": stream})
    assert_equal_bits(result, train_with_state(flags, "bf16", family=family))


def test_bert_has_a_recording_per_number_of_full_rows():
    recorded = []
    graphs = {"record": lambda run, stream: recorded.append(run) or run}
    train_task("bert", f"--micro-batch-size 8 {NO_DROPOUT}", graphs=graphs)
    assert 2 <= len(recorded) <= 8


@pytest.mark.parametrize("family, flags", PADDED)
def test_replays_of_padded_batches_equal_plain_execution(family, flags, monkeypatch):
    run_as_on_a_device(monkeypatch)
    expected = train_task(family, flags, "fp64")
    monkeypatch.setattr(packed_seq_params, "is_on_host", lambda x: False)
    actual = train_task(family, flags, "fp64", graphs={"record": record_tape})
    if DROPOUT in flags:
        assert_equal_bits(actual, expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):  # kernels that take padding otherwise where its bounds are known
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family, flags", PADDED)
def test_cuda_graphs_of_padded_batches_equal_plain_execution_bit_for_bit(family, flags, precision):
    flags += " --attention-backend unfused" + " --bf16" * (precision == "bf16")
    stream = torch.cuda.Stream(torch.cuda.current_device())
    assert_equal_bits(train_task(family, flags, graphs={"stream": stream}), train_task(family, flags))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family, flags", [*(item for item in PADDED if NO_DROPOUT in item[1]), ("t5", f"{RELATIVE} {NO_DROPOUT}")]
)
def test_cuda_graphs_of_padded_batches_with_fused_attention_agree(family, flags, precision):
    """Batches on the device select equal kernels; runs without graphs otherwise choose the kernel by the padding."""
    flags += " --seq-length 128 --max-position-embeddings 128" + " --bf16" * (precision == "bf16")
    flags += " --decoder-seq-length 128" * (family == "t5")
    stream = torch.cuda.Stream(torch.cuda.current_device())
    expected = train_task(family, flags, graphs={"record": lambda run, stream: run, "stream": stream})
    for actual, requested in zip(train_task(family, flags, graphs={"stream": stream}), expected, strict=True):
        assert (actual - requested).abs().max() <= 0.03 * requested.abs().max() + 3e-3
