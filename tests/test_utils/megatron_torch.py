"""Checkpoints of Megatron-LM in its ``torch`` format, written in its layout: a small model on TP, PP and virtual stages
with the state of Adam, by parameter number or in flat buffers."""

import argparse

import torch

HIDDEN, HEADS, GROUPS, WIDTH, LAYERS, VOCABULARY, PADDED = 16, 4, 2, 12, 4, 50, 64
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "group_query_attention": True,
    "num_query_groups": GROUPS, "ffn_hidden_size": WIDTH, "swiglu": True, "normalization": "RMSNorm",
    "vocab_size": VOCABULARY, "padded_vocab_size": PADDED, "untie_embeddings_and_output_weights": True,
    "consumed_train_samples": 28, "lr": 0.1, "seq_length": 32, "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "make_vocab_size_divisible_by": 64, "bf16": False, "fp16": False, "add_bias_linear": False, "lr_warmup_init": 0.0,
}  # fmt: skip
SCHEDULE = {
    "max_lr": 0.1, "min_lr": 0.0, "lr_warmup_steps": 8, "lr_decay_steps": 160, "lr_decay_style": "cosine",
    "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 160, "num_steps": 28,
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": (HIDDEN,), "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HIDDEN // HEADS, HIDDEN),
    "pre_mlp_layernorm.weight": (HIDDEN,), "mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, WIDTH),
}  # fmt: skip


def global_model(seed):
    """Megatron-LM's global tensors by its names, as its layers make them."""
    torch.manual_seed(seed)
    shapes = {"embedding.word_embeddings.weight": (PADDED, HIDDEN)}
    shapes |= {f"decoder.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER.items()}
    shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (PADDED, HIDDEN)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


WEIGHTS, MOMENTS, SQUARES = (global_model(seed) for seed in range(3))


def part(name, tensor, rank, tp):
    """Return a tensor-parallel rank's part: its shards of gate and up, stacked."""
    if "norm" in name:
        return tensor
    if "linear_fc1" in name:
        gate, value = tensor.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], value.chunk(tp)[rank]])
    return tensor.chunk(tp, 1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank].clone()


def names_of(stage, pp, chunk=0, vpp=1):
    """Global names of a (virtual) stage, with its own numbers of layers."""
    item = LAYERS // pp // vpp
    first = chunk * (LAYERS // vpp) + stage * item
    names = ["embedding.word_embeddings.weight"] if stage == chunk == 0 else []
    names += [f"decoder.layers.{i}.{name}" for i in range(first, first + item) for name in LAYER]
    last = stage == pp - 1 and chunk == vpp - 1
    names += ["decoder.final_layernorm.weight", "output_layer.weight"] if last else []

    def local(name):
        if not name.startswith("decoder.layers."):
            return name
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        return f"decoder.layers.{int(number) - first}.{rest}"

    return {local(name): name for name in names}


def write_torch(folder, tp=1, pp=1, vpp=1, distributed=False, rename=lambda name: name, **changes):
    """``--ckpt-format torch``, with the state of Adam."""
    args = {**ARGS, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    for stage in range(pp):
        for rank in range(tp):
            state = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7,
                     "opt_param_scheduler": SCHEDULE}  # fmt: skip
            order = []
            for chunk in range(vpp):
                names = names_of(stage, pp, chunk, vpp)
                key = "model" if vpp == 1 else f"model{chunk}"
                state[key] = {rename(k): part(name, WEIGHTS[name], rank, tp) for k, name in names.items()}
                state[key]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                order += names.values()
            path = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            if distributed:
                torch.save(flat_state(order, rank, tp), path / "distrib_optim.pt")
            else:
                groups = [[name for name in order if ("norm" in name) == late] for late in (False, True)]
                numbered = [name for group in groups for name in group]
                state["optimizer"] = {
                    "state": {
                        i: {"step": torch.tensor(7.0), "exp_avg": part(name, MOMENTS[name], rank, tp),
                            "exp_avg_sq": part(name, SQUARES[name], rank, tp)} for i, name in enumerate(numbered)
                    },
                    "param_groups": [
                        {"wd_mult": float(not late), "params": [numbered.index(name) for name in groups[late]]}
                        for late in (0, 1)
                    ],
                }  # fmt: skip
            torch.save({**state, **changes}, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def flat_state(order, rank, tp):
    """A buffer: parameters from the last to the first, each at a multiple of 64."""
    buffer = {}
    for kind, model in {"param": WEIGHTS, "exp_avg": MOMENTS, "exp_avg_sq": SQUARES}.items():
        pieces, end = [], 0
        for name in reversed(order):
            pieces.append(torch.zeros(-end % 64))
            pieces.append(part(name, model[name], rank, tp).flatten())
            end = sum(piece.numel() for piece in pieces)
        buffer[kind] = torch.cat(pieces)
    buffer["numel_unpadded"] = buffer["param"].numel()
    return {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): buffer}}
