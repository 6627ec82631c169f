"""The copy-engine benchmark times the same collective on both transports."""

import dataclasses

import torch
import torch.distributed as dist

from benchmarks.bench_copy_engines import collectives, largest_differences
from megatron.core.groups.process_groups import Group
from tests.test_utils.shared_window import engines_over_shared_memory


def differences(rank, size):
    torch.manual_seed(rank)
    plain = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    engines = engines_over_shared_memory("world", dist.group.WORLD, range(size), rank)
    groups = {"NCCL": plain, "copy engines": dataclasses.replace(plain, engines=engines)}
    return largest_differences(collectives(groups, torch.randn(2, 1, 3), torch.randn(2 * size, 1, 3)))


def test_both_ways_give_the_same(gloo_pool):
    for actual in gloo_pool.run(differences, 2):
        assert actual.keys() == {"all-gather", "reduce-scatter"} and max(actual.values()) < 1e-6
