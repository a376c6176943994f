"""Train the best language model you can within a size limit and a time limit.

    python train_gpt.py --help                             every variable and its default
    python train_gpt.py NUM_LAYERS=4 DEVICE=cpu            one device: CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  eight GPUs, published settings
    python train_gpt.py ITERATIONS=0 INIT_FROM=RUN_ID DATA_PATH=FOLDER    score its model

Set variables in the environment or as NAME=value arguments; arguments win. @FILE names a file
of such lines, over which both win. In shapes, B is rows, T tokens, V vocabulary, D width,
H query heads, K key/value heads, C head width.
"""
import ctypes
import difflib
import gc
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
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
# A field of Config is `free` if it may change on resume, `kept` if the model needs it later.
STARTED = time.monotonic()  # after the imports
SHARD_START = [20240520, 1]  # magic number and version
HEADER_BYTES = 1024  # in front of a shard's tokens
INT8_FORMAT = "int8_clean_per_row_v1"
MODEL_FILE = "final_model.int8.ptz"  # the artifact
CHECKPOINT_FORMAT = 4
STOPS = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"}  # of job systems and terminals
CASE = "\ue001\ue002\ue003"  # CaseOps' operators for capitals: tokens without bytes
OLD_TORCH = torch.__version__ < (2, 10)  # flash attention on CPUs knows no groups of queries
SDPA = ("cudnn", "flash", "mem_efficient", "math")  # PyTorch's attention kernels
FOREIGN = {"COMPILER", "MODEL_DIR", "DATASET_PATH", "DEVICES", "SEEDS"}  # set by clusters
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
    # Run and data
    run_id: str = free("", "name of logs/RUN_ID.txt and .jsonl; empty: a new name")
    seed: int = var(1337, "seed of the initial weights and of LOADER=shuffled")
    out_dir: str = free("", "folder of the model's files and checkpoints/; empty: logs/RUN_ID")
    init_from: str = free("", "artifact, state dict, checkpoint or RUN_ID to start from")
    data_path: str = free("./data/datasets/fineweb10B_sp1024", "folder with token shards")
    tokenizer_path: str = free("./data/tokenizers/fineweb_1024_bpe.model", "file, byte260 or gpt2")
    tokenizer_sha256: str = kept("", "digest that the tokenizer must have; empty: any")
    loader: str = var("sequential", "order of the training text", "sequential|shuffled")
    overfit: bool = var(False, "train on the first batch again and again")
    # Device
    device: str = free("auto", "auto: the first that is available", "auto|cuda|mps|cpu")
    dtype: str = kept("auto", "type; auto: bfloat16 where native", "auto|bfloat16|float32|float16")
    matmul_precision: str = free("high", "float32 products; high: TF32 on CUDA", "highest|high")
    compile: str = free("auto", "auto: 1 on CUDA, blocks on Linux", "auto|0|1|blocks")
    attn: str = free("auto", "tiled: for CPUs", "auto|flash|cudnn|efficient|math|tiled")
    # Length, validation and log
    iterations: int = free(20000, "train for at most N steps")
    max_wallclock_seconds: float = free(600.0, "train for at most N seconds; 0: no limit")
    warmup_steps: int = free(20, "untimed steps that prime the kernels and are undone")
    warmdown_iters: int = var(3000, "lower the rates in the last N steps", low=-1e9)
    train_batch_tokens: int = var(393216, "tokens in a step, over all ranks", low=1)
    train_seq_len: int = kept(4096, "tokens in a row, in training and validation", low=1)
    grad_accum_steps: int = free(0, "spans that a rank reads a step; 0: its share of 8")
    micro_batch_tokens: int = free(0, "maximum tokens in a forward pass; 0: by device")
    val_loss_every: int = free(1000, "validate every N steps; 0: only at the end")
    val_batch_size: int = free(524288, "most tokens scored in GRAD_ACCUM_STEPS passes")
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
    head_gate: bool = kept(False, "let each token weigh the output of each of its heads")
    lanes: int = kept(0, "blocks at the end whose MLP has a residual stream of its own")
    num_loops: int = kept(0, "extra passes through blocks LOOP_START to LOOP_END; 0: none")
    loop_start: int = kept(0, "first repeated block, counted from 0")
    loop_end: int = kept(0, "last repeated block, counted from 0")
    loop_at: float = free(0.35, "part of the run before NUM_LOOPS acts", high=0.99)
    smear: bool = kept(False, "add a learned share of the token before to each embedding")
    embed_float32: bool = var(False, "keep the table in float32 instead of bfloat16")
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
    muon_row_norm: bool = var(False, "give the rows of Muon's updates one norm at first")
    muon_momentum_warmup_start: float = var(0.92, "Muon's momentum at step 0")
    muon_momentum_warmup_steps: int = var(1500, "raise Muon's momentum over N steps")
    beta1: float = var(0.9, "Adam's decay of the first moment")
    beta2: float = var(0.95, "Adam's decay of the second moment")
    adam_eps: float = var(1e-8, "Adam's epsilon", low=1e-30)
    fused: bool = free(True, "run Adam in one kernel (never on MPS)")
    weight_decay: float = var(0.0, "decay of matrices and tables, times their rate")
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
    int8_keep_float_fp32_name_patterns: str = free(CONTROL, "small tensors in float32")
    int8_keep_float_max_numel: int = free(65536, "tensors of at most N numbers stay floats")
    export_bits: int = free(8, "bits of the blocks' matrices", "4|5|6|7|8")
    embed_bits: int = free(8, "bits of the embedding and of an untied head", "4|5|6|7|8")
    export_clip: float = free(0.0, "clip rows at N standard deviations; 0: not at all")
    gptq_batches: int = free(0, "calibrate rounding on N more batches (GPTQ); 0: off")
    size_cap: int = free(0, "maximum bytes of code and artifact; 0: no check")

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
        require(self.lanes <= self.num_layers - self.loop_start, f"LANES={self.lanes} must be at "
                f"most NUM_LAYERS - LOOP_START = {self.num_layers - self.loop_start}")
        require(not 0 < self.micro_batch_tokens < self.train_seq_len,
                f"MICRO_BATCH_TOKENS={self.micro_batch_tokens} is less than a row of TRAIN_SEQ_LEN")
        require(re.fullmatch(r"([^./\\\s-][^/\\\s]*)?", self.run_id),
                f"RUN_ID={self.run_id!r} must not be a path, contain spaces or begin with . or -")

FIELDS = {f.name.upper(): f for f in fields(Config)}
KEPT = ["TOKENIZER_PATH", *(name for name, f in FIELDS.items() if f.metadata["kind"] == "kept")]

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
        wanted = "a whole number" if f.type is int else "a number"
        raise ValueError(f"{name}={text!r} is not {wanted}; example: {name}={f.default}") from None

def read_description(path: str) -> dict[str, str]:
    """An artifact's variables; {} for other files. Raises ValueError for unknown ones. They are
    found by their first name: nothing is unpickled before the model's size is known."""
    try:
        start = np.fromfile(path, np.uint8, 1 << 20).tobytes()
        start = zlib.decompressobj().decompress(start, 1 << 20).decode("latin-1")
        about, _ = json.JSONDecoder().raw_decode(start, start.index('{"TOKENIZER_PATH": '))
    except (OSError, zlib.error, ValueError, RecursionError):
        return {}
    unknown = ", ".join(about.keys() - set(KEPT))
    require(not unknown, f"{path} has settings that this script does not know: {unknown}")
    return {name: str(value) for name, value in about.items()}

def load_config(arguments: list[str], environment: dict[str, str]) -> tuple[Config, dict]:
    """The configuration; the text and origin of what was set. Raises ValueError."""
    given = {n: (text, "environment") for n, text in environment.items() if n not in FOREIGN}
    from_files = {}
    for argument in arguments:
        is_file = argument.startswith("@")
        text = Path(argument[1:]).read_text(encoding="utf-8-sig") if is_file else argument
        for line in re.findall("(?m)^[^#\n].*", text):
            name, is_pair, value = line.partition("=")
            require(is_pair, f"{line!r} is not NAME=value, such as NUM_LAYERS=9; try --help")
            origin = argument if is_file else "argument"
            (from_files if is_file else given)[name] = (value, origin)
    given = {n: (os.path.expanduser(t), o) for n, (t, o) in (from_files | given).items()}
    folder = Path(given.get("DATA_PATH", (Config.data_path,))[0])
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        about = json.loads((folder / "manifest.json").read_bytes())["tokenizer"]
        path = str(folder / about["name"]) if (folder / about["name"]).is_file() else about["name"]
        given = {"TOKENIZER_PATH": (path, "manifest"),
                 "VOCAB_SIZE": (str(about["vocab_size"]), "manifest")} | given
    path, origin = given.get("INIT_FROM", ("", ""))
    if path and Path("logs", path, MODEL_FILE).is_file():  # a RUN_ID
        path = Path("logs", path, MODEL_FILE).as_posix()
        given["INIT_FROM"] = (path, origin)
    given = {name: (text, path) for name, text in read_description(path).items()} | given
    for name in given.keys() - FIELDS.keys():  # other programs have variables, too
        text, origin = given.pop(name)
        near = difflib.get_close_matches(name.lstrip("-").upper(), FIELDS, 1, 0.85)
        hint = f"did you mean {near[0]}?" if near else "--help lists all of them"
        require(origin == "environment" and not near,
                f"{name}={text!r} ({origin}) is not a variable of this script; {hint}")
    values = {FIELDS[name].name: parse_value(name, text) for name, (text, _) in given.items()}
    control = values.get("control_tensor_name_patterns", CONTROL)
    values.setdefault("int8_keep_float_fp32_name_patterns", control)
    return Config(**values), given

def print_help() -> None:
    """Print every variable with its default, its meaning and its choices."""
    print(__doc__)
    for name, f in FIELDS.items():
        text = f"{name}={int(f.default) if f.type is bool else f.default}"
        print(f"  {text:<35} {f.metadata['help']}  {f.metadata['choices']}")

def matches(name: str, patterns: str) -> bool:
    """Whether one of the comma-separated patterns is part of the tensor's name."""
    return any(pattern and pattern in name for pattern in patterns.split(","))

# ---- Ranks and device ------------------------------------------------------------------
# All ranks make the same collective calls in the same order; one alone needs no group.
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

    def peak_mib(self) -> int:
        """The most memory of a GPU's tensors so far in MiB; 0 without one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() >> 20
        return 0

    def now_ms(self) -> float:
        """The time in ms, of any origin, when the device has no work left."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()

def find_ranks() -> list[int]:
    """Rank, number of ranks, and both on this machine, from torchrun's variables; one rank
    without them. Raises ValueError if another launcher started several processes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(os.environ.get(name) for name in names):
        return [int(os.environ[name]) for name in names]
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        require(os.environ.get(name, "1") == "1", f"{name}={os.environ.get(name)}, but {names} "
                "are not all set: start with torchrun, or put logs/ranks.sh before python")
    return [0, 1, 0, 1]

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
    elif "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    if kind == "cpu" and sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: glibc takes memory from its heap
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: and keeps it, a fifth faster
    if size > 1:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store
        store = dist.PrefixStore(attempt, next(dist.rendezvous("env://", rank, size))[0])
        backend, gpu = ("nccl", device) if kind == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=gpu)
    return Ranks(rank, size, device)

def bfloat16_is_native(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; some CPUs do (AMX, AVX512-BF16)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type == "cpu" and has_units

# ---- Log -------------------------------------------------------------------------------
# Programs read these lines: they begin as the published trainer's. Events have exact values.
class RunLog:
    """Console, logs/RUN_ID.txt and logs/RUN_ID.jsonl of the main rank; others are silent."""
    def __init__(self, run_id: str, source: str, is_main: bool):
        self.is_main = is_main
        self.code = source.encode("utf-8")
        if not is_main:
            return
        Path("logs").mkdir(exist_ok=True)
        stamp = time.time_ns()
        paths = [Path("logs", run_id + ending) for ending in (".txt", ".jsonl")]
        for path in filter(Path.exists, paths):  # the logs of two runs never mix
            path.rename(path.with_name(f"{path.stem}.{stamp}{path.suffix}"))
        self.text, self.json = (path.open("w", encoding="utf-8") for path in paths)
        print(paths[0], flush=True)
        smi = subprocess.getoutput("timeout 30 nvidia-smi") if shutil.which("nvidia-smi") else ""
        self.write(self.text, f"{source}\n{'=' * 100}\nRunning Python {sys.version}\n"
                   f"Running PyTorch {torch.__version__}\n{smi}\n{'=' * 100}")

    def write(self, file, text: str) -> None:
        """Write a line to an open file. If that fails, warn."""
        try:
            print(text, file=file, flush=True)
        except OSError as error:
            warnings.warn(f"{file.name}: a line was not written: {error}", stacklevel=2)

    def line(self, text: str) -> None:
        """Write a line to the console and the .txt."""
        for file in (sys.stdout, self.text) if self.is_main else ():
            self.write(file, text)

    def event(self, event: str, text: str = "", **values) -> None:
        """Write values to the .jsonl, null if they are not finite, and a text for people."""
        if self.is_main:
            values = {"event": event, **values, "elapsed_s": round(time.monotonic() - STARTED, 3)}
            bad = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
            self.write(self.json, json.dumps(values | dict.fromkeys(bad)))
        if text:
            self.line(text)

# ---- Data and validation ---------------------------------------------------------------
# What a step reads follows from its number alone. A score is in bits per byte of text.
def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a uint16 memory map. Raises ValueError if it is empty or damaged."""
    header = np.fromfile(path, dtype="<i4", count=3).tolist()
    require(len(header) == 3 and header[:2] == SHARD_START, f"{path} is not a token shard: it "
            f"starts with {header}, not with {SHARD_START} and the number of tokens")
    size = path.stat().st_size
    require(size == HEADER_BYTES + 2 * header[2] > HEADER_BYTES, f"{path} is damaged: {size} "
            f"bytes do not match {header[2]} tokens; make or download it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)

def open_split(config: Config, split: str) -> dict[Path, np.ndarray]:
    """The shards of "train" or "val", uint16, in the order of their names. Raises ValueError."""
    paths = sorted(Path(config.data_path).glob(f"*_{split}_[0-9]*.bin"))
    where = f"DATA_PATH={config.data_path!r}"
    require(paths, f"{where} has no *_{split}_*.bin; a small set: python data/prepare.py sotu "
            f"--tokenizer sp{config.vocab_size} --out data/datasets/sotu")
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

@lru_cache(maxsize=2)  # the last step of an epoch may read rows of the next one
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order of the rows in an epoch of LOADER=shuffled: a permutation, int64 (rows,)."""
    return np.random.default_rng([seed, epoch]).permutation(rows)

class TokenLoader:
    """The training shards as one endless text. A step reads its next `pieces`, ranks in turn:
    spans, as published, or single rows of TRAIN_SEQ_LEN if shuffled. Raises ValueError."""
    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.shards = list(open_split(config, "train").items())  # ids: checked when read
        self.ends = np.cumsum([len(tokens) for _, tokens in self.shards])
        self.tokens = int(self.ends[-1])
        self.rows = (self.tokens - 1) // config.train_seq_len
        self.shuffled = config.loader == "shuffled"
        spans = config.grad_accum_steps * ranks.world_size
        self.pieces = config.train_batch_tokens // config.train_seq_len if self.shuffled else spans
        self.length = config.train_batch_tokens // self.pieces
        self.stride = self.length if self.shuffled else self.length + 1  # as published
        self.batches(0)  # shards of another vocabulary are found before training

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens (uint16) from `start`. Raises ValueError as check_ids does."""
        end = start + count
        parts = []
        while start < end:
            index = int(np.searchsorted(self.ends, start % self.tokens, side="right"))
            path, tokens = self.shards[index]
            parts.append(tokens[start % self.tokens - int(self.ends[index]):][:end - start])
            start += len(check_ids(parts[-1], self.config.vocab_size, path))
        return np.concatenate(parts)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step, from 0: inputs and targets (B, T), int64."""
        first = 0 if self.config.overfit else step * self.pieces  # of all pieces in order
        mine = range(first + self.ranks.rank, first + self.pieces, self.ranks.world_size)
        if self.shuffled:
            mine = [int(epoch_order(self.config.seed, i // self.rows, self.rows)[i % self.rows])
                    for i in mine]
        texts = np.stack([self.read(i * self.stride, self.length + 1) for i in mine])
        pairs = np.stack((texts[:, :-1], texts[:, 1:])).reshape(2, -1, self.config.train_seq_len)
        ids = torch.from_numpy(pairs.astype(np.int64))
        ids = ids.pin_memory() if self.config.device == "cuda" else ids
        ids = ids.to(self.ranks.device, non_blocking=ids.is_pinned())  # without waiting
        rows = self.config.micro_batch_tokens // self.config.train_seq_len
        return list(zip(*(part.split(rows) for part in ids)))  # all of one size

def load_byte_table(config: Config) -> tuple[str, np.ndarray, np.ndarray]:
    """The tokenizer's kind; the UTF-8 bytes of its tokens, uint16 (V, 2), in column 1 after a
    boundary token; the boundary tokens, bool (V,). Raises ValueError."""
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
            silent = [boundary[i] or model.is_unknown(i) or model.is_unused(i) for i in ids]
            pieces = ["" if silent[i] else model.id_to_piece(i).replace("\u2581", " ") for i in ids]
            lengths = [1 if model.is_byte(i) else len(pieces[i].strip(CASE).encode()) for i in ids]
            if model.encode("a", out_type=str)[0].startswith("\u2581"):  # it prepends a space
                after_boundary = [lengths[i] - pieces[i].startswith(" ") for i in ids]
        elif path.endswith(".json"):
            vocabulary = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = vocabulary["kind"]
            lengths = [len(token.encode("latin-1")) for token in vocabulary["tokens"]]
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
            splits = (json.loads(source.read_bytes()) if source.exists() else {}).get("splits", {})
            counts = [splits.get("val", {}).get(name) for name in ("tokens", "decoded_bytes")]
            entries = [entry for split in splits.values() for entry in split.get("shards", [])]
            self.data_sha256 = {str(entry["file"]): entry.get("sha256") for entry in entries}
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{source} is damaged: {error!r}; make the data again") from None
        names = {path.name for path in source.parent.glob("*_[0-9]*.bin")}
        listed = {name for name in self.data_sha256 if name in names or config.iterations}
        odd = ", ".join(sorted(names ^ listed)) if entries else ""
        require(not odd, f"{source} and the shards there differ in {odd}; copy all, move others")
        shards = open_split(config, "val").items()
        tokens = np.concatenate([check_ids(ids, config.vocab_size, path) for path, ids in shards])
        self.tokenizer_kind, table, boundary = load_byte_table(config)
        target_bytes = table[tokens[1:], boundary[tokens[:-1]].astype(np.uint8)]
        first_bytes = int(table[tokens[0], 1])  # the first token is text, but no target
        found = [len(tokens), first_bytes + int(target_bytes.sum(dtype=np.int64))]
        wanted = [there if said is None else said for said, there in zip(counts, found)]
        require(found == wanted, f"{source} says {wanted} validation tokens and bytes, shards and "
                f"TOKENIZER_PATH={config.tokenizer_path!r} give {found}: the score would be wrong")
        rows = (len(tokens) - 1) // config.train_seq_len
        wanted_rows = math.ceil(config.val_tokens / config.train_seq_len) or rows
        self.count = min(rows, wanted_rows) * config.train_seq_len  # targets
        self.tokens = tokens[:self.count + 1]
        self.bytes = int(target_bytes[:self.count].sum(dtype=np.int64))
        self.label = f" partial:{config.val_tokens}" if wanted_rows < rows else ""

    def score(self, model: nn.Module, length: int = 0, stride: int = 0) -> dict[str, float]:
        """The loss in nats, bits per byte, and ms they took. Windows of `length` tokens (0: a
        row), moved by `stride` (0: length), score what earlier ones did not. Collective."""
        start_ms = self.ranks.now_ms()
        config, ranks = self.config, self.ranks
        length = min(length or config.train_seq_len, self.count)
        stride = min(stride or length, length)
        windows = 1 + math.ceil((self.count - length) / stride)
        limit = config.val_batch_size // (ranks.world_size * config.grad_accum_steps)
        batch = max(1, min(limit, config.micro_batch_tokens) // length)  # windows at once
        # A small text is scored by training's graph: to compile another one takes longer.
        alike = (batch * length, length) == (config.micro_batch_tokens, config.train_seq_len)
        small = alike and config.compile != "0" and windows * stride < 1 << 20
        stops = np.minimum(length + stride * np.arange(windows + batch), self.count)
        starts = np.concatenate(([0], stops[:-1]))  # of what is new in a window
        device = "cpu" if ranks.device.type == "mps" else ranks.device  # it has no float64
        nats = torch.zeros((), dtype=torch.float64, device=device)
        for first in range(batch * ranks.rank, windows, batch * ranks.world_size):
            rows = slice(first, first + batch)
            places = stops[rows, None] - length + np.arange(length)
            is_scored = places >= starts[rows, None]
            targets = np.where(is_scored, self.tokens[places + 1].astype(np.int64), -1)
            pair = np.stack((self.tokens[places].astype(np.int64), targets))
            with torch.set_grad_enabled(small or config.device == "mps"):  # pytorch#195910
                loss = model(*torch.from_numpy(pair).to(ranks.device)).detach()
            nats += loss.to(device).double() * int(is_scored.sum())
        total = ranks.sum(nats).item()
        return {"val_loss": total / self.count, "val_bpb": total / math.log(2) / self.bytes,
                "eval_time_ms": ranks.now_ms() - start_ms}

# ---- Model -----------------------------------------------------------------------------
# Each module is its equation for whole rows. Weights, mostly float32, are cast to x's type.
def rms_norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """gain * x / sqrt(mean(x^2) + float32's epsilon) over the last dimension, in x's type."""
    factors = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1.19e-7)
    return (x * (factors * gain)).to(x.dtype)  # few factors: the gain's gradient is cheap

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x (B, T, H, C) by halves; cos, sin (T, 1, C/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

def token_before(x: Tensor) -> Tensor:
    """x (B, T, ...) of the token before; zero for the first."""
    return F.pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0))

def tiled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention for CPUs, a quarter of the queries at a time, without the keys after
    them: q (B, K, H/K, T, C); k, v (B, K, T, C). To join chunks is faster than slices."""
    size = math.ceil(q.size(3) / 4)
    y, keys, values = [], k.chunk(4, dim=2), v.chunk(4, dim=2)
    for i, q_i in enumerate(q.chunk(4, dim=3)):  # `size` queries; the last may be fewer
        k_i, v_i = torch.cat(keys[:i + 1], dim=2), torch.cat(values[:i + 1], dim=2)
        scores = (q_i.flatten(2, 3) @ k_i.mT).unflatten(2, q_i.shape[2:4]) * q.size(4) ** -0.5
        mask = torch.full(scores.shape[3:], -math.inf, dtype=q.dtype).triu(i * size + 1)
        p = (scores + mask).softmax(-1)
        y.append((p.flatten(2, 3) @ v_i).view_as(q_i))
    return torch.cat(y, dim=3)

def causal_attention(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """Grouped causal attention (arXiv:2305.13245): q (B, H, T, C), k, v (B, K, T, C)."""
    if kernel == "tiled":
        return tiled_attention(q.unflatten(1, (k.size(1), -1)), k, v).flatten(1, 2)
    has_groups = kernel == "cudnn" or (kernel == "flash" and not (q.is_cpu and OLD_TORCH))
    if q.size(1) > k.size(1) and not has_groups:
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=has_groups)

def linear(x: Tensor, *layers: nn.Module, scale: Tensor | None = None) -> Tensor:
    """x (..., D) @ weight.T * scale (N,) in x's type, for one layer or several at once. While
    `calibrate` watches a layer, its `gram` adds up x^T x (D, D)."""
    weights = [layer.weight for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if scale is not None:
        weight = weight * scale[:, None]  # smaller than the output
    for layer in layers:
        if getattr(layer, "gram", None) is not None:
            rows = x.flatten(0, -2).float()
            layer.gram = layer.gram + rows.mT @ rows
    return F.linear(x, weight.to(x.dtype))

class Attention(nn.Module):
    """Causal self-attention of x (B, T, D); queries and keys are normed, with a gain a head."""
    def __init__(self, config: Config):
        super().__init__()
        width = config.model_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        kv_width = width // config.num_heads * config.num_kv_heads
        self.config = config
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, kv_width, bias=False)
        self.c_v = nn.Linear(width, kv_width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        if config.head_gate:
            self.attn_scale_gate = nn.Parameter(torch.zeros(config.num_heads, min(32, width)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        qkv = linear(x, self.c_q, self.c_k, self.c_v).unflatten(-1, (sum(self.heads), -1))
        q, k, v = qkv.split(self.heads, dim=2)  # of (B, T, H + 2K, C)
        if self.config.shift_keys:  # so that one layer can copy (modded-nanogpt#169)
            half = k.size(3) // 2
            pair = torch.arange(k.size(3), device=k.device) % half  # the fastest first
            k = torch.where(pair < (self.config.rope_dims // 2 or half // 2), k, token_before(k))
        q = rotate(rms_norm(q, self.q_gain.to(q.dtype)[:, None]), cos, sin)
        k = rotate(rms_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, C)
        y = causal_attention(q, k, v, self.config.attn).transpose(1, 2)  # (B, T, H, C)
        if self.config.head_gate:  # of 32 inputs; 1 at first (arXiv:2505.06708)
            gate = self.attn_scale_gate.to(x.dtype)
            y = y * (2 * F.linear(x[..., :gate.size(1)], gate).sigmoid())[..., None]
        if self.config.exclusive_attn:  # arXiv:2603.09078
            own = rms_norm(v.transpose(1, 2))[:, :, :, None]
            y = y.unflatten(2, (v.size(1), -1))  # (B, T, K, H / K, C)
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
        hidden = F.leaky_relu(linear(x, self.fc), self.slope).square()
        return linear(hidden, self.proj, scale=scale)

class Block(nn.Module):
    """Attention and MLP on a residual stream x (B, T, D), mixed with the embedding x0. A `lane`
    is the MLP's own stream: each stream adds both outputs, with weights (parameter-golf#1518)."""
    def __init__(self, config: Config, number: int):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.attn_scale = nn.Parameter(torch.ones(config.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(config.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, config.model_dim))
        if number >= config.num_layers - config.lanes:  # weights of stream, attention, MLP
            self.resid_mix_lanes = nn.Parameter(torch.tensor([[1.1, 1.3, 0.7], [1.1, 0.7, 1.3]]))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor, lane: Tensor | None):
        mix = self.resid_mix.to(x.dtype)
        mixed = mix[0] * x + mix[1] * x0
        attended = self.attn(rms_norm(mixed), cos, sin, self.attn_scale)
        if lane is None:
            x = mixed + attended
            return x + self.mlp(rms_norm(x), self.mlp_scale), None
        fed = self.mlp(rms_norm(lane), self.mlp_scale)
        (a, b, c), (d, e, f) = self.resid_mix_lanes.to(x.dtype)
        return a * x + b * attended + c * fed, d * lane + e * attended + f * fed

class GPT(nn.Module):
    """A GPT whose first half of blocks has skip connections to the second, last to first."""
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.compute_dtype = getattr(torch, config.dtype, torch.float32)  # of "auto": float32
        rows = math.ceil(config.vocab_size / config.vocab_pad) * config.vocab_pad
        self.tok_emb = nn.Embedding(rows, config.model_dim)  # as published: first to use the seed
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        tied = config.tie_embeddings
        self.loops = config.num_loops  # 0 until LOOP_AT (parameter-golf#1437)
        self.lm_head = None if tied else nn.Linear(config.model_dim, rows, bias=False)
        half = (config.num_layers + self.loops * (config.loop_end + 1 - config.loop_start)) // 2
        ones = torch.ones(half, config.model_dim)
        self.skip_weights = nn.Parameter(ones, requires_grad=config.num_layers > 1)  # else unused
        self.smear = nn.Parameter(torch.zeros(config.model_dim)) if config.smear else None
        for name, p in self.named_parameters():
            if config.init == "gpt2" and name.endswith(".weight"):  # Radford et al. 2019
                depth = 2 * config.num_layers if ".proj." in name else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name == "lm_head.weight" or ".proj." in name:
                nn.init.zeros_(p)
            elif tied and name == "tok_emb.weight":
                nn.init.normal_(p, std=config.tied_embed_init_std)
        half_head = config.model_dim // config.num_heads // 2
        exponents = torch.arange(half_head) / (config.rope_dims // 2 or half_head)
        frequencies = (config.rope_base ** -exponents).where(exponents < 1, 0)  # the rest: no turn
        if self.compute_dtype == torch.bfloat16:
            # The published trainer starts in bfloat16: equal seeds and its weights need the same.
            for tensor in (*self.parameters(), frequencies):
                tensor.data.copy_(tensor.data.bfloat16())
            if config.optimizer == "muon" and not (config.weight_decay or config.embed_float32):
                self.tok_emb.bfloat16()  # as published; small updates and decay would vanish there
        length = max(config.train_seq_len, config.eval_seq_len)
        angles = torch.outer(torch.arange(length).float(), frequencies)[:, None]  # (T, 1, C/2)
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last block's output (B, T, D) for tokens (B, T), int64."""
        cos, sin = self.rotary[:, :tokens.size(1)].to(self.compute_dtype)
        x0 = rms_norm(self.tok_emb(tokens).to(self.compute_dtype))
        if self.smear is not None:  # across documents, too (modded-nanogpt#130)
            x0 = x0 + self.smear.to(x0.dtype) * token_before(x0)
        blocks, start, end = list(self.blocks), self.config.loop_start, self.config.loop_end + 1
        order = blocks[:end] + self.loops * blocks[start:end] + blocks[end:]
        half = len(order) // 2
        x, lane, pushed = x0.clone(), None, []  # with x0 twice, block 0 would need its own graph
        for i, block in enumerate(order):
            if lane is None and i >= len(order) - self.config.lanes:
                lane = x.clone()
            if i >= half and pushed:
                x = x + self.skip_weights[i - half].to(x.dtype) * pushed.pop()
            x, lane = block(x, x0, cos, sin, lane)
            if i < half:
                pushed.append(x)
        return x if lane is None else lane

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits (B, T, V), float32, from `hidden`'s (B, T, D)."""
        cap = self.config.logit_softcap
        logits = linear(rms_norm(x), self.lm_head or self.tok_emb).float()
        return cap * (2 * torch.sigmoid(2 / cap * logits) - 1)  # cap * tanh(logits / cap), faster

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `hidden`'s (B, T, D), 0-d float32 in nats; targets of -1 are
        not counted. Logits whose exp cannot overflow need no pass for their maximum."""
        logits = self.logits(x)
        ids = torch.arange(logits.size(-1), dtype=torch.int32, device=logits.device)
        is_bounded = self.config.logit_softcap <= 64
        log_sum = logits.exp().sum(-1).log() if is_bounded else logits.logsumexp(-1)
        nats = log_sum - logits.where(ids == targets[..., None].int(), 0).sum(-1)
        counted = targets >= 0
        return (nats * counted).sum() / counted.sum()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The `loss` of tokens and targets (B, T), int64."""
        return self.loss(self.hidden(tokens), targets)

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
        for name in SDPA:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(kernel in name)
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # a refusal
            causal_attention(q, k, k, kernel).sum().backward()
            return kernel
    raise ValueError(f"ATTN={config.attn} runs no {config.dtype} heads of {q.size(3)}; try auto")

# ---- Optimizers ------------------------------------------------------------------------
# Each parameter is in one group. Rates follow from the step and the training clock alone.
def orthogonalize(updates: Tensor, steps: int, compute=torch.bfloat16) -> Tensor:
    """Move the singular values of wide matrices (N, rows, columns) close to 1, by Newton-Schulz
    steps in bfloat16 (Jordan 2024, kellerjordan.github.io/posts/muon), multiplied in `compute`."""
    x = updates.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        x = x.to(compute)
        gram = (x @ x.mT).bfloat16().to(compute)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(compute)
        x = torch.baddbmm(x, polynomial, x, beta=a).bfloat16()
    return x

class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum. The matrices of a shape and of its transpose are a bank; a rank
    orthogonalises its share of each bank, and has the momentum of all matrices of a shape
    as one tensor (n, rows, columns), in the state of the first."""
    def __init__(self, groups: list[dict], config: Config, ranks: Ranks):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.config, self.ranks = config, ranks
        self.compute = torch.bfloat16 if bfloat16_is_native(ranks.device) else torch.float32
        self.banks = {}  # by their sides: the matrices of each shape
        for p in self.param_groups[0]["params"]:
            self.banks.setdefault(tuple(sorted(p.shape)), {}).setdefault(p.shape, []).append(p)
        for shape, params in [pair for bank in self.banks.values() for pair in bank.items()]:
            self.state[params[0]]["momentum_buffer"] = params[0].new_zeros(len(params), *shape)

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices. Collective."""
        group, world_size = self.param_groups[0], self.ranks.world_size
        pending = []
        for bank in self.banks.values():
            share = math.ceil(sum(map(len, bank.values())) / world_size)  # the last may have less
            start = share * self.ranks.rank  # of this rank's share in the next shape
            wide = []
            for shape, params in bank.items():
                grads = torch.stack([p.grad for p in params])
                momentum = self.state[params[0]]["momentum_buffer"]
                momentum.mul_(group["momentum"]).add_(grads)
                mine = slice(max(0, start), max(0, start + share))
                start -= len(params)
                updates = grads[mine].add_(momentum[mine], alpha=group["momentum"])
                if self.config.muon_row_norm:
                    updates = F.normalize(updates, dim=2)
                updates = updates.bfloat16()
                wide.append(updates.mT if shape[0] > shape[1] else updates)
            wide.append(updates.new_zeros(share - sum(map(len, wide)), *wide[0].shape[1:]))
            updates = orthogonalize(torch.cat(wide), self.config.muon_backend_steps, self.compute)
            work = None
            if world_size > 1:  # as this rank goes on with the next bank
                part, updates = updates, updates.new_empty(share * world_size, *updates.shape[1:])
                gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer
                work = gather(updates, part, async_op=True)
            pending.append((bank, updates, work))
        for bank, updates, work in pending:
            if work:
                work.wait()
            for shape, params in bank.items():
                own, updates = updates[:len(params)], updates[len(params):]
                if shape[0] > shape[1]:
                    own = (own * (shape[0] / shape[1]) ** 0.5).mT
                own = own.to(torch.float32, memory_format=torch.contiguous_format)
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(own), alpha=-group["lr"])

def build_optimizers(model: GPT, config: Config, ranks: Ranks) -> list[torch.optim.Optimizer]:
    """Adam, with Muon for the blocks' matrices, or AdamW (arXiv:1711.05101)."""
    rates = {"embed": config.tied_embed_lr if config.tie_embeddings else config.embed_lr,
             "head": config.head_lr, "scalar": config.scalar_lr, "matrix": config.matrix_lr}
    if config.optimizer == "adamw":
        rates = dict.fromkeys(rates, config.adam_lr)
    groups = {kind: {"kind": kind, "params": [], "lr": lr, "base_lr": lr,
                     "weight_decay": 0.0 if kind == "scalar" else config.weight_decay}
              for kind, lr in rates.items()}
    kinds = {"tok_emb.weight": "embed", "lm_head.weight": "head"}
    for name, p in model.named_parameters():
        is_matrix = (p.ndim == 2 and name.startswith("blocks.")
                     and not matches(name, config.control_tensor_name_patterns))
        groups[kinds.get(name, "matrix" if is_matrix else "scalar")]["params"].append(p)
    muon = [Muon([groups.pop("matrix")], config, ranks)] if config.optimizer == "muon" else []
    adam = torch.optim.AdamW([g for g in groups.values() if g["params"]], eps=config.adam_eps,
                             betas=(config.beta1, config.beta2), fused=config.fused or None)
    return [adam, *muon]

def schedule(config: Config, step: int, elapsed_ms: float) -> tuple[float, float]:
    """Factor of the rates and Muon's momentum, `elapsed_ms` after the start. With a cap, the
    published warmdown ends there, others (cosine: arXiv:1608.03983) there or at ITERATIONS."""
    cap_ms = config.max_wallclock_seconds * 1000 or math.inf
    if config.lr_schedule == "cosine":
        steps = max(1, config.iterations - config.lr_warmup_steps)
        done = max((step - config.lr_warmup_steps) / steps, elapsed_ms / cap_ms)
        shape = (1 + math.cos(math.pi * min(1.0, done))) / 2
    elif config.warmdown_fraction:
        done = max(step / config.iterations, elapsed_ms / cap_ms)
        shape = max(0.0, 1 - done) / config.warmdown_fraction
    elif cap_ms < math.inf:
        warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
        shape = max(0.0, cap_ms - elapsed_ms) / max(warmdown_ms, 1e-9)
    else:
        shape = max(0, config.iterations - step) / max(config.warmdown_iters, 1e-9)
    factor = config.min_lr + (1 - config.min_lr) * min(1.0, shape)
    risen = min(1.0, step / max(1, config.muon_momentum_warmup_steps))
    momentum = (1 - risen) * config.muon_momentum_warmup_start + risen * config.muon_momentum
    return min((step + 1) / max(1, config.lr_warmup_steps), factor), momentum

# ---- Export ----------------------------------------------------------------------------
# Files may be hostile: reading them runs no code and takes no more memory than a model needs.
def quantize_tensor(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and their scales, as published: float16 (rows,) for a matrix, else float32."""
    is_matrix = tensor.ndim == 2
    rows = tensor.float() if is_matrix else tensor.float().reshape(1, -1)
    clip = torch.quantile(rows.abs(), 0.9999984, dim=1, keepdim=True)
    scale = clip.clamp_min(1) / 127 if is_matrix else (clip / 127).where(clip > 0, 1)
    quantized = rows.clamp(-clip, clip).div_(scale).round_().to(torch.int8)
    return quantized.view(tensor.shape), scale[:, 0].half() if is_matrix else scale.squeeze()

def round_rows(weight: Tensor, bits: int, clip: float, gram=None) -> tuple[Tensor, Tensor]:
    """A matrix as int8 values of `bits` bits and float16 scales (rows,). Rows are clipped at
    `clip` deviations; with `gram`, later columns make up for errors (arXiv:2210.17323)."""
    rows = weight.float()
    levels = 2 ** (bits - 1) - 1
    limits = clip * rows.std(1) if clip else rows.abs().amax(1)
    scales = (limits / levels).clamp_min(1e-7).half()
    if gram is None:
        return (rows / scales[:, None]).round().clamp(-levels, levels).to(torch.int8), scales
    order = gram.diag().argsort(descending=True)
    gram = gram.double() + 0.01 * gram.diag().mean().clamp_min(1e-7) * torch.eye(len(gram))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram[order][:, order]))
    rows = rows[:, order]
    rounded = torch.empty_like(rows)
    for i, factors in enumerate(torch.linalg.cholesky(inverse, upper=True).float().contiguous()):
        rounded[:, i] = (rows[:, i] / scales).round().clamp(-levels, levels)
        error = (rows[:, i] - rounded[:, i] * scales) / factors[i]
        rows[:, i:] -= torch.outer(error, factors[i:])
    return rounded[:, order.argsort()].to(torch.int8), scales

def quantize(state: dict, config: Config, grams: dict | None = None) -> tuple[dict, int]:
    """The int8 artifact and its payload in bytes; small tensors stay floats."""
    clip = config.export_clip
    published = config.export_bits == config.embed_bits == 8 and not clip and not grams
    about = {name: getattr(config, name.lower()) for name in KEPT}
    path = Path(config.tokenizer_path)
    about["TOKENIZER_PATH"] = path.name if path.is_absolute() else path.as_posix()
    artifact = {"__quant_format__": INT8_FORMAT, "about": json.dumps(about), "quantized": {},
                "scales": {}, "dtypes": {}, "passthrough": {}, "qmeta": {},
                "passthrough_orig_dtypes": {}}
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        if t.is_floating_point() and t.numel() > config.int8_keep_float_max_numel:
            bits = config.export_bits if name.startswith("blocks.") else config.embed_bits
            gram = (grams or {}).get(name)
            plain = published or t.ndim != 2 or matches(name, config.control_tensor_name_patterns)
            pair = quantize_tensor(t) if plain else round_rows(t, bits, clip, gram)
            artifact["quantized"][name], artifact["scales"][name] = pair
            artifact["dtypes"][name] = dtype
            if t.ndim == 2:
                artifact["qmeta"][name] = {"scheme": "per_row", "axis": 0}
            continue
        if t.is_floating_point():
            keep = matches(name, config.int8_keep_float_fp32_name_patterns)
            t = t.to(torch.float32 if keep else torch.float16)
        artifact["passthrough"][name] = t
        if t.dtype != state[name].dtype:
            artifact["passthrough_orig_dtypes"][name] = dtype
    parts = (artifact[part] for part in ("quantized", "scales", "passthrough"))
    return artifact, sum(t.nbytes for part in parts for t in part.values())

def saved(value) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()

def pack(state: dict, config: Config, grams: dict | None = None) -> tuple[bytes, dict]:
    """The artifact's file, in the smaller of two codings, and what the log says of it."""
    artifact, payload = quantize({name: t.cpu() for name, t in state.items()}, config, grams)
    raw = saved(artifact)
    packers = [zlib.compressobj(9), zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)]
    data = min((packer.compress(raw) + packer.flush() for packer in packers), key=len)
    return data, {"payload_bytes": payload, "raw_bytes": len(raw), "artifact_bytes": len(data),
                  "artifact_sha256": sha256(data).hexdigest()}

def dequantize(artifact: dict, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 tensors of an int8 artifact. Raises ValueError for a bad shape or scale."""
    state = dict(artifact["passthrough"])
    for name, quantized in artifact["quantized"].items():
        scale = artifact["scales"][name]
        rows = quantized.shape[:1] if quantized.ndim == 2 else ()
        require(quantized.dtype == torch.int8 and quantized.shape == wanted[name].shape
                and scale.shape == rows, f"{name} or its scale has another shape or type")
        require(((0 < scale) & (scale < math.inf)).all(), f"a scale of {name} is not positive")
        state[name] = quantized.float() * (scale[:, None] if scale.ndim else scale)
    return state

def read_archive(data: bytes):
    """Read what torch.save wrote; runs no code, inflates nothing, and compares checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        require(all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
                and sum(entry.file_size for entry in entries) <= len(data), "it has packed entries")
        require(archive.testzip() is None, "a checksum in it is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of an artifact, state dict or checkpoint. Raises ValueError."""
    wanted = model.state_dict()
    limit = sum(16 * t.numel() + 4096 for t in wanted.values()) + (1 << 20)  # a checkpoint's
    try:
        data = np.fromfile(path, np.uint8, limit + 1).tobytes()
        if not data.startswith(b"PK"):  # torch.save writes zip archives
            data = zlib.decompressobj().decompress(data, limit + 1)
        require(len(data) <= limit, f"it has more than the {limit} bytes that the model needs")
        state = read_archive(data)
        state = state.get("model", state)  # of a checkpoint
        if state.get("__quant_format__") == INT8_FORMAT:
            state = dequantize(state, wanted)
        model.load_state_dict(dict(state))  # a plain dict, without metadata
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

@torch.no_grad()
def calibrate(model: GPT, steps: list[list], ranks: Ranks) -> dict[str, Tensor]:
    """x^T x (columns, columns) of a layer's inputs in these batches, by weight. Collective."""
    model.apply(lambda module: setattr(module, "gram", 0.0))  # `linear` adds to it
    with torch.compiler.set_stance("force_eager"):
        for x, y in [pair for batches in steps for pair in batches]:
            model(x, y)
    grams = {f"{name}.weight": ranks.sum(layer.gram).cpu() for name, layer
             in model.named_modules() if isinstance(layer.gram, Tensor)}
    model.apply(lambda module: setattr(module, "gram", None))
    return grams

# ---- Training --------------------------------------------------------------------------
# A Trainer holds all that a step changes: its state undoes the warm-up and resumes a run, exactly.
class Clock:
    """The steps done, the training time on which the ranks agreed last, and signals to stop.
    Agreeing waits for the device; in between, time advances by the mean step."""
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
        """Keep a signal until the ranks agree on it. A second Ctrl-C ends this process."""
        now = time.monotonic()
        if number == signal.SIGINT and self.signals and now > self.signals[0][1] + 1:
            os._exit(128 + number)  # sys.exit would wait for other ranks
        if not self.signals and self.ranks.rank == 0:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"stopping after this step or score; Ctrl-C again: at once\n")
        self.signals.append((number, now))

class Trainer:
    """Model, optimizers, average, clock. Raises ValueError if INIT_FROM does not fit."""
    def __init__(self, config: Config, ranks: Ranks, init_from: str = ""):
        self.config, self.ranks, self.clock = config, ranks, Clock(config, ranks)
        torch.manual_seed(config.seed)
        self.model = GPT(config)
        if init_from:
            load_weights(self.model, init_from)
        self.model.to(ranks.device)
        self.optimizers = build_optimizers(self.model, config, ranks)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.dtype == "float16")
        self.ddp = self.model  # ranks start with rank 0's weights and average gradients
        if ranks.world_size > 1:
            torch._dynamo.config.optimize_ddp = False  # or graphs are cut at buckets' ends
            self.model._ddp_params_and_buffers_to_ignore = ["rotary"]  # the same everywhere
            self.ddp = DDP(self.model, gradient_as_bucket_view=True, bucket_cap_mb=1 << 20)
        self.average = [p.data.float().clone() for p in self.model.parameters() if config.ema_decay]

    def train_step(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Make one update from micro-batches of inputs and targets (B, T), int64. Return this
        rank's mean loss in nats and the norm of all gradients: float32, 0-d. Collective."""
        config = self.config
        factor, momentum = schedule(config, self.clock.step, self.clock.time_ms)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
                group["momentum"] = momentum  # Adam ignores it
        losses = torch.zeros((), device=self.ranks.device)
        for i, (x, y) in enumerate(batches, 1):
            self.ddp.require_backward_grad_sync = i == len(batches)  # once a step
            loss = self.ddp(x, y) * (1 / len(batches))
            self.scaler.scale(loss).backward()
            losses += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads).nan_to_num(nan=math.inf, posinf=math.inf)
        if config.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), config.grad_clip_norm, norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        if self.average:  # float32 keeps small updates; short runs forget sooner
            weights = [p.detach().float() for p in self.model.parameters()]
            share = max(1 - config.ema_decay, 9 / (10 + self.clock.step))
            torch._foreach_lerp_(self.average, weights, share)
        return losses, norm

    def state_dict(self) -> dict:
        """All that a step changes; the tensors are the live ones."""
        return {"step": self.clock.step, "time_ms": self.clock.time_ms,
                "model": self.model.state_dict(), "scaler": self.scaler.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers], "average": self.average}

    def load_state_dict(self, state: dict) -> None:
        """Return to a `state_dict` and start the clock. `param_groups` become new objects."""
        self.model.load_state_dict(dict(state["model"]))  # a plain dict, without metadata
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.scaler.load_state_dict(state["scaler"])
        for mine, read in zip(self.average, state["average"], strict=True):
            mine.copy_(read.view_as(mine))
        self.clock.set(int(state["step"]), float(state["time_ms"]))

# ---- Checkpoints and the loop ----------------------------------------------------------
# Ranks branch together, by the step or by what they agreed on. Rank 0 writes, all ranks read.
def list_checkpoints(config: Config) -> list[Path]:
    """The checkpoints of RUN_ID by their steps, or of every run by their times; newest first."""
    pattern = (re.escape(config.run_id) or ".+") + r"_\d{8,}(_[0-9a-f]{16})?\.pt"  # 1: a hash
    place = Path(config.out_dir or "logs")
    files = place.glob("checkpoints/*.pt" if config.out_dir else "*/checkpoints/*.pt")
    found = [path for path in files if re.fullmatch(pattern, path.name) and path.exists()]
    return sorted(found, key=lambda p: (config.run_id or p.stat().st_mtime_ns, p.name))[::-1]

def find_checkpoint(config: Config) -> dict | None:
    """The checkpoint RESUME; "auto": the newest readable one, or None. Raises ValueError."""
    paths = list_checkpoints(config) if config.resume == "auto" else [config.resume]
    for path in paths:
        try:
            state = read_archive(Path(path).read_bytes())
            require(state.get("format") == CHECKPOINT_FORMAT, "it is of another version")
            return {**state, "path": str(path), "run_id": str(state["config"]["run_id"])}
        except Exception as error:  # hostile or damaged files fail in many ways
            print(f"warning: checkpoint {path} cannot be used: {error}", file=sys.stderr)
    require(not paths, f"RESUME={config.resume}: no checkpoint can be used; change it or RUN_ID")
    return None

def resume(trainer: Trainer, loader: TokenLoader, state: dict) -> None:
    """Continue from a checkpoint. Raises ValueError if settings, text or tensors do not fit."""
    try:
        old = {**asdict(Config()), **state["config"]}  # new ones: defaults; gone: off
        new = {k: v and "unknown to this script" for k, v in old.items()} | asdict(trainer.config)
        may_differ = {f.name for f in fields(Config) if f.metadata["kind"] == "free"}
        refused = [f"{name.upper()} was {old[name]!r} and is {new[name]!r}"
                   for name in old if name not in may_differ and old[name] != new[name]]
        require(not refused, f"it was trained with other settings: {'; '.join(refused)}")
        step, time_ms = state["step"], state["time_ms"]
        require(0 <= step <= trainer.config.iterations and 0 <= time_ms < math.inf,
                f"it is of step {step} and {time_ms} ms, not within ITERATIONS")
        seen = state["training_tokens"]
        require(seen == loader.tokens, f"it read {seen} tokens, DATA_PATH has {loader.tokens}")
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

def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; never if that is 0."""
    return every > 0 and step % every == 0

def warm_up(trainer: Trainer, loader: TokenLoader | None, log: RunLog) -> None:
    """Take WARMUP_STEPS steps, undo them, start the clock."""
    config, clock = trainer.config, trainer.clock
    before = saved(trainer.state_dict())
    for i in range(1, config.warmup_steps + 1 if config.iterations else 0):
        trainer.train_step(loader.batches(0)[:1])
        log.line(f"warmup_step:{i}/{config.warmup_steps}")
        clock.agree()
        if clock.stop_signal:
            break
    gc.collect()
    trainer.load_state_dict(read_archive(before))

def show(score: dict, digits: int = 8) -> str:
    """The loss and the bits per byte of a score, as the published trainer prints them."""
    return f"val_loss:{score['val_loss']:.{digits}f} val_bpb:{score['val_bpb']:.{digits}f}"

def validate(trainer: Trainer, validation: Validation, log: RunLog) -> None:
    """Log the model's score, off the clock. Collective."""
    clock = trainer.clock
    with clock.paused():
        score = validation.score(trainer.model)
        log.event("val", f"step:{clock.step}/{clock.iterations} {show(score, 4)} train_time:"
                  f"{clock.time_ms:.0f}ms step_avg:{clock.time_ms / max(clock.step, 1):.2f}ms"
                  f"{validation.label}{' weights:live' * bool(trainer.average)}", step=clock.step,
                  train_time_ms=clock.time_ms, **score)
        gc.collect()

def log_step(trainer: Trainer, loader: TokenLoader, log: RunLog, losses: Tensor, norm: Tensor,
             since: tuple[int, float]) -> None:
    """Log the step just done; `since`: step and ms of the line before. Collective."""
    config, step, time_ms = trainer.config, trainer.clock.step, trainer.clock.time_ms
    loss = trainer.ranks.sum(losses).item() / trainer.ranks.world_size
    lr, grad_norm = trainer.optimizers[-1].param_groups[0]["lr"], norm.item()
    rate = 1000 * config.train_batch_tokens * (step - since[0]) / max(time_ms - since[1], 1e-6)
    epoch = step * loader.pieces * loader.stride / loader.tokens
    cap_ms = trainer.clock.cap_ms
    eta_s = max(0.0, min(cap_ms, config.iterations * time_ms / step) - time_ms) / 1000
    cap = f" cap:{time_ms / cap_ms:.1%}" if cap_ms < math.inf else ""
    log.event("train", f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:"
              f"{time_ms:.0f}ms step_avg:{time_ms / step:.2f}ms lr:{lr:.2e} "
              f"grad_norm:{grad_norm:.3f} tok_per_sec:{rate:.0f}{cap} eta:{eta_s / 60:.1f}m "
              f"epoch:{epoch:.3f}", step=step, train_loss=loss, train_time_ms=time_ms,
              step_avg_ms=time_ms / step, lr=lr, grad_norm=grad_norm, tok_per_sec=rate,
              eta_s=eta_s, epoch=epoch, mem_mib=trainer.ranks.peak_mib())

def train(trainer: Trainer, loader: TokenLoader, validation: Validation, log: RunLog) -> None:
    """Train until ITERATIONS, the cap or a signal. Raises FloatingPointError if it diverges."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    first_step, last_line, batches = clock.step, (clock.step, clock.time_ms), []
    while True:
        done = clock.step >= config.iterations or clock.time_ms >= clock.cap_ms
        progress = max(clock.step / max(1, config.iterations), clock.time_ms / clock.cap_ms)
        trainer.model.loops = config.num_loops if done or progress >= config.loop_at else 0
        # A checkpoint comes first: validation and export can take long.
        saves = is_due(clock.step, config.checkpoint_every) or (done and config.checkpoint_every)
        if clock.step > first_step and (saves or clock.stop_signal) and ranks.rank == 0:
            save_checkpoint(trainer, loader, log)
        if done or clock.stop_signal:
            return
        if is_due(clock.step, config.val_loss_every):
            validate(trainer, validation, log)
            if clock.stop_signal:
                continue  # to the checkpoint above
        loss, norm = trainer.train_step(batches or loader.batches(clock.step))
        step = clock.step = clock.step + 1
        mean_ms = clock.time_ms / max(step - 1, 1)
        clock.time_ms += mean_ms
        batches = loader.batches(step) if step < config.iterations else []  # as the device works
        # Now and then, and near the cap at each step, the ranks agree on time, signals and faults.
        is_logged = step <= 10 or is_due(step, config.train_log_every)
        if (is_logged or step % 10 == 0 or step == config.iterations or ranks.device.type == "cpu"
                or mean_ms > 1000 or clock.time_ms > clock.cap_ms - 20 * mean_ms
                or is_due(step, config.val_loss_every) or is_due(step, config.checkpoint_every)):
            may_overflow = config.dtype == "float16" and trainer.scaler.get_scale() > 2**-20
            if clock.agree(not (loss if may_overflow else loss + norm).isfinite()):
                log.event("nonfinite", step=step)
                raise FloatingPointError(f"the loss or gradient near step:{step} is not finite; "
                                         "lower the rates or set GRAD_CLIP_NORM=1")
        if is_logged or clock.time_ms >= clock.cap_ms:
            log_step(trainer, loader, log, loss, norm, last_line)
            last_line = (step, clock.time_ms)

def export(trainer: Trainer, loader: TokenLoader | None, validation: Validation,
           log: RunLog) -> None:
    """Write final_model.pt and final_model.int8.ptz, and read the latter back. Calibration
    reads training text: it is on the clock. A signal waits for the files. Raises OSError."""
    config, ranks, clock = trainer.config, trainer.ranks, trainer.clock
    for p in trainer.model.parameters() if trainer.average else ():
        p.data.copy_(trainer.average.pop(0))
    state = trainer.model.state_dict()
    clock.set(clock.step, clock.time_ms)  # the last checkpoint is not training
    with clock.paused():
        if ranks.rank == 0:  # the floats first: nothing below can lose them
            floats = saved({name: t.cpu() for name, t in state.items()})
            try:
                write_whole(Path(config.out_dir, "final_model.pt"), floats)
            except OSError as error:  # a full disk may still hold the artifact
                log.line(f"warning: {error}")
    batches = [loader.batches(clock.step + i) for i in range(config.gptq_batches)]
    grams = calibrate(trainer.model, batches, ranks) if batches else None
    validate(trainer, validation, log)
    if clock.step < config.iterations:
        log.line(f"stopping_early: wallclock_cap train_time:{clock.time_ms:.0f}ms "
                 f"step:{clock.step}/{config.iterations}")
    log.line(f"peak memory allocated: {ranks.peak_mib() or 'unknown'} MiB")
    if ranks.rank == 0:
        path, code_bytes = Path(config.out_dir, MODEL_FILE), len(log.code)
        if ranks.device.type == "cuda":  # NCCL ends waiting ranks after ten minutes
            torch.set_num_threads(os.cpu_count() or 1)  # torchrun gives one
        data, about = pack(state, config, grams)
        write_whole(path, data)
        ratio = sum(t.nbytes for t in state.values()) / about["payload_bytes"]
        log.event("export", f"""Serialized model: {len(floats)} bytes
Code size: {code_bytes} bytes
Total submission size: {len(floats) + code_bytes} bytes
Serialized model int8+zlib: {len(data)} bytes \
(payload:{about["payload_bytes"]} raw_torch:{about["raw_bytes"]} payload_ratio:{ratio:.2f}x)
Total submission size int8+zlib: {len(data) + code_bytes} bytes""",
                  step=clock.step, model_bytes=len(floats), code_bytes=code_bytes,
                  code_sha256=sha256(log.code).hexdigest(), **about)
        if 0 < config.size_cap < len(data) + code_bytes:
            log.line(f"WARNING: larger than SIZE_CAP={config.size_cap}; lower EXPORT_BITS")
        load_weights(trainer.model, path)
    for p in trainer.model.parameters() if ranks.world_size > 1 else ():
        dist.broadcast(p.data, 0)  # the other ranks may not see the file
    clock.agree()

def log_final_scores(trainer: Trainer, validation: Validation, log: RunLog) -> None:
    """Score what the artifact holds. Raises FloatingPointError if that is not finite."""
    config, step, label = trainer.config, trainer.clock.step, validation.label
    if config.eval_seq_len or config.eval_stride:
        score = validation.score(trainer.model, config.eval_seq_len, config.eval_stride)
        took = f"eval_time:{score['eval_time_ms']:.0f}ms{label}"
        log.event("windows", f"windows {show(score)} {took}", step=step, **score)
    score = validation.score(trainer.model)
    took = f"eval_time:{score['eval_time_ms']:.0f}ms{label}"
    log.event("final", f"final_int8_zlib_roundtrip {show(score, 4)} {took}\n"
              f"final_int8_zlib_roundtrip_exact {show(score)}{label}", step=step, **score)
    if not math.isfinite(score["val_loss"]):
        raise FloatingPointError("the final score is not finite; lower the rates")

# ---- A run -----------------------------------------------------------------------------
# `run` wires the parts. Nothing is written before all is checked; errors of the user are sentences.
def resolve(config: Config, ranks: Ranks) -> Config:
    """Replace automatic settings with their values; round the batch. Raises ValueError."""
    device = ranks.device.type
    other = "float16" if device == "cuda" else "float32"  # T4: fast in float16 only
    builds = device == "cpu" and Path(sysconfig.get_path("include"), "Python.h").exists()
    builds = builds and sys.platform == "linux" and shutil.which(os.environ.get("CXX", "g++"))
    kind = "1" if device == "cuda" else "blocks" if builds else "0"
    chosen = {"dtype": "bfloat16" if bfloat16_is_native(ranks.device) else other,
              "compile": kind if config.iterations else "0"}
    config = replace(config, **{k: v for k, v in chosen.items() if getattr(config, k) == "auto"})
    # A step reads 8 spans, fewer if rows are few: 1, 2, 4 and 8 ranks compute the same.
    length = config.train_seq_len
    spans = 2 ** int(math.log2(min(8, max(1, config.train_batch_tokens / length))))
    spans_per_rank = config.grad_accum_steps or math.ceil(spans / ranks.world_size)
    least = spans_per_rank * ranks.world_size * length
    tokens = max(1, round(config.train_batch_tokens / least)) * least
    if tokens != config.train_batch_tokens and ranks.rank == 0:
        print(f"warning: TRAIN_BATCH_TOKENS={tokens}, a multiple of {least}", file=sys.stderr)
    rows = tokens // (ranks.world_size * length)  # of a rank
    width = config.model_dim * getattr(torch, config.dtype).itemsize
    limits = {"cpu": (1 << 21) // width, "mps": length}  # a CPU's cache; all scores of a row
    if device == "cuda":  # shares of the memory, by peaks measured on an H100
        per_token = config.num_layers * width * (11 + 2 * config.mlp_mult) + 6 * config.vocab_size
        share = 0.35 if config.compile == "1" else 0.12
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        limits["cuda"] = -ranks.max(-share * memory / per_token)[0]  # of the smallest GPU
    limit = config.micro_batch_tokens or limits[device]
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n * length <= limit]
    run_id = config.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
    path = Path(config.tokenizer_path)
    digest = sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()
    require(config.tokenizer_sha256 in ("", digest), f"TOKENIZER_PATH={path} is missing "
            f"or not the model's, of TOKENIZER_SHA256={config.tokenizer_sha256}; use its data")
    return replace(config, device=device, run_id=run_id, out_dir=config.out_dir or f"logs/{run_id}",
                   attn=choose_attention(config, ranks.device), grad_accum_steps=spans_per_rank,
                   train_batch_tokens=tokens, micro_batch_tokens=max(fitting, default=1) * length,
                   fused=config.fused and device != "mps", tokenizer_sha256=digest)

def announce(trainer: Trainer, loader: TokenLoader | None, validation: Validation, log: RunLog,
             overrides: dict) -> None:
    """Log data, model and settings, in lines that begin as the published trainer's."""
    c, ranks, model = trainer.config, trainer.ranks, trainer.model
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
model_params:{sum(p.numel() for p in model.parameters())}
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

def run(config: Config, overrides: dict, source: str) -> int:
    """Train, export and score. Returns the exit status; raises ValueError, OSError and others."""
    ranks = start_ranks(config)
    torch.set_float32_matmul_precision(config.matmul_precision)
    checkpoint = find_checkpoint(config) if config.resume else None
    run_id = config.run_id or (checkpoint["run_id"] if checkpoint else "")
    config = resolve(replace(config, run_id=run_id), ranks)
    exports = config.iterations > 0 or not config.init_from.endswith(".ptz")  # or only scores
    model = Path("logs", config.run_id, MODEL_FILE)  # in OUT_DIR, a model may be replaced
    require(checkpoint or not exports or model.parent != Path(config.out_dir) or not model.exists(),
            f"{model} exists; set another RUN_ID, or INIT_FROM={config.run_id} to use it")
    validation = Validation(config, ranks)
    reads = config.iterations or (exports and config.gptq_batches)
    loader = TokenLoader(config, ranks) if reads else None
    facts = {name: getattr(config, f.name) for name, f in FIELDS.items()
             if f.metadata["kind"] != "free" or f.type is not str}  # paths, kernels may differ
    facts |= {"the validation text": sha256(validation.tokens).digest(),
              "the training tokens": loader and loader.tokens,
              "the checkpoint": checkpoint and (checkpoint["step"], checkpoint["time_ms"])}
    own = [zlib.crc32(repr(value).encode()) for value in facts.values()]
    differs = ranks.max(*(a != b for a, b in zip(own, ranks.max(*own))))
    wrong = [name for name, is_wrong in zip(facts, differs) if is_wrong]
    require(not wrong, f"the ranks do not agree on {', '.join(wrong)}")
    trainer = Trainer(config, ranks, "" if checkpoint else config.init_from)
    clock = trainer.clock
    if checkpoint:
        resume(trainer, loader, checkpoint)
    if ranks.rank == 0:
        Path(config.out_dir).mkdir(parents=True, exist_ok=True)
        require(os.access(config.out_dir, os.W_OK), f"OUT_DIR={config.out_dir!r} is not writable")
    log = RunLog(config.run_id, source, is_main=ranks.rank == 0)
    announce(trainer, loader, validation, log, overrides)
    if checkpoint:
        log.event("resume", f"resumed: step:{clock.step} train_time:{clock.time_ms:.0f}ms "
                  f"from {checkpoint['path']}", step=clock.step, train_time_ms=clock.time_ms,
                  file=checkpoint["path"])
    del checkpoint
    gc.disable()  # it slows compiling, and one rank's collection would hold up the others
    if config.iterations and config.compile != "0":  # before the first step, of all ranks
        log.line("compiling: a minute or more the first time; COMPILE=0 avoids it")
        for part in [trainer.model] if config.compile == "1" else trainer.model.blocks:
            part.compile(dynamic=False, fullgraph=True)
        if config.compile == "blocks":
            trainer.model.loss = torch.compile(trainer.model.loss, dynamic=False, fullgraph=True)
        for loops in sorted({0, config.num_loops}):  # two graphs if blocks run again
            trainer.model.loops = loops
            trainer.model(*loader.batches(0)[0]).backward()
        trainer.model.zero_grad(set_to_none=True)
    stops = [number for number in signal.Signals  # not those that nohup and shells ignore
             if number.name in STOPS and signal.getsignal(number) != signal.SIG_IGN]
    for number in stops:
        signal.signal(number, clock.on_signal)
    warm_up(trainer, loader, log)
    train(trainer, loader, validation, log)
    if exports and not clock.stop_signal:
        export(trainer, loader, validation, log)  # a signal that comes now waits for its files
    if clock.stop_signal:
        hint = "set RESUME=auto to go on" if list_checkpoints(config) else "there is no checkpoint"
        log.line(f"stopped: signal {clock.stop_signal:g} after step:{clock.step}; {hint}")
    else:
        for number in stops:
            signal.signal(number, signal.SIG_DFL)  # the files are written: end at once
        log_final_scores(trainer, validation, log)
    ranks.max(0)  # wait for all: gloo aborts in a rank whose peer has left
    return 128 + int(clock.stop_signal) if clock.stop_signal else 0

def main() -> int:
    """Run the script with this process's arguments and environment; return the exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print_help()
        return 0
    status = 1
    try:
        status = run(*load_config(sys.argv[1:], {**os.environ}), Path(__file__).read_text("utf-8"))
    except (ValueError, OSError, FloatingPointError, KeyboardInterrupt,
            dist.DistNetworkError) as error:
        print(f"train_gpt.py: {str(error) or 'stopped'}", file=sys.stderr, flush=True)
    except torch.OutOfMemoryError as error:
        print(f"train_gpt.py: {error}\nTry a lower MICRO_BATCH_TOKENS", file=sys.stderr)
    if dist.is_initialized():  # threads of gloo may abort Python's own end
        os._exit(status)
    return status

if __name__ == "__main__":
    sys.exit(main())
