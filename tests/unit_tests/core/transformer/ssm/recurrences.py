"""Linear recurrences, token by token, as their papers state them: what chunks are compared with."""

import torch


def delta_rule_by_token(query, key, value, log_decay, beta, follows, state):
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q, per value head; g per head or per row of S. The same
    arguments and results as ``ssm/delta_rule.py``, [s, b, heads, channels] each."""
    outputs, shared = [], value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    for token in range(len(value)):
        if follows is not None:
            state = state * follows[token][:, None, None, None]
        decayed = state * log_decay[token].exp().reshape(*state.shape[:2], -1, 1)
        predicted = torch.einsum("bhk,bhkv->bhv", key[token], decayed)
        correction = beta[token].unsqueeze(-1) * (value[token] - predicted)
        state = decayed + torch.einsum("bhk,bhv->bhkv", key[token], correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[token], state))
    return torch.stack(outputs), state


def state_space_by_token(query, key, value, log_decay, follows, state):
    """S = exp(g) S + k v^T; o = S^T q, per head: ``ssm/state_space.py``."""
    outputs, shared = [], value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    for token in range(len(value)):
        if follows is not None:
            state = state * follows[token][:, None, None, None]
        written = torch.einsum("bhk,bhv->bhkv", key[token], value[token])
        state = state * log_decay[token].exp()[..., None, None] + written
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[token], state))
    return torch.stack(outputs), state


def convolution_by_token(x, follows, tail, weight):
    """sum_i weight[i] x_(t - i) back to the beginning of the document, per channel. ``x`` [s, b, c], ``tail``
    [b, taps - 1, c]."""
    taps, outputs = weight.shape[1], torch.zeros_like(x)
    for row in range(x.shape[1]):
        inputs = torch.cat((tail[row].to(x.dtype), x[:, row]))
        for token in range(len(x)):
            for distance in range(taps):
                outputs[token, row] += inputs[taps - 1 + token - distance] * weight[:, -1 - distance]
                at = token - distance
                if follows is not None and at >= 0 and not follows[at, row]:
                    break
    return outputs
