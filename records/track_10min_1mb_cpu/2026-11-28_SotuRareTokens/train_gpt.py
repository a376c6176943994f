"""Train the best language model you can within a size limit and a time limit.

    python train_gpt.py NUM_LAYERS=4 DEVICE=cpu            one device; --help lists all variables
    torchrun --standalone --nproc_per_node=8 train_gpt.py  eight GPUs, published settings

Variables are NAME=value arguments, else of the environment, else lines of a file given as @FILE.
Science comes first: Config, GPT, Muon, build_optimizers, TokenLoader, schedule, Trainer (a step),
train (all steps). Then machinery: start_ranks, load_config, RunLog, Validation, quantize to
load_weights (the artifact), checkpoints, export, run. In shapes, B is rows, T tokens, V vocabulary,
D width, H query heads, K key/value heads, C head width. "Published": openai/parameter-golf.
"""
import ctypes
import difflib
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
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# ---- Configuration ---------------------------------------------------------------------
# A setting is a field of Config: my_gain: float = kept(1.0, "gain of my layer", high=9). The model
# needs what is `kept`, and stores it; `var` is for training; only `free` may change on RESUME.
STARTED = time.monotonic()  # after the imports
SHARD_START = [20240520, 1]  # magic number and version
HEADER_BYTES = 1024  # in front of a shard's tokens
INT8_FORMAT = "int8_clean_per_row_v1"
MODEL_FILE = "final_model.int8.ptz"  # the artifact
CHECKPOINT_FORMAT = 4
STOPS = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"}  # of job systems and terminals
CASE = {"\ue001", "\ue002", "\ue003"}  # CaseOps tokenizers' marks of capitals: no bytes
SDPA = ("cudnn", "flash", "mem_efficient", "math")  # PyTorch's attention kernels
FOREIGN = {"COMPILER", "MODEL_DIR", "DATASET_PATH", "DEVICES", "SEEDS"}  # of clusters, not misspelt
CONTROL = ("attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,"
           "skip_weight,skip_weights")

def require(condition, message: str) -> None:
    """Raise ValueError with a message for the user unless the condition holds."""
    if not condition:
        raise ValueError(message)

def var(default, text: str, choices: str = "", low: float = 0, high: float = 1e18, kind=""):
    """A field of Config: its help, choices, lowest and highest value, and kind."""
    about = dict(help=text, choices=choices, limits=(low, high), kind=kind)
    return field(default=default, metadata=about)

free = partial(var, kind="free")
kept = partial(var, kind="kept")

@dataclass(frozen=True)
class Config:
    """Every setting of a run. A field is the variable of the same name in capitals."""
    # Run, data and device
    run_id: str = free("", "name of logs/RUN_ID.txt and .jsonl; empty: a new name")
    seed: int = var(1337, "seed of the initial weights and of LOADER=shuffled")
    out_dir: str = free("", "folder of the model's files and checkpoints/; empty: logs/RUN_ID")
    init_from: str = free("", "artifact, state dict, checkpoint or RUN_ID to start from")
    data_path: str = free("./data/datasets/fineweb10B_sp1024", "folder with token shards")
    tokenizer_path: str = free("./data/tokenizers/fineweb_1024_bpe.model", "file, byte260 or gpt2")
    tokenizer_sha256: str = kept("", "digest that the tokenizer must have; empty: any")
    loader: str = var("sequential", "order of the training text", "sequential|shuffled")
    overfit: bool = var(False, "train on the first batch again and again")
    device: str = free("auto", "auto: the first that is available", "auto|cuda|mps|cpu")
    dtype: str = kept("auto", "type; auto: bfloat16 where native", "auto|bfloat16|float32|float16")
    matmul_precision: str = free("high", "float32 products; high: TF32 on CUDA", "highest|high")
    compile: str = free("auto", "auto: 1 on CUDA, blocks on Linux's CPUs", "auto|0|1|blocks")
    attn: str = free("auto", "tiled: for CPUs", "auto|flash|cudnn|efficient|math|tiled")
    # Length, validation and log
    iterations: int = free(20000, "train for at most N steps")
    max_wallclock_seconds: float = free(600.0, "train for at most N seconds; 0: no limit")
    warmup_steps: int = free(20, "untimed steps that prime the kernels and are undone")
    warmdown_iters: int = var(3000, "lower the rates in the last N steps; <= 0: never", low=-1e9)
    train_batch_tokens: int = var(393216, "tokens in a step, over all ranks", low=1)
    train_seq_len: int = kept(4096, "tokens in a row, in training and validation", low=1)
    grad_accum_steps: int = free(0, "spans of text per rank and step (not passes); 0: 8 / ranks")
    micro_batch_tokens: int = free(0, "maximum tokens in a forward pass; 0: by device")
    val_loss_every: int = free(1000, "validate every N steps; 0: only at the end")
    val_batch_size: int = free(524288, "a pass scores at most N / ranks / GRAD_ACCUM_STEPS tokens")
    val_tokens: int = free(0, "for a quick look, validate on the first N tokens; 0: all")
    eval_seq_len: int = free(0, "window of a second score; 0: TRAIN_SEQ_LEN", high=1e6)
    eval_stride: int = free(0, "tokens by which these windows move; 0: no overlap")
    train_log_every: int = free(200, "log every N steps, and the first ten")
    # Model
    vocab_size: int = kept(1024, "tokens in the tokenizer's vocabulary", low=1)
    vocab_pad: int = kept(1, "round the rows of the tables up to a multiple of N", low=1)
    num_layers: int = kept(9, "blocks; the first half feeds skips to the second", low=1)
    model_dim: int = kept(512, "width of the residual stream", low=1)
    num_heads: int = kept(8, "query heads, which share MODEL_DIM", low=1)
    num_kv_heads: int = kept(4, "key/value heads; must divide NUM_HEADS", low=1)
    mlp_mult: int = kept(2, "hidden width of the MLP, as a multiple of MODEL_DIM", low=1)
    tie_embeddings: bool = kept(True, "use one table for input and output")
    rope_base: float = kept(10000.0, "base of the rotary frequencies", low=1)
    logit_softcap: float = kept(30.0, "limit of the logits, by tanh", low=1e-3, high=1e3)
    qk_gain_init: float = var(1.5, "initial gain of the queries, learned per head")
    tied_embed_init_std: float = var(0.005, "initial standard deviation of a tied table")
    init: str = var("baseline", "gpt2: all weights normal, std 0.02", "baseline|gpt2")
    mlp_slope: float = kept(0.0, "slope of the MLP's ReLU below 0, before the square")
    rope_dims: int = kept(0, "dimensions of a head that rotate; 0: all")
    shift_keys: bool = kept(False, "shift a part of each key by one token")
    exclusive_attn: bool = kept(False, "project a token's own value out of its output")
    lanes: int = kept(0, "blocks at the end whose MLP has a residual stream of its own")
    num_loops: int = kept(0, "extra passes through blocks LOOP_START to LOOP_END; 0: none")
    loop_start: int = kept(0, "first repeated block, counted from 0")
    loop_end: int = kept(0, "last repeated block, counted from 0")
    loop_at: float = free(0.35, "part of the run before NUM_LOOPS acts", high=0.99)
    smear: bool = kept(False, "add a learned share of the token before to each embedding")
    # Optimizers
    optimizer: str = var("muon", "muon: for the blocks' matrices, else Adam", "muon|adamw")
    adam_lr: float = var(3e-4, "learning rate of everything with OPTIMIZER=adamw")
    embed_lr: float = var(0.6, "learning rate of an untied embedding, with Muon")
    head_lr: float = var(0.008, "learning rate of an untied output head, with Muon")
    tied_embed_lr: float = var(0.03, "learning rate of a tied embedding, with Muon")
    matrix_lr: float = var(0.02, "learning rate of the blocks' matrices, with Muon")
    scalar_lr: float = var(0.02, "learning rate of vectors and the like, with Muon")
    muon_momentum: float = var(0.99, "Muon's momentum after its warm-up")
    muon_backend_steps: int = var(5, "Newton-Schulz steps of Muon")
    muon_slow_at: float = var(0.0, "part of the run before a slow momentum acts; 0: never", high=1)
    muon_row_norm: bool = var(False, "scale the rows of an update to norm 1, then orthogonalize")
    muon_momentum_warmup_start: float = var(0.92, "Muon's momentum at step 0")
    muon_momentum_warmup_steps: int = var(1500, "raise Muon's momentum over N steps")
    beta1: float = var(0.9, "Adam's decay of the first moment")
    beta2: float = var(0.95, "Adam's decay of the second moment")
    adam_eps: float = var(1e-8, "Adam's epsilon", low=1e-30)
    fused: bool = free(True, "run Adam in one kernel (never on MPS); 0: PyTorch chooses")
    weight_decay: float = var(0.0, "decay of matrices and tables, times their rate")
    dropout: float = var(0.0, "share of the blocks' outputs to drop: for small texts", high=0.9)
    lr_schedule: str = var("warmdown", "shape of the rates' decay", "warmdown|cosine")
    lr_warmup_steps: int = var(0, "raise the learning rate over the first N steps")
    warmdown_fraction: float = var(0.0, "lower the rates in this last part of the run")
    min_lr: float = var(0.0, "learning rate at the end, as a fraction of the peak")
    ema_decay: float = var(0.0, "decay of the average that the run ends with; 0: off", high=1)
    grad_clip_norm: float = var(0.0, "clip the gradients to this global norm; 0: off")
    # Checkpoints and export
    checkpoint_every: int = free(0, "save a checkpoint every N steps; 0: if stopped")
    keep_checkpoints: int = free(2, "keep the N newest checkpoints of the run", low=1)
    resume: str = free("", "checkpoint to continue; auto: the newest readable one")
    control_tensor_name_patterns: str = var(CONTROL, "parts of names: trained by Adam, not Muon")
    int8_keep_float_fp32_name_patterns: str = free("", "tensors in float32; empty: as above")
    int8_keep_float_max_numel: int = free(65536, "tensors of at most N numbers stay floats")
    export_bits: int = free(8, "bits of the blocks' matrices", "4|5|6|7|8")
    embed_bits: int = free(8, "bits of the embedding and of an untied head", "4|5|6|7|8")
    export_clip: float = free(0.0, "clip rows at N standard deviations; 0: not at all")
    gptq_batches: int = free(0, "calibrate rounding on N more batches (GPTQ); 0: off")
    size_cap: int = free(0, "maximum bytes of code and artifact: raises EXPORT_CLIP; 0: no check")

    def __post_init__(self):
        for f in fields(self):
            value, (low, high) = getattr(self, f.name), f.metadata["limits"]
            require(f.type not in (int, float) or low <= value <= high,
                    f"{f.name.upper()}={value} must be from {low:g} to {high:g}")
        heads = self.num_heads
        require(self.model_dim % (2 * heads) == 0,
                f"MODEL_DIM={self.model_dim} must be a multiple of 2 * NUM_HEADS = {2 * heads}")
        require(self.rope_dims % 2 == 0 and self.rope_dims * heads < self.model_dim,
                f"ROPE_DIMS={self.rope_dims} must be even, below {self.model_dim // heads}")
        require(heads % self.num_kv_heads == 0,
                f"NUM_KV_HEADS={self.num_kv_heads} must divide NUM_HEADS={heads}; 1 does")
        require(self.loop_start <= self.loop_end < self.num_layers,
                f"LOOP_END={self.loop_end} must be from LOOP_START to NUM_LAYERS - 1")
        require(self.lanes <= self.num_layers - self.loop_start,  # from the loop's last pass on
                f"LANES={self.lanes} must be at most NUM_LAYERS - LOOP_START")
        require(re.fullmatch(r"([^./\\\s-][^/\\\s]*)?", self.run_id),
                f"RUN_ID={self.run_id!r} must not be a path, contain spaces or begin with . or -")

FIELDS = {f.name.upper(): f for f in fields(Config)}
MAY_CHANGE = {"TOKENIZER_PATH", "TOKENIZER_SHA256", "TRAIN_SEQ_LEN", "DTYPE"}  # with INIT_FROM
KEPT = ["TOKENIZER_PATH", *(name for name, f in FIELDS.items() if f.metadata["kind"] == "kept")]

# ---- Ranks -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Ranks:
    """This process among all: its rank, their number and its device."""
    rank: int
    world_size: int
    device: torch.device

    def max(self, *values: float) -> list[float]:
        """The largest of each value over the ranks. Collective."""
        if self.world_size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor of any shape by its sum over the ranks. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def put(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device, without waiting for a GPU."""
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def now_ms(self) -> float:
        """The time in ms, of any origin, when the device has no work left."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()

# ---- Model -----------------------------------------------------------------------------
def rms_norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """gain * x / sqrt(mean(x^2) + float32's epsilon) over the last dimension, in x's type."""
    factors = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1.19e-7)
    return (x * (factors * gain)).to(x.dtype)  # factors are few: cheap gradient of the gain

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x (B, T, H, C) by halves; cos, sin (T, 1, C/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

def token_before(x: Tensor) -> Tensor:
    """x (B, T, ...) of the token before; zero for the first."""
    return F.pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0))  # one token in front

def tiled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by quarters of the queries: q (B, K, H/K, T, C); k, v (B, K, T, C)."""
    tiles, keys, values = [], k.chunk(4, 2), v.chunk(4, 2)
    places = torch.arange(q.size(3), dtype=torch.int32)  # int64 is slower to compare
    for i, (q_i, places_i) in enumerate(zip(q.chunk(4, 3), places.chunk(4))):
        k_i = torch.cat(keys[:i + 1], 2)  # none after the tile; a slice of k would be slower
        v_i = torch.cat(values[:i + 1], 2)
        scores = q_i.flatten(2, 3) @ k_i.mT  # one product for all heads that share a key
        scores = scores.unflatten(2, q_i.shape[2:4]) * q.size(4) ** -0.5  # (B, K, H/K, t, keys)
        mask = torch.where(places[:k_i.size(2)] <= places_i[:, None], 0, -math.inf).to(q.dtype)
        weights = (scores + mask).softmax(-1)
        tiles.append((weights.flatten(2, 3) @ v_i).view_as(q_i))
    return torch.cat(tiles, 3)

def causal_attention(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """Grouped causal attention (arXiv:2305.13245): q (B, H, T, C), k, v (B, K, T, C)."""
    group = q.size(1) // k.size(1)  # query heads that share a key
    if kernel == "tiled":
        return tiled_attention(q.unflatten(1, (-1, group)), k, v).flatten(1, 2)
    has_groups = kernel in ("cudnn", "flash")  # the others need as many keys as queries
    if group > 1 and not has_groups:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=has_groups)

def linear(x: Tensor, *layers: nn.Module, scale: Tensor | None = None) -> Tensor:
    """x (..., D) @ weight.T * scale (N,) in x's type, for one layer or several at once."""
    for layer in layers:
        if getattr(layer, "inputs_gram", None) is not None:  # `calibrate` wants x^T x (D, D)
            rows = x.detach().flatten(0, -2).float()
            layer.inputs_gram = layer.inputs_gram + rows.mT @ rows
    weights = [layer.weight for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if scale is not None:
        weight = weight * scale[:, None]  # cheaper than to scale the output
    return F.linear(x, weight.to(x.dtype))

class Attention(nn.Module):
    """Causal self-attention of x (B, T, D); queries and keys are normed, with a gain a head."""
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        width = config.model_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)  # of q, k, v
        kv_width = width // config.num_heads * config.num_kv_heads
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, kv_width, bias=False)
        self.c_v = nn.Linear(width, kv_width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        config = self.config
        qkv = linear(x, self.c_q, self.c_k, self.c_v)
        qkv = qkv.unflatten(-1, (sum(self.heads), -1))  # (B, T, H + 2K, C)
        q, k, v = qkv.split(self.heads, dim=2)
        if config.shift_keys:  # so that one layer can copy what followed (modded-nanogpt#169)
            pair = torch.arange(k.size(3), device=k.device) % (k.size(3) // 2)  # of a channel
            fast = config.rope_dims // 2 or k.size(3) // 4  # rotating pairs, or half; others shift
            k = torch.where(pair < fast, k, token_before(k))
        q = rms_norm(q, self.q_gain.to(q.dtype)[:, None])
        q, k = rotate(q, cos, sin), rotate(rms_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, C)
        y = causal_attention(q, k, v, config.attn).transpose(1, 2)  # (B, T, H, C)
        if config.exclusive_attn:  # remove what is along a token's own value (arXiv:2603.09078)
            own = rms_norm(v.transpose(1, 2))[:, :, :, None]  # (B, T, K, 1, C), mean square 1
            y = y.unflatten(2, (v.size(1), -1))  # (B, T, K, H/K, C)
            y = y - (y * own).mean(-1, keepdim=True) * own
        return linear(y.flatten(2), self.proj, scale=scale)

class MLP(nn.Module):
    """Two linear layers with a squared, perhaps leaky ReLU between (arXiv:2109.08668)."""
    def __init__(self, config: Config):
        super().__init__()
        self.fc = nn.Linear(config.model_dim, config.mlp_mult * config.model_dim, bias=False)
        self.proj = nn.Linear(config.mlp_mult * config.model_dim, config.model_dim, bias=False)
        self.slope = config.mlp_slope

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return linear(F.leaky_relu(linear(x, self.fc), self.slope).square(), self.proj, scale=scale)

def drop(x: Tensor, masks: Tensor | None, which: int) -> Tensor:
    """x (B, T, D) times one of a block's dropout masks (B, 2, D), if there are any."""
    return x if masks is None else x * masks[:, which, None].to(x.dtype)

class Block(nn.Module):
    """Attention and MLP on a stream x (B, T, D), mixed with x0; a `lane` is the MLP's stream."""
    def __init__(self, config: Config, number: int):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.attn_scale = nn.Parameter(torch.ones(config.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(config.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, config.model_dim))
        if number >= config.num_layers - config.lanes:  # rows: new x, lane; columns: old, attn, MLP
            self.resid_mix_lanes = nn.Parameter(torch.tensor([[1.1, 1.3, 0.7], [1.1, 0.7, 1.3]]))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor, lane=None, masks=None):
        mix = self.resid_mix.to(x.dtype)
        mixed = mix[0] * x + mix[1] * x0
        attended = drop(self.attn(rms_norm(mixed), cos, sin, self.attn_scale), masks, 0)
        source = lane if lane is not None else mixed + attended  # the MLP's input
        fed = drop(self.mlp(rms_norm(source), self.mlp_scale), masks, 1)
        if lane is None:
            return source + fed, None
        to_x, to_lane = self.resid_mix_lanes.to(x.dtype)  # parameter-golf#1518
        x = to_x[0] * x + to_x[1] * attended + to_x[2] * fed  # x itself, not `mixed`
        return x, to_lane[0] * lane + to_lane[1] * attended + to_lane[2] * fed

class GPT(nn.Module):
    """A GPT whose first half of blocks has skip connections to the second, last to first."""
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.compute_dtype = getattr(torch, config.dtype, torch.float32)  # float32 for "auto"
        width = config.model_dim
        rows = math.ceil(config.vocab_size / config.vocab_pad) * config.vocab_pad
        self.tok_emb = nn.Embedding(rows, width)  # made in the published order, so that seeds agree
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.lm_head = None if config.tie_embeddings else nn.Linear(width, rows, bias=False)
        self.loops = config.num_loops  # `train` sets it: 0 until LOOP_AT
        half = (config.num_layers + self.loops * (config.loop_end + 1 - config.loop_start)) // 2
        self.skip_weights = nn.Parameter(torch.ones(half, width), requires_grad=half > 0)
        self.smear = nn.Parameter(torch.zeros(width)) if config.smear else None
        for name, p in self.named_parameters():
            if config.init == "gpt2" and name.endswith(".weight"):  # Radford et al. 2019
                depth = 2 * config.num_layers if ".proj." in name else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name == "lm_head.weight" or ".proj." in name:
                nn.init.zeros_(p)
            elif name == "tok_emb.weight" and config.tie_embeddings:
                nn.init.normal_(p, std=config.tied_embed_init_std)
        pairs = width // config.num_heads // 2
        exponents = torch.arange(pairs) / (config.rope_dims // 2 or pairs)
        frequencies = (config.rope_base ** -exponents).where(exponents < 1, 0)  # past ROPE_DIMS: 0
        if self.compute_dtype == torch.bfloat16:  # rounded as published, so that equal seeds agree
            for tensor in (*self.parameters(), frequencies):
                tensor.data.copy_(tensor.data.bfloat16())
            if config.optimizer == "muon" and not config.weight_decay:
                self.tok_emb.bfloat16()  # as published; too coarse for decay
        positions = torch.arange(max(config.train_seq_len, config.eval_seq_len)).float()
        angles = torch.outer(positions, frequencies)[:, None]  # (T, 1, C/2)
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def hidden(self, tokens: Tensor, masks: Tensor | None = None) -> Tensor:
        """The last block's output (B, T, D) for tokens (B, T); document masks would begin here."""
        cos, sin = self.rotary[:, :tokens.size(1)].to(self.compute_dtype)
        x0 = rms_norm(self.tok_emb(tokens).to(self.compute_dtype))
        if self.smear is not None:  # across documents, too (modded-nanogpt#130)
            x0 = x0 + self.smear.to(x0.dtype) * token_before(x0)
        x, lane, skips = x0.clone(), None, []  # if x were x0, block 0 would compile apart
        start, end = self.config.loop_start, self.config.loop_end + 1
        order = [*range(end)] + self.loops * [*range(start, end)] + [*range(end, len(self.blocks))]
        half = len(order) // 2
        for i, number in enumerate(order):
            if lane is None and i >= len(order) - self.config.lanes:
                lane = x.clone()
            if i >= half and skips:
                x = x + self.skip_weights[i - half].to(x.dtype) * skips.pop()
            own = None if masks is None else masks[:, number]
            x, lane = self.blocks[number](x, x0, cos, sin, lane, own)
            if i < half:
                skips.append(x)
        return x if lane is None else lane  # the lane gets every block's outputs, too

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits (..., V), float32, from `hidden` (..., D), at any of its positions."""
        cap = self.config.logit_softcap
        logits = linear(rms_norm(x), self.lm_head or self.tok_emb).float()
        return cap * (2 * torch.sigmoid(2 / cap * logits) - 1)  # cap * tanh(logits / cap), faster

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, 0-d float32 in nats, of `hidden`'s x, where targets are not -1."""
        logits = self.logits(x)
        is_bounded = self.config.logit_softcap <= 64  # exp cannot overflow: subtract no maximum
        log_sum = logits.exp().sum(-1).log() if is_bounded else logits.logsumexp(-1)
        ids = torch.arange(logits.size(-1), dtype=torch.int32, device=logits.device)
        nats = log_sum - logits.where(ids == targets[..., None].int(), 0).sum(-1)  # a gather, fused
        counted = targets >= 0
        return (nats * counted).sum() / counted.sum()

    def forward(self, tokens: Tensor, targets: Tensor, masks: Tensor | None = None) -> Tensor:
        """The `loss` of tokens and targets (B, T), int64, with dropout's masks in training."""
        return self.loss(self.hidden(tokens, masks), targets)

# ---- Optimizers ------------------------------------------------------------------------
def orthogonalize(updates: Tensor, steps: int, compute=torch.bfloat16) -> Tensor:
    """Move singular values of (N, rows, columns) close to 1 (kellerjordan.github.io/posts/muon)."""
    x = updates.bfloat16()
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):  # of Newton and Schulz: x <- a x + (b A + c A^2) x, where A = x x^T
        x = x.to(compute)
        gram = (x @ x.mT).bfloat16().to(compute)  # computed in float32, round as bfloat16
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(compute)
        x = torch.baddbmm(x, polynomial, x, beta=a).bfloat16()
    return x.mT if is_tall else x

class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum. Matrices of one shape form a bank; its momentum (N, rows, columns)
    is state of the bank's first matrix. State is whole on every rank; orthogonalizing is split."""
    def __init__(self, groups: list[dict], config: Config, ranks: Ranks):
        super().__init__(groups, {})
        self.config, self.ranks = config, ranks
        self.compute = torch.bfloat16 if bfloat16_is_native(ranks.device) else torch.float32
        self.banks = {}
        for p in self.param_groups[0]["params"]:
            self.banks.setdefault(p.shape, []).append(p)
        for shape, params in self.banks.items():
            self.state[params[0]]["momentum_buffer"] = params[0].new_zeros(len(params), *shape)
            if config.muon_slow_at:
                self.state[params[0]]["slow_buffer"] = params[0].new_zeros(len(params), *shape)

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices. Collective."""
        group, world_size = self.param_groups[0], self.ranks.world_size
        pending = []
        for shape, params in self.banks.items():
            grads = torch.stack([p.grad for p in params])
            momentum = self.state[params[0]]["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(grads)
            if self.config.muon_slow_at:
                slow = self.state[params[0]]["slow_buffer"].mul_(0.98).add_(grads)
                grads.add_(slow, alpha=group["slow"])
            share = math.ceil(len(params) / world_size)  # the last rank may have less
            mine = slice(share * self.ranks.rank, share * (self.ranks.rank + 1))
            updates = grads[mine].add_(momentum[mine], alpha=group["fast"])
            updates = F.pad(updates, (0, 0, 0, 0, 0, share - len(updates)))  # to `share` matrices
            if self.config.muon_row_norm:
                updates = F.normalize(updates, dim=2)
            updates = orthogonalize(updates, self.config.muon_backend_steps, self.compute)
            updates = updates * max(1, shape[0] / shape[1]) ** 0.5
            work = None
            if world_size > 1:  # while this rank goes on with the next shape
                gathered = updates.new_empty(share * world_size, *shape)
                gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # new, old
                work = gather(gathered, updates.contiguous(), async_op=True)
                updates = gathered
            pending.append((params, updates, work))
        for params, updates, work in pending:
            if work:
                work.wait()
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates[:len(params)].float()), alpha=-group["lr"])

def build_optimizers(model: GPT, config: Config, ranks: Ranks) -> list[torch.optim.Optimizer]:
    """Adam, with Muon for the blocks' matrices, or AdamW (arXiv:1711.05101). Put others before the
    last, whose rate is logged. Groups need `kind` and `base_lr`; `train_step` sets the rest."""
    rates = {"embed": config.tied_embed_lr if config.tie_embeddings else config.embed_lr,
             "head": config.head_lr, "scalar": config.scalar_lr, "matrix": config.matrix_lr}
    if config.optimizer == "adamw":
        rates = dict.fromkeys(rates, config.adam_lr)
    groups = {kind: {"kind": kind, "params": [], "lr": lr, "base_lr": lr,
                     "weight_decay": config.weight_decay} for kind, lr in rates.items()}
    groups["scalar"]["weight_decay"] = 0.0
    for name, p in model.named_parameters():
        kind = {"tok_emb.weight": "embed", "lm_head.weight": "head"}.get(name, "scalar")
        is_control = matches(name, config.control_tensor_name_patterns)
        if p.ndim == 2 and name.startswith("blocks.") and not is_control:
            kind = "matrix"
        groups[kind]["params"].append(p)
    matrices = [groups.pop("matrix")] if config.optimizer == "muon" else []
    adam = torch.optim.AdamW([g for g in groups.values() if g["params"]], eps=config.adam_eps,
                             betas=(config.beta1, config.beta2), fused=config.fused or None)
    return [adam, *(Muon([group], config, ranks) for group in matrices)]

# ---- Data ------------------------------------------------------------------------------
@lru_cache(maxsize=2)  # the last step of an epoch may read rows of the next one
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order of the rows in an epoch of LOADER=shuffled: a permutation, int64 (rows,)."""
    return np.random.default_rng([seed, epoch]).permutation(rows)

class TokenLoader:
    """The shards as one endless text in pieces: a row each if shuffled, else a span of rows."""
    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.shards = list(open_split(config, "train").items())
        self.ends = np.cumsum([len(tokens) for _, tokens in self.shards])
        self.tokens = int(self.ends[-1])
        self.rows = (self.tokens - 1) // config.train_seq_len
        self.shuffled = config.loader == "shuffled"
        step_rows = config.train_batch_tokens // config.train_seq_len  # over all ranks
        self.pieces = step_rows if self.shuffled else config.grad_accum_steps * ranks.world_size
        self.length = config.train_batch_tokens // self.pieces
        self.stride = self.length if self.shuffled else self.length + 1  # spans share no token
        self.batches(0)  # shards of another vocabulary are found before training

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens (uint16) from `start`. Raises ValueError as check_ids does."""
        parts = []
        while count > 0:
            place = start % self.tokens
            index = np.searchsorted(self.ends, place, side="right")
            path, tokens = self.shards[index]
            first = place - (self.ends[index] - len(tokens))  # in this shard
            parts.append(check_ids(tokens[first:first + count], self.config.vocab_size, path))
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def dropout_masks(self, step: int) -> np.ndarray:
        """Factors of channels in this rank's rows, float32 (B, layers, 2, D); arXiv:1512.05287."""
        config = self.config
        shape = (self.pieces, self.length // config.train_seq_len, config.num_layers, 2,
                 config.model_dim)  # 2: attention, MLP
        draws = np.random.default_rng([config.seed, step]).random(shape, np.float32)  # of all ranks
        kept = draws[self.ranks.rank::self.ranks.world_size] >= config.dropout
        return (kept / np.float32(1 - config.dropout)).reshape(-1, *shape[2:])

    def batches(self, step: int) -> list[tuple[Tensor, ...]]:
        """This rank's micro-batches of a step: inputs and targets (B, T), int64; dropout masks."""
        config, texts = self.config, []
        first = 0 if config.overfit else step * self.pieces
        for piece in range(first + self.ranks.rank, first + self.pieces, self.ranks.world_size):
            if self.shuffled:
                piece = epoch_order(config.seed, piece // self.rows, self.rows)[piece % self.rows]
            texts.append(self.read(piece * self.stride, self.length + 1))
        pairs = np.stack([(text[:-1], text[1:]) for text in texts], 1).astype(np.int64)
        parts = [*self.ranks.put(pairs.reshape(2, -1, config.train_seq_len))]  # inputs, targets
        if config.dropout:
            parts.append(self.ranks.put(self.dropout_masks(step)))
        rows = config.micro_batch_tokens // config.train_seq_len
        return list(zip(*(part.split(rows) for part in parts)))  # of one size: see `resolve`

# ---- Training --------------------------------------------------------------------------
def schedule(config: Config, step: int, elapsed_ms: float) -> tuple[float, ...]:
    """Factor of the rates; Muon's momentum, `fast` and `slow`, after `step` steps. A new schedule
    is a choice of LR_SCHEDULE and a branch for `shape`, from 1 to 0, where `done` is 1."""
    cap_ms = config.max_wallclock_seconds * 1000 or math.inf
    warmup = config.lr_warmup_steps if config.lr_schedule == "cosine" else 0
    done = max((step - warmup) / max(1, config.iterations - warmup), elapsed_ms / cap_ms)
    if config.lr_schedule == "cosine":  # arXiv:1608.03983
        shape = (1 + math.cos(math.pi * min(1.0, done))) / 2
    elif config.warmdown_fraction:
        shape = max(0.0, 1 - done) / config.warmdown_fraction
    elif cap_ms < math.inf:  # as published: the cap alone counts
        warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
        shape = max(0.0, cap_ms - elapsed_ms) / max(warmdown_ms, 1e-9)
    else:
        shape = max(0, config.iterations - step) / max(config.warmdown_iters, 1e-9)
    factor = config.min_lr + (1 - config.min_lr) * min(1.0, shape)
    risen = min(1.0, step / max(1, config.muon_momentum_warmup_steps))
    momentum = (1 - risen) * config.muon_momentum_warmup_start + risen * config.muon_momentum
    fast, slow = momentum, 0.0  # shares of two memories in an update; the gradient's is 1
    if 0 < config.muon_slow_at <= done:  # modded-nanogpt#340
        momentum, fast, slow = 0.85, 1.25, 0.2134  # as averages: 42 and 53 %
    factor = min((step + 1) / max(1, config.lr_warmup_steps), factor)  # warm-up, if lower
    return factor, momentum, fast, slow

class Trainer:
    """All that a step changes, to be undone or resumed. Raises ValueError for a bad INIT_FROM."""
    def __init__(self, config: Config, ranks: Ranks, init_from: str = ""):
        self.config, self.ranks, self.clock = config, ranks, Clock(config, ranks)
        torch.manual_seed(config.seed)
        self.model = GPT(config)
        if init_from:
            load_weights(self.model, init_from)
        self.model.to(ranks.device)
        self.optimizers = build_optimizers(self.model, config, ranks)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.dtype == "float16")
        self.ddp = self.model  # DDP: rank 0's weights at first, then mean gradients
        if ranks.world_size > 1:
            torch._dynamo.config.optimize_ddp = False  # or graphs are cut at buckets' ends
            self.model._ddp_params_and_buffers_to_ignore = ["rotary"]  # the same everywhere
            self.ddp = DDP(self.model, gradient_as_bucket_view=True, bucket_cap_mb=1 << 20)
        self.average = [p.data.float().clone() for p in self.model.parameters() if config.ema_decay]

    def train_step(self, batches: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Make one update; this rank's mean loss in nats and the gradients' norm. Collective."""
        config = self.config
        factor, *memories = schedule(config, self.clock.step, self.clock.time_ms)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
                group["momentum"], group["fast"], group["slow"] = memories  # Adam ignores them
        losses = torch.zeros((), device=self.ranks.device)
        for i, batch in enumerate(batches, 1):
            self.ddp.require_backward_grad_sync = i == len(batches)  # once a step
            loss = self.ddp(*batch) * (1 / len(batches))
            self.scaler.scale(loss).backward()
            losses += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if config.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), config.grad_clip_norm, norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        if self.average:  # in float32, which keeps small changes
            weights = [p.detach().float() for p in self.model.parameters()]
            share = max(1 - config.ema_decay, 9 / (10 + self.clock.step))  # more in the first steps
            torch._foreach_lerp_(self.average, weights, share)
        return losses, norm

    def state_dict(self) -> dict:
        """All that a step changes; the tensors are the live ones."""
        return {"step": self.clock.step, "time_ms": self.clock.time_ms,
                "model": self.model.state_dict(), "scaler": self.scaler.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers], "average": self.average}

    def load_state_dict(self, state: dict) -> None:
        """Return to a `state_dict` and start the clock. `param_groups` become new objects."""
        self.model.load_state_dict(dict(state["model"]))  # dict(): without a file's _metadata
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.scaler.load_state_dict(state["scaler"])
        for mine, read in zip(self.average, state["average"], strict=True):
            mine.copy_(read.view_as(mine))  # view_as raises where copy_ would broadcast
        self.clock.set(int(state["step"]), float(state["time_ms"]))

def train(trainer: Trainer, loader: TokenLoader, validation: "Validation", log: "RunLog") -> None:
    """Train until ITERATIONS, the cap or a signal. Raises FloatingPointError if it diverges."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    saved_step, last_logged, batches = clock.step, (clock.step, clock.time_ms), []
    while True:
        done = clock.step >= config.iterations or clock.time_ms >= clock.cap_ms
        progress = max(clock.step / max(1, config.iterations), clock.time_ms / clock.cap_ms)
        trainer.model.loops = config.num_loops if done or progress >= config.loop_at else 0
        saves = is_due(clock.step, config.checkpoint_every) or (done and config.checkpoint_every)
        if ranks.rank == 0 and clock.step > saved_step and (saves or clock.stop_signal):
            saved_step = clock.step
            save_checkpoint(trainer, loader, log)  # first: validation and export can take long
        if done or clock.stop_signal:
            return
        if is_due(clock.step, config.val_loss_every):
            validate(trainer, validation, log)
            if clock.stop_signal:
                continue  # to the checkpoint above
        loss, norm = trainer.train_step(batches or loader.batches(clock.step))
        step = clock.step = clock.step + 1
        mean_ms = clock.time_ms / max(step - 1, 1)
        clock.time_ms += mean_ms  # an estimate, until the ranks agree
        batches = loader.batches(step) if step < config.iterations else []  # as the device works
        is_logged = step <= 10 or is_due(step, config.train_log_every)
        often = 1 if mean_ms > 1000 or ranks.device.type == "cpu" else 10  # waiting costs GPUs time
        periods = (often, config.val_loss_every, config.checkpoint_every)
        is_near_end = step == config.iterations or clock.time_ms > clock.cap_ms - 20 * mean_ms
        if is_logged or is_near_end or any(is_due(step, every) for every in periods):
            scaled = config.dtype == "float16" and trainer.scaler.get_scale() > 2**-20  # low: stuck
            checked = loss if scaled else loss + norm  # GradScaler skips overflows unless stuck
            if clock.agree(not checked.isfinite()):  # waits for the device; sets time, stop_signal
                log.event("nonfinite", step=step)
                raise FloatingPointError(f"the loss or gradient near step:{step} is not finite; "
                                         "lower the rates or set GRAD_CLIP_NORM=1")
        if is_logged or clock.time_ms >= clock.cap_ms:
            log_step(trainer, loader, log, loss, norm, last_logged)
            last_logged = (step, clock.time_ms)

# ======== The rest is machinery: start and settings, log, validation, files, a run ========
def find_ranks() -> list[int]:
    """Rank and number of ranks, in all and here, from torchrun's variables. Raises ValueError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(os.environ.get(name) for name in names):
        return [int(os.environ[name]) for name in names]
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        require(os.environ.get(name, "1") == "1", f"{name}={os.environ.get(name)}, but {names} "
                "are not all set: start with torchrun, or put tools/ranks.sh before python")
    return [0, 1, 0, 1]

def count_cores() -> float:
    """PyTorch's number of threads, or a container's quota of CPUs by Linux's cgroup v2 or v1."""
    names = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # v2: both in one file
    paths = [Path("/sys/fs/cgroup", name) for name in names]
    words = " ".join(path.read_text() for path in paths if path.exists()).split()  # quota, period
    quota = int(words[0]) / int(words[1]) if words and words[0].isdigit() else math.inf  # else none
    return min(torch.get_num_threads(), quota)

def start_ranks(config: Config) -> Ranks:
    """Choose the device and join the process group. Raises ValueError."""
    rank, size, local_rank, local_size = find_ranks()
    has_mps = torch.backends.mps.is_available() and size == 1  # MPS has no collectives
    usable = ["cuda"] * torch.cuda.is_available() + ["mps"] * has_mps + ["cpu"]
    kind = usable[0] if config.device == "auto" else config.device
    if usable == ["cpu"] and config.device == "auto" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        require("GPU 0" not in subprocess.getoutput("timeout 30 nvidia-smi -L"), "PyTorch cannot "
                "use the GPU here: install a build for its driver (pytorch.org), or set DEVICE=cpu")
    require(kind in usable, f"DEVICE={kind} is not available here; use {' or '.join(usable)}")
    require(kind != "cuda" or local_rank < torch.cuda.device_count(), "more ranks than GPUs here")
    device = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:  # ranks share the cores of a machine or container
        torch.set_num_threads(max(1, int(count_cores() / local_size)))
    if kind == "cpu":
        with suppress(AttributeError, TypeError):  # only glibc has it
            ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: memory is taken from the heap
            ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: and kept, a fifth faster
    if size > 1:
        store, *_ = next(dist.rendezvous("env://", rank, size))  # outlives restarts: prefix it
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend, gpu = ("nccl", device) if kind == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=gpu)
    return Ranks(rank, size, device)

def bfloat16_is_native(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; some CPUs do (AMX, AVX512-BF16)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cpu" and has_units

def choose_attention(config: Config, device: torch.device) -> str:
    """Enable ATTN, or the first kernel that can run a row here. Raises ValueError for none."""
    kernels = ["math"] if device.type == "mps" else ["flash", "cudnn", "efficient", "math"]
    is_short = max(config.train_seq_len, config.eval_seq_len) <= 1024  # tiles need memory
    capability = device.type == "cuda" and torch.cuda.get_device_capability()
    if capability == (9, 0) and (torch.backends.cudnn.version() or 0) > 91500:  # pytorch#169849
        kernels.insert(0, "cudnn")  # 1.6 times as fast there
    elif device.type == "cpu" and config.compile != "0" and is_short:
        kernels.insert(0, "tiled")
    like = {"dtype": getattr(torch, config.dtype), "device": device, "requires_grad": True}
    q, k = (torch.ones(1, heads, 64, config.model_dim // config.num_heads, **like)
            for heads in (config.num_heads, config.num_kv_heads))
    for kernel in kernels if config.attn == "auto" else [config.attn]:
        for name in SDPA:  # all off but `kernel`; "efficient" is mem_efficient, "tiled" is none
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name.endswith(kernel))
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # it cannot run here
            causal_attention(q, k, k, kernel).sum().backward()
            return kernel
    raise ValueError(f"ATTN={config.attn} runs no {config.dtype} heads of {q.size(3)}; try auto")

def parse_value(name: str, text: str):
    """The value of a variable that is written as `text`. Raises ValueError."""
    f = FIELDS[name]
    choices = "0|1|false|true" if f.type is bool else f.metadata["choices"]
    if choices:
        require(text.lower() in choices.split("|"), f"{name}={text!r} must be one of {choices}")
        return text.lower() in ("1", "true") if f.type is bool else f.type(text.lower())
    try:
        return f.type(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} cannot be read; example: {name}={f.default}") from None

def read_settings(path: str) -> dict[str, str]:
    """The model's settings in a file, with unknown ones that are not 0 or empty; {} if none."""
    try:
        state = read_saved(path)
        config = state.get("config", {})  # of a checkpoint
        about = {name: config[name.lower()] for name in KEPT if name.lower() in config}
        about |= json.loads(state.get("about", "{}"))
    except Exception:  # hostile or damaged files fail in many ways; `load_weights` says it
        return {}
    return {name: str(value) for name, value in about.items() if value or name in KEPT}

def load_config(arguments: list[str], environment: dict[str, str]) -> tuple[Config, dict]:
    """The configuration; the text and origin of what was set. Raises ValueError."""
    given = {n: (text, "environment") for n, text in environment.items() if n not in FOREIGN}
    from_files = {}
    for argument in arguments:
        lines, target, origin = [argument], given, "argument"
        if argument.startswith("@"):
            lines = Path(argument[1:]).read_text("utf-8-sig").splitlines()
            lines, target, origin = [s for s in lines if s and s[0] != "#"], from_files, argument
        for line in lines:
            name, is_pair, value = line.partition("=")
            require(is_pair, f"{line!r} is not NAME=value, such as NUM_LAYERS=9; try --help")
            target[name] = (value, origin)
    given = {n: (os.path.expanduser(t), o) for n, (t, o) in (from_files | given).items()}
    data_path, _ = given.get("DATA_PATH", (Config.data_path, ""))
    with suppress(Exception):  # `Validation` says what is wrong with it
        about = json.loads(Path(data_path, "manifest.json").read_bytes())["tokenizer"]
        file = Path(data_path, about["name"])
        path = str(file) if file.is_file() else about["name"]  # such as gpt2
        given = {"TOKENIZER_PATH": (path, "manifest"),
                 "VOCAB_SIZE": (str(about["vocab_size"]), "manifest")} | given
    path, origin = given.get("INIT_FROM", ("", ""))
    if path and Path("logs", path, MODEL_FILE).is_file():  # a RUN_ID
        path = Path("logs", path, MODEL_FILE).as_posix()
        given["INIT_FROM"] = (path, origin)
    for name, text in read_settings(path).items():
        require(name in KEPT, f"{path} has a setting that this script does not know: {name}")
        own, source = given.setdefault(name, (text, path))  # what was set, else the model's
        require(name in MAY_CHANGE or parse_value(name, own) == parse_value(name, text),
                f"{name}={own} ({source}), but the model in INIT_FROM={path} has {name}={text}")
    for name in given.keys() - FIELDS.keys():  # other programs have variables, too
        text, origin = given.pop(name)
        cutoff = 0.85 if origin == "environment" else 0.5  # an argument may be a part of a name
        near = difflib.get_close_matches(name.lstrip("-").upper(), FIELDS, 2, cutoff)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all of them"
        require(origin == "environment" and not near,
                f"{name}={text!r} ({origin}) is not a variable of this script; {hint}")
    values = {name.lower(): parse_value(name, text) for name, (text, _) in given.items()}
    return Config(**values), given

def matches(name: str, patterns: str) -> bool:
    """Whether one of the comma-separated patterns is part of the tensor's name."""
    return any(pattern and pattern in name for pattern in patterns.split(","))

# ---- Log -------------------------------------------------------------------------------
def lock(file) -> None:
    """Hold an open file until this process ends. Raises ValueError if another one holds it."""
    with suppress(ImportError, OSError):  # Windows; Lustre without flock
        import fcntl
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"a run writes to {file.name}: stop it or change RUN_ID") from None

class RunLog:
    """Console, logs/RUN_ID.txt and logs/RUN_ID.jsonl of the main rank; others are silent."""
    def __init__(self, run_id: str, source: str, is_main: bool):
        self.code, self.files = source.encode(), ()
        if not is_main:
            return
        Path("logs").mkdir(exist_ok=True)
        paths = [Path("logs", run_id + ending) for ending in (".txt", ".jsonl")]
        now = time.time_ns()
        for path in filter(Path.exists, paths):  # the logs of two runs never mix
            with path.open("a") as file:
                lock(file)
            path.rename(path.with_name(f"{run_id}.{now}{path.suffix}"))
        self.text, self.json = (path.open("a", encoding="utf-8") for path in paths)
        lock(self.text)
        self.files = (sys.stdout, self.text)
        print(paths[0], flush=True)
        smi = subprocess.getoutput("timeout 30 nvidia-smi 2> /dev/null")
        self.line(f"{source}\n{'=' * 100}\nRunning Python {sys.version}\n"
                  f"Running PyTorch {torch.__version__}\n{smi}\n{'=' * 100}", self.text)

    def line(self, text: str, *files) -> None:
        """Write a line to open files, else to the console and the .txt; warn if that fails."""
        for file in files or self.files:
            try:
                print(text, file=file, flush=True)
            except OSError as error:
                warnings.warn(f"{file.name}: a line was not written: {error}", stacklevel=2)

    def event(self, event: str, text: str = "", **values) -> None:
        """Write values to the .jsonl, and the line that the format `text` makes of them."""
        if self.files:
            values = {"event": event, **values, "elapsed_s": round(time.monotonic() - STARTED, 3)}
            finite = json.loads(json.dumps(values), parse_constant=lambda nan_or_inf: None)
            self.line(json.dumps(finite), self.json)
        if text:
            self.line(text.format(**values))

# ---- Validation ------------------------------------------------------------------------
def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a uint16 memory map. Raises ValueError if it is empty or damaged."""
    header = np.fromfile(path, dtype="<i4", count=3).tolist()
    require(len(header) == 3 and header[:2] == SHARD_START, f"{path} is not a token shard")
    size = path.stat().st_size
    require(header[2] > 0 and size == HEADER_BYTES + 2 * header[2], f"{path} is damaged: {size} "
            f"bytes do not match {header[2]} tokens; make or download it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)

def open_split(config: Config, split: str) -> dict[Path, np.ndarray]:
    """The shards of "train" or "val", uint16, in the order of their names. Raises ValueError."""
    paths = sorted(Path(config.data_path).glob(f"*_{split}_[0-9]*.bin"))
    where = f"DATA_PATH={config.data_path!r}"
    ways = [*map(str, Path("data/datasets").glob("*")), "data/prepare.py", "data/download.py"]
    require(paths, f"there is no {where} with *_{split}_*.bin; use {' or '.join(sorted(ways))}")
    shards = {path: open_shard(path) for path in paths}
    tokens = sum(map(len, shards.values()))
    require(tokens > config.train_seq_len, f"{where} has {tokens} tokens in *_{split}_*.bin, too "
            f"few for a row of TRAIN_SEQ_LEN={config.train_seq_len}")
    return shards

def check_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> np.ndarray:
    """Return tokens of the shard `path`. Raises ValueError if one is not in the vocabulary."""
    largest = int(tokens.max())
    require(largest < vocab_size, f"{path} holds token {largest}, too large for VOCAB_SIZE="
            f"{vocab_size}; set it and TOKENIZER_PATH to what the shards were made with")
    return tokens

def load_byte_table(config: Config) -> tuple[str, np.ndarray, np.ndarray]:
    """The kind; bytes of tokens (V, 2): in a text, after a control token; control tokens (V,)."""
    path = config.tokenizer_path
    after_boundary = boundary = None
    try:
        if path == "byte260":
            kind, lengths = "byte", [0] * 4 + [1] * 256
        elif path.endswith(".model"):
            import sentencepiece
            kind = "sentencepiece"
            model = sentencepiece.SentencePieceProcessor(model_file=path)
            ids = range(model.vocab_size())
            boundary = [model.is_control(i) for i in ids]
            silent = [boundary[i] or model.is_unknown(i) or model.is_unused(i)  # or a CASE mark:
                      or (model.id_to_piece(i) in CASE and model.get_score(i) == 0) for i in ids]
            pieces = ["" if silent[i] else model.id_to_piece(i).replace("\u2581", " ") for i in ids]
            lengths = [1 if model.is_byte(i) else len(pieces[i].encode()) for i in ids]
            if model.encode("a", out_type=str)[0].startswith("\u2581"):  # it prepends a space
                after_boundary = [lengths[i] - pieces[i].startswith(" ") for i in ids]
        else:
            import tiktoken
            kind = "tiktoken"
            encoding = tiktoken.get_encoding(path)
            lengths = [0] * encoding.n_vocab  # special tokens and holes stay 0
            for text in encoding.token_byte_values():
                lengths[encoding.encode_single_token(text)] = len(text)
    except Exception as error:  # a missing package, a missing or damaged file
        raise ValueError(f"TOKENIZER_PATH={path!r} cannot be read: {error}") from None
    require(len(lengths) == config.vocab_size, f"VOCAB_SIZE={config.vocab_size}, but tokenizer "
            f"{path!r} has {len(lengths)} tokens; set both to what the shards were made with")
    table = np.array([lengths, after_boundary or lengths], dtype=np.uint16).T
    return kind, table, np.array(boundary or [False] * len(lengths))

class Validation:
    """The validation text and its bytes. Raises ValueError if manifest.json counts others."""
    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        source = Path(config.data_path, "manifest.json")
        try:
            splits = json.loads(source.read_bytes() if source.exists() else "{}").get("splits", {})
            counts = [splits.get("val", {}).get(name) for name in ("tokens", "decoded_bytes")]
            entries = [entry for split in splits.values() for entry in split.get("shards", [])]
            self.data_sha256 = {str(entry["file"]): entry.get("sha256") for entry in entries}
        except Exception as error:  # hostile or damaged files fail in many ways
            raise ValueError(f"{source} is damaged: {error!r}; make the data again") from None
        there = {path.name for path in source.parent.glob("*_[0-9]*.bin")}
        listed = {name for name in self.data_sha256 if config.iterations or name in there}
        odd = sorted(there ^ listed) if entries else []  # ITERATIONS=0: listed ones may be missing
        require(not odd, f"{source} and the shards there differ in {odd}; copy all, move others")
        shards = open_split(config, "val").items()
        tokens = np.concatenate([check_ids(ids, config.vocab_size, path) for path, ids in shards])
        self.tokenizer_kind, table, boundary = load_byte_table(config)
        target_bytes = table[tokens[1:], boundary[tokens[:-1]].astype(np.uint8)]  # column 0 or 1
        found = [len(tokens), int(table[tokens[0], 1] + target_bytes.sum(dtype=np.int64))]
        wanted = [own if said is None else said for said, own in zip(counts, found)]
        require(found == wanted, f"{source} says {wanted} validation tokens and bytes, shards and "
                f"TOKENIZER_PATH={config.tokenizer_path!r} give {found}: the score would be wrong")
        rows = (len(tokens) - 1) // config.train_seq_len
        wanted_rows = math.ceil(config.val_tokens / config.train_seq_len) or rows
        self.count = min(rows, wanted_rows) * config.train_seq_len  # targets
        self.tokens = tokens[:self.count + 1]
        self.bytes = int(target_bytes[:self.count].sum(dtype=np.int64))
        self.label = f" partial:{config.val_tokens}" if wanted_rows < rows else ""

    def score(self, model: nn.Module, length: int = 0, stride: int = 0) -> dict[str, float]:
        """Score windows of `length` tokens (0: a row), `stride` apart (0: length). Collective."""
        start_ms = self.ranks.now_ms()
        config, ranks = self.config, self.ranks
        length = min(length or config.train_seq_len, self.count)
        stride = min(stride or length, length)
        windows = 1 + math.ceil((self.count - length) / stride)
        limit = config.val_batch_size // (ranks.world_size * config.grad_accum_steps)
        batch = max(1, min(limit, config.micro_batch_tokens) // length)  # windows at once
        same_shape = batch * length == config.micro_batch_tokens and length == config.train_seq_len
        reuses = same_shape and config.compile != "0" and windows * stride < 2**20  # train's graph
        stops = np.minimum(length + stride * np.arange(windows + batch), self.count)  # and padding
        starts = np.concatenate(([0], stops[:-1]))  # scored from start to stop; padding: nothing
        device = "cpu" if ranks.device.type == "mps" else ranks.device  # it has no float64
        nats = torch.zeros((), dtype=torch.float64, device=device)
        shape = (batch, config.num_layers, 2, config.model_dim)
        masks = [torch.ones(shape, device=ranks.device)] if config.dropout else []  # same graph
        for first in range(batch * ranks.rank, windows, batch * ranks.world_size):
            rows = slice(first, first + batch)
            places = stops[rows, None] - length + np.arange(length)
            is_scored = places >= starts[rows, None]
            targets = np.where(is_scored, self.tokens[places + 1], np.int64(-1))
            pair = np.stack((self.tokens[places], targets))  # int64
            with torch.set_grad_enabled(reuses or config.device == "mps"):  # MPS: #195910
                loss = model(*ranks.put(pair), *masks).detach()
            nats += loss.to(device).double() * int(is_scored.sum())
        total = ranks.sum(nats).item()
        return {"val_loss": total / self.count, "val_bpb": total / math.log(2) / self.bytes,
                "eval_time_ms": ranks.now_ms() - start_ms}

# ---- Export ----------------------------------------------------------------------------
def quantize_tensor(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and their scales, as published: float16 (rows,) for a matrix, else float32."""
    is_matrix = tensor.ndim == 2
    rows = tensor.float() if is_matrix else tensor.float().reshape(1, -1)
    clip = torch.quantile(rows.abs(), 0.9999984, dim=1, keepdim=True)
    scale = clip.clamp_min(1) / 127 if is_matrix else (clip / 127).where(clip > 0, 1)
    quantized = rows.clamp(-clip, clip).div_(scale).round_().to(torch.int8)
    return quantized.view(tensor.shape), (scale[:, 0].half() if is_matrix else scale.squeeze())

def round_rows(weight: Tensor, bits: int, clip: float, gram=None, moment=None):
    """A matrix as int8 values of `bits` bits and float16 scales (rows,), by GPTQ if calibrated."""
    rows = weight.to(torch.float32, copy=True)
    levels = 2 ** (bits - 1) - 1
    limits = clip * rows.std(1) if clip else rows.abs().amax(1)  # deviations, or no clipping
    if clip and moment is not None:  # round coarsely where gradients are small: in rare tokens
        costs = moment.float().cpu().mean(1) * rows.var(1)  # of equal relative errors
        limits *= (costs / costs.mean() + 1e-4).pow(-0.25).clamp_min(min(1, 6 / clip))
    scales = (limits / levels).clamp_min(1e-7).half()
    if gram is None:
        return (rows / scales[:, None]).round().clamp(-levels, levels).to(torch.int8), scales
    gram = gram.double() + 0.01 * gram.diag().mean().clamp_min(1e-7) * torch.eye(len(gram))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    triangle = torch.linalg.cholesky(inverse, upper=True).float()
    rounded = torch.empty_like(rows)
    for i, factors in enumerate(triangle.contiguous()):
        rounded[:, i] = (rows[:, i] / scales).round().clamp(-levels, levels)
        error = (rows[:, i] - rounded[:, i] * scales) / factors[i]
        rows[:, i:] -= torch.outer(error, factors[i:])  # the rest make up for it (arXiv:2210.17323)
    return rounded.to(torch.int8), scales

def quantize(state: dict, config: Config, known: dict | None = None) -> tuple[dict, int]:
    """The int8 artifact and its payload in bytes; small tensors stay floats."""
    published = config.export_bits == config.embed_bits == 8 and not (config.export_clip or known)
    about = {name: getattr(config, name.lower()) for name in KEPT}
    in_float32 = config.int8_keep_float_fp32_name_patterns or config.control_tensor_name_patterns
    path = Path(config.tokenizer_path)
    about["TOKENIZER_PATH"] = path.name if path.is_absolute() else path.as_posix()
    artifact = {"__quant_format__": INT8_FORMAT, "about": json.dumps(about), "quantized": {},
                "scales": {}, "dtypes": {}, "passthrough": {}, "qmeta": {},
                "passthrough_orig_dtypes": {}}
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        if t.is_floating_point() and t.numel() > config.int8_keep_float_max_numel:
            bits = config.export_bits if name.startswith("blocks.") else config.embed_bits
            own = (known or {}).get(name, ())
            plain = published or t.ndim != 2 or matches(name, config.control_tensor_name_patterns)
            pair = quantize_tensor(t) if plain else round_rows(t, bits, config.export_clip, *own)
            artifact["quantized"][name], artifact["scales"][name] = pair
            artifact["dtypes"][name] = dtype
            if t.ndim == 2:
                artifact["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        elif not t.is_floating_point() or matches(name, in_float32):
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

def pack(state: dict, config: Config, known: dict | None = None) -> tuple[bytes, dict]:
    """The artifact's file, in the smaller of two codings, and what the log says of it."""
    artifact, payload = quantize(state, config, known)
    raw = saved(artifact)
    packers = [zlib.compressobj(9), zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)]
    data = min((packer.compress(raw) + packer.flush() for packer in packers), key=len)
    return data, {"payload_bytes": payload, "raw_bytes": len(raw), "artifact_bytes": len(data),
                  "artifact_sha256": sha256(data).hexdigest(), "export_clip": config.export_clip}

def read_saved(path: str | Path) -> dict:
    """What torch.save wrote in a file, which zlib may have packed. Runs no code of hostile ones."""
    data = Path(path).read_bytes()
    if not data.startswith(b"PK"):  # torch.save writes zip archives
        data = zlib.decompressobj().decompress(data, 32 * len(data))  # limited, against zip bombs
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        require(sum(e.file_size for e in archive.infolist()) <= len(data), "entries are packed")
        require(archive.testzip() is None, "a checksum in it is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of an artifact, state dict or checkpoint. Raises ValueError."""
    try:
        state = read_saved(path)
        state = state.get("model", state)  # of a checkpoint
        if state.get("__quant_format__") == INT8_FORMAT:
            for name, values in state["quantized"].items():
                scale = state["scales"][name]  # of each row, or of a vector
                fits = values.shape == model.get_parameter(name).shape
                require(fits and scale.shape == values.shape[:-1], f"{name} has another shape")
                state["passthrough"][name] = (values.float().T * scale).T
            state = state["passthrough"]
        model.load_state_dict(dict(state))  # dict(): without a file's _metadata
    except Exception as error:  # hostile or damaged files fail in many ways
        raise ValueError(f"{path} cannot be loaded into this model: {error}") from None

def write_whole(path: Path, data: bytes) -> None:
    """Write under another name, then rename: `path` is never half a file. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from None

def calibrate(trainer: Trainer, steps: list[list]) -> dict[str, tuple]:
    """By weight: x^T x (columns, columns) of its inputs, and Adam's second moment. Collective."""
    model, adam = trainer.model, trainer.optimizers[0]
    model.apply(lambda module: setattr(module, "inputs_gram", 0.0))  # `linear` adds to it
    with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(model.rotary.is_mps):
        for x, y, *_ in sum(steps, []):  # without dropout; gradients on MPS: as in `score`
            model(x, y)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer.inputs_gram, Tensor):
            moment = adam.state.get(layer.weight, {}).get("exp_avg_sq")  # Muon has none
            found[f"{name}.weight"] = (trainer.ranks.sum(layer.inputs_gram).cpu(), moment)
    model.apply(lambda module: setattr(module, "inputs_gram", None))
    return found

# ---- Checkpoints -----------------------------------------------------------------------
def list_checkpoints(config: Config) -> list[Path]:
    """The checkpoints of RUN_ID by their steps, or of every run by their times; newest first."""
    pattern = (re.escape(config.run_id) or ".+") + r"_\d{8,}\.pt"
    files = Path(config.out_dir or "logs").glob("*/" * (not config.out_dir) + "checkpoints/*.pt")
    found = [path for path in files if re.fullmatch(pattern, path.name) and path.exists()]
    return sorted(found, key=lambda p: p.name if config.run_id else p.stat().st_mtime_ns)[::-1]

def find_checkpoint(config: Config) -> dict:
    """The checkpoint RESUME; "auto": the newest readable one, or {}. Raises ValueError."""
    paths = list_checkpoints(config) if config.resume == "auto" else [config.resume]
    for path in paths:
        try:
            state = read_saved(path)
            require(state.get("format") == CHECKPOINT_FORMAT, "it is of another version")
            return {**state, "path": str(path), "run_id": str(state["config"]["run_id"])}
        except Exception as error:  # hostile or damaged files fail in many ways
            print(f"warning: checkpoint {path} cannot be used: {error}", file=sys.stderr)
    require(not paths, f"RESUME={config.resume}: no checkpoint can be used; change it or RUN_ID")
    return {}

def resume(trainer: Trainer, loader: TokenLoader, state: dict) -> None:
    """Continue from a checkpoint. Raises ValueError if settings, text or tensors do not fit."""
    try:
        old, new = {**asdict(Config()), **state["config"]}, asdict(trainer.config)
        fixed = [f.name for f in fields(Config) if f.metadata["kind"] != "free"]
        refused = [f"{name.upper()} was {old[name]!r} and is {new[name]!r}"
                   for name in fixed if old[name] != new[name]]
        refused += [f"{name.upper()} is unknown now" for name in {*old} - {*new} if old[name]]
        require(not refused, f"it was trained with other settings: {'; '.join(refused)}")
        require(state["step"] <= trainer.config.iterations, "its step is beyond ITERATIONS")
        require(state["training_tokens"] == loader.tokens, "it read other text than DATA_PATH has")
        trainer.load_state_dict(state)
    except Exception as error:  # hostile or damaged files fail in many ways
        raise ValueError(f"checkpoint {state['path']} does not fit this run: {error}; "
                         "undo that, or start anew with a new RUN_ID") from None

def save_checkpoint(trainer: Trainer, loader: TokenLoader, log: RunLog) -> None:
    """Write a checkpoint and delete the oldest ones of this run. A failure only warns."""
    config, step = trainer.config, trainer.clock.step
    path = Path(config.out_dir, "checkpoints", f"{config.run_id}_{step:08d}.pt")
    try:
        path.parent.mkdir(exist_ok=True)
        data = saved({"format": CHECKPOINT_FORMAT, "config": asdict(config),
                      "training_tokens": loader.tokens, **trainer.state_dict()})
        write_whole(path, data)
        log.event("checkpoint", step=step, file=path.name, bytes=len(data))
        older = [other for other in list_checkpoints(config) if other != path]
        for old in older[config.keep_checkpoints - 1:]:
            old.unlink()
    except OSError as error:
        log.line(f"warning: checkpoint of step {step}: {error}")

# ---- A run -----------------------------------------------------------------------------
class Clock:
    """Steps, signals to stop, and training time, which `agree` measures; `train` adds estimates."""
    def __init__(self, config: Config, ranks: Ranks):
        self.ranks, self.iterations = ranks, config.iterations
        self.cap_ms = config.max_wallclock_seconds * 1000 or math.inf
        self.signals = []  # received by this process: number and time
        self.stop_signal = 0  # received by any rank when the ranks last agreed
        self.set(0, 0.0)

    def set(self, step: int, time_ms: float) -> None:
        """Start the clock after `step` steps, which took `time_ms`."""
        self.step, self.time_ms = step, time_ms
        self.zero_ms = self.ranks.now_ms() - time_ms  # when the clock was at zero

    def agree(self, is_bad: bool = False) -> bool:
        """Take the largest time and any signal; whether any rank `is_bad`. Collective."""
        number = self.signals[0][0] if self.signals else 0
        elapsed_ms = self.ranks.now_ms() - self.zero_ms
        self.stop_signal, self.time_ms, is_bad = self.ranks.max(number, elapsed_ms, is_bad)
        return bool(is_bad)

    @contextmanager
    def paused(self):
        """Stop the clock on all ranks for what is not training. Collective."""
        self.agree()
        stopped_ms = self.time_ms
        yield
        self.agree()
        self.set(self.step, stopped_ms)

    def on_signal(self, number: int, frame) -> None:
        """Keep a signal until the ranks agree on it; Ctrl-C again, after a second, ends at once."""
        now = time.monotonic()
        first, received = self.signals[0] if self.signals else (number, now)
        if signal.SIGINT in (first, number) and now > received + 1:  # sooner: torchrun's SIGTERM
            os._exit(128 + number)  # sys.exit would wait for ranks
        if not self.signals and self.ranks.rank == 0:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"stopping after this step or score; Ctrl-C again: at once\n")
        self.signals.append((number, now))

def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; never if that is 0."""
    return every > 0 and step % every == 0

def warm_up(trainer: Trainer, loader: TokenLoader | None, log: RunLog) -> None:
    """Take WARMUP_STEPS steps, undo them, start the clock."""
    before, steps = saved(trainer.state_dict()), trainer.config.warmup_steps
    for i in range(1, 1 + (steps if trainer.config.iterations else 0)):
        trainer.train_step(loader.batches(0)[:1])
        log.line(f"warmup_step:{i}/{steps}")
    gc.collect()
    trainer.load_state_dict(torch.load(io.BytesIO(before), map_location="cpu"))

def validate(trainer: Trainer, validation: Validation, log: RunLog) -> None:
    """Log the model's score, off the clock. Collective."""
    clock = trainer.clock
    with clock.paused():
        score = validation.score(trainer.model)
        label = validation.label + (" weights:live" if trainer.average else "")  # not the average
        log.event("val", "step:{step}/{iterations} val_loss:{val_loss:.4f} val_bpb:{val_bpb:.4f} "
                  "train_time:{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms" + label,
                  step=clock.step, iterations=clock.iterations, train_time_ms=clock.time_ms,
                  step_avg_ms=clock.time_ms / max(clock.step, 1), **score)
        gc.collect()

def log_step(trainer: Trainer, loader: TokenLoader, log: RunLog, losses, norm, since) -> None:
    """Log the step just done; `since`: step and ms of the line before. Collective."""
    config, step, time_ms = trainer.config, trainer.clock.step, trainer.clock.time_ms
    loss = trainer.ranks.sum(losses).item() / trainer.ranks.world_size
    rate = 1000 * config.train_batch_tokens * (step - since[0]) / max(time_ms - since[1], 1e-6)
    log.event("train", "step:{step}/{iterations} train_loss:{train_loss:.4f} train_time:"
              "{train_time_ms:.0f}ms step_avg:{step_avg_ms:.2f}ms lr:{lr:.2e} grad_norm:"
              "{grad_norm:.3f} tok_per_sec:{tok_per_sec:.0f} epoch:{epoch:.3f}",
              step=step, iterations=config.iterations, train_loss=loss, train_time_ms=time_ms,
              step_avg_ms=time_ms / step, grad_norm=norm.item(), tok_per_sec=rate,
              lr=trainer.optimizers[-1].param_groups[0]["lr"],  # Muon's, else Adam's first
              epoch=step * loader.pieces * loader.stride / loader.tokens,
              mem_mib=torch.cuda.max_memory_allocated() >> 20)

def export(trainer: Trainer, loader: TokenLoader, validation: Validation, log: RunLog) -> None:
    """Write final_model.pt and final_model.int8.ptz; read the latter back. Raises OSError."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    for p, average in zip(trainer.model.parameters(), trainer.average):
        p.data.copy_(average)
    trainer.average = []  # the model has it
    state = {name: t.cpu() for name, t in trainer.model.state_dict().items()}
    clock.set(clock.step, clock.time_ms)  # restarts it: the last checkpoint took time
    with clock.paused():
        if ranks.rank == 0:  # the floats first: nothing below can lose them
            floats = saved(state)
            try:
                write_whole(Path(config.out_dir, "final_model.pt"), floats)
            except OSError as error:  # a full disk may still hold the artifact
                log.line(f"warning: {error}")
    batches = [loader.batches(clock.step + i) for i in range(config.gptq_batches)]
    known = calibrate(trainer, batches) if batches else None  # on the clock
    validate(trainer, validation, log)
    if clock.step < config.iterations:
        log.line(f"stopping_early: wallclock_cap train_time:{clock.time_ms:.0f}ms "
                 f"step:{clock.step}/{config.iterations}")
    if ranks.device.type == "cuda":
        log.line(f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB")
    if ranks.rank == 0:
        path, code = Path(config.out_dir, MODEL_FILE), len(log.code)
        if ranks.device.type == "cuda" and ranks.world_size > 1:
            torch.set_num_threads(os.cpu_count())  # torchrun sets 1: peers in NCCL could time out
        data, about = pack(state, config, known)
        while 0 < config.size_cap < len(data) + code:
            log.line(f"WARNING: above SIZE_CAP with EXPORT_CLIP={config.export_clip:g}; raise it")
            if not 0 < config.export_clip < 2 * trainer.config.export_clip:  # other ranks wait
                break
            config = replace(config, export_clip=1.1 * config.export_clip)  # rounds more coarsely
            data, about = pack(state, config, known)
        write_whole(path, data)
        log.event("export", """Serialized model: {model_bytes} bytes
Code size: {code_bytes} bytes
Total submission size: {model_total} bytes
Serialized model int8+zlib: {artifact_bytes} bytes \
(payload:{payload_bytes} raw_torch:{raw_bytes} payload_ratio:{payload_ratio:.2f}x)
Total submission size int8+zlib: {total_bytes} bytes""",
                  step=clock.step, model_bytes=len(floats), code_bytes=code,
                  model_total=len(floats) + code, total_bytes=len(data) + code,
                  payload_ratio=sum(t.nbytes for t in state.values()) / about["payload_bytes"],
                  code_sha256=sha256(log.code).hexdigest(), **about)
        load_weights(trainer.model, path)
    for p in (trainer.model.parameters() if ranks.world_size > 1 else ()):
        dist.broadcast(p.data, 0)  # the other ranks may not see the file
    clock.agree()

def log_final_scores(trainer: Trainer, validation: Validation, log: RunLog) -> None:
    """Score what the artifact holds. Raises ValueError if that is not finite."""
    config, step, label = trainer.config, trainer.clock.step, validation.label
    scored, took = "val_loss:{val_loss:.8f} val_bpb:{val_bpb:.8f}", "eval_time:{eval_time_ms:.0f}ms"
    if config.eval_seq_len or config.eval_stride:
        score = validation.score(trainer.model, config.eval_seq_len, config.eval_stride)
        log.event("windows", f"windows {scored} {took}{label}", step=step, **score)
    score = validation.score(trainer.model)
    name, short = "final_int8_zlib_roundtrip", scored.replace(".8f", ".4f")
    log.event("final", f"{name} {short} {took}{label}\n{name}_exact {scored}{label}",
              step=step, **score)
    require(math.isfinite(score["val_loss"]), "the final score is not finite; lower the rates")

def resolve(config: Config, ranks: Ranks) -> Config:
    """Replace automatic settings with their values; round the batch. Raises ValueError."""
    device = ranks.device.type
    other = "float16" if device == "cuda" else "float32"  # T4: fast in float16 only
    if config.dtype == "auto":
        config = replace(config, dtype="bfloat16" if bfloat16_is_native(ranks.device) else other)
    if config.compile == "auto":
        mode = {"cuda": "1", "cpu": "blocks" if sys.platform == "linux" else "0"}.get(device, "0")
        config = replace(config, compile=mode if config.iterations else "0")
    length = config.train_seq_len  # a step reads 8 spans: 1, 2, 4 and 8 ranks compute the same
    spans = 2 ** int(math.log2(min(8, max(1, config.train_batch_tokens / length))))  # 1, 2, 4, 8
    spans_per_rank = config.grad_accum_steps or math.ceil(spans / ranks.world_size)
    unit = spans_per_rank * ranks.world_size * length
    require(2 * config.train_batch_tokens >= unit, "TRAIN_BATCH_TOKENS="
            f"{config.train_batch_tokens} is less than half of {unit}; lower TRAIN_SEQ_LEN")
    tokens = max(1, round(config.train_batch_tokens / unit)) * unit
    if tokens != config.train_batch_tokens and ranks.rank == 0:
        print(f"warning: TRAIN_BATCH_TOKENS={tokens}, a multiple of {unit}", file=sys.stderr)
    rows = tokens // (ranks.world_size * length)  # of a rank
    width = config.model_dim * getattr(torch, config.dtype).itemsize
    limits = {"cpu": (1 << 21) // width, "mps": length}  # in tokens: 2 MiB, for a cache; a row
    if device == "cuda":  # shares of the memory, by peaks measured on an H100
        per_token = config.num_layers * width * (11 + 2 * config.mlp_mult) + 6 * config.vocab_size
        share = 0.35 if config.compile == "1" else 0.12
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        limits["cuda"] = -ranks.max(-share * memory / per_token)[0]  # of the smallest GPU
    most = min(rows, max(1, int((config.micro_batch_tokens or limits[device]) / length)))
    micro_batch = next(n for n in range(most, 0, -1) if rows % n == 0)
    run_id = config.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    path = Path(config.tokenizer_path)
    digest = sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()
    require(config.tokenizer_sha256 in ("", digest), f"TOKENIZER_PATH={path} is missing "
            f"or not the model's, of TOKENIZER_SHA256={config.tokenizer_sha256}; use its data")
    return replace(config, device=device, run_id=run_id, out_dir=config.out_dir or f"logs/{run_id}",
                   attn=choose_attention(config, ranks.device), grad_accum_steps=spans_per_rank,
                   train_batch_tokens=tokens, micro_batch_tokens=micro_batch * length,
                   fused=config.fused and device != "mps", tokenizer_sha256=digest)

def announce(trainer: Trainer, loader, validation, log: RunLog, overrides: dict) -> None:
    """Log data, model and settings, in lines that begin as the published trainer's."""
    c, ranks = trainer.config, trainer.ranks
    settings = {name: getattr(c, f.name) for name, f in FIELDS.items()}
    rates = {g["kind"]: g["base_lr"] for o in trainer.optimizers for g in o.param_groups}
    log.event("config", config=settings, overrides=overrides, data_sha256=validation.data_sha256,
              val_tokens=validation.count, val_bytes=validation.bytes, torch=torch.__version__,
              world_size=ranks.world_size, threads=torch.get_num_threads(),
              gpu=torch.cuda.get_device_name() if c.device == "cuda" else "")
    log.line(f"""val_bpb:enabled tokenizer_kind={validation.tokenizer_kind} \
tokenizer_path={c.tokenizer_path}
train_loader:dataset:{Path(c.data_path).name} train_shards:{len(loader.shards) if loader else 0} \
tokens:{loader.tokens if loader else 0}
val_loader:shards pattern={c.data_path}/*_val_*.bin tokens:{validation.count}{validation.label}
model_params:{sum(p.numel() for p in trainer.model.parameters())}
world_size:{ranks.world_size} grad_accum_steps:{c.grad_accum_steps} device:{ranks.device} \
dtype:{c.dtype} compile:{c.compile} micro_batch_tokens:{c.micro_batch_tokens}
sdp_backends:{" ".join(f"{name}={c.attn in name}" for name in SDPA)}
attention_mode:gqa num_heads:{c.num_heads} num_kv_heads:{c.num_kv_heads}
tie_embeddings:{c.tie_embeddings} embed_lr:{rates["embed"]} head_lr:{rates.get("head", 0.0)} \
matrix_lr:{rates.get("matrix", 0.0)} scalar_lr:{rates["scalar"]}
train_batch_tokens:{c.train_batch_tokens} train_seq_len:{c.train_seq_len} \
iterations:{c.iterations} warmup_steps:{c.warmup_steps} \
max_wallclock_seconds:{c.max_wallclock_seconds:.3f}
seed:{c.seed}""")

def compile_model(trainer: Trainer, loader: TokenLoader, is_optional: bool) -> None:
    """Compile. If that fails, warn if `is_optional`, else raise ValueError. Collective."""
    config, model, failure = trainer.config, trainer.model, ""
    for part in [model] if config.compile == "1" else model.blocks:
        part.compile(dynamic=False, fullgraph=True)
    if config.compile == "blocks":
        model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
    try:
        for loops in sorted({0, config.num_loops}):  # two graphs if blocks run again
            model.loops = loops
            model(*loader.batches(0)[0]).backward()
    except (torch._dynamo.exc.TorchDynamoException, OSError, ImportError) as error:
        failure = next((s for s in str(error).splitlines() if "error: " in s), f"{error!r:.200}")
    model.zero_grad()
    if any(trainer.ranks.max(bool(failure))):
        failure = f"COMPILE={config.compile} failed: {failure or 'in another rank'}"
        require(is_optional or trainer.clock.signals,  # Ctrl-C stops g++, too
                f"{failure}; set COMPILE=0, CXX or TORCHINDUCTOR_CACHE_DIR")
        print(f"warning: {failure}; going on uncompiled; COMPILE=0 plans for that", file=sys.stderr)
        torch.compiler.set_stance("force_eager")

@contextmanager
def signals_kept(clock: Clock):
    """While a run trains, `clock` keeps signals (but what nohup ignores); garbage is kept, too."""
    stops = [n for n in signal.Signals if n.name in STOPS and signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, clock.on_signal) for number in stops}
    gc.disable()  # it slows compiling, and one rank's collection would hold up the others
    try:
        yield
    finally:
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not from Python

def run(config: Config, overrides: dict, source: str) -> int:
    """Train, export and score. Returns the exit status; raises ValueError, OSError and others."""
    ranks = start_ranks(config)
    torch.set_float32_matmul_precision(config.matmul_precision)
    checkpoint = find_checkpoint(config) if config.resume else {}
    config = resolve(replace(config, run_id=config.run_id or checkpoint.get("run_id", "")), ranks)
    exports = config.iterations > 0 or not config.init_from.endswith(".ptz")  # .ptz: only score it
    model = Path("logs", config.run_id, MODEL_FILE)
    writes_it = exports and model.parent == Path(config.out_dir)
    require(checkpoint or not writes_it or not model.exists(),
            f"{model} exists; set another RUN_ID, or INIT_FROM={config.run_id} to use it")
    validation = Validation(config, ranks)
    reads = config.iterations or (exports and config.gptq_batches)
    loader = TokenLoader(config, ranks) if reads else None
    facts = {name: getattr(config, f.name) for name, f in FIELDS.items()
             if f.metadata["kind"] != "free" or f.type is not str}  # free texts (paths) may differ
    facts |= {"the validation text": sha256(validation.tokens).digest(),
              "the training tokens": loader and loader.tokens,
              "the checkpoint": checkpoint and (checkpoint["step"], checkpoint["time_ms"])}
    codes = {name: zlib.crc32(repr(value).encode()) for name, value in facts.items()}
    wrong = [name for name, c in codes.items() if ranks.max(c, -c) != [c, -c]]  # max and min are c
    require(not wrong, f"the ranks do not agree on {', '.join(wrong)}")
    trainer = Trainer(config, ranks, "" if checkpoint else config.init_from)
    clock = trainer.clock
    if checkpoint:
        resume(trainer, loader, checkpoint)
    if ranks.rank == 0:
        Path(config.out_dir).mkdir(parents=True, exist_ok=True)
        require(os.access(config.out_dir, os.W_OK), f"OUT_DIR={config.out_dir!r} is not writable")
    log = RunLog(config.run_id, source, ranks.rank == 0)
    announce(trainer, loader, validation, log, overrides)
    if checkpoint:
        log.event("resume", "resumed: step:{step} train_time:{train_time_ms:.0f}ms from {file}",
                  step=clock.step, train_time_ms=clock.time_ms, file=checkpoint["path"])
    del checkpoint
    with signals_kept(clock):
        if config.iterations and config.compile != "0":
            log.line("compiling: a minute or more the first time; COMPILE=0 avoids it")
            compile_model(trainer, loader, overrides.get("COMPILE", ("auto",))[0].lower() == "auto")
        warm_up(trainer, loader, log)
        train(trainer, loader, validation, log)
        if exports and not clock.stop_signal:
            export(trainer, loader, validation, log)  # a signal that comes now waits for its files
    if clock.stop_signal:
        hint = "set RESUME=auto to go on" if list_checkpoints(config) else "there is no checkpoint"
        log.line(f"stopped: signal {clock.stop_signal:g} after step:{clock.step}; {hint}")
    else:
        log_final_scores(trainer, validation, log)
    ranks.max(0)  # wait for all: gloo aborts in a rank whose peer has left
    return 128 + int(clock.stop_signal) if clock.stop_signal else 0

def main() -> int:
    """Run the script with this process's arguments and environment; return the exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        for name, f in FIELDS.items():
            print(f"  {f'{name}={f.default}':<35} {f.metadata['help']}  {f.metadata['choices']}")
        return 0
    status = 1
    try:
        status = run(*load_config(sys.argv[1:], os.environ), Path(__file__).read_text("utf-8"))
    except (ValueError, OSError, FloatingPointError, KeyboardInterrupt, dist.DistError) as error:
        print(f"train_gpt.py: {str(error) or 'stopped'}", file=sys.stderr, flush=True)
    except torch.OutOfMemoryError as error:
        print(f"train_gpt.py: {error}\nTry a lower MICRO_BATCH_TOKENS", file=sys.stderr)
    if dist.is_initialized():  # threads of gloo may abort Python's own end
        os._exit(status)
    return status

if __name__ == "__main__":
    sys.exit(main())
