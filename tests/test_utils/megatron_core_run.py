"""One rank of the original Megatron Core, on a CPU over gloo: a program for an interpreter that has it installed.

``python megatron_core_run.py JSON``: trains a small GPT, BERT or T5 on given samples and writes checkpoints and losses.
The code below reads the entries of the JSON (``args``: Megatron-LM arguments). Devices of tensors are replaced.
"""

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
import types
import warnings
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors are made on the CPU, and say that they are CUDA's."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class Threads:
    """In place of a multiprocessing context: its writer forks."""

    Queue = JoinableQueue = queue.Queue
    Process = threading.Thread

    def Manager(self):
        return self


class NoSeeds:
    """In place of the tracker of CUDA's random states."""

    def is_initialized(self):
        return True

    @contextlib.contextmanager
    def fork(self, name=""):
        yield


def prepare():
    """Replaces what needs CUDA, before anything of it is imported."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_, **__: None
    np.product = np.prod  # of numpy 1, which 0.14 was written for
    dist.init_process_group("gloo")
    OnCpu().__enter__()
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.tensor_parallel import random

    filesystem_async.mp = async_utils.mp = types.SimpleNamespace(get_context=lambda _: Threads(), Queue=queue.Queue)
    filesystem_async._process_memory = lambda: 0  # asks for psutil
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER = NoSeeds()


class Run:
    """Model, optimizer and schedule of ``options['args']``."""

    def __init__(self, options):
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.options, self.iteration = options, 0
        self.args = a = argparse.Namespace(**options["args"])
        self.parallel = parallel_state
        parallel_state.initialize_model_parallel(a.tensor_model_parallel_size, a.pipeline_model_parallel_size)
        torch.manual_seed(7)
        config = TransformerConfig(
            num_layers=a.num_layers, hidden_size=a.hidden_size, num_attention_heads=a.num_attention_heads,
            ffn_hidden_size=a.ffn_hidden_size, num_query_groups=a.num_query_groups, use_cpu_initialization=True,
            hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=a.tensor_model_parallel_size,
            pipeline_model_parallel_size=a.pipeline_model_parallel_size, pipeline_dtype=torch.float32,
            gated_linear_unit=a.swiglu, normalization=a.normalization,
            activation_func=torch.nn.functional.silu if a.swiglu else torch.nn.functional.gelu,
            add_bias_linear=a.add_bias_linear, layernorm_epsilon=a.norm_epsilon, bias_activation_fusion=False,
            masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
            apply_rope_fusion=False, persist_layer_norm=False,
        )  # fmt: skip
        self.kind = options.get("kind", "gpt")
        self.model = MODELS[self.kind](
            config, a, vocab_size=a.padded_vocab_size,
            max_sequence_length=a.max_position_embeddings, pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(), position_embedding_type=a.position_embedding_type,
            share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=a.use_distributed_optimizer)
        self.ddp = DistributedDataParallel(config, ddp, self.model)
        self.ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=a.lr, min_lr=a.min_lr, weight_decay=a.weight_decay, clip_grad=a.clip_grad,
            adam_beta2=a.adam_beta2, use_distributed_optimizer=a.use_distributed_optimizer,
        ), [self.ddp])  # fmt: skip
        size = a.global_batch_size
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=a.lr, min_lr=a.min_lr, lr_warmup_steps=a.lr_warmup_iters * size,
            lr_decay_steps=a.lr_decay_iters * size, lr_decay_style=a.lr_decay_style, start_wd=a.weight_decay,
            end_wd=a.weight_decay, wd_incr_steps=a.train_iters * size, wd_incr_style="constant",
        )  # fmt: skip
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss

    def sharded(self, loading=False):
        """The state as its ``checkpointing.py`` makes it."""
        kind = self.options.get("sharding_type", "fully_sharded_model_space")
        metadata = {
            "distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }  # fmt: skip
        model = self.model.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {
            "args": self.args, "checkpoint_version": 3.0, "iteration": self.iteration, "model": model,
            "optimizer": optimizer, "opt_param_scheduler": self.scheduler.state_dict(),
        }, metadata  # fmt: skip

    def load(self, folder, iteration):
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded(loading=True)[0], f"{folder}/iter_{iteration:07d}")
        self.model.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.iteration = iteration

    def save(self, folder, kind):
        from megatron.core import dist_checkpointing

        self.args.consumed_train_samples = self.iteration * self.args.global_batch_size
        path = f"{folder}/iter_{self.iteration:07d}"
        os.makedirs(path, exist_ok=True)
        dist.barrier()
        if kind == "torch_dist":
            state, metadata = self.sharded()
            dist_checkpointing.save(state, path, content_metadata=metadata)
        else:
            self.save_torch(path)
        dist.barrier()
        with open(f"{folder}/latest_checkpointed_iteration.txt", "w") as file:
            file.write(str(self.iteration))

    def save_torch(self, path):
        stages, parallel = self.args.pipeline_model_parallel_size, self.parallel
        path += f"/mp_rank_{parallel.get_tensor_model_parallel_rank():02d}"
        path += f"_{parallel.get_pipeline_model_parallel_rank():03d}" if stages > 1 else ""
        os.makedirs(path, exist_ok=True)
        if self.args.use_distributed_optimizer:
            self.optimizer.save_parameter_state(f"{path}/distrib_optim.pt")
        torch.save({
            "args": self.args, "checkpoint_version": 3.0, "iteration": self.iteration,
            "model": self.ddp.state_dict_for_save_checkpoint(), "optimizer": self.optimizer.state_dict(),
            "opt_param_scheduler": self.scheduler.state_dict(),
        }, f"{path}/model_optim_rng.pt")  # fmt: skip

    def train(self, data, until):
        """Losses up to iteration ``until``; ``data`` is [iterations, samples, tokens and one more], of the other kinds
        arrays [iterations, samples, ...] by name."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        a, losses = self.args, []
        while self.iteration < until:
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            arrays = {name: item[self.iteration] for name, item in data.items()}
            parts = [{name: torch.from_numpy(item[first : first + a.micro_batch_size]) for name, item in arrays.items()}
                     for first in range(0, a.global_batch_size, a.micro_batch_size)]  # fmt: skip
            out = get_forward_backward_func()(
                forward_step_func=STEPS[self.kind], data_iterator=iter(parts), model=[self.ddp],
                num_microbatches=len(parts), seq_length=a.seq_length, micro_batch_size=a.micro_batch_size,
                forward_only=False,
            )  # fmt: skip
            self.optimizer.step()
            self.scheduler.step(a.global_batch_size)
            self.iteration += 1
            if self.parallel.is_pipeline_last_stage():
                losses.append(float(torch.stack([item["lm loss"] for item in out]).mean()))
        return losses


def gpt(config, a, **options):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(config, get_gpt_layer_local_spec(normalization=a.normalization), **options)


def bert(config, a, **options):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    types = 2 if a.bert_binary_head else 0
    return BertModel(config, types, bert_layer_local_spec, add_binary_head=a.bert_binary_head, **options)


def t5(config, a, **options):
    """Build T5 with the final norms of its stacks, which its local spec leaves to Transformer Engine."""
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    specs = (TransformerBlockSubmodules([item()] * a.num_layers, layer_norm=WrappedTorchNorm)
             for item in (encoder_model_with_local_spec, decoder_model_with_local_spec))  # fmt: skip
    return T5Model(config, config, *specs, **options)


MODELS = {"gpt": gpt, "bert": bert, "t5": t5}


def mean_loss(output):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def masked_loss(batch, output):
    """Mean over the unmasked words, plus the mean over sentence pairs if there are any."""
    losses, pairs = output if isinstance(output, tuple) else (output, None)
    mask = batch["loss_mask"].float()
    loss = (losses.float() * mask).sum() / mask.sum()
    report = {"lm loss": loss.detach().clone()}
    if pairs is not None:
        loss = loss + torch.nn.functional.cross_entropy(pairs.float(), batch["is_random"])
    return loss, report


def gpt_step(batches, model):
    batch = next(batches)["tokens"].long()
    length = batch.shape[1] - 1
    positions = torch.arange(length)[None].expand(len(batch), -1)
    mask = ~torch.tril(torch.ones(1, 1, length, length, dtype=torch.bool))
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    return model(tokens, positions, mask, labels=labels), partial(mean_loss)


def bert_step(batches, model):
    batch = next(batches)
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=batch["types"], lm_labels=batch["labels"])
    return output, partial(masked_loss, batch)


def t5_step(batches, model):
    batch = next(batches)
    encoder, decoder = batch["enc_mask"] > 0, batch["dec_mask"] > 0
    causal = torch.tril(torch.ones(decoder.shape[1], decoder.shape[1], dtype=torch.bool))
    masks = (~(encoder[:, None] & encoder[:, :, None]), ~(decoder[:, None] & decoder[:, :, None] & causal),
             ~(encoder[:, None] & decoder[:, :, None]))  # fmt: skip
    masks = (mask[:, None] for mask in masks)  # one for all heads
    return model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"]), partial(masked_loss, batch)


STEPS = {"gpt": gpt_step, "bert": bert_step, "t5": t5_step}


def main(options):
    prepare()
    run = Run(options)
    if "load" in options:
        run.load(options["load"], options["load_iteration"])
    data = np.load(options["data"])
    data = {"tokens": data} if isinstance(data, np.ndarray) else dict(data)
    for until in options["until"]:
        losses = run.train(data, until)
        for kind in options.get("formats", ()):
            run.save(f"{options['save']}/{kind}", kind)
    if losses and run.parallel.get_tensor_model_parallel_rank() == 0:
        with open(options["losses"], "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
