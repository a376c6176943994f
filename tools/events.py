"""The one reader of .jsonl logs: the events of one log, and of a run with the logs from before it was resumed.

    python tools/events.py [RUN_ID]    say what a run made and where; without RUN_ID, the newest run in logs/
"""

import argparse
import glob
import json
import re
import shlex
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

RULE = "=" * 100  # divides source, machine and lines in a text log
# Settings that do not change what is trained, so that the seeds of a record may differ in them.
MAY_DIFFER_BETWEEN_SEEDS = {"SEED", "RUN_ID", "OUT_DIR", "RESUME", "CHECKPOINT_EVERY", "KEEP_CHECKPOINTS"}
# The end of the name of a log from before a resume, a time in ns. With its many digits, "wd0.05" is not an older log of "wd0".
OLDER = r"\.\d{10,}$"
MAX_LISTED = 10  # runs in a message, the newest
MANY_EPOCHS = 4  # readings of a text, after which a model may begin to learn it by heart
RISE, GAP = 0.01, 1.0  # nats: of the validation loss above its lowest, and above the training loss


def interpreter() -> str:
    """Return the Python that runs, as one types it in this folder."""
    path = Path(sys.executable)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def find_log(name: str = "") -> Path:
    """Return the path of a .jsonl log, from its path, that of the .txt log beside it, or a RUN_ID in logs/; from "", the
    newest in logs/. Raises ValueError."""
    logs = sorted(Path("logs").glob("*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not name:
        if not logs:
            raise ValueError("there is no run in logs/ yet")
        return logs[0]
    path = Path(name).with_suffix(".jsonl") if name.endswith((".jsonl", ".txt")) else Path("logs", f"{name}.jsonl")
    if path.is_file():
        return path
    # The log from before a resume is not a run of its own.
    runs = [log.stem for log in logs if not re.search(OLDER, log.stem)]
    there_are = ", ".join(runs[:MAX_LISTED]) + ", ..." * (len(runs) > MAX_LISTED) or "none"
    raise ValueError(f"{name!r} is neither a file nor a RUN_ID in logs/; there are: {there_are}")


def read_events(path: Path) -> list[dict]:
    """Return the events of a .jsonl log, without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines[:-1]]
    with suppress(ValueError):
        events += [json.loads(line) for line in lines[-1:]]
    return events


def given_settings(start: dict) -> dict[str, str]:
    """Return the settings in a "config" event that were arguments or in the environment: not those of files or of a model."""
    overrides = start.get("overrides", {})
    return {name: text for name, (text, origin) in overrides.items() if origin in ("argument", "environment")}


def resume_step(events: list[dict]) -> int:
    """Return the step at which a log was resumed, or 0."""
    return next((event["step"] for event in events if event["event"] == "resume"), 0)


def read_history(path: Path) -> list[dict]:
    """Return the events of a .jsonl log. A resumed run has its earlier steps in older logs, which the trainer renamed to
    NAME.TIME.jsonl: they follow the first event. If two logs have a step, the newer one counts."""
    events = read_events(path)
    resumed = resume_step(events)
    found = path.parent.glob(f"{glob.escape(path.stem)}.*.jsonl")
    older_paths = sorted(other for other in found if re.fullmatch(OLDER, other.stem.removeprefix(path.stem)))
    while resumed and older_paths:
        older = read_events(older_paths.pop())
        steps = [event for event in older if event["event"] in ("train", "val") and event["step"] <= resumed]
        if any(event["event"] == "train" for event in steps):
            by_step = {(event["event"], event.get("step")): event for event in events[:1] + steps + events[1:]}
            events = list(by_step.values())
            resumed = resume_step(older)
    return events


def warn_of_overfitting(events: list[dict]) -> tuple[str, int]:
    """Return a line that begins with a line end if the text was read many times and validation rose or stopped falling, or
    is far above training, else ""; and the steps that would have been enough, or 0. The last validation is that of the average,
    if there is one. The rounded artifact is not compared: its score is always a little higher."""
    train = next((event for event in reversed(events) if event["event"] == "train"), None)
    scores = [event for event in events if event["event"] == "val" and event["val_loss"] is not None]
    learns_one_batch = events[0].get("config", {}).get("OVERFIT")  # on purpose
    if not train or not scores or train["epoch"] <= MANY_EPOCHS or learns_one_batch:
        return "", 0
    last, best = scores[-1]["val_loss"], min(scores, key=lambda event: event["val_loss"])
    before = [event["val_loss"] for event in scores if event["step"] <= 0.8 * scores[-1]["step"]]
    read = f"\nwarning: the training text was read {train['epoch']:.0f} times"
    dropout = events[0].get("config", {}).get("DROPOUT", 0)
    more = next((f"DROPOUT={share}" for share in (0.1, 0.3, 0.5) if share > dropout), "a smaller MODEL_DIM")
    others = f"then {more}, or more text"
    if last > best["val_loss"] + RISE:
        return (f"{read}. Validation loss was lowest at step {best['step']:,} ({best['val_loss']:.2f} nats) and has risen to "
                f"{last:.2f}, while training loss is {train['train_loss']:.2f}: the model is memorizing the text. First try "
                f"ITERATIONS={best['step']}, {others}"), best["step"]
    if before and last > min(before) - RISE:
        step = next(event["step"] for event in scores if event["val_loss"] <= last + RISE)
        return (f"{read}, and validation loss stopped falling at about step {step:,} of {scores[-1]['step']:,}. First try "
                f"ITERATIONS={step}, {others}"), step
    if last > train["train_loss"] + GAP:
        return (f"{read}. Training loss is {train['train_loss']:.2f} nats and validation loss {last:.2f}: the model has memorized "
                f"much of the text. First try {more}, then more text"), 0
    return "", 0


def name_best(events: list[dict]) -> str:
    """Return a line that begins with a line end and names the best validation, or "" if that is the last."""
    scores = [event for event in events if event["event"] == "val" and event["val_bpb"] is not None]
    best = min(scores, key=lambda event: event["val_bpb"], default=None)
    if not best or best["val_bpb"] == scores[-1]["val_bpb"]:
        return ""
    return (f"\nbest      {best['val_bpb']:.4f} bits per byte, at step {best['step']:,}; the model is that of the last step, "
            f"{scores[-1]['step']:,}, with {scores[-1]['val_bpb']:.4f}")


def next_steps(run: str, start: dict, steps: int) -> list[str]:
    """Return three commands for what one does next with a run, whose "config" event is `start`. `steps`: those that would have
    been enough, or 0."""
    python, run = interpreter(), shlex.quote(run)
    plot = f"{python} tools/plot.py {run}"
    if not find_spec("matplotlib"):
        plot = f"{python} -m pip install matplotlib && {plot}"
    presets = {Path(origin[1:]).stem for _, origin in start["overrides"].values() if origin.startswith("@")}
    better = "cpu_1mb" if start["config"]["DTYPE"] == "bfloat16" else "cpu_1mb_avx2"
    data = start["config"]["DATA_PATH"]
    if steps and "quick" in presets:
        left_out = {*MAY_DIFFER_BETWEEN_SEEDS, "VAL_LOSS_EVERY", "ITERATIONS"}
        words = [f"{name}={text}" for name, text in given_settings(start).items() if name not in left_out]
        words.append(f"ITERATIONS={steps}")
        more = f"./run.sh {shlex.join(words)}    # only as long as it improved"
    elif not Path(data).name.startswith(("sotu", "fineweb")):  # it is the user's own text
        more = f"{python} train_gpt.py --help    # every setting"
    elif "quick" in presets:
        more = f"./run.sh --preset {better}    # ten minutes, a better model"
    else:
        more = f"{python} data/prepare.py FOLDER --tokenizer unigram1024 --out data/datasets/mine    # your own text"
    return [f"{python} tools/sample.py {run} --interactive", f"{plot}    # add other RUN_IDs to compare", more]


def summarize(log: Path) -> str:
    """Return what a run made, and commands for what one does next."""
    latest = {event["event"]: event for event in read_events(log)}
    folder = Path(latest["config"]["config"]["OUT_DIR"])
    if "final" not in latest:
        return f"{log}: the run has not ended; if it has checkpoints, resume it with RUN_ID={log.stem} RESUME=auto"
    final, export = latest["final"], latest.get("export")
    if final["val_bpb"] is None:
        return f"{log}: the final score is not finite"
    score = f"{final['val_bpb']:.4f} bits per byte of the validation text"
    if not export:
        return score
    size, cap = export["artifact_bytes"] + export["code_bytes"], latest["config"]["config"].get("SIZE_CAP", 0)
    too_large = f", more than SIZE_CAP={cap:,}" if 0 < cap < size else ""
    history = read_history(log)
    warning, steps = warn_of_overfitting(history)
    commands = "\n          ".join(next_steps(log.stem, latest["config"], steps))
    return f"""{final['step']:,} steps in {latest['val']['train_time_ms'] / 1000:,.0f} s: {score}, with \
{size:,} bytes of model and code{too_large}{name_best(history)}{warning}
log       {log}; {log.with_suffix('.txt')} also has the script
model     {folder / 'final_model.int8.ptz'}; final_model.pt beside it has all weights in full
next      {commands}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="", metavar="RUN_ID", help="or a log (default: the newest in logs/)")
    options = parser.parse_args()
    try:
        log = find_log(options.run)
    except ValueError as error:
        sys.exit(f"events.py: {error}")
    try:
        print(summarize(log))
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"events.py: {log} is no log of a run: {error!r}")


if __name__ == "__main__":
    main()
