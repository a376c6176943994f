"""Train the best language model that fits in a fixed number of bytes and of minutes.

    python train_gpt.py --help                              every variable, its default and unit
    python train_gpt.py NUM_LAYERS=4 DEVICE=cpu             one device; by default CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py   eight GPUs: the published baseline
    ITERATIONS=0 INIT_FROM=final_model.int8.ptz OUT_DIR=/tmp/x python train_gpt.py      score only

Variables are set in the environment or as NAME=value behind the script; arguments win. Shapes: B
rows, T tokens, V vocabulary, D width, H query heads, K key/value heads, C head width, N any number.
"""
import copy
import difflib
import gc
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ---- Configuration -----------------------------------------------------------------------------
STARTED = time.monotonic()  # of the process, but for its imports
CONTROL = ("attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,"
           "skip_weight,skip_weights")

def require(condition, message: str) -> None:
    """Raises ValueError with a message for the user unless the condition holds."""
    if not condition:
        raise ValueError(message)

def var(default, unit: str, text: str, low: float = 0, free: bool = False):
    """A variable: default, unit (or its choices, joined by "|"), line of help, smallest number, and
    whether a resumed run may change it, because what is trained stays the same mathematics."""
    return field(default=default, metadata={"unit": unit, "help": text, "low": low, "free": free})

free = partial(var, free=True)

@dataclass(frozen=True)
class Config:
    """Every setting of a run. A field is the variable of the same name in capitals."""
    # Run and data
    run_id: str = free("", "name", "names the logs, logs/RUN_ID.txt and .jsonl; empty: a new name")
    seed: int = var(1337, "", "seed of the initial weights, and of LOADER=shuffled")
    out_dir: str = free(".", "folder", "receives final_model.pt and final_model.int8.ptz")
    init_from: str = free("", "file", "start from this artifact, state dict or checkpoint")
    data_path: str = free("./data/datasets/fineweb10B_sp1024", "", "folder of token shards")
    tokenizer_path: str = free("./data/tokenizers/fineweb_1024_bpe.model", "", "or byte260, gpt2")
    loader: str = var("sequential", "sequential|shuffled", "shuffled: rows in an order from SEED")
    overfit: bool = var(False, "0|1", "every step trains on the first rows again")
    # Device
    device: str = free("auto", "auto|cuda|mps|cpu", "auto: the first of these that is there")
    dtype: str = var("auto", "auto|bfloat16|float32|float16", "auto: bfloat16 where it is native")
    matmul_precision: str = free("high", "highest|high", "of float32 products; high: TF32 on CUDA")
    compile: str = free("auto", "auto|0|1", "torch.compile; auto: on CUDA, and on Linux with g++")
    attn: str = free("auto", "auto|flash|cudnn|efficient|math", "attention kernel, where it runs")
    # Length, validation and log
    iterations: int = var(20000, "steps", "steps to train; the wall clock may end the run sooner")
    max_wallclock_seconds: float = var(600.0, "s", "cap of the training clock; 0: none")
    warmup_steps: int = free(20, "steps", "unclocked, to prime the kernels; then undone")
    warmdown_iters: int = var(3000, "steps", "last steps, of falling learning rate", low=-math.inf)
    train_batch_tokens: int = var(393216, "tokens", "a step, over all ranks and spans", low=1)
    train_seq_len: int = var(4096, "tokens", "row length in training and validation", low=1)
    grad_accum_steps: int = free(0, "spans", "read by a rank in a step; 0: 8, over all ranks")
    micro_batch_tokens: int = free(0, "tokens", "a forward at most, or a row; 0: by device")
    val_loss_every: int = free(1000, "steps", "between validations; 0: only at the end")
    val_batch_size: int = free(524288, "tokens", "a validation forward at most, over all spans")
    train_log_every: int = free(200, "steps", "between log lines after the first ten; 0: no more")
    # Model
    vocab_size: int = var(1024, "tokens", "size of the tokenizer's vocabulary", low=1)
    vocab_pad: int = var(1, "rows", "tables have a multiple of this; the softmax sees them", low=1)
    num_layers: int = var(9, "blocks", "the first half feeds skip connections to the second", low=1)
    model_dim: int = var(512, "", "width of the residual stream", low=1)
    num_heads: int = var(8, "heads", "query heads; they share MODEL_DIM", low=1)
    num_kv_heads: int = var(4, "heads", "key/value heads; divides NUM_HEADS", low=1)
    mlp_mult: int = var(2, "times MODEL_DIM", "hidden width of the MLP", low=1)
    tie_embeddings: bool = var(True, "0|1", "one table for input and output")
    rope_base: float = var(10000.0, "", "base of the rotary frequencies", low=1)
    logit_softcap: float = var(30.0, "", "tanh keeps logits below this", low=1e-3)
    qk_gain_init: float = var(1.5, "", "initial gain of the queries, learned per head")
    tied_embed_init_std: float = var(0.005, "", "deviation of the tied table's initial values")
    init: str = var("baseline", "baseline|gpt2", "gpt2: normal, 0.02, less in projections")
    # Optimizers
    optimizer: str = var("muon", "muon|adamw", "muon: with Adam for all but matrices of blocks")
    adam_lr: float = var(3e-4, "", "OPTIMIZER=adamw, everything; the next five are for muon")
    embed_lr: float = var(0.6, "", "Adam, embedding when untied")
    head_lr: float = var(0.008, "", "Adam, output head when untied")
    tied_embed_lr: float = var(0.03, "", "Adam, embedding when tied")
    matrix_lr: float = var(0.02, "", "Muon, matrices inside blocks")
    scalar_lr: float = var(0.02, "", "Adam, vectors and control tensors")
    muon_momentum: float = var(0.99, "", "Muon's momentum after its warm-up")
    muon_backend_steps: int = var(5, "steps", "Newton-Schulz steps of Muon")
    muon_momentum_warmup_start: float = var(0.92, "", "Muon's momentum at step 0")
    muon_momentum_warmup_steps: int = var(1500, "steps", "of the momentum's warm-up; 0: none")
    beta1: float = var(0.9, "", "Adam's decay of the first moment")
    beta2: float = var(0.95, "", "Adam's decay of the second moment")
    adam_eps: float = var(1e-8, "", "Adam's epsilon")
    fused: bool = free(True, "0|1", "Adam in one kernel; not on MPS")
    weight_decay: float = var(0.0, "", "of matrices and embeddings a step, times their rate")
    lr_schedule: str = var("warmdown", "warmdown|cosine", "cosine ignores WARMDOWN_ITERS")
    lr_warmup_steps: int = var(0, "steps", "first steps, of a rising learning rate")
    min_lr: float = var(0.0, "times peak", "learning rate at which the schedule ends")
    grad_clip_norm: float = var(0.0, "", "clip gradients to this global norm; 0: off")
    # Checkpoints and faults
    checkpoint_every: int = free(0, "steps", "between checkpoints; 0: none")
    checkpoint_dir: str = free("", "folder", "of the checkpoints; empty: OUT_DIR/checkpoints")
    keep_checkpoints: int = free(2, "files", "the newest ones of the run are kept", low=1)
    resume: str = free("", "auto, file", "go on from this checkpoint; auto: the newest whole one")
    # Export
    control_tensor_name_patterns: str = var(CONTROL, "names", "go to Adam, not to Muon")
    int8_keep_float_fp32_name_patterns: str = free(CONTROL, "names", "stay float32; else as above")
    int8_keep_float_max_numel: int = free(65536, "elements", "tensors up to this size stay floats")

    def __post_init__(self):
        for f in fields(self):
            value, low = getattr(self, f.name), f.metadata["low"]
            require(f.type not in (int, float) or low <= value < math.inf,
                    f"{f.name.upper()}={value} must be a finite number of {low} or more")
        require(self.model_dim % (2 * self.num_heads) == 0, f"MODEL_DIM={self.model_dim} must be a "
                f"multiple of 2 * NUM_HEADS = {2 * self.num_heads}: heads have an even width")
        require(self.num_heads % self.num_kv_heads == 0,
                f"NUM_KV_HEADS={self.num_kv_heads} must divide NUM_HEADS={self.num_heads}; 1 does")
        require(Path(self.run_id).name == self.run_id, f"RUN_ID={self.run_id!r} is no plain name")

def parse_value(f, text: str):
    """The value that `text` means for a field; ValueError names the variable and what works."""
    choices = f.metadata["unit"].split("|") + ["true", "false"] * (f.type is bool)
    text = text.lower() if (chosen := len(choices) > 1) else text
    require(not chosen or text in choices, f"{f.name.upper()}={text!r} is none of {choices}")
    try:
        return text in ("1", "true") if f.type is bool else f.type(text)
    except ValueError:
        message = f"{f.name.upper()}={text!r} is no {f.type.__name__}, as {f.default} is"
        raise ValueError(message) from None

def load_config(arguments: list[str], environment: dict[str, str]) -> tuple[Config, dict]:
    """Returns the configuration and, for each variable that was set, its text and who set it,
    "argument" or "environment". ValueError: a bad value, an unknown or misspelt name."""
    known = {f.name.upper(): f for f in fields(Config)}
    texts = {name: (environment[name], "environment") for name in known if name in environment}
    # Clusters and containers set these, and mean something else.
    for name in environment.keys() - known.keys() - {"COMPILER", "MODEL_DIR", "DATASET_PATH"}:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
        require(not near, f"{name}={environment[name]!r} in the environment is no variable of this "
                f"script; did you mean {''.join(near)}? If not, unset {name}")
    for argument in arguments:
        name, equals, text = argument.partition("=")
        near = difflib.get_close_matches(name.lstrip("-").upper(), known, 1) or ["NAME"]
        require(name in known and equals, f"unknown argument {argument!r}; did you mean "
                f"{near[0]}={text or 'value'}? --help lists all variables")
        texts[name] = (text, "argument")
    values = {known[name].name: parse_value(known[name], text) for name, (text, _) in texts.items()}
    control = values.get("control_tensor_name_patterns", CONTROL)
    values.setdefault("int8_keep_float_fp32_name_patterns", control)
    return Config(**values), texts

def matches(name: str, patterns: str) -> bool:
    """Whether one of the comma-separated patterns is part of the tensor's name."""
    return any(pattern and pattern in name for pattern in patterns.split(","))

# ---- Ranks and device --------------------------------------------------------------------------
@dataclass(frozen=True)
class Ranks:
    """This process among all. Every collective is the identity when there is one process."""
    rank: int
    world_size: int
    device: torch.device

    def reduce(self, tensor: Tensor, operation=dist.ReduceOp.SUM) -> Tensor:
        """Sums `tensor` over the ranks, or as `operation` says, in place, and returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, operation)
        return tensor

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over the ranks, once all of them are here."""
        device = self.device if self.world_size > 1 else "cpu"  # MPS has no float64
        largest = torch.tensor(values, dtype=torch.float64, device=device)
        return self.reduce(largest, dist.ReduceOp.MAX).tolist()

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the main rank's tensor, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors (N, ...) of all ranks, one after another: (world * N, ...)."""
        if self.world_size == 1:
            return tensor
        whole = tensor.new_empty(self.world_size * len(tensor), *tensor.shape[1:])
        dist.all_gather(list(whole.chunk(self.world_size)), tensor)
        return whole

    def now_ms(self) -> float:
        """The time in ms, when the device has done all that it was asked to do."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()

def start_ranks(config: Config) -> Ranks:
    """Reads torchrun's variables, picks the device and joins the process group if there is one."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **os.environ}
    rank, world_size, local_rank = (int(values[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    mps = torch.backends.mps.is_available() and world_size == 1  # it has no collectives
    usable = ["cuda"] * torch.cuda.is_available() + ["mps"] * mps + ["cpu"]
    kind = usable[0] if config.device == "auto" else config.device
    require(kind in usable, f"DEVICE={kind} cannot be used here, but {' and '.join(usable)} can")
    if kind == "cuda":
        gpus = torch.cuda.device_count()
        require(local_rank < gpus, f"LOCAL_RANK={local_rank} of {gpus} GPUs: start fewer processes")
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in values:  # the ranks of a machine share its cores
        local_size = int(values.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    if world_size > 1:
        attempt, keys = values.get("TORCHELASTIC_RESTART_COUNT", "0"), {}
        if attempt != "0":  # torchrun's store still has the addresses of processes that have ended
            store = dist.TCPStore(values["MASTER_ADDR"], int(values["MASTER_PORT"]), world_size)
            store = dist.PrefixStore(attempt, store)
            keys = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", **keys)
    return Ranks(rank, world_size, torch.device(kind, local_rank if kind == "cuda" else None))

def bfloat16_is_native(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware, CPUs with AMX or AVX512-BF16 included."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, probe, bool)() for probe in probes)

def split_batch(config: Config, world_size: int) -> tuple[int, int]:
    """Returns spans per rank and tokens per step, rounded to whole rows. A step reads 8 spans of
    the stream, or 4, 2, 1 if it has fewer rows, where the world size divides that: 1, 2, 4 and 8
    ranks compute the same. Others take the first accumulation from there on that rounds nothing."""
    rows, wanted = config.train_batch_tokens / config.train_seq_len, config.grad_accum_steps
    shared = 2 ** int(math.log2(min(8, max(1, rows))))
    first = wanted or math.ceil(shared / world_size)
    choices = [first] if wanted or shared % world_size == 0 else range(first, 2 * first + 1)
    accum = next((a for a in choices if rows % (world_size * a) == 0), first)
    least = accum * world_size * config.train_seq_len
    for name in ("train_batch_tokens", "val_batch_size"):
        require(getattr(config, name) >= least, f"{name.upper()}={getattr(config, name)} is less "
                f"than a row of TRAIN_SEQ_LEN for each rank and span; {least} would do")
    return accum, max(1, round(config.train_batch_tokens / least)) * least

# ---- Log ---------------------------------------------------------------------------------------
def new_run_id() -> str:
    """A name that no other run has: date, time and six random digits."""
    return time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()

def write_line(file, text: str) -> None:
    """Write a line at once. A full disk must not stop the training: a failure only warns."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        warnings.warn(f"{file.name}: a line was not written: {error}", stacklevel=2)

class RunLog:
    """Console, logs/RUN_ID.txt and logs/RUN_ID.jsonl of the main rank; other ranks are silent."""

    def __init__(self, run_id: str, source: str, is_main: bool):
        self.is_main = is_main
        self.on_terminal = sys.stdout.isatty()
        if not is_main:
            return
        Path("logs").mkdir(exist_ok=True)
        text_path = Path("logs", run_id + ".txt")
        json_path = Path("logs", run_id + ".jsonl")
        stamp = new_run_id()
        for path in (text_path, json_path):  # logs of two runs never mix in one file
            if path.exists():
                path.rename(path.with_name(f"{path.stem}.{stamp}{path.suffix}"))
        self.text = text_path.open("w", encoding="utf-8")
        self.json = json_path.open("w", encoding="utf-8")
        print(text_path, flush=True)
        smi = ""
        if shutil.which("nvidia-smi"):
            smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
        versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
        write_line(self.text, "\n".join((source, "=" * 100, versions, smi, "=" * 100)))

    def line(self, text: str) -> None:
        """Write a line to the console and to the text log."""
        if self.is_main:
            clear = "\x1b[2K" if self.on_terminal else ""  # the progress line goes
            write_line(sys.stdout, clear + text)
            write_line(self.text, text)

    def event(self, event: str, **values) -> None:
        """Write a JSON object with unrounded numbers to the .jsonl log."""
        if self.is_main:
            elapsed = round(time.monotonic() - STARTED, 3)
            write_line(self.json, json.dumps({"event": event, **values, "elapsed_s": elapsed}))

    def progress(self, text: str) -> None:
        """Show a line that the next one replaces, if the console is a terminal."""
        if self.is_main and self.on_terminal:
            columns = shutil.get_terminal_size().columns
            print("\x1b[2K" + text[:columns - 1], end="\r", flush=True)

PEAK_TFLOPS = {  # dense bfloat16 products, from the makers' data sheets
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 4090": 165, "RTX 3090": 71}

def peak_flops(ranks: Ranks) -> float | None:
    """What all GPUs together can do in a second; None where that is not known."""
    if ranks.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(ranks.device)
    known = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
    return known[0] * 1e12 * ranks.world_size if known else None

def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """The most MiB that were allocated and reserved on a CUDA device; 0 on others."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20

def log_step(run: "Run", clock: "Clock", loss: float, norm: float) -> None:
    """Log a training step; its speed is that since the line before."""
    config = run.config
    step = run.step
    average = run.time_ms / step
    rate = clock.steps_per_second() * config.train_batch_tokens
    peak = peak_flops(run.ranks)
    mfu = None
    if peak and config.dtype != "float32":
        mfu = rate * run.model.flops_per_token() / peak
    lr = run.optimizers[-1].param_groups[0]["lr"]
    memory, _ = peak_memory_mib(run.ranks.device)
    eta = clock.eta_s()
    epoch = run.loader.epochs(step)
    run.log.event("train", step=step, train_loss=loss, train_time_ms=run.time_ms,
                  step_avg_ms=average, lr=lr, grad_norm=norm, tok_per_sec=rate, mfu=mfu,
                  mem_mib=memory, eta_s=eta, epoch=epoch)
    run.log.line(f"step:{step}/{config.iterations} train_loss:{loss:.4f} "
                 f"train_time:{run.time_ms:.0f}ms step_avg:{average:.2f}ms lr:{lr:.2e} "
                 f"grad_norm:{norm:.3f} tok_per_sec:{rate:.0f} "
                 f"mfu:{'n/a' if mfu is None else f'{mfu:.1%}'} mem:{memory}MiB "
                 f"eta:{eta / 60:.1f}m epoch:{epoch:.3f}")

def log_validation(run: "Run") -> None:
    """Score the validation split and log the result."""
    score = evaluate(run)
    average = run.time_ms / max(run.step, 1)
    times = f"train_time:{run.time_ms:.0f}ms step_avg:{average:.2f}ms"
    run.log.line(f"step:{run.step}/{run.config.iterations} {score_text(score, 4, times)}")
    run.log.event("val", step=run.step, **score, train_time_ms=run.time_ms)

def log_end(run: "Run", stopped_early: bool) -> None:
    """Log why training ended, what it has read and the memory that it took."""
    if stopped_early:
        run.log.line(f"stopping_early: wallclock_cap train_time:{run.time_ms:.0f}ms "
                     f"step:{run.step}/{run.config.iterations}")
    if run.loader:
        epochs = run.loader.epochs(run.step)
        unique = run.loader.unique_tokens(run.step)
        run.log.line(f"train_loader:epochs:{epochs:.3f} unique_tokens:{unique} "
                     f"of {run.loader.tokens}")
        run.log.event("data", epochs=epochs, unique_tokens=unique, tokens=run.loader.tokens)
    allocated, reserved = peak_memory_mib(run.ranks.device)
    run.log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")

# ---- Data and bytes ----------------------------------------------------------------------------
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024

def find_shards(config: Config, split: str) -> list[Path]:
    """The shards of "train" or "val" in name order; ValueError if there are none, or two sets."""
    files = sorted(Path(config.data_path).glob(f"*_{split}_[0-9]*.bin"))
    require(files, f"no *_{split}_*.bin in DATA_PATH={config.data_path!r}; a small set is made by "
            "`python data/prepare.py sotu --tokenizer sp1024 --out data/datasets/sotu_sp1024`, the "
            "challenge's is fetched by `python data/download.py --variant sp1024`")
    sets = sorted({path.name.rsplit(f"_{split}_", 1)[0] for path in files})
    require(len(sets) == 1, f"DATA_PATH={config.data_path!r} mixes shards of {', '.join(sets)}")
    return files

def open_shard(path: Path, vocab_size: int | None = None) -> np.ndarray:
    """A shard's values as a uint16 memory map. ValueError: no shard, header and size disagree, no
    tokens, or, where `vocab_size` is given, an id that is not below it."""
    header, size = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4), path.stat().st_size
    require(header[:2].tolist() == [SHARD_MAGIC, SHARD_VERSION], f"{path} is no token shard: it "
            f"starts with the integers {header[:2].tolist()}, not {SHARD_MAGIC}, {SHARD_VERSION}")
    count = int(header[2]) if len(header) * 4 == HEADER_BYTES else 0
    require(size == HEADER_BYTES + 2 * count > HEADER_BYTES, f"{path} is damaged: it has {size} "
            f"bytes and a header that promises {count} tokens; make or download it again")
    shard = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)
    return shard if vocab_size is None else check_ids(shard, vocab_size, path)

def check_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> np.ndarray:
    """Returns tokens of the shard `path`. ValueError: one is not below the vocabulary's size."""
    largest = int(tokens.max())
    require(largest < vocab_size, f"{path} holds token {largest}, too large for VOCAB_SIZE="
            f"{vocab_size}; set it and TOKENIZER_PATH to what the shards were made with")
    return tokens

class TokenLoader:
    """The training shards in name order as one endless sequence of tokens. What a step reads
    follows from its number alone. A piece is one token longer than its inputs. LOADER=sequential
    reads consecutive spans, GRAD_ACCUM_STEPS per step and rank. LOADER=shuffled reads rows of
    TRAIN_SEQ_LEN tokens in an order that is drawn anew for every epoch."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.files = find_shards(config, "train")
        self.shards = [open_shard(path) for path in self.files]  # ids are checked when read
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        self.tokens = int(self.ends[-1])
        self.shuffled = config.loader == "shuffled"
        self.rows = (self.tokens - 1) // config.train_seq_len
        require(self.rows, f"DATA_PATH={config.data_path!r} has {self.tokens} training tokens, too "
                f"few for a row of TRAIN_SEQ_LEN={config.train_seq_len}")
        if self.shuffled:
            self.length = config.train_seq_len
            self.epoch_tokens = self.rows * self.length
        else:
            self.length = config.train_batch_tokens // (config.grad_accum_steps * ranks.world_size)
            self.epoch_tokens = self.tokens
        self.pieces = config.train_batch_tokens // self.length  # a step, over all ranks
        self.step_tokens = self.pieces * (self.length + (not self.shuffled))
        if config.overfit:
            self.epoch_tokens = self.step_tokens
        self.batch(0)  # shards of another vocabulary are found before training

    def start(self, piece: int) -> int:
        """Where a piece begins in the endless sequence; pieces are counted from step 0 on."""
        if not self.shuffled:
            return piece * (self.length + 1) % self.tokens
        epoch, place = divmod(piece, self.rows)
        return int(epoch_order(self.config.seed, epoch, self.rows)[place]) * self.length

    def locate(self, start: int) -> tuple[int, int]:
        """Shard number and place in that shard of token `start` of the endless sequence."""
        start %= self.tokens
        index = int(np.searchsorted(self.ends, start, side="right"))
        return index, start - int(self.ends[index]) + len(self.shards[index])

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens, uint16, from token `start` of the endless sequence on. ValueError: an id
        is not in the vocabulary."""
        parts = []
        while count > 0:
            index, place = self.locate(start)
            part = self.shards[index][place:place + count]
            parts.append(check_ids(part, self.config.vocab_size, self.files[index]))
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def first_piece(self, step: int) -> int:
        """The number of a step's first piece. OVERFIT=1 reads the first step again and again."""
        return 0 if self.config.overfit else step * self.pieces

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of a step, counted from 0: both (rows, T) int64 on the
        device."""
        first = self.first_piece(step)
        mine = range(first + self.ranks.rank, first + self.pieces, self.ranks.world_size)
        texts = np.stack([self.read(self.start(piece), self.length + 1) for piece in mine])
        pairs = np.stack((texts[:, :-1], texts[:, 1:])).reshape(2, -1, self.config.train_seq_len)
        batch = torch.from_numpy(pairs.view(np.int16))
        if self.ranks.device.type == "cuda":
            batch = batch.pin_memory()  # so that the copy does not wait for the device
        inputs, targets = to_ids(batch, self.ranks.device)
        return inputs, targets

    def place(self, step: int) -> str:
        """Where the tokens of a step begin, in words."""
        index, place = self.locate(self.start(self.first_piece(step)))
        return f"{self.files[index]} at token {place}"

    def wraps_around(self, step: int) -> bool:
        """Whether the last of `step` steps began or ended a new epoch."""
        new = int(self.epochs(step)) > int(self.epochs(step - 1))
        return new and not self.config.overfit

    def epochs(self, step: int) -> float:
        """How often the training data have been read after `step` steps."""
        return step * self.step_tokens / self.epoch_tokens

    def unique_tokens(self, step: int) -> int:
        """How many different tokens have been read after `step` steps."""
        return min(step * self.step_tokens, self.epoch_tokens)

@lru_cache(maxsize=2)  # a step can end in the next epoch
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order of the rows in an epoch of LOADER=shuffled: a permutation, int64 (rows,)."""
    return np.random.default_rng([seed, epoch]).permutation(rows)

def to_ids(tokens: Tensor, device: torch.device) -> Tensor:
    """int64 ids on the device from the bits of uint16 ones in int16, which all devices have."""
    return tokens.to(device, non_blocking=True).to(torch.int64) & 0xFFFF

def load_byte_table(config: Config) -> tuple[str, np.ndarray, np.ndarray]:
    """How many bytes of text a token of TOKENIZER_PATH stands for. Returns its kind; UTF-8 bytes,
    uint16 (V, 2), in column 1 after a boundary, in column 0 after other tokens; and which are
    boundaries, bool (V,). ValueError: unreadable, or the vocabulary is not VOCAB_SIZE."""
    path, first, boundary = config.tokenizer_path, None, None
    try:
        if path == "byte260":
            kind, lengths = "byte", [0] * 4 + [1] * 256
        elif path.endswith(".model"):
            kind, (lengths, first, boundary) = "sentencepiece", sentencepiece_bytes(path)
        elif path.endswith(".json"):
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            kind, lengths = data["kind"], [len(t.encode("latin-1")) for t in data["tokens"]]
        else:
            import tiktoken
            known = ["*.model", "*.json", "byte260", *tiktoken.list_encoding_names()]
            require(path in known[3:], f"it is none of {', '.join(known)}")
            kind, encoding = "tiktoken", tiktoken.get_encoding(path)
            lengths = [0] * encoding.n_vocab  # special tokens and holes stay 0
            for text in encoding.token_byte_values():
                lengths[encoding.encode_single_token(text)] = len(text)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"TOKENIZER_PATH={path!r} is no vocabulary that can be read ({error}); "
                         "data/prepare.py makes one and prints what to set") from None
    require(len(lengths) == config.vocab_size, f"VOCAB_SIZE={config.vocab_size}, but the tokenizer "
            f"{path!r} has {len(lengths)} tokens; set VOCAB_SIZE={len(lengths)}")
    table = np.array([lengths, first or lengths], dtype=np.uint16).T
    return kind, table, np.array(boundary or [False] * len(lengths))

def sentencepiece_bytes(path: str) -> tuple[list[int], list[int], list[bool]]:
    """Per token of a SentencePiece model: its bytes, those after a boundary, and whether it is one.
    The mark U+2581 stands for a space, one byte; but models with a dummy prefix put one in front of
    a document's first word that the text lacks."""
    import sentencepiece
    model, mark = sentencepiece.SentencePieceProcessor(model_file=path), "\u2581"
    ids = range(model.vocab_size())
    silent = [model.is_control(i) or model.is_unknown(i) or model.is_unused(i) for i in ids]
    pieces = ["" if silent[i] else "?" if model.is_byte(i) else model.id_to_piece(i) for i in ids]
    dummy = model.encode("a", out_type=str)[0].startswith(mark)
    lengths = [len(piece.replace(mark, " ").encode("utf-8")) for piece in pieces]
    first = [n - (dummy and p.startswith(mark)) for n, p in zip(lengths, pieces)]
    return lengths, first, [model.is_control(i) for i in ids]

def load_validation(config: Config) -> tuple[str, np.ndarray, int, int | None]:
    """Returns the tokenizer's kind; the validation split cut to whole rows and one token more,
    uint16; the UTF-8 bytes of its targets; and, where the tokenizer changes text, those of the
    original. ValueError: too short for a row, or not what its manifest says."""
    tokens = np.concatenate([open_shard(p, config.vocab_size) for p in find_shards(config, "val")])
    kind, table, boundary = load_byte_table(config)
    cut = (len(tokens) - 1) // config.train_seq_len * config.train_seq_len
    require(cut, f"DATA_PATH={config.data_path!r} has {len(tokens)} validation tokens, too few for "
            f"one row of TRAIN_SEQ_LEN={config.train_seq_len}")
    charged = table[tokens[1:], boundary[tokens[:-1]].astype(np.uint8)]
    whole = int(charged.sum(dtype=np.int64)) + int(table[tokens[0], 1])  # the first is no target
    raw = check_manifest(config, len(tokens), whole)
    counts = [None if x is None else int(x[:cut].sum(dtype=np.int64)) for x in (charged, raw)]
    return kind, tokens[:cut + 1], *counts

def check_manifest(config: Config, token_count: int, charged: int) -> np.ndarray | None:
    """Compares the uncut validation split with DATA_PATH/manifest.json. Where the tokenizer changes
    text, returns the bytes of original text under each target, uint16 (N - 1,)."""
    path, raw = Path(config.data_path, "manifest.json"), None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if manifest.get("made_by") not in ("data/prepare.py", "data/convert.py"):  # no byte counts
            return None
        split, changes_text = manifest["splits"]["val"], manifest["tokenizer"]["changes_text"]
        pairs = [("validation tokens", split["tokens"], token_count),
                 ("bytes of decoded text", split["decoded_bytes"], charged)]
        original = split["bytes"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; make the data set again") from None
    if changes_text:
        files = sorted(path.parent.glob("*_val_bytes_*.bin"))
        raw = np.concatenate([np.zeros(0, np.uint16), *(open_shard(file) for file in files)])
        pairs.append(("entries of *_val_bytes_*.bin", token_count, len(raw)))
    found_original = charged if raw is None else int(raw.sum(dtype=np.int64))
    for what, wanted, found in (*pairs, ("bytes of original text", original, found_original)):
        require(wanted == found, f"{path} says {wanted} {what}, but the shards with TOKENIZER_PATH="
                f"{config.tokenizer_path!r} give {found}: the score would be wrong")
    return None if raw is None else raw[1:]

# ---- Model -------------------------------------------------------------------------------------
def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2)) over the last dimension, in float32 inside, in x's type outside. Epsilon
    is float32's for every type: bfloat16's own would drown a small embedding."""
    return F.rms_norm(x, (x.size(-1),), eps=1.19e-7)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x (B, H, T, C) in two halves; cos, sin (T, C/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

def causal_attention(q: Tensor, k: Tensor, v: Tensor, repeat_kv: bool) -> Tensor:
    """Grouped-query attention (arXiv:2305.13245): q (B, H, T, C), k and v (B, K, T, C)."""
    groups = q.size(1) // k.size(1)
    if repeat_kv and groups > 1:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

class CastLinear(nn.Linear):
    """A linear layer whose float32 weight is cast to the input's type where it is used."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

class Attention(nn.Module):
    """Causal self-attention with RMS-normed queries and keys and a learned gain per query head."""

    def __init__(self, config: Config, repeat_kv: bool):
        super().__init__()
        self.heads, self.kv_heads, self.repeat_kv = config.num_heads, config.num_kv_heads, repeat_kv
        width = config.model_dim
        kv_width = width // config.num_heads * config.num_kv_heads
        self.c_q, self.c_k, self.c_v, self.proj = (
            CastLinear(width, n, bias=False) for n in (width, kv_width, kv_width, width))
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (layer(x).view(B, T, heads, -1).transpose(1, 2) for layer, heads in (
            (self.c_q, self.heads), (self.c_k, self.kv_heads), (self.c_v, self.kv_heads)))
        q, k = rotate(rms_norm(q), cos, sin), rotate(rms_norm(k), cos, sin)
        q = q * self.q_gain.to(q.dtype)[:, None, None]
        y = causal_attention(q, k, v, self.repeat_kv)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))

class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them (arXiv:2109.08668)."""

    def __init__(self, config: Config):
        super().__init__()
        self.fc = CastLinear(config.model_dim, config.mlp_mult * config.model_dim, bias=False)
        self.proj = CastLinear(config.mlp_mult * config.model_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square())

class Block(nn.Module):
    """Attention and MLP on a residual stream into which the first embedding x0 is mixed again."""

    def __init__(self, config: Config, repeat_kv: bool):
        super().__init__()
        self.attn, self.mlp = Attention(config, repeat_kv), MLP(config)
        ones = torch.ones(config.model_dim)
        self.attn_scale, self.mlp_scale = nn.Parameter(ones.clone()), nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, torch.zeros_like(ones))))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), cos, sin)
        return x + self.mlp_scale.to(x.dtype) * self.mlp(rms_norm(x))

class GPT(nn.Module):
    """A GPT whose first half of blocks feeds skip connections to the second, last in, first out.
    Weights are float32 but for the embedding, which is bfloat16 in the baseline's bfloat16 runs:
    small updates and decay would round to nothing there, so that it is float32 with AdamW or weight
    decay. Activations are in the compute type. Tensor names are a contract: checkpoints are
    exchanged under them."""

    def __init__(self, config: Config, repeat_kv: bool = False):
        super().__init__()
        self.config, self.compute_dtype = config, getattr(torch, config.dtype)
        # The order of the draws decides what a seed means.
        vocab_rows = -(-config.vocab_size // config.vocab_pad) * config.vocab_pad
        self.tok_emb = nn.Embedding(vocab_rows, config.model_dim)
        self.blocks = nn.ModuleList(Block(config, repeat_kv) for _ in range(config.num_layers))
        tied, shape = config.tie_embeddings, (config.model_dim, vocab_rows)
        self.lm_head = None if tied else CastLinear(*shape, bias=False)
        skips = min(config.num_layers // 2, config.num_layers - config.num_layers // 2)
        self.skip_weights = nn.Parameter(torch.ones(skips, config.model_dim))
        half = config.model_dim // config.num_heads // 2
        frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        for name, p in self.named_parameters():
            if config.init == "gpt2" and name.endswith(".weight"):  # Radford et al. 2019: residual
                depth = 2 * config.num_layers if ".proj." in name else 1  # projections are smaller
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name == "lm_head.weight" or ".proj." in name:
                nn.init.zeros_(p)
            elif tied and name == "tok_emb.weight":
                nn.init.normal_(p, std=config.tied_embed_init_std)
        if self.compute_dtype == torch.bfloat16:  # rounded once, as published weights expect
            for tensor in (*self.parameters(), self.frequencies):
                tensor.data.copy_(tensor.data.bfloat16())
            if config.optimizer == "muon" and not config.weight_decay:
                self.tok_emb.bfloat16()

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the last block makes of tokens (B, T) int64: (B, T, D) in the compute type."""
        positions = torch.arange(tokens.size(1), device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)  # (T, C/2)
        cos, sin = angles.cos().to(self.compute_dtype), angles.sin().to(self.compute_dtype)
        x0 = rms_norm(self.tok_emb(tokens).to(self.compute_dtype))
        x = x0.view_as(x0)  # were it the same object, the first block would be compiled for itself
        half, pushed = len(self.blocks) // 2, []
        for i, block in enumerate(self.blocks):
            if i >= half and pushed:
                x = x + self.skip_weights[i - half].to(x.dtype) * pushed.pop()
            x = block(x, x0, cos, sin)
            if i < half:
                pushed.append(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits (B, T, V) in the compute type from `hidden`'s (B, T, D)."""
        head = self.tok_emb if self.lm_head is None else self.lm_head
        logits = F.linear(rms_norm(x), head.weight.to(x.dtype))
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats (0-d float32) of targets (B, T) after `hidden`'s (B, T, D)."""
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats (0-d float32) of targets (B, T) after tokens (B, T)."""
        return self.loss(self.hidden(tokens), targets)

    def flops_per_token(self) -> int:
        """Of forward and backward: 6 per weight of a matrix product, and causal attention."""
        products = {n: p.numel() for n, p in self.named_parameters() if n.endswith("weight")}
        lookup = 0 if self.lm_head is None else products["tok_emb.weight"]
        attention = len(self.blocks) * self.config.train_seq_len * self.config.model_dim
        return 6 * (sum(products.values()) - lookup + attention)

def choose_attention(config: Config, device: torch.device) -> tuple[str, bool]:
    """Leaves one attention kernel on: ATTN or else the first that runs the model's heads. Returns
    its name and whether it needs key/value heads repeated, because it cannot group queries."""
    if device.type == "mps":  # it has one kernel of its own, and no switches
        return "math", True
    cuda = torch.backends.cuda
    switches = {"flash": cuda.enable_flash_sdp, "cudnn": cuda.enable_cudnn_sdp,
                "efficient": cuda.enable_mem_efficient_sdp, "math": cuda.enable_math_sdp}
    shape, dtype = (1, config.num_heads, 128, config.model_dim // config.num_heads), config.dtype
    q = torch.zeros(shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    k = q.detach()[:, :config.num_kv_heads].requires_grad_()
    for name in sorted(switches, key=lambda name: name != config.attn):
        for other, switch in switches.items():
            switch(other == name)
        for repeat in (False, True):
            try:
                with warnings.catch_warnings(action="ignore"):  # PyTorch explains each refusal
                    causal_attention(q, k, k, repeat).sum().backward()
                return name, repeat
            except RuntimeError:  # the math kernel, which is tried last, runs everywhere
                pass

# ---- Optimizers --------------------------------------------------------------------------------
def orthogonalize(updates: Tensor, steps: int, compute=torch.bfloat16) -> Tensor:
    """Newton-Schulz iteration in bfloat16 that moves the singular values of matrices (N, rows,
    columns) close to 1 (Muon, Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). The
    products are computed in the type `compute` and rounded."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = updates.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if tall := x.size(1) > x.size(2):
        x = x.mT
    for _ in range(steps):
        x = x.to(compute)
        gram = (x @ x.mT).bfloat16().to(compute)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(compute)
        x = torch.baddbmm(x, polynomial, x, beta=a).bfloat16()
    return x.mT if tall else x

class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, all matrices of one shape in batched products. Each
    rank has a share of every shape, and the updates are gathered in bfloat16. The momentum of all
    matrices of a shape is one tensor (N, rows, columns), kept in the state of the first one."""

    def __init__(self, groups: list[dict], config: Config, ranks: Ranks):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.steps = config.muon_backend_steps
        self.ranks = ranks
        # CPUs without bfloat16 units multiply it a thousand times slower than float32.
        slow = ranks.device.type == "cpu" and not bfloat16_is_native(ranks.device)
        self.compute = torch.float32 if slow else torch.bfloat16
        self.banks = {}  # matrices by their shape
        for p in self.param_groups[0]["params"]:
            self.banks.setdefault(p.shape, []).append(p)

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for shape, params in self.banks.items():
            grads = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(grads)
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(grads)
            share = math.ceil(len(params) / self.ranks.world_size)  # the last ranks may have less
            first = share * self.ranks.rank
            updates = grads[first:first + share]
            updates.add_(momentum[first:first + share], alpha=group["momentum"])
            updates = F.pad(updates, (0, 0, 0, 0, 0, share - len(updates)))
            scale = max(1, shape[0] / shape[1]) ** 0.5
            updates = orthogonalize(updates, self.steps, self.compute) * scale
            updates = self.ranks.gather(updates.contiguous())[:len(params)].to(params[0].dtype)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates), alpha=-group["lr"])

def build_optimizers(run: "Run") -> None:
    """Gives the run optimizers without a past, and the loss scaling that only float16 needs. Adam
    has embedding, head, vectors and control tensors, Muon the blocks' matrices, or AdamW has all;
    each parameter is in exactly one group, whose base_lr is the rate before the schedule. Vectors
    and control tensors have no weight decay (arXiv:1711.05101)."""
    config, ranks = run.config, run.ranks
    rates = {"embed": config.tied_embed_lr if config.tie_embeddings else config.embed_lr,
             "head": config.head_lr, "scalar": config.scalar_lr, "matrix": config.matrix_lr}
    rates = rates if config.optimizer == "muon" else dict.fromkeys(rates, config.adam_lr)
    groups = {kind: {"kind": kind, "params": [], "lr": lr, "base_lr": lr, "weight_decay":
                     config.weight_decay * (kind != "scalar")} for kind, lr in rates.items()}
    for name, p in run.model.named_parameters():
        control = matches(name, config.control_tensor_name_patterns)
        matrix = p.ndim == 2 and name.startswith("blocks.") and not control
        special = {"tok_emb.weight": "embed", "lm_head.weight": "head"}
        groups[special.get(name, "matrix" if matrix else "scalar")]["params"].append(p)
    muon = [Muon([groups.pop("matrix")], config, ranks)] if config.optimizer == "muon" else []
    adam = torch.optim.AdamW([group for group in groups.values() if group["params"]],
                             betas=(config.beta1, config.beta2), eps=config.adam_eps,
                             fused=config.fused or None)
    run.optimizers = [adam, *muon]
    run.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.dtype == "float16")
    run.first_bad = torch.tensor(-1, device=ranks.device)

def lr_factor(config: Config, step: int, elapsed_ms: float) -> float:
    """What the base learning rates are multiplied by in `step`, which starts after `elapsed_ms` of
    training. With a cap on the wall clock the warmdown is planned in time, at the pace so far, and
    the cosine (arXiv:1608.03983) ends with the steps or the time, whichever comes first."""
    cap_ms, warmup, left = config.max_wallclock_seconds * 1000, config.lr_warmup_steps, 1.0
    if config.lr_schedule == "cosine":
        done = (step - warmup) / max(1, config.iterations - warmup)
        done = min(1.0, max(0.0, done, elapsed_ms / cap_ms if cap_ms else 0.0))
        left = (1 + math.cos(math.pi * done)) / 2
    elif config.warmdown_iters > 0 and cap_ms:
        warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
        left = min(1.0, max(0.0, cap_ms - elapsed_ms) / max(warmdown_ms, 1e-9))
    elif config.warmdown_iters > 0:
        left = min(1.0, max(0, config.iterations - step) / config.warmdown_iters)
    return min((step + 1) / max(1, warmup), config.min_lr + (1 - config.min_lr) * left)

def muon_momentum(config: Config, step: int) -> float:
    """Muon's momentum in `step`: linear from its start to its final value, then constant."""
    steps = config.muon_momentum_warmup_steps
    done = min(1.0, step / steps) if steps else 1.0
    return (1 - done) * config.muon_momentum_warmup_start + done * config.muon_momentum

def average(tensors: list[Tensor], ranks: Ranks) -> None:
    """Averages tensors over the ranks, in place, with one exchange for each of their types."""
    for dtype in dict.fromkeys(t.dtype for t in tensors) if ranks.world_size > 1 else ():
        same = [t for t in tensors if t.dtype == dtype]
        flat = ranks.reduce(torch.cat([t.flatten() for t in same])).div_(ranks.world_size)
        for t, mean in zip(same, flat.split([t.numel() for t in same])):
            t.copy_(mean.view_as(t))

# ---- Evaluation --------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(run: "Run") -> dict[str, float]:
    """Scores the validation split, each rank a range of its rows, summing in float64. Returns
    val_loss, nats per token; val_bpb, bits per byte of the text as tokenized (the published
    convention); and, where the tokenizer changes text, val_bpb_raw, per byte of the original."""
    config, ranks, length = run.config, run.ranks, run.config.train_seq_len
    rows = (len(run.val_tokens) - 1) // length
    share = -(-rows // ranks.world_size)  # rows of a rank, in forwards of one shape
    limit = config.val_batch_size // (ranks.world_size * config.grad_accum_steps)
    limit = min(limit, config.micro_batch_tokens) // length
    batch = -(-share // -(-share // limit))
    first, last = share * ranks.rank, min(rows, share * (ranks.rank + 1))
    device = "cpu" if ranks.device.type == "mps" else ranks.device  # MPS has no float64
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(first, last, batch):
        stop = min(start + batch, last)
        span = run.val_tokens[start * length:stop * length + 1].view(np.int16)
        span = to_ids(torch.from_numpy(span), ranks.device)
        inputs, targets = span[:-1].view(-1, length), span[1:].view(-1, length)
        if missing := batch - len(inputs):
            inputs = F.pad(inputs, (0, 0, 0, missing))
            targets = F.pad(targets, (0, 0, 0, missing), value=-100)  # is left out of the mean
        nats += run.model(inputs, targets).to(device).double() * (stop - start) * length
    total = ranks.reduce(nats).item()
    counts = {"val_bpb": run.val_bytes, "val_bpb_raw": run.val_raw_bytes}
    bits = {name: total / math.log(2) / n for name, n in counts.items() if n is not None}
    return {"val_loss": total / (rows * length), **bits}

def score_text(score: dict[str, float], digits: int, between: str = "") -> str:
    """A score's fields for a log line; val_bpb_raw stands last, after all that parsers read."""
    texts = [f"{name}:{value:.{digits}f}" for name, value in score.items()]
    return " ".join(filter(None, (*texts[:2], between, *texts[2:])))

# ---- Export and reading ------------------------------------------------------------------------
INT8_FORMAT = "int8_clean_per_row_v1"
INT8_PERCENTILE = 0.9999984

def quantize_tensor(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values of the tensor's shape, and their scales: float16 (rows,) for a matrix, one
    float32 for other shapes."""
    rows = tensor.float() if tensor.ndim == 2 else tensor.float().reshape(1, -1)
    values = rows.abs()
    # The percentile of a row, interpolated linearly, from a partial sort.
    place = INT8_PERCENTILE * (rows.size(1) - 1)
    below = int(place)
    top = values.topk(rows.size(1) - below).values
    clip = torch.lerp(top[:, -1:], top[:, -2:][:, :1], place - below)
    if tensor.ndim == 2:
        scale = clip.clamp_min(1) / 127
        stored_scale = scale[:, 0].half()
    else:
        scale = (clip / 127).where(clip > 0, 1)
        stored_scale = scale.squeeze()
    torch.maximum(rows, -clip, out=values)  # with minimum three times as fast as clamp
    torch.minimum(values, clip, out=values)
    quantized = values.div_(scale).round_().to(torch.int8)  # clip / scale is 127 at most
    return quantized.view(tensor.shape), stored_scale

def quantize(state: dict[str, Tensor], config: Config) -> tuple[dict, int]:
    """The object of the int8 artifact and its payload in bytes: large float tensors as int8 with
    scales, small ones as float16, or float32 where a pattern asks for it."""
    artifact = {"__quant_format__": INT8_FORMAT, "quantized": {}, "scales": {}, "dtypes": {},
                "passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not tensor.is_floating_point():
            artifact["passthrough"][name] = tensor
        elif tensor.numel() > config.int8_keep_float_max_numel:
            artifact["quantized"][name], artifact["scales"][name] = quantize_tensor(tensor)
            artifact["dtypes"][name] = dtype
            if tensor.ndim == 2:
                artifact["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        else:
            keep = matches(name, config.int8_keep_float_fp32_name_patterns)
            stored = tensor.to(torch.float32 if keep else torch.float16)
            artifact["passthrough"][name] = stored
            if stored.dtype != tensor.dtype:
                artifact["passthrough_orig_dtypes"][name] = dtype
    stored = ("quantized", "scales", "passthrough")
    tensors = [t for part in stored for t in artifact[part].values()]
    return artifact, sum(t.nbytes for t in tensors)

def dequantize(artifact: dict, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an int8 artifact. ValueError: one has another shape than in `wanted`, or a
    scale that is not a positive number."""
    state = dict(artifact["passthrough"])
    for name, quantized in artifact["quantized"].items():
        scale = artifact["scales"][name]
        rows = quantized.shape[:1] if quantized.ndim == 2 else ()
        same_shape = quantized.shape == wanted[name].shape and scale.shape == rows
        require(same_shape and quantized.dtype == torch.int8,
                f"{name} or its scale has another shape or type")
        scale = scale.float()
        require(bool((scale > 0).all() and scale.isfinite().all()), f"{name} has no sound scales")
        state[name] = quantized.float() * (scale[:, None] if scale.ndim else scale)
    return state

def read_archive(data: bytes):
    """What torch.save wrote, as data: no code is run, nothing inflates, every checksum is compared.
    Many kinds of errors: it is something else."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        size = sum(entry.file_size for entry in entries)
        require(stored and size <= len(data), "it has packed entries")
        damaged = archive.testzip()
        require(damaged is None, f"its entry {damaged} is damaged")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

def check_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """ValueError: names or shapes differ, or one is no tensor of numbers like the wanted one."""
    names = found.keys() ^ wanted.keys()
    require(not names, f"it lacks, or should not have, {', '.join(map(str, sorted(names)[:3]))}")
    for name, like in wanted.items():
        t = found[name]
        require(isinstance(t, Tensor) and t.shape == like.shape
                and t.is_floating_point() == like.is_floating_point(),
                f"{name} is not the {like.dtype} {tuple(like.shape)} that this model has")

def load_weights(model: nn.Module, path: str | Path, digest: str = "") -> None:
    """Copy a state dict, an int8 artifact or the weights of a checkpoint into the model.
    ValueError: it is none of them, damaged, of another model, larger than one of this model can be,
    or its sha256 is not `digest`."""
    wanted = model.state_dict()
    # A checkpoint has weights and two moments, all in float32 at most.
    limit = sum(16 * t.numel() + 4096 for t in wanted.values()) + (1 << 20)
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
        require(digest in ("", sha256(data).hexdigest()), "another run has written it: give each "
                "run an OUT_DIR of its own")
        if not data.startswith(b"PK"):  # as zip archives do, which torch.save writes
            inflater = zlib.decompressobj()
            data = inflater.decompress(data, limit + 1)
            require(inflater.eof or len(data) > limit, "it ends too early")
        require(len(data) <= limit, f"it has more than the {limit} bytes that this model can need")
        state = read_archive(data)
        if state.get("__quant_format__") == INT8_FORMAT:
            state = dequantize(state, wanted)
        elif "optimizers" in state:
            state = state["model"]
        check_tensors(state, wanted)
        model.load_state_dict(dict(state))  # without what a state dict may say about itself
    except Exception as error:  # what is hostile or damaged fails in many ways
        raise ValueError(f"{path} cannot be loaded into this model: {error}") from None

def write_whole(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename, so that `path` is never half a file, even after a
    loss of power. OSError: nothing was written."""
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

def saved(value) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()

def write_artifact(run: "Run", source: str) -> None:
    """Write final_model.pt and final_model.int8.ptz, and put what the artifact holds into the
    model."""
    log = run.log
    folder = Path(run.config.out_dir)
    code = source.encode("utf-8")
    state = {name: t.detach().cpu() for name, t in run.model.state_dict().items()}
    floats = saved(state)
    write_whole(folder / "final_model.pt", floats)
    log.line(f"Serialized model: {len(floats)} bytes")
    log.line(f"Code size: {len(code)} bytes")
    log.line(f"Total submission size: {len(floats) + len(code)} bytes")
    artifact, payload = quantize(state, run.config)
    raw = saved(artifact)
    data = zlib.compress(raw, 9)
    digest = sha256(data).hexdigest()
    write_whole(folder / "final_model.int8.ptz", data)
    ratio = sum(t.nbytes for t in state.values()) / payload
    log.line(f"Serialized model int8+zlib: {len(data)} bytes (payload:{payload} "
             f"raw_torch:{len(raw)} payload_ratio:{ratio:.2f}x)")
    log.line(f"Total submission size int8+zlib: {len(data) + len(code)} bytes")
    log.event("export", step=run.step, model_bytes=len(floats), code_bytes=len(code),
              code_sha256=sha256(code).hexdigest(), payload_bytes=payload,
              artifact_bytes=len(data), artifact_sha256=digest)
    load_weights(run.model, folder / "final_model.int8.ptz", digest)

def export(run: "Run", source: str) -> None:
    """Write the artifact, and score what is read back from its file."""
    if run.ranks.rank == 0:
        write_artifact(run, source)
    for p in run.model.parameters():  # only the main rank is sure to see the file
        run.ranks.broadcast(p.data)
    started = run.ranks.now_ms()
    score = evaluate(run)
    eval_ms = run.ranks.now_ms() - started
    run.log.line(f"final_int8_zlib_roundtrip {score_text(score, 4, f'eval_time:{eval_ms:.0f}ms')}")
    run.log.line(f"final_int8_zlib_roundtrip_exact {score_text(score, 8)}")
    run.log.event("final", step=run.step, **score, eval_time_ms=eval_ms)

# ---- Checkpoints -------------------------------------------------------------------------------
CHECKPOINT_FORMAT = 2
CHECKPOINT_NAME = re.compile(r"(.+)_\d{8}(_[0-9a-f]{16})?\.pt")  # RUN_ID_STEP.pt; 1 had a digest

def checkpoint_folder(config: Config) -> Path:
    """CHECKPOINT_DIR, or OUT_DIR/checkpoints if that is empty."""
    return Path(config.checkpoint_dir or Path(config.out_dir, "checkpoints"))

def list_checkpoints(config: Config) -> list[Path]:
    """The checkpoints of RUN_ID, or of every run if that is empty, the newest one first."""
    found = []
    for path in checkpoint_folder(config).glob("*.pt"):
        name = CHECKPOINT_NAME.fullmatch(path.name)
        if name and config.run_id in ("", name[1]):
            found.append(path)
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

def read_checkpoint(path: Path) -> dict:
    """What save_checkpoint wrote. ValueError: damaged, something else, or of another format."""
    try:
        state = read_archive(path.read_bytes())
        require(isinstance(state, dict) and "format" in state, "it is not a checkpoint")
        require(state["format"] == CHECKPOINT_FORMAT, f"it has format {state['format']}, and this "
                f"train_gpt.py reads {CHECKPOINT_FORMAT}: resume it with the script that wrote it")
        plain = (*state["config"].keys(), *state["config"].values())
        require(all(type(x) in (str, int, float, bool) for x in plain), "its settings are damaged")
        return state
    except Exception as error:  # a damaged or hostile file fails in many ways
        raise ValueError(f"checkpoint {path} cannot be used: {error}") from None

def find_checkpoint(config: Config, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The checkpoint that RESUME names, or with "auto" the newest one that can be read, and lines
    about those that cannot. All ranks get the path that the main rank found."""
    if config.resume != "auto":
        return Path(config.resume) if config.resume else None, []
    usable, warnings_found = None, []
    for path in list_checkpoints(config) if ranks.rank == 0 else []:
        try:
            read_checkpoint(path)
            usable = path
            break
        except ValueError as error:
            warnings_found.append(f"warning: {error}")
    if ranks.world_size > 1:
        choice = [usable]
        dist.broadcast_object_list(choice)
        usable = choice[0]
    return usable, warnings_found

def check_settings(config: Config, state: dict, path: Path) -> None:
    """ValueError names the settings in which the run differs from its checkpoint."""
    changed = []
    for f in fields(Config):
        then = state["config"].get(f.name, f.default)  # an older script had no such variable
        now = getattr(config, f.name)
        if then != now and not f.metadata["free"]:
            changed.append(f"{f.name.upper()} was {then!r} and is {now!r}")
    require(not changed, f"RESUME: {path} was trained with other settings: {'; '.join(changed)}")

def state_of(run: "Run") -> dict:
    """Everything that training changes; the tensors are the live ones."""
    return {"step": run.step, "time_ms": run.time_ms, "model": run.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "scaler": run.scaler.state_dict()}

def restore(run: "Run", state: dict) -> None:
    """Put the run where it was when state_of gave `state`."""
    run.model.load_state_dict(state["model"])
    for optimizer, values in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    run.scaler.load_state_dict(state["scaler"])
    run.step = int(state["step"])
    run.time_ms = float(state["time_ms"])

def resume(run: "Run", state: dict, path: Path) -> None:
    """Continue from a checkpoint. ValueError: its tensors or its clock do not fit this run."""
    try:
        check_tensors(state["model"], run.model.state_dict())
        restore(run, state)
        require(0 <= run.step <= run.config.iterations, f"step {run.step} is not in this run")
        require(0 <= run.time_ms < math.inf, f"its clock says {run.time_ms} ms")
    except Exception as error:  # a hostile file fails in many ways
        raise ValueError(f"checkpoint {path} does not fit this run: {error}") from None
    run.log.event("resume", step=run.step, train_time_ms=run.time_ms, file=str(path))
    run.log.line(f"resumed: step:{run.step} train_time:{run.time_ms:.0f}ms from {path}")

def save_checkpoint(run: "Run") -> None:
    """Write the state of the run, and keep the KEEP_CHECKPOINTS newest of its checkpoints. A failed
    write only warns. FloatingPointError: a step was not finite, so that nothing is written."""
    stop_if_not_finite(run)
    if run.ranks.rank > 0:
        return
    config = run.config
    path = checkpoint_folder(config) / f"{config.run_id}_{run.step:08d}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = saved({"format": CHECKPOINT_FORMAT, "config": asdict(config), **state_of(run)})
        write_whole(path, data)
        for old in list_checkpoints(config)[config.keep_checkpoints:]:
            old.unlink()
    except OSError as error:
        run.log.line(f"warning: no checkpoint of step {run.step}: {error}")
        return
    run.log.event("checkpoint", step=run.step, file=path.name, bytes=len(data))

# ---- Training ----------------------------------------------------------------------------------
@dataclass
class Run:
    """What a run is made of, and how far it has come."""
    config: Config
    ranks: Ranks
    log: RunLog
    model: GPT
    loader: TokenLoader | None
    val_tokens: np.ndarray
    val_bytes: int
    val_raw_bytes: int | None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    first_bad: Tensor | None = None  # first step that was not finite, or -1; int64 on the device
    step: int = 0  # steps done
    time_ms: float = 0.0  # on the training clock
    signal: int = 0  # that asks this process to stop

class Clock:
    """The training clock, which validations do not move. The ranks agree on it, and on signals, in
    every tenth step, near the cap and where steps are slow, because agreeing waits for the device.
    In between it advances at the pace of the steps before, so that all ranks stop together."""

    def __init__(self, run: Run):
        self.run = run
        self.cap_ms = run.config.max_wallclock_seconds * 1000 or math.inf
        self.pace = run.time_ms / max(run.step, 1)  # ms a step
        self.first_step = run.step + 1
        self.agreed_step = run.step
        self.agreed_ms = run.time_ms
        self.rated_step = run.step
        self.rated_ms = run.time_ms
        self.signal = 0
        self.origin = run.ranks.now_ms() - run.time_ms

    def advance(self, agree: bool) -> None:
        """Count one more step; `agree` asks for an agreement after it."""
        run = self.run
        run.step += 1
        run.time_ms += self.pace
        near_cap = self.left_ms() < 20 * self.pace
        slow = run.ranks.device.type == "cpu" or self.pace > 1000 or run.step == self.first_step
        if agree or near_cap or slow or run.step % 10 == 0:
            self.agree()

    def agree(self) -> None:
        """Wait for all ranks and take the largest of their clocks. FloatingPointError: a step was
        not finite."""
        run = self.run
        if run.step == self.agreed_step:
            return
        stop_if_not_finite(run)
        now = run.ranks.now_ms() - self.origin
        run.time_ms, signal_number = run.ranks.largest(now, run.signal)
        self.signal = int(signal_number)
        self.pace = (run.time_ms - self.agreed_ms) / (run.step - self.agreed_step)
        self.agreed_step = run.step
        self.agreed_ms = run.time_ms

    def left_ms(self) -> float:
        """Time until the cap; infinite without one."""
        return self.cap_ms - self.run.time_ms

    def eta_s(self) -> float:
        """Seconds until the last step or the cap, at the average pace so far."""
        steps_left = self.run.config.iterations - self.run.step
        return max(0.0, min(self.left_ms(), steps_left * self.run.time_ms / self.run.step)) / 1000

    def steps_per_second(self) -> float:
        """The speed since the last call."""
        steps = self.run.step - self.rated_step
        seconds = (self.run.time_ms - self.rated_ms) / 1000
        self.rated_step = self.run.step
        self.rated_ms = self.run.time_ms
        return steps / max(seconds, 1e-9)

    @contextmanager
    def paused(self):
        """Leave what is done inside off the clock."""
        started = self.run.ranks.now_ms()
        yield
        self.origin += self.run.ranks.now_ms() - started

def stop_if_not_finite(run: Run) -> None:
    """FloatingPointError names the first step whose loss or gradient norm was not finite, if there
    was one, and where its batch begins."""
    step = int(run.first_bad)
    if step < 0:
        return
    place = run.loader.place(step)
    run.log.event("nonfinite", step=step + 1, batch=place)
    text = f"loss or gradient of step:{step + 1} is not finite; its batch begins in {place}"
    run.log.line(f"nonfinite: {text}")
    raise FloatingPointError(f"{text}. Checkpoints are from before it. A smaller learning rate or "
                             "GRAD_CLIP_NORM=1 may help")

def stop_on_signals(run: Run) -> None:
    """Let SIGTERM and SIGINT end the run after a step and a checkpoint."""
    def remember(number: int, _) -> None:
        run.signal = number  # launchers repeat a signal, so another one changes nothing

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)

def set_rates(run: Run, factor: float) -> None:
    """Set the learning rates and Muon's momentum of the next step."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
            if "momentum" in group:
                group["momentum"] = muon_momentum(run.config, run.step)

def forward_backward(run: Run, micro_batches: int | None) -> Tensor:
    """Add up the gradients of this rank's part of a step, in micro-batches; return their mean loss,
    0-d float32 on the device. `micro_batches` leaves out the others."""
    inputs, targets = run.loader.batch(run.step)
    rows = run.config.micro_batch_tokens // run.config.train_seq_len
    loss_sum = torch.zeros((), device=run.ranks.device)
    for x, y in list(zip(inputs.split(rows), targets.split(rows)))[:micro_batches]:
        loss = run.model(x, y) * (len(x) / len(inputs))
        run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    return loss_sum

def train_step(run: Run, factor: float, micro_batches: int | None = None) -> tuple[Tensor, Tensor]:
    """One update at `factor` times the base learning rates. Returns the mean loss over the ranks
    and the global norm of the averaged gradients, both 0-d float32 on the device."""
    config = run.config
    set_rates(run, factor)
    loss = forward_backward(run, micro_batches)
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    average([*grads, loss], run.ranks)
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    # An overflow, which float16 skips, may be NaN here; clipping must not spread it.
    norm = nn.utils.get_total_norm(grads).nan_to_num(math.inf, math.inf)
    if config.grad_clip_norm > 0:
        nn.utils.clip_grads_with_norm_(run.model.parameters(), config.grad_clip_norm, norm)
    watched = loss if config.dtype == "float16" else loss + norm
    is_first_bad = ~watched.isfinite() & (run.first_bad < 0)
    run.first_bad = torch.where(is_first_bad, run.step, run.first_bad)
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    run.scaler.update()
    return loss, norm

def warm_up(run: Run) -> None:
    """Run WARMUP_STEPS steps of one micro-batch, so that first calls are off the clock, then put
    everything back."""
    steps = run.config.warmup_steps
    before = copy.deepcopy(state_of(run))
    for step in range(1, steps + 1):
        train_step(run, 1.0, micro_batches=1)
        if steps <= 20 or step % 10 == 0 or step == steps:
            run.log.line(f"warmup_step:{step}/{steps}")
    restore(run, before)
    run.first_bad.fill_(-1)

def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done in this one; 0: never."""
    return every > 0 and step % every == 0

def train(run: Run) -> int:
    """Train until ITERATIONS, the cap of the wall clock or a signal; return the signal, else 0."""
    config = run.config
    log = run.log
    gc.collect()
    gc.disable()  # a collection in the middle of a step would hold up all ranks
    clock = Clock(run)
    shown_loss = math.nan
    while True:
        finished = run.step >= config.iterations or clock.left_ms() <= 0
        if finished or is_due(run.step, config.val_loss_every):
            clock.agree()
            with clock.paused():
                log_validation(run)
                gc.collect()
        if finished:
            break
        loss, norm = train_step(run, lr_factor(config, run.step, run.time_ms))
        log_this = run.step < 10 or is_due(run.step + 1, config.train_log_every)
        clock.advance(agree=log_this or run.step + 1 == config.iterations)
        if run.loader.wraps_around(run.step):
            log.line(f"train_loader:wrap_around step:{run.step}/{config.iterations} epoch:"
                     f"{run.loader.epochs(run.step):.3f} of {run.loader.tokens} tokens")
        capped = clock.left_ms() <= 0
        if log_this or capped:
            shown_loss = loss.item()
            log_step(run, clock, shown_loss, norm.item())
        log.progress(f"step {run.step} loss {shown_loss:.4f} eta {clock.eta_s() / 60:.1f}m")
        last = capped or run.step >= config.iterations
        due = config.checkpoint_every and (last or is_due(run.step, config.checkpoint_every))
        if clock.signal or due:
            save_checkpoint(run)
        if clock.signal:
            log.line(f"stopped: signal {clock.signal} after step:{run.step}; RESUME=auto continues")
            break
    gc.enable()
    log_end(run, stopped_early=run.step < config.iterations and not clock.signal)
    return clock.signal

def compile_model(run: Run) -> None:
    """Compiles the model: as one graph on a GPU, and on a CPU block by block, which starts sooner
    and runs as fast. Where the compiler fails, it warns and the model stays eager."""
    model, on_cuda = run.model, run.ranks.device.type == "cuda"
    rows = run.config.micro_batch_tokens // run.config.train_seq_len
    inputs, targets = run.loader.batch(0)
    for part in [model] if on_cuda else model.blocks:
        part.compile(dynamic=False, fullgraph=True)
    if not on_cuda:
        model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
    try:
        model(inputs[:rows], targets[:rows]).backward()
    except Exception as error:  # compilers fail in many ways
        torch.compiler.set_stance("force_eager")
        run.log.line(f"warning: no compiling, for it fails: {str(error)[:200]!r}")
    run.ranks.largest(0)  # waits for all
    model.zero_grad(set_to_none=True)

def resolve(config: Config, ranks: Ranks) -> tuple[Config, bool]:
    """Puts values in the place of everything automatic; also says whether to repeat kv heads."""
    on_cuda, on_cpu = (ranks.device.type == kind for kind in ("cuda", "cpu"))
    builds = on_cpu and sys.platform == "linux" and shutil.which(os.environ.get("CXX", "g++"))
    builds = not any(ranks.largest(not builds))  # on all machines, for compiling waits for all
    auto = {"dtype": "bfloat16" if bfloat16_is_native(ranks.device) else "float32",
            "compile": "1" if on_cuda or builds else "0"}
    auto = {name: value for name, value in auto.items() if getattr(config, name) == "auto"}
    auto |= {"device": ranks.device.type, "run_id": config.run_id or new_run_id()}
    accum, tokens = split_batch(config, ranks.world_size)
    span, length = tokens // (accum * ranks.world_size), config.train_seq_len
    size = config.model_dim * getattr(torch, auto.get("dtype", config.dtype)).itemsize
    # Activations of 2 MB stay in a CPU's cache.
    limit = config.micro_batch_tokens or ((1 << 21) // size if on_cpu else span)
    rows = accum * span // length
    rows = next(n for n in range(max(1, min(rows, limit // length)), 0, -1) if rows % n == 0)
    config = replace(config, grad_accum_steps=accum, train_batch_tokens=tokens,
                     micro_batch_tokens=rows * length, **auto,
                     fused=config.fused and ranks.device.type != "mps")
    attn, repeat_kv = choose_attention(config, ranks.device)
    return replace(config, attn=attn), repeat_kv

def set_up(config: Config, overrides: dict, source: str) -> Run:
    """Finds every mistake that can be found before training, opens the log and builds the run."""
    ranks = start_ranks(config)
    torch.set_float32_matmul_precision(config.matmul_precision)
    path, notes = find_checkpoint(config, ranks)
    state = read_checkpoint(path) if path else None
    if state and not config.run_id:
        config = replace(config, run_id=state["config"]["run_id"])
    config, repeat_kv = resolve(config, ranks)
    kind, *validation = load_validation(config)
    loader = TokenLoader(config, ranks) if config.iterations else None
    if state:
        check_settings(config, state, path)
    torch.manual_seed(config.seed)
    model = GPT(config, repeat_kv)
    if config.init_from and not state:
        load_weights(model, config.init_from)
    model.to(ranks.device)
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    require(os.access(config.out_dir, os.W_OK), f"OUT_DIR={config.out_dir!r} cannot be written to")
    log = RunLog(config.run_id, source, ranks.rank == 0)
    run = Run(config, ranks, log, model, loader, *validation)
    announce(run, kind, repeat_kv, overrides)
    for note in notes:
        run.log.line(note)
    if loader and config.compile == "1":
        compile_model(run)
    build_optimizers(run)
    for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
        run.log.line(f"parameters:{group['kind']} lr:{group['lr']} weight_decay:"
                     f"{group['weight_decay']} tensors:{len(group['params'])} numbers:"
                     f"{sum(p.numel() for p in group['params'])}")
    if state:
        resume(run, state, path)
    return run

def announce(run: Run, kind: str, repeat_kv: bool, overrides: dict) -> None:
    """Logs what the run is about to do, in the lines that parsers of the field know."""
    c, attn = run.config, {"efficient": "mem_efficient"}.get(run.config.attn, run.config.attn)
    settings = {f.name.upper(): getattr(c, f.name) for f in fields(Config)}
    backends = " ".join(f"{x}={x == attn}" for x in ("cudnn", "flash", "mem_efficient", "math"))
    shards, tokens = (len(run.loader.files), run.loader.tokens) if run.loader else (0, 0)
    pattern = str(find_shards(c, "val")[0]).rsplit("_", 1)[0] + "_*.bin"
    run.log.event("config", config=settings, overrides=overrides, torch=torch.__version__,
                  world_size=run.ranks.world_size, threads=torch.get_num_threads(),
                  val_tokens=len(run.val_tokens) - 1, val_bytes=run.val_bytes,
                  val_raw_bytes=run.val_raw_bytes)
    run.log.line(f"""val_bpb:enabled tokenizer_kind={kind} tokenizer_path={c.tokenizer_path}
train_loader:dataset:{Path(c.data_path).name} train_shards:{shards} tokens:{tokens} \
loader:{c.loader}
val_loader:shards pattern={pattern} tokens:{len(run.val_tokens) - 1}
model_params:{sum(p.numel() for p in run.model.parameters())}
world_size:{run.ranks.world_size} grad_accum_steps:{c.grad_accum_steps} device:{run.ranks.device} \
dtype:{c.dtype} compile:{c.compile} micro_batch_tokens:{c.micro_batch_tokens}
sdp_backends:{backends} repeated_kv_heads={repeat_kv}
attention_mode:gqa num_heads:{c.num_heads} num_kv_heads:{c.num_kv_heads}
tie_embeddings:{c.tie_embeddings} embed_lr:{c.tied_embed_lr if c.tie_embeddings else c.embed_lr} \
head_lr:{0.0 if c.tie_embeddings else c.head_lr} matrix_lr:{c.matrix_lr} scalar_lr:{c.scalar_lr}
train_batch_tokens:{c.train_batch_tokens} train_seq_len:{c.train_seq_len} \
iterations:{c.iterations} warmup_steps:{c.warmup_steps} \
max_wallclock_seconds:{c.max_wallclock_seconds:.3f}
seed:{c.seed}
config:{json.dumps({**settings, "overrides": overrides})}""")

def main() -> None:
    """One run: set up, warm up, train, export, score what was exported."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        for f in fields(Config):
            default, unit = int(f.default) if f.type is bool else f.default, f.metadata["unit"]
            print(f"{f.name.upper()}={default}\n    {f.metadata['help']}", f"[{unit}]" * bool(unit))
        return
    source, name = Path(__file__).read_text(encoding="utf-8"), Path(__file__).name
    try:
        run = set_up(*load_config(sys.argv[1:], dict(os.environ)), source)
        stop_on_signals(run)
        if run.loader:
            warm_up(run)
        asked = train(run)
        if not asked:
            export(run, source)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"{name}: {error}")
    except RuntimeError as error:
        where, text = f"{name}: rank {os.environ.get('RANK', '0')}", str(error)
        if "out of memory" in text or "t allocate memory" in text:
            sys.exit(f"{where}: {text[:400]}\nFor less memory: a smaller MICRO_BATCH_TOKENS, "
                     "TRAIN_SEQ_LEN, MODEL_DIM or NUM_LAYERS, or COMPILE=1")
        if dist.is_initialized() and any(word in text for word in ("gloo", "NCCL", "Connection")):
            sys.exit(f"{where} has lost another rank, which the launcher names: {text}")
        raise
    if dist.is_initialized():
        dist.barrier()  # gloo aborts in a rank whose peer has left
        dist.destroy_process_group()
    if asked:
        sys.exit(128 + asked)

if __name__ == "__main__":
    main()
