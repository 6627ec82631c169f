"""The training task of the family: KL(teacher || student) of every token's distribution."""

from functools import partial

from megatron.core import parallel_state
from megatron.core.tensor_parallel.operators import gather_from_region
from megatron.core.tokenizers import build_tokenizer
from megatron.training.checkpoint.companion_settings import load_companion_config
from megatron.training.tasks.gpt import GPTTask
from megatron.training.tasks.language_model import mock_data
from tests.test_utils.toy_distillation.family import TeacherConfig


def companions(cfg):
    folder = cfg.group(TeacherConfig).teacher
    return {} if folder is None else {"teacher": load_companion_config(cfg, folder)}


class DistillationTask(GPTTask):
    """Student on random samples."""

    losses = ("kl",)

    def __init__(self, cfg, tokenizer=None):
        super().__init__(cfg, tokenizer or build_tokenizer(cfg.tokenizer))

    def train_valid_test_datasets_provider(self, num_samples):
        return mock_data(self, num_samples)

    def forward_step(self, data_iterator, model):
        batch = self.get_batch(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], sample_index=batch["sample_index"])
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch, output):
        tp = parallel_state.get_process_groups().tp
        student, teacher = (
            gather_from_region(logits, tp)[..., : self.vocab_size].log_softmax(-1)
            for logits in (output.trained, output.frozen["teacher"])
        )
        mask = batch["loss_mask"].to(student.dtype)
        return {"kl": (((teacher.exp() * (teacher - student)).sum(-1) * mask).sum(), mask.sum())}


def with_token_losses(kind):
    """A task that compares token losses, as losses with a reference model do."""

    class TokenLosses(kind):
        losses = ("margin",)
        forward_step = GPTTask.forward_step

        def loss_func(self, batch, output):
            mask = batch["loss_mask"].to(output.trained.dtype)
            return {"margin": (((output.trained - output.frozen["teacher"]).exp() * mask).sum(), mask.sum())}

    return TokenLosses
