"""Process groups as an object with one attribute per axis, which programs build and pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core import parallel_state

_GETTERS: dict[str, Callable[[], object]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "mp": parallel_state.get_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
    "hcp": parallel_state.get_hierarchical_context_parallel_groups,
    "embd": parallel_state.get_embedding_group,
    "pos_embd": parallel_state.get_position_embedding_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "intra_dp_cp": lambda: parallel_state.get_data_parallel_group(True, partial_data_parallel=True),
    "tp_dp_cp": lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    "ep": parallel_state.get_expert_model_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "tp_ep_pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
    "expt_dp": parallel_state.get_expert_data_parallel_group,
    "intra_expt_dp": lambda: parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
}


class ProcessGroupCollection:
    """Torch process groups by Megatron-LM's short names (``tp``, ``dp_cp``, ``expt_dp``, ...); None if not set."""

    def __init__(self, **groups: object) -> None:
        if unknown := sorted(groups.keys() - _GETTERS.keys()):
            raise ValueError(f"ProcessGroupCollection: unknown groups {', '.join(unknown)}; choose from {_NAMES}")
        vars(self).update(groups)

    def __getattr__(self, name: str) -> None:
        if name not in _GETTERS:
            raise AttributeError(f"ProcessGroupCollection has no group {name!r}; choose from {_NAMES}")
        return None

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Return the running program's groups, of the axes ``required_pgs`` or all axes."""
        names = list(_GETTERS) if required_pgs is None else required_pgs
        if unknown := sorted(set(names) - _GETTERS.keys()):
            raise ValueError(f"required_pgs: unknown groups {', '.join(unknown)}; choose from {_NAMES}")
        return cls(**{name: _GETTERS[name]() for name in names})

    def __repr__(self) -> str:
        sizes = (f"{name}={getattr(group, 'size', lambda: 1)()}" for name, group in vars(self).items())
        return f"ProcessGroupCollection({', '.join(sizes)})"


def differing_groups(collection: ProcessGroupCollection) -> list[str]:
    """Return the names of the groups in ``collection`` that are not the running program's."""
    return [name for name, group in vars(collection).items() if group != _GETTERS[name]()]


_NAMES = ", ".join(_GETTERS)
