"""Send the numbers of a run to Weights & Biases, trackio or TensorBoard, while it trains or afterwards.

    python logs/track.py wandb RUN_ID          follow logs/RUN_ID.jsonl until the run ends; or trackio, or tensorboard
    python logs/track.py wandb RUN_ID --once   send what the log holds now

The trainer does not depend on this program. Each start makes a page of its own, with all steps of the run, those before it
was resumed included; TensorBoard's is logs/RUN_ID.tensorboard/.
"""

import argparse
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from events import read_history

SENT = ("train", "val", "windows", "final")  # the events whose numbers are sent
POLL_SECONDS = 2.0


def follow(path: Path, once: bool) -> Iterator[dict]:
    """Yield the settings and each numbered event of a log once, until the final score, or what is there now."""
    seen = set()
    while True:
        events = read_history(path) if path.is_file() else []
        for event in events:
            key = event["event"], event.get("step", 0)
            if event["event"] in ("config", *SENT) and key not in seen:
                seen.add(key)
                yield event
        if once or any(event["event"] == "final" for event in events):
            return
        time.sleep(POLL_SECONDS)


def open_tracker(tracker: str, path: Path, settings: dict) -> tuple[Callable, Callable]:
    """Return two functions: send(numbers by name, step) and close(). Raises ValueError if the tracker is not installed."""
    try:
        module = importlib.import_module("torch.utils.tensorboard" if tracker == "tensorboard" else tracker)
    except ImportError as error:
        raise ValueError(f"{tracker} cannot be imported ({error}); install it with: pip install {tracker}") from None
    if tracker == "tensorboard":
        folder = path.with_suffix(".tensorboard")
        shutil.rmtree(folder, ignore_errors=True)
        writer = module.SummaryWriter(str(folder))
        return lambda numbers, step: [writer.add_scalar(*pair, step) for pair in numbers.items()], writer.close
    run = module.init(project=os.environ.get("WANDB_PROJECT", "train_gpt"), name=path.stem, config=settings)
    return lambda numbers, step: run.log({**numbers, "step": step}, step=step), run.finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=("wandb", "trackio", "tensorboard"))
    parser.add_argument("run", metavar="RUN_ID", help="run in logs/, or path of a .jsonl log")
    parser.add_argument("--once", action="store_true", help="send what the log holds now, then stop")
    options = parser.parse_args()
    path = Path(options.run) if options.run.endswith(".jsonl") else Path("logs", f"{options.run}.jsonl")
    if not path.is_file():
        if options.once:
            sys.exit(f"track.py: {path} does not exist; name a run in logs/ or the path of a .jsonl log")
        print(f"waiting for {path}", flush=True)
    sent, send, close = 0, None, None
    try:
        for event in follow(path, options.once):
            if not send:
                send, close = open_tracker(options.tracker, path, event.get("config", {}))
            numbers = {f"{event['event']}/{name}": value for name, value in event.items() if isinstance(value, int | float)}
            if event["event"] in SENT:
                send(numbers, event["step"])
                sent += 1
        print(f"{sent} events sent from {path}")
    except KeyboardInterrupt:
        sys.exit(f"track.py: stopped after {sent} events")
    except (ValueError, LookupError, OSError) as error:
        sys.exit(f"track.py: {path}: {error}")
    finally:
        if close:
            close()


if __name__ == "__main__":
    main()
