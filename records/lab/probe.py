"""Measure what the minutes with a GPU are for; each call prints one table.

    python records/lab/probe.py time         ms of a step with flags of the compiler, each in a new process
    python records/lab/probe.py profile      the kernels of a step, by family
    python records/lab/probe.py world8       the parts of a step of rank 0 of eight, without the wire between them
    python records/lab/probe.py host         the same with 4,096 tokens a step, so that the host is the limit
    python records/lab/probe.py start        seconds from start to first step, with and without a compiler cache

NAME=value arguments reach train_gpt.py. On a CPU the model is tiny, to try the modes before there is a GPU. The
training text is random tokens. For two commits in turn, see bench.py.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

STARTED = time.perf_counter()  # after the import of torch
sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]

import train_gpt  # noqa: E402
from bench import write_data  # noqa: E402
from common import hardware, table  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

COMMON = "DATA_PATH=data TOKENIZER_PATH=data/vocabulary.json RUN_ID=probe WARMUP_STEPS=0 VAL_LOSS_EVERY=0"
TINY = ("NUM_LAYERS=4 MODEL_DIM=128 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=64 TRAIN_BATCH_TOKENS=4096 "
        "VAL_BATCH_SIZE=4096 DEVICE=cpu")
FEW_TOKENS = "TRAIN_SEQ_LEN=512 TRAIN_BATCH_TOKENS=4096"
RANKS = 8
FLAGS = ("", "TORCHINDUCTOR_ENABLE_PDL=1", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1",
         "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1", "")  # the first again, to show how far it repeats
FAMILIES = {  # of kernels on a GPU, of operators on a CPU: the first pattern that a name contains
    "attention": r"flash|fmha|cudnn.*sdpa|sdpa|scaled_dot_product|attention",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|aten::(add|b)?mm|aten::(add|badd)?bmm|mkldnn.*linear",
    "compiled elementwise": r"^triton_|^graph_|cpp_fused|CompiledFxGraph",
    "copies": r"memcpy|memset|copy|aten::(cat|stack|fill_|zero_)",
    "optimizer": r"multi_tensor|fused_adam|foreach",
    "others": ""}


# ---- Running steps ---------------------------------------------------------------------------------------


def make_trainer(words: list[str], world_size: int = 1) -> tuple[train_gpt.Trainer, train_gpt.TokenLoader]:
    """A trainer, and random tokens in this folder, perhaps as rank 0 of several, whose exchanges only copy."""
    config, _ = train_gpt.load_config(words, {})
    if world_size > 1:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        ranks = train_gpt.Ranks(0, world_size, torch.device(kind, 0 if kind == "cuda" else None))
    else:
        ranks = train_gpt.start_ranks(config)
    if not Path("data").exists():
        write_data(Path("data"), config.vocab_size, config.train_seq_len)
    torch.set_float32_matmul_precision(config.matmul_precision)
    config = train_gpt.resolve(config, ranks)
    loader, trainer = train_gpt.TokenLoader(config, ranks), train_gpt.Trainer(config, ranks)
    if config.compile == "1":
        trainer.model.compile(dynamic=False, fullgraph=True)
    if world_size > 1:  # the fake group has no result that DDP could wait for
        trainer.ddp.register_comm_hook(None, own_gradients)
    return trainer, loader


def own_gradients(state, bucket) -> torch.futures.Future[torch.Tensor]:
    """The average of the ranks' gradients, as if all had the same."""
    tensor = bucket.buffer()
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(tensor)
    return future


def step(trainer: train_gpt.Trainer, loader: train_gpt.TokenLoader) -> None:
    trainer.train_step(loader.batches(trainer.clock.step))
    trainer.clock.step += 1


def ms_of_steps(trainer: train_gpt.Trainer, loader: train_gpt.TokenLoader, steps: int) -> float:
    """The mean ms of a step; only the end waits for the device."""
    start_ms = trainer.ranks.now_ms()
    for _ in range(steps):
        step(trainer, loader)
    return (trainer.ranks.now_ms() - start_ms) / steps


class Stopwatch:
    """Marks on the device's timeline, or on the clock of a CPU."""
    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.marks = []

    def mark(self, name: str) -> None:
        """The time since the mark before is that of `name`."""
        event = time.perf_counter()
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((name, event))

    def parts(self) -> dict[str, list[float]]:
        """ms of each name, in the order of the marks."""
        if self.is_cuda:
            torch.cuda.synchronize()
        found = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:]):
            ms = before.elapsed_time(after) if self.is_cuda else 1000 * (after - before)
            found.setdefault(name, []).append(ms)
        return found


def marked(function, watch: Stopwatch, before: str, after: str):
    """The function, with a mark before it and one after it."""
    def call(*args, **kwargs):
        watch.mark(before)
        value = function(*args, **kwargs)
        watch.mark(after)
        return value
    return call


# ---- The modes -------------------------------------------------------------------------------------------


def parts(words: list[str], steps: int) -> list[list]:
    """Rows of the parts of a step of rank 0 of eight."""
    trainer, loader = make_trainer(words, RANKS)
    ms_of_steps(trainer, loader, 3)
    whole_ms = ms_of_steps(trainer, loader, steps)
    watch = Stopwatch(trainer.ranks.device)
    train_gpt.nn.utils.get_total_norm = marked(train_gpt.nn.utils.get_total_norm, watch, "forward, backward, exchange", "norm")
    for optimizer in trainer.optimizers:
        optimizer.step = marked(optimizer.step, watch, "rest", type(optimizer).__name__)
    for _ in range(steps):
        watch.mark("rest")
        step(trainer, loader)
    if not all(p.isfinite().all() for p in trainer.model.parameters()):
        sys.exit("probe.py: the exchange of this PyTorch's fake process group does not copy: weights are not finite")
    found = watch.parts()
    rows = [[name, f"{sum(ms) / steps:.2f}", f"{min(ms):.2f} to {max(ms):.2f}"] for name, ms in found.items()]
    return [*rows, ["a step, without marks", f"{whole_ms:.2f}", ""]]


def profile(words: list[str], steps: int) -> list[list]:
    """Rows of the families of kernels in a step."""
    from torch.profiler import ProfilerActivity
    trainer, loader = make_trainer(words)
    ms_of_steps(trainer, loader, 3)
    on_gpu = trainer.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with torch.profiler.profile(activities=activities) as profiler:
        whole_ms = ms_of_steps(trainer, loader, steps)
    found = {family: [0.0, 0, {}] for family in FAMILIES}
    for event in profiler.key_averages():
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        if is_kernel != on_gpu or event.key.startswith("ProfilerStep"):
            continue
        ms = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / steps
        family = next(name for name, pattern in FAMILIES.items() if re.search(pattern, event.key, re.I))
        found[family][0] += ms
        found[family][1] += event.count
        found[family][2][event.key] = ms
    rows = [[family, f"{ms:.2f}", f"{count / steps:.0f}", max(names, key=names.get, default="")[:60]]
            for family, (ms, count, names) in found.items()]
    return [*rows, ["a step", f"{whole_ms:.2f}", "", ""]]


def worker(words: list[str], steps: int) -> dict:
    """What a new process measures: ms of steps in three groups, seconds until the first is done, seconds of compiling."""
    trainer, loader = make_trainer(words)
    ms_of_steps(trainer, loader, 1)
    first_s = time.perf_counter() - STARTED
    ms_of_steps(trainer, loader, 2)
    groups = [ms_of_steps(trainer, loader, max(1, steps // 3)) for _ in range(3)]
    names, seconds = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    phases = {name: float(total) for name, total in zip(names, seconds)}
    return {"ms": groups, "first_s": first_s, "phases": phases}


def new_process(words: list[str], steps: int, environment: dict[str, str]) -> dict:
    """Run worker() in a new process. Exits if that fails."""
    command = [sys.executable, __file__, "worker", "--steps", str(steps), *words]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"probe.py: {environment} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def flags(words: list[str], steps: int, chosen: list[str]) -> list[list]:
    """Rows of the flags: ms of a step and seconds of the start, each in a new process with an empty cache."""
    rows, base = [], 0.0
    for flag in chosen:
        with tempfile.TemporaryDirectory() as cache:
            pairs = dict(pair.split("=", 1) for pair in flag.split())
            found = new_process(words, steps, {"TORCHINDUCTOR_CACHE_DIR": cache, **pairs})
        ms = statistics.median(found["ms"])
        base = base or ms
        rows.append([flag or "none", f"{ms:.2f}", f"{min(found['ms']):.2f} to {max(found['ms']):.2f}", f"{ms / base:.4f}",
                     f"{found['first_s']:.1f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def starts(words: list[str]) -> list[list]:
    """Rows of three starts: with an empty compiler cache, with the same again, and without any."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        kept = {"TORCHINDUCTOR_CACHE_DIR": cache}
        for name, environment in (("first, empty cache", kept), ("second, the same cache", kept), ("third, the same cache", kept),
                                  ("caches off", {**kept, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})):
            found = new_process(words, 3, environment)
            longest = sorted(found["phases"].items(), key=lambda phase: -phase[1])[:4]
            rows.append([name, f"{found['first_s']:.1f}", ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in longest)])
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


HEADERS = {
    "time": "| flags of the compiler | ms per step | three groups | ratio | start to first step, s |",
    "profile": "| family | ms per step | launches | the longest |",
    "world8": "| part | ms per step | range |",
    "host": "| part | ms per step | range |",
    "start": "| start | seconds to the first step | longest phases of compiling, s |"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*HEADERS, "worker"])
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--flags", action="append", help="environment of a process, NAME=value NAME=value; may be repeated")
    options = parser.parse_intermixed_args()
    tiny = [] if torch.cuda.is_available() else TINY.split()
    few = FEW_TOKENS.split() if options.mode == "host" else []
    words = [*COMMON.split(), *tiny, *few, *options.settings]
    if options.mode == "worker":
        print(json.dumps(worker(options.settings, options.steps)))
        return
    print(f"{hardware()}, PyTorch {torch.__version__}, {options.mode}: {' '.join(options.settings) or 'the defaults'}\n")
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        if options.mode == "time":
            rows = flags(words, options.steps, options.flags or list(FLAGS))
        elif options.mode == "start":
            rows = starts(words)
        else:
            rows = (profile if options.mode == "profile" else parts)(words, options.steps)
        print("\n".join(table(HEADERS[options.mode], rows)))
        os.chdir("/")


if __name__ == "__main__":
    main()
