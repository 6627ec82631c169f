"""Parameters that are registered in a different module than the module that uses them."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.core.sharding.placement import declare


class MovableParameters(nn.Module):
    """Base class of modules whose parameters :func:`move_parameters` can register in another module. Subclasses must
    access their parameters as attributes."""

    def __getattr__(self, name: str) -> Any:
        """Look up moved parameters in their new module on every access, because FSDP replaces registered parameters."""
        moved = self.__dict__.get("_moved", {})
        if name in moved:
            owner, new_name = moved[name]
            return getattr(owner, new_name)
        return super().__getattr__(name)


def move_parameters(root: nn.Module, source: str, target: str, prefix: str) -> None:
    """Move the direct parameters of submodule ``source`` of ``root`` to its submodule ``target``, as ``prefix`` + name,
    in place. State dicts and ``named_parameters`` use the new names. Checkpoints keep the old names, which this
    function records in ``ParameterSpec.registered_as``. ``source`` must be a :class:`MovableParameters` (asserted),
    which still finds its parameters as attributes; every moved parameter must have a spec."""
    module, owner = root.get_submodule(source), root.get_submodule(target)
    assert isinstance(module, MovableParameters)
    moved = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        owner.register_parameter(prefix + name, parameter)
        names = (f"{target}.{prefix}{name}", f"{source}.{name}")
        declare(parameter, registered_as=names)
        moved[name] = (owner, prefix + name)
    module.__dict__["_moved"] = moved
