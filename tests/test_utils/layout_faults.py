"""Injected faults: each a context manager that breaks one thing on every rank of the pool while a layout runs."""

import contextlib
import dataclasses
import importlib
from unittest import mock

from tests.test_utils.shared_window import engines_over_shared_memory


def module(name):
    """A module, also where its package re-exports a function of the same name."""
    return importlib.import_module(name)


def through_copy_engines(rank):
    """No fault: messages that copy engines would carry go through memory that the ranks share."""
    where = module("megatron.core.parallel_state")
    return mock.patch.object(where, "start_copy_engines", engines_over_shared_memory)


def small_messages_through_copy_engines(rank):
    """No fault: on GPUs, copy engines carry every message that they support, even small ones."""
    engines = module("megatron.core.groups.copy_engines.exchange").CopyEngines
    return mock.patch.object(engines, "carries", lambda self, num_bytes: True)


def norm_gradients_not_summed(rank):
    """Partial gradients of norms and biases are not summed under sequence parallelism."""
    where = module("megatron.core.distributed.finalize_model_grads")
    return mock.patch.object(where, "sum_partial_gradients", lambda *_: None)


def gradients_summed_twice(rank):
    """Partial gradients are summed over their group twice, so they are too large by a factor of the group size."""
    where = module("megatron.core.distributed.finalize_model_grads")
    correct = where.sum_partial_gradients

    def twice(*arguments):
        correct(*arguments)
        correct(*arguments)

    return mock.patch.object(where, "sum_partial_gradients", twice)


def only_last_microbatch(rank):
    """Only the gradient of the last micro-batch is kept."""
    where = module("megatron.core.distributed.distributed_data_parallel").DistributedDataParallel
    correct = where._note

    def forgetting(self, parameter):
        if not self._last_microbatch:
            parameter.main_grad.zero_()
        correct(self, parameter)

    return mock.patch.object(where, "_note", forgetting)


def dropped_layer(rank):
    """The last pipeline stage builds one layer less."""
    return _other_branches(lambda local: local[:-2])


def dropped_half(rank):
    """The last pipeline stage leaves out the last branch of its last layer."""
    return _other_branches(lambda local: local[:-1])


def doubled_half(rank):
    """The last pipeline stage begins with a half that the stage before it has too."""
    return _other_branches(lambda local: range(local.start - 1, local.stop))


def _other_branches(of_last_stage):
    where = module("megatron.core.models.gpt.model")
    correct = where.TransformerBlock

    def other(*arguments, branches, post_layer_norm, **remaining):
        local = of_last_stage(branches) if post_layer_norm else branches
        return correct(*arguments, branches=local, post_layer_norm=post_layer_norm, **remaining)

    return mock.patch.object(where, "TransformerBlock", other)


def loss_is_a_mean_of_means(rank):
    """Every micro-batch has the same weight, regardless of the number of its unmasked tokens."""

    def loss_func(self, batch, output):
        mask = batch["loss_mask"].to(output.dtype)
        loss = (output * mask).sum() / mask.sum().clamp(min=1)
        return {"lm loss": (loss * mask.numel(), mask.sum())}

    return mock.patch.object(module("megatron.training.tasks.gpt").GPTTask, "loss_func", loss_func)


def untied_embeddings(rank):
    """The first and the last stage train their copies of the embedding apart."""
    where = module("megatron.core.models.gpt.model").GPTModel
    return mock.patch.object(where, "tie_over_stages", lambda self, **which: None)


def padding_in_the_softmax(rank):
    """Padded entries of the vocabulary take part in the softmax."""
    where = module("megatron.core.tensor_parallel.cross_entropy")
    return mock.patch.object(where, "num_true_entries", lambda vocab_size, local_size, group: local_size)


def dropout_by_local_position(rank):
    """Dropout masks depend on a token's position on its rank instead of in its sequence."""
    import torch

    where = module("megatron.core.models.gpt.model").GPTModel
    correct = where.dropout_coordinates

    def local(self, *arguments):
        at = correct(self, *arguments)
        return dataclasses.replace(at, position_s=torch.arange(len(at.position_s)))

    return mock.patch.object(where, "dropout_coordinates", local)


def replicated_counted_on_every_rank(rank):
    """The gradient norm counts a replicated parameter once per tensor-parallel rank."""
    optimizer = module("megatron.core.optimizer.optimizer")
    return mock.patch.object(optimizer, "counts_on_this_rank", lambda spec, groups: True)


def stale_weights(rank):
    """Overlapped gathers of updated weights never happen."""
    where = module("megatron.core.distributed.param_and_grad_buffer").Bucket
    return mock.patch.object(where, "start_gather", lambda self: None)


def bucket_sent_before_it_is_full(rank):
    """An overlapped sum starts one gradient too early."""
    where = module("megatron.core.distributed.param_and_grad_buffer").Bucket
    correct = where.reset

    def reset(self):
        correct(self)
        self.pending -= len(self.parameters) > 1

    def ready(self, parameter):
        bucket = self.buckets_by_parameter[parameter]
        bucket.pending -= bucket.pending > 0
        for item in self.buckets:
            if not item.started:
                if item.pending > 0:
                    return
                item.start_sum()
                item.wait()  # else the missing gradient may still come in time

    buffer = module("megatron.core.distributed.param_and_grad_buffer").ParamAndGradBuffer
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(where, "reset", reset))
    stack.enter_context(mock.patch.object(buffer, "gradient_is_ready", ready))
    return stack


def data_order_depends_on_ranks(rank):
    """Each data-parallel rank reads a different range of the data."""
    where = module("megatron.training.data.loader").Shard
    correct = where.slices

    def apart(self, start, global_batch_size):
        yield from correct(self, start + 1000 * self.rank, global_batch_size)

    return mock.patch.object(where, "slices", apart)


def reduced_in_bf16(rank):
    """Gradients are rounded to bfloat16 before they are reduced."""
    import torch

    where = module("megatron.core.distributed.param_and_grad_buffer").Bucket
    correct = where.start_sum

    def rounded(self):
        self.grads.copy_(self.grads.to(torch.bfloat16))
        correct(self)

    return mock.patch.object(where, "start_sum", rounded)


def same_seed_on_every_rank(rank):
    """Every tensor-parallel rank draws the values of the first shard."""
    where = module("megatron.core.sharding.placement")
    correct = where._contiguous_runs

    def first_shard(shape, retained):
        return correct(shape, where.Rectangle((0,) * len(shape), retained.lengths))

    return mock.patch.object(where, "_contiguous_runs", first_shard)


def loss_mask_wears_off(rank):
    """The data set hands out its own loss masks, which zero more with every access."""
    where = module("megatron.training.verify.layout_trace").SyntheticSamples
    correct = where.__getitem__
    observed = []

    def aliased(self, index):
        sample = correct(self, index)
        observed.append(index)
        sample["loss_mask"][: len(observed) % 8] = 0.0
        return sample

    return mock.patch.object(where, "__getitem__", aliased)


def every_rank_pools_its_first_local_position(rank):
    """Under sequence parallelism the binary head reads the first position of every rank."""
    where = module("megatron.core.models.bert.heads")
    return mock.patch.object(where, "reduce_from_region", lambda x, group: x)


def pairs_weigh_as_on_one_rank(rank):
    """The weight of the second loss is counted from this rank's samples."""
    import torch

    where = module("megatron.training.step")
    weights = module("megatron.core.pipeline_parallel.loss_weights").LossWeights
    count, correct, local = where.global_counts, weights.set, []

    def noting_counts(counts, *remaining):
        local[:] = [counts]
        return count(counts, *remaining)

    def of_this_rank(self, values):
        correct(self, torch.cat((values[:1], 1.0 / local[0][1:])))

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(where, "global_counts", noting_counts))
    stack.enter_context(mock.patch.object(weights, "set", of_this_rank))
    return stack


def samples_of_a_row_drop_other_elements(rank):
    """Dropout in packed samples uses the first sample's number for every sample."""
    where = module("megatron.training.data.masked_rows")
    correct = where.pack_rows

    def of_the_first(batch, lengths, multiple):
        first = batch["sample_index"][:1].expand(len(lengths)).clone()
        return correct({**batch, "sample_index": first}, lengths, multiple)

    return mock.patch.object(where, "pack_rows", of_the_first)


def states_go_on_to_the_next_document(rank):
    """States of a recurrence are not reset at a new document, except on the first rank."""
    where = module("tests.test_utils.gated_recurrence")
    correct = where.follows

    def on_the_first_rank(like, layout):
        return correct(like, layout.with_documents(None) if rank else layout)

    return mock.patch.object(where, "follows", on_the_first_rank)


def states_begin_at_zero_on_every_rank(rank):
    """A recurrence under context parallelism starts each rank's chunks without the state before them."""
    import torch

    where = module("megatron.core.attention.token_layout").TokenLayout
    return mock.patch.object(where, "full", lambda self, x, dim: torch.zeros_like(x).repeat_interleave(
        self.group.size, dim
    ))  # fmt: skip


def documents_unknown_to_linear_attention(rank):
    """Linear attention does not know where documents begin, except on the first rank."""
    where = module("megatron.core.transformer.ssm.delta_mixer")
    correct = where.follows
    return mock.patch.object(where, "follows", lambda *arguments: None if rank else correct(*arguments))


def gradients_of_states_lost_on_all_but_the_last_rank(rank):
    """Backward of the states that context-parallel ranks exchange returns zeros on all ranks but the last."""
    where = module("megatron.core.attention.token_layout").TokenLayout
    correct = where.sum_local

    def lost(self, x, dim):
        result = correct(self, x, dim)
        return result if self.group.is_last else result * 0

    return mock.patch.object(where, "sum_local", lost)


def context_parallel_rank_forgets_the_others(rank):
    """Under context parallelism the loss is averaged over this rank's tokens only."""
    where = module("megatron.core.pipeline_parallel.loss_weights").LossWeights
    correct = where.set

    def local_weights(self, values):
        cp = module("megatron.core.parallel_state").get_process_groups().cp
        correct(self, values / (1.0 + 0.5 * cp.rank))

    return mock.patch.object(where, "set", local_weights)


def attention_gradients_of_blocks_are_off(rank):
    """The blocks of context-parallel attention compute the gradient of keys with an error of one percent."""
    where = module("megatron.core.attention.kernels.unfused").UnfusedAttention
    correct = where.backward

    def off(self, *arguments):
        grad_query, grad_key, grad_value = correct(self, *arguments)
        return grad_query, grad_key * 1.01, grad_value

    return mock.patch.object(where, "backward", off)


def masks_from_the_clock(rank):
    """Dropout masks come from an unseeded generator."""
    import torch

    where = module("megatron.core.random.philox").DropoutStream
    correct = where.keep_mask

    def drawn(self, rate, *arguments):
        mask = correct(self, rate, *arguments)
        generator = torch.Generator()
        generator.seed()
        return torch.rand(mask.shape, generator=generator) >= rate

    return mock.patch.object(where, "keep_mask", drawn)


def router_gradients_not_summed(rank):
    """Router gradients are not summed over ranks under sequence parallelism: only local positions contribute."""
    where = module("megatron.core.distributed.partial_gradients")
    correct = where._partial_sums

    def without_routers(modules, groups):
        modules = list(modules)
        named = [pair for item in modules for pair in item.named_parameters()]
        left_out = {item.main_grad.data_ptr() for name, item in named if "router" in name}
        return [pair for pair in correct(modules, groups) if pair[1].gradient.data_ptr() not in left_out]

    return mock.patch.object(where, "_partial_sums", without_routers)


def experts_summed_over_dense_ranks(rank):
    """Gradients of experts are summed over all data-parallel ranks, although some ranks have other experts."""
    return _other_expert_groups(lambda groups, correct: groups.dense)


def experts_counted_by_every_copy(rank):
    """The gradient norm counts an expert as often as there are copies of it."""
    return _other_expert_groups(lambda groups, correct: correct._replace(model=groups.world))


def norm_without_the_experts_of_others(rank):
    """The gradient norm adds up experts over the ranks that share dense weights."""
    return _other_expert_groups(lambda groups, correct: correct._replace(model=groups.tp_pp))


def _other_expert_groups(change):
    where = module("megatron.core.groups.process_groups").ProcessGroups
    correct = where.expert.fget
    return mock.patch.object(where, "expert", property(lambda self: change(self, correct(self))))


def gradients_of_experts_averaged(rank):
    """Gradients of experts are divided by the expert-parallel ranks, whose tokens they all have."""
    where = module("megatron.core.distributed.finalize_model_grads")
    correct = where.sum_partial_gradients

    def averaged(modules, groups):
        correct(modules, groups)
        for name, parameter in (pair for item in modules for pair in item.named_parameters()):
            if ".experts." in name:
                parameter.main_grad.div_(groups.ep.size)

    return mock.patch.object(where, "sum_partial_gradients", averaged)


def expert_bias_from_local_tokens(rank):
    """The bias of the choice follows the load that this rank's tokens make."""
    router = module("megatron.core.transformer.moe.router").TopKRouter
    statistics = module("megatron.core.statistics").StepStatistics
    take, end_step = statistics.take, router.end_step

    def noting(self, device):
        self.taken = take(self, device)
        return self.taken

    def by_own(self, totals):
        end_step(self, totals | {"tokens_per_expert": self.statistics.taken[: self.num_experts]})

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(statistics, "take", noting))
    stack.enter_context(mock.patch.object(router, "end_step", by_own))
    return stack


def side_losses_averaged_over_ranks(rank):
    """Balancing losses are divided by the data-parallel size, although every rank has different sequences."""
    where = module("megatron.core.transformer.moe.router")
    correct = where.attach_loss

    def averaged(values, loss, scale):
        return correct(values, loss, scale / module("megatron.core.parallel_state").get_process_groups().dp.size)

    return mock.patch.object(where, "attach_loss", averaged)


def balance_of_local_positions(rank):
    """Balancing losses take the positions of this rank for the whole sequence."""
    where = module("megatron.core.transformer.moe.router")
    correct = where.fractions

    def of_own(rule, counts_be, num_choices, last_batch_e, sharers):
        return correct(rule, counts_be, num_choices // sharers.size, last_batch_e, type(sharers)("alone"))

    return mock.patch.object(where, "fractions", of_own)


def fp8_scales_of_the_local_part(rank):
    """A matrix that several ranks hold is cast by each with the scale of its part."""
    where = module("megatron.core.fp8.gemms")
    correct = where.current_amax
    return mock.patch.object(where, "current_amax", lambda x, groups: correct(x, ()))


def fp8_expert_scales_of_the_local_rows(rank):
    """Rows of experts are cast by each rank with the scale of its rows."""
    where = module("megatron.core.fp8.experts")
    correct = where.raise_over  # also for the weights, with a number per expert
    return mock.patch.object(where, "raise_over", lambda x, groups: x if len(x) == 1 else correct(x, groups))


def fp8_history_of_the_local_rank(rank):
    """Delayed scales follow from the micro-batches of this rank only."""
    where = module("megatron.core.fp8.scales").ScaleHistory
    correct = where.update
    return mock.patch.object(where, "update", lambda self, groups: correct(self, ()))


def fp8_copies_of_the_first_weights(rank):
    """GEMMs read the copies of weights that the first step made."""
    where = module("megatron.core.fp8.gemms").Fp8Gemms
    correct, copies = where.weight_copies, {}

    def first(self, weight, *, columns):
        key = id(self), weight.shape, columns
        if key not in copies:
            copies[key] = correct(self, weight, columns=columns)
        return copies[key]

    return mock.patch.object(where, "weight_copies", first)


def samples_planned_twice(rank):
    """The last sample of the steps of the first rank is planned twice, in the same way on all ranks."""
    where = module("megatron.training.data.variable_lengths")
    correct = where.plan_batch

    def twice(*arguments):
        plan = correct(*arguments)
        return dataclasses.replace(plan, ranks=tuple(tuple(map(doubled, steps)) for steps in plan.ranks))

    def doubled(step):
        return step._replace(samples=step.samples + step.samples[-1:]) if step.first == 0 else step

    return mock.patch.object(where, "plan_batch", twice)


def positions_of_the_row(rank):
    """Tokens of a packed row are numbered from the start of the row, not of their sample."""
    where = module("megatron.training.data.variable_lengths").Rows
    correct = where._row

    def numbered(self, *arguments):
        row = correct(self, *arguments)
        positions = module("torch").arange(row["position_ids"].shape[1]) % 32
        return {**row, "position_ids": positions[None]}

    return mock.patch.object(where, "_row", numbered)


def tokens_of_the_next_rank(rank):
    """A rank of a shared step computes the tokens of the next rank of its group, at its own positions."""
    where = module("megatron.core.attention.token_layout")
    correct = where.zigzag.local_part

    def of_the_next(x, rank, size, *arguments):
        return correct(x, (rank + 1) % size, size, *arguments)

    return mock.patch.object(where.zigzag, "local_part", of_the_next)


def groups_of_half_the_ranks(rank):
    """Both halves of the ranks of a step compute its full row."""
    where = module("megatron.training.data.variable_lengths").Rows
    correct = where.local

    def halved(self, row):
        return correct(self, {**row, "size": max(1, row["size"] // 2)})

    return mock.patch.object(where, "local", halved)


def tower_gradients_not_summed(rank):
    """Each tensor-parallel rank has the vision tower's gradients of its images only."""
    where = module("megatron.core.models.vlm.tower")
    correct = where.declare
    return mock.patch.object(where, "declare", lambda param, mesh, grad: correct(param, mesh=mesh, grad={}))


def images_in_the_order_of_other_ranks(rank):
    """The embeddings of images are taken from the places of another rank."""
    where = module("megatron.core.models.vlm.model")
    correct = where.gathering
    return mock.patch.object(where, "gathering", lambda tokens, shares, *more: correct(tokens, shares[::-1], *more))


def gradients_of_images_summed_over_copies(rank):
    """Without sequence parallelism, equal gradients of tensor-parallel ranks are added."""
    where = module("megatron.core.models.vlm.model")
    correct = where.gathering
    return mock.patch.object(where, "gathering", lambda *arguments: correct(*arguments[:3], 1))


def images_in_a_line(rank):
    """Every rank except the first gives the tokens of an image the row 0."""
    where = module("megatron.core.models.vlm.model")
    correct = where.axes_tables
    return mock.patch.object(where, "axes_tables", lambda rotary, positions, sections: correct(
        rotary, positions if rank == 0 else positions[..., [0, 0, 2]], sections
    ))  # fmt: skip


def no_fault(rank):
    return contextlib.nullcontext()


def no_squared_temperature(rank):
    """The divergence of distillation lacks the factor T^2."""
    where = module("megatron.training.tasks.distillation").Divergence
    correct = where.__call__
    return mock.patch.object(where, "__call__", lambda self, *logits: correct(self, *logits) / self.temperature**2)


def teacher_shifted_by_a_token(rank):
    """The student learns the teacher's distribution of the token before."""
    where = module("megatron.training.tasks.distillation").Divergence
    correct = where.__call__
    return mock.patch.object(
        where, "__call__", lambda self, student, teacher: correct(self, student, teacher.roll(1, 1))
    )


def teacher_layer_shifted_by_a_token(rank):
    """The student's layers are compared with the teacher's of the token before."""
    where = module("megatron.core.transformer.layer_losses")
    correct = where._store

    def store(pair, layer, args, output):
        correct(pair, layer, args, output.roll(1, 0))

    return mock.patch.object(where, "_store", store)


def layer_loss_on_one_rank(rank):
    """Only the first tensor-parallel rank adds the gradient of a loss between layers."""
    where = module("megatron.core.transformer.layer_losses")
    correct = where.attach_loss
    return mock.patch.object(
        where, "attach_loss", lambda values, loss, scale: correct(values, loss, scale) if rank == 0 else values
    )


def unmasked_layer_loss(rank):
    """The losses of layers count all tokens."""
    where = module("megatron.training.tasks.gpt")
    correct = where.LayerTargets
    return mock.patch.object(where, "LayerTargets", lambda mask, weight: correct(mask * 0 + 1, weight))


def distillation_is_a_mean_of_means(rank):
    """The normalizer of distillation is not that of the global batch: every micro-batch has the same weight."""
    where = module("megatron.training.tasks.distillation")
    correct = where.distillation_losses

    def means(settings, batch, *remaining):
        losses = correct(settings, batch, *remaining)
        total, count = losses[where.LOSS]
        return {**losses, where.LOSS: (total / count.clamp(min=1) * batch["loss_mask"].numel(), count)}

    return mock.patch.object(where, "distillation_losses", means)
