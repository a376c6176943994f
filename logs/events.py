"""The one reader of .jsonl logs: the events of one log, and of a run with the logs from before it was resumed.

    python logs/events.py [RUN_ID]    say what a run made and where; without RUN_ID, the newest run in logs/
"""

import argparse
import glob
import json
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

RULE = "=" * 100  # divides source, machine and lines in a text log
# Settings that do not change what is trained, so that the seeds of a record may differ in them.
MAY_DIFFER_BETWEEN_SEEDS = {"SEED", "RUN_ID", "OUT_DIR", "RESUME", "CHECKPOINT_EVERY", "KEEP_CHECKPOINTS"}
MANY_EPOCHS, LARGE_GAP = 4, 1.0  # nats: a model that reads a small text often learns it by heart


def find_log(name: str) -> Path:
    """Return the path of a .jsonl log, from a path or a RUN_ID in logs/."""
    return Path(name) if name.endswith(".jsonl") else Path("logs", f"{name}.jsonl")


def read_events(path: Path) -> list[dict]:
    """Return the events of a .jsonl log, without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines[:-1]]
    with suppress(ValueError):
        events += [json.loads(line) for line in lines[-1:]]
    return events


def resume_step(events: list[dict]) -> int:
    """Return the step at which a log was resumed, or 0."""
    return next((event["step"] for event in events if event["event"] == "resume"), 0)


def read_history(path: Path) -> list[dict]:
    """Return the events of a .jsonl log. A resumed run has its earlier steps in older logs, which the trainer renamed to
    NAME.TIME.jsonl: they follow the first event. If two logs have a step, the newer one counts."""
    events = read_events(path)
    resumed = resume_step(events)
    found = path.parent.glob(f"{glob.escape(path.stem)}.*.jsonl")
    # TIME, in ns, has many digits: the log of the run "wd0.05" is not an older one of "wd0".
    older_paths = sorted(other for other in found if re.fullmatch(r"\.\d{10,}", other.stem.removeprefix(path.stem)))
    while resumed and older_paths:
        older = read_events(older_paths.pop())
        steps = [event for event in older if event["event"] in ("train", "val") and event["step"] <= resumed]
        if any(event["event"] == "train" for event in steps):
            by_step = {(event["event"], event.get("step")): event for event in events[:1] + steps + events[1:]}
            events = list(by_step.values())
            resumed = resume_step(older)
    return events


def summarize(log: Path) -> str:
    """Return what a run made, and commands for what one does next."""
    latest = {event["event"]: event for event in read_events(log)}
    folder = Path(latest["config"]["config"]["OUT_DIR"])
    if "final" not in latest:
        return f"{log}: the run has not ended; if it has checkpoints, resume it with RUN_ID={log.stem} RESUME=auto"
    final, export, train = latest["final"], latest.get("export"), latest.get("train")
    run = shlex.quote(log.stem)
    score = f"{final['val_bpb']:.4f} bits per byte of the validation text"
    if not export:
        return score
    warning = ""
    if train and train["epoch"] > MANY_EPOCHS and final["val_loss"] > train["train_loss"] + LARGE_GAP:
        warning = (f"\nwarning: it read its text {train['epoch']:.0f} times and knows it far better than other text ("
                   f"{train['train_loss']:.2f} and {final['val_loss']:.2f} nats per token): use more text or fewer steps")
    return f"""{final['step']:,} steps in {latest['val']['train_time_ms'] / 1000:,.0f} s: {score}, with \
{export['artifact_bytes'] + export['code_bytes']:,} bytes of model and code{warning}
log       {log}; {log.with_suffix('.txt')} also has the script
model     {folder / 'final_model.int8.ptz'}; final_model.pt beside it has all weights in full
next      .venv/bin/python logs/sample.py {run} --interactive
          .venv/bin/python logs/plot.py {run}
          .venv/bin/python train_gpt.py --help          every setting"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="RUN_ID", help="or a .jsonl log (default: the newest in logs/)")
    name = parser.parse_args().run
    try:
        logs = sorted(Path("logs").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        print(summarize(find_log(name) if name else logs[-1]))
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"events.py: {name or 'logs/'} is no log of a run: {error}")


if __name__ == "__main__":
    main()
