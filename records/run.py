"""Run the seeds of a record one after another and package them.

    python records/run.py --track track_10min_1mb_cpu --division bench --name Control --author me \\
        --blurb "What is new" --seeds 1337,1338,1339 DATA_PATH=data/datasets/bench_sp1024 NUM_LAYERS=3 ...
    python records/run.py ... --base track_10min_1mb_cpu/2026-01-31_Control MATRIX_LR=0.03       on the base's settings

The same command goes on after an interruption: seeds that have finished with these settings and this script are not run
again; an unfinished one starts anew, or, where CHECKPOINT_EVERY is set, from its checkpoint. Runs are called NAME_seedN.
"""

import argparse
import json
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from submit import add_arguments, report, submit  # noqa: E402
from verify import ROOT, load_track  # noqa: E402


def is_finished(run_id: str, settings: dict[str, str]) -> bool:
    """Whether logs/RUN_ID.jsonl is of a finished run of this script with these settings and no others."""
    path = ROOT / "logs" / f"{run_id}.jsonl"
    if not path.is_file():
        return False
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not events or events[-1]["event"] != "final":
        return False
    code = next(event["code_sha256"] for event in events if event["event"] == "export")
    set_then = {name: text for name, (text, _) in events[0]["overrides"].items()}
    return set_then == settings and code == sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", default="1337,1338,1339", help="numbers, joined by commas")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine, by torchrun")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py")
    options = parser.parse_args()
    if not (options.track and options.name):
        parser.error("--track and --name are needed")
    settings = {}
    try:
        load_track(ROOT / "records" / options.track / options.name)
        if options.base:
            path = ROOT / "records" / options.base / "submission.json"
            settings |= {name: str(int(value) if isinstance(value, bool) else value)
                         for name, value in json.loads(path.read_text(encoding="utf-8"))["settings"].items()}
        settings |= dict(setting.split("=", 1) for setting in options.settings)
    except (ValueError, OSError) as error:
        sys.exit(f"run.py: {error}")
    if "CHECKPOINT_EVERY" in settings:
        settings.setdefault("RESUME", "auto")
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    run_ids = []
    for seed in options.seeds.split(","):
        run_ids.append(f"{options.name}_seed{seed}")
        given = {**settings, "SEED": seed, "RUN_ID": run_ids[-1], "OUT_DIR": f"logs/{run_ids[-1]}"}
        if is_finished(run_ids[-1], given):
            print(f"{run_ids[-1]} has finished already", flush=True)
            continue
        result = subprocess.run([*launcher, "train_gpt.py", *(f"{name}={value}" for name, value in given.items())],
                                cwd=ROOT, check=False)
        if result.returncode:
            sys.exit(f"run.py: {run_ids[-1]} ended with {result.returncode}; the same command goes on from there")
    try:
        report(submit(options, run_ids, f"python records/run.py {shlex.join(sys.argv[1:])}"))
    except (ValueError, OSError) as error:
        sys.exit(f"run.py: {error}")


if __name__ == "__main__":
    main()
