"""The module of the toy transform: output of a product times a gain per row."""

from torch import nn

from megatron.core.sharding.placement import Ones, Shard, SubTensor, declare, parameter
from megatron.core.sharding.rectangles import Rectangle
from megatron.core.tensor_parallel.gemms import GemmLayer


class Gain(nn.Module):
    def __init__(self, weight, groups):
        super().__init__()
        spec = weight.spec
        is_row = spec.mesh.get("tp") == Shard(len(spec.shape) - 1)
        shape = spec.shape[:-1]
        if spec.part is not None:
            area = spec.part.rectangle
            shape = SubTensor(shape, "value", Rectangle(area.offsets[:-1], area.lengths[:-1]))
        self.value = parameter(
            shape, init=Ones(), mesh={} if is_row else spec.mesh, ndim=1, groups=groups,
            partial=("tp",) if is_row else tuple(spec.grad), dtype=weight.dtype,
        )  # fmt: skip

    def forward(self, product, x, weight, bias, traits, store):
        output = product(x, weight, None, traits, store) * self.value
        return output if bias is None else output + bias


def add_gains(model, names, groups):
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, GemmLayer) and name.rpartition(".")[2] in names:
            linear.wrap("gain", Gain(linear.weight, groups))
            if (shared := getattr(linear, "shared_weight", None)) is not None:
                linear.wrap("shared_gain", Gain(shared, groups), "shared_product")
                declare(linear.shared_gain.value, registered_as=("shared_gain.value", "gain.value"))


