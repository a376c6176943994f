"""Train the best language model you can within a size limit and a time limit.

    python train_gpt.py NUM_LAYERS=4 DEVICE=cpu            on one device
    torchrun --standalone --nproc_per_node=8 train_gpt.py  on eight GPUs, default settings

Set NAME=value as an argument, in the environment or in @FILE; the first of these wins.
The science comes first, from Config to train; the rest is machinery. Tensor shapes:
B rows, T tokens, V vocabulary, D width, H query heads, K key/value heads, C head width.
"As published" means: as in the script of the parameter-golf challenge.
"""
from pathlib import Path

SOURCE = Path(__file__).read_text("utf-8")  # The file may change during imports.

import difflib
import fcntl
import gc
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Literal, NewType, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# ---- Configuration ---------------------------------------------------------------------
STARTED = time.monotonic()  # The log's elapsed_s counts from here.
HEADER_BYTES = 1024  # A shard's tokens follow them.
INT8_FORMAT = "int8_clean_per_row_v1"
MODEL_FILE = "final_model.int8.ptz"  # The artifact; final_model.pt has the floats.
CHECKPOINT_FORMAT = 4
KEPT_CHECKPOINTS = 2  # A run keeps only its newest, this many.
STOPS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"}
FOREIGN = {"COMPILER", "MODEL_DIR", "DATASET_PATH", "DEVICES", "SEEDS"}  # These are no typos.
IGNORED = {"loop_start", "loop_end", "loop_at", "keep_checkpoints", "val_tokens"}  # old settings
CONTROL = ("attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,"
           "skip_weight,skip_weights")  # A control tensor's name contains one of these.
SDP_OF_ATTN = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}
AtLeast1, Share, Signed, Cap = (NewType(n, float) for n in ("AtLeast1", "Share", "Signed", "Cap"))
LIMITS = {AtLeast1: (1, 1e18), Share: (0, 1), Signed: (-1e18, 1e18), Cap: (1, 1000)}

def require(condition, message: str):
    """Raise ValueError with a message for the user unless the condition holds."""
    if not condition:
        raise ValueError(message)

@dataclass(frozen=True)
class Config:
    """Settings. LIMITS: a type's range, else 0 and up; a default tells int from float."""
    # Model: the artifact and the checkpoints store these settings.
    tokenizer_sha256: str = ""  # digest of the tokenizer's file or name; empty: any
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"  # of activations
    train_seq_len: AtLeast1 = 4096  # tokens in a row, in training and validation
    vocab_size: AtLeast1 = 1024  # tokens in the vocabulary
    vocab_pad: AtLeast1 = 1  # round the rows of embedding and head up to a multiple of N
    num_layers: AtLeast1 = 9  # blocks; the first half feeds skips to the second
    model_dim: AtLeast1 = 512  # width of the residual stream
    num_heads: AtLeast1 = 8  # query heads, which share MODEL_DIM
    num_kv_heads: AtLeast1 = 4  # key/value heads; must divide NUM_HEADS
    mlp_mult: AtLeast1 = 2  # hidden width of the MLP, as a multiple of MODEL_DIM
    tie_embeddings: bool = True  # use one table for input and output
    rope_base: AtLeast1 = 10000.0  # base of the rotary frequencies
    logit_softcap: Cap = 30.0  # bound of the logits, by tanh; 1000 at most, for precision
    mlp_slope: Share = 0.0  # slope of the MLP's ReLU below 0, before the square
    shift_keys: bool = False  # take a part of each key from the token before
    exclusive_attn: bool = False  # project a token's own value out of its attention
    lanes: int = 0  # in the last N blocks, the MLPs read a second stream, the lane
    smear: bool = False  # add a learned share of the token before to each embedding
    # Training: RESUME refuses other values of these.
    seed: int = 1337  # of the initial weights, LOADER=shuffled and DROPOUT
    loader: Literal["sequential", "shuffled"] = "sequential"  # order of the training text
    overfit: bool = False  # train on the first batch again and again
    train_batch_tokens: AtLeast1 = 393216  # tokens in a step, over all ranks
    qk_gain_init: float = 1.5  # initial gain of the queries, learned per head
    tied_embed_init_std: float = 0.005  # initial standard deviation of a tied embedding
    init: Literal["baseline", "gpt2", "by_name"] = "baseline"  # by_name: a seed per tensor
    dropout: Share = 0.0  # share of the channels to drop, drawn anew for each row
    optimizer: Literal["muon", "adamw"] = "muon"  # of blocks' matrices; else AdamW
    adam_lr: float = 3e-4  # learning rate of everything with OPTIMIZER=adamw
    embed_lr: float = 0.6  # learning rate of an untied embedding, if OPTIMIZER=muon
    head_lr: float = 0.008  # learning rate of an untied output head, if OPTIMIZER=muon
    tied_embed_lr: float = 0.03  # learning rate of a tied embedding, if OPTIMIZER=muon
    matrix_lr: float = 0.02  # learning rate of the blocks' matrices, if OPTIMIZER=muon
    scalar_lr: float = 0.02  # learning rate of all other parameters, if OPTIMIZER=muon
    muon_momentum: Share = 0.99  # Muon's momentum after its warm-up
    muon_backend_steps: int = 5  # Newton-Schulz steps of Muon
    muon_row_norm: bool = False  # scale rows of an update to norm 1 before Newton-Schulz
    muon_momentum_warmup_start: Share = 0.92  # Muon's momentum at step 0
    muon_momentum_warmup_steps: int = 1500  # raise Muon's momentum over N steps
    beta1: Share = 0.9  # Adam's decay of the first moment
    beta2: Share = 0.95  # Adam's decay of the second moment
    adam_eps: float = 1e-8  # Adam's epsilon
    fused: bool = True  # run Adam in one kernel (never on MPS); 0: PyTorch chooses
    weight_decay: float = 0.0  # a step shrinks matrices, embeddings and head by N * rate
    grad_clip_norm: float = 0.0  # clip the gradients to this global norm; 0: off
    control_tensor_name_patterns: str = CONTROL  # tensors for AdamW, kept exact if small
    lr_schedule: Literal["warmdown", "cosine"] = "warmdown"  # shape of the rates' decay
    lr_warmup_steps: int = 0  # raise the learning rate over the first N steps
    warmdown_iters: Signed = 3000  # rates fall in the N steps before the cap, or end; <= 0: never
    warmdown_fraction: Share = 0.0  # the same as a share of the run; 0: WARMDOWN_ITERS
    min_lr: Share = 0.0  # lowest learning rate, as a fraction of the peak
    # Run: RESUME accepts other values of these, if the text and its order stay the same.
    run_id: str = ""  # name of the logs; empty: a new one
    out_dir: str = ""  # folder of the model's files and checkpoints/; empty: logs/RUN_ID
    init_from: str = ""  # artifact, state dict or checkpoint whose weights to start from
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder with token shards
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # or gpt2, byte260
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first available
    matmul_precision: Literal["highest", "high", "medium"] = "high"  # of float32 products
    compile: Literal["auto", "0", "1", "blocks"] = "auto"  # 0: off; 1: the whole model
    attn: Literal["auto", "flash", "cudnn", "efficient", "math", "tiled"] = "auto"  # auto: the best
    iterations: int = 20000  # train for at most N steps
    max_wallclock_seconds: float = 600.0  # end training after N seconds of it; 0: never
    warmup_steps: int = 20  # untimed steps at rate 0 that prime the kernels
    grad_accum_steps: int = 0  # spans of text that a rank reads a step; 0: 8 / ranks
    micro_batch_tokens: int = 0  # most tokens in a forward pass; 0: by device
    val_loss_every: int = 1000  # validate every N steps; 0: only at the end
    val_batch_size: int = 524288  # up to N / ranks / GRAD_ACCUM_STEPS tokens at once
    eval_stride: int = 0  # also score in windows that move by N tokens; 0: do not
    train_log_every: int = 200  # log steps 1 to 10, every N-th, and one at the time limit
    checkpoint_every: int = 0  # save every N steps and at the end; 0: only on a signal
    resume: str = ""  # checkpoint to continue; auto: the newest (of RUN_ID, if set)
    export_bits: Literal[4, 5, 6, 7, 8] = 8  # bits of the blocks' matrices
    embed_bits: Literal[4, 5, 6, 7, 8] = 8  # bits of the embedding and of an untied head
    export_clip: float = 0.0  # clip rows at N standard deviations; 0: off
    int8_keep_float_max_numel: int = 65536  # tensors of at most N numbers stay floats
    size_cap: int = 0  # bytes for model and code; EXPORT_CLIP > 0 rises to fit; 0: off

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            low, high = LIMITS.get(f.type, (0, 1e18))
            require(isinstance(value, str) or low <= value <= high,
                    f"{f.name.upper()}={value} must be from {low:g} to {high:g}")
        heads, width = self.num_heads, self.model_dim
        require(width % (2 * heads) == 0, f"MODEL_DIM={width} is no multiple of 2 * {heads} heads")
        require(heads % self.num_kv_heads == 0,
                f"NUM_KV_HEADS={self.num_kv_heads} must divide NUM_HEADS={heads}; 1 does")
        require(self.lanes <= self.num_layers, f"LANES={self.lanes} must be at most NUM_LAYERS")
        require(re.fullmatch(r"([^./\\\s-][^/\\\s]*)?", self.run_id),
                f"RUN_ID={self.run_id!r} must not be a path, contain spaces or begin with . or -")

FIELDS = {f.name.upper(): f for f in fields(Config)}  # in order: model, training, run
OF_MODEL = list(FIELDS)[:list(FIELDS).index("SEED")]
OF_RUN = list(FIELDS)[list(FIELDS).index("RUN_ID"):]
STORED = ["TOKENIZER_PATH", *OF_MODEL]  # An artifact stores these.
MAY_CHANGE = {"TOKENIZER_PATH", "TOKENIZER_SHA256", "TRAIN_SEQ_LEN", "DTYPE"}  # beside INIT_FROM

# ---- Ranks -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Ranks:
    """A run's ranks as one process sees them: its own, their number, its device."""
    rank: int
    world_size: int
    device: torch.device
    node: dist.ProcessGroup | None = None  # This machine's ranks; None if alone.

    def max(self, *values: float) -> list[float]:
        """The largest of each value over the ranks. Collective."""
        if self.world_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def sum(self, tensor):
        """Replace a tensor of any shape by its sum over the ranks. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def to_device(self, array):
        """Copy an array to the device, without waiting for a GPU."""
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def now_ms(self) -> float:
        """Wait for the device's work; the time in ms since an arbitrary moment."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()

# ---- Model -----------------------------------------------------------------------------
def rms_norm(x, gain=1.0):
    """gain * x / sqrt(mean(x^2) + float32's epsilon), by the last dimension, in x's type."""
    factors = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1.19e-7)
    return (x * (factors * gain)).to(x.dtype)  # (x * factors) * gain would read x twice.

def linear(x, *layers, scale=None):
    """x (..., D) @ weight.T * scale, in x's type; outputs of several layers, joined."""
    weights = [layer.weight for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if scale is not None:  # Scaling the output would cost more.
        weight = weight * scale[:, None]
    return F.linear(x, weight.to(x.dtype))

def rotate(x, cos, sin):
    """Rotary embedding (arXiv:2104.09864) of x (B, T, H, C); cos and sin (T, 1, C/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

def tiled_attention(q, k, v):
    """CPUs: quarter i of q (B, K, H/K, T, C) reads quarters 0 to i of k, v (B, K, T, C)."""
    outputs, keys, values = [], k.chunk(4, dim=2), v.chunk(4, dim=2)
    places = torch.arange(q.size(3), dtype=torch.int32)  # int64 is slower to compare.
    for i, (q_i, places_i) in enumerate(zip(q.chunk(4, 3), places.chunk(4))):
        k_i, v_i = torch.cat(keys[:i + 1], 2), torch.cat(values[:i + 1], 2)
        scores = (q_i.flatten(2, 3) @ k_i.mT).unflatten(2, q_i.shape[2:4])  # (..., T/4, keys)
        mask = torch.where(places[:k_i.size(2)] <= places_i[:, None], 0, -math.inf).to(q.dtype)
        weights = (scores * q.size(4) ** -0.5 + mask).softmax(-1)
        outputs.append((weights.flatten(2, 3) @ v_i).view_as(q_i))
    return torch.cat(outputs, 3)

def causal_attention(q, k, v, kernel: str):
    """Grouped causal attention (arXiv:2305.13245): q (B, H, T, C), k, v (B, K, T, C)."""
    group = q.size(1) // k.size(1)  # query heads that share a key
    if kernel == "tiled":
        return tiled_attention(q.unflatten(1, (-1, group)), k, v).flatten(1, 2)
    if group > 1 and kernel not in ("cudnn", "flash"):  # These two take groups.
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1))

def token_before(x):
    """x (B, T, ...) of the token before; zero for the first."""
    return F.pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0))  # last dimension first

def smear(x, share):
    """x (B, T, D) plus a learned share (D,) of the token before (modded-nanogpt#130)."""
    return x + share.to(x.dtype) * token_before(x)

def shift_keys(k):
    """Take half the channels of k (B, T, K, C) from the token before, so that one layer can find
    what followed an earlier token (modded-nanogpt#169; up to -0.08 bpb)."""
    pairs = k.size(3) // 2  # `rotate` turns channels i and i + pairs, low i fastest.
    pair = torch.arange(k.size(3), device=k.device) % pairs  # i of each channel
    return torch.where(pair < pairs // 2, k, token_before(k))  # Slow pairs shift.

def remove_own_value(y, v):
    """Remove from y (B, T, H, C) its part along v (B, T, K, C): arXiv:2603.09078, -0.008 bpb."""
    own = rms_norm(v)[:, :, :, None]  # (B, T, K, 1, C), of mean square 1
    y = y.unflatten(2, (v.size(2), -1))  # (B, T, K, H/K, C)
    return (y - (y * own).mean(-1, keepdim=True) * own).flatten(2, 3)

class Attention(nn.Module):
    """Causal self-attention of x (B, T, D), with normed queries and keys."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config.model_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        kv_width = width // config.num_heads * config.num_kv_heads
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, kv_width, bias=False)
        self.c_v = nn.Linear(width, kv_width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))

    def forward(self, x, cos, sin, scale):
        qkv = linear(x, self.c_q, self.c_k, self.c_v).unflatten(-1, (sum(self.heads), -1))
        q, k, v = qkv.split(self.heads, dim=2)  # each (B, T, heads, C)
        if self.config.shift_keys:
            k = shift_keys(k)
        q = rotate(rms_norm(q, self.q_gain.to(q.dtype)[:, None]), cos, sin)
        k = rotate(rms_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, C)
        y = causal_attention(q, k, v, self.config.attn).transpose(1, 2)
        if self.config.exclusive_attn:
            y = remove_own_value(y, v.transpose(1, 2))
        return linear(y.flatten(2), self.proj, scale=scale)

class MLP(nn.Module):
    """Two linear layers with a squared, perhaps leaky ReLU between (arXiv:2109.08668)."""
    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(config.model_dim, config.mlp_mult * config.model_dim, bias=False)
        self.proj = nn.Linear(config.mlp_mult * config.model_dim, config.model_dim, bias=False)
        self.slope = config.mlp_slope

    def forward(self, x, scale):
        x = F.leaky_relu(linear(x, self.fc), self.slope).square()
        return linear(x, self.proj, scale=scale)

def dropout(x, rate):
    """Drop a share `rate` of channels of each row of x (B, T, D); arXiv:1512.05287."""
    if rate is None:
        return x
    draws = torch.rand(x.size(0), 1, x.size(2), device=x.device)
    return x * ((draws >= rate) / (1 - rate).clamp_min(1e-9)).to(x.dtype)  # Avoid 0 / 0.

class Block(nn.Module):
    """Attention and MLP on a stream x (B, T, D), into which the embedding x0 is mixed."""
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.attn_scale = nn.Parameter(torch.ones(config.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(config.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, config.model_dim))

    def forward(self, x, x0, cos, sin, drop_rate):
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + dropout(self.attn(rms_norm(x), cos, sin, self.attn_scale), drop_rate)
        return x + dropout(self.mlp(rms_norm(x), self.mlp_scale), drop_rate)

class LaneBlock(Block):
    """A block whose MLP reads a second stream, the lane (parameter-golf#1518, -0.0035 bpb)."""
    def __init__(self, config):
        super().__init__(config)
        # Rows x, lane: factors of old value, attention, MLP. Its name keeps it from Muon.
        self.resid_mix_lanes = nn.Parameter(torch.tensor([[1.1, 1.3, 0.7], [1.1, 0.7, 1.3]]))

    def forward(self, x, lane, x0, cos, sin, drop_rate):
        mix = self.resid_mix.to(x.dtype)
        mixed = rms_norm(mix[0] * x + mix[1] * x0)  # Only attention reads the mix.
        attended = dropout(self.attn(mixed, cos, sin, self.attn_scale), drop_rate)
        mlp_out = dropout(self.mlp(rms_norm(lane), self.mlp_scale), drop_rate)
        to_x, to_lane = self.resid_mix_lanes.to(x.dtype)
        x = to_x[0] * x + to_x[1] * attended + to_x[2] * mlp_out
        return x, to_lane[0] * lane + to_lane[1] * attended + to_lane[2] * mlp_out

def cross_entropy(logits, targets, limit: float):
    """F.cross_entropy of logits (B, T, V), ignore_index=-1, in few passes: a target's logit is
    a masked sum; if `limit` keeps exp from overflowing, no maximum is subtracted."""
    log_sum = logits.exp().sum(-1).log() if limit <= 64 else logits.logsumexp(-1)
    ids = torch.arange(logits.size(-1), dtype=torch.int32, device=logits.device)
    nats = log_sum - logits.where(ids == targets[..., None].int(), 0).sum(-1)
    is_counted = targets >= 0
    return (nats * is_counted).sum() / is_counted.sum()

class GPT(nn.Module):
    """A GPT. The first half of its blocks feeds skips to the second, in reverse order."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.compute_dtype = getattr(torch, config.dtype, torch.float32)  # "auto": float32
        width = config.model_dim
        size = math.ceil(config.vocab_size / config.vocab_pad) * config.vocab_pad
        self.tok_emb = nn.Embedding(size, width)  # This order decides the random draws.
        self.first_lane_block = config.num_layers - config.lanes
        kinds = [Block] * self.first_lane_block + [LaneBlock] * config.lanes
        self.blocks = nn.ModuleList(kind(config) for kind in kinds)
        self.lm_head = None if config.tie_embeddings else nn.Linear(width, size, bias=False)
        self.half = config.num_layers // 2
        # With one block these are empty, and DDP would wait for their gradient.
        self.skip_weights = nn.Parameter(torch.ones(self.half, width), requires_grad=self.half > 0)
        self.smear = nn.Parameter(torch.zeros(width)) if config.smear else None
        rate = torch.zeros(()) if config.dropout else None  # A float would be baked in.
        self.register_buffer("drop_rate", rate, persistent=False)
        for name, p in self.named_parameters():
            if config.init == "by_name":  # Then no draw below depends on other tensors.
                torch.manual_seed(config.seed + zlib.crc32(name.encode()))
            if config.init == "gpt2" and name.endswith(".weight"):  # Radford et al. 2019
                depth = 2 * config.num_layers if ".proj." in name else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name == "lm_head.weight" or ".proj." in name:
                nn.init.zeros_(p)
            elif name == "tok_emb.weight" and config.tie_embeddings:
                nn.init.normal_(p, std=config.tied_embed_init_std)
            elif config.init == "by_name" and re.fullmatch(r"blocks\..*\.weight", name):
                nn.init.kaiming_uniform_(p, a=math.sqrt(5))  # Draw as nn.Linear did.
        pairs = width // config.num_heads // 2
        frequencies = config.rope_base ** -(torch.arange(pairs) / pairs)
        if self.compute_dtype == torch.bfloat16:  # As published, values are rounded.
            for tensor in (*self.parameters(), frequencies):
                tensor.data.copy_(tensor.data.bfloat16())
            if config.optimizer == "muon" and not config.weight_decay:
                self.tok_emb.bfloat16()  # as published; small steps and decay need more
        angles = torch.outer(torch.arange(config.train_seq_len).float(), frequencies)[:, None]
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def hidden(self, tokens):
        """The last block's output (B, T, D) for tokens (B, T)."""
        cos, sin = self.rotary[:, :tokens.size(1)].to(self.compute_dtype)
        x0 = rms_norm(self.tok_emb(tokens).to(self.compute_dtype))
        if self.smear is not None:
            x0 = smear(x0, self.smear)
        x = x0.clone()  # If x were x0 itself, block 0 would be compiled once more.
        lane, skips = None, []
        for i, block in enumerate(self.blocks):
            if i == self.first_lane_block:
                lane = x.clone()  # It is a copy for the same reason.
            if i >= self.half and skips:  # An odd last block gets no skip.
                x = x + self.skip_weights[i - self.half].to(x.dtype) * skips.pop()
            if lane is None:
                x = block(x, x0, cos, sin, self.drop_rate)
            else:
                x, lane = block(x, lane, x0, cos, sin, self.drop_rate)
            if i < self.half:
                skips.append(x)
        return x if lane is None else lane  # Either stream has all blocks' outputs.

    def logits(self, x):
        """Next-token logits (..., V), float32, of outputs (..., D) of `hidden`."""
        cap = self.config.logit_softcap
        logits = linear(rms_norm(x), self.lm_head or self.tok_emb).float()
        return cap * (2 * torch.sigmoid(2 / cap * logits) - 1)  # cap * tanh, but faster

    def loss(self, x, targets):
        """Mean cross entropy in nats, 0-d float32, where the targets are not -1."""
        return cross_entropy(self.logits(x), targets, self.config.logit_softcap)

    def forward(self, tokens, targets):
        """The `loss` of tokens and targets (B, T), int64."""
        return self.loss(self.hidden(tokens), targets)

# ---- Optimizers ------------------------------------------------------------------------
def orthogonalize(updates, steps: int, compute=torch.bfloat16):
    """Move singular values of (N, rows, columns) to about 1: kellerjordan.github.io/posts/muon
    Results are rounded to bfloat16; `compute` is the type that multiplies faster here."""
    x = updates.bfloat16()
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):  # Newton-Schulz: x <- a x + (b A + c A^2) x, where A = x x^T
        x = x.to(compute)
        gram = (x @ x.mT).bfloat16().to(compute)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(compute)
        x = torch.baddbmm(x, polynomial, x, beta=a).bfloat16()
    return x.mT if is_tall else x

class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum. Matrices of one shape form a bank, with one momentum.
    The ranks of a machine share the work; every machine does all of it."""
    def __init__(self, groups: list[dict], config, ranks):
        super().__init__(groups, {})
        self.config, self.ranks = config, ranks
        self.compute = torch.bfloat16 if bfloat16_is_native(ranks.device) else torch.float32
        self.banks = {}
        for p in self.param_groups[0]["params"]:
            self.banks.setdefault(p.shape, []).append(p)

    @torch.no_grad()
    def step(self):
        """Update all matrices. Collective."""
        group, node = self.param_groups[0], self.ranks.node
        node_rank, node_size = (node.rank(), node.size()) if node else (0, 1)
        pending, gathers = [], []
        for shape, params in self.banks.items():
            grads = torch.stack([p.grad for p in params])  # The copy is changed below.
            state = self.state[params[0]]
            momentum = group["momentum"] * state.get("momentum_buffer", 0) + grads
            state["momentum_buffer"] = momentum
            share = math.ceil(len(params) / node_size)  # matrices per rank
            mine = slice(share * node_rank, share * (node_rank + 1))
            updates = grads[mine].add_(momentum[mine], alpha=group["momentum"])
            updates = F.pad(updates, (0, 0, 0, 0, 0, share - len(updates)))
            if self.config.muon_row_norm:
                updates = F.normalize(updates, dim=2)
            updates = orthogonalize(updates, self.config.muon_backend_steps, self.compute)
            updates = updates * max(1, shape[0] / shape[1]) ** 0.5  # as published
            if node_size > 1:  # The transfer runs beside the next bank's work.
                part = updates.contiguous()
                updates = part.new_empty(share * node_size, *shape)
                gathers.append(dist.all_gather_single(updates, part, node, async_op=True))
            pending.append((params, updates))
        for gather in gathers:
            gather.wait()
        for params, updates in pending:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates[:len(params)].float()), alpha=-group["lr"])

def build_optimizers(model, config, ranks) -> dict[str, torch.optim.Optimizer]:
    """AdamW (arXiv:1711.05101), as "adam"; perhaps "muon", for the blocks' matrices."""
    rates = {"embed": config.tied_embed_lr if config.tie_embeddings else config.embed_lr,
             "head": config.head_lr, "scalar": config.scalar_lr, "matrix": config.matrix_lr}
    if config.optimizer == "adamw":
        rates = dict.fromkeys(rates, config.adam_lr)
    groups = {}
    for kind, lr in rates.items():
        decay = 0.0 if kind == "scalar" else config.weight_decay
        groups[kind] = dict(kind=kind, params=[], lr=lr, base_lr=lr, weight_decay=decay)
    controls = config.control_tensor_name_patterns.split(",")
    for name, p in model.named_parameters():
        kind = {"tok_emb.weight": "embed", "lm_head.weight": "head"}.get(name, "scalar")
        is_control = any(part and part in name for part in controls)
        if p.ndim == 2 and name.startswith("blocks.") and not is_control:
            kind = "matrix"
        groups[kind]["params"].append(p)
    matrices = groups.pop("matrix") if config.optimizer == "muon" else None
    fused = (config.fused and ranks.device.type != "mps") or None  # None: PyTorch picks.
    adam = torch.optim.AdamW([g for g in groups.values() if g["params"]], fused=fused,
                             betas=(config.beta1, config.beta2), eps=config.adam_eps)
    if matrices is None:
        return {"adam": adam}
    return {"adam": adam, "muon": Muon([matrices], config, ranks)}

# ---- Data ------------------------------------------------------------------------------
@lru_cache(maxsize=2)  # The last step of an epoch may read rows of the next one.
def epoch_order(seed: int, epoch: int, rows: int):
    """The order of rows in an epoch of LOADER=shuffled: a permutation, uint32 (rows,)."""
    return np.random.default_rng([seed, epoch]).permutation(np.arange(rows, dtype=np.uint32))

class TokenLoader:
    """The shards' endless text. A step reads `pieces`: rows if shuffled, else spans."""
    def __init__(self, config, ranks):
        self.config, self.ranks = config, ranks
        self.shards = list(open_split(config, "train").items())
        self.ends = np.cumsum([count for _, count in self.shards])
        self.num_tokens = int(self.ends[-1])
        self.rows = (self.num_tokens - 1) // config.train_seq_len
        self.shuffled = config.loader == "shuffled"
        step_rows = config.train_batch_tokens // config.train_seq_len
        self.pieces = step_rows if self.shuffled else config.grad_accum_steps * ranks.world_size
        self.length = config.train_batch_tokens // self.pieces
        self.stride = self.length if self.shuffled else self.length + 1  # as published
        # RESUME compares the starts of shards: 32 MiB / shards of each, at least 8 KiB.
        paths = sorted(Path(config.data_path).glob("*_[0-9]*.bin"))
        size = max(2**13, 2**25 // len(paths))
        starts = [np.fromfile(path, np.uint8, size) for path in paths]
        self.about = {"training_tokens": self.num_tokens, "pieces": self.pieces,
                      "text_sha256": sha256(np.concatenate(starts)).hexdigest()}

    def read(self, start: int, size: int):
        """`size` tokens (uint16) from `start`. Raises ValueError as read_shard does."""
        parts = []
        while size > 0:
            place = start % self.num_tokens
            index = np.searchsorted(self.ends, place, side="right")
            path, count = self.shards[index]
            left = int(self.ends[index]) - place  # tokens from there to the shard's end
            parts.append(read_shard(path, self.config.vocab_size, count - left, min(size, left)))
            start, size = start + len(parts[-1]), size - len(parts[-1])
        return np.concatenate(parts)

    def batches(self, step: int, expected_steps=0) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches (B, T), inputs and targets, in a run of `expected_steps`."""
        config, texts = self.config, []
        first = 0 if config.overfit else step * self.pieces
        epoch_steps = self.rows // self.pieces
        last_epoch_start = round(expected_steps) - epoch_steps
        # If two epochs fit, the last epoch_steps steps read an extra epoch, number 10**6:
        # falling rates see about every row. By `%`, a moving end repeats none of them.
        if self.shuffled and not config.overfit and 0 < epoch_steps <= last_epoch_start <= step:
            first = 10**6 * self.rows + step % epoch_steps * self.pieces
        for piece in range(first, first + self.pieces)[self.ranks.rank::self.ranks.world_size]:
            if self.shuffled:
                epoch, place = divmod(piece, self.rows)
                piece = int(epoch_order(config.seed, epoch, self.rows)[place])
            texts.append(self.read(piece * self.stride, self.length + 1))
        texts = np.stack(texts).astype(np.int64)
        pair = np.stack((texts[:, :-1], texts[:, 1:]))
        inputs, targets = self.ranks.to_device(pair.reshape(2, -1, config.train_seq_len))
        at_once = config.micro_batch_tokens // config.train_seq_len  # rows
        return list(zip(inputs.split(at_once), targets.split(at_once)))

# ---- Training --------------------------------------------------------------------------
def schedule(config, step: int, elapsed_ms: float) -> tuple[float, float]:
    """Factor of the rates, and Muon's momentum, after `step` steps in `elapsed_ms`.
    Rates fall by a cosine after a warm-up (arXiv:1608.03983), or linearly at the end."""
    cap_ms = config.max_wallclock_seconds * 1000 or math.inf
    warmup = config.lr_warmup_steps if config.lr_schedule == "cosine" else 0
    done = max((step - warmup) / max(1, config.iterations - warmup), elapsed_ms / cap_ms)
    if config.lr_schedule == "cosine":
        level = (1 + math.cos(math.pi * min(1.0, done))) / 2
    elif config.warmdown_fraction:
        level = max(0.0, 1 - done) / config.warmdown_fraction
    elif cap_ms < math.inf:  # As published, ITERATIONS does not count then.
        warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
        level = max(0.0, cap_ms - elapsed_ms) / max(warmdown_ms, 1e-9)
    else:
        level = max(0, config.iterations - step) / max(config.warmdown_iters, 1e-9)
    falling = config.min_lr + (1 - config.min_lr) * min(1.0, level)
    rising = (step + 1) / max(1, config.lr_warmup_steps)
    steps = config.muon_momentum_warmup_steps
    part = min(1.0, step / steps) if steps else 1.0
    momentum = (1 - part) * config.muon_momentum_warmup_start + part * config.muon_momentum
    return min(rising, falling), momentum

class Trainer:
    """Model, optimizers, scaler and clock. Raises ValueError for a bad INIT_FROM."""
    def __init__(self, config, ranks, init_from=""):
        self.config, self.ranks, self.clock = config, ranks, Clock(config, ranks)
        torch.manual_seed(config.seed)
        self.model = GPT(config)
        if init_from:
            load_weights(self.model, init_from)
        self.model.to(ranks.device)
        self.optimizers = build_optimizers(self.model, config, ranks)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.dtype == "float16")
        self.ddp = self.model  # Several ranks wrap it.
        if ranks.world_size > 1:
            torch._dynamo.config.optimize_ddp = False  # It cuts graphs by DDP's buckets.
            self.ddp = DDP(self.model, gradient_as_bucket_view=True, forward_sync_buffers=False,
                           bucket_cap_mb=1 << 20)  # One bucket: gradients come together.

    def train_step(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Make an update; return this rank's mean loss in nats, the gradients' norm. Collective."""
        config, step = self.config, self.clock.step
        factor, momentum = schedule(config, step, self.clock.time_ms)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
                if name == "muon":
                    group["momentum"] = momentum
        if config.dropout:  # A resumed run draws the same: integers have fixed hashes.
            torch.manual_seed(hash((config.seed, step, self.ranks.rank)))
            self.model.drop_rate.fill_(config.dropout)
        losses = torch.zeros((), device=self.ranks.device)
        for i, (inputs, targets) in enumerate(batches, 1):
            self.ddp.require_backward_grad_sync = i == len(batches)  # Sync once a step.
            loss = self.ddp(inputs, targets) * (1 / len(batches))  # as published, not /
            self.scaler.scale(loss).backward()
            losses += loss.detach()
        if config.dropout:
            self.model.drop_rate.zero_()  # Validation drops nothing.
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip_norm or math.inf)
        if not self.scaler.is_enabled() or norm.isfinite():  # An overflow skips the step.
            for optimizer in self.optimizers.values():
                optimizer.step()
        self.model.zero_grad()
        self.scaler.update()
        return losses, norm

    def state_dict(self) -> dict:
        """All that a step changes; the tensors are the live ones."""
        return {"step": self.clock.step, "time_ms": self.clock.time_ms,
                "model": self.model.state_dict(), "scaler": self.scaler.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers.values()]}

    def load_state_dict(self, state: dict):
        """Return to a `state_dict` and start the clock."""
        self.model.load_state_dict(dict(state["model"]))  # no _metadata: see load_weights
        for optimizer, old in zip(self.optimizers.values(), state["optimizers"], strict=True):
            for group in old["param_groups"]:  # Another device may have saved it.
                group["fused"] = optimizer.defaults.get("fused")
            optimizer.load_state_dict(old)
        self.scaler.load_state_dict(state["scaler"])
        self.clock.set(int(state["step"]), float(state["time_ms"]))

def train(trainer, loader, validation, log):
    """Train to ITERATIONS, the cap or a signal. Raises FloatingPointError if it diverges.
    Each turn saves and validates if due, then steps; between syncs, time is estimated."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    saved_step = clock.step
    last_logged = (clock.step, clock.time_ms)
    while True:
        is_done = clock.step >= config.iterations or clock.time_ms >= clock.cap_ms
        saves_end = is_done and (config.checkpoint_every or saved_step > 0)  # or resumed
        saves = saves_end or is_due(clock.step, config.checkpoint_every)
        if ranks.rank == 0 and clock.step > saved_step and (saves or clock.stop_signal):
            save_checkpoint(trainer, loader, log)  # Validation can take long.
            saved_step = clock.step
        if is_done or clock.stop_signal:
            return
        if is_due(clock.step, config.val_loss_every):
            validate(trainer, validation, log)
            if clock.stop_signal:
                continue  # The next turn saves.
        mean_ms = clock.time_ms / max(clock.step, 1)
        expected_steps = min(config.iterations, clock.cap_ms / max(mean_ms, 1e-9))
        loss, norm = trainer.train_step(loader.batches(clock.step, expected_steps))
        step = clock.step = clock.step + 1
        clock.time_ms += mean_ms
        is_logged = step <= 10 or is_due(step, config.train_log_every)
        near_end = step == config.iterations or clock.time_ms > clock.cap_ms - 20 * mean_ms
        waits_every = 1 if mean_ms > 1000 or ranks.device.type == "cpu" else 10  # Waiting costs.
        periods = (waits_every, config.val_loss_every, config.checkpoint_every)
        if is_logged or near_end or any(is_due(step, every) for every in periods):
            # The scale falls at each overflow; only below 2**-20 is a bad norm an error.
            can_overflow = config.dtype == "float16" and trainer.scaler.get_scale() > 2**-20
            watched = loss if can_overflow else loss + norm
            if clock.synchronize(is_bad=not watched.isfinite()):
                log.event("nonfinite", step=step)
                raise FloatingPointError(f"loss or gradient near step:{step} is not finite; "
                                         "lower the rates or set GRAD_CLIP_NORM=1")
        if is_logged or clock.time_ms >= clock.cap_ms:
            log_step(trainer, loader, log, loss, norm, last_logged)
            last_logged = (step, clock.time_ms)

# ==== The rest is machinery: start and settings, log, validation, files, a run ==========
def find_ranks() -> list[int]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, by torchrun. Raises ValueError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(os.environ.get(name) for name in names):
        return [int(os.environ[name]) for name in names]
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        require((os.environ.get(name) or "1") == "1", f"{name} is not 1, but {names} are not "
                "all set: use torchrun or tools/ranks.sh")
    return [0, 1, 0, 1]

def count_cores(cores: int, quota=Path("/sys/fs/cgroup/cpu.max")) -> float:
    """`cores`, or a container's quota of CPUs by Linux's cgroup v2, if that is less."""
    most, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return cores if most == "max" else min(cores, int(most) / int(period))

def start_ranks(config) -> Ranks:
    """Choose the device and join the process group. Raises ValueError."""
    rank, size, local_rank, local_size = find_ranks()
    has_mps = torch.backends.mps.is_available() and size == 1  # MPS has no collectives.
    usable = ["cuda"] * torch.cuda.is_available() + ["mps"] * has_mps + ["cpu"]
    kind = usable[0] if config.device == "auto" else config.device
    require(kind in usable, f"DEVICE={kind} is not available here; use {' or '.join(usable)}")
    device = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        require(local_rank < torch.cuda.device_count(), f"LOCAL_RANK={local_rank} has no GPU")
        torch.cuda.set_device(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # Ranks share the cores.
        torch.set_num_threads(max(1, int(count_cores(torch.get_num_threads()) / local_size)))
    torch.set_deterministic_debug_mode("warn" if kind == "cpu" else "default")  # repeatable on CPUs
    torch.utils.deterministic.fill_uninitialized_memory = False  # It costs time.
    node = None
    if size > 1:
        shared, *_ = next(dist.rendezvous("env://", rank, size))  # It outlives restarts.
        store = dist.PrefixStore(str(shared.add("starts", 0)), shared)  # Start n uses prefix n.
        backend, gpu = ("nccl", device) if kind == "cuda" else ("gloo", None)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                    device_id=gpu, timeout=timedelta(hours=2))  # Exports take long.
        except RuntimeError as error:
            raise ValueError(f"the ranks cannot connect by {backend}: {error}") from None
        node, _ = dist.new_subgroups(local_size, timeout=timedelta(hours=2))
        shared.add("starts", rank == 0)  # All have joined and read n: make it n + 1.
    return Ranks(rank, size, device, node)

def bfloat16_is_native(device: torch.device) -> bool:
    """Whether CUDA or an x86 CPU multiplies bfloat16 in hardware; False elsewhere."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cpu" and has_units

def run_attention(qkv: list[Tensor], kernel: str) -> list[Tensor]:
    """Enable only `kernel`; its output and gradients for qkv, or [] if it does not run."""
    for attn, sdp in SDP_OF_ATTN.items():
        getattr(torch.backends.cuda, f"enable_{sdp}_sdp")(kernel == attn)
    try:
        with warnings.catch_warnings(action="ignore"):
            y = causal_attention(*qkv, kernel)
            return [y, *torch.autograd.grad(y.sum(), qkv)]
    except torch.OutOfMemoryError:  # It is a RuntimeError, too.
        raise
    except RuntimeError:
        return []

def choose_attention(config, device: torch.device) -> str:
    """Enable ATTN, or the first kernel that agrees with `math`. Raises ValueError."""
    kernels = ["math"] if device.type == "mps" else ["flash", "cudnn", "efficient", "math"]
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    if capability == (9, 0) and (torch.backends.cudnn.version() or 0) > 91500:  # pytorch#169849
        kernels.insert(0, "cudnn")  # It is 1.6 times as fast there.
    elif device.type == "cpu" and config.compile != "0" and config.train_seq_len <= 1024:
        kernels.insert(0, "tiled")  # It is slow uncompiled; longer rows need much memory.
    width = config.model_dim // config.num_heads
    most = 1024 if device.type == "cpu" else 4096  # `math` is slow, and takes memory.
    length = min(max(64, config.train_seq_len), most)
    options = dict(dtype=getattr(torch, config.dtype), device=device, requires_grad=True)
    group = config.num_heads // config.num_kv_heads  # query heads that share a key
    qkv = [torch.randn(1, heads, length, width, **options) for heads in (group, 1, 1)]
    wanted = run_attention(qkv, "math")
    for kernel in (kernels if config.attn == "auto" else [config.attn]):
        got = run_attention(qkv, kernel)
        errors = [(g - w).float().norm() / w.float().norm() for g, w in zip(got, wanted)]
        if errors and all(e < 0.05 for e in errors):  # Rounding to bfloat16 makes 0.01.
            return kernel
    raise ValueError(f"ATTN={config.attn} does not run {config.dtype} heads of {width}, "
                     "or not as math does; try auto")

def parse_value(name: str, text: str):
    """The value of a variable that is written as `text`. Raises ValueError."""
    f = FIELDS[name]
    choices = ["0", "1", "false", "true"] if f.type is bool else [*map(str, get_args(f.type))]
    require(not choices or text.lower() in choices, f"{name}={text!r} must be one of {choices}")
    if f.type is bool:
        return text.lower() in ("1", "true")
    try:
        return type(f.default)(text.lower() if choices else text)
    except ValueError:
        kind = "whole number" if isinstance(f.default, int) else "number"
        raise ValueError(f"{name}={text!r} must be a {kind}, like {f.default}") from None

def read_words(arguments: list[str], environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The text and origin of each name that is set. Raises ValueError, OSError."""
    words = []
    for file in (argument for argument in arguments if argument.startswith("@")):
        lines = Path(file[1:]).expanduser().read_text("utf-8-sig", errors="replace").splitlines()
        words += [(line, file) for line in map(str.strip, lines) if line[:1] not in ("", "#")]
    words += [(f"{n}={t}", "environment") for n, t in environment.items() if t and n not in FOREIGN]
    words += [(argument, "argument") for argument in arguments if argument[:1] != "@"]
    given = {}
    for word, origin in words:  # Arguments come last and win.
        name, is_pair, text = word.partition("=")
        require(is_pair, f"{word!r} ({origin}) is not NAME=value, like NUM_LAYERS=9; see --help")
        given[name] = (os.path.expanduser(text), origin)
    return given

def read_model(path: str) -> dict[str, str]:
    """A file's model settings and unknown ones that are on, to refuse; {}: unreadable."""
    try:
        state = read_saved(path)
        config = {n.upper(): value for n, value in state.get("config", {}).items()}
        about = {n: v for n, v in config.items() if n in STORED or n not in FIELDS}
        about |= json.loads(state.get("about", "{}"))
    except Exception:  # Damaged files fail in many ways; `load_weights` says how.
        return {}
    return {name: str(value) for name, value in about.items()
            if name in STORED or (value and name.lower() not in IGNORED)}

def load_config(arguments: list[str], environment: dict[str, str]) -> tuple[Config, dict]:
    """The configuration; text and origin of what was set. Raises ValueError, OSError."""
    given = read_words(arguments, environment)
    data_path, _ = given.get("DATA_PATH", (Config.data_path, ""))
    with suppress(Exception):  # `Validation` reports a damaged manifest.
        about = json.loads(Path(data_path, "manifest.json").read_bytes())["tokenizer"]
        file, size = Path(data_path, about["name"]), str(about["vocab_size"])
        name = str(file) if file.is_file() else about["name"]  # such as gpt2
        given = {"TOKENIZER_PATH": (name, "manifest"), "VOCAB_SIZE": (size, "manifest")} | given
    path, _ = given.get("INIT_FROM", ("", ""))
    for name, value in (read_model(path) if path else {}).items():
        require(name in STORED, f"{path} has a setting that this script does not know: {name}")
        text, origin = given.setdefault(name, (value, path))
        require(name in MAY_CHANGE or parse_value(name, text) == parse_value(name, value),
                f"{name}={text} ({origin}), but the model in INIT_FROM={path} has {name}={value}")
    for name in given.keys() - FIELDS.keys():  # These are no settings.
        text, origin = given.pop(name)
        near = difflib.get_close_matches(name.upper(), FIELDS, 2, 0.85)
        if origin == "environment" and not near:
            continue  # It is another program's.
        near = near or difflib.get_close_matches(name.upper(), FIELDS, 2, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all of them"
        raise ValueError(f"{name}={text!r} ({origin}) is not a variable of this script; {hint}")
    values = {name.lower(): parse_value(name, text) for name, (text, _) in given.items()}
    return Config(**values), given

# ---- Log -------------------------------------------------------------------------------
def set_aside(*paths: Path):
    """Rename the files that exist under these names to NAME.TIME.SUFFIX."""
    now = time.time_ns()  # It shows which files belong together.
    for path in filter(Path.exists, paths):
        aside = path.rename(path.with_name(f"{path.stem}.{now}{path.suffix}"))
        warnings.warn(f"{path} exists; it is kept as {aside.name}", stacklevel=2)

class RunLog:
    """Console, logs/RUN_ID.txt and logs/RUN_ID.jsonl of rank 0; others are silent."""
    def __init__(self, run_id: str, source: str, is_main: bool):
        self.code, self.files = source.encode(), ()  # `export` counts the code's bytes.
        if not is_main:
            return
        paths = [Path("logs", run_id + ending) for ending in (".txt", ".jsonl")]
        try:  # A run locks its .txt until it ends.
            with paths[0].open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # No file, or no locks there, is fine.
            require(not isinstance(error, BlockingIOError), f"RUN_ID={run_id} is still running")
        set_aside(*paths)  # The logs of two runs never mix.
        self.text, self.json = (p.open("a", encoding="utf-8", errors="replace") for p in paths)
        with suppress(OSError):
            fcntl.lockf(self.text, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.files = (sys.stdout, self.text)
        self.line(str(paths[0]), sys.stdout)
        smi = subprocess.getoutput("timeout 30 nvidia-smi 2> /dev/null", errors="replace")
        self.line(f"{source}\n{'=' * 100}\nRunning Python {sys.version}\n"
                  f"Running PyTorch {torch.__version__}\n{smi}\n{'=' * 100}", self.text)

    def line(self, text: str, *files):
        """Write a line to `files`, else to console and .txt; warn if that fails."""
        for file in files or self.files:
            try:
                print(text, file=file, flush=True)
            except (OSError, ValueError) as error:  # It is full, closed or not UTF-8.
                warnings.warn(f"{getattr(file, 'name', '')}: line missing: {error}", stacklevel=2)

    def event(self, event: str, text="", **values):
        """Write values to the .jsonl (inf, NaN: null), and `text` with them as `line` does."""
        if self.files:
            values = {"event": event, **values, "elapsed_s": round(time.monotonic() - STARTED, 3)}
            plain = json.loads(json.dumps(values), parse_constant=lambda nan_or_inf: None)
            self.line(json.dumps(plain), self.json)
        if text:
            self.line(text.format(**values))

# ---- Shards and validation -------------------------------------------------------------
def count_tokens(path) -> int:
    """The token count in a shard's header, after magic and version. Raises ValueError."""
    header = np.fromfile(path, dtype="<i4", count=3).tolist()
    require(len(header) == 3 and header[:2] == [20240520, 1], f"{path} is not a token shard")
    size, count = path.stat().st_size, header[2]
    require(count > 0 and size == HEADER_BYTES + 2 * count, f"{path} is damaged: {size} "
            f"bytes do not match {count} tokens; make or download it again")
    return count

def read_shard(path, vocab_size: int, start=0, count=-1):
    """`count` tokens (uint16) of a shard from `start` on; -1: all. Raises ValueError."""
    tokens = np.fromfile(path, dtype="<u2", count=count, offset=HEADER_BYTES + 2 * start)
    require(len(tokens) >= max(1, count), f"{path} has become shorter; make it again")
    largest = int(tokens.max())
    require(largest < vocab_size, f"{path} holds token {largest}, too large for VOCAB_SIZE="
            f"{vocab_size}; set it and TOKENIZER_PATH to what the shards were made with")
    return tokens

def open_split(config, split: str) -> dict[Path, int]:
    """Each shard of "train" or "val", by name, with its token count. Raises ValueError."""
    where = f"DATA_PATH={config.data_path!r}"
    paths = sorted(Path(config.data_path).glob(f"*_{split}_[0-9]*.bin"))
    there = ", ".join(map(str, Path("data/datasets").glob("*"))) or "no data set yet"
    require(paths, f"{where} has no *_{split}_[0-9]*.bin; there is {there}; prepare a text "
            "by data/prepare.py, or fetch FineWeb by data/download.py")
    shards = {path: count_tokens(path) for path in paths}
    tokens = sum(shards.values())
    require(tokens > config.train_seq_len, f"{where} has {tokens} tokens in *_{split}_*.bin, "
            f"too few for a row of TRAIN_SEQ_LEN={config.train_seq_len}")
    return shards

def load_byte_table(config) -> tuple[str, np.ndarray, np.ndarray]:
    """The tokenizer's kind; byte counts of tokens (V, 2); which are control tokens (V,).
    Column 1, for after a control token, omits a first space. Raises ValueError."""
    path, lengths, starting_lengths, is_control = config.tokenizer_path, [], [], []
    try:
        if path == "byte260":
            kind, lengths = "byte", [0] * 4 + [1] * 256  # Four special tokens come first.
        elif path.endswith(".model"):
            import sentencepiece
            kind = "sentencepiece"
            model = sentencepiece.SentencePieceProcessor(model_file=path)
            adds_space = model.encode("a", out_type=str)[0].startswith("\u2581")
            for i in range(model.vocab_size()):
                piece = model.id_to_piece(i).replace("\u2581", " ")
                # caseops tokenizers mark letters' case by these tokens of score 0.
                is_mark = model.get_score(i) == 0 and piece in {"\ue001", "\ue002", "\ue003"}
                if is_mark or model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
                    piece = ""
                lengths.append(1 if model.is_byte(i) else len(piece.encode()))
                starting_lengths.append(lengths[i] - (adds_space and piece.startswith(" ")))
                is_control.append(model.is_control(i))
        else:
            import tiktoken
            encoding = tiktoken.get_encoding(path)
            kind, lengths = "tiktoken", [0] * encoding.n_vocab  # Special tokens keep 0.
            for text in encoding.token_byte_values():
                lengths[encoding.encode_single_token(text)] = len(text)
    except Exception as error:  # A package or file is missing or damaged.
        raise ValueError(f"TOKENIZER_PATH={path!r} cannot be read: {error}") from None
    require(len(lengths) == config.vocab_size, f"VOCAB_SIZE={config.vocab_size}, but "
            f"{path!r} has {len(lengths)} tokens; set both to what the shards were made with")
    table = np.array([lengths, starting_lengths or lengths], dtype=np.uint16).T
    return kind, table, np.array(is_control or [0] * len(lengths), dtype=np.uint8)

class Validation:
    """Validation text and its bytes. Raises ValueError if manifest.json contradicts."""
    def __init__(self, config, ranks):
        self.config, self.ranks = config, ranks
        source = Path(config.data_path, "manifest.json")
        try:
            splits = json.loads(source.read_bytes() if source.exists() else "{}").get("splits", {})
            claims = [splits.get("val", {}).get(name) for name in ("tokens", "decoded_bytes")]
            entries = sum((split.get("shards", []) for split in splits.values()), [])
            self.data_sha256 = {str(entry["file"]): entry.get("sha256") for entry in entries}
        except Exception as error:  # Damaged files fail in many ways.
            raise ValueError(f"{source} is damaged: {error!r}; make it again") from None
        there = {path.name for path in source.parent.glob("*_[0-9]*.bin")}
        listed = self.data_sha256.keys() or there
        # Without training, listed shards may be missing; unlisted ones are always wrong.
        odd = sorted((there ^ listed) if config.iterations else (there - listed))
        require(not odd, f"{source} and the shards differ in {odd}; copy missing, move extra ones")
        tokens = np.hstack([read_shard(p, config.vocab_size) for p in open_split(config, "val")])
        self.tokenizer_kind, table, is_control = load_byte_table(config)
        target_bytes = table[tokens[1:], is_control[tokens[:-1]]]
        found = [len(tokens), int(table[tokens[0], 1] + target_bytes.sum(dtype=np.int64))]
        wanted = [size if claim is None else claim for claim, size in zip(claims, found)]
        require(found == wanted, f"{source} says {wanted} validation tokens and bytes, shards "
                f"and TOKENIZER_PATH={config.tokenizer_path} give {found}: scores would be wrong")
        self.num_targets = (len(tokens) - 1) // config.train_seq_len * config.train_seq_len
        self.tokens = tokens[:self.num_targets + 1]
        self.bytes = int(target_bytes[:self.num_targets].sum(dtype=np.int64))
        require(self.bytes, f"{source.parent}: no validation row has text; prepare more")

    def score(self, model, stride=0) -> dict[str, float]:
        """Score rows, or windows of a row's length that move by `stride`. Collective."""
        config, ranks, start_ms = self.config, self.ranks, self.ranks.now_ms()
        length = config.train_seq_len
        stride = min(stride or length, length)
        windows = 1 + math.ceil((self.num_targets - length) / stride)
        limit = config.val_batch_size // (ranks.world_size * config.grad_accum_steps)
        batch = max(1, min(limit, config.micro_batch_tokens) // length)  # windows at once
        # Window i scores starts[i] to stops[i]; extra ones fill the last batch, unscored.
        stops = np.minimum(length + stride * np.arange(windows + batch), self.num_targets)
        starts = np.concatenate(([0], stops[:-1]))
        # With gradients, training's graph is reused; without, compiling takes a minute.
        reuses_graph = config.compile != "0" and batch * length == config.micro_batch_tokens
        device = "cpu" if ranks.device.type == "mps" else ranks.device  # MPS: no float64
        nats = torch.zeros((), dtype=torch.float64, device=device)
        for first in range(batch * ranks.rank, windows, batch * ranks.world_size):
            chosen = slice(first, first + batch)
            places = stops[chosen, None] - length + np.arange(length)
            is_scored = places >= starts[chosen, None]
            targets = np.where(is_scored, self.tokens[places + 1], np.int64(-1))
            pair = np.stack((self.tokens[places], targets))  # int64
            with torch.set_grad_enabled(reuses_graph):
                loss = model(*ranks.to_device(pair)).detach()
            nats += loss.to(device).double() * int(is_scored.sum())
        total = ranks.sum(nats).item()
        return {"val_loss": total / self.num_targets, "val_bpb": total / math.log(2) / self.bytes,
                "eval_time_ms": ranks.now_ms() - start_ms}

# ---- Export ----------------------------------------------------------------------------
def quantize_tensor(tensor, bits=0, clip=0.0):
    """int8 values of `bits` bits; scales: float16 (rows,) of a matrix, else one float32.
    Bits 0 means 8 as published: clipped at percentile 99.99984, matrices' scales >= 1/127."""
    is_matrix = tensor.ndim == 2
    levels = 2 ** ((bits or 8) - 1) - 1
    rows = tensor.float().reshape(len(tensor) if is_matrix else 1, -1)
    if not bits:
        limits = torch.quantile(rows.abs(), 0.9999984, dim=1, keepdim=True)
        rows = rows.clamp(-limits, limits)
        scales = limits.clamp_min(1) / 127 if is_matrix else (limits / 127).where(limits > 0, 1)
    else:
        limits = clip * rows.std(1) if clip else rows.abs().amax(1)
        scales = (limits / levels).clamp_min(1e-7).half()[:, None]  # Use them as stored.
    rounded = (rows / scales).round().clamp(-levels, levels)
    scales = scales[:, 0].half() if is_matrix else scales.squeeze()
    return rounded.to(torch.int8).view(tensor.shape), scales

def quantize(state: dict, config) -> tuple[dict, int]:
    """The int8 artifact and its payload in bytes; small tensors stay floats."""
    published = config.export_bits == config.embed_bits == 8 and not config.export_clip
    published &= config.optimizer == "muon"  # AdamW's weights need finer scales.
    about = {name: getattr(config, name.lower()) for name in STORED}
    path = Path(config.tokenizer_path)  # An absolute one would tell whose machine it was.
    about["TOKENIZER_PATH"] = path.name if path.is_absolute() else path.as_posix()
    keys = ("quantized", "scales", "dtypes", "passthrough", "qmeta", "passthrough_orig_dtypes")
    artifact = {"__quant_format__": INT8_FORMAT, "about": json.dumps(about)} | {k: {} for k in keys}
    controls = config.control_tensor_name_patterns.split(",")
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        is_control = any(part and part in name for part in controls)
        if t.is_floating_point() and t.numel() > config.int8_keep_float_max_numel:
            bits = config.export_bits if name.startswith("blocks.") else config.embed_bits
            if published or is_control or t.ndim != 2:
                bits = 0
            values, scales = quantize_tensor(t, bits, config.export_clip)
            artifact["quantized"][name], artifact["scales"][name] = values, scales
            artifact["dtypes"][name] = dtype
            if t.ndim == 2:
                artifact["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        elif is_control or not t.is_floating_point():
            artifact["passthrough"][name] = t
        else:
            artifact["passthrough"][name] = t.half()
            artifact["passthrough_orig_dtypes"][name] = dtype
    parts = (artifact[part] for part in ("quantized", "scales", "passthrough"))
    return artifact, sum(t.nbytes for part in parts for t in part.values())

def saved(value) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()

def pack(state: dict, config) -> tuple[bytes, dict]:
    """The artifact's file, in the smaller of two codings, and what the log says of it."""
    artifact, payload = quantize(state, config)
    raw = saved(artifact)
    packers = [zlib.compressobj(9), zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)]
    data = min((packer.compress(raw) + packer.flush() for packer in packers), key=len)
    return data, {"payload_bytes": payload, "raw_bytes": len(raw), "artifact_bytes": len(data),
                  "artifact_sha256": sha256(data).hexdigest(), "export_clip": config.export_clip}

def read_saved(path: str | Path) -> dict:
    """What torch.save wrote, perhaps packed by zlib. A plain file is mapped: ranks share it."""
    is_plain = np.fromfile(path, "S2", 1).tolist() == [b"PK"]  # Zip archives start so.
    source = str(path)
    if not is_plain:
        data = Path(path).read_bytes()  # The limit below stops zip bombs.
        source = io.BytesIO(zlib.decompressobj().decompress(data, max(2**26, 32 * len(data))))
    with zipfile.ZipFile(source) as archive:
        require(not any(e.compress_type for e in archive.infolist()), "entries are packed")
        require(archive.testzip() is None, "a checksum is wrong; copy it again")
    if not is_plain:
        source.seek(0)
    return torch.load(source, map_location="cpu", weights_only=True, mmap=is_plain)

def load_weights(model, path: str | Path):
    """Load the weights of an artifact, state dict or checkpoint. Raises ValueError."""
    try:
        state = read_saved(path)
        state = state.get("model", state)  # Only checkpoints have it.
        if state.get("__quant_format__") == INT8_FORMAT:
            for name, values in state["quantized"].items():
                scales = state["scales"][name].view(-1, *[1] * (values.ndim - 1))
                fits = values.shape == model.get_parameter(name).shape
                require(fits and len(scales) in (1, len(values)), f"{name} has another shape")
                state["passthrough"][name] = values.float() * scales
            state = state["passthrough"]
        model.load_state_dict(dict(state))  # Its _metadata can make it assign, not copy.
    except Exception as error:  # Damaged files fail in many ways.
        raise ValueError(f"{path} cannot be loaded into this model: {error}") from None

def write_whole(path, data: bytes):
    """Write a file whole or not at all; set aside what was there. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # It may be gone.
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        set_aside(path)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from None

# ---- Checkpoints -----------------------------------------------------------------------
def list_checkpoints(config, suffix=".pt") -> list[Path]:
    """The checkpoints of RUN_ID by steps, or of all runs by times; the newest first."""
    pattern = (re.escape(config.run_id) or ".+") + r"_\d{8,}" + re.escape(suffix)
    folder = Path(config.out_dir or "logs")
    files = folder.glob("checkpoints/*" if config.out_dir else "*/checkpoints/*")
    found = [path for path in files if re.fullmatch(pattern, path.name) and path.exists()]
    return sorted(found, key=lambda p: p.name if config.run_id else p.stat().st_mtime)[::-1]

def find_checkpoint(config) -> dict:
    """RESUME's checkpoint (auto: newest readable; no files: {}). Raises ValueError."""
    paths = list_checkpoints(config) if config.resume == "auto" else [config.resume]
    for path in paths:
        try:
            state = read_saved(path)
            require(state.get("format") == CHECKPOINT_FORMAT, "it has another format")
            return {**state, "path": str(path), "run_id": str(state["config"]["run_id"])}
        except Exception as error:  # Damaged files fail in many ways.
            print(f"warning: checkpoint {path} cannot be used: {error}", file=sys.stderr)
    require(not paths, f"RESUME={config.resume}: no usable checkpoint; change it or RUN_ID")
    return {}

def resume(trainer, loader, state: dict):
    """Continue from a checkpoint. Raises ValueError if it does not fit this run."""
    try:
        old, new = {**asdict(Config()), **state["config"]}, asdict(trainer.config)
        refused = [f"{n} was {old[f.name]!r} and is {new[f.name]!r}" for n, f in FIELDS.items()
                   if n not in OF_RUN and old[f.name] != new[f.name]]
        gone = sorted(old.keys() - new.keys() - IGNORED)
        refused += [f"{name.upper()} is unknown now" for name in gone if old[name]]
        require(not refused, f"it was trained with other settings: {'; '.join(refused)}")
        require(state["step"] <= trainer.config.iterations, "its step is beyond ITERATIONS")
        changed = [n for n, value in loader.about.items() if state.get(n, value) != value]
        require(not changed, f"{', '.join(changed)} changed: by data, ranks or GRAD_ACCUM_STEPS")
        trainer.load_state_dict(state)
    except Exception as error:  # Damaged files fail in many ways.
        raise ValueError(f"checkpoint {state['path']} does not fit this run: {error}; "
                         "undo that, or start anew with a new RUN_ID") from None

def save_checkpoint(trainer, loader, log):
    """Write a checkpoint; of this run's, only the newest stay. A failure only warns."""
    config, step = trainer.config, trainer.clock.step
    path = Path(config.out_dir, "checkpoints", f"{config.run_id}_{step:08d}.pt")
    try:
        data = saved({"format": CHECKPOINT_FORMAT, "config": asdict(config),
                      **loader.about, **trainer.state_dict()})
        write_whole(path, data)
        log.event("checkpoint", step=step, file=path.name, bytes=len(data))
        old = [p for p in list_checkpoints(config) if p != path][KEPT_CHECKPOINTS - 1:]
        for file in old + list_checkpoints(config, ".pt.tmp"):  # Killed runs leave .tmp.
            file.unlink()
    except OSError as error:
        log.line(f"warning: checkpoint of step {step}: {error}")

# ---- A run -----------------------------------------------------------------------------
class Clock:
    """Steps, training time in ms, and signals to stop; the ranks `synchronize` them."""
    def __init__(self, config, ranks):
        self.ranks = ranks
        self.cap_ms = config.max_wallclock_seconds * 1000 or math.inf
        self.signal = 0  # the first that this process received
        self.stop_signal = 0  # received by any rank when they last synchronized
        self.set(0, 0.0)

    def set(self, step: int, time_ms: float):
        """Start the clock after `step` steps, which took `time_ms`."""
        gc.collect(1)  # As gc is off in a run, free what is new.
        self.step, self.time_ms = step, time_ms
        self.zero_ms = self.ranks.now_ms() - time_ms  # The clock was at zero then.

    def synchronize(self, is_bad=False) -> bool:
        """Agree on time and signals; return whether any rank `is_bad`. Collective."""
        elapsed_ms = self.ranks.now_ms() - self.zero_ms
        self.stop_signal, self.time_ms, is_bad = self.ranks.max(self.signal, elapsed_ms, is_bad)
        return bool(is_bad)

    @contextmanager
    def paused(self):
        """Stop the clock on all ranks for what is not training. Collective."""
        self.synchronize()
        stopped_ms = self.time_ms
        yield
        self.synchronize()  # Wait for all ranks, take their signals, drop the time.
        self.set(self.step, stopped_ms)

    def on_signal(self, number: int, frame):
        """Keep a signal for `synchronize`."""
        if not self.signal and self.ranks.rank == 0:
            with suppress(OSError):  # The terminal may be closed.
                os.write(2, b"stopping soon; Ctrl-\\ stops now\n")
        self.signal = self.signal or number

def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; never if that is 0."""
    return every > 0 and step % every == 0

def warm_up(trainer, loader, log):
    """Before step 0, make WARMUP_STEPS of one micro-batch at rate 0. Start the clock."""
    before = trainer.state_dict()  # It copies rates; rate 0 keeps weights.
    steps = trainer.config.warmup_steps if loader and trainer.clock.step == 0 else 0
    for group in sum((o.param_groups for o in trainer.optimizers.values()), []):
        group["base_lr"] = 0.0
    for i in range(1, steps + 1):
        trainer.train_step(loader.batches(0)[:1])
        if steps <= 20 or i % 10 == 0 or i == steps:
            log.line(f"warmup_step:{i}/{steps}")
    trainer.load_state_dict(before)

def validate(trainer, validation, log):
    """Log the model's score, off the clock. Collective."""
    clock = trainer.clock
    with clock.paused():
        score = validation.score(trainer.model)
        log.event("val", "step:{step}/{iterations} val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} "
                  "train_time:{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms",
                  step=clock.step, iterations=trainer.config.iterations, **score,
                  train_time_ms=clock.time_ms, step_avg_ms=clock.time_ms / max(clock.step, 1))

def log_step(trainer, loader, log, loss, norm, since: tuple):
    """Log the step just done; `since`: step and ms of the line before. Collective."""
    config, step, time_ms = trainer.config, trainer.clock.step, trainer.clock.time_ms
    mean_loss = trainer.ranks.sum(loss).item() / trainer.ranks.world_size
    tokens = config.train_batch_tokens * (step - since[0])
    optimizer = trainer.optimizers.get("muon", trainer.optimizers["adam"])
    log.event("train", "step:{step}/{iterations} train_loss:{train_loss:.4f} train_time:"
              "{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms lr:{lr:.2e} grad_norm:"
              "{grad_norm:.3f} tok_per_sec:{tok_per_sec:.0f} epoch:{epoch:.3f}",
              step=step, iterations=config.iterations, train_loss=mean_loss,
              train_time_ms=time_ms, step_avg_ms=time_ms / step, grad_norm=norm.item(),
              tok_per_sec=1000 * tokens / max(time_ms - since[1], 1e-6),
              lr=optimizer.param_groups[0]["lr"], mem_mib=torch.cuda.max_memory_allocated() >> 20,
              epoch=step * loader.pieces * loader.stride / loader.num_tokens)

def export(trainer, validation, log):
    """Write floats, validate, write and load the artifact. Raises OSError, ValueError."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    state = {name: t.cpu() for name, t in trainer.model.state_dict().items()}
    if ranks.rank == 0:  # The floats come first: nothing below can lose them.
        floats = saved(state)
        write_whole(Path(config.out_dir, "final_model.pt"), floats)
    clock.set(clock.step, clock.time_ms)  # Writing the floats is not training.
    validate(trainer, validation, log)
    if clock.step < config.iterations:
        log.line(f"stopping_early: wallclock_cap train_time:{clock.time_ms:.0f}ms "
                 f"step:{clock.step}/{config.iterations}")
    if ranks.device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        log.line(f"peak memory allocated: {peak >> 20} MiB reserved: {reserved >> 20} MiB")
    if ranks.rank == 0:
        path, code_bytes = Path(config.out_dir, MODEL_FILE), len(log.code)
        for i in range(9 if config.export_clip else 1):  # Coarser steps pack better.
            clip = 1.1**i * config.export_clip
            data, about = pack(state, replace(config, export_clip=clip))
            if not config.size_cap or len(data) + code_bytes <= config.size_cap:
                break
            log.line(f"WARNING: above SIZE_CAP={config.size_cap} with EXPORT_CLIP={clip:g}")
        write_whole(path, data)
        log.event("export", """Serialized model: {model_bytes} bytes
Code size: {code_bytes} bytes
Total submission size: {model_total} bytes
Serialized model int8+zlib: {artifact_bytes} bytes \
(payload:{payload_bytes} raw_torch:{raw_bytes} payload_ratio:{payload_ratio:.2f}x)
Total submission size int8+zlib: {total_bytes} bytes""",
                  step=clock.step, model_bytes=len(floats), code_bytes=code_bytes,
                  model_total=len(floats) + code_bytes, total_bytes=len(data) + code_bytes,
                  payload_ratio=sum(t.nbytes for t in state.values()) / about["payload_bytes"],
                  code_sha256=sha256(log.code).hexdigest(), **about)
        load_weights(trainer.model, path)
    if ranks.world_size > 1:  # The other ranks may not see the file.
        for p in trainer.model.parameters():
            dist.broadcast(p.data, 0)

def log_final_scores(trainer, validation, log):
    """Score what the artifact holds. Raises ValueError if that is not finite."""
    config, step = trainer.config, trainer.clock.step
    if config.eval_stride:
        score = validation.score(trainer.model, config.eval_stride)
        log.event("windows", "windows val_loss:{val_loss:.8f} val_bpb:{val_bpb:.8f} "
                  "eval_time:{eval_time_ms:.0f}ms", step=step, **score)
    score = validation.score(trainer.model)
    log.event("final", "final_int8_zlib_roundtrip val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} "
              "eval_time:{eval_time_ms:.0f}ms\nfinal_int8_zlib_roundtrip_exact "
              "val_loss:{val_loss:.8f} val_bpb:{val_bpb:.8f}", step=step, **score)
    require(math.isfinite(score["val_loss"]), "the final score is not finite; lower the rates")

def plan_batch(config, ranks) -> Config:
    """Set spans, micro-batches; 1, 2, 4 or 8 ranks read the same text. Raises ValueError."""
    length, tokens = config.train_seq_len, config.train_batch_tokens
    spans = max(n for n in (1, 2, 4, 8) if n <= max(1, tokens / length))
    spans_per_rank = config.grad_accum_steps or math.ceil(spans / ranks.world_size)
    unit = spans_per_rank * ranks.world_size * length
    nearest = max(1, round(tokens / unit)) * unit
    require(tokens == nearest or not config.iterations,  # A run that only scores reads none.
            f"TRAIN_BATCH_TOKENS={tokens} is not a multiple of {unit} (TRAIN_SEQ_LEN * ranks * "
            f"GRAD_ACCUM_STEPS={spans_per_rank}); the nearest is {nearest}")
    nbytes = config.model_dim * getattr(torch, config.dtype).itemsize  # of a token in x
    limits = {"cpu": (2 << 20) // nbytes, "mps": length}  # 2 MiB of x stay in caches.
    if ranks.device.type == "cuda":  # Bytes per token fit peaks measured on an H100.
        per_token = config.num_layers * nbytes * (11 + 2 * config.mlp_mult) + 6 * config.vocab_size
        share = 0.12 if config.compile in ("0", "blocks") else 0.35  # Fusion saves much.
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        limits["cuda"] = -ranks.max(-share * memory / per_token)[0]  # The smallest GPU decides.
    limit = config.micro_batch_tokens or limits[ranks.device.type]
    rows = max(1, tokens // (ranks.world_size * length))  # of a rank
    at_once = max(n for n in range(1, rows + 1) if rows % n == 0 and n <= max(1, limit / length))
    return replace(config, grad_accum_steps=spans_per_rank, micro_batch_tokens=at_once * length)

def resolve(config, ranks) -> Config:
    """Replace automatic settings with their values. Raises ValueError."""
    device = ranks.device.type
    fallback = "float16" if device == "cuda" else "float32"  # A T4 has no bfloat16.
    if config.dtype == "auto":
        config = replace(config, dtype="bfloat16" if bfloat16_is_native(ranks.device) else fallback)
    modes = {"cuda": "1", "cpu": "blocks" if sys.platform == "linux" else "0", "mps": "0"}
    mode = modes[device] if config.compile == "auto" else config.compile
    config = replace(config, compile=mode if config.iterations else "0")
    config = plan_batch(config, ranks)
    run_id = config.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    path = Path(config.tokenizer_path)
    digest = sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()
    require(config.tokenizer_sha256 in ("", digest), f"TOKENIZER_PATH={path} is missing "
            f"or wrong; use the one with TOKENIZER_SHA256={config.tokenizer_sha256}")
    return replace(config, device=device, run_id=run_id, out_dir=config.out_dir or f"logs/{run_id}",
                   attn=choose_attention(config, ranks.device), tokenizer_sha256=digest)

def announce(trainer, loader, validation, log, overrides: dict, resumed_from=""):
    """Log data, model and settings, in lines that begin as the published trainer's."""
    c, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    groups = sum((o.param_groups for o in trainer.optimizers.values()), [])
    rates = {group["kind"]: group["base_lr"] for group in groups}
    decayed = sum((group["params"] for group in groups if group["weight_decay"]), [])
    log.event("config", config={name: getattr(c, f.name) for name, f in FIELDS.items()},
              overrides=overrides, data_sha256=validation.data_sha256, torch=torch.__version__,
              val_tokens=validation.num_targets, val_bytes=validation.bytes,
              world_size=ranks.world_size, threads=torch.get_num_threads(),
              gpu=torch.cuda.get_device_name() if c.device == "cuda" else "")
    log.line(f"""val_bpb:enabled tokenizer_kind={validation.tokenizer_kind} \
tokenizer_path={c.tokenizer_path}
train_loader:dataset:{Path(c.data_path).name} train_shards:{len(loader.shards) if loader else 0} \
tokens:{loader.num_tokens if loader else 0}
val_loader:shards pattern={c.data_path}/*_val_*.bin tokens:{validation.num_targets}
model_params:{sum(p.numel() for p in trainer.model.parameters())}
world_size:{ranks.world_size} grad_accum_steps:{c.grad_accum_steps} device:{ranks.device} \
dtype:{c.dtype} compile:{c.compile} micro_batch_tokens:{c.micro_batch_tokens}
sdp_backends:{" ".join(f"{sdp}={c.attn == attn}" for attn, sdp in SDP_OF_ATTN.items())}
attention_mode:gqa num_heads:{c.num_heads} num_kv_heads:{c.num_kv_heads}
tie_embeddings:{c.tie_embeddings} embed_lr:{rates["embed"]} head_lr:{rates.get("head", 0.0)} \
matrix_lr:{rates.get("matrix", 0.0)} scalar_lr:{rates["scalar"]}
weight_decay:{c.weight_decay} tensors:{len(decayed)} parameters:{sum(p.numel() for p in decayed)}
train_batch_tokens:{c.train_batch_tokens} train_seq_len:{c.train_seq_len} \
iterations:{c.iterations} warmup_steps:{c.warmup_steps} \
max_wallclock_seconds:{c.max_wallclock_seconds:.3f}
seed:{c.seed}""")
    if loader and c.device == "cpu" and c.train_batch_tokens == Config.train_batch_tokens:
        log.line("the defaults are for eight GPUs; on a CPU, take @records/presets/quick.env")
    if resumed_from:
        log.event("resume", "resumed: step:{step} train_time:{train_time_ms:.0f}ms from {file}",
                  step=clock.step, train_time_ms=clock.time_ms, file=resumed_from)
    elif c.resume:
        log.line("RESUME=auto finds no checkpoint; starting at step 0")

def compile_model(trainer, loader):
    """Compile the model, or its blocks and its loss. Raises ValueError if that fails."""
    mode, model = trainer.config.compile, trainer.model
    torch.compiler.reset()  # An earlier run of this process may have filled its cache.
    for part in (model.blocks if mode == "blocks" else [model]):
        part.compile(dynamic=False, fullgraph=True)
    if mode == "blocks":
        model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
    try:
        model(*loader.batches(0)[0]).backward()
    except (torch._dynamo.exc.TorchDynamoException, OSError, ImportError) as error:
        require(not trainer.clock.signal, "stopped while compiling")  # Ctrl-C ends g++.
        last = re.split(r"Output:|\n(?=\w+Error: )", str(error))[-1].split()  # the cause
        raise ValueError(f"COMPILE={mode} failed: {' '.join(last):.400}; try 0") from None
    model.zero_grad()

@contextmanager
def signals_kept(clock):
    """Within, `clock` takes signals, except ignored ones (as under nohup); gc is off."""
    stops = [n for n in signal.Signals if n.name in STOPS and signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, clock.on_signal) for number in stops}
    gc.disable()  # It slows compiling, and other ranks wait for it.
    try:
        yield
    finally:
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was set in C.

def run(config, overrides: dict, source: str) -> int:
    """Train, export and score; return the exit status. `main` prints errors."""
    ranks = start_ranks(config)
    torch.set_float32_matmul_precision(config.matmul_precision)
    checkpoint = find_checkpoint(config) if config.resume else {}
    config = resolve(replace(config, run_id=config.run_id or checkpoint.get("run_id", "")), ranks)
    only_scores = not config.iterations and config.init_from.endswith(".ptz")
    validation = Validation(config, ranks)
    loader = TokenLoader(config, ranks) if config.iterations else None
    settings = [getattr(config, f.name) for name, f in FIELDS.items()  # Texts may differ.
                if name not in OF_RUN or not isinstance(f.default, str)]
    facts = repr((settings, validation.bytes, loader and loader.about, checkpoint.get("step")))
    crc = zlib.crc32(facts.encode())  # The ranks' largest and smallest must be equal.
    require(ranks.max(crc, -crc) == [crc, -crc], "the ranks differ in settings or data")
    trainer = Trainer(config, ranks, "" if checkpoint else config.init_from)
    clock = trainer.clock
    if checkpoint:
        resume(trainer, loader, checkpoint)
    if ranks.rank == 0:
        Path("logs").resolve().mkdir(exist_ok=True)  # Make a link's missing target, too.
        Path(config.out_dir).mkdir(parents=True, exist_ok=True)
        require(os.access(config.out_dir, os.W_OK), f"OUT_DIR={config.out_dir} is not writable")
    log = RunLog(config.run_id, source, ranks.rank == 0)
    announce(trainer, loader, validation, log, overrides, checkpoint.get("path"))
    if ranks.rank == 0 and config.iterations:  # RESUME=auto must not find an old run's.
        set_aside(*[p for p in list_checkpoints(config) if int(p.stem.split("_")[-1]) > clock.step])
    del checkpoint  # Its file is unmapped, unless an optimizer on a CPU uses it.
    with signals_kept(clock):
        if config.compile != "0":
            log.line("compiling: a minute or more the first time; COMPILE=0 avoids it")
            compile_model(trainer, loader)
        warm_up(trainer, loader, log)
        train(trainer, loader, validation, log)
        if not (only_scores or clock.stop_signal):
            export(trainer, validation, log)
            clock.synchronize()  # Heed signals during the export.
    if clock.stop_signal:
        hint = "set RESUME=auto to go on" if list_checkpoints(config) else "there is no checkpoint"
        log.line(f"stopped: signal {clock.stop_signal:g} after step:{clock.step}; {hint}")
    else:
        log_final_scores(trainer, validation, log)
    ranks.max(0)  # Wait for all: gloo aborts in a rank whose peer has left.
    return 128 + int(clock.stop_signal) if clock.stop_signal else 0

def main() -> int:
    """Run the script with this process's arguments and environment; the exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly.
        settings = SOURCE.partition("\nclass Config:")[2].partition("\n    def ")[0]
        print(__doc__, re.sub(r"\n    \w+:", lambda match: match[0].upper(), settings))
        return 0
    warnings.formatwarning = lambda text, *place: f"note: {text}\n"
    try:
        status = run(*load_config(sys.argv[1:], os.environ), SOURCE)
    except (ValueError, OSError, FloatingPointError, KeyboardInterrupt, dist.DistError,
            torch.AcceleratorError, torch.OutOfMemoryError) as error:
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        oom = isinstance(error, torch.OutOfMemoryError)
        hint = "\nLower MICRO_BATCH_TOKENS; a model of 3e9 parameters fills 80 GB" if oom else ""
        print(f"train_gpt.py: {str(error) or 'stopped'}{hint}", file=sys.stderr)
    if dist.is_initialized():  # gloo's threads may abort Python's normal exit.
        os._exit(status)
    return status

if __name__ == "__main__":
    sys.exit(main())
