"""Send the numbers of a run to Weights & Biases or TensorBoard, while it trains or afterwards.

    python logs/track.py wandb RUN_ID              follow logs/RUN_ID.jsonl until the run ends
    python logs/track.py tensorboard RUN_ID        the same, into logs/RUN_ID.tensorboard/
    python logs/track.py wandb RUN_ID --once       send what the log holds now, then stop

The trainer does not depend on this program: start and stop it at any time. logs/RUN_ID.wandb.json or
logs/RUN_ID.tensorboard.json remembers how much was sent; delete that file to send everything again.
"""

import argparse
import importlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from events import older_logs, read_events, resume_step

SENT = ("train", "val", "windows", "final")  # the events whose numbers are sent
POLL_SECONDS = 2.0


class Log:
    """The .jsonl logs of a run, read from where this program last stopped: first those that the trainer renamed when the run
    was resumed. A file keeps `state`: how many logs were read to their end, the first line and the bytes read of the next one,
    the tracker's ids of this run and the previous one, and whether the final score was sent."""

    def __init__(self, path: Path, tracker: str):
        self.path = path
        self.state_path = path.with_suffix(f".{tracker}.json")
        self.state = {"done": 0, "first_line": "", "offset": 0, "id": "", "previous": "", "finished": False}
        if self.state_path.is_file():
            self.state |= json.loads(self.state_path.read_text(encoding="utf-8"))
            return
        logs = [*older_logs(path), path]
        first = len(logs) - 1  # the log in which the newest run began
        while first and path.is_file() and resume_step(read_events(logs[first])):
            first -= 1
        self.state["done"] = first

    def new_events(self) -> list[dict]:
        """Return the events added since the last call, of one log. A run that was started or resumed under the same name
        has a new log; the trainer has renamed the one before."""
        older = older_logs(self.path)
        done = min(self.state["done"], len(older))
        path = [*older, self.path][done]
        if not path.is_file():
            return []
        with path.open("rb") as file:
            first_line = file.readline().decode("utf-8")
            offset = self.state["offset"] if first_line == self.state["first_line"] else 0  # 0: another log in its place
            file.seek(offset)
            data = file.read()
        if len(older_logs(self.path)) > len(older):  # renamed just now
            return []
        complete = data[:data.rfind(b"\n") + 1]  # the trainer may be writing the last line
        if not complete and done < len(older):
            self.state.update(done=done + 1, offset=0)
            return self.new_events()
        self.state.update(done=done, first_line=first_line, offset=offset + len(complete))
        return [json.loads(line) for line in complete.decode("utf-8").splitlines()]

    def settings(self) -> dict:
        """Return the settings of the run, which are in the first event."""
        return json.loads(self.state["first_line"])["config"]

    def save(self) -> None:
        """Write the state to its file."""
        temporary = self.state_path.with_name(self.state_path.name + ".tmp")
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        os.replace(temporary, self.state_path)


def open_wandb(log: Log, module) -> tuple[Callable, Callable]:
    """Open the run's page. Return two functions: send(numbers by name, step) and close()."""
    project = os.environ.get("WANDB_PROJECT", "train_gpt")
    run = module.init(project=project, name=log.path.stem, id=log.state["id"], resume="allow",
                      config=log.settings())
    # wandb's own step cannot go back, but the steps of a resumed run can repeat.
    run.define_metric("*", step_metric="step")

    def send(numbers: dict[str, float], step: int) -> None:
        run.log({**numbers, "step": step})

    return send, run.finish


def open_tensorboard(log: Log, module) -> tuple[Callable, Callable]:
    """Open a folder for TensorBoard. Return two functions: send(numbers by name, step) and close()."""
    writer = module.SummaryWriter(str(log.path.with_suffix(".tensorboard") / log.state["id"]))

    def send(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, writer.close


def numbers_of(event: dict) -> dict[str, float]:
    """Return the numbers of an event by names such as "train/train_loss", without those that are null."""
    return {f"{event['event']}/{name}": value for name, value in event.items()
            if name not in ("event", "step") and value is not None}


def track(tracker: str, path: Path, once: bool) -> int:
    """Send the events that were not sent yet; unless `once`, continue until the final score. Return how many
    were sent. Raises ValueError if the tracker is not installed or the file is not a log of train_gpt.py."""
    module_name = "torch.utils.tensorboard" if tracker == "tensorboard" else tracker
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{tracker} cannot be imported ({error}); "
                         f"install it with: pip install {tracker}") from None
    open_tracker = open_wandb if tracker == "wandb" else open_tensorboard
    log = Log(path, tracker)
    send = None  # until there are numbers: a "resume" event decides which run they belong to
    close = None
    sent = 0
    while True:
        events = log.new_events()
        for event in events:
            if event["event"] == "config":  # a log begins
                if close:
                    close()
                send = None
                close = None
                log.state.update(previous=log.state["id"], id="", finished=False)
            elif event["event"] == "resume":
                log.state["id"] = log.state["previous"]
            elif event["event"] in SENT:
                if send is None:
                    log.state["id"] = log.state["id"] or uuid.uuid4().hex[:12]
                    send, close = open_tracker(log, module)
                send(numbers_of(event), event["step"])
                sent += 1
                log.state["finished"] = event["event"] == "final"
        if events:
            log.save()
            continue  # the next log, if there is one
        if once or log.state["finished"]:
            break
        time.sleep(POLL_SECONDS)
    if close:
        close()
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=("wandb", "tensorboard"))
    parser.add_argument("run", metavar="RUN_ID", help="run in logs/, or path of a .jsonl log")
    parser.add_argument("--once", action="store_true", help="send what the log holds now, then stop")
    options = parser.parse_args()
    path = Path(options.run)
    if path.suffix != ".jsonl":
        path = Path("logs", options.run + ".jsonl")
    if not path.is_file():
        if options.once:
            sys.exit(f"track.py: {path} does not exist; name a run in logs/ or the path of a .jsonl log")
        print(f"waiting for {path}", flush=True)
    try:
        sent = track(options.tracker, path, options.once)
        print(f"{sent} events sent from {path}")
    except KeyboardInterrupt:
        sys.exit(f"track.py: stopped; run the same command again to continue with {path}")
    except (ValueError, LookupError, OSError) as error:
        sys.exit(f"track.py: {path}: {error}")


if __name__ == "__main__":
    main()
