"""Stored log-probabilities: the folder."""

import pytest
import torch

from megatron.training.data.stored_logits import IDS, VALUES, StoredLogits, digests


@pytest.mark.parametrize("slash", ["", "/"])
def test_finished_folder_has_the_name_and_the_values(tmp_path, slash):
    folder, tokens = f"{tmp_path}/logits{slash}", torch.arange(6).view(2, 3)
    values, ids = torch.randn(2, 3, 4), torch.randint(9, (2, 3, 4))
    store = StoredLogits.create(folder, "fp32", 9, (2, 3, 4))
    store.write(torch.tensor([1, 0]), torch.arange(3).expand(2, 3), values, ids, digests(tokens))
    store.finish(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
    batch = StoredLogits(folder).read(torch.tensor([0, 1]), tokens.flip(0))
    assert torch.equal(batch[VALUES], values.flip(0)) and torch.equal(batch[IDS], ids.flip(0))
