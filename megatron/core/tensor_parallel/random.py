"""Seeds and states of torch's generators, for programs and modules that use them.

The library itself does not use them: initial weights and dropout masks are functions of seed and position
(``megatron.core.random.philox``) and are the same for any layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.parallel_state import get_process_groups

_MODEL_PARALLEL, _EXPERT_PARALLEL, _DATA_PARALLEL = "model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if torch.cuda.is_available() else torch.set_rng_state)(state)


class CudaRNGStatesTracker:
    """Named states of the current GPU's generator; without a GPU, the CPU generator's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def is_initialized(self) -> bool:
        """Return whether there are any states."""
        return bool(self.states_)

    def get_states(self) -> dict[str, Tensor]:
        """Return a new dictionary of the states by name. The tensors are never modified."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states; keeps references to the tensors."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state ``name`` of a generator seeded with ``seed``; the current state stays. Raises ValueError if
        name or seed is in use."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random state {name}, seed {seed}: the name or the seed is in use")
        before = _state()
        (torch.cuda.manual_seed if torch.cuda.is_available() else torch.manual_seed)(seed)
        self.seeds_.add(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Context with the state ``name``, which is advanced. Raises ValueError for an unknown name."""
        if name not in self.states_:
            raise ValueError(f"random state {name}: does not exist; call model_parallel_cuda_manual_seed(seed) first")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker(*_: object, **__: object) -> CudaRNGStatesTracker:
    """Return the tracker of this process; arguments (Transformer Engine, inference, CUDA graphs) are ignored."""
    return _TRACKER


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the state that differs between the ranks of expert layers."""
    return _EXPERT_PARALLEL


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the state that is equal on all ranks after ``model_parallel_cuda_manual_seed``."""
    return _DATA_PARALLEL


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    **megatron_arguments: object,
) -> None:
    """Seed torch on the CPU and on every GPU with ``seed``, equally on all ranks, and replace the named states of the
    tracker by three new ones. Ranks that are not given come from the running program's groups. As in Megatron-LM
    ``data-parallel-rng`` has ``seed`` on all ranks, ``model-parallel-rng`` seed + 2718 + tp rank and
    ``expert-parallel-rng`` seed + 1024 + 100 * ep rank + etp rank (plus 2^20 if that equals the former). The other
    arguments select Megatron-LM's tracker and are ignored; unknown ones raise TypeError."""
    if unknown := megatron_arguments.keys() - _FURTHER:
        raise TypeError(f"model_parallel_cuda_manual_seed() has no arguments {', '.join(sorted(unknown))}")
    groups = get_process_groups()
    ranks = {"tp": tp_rank, "ep": ep_rank, "etp": etp_rank}
    tp, ep, etp = (getattr(groups, axis).rank if rank is None else rank for axis, rank in ranks.items())
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    _TRACKER.reset()
    _TRACKER.add(_DATA_PARALLEL, seed)
    _TRACKER.add(_MODEL_PARALLEL, seed + 2718 + tp)
    of_experts = seed + 1024 + 100 * ep + etp
    # from EP 18 on, Megatron-LM's formulas give both states of some ranks one seed (and its program ends there)
    _TRACKER.add(_EXPERT_PARALLEL, of_experts + (1 << 20) * (of_experts == seed + 2718 + tp))


_FURTHER = {"force_reset_rng", "gtp_remat_rank", "egtp_remat_rank", "gtp_remat_world_size", "egtp_remat_world_size"}

serve_other_names(__name__)
