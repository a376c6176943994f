"""Send the numbers of a run to Weights & Biases, trackio or TensorBoard, while it trains or afterwards.

    python tools/track.py wandb RUN_ID    follow logs/RUN_ID.jsonl until the run ends or Ctrl-C; or trackio, or tensorboard
    python tools/track.py wandb RUN_ID --once    send what there is now, also of a run that was stopped

Each start makes a new page with all steps of the run, including those before a resume. TensorBoard keeps one page, the folder
logs/RUN_ID.tensorboard/, in which new points hide the old ones.
"""

import argparse
import importlib
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from events import find_log, interpreter, prepare_output, read_history


def open_tracker(tracker: str, path: Path, settings: dict):
    """Return two functions: send(numbers by name, step) and close(). Raises ImportError."""
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(str(path.with_suffix(".tensorboard")), purge_step=0)  # hides what was sent before
        return lambda numbers, step: [writer.add_scalar(*pair, step) for pair in numbers.items()], writer.close
    client = importlib.import_module(tracker)
    run = client.init(project=os.environ.get("WANDB_PROJECT") or "train_gpt", name=path.stem, config=settings)
    return lambda numbers, step: run.log({**numbers, "step": step}, step=step), run.finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=("wandb", "trackio", "tensorboard"))
    parser.add_argument("run", metavar="RUN_ID", help="run in logs/, or path of a .jsonl log")
    parser.add_argument("--once", action="store_true", help="do not wait for more events")
    options = parser.parse_args()
    sent = set()
    try:
        path = find_log(options.run)
        events = read_history(path)
        send, close = open_tracker(options.tracker, path, events[0]["config"])
        with suppress(KeyboardInterrupt):
            while True:
                for event in events:
                    kind, step = event["event"], event.get("step")
                    if kind in ("train", "val", "windows", "final") and (kind, step) not in sent:
                        send({f"{kind}/{name}": value for name, value in event.items() if isinstance(value, int | float)}, step)
                        sent.add((kind, step))
                if options.once or any(event["event"] in ("final", "nonfinite") for event in events):
                    break
                time.sleep(2)
                with suppress(OSError, ValueError):  # it is renamed when the run is resumed, and then empty for a moment
                    events = read_history(path)
        close()
    except ImportError as error:
        sys.exit(f"track.py: {error}; run: {interpreter()} -m pip install {options.tracker}")
    except Exception as error:  # also a tracker's own, as without a login or on a full disk
        sys.exit(f"track.py: {error}")
    print(f"{len(sent)} events sent from {path}")


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    try:
        main()
    except KeyboardInterrupt:  # while a tracker is opened or closed
        sys.exit("track.py: stopped")
