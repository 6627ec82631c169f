"""A GPT whose linear layers have a gain per output row, the only trained parameters, (IA)^3. Torch-free."""

from dataclasses import dataclass, replace

from megatron.core.config.optional import OptionalGroup
from megatron.core.description.model import Param
from megatron.core.models.family import Program
from megatron.core.models.registry import get_family
from megatron.core.models.transforms import ModelTransform


@dataclass(kw_only=True)
class GainConfig(OptionalGroup):
    """Gains"""

    TRANSFORM = "tests.test_utils.toy_adapter.family:gains"

    gain_modules: list[str] | None = None
    """Linear layers with a gain, by the last part of their names."""


class Gains(ModelTransform):
    """Gains on the outputs of the chosen linear layers of a frozen model."""

    def __init__(self, names):
        self.names = set(names)

    def apply(self, model, groups):
        from tests.test_utils.toy_adapter.gain import add_gains

        add_gains(model, self.names, groups)

    def describe(self, model):
        def changed(piece):
            params = [replace(param, frozen=True) for param in piece.params]
            for param in piece.params:
                module, _, leaf = param.name.rpartition(".")
                if leaf == "weight" and module.rpartition(".")[2] in self.names:
                    mesh = {axis: dim for axis, dim in param.mesh.items() if dim < len(param.shape) - 1}
                    shape = param.shape[:-1]
                    params.append(Param(f"{module}.gain.value", shape, mesh, ndim=1, shared=param.shared))
            return replace(piece, params=tuple(params))

        layers = tuple(tuple(changed(branch) for branch in branches) for branches in model.layers)
        return replace(model, embedding=changed(model.embedding), layers=layers, head=changed(model.head))

    def stores(self, name):
        return ".gain." in name


def gains(cfg):
    names = cfg.group(GainConfig).gain_modules
    return None if names is None else Gains(names)


GPT = get_family("gpt")
FAMILY = replace(
    GPT,
    name=__name__,
    is_default=False,
    programs=(Program("gains", "gains of frozen models"),),
    groups=(*GPT.groups, GainConfig),
    tokenizer_type="NullTokenizer",
)
