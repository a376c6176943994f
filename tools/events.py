"""The one reader of .jsonl logs: the events of one log, and of a run with the logs from before it was resumed.

    python tools/events.py [RUN_ID]    say what a run made and where; without RUN_ID, the newest run in logs/
"""

import argparse
import glob
import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from flops import describe
from settings import presets, words_of

ROOT = Path(__file__).resolve().parent.parent
MODEL_FILE = "final_model.int8.ptz"
RULE = "=" * 100  # divides source, machine and lines in a text log
# Settings that do not change what is trained, so that the seeds of a record may differ in them.
MAY_DIFFER_BETWEEN_SEEDS = {"SEED", "RUN_ID", "OUT_DIR", "RESUME", "CHECKPOINT_EVERY"}
# The end of the name of a log from before a resume, a time in ns. By its 19 digits, it is no name such as "run.20260131093000".
OLDER = r"\.\d{19}$"
MAX_LISTED = 10  # runs in a message, the newest
MANY_EPOCHS = 4  # readings of a text, after which a model may begin to learn it by heart
RISE, GAP = 0.01, 1.0  # nats: of the validation loss above its lowest, and above the training loss


def prepare_output(ends_with_reader: bool = True) -> None:
    """Let output have any file name, with escapes for what the terminal does not have, and if `ends_with_reader`, let this process
    end without a message where `| head` has read enough. That is not for processes that others depend on."""
    if not hasattr(sys.stdout, "reconfigure"):  # in a notebook, whose process goes on
        return
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    if ends_with_reader and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def limited(low: float, high: float = math.inf, kind: type = float):
    """Return a type for argparse: a number from `low` to `high`, without infinity."""
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            what = "whole number" if kind is int else "number"
            limits = f"of {low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} must be a {what} {limits}")
        return value

    return parse


def typed(path: Path) -> str:
    """Return a path as one types it in this folder."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def interpreter() -> str:
    """Return the Python that runs, as one types it in this folder."""
    return typed(Path(sys.executable))


def launcher(ranks: int) -> list[str]:
    """Return the command that starts a Python script with this many processes on this machine."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc_per_node={ranks}"]


def check_logs() -> None:
    """Raise ValueError if logs/ is a link that leads nowhere: to other code, it would look like an empty folder or a file."""
    if os.path.islink("logs") and not os.path.exists("logs"):
        raise ValueError(f"logs is a link to {os.readlink('logs')}, which does not exist: make that folder, or remove the link")


def newest_first(pattern: str) -> list[Path]:
    """Return the files in logs/ with names of a pattern, but no links that lead nowhere."""
    return sorted(filter(Path.is_file, Path("logs").glob(pattern)), key=lambda path: path.stat().st_mtime, reverse=True)


def find_run(name: str) -> Path | None:
    """Return logs/RUN_ID.jsonl if `name` is a RUN_ID that has it: a RUN_ID may look like a file, such as input.txt."""
    path = Path("logs", f"{name}.jsonl")
    return path if Path(name).name == name and path.is_file() else None


def find_log(name: str = "") -> Path:
    """Return the path of a .jsonl log, from a RUN_ID in logs/, its path, or that of the .txt or .log beside it; from "", the
    newest in logs/. Raises ValueError."""
    check_logs()
    logs = newest_first("*.jsonl")
    if not name:
        if not logs:
            raise ValueError("there is no run in logs/ yet")
        return logs[0]
    path = find_run(name) or Path(name)
    if path.suffix in (".txt", ".log"):
        path = path.with_suffix(".jsonl")
    if path.suffix == ".jsonl" and path.is_file():
        return path
    if path.is_file():
        raise ValueError(f"{name} is not a .jsonl log, and there is none beside it")
    # The log from before a resume is not a run of its own.
    runs = [log.stem for log in logs if not re.search(OLDER, log.stem)]
    there_are = ", ".join(runs[:MAX_LISTED]) + ", ..." * (len(runs) > MAX_LISTED) or "none"
    raise ValueError(f"{name!r} is neither a file nor a RUN_ID in logs/; there are: {there_are}")


def parse_event(line: str) -> dict:
    """Return the event in a line of a .jsonl log; {} if it has none."""
    try:
        event = json.loads(line)
        is_event = isinstance(event["event"], str) and isinstance(event.get("step", 0), int)
        return event if is_event and isinstance(event.get("overrides", {}), dict) else {}
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def iterate_events(path: Path) -> Iterator[dict]:
    """Yield the events of a .jsonl log, the first of which is "config", without a last line that was cut off. Raises ValueError
    if a log is empty or damaged, and OSError."""
    damage, number = "", 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if damage:  # not in the last line
                raise ValueError(damage)
            event = parse_event(line)
            if not event:
                damage = f"{path} is damaged, or not a .jsonl log of train_gpt.py: its line {number} is no event"
                damage += "; delete that line to read the others" * (number > 1)
                continue
            if number == 1 and not (event["event"] == "config" and isinstance(event.get("config"), dict)):
                raise ValueError(f'{path} is damaged: it begins with "{event["event"]}", not with the settings, an event "config"')
            yield event
    if number == 0 or (number == 1 and damage):
        raise ValueError(f"{path} is empty: the run has not begun")


def read_events(path: Path) -> list[dict]:
    """Return the events of a .jsonl log. Raises what `iterate_events` raises."""
    return list(iterate_events(path))


def read_outline(path: Path, last: float = math.inf) -> list[dict]:
    """Return the events of a .jsonl log up to step `last`, but the last of the "train" events alone, so that the memory that a
    long run takes does not grow with its steps."""
    events, train = [], []
    for event in iterate_events(path):
        if event["event"] == "train":
            train = [event] if event.get("step", 0) <= last else train
        elif event.get("step", 0) <= last:
            events.append(event)
    return events + train


def given_settings(start: dict) -> dict[str, str]:
    """Return the settings in a "config" event that were arguments or in the environment: not those of files or of a model."""
    overrides = start.get("overrides", {})
    return {name: text for name, (text, origin) in overrides.items() if origin in ("argument", "environment")}


def resume_step(events: list[dict]) -> int:
    """Return the step at which a log was resumed, or 0."""
    return next((event["step"] for event in events if event["event"] == "resume"), 0)


def read_history(path: Path, is_outline: bool = False) -> list[dict]:
    """Return the events of a .jsonl log, or their outline. A resumed run has its earlier steps in older logs, which the trainer
    renamed to NAME.TIME.jsonl: they follow the first event. If two logs have a step, the newer one counts."""
    events = read_outline(path) if is_outline else read_events(path)
    resumed = resume_step(events)
    found = path.parent.glob(f"{glob.escape(path.stem)}.*.jsonl")
    older_paths = sorted(other for other in found if re.fullmatch(OLDER, other.stem.removeprefix(path.stem)))
    while resumed and older_paths:
        other = older_paths.pop()
        older = read_outline(other, resumed) if is_outline else read_events(other)
        steps = [event for event in older if event["event"] in ("train", "val") and event["step"] <= resumed]
        if any(event["event"] == "train" for event in steps):
            by_step = {(event["event"], event.get("step")): event for event in events[:1] + steps + events[1:]}
            events = list(by_step.values())
            resumed = resume_step(older)
    return events


def warn_of_overfitting(events: list[dict]) -> str:
    """Return a line that begins with a line end if the text was read many times and validation rose or stopped falling, or
    is far above training, else "". The rounded artifact is not compared: its score is always a little higher."""
    train = next((event for event in reversed(events) if event["event"] == "train"), None)
    scores = [event for event in events if event["event"] == "val" and event["val_loss"] is not None]
    learns_one_batch = events[0].get("config", {}).get("OVERFIT")  # on purpose
    if not train or not scores or learns_one_batch:
        return ""
    epochs = train["epoch"] / train["step"] * scores[-1]["step"]  # The last steps may not be logged.
    if epochs <= MANY_EPOCHS:
        return ""
    last, best = scores[-1]["val_loss"], min(scores, key=lambda event: event["val_loss"])
    # With WARMDOWN_FRACTION=0.8, a sixth of the sum of all rates is that of the last two fifths of the steps, but only a
    # twenty-fourth that of the last fifth, in which even a model that still learns gains little.
    before = [event["val_loss"] for event in scores if event["step"] <= 0.6 * scores[-1]["step"]]
    read = f"\nwarning: the training text was read {epochs:.0f} times"
    dropout = events[0].get("config", {}).get("DROPOUT", 0)
    more = next((f"DROPOUT={share}" for share in (0.1, 0.3, 0.5) if share > dropout), "a smaller MODEL_DIM")
    others = f"then {more}, or more text"
    if last > best["val_loss"] + RISE:
        return (f"{read}. Validation loss was lowest at step {best['step']:,} ({best['val_loss']:.2f} nats) and has risen to "
                f"{last:.2f}, while training loss is {train['train_loss']:.2f}: the model is memorizing the text. First try "
                f"ITERATIONS={best['step']}, {others}")
    if before and last > min(before) - RISE:
        step = next(event["step"] for event in scores if event["val_loss"] <= last + RISE)
        return (f"{read}, and validation loss stopped falling at about step {step:,} of {scores[-1]['step']:,}. First try "
                f"ITERATIONS={step}, {others}")
    if last > train["train_loss"] + GAP:
        return (f"{read}. Training loss is {train['train_loss']:.2f} nats and validation loss {last:.2f}: the model has memorized "
                f"much of the text. First try {more}, then more text")
    return ""


def name_best(events: list[dict]) -> str:
    """Return a line that begins with a line end and names the best validation, or "" if that is the last."""
    scores = [event for event in events if event["event"] == "val" and event["val_bpb"] is not None]
    best = min(scores, key=lambda event: event["val_bpb"], default=None)
    if not best or best["val_bpb"] == scores[-1]["val_bpb"]:
        return ""
    return (f"\nbest      {best['val_bpb']:.4f} bits per byte, at step {best['step']:,}; the model is that of the last step, "
            f"{scores[-1]['step']:,}, with {scores[-1]['val_bpb']:.4f}")


def find_checkpoint(log: Path, events: list[dict]) -> Path | None:
    """Return the last checkpoint of a run that is still there: one that it saved, or from which it was resumed; in its OUT_DIR, or
    beside its log, as this may be another folder than it trained in."""
    folders = events[0]["config"].get("OUT_DIR", ""), log.with_suffix("")
    names = [Path(event.get("file", "")).name for event in reversed(events) if event["event"] in ("checkpoint", "resume")]
    found = (Path(folder, "checkpoints", name) for name in names for folder in folders)
    return next(filter(Path.is_file, found), None)


def runner() -> str:
    """Return run.sh as one types it in this folder."""
    path = typed(ROOT / "run.sh")
    return path if "/" in path else f"./{path}"


def repeated(log: Path, start: dict, changes: dict[str, str]) -> str:
    """Return the command that trains like the run of a log, with changes."""
    given = {name: text for name, text in given_settings(start).items() if name not in MAY_DIFFER_BETWEEN_SEEDS}
    origins = {origin for _, origin in start["overrides"].values() if origin.startswith("@")}
    files = list(origins) if len(origins) == 1 else []  # A log does not tell the order of several.
    of_files = {name: text for name, (text, origin) in start["overrides"].items() if origin in origins and not files}
    words = words_of({**of_files, **given, **changes})
    preset = next((name for name in presets() if files == [f"@records/presets/{name}.env"]), "")
    if preset and (Path.cwd() == ROOT or log.absolute().parent != Path("logs").absolute()):  # run.sh works in ROOT.
        return f"{runner()} {shlex.join(['--preset', preset, *words])}"
    python = " ".join([interpreter(), *launcher(start.get("world_size", 1))[1:], typed(ROOT / "train_gpt.py")])
    return f"{python} {shlex.join([*files, *words])}"


def resumption(log: Path, start: dict) -> str:
    """Return the command that continues a run from its checkpoint: run.sh finds most settings in the logs of its own folder."""
    given = given_settings(start)
    if log.absolute().parent != ROOT / "logs":
        return repeated(log, start, {**given, "RUN_ID": log.stem, "RESUME": "auto"})
    words = [f"{name}={given[name]}" for name in ("DATA_PATH", "OUT_DIR") if name in given]
    return f"{runner()} {shlex.join([*words, f'RUN_ID={log.stem}', 'RESUME=auto'])}"


def next_steps(log: Path, model: Path | None, start: dict) -> list[str]:
    """Return commands for what one does next with a run, whose artifact or checkpoint is `model`."""
    python, is_here = interpreter(), log.parent == Path("logs")
    sample, plot, prepare = (typed(ROOT / name) for name in ("tools/sample.py", "tools/plot.py", "data/prepare.py"))
    run = shlex.quote(log.stem if is_here else str(log))
    commands = []
    if model:
        of_run = run if is_here and model.name == MODEL_FILE else shlex.quote(str(model))
        commands.append(f"{python} {sample} {of_run} --interactive")
    install = "" if find_spec("matplotlib") else f"{python} -m pip install matplotlib && "
    commands.append(f"{install}{python} {plot} {run}    # add other RUN_IDs to compare")
    presets = {Path(origin[1:]).stem for _, origin in start["overrides"].values() if origin.startswith("@")}
    better = "cpu_1mb" if start["config"]["DTYPE"] == "bfloat16" else "cpu_1mb_avx2"
    is_own_text = not Path(start["config"]["DATA_PATH"]).name.startswith(("sotu", "fineweb"))
    if "quick" in presets:
        own = {"DATA_PATH": start["config"]["DATA_PATH"]} if is_own_text else {}
        words = shlex.join(["--preset", better, *words_of(own)])
        commands.append(f"{runner()} {words}    # ten minutes, a better model")
    elif is_own_text:
        commands.append(f"{python} {typed(ROOT / 'train_gpt.py')} --help    # every setting")
    if not is_own_text:
        commands.append(f"{python} {prepare} FOLDER --tokenizer unigram1024 --out data/datasets/mine    # your own text")
    return commands


def describe_machine(latest: dict[str, dict]) -> str:
    """Return what a run found: the device, the type and the kernel, and with them its speed and memory."""
    start, train = latest["config"], latest.get("train", {})
    config = start["config"]
    place = f"{start.get('world_size', 1)} x {start['gpu']}" if start.get("gpu") else config.get("DEVICE", "")
    found = [place, config["DTYPE"], f"attention {config.get('ATTN', 'as in its script')}"]
    if train.get("tok_per_sec"):
        found.append(f"{train['tok_per_sec']:,.0f} tokens/s")
    if train.get("mem_mib"):
        found.append(f"{train['mem_mib'] / 1024:.1f} GiB of its memory")
    if train.get("tok_per_sec"):
        found.append(describe(train["tok_per_sec"], config, start.get("gpu", ""), start.get("world_size", 1)))
    return ", ".join(found)


def find_artifact(log: Path, start: dict, export: dict) -> Path | None:
    """Return the artifact of a run: in its OUT_DIR, or as it lies beside a log that was copied, or in a record. None if it is not
    there, or another run has replaced it."""
    places = [Path(start["config"]["OUT_DIR"], MODEL_FILE), log.with_suffix("") / MODEL_FILE]
    if log.name.startswith("train_seed"):
        places.append(log.with_name(f"{log.stem.replace('train', 'artifact')}.int8.ptz"))
    wanted = export.get("artifact_sha256")
    there = [path for path in places if path.is_file()]
    return next((path for path in there if wanted in (None, sha256(path.read_bytes()).hexdigest())), None)


def describe_unfinished(log: Path, events: list[dict], export: dict | None) -> str:
    """Return where a run without a final score is, and commands that continue it, score its model or begin it again."""
    start, checkpoint = events[0], find_checkpoint(log, events)
    model = checkpoint or (export and find_artifact(log, start, export))
    step = max(event.get("step", 0) for event in events)
    has_diverged = any(event["event"] == "nonfinite" for event in events)
    end = "has diverged: lower its rates or set GRAD_CLIP_NORM=1" if has_diverged else "has not ended"
    if checkpoint:
        first, there_is = f"{resumption(log, start)}    # continue", f"the last is {checkpoint}"
    elif model:
        first = f"{repeated(log, start, {'ITERATIONS': '0', 'INIT_FROM': str(model)})}    # score its model"
        there_is = f"there is none, but the model is saved: {model}"
    else:
        first = f"{repeated(log, start, {})}    # again"
        there_is = "there is none"
    commands = "\n             ".join([first, *next_steps(log, model, start)])
    return f"""{log}: the run {end}; its last event is of step {step:,}
checkpoint   {there_is}
next         {commands}"""


def summarize(log: Path) -> str:
    """Return what a run made, and commands for what one does next."""
    history = read_history(log, is_outline=True)
    latest = {event["event"]: event for event in history}
    start = latest["config"]
    if "final" not in latest:
        return describe_unfinished(log, history, latest.get("export"))
    final, export = latest["final"], latest.get("export")
    if final["val_bpb"] is None:
        return f"{log}: the final score is not finite"
    score = f"{final['val_bpb']:.4f} bits per byte of the validation text"
    if not export:
        return score
    size, cap = export["artifact_bytes"] + export["code_bytes"], start["config"].get("SIZE_CAP", 0)
    too_large = f", more than SIZE_CAP={cap:,}" if 0 < cap < size else ""
    text = log.with_suffix(".txt")
    beside = f"; {text} also has the script" if text.is_file() else ""
    model = find_artifact(log, start, export)
    place = f"not in OUT_DIR={start['config']['OUT_DIR']}: moved, deleted, or replaced by another run"
    if model:
        has_more = model.with_name("final_model.pt").is_file()
        place = f"{model}{'; final_model.pt beside it has all weights in full' * has_more}"
    commands = "\n          ".join(next_steps(log, model, start))
    return f"""{final['step']:,} steps in {latest['val']['train_time_ms'] / 1000:,.0f} s: {score}, with \
{size:,} bytes of model and code{too_large}{name_best(history)}{warn_of_overfitting(history)}
machine   {describe_machine(latest)}
log       {log}{beside}
model     {place}
next      {commands}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="", metavar="RUN_ID", help="or a log (default: the newest in logs/)")
    options = parser.parse_args()
    try:
        log = find_log(options.run)
        summary = summarize(log)
    except (OSError, ValueError) as error:
        sys.exit(f"events.py: {error}")
    except (LookupError, TypeError) as error:
        sys.exit(f"events.py: {log} is damaged, or of another program: an event lacks {error}")
    print(summary)


if __name__ == "__main__":
    prepare_output()
    main()
