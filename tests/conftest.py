"""What the tests share: the scripts on the path, the trainer in this process and as a subprocess."""

import contextlib
import gc
import io
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers side by side: more threads than cores are many times slower
    os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / folder) for folder in ("data", "logs", "records", "records/lab"))]

import train_gpt  # noqa: E402
from tiny import (TINY, events, make_shards, make_trainer, one_process, read_checkpoint, silent_log,  # noqa: E402, F401
                  tiny_arguments, tiny_config, write_shard)


def flash_groups_heads() -> bool:
    """Whether PyTorch's flash kernel takes grouped heads on CPUs: that of 2.13 does, that of 2.8 does not."""
    q, k = train_gpt.torch.ones(1, 2, 8, 16), train_gpt.torch.ones(1, 1, 8, 16)
    with train_gpt.torch.nn.attention.sdpa_kernel(train_gpt.torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        try:
            train_gpt.causal_attention(q, k, k, "flash")
        except RuntimeError:
            return False
    return True


PLAIN_KERNEL = "flash" if flash_groups_heads() else "math"  # what CPUs run if the model is not compiled

# Where tiktoken's files lie beside the repository, its tests need no network.
if (REPOSITORY.parent / "shared" / "tiktoken_cache").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(REPOSITORY.parent / "shared" / "tiktoken_cache"))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; ./run.sh test leaves it out, CI runs it")
    config.addinivalue_line("markers", "gpu: needs CUDA; ./run.sh test -m gpu runs it")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers(config):
    """How many tests run at a time: one for each core, up to four; on a GPU, one after the other."""
    return 0 if config.option.markexpr == "gpu" else min(4, os.cpu_count() or 1)


def pytest_collection_modifyitems(config, items):
    """Side by side, files with slow tests come first, so that no process is left with a long one at the end."""
    if config.getoption("dist", "no") != "no":
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


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
    """The same in this process, which saves the start; SystemExit carries what it wrote to stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in signal.Signals if number.name in train_gpt.STOPS}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            status = train_gpt.main()
    finally:
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        print(errors.getvalue(), file=sys.stderr, end="")
    if status:
        raise SystemExit(errors.getvalue().strip() if status == 1 else status)
