"""Compare the speed of train_gpt.py between commits or settings, from its logs.

    python tools/bench.py                                  this checkout, in the device's configurations
    python tools/bench.py cpu-small --against HEAD~3       two commits in turn: A, B, A, B, A, B
    python tools/bench.py gpu-default --with 'ATTN=flash TORCHINDUCTOR_ENABLE_PDL=1'    this checkout, without and with these
    python tools/bench.py gpu-default --ranks 8 COMPILE=0  eight processes, with another setting
    python tools/bench.py --parts --profile traces         also forward, backward, optimizer; a table of the slowest kernels

The compiler's settings that may help a GPU, each measured in turn with none:

    python tools/bench.py gpu-preset --with TORCHINDUCTOR_MAX_AUTOTUNE=1 --with TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 \\
        --with TORCHINDUCTOR_ENABLE_PDL=1

Each measurement is a new process that trains on random tokens, so no data set is needed. --against takes any
commit since 8d04a07 that has the configuration's variables. Each side has its own compiler cache, which is empty at the
first start. Words of --with that are no variables of train_gpt.py go to the environment. TFLOP/s are counted as in
flops.py; the peak is that of the GPU's data sheet, or else what a matrix product reaches here. --parts waits for the device
between the parts of a step, so a GPU's sum is longer than a step. --profile DIR writes NAME.trace.json.gz, three steps by
PyTorch's profiler, for https://ui.perfetto.dev.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import numpy as np

from common import ROOT, gpu_names, hardware, markdown_cell, measure_tflops, table
import train_gpt
from flops import count_flops, find_peak
from events import launcher, limited, prepare_output, read_events
from settings import PRESETS, pairs_of, words_of
from train_gpt import torch

COMMON = ("VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=0 MAX_WALLCLOCK_SECONDS=600 WARMUP_STEPS=1 RUN_ID=bench "
          "OUT_DIR=out DATA_PATH=../data TOKENIZER_PATH=byte260")
CONFIGURATIONS = {  # settings, steps that are timed, validation tokens
    "cpu-small": ("NUM_LAYERS=4 MODEL_DIM=256 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=512 "
                  "TRAIN_BATCH_TOKENS=32768", 4, 1 << 16),
    "cpu-preset": (f"@{PRESETS}/cpu_1mb_avx2.env VOCAB_SIZE=2048 SIZE_CAP=0", 40, 1 << 16),
    "gpu-default": ("", 30, 1 << 23),
    "gpu-preset": (f"@{PRESETS}/h100_1gpu_16mb.env SIZE_CAP=0 EVAL_STRIDE=0", 30, 1 << 20)}
ROWS = {  # key of a measurement: title, digits
    "tokens_per_s": ("training, tokens/s", 0), "tflops": ("training, TFLOP/s", 3), "peak_share": ("% of the peak", 1),
    "val_tokens_per_s": ("validation, tokens/s", 0),
    "export_s": ("export, s", 2), "peak_mib": ("peak memory, MiB", 0),
    "artifact_bytes": ("artifact, bytes", 0), "first_start_s": ("first start to first step, s", 1),
    "later_start_s": ("later starts to first step, s", 1)}


# ---- Measuring a run -----------------------------------------------------------------------------------


def write_data(folder: Path, val_tokens: int) -> None:
    """Write shards of random bytes, as tokens of byte260."""
    folder.mkdir()
    for split, count in (("train", 1 << 23), ("val", val_tokens + 1)):
        header = np.zeros(256, dtype="<i4")
        header[:3] = (20240520, 1, count)
        tokens = np.random.default_rng(count).integers(4, 260, count, dtype=np.uint16)
        (folder / f"random_{split}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())


def quantities(lines: list[tuple[float, str]], events: list[dict], skip: int) -> dict[str, float]:
    """Return the speeds, times and sizes of a run, from its console (seconds since the start, text) and its
    events. The rate leaves out the first `skip` steps. Raises KeyError if an event or a line is missing."""
    latest = {event["event"]: event for event in events}
    settings = latest["config"]["config"]
    clock_ms = {event["step"]: event["train_time_ms"] for event in events if event["event"] == "train"}
    seconds = {text.split(" ")[0]: at for at, text in lines}
    text = "\n".join(text for _, text in lines)
    last = latest["val"]  # the validation after the last step
    tokens = (last["step"] - skip) * settings["TRAIN_BATCH_TOKENS"]
    val_tokens = int(re.search(r"^val_loader:.* tokens:(\d+)", text, re.M)[1])
    eval_s = latest["final"]["eval_time_ms"] / 1000
    tokens_per_s = 1000 * tokens / (last["train_time_ms"] - clock_ms[skip])
    result = {"tokens_per_s": tokens_per_s,
              "tflops": tokens_per_s * count_flops(settings) / 1e12,
              "val_tokens_per_s": val_tokens / eval_s,
              "export_s": seconds["final_int8_zlib_roundtrip"] - seconds[f"step:{last['step']}/{settings['ITERATIONS']}"]
              - eval_s,
              "start_s": seconds[f"step:1/{settings['ITERATIONS']}"] - clock_ms[1] / 1000,
              "artifact_bytes": latest["export"]["artifact_bytes"]}
    if settings["DEVICE"] == "cuda":
        result["peak_mib"] = int(re.search(r"^peak memory allocated: (\d+) MiB", text, re.M)[1])
    return result


def measure(command: list[str], skip: int, folder: Path, cache: Path, more: dict[str, str]) -> dict:
    """Run a trainer in a new folder beside the data, with `more` in its environment, and return its quantities and, as
    "start", its "config" event. Without CUDA, the peak memory is that of its largest process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1", **more}
    is_first = not cache.exists()
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
        with process.stdout:
            lines = [(time.monotonic() - started, line.rstrip("\n")) for line in process.stdout]
        _, status, usage = os.wait4(process.pid, 0)  # getrusage would mix all children
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            end_of_log = "\n".join(text for _, text in lines[-20:])
            sys.exit(f"bench.py: {' '.join(command)} failed:\n{end_of_log}")
        events = read_events(Path(place, "logs", "bench.jsonl"))
    found = quantities(lines, events, skip)
    found["first_start_s" if is_first else "later_start_s"] = found.pop("start_s")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return {"peak_mib": usage.ru_maxrss * unit >> 20, "start": events[0], **found}


# ---- Inside the trainer's process ----------------------------------------------------------------------


def parts_worker(skip: int, output: str) -> None:
    """Run train_gpt.py with the arguments of this process. Rank 0 times the parts of each step after the first `skip` and
    writes a table of them to OUTPUT.txt. Norm, clipping and the optimizers are one part: what follows the last backward pass."""
    plain_step, plain_backward = train_gpt.Trainer.train_step, torch.Tensor.backward
    times = {"forward": [], "backward": [], "optimizer": []}

    def train_step(trainer, batches):
        now, spent = trainer.ranks.now_ms, dict.fromkeys(times, 0.0)
        last = now()

        def backward(loss):
            nonlocal last
            begun = now()
            plain_backward(loss)
            spent["forward"] += begun - last
            last = now()
            spent["backward"] += last - begun

        with patch.object(torch.Tensor, "backward", backward):
            result = plain_step(trainer, batches)
        spent["optimizer"] = now() - last
        if trainer.clock.step >= skip:
            for part, ms in spent.items():
                times[part].append(ms)
        if trainer.clock.step == trainer.config.iterations - 1 and trainer.ranks.rank == 0:
            medians = {part: statistics.median(values) for part, values in times.items()}
            rows = [[part, f"{ms:.1f}", f"{ms / sum(medians.values()):.0%}"] for part, ms in medians.items()]
            Path(f"{output}.txt").write_text("\n".join(table("| part of a step | ms | share |", rows)) + "\n", encoding="utf-8")
        return result

    train_gpt.Trainer.train_step = train_step
    sys.exit(train_gpt.main())


def profile_worker(skip: int, output: str) -> None:
    """Run train_gpt.py with the arguments of this process. Rank 0 profiles three steps after the first `skip` and writes
    OUTPUT.trace.json.gz, and the slowest kernels to OUTPUT.txt."""
    plain_step = train_gpt.Trainer.train_step
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_gpu]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)

    def train_step(trainer, batches):
        step, is_main = trainer.clock.step, trainer.ranks.rank == 0
        if step == skip and is_main:
            profiler.start()
        result = plain_step(trainer, batches)
        if step == skip + 2 and is_main:
            trainer.ranks.now_ms()  # the device has ended, too
            profiler.stop()
            profiler.export_chrome_trace(f"{output}.trace.json.gz")
            order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            text = profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)
            Path(f"{output}.txt").write_text(text, encoding="utf-8")
        return result

    train_gpt.Trainer.train_step = train_step
    sys.exit(train_gpt.main())


# ---- Two sides in turn ---------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository; exit if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        sys.exit(f"bench.py: git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


def variables_of(words: list[str]) -> dict[str, str]:
    """Return the settings of NAME=value and @FILE words, the last of each name. Raises ValueError and OSError."""
    overrides = train_gpt.load_config(words, {})[1]
    return {name: text for name, (text, _) in overrides.items()}


def cell(values: list[float], digits: int) -> str:
    """Return the median as text, with the range of several values; "" for none."""
    texts = [f"{f(values):,.{digits}f}" for f in (statistics.median, min, max)] if values else [""]
    return texts[0] if len(values) < 2 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def median_table(name: str, sides: list[tuple[str, list[dict]]]) -> str:
    """Return a Markdown table with a row for each quantity that was measured, a column for each side, and one for each side
    divided by the first, round by round: the median and the range. From nine rounds on, the range leaves out the lowest and
    the highest: it holds the true median with 96 % or more."""
    lines = []
    for key, (title, digits) in ROWS.items():
        values = [[found[key] for found in measured if key in found] for _, measured in sides]
        cells = [cell(of_side, digits) for of_side in values]
        for others in values[1:]:
            ratios = sorted(after / before for before, after in zip(values[0], others, strict=False))
            cells.append(cell(ratios[1:-1] if len(ratios) >= 9 else ratios, 3))
        if any(cells):
            lines.append([title, *cells])
    ratio_of = "ratio of each round" if len(sides) == 2 else "{}, ratio"
    columns = [name, *(side for side, _ in sides), *(ratio_of.format(side) for side, _ in sides[1:])]
    return "\n".join(table(f"| {' | '.join(map(markdown_cell, columns))} |", lines)) + "\n"


def compare(name: str, options: argparse.Namespace, folder: Path) -> None:
    """Measure all sides in turn in one configuration and print the tables."""
    settings, steps, val_tokens = CONFIGURATIONS[name]
    skip = 10 if name.startswith("gpu") else 1  # the first ten steps are logged, which makes a GPU wait
    variables = variables_of([*settings.split(), *COMMON.split(), *options.settings])
    variables["ITERATIONS"] = str(skip + (options.steps or steps))
    variables |= {"VOCAB_PAD": variables.get("VOCAB_SIZE", "1024"), "VOCAB_SIZE": "260"}  # tables and logits as large
    write_data(folder / "data", val_tokens)
    here = "this checkout"
    if (ROOT / ".git").exists():
        changed = git("status", "--porcelain", "train_gpt.py")
        here = git("rev-parse", "--short", "HEAD").strip() + " and changes" * bool(changed)
    sides = [(here, ROOT / "train_gpt.py", variables, {})]
    if options.against:
        script = folder / "train_gpt.py"
        script.write_text(git("show", f"{options.against}:train_gpt.py"), encoding="utf-8")
        sides.insert(0, (git("rev-parse", "--short", options.against).strip(), script, variables, {}))
    for words in options.with_words:
        more = pairs_of(words.split())
        fields = {field.name.upper() for field in train_gpt.fields(train_gpt.Config)}
        changed = {name: text for name, text in more.items() if name in fields}
        environment = {name: text for name, text in more.items() if name not in fields}
        sides.append((words, ROOT / "train_gpt.py", variables | changed, environment))
    measured = [(side, []) for side, *_ in sides]
    for _ in range(options.rounds):
        for i, (_, script, its, environment) in enumerate(sides):
            command = [*launcher(options.ranks), str(script), *words_of(its)]
            measured[i][1].append(measure(command, skip, folder, folder / f"cache{i}", environment))
    start = measured[0][1][0]["start"]
    dtype, product = start["config"]["DTYPE"], measure_tflops(start)
    gpus = start["world_size"] if start.get("gpu") else 1  # on CPUs, the product has the cores of all ranks
    peak = gpus * (find_peak(start.get("gpu", ""), dtype) or product)
    for _, runs in measured:
        for found in runs:
            found["peak_share"] = 100 * found["tflops"] / peak
    print(f"{int(variables['ITERATIONS']) - skip} steps are timed; a matrix product reaches {product:.2g} TFLOP/s in {dtype} at "
          f"width {start['config']['MODEL_DIM']}; the peak is {peak:.3g}\n")
    print(median_table(name, measured), flush=True)

    def watch(kind: str, output: Path) -> None:
        """Train this checkout once more, watched, and print what was found."""
        cache = folder / f"cache{int(bool(options.against))}"  # compiled before
        longer = variables | {"ITERATIONS": str(max(skip + 3, int(variables["ITERATIONS"])))}
        command = [*launcher(options.ranks), __file__, "--worker", kind, str(skip), str(output), *words_of(longer)]
        measure(command, skip, folder, cache, {})
        print(Path(f"{output}.txt").read_text(encoding="utf-8"), flush=True)

    if options.parts:
        watch("parts", folder / "parts")
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        output = options.profile.resolve() / name
        watch("profile", output)
        print("\n".join(f"wrote {options.profile / path.name}" for path in sorted(output.parent.glob(f"{name}.*"))))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        kind, skip, output = sys.argv[2:5]
        del sys.argv[1:5]
        worker = {"parts": parts_worker, "profile": profile_worker}[kind]
        worker(int(skip), output)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="settings NAME=value, and configurations: "
                        + ", ".join(CONFIGURATIONS))
    parser.add_argument("--against", metavar="REV", help="a commit to measure in turn with this checkout")
    parser.add_argument("--with", dest="with_words", action="append", default=[], metavar="'NAME=value ...'",
                        help="settings or environment to measure in turn with none; may be given several times")
    parser.add_argument("--rounds", type=limited(1, kind=int), default=3, help="measurements of each side (default: 3)")
    parser.add_argument("--steps", type=limited(0, kind=int), default=0, help="steps to time (default: by configuration)")
    parser.add_argument("--ranks", type=limited(1, kind=int), default=1, help="processes, started by torchrun (default: 1)")
    parser.add_argument("--parts", action="store_true", help="also time the parts of a step of this checkout")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also profile three steps of this checkout, into DIR")
    options = parser.parse_intermixed_args()
    options.settings = [word for word in options.what if "=" in word]
    names = [word for word in options.what if "=" not in word]
    if unknown := set(names) - CONFIGURATIONS.keys():
        parser.error(f"configuration {' '.join(unknown)} must be one of {', '.join(CONFIGURATIONS)}")
    if not names:
        device = "gpu" if gpu_names() else "cpu"
        names = [name for name in CONFIGURATIONS if name.startswith(device)]
    print(f"{hardware()}, PyTorch {version('torch')}, ranks: {options.ranks}, rounds: {options.rounds} "
          f"{' '.join(options.settings)}\n", flush=True)
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                compare(name, options, Path(folder))
    except (ValueError, OSError) as error:
        sys.exit(f"bench.py: {error}")
    except KeyboardInterrupt:
        sys.exit("bench.py: stopped")


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
