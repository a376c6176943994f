"""Send the numbers of a run to Weights & Biases or TensorBoard, while it trains or afterwards.

    python logs/track.py wandb RUN_ID              follow logs/RUN_ID.jsonl until the run ends
    python logs/track.py tensorboard RUN_ID        the same, into logs/RUN_ID.tensorboard/
    python logs/track.py wandb RUN_ID --once       send what the log holds now, then stop

The trainer does not know about this program: it can be started, stopped and started again at any time. What was
already sent is remembered in logs/RUN_ID.wandb.json or logs/RUN_ID.tensorboard.json; delete that file to send everything again.
"""

import argparse
import importlib
import json
import os
import sys
import time
import uuid
from pathlib import Path

SENT = ("train", "val", "final")  # the events whose numbers are sent
POLL_SECONDS = 2.0


class Log:
    """The .jsonl log of a run, read from where this program stopped the last time. `state` is kept in a file: the log's
    first line, how many bytes were read, the tracker's id of the run and of the one before it, and whether the final
    score was sent."""

    def __init__(self, path: Path, tracker: str):
        self.path = path
        self.state_path = path.with_suffix(f".{tracker}.json")
        self.state = {"first_line": "", "offset": 0, "id": "", "previous": "", "finished": False}
        if self.state_path.is_file():
            self.state = json.loads(self.state_path.read_text(encoding="utf-8"))

    def new_events(self) -> list[dict]:
        """Return the events that were added since the last call. A log that was replaced, because a run was started or
        resumed under the same name, is read from its beginning."""
        with self.path.open("rb") as file:
            first_line = file.readline().decode("utf-8")
            if not first_line.endswith("\n"):
                return []
            if first_line != self.state["first_line"]:
                self.state.update(first_line=first_line, offset=0)
            file.seek(self.state["offset"])
            data = file.read()
        whole = data[:data.rfind(b"\n") + 1]  # the trainer may be writing the last line
        self.state["offset"] += len(whole)
        return [json.loads(line) for line in whole.decode("utf-8").splitlines()]

    def settings(self) -> dict:
        """The run's variables, from the first event."""
        return json.loads(self.state["first_line"])["config"]

    def remember(self) -> None:
        """Write down what was sent."""
        temporary = self.state_path.with_name(self.state_path.name + ".tmp")
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        os.replace(temporary, self.state_path)


def open_wandb(log: Log, module):
    """Return a function that sends numbers by name, and a step, to the run's page."""
    run = module.init(project=os.environ.get("WANDB_PROJECT", "train_gpt"), name=log.path.stem, id=log.state["id"],
                      resume="allow", config=log.settings())
    # With a step of our own, a validation and a training line of one step, or steps that are done again, are all kept.
    run.define_metric("*", step_metric="step")
    return lambda numbers, step: run.log({**numbers, "step": step}), run.finish


def open_tensorboard(log: Log, module):
    """Return a function that writes numbers by name, and a step, into the folder that TensorBoard reads."""
    writer = module.SummaryWriter(str(log.path.with_suffix(".tensorboard") / log.state["id"]))

    def send(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, writer.close


def numbers_of(event: dict) -> dict[str, float]:
    """The numbers of an event, named as "train/train_loss"; what is unknown (null) is left out."""
    return {f"{event['event']}/{name}": value for name, value in event.items()
            if name not in ("event", "step") and value is not None}


def track(tracker: str, path: Path, once: bool) -> int:
    """Send every event of the log that was not sent yet, until the final score; return how many were sent. ValueError:
    the tracker's library is not installed, or the file is not a log of train_gpt.py."""
    try:
        module = importlib.import_module("torch.utils.tensorboard" if tracker == "tensorboard" else tracker)
    except ImportError as error:
        raise ValueError(f"{tracker} cannot be imported ({error}); install it with: pip install {tracker}") from None
    log, send, close, sent = Log(path, tracker), None, None, 0
    while True:
        events = log.new_events() if path.is_file() else []
        for event in events:
            if event["event"] == "config":  # a log begins
                if close:
                    close()
                send, close = None, None
                log.state.update(previous=log.state["id"], id="", finished=False)
            elif event["event"] == "resume":
                log.state["id"] = log.state["previous"]
            elif event["event"] in SENT:
                if send is None:
                    log.state["id"] = log.state["id"] or uuid.uuid4().hex[:12]
                    send, close = (open_wandb if tracker == "wandb" else open_tensorboard)(log, module)
                send(numbers_of(event), event["step"])
                sent += 1
                log.state["finished"] = event["event"] == "final"
        if events:
            log.remember()
        if once or log.state["finished"]:
            break
        time.sleep(POLL_SECONDS)
    if close:
        close()
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=("wandb", "tensorboard"))
    parser.add_argument("run", metavar="RUN_ID", help="a run in logs/, or the path of a .jsonl log")
    parser.add_argument("--once", action="store_true", help="send what the log holds now, then stop")
    options = parser.parse_args()
    path = Path(options.run) if options.run.endswith(".jsonl") else Path("logs", options.run + ".jsonl")
    if not path.is_file():
        if options.once:
            sys.exit(f"track.py: {path} does not exist; name a run in logs/, or the path of a .jsonl log")
        print(f"waiting for {path}", flush=True)
    try:
        print(f"{track(options.tracker, path, options.once)} events sent from {path}")
    except KeyboardInterrupt:
        sys.exit(f"track.py: stopped; run the same command again to continue with {path}")
    except (ValueError, LookupError, OSError) as error:
        sys.exit(f"track.py: {path}: {error}")


if __name__ == "__main__":
    main()
