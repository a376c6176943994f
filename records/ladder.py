"""Climb the GPT-2 speed-up ladder with nothing but variables of train_gpt.py, one more on each rung.

    python records/ladder.py --shape 124M DATA_PATH=data/datasets/mine_gpt2          GPT-2's size, for a GPU
    python records/ladder.py --shape small DATA_PATH=data/datasets/mine_gpt2         4 layers of width 128, for a CPU
    python records/ladder.py --report records/track_speedup_ladder/2026-01-31_A100   prints a folder's README.md

Bring your own text, in GPT-2 tokens: data/prepare.py TEXT --tokenizer gpt2. A small validation split saves time, as each
rung ends with export and score. NAME=value arguments apply to every rung. A rung whose ATTN or COMPILE=1 does not run here
is skipped, and later rungs omit its settings. The folder records/track_speedup_ladder/DATE_NAME gets
ladder.json, the log of every rung that ran, and README.md with the table.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from common import ABSOLUTE_PATH, ROOT, hardware, launcher, load_json, read_events

sys.path.append(str(ROOT / "logs"))

from plot import mfu_of  # noqa: E402

SHAPES = {
    "124M": "NUM_LAYERS=12 MODEL_DIM=768 NUM_HEADS=12 NUM_KV_HEADS=12 MLP_MULT=4 TRAIN_SEQ_LEN=1024 "
            "TRAIN_BATCH_TOKENS=8192",
    "small": "NUM_LAYERS=4 MODEL_DIM=128 NUM_HEADS=4 NUM_KV_HEADS=4 MLP_MULT=4 TRAIN_SEQ_LEN=256 "
             "TRAIN_BATCH_TOKENS=1024"}
COMMON = ("VOCAB_SIZE=50257 TOKENIZER_PATH=gpt2 ITERATIONS=50 MAX_WALLCLOCK_SECONDS=0 WARMUP_STEPS=0 WARMDOWN_ITERS=0 "
          "VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=1 GRAD_ACCUM_STEPS=1 OPTIMIZER=adamw ADAM_LR=3e-4 BETA2=0.999 FUSED=0 "
          "TIE_EMBEDDINGS=0 DTYPE=float32 MATMUL_PRECISION=highest COMPILE=0 ATTN=math")
# What a rung is called; what it sets from there on; and what the three published ladders that it follows have: the first
# on Apple's MPS with tiny batches, the second on an A100 with 8 x 1,024 tokens, the third on an RTX 3080 (ms, tokens/s).
RUNGS = [
    ("overfit one batch", "OVERFIT=1 ADAM_LR=3e-3", ("loss 10.90 to 0.06", "", "")),
    ("stream", "OVERFIT=0 ADAM_LR=3e-4", ("loss 10.96 to 6.97", "", "")),
    ("tied weights", "TIE_EMBEDDINGS=1", ("loss 11.08 to 6.83", "", "tied nothing")),
    ("GPT-2's initial values", "INIT=gpt2", ("loss 10.82 to 6.82", "", "loss got worse")),
    ("float32", "", ("100.7 ms, 10.2k", "577.6 ms, 14.2k", "177.6 ms, 11.5k")),
    ("TF32", "MATMUL_PRECISION=high", ("99.6 ms", "237.2 ms, 34.5k", "not waited for")),
    ("bfloat16", "DTYPE=bfloat16", ("357.3 ms, 45.9k (CUDA)", "203.7 ms, 40.2k", "not waited for")),
    ("torch.compile", "COMPILE=1", ("", "78.3 ms, 104.6k", "not waited for")),
    ("flash attention (SDPA)", "ATTN=flash", ("", "56.2 ms, 145.8k", "not waited for")),
    ("padded vocabulary", "VOCAB_PAD=64", ("", "54.6 ms, 150.1k", "not waited for")),
    ("betas and clipping", "BETA2=0.95 GRAD_CLIP_NORM=1", ("", "55.6 ms, 147.3k", "not waited for")),
    ("cosine schedule", "LR_SCHEDULE=cosine ADAM_LR=6e-4 LR_WARMUP_STEPS=10 MIN_LR=0.1",
     ("", "55.6 ms, 147.4k", "not waited for")),
    ("weight decay, fused AdamW", "WEIGHT_DECAY=0.1 FUSED=1", ("", "50.7 ms, 161.7k", "")),
    ("gradient accumulation, 4 times", "ACCUMULATE=4", ("", "", "")),
    ("two ranks (DDP)", "RANKS=2", ("", "", "211.6k on 2 RTX 4090"))]
UNTIMED = 10  # steps before those that are timed
UNAVAILABLE = re.compile(r"^train_gpt\.py: ((?:ATTN=|COMPILE=1\b).*)", re.MULTILINE | re.DOTALL)
PARAMETERS = 123_573_648  # of train_gpt.py at GPT-2's size


def pairs_of(words: list[str]) -> dict[str, str]:
    """The settings NAME=value by name."""
    return dict(word.split("=", 1) for word in words)


def rung_settings(shape: str, extra: list[str], skipped: Collection[str] = ()) -> list[tuple[str, dict[str, str], int]]:
    """Return name, settings and ranks of every rung; each inherits from those before it that were not skipped."""
    below = {**pairs_of(f"{COMMON} {SHAPES[shape]}".split()), "RANKS": "1"}
    result = []
    for name, changes, _ in RUNGS:
        settings = {**below, **pairs_of(changes.split())}
        if times := int(settings.pop("ACCUMULATE", 0)):
            settings["MICRO_BATCH_TOKENS"] = settings["TRAIN_BATCH_TOKENS"]
            settings["TRAIN_BATCH_TOKENS"] = str(times * int(settings["TRAIN_BATCH_TOKENS"]))
            settings["GRAD_ACCUM_STEPS"] = "0"
        if name not in skipped:
            below = dict(settings)
        ranks = int(settings.pop("RANKS"))
        settings["VAL_BATCH_SIZE"] = settings["TRAIN_BATCH_TOKENS"]
        result.append((name, {**settings, **pairs_of(extra)}, ranks))
    return result


def unavailable(output: str) -> str:
    """Why ATTN or COMPILE=1 does not run here, as train_gpt.py says at the end of `output`: one line without absolute
    paths; empty if it failed for another reason."""
    match = UNAVAILABLE.search(output)
    line = " ".join(match[1].split())[:300] if match else ""
    return ABSOLUTE_PATH.sub(lambda path: path[0].replace(path[1], "PATH"), line).replace("`", "'")


def climb(folder: Path, shape: str, extra: list[str]) -> None:
    """Runs all rungs, one after another, in a folder of their own, and keeps their .jsonl logs. Skips those whose ATTN or
    COMPILE=1 does not run here. ValueError: one failed otherwise, or the first one; then nothing is left."""
    about = {"hardware": hardware(), "shape": shape, "extra": extra, "rungs": [], "skipped": {}}
    if int(rung_settings(shape, extra)[0][1]["ITERATIONS"]) < UNTIMED + 3:
        raise ValueError(f"ITERATIONS must be {UNTIMED + 3} or more: the first {UNTIMED} steps are not timed")
    with tempfile.TemporaryDirectory() as place:
        Path(place, "data").symlink_to(ROOT / "data")  # so that logs have the same relative paths everywhere
        (logs := Path(place, "ladder")).mkdir()
        for number in range(1, len(RUNGS) + 1):
            name, settings, ranks = rung_settings(shape, extra, about["skipped"])[number - 1]
            if about["hardware"].startswith("1x ") and ranks > 1:
                print("skipped, as there is one GPU:", name)
                break
            environment = dict(os.environ)
            if ranks > 1:
                environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // ranks))
            arguments = [f"{key}={value}" for key, value in {**settings, "RUN_ID": "rung", "OUT_DIR": "out"}.items()]
            result = subprocess.run([*launcher(ranks), str(ROOT / "train_gpt.py"), *arguments], cwd=place, env=environment,
                                    capture_output=True, text=True, check=False)
            if result.returncode and number > 1 and (reason := unavailable(result.stderr)):
                about["skipped"][name] = reason
                print(number, name, "is skipped:", reason, flush=True)
                continue
            if result.returncode:
                raise ValueError(f"rung {number}, {name}, failed: {(result.stderr or result.stdout)[-1500:]}")
            shutil.copy(Path(place, "logs", "rung.jsonl"), logs / f"rung{number:02d}.jsonl")
            about["rungs"].append(name)
            print(number, name, flush=True)
        (logs / "ladder.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (logs / "README.md").write_text(report(logs), encoding="utf-8")
        shutil.copytree(logs, folder)


def check_rungs(folder: Path) -> list[str]:
    """Return what is wrong with a ladder's logs: one script must have run each rung with the settings of all rungs up
    to it, except those that were skipped."""
    about = load_json(folder / "ladder.json")
    skipped = about.get("skipped", {})
    ran = [name for name, _, _ in RUNGS if name not in skipped][:len(about["rungs"])]
    if about["rungs"] != ran:
        return ["ladder.json does not have the rungs in their order"]
    found, codes = [], set()
    for number, (name, settings, ranks) in enumerate(rung_settings(about["shape"], about["extra"], skipped), 1):
        if name not in ran:
            continue
        events = read_events(folder / f"rung{number:02d}.jsonl")
        then = {key: value for key, (value, _) in events[0]["overrides"].items() if key not in ("RUN_ID", "OUT_DIR")}
        if then != settings or events[0]["world_size"] != ranks:
            found.append(f"rung{number:02d}.jsonl was not run with the settings of {name!r}")
        clock = [event["train_time_ms"] for event in events if event["event"] == "train"]
        if clock != sorted(clock) or len(clock) != int(settings["ITERATIONS"]):
            found.append(f"rung{number:02d}.jsonl: steps are missing, or the clock goes backwards")
        codes.add(next(event["code_sha256"] for event in events if event["event"] == "export"))
    return found + ["the rungs have not run the same train_gpt.py"] * (len(codes) > 1)


def measure(path: Path) -> dict:
    """Return one rung's times (of the steps after the first ten), speed, memory, losses and settings."""
    events = read_events(path)
    start, trained = events[0], [event for event in events if event["event"] == "train"]
    clock = [event["train_time_ms"] for event in trained]
    times = sorted(after - before for before, after in zip(clock[UNTIMED - 1:], clock[UNTIMED:]))
    low, middle, high = statistics.quantiles(times, n=4)
    rate = start["config"]["TRAIN_BATCH_TOKENS"] / middle * 1000
    return {"ms": middle, "iqr": high - low, "rate": rate, "mfu": mfu_of(start, rate),
            "mem": max(event["mem_mib"] for event in trained), "first": trained[0]["train_loss"],
            "last": statistics.mean(event["train_loss"] for event in trained[-10:]), "config": start["config"],
            "torch": start["torch"], "world_size": start["world_size"], "threads": start["threads"],
            "code": next(event["code_sha256"] for event in events if event["event"] == "export")}


def idle(name: str, now: dict, before: dict | None) -> str:
    """Why a rung does nothing on this device; empty if it does something."""
    device = now["config"]["DEVICE"]
    if name == "TF32" and device != "cuda":
        return "does nothing: TF32 needs CUDA"
    if name == "weight decay, fused AdamW" and not now["config"]["FUSED"]:
        return "not fused here"
    if before and now["config"]["ATTN"] == before["config"]["ATTN"] and "SDPA" in name:
        return f"does nothing: {now['config']['ATTN']} was chosen before"
    return ""


def report(folder: Path) -> str:
    """README.md of a ladder, from ladder.json and the logs alone."""
    about = load_json(folder / "ladder.json")
    measured = {name: measure(folder / f"rung{number:02d}.jsonl") for number, (name, _, _) in enumerate(RUNGS, 1)
                if name in about["rungs"]}
    skipped = about.get("skipped", {})
    rows, before = [], None
    for name, sets, published in RUNGS:
        if now := measured.get(name):
            numbers = [f"{now['ms']:.1f} ({now['iqr']:.1f})", f"{now['rate']:,.0f}",
                       "n/a" if now["mfu"] is None else f"{now['mfu']:.1%}", f"{now['mem']:,}" if now["mem"] else "n/a",
                       f"{now['first']:.2f} to {now['last']:.2f}", idle(name, now, before)]
            before = now
        elif name in skipped:
            numbers = ["n/a"] * 5 + ["skipped"]
        else:
            continue
        rows.append("| " + " | ".join([name, f"`{sets}`" if sets else "", *numbers, *published]) + " |")
    if skipped:
        rows += ["", "Skipped, because they do not run here; the rungs after them do without what they set:", ""]
        rows += [f"- {name}: `{reason}`" for name, reason in skipped.items()]
    first, fused = measured["float32"], measured.get("weight decay, fused AdamW")
    gain = f"From float32 to the fused optimizer: {first['ms'] / fused['ms']:.2f} times as fast.\n\n" if fused else ""
    config = first["config"]
    return f"""# The speed-up ladder on {about['hardware']}

Shape `{about['shape']}`: {config['NUM_LAYERS']} layers of width {config['MODEL_DIM']}, {config['NUM_HEADS']} heads, \
vocabulary {config['VOCAB_SIZE']:,}, rows of {config['TRAIN_SEQ_LEN']:,}, {config['TRAIN_BATCH_TOKENS']:,} tokens a step.
Device {config['DEVICE']}, {first['threads']} threads, PyTorch {first['torch']}, train_gpt.py {first['code'][:12]}, \
data {Path(config['DATA_PATH']).name}. {config['ITERATIONS']} steps a rung; median and
interquartile range are of the steps after the first {UNTIMED}, each of which was waited for. MiB is the peak of CUDA's
memory; older logs have that of the process on a CPU.

{gain}| rung, with all before it | sets | ms a step (IQR) | tokens/s | MFU | MiB | train_loss: first, mean of last 10 | here | MPS | \
A100 | RTX 3080 |
|---|---|---|---|---|---|---|---|---|---|---|
""" + "\n".join(rows) + f"""

The last three columns are the published ladders that this one follows: 124M parameters, Tiny Shakespeare, ms a step and tokens
a second where they have them. They cannot be compared with this device, and they have mistakes of their own:

- The RTX 3080's times after its float32 rung were taken without waiting for the GPU: its 147k tokens/s in float32 would be four
  times that card's peak. Only its first rung and the run on two RTX 4090 can be used. Its tied weights were a misspelt
  attribute, which ties nothing.
- The A100's ladder trains on one batch only, so that its losses rank nothing. Its first compiled step (90 ms) leaves out the
  compiling.
- TF32 does nothing on MPS. The batch size changes within the MPS and the RTX 3080 ladder.

Losses are a check that a rung learns, not what it is worth: {config['ITERATIONS']} steps rank nothing. \
The model is this project's GPT,
not GPT-2: no biases, RMS norm, rotary positions, squared ReLU. At 12 layers of width 768 with 12 heads it has {PARAMETERS:,}
parameters with a tied vocabulary of 50,257; GPT-2 has 124,439,808.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--name", default="", help="of the folder (default: the shape)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="print the README.md of a finished ladder")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py for every rung")
    options = parser.parse_args()
    try:
        if options.report:
            print(report(options.report), end="")
            return
        folder = ROOT / "records" / "track_speedup_ladder" / f"{time.strftime('%Y-%m-%d')}_{options.name or options.shape}"
        if folder.exists():
            raise ValueError(f"{folder.relative_to(ROOT)} is there already; delete it, or choose another --name")
        for setting in options.settings:
            if "=" not in setting or "=/" in setting:
                raise ValueError(f"{setting!r} must be NAME=value, paths relative (example: DATA_PATH=data/x)")
        climb(folder, options.shape, options.settings)
        print(folder.relative_to(ROOT))
    except (ValueError, OSError) as error:
        sys.exit(f"ladder.py: {error}")


if __name__ == "__main__":
    main()
