"""Run the seeds of a record one after another and package them.

    python records/run.py --track track_10min_1mb_cpu --division sotu --name Control --author me \\
        --blurb "What is new" --seeds 1337,1338,1339 DATA_PATH=data/datasets/sotu_sp1024 NUM_LAYERS=3 ...
    python records/run.py ... --base track_10min_1mb_cpu/2026-01-31_Control MATRIX_LR=0.03       on the base's settings

After an interruption, run the same command again: seeds that have finished with these settings and this script are kept, and
an unfinished one starts again. The runs are called NAME_seedN.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir

from claims import check_division, check_request, other_seeds
from common import FOLDER_NAME, ROOT, Findings, has_finished, launcher, load_json, load_track, pairs_of, require_packages
from events import MAY_DIFFER_BETWEEN_SEEDS
from log_rules import find_table
from source_rules import check_script
from submit import add_arguments, folder_of, submit
from verify import report

sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402


RENAMED = {"MUON_POLAR": "MUON_ROW_NORM"}  # variables of the scripts of older records


def run_seed(command: list[str], environment: dict[str, str]) -> int:
    """Run the trainer and return its exit status. SIGTERM is passed on; on Ctrl-C, which the trainer receives itself, wait
    for its checkpoint."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def plan_settings(options) -> dict[str, str]:
    """Return the settings of the runs by name: the base's, the environment's where the base sets them, those of the
    command, and the track's DEVICE. Sets the division to the base's if none is given. Raises ValueError and OSError."""
    settings = {}
    tracks = sorted(path.parent.name for path in (ROOT / "records").glob("track_*/track.json"))
    if options.track not in tracks:
        raise ValueError(f"--track {options.track!r} must be one of {', '.join(tracks)}")
    if options.base:
        bases = [f"{options.track}/{path.parent.name}" for path in (ROOT / "records" / options.track).glob("*/submission.json")]
        if options.base not in bases:
            raise ValueError(f"--base {options.base!r} must be one of {', '.join(sorted(bases))}")
        submission = load_json(ROOT / "records" / options.base / "submission.json")
        options.division = options.division or submission["division"]
        settings = {RENAMED.get(name, name): str(value) for name, value in submission["settings"].items()}
        settings = {name: os.environ.get(name, value) for name, value in settings.items()}
    settings |= pairs_of(options.settings)
    allowed = load_track(folder_of(options, time.gmtime())).get("settings", {})
    if "DEVICE" in allowed and "DEVICE" not in os.environ:  # the trainer would prefer a GPU
        settings.setdefault("DEVICE", allowed["DEVICE"][0])
    return settings


def check_plan(options, settings: dict[str, str], seeds: list[str]) -> None:
    """Validate the request before training. Raises ValueError with all reasons for which the record would be
    refused."""
    folder = folder_of(options, time.gmtime())
    track = load_track(folder)
    problems = Findings()
    problems.check(FOLDER_NAME.fullmatch(folder.name), f"--name {options.name!r} must be letters, digits or _ . -")
    problems.check(len(set(seeds)) == len(seeds) and all(re.fullmatch(r"\d+", seed) for seed in seeds),
                   f"--seeds {','.join(seeds)} must be different numbers")
    problems.check(not folder.exists(), f"{folder.relative_to(ROOT)} exists; delete it, or choose another --name")
    most = min(track.get("max_world_size", options.ranks), track.get("max_threads", options.ranks))
    problems.check(options.ranks <= most, f"--ranks {options.ranks} is more than the track's {most}")
    problems += check_script((ROOT / "train_gpt.py").read_text(encoding="utf-8"))
    config, given = train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], dict(os.environ))
    problems.check(not config.val_tokens, "VAL_TOKENS scores a part of the validation text")
    names = [*given, "MAX_WALLCLOCK_SECONDS", *track.get("settings", {})]
    planned = {name: getattr(config, name.lower()) for name in names}
    check_request(track, options.division, len(seeds), planned, problems)
    other_seeds(folder, options.base, options.division, problems)
    if track.get("divisions") and not problems:
        with chdir(ROOT):
            validation = train_gpt.Validation(config, train_gpt.Ranks(0, 1, train_gpt.torch.device("cpu")))
        seen = {"settings": {"TRAIN_SEQ_LEN": config.train_seq_len}, "val_tokens": validation.count,
                "val_bytes": validation.bytes, "data_sha256": validation.data_sha256}
        seen["table"] = find_table(track["divisions"][options.division]["scored"], seen)
        check_division(seen, options.division, problems)
    if problems:
        raise ValueError("; ".join(problems))


def measure_machine(run_id: str, settings: dict[str, str], environment: dict[str, str]) -> None:
    """Write the machine's rates of this moment to logs/RUN_ID.rates.json."""
    config, _ = train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], dict(os.environ))
    command = [sys.executable, str(ROOT / "records" / "rates.py"), config.device, str(config.model_dim)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        (ROOT / "logs").mkdir(exist_ok=True)
        (ROOT / "logs" / f"{run_id}.rates.json").write_text(result.stdout, encoding="utf-8")
        print(f"{run_id}: this machine now: {result.stdout.strip()}", flush=True)


def run_seeds(options, settings: dict[str, str], seeds: list[str]) -> list[str]:
    """Run the seeds that have not finished and return all RUN_IDs. Exits if a run fails."""
    environment = dict(os.environ)
    threads = load_track(folder_of(options, time.gmtime())).get("max_threads")
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads // options.ranks)
    run_ids = []
    for seed in seeds:
        run_id = f"{options.name}_seed{seed}"
        run_ids.append(run_id)
        given = {**settings, "SEED": seed, "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}"}
        if has_finished(ROOT, run_id, given, options.ranks):
            print(f"{run_id} has already finished", flush=True)
            continue
        shutil.rmtree(ROOT / given["OUT_DIR"], ignore_errors=True)  # of an unfinished or another run
        arguments = [f"{name}={text}" for name, text in given.items()]
        measure_machine(run_id, given, environment)
        status = run_seed([*launcher(options.ranks), "train_gpt.py", *arguments], environment)
        if status:
            was_signal = status > 128 or status < 0
            hint = "; run the same command again to continue" if was_signal else ""
            sys.exit(f"run.py: {run_id} ended with status {status}{hint}")
    return run_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", default="1337,1338,1339", help="numbers, separated by commas")
    parser.add_argument("--ranks", type=int, choices=range(1, 9), default=1, metavar="N",
                        help="processes on this machine, started by torchrun")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py")
    options = parser.parse_args()
    if not (options.track and options.name):
        parser.error("--track and --name are needed")
    require_packages()
    seeds = options.seeds.split(",")
    try:
        settings = plan_settings(options)
        check_plan(options, settings, seeds)
        run_ids = run_seeds(options, settings, seeds)
        words = [f"--{key}={getattr(options, key)}" for key in ("track", "division", "name", "base", "seeds")
                 if getattr(options, key)]
        given = train_gpt.load_config([], dict(os.environ))[1].keys() & os.environ.keys() - MAY_DIFFER_BETWEEN_SEEDS
        words += [f"{name}={os.environ[name]}" for name in sorted(given - pairs_of(options.settings).keys())]
        if options.ranks > 1:
            words.append(f"--ranks={options.ranks}")
        folder = submit(options, run_ids, f"python records/run.py {shlex.join(words + options.settings)}")
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        sys.exit("run.py: stopped; run the same command again to continue")
    sys.exit(0 if report(folder) else 1)


if __name__ == "__main__":
    main()
