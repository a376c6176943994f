"""Train variations of one setting with several seeds, and print what each is worth.

    python tools/ablate.py control 'relu MLP_SLOPE=0' 'wide MLP_MULT=4' --base records/presets/cpu_1mb.env \\
        --seeds 1337,1338 --jobs 2 --settings ITERATIONS=1500 DATA_PATH=data/datasets/sotu_caseops2048

A variation is a name and its settings; the first one is what the others are compared with. All run for the same
ITERATIONS, so that a noisy machine changes nothing; bench.py says what a variation costs in time. With --seconds N, all run
for the same time instead, which counts what a variation costs: use a quiet machine and --jobs 1. Runs that have finished
with these settings and this script are kept. The logs are logs/ablate_NAME_SEED.jsonl.

p is that of the records' test, one-sided: how often seeds alone would make a variation look this much better than the
first one.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import ROOT, compare_scores, count_cores, deviation, has_finished, pairs_of, require_packages, table
import train_gpt
from events import read_events


def train(name: str, seed: str, settings: dict[str, str], seconds: float, threads: int) -> list[dict]:
    """Train a variation, for ITERATIONS or `seconds` if that is not 0, unless that has been done. Returns the events of its
    log. Exits if the run fails."""
    run_id = f"ablate_{name}_{seed}"
    given = {**settings, "SEED": seed, "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}",
             "MAX_WALLCLOCK_SECONDS": str(seconds)}
    if not has_finished(ROOT, run_id, given, ranks=1):
        shutil.rmtree(ROOT / given["OUT_DIR"], ignore_errors=True)
        words = [f"{key}={value}" for key, value in given.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        result = subprocess.run([sys.executable, "train_gpt.py", *words], cwd=ROOT, env=environment,
                                capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"ablate.py: {run_id} ended with status {result.returncode}: {result.stderr[-400:]}")
    return read_events(ROOT / "logs" / f"{run_id}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variations", nargs="+", metavar="'NAME VARIABLE=value ...'")
    parser.add_argument("--base", help="file with settings, one VARIABLE=value a line")
    parser.add_argument("--seeds", default="1337,1338", help="numbers, separated by commas")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N",
                        help="runs at the same time, which share the cores")
    parser.add_argument("--seconds", type=float, default=0, metavar="N", help="train each for N seconds, not for ITERATIONS")
    parser.add_argument("--settings", nargs="*", default=[], metavar="VARIABLE=value", help="of all runs")
    options = parser.parse_args()
    try:
        base = train_gpt.load_config([f"@{options.base}"] if options.base else [], {})[1]
        common = {name: text for name, (text, origin) in base.items() if origin == f"@{options.base}"} | pairs_of(options.settings)
        names = [words.split()[0] for words in options.variations]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two variations are called {' and '.join(sorted(repeated))}; give each its own name")
        if settings := [name for name in names if "=" in name]:
            raise ValueError(f"{settings[0]} is a setting; before it, in the same quotes, goes a name: 'NAME {settings[0]}'")
        trials = [(name, seed, {**common, **pairs_of(words)}) for name, *words in map(str.split, options.variations)
                  for seed in options.seeds.replace(" ", "").split(",")]
        for _, seed, settings in trials:  # mistakes are found before the first run
            train_gpt.load_config([f"{key}={value}" for key, value in {**settings, "SEED": seed}.items()], {})
    except (OSError, ValueError) as error:
        sys.exit(f"ablate.py: {error}")
    if "," in options.seeds:
        require_packages()
    os.chdir(ROOT)  # to which the paths in the settings are relative
    threads = max(1, count_cores() // options.jobs)
    pool = ThreadPoolExecutor(options.jobs)
    started, ended = time.monotonic(), []
    print(f"{len(trials)} runs, {options.jobs} at a time", flush=True)

    def run(trial: tuple[str, str, dict[str, str]]) -> list[dict]:
        events = train(*trial, options.seconds, threads)
        ended.append(trial)
        minutes = (time.monotonic() - started) / len(ended) * (len(trials) - len(ended)) / 60
        print(f"ablate_{trial[0]}_{trial[1]}: run {len(ended)} of {len(trials)}, about {minutes:.0f} min left", flush=True)
        return events

    try:
        logs = list(pool.map(run, trials))
    except KeyboardInterrupt:
        sys.exit("ablate.py: stopped; the same command goes on, and keeps the runs that have finished")
    finally:
        pool.shutdown(cancel_futures=True)
    results = {}
    for (name, _, _), events in zip(trials, logs):
        last = {event["event"]: event for event in events}
        results.setdefault(name, []).append((
            last["val"]["val_bpb"], last["final"]["val_bpb"], last["export"]["artifact_bytes"], last["val"]["step"]))
    rows = []
    scores = {name: [{"val_bpb": number[0]} for number in numbers] for name, numbers in results.items()}
    first_name = next(iter(results))
    first = statistics.mean(number[0] for number in results[first_name])
    for name, numbers in results.items():
        test = compare_scores({}, scores[name], scores[first_name]) if name != first_name else None
        score, exported, size, steps = map(statistics.mean, zip(*numbers))
        spread = deviation([number[0] for number in numbers])
        p = f"{test['p']:.2g}" if test else ""
        rows.append([name, f"{score:.4f} ± {spread:.4f}", f"{score - first:+.4f}", p, f"{exported:.4f}",
                     f"{size:,.0f}", f"{steps:,.0f}"])
    header = "| | bits per byte | change | p | after export | artifact, bytes | steps |"
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
