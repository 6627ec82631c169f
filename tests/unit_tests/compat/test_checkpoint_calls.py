"""Calls by which programs write and read checkpoints themselves: shards, background saves, custom loops."""

import functools
import sys
import threading
from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import CheckpointError, serialization
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint


@pytest.fixture
def single():
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


# ---- shards


def _halves(rank, world_size, folder):
    """Two ranks save a weight split along dim 1, a replicated bias, and one layer of a stack of two."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    local = {"weight": torch.arange(12.0).view(3, 4)[:, 2 * rank : 2 * rank + 2].clone(), "bias": torch.ones(3)}
    state = make_sharded_tensors_for_checkpoint({**local, "_extra_state": None}, "linear.", {"weight": 1})
    layer = {"w": torch.full((2,), float(rank))}
    state |= make_sharded_tensors_for_checkpoint(layer, "layers.", None, ((0, rank, 2),))
    plain = nn.Module()
    plain.register_parameter("scale", nn.Parameter(torch.full((2,), 7.0)))
    state |= sharded_state_dict_default(plain, "plain.")
    state["one"] = make_tp_sharded_tensor_for_checkpoint(local["weight"], "one", 1, prepend_offsets=((0, 0, 1),))
    state["both"] = make_sharded_tensor_for_checkpoint(torch.full((2,), 5.0), "both")
    dist_checkpointing.save(state, folder)
    parallel_state.destroy_model_parallel()
    return {name: tensor.offsets for name, tensor in state.items()}


def test_shards_of_two_ranks_are_the_full_tensors(gloo_pool, tmp_path, single):
    offsets = gloo_pool.run(_halves, 2, str(tmp_path / "saved"))
    assert [rank["linear.weight"] for rank in offsets] == [(0, 0), (0, 2)]
    full = {"linear.weight": torch.zeros(3, 4), "linear.bias": torch.zeros(3), "layers.w": torch.zeros(2, 2)}
    full |= {"one": torch.zeros(1, 3, 4), "both": torch.zeros(2)}
    state = make_sharded_tensors_for_checkpoint({**full, "plain.scale": torch.zeros(2)}, "", {"linear.weight": 1})
    loaded = dist_checkpointing.load(state, tmp_path / "saved")
    assert torch.equal(loaded["linear.weight"], torch.arange(12.0).view(3, 4))
    shapes = {name: item.global_shape for name, item in serialization.load_tensors_metadata(tmp_path / "saved").items()}
    assert shapes["linear.weight"] == (3, 4) and shapes["one"] == (1, 3, 4)
    assert torch.equal(loaded["one"][0], loaded["linear.weight"]) and loaded["both"].tolist() == [5, 5]
    assert loaded["layers.w"].tolist() == [[0, 0], [1, 1]] and loaded["plain.scale"].tolist() == [7, 7]


def test_wrong_shards_are_named(single):
    with pytest.raises(ValueError, match=r"a\.w: has 1 dims, tensor_parallel_layers_axis_map names dim 1"):
        make_sharded_tensors_for_checkpoint({"w": torch.ones(2)}, "a.", {"w": 1})
    with pytest.raises(ValueError, match="axes must be 0, 1"):
        make_sharded_tensors_for_checkpoint({"w": torch.ones(2)}, "a.", None, ((1, 0, 2),))
    with pytest.raises(ValueError, match=r"a\.w: is a str"):
        make_sharded_tensors_for_checkpoint({"w": "text"}, "a.")


def test_sharded_state_dict_of_a_module_is_called(single):
    class Module(nn.Module):
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {prefix: (sharded_offsets, metadata)}

    assert sharded_state_dict_default(Module(), "x.", ((0, 1, 2),), {"a": 1}) == {"x.": (((0, 1, 2),), {"a": 1})}


# ---- background


def test_requests_end_in_order_after_their_work():
    queue, started, release, events = AsyncCallsQueue(), threading.Event(), threading.Event(), []

    def work(name, data):
        started.set()
        release.wait(30)
        events.append((name, data))

    values = [1]
    first = AsyncRequest(work, ("first", None), [], preload_fn=lambda: list(values))
    first.add_finalize_fn(lambda: events.append("end of first"))
    assert queue.schedule_async_request(first) == 0
    values[0] = 2  # the request has a copy
    assert queue.schedule_async_request(AsyncRequest(None, (), [lambda: events.append("end of second")])) == 1
    assert started.wait(30) and queue.maybe_finalize_async_calls() == [] and queue.get_num_unfinalized_calls() == 2
    release.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1] and queue.get_num_unfinalized_calls() == 0
    assert events == [("first", [1]), "end of first", "end of second"]
    with pytest.raises(RuntimeError, match="frozen"):
        first.freeze().add_finalize_fn(print)
    queue.close()


def _failing(rank, world_size):
    queue, ended = AsyncCallsQueue(persistent=True), []

    def work():
        if rank == 1:
            raise OSError("disk full")

    queue.schedule_async_request(AsyncRequest(work, (), [lambda: ended.append(rank)]))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointError as error:
        return str(error), ended
    finally:
        queue.close(abort=True)


def test_a_failed_write_is_an_error_on_all_ranks(gloo_pool):
    for message, ended in gloo_pool.run(_failing, 2):
        assert message.startswith("rank 1: OSError: disk full") and ended == []


def _write(state, folder, queue):
    """Write ``state`` by the steps that Megatron-LM's strategy takes; return before the files are complete."""
    planner, writer = DefaultSavePlanner(), FileSystemWriterAsync(folder, thread_count=2)
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan, metadata = planner.create_global_plan([planner.create_local_plan()])
    plan = writer.prepare_global_plan([writer.prepare_local_plan(plan[0])])[0]
    writer.prepare_write_data(planner.finish_plan(plan), planner)
    function, preload, arguments = writer.get_save_function_and_args()
    end = functools.partial(lambda: writer.finish(metadata, [writer.retrieve_write_results()]))
    queue.schedule_async_request(AsyncRequest(function, arguments, [end], preload_fn=preload))


def test_torch_reads_background_checkpoints(tmp_path):
    queue, weight = AsyncCallsQueue(), torch.arange(6.0)
    _write({"weight": weight, "note": "text"}, tmp_path / "saved", queue)
    weight.zero_()  # training continues
    queue.close()
    loaded = {"weight": torch.ones(6), "note": ""}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / "saved"), planner=DefaultLoadPlanner(), no_dist=True)
    assert loaded == {"weight": loaded["weight"], "note": "text"} and loaded["weight"].tolist() == [*range(6)]
    with pytest.raises(ValueError, match="use_msc"):
        FileSystemWriterAsync(tmp_path, use_msc=True)


# ---- custom loops


FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 0.01 --tokenizer-type NullTokenizer --vocab-size "
    "31 --distributed-backend gloo --mock-data"
)


def _custom_loop(rank, world_size, folder, load):
    """Train two steps with Megatron-LM's calls and save, or load; return weights, iteration and samples."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import get_args, get_model, initialize_megatron
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    way = ["--load" if load else "--save", folder]
    sys.argv = ["own.py", *FLAGS.split(), "--tensor-model-parallel-size", str(world_size), *way]
    initialize_megatron()
    args = get_args()

    def provider(pre_process=True, post_process=True):
        config = core_transformer_config_from_args(args)
        return GPTModel(config, get_gpt_layer_local_spec(), args.padded_vocab_size, args.max_position_embeddings,
                        pre_process=pre_process, post_process=post_process)  # fmt: skip

    model = get_model(provider)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), model)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 1, 8, "linear", 0.0, 0.0, 8, "constant")
    if load:
        iteration, flops = load_checkpoint(model, optimizer, scheduler)
        return _weights(model), iteration, flops, args.consumed_train_samples
    for weight in model[0].parameters():
        with torch.no_grad():
            weight.add_(0.5)
    args.consumed_train_samples = 4
    save_checkpoint(2, model, optimizer, scheduler, 3e9)
    return _weights(model), 2, 3e9, 4


def _weights(model):
    state = model[0].module.sharded_state_dict()
    return {name: (tensor.offsets, tensor.local.detach().clone()) for name, tensor in state.items()}


def test_a_program_with_its_custom_loop_saves_and_loads(gloo_pool, tmp_path):
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    folder = tmp_path / "run"
    saved = gloo_pool.run(_custom_loop, 2, str(folder), False)
    loaded = gloo_pool.run(_custom_loop, 2, str(folder), True)
    for before, after in zip(saved, loaded):
        assert before[1:] == after[1:] == (2, 3e9, 4) and before[0].keys() == after[0].keys()
        assert all(torch.equal(value[1], after[0][name][1]) for name, value in before[0].items())
    with open(get_checkpoint_tracker_filename(folder)) as file:
        assert file.read() == "2"
    common = dist_checkpointing.load_common_state_dict(folder / "iter_0000002")
    assert common["iteration"] == 2 and common["num_floating_point_operations_so_far"] == 3e9
    assert common["args"].hidden_size == 16 and common["opt_param_scheduler"]["num_steps"] == 0


def test_values_of_saved_states_are_the_common_state(tmp_path, single):
    state = make_sharded_tensors_for_checkpoint({"w": torch.ones(2)}, "") | {"iteration": 7, "deep": {"x": [1]}}
    dist_checkpointing.save(state, tmp_path / "saved")
    assert dist_checkpointing.load_common_state_dict(tmp_path / "saved") == {"iteration": 7, "deep": {"x": [1]}}
    with pytest.raises(CheckpointError, match="nothing"):
        dist_checkpointing.load_common_state_dict(tmp_path / "nothing")


def test_the_common_state_of_megatron_lm_has_its_arguments(tmp_path):
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path)
    torch.save({"args": Namespace(hidden_size=8), "iteration": 3, "checkpoint_version": 3.0}, tmp_path / "common.pt")
    common = serialization.load_common_state_dict(tmp_path)
    assert common == {"args": Namespace(hidden_size=8), "iteration": 3, "checkpoint_version": 3.0}
    [shape] = serialization.load_tensors_metadata(tmp_path).items()
    assert shape[0] == "weight" and shape[1].global_shape == (2,)
