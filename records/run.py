"""Run the seeds of a record one after another and package them.

    python records/run.py --track track_10min_1mb_cpu --division bench --name Control --author me \\
        --blurb "What is new" --seeds 1337,1338,1339 DATA_PATH=data/datasets/bench_sp1024 NUM_LAYERS=3 ...
    python records/run.py ... --base track_10min_1mb_cpu/2026-01-31_Control MATRIX_LR=0.03       on the base's settings

The same command goes on after an interruption: seeds that have finished with these settings and this script are not run
again; an unfinished one starts anew, or, where CHECKPOINT_EVERY is set, from its checkpoint. Runs are called NAME_seedN.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from submit import add_arguments, preflight, report, submit  # noqa: E402
from verify import ROOT, load_track, read_events  # noqa: E402


def state_of(run_id: str, settings: dict[str, str], ranks: int) -> str:
    """What logs/RUN_ID.jsonl is of: a "finished" or a "begun" run of this script with these settings and no others, where
    RESUME does not count, on as many ranks; "other" if it is of none."""
    log, text = (ROOT / "logs" / f"{run_id}{suffix}" for suffix in (".jsonl", ".txt"))
    try:
        events = read_events(log)
        then = {name: value for name, (value, _) in events[0]["overrides"].items()}
        wanted = {**{name: os.environ[name] for name in events[0]["config"] if name in os.environ}, **settings}
        source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
        same = text.read_text(encoding="utf-8").startswith(source + "\n=") and events[0]["world_size"] == ranks
    except (OSError, ValueError, LookupError):  # none, or one that a power failure has cut
        return "other"
    then.pop("RESUME", None)
    wanted.pop("RESUME", None)
    if not same or then != wanted:
        return "other"
    return "finished" if any(event["event"] == "final" for event in events) else "begun"


def run_seed(arguments: list[str], environment: dict[str, str]) -> int:
    """Runs the trainer to its end, passing on SIGTERM; on Ctrl-C, which it gets itself, waits for its checkpoint."""
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", default="1337,1338,1339", help="numbers, joined by commas")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine, by torchrun")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py")
    options = parser.parse_args()
    if not (options.track and options.name):
        parser.error("--track and --name are needed")
    settings, seeds = {}, options.seeds.split(",")
    try:
        if options.base:
            path = ROOT / "records" / options.base / "submission.json"
            settings |= {name: str(int(value) if isinstance(value, bool) else value)
                         for name, value in json.loads(path.read_text(encoding="utf-8"))["settings"].items()}
        for setting in options.settings:
            if "=" not in setting:
                raise ValueError(f"{setting!r} is no setting, as NUM_LAYERS=3 is")
        settings |= dict(setting.split("=", 1) for setting in options.settings)
        folder = preflight(options, settings, len(seeds), options.ranks)
        threads = load_track(folder).get("max_threads")
    except (ValueError, OSError, KeyError) as error:
        sys.exit(f"run.py: {error}")
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads // options.ranks)
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    run_ids = []
    for seed in seeds:
        run_ids.append(f"{options.name}_seed{seed}")
        given = {**settings, "SEED": seed, "RUN_ID": run_ids[-1], "OUT_DIR": f"logs/{run_ids[-1]}"}
        state = state_of(run_ids[-1], given, options.ranks)
        if state == "finished":
            print(f"{run_ids[-1]} has finished already", flush=True)
            continue
        if state == "begun" and "CHECKPOINT_EVERY" in settings:
            given.setdefault("RESUME", "auto")
        code = run_seed([*launcher, "train_gpt.py", *(f"{name}={value}" for name, value in given.items())], environment)
        if code:
            more = "; the same command goes on from there" if code > 128 or code < 0 else ""  # a signal has ended it
            sys.exit(f"run.py: {run_ids[-1]} ended with {code}{more}")
    said = [f"--{key}={value}" for key in ("track", "division", "name", "base", "seeds") if (value := getattr(options, key))]
    said += [f"--ranks={options.ranks}"] * (options.ranks > 1) + options.settings
    try:
        submit(options, folder, run_ids, f"python records/run.py {shlex.join(said)}")
        report(folder)
    except (ValueError, OSError, KeyError) as error:
        sys.exit(f"run.py: {error}")


if __name__ == "__main__":
    main()
