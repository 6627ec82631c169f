"""T5 (Raffel et al. 2020), as Megatron-LM has it: an encoder of the remaining text, a decoder of the masked spans.

    e = norm(layers(E[token] + P[position]))                        encoder; queries see every token except padding
    x = x + attention(norm(x));  x = x + cross(norm(x), e);  x = x + mlp(norm(x))      decoder; queries from x see
    loss_t = -log softmax(x_t E^T + c)[label_t]                                        no later token of x, but all of e

Relative positions: a bias per head on the scores of self-attention, one table for all layers of a stack, by buckets of
distances that grow with the distance (section 2.1 and the published code).
"""

from __future__ import annotations

import math
from types import SimpleNamespace as Batch

import numpy as np
import torch
from torch import Tensor

from tests.reference.attention import attention, in_reach
from tests.reference.masked_samples import Masking, Vocabulary, t5_samples
from tests.reference.model import Model
from tests.reference.settings import Settings
from tests.reference.training import Recipe
from tests.reference.weights import Maker, Weights, head_dim, num_groups

CROSS_NORMS = {"pre_cross_attn_layernorm": "post", "post_cross_attention_layernorm": "pre"}
"""Norm name -> the placement of norms that lacks this norm."""
TABLE = "relative_pos_emb.relative_attention_bias.weight"


def depths(c: Settings) -> dict[str, int]:
    return {"encoder": c.num_layers, "decoder": c.decoder_num_layers or c.num_layers}


def initial_weights(c: Settings) -> Weights:
    make = Maker(c)
    make.embeddings()
    for part, depth in depths(c).items():
        for layer in range(depth):
            make.layer(f"{part}.layers.{layer}", False)
            if part == "decoder":
                cross_attention(make, f"{part}.layers.{layer}")
        make.norm(f"{part}.final_layernorm", c.hidden_size)
        if c.position_embedding_type == "relative":
            make.matrix(f"{part}_{TABLE}", c.relative_attention_num_buckets, c.num_attention_heads)
    if c.untie_embeddings_and_output_weights:
        make.matrix(f"{T5.head}.weight", c.vocab_size, c.hidden_size)
    elif not c.scale_decoder_outputs:
        make.weights[f"{T5.head}.bias"] = torch.zeros(c.vocab_size, dtype=torch.float64)
    return make.weights


def cross_attention(make: Maker, at: str) -> None:
    c, h, d = make.c, make.c.hidden_size, head_dim(make.c)
    for name, unless in CROSS_NORMS.items():
        if c.norm_placement != unless:
            make.norm(f"{at}.{name}", h)
    make.linear(f"{at}.cross_attention.linear_q", c.num_attention_heads * d, h, bias=make.bias)
    make.linear(f"{at}.cross_attention.linear_kv", 2 * num_groups(c) * d, h, bias=make.bias)
    make.linear(f"{at}.cross_attention.linear_proj", h, c.num_attention_heads * d, bias=make.bias, std=make.into_stream)


def batch_of(c: Settings, samples: list[dict], first: int) -> Batch:
    """Arrays of samples one above the other, which are ``first`` and on of the stream: [b, encoder's length], [b,
    decoder's length]."""
    names = "text_enc", "text_dec", "labels", "loss_mask", "enc_mask"
    encoder, decoder, labels, mask, real = (np.stack([sample[name] for sample in samples]) for name in names)
    return Batch(encoder=encoder, decoder=decoder, labels=labels, loss_mask=mask.astype(float), real=real == 1,
                 samples=np.arange(first, first + len(samples)))  # fmt: skip


class T5(Model):
    """Both stacks; ``part`` is the one that computes."""

    head, part = "lm_head.output_layer", "encoder"

    def losses(self) -> Tensor:
        """Loss of every token of the decoder [b, s]."""
        return self.cross_entropy(self.hidden(), torch.from_numpy(self.batch.labels))

    def hidden(self) -> Tensor:
        """[b, s, h] of the decoder's last layer."""
        self.encoded = self.stack("encoder", torch.from_numpy(self.batch.encoder))
        decoded = self.stack("decoder", torch.from_numpy(self.batch.decoder))
        return decoded / math.sqrt(self.c.hidden_size) if self.c.scale_decoder_outputs else decoded

    def stack(self, part: str, tokens: Tensor) -> Tensor:
        self.part, self.length = part, tokens.shape[1]
        self.batch.positions = np.tile(np.arange(self.length), (len(tokens), 1))
        x = self.embedding(tokens)
        for layer in range(depths(self.c)[part]):
            x = self.layer(x, f"{part}.layers.{layer}", layer + 1)
        return self.norm(x, f"{part}.final_layernorm")

    def between(self, x: Tensor, at: str, number: int) -> Tensor:
        """Apply cross-attention after self-attention, in the decoder."""
        if self.part == "encoder":
            return x
        before, after = (f"{at}.{name}" if self.c.norm_placement != unless else None
                         for name, unless in CROSS_NORMS.items())  # fmt: skip
        normed = x if before is None else self.norm(x, before)
        branch = attention(self, normed, f"{at}.cross_attention", number, self.encoded)
        branch = branch if after is None else self.norm(branch, after)
        previous = self.c.apply_residual_connection_post_layernorm
        return (normed if previous else x) + self.dropout(branch, *self.site(number), "cross attention output")

    def site(self, number: int) -> tuple[str, int]:
        return "layer", number + (depths(self.c)["encoder"] if self.part == "decoder" else 0)

    def visible(self, number: int) -> Tensor:
        is_decoder = self.part == "decoder"
        observed = in_reach(self.c, number, self.length, causal=is_decoder)
        return observed if is_decoder else observed & self.visible_of_source()

    def visible_of_source(self) -> Tensor:
        return torch.from_numpy(self.batch.real)[:, None, None]

    def position_bias(self) -> Tensor | float:
        """[a, q, k] of the table [buckets, a]."""
        if self.c.position_embedding_type != "relative":
            return 0.0
        place = torch.arange(self.length)
        return self.weights[f"{self.part}_{TABLE}"][bucket(self.c, place - place[:, None], self.part)].movedim(-1, 0)


def bucket(c: Settings, distance: Tensor, part: str) -> Tensor:
    """Return the bucket index of key minus query. The encoder's upper half is for keys after the query. In each half
    (in the decoder, whose keys precede the query: in all buckets) the first half holds one distance each; the rest
    grows by a factor up to the longest distance."""
    buckets, offset = c.relative_attention_num_buckets, 0
    if part == "encoder":
        buckets = buckets // 2
        offset, distance = buckets * (distance > 0), distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    single = buckets // 2
    steps = (distance.clamp(min=1).float() / single).log() / math.log(c.relative_attention_max_distance / single)
    far = (single + (steps * (buckets - single)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < single, distance, far)


def recipe(v: Vocabulary) -> Recipe:
    """Return the recipe for training on documents of several sentences, or of one each."""

    def cut(c: Settings, documents: list, expected: int | None) -> list[dict]:
        lengths = c.seq_length, c.decoder_seq_length
        how = Masking(c.mask_prob, 10, geometric=True)
        return t5_samples(documents, expected, lengths, c.short_seq_prob, c.seed, v, how)

    return Recipe(cut, batch_of, T5, initial_weights)
