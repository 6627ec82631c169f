"""BERT (Devlin et al. 2018), as Megatron-LM has it: a bidirectional encoder that predicts masked tokens, and whether
two text segments are in their original order (Lan et al. 2019).

    x = dropout(E[token] + P[position] + T[type]);  GPT's layers; queries see every token except padding
    y = norm(gelu(x W + b));  loss_t = -log softmax(y_t E^T + c)[label_t]      masked tokens
    p = tanh(x_0 W' + b');    loss = -log softmax(p W'' + b'')[swapped]         the first token's place

If residuals are taken after the norms, this is the published model: the first norm is the embedding's, the next
layer's first norm is the norm after this layer, and the final norm is the norm after the last layer.
"""

from __future__ import annotations

from types import SimpleNamespace as Batch

import numpy as np
import torch
from torch import Tensor

from tests.reference.attention import in_reach
from tests.reference.masked_samples import Masking, Vocabulary, bert_samples
from tests.reference.model import Model, erf_gelu
from tests.reference.settings import Settings
from tests.reference.training import Recipe
from tests.reference.weights import Maker, Weights


def initial_weights(c: Settings) -> Weights:
    make, h, pair = Maker(c), c.hidden_size, not c.bert_no_binary_head
    types = c.bert_num_tokentypes or 2 * pair
    make.embeddings(**{"tokentype": types} if types else {})
    for layer in range(c.num_layers):
        make.layer(f"encoder.layers.{layer}", False)
    make.norm("encoder.final_layernorm", h)
    make.linear("lm_head.dense", h, h, bias=make.bias)
    make.norm("lm_head.layer_norm", h)
    if c.untie_embeddings_and_output_weights:
        make.matrix("output_layer.weight", c.vocab_size, h)
    make.weights["output_layer.bias"] = torch.zeros(c.vocab_size, dtype=torch.float64)
    if pair:
        make.linear("pooler.dense", h, h, bias=True)
        make.linear("binary_head", 2, h, bias=True)
    return make.weights


def batch_of(c: Settings, samples: list[dict], first: int) -> Batch:
    """Arrays [b, s] of samples one above the other, which are ``first`` and on of the stream."""
    text, types, labels, mask, real = (
        np.stack([sample[name] for sample in samples])
        for name in ("text", "types", "labels", "loss_mask", "padding_mask")
    )
    return Batch(tokens=text, types=types, labels=labels, loss_mask=mask.astype(float), real=real == 1,
                 swapped=np.array([sample["is_random"] for sample in samples]),
                 positions=np.tile(np.arange(text.shape[1]), (len(text), 1)),
                 samples=np.arange(first, first + len(samples)))  # fmt: skip


class Bert(Model):
    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        x = self.hidden()
        labels, mask = torch.from_numpy(self.batch.labels), torch.from_numpy(self.batch.loss_mask)
        result = {"lm loss": ((self.cross_entropy(self.transformed(x), labels) * mask).sum(), mask.sum())}
        if "binary_head.weight" in self.weights:
            order = self.order(x).log_softmax(dim=-1).gather(-1, torch.from_numpy(self.batch.swapped)[:, None])
            result["sop loss"] = -order.sum(), torch.tensor(float(len(order)))
        return result

    def hidden(self) -> Tensor:
        """[b, s, h] of the last layer."""
        x = self.embedding(torch.from_numpy(self.batch.tokens))
        for layer in range(self.c.num_layers):
            x = self.layer(x, f"encoder.layers.{layer}", layer + 1)
        return self.norm(x, "encoder.final_layernorm")

    def raw_embedding(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        types = self.weights.get("embedding.tokentype_embeddings.weight")
        x = super().raw_embedding(tokens, positions)
        return x if types is None else x + types[torch.from_numpy(self.batch.types)]

    def visible(self, number: int) -> Tensor:
        real = torch.from_numpy(self.batch.real)
        return in_reach(self.c, number, real.shape[1], causal=False) & real[:, None, None]

    def transformed(self, x: Tensor) -> Tensor:
        """Return the output layer's input [b, s, h]."""
        return self.norm(erf_gelu(self.linear(x, "lm_head.dense")), "lm_head.layer_norm")

    def order(self, x: Tensor) -> Tensor:
        """[b, 2]: in their order, swapped."""
        return self.linear(torch.tanh(self.linear(x[:, 0], "pooler.dense")), "binary_head")


def recipe(v: Vocabulary) -> Recipe:
    """Training on documents of sentences."""

    def cut(c: Settings, documents: list, expected: int | None) -> list[dict]:
        pair, how = not c.bert_no_binary_head, Masking(c.mask_prob)
        return bert_samples(documents, expected, c.seq_length, c.short_seq_prob, c.seed, v, how, pair)

    return Recipe(cut, batch_of, Bert, initial_weights)
