"""The planner's prediction of a training step, written from docs/guides/planning.md and the papers of its terms.

Inputs are the description of a model (operations with FLOPs, sizes and bytes), its stages and its schedule, which other
tests compare with real models. The formulas of all times are written again here: GEMMs, attention, memory traffic,
collectives with their volumes, virtual stages, optimizer; rates, MFU, days and GPU-hours follow from the time.

A collective of S bytes over n ranks moves (n - 1) / n S per rank and link: all-gather, reduce-scatter and all-to-all
once, all-reduce twice (a reduce-scatter, then an all-gather).

Legend: T tokens of a micro-batch on a context-parallel rank, h hidden, L layers; times in seconds, sizes in bytes.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from importlib.resources import files
from statistics import NormalDist

MICROSECOND = 1e-6


def read_rows(name):
    """Rows of a table of measured constants."""
    text = files("megatron.training.report.plan").joinpath(name).read_text()
    return list(csv.reader((line for line in text.splitlines() if not line.startswith("#")), delimiter="\t"))


class Hardware:
    """GPUs of one kind in nodes."""

    def __init__(self, gpu, nodes, gpus_per_node, nic_gbits=400.0):
        row = next(row for row in read_rows("gpus.tsv") if row[0] == gpu)
        names = ("gib", "peak", "gemm", "weight_gradient", "fp8", "forward", "backward", "terabytes", "nvlink")
        self.__dict__.update(zip(names, map(float, row[1:10])))
        self.bandwidth = self.terabytes * 1e12
        self.nodes, self.per_node, self.cards = nodes, gpus_per_node, nic_gbits / 400
        self.ranks = nodes * gpus_per_node

    def bus(self, link, kind, size):
        """Bytes per second: straight lines between measured points over the logarithm of the size."""
        points = sorted((float(mb) * 1e6, float(rate)) for name, what, mb, rate, *_ in read_rows("links.tsv")
                        if name == link and what == kind)  # fmt: skip
        if size < points[0][0]:
            rate = points[0][1] * size / points[0][0]
        elif size > points[-1][0]:
            rate = points[-1][1]
        else:
            (x0, y0), (x1, y1) = next(pair for pair in zip(points, points[1:]) if pair[0][0] <= size <= pair[1][0])
            rate = y0 + (y1 - y0) * (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0))
        return rate * 1e9 * (self.nvlink if link == "nvlink" else self.cards)

    def collective(self, kind, size, ranks, stride):
        if ranks == 1 or size == 0:
            return 0.0
        in_node = min(ranks, max(1, self.per_node // stride))
        latency = (10 + in_node + (15 * math.log2(ranks / in_node) if in_node < ranks else 0)) * MICROSECOND
        measured = "all_reduce" if kind == "all_reduce" else "shard"
        nvlink = self.bus("nvlink", measured, size)
        if in_node == ranks:
            slowest = nvlink
        elif kind == "all_to_all":  # messages to other nodes and within the node are sent at the same time
            away = (ranks - in_node) / ranks * size
            return latency + max(away / self.bus("nic", "shard", away), size * (in_node - 1) / ranks / nvlink)
        else:  # one card per rank of the node
            cards = in_node * self.bus("nic", measured, size)
            slowest = cards if in_node == 1 else min(nvlink, cards)
        volume = size * (ranks - 1) / ranks * {"all_reduce": 2}.get(kind, 1)
        return latency + volume / slowest

    def message(self, size, stride):
        if stride < self.per_node:
            return 10 * MICROSECOND + size / (200e9 * self.nvlink)
        return 20 * MICROSECOND + size / (45e9 * self.cards)


def gemm(hardware, tflops, m, n, k, count, item):
    """``count`` products of [m, k] and [k, n] in tiles of 128 x 256 (either way around) on 132 processors. Half of the
    last, partly filled wave is lost; a tile has overhead like 48 more elements of k; or the bytes take longer."""
    tiles = count * min(math.ceil(m / 128) * math.ceil(n / 256), math.ceil(m / 256) * math.ceil(n / 128))
    padded = tiles * 128 * 256 * k * 2  # FLOPs with padding of tiles
    lost = 1 + (math.ceil(tiles / 132) / (tiles / 132) - 1) / 2
    compute = padded * lost * (k + 48) / k / (tflops * 1e12)
    memory = count * item * (m * n + m * k + n * k) / hardware.bandwidth
    return max(compute, memory) + 3 * MICROSECOND


class Plan:
    """Prediction of one step of the resolved configuration ``cfg`` on ``hardware``; ``factor`` multiplies device times.
    ``stages``: contents of all stages, stage s on pipeline rank s modulo their number."""

    def __init__(self, cfg, hardware, description, stages, factor):
        self.cfg, self.hardware, self.description, self.stages, self.factor = cfg, hardware, description, stages, factor
        m, t = cfg.model, cfg.training
        self.tp, self.pp, self.cp = (
            m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size,
        )  # fmt: skip
        self.ep = m.expert_model_parallel_size
        self.etp = m.expert_tensor_parallel_size or self.tp
        self.world = hardware.ranks
        self.dp = self.world // (self.tp * self.pp * self.cp)
        self.T = cfg.data.seq_length * t.micro_batch_size / self.cp
        self.num_microbatches = t.global_batch_size // (t.micro_batch_size * self.dp)
        self.item = 2  # bf16
        self.stream = self.T * m.hidden_size * self.item

    # ---- operations: {(phase, part): seconds} with phases F, I (input gradients), W (weight gradients)

    def operation(self, op, piece):
        m, hardware = self.cfg.model, self.hardware
        result = defaultdict(float)
        flops = op.flops * self.T / self.cfg.data.seq_length / self.tp  # of a rank, forward
        if op.kind == "gemm":
            n, k = op.gemm
            routed = piece.name == "experts" and op.name != "router"
            count = m.num_moe_experts / self.ep if routed else 1
            rows = flops / (2 * n * k * count)
            share = 0.92 if routed else 1.0
            forward, weight, item = hardware.gemm * share, hardware.weight_gradient * share, 2
            in_fp8 = m.fp8 and piece.is_branch and piece.name != "experts"
            if in_fp8:
                blockwise = m.fp8_recipe == "blockwise"
                forward = weight = hardware.fp8 * (0.82 if blockwise else 1)
                item, cast = 1, 8 if blockwise else 6  # bytes read and written per element of two copies
                result["F", "memory-bound"] += rows * k * cast / hardware.bandwidth
                result["I", "memory-bound"] += rows * n * cast / hardware.bandwidth
            result["F", "GEMM"] += gemm(hardware, forward, rows, n, k, count, item)
            result["I", "GEMM"] += gemm(hardware, forward, rows, k, n, count, item)
            result["W", "GEMM"] += gemm(hardware, weight, n, k, rows, count, item)
        elif op.kind == "attention":
            causal_keys = self.cfg.data.seq_length / 2
            result["F", "attention"] = 3e-6 + flops * (1 + 400 / causal_keys) / (hardware.forward * 1e12)
            result["I", "attention"] = 3e-6 + 2.5 * flops * (1 + 450 / causal_keys) / (hardware.backward * 1e12)
        elif op.kind == "recurrence":  # a tenth of the rate of GEMMs, or the bytes take longer
            compute, memory = flops / (0.1 * hardware.gemm * 1e12), op.traffic * self.T / hardware.bandwidth
            result["F", "recurrence"] = 3e-6 + max(compute, memory * 0.4)
            result["I", "recurrence"] = 3e-6 + max(2.5 * compute, memory * 0.6)
        else:
            seconds = op.traffic * self.T / hardware.bandwidth
            fixed = 3e-6 if op.traffic else 0.0
            result["F", "memory-bound"], result["I", "memory-bound"] = fixed + seconds * 0.4, fixed + seconds * 0.6
        full = m.recompute_granularity == "full" and piece.is_branch
        modules = set(m.recompute_modules or ["core_attn"]) if m.recompute_granularity == "selective" else set()
        selected = op.kind != "gemm" and any(modules & set(saved.modules) for saved in op.saved)
        if full or selected:
            result["I", "recomputation"] = sum(value for (phase, _), value in result.items() if phase == "F")
        return result

    def piece(self, piece):
        result = defaultdict(float)
        for op in piece.ops:
            add(result, self.operation(op, piece))
        for phase in "FIW":  # small kernels and gaps
            result[phase, "other"] = 0.01 * sum(value for (item, _), value in result.items() if item == phase)
        if piece.is_branch:
            add(result, self.tensor_parallel())
            if any(op.kind == "attention" for op in piece.ops):
                add(result, self.context_parallel(sum(v for (_, part), v in result.items() if part == "attention")))
            if piece.name == "experts":
                add(result, self.expert_parallel())
        return result

    # ---- collectives of a branch

    def tensor_parallel(self):
        """Sequence parallel: all-gather before and reduce-scatter after the branch, in backward one more all-gather (of
        the saved input). Else one all-reduce per direction."""
        if self.tp == 1:
            return {}
        visible = 0.33 if self.cfg.model.tp_comm_overlap else 0.85
        if self.cfg.model.sequence_parallel:
            one = self.hardware.collective("shard", self.stream, self.tp, 1)
            forward, backward = 2 * one, 3 * one
        else:
            forward = backward = self.hardware.collective("all_reduce", self.stream, self.tp, 1)
        part = "tensor communication"
        return {("F", part): visible * forward, ("I", part): visible * backward}

    def context_parallel(self, attention):
        if self.cp == 1:
            return {}
        m = self.cfg.model
        part, kv_heads = "context communication", max(m.num_query_groups or m.num_attention_heads, self.tp)
        keys_values = 2 * self.T * kv_heads / self.tp * m.kv_channels * self.item
        kind = m.cp_comm_type if isinstance(m.cp_comm_type, str) else m.cp_comm_type[0]
        if kind == "a2a":
            heads = 2 * self.T * m.num_attention_heads / self.tp * m.kv_channels * self.item  # queries and outputs
            one = 1.6 * self.hardware.collective("all_to_all", heads + keys_values, self.cp, self.tp)
            return {("F", part): one, ("I", part): one}
        if kind == "allgather":
            one, visible = self.hardware.collective("shard", keys_values * self.cp, self.cp, self.tp), 1.0
        else:
            one = (self.cp - 1) * self.hardware.message(keys_values, self.tp)
            visible = min(1.0, 0.3 * (self.cp - 1))
        forward, backward = 2 * visible * one, 3 * 2 * visible * one
        if self.cp * self.tp > self.hardware.per_node:  # half of attention hides messages between nodes
            forward -= attention / 2 / 3.5
            backward -= attention / 2
        return {("F", part): max(forward, 0.2 * visible * one), ("I", part): max(backward, 0.6 * visible * one)}

    def expert_parallel(self):
        """Dispatch and combination, forward and backward."""
        if self.ep == 1:
            return {}
        m, part = self.cfg.model, "expert communication"
        local = self.stream / (self.tp if m.sequence_parallel else 1)
        if m.moe_token_dispatcher_type == "allgather":
            one = self.hardware.collective("shard", local * self.ep, self.ep, self.etp)
        else:
            one = self.hardware.collective("all_to_all", local * m.moe_router_topk, self.ep, self.etp)
        return {("F", part): 2 * one, ("I", part): 2 * one}

    # ---- stages

    def fully_sharded(self, elements, times):
        """Weights are gathered for the forward pass and, if they were freed, for backward; gradients are reduced."""
        d = self.cfg.distributed
        ranks, grad = (self.dp * self.cp, self.tp), 4 if self.cfg.optimizer.accumulate_allreduce_grads_in_fp32 else 2
        gather = self.hardware.collective("shard", 2 * elements, *ranks)
        backward = self.hardware.collective("shard", grad * elements, *ranks)
        backward += gather if d.torch_fsdp2_reshard_after_forward else 0
        compute = [sum(value for (phase, _), value in times.items() if phase in phases) for phases in ("F", "IW")]
        part = "data communication"
        return {
            ("F", part): max(gather / 20, gather - 0.9 * compute[0]),
            ("I", part): max(backward / 20, backward - 0.9 * compute[1]),
        }

    def stage(self, pieces, params):
        """A stage is at least as slow as the host starts its kernels, 40 microseconds each."""
        m, actual = self.cfg.model, defaultdict(float)
        for piece in pieces:
            add(actual, self.piece(piece))
        if self.cfg.distributed.use_torch_fsdp2:
            add(actual, self.fully_sharded(sum(elements for elements, _ in params), dict(actual)))
        for key in actual:
            actual[key] *= self.factor
        branches = sum(piece.is_branch for piece in pieces)
        layers_with_experts = sum(piece.name == "experts" for piece in pieces)
        waits = self.ep > 1 and m.moe_token_dispatcher_type != "allgather"  # the host reads counts of rows
        if waits:
            actual["F", "host"] += layers_with_experts * 1.1e-3
            actual["I", "host"] += layers_with_experts * 1.1e-3
        kernels = branches / 2 * (53 + (18 if m.fp8 else 0)) + layers_with_experts * (113 + (105 if waits else 0))
        missing = 40 * MICROSECOND * kernels - sum(actual.values())
        if missing > 0:
            actual["F", "host"] += missing / 3
            actual["I", "host"] += missing * 2 / 3
        return actual

    def pipeline(self, costs, schedule, simulate):
        """Duration of all micro-batches."""
        if self.pp == 1:
            return self.num_microbatches * sum(sum(cost.values()) for cost in costs)
        split = schedule.splits_backward
        size = self.stream / (self.tp if self.cfg.model.sequence_parallel else 1)

        def seconds(stage, action):
            phases = {"F": "F", "B": "I" if split else "IW", "W": "W"}[action.kind]
            return sum(value for (phase, _), value in costs[stage].items() if phase in phases)

        latency = self.hardware.message(size, self.world // self.pp)
        return simulate(schedule, seconds, latency=latency).duration

    def after_backward(self, params, cost):
        """Optimizer and data-parallel collectives of the parameters [(elements of a rank, is expert)] of one pipeline
        rank, whose first stage has the times ``cost``."""
        d = self.cfg.distributed
        dense = sum(elements for elements, expert in params if not expert)
        experts = sum(elements for elements, expert in params if expert)
        groups = [(dense, self.dp * self.cp, self.tp)]
        groups.append((experts, self.world // (self.ep * self.etp * self.pp), self.ep * self.etp))
        sharded = d.use_distributed_optimizer or d.use_torch_fsdp2
        grad = 4 if self.cfg.optimizer.accumulate_allreduce_grads_in_fp32 else 2
        state = 2 + 8  # remainder of the master, two fp32 moments
        updated = sum(elements / (ranks if sharded else 1) for elements, ranks, _ in groups)
        # gradients are zeroed and read, the state is read and written, weights are written
        result = {"optimizer": 1e-3 + updated * (2 * grad + 2 * state + 2) / self.hardware.bandwidth}
        if d.use_torch_fsdp2:
            return result
        collective = self.hardware.collective
        if sharded:
            reduce = sum(collective("shard", size * grad, ranks, stride) for size, ranks, stride in groups)
            gather = sum(collective("shard", size * 2, ranks, stride) for size, ranks, stride in groups)
        else:
            reduce = sum(collective("all_reduce", size * grad, ranks, stride) for size, ranks, stride in groups)
            gather = 0.0
        backward = sum(value for (phase, _), value in cost.items() if phase in "IW")
        forward = sum(value for (phase, _), value in cost.items() if phase == "F")
        if d.overlap_grad_reduce:
            reduce = max(0.05 * reduce, reduce - 0.9 * backward)
        if d.overlap_param_gather:
            gather = max(0.05 * gather, gather - 0.9 * forward)
        result["data communication"] = reduce + gather
        return result

    def predict(self, list_pieces, list_params, schedule, simulate):
        """Seconds of the step by part. ``list_pieces(stage)``, ``list_params(stages of a rank)``: contents."""
        costs = [self.stage(list_pieces(stage), list_params([stage])) for stage in self.stages]
        duration = self.pipeline(costs, schedule, simulate)
        parts = defaultdict(float)
        for cost in costs:  # every chunk of every rank, for all micro-batches; the mean over the ranks
            for (_, part), seconds in cost.items():
                parts[part] += seconds * self.num_microbatches / self.pp
        parts["bubble"] = duration - sum(parts.values())
        self.idle = parts["bubble"] / duration
        ends = [self.after_backward(list_params(self.stages[rank :: self.pp]), costs[rank]) for rank in range(self.pp)]
        for part, seconds in max(ends, key=lambda end: sum(end.values())).items():
            parts[part] += seconds
        return {part: seconds for part, seconds in parts.items() if abs(seconds) > 1e-12}


def add(total, more):
    for key, value in more.items():
        total[key] += value


def slowest_rank(ranks):
    """Expected time of the slowest of ``ranks`` ranks relative to the mean, at a deviation of 0.3 % (Blom 1958)."""
    return 1 + 0.003 * NormalDist().inv_cdf((ranks - 3 / 8) / (ranks + 1 / 4)) if ranks > 1 else 1.0


def dense_flops_per_token(layers, hidden, ffn, heads, kv_heads, channels, seq, vocab, *, gated):
    """Forward and backward FLOPs per token: 6 per weight of a GEMM, and causal scores (half)."""
    attention = hidden * channels * (heads + 2 * kv_heads) + heads * channels * hidden
    mlp = hidden * ffn * (3 if gated else 2)
    scores = 2 * 2 * heads * channels * seq / 2 * 3  # two products with seq / 2 keys, forward and twice backward
    return layers * (6 * (attention + mlp) + scores) + 6 * hidden * vocab


def rates(seconds, ranks, peak, batch_size, seq, flops_per_token, tokens, price):
    """Rates per GPU, and time and cost of ``tokens`` tokens, of a step of ``seconds`` on ``ranks`` GPUs."""
    per_step = batch_size * seq
    days = tokens / per_step * seconds / 86400
    tflops = per_step * flops_per_token / seconds / 1e12 / ranks
    return {
        "tokens_per_second_per_gpu": per_step / seconds / ranks,
        "tflops_per_gpu": tflops,
        "mfu": tflops / peak,
        "days": days,
        "gpu_hours": days * 24 * ranks,
        "cost": days * 24 * ranks * price,
    }
