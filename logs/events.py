"""The one reader of logs: the events of a .jsonl, of a text log, and of a run with its older logs.

    python logs/events.py [RUN_ID]    say in words what a run made, and where; without RUN_ID, the newest run in logs/
"""

import argparse
import glob
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

RULE = "=" * 100  # divides source, machine and lines in a text log
# Settings that do not change what is trained, so that the seeds of a record may differ in them. Older scripts had
# CHECKPOINT_DIR and TRACKERS.
MAY_DIFFER_BETWEEN_SEEDS = {"SEED", "RUN_ID", "OUT_DIR", "RESUME", "CHECKPOINT_EVERY", "CHECKPOINT_DIR",
                            "KEEP_CHECKPOINTS", "TRACKERS"}
PAIR = re.compile(r"(\w+)[:=](\S+)")
START_LINES = ("train_batch_tokens:", "seed:", "tie_embeddings:", "attention_mode:", "model_params:")
MANY_EPOCHS, LARGE_GAP = 4, 1.0  # nats: a model that reads a small text often learns it by heart
QUANTITIES = {"train": ("lr", "grad_norm", "tok_per_sec"), "val": ("val_bpb",)}  # beside loss and time


def read_events(path: Path) -> list[dict]:
    """Return the events of a .jsonl log, without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines[:-1]]
    with suppress(ValueError):
        events += [json.loads(line) for line in lines[-1:]]
    return events


def text_events(lines: list[str]) -> Iterator[dict]:
    """Yield events from the lines of a text log that published trainers write too, and from the settings."""
    settings = {}
    for line in lines:
        pairs = dict(PAIR.findall(line))
        if line.startswith("step:") and "train_time" in pairs:
            step, _ = pairs["step"].split("/")
            milliseconds = pairs["train_time"].removesuffix("ms")
            yield {**pairs, "event": "val" if "val_loss" in pairs else "train", "step": step,
                   "train_time_ms": milliseconds}
        elif line.startswith("config:{"):
            settings = json.loads(line.removeprefix("config:"))
        elif line.startswith(START_LINES):
            settings = {**{name.upper(): value for name, value in pairs.items()}, **settings}
        elif line.startswith("final_int8_zlib_roundtrip_exact "):
            yield {**pairs, "event": "final"}
        elif match := re.match(r"Serialized model int8\+zlib: (\d+) bytes", line):
            yield {"event": "export", "artifact_bytes": match[1]}
        elif match := re.match(r"Code size: (\d+) bytes", line):
            yield {"event": "export", "code_bytes": match[1]}
    yield {"event": "config", "config": settings}


def resume_step(events: list[dict]) -> int:
    """Return the step at which a log was resumed, or 0."""
    return next((event["step"] for event in events if event["event"] == "resume"), 0)


def older_logs(path: Path) -> list[Path]:
    """Return the logs that the trainer renamed to NAME.TIME.jsonl (or .txt), the oldest first. TIME, in ns, has
    many digits: the log of the run "wd0.05" is not one of "wd0"."""
    found = path.parent.glob(f"{glob.escape(path.stem)}.*{path.suffix}")
    return sorted(other for other in found if re.fullmatch(r"\.\d{10,}", other.stem.removeprefix(path.stem)))


def read_history(path: Path) -> list[dict]:
    """Return the events of a log of either kind. A .jsonl log of a resumed run takes its earlier steps from
    the older logs, which the trainer renamed to NAME.*.jsonl. If both have a step, the newer one counts."""
    if path.suffix != ".jsonl":
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        rules = [i for i, line in enumerate(lines) if line == RULE]
        after_source = rules[-1] + 1 if rules else 0
        return list(text_events(lines[after_source:]))
    events = read_events(path)
    resumed = resume_step(events)
    older_paths = older_logs(path)
    while resumed and older_paths:
        older = read_events(older_paths.pop())
        steps = [event for event in older if event["event"] in QUANTITIES and event["step"] <= resumed]
        if any(event["event"] == "train" for event in steps):
            again = {(event["event"], event.get("step")) for event in events}
            events = [event for event in steps if (event["event"], event["step"]) not in again] + events
            resumed = resume_step(older)
    return events


def summarize(log: Path) -> str:
    """Return what a run made, and commands for what one does next."""
    latest = {event["event"]: event for event in read_events(log)}
    if "final" not in latest:
        has_checkpoint = any(Path(latest["config"]["config"]["OUT_DIR"], "checkpoints").glob(f"{glob.escape(log.stem)}_*.pt"))
        hint = f"RUN_ID={log.stem} RESUME=auto goes on from its last checkpoint" if has_checkpoint else "it left no checkpoint"
        return f"{log}: the run has not ended; {hint}"
    final, export, train = latest["final"], latest.get("export"), latest.get("train")
    score = f"{final['val_bpb']:.4f} bits per byte of the validation text"
    if not export:
        return score
    run, folder = shlex.quote(log.stem), Path(latest["config"]["config"]["OUT_DIR"])
    lines = [f"{final['step']:,} steps in {latest['val']['train_time_ms'] / 1000:,.0f} s: {score}, with "
             f"{export['artifact_bytes'] + export['code_bytes']:,} bytes of model and code"]
    if train and train["epoch"] > MANY_EPOCHS and final["val_loss"] > train["train_loss"] + LARGE_GAP:
        lines.append(f"warning: it read its text {train['epoch']:.0f} times and knows it far better than other text "
                     f"({train['train_loss']:.2f} and {final['val_loss']:.2f} nats per token): train on more text or for less time")
    lines += [f"log       {log}; {log.with_suffix('.txt')} also has the script",
              f"model     {folder / 'final_model.int8.ptz'}; final_model.pt beside it has all weights in full",
              f"next      .venv/bin/python logs/sample.py {run} --interactive",
              f"          .venv/bin/python logs/plot.py {run}",
              "          .venv/bin/python train_gpt.py --help          every setting",
              "          .venv/bin/python data/prepare.py --help       your own text",
              "          ./run.sh NUM_LAYERS=6 MATRIX_LR=0.03          another run, with other settings"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="RUN_ID", help="or a .jsonl log (default: the newest in logs/)")
    name = parser.parse_args().run
    logs = sorted(Path("logs").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    log = Path(name) if name and Path(name).is_file() else Path("logs", f"{name}.jsonl") if name else [Path("logs"), *logs][-1]
    try:
        print(summarize(log))
    except (OSError, ValueError, LookupError):
        sys.exit(f"events.py: {name or log} is no log of a run; there are: {', '.join(path.stem for path in logs) or 'none'}")


if __name__ == "__main__":
    main()
