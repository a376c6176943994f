"""Climb the GPT-2 speed-up ladder with nothing but variables of train_gpt.py, one more on each rung.

    python tools/ladder.py --shape 124M DATA_PATH=data/datasets/mine_gpt2          GPT-2's size, for a GPU
    python tools/ladder.py --shape small DATA_PATH=data/datasets/mine_gpt2         4 layers of width 128, for a CPU

Bring your own text, in GPT-2 tokens: data/prepare.py TEXT --tokenizer gpt2. A small validation split saves time, as
each rung ends with export and score. NAME=value arguments apply to every rung. A rung that fails here, as its ATTN or
COMPILE=1 may, is skipped, and later rungs omit its settings. The table is printed; logs/ladder_rungN.jsonl has each rung's log.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from common import ROOT, count_cores, hardware, only_one, table
from events import launcher, prepare_output, read_events
from settings import pairs_of, words_of

SHAPES = {
    "124M": "NUM_LAYERS=12 MODEL_DIM=768 NUM_HEADS=12 NUM_KV_HEADS=12 MLP_MULT=4 TRAIN_SEQ_LEN=1024 TRAIN_BATCH_TOKENS=8192",
    "small": "NUM_LAYERS=4 MODEL_DIM=128 NUM_HEADS=4 NUM_KV_HEADS=4 MLP_MULT=4 TRAIN_SEQ_LEN=256 TRAIN_BATCH_TOKENS=1024"}
COMMON = ("VOCAB_SIZE=50257 TOKENIZER_PATH=gpt2 ITERATIONS=50 MAX_WALLCLOCK_SECONDS=0 WARMUP_STEPS=0 WARMDOWN_ITERS=0 "
          "VAL_LOSS_EVERY=0 GRAD_ACCUM_STEPS=1 OPTIMIZER=adamw ADAM_LR=3e-4 BETA2=0.999 FUSED=0 "
          "TIE_EMBEDDINGS=0 DTYPE=float32 MATMUL_PRECISION=highest COMPILE=0 ATTN=math")
RUNGS = [  # name; the settings that it adds
    ("overfit one batch", "OVERFIT=1 ADAM_LR=3e-3"),
    ("stream", "OVERFIT=0 ADAM_LR=3e-4"),
    ("tied weights", "TIE_EMBEDDINGS=1"),
    ("GPT-2's initial values", "INIT=gpt2"),
    ("float32", ""),
    ("TF32", "MATMUL_PRECISION=high"),
    ("bfloat16", "DTYPE=bfloat16"),
    ("torch.compile", "COMPILE=1"),
    ("flash attention (SDPA)", "ATTN=flash"),
    ("padded vocabulary", "VOCAB_PAD=64"),
    ("betas and clipping", "BETA2=0.95 GRAD_CLIP_NORM=1"),
    ("cosine schedule", "LR_SCHEDULE=cosine ADAM_LR=6e-4 LR_WARMUP_STEPS=10 MIN_LR=0.1"),
    ("weight decay, fused AdamW", "WEIGHT_DECAY=0.1 FUSED=1"),
    ("gradient accumulation, 4 times", "ACCUMULATE=4"),
    ("two ranks (DDP)", "RANKS=2")]
UNTIMED = 10  # steps before those that are timed


def climb(shape: str, extra: list[str]) -> str:
    """Run all rungs, one after another, each with the settings of those before it that did not fail. Return the report.
    Raises ValueError if the first one fails, or if no step would be timed."""
    below = pairs_of([*f"{COMMON} {SHAPES[shape]}".split(), *extra])
    fixed = {name: text for name, text in pairs_of(extra).items() if name != "TRAIN_BATCH_TOKENS"}  # which a rung multiplies
    steps = below["ITERATIONS"]
    if not steps.isdecimal() or int(steps) < UNTIMED + 3:
        raise ValueError(f"ITERATIONS={steps} must be {UNTIMED + 3} or more: the first {UNTIMED} steps are not timed")
    skipped, logs = {}, {}
    for number, (name, changes) in enumerate(RUNGS, 1):
        settings = {**below, **pairs_of(changes.split())}
        ranks = int(settings.pop("RANKS", 1))
        if times := int(settings.pop("ACCUMULATE", 0)):
            settings["MICRO_BATCH_TOKENS"] = settings["TRAIN_BATCH_TOKENS"]
            settings["TRAIN_BATCH_TOKENS"] = str(times * int(settings["TRAIN_BATCH_TOKENS"]))
            settings["GRAD_ACCUM_STEPS"] = "0"
        run_id = f"ladder_rung{number:02d}"
        given = {**settings, "VAL_BATCH_SIZE": settings["TRAIN_BATCH_TOKENS"], **fixed, "TRAIN_LOG_EVERY": "1", "RUN_ID": run_id,
                 "OUT_DIR": f"logs/{run_id}"}
        environment = {name: text for name, text in os.environ.items() if name not in given}
        if ranks > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, count_cores() // ranks))
        command = [*launcher(ranks), "train_gpt.py", *words_of(given)]
        shutil.rmtree(ROOT / given["OUT_DIR"], ignore_errors=True)  # a model of an earlier climb would stop the run
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace",
                                check=False)
        if result.returncode:
            if number == 1:
                raise ValueError(f"rung 1, {name}, failed: {(result.stderr or result.stdout)[-1500:]}")
            error = re.search(r"^train_gpt\.py: (.*)", result.stderr, re.M)
            skipped[name] = error[1].replace("`", "'")[:300] if error else f"status {result.returncode}"
        else:
            below = settings
            logs[name] = read_events(ROOT / "logs" / f"{run_id}.jsonl")
        print(number, name, f"is skipped: {skipped[name]}" if name in skipped else "", flush=True)
    return report(shape, logs, skipped)


def measure(events: list[dict]) -> list[str]:
    """Return a rung's cells of the table: time, speed, memory and losses. The first ten steps are not timed."""
    trained = [event for event in events if event["event"] == "train"]
    clock = [event["train_time_ms"] for event in trained]
    times = [after - before for before, after in zip(clock[UNTIMED - 1:], clock[UNTIMED:])]
    low, middle, high = statistics.quantiles(times, n=4)
    rate = events[0]["config"]["TRAIN_BATCH_TOKENS"] / middle * 1000
    memory = max(event["mem_mib"] for event in trained)
    last = statistics.mean(event["train_loss"] for event in trained[-10:])
    return [f"{middle:.1f} ({high - low:.1f})", f"{rate:,.0f}", f"{memory:,}" if memory else "n/a",
            f"{trained[0]['train_loss']:.2f} to {last:.2f}"]


def report(shape: str, logs: dict[str, list[dict]], skipped: dict[str, str]) -> str:
    """Return the table in Markdown and what it was measured on. `logs` has the events of a rung by its name."""
    rows = []
    for name, sets in RUNGS:
        cells = ["skipped", *["n/a"] * 3] if name in skipped else measure(logs[name])
        rows.append([name, f"`{sets}`" if sets else "", *cells])
    events = logs[RUNGS[0][0]]
    start, config = events[0], events[0]["config"]
    code = next(event["code_sha256"] for event in events if event["event"] == "export")
    text = f"""# The speed-up ladder on {hardware()}

- Shape `{shape}`: {config['NUM_LAYERS']} layers of width {config['MODEL_DIM']}, {config['NUM_HEADS']} heads, \
vocabulary {config['VOCAB_SIZE']:,}, rows of {config['TRAIN_SEQ_LEN']:,}, {config['TRAIN_BATCH_TOKENS']:,} tokens a step.
- Device {config['DEVICE']}, {start['threads']} threads, PyTorch {start['torch']}, train_gpt.py {code[:12]}, data \
{Path(config['DATA_PATH']).name}.
- {config['ITERATIONS']} steps a rung. Median and interquartile range (IQR) are of the steps after the first {UNTIMED}, each \
of which was waited for.
- MiB is the peak of the memory of CUDA's tensors. The losses show that a rung learns; they rank nothing.
"""
    header = "| rung, with all before it | sets | ms a step (IQR) | tokens/s | MiB | train_loss: first, mean of last 10 |"
    lines = [*text.splitlines(), "", *table(header, rows)]
    if skipped:
        lines += ["", "Skipped, because they do not run here; the rungs after them do without what they set:", "",
                  *(f"- {name}: `{reason}`" for name, reason in skipped.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py for every rung")
    options = parser.parse_args()
    try:
        with only_one(ROOT / "logs" / "ladder.lock"):
            print("", climb(options.shape, options.settings), sep="\n", end="")
    except (ValueError, OSError) as error:
        sys.exit(f"ladder.py: {error}")
    except KeyboardInterrupt:
        sys.exit("ladder.py: stopped")


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
