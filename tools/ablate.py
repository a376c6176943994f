"""Say whether changes to settings or to the script make a better model, in as few runs as it takes.

    python tools/ablate.py base 'slope0 MLP_SLOPE=0' 'mine script=ideas/mine.py' \\
        --base records/presets/cpu_1mb.env \\
        --settings ITERATIONS=600 DATA_PATH=data/datasets/sotu_caseops2048
    python tools/ablate.py tried      list the comparisons so far, which are kept in logs/tried

A variation is a name and its settings; script=FILE trains another script. The first one is what the
others are compared with. All train with seed after seed, until each gets a verdict:

    better     it gains. If none of the variations gains anything, one or more is called better in
               5 % of commands, however many variations there are and however often seeds are added
    no gain    it gains less than --diff bits per byte; if it gains more, 5 % of cases say this.
               Intervals hold at all numbers of pairs together, so of a few pairs, they are several
               times as wide as those of a single t-test
    undecided  --most-seeds are not enough; repeat the command with more, and it goes on
    invalid    its scores would be wrong: its logits depend on later tokens or other rows, its loss
               is not theirs, an artifact does not score what its log says or, with --seconds, the
               clock is slow, by 5 % and 5 s. Not noticed: training on the validation text, several
               updates in a step, or times that are false in all of a log
    failed     a run failed, or its model could not be scored again

All train for ITERATIONS, or for --seconds, which needs a quiet machine. Finished runs in logs/ with
the same script, settings, data, seed, PyTorch and GPU are not repeated, so a command that was
stopped can be given again; with --seconds, --jobs must be the same, too, and without GPUs, the CPU.

Exit status: 0 if all are better, 1 if some are not, 2 for an invalid variation, a mistake in the
command or a full disk, 3 if a run failed (even if others are invalid), 130 if stopped.
"""

import argparse
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from common import ROOT, can_lock, count_cores, gpu_names, hardware, load_json, require_packages, run_command, table, write_whole
from effects import (
    ERROR, MOST_PAIRS, Effect, Run, content_of, correct_for_selection, differences_of, ends_of, judge_all, limits_of,
    pairs_of_seeds, read_run, read_runs,
)
from events import MODEL_FILE, check_logs, limited, prepare_output, read_events
from settings import pairs_of, read_settings, words_of

LOGS = ROOT / "logs"
HEADER = "| change | length | verdict | effect (90 % interval) | pairs | spread of a pair | name | base | text |"
BUSY = 0.6  # load of a core; a program that ended a minute ago still counts a third
FOR_ALL = {"SEED", "ITERATIONS", "MAX_WALLCLOCK_SECONDS", "INIT_FROM", "RESUME"}


@dataclass
class Arm:
    """A variation, and what is known of it."""
    name: str
    script: Path
    settings: dict
    given: str = ""  # the words of the variation
    plan: dict = field(default_factory=dict)  # from probe.py
    content: dict = field(default_factory=dict)  # of its runs
    verdict: str = ""
    reason: str = ""
    runs: list = field(default_factory=list)  # one of each seed
    effect: Effect | None = None  # by which it was judged

    def has(self, run: Run | None, seed: int) -> bool:
        """Whether a run is of this arm with this seed. It must be younger than what it read: files
        may change under one name, and shards under an old manifest."""
        if run is None or run.seed != seed or run.content != self.content:
            return False
        config = self.plan["config"]
        files = [*Path(config["DATA_PATH"]).glob("*.bin")]
        if config["INIT_FROM"]:
            files.append(Path(config["INIT_FROM"]))
        return run.began > max((file.stat().st_mtime for file in files), default=0)

    def tag(self) -> str:
        """Return a digest of the content and, if it counts, one of the CPU's name."""
        digest = sha256(repr(sorted(self.content.items())).encode()).hexdigest()[:6]
        return f"{digest}_on_{self.content['cpu']}" if self.content.get("cpu") else digest


# ---- The command -----------------------------------------------------------------------


def read_common(options) -> dict:
    """Return the settings of all runs. Raises ValueError unless they limit a run in one way."""
    settings = read_settings(options.base)[0] if options.base else {}
    settings |= {"MAX_WALLCLOCK_SECONDS": f"{options.seconds:g}", **pairs_of(options.settings)}
    has_steps = "ITERATIONS" in settings or "ITERATIONS" in os.environ
    if has_steps == bool(options.seconds):
        raise ValueError("give the length of a run once: as ITERATIONS=600, in --settings, --base "
                         "or the environment, or as --seconds 60; no preset's time limit is used")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if options.seconds and not gpu_names() and load > BUSY * count_cores():
        raise ValueError(f"the cores are busy (load {load:.1f} of {count_cores()}), and --seconds "
                         "would measure that; wait, or compare at equal ITERATIONS")
    return settings


def read_arms(options, folder: Path) -> list[Arm]:
    """Return the variations. Their scripts are copied into `folder`, so that they can be edited
    meanwhile. Raises ValueError for a mistake."""
    common, arms = read_common(options), []
    for number, text in enumerate(options.variations):
        name, *words = shlex.split(text) or [""]
        if not name or "=" in name:
            raise ValueError(f"{text!r} must begin with a name: 'NAME VARIABLE=value'")
        if name in [arm.name for arm in arms]:
            raise ValueError(f"two variations are called {name}; give each its own name")
        own = pairs_of(words)
        script = own.pop("script", ROOT / "train_gpt.py")
        for variable in sorted(FOR_ALL & own.keys()):
            raise ValueError(f"{name} sets {variable}, which must be equal in all: --settings {variable}={own[variable]}")
        copy = folder / str(number) / "train_gpt.py"
        copy.parent.mkdir()
        shutil.copy(script, copy)
        arms.append(Arm(name, copy, {**common, **own}, shlex.join(words)))
    return arms


def describe_end(status: int, errors: str) -> str:
    """Return why a process ended, by its exit status and stderr: its signal, or the last line of
    what it wrote, and the line of the script that a traceback names."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = re.findall(r'train_gpt.py", (line \d+)', errors)[-1:]
    last = [line.removeprefix("train_gpt.py: ") for line in errors.strip().splitlines()[-1:]]
    return ", ".join([f"status {status}", *lines, *last])


def make_plans(arms: list[Arm], runner: "Runner") -> None:
    """Ask each arm's script what it would train, and whether its model is valid. Raises ValueError
    for a setting that is wrong, and if the first arm cannot be used."""
    cpu = sha256(hardware(uses_gpus=False).encode()).hexdigest()[:6]
    for arm in arms:
        words = words_of({"RUN_ID": arm.name, **arm.settings})
        command = [sys.executable, ROOT / "tools" / "probe.py", arm.script, "plan", *words]
        try:
            result = subprocess.run(command, cwd=ROOT, env=runner.environment, capture_output=True, text=True, errors="replace",
                                    check=False, stdin=subprocess.DEVNULL, timeout=min(runner.patience, 1e6))
        except subprocess.TimeoutExpired:
            arm.verdict, arm.reason = "failed", f"the script cannot be used: it hangs (--patience {runner.patience / 60:g})"
            continue
        answer = result.stdout.strip().rpartition("\n")[2]  # the last line
        if result.returncode or not answer.startswith("{"):
            end = describe_end(result.returncode, result.stderr)
            arm.verdict, arm.reason = "failed", f"the script cannot be used: {end}"
            continue
        arm.plan = json.loads(answer)
        if "error" in arm.plan:
            raise ValueError(f"{arm.name}: {arm.plan['error']}")
        arm.content = content_of(arm.plan, arm.script.read_text(encoding="utf-8"), cpu)
        if arm.plan["reason"]:
            arm.verdict, arm.reason = "invalid", arm.plan["reason"]
    if arms[0].verdict:
        raise ValueError(f"{arms[0].name} is {arms[0].verdict}: {arms[0].reason}")


def check_against(first: Arm, arm: Arm) -> None:
    """Raises ValueError if a variation is equal to the first one, or is scored on another text."""
    if arm.verdict:
        return
    if first.content == arm.content:
        raise ValueError(f"{arm.name} is equal to {first.name}: what it sets changes nothing")
    if text_of(first.plan) != text_of(arm.plan):
        raise ValueError(f"{arm.name} is scored on another text than {first.name}")


def text_of(plan: dict) -> int | tuple:
    """Return what tells a validation text from others: its bytes, whatever the tokenizer, or if no
    manifest has them, the folder and the tokenizer, by which the trainer counts them."""
    folder, tokenizer = plan["config"]["DATA_PATH"], plan["config"]["TOKENIZER_PATH"]
    manifest = Path(folder, "manifest.json")
    splits = load_json(manifest).get("splits", {}) if manifest.exists() else {}
    return splits.get("val", {}).get("decoded_bytes", (folder, tokenizer))


# ---- Runs ------------------------------------------------------------------------------


class Runner:
    """Trains arms, each on a GPU of its own if there are any, else on a share of the cores. `runs`
    are all that are known. A run that does not write to its log for `patience` seconds is ended."""
    def __init__(self, jobs: int, say, patience: float = math.inf):
        self.jobs, self.say, self.patience = jobs, say, patience
        self.runs, self.processes, self.is_stopping = [], [], False
        self.pool, self.places = ThreadPoolExecutor(jobs), queue.Queue()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = range(len(gpu_names())) if visible is None else visible.split(",")
        for job in range(jobs):
            self.places.put({"CUDA_VISIBLE_DEVICES": str(gpus[job % len(gpus)])} if gpus else {})
        self.environment = dict(os.environ)
        if jobs > 1 and not self.environment.get("OMP_NUM_THREADS"):
            self.environment["OMP_NUM_THREADS"] = str(max(1, count_cores() // jobs))

    def hangs(self, is_over, log: Path) -> bool:
        """Wait for the end of a run. Return whether its log did not grow for `patience` before."""
        size, quiet_s = 0, 0.0
        while not (has_ended := is_over()) and quiet_s <= self.patience:
            time.sleep(0.2)
            before, size = size, log.stat().st_size if log.exists() else 0
            quiet_s = quiet_s + 0.2 if size == before else 0.0  # a clock counts sleep
        return not has_ended

    def start(self, command: list[str], lock, log: Path) -> str:
        """Run a command, which holds the locked file, too; return its error, or ""."""
        place = self.places.get()
        try:
            # A pipe would stay open as long as any process that the run has left.
            with tempfile.TemporaryFile("w+", errors="replace") as errors:
                process = subprocess.Popen(command, cwd=ROOT, env={**self.environment, **place},
                                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                                           pass_fds=[lock.fileno()] if os.name == "posix" else [])
                self.processes.append(process)
                if self.is_stopping:
                    process.terminate()
                if self.hangs(lambda: process.poll() is not None, log):
                    process.kill()
                    process.wait()
                    return "it hung: its log has not grown for longer than --patience"
                errors.seek(0)
                return describe_end(process.returncode, errors.read()) if process.returncode else ""
        finally:
            self.places.put(place)

    def train(self, trial: tuple[Arm, int]) -> None:
        """Train an arm with a seed, and add the run to `runs`, or why it failed to the arm. If
        another command trains it, or a run that such a command has left, wait for that one."""
        arm, seed = trial
        name = f"ablate_{arm.name}_{arm.tag()}_{seed}"
        own = {"SEED": seed, "RUN_ID": name, "OUT_DIR": f"logs/{name}"}
        command = [sys.executable, arm.script, *words_of(arm.settings | own)]
        log, error = LOGS / f"{name}.jsonl", "its log is not of the run that was planned, or older than files that it read"
        (LOGS / name).mkdir(parents=True, exist_ok=True)
        with (LOGS / name / "lock").open("w") as lock:
            if not can_lock(lock):
                self.say(f"{name}: waiting for the run of another command, or one that it has left")
            if self.hangs(lambda: can_lock(lock) or self.is_stopping or arm.verdict, log):
                arm.verdict, arm.reason = "failed", f"it hangs; to end it: pkill -9 -f 'RUN_ID={name}'"
            run = read_run(log)
            if not (self.is_stopping or arm.verdict or arm.has(run, seed)):
                error = self.start(command, lock, log) or error
                run = read_run(log)
                if run is None:  # no run is resumed
                    shutil.rmtree(LOGS / name / "checkpoints", ignore_errors=True)
        if arm.has(run, seed):
            self.runs.append(run)
            self.say(f"{name}: {run.bpb:.4f} bits per byte, {run.seconds / 60:.1f} min")
        elif not arm.verdict:
            arm.verdict, arm.reason = "failed", f"{name}: {error}"

    def stop(self) -> None:
        self.is_stopping = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.terminate()


def model_of(run: Run) -> Path:
    """Return the path of the artifact that a run in logs/ has left."""
    return run.log.with_suffix("") / MODEL_FILE


def check_scores(arm: Arm, say) -> None:
    """Score the artifacts of the arm's runs again, by the logits of its script, on this checkout's
    validation text. If a log has another score, or its clock is slow, the arm is invalid: a probe
    before training does not see everything. Runs without an artifact stay unchecked."""
    from probe import check_artifact, check_clock, read_text
    for run in arm.runs:
        if run.checked is None and not arm.verdict and model_of(run).exists():
            say(f"checking the model of {run.log.stem}: up to a minute")
            try:
                events = read_events(run.log)
                config = events[0]["config"]
                text = read_text(arm.plan["config"])  # The run's data may have been moved.
                _, reason = check_artifact(arm.script, model_of(run), config, text, run.bpb)
                run.checked = reason or (check_clock(events) if config["MAX_WALLCLOCK_SECONDS"] else "")
            except (ValueError, LookupError) as error:  # perhaps for lack of memory: not for the log
                arm.verdict, arm.reason = "failed", f"{run.log.stem}: {error}"
                return
            with run.log.open("a", encoding="utf-8") as file:
                print(json.dumps({"event": "checked", "reason": run.checked}), file=file)
        if run.checked:
            arm.verdict, arm.reason = "invalid", run.checked


def missing_runs(arms: list[Arm], seeds, runs: list[Run]) -> list[tuple[Arm, int]]:
    """Return the arms with the seeds that they have no run of. From seed to seed, the arms change
    their order, so that a machine that slows down treats them alike."""
    trials = []
    for place, seed in enumerate(seeds):
        in_order = arms[::-1] if place % 2 else arms
        trials += [(arm, seed) for arm in in_order if not any(arm.has(run, seed) for run in runs)]
    return trials


def train_all(arms: list[Arm], seeds, runner: Runner) -> None:
    """Train what is missing of the arms with these seeds. Give each arm all its runs, one of a
    seed, and score them again, unless its scores are those of the first one."""
    trials = missing_runs(arms, seeds, runner.runs)
    known = [run.seconds for run in runner.runs if any(run.content == arm.content for arm in arms)]
    rounds = math.ceil(len(trials) / runner.jobs)
    minutes = f"about {rounds * statistics.median(known) / 60:.1f} min" if known else "of unknown length: see logs/ablate_*.txt"
    if trials:
        runner.say(f"{len(trials)} runs, for seeds up to {max(seeds)}, {minutes}")
    list(runner.pool.map(runner.train, trials))
    for arm in arms:
        found = {run.seed: run for run in runner.runs if arm.has(run, run.seed)}
        arm.runs = [found[seed] for seed in sorted(found)]  # whichever ended first
        differences = differences_of(pairs_of_seeds(arms[0].runs, arm.runs))
        if arm is not arms[0] and not arm.verdict and set(differences) == {0.0}:
            arm.reason = f"its scores are those of {arms[0].name}: is it switched on?"
            runner.say(f"{arm.name}: {arm.reason}")
        else:
            check_scores(arm, runner.say)


def train_until_clear(arms: list[Arm], runner: Runner, options) -> None:
    """Train the arms with more and more seeds, until all have a verdict."""
    first, *rest = arms
    seed, count = first.plan["config"]["SEED"], 2
    while undecided := [arm for arm in rest if not arm.verdict]:
        train_all([first, *undecided], range(seed, seed + count), runner)
        for arm in rest if first.verdict == "invalid" else undecided:  # Its scores were false before, too.
            if first.verdict:
                arm.verdict = first.verdict
                arm.reason = f"{first.name}, the first one: {first.reason}"
            elif not arm.verdict:
                arm.effect = limits_of(differences_of(pairs_of_seeds(first.runs, arm.runs)))
        judged = [arm for arm in rest if arm.verdict not in ("invalid", "failed")]
        verdicts = judge_all([arm.effect for arm in judged], options.diff, len(rest))
        for arm, verdict in zip(judged, verdicts):
            if not arm.verdict and (verdict != "undecided" or count == options.most_seeds):
                arm.verdict = verdict
        for arm in rest:
            note_tried(first, arm)
        more = max(1, options.jobs // (1 + len(undecided)))
        count = min(options.most_seeds, count + more)


# ---- The answer ------------------------------------------------------------------------


def facts_of(first: Arm, arm: Arm) -> dict:
    """Return what is known of an arm, for --json and `tried`."""
    facts = {"name": arm.name, "verdict": arm.verdict or "undecided", "reason": arm.reason}
    if arm.verdict in ("invalid", "failed"):
        return facts
    effect, pairs = arm.effect, pairs_of_seeds(first.runs, arm.runs)
    seconds = arm.content["MAX_WALLCLOCK_SECONDS"]
    length = f"{seconds:g} s" if seconds else f"{arm.content['ITERATIONS']:,} steps"
    facts |= {"change": arm.given, "base": first.given or first.name, "data": arm.content["data"], "length": length,
              "text": Path(arm.plan["config"]["DATA_PATH"]).name, "effect": effect.mean, "low": effect.low,
              "high": effect.high, "p": effect.p, "pairs": effect.pairs, "spread": effect.spread}
    if arm.verdict == "better":
        facts["effect_corrected"] = correct_for_selection(effect)
    return {**facts, "logs": [[str(run.log) for run in pair] for pair in pairs],
            "unchecked": sum(run.checked is None for pair in pairs for run in pair),
            "step_ratios": [second.step_ms / run.step_ms for run, second in pairs],
            "bytes": [run.artifact_bytes for run in pairs[0]]}


def sentence(facts: dict, diff: float) -> str:
    """Return the line about an arm."""
    begin = f"{facts['name']:<12} {facts['verdict']:<9}  "
    if facts["reason"]:
        return begin + facts["reason"]
    worse = "it is worse: " if facts["low"] > 0 else ""
    text = f"{facts['effect']:+.4f} bits per byte (90 % interval {ends_of(facts)}), {facts['pairs']} pairs of seeds"
    if facts["verdict"] == "better":
        text += f"; corrected for being selected: {facts['effect_corrected']:+.4f}"
    if facts["verdict"] == "better" and facts["spread"] > diff:
        text += "; pairs vary by more than --diff, so rare bad runs may have been missed"
    ratios = facts["step_ratios"]
    text += f"; a step took {min(ratios):.2f} to {max(ratios):.2f} times as long, by pairs"
    growth = 100 * (facts["bytes"][1] / facts["bytes"][0] - 1)
    text += f", model and script have {growth:+.1f} % bytes"
    if facts["unchecked"]:
        text += f"; {facts['unchecked']} runs were not scored again, for lack of an artifact"
    return begin + worse + text


def note_tried(first: Arm, arm: Arm) -> None:
    """Keep what is known of an arm in the ledger, or take it back if it is invalid."""
    file = LOGS / "tried" / f"{first.tag()}_{arm.tag()}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = facts_of(first, arm)
    if "effect" in facts:
        write_whole(file, json.dumps(facts))
    elif arm.verdict == "invalid":  # What failed may have been judged with fewer seeds.
        file.unlink(missing_ok=True)


def read_tried() -> list[dict]:
    """Return what the ledger has of each comparison, the newest last."""
    files = sorted((LOGS / "tried").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [load_json(file) for file in files]


def count_better(tried: list[dict]) -> str:
    """Return how many comparisons look better, and how many of them may be false."""
    better = sum(facts["p"] <= ERROR for facts in tried)
    return f"{better} look better one by one (p <= {ERROR:g}); by chance alone, about {ERROR * len(tried):.2g} would"


def list_tried() -> list[str]:
    """Return a table of the comparisons so far, the newest last."""
    rows, tried = [], read_tried()
    if not tried:
        return [f"no comparison in {LOGS} yet"]
    for facts in tried:
        effect = f"{facts['effect']:+.4f} ({ends_of(facts)})"
        rows.append([f"`{facts['change']}`", facts["length"], facts["verdict"], effect.replace("-", "−"),
                     facts["pairs"], f"{facts['spread']:.4f}", facts["name"], facts["base"], facts["text"]])
    about = f"Of all {len(tried)} comparisons, {count_better(tried)}. An interval does not allow for the others. "
    return [f"{about}The first six cells are for records/ablations.md.\n", *table(HEADER, rows)]


def report(first: Arm, arms: list[Arm], options) -> None:
    """Print the verdicts on the arms, which were compared with the first."""
    rows = [facts_of(first, arm) for arm in arms]
    if options.json:
        print("\n".join(map(json.dumps, rows)))
        return
    print("\n".join(sentence(facts, options.diff) for facts in rows))
    tried = [facts for facts in read_tried() if facts["data"] == first.content["data"]]
    print(f"against {first.name}; ideas tried on this text: {len(tried)}; {count_better(tried)}")
    took = [run.seconds for arm in (first, *arms) for run in arm.runs]
    print(f"{len(took)} runs took {sum(took) / 60:.1f} min one by one")


def shared_options(description: str) -> argparse.ArgumentParser:
    """Return a parser for the options that ablate.py and loop.py share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="file with settings, one VARIABLE=value a line")
    parser.add_argument("--settings", nargs="*", action="extend", default=[], metavar="VARIABLE=value",
                        help="of all runs; SEED is the first seed; INIT=by_name, if shapes differ, makes pairs agree")
    parser.add_argument("--diff", type=limited(0, 1), default=0.002, metavar="N",
                        help="the gain that matters (default: %(default)s)")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N",
                        help="runs at the same time, each on its own GPU or a share of the cores")
    parser.add_argument("--patience", type=limited(0), default=30, metavar="N",
                        help="minutes without log lines that end a run, or a trial of a script before (default: %(default)s)")
    return parser


def main() -> int:
    parser = shared_options(__doc__)
    parser.add_argument("variations", nargs="*", metavar="'NAME [script=FILE] VARIABLE=value ...'", help="or: tried")
    parser.add_argument("--most-seeds", type=int, choices=range(2, MOST_PAIRS + 1), default=12,
                        metavar="N", help="seeds of a variation (default: %(default)s)")
    parser.add_argument("--seconds", type=limited(0), default=0, metavar="N", help="train each for N seconds, not for ITERATIONS")
    parser.add_argument("--json", action="store_true", help="print a JSON object per variation")
    options = parser.parse_intermixed_args()
    variations = [word for word in options.settings if not re.match(r"\w+=", word)]
    options.settings = [word for word in options.settings if word not in variations]
    options.variations += variations  # which stand behind --settings
    if len(options.variations) < 2 and options.variations != ["tried"]:
        parser.error("give at least two variations: base 'NAME VARIABLE=value'")
    require_packages()
    if options.variations == ["tried"]:
        print("\n".join(list_tried()))
        return 0
    output = sys.stderr if options.json else sys.stdout
    runner = Runner(options.jobs, lambda text: print(text, file=output, flush=True), 60 * options.patience)
    try:
        with tempfile.TemporaryDirectory() as folder:
            arms = read_arms(options, Path(folder))
            os.chdir(ROOT)  # to which the paths in the settings are relative
            check_logs()
            make_plans(arms, runner)
            for arm in arms[1:]:
                check_against(arms[0], arm)
            runner.runs = read_runs(LOGS)
            train_until_clear(arms, runner, options)
        report(arms[0], arms[1:], options)
    finally:
        runner.stop()
    statuses = {"better": 0, "invalid": 2, "failed": 3}
    return max(statuses.get(arm.verdict, 1) for arm in arms[1:])


if __name__ == "__main__":
    prepare_output(ends_with_reader=sys.argv[1:2] == ["tried"])
    run_command(main)
