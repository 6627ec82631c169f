"""A decoder-only transformer, from the papers: the loss of every token.

    x = dropout(E[token] + P[position])
    x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))        each layer; pre-norm: Radford et al. 2019
    x = x + dropout(attention(norm(x))) + dropout(mlp(norm'(x)))               parallel: Wang and Komatsuzaki 2021
                                                                               norm' may be norm (Phi, Falcon)
    loss_t = -log softmax(norm(x_t) W^T)[label_t]                              W = E where tied: Press and Wolf 2017

Norms: Ba et al. 2016, Zhang and Sennrich 2019; after branches, and soft caps: OLMo 2 and Gemma 2 (2024). Activations:
Hendrycks and Gimpel 2016, So et al. 2021, Shazeer 2020. Dropout: Srivastava et al. 2014. Multi-token prediction:
DeepSeek-V3 (2024), section 2.2, with the embedding before the hidden state, as in its published weights. Attention and
mixture of experts are in separate files.

Legend: b batch, s sequence, h hidden, a heads, f feed-forward.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import fp8, random_numbers
from tests.reference.attention import attention, capped, in_reach
from tests.reference.data import Batch
from tests.reference.experts import mixture
from tests.reference.settings import Settings
from tests.reference.weights import Weights


class Model:
    """A function of weights, a global batch and router states. Dropout and side losses only in training;
    the ``size`` of micro-batches affects only experts."""

    head = "output_layer"

    def __init__(self, c: Settings, weights: Weights, batch: Batch, routers: dict, size: int, training: bool) -> None:
        self.c, self.weights, self.batch, self.routers, self.training = c, weights, batch, routers, training
        self.micro_batch_size = size
        self.aux_losses: dict[str, list[tuple[float, Tensor]]] = {}
        """Name -> (coefficient, mean) of every layer with experts."""
        self.later_losses: list[tuple[Tensor, Tensor]] = []
        """Losses of tokens further ahead: (sum, number of tokens) of every sequence [b]."""
        self.histories: fp8.Histories = {}

    def losses(self) -> Tensor:
        """Loss of every token [b, s]."""
        c, tokens = self.c, torch.from_numpy(self.batch.tokens)
        x = self.embedding(tokens)
        for layer in range(c.num_layers):
            x = self.layer(x, f"decoder.layers.{layer}", layer + 1)
        x = self.norm(x, "decoder.final_layernorm")
        labels, mask = torch.from_numpy(self.batch.labels), torch.from_numpy(self.batch.loss_mask)
        positions = torch.from_numpy(self.batch.positions)
        losses = self.cross_entropy(x, labels)
        for depth in range(c.mtp_num_layers or 0 if self.training else 0):
            tokens, positions, labels, mask = (F.pad(x[:, 1:], (0, 1)) for x in (tokens, positions, labels, mask))
            depth = 0 if c.mtp_use_repeated_layer else depth  # the same layer, whatever it is applied to
            at = f"mtp.layers.{depth}"
            both = self.norm(self.embedding(tokens, positions), f"{at}.enorm"), self.norm(x, f"{at}.hnorm")
            x, number = self.linear(torch.cat(both, dim=-1), f"{at}.eh_proj"), c.num_layers + depth + 1
            x = self.norm(self.layer(x, f"{at}.mtp_model_layer", number), f"{at}.final_layernorm")
            self.later_losses.append(((self.cross_entropy(x, labels) * mask).sum(dim=1), mask.sum(dim=1)))
        return losses

    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each loss by name: its sum over the batch, and over how many."""
        mask = torch.from_numpy(self.batch.loss_mask)
        return {"lm loss": ((self.losses() * mask).sum(), mask.sum())}

    def site(self, number: int) -> tuple[str, int]:
        """Layer ``number`` in the keys of dropout masks."""
        return "layer", number

    def visible(self, number: int) -> Tensor:
        """Keys that a query sees [b, 1, q, k]: those in reach, of its document."""
        documents = torch.from_numpy(self.batch.documents)
        same = documents[:, :, None] == documents[:, None, :]
        return (in_reach(self.c, number, self.c.seq_length, causal=True) & same)[:, None]

    def position_bias(self) -> Tensor | float:
        """Added to scores."""
        return 0.0

    def embedding(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``positions`` int64 [b, s] of the tokens; None: the batch's."""
        x = self.raw_embedding(tokens, positions) * self.c.embedding_multiplier
        return self.dropout(x * math.sqrt(self.c.hidden_size) if self.c.apply_embedding_scaling else x, "embedding")

    def raw_embedding(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        if self.c.position_embedding_type == "learned_absolute":
            positions = torch.from_numpy(self.batch.positions) if positions is None else positions
            x = x + self.weights["embedding.position_embeddings.weight"][positions + self.c.learned_position_offset]
        return x

    def layer(self, x: Tensor, at: str, number: int) -> Tensor:
        previous, c = self.c.apply_residual_connection_post_layernorm, self.c
        factor = c.residual_multiplier

        def norm(y: Tensor, name: str, unless: str) -> Tensor:
            return y if c.norm_placement == unless else self.norm(y, f"{at}.{name}_layernorm")

        normed = norm(x, "input", "post")
        branch = norm(attention(self, normed, f"{at}.self_attention", number), "post_self_attention", "pre")
        x = normed if c.embed_layernorm and number == 1 else x
        seen, x = x, (normed if previous else x) + factor * self.dropout(branch, *self.site(number), "attention output")
        x = self.between(x, at, number)
        if not c.share_parallel_norm:
            normed = norm(seen if c.use_parallel_residual else x, "pre_mlp", "post")
        has_experts = f"{at}.mlp.router.weight" in self.weights
        branch = norm((mixture if has_experts else Model.mlp)(self, normed, f"{at}.mlp"), "post_mlp", "pre")
        return (normed if previous else x) + factor * self.dropout(branch, *self.site(number), "mlp output")

    def logits(self, x: Tensor) -> Tensor:
        tied = not self.c.untie_embeddings_and_output_weights
        logits = x @ self.weights["embedding.word_embeddings.weight" if tied else f"{self.head}.weight"].T
        logits = (logits + self.weights.get(f"{self.head}.bias", 0.0)) / self.c.logits_scaling
        return capped(logits, self.c.final_logit_softcapping)

    def between(self, x: Tensor, at: str, number: int) -> Tensor:
        """Apply the sublayers between attention and feed-forward network; here none."""
        return x

    def cross_entropy(self, x: Tensor, labels: Tensor) -> Tensor:
        """A label below 0 stands for none."""
        logits = self.logits(x)
        return logits.logsumexp(dim=-1) - logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    def linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """x W^T + b; of weights that many experts share a tensor of, with one's."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if expert is not None:
            weight, bias = weight[expert], None if bias is None else bias[expert]
        elif fp8.covers(self.c, name):
            y = fp8.linear(self.c, x, weight, name, self.histories, self.micro_batch_size, self.training)
            return y if bias is None else y + bias
        return x @ weight.T if bias is None else x @ weight.T + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"] + float(self.c.apply_layernorm_1p)
        y = x
        if self.c.normalization == "LayerNorm":
            y = y - y.mean(dim=-1, keepdim=True)
        y = y / (y.square().mean(dim=-1, keepdim=True) + self.c.norm_epsilon).sqrt() * weight
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def dropout(self, x: Tensor, *site: str | int) -> Tensor:
        """Drop entries of hidden states [b, s, h] or attention weights [b, a, q, k]."""
        is_attention = x.dim() == 4
        rate = self.c.attention_dropout if is_attention else self.c.hidden_dropout
        if not self.training or not rate:
            return x
        key = random_numbers.key_of(self.c.seed, "dropout", *site)
        sample, position = self.batch.samples[:, None], torch.arange(x.shape[-2]).numpy()
        row = 0
        if is_attention:
            sample, row = sample[..., None], torch.arange(x.shape[1])[:, None].numpy()
        retained = torch.from_numpy(random_numbers.keep_mask(rate, key, sample, position, row, x.shape[-1]))
        return torch.where(retained, x / random_numbers.kept_share(rate), 0)

    def mlp(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        y = self.activation(self.linear(x, f"{name}.linear_fc1", expert))
        return self.linear(y, f"{name}.linear_fc2", expert)

    def activation(self, y: Tensor) -> Tensor:
        """Gated forms take gate and linear half from the upper and lower rows of fc1."""
        c = self.c
        if c.swiglu or c.quick_geglu or c.geglu:
            gate, half = y.chunk(2, dim=-1)
            if (limit := c.activation_func_clamp_value) is not None:
                gate, half = gate.clamp(max=limit), half.clamp(-limit, limit)
            gelu = erf_gelu if c.exact_gelu else tanh_gelu
            gate = gelu(gate) if c.geglu else gate * torch.sigmoid((1.0 if c.swiglu else 1.702) * gate)
            y = gate * (half + c.glu_linear_offset)
        elif c.squared_relu or c.relu:
            y = F.relu(y) ** (2 if c.squared_relu else 1)
        elif c.disable_bias_linear or c.no_bias_gelu_fusion or c.exact_gelu:
            y = erf_gelu(y)
        else:  # with a bias Megatron-LM's fused kernel takes the approximation
            y = tanh_gelu(y)
        return y


def tanh_gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


def erf_gelu(y: Tensor) -> Tensor:
    return y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
