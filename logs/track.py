"""Send the numbers of a run to Weights & Biases, trackio or TensorBoard, while it trains or afterwards.

    python logs/track.py wandb RUN_ID    follow logs/RUN_ID.jsonl until the run ends or Ctrl-C; or trackio, or tensorboard

Each start makes a new page with all steps of the run, also those from before it was resumed. TensorBoard's page is
logs/RUN_ID.tensorboard/.
"""

import argparse
import importlib
import os
import shutil
import sys
import time
from pathlib import Path

from events import find_log, read_history

POLL_SECONDS = 2.0


def open_tracker(tracker: str, path: Path, settings: dict):
    """Return two functions: send(numbers by name, step) and close(). Raises ImportError."""
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        folder = path.with_suffix(".tensorboard")
        shutil.rmtree(folder, ignore_errors=True)
        writer = SummaryWriter(str(folder))
        return lambda numbers, step: [writer.add_scalar(*pair, step) for pair in numbers.items()], writer.close
    project = os.environ.get("WANDB_PROJECT", "train_gpt")
    run = importlib.import_module(tracker).init(project=project, name=path.stem, config=settings)
    return lambda numbers, step: run.log({**numbers, "step": step}, step=step), run.finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=("wandb", "trackio", "tensorboard"))
    parser.add_argument("run", metavar="RUN_ID", help="run in logs/, or path of a .jsonl log")
    options = parser.parse_args()
    path = find_log(options.run)
    try:
        events = read_history(path)
        send, close = open_tracker(options.tracker, path, events[0]["config"])
    except ImportError as error:
        sys.exit(f"track.py: {error}; install it with: pip install {options.tracker}")
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"track.py: {path} is no log of a run: {error}")
    sent = set()
    try:
        while True:
            for event in events:
                key = event["event"], event.get("step")
                if event["event"] in ("train", "val", "windows", "final") and key not in sent:
                    send({f"{key[0]}/{name}": value for name, value in event.items() if isinstance(value, int | float)}, key[1])
                    sent.add(key)
            if any(event["event"] == "final" for event in events):
                break
            time.sleep(POLL_SECONDS)
            events = read_history(path) if path.is_file() else []  # it is renamed when the run is resumed
        print(f"{len(sent)} events sent from {path}")
    except KeyboardInterrupt:
        sys.exit(f"track.py: stopped after {len(sent)} events")
    finally:
        close()


if __name__ == "__main__":
    main()
