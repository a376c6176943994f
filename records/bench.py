"""Measure how fast train_gpt.py is, alone or in turn with another commit.

    python records/bench.py                                      the configurations of this device
    python records/bench.py cpu-small --against HEAD~3           two commits, A B A B
    python records/bench.py gpu-default --ranks 8 COMPILE=0      eight processes, other settings

Every measurement is a fresh process on random tokens: no data set is needed. Whole steps are timed
first, and undisturbed; the phases come from further steps, in which the device is waited for after
each one. MFU is against the rate of a large matrix product that the same process measures.
"""
import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=0 MAX_WALLCLOCK_SECONDS=600 WARMUP_STEPS=1 RUN_ID=bench "
          "OUT_DIR=out DATA_PATH=tokens TOKENIZER_PATH=bench.model")
CONFIGURATIONS = {  # settings, whole steps that are timed, tokens of validation
    "cpu-small": ("NUM_LAYERS=4 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=512 "
                  "TRAIN_BATCH_TOKENS=32768", 4, 1 << 16),
    "cpu-default-shape": ("TRAIN_SEQ_LEN=1024 TRAIN_BATCH_TOKENS=16384", 2, 1 << 15),
    "gpu-default": ("", 30, 1 << 23),
    "gpu-1024": ("TRAIN_SEQ_LEN=1024 TRAIN_BATCH_TOKENS=524288", 30, 1 << 23),
    "gpu-124M": ("NUM_LAYERS=12 MODEL_DIM=768 NUM_HEADS=12 NUM_KV_HEADS=12 MLP_MULT=4 VOCAB_SIZE=50304 "
                 "TRAIN_SEQ_LEN=1024 TRAIN_BATCH_TOKENS=8192 VAL_BATCH_SIZE=65536 GRAD_ACCUM_STEPS=1", 50, 1 << 20)}
PHASES = ("load", "forward", "backward", "synchronise", "optimizer")
PHASE_STEPS = 2


class Tokenizer:
    """Stands in for SentencePiece's processor: a vocabulary of any size, of one letter a token."""

    def __init__(self, model_file):
        self.size = int(os.environ["BENCH_VOCABULARY"])

    def vocab_size(self):
        return self.size

    def bos_id(self):
        return 1

    def encode(self, text, out_type):
        return ["\u2581a"]

    def id_to_piece(self, i):
        return "a"

    def is_control(self, i):
        return i == 1

    def is_unknown(self, i):
        return i == 0

    is_unused = is_byte = lambda self, i: False


def write_tokens(folder: Path, vocabulary: int, train: int, val: int) -> None:
    """Two shards of random tokens."""
    import numpy as np
    folder.mkdir()
    for split, count in (("train", train), ("val", val + 1)):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, count
        tokens = np.random.default_rng(count).integers(0, vocabulary, count, dtype=np.uint16)
        (folder / f"bench_{split}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())


class Meter:
    """Times the parts of a run of another module, whatever their insides are. The clock of whole steps starts behind
    the first `skip` of them: on a GPU the trainer waits for each of the first ten, to log it."""

    def __init__(self, steps: int, skip: int = 0):
        self.result, self.phases, self.inner = {}, dict.fromkeys(PHASES, 0.0), [0.0]
        self.calls, self.steps, self.skip, self.counts = 0, steps, skip, False

    def now(self) -> float:
        import torch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def phase(self, name: str, function):
        """The function, timed without what is timed inside of it."""
        def timed(*args, **kwargs):
            if not self.counts:
                return function(*args, **kwargs)
            start = self.now()
            self.inner.append(0.0)
            value = function(*args, **kwargs)
            spent = self.now() - start
            self.phases[name] += spent - self.inner.pop()
            self.inner[-1] += spent
            return value
        return timed

    def whole(self, name: str, function, count=lambda *args: None):
        """The function; its time goes to `name` of the result, as a list of one entry a call."""
        def timed(*args, **kwargs):
            start = self.now()
            value = function(*args, **kwargs)
            self.result.setdefault(name, []).append(self.now() - start)
            count(*args)
            return value
        return timed

    def step(self, train_step):
        """The training step: the first is the warm-up, then whole ones, then those with phases."""
        def timed(run, *args, **kwargs):
            import torch
            self.calls += 1
            if self.calls == 2 + self.skip:
                self.first = self.now()
            if self.calls == 2 + self.skip + self.steps:
                self.result["step_s"] = (self.now() - self.first) / self.steps
                name = "batch" if hasattr(run.loader, "batch") else "next_batch"  # as it was called until c5ae37f
                setattr(run.loader, name, self.phase("load", getattr(run.loader, name)))
                if hasattr(run, "forward"):  # until 7b52469 the compiled model had a name of its own
                    run.forward = self.phase("forward", run.forward)
                else:
                    type(run.model).__call__ = self.phase("forward", type(run.model).__call__)
                torch.Tensor.backward = self.phase("backward", torch.Tensor.backward)
                for name in ("all_reduce", "all_gather"):
                    function = getattr(torch.distributed, name)
                    setattr(torch.distributed, name, self.phase("synchronise", function))
                for optimizer in run.optimizers:
                    optimizer.step = self.phase("optimizer", optimizer.step)
            self.counts = self.calls >= 2 + self.skip + self.steps
            value = train_step(run, *args, **kwargs)
            self.counts = False
            if self.calls == 1:
                self.now()
                self.result["start_s"] = time.time() - float(os.environ["BENCH_STARTED"])
            return value
        return timed


def matmul_tflops(device: str, dtype: str) -> float:
    """The device's rate in a large matrix product, best of ten."""
    import torch
    size, meter = 8192 if device == "cuda" else 2048, Meter(0)
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    times = []
    for _ in range(10):
        start = meter.now()
        a @ b
        times.append(meter.now() - start)
    return 2 * size ** 3 / min(times) / 1e12


def measure(root: str, steps: int) -> None:
    """The worker: runs train_gpt.py of `root` with the arguments of this process, prints JSON."""
    import resource
    sys.modules["sentencepiece"] = types.ModuleType("sentencepiece")
    sys.modules["sentencepiece"].SentencePieceProcessor = Tokenizer
    sys.path.insert(0, root)
    import train_gpt
    import torch
    meter, seen, state = Meter(steps, 10 * torch.cuda.is_available()), {}, {}
    result = meter.result
    train_gpt.train_step = meter.step(train_gpt.train_step)
    train_gpt.evaluate = meter.whole("val_s", train_gpt.evaluate, lambda run: seen.update(run=run))
    train_gpt.quantize = meter.whole("quantize_s", train_gpt.quantize, lambda *a: state.update(a[0]))
    train_gpt.export = meter.whole("export_s", train_gpt.export)
    train_gpt.zlib.compress = meter.whole("zlib_s", train_gpt.zlib.compress)
    sys.stdout, console = io.StringIO(), sys.stdout
    train_gpt.main()
    sys.stdout = console
    run = seen["run"]
    if run.ranks.rank:
        return
    config, tokens = run.config, len(run.val_tokens) - 1
    result["threads"] = torch.get_num_threads()
    result["export_s"] = result["export_s"][0] - result["val_s"][-1]
    result["val_tokens_per_s"] = tokens / result["val_s"][-1]
    result["tokens_per_s"] = config.train_batch_tokens / result["step_s"]
    result["ms"] = {name: 1000 * t / PHASE_STEPS for name, t in meter.phases.items()}
    result["tflops"] = matmul_tflops(config.device, config.dtype)
    flops = run.model.flops_per_token() * result["tokens_per_s"] / run.ranks.world_size
    result["mfu"] = flops / 1e12 / result["tflops"]
    cuda, peak = config.device == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result["peak_mib"] = (torch.cuda.max_memory_allocated() if cuda else 1024 * peak) >> 20
    start = time.perf_counter()
    for t in state.values():
        if t.ndim == 2 and t.numel() > 65536:
            torch.quantile(t.detach().float().cpu().abs(), 0.9999984, dim=1)
    result["quantile_s"] = time.perf_counter() - start
    print(json.dumps(result))


def launch(root: Path, name: str, options, folder: Path) -> dict:
    """One measurement of the tree `root` in a process of its own, or as many as there are ranks."""
    import torch
    settings, steps, val = CONFIGURATIONS[name]
    skip = 10 * torch.cuda.is_available()
    steps = options.steps or steps
    variables = dict(pair.split("=", 1) for pair in f"{COMMON} {settings}".split() + options.settings)
    vocabulary = int(variables.get("VOCAB_SIZE", 1024))
    with tempfile.TemporaryDirectory() as place:
        write_tokens(Path(place, "tokens"), vocabulary, 1 << 23, val)
        arguments = [f"{k}={v}" for k, v in {**variables, "ITERATIONS": str(steps + skip + PHASE_STEPS)}.items()]
        launcher = [sys.executable]
        if options.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        environment = {**os.environ, "BENCH_VOCABULARY": str(vocabulary), "BENCH_STARTED": str(time.time()),
                       "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        done = subprocess.run([*launcher, __file__, "--worker", str(root), str(steps), *arguments], cwd=place,
                              env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} of {root} failed")
    return json.loads(done.stdout.splitlines()[-1])


def commit_of(revision: str) -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", revision]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def unpack(revision: str, folder: Path) -> Path:
    """The tree of a commit, in a folder."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / "tree", filter="data")
    return folder / "tree"


def table(name: str, sides: dict[str, list[dict]]) -> str:
    """Markdown: a row a quantity, a column a commit; median, and smallest to largest."""
    def values(rows, key):
        parts = key.split(".")
        found = [row[parts[0]][parts[1]] if len(parts) > 1 else row[parts[0]] for row in rows]
        return [sum(v) if isinstance(v, list) else v for v in found]

    def cell(numbers, digits):
        text = f"{statistics.median(numbers):,.{digits}f}"
        return text if len(numbers) == 1 else f"{text} ({min(numbers):,.{digits}f} to {max(numbers):,.{digits}f})"

    rows = [("tokens/s, whole steps", "tokens_per_s", 0), ("MFU of the measured rate", "mfu", 3),
            ("matrix product, TFLOP/s", "tflops", 2), *((f"{p}, ms a step", f"ms.{p}", 1) for p in PHASES),
            ("peak memory, MiB", "peak_mib", 0), ("validation tokens/s", "val_tokens_per_s", 0),
            ("export, s", "export_s", 2), ("of it zlib, s", "zlib_s", 2), ("of it quantizing, s", "quantize_s", 3),
            ("torch.quantile by row, s", "quantile_s", 3)]
    lines = [f"| {name} | " + " | ".join(sides) + " |", "|---|" + "---|" * len(sides)]
    for title, key, digits in rows:
        lines.append(f"| {title} | " + " | ".join(cell(values(r, key), digits) for r in sides.values()) + " |")
    for title, part in (("first start to first step, s", slice(0, 1)), ("later starts, s", slice(1, None))):
        cells = [cell(values(r[part], "start_s"), 1) if r[part] else "" for r in sides.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        root, steps = sys.argv[2], int(sys.argv[3])
        sys.argv = ["train_gpt.py", *sys.argv[4:]]
        measure(root, steps)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="configurations, and NAME=value settings for all of them: "
                        + ", ".join(CONFIGURATIONS))
    parser.add_argument("--against", metavar="REV", help="another commit, measured in turn with this checkout")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each commit (default 3)")
    parser.add_argument("--steps", type=int, default=0, help="whole steps that are timed")
    parser.add_argument("--ranks", type=int, default=1, help="processes, started by torchrun")
    parser.add_argument("--json", type=Path, help="file that receives all measurements")
    options = parser.parse_intermixed_args()
    options.settings = [word for word in options.what if "=" in word]
    names = [word for word in options.what if "=" not in word]
    if unknown := set(names) - CONFIGURATIONS.keys():
        parser.error(f"no configuration {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}")
    import torch
    names = names or [name for name in CONFIGURATIONS if name.startswith("gpu") == torch.cuda.is_available()]
    changed = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], capture_output=True,
                             text=True, check=True).stdout
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() + " CPU"
    print(f"{device}, {os.cpu_count()} cores, PyTorch {torch.__version__}, {options.ranks} ranks, "
          f"{options.rounds} rounds {' '.join(options.settings)}\n", flush=True)
    everything = {}
    with tempfile.TemporaryDirectory() as temporary:
        trees = {commit_of("HEAD") + " and changes" * bool(changed): ROOT}
        if options.against:
            trees = {commit_of(options.against): unpack(options.against, Path(temporary)), **trees}
        for name in names:
            sides = {side: [] for side in trees}
            for _ in range(options.rounds):
                for i, (side, tree) in enumerate(trees.items()):
                    cache = Path(temporary, f"{name}-{i}")
                    sides[side].append(launch(tree, name, options, cache))
            print(table(name, sides) + "\n", flush=True)
            everything[name] = sides
            if options.json:
                options.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
