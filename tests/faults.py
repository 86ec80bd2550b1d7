"""Faults to plant in a converted model: each makes one module depend on the batch in one known way, on any machine."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

ATTENTION = "split_by_length"


class StockProduct(nn.Linear):
    """Cuts the sum in two when there are more than two rows, as a kernel with split-K does."""

    def forward(self, input):
        weight, cut = self.weight.t(), self.in_features // 3
        if input.shape[0] <= 2:
            return torch.bmm(input, weight.expand(input.shape[0], -1, -1))
        left, right = (w.expand(input.shape[0], -1, -1) for w in (weight[:cut], weight[cut:]))
        return torch.bmm(input[..., :cut], left) + torch.bmm(input[..., cut:], right)


class RowCountNorm(LlamaRMSNorm):
    """Adds up in another way from 64 rows on."""

    def forward(self, hidden_states):
        squares = hidden_states.float() ** 2
        cut = squares.shape[-1] // 3
        if squares[..., 0].numel() < 64:
            total = squares.sum(-1, keepdim=True)
        else:
            total = squares[..., :cut].sum(-1, keepdim=True) + squares[..., cut:].sum(-1, keepdim=True)
        scale = torch.rsqrt(total / squares.shape[-1] + self.variance_epsilon)
        return self.weight * (hidden_states * scale).to(hidden_states.dtype)


class UnmaskedAttention(BertSelfAttention):
    """Sees the padding."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states, None, **kwargs)


class AddingInAnyOrder(LlamaMLP):
    """Adds three parts of every token in memory; their order follows the number of tokens, as that of experts does."""

    def forward(self, x):
        y = super().forward(x)
        rows = y.flatten(0, -2)
        order = [0, 1, 2] if len(rows) % 2 else [2, 0, 1]
        parts = [rows * 0.1, rows * 0.7, rows * 0.2]
        parts = torch.cat([parts[index] for index in order])
        where = torch.arange(len(rows), device=rows.device).repeat(3)
        return torch.zeros_like(rows).index_add_(0, where, parts).view_as(y)


def split_by_length(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Causal attention without padding, (batch, heads, tokens, head) states; from 38 keys on in two parts."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    weights = F.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    cut = kv_len // 2 if kv_len >= 38 else kv_len
    out = weights[..., :cut] @ value[:, :, :cut]
    if cut < kv_len:
        out = out + weights[..., cut:] @ value[:, :, cut:]
    return out.transpose(1, 2).contiguous(), None


def plant_split(attention: nn.Module) -> None:
    """Give one attention module of a converted model the function above."""
    AttentionInterface.register(ATTENTION, split_by_length)
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation_internal = ATTENTION


def plant(module: nn.Module, cls: type) -> None:
    """Give one module of a converted model another class, over the stock one."""
    module.__class__ = cls
