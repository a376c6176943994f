"""What tools and records share: folders, runs, the machine, tables and statistics."""

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import chdir, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMI_S = 30  # as long as the trainer waits for nvidia-smi
sys.path.insert(0, str(ROOT))
# For the runs that are started: glibc keeps freed memory for the next step, and takes huge pages, which is faster on CPUs.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc."
                      "trim_threshold=0xffffffffffffffff")
# OpenMP's threads spin while they wait for one another. Only beside a busy program are steps faster if they soon sleep instead.
if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from events import given_settings, interpreter, read_events, typed  # noqa: E402
from settings import words_of  # noqa: E402


def require_packages() -> None:
    """Exit with status 2 and what to install if the packages that records and ablations need are missing."""
    missing = [package for package in ("scipy", "matplotlib") if not find_spec(package)]
    if missing:
        command = f"{interpreter()} -m pip install -r {typed(ROOT / 'requirements-dev.txt')}"
        print(f"{' and '.join(missing)} must be installed: {command}", file=sys.stderr)
        sys.exit(2)


def stop_once(number, frame) -> None:
    """Raise KeyboardInterrupt. Further signals change nothing: the trainers are being stopped."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, lambda *_: None)  # Trainers would inherit SIG_IGN.
    raise KeyboardInterrupt


def run_command(main) -> None:
    """Run `main`, and exit with the status that it returns: 2 after a mistake or with a full disk, 130 if it is stopped."""
    name = Path(sys.argv[0]).name
    signal.signal(signal.SIGTERM, stop_once)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # which a script's shell sets in the background
        signal.signal(signal.SIGINT, stop_once)
    try:
        status = main()
    except (OSError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on after the runs that have ended", file=sys.stderr)
        status = 130
    sys.exit(status)


def load_json(path: Path):
    """Parse a JSON file. Raises ValueError with its name."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that a stop at any moment, or a full disk, leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- Runs of the trainer -------------------------------------------------------------------------------


def has_finished(root: Path, run_id: str, settings: dict[str, str], ranks: int) -> bool:
    """Whether logs/RUN_ID.jsonl of the checkout `root` is a whole run of its script with these settings, ranks and data, and
    this PyTorch."""
    from train_gpt import load_config
    try:
        events = read_events(root / "logs" / f"{run_id}.jsonl")
        with chdir(root):  # where relative paths begin
            _, overrides = load_config(words_of(settings), dict(os.environ))
        is_same = given_settings(events[0]) == given_settings({"overrides": overrides})
        script = (root / "train_gpt.py").read_text(encoding="utf-8")
        log = (root / "logs" / f"{run_id}.txt").read_text(encoding="utf-8")
        is_same = is_same and log.startswith(script + "\n=") and events[0]["world_size"] == ranks
        is_same = is_same and events[0]["torch"].split("+")[0] == version("torch").split("+")[0]
        manifest = root / events[0]["config"]["DATA_PATH"] / "manifest.json"
        if manifest.exists():  # the text of another day may have the same name
            splits = json.loads(manifest.read_text(encoding="utf-8"))["splits"]
            digests = {entry["file"]: entry.get("sha256") for split in splits.values() for entry in split["shards"]}
            is_same = is_same and events[0]["data_sha256"] == digests
    except (OSError, ValueError, LookupError):  # no log, or a power failure truncated it
        return False
    return is_same and any(event["event"] == "final" and event["val_bpb"] is not None for event in events)


def can_lock(file) -> bool:
    """Lock an open file, unless another program holds it. Return whether it is ours."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; Lustre without flock
        pass
    return True


@contextmanager
def only_one(lock: Path):
    """Hold a lock file, and yield it open for the trainers to inherit. Raises ValueError if another command holds it, or a trainer
    that such a command has left."""
    lock.parent.resolve().mkdir(exist_ok=True)  # An error names a dead link's target.
    with lock.open("w") as file:
        if not can_lock(file):
            raise ValueError(f"another command trains these runs, or a trainer that it has left ({lock} is locked): wait for it")
        yield file


# ---- The machine ---------------------------------------------------------------------------------------


def gpu_names() -> list[str]:
    """Return the name of each GPU that nvidia-smi lists."""
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    arguments = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False, timeout=SMI_S)
    except subprocess.TimeoutExpired:
        print(f"warning: nvidia-smi has not answered in {SMI_S} s, so no GPU is known; does its driver hang?", file=sys.stderr)
        return []
    lines = result.stdout.splitlines() if result.returncode == 0 else []  # else they say what is wrong
    return [line.strip() for line in lines if line.strip()]


def count_cores() -> int:
    """Return the number of CPU cores that this process may use: at most its container's quota."""
    from train_gpt import count_cores
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(count_cores(here)))


def hardware(uses_gpus: bool = True) -> str:
    """Return the name of the machine: its GPUs, if it has some and they are used, else its CPU and cores."""
    if uses_gpus and (names := gpu_names()):
        return f"{len(names)}x {names[0]}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file() and (match := re.search(r"model name\s*: (.+)", cpuinfo.read_text(encoding="utf-8"))):
        model = match[1]
    return f"{count_cores()} cores of {model}"


def measure_tflops(start: dict) -> float:
    """Return the speed of this machine's matrix products in TFLOP/s, in the type and the width of a run, from its "config"
    event."""
    import torch
    config = start["config"]
    torch.set_num_threads(start["threads"] * start["world_size"])
    dtype, width = getattr(torch, config["DTYPE"]), config["MODEL_DIM"]
    a, b = (torch.ones(shape, dtype=dtype, device=config["DEVICE"]) for shape in ((4096, width), (width, 4 * width)))
    fastest = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * 4096 * width * 4 * width / fastest / 1e12


def describe_machine(start: dict) -> str:
    """Return the name of this machine for a run, from its "config" event, and its speed, on which scores of a time limit depend; if
    it ran on another GPU, the name."""
    gpu, config = start.get("gpu"), start["config"]
    name = f"{start['world_size']}x {gpu}" if gpu else hardware(uses_gpus=False)
    if gpu and not gpu.startswith(tuple(gpu_names())):  # MIG adds to the name
        return name
    return f"{name}, {measure_tflops(start):.2g} TFLOP/s in {config['DTYPE']} at width {config['MODEL_DIM']}"


# ---- Tables and statistics -----------------------------------------------------------------------------


def table(header: str, rows) -> list[str]:
    """Return the lines of a Markdown table. `header` is its first line, a row is a list of cells, which may have any text."""
    rule = "|---" * (header.count("|") - header.count(r"\|") - 1) + "|"
    return [header, rule, *(f"| {' | '.join(map(markdown_cell, row))} |" for row in rows)]


def markdown_cell(value: object) -> str:
    """Return a value as a cell of a Markdown table: a | or the end of a line would end it, and a backslash would escape ours."""
    return re.sub(r"(\\*)\|", r"\1\1\\|", " ".join(str(value).splitlines()))


def with_deviation(scores: list[float]) -> str:
    """Return the mean of scores and, if there are several, ± their sample standard deviation."""
    spread = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.4f}{spread}"


def score(result: dict) -> float:
    """Return the bits per byte that rank a record or a seed: of the original text where that is known."""
    original = result.get("val_bpb_original")
    return result["val_bpb"] if original is None else original


def compare_scores(track: dict, ours: list[dict], theirs: list[dict]) -> dict | None:
    """Test whether our mean bits per byte are lower than theirs by more than the track's margin: a one-sided Welch
    t-test (unequal variances). Return margin, numbers of seeds, p and difference; None with fewer than two seeds on a
    side. The margin of a track is in nats per token; their scores tell the bits per byte of a nat."""
    if min(len(ours), len(theirs)) < 2:
        return None
    from scipy import stats
    margin = 0.0
    if nats := track.get("margin_nats"):
        margin = nats * theirs[0]["val_bpb"] / theirs[0]["val_loss"]
    our_scores = [score(seed) for seed in ours]
    their_scores = [score(seed) for seed in theirs]
    shifted = [value - margin for value in their_scores]
    test = stats.ttest_ind(our_scores, shifted, equal_var=False, alternative="less")
    return {"margin": margin, "n": [len(ours), len(theirs)], "p": float(test.pvalue),
            "difference": statistics.mean(our_scores) - statistics.mean(their_scores)}


if __name__ == "__main__":
    print(f"usage: other scripts import this file. {__doc__}")
