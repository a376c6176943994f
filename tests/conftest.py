"""What the tests share: tiny shards, tiny configurations, and the trainer as a subprocess."""

import gc
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / folder) for folder in ("data", "logs", "records"))]

import train_gpt  # noqa: E402

# Where tiktoken's files lie beside the repository, its tests need no network.
if (REPOSITORY.parent / "shared" / "tiktoken_cache").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(REPOSITORY.parent / "shared" / "tiktoken_cache"))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; ./run.sh test leaves it out, CI runs it")
    config.addinivalue_line("markers", "gpu: needs CUDA; ./run.sh test -m gpu runs it")


GPU_TABLE: list[str] = []  # the lines that test_gpu.py leaves for the end


def versions() -> str:
    """What the tests run with."""
    torch = train_gpt.torch
    bfloat16 = "native" if train_gpt.bfloat16_is_native(torch.device("cpu")) else "emulated"
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
            f"CPU {torch.backends.cpu.get_cpu_capability()} with {bfloat16} bfloat16")


def pytest_report_header() -> str:
    return versions()


def pytest_terminal_summary(terminalreporter):
    """The versions, where -q has left the header out, and the table of test_gpu.py."""
    if terminalreporter.config.option.verbose < 0:
        terminalreporter.write_line(versions())
    if GPU_TABLE:
        terminalreporter.section("please send this table to the authors")
        outcomes = [f"{len(terminalreporter.stats.get(outcome, []))} {outcome}"
                    for outcome in ("passed", "failed", "error", "skipped")]
        for line in [*GPU_TABLE, f"| tests | {', '.join(outcomes)} |"]:
            terminalreporter.write_line(line)


TINY = {
    "DEVICE": "cpu", "DTYPE": "float32", "TOKENIZER_PATH": "byte260", "VOCAB_SIZE": "260",
    "NUM_LAYERS": "2", "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TRAIN_SEQ_LEN": "32",
    "TRAIN_BATCH_TOKENS": "1024", "VAL_BATCH_SIZE": "4096", "ITERATIONS": "4", "WARMUP_STEPS": "1",
    "WARMDOWN_ITERS": "2", "VAL_LOSS_EVERY": "2", "TRAIN_LOG_EVERY": "1", "MAX_WALLCLOCK_SECONDS": "0",
    "MUON_MOMENTUM_WARMUP_STEPS": "2", "COMPILE": "0",
    "MICRO_BATCH_TOKENS": "512",
}


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """A shard, written independently of data/prepare.py; header fields may be wrong on purpose."""
    tokens = np.asarray(tokens, dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.unlink(missing_ok=True)  # where an older file is mapped, it stays as it was
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def make_shards(folder: Path) -> Path:
    """A new folder `tiny` with two training shards and one validation shard of byte260 tokens."""
    data = folder / "tiny"
    data.mkdir()
    text = [4 + byte for byte in b"the quick brown fox jumps over the lazy dog. "] * 400
    for name, size in (("train_000000", 9000), ("train_000001", 5000), ("val_000000", 3000)):
        write_shard(data / f"tiny_{name}.bin", [1, *text[:size - 1]])
    return data


def tiny_config(**changes) -> train_gpt.Config:
    """The tiny configuration with lower-case changes, resolved as on one CPU."""
    known = {f.name.upper(): f for f in train_gpt.fields(train_gpt.Config)}
    values = {known[n].name: train_gpt.parse_value(known[n], text) for n, text in TINY.items()}
    values.update(grad_accum_steps=8, attn="math")
    return train_gpt.Config(**{**values, **changes})


def one_process() -> train_gpt.Ranks:
    return train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu"))


def micro_batches(config: train_gpt.Config, x, y) -> list[tuple]:
    """Inputs and targets as a loader splits them."""
    rows = config.micro_batch_tokens // config.train_seq_len
    return list(zip(x.split(rows), y.split(rows)))


def whole_batch(loader: train_gpt.TokenLoader, step: int) -> tuple:
    """A rank's inputs and targets of a step, from all its micro-batches."""
    return tuple(train_gpt.torch.cat(parts) for parts in zip(*loader.batches(step)))


def split_batch(config: train_gpt.Config, world_size: int) -> tuple[int, int]:
    """Spans per rank and tokens per step, as they are resolved for a number of ranks."""
    ranks = train_gpt.Ranks(0, world_size, train_gpt.torch.device("cpu"))
    resolved = train_gpt.resolve(train_gpt.replace(config, dtype="float32", compile="0"), ranks)
    return resolved.grad_accum_steps, resolved.train_batch_tokens


def read_checkpoint(path: Path) -> dict:
    return train_gpt.find_checkpoint(tiny_config(resume=str(path)))


def run_trainer(folder: Path, *arguments: str, ranks: int = 0, environment=None, timeout=240):
    """Runs the script in `folder`, by torchrun where `ranks` > 0. Returns the finished process."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    clean = {k: v for k, v in os.environ.items() if k not in TINY and k not in ("RUN_ID", "OUT_DIR")}
    if ranks:
        clean["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [*launcher, str(REPOSITORY / "train_gpt.py"), *arguments], cwd=folder, timeout=timeout,
        env={**clean, **(environment or {})}, capture_output=True, text=True, check=False)


def run_here(monkeypatch, folder: Path, *arguments: str) -> None:
    """The same in this process, which saves the start; SystemExit carries the script's message."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        train_gpt.main()
    finally:
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def tiny_arguments(data: Path, **changes) -> list[str]:
    """The tiny configuration as arguments of the script."""
    return [f"{name}={value}" for name, value in {**TINY, "DATA_PATH": str(data), **changes}.items()]


def events(folder: Path, run_id: str) -> list[dict]:
    lines = (folder / "logs" / f"{run_id}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
