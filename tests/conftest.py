"""What the tests share: the scripts on the path, the trainer in this process and as a subprocess."""

import contextlib
import io
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers side by side: more threads than cores are many times slower
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before PyTorch is loaded; tools/common.py says why

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / folder) for folder in ("data", "tools", "tools/huggingface", "records"))]

import train_gpt  # noqa: E402

GOLDEN = Path(os.environ.get("GOLDEN_PATH", REPOSITORY.parent / "shared" / "golden")).resolve()
MODEL = GOLDEN.parent / "tokenizers" / "fineweb_1024_bpe.model"
TINY = {
    "DEVICE": "cpu", "DTYPE": "float32", "TOKENIZER_PATH": "byte260", "VOCAB_SIZE": "260", "NUM_LAYERS": "2",
    "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TRAIN_SEQ_LEN": "32", "TRAIN_BATCH_TOKENS": "1024",
    "MICRO_BATCH_TOKENS": "512", "VAL_BATCH_SIZE": "4096", "ITERATIONS": "4", "WARMUP_STEPS": "1", "WARMDOWN_ITERS": "2",
    "VAL_LOSS_EVERY": "2", "TRAIN_LOG_EVERY": "1", "MAX_WALLCLOCK_SECONDS": "0", "MUON_MOMENTUM_WARMUP_STEPS": "2",
    "COMPILE": "0", "OUT_DIR": ".",
}

# Where tiktoken's files lie beside the repository, its tests need no network.
if (REPOSITORY.parent / "shared" / "tiktoken_cache").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(REPOSITORY.parent / "shared" / "tiktoken_cache"))


@pytest.fixture(autouse=True)
def attention_is_put_back():
    """A run leaves one kernel of PyTorch's attention enabled, or none."""
    flags = train_gpt.torch.backends.cuda
    before = {name: getattr(flags, f"{name}_sdp_enabled")() for name in train_gpt.SDP_OF_ATTN.values()}
    yield
    for name, is_on in before.items():
        getattr(flags, f"enable_{name}_sdp")(is_on)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; ./run.sh test leaves it out, CI runs it")
    config.addinivalue_line("markers", "gpu: needs CUDA; ./run.sh test -m gpu runs it")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers(config):
    """How many tests run at a time: one for each core, up to four; on a GPU, one after the other."""
    return 0 if config.option.markexpr == "gpu" else min(4, os.cpu_count() or 1)


GPU_TABLE: list[str] = []  # the lines that test_gpu.py leaves for the end


def versions() -> str:
    """What the tests run with."""
    torch = train_gpt.torch
    bfloat16 = "native" if train_gpt.bfloat16_is_native(torch.device("cpu")) else "emulated"
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
            f"CPU {torch.backends.cpu.get_cpu_capability()} with {bfloat16} bfloat16")


def pytest_terminal_summary(terminalreporter):
    """The versions, and the table of test_gpu.py."""
    terminalreporter.write_line(versions())
    if GPU_TABLE:
        terminalreporter.section("please send this table to the authors")
        outcomes = [f"{len(terminalreporter.stats.get(outcome, []))} {outcome}"
                    for outcome in ("passed", "failed", "error", "skipped")]
        for line in [*GPU_TABLE, f"| tests | {', '.join(outcomes)} |"]:
            terminalreporter.write_line(line)


# ---- Tiny shards, settings and runs ------------------------------------------------------------------------


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


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Such a folder, which no test may change."""
    return make_shards(tmp_path_factory.mktemp("data"))


def tiny_config(**changes) -> train_gpt.Config:
    """The tiny configuration with lower-case changes, resolved as on one CPU."""
    values = {name.lower(): train_gpt.parse_value(name, text) for name, text in TINY.items()}
    values.update(grad_accum_steps=8, attn="math")
    return train_gpt.Config(**{**values, **changes})


def one_process() -> train_gpt.Ranks:
    return train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu"))


def tiny_arguments(data: Path, **changes) -> list[str]:
    """The tiny configuration as arguments of the script."""
    return [f"{name}={value}" for name, value in {**TINY, "DATA_PATH": str(data), **changes}.items()]


def events(folder: Path, run_id: str) -> list[dict]:
    lines = (folder / "logs" / f"{run_id}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_trainer(folder: Path, *arguments: str, ranks: int = 0, environment=None, script=REPOSITORY / "train_gpt.py"):
    """Runs a script in `folder`, by torchrun where `ranks` > 0. Returns the finished process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    clean = {k: v for k, v in os.environ.items() if k not in TINY and k not in ("RUN_ID", "OUT_DIR")}
    if ranks:
        clean["OMP_NUM_THREADS"] = "1"
    return subprocess.run([sys.executable, *launcher, str(script), *map(str, arguments)], cwd=folder, timeout=600,
                          env={**clean, **(environment or {})}, capture_output=True, text=True, check=False)


def run_script(monkeypatch, script, *arguments) -> None:
    """Runs the main() of a script that was imported; SystemExit carries its error."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
    script.main()


def run_here(monkeypatch, folder: Path, *arguments: str) -> None:
    """run_trainer in this process, which saves the start; SystemExit carries what it wrote to stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            status = train_gpt.main()
    finally:
        print(errors.getvalue(), file=sys.stderr, end="")
    if status:
        raise SystemExit(errors.getvalue().strip() if status == 1 else status)
