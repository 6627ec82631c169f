"""Rank lists of parallel groups by their sizes, for programs that make groups of their own."""

from __future__ import annotations

from megatron.core.groups.process_groups import orthogonal_rank_lists


class RankGenerator:
    """Ranks on a grid whose axes ``order`` lists from the fastest to the slowest, such as "tp-cp-ep-dp-pp"."""

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        """The first rank is ``rank_offset``. Raises RuntimeError for an axis of size > 1 that ``order`` lacks, and
        ValueError for experts and context parallelism on one grid."""
        if ep > 1 and cp > 1:
            raise ValueError("RankGenerator: ep and cp have separate grids; one of both must be 1")
        self.tp, self.ep, self.dp, self.pp, self.cp, self.rank_offset = tp, ep, dp, pp, cp, rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        self.world_size = tp * ep * dp * pp * cp
        names = order.lower().split("-")
        for name in [name for name in self.name_to_size if name not in names]:
            if self.name_to_size[name] > 1:
                raise RuntimeError(f"RankGenerator: order {order!r} lacks {name} of size {self.name_to_size[name]}")
            names.append(name)
        self.order = "-".join(names)
        self.ordered_size = [self.name_to_size[name] for name in names]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return all groups along the axes of ``token``, such as "tp-dp"; in a group, ranks have the grid's order."""
        sizes = dict(zip(self.order.split("-"), self.ordered_size))
        lists = orthogonal_rank_lists(sizes, set(token.split("-")))
        return [[rank + self.rank_offset for rank in ranks] for ranks in lists]
