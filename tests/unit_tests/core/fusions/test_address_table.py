"""Tables of addresses: rows and formats of weights, and what rebuilds a cached table."""

import pytest
import torch

from megatron.core.fusions.address_table import AddressTables
from megatron.core.fusions.storage import Copy, Remainder, Storage

SIZE = 64


def formats(tables):
    return [(table.format, table.rows.tolist()) for table in tables]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_of_two_dtypes_at_one_address_have_separate_tables(dtype):
    weight, gradient = torch.zeros(SIZE), torch.ones(SIZE)
    tables = AddressTables()
    [wide] = tables.find([(Storage(weight), (gradient,))])
    [narrow] = tables.find([(Storage(weight), (gradient.view(dtype)[:SIZE],))])
    assert wide.format.operands == (torch.float32,) and narrow.format.operands == (dtype,)
    assert wide.rows.tolist() == narrow.rows.tolist() == [[weight.data_ptr(), 0, gradient.data_ptr(), SIZE]]


def test_weights_of_two_dtypes_at_one_address_have_separate_tables():
    memory, gradient = torch.zeros(SIZE), torch.ones(SIZE)
    tables = AddressTables()
    kinds = [tables.find([(Storage(memory.view(dtype)[:SIZE]), (gradient,))])[0].format.weight
             for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32)]  # fmt: skip
    assert kinds == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def test_a_table_is_kept_while_nothing_changes_and_depends_on_order_and_addresses():
    first, second = (Storage(torch.zeros(SIZE)) for _ in range(2))
    gradients = torch.ones(3, SIZE)
    tables = AddressTables()
    group = [(first, (gradients[0],)), (second, (gradients[1],))]
    assert tables.find(group) is tables.find(list(group))
    [moved] = tables.find([(first, (gradients[0],)), (second, (gradients[2],))])
    assert moved.rows[:, 2].tolist() == [gradients[0].data_ptr(), gradients[2].data_ptr()]


@pytest.mark.parametrize("kind, bits", [(Copy, 32), (Remainder, 16)])
def test_extra_master_storage_is_part_of_the_format(kind, bits):
    storage = kind(torch.zeros(SIZE, dtype=torch.bfloat16))
    storage.kept = torch.zeros(SIZE, dtype=kind.kept_dtype)
    [table] = AddressTables().find([(storage, (torch.ones(SIZE),))])
    assert table.format.kept_bits == bits and table.rows[0, 1] == storage.kept.data_ptr()
