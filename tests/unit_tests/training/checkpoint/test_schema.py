"""A crafted manifest with a valid checksum ends in one message or in a correct run."""

import copy
import hashlib
import json
import random

import pytest

from megatron.core.config.errors import UserError
from megatron.core.dist_checkpointing import CheckpointError, manifest
from megatron.training.checkpoint.schema import MAX_COUNT
from megatron.training.checkpoint.settings import apply_checkpoint_args
from tests.test_utils.checkpointed_run import Run, settings

VALUES = [
    None, True, -1, 0, 3, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, float("nan"), float("inf"), "", "7", "x" * 5000,
    "../../etc/passwd", [], [None], [[[]]], [2**62, 2**62], {}, {"a": {"b": []}}, [{}],
]  # fmt: skip


def places(value, path=()):
    """Paths to every entry of nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(content, generator, all_places):
    result = copy.deepcopy(content)
    path = generator.choice(all_places)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    kind = generator.choice(["replace", "replace", "replace", "delete", "add"])
    if kind == "delete":
        del parent[path[-1]]
    elif kind == "add" and isinstance(parent, dict):
        parent["unknown"] = generator.choice(VALUES)
    else:
        parent[path[-1]] = generator.choice(VALUES)
    return path, result


def rewritten(path, content):
    path.write_bytes(manifest.encode(content))


@pytest.fixture
def forged(two):
    """The newest checkpoint's manifest: its path and content."""
    path = two / "iter_0000002" / "metadata.json"
    content = json.loads(path.read_bytes())
    del content["sha256"]
    return path, content


def test_forged_manifests_end_in_one_message(two, forged):
    path, content = forged
    generator = random.Random(7)
    everywhere = list(places(content))
    structure = [place for place in everywhere if place[:2] != ("objects", "args")]
    refused = 0
    for number in range(300):
        place, forgery = mutated(content, generator, everywhere if number % 4 == 0 else structure)
        rewritten(path, forgery)
        for cfg in (settings(two), settings(two, finetune=True)):
            run = Run(cfg)
            try:
                run.load()
            except UserError as error:
                assert str(two) in str(error) or "schedule differs" in str(error), place
                assert len(str(error)) < 20_000, place
                refused += 1
            else:
                state = run.state
                assert type(state.iteration) is int and 0 <= state.iteration <= MAX_COUNT, place
                assert type(state.consumed_train_samples) is int and state.consumed_train_samples >= 0, place
            run.checkpointer.close()
    assert refused > 250


@pytest.mark.parametrize("change", [
    lambda o: o.update(iteration=float("nan")), lambda o: o.update(iteration=-2), lambda o: o.update(iteration=True),
    lambda o: o["train_state"].update(iteration=3), lambda o: o["train_state"].update(consumed_train_samples=-8),
    lambda o: o["train_state"].update(floating_point_operations=float("inf")), lambda o: o["train_state"].clear(),
    lambda o: o.update(train_state=[]), lambda o: o.pop("args"), lambda o: o.update(args=[["a", 1]]),
    lambda o: o["optimizer"].update(step=float("nan")), lambda o: o["optimizer"].update(grad_scaler={"scale": 0}),
    lambda o: o["scheduler"].update(num_steps=10**400), lambda o: o["scheduler"].update(max_lr="1"),
    lambda o: o.update(tokenizer=5), lambda o: o["versions"].update(torch=2),
])  # fmt: skip
def test_counters_that_count_nothing_are_rejected(two, forged, change):
    path, content = forged
    change(content["objects"])
    rewritten(path, content)
    with pytest.raises(CheckpointError, match=r"iter_0000002/metadata\.json: not as training writes it"):
        Run(settings(two)).load()


def test_settings_of_the_wrong_type_are_rejected_before_they_are_used(two, forged):
    path, content = forged
    stored = content["objects"]["args"]
    expected = settings(two, use_checkpoint_args=True, num_layers=None, hidden_size=None)
    names = "num_layers hidden_size swiglu normalization rotary_base window_attn_skip_freq vocab_file"
    for name in names.split():
        for value in VALUES:
            rewritten(path, {**content, "objects": {**content["objects"], "args": {**stored, name: value}}})
            try:
                selected = getattr(apply_checkpoint_args(expected).flat, name)
            except CheckpointError as error:
                assert f"{name} is" in str(error)
            else:
                assert not isinstance(selected, dict)
                assert name != "num_layers" or type(selected) in (int, type(None))
                assert name != "swiglu" or type(selected) is bool
    rewritten(path, {**content, "objects": {**content["objects"], "args": 5}})
    with pytest.raises(CheckpointError, match=r"metadata\.json: args is not a table"):
        apply_checkpoint_args(expected)


def test_nesting_without_end_is_rejected(two):
    path = two / "iter_0000002" / "metadata.json"
    body = b'{"files":' + b"[" * 200_000
    path.write_bytes(body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    with pytest.raises(CheckpointError, match="metadata.json: not JSON"):
        Run(settings(two)).load()


def test_rectangles_that_overlap_do_not_hide_a_hole(two, forged):
    """Two pieces that add up to the size of a tensor, one of them twice in the same place."""
    path, content = forged
    name, entry = next((n, e) for n, e in content["tensors"].items() if e["shape"] == [16, 8])
    chunk = {**entry["chunks"][0], "shape": [8, 8]}
    entry["chunks"] = [chunk, dict(chunk)]
    rewritten(path, content)
    with pytest.raises(CheckpointError, match=f"{name} of shape .* is not covered exactly once"):
        Run(settings(two)).load()
