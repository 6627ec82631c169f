"""Observations of a run: plain data that a worker of the pool returns to the test."""

import collections
import dataclasses


@dataclasses.dataclass
class Batch:
    """One micro-batch as the model got it."""

    training: bool
    samples: list
    tokens: list
    labels: list
    loss_mask: list
    positions: list
    documents: list | None


@dataclasses.dataclass
class Run:
    """Observations of a run on one rank."""

    code: int = 0
    errors: str = ""
    log: str = ""
    rank: int = 0
    initial: dict = dataclasses.field(default_factory=dict)
    """Weights before the first step, this rank's rectangles under global names."""
    weights: dict = dataclasses.field(default_factory=dict)
    gradients: list = dataclasses.field(default_factory=list)
    """Per update: name -> gradient of the mean loss, before clipping."""
    moments: dict = dataclasses.field(default_factory=dict)
    """Kind -> name -> tensor, after the last step."""
    kept: dict = dataclasses.field(default_factory=dict)
    """Name -> extra tensor with which the optimizer stores the exact value of a weight."""
    loaded_moments: dict = dataclasses.field(default_factory=dict)
    """The moments before the first step."""
    rates: list = dataclasses.field(default_factory=list)
    """Per update: {(learning rate, weight decay): names} of the groups of parameters."""
    batches: list = dataclasses.field(default_factory=list)
    modules: dict = dataclasses.field(default_factory=dict)
    """Class -> how many the model has."""
    forwards: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """Class -> forward passes while training, recomputed ones included."""
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """(operation, number format) -> calls from the first step on."""
    order: list = dataclasses.field(default_factory=list)
    """Events while training, in order: forward and backward passes of layers, collectives."""
    formats: dict = dataclasses.field(default_factory=dict)
    """Class -> dtypes of its forward outputs while training."""
    outputs: dict = dataclasses.field(default_factory=dict)
    """Class -> shape of its first forward output."""
    zeros: dict = dataclasses.field(default_factory=dict)
    """Class -> fraction of zeros in its first forward output."""
    kernels: set = dataclasses.field(default_factory=set)
    """GPU kernels that modules were built with."""
    stored: dict = dataclasses.field(default_factory=dict)
    """Name -> shape in memory, padding included."""
    rotary: list | None = None
    """Cosines and sines of the first 8 positions."""
    buckets: list = dataclasses.field(default_factory=list)
    """Elements of each gradient bucket, and its number format."""
    groups: dict = dataclasses.field(default_factory=dict)
    """Axis -> ranks of this rank's process group."""
    records: list = dataclasses.field(default_factory=list)
    """Records of ``metrics.jsonl``."""
    timings: list = dataclasses.field(default_factory=list)
    """Records of ``timing.jsonl``."""
    files: list = dataclasses.field(default_factory=list)
    called: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """Calls of the functions that a row asked to be counted."""
    arguments: list = dataclasses.field(default_factory=list)
    """Arguments of these calls, as text."""
    saved: dict = dataclasses.field(default_factory=dict)
    """Iteration -> names of the tensors of the checkpoint that was written then."""

    def column(self, name, kind="train"):
        """One value of every record of a kind."""
        return [record.get(name) for record in self.records if record["kind"] == kind]

    def statistic(self, name):
        """One statistic of a module, ``layer 1/dropped``, of every step."""
        return [record["statistics"].get(name) for record in self.records if record["kind"] == "train"]

    @property
    def losses(self):
        return self.column("lm loss")

    @property
    def evaluations(self):
        """Validation and test losses, in order."""
        return self.column("lm loss", "valid") + self.column("lm loss", "test")

    @property
    def learning_rates(self):
        return self.column("learning_rate")

    @property
    def num_iterations(self):
        return len(self.losses)

    @property
    def samples(self):
        """Sample numbers that training read, in order."""
        return [sample for batch in self.batches if batch.training for sample in batch.samples]

    @property
    def evaluated(self):
        return [sample for batch in self.batches if not batch.training for sample in batch.samples]

    @property
    def tokens(self):
        """Token ids that training read."""
        return [batch.tokens for batch in self.batches if batch.training]
