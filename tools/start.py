"""Train on this machine: choose what is left open, show how it goes, say what to do next.

    ./run.sh [NAME=value ...]         install into .venv, then train; without a GPU, for two minutes
    ./run.sh --preset NAME [...]      the settings of records/presets/NAME.env
    ./run.sh RUN_ID=... RESUME=auto   continue from a checkpoint, with the run's own settings
    ./run.sh test [...]               run the tests; -m slow: the slow ones; -m gpu: those for GPUs

NAME=value, an argument or a variable of the environment, is a setting of train_gpt.py. It overrides
what is chosen here. PYTHON names the interpreter that makes .venv.
"""

import argparse
import difflib
import glob
import math
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from common import ROOT, gpu_names, load_json
from events import (
    find_artifact, find_run, given_settings, interpreter, iterate_events, launcher, newest_first,
    parse_event, prepare_output, repeated, summarize,
)
from settings import presets, read_settings, words_of

MANY_TOKENS = 2_000_000  # On such a text, two minutes of the preset quick do not overfit.
FEW_TOKENS = 600_000
EPOCHS = 10  # readings of a smaller text
ENOUGH_SHARDS = 10  # of FineWeb, for ten minutes on a GPU, which read the speeches dozens of times
FINEWEB = ("sp1024", "sp4096", "sp8192")  # tokenizers for which FineWeb can be downloaded
SCRIPT = "train_gpt.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
           signal.SIGUSR2, signal.SIGXCPU)  # that the trainer is to have
TRACKERS = ("wandb", "trackio", "tensorboard")
TRACKER_S = 60  # for a tracker to send the rest after the training


# ---- What to train ------------------------------------------------------------------


@dataclass
class Start:
    """A run to start: the arguments of train_gpt.py, and the number of processes here."""
    arguments: list[str]
    ranks: int


def preset_file(name: str) -> tuple[Path, str]:
    """Return the file and the tokenizer of a preset. Raises ValueError."""
    path = Path("records/presets", f"{name}.env")
    _, tokenizer = read_settings(path)
    if not tokenizer:
        raise ValueError(f"{path} has no line like '# tokenizer: sp1024': add one, or if it only "
                         "adds to a preset, give both to train_gpt.py")
    return path, tokenizer


def count_gpus(device: str) -> int:
    """Return how many GPUs to use for DEVICE: all, or the largest power of two below their number.
    Raises ValueError if PyTorch cannot use them."""
    if device.lower() not in ("", "auto", "cuda"):
        return 0
    import torch
    # device_count asks the driver, which also counts GPUs when it is too old for this PyTorch.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and not device and "CUDA_VISIBLE_DEVICES" not in os.environ and gpu_names():
        raise ValueError("PyTorch cannot use this machine's GPUs: install a build for their driver "
                         "into .venv (see pytorch.org), or set DEVICE=cpu")
    shared = 2 ** (count.bit_length() - 1) if count else 0
    if shared < count:
        print(f"Of {count} GPUs, at most {shared} train: batches are shared by 1, 2, 4 or 8.")
    return shared


def count_tokens(data: str) -> int:
    """Return the training tokens in a folder of prepare.py; MANY_TOKENS if it does not say."""
    try:
        return int(load_json(Path(data, "manifest.json"))["splits"]["train"]["tokens"])
    except (OSError, ValueError, TypeError, LookupError):
        return MANY_TOKENS


def has_shards(folder: Path) -> bool:
    """Whether a folder has a validation split, without which nothing trains."""
    return any(folder.glob("*_val_[0-9]*.bin"))


def check_data(data: str) -> None:
    """Raise ValueError if DATA_PATH has no shards: say how to make them, or where they may be."""
    path, called_from = Path(data), Path(os.environ.get("OLDPWD", ""))
    if has_shards(path):
        return
    if path.exists():
        prepare = ["data/prepare.py", data, "--tokenizer", "unigram1024", "--out",
                   f"data/datasets/{path.resolve().stem}"]
        raise ValueError(f"DATA_PATH={data} has no *_val_*.bin: if it is text, prepare it first: "
                         f"{interpreter()} {shlex.join(prepare)}")
    meant = sorted(filter(has_shards, Path("data/datasets").glob("*")))
    if Path(called_from, data).exists():
        meant = [called_from / data]
    advice = "data/prepare.py makes such a folder of your text"
    if meant:
        advice = "you may mean " + " or ".join(f"DATA_PATH={shlex.quote(str(other))}" for other in meant)
    raise ValueError(f"DATA_PATH={data} does not exist in {ROOT}; {advice}")


def call(*command: str) -> None:
    """Run a script of data/, and leave out the next command that it prints. Exits if it fails."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True,
                          errors="replace") as process:
        for line in process.stdout:
            if not line.startswith("next: "):
                print(line, end="", flush=True)
    if process.returncode:
        sys.exit(process.returncode if process.returncode > 0 else 128 - process.returncode)


def count_shards(tokenizer: str) -> int:
    """Return the number of FineWeb's training shards; 0 if a download was stopped before."""
    shards = Path("data/datasets", f"fineweb10B_{tokenizer}")
    model = Path("data/tokenizers", f"fineweb_{tokenizer.removeprefix('sp')}_bpe.model")
    is_complete = model.exists() and any(shards.glob("fineweb_val_*.bin"))
    return len(list(shards.glob("fineweb_train_*.bin"))) if is_complete else 0


def find_data(tokenizer: str, gpus: int) -> dict[str, str]:
    """Fetch FineWeb if there are GPUs, or speeches if FineWeb is not there. Return DATA_PATH, and
    TOKENIZER_PATH if it is needed."""
    if gpus and tokenizer in FINEWEB and count_shards(tokenizer) < ENOUGH_SHARDS:
        print("fetching FineWeb's first ten shards, 2 GB; to see a minute of training before that, "
              "stop this with Ctrl-C, and run ./run.sh --preset gpu_minute", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "huggingface_hub"], check=False)
        call("data/download.py", "--variant", tokenizer, "--train-shards", str(ENOUGH_SHARDS))
    if count_shards(tokenizer):
        model = f"data/tokenizers/fineweb_{tokenizer.removeprefix('sp')}_bpe.model"
        return {"DATA_PATH": f"data/datasets/fineweb10B_{tokenizer}", "TOKENIZER_PATH": model}
    speeches = f"data/datasets/sotu_{tokenizer}"
    if not Path(speeches, "manifest.json").exists():
        call("data/prepare.py", "sotu", "--tokenizer", tokenizer, "--out", speeches)
    return {"DATA_PATH": speeches}


def suit_small_text(config, own: dict[str, str], tokens: int) -> dict[str, str]:
    """Return settings with which a preset overfits less on few tokens, where its own would not do.
    Prints them."""
    batch, steps = config.train_batch_tokens, config.iterations
    if "ITERATIONS" not in own:
        steps = min(steps, EPOCHS * tokens // batch + 1)
    dropout = 0.1 if tokens >= FEW_TOKENS else 0.3
    val_loss_every = min(steps // 10 + 1, config.val_loss_every)  # The time limit may end it first.
    added = {"DROPOUT": max(dropout, config.dropout), "ITERATIONS": steps,
             "VAL_LOSS_EVERY": val_loss_every}
    added = {name: str(value) for name, value in added.items()
             if name not in own and value != getattr(config, name.lower())}
    print(f"The training text has {tokens:,} tokens, few for this model: at most {steps:,} steps, "
          f"which read it {steps * batch / tokens:.2g} times. "
          f"Added: {shlex.join(words_of(added)) or 'nothing'}")
    return added


def suit_machine(gpus: int) -> dict[str, str]:
    """Return COMPILE=0 where PyTorch cannot compile, and say why."""
    headers = Path(sysconfig.get_path("include"))
    has_headers = not headers.is_dir() or (headers / "Python.h").exists()
    can_compile = has_headers and shutil.which(os.environ.get("CXX") or "g++")
    if " " in str(ROOT):  # PyTorch does not quote its paths for the compiler.
        print("The path of this folder has a space, with which PyTorch cannot compile: training is "
              "slower.")
    elif not gpus and sys.platform == "linux" and not can_compile:
        print("PyTorch cannot compile without g++ and Python's headers (apt install g++ "
              "python3-dev): training is slower.")
    else:
        return {}
    return {"COMPILE": "0"}


def plan(words: list[str], preset: str) -> Start:
    """Choose what the user has left open. Raises ValueError and OSError."""
    from train_gpt import load_config, read_words
    path, tokenizer = preset_file(preset) if preset else ("", "sp1024")
    files = [f"@{path}"] if preset else []
    given = {name: text for name, (text, _) in read_words(files + words, os.environ).items()}
    for name in ("INIT_FROM", "RESUME"):
        file = given.get(name, "auto")
        if file != "auto" and not Path(file).exists():
            raise ValueError(f"{name}={file} does not exist in {ROOT}")
    if given.get("RESUME") and (start := plan_resumption(files, words, given)):
        return start
    data = given.get("DATA_PATH", "")
    if data:
        check_data(data)
    gpus, tokens = count_gpus(given.get("DEVICE", "")), count_tokens(data) if data else MANY_TOKENS
    if not preset and (not gpus or (tokens < MANY_TOKENS and "INIT_FROM" not in given)):
        path, tokenizer = preset_file("quick")
        files, gpus = [f"@{path}"], min(gpus, 1)
        tokenizer = "sp1024" if count_shards("sp1024") else tokenizer
    config, overrides = load_config(files + words, os.environ)  # finds mistakes before a download
    own = given_settings({"overrides": overrides})
    chosen = {} if data else find_data(tokenizer, gpus)
    if path and config.iterations and 0 < tokens < MANY_TOKENS:
        chosen |= suit_small_text(config, own, tokens)
    chosen |= suit_machine(gpus)
    if "RESUME" not in own:  # else a run that is resumed has a name
        chosen["RUN_ID"] = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    chosen = {name: text for name, text in chosen.items() if name not in own}
    return Start([*words_of(chosen), *files, *words], max(1, gpus))


def are_unchanged(files: list[str], overrides: dict) -> bool:
    """Whether @FILE words still set what they set in a run with these overrides."""
    from train_gpt import read_words
    try:
        now = {name: text for name, (text, _) in read_words(files, {}).items()}
    except (OSError, ValueError):
        return False
    then = {name: text for name, (text, origin) in overrides.items() if origin in files}
    return then.items() <= now.items() and now.keys() <= overrides.keys()


def read_log(log: Path) -> list[dict]:
    """Return the events of a log without those of "train": all of them, or those before damage."""
    events = []
    with suppress(ValueError):
        for event in iterate_events(log):
            if event["event"] != "train":
                events.append(event)
    return events


def find_writer(checkpoint: Path) -> Path | None:
    """Return the newest log that says that its run has written a checkpoint."""
    run_id = checkpoint.stem.rpartition("_")[0]
    logs = newest_first(f"{glob.escape(run_id)}*.jsonl")
    writes = (log for log in logs for event in read_log(log)
              if event.get("file") == checkpoint.name)
    return next(writes, None)


def refuse_ended(log: Path, events: list[dict]) -> None:
    """Raise ValueError if the run of a log, which has no checkpoint, has a model: to begin it again
    would set that aside."""
    latest = {event["event"]: event for event in events}
    if not {"export", "final"} & latest.keys():
        return
    model = find_artifact(log, events[0], latest.get("export", {}))
    advice = f"{interpreter()} tools/events.py {shlex.quote(log.stem)} says what it left"
    if model:
        again = repeated(log, events[0], {"INIT_FROM": str(model)})
        advice = f"to train its model further, as a new run: {again}"
    raise ValueError(f"RUN_ID={log.stem} has ended ({log}) and left no checkpoint to resume; "
                     f"{advice}")


def plan_resumption(files: list[str], words: list[str], given: dict[str, str]) -> Start | None:
    """Return how to continue from the checkpoint RESUME, or how to begin a run again that stopped
    before its first one: with the settings in its log, unless the user gives others. None if there
    is no such log. Raises ValueError if the run has ended and left no checkpoint."""
    from train_gpt import Config, list_checkpoints
    named = of_log = Config(run_id=given.get("RUN_ID", ""), out_dir=given.get("OUT_DIR", ""))
    log = find_run(named.run_id)
    events = read_log(log) if log else []
    if events and not named.out_dir:
        of_log = replace(named, out_dir=events[0]["config"].get("OUT_DIR", ""))
    checkpoints = list_checkpoints(of_log) or list_checkpoints(named)
    paths = checkpoints if given["RESUME"] == "auto" else [Path(given["RESUME"])]
    if not paths and not events:
        runs = [log.stem for log in newest_first("*.jsonl")]
        for near in difflib.get_close_matches(named.run_id, runs, 1, 0.8):
            print(f"There is no run {named.run_id} in logs/; did you mean RUN_ID={near}?")
        return None  # The trainer says that there is no checkpoint.
    if paths:
        log = find_writer(paths[0])
        if not log:
            return None
        events, run_id = read_log(log), paths[0].stem.rpartition("_")[0]
        found = f"RESUME continues from {paths[0]}, with the settings of {log}"
    else:
        refuse_ended(log, events)
        run_id = log.stem
        found = f"There is no checkpoint: {run_id} begins again, with the settings of {log}"
    overrides = events[0]["overrides"]
    of_files = {name: pair for name, pair in overrides.items() if pair[1].startswith("@")}
    old_files = list(dict.fromkeys(file for _, file in of_files.values()))
    again = given_settings(events[0]) | {"RUN_ID": run_id}
    if are_unchanged(old_files, overrides):
        files = list(dict.fromkeys(old_files + files))
    else:
        again |= {name: text for name, (text, _) in of_files.items()}
    device = given.get("DEVICE") or overrides.get("DEVICE", [""])[0]
    gpus = min(count_gpus(device), events[0]["world_size"])
    print(found)
    again |= suit_machine(gpus)
    again = {name: text for name, text in again.items() if name not in given}
    return Start([*words_of(again), *files, *words], max(1, gpus))


# ---- The view -----------------------------------------------------------------------


def bits(event: dict) -> str:
    """Return the score in an event "val" or "final"."""
    return "not finite" if event["val_bpb"] is None else f"{event['val_bpb']:.4f} bits per byte"


@dataclass
class Progress:
    """How far a run is, from the events of its log and the other lines of its console."""
    limit_s: float = math.inf
    iterations: int = 0
    step: int = 0
    signal: int = 0  # that stopped the run
    time_s: float = 0.0  # of training, until `step`
    step_s: float = 0.0
    log_s: float = 0.0  # of training, between the last two logged steps
    seen_s: float = 0.0  # when the last event was read, as time.monotonic() says it
    val_loss_every: float = math.inf
    next_val: float = math.inf  # the step of the next validation, at which the clock stops
    phase: str = "starting"
    score: str = ""
    speed: str = ""

    def read(self, event: dict, now_s: float) -> str:
        """Take an event; return a line that is to stay, or ""."""
        kind = event["event"]
        if kind == "config":
            self.limit_s = event["config"]["MAX_WALLCLOCK_SECONDS"] or math.inf
            self.iterations = event["config"]["ITERATIONS"]
            self.val_loss_every = event["config"]["VAL_LOSS_EVERY"] or math.inf
        elif kind == "train":
            time_s, steps = event["train_time_ms"] / 1000, event["step"] - self.step
            self.log_s = time_s - self.time_s
            self.step_s = self.log_s / max(1, steps)
            self.step, self.time_s, self.seen_s, self.phase = event["step"], time_s, now_s, ""
            self.speed = f"{event['tok_per_sec']:,.0f} tokens/s  epoch {event['epoch']:.2f}"
        elif kind == "val":
            self.step, self.seen_s = event["step"], now_s
            self.time_s = event["train_time_ms"] / 1000
            self.score, self.next_val = bits(event), self.step + self.val_loss_every
            return f"step {self.step:,}, {self.time_s:,.0f} s: {self.score}"
        elif kind == "export":
            self.phase = "scoring the saved model"
        elif kind == "final":
            return f"the saved model: {bits(event)}"
        return ""

    def hear(self, line: str) -> str:
        """Take a line of the console; return it if the user should see it, else ""."""
        if line.startswith("compiling"):
            self.phase = "compiling, a minute or more the first time"
        elif line.startswith("warmup_step"):
            self.phase = "warming up"
        elif match := re.match(r"stopped: signal (\d+) after step:(\d+)", line):
            self.signal, self.step = map(int, match.groups())
        return line if re.match("(?i)warning|resume", line) else ""

    def share(self, now_s: float) -> tuple[float, float]:
        """Return how much is done, from 0 to 1, and the seconds of training that are left, after a
        step."""
        until_val_s = (self.next_val - self.step) * self.step_s
        since_s = max(0.0, min(now_s - self.seen_s, self.log_s, until_val_s))
        time_s, step = self.time_s + since_s, self.step + since_s / self.step_s
        left_s = min(self.limit_s - time_s, (self.iterations - step) * self.step_s)
        done = max(time_s / self.limit_s, step / max(1, self.iterations))
        return min(1.0, done), max(0.0, left_s)

    def line(self, now_s: float) -> tuple[float, str]:
        """Return how much is done, from 0 to 1, and what to write beside the bar."""
        if self.phase or not self.step_s:
            return float(self.phase.startswith("scoring")), self.phase
        done, left_s = self.share(now_s)
        minutes, seconds = divmod(round(left_s), 60)
        left = f"{minutes}:{seconds:02}" if minutes < 10 else f"{minutes} min"
        score = f"last score {self.score.removesuffix(' bits per byte')}  " if self.score else ""
        if done == 1 or self.step == self.next_val:
            score = "validating  "
        return done, f"{100 * done:3.0f} %  {left} left  {score}{self.speed}"


class View:
    """A line that changes, below lines that stay. Without a terminal, a line for each tenth, and
    for each phase before the first step."""

    def __init__(self):
        from tqdm import tqdm
        width = min(100, shutil.get_terminal_size().columns - 1)
        self.bar = tqdm(total=1, bar_format="{elapsed} {bar} {desc}", ncols=width, leave=False,
                        disable=None, file=sys.stdout)
        self.tenths, self.phase = 0, ""

    def keep(self, line: str, file=None) -> None:
        """Write a line that stays, at once."""
        try:
            with self.bar.external_write_mode(file):
                print(line, file=file, flush=True)
        except OSError:  # Its reader has ended, as `| head` does. The trainer goes on.
            os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())

    def show(self, done: float, text: str) -> None:
        """Show how much is done, from 0 to 1."""
        if not self.bar.disable:
            self.bar.n = done
            self.bar.set_description_str(text)
        elif int(10 * done) > self.tenths or (done == 0 and text != self.phase):
            self.tenths, self.phase = int(10 * done), text
            self.keep(text)


def read_core_times(pid: int, times: dict[str, tuple[int, int]]) -> None:
    """Note how long each thread of a process had a core, and waited for one, in ns. Linux only."""
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # The thread may have ended.
            used, waited, _ = path.read_text().split()
            times[path.parent.name] = int(used), int(waited)


@contextmanager
def signals_forwarded(child: subprocess.Popen):
    """Hand signals on to a child, which has its own process group: Ctrl-C reaches it once."""
    def suspend(*_):  # Ctrl-Z
        child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        child.send_signal(signal.SIGCONT)

    handlers = {number: lambda number, _: child.send_signal(number) for number in SIGNALS}
    handlers[signal.SIGTSTP] = suspend
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()
              if signal.getsignal(number) != signal.SIG_IGN}  # as nohup leaves it
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Outcome:
    """A trainer that has ended: its exit status, its log if it has begun one, its progress, and the
    share of the time for which it could have used the cores that it had them."""
    status: int
    log: Path | None
    progress: Progress
    share: float


def follow(child: subprocess.Popen, tracker: str) -> Outcome:
    """Show the trainer's progress until it ends."""
    view, progress, times = View(), Progress(), {}
    log = events = tracking = None
    lines = queue.Queue()

    def listen(stream, is_error):
        for line in stream:
            lines.put((line.rstrip("\n"), is_error))

    for stream in (child.stdout, child.stderr):
        threading.Thread(target=listen, args=(stream, stream is child.stderr), daemon=True).start()
    while True:
        has_ended = child.poll() is not None  # Its last lines may come later.
        with suppress(queue.Empty):
            line, is_error = lines.get(timeout=0.5)
            has_ended = False
            if is_error:
                view.keep(line, sys.stderr)
            elif log is None and re.fullmatch(r"logs/.+\.txt", line):
                log = Path(line).with_suffix(".jsonl")
                events = log.open(encoding="utf-8", errors="replace")
            elif kept := progress.hear(line):
                view.keep(kept)
        for event in filter(None, map(parse_event, events or ())):
            if tracker and not tracking:  # It would refuse an empty log.
                track = [sys.executable, "tools/track.py", tracker, log.stem]
                tracking = subprocess.Popen(track, stdin=subprocess.DEVNULL, process_group=0)
            if kept := progress.read(event, time.monotonic()):
                view.keep(kept)
        view.show(*progress.line(time.monotonic()))
        read_core_times(child.pid, times)
        if has_ended:
            break
    view.bar.close()
    if tracking:
        if child.returncode:
            tracking.send_signal(signal.SIGINT)
        try:
            with signals_forwarded(tracking):  # The trainer has ended.
                tracking.wait(TRACKER_S)
        except subprocess.TimeoutExpired:
            tracking.kill()
            again = f"{interpreter()} tools/track.py {tracker} {shlex.quote(log.stem)} --once"
            print(f"{tracker} has not taken all numbers; to send them later: {again}")
    used, waited = (sum(column) for column in zip(*times.values())) if times else (0, 0)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    if status and progress.signal:  # torchrun returns 1 then.
        status = 128 + progress.signal
    return Outcome(status, log, progress, 1.0 if used + waited < 20e9 else used / (used + waited))


def train(start: Start, tracker: str) -> Outcome:
    """Train and show it."""
    command = [*launcher(start.ranks), SCRIPT, *start.arguments]
    print(interpreter(), shlex.join(command[1:]))
    print("Bits per byte of text that it does not train on should fall.", flush=True)
    with (subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, errors="replace",
                           process_group=0) as child,
          signals_forwarded(child)):
        return follow(child, tracker)


# ---- What to do next ----------------------------------------------------------------


def conclude(outcome: Outcome) -> None:
    """Say what happened, and what to do next."""
    log, progress = outcome.log, outcome.progress
    if outcome.share < 0.5 and not outcome.status and progress.step:
        print("The cores were busy with other programs: this run had "
              f"{100 * outcome.share:.0f} % of the time that it could have used. End them, and "
              "train again.")
    if not log:
        return
    try:
        summary = summarize(log)
    except (OSError, ValueError, LookupError) as error:  # A stop or a full disk left no event.
        summary = f"There is no summary: {error}"
    if outcome.status > 128:
        name = signal.Signals(outcome.status - 128).name.replace("SIGINT", "Ctrl-C")
        hint = " If memory ran out, set a lower MICRO_BATCH_TOKENS." * (name == "SIGKILL")
        print(f"Stopped by {name} after {progress.step:,} steps.{hint}")
    elif outcome.status:
        print(f"The run failed after {progress.step:,} steps; the error is above.")
    elif "final_model" in summary:
        print("\nA sample of what it writes:", flush=True)
        sample = [sys.executable, "tools/sample.py", log.stem, "--length", "80"]
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the sample alone.
            subprocess.run(sample, check=False)
    if Path(os.environ.get("OLDPWD", ROOT)).resolve() != ROOT:
        print(f"The next commands are for the folder {ROOT}.")
    print(summary)


def main() -> None:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="settings of train_gpt.py")
    parser.add_argument("--preset", default="", metavar="NAME", help=", ".join(presets()))
    parser.add_argument("--track", default="", choices=TRACKERS,
                        help="also send the numbers to this tracker")
    parser.add_argument("--check", action="store_true", help="only check the form of these arguments")
    options = parser.parse_intermixed_args()
    os.chdir(ROOT)
    try:
        for word in options.settings:
            if "=" not in word:
                raise ValueError(f"{word} is not NAME=value, --preset NAME, --help or test")
        if options.preset:
            preset_file(options.preset)
        if options.check:
            return
        # Where wandb has run, its folder wandb/ looks like a package without an origin.
        if options.track and not getattr(find_spec(options.track), "origin", None):
            install = f"{interpreter()} -m pip install {options.track}"
            raise ValueError(f"--track {options.track} needs a package: {install}")
        outcome = train(plan(options.settings, options.preset), options.track)
        conclude(outcome)
    except (OSError, ValueError) as error:
        sys.exit(f"run.sh: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(outcome.status)


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
