"""Read new tokens of a text without reading the text again: keys and values are kept, as in transformers.

The model is the GPT of train_gpt.py, its code and its weights. Only Attention.forward is written again, in Reader.attend: a change
of one must be made in the other.
"""

import copy
import math
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cache:
    """Keys and values of up to `length` tokens, with the methods of transformers' caches that `hidden` calls. Its memory is
    reserved at once: growing would copy everything for each token."""

    def __init__(self, length: int):
        self.length = length
        self.layers: list[SimpleNamespace] = []

    def get_seq_length(self) -> int:
        """The number of tokens in the cache."""
        return self.layers[0].count if self.layers else 0

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, K, T, any width); return those of all tokens so far."""
        if layer == len(self.layers):
            room = [t.new_empty(*t.shape[:2], self.length, t.size(3)) for t in (keys, values)]
            self.layers.append(SimpleNamespace(keys=room[0], values=room[1], count=0))
        kept = self.layers[layer]
        start, kept.count = kept.count, kept.count + keys.size(2)
        kept.keys[:, :, start:kept.count] = keys
        kept.values[:, :, start:kept.count] = values
        return kept.keys[:, :, :kept.count], kept.values[:, :, :kept.count]


def window_start(length: int, context: int) -> int:
    """Where to begin reading a text of `length` tokens. Positions in a cache are fixed, so the window cannot slide by one token:
    it moves by half a context, and is read again then."""
    step = max(1, context // 2)
    return math.ceil(max(0, length - context) / step) * step


def twin(module: nn.Module, **replaced) -> nn.Module:
    """Return a module of the same tensors and hooks with some attributes replaced. The original is left as it is."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    other._buffers = dict(module._buffers)
    for name, value in replaced.items():
        setattr(other, name, value)
    return other


class Reader:
    """Reads `count` tokens that follow those in a cache. mask: bool (B, tokens in the cache + count), False for padding on the
    left; None: there is none.

    Smear and shifted keys need the token before. The first of new tokens finds it in the cache: values have more columns there
    (in layer 0 the embedding, in each layer the key before it is shifted), so that whatever selects or crops values, such as a
    beam search, does so with them, too."""

    def __init__(self, gpt: nn.Module, cache, count: int, mask: Tensor | None):
        self.trainer = sys.modules[type(gpt).__module__]  # train_gpt, also as a module of an exported folder
        self.gpt, self.cache, self.count, self.mask = gpt, cache, count, mask
        self.past = int(cache.get_seq_length())
        self.columns: list[Tensor] = []  # what the next layer keeps besides its values, each (B, K, T, width)
        self.visible = None  # which keys the queries see, bool (B or 1, 1, T, keys); None: all, or all up to their own
        if mask is not None or 0 < self.past and count > 1:
            keys = torch.arange(self.past + count, device=gpt.skip_weights.device)
            queries = keys[self.past:, None]
            self.visible = (keys <= queries)[None, None]
            if mask is not None:  # Padding sees itself: a softmax over nothing would be NaN.
                self.visible = self.visible & mask[:, None, None] | (keys == queries)

    def behind(self, x: Tensor, layer: int) -> Tensor:
        """Put the token before (zeros before the first) in front of x (B, T, ...); keep x for the next one."""
        kv_heads = self.gpt.config.num_kv_heads
        column = x.reshape(*x.shape[:2], kv_heads, -1).transpose(1, 2)
        before = torch.zeros_like(column[:, :, :1])
        if self.past:
            head_width = self.gpt.config.model_dim // self.gpt.config.num_heads
            start = head_width + sum(other.size(3) for other in self.columns)
            before = self.cache.layers[layer].values[:, :, self.past - 1:self.past, start:start + column.size(3)]
        self.columns.append(column)
        return torch.cat((before.transpose(1, 2).reshape_as(x[:, :1]), x), 1)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings (B, T, D) of tokens (B, T), with smear (B, 1 + T, D): the token before comes first. 0 for padding,
        which then is 0 in every layer."""
        x = self.gpt.tok_emb.forward(tokens).to(self.gpt.compute_dtype)  # The twin's call runs the hooks.
        if self.mask is not None:
            x = x * self.mask[:, self.past:, None]
        return x if self.gpt.smear is None else self.behind(x, 0)

    def attend(self, attn: nn.Module, layer: int, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        """The trainer's Attention.forward of x (B, T or 1 + T, D) with the cache. The token before, which is done, gets zeros."""
        rms_norm, rotate, linear = self.trainer.rms_norm, self.trainer.rotate, self.trainer.linear
        config = attn.config
        layers = zip((attn.c_q, attn.c_k, attn.c_v), attn.heads)
        q, k, v = (linear(x[:, -self.count:], c).unflatten(-1, (heads, -1)) for c, heads in layers)
        own = v
        if config.shift_keys:
            k = self.trainer.shift_keys(self.behind(k, layer))[:, 1:]
        q = rotate(rms_norm(q, attn.q_gain.to(q.dtype)[:, None]), cos, sin)
        k = rotate(rms_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, C)
        k, kept = self.cache.update(k, torch.cat((v, *self.columns), -1), layer)
        self.columns = []
        tokens = self.past + self.count  # Caches of a fixed size return more.
        y = self.attention(q, k[:, :, :tokens], kept[:, :, :tokens, :v.size(3)], config.attn)
        y = y.transpose(1, 2)
        if config.exclusive_attn:
            y = self.trainer.remove_own_value(y, own)
        y = linear(y.flatten(2), attn.proj) * scale.to(y.dtype)
        return F.pad(y, (0, 0, x.size(1) - self.count, 0))

    def feed(self, mlp: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
        """The trainer's MLP.forward, but the outputs are scaled, not the weights: that is faster for a few tokens."""
        y = mlp.forward(x[:, -self.count:], None) * scale.to(x.dtype)
        return F.pad(y, (0, 0, x.size(1) - self.count, 0))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """The trainer's causal_attention of q (B, H, T, C) to k, v (B, K, all tokens so far, C)."""
        if self.past == 0 and self.visible is None:
            return self.trainer.causal_attention(q, k, v, kernel)
        group = q.size(1) // k.size(1)
        visible = self.visible if self.visible is None else self.visible.repeat(1, 1, group, 1)
        grouped = q.unflatten(1, (-1, group)).flatten(2, 3)  # (B, K, H/K * T, C): no copies of keys
        return F.scaled_dot_product_attention(grouped, k, v, visible).unflatten(2, (group, -1)).flatten(1, 2)


def hidden(gpt: nn.Module, tokens: Tensor, cache, mask: Tensor | None = None) -> Tensor:
    """Return gpt.hidden (B, T, D) of tokens (B, T) that follow those in the cache, a Cache or one of transformers', and append
    them to it. mask: see Reader. There must be at most TRAIN_SEQ_LEN tokens in all."""
    reader = Reader(gpt, cache, tokens.size(1), mask)
    # The model's own modules stay as they are: others may be using them.
    blocks = nn.ModuleList(
        twin(block, attn=twin(block.attn, forward=partial(reader.attend, block.attn, layer)),
             mlp=twin(block.mlp, forward=partial(reader.feed, block.mlp)))
        for layer, block in enumerate(gpt.blocks))
    tok_emb = twin(gpt.tok_emb, forward=reader.embed)
    other = twin(gpt, tok_emb=tok_emb, blocks=blocks, rotary=gpt.rotary[:, reader.past:])
    return other.hidden(tokens)[:, -tokens.size(1):]


if __name__ == "__main__":
    print(f"usage: other scripts import this file. {__doc__}")
