"""Say whether changes to settings or to the script make a better model, in as few runs as it takes.

    python tools/ablate.py base 'relu MLP_SLOPE=0' 'mine script=ideas/mine.py' \\
        --base records/presets/cpu_1mb.env \\
        --settings ITERATIONS=600 DATA_PATH=data/datasets/sotu_caseops2048
    python tools/ablate.py tried [WORD]      list the comparisons that the logs hold

A variation is a name and its settings; script=FILE trains another script. The first one is what the
others are compared with. All train with seed after seed, until each gets a verdict:

    better     it gains. If none of the variations gains anything, one or more is called better in
               5 % of commands, however many variations there are and however often seeds are added
    no gain    it gains less than --diff bits per byte; if it gains more, 5 % of cases say this.
               Intervals hold at all numbers of pairs together, so of a few pairs, they are several
               times as wide as those of a single t-test
    undecided  --most-seeds are not enough; with more, the command goes on
    invalid    its scores would be wrong: its logits depend on later tokens or other rows, its loss
               is not theirs, or an artifact does not score what its log says. Not noticed: training
               on the validation text, several updates in a step
    failed     a run failed

All train for ITERATIONS, or for --seconds, which needs a quiet machine. Finished runs in logs/ with
the same script (except comments), settings, data, seed, PyTorch and GPU are not repeated, so a
command that was stopped can be given again; with --seconds and no GPU, the CPU must be the same,
too. loop.py tries one idea after another and keeps what helps.

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
from hashlib import file_digest, sha256
from pathlib import Path

from common import (
    ROOT, can_lock, count_cores, gpu_names, hardware, load_json, require_packages, table,
)
from effects import (
    ERROR, MOST_PAIRS, SAME, Effect, Run, compare_all, content_of, correct_for_selection,
    differences_of, differing, judge_all, limits_of, note_check, p_of, pairs_of_seeds, read_run,
    read_runs,
)
from events import check_logs, limited, prepare_output, read_events
from settings import pairs_of, read_settings

LOGS = ROOT / "logs"
ROW = "| change | length | verdict | effect (90 % interval) | pairs | spread of a pair |"
BUSY = 0.6  # load of a core; a program that ended a minute ago still counts a third
FOR_ALL = {"SEED", "ITERATIONS", "MAX_WALLCLOCK_SECONDS", "INIT_FROM", "RUN_ID", "OUT_DIR",
           "RESUME"}


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
        """Whether a run is of this arm with this seed. Files without a digest in its log must be
        older than the run."""
        if run is None or run.seed != seed or differing(run.content, self.content):
            return False
        config, digests = self.plan["config"], self.plan["data_sha256"].values()
        files = [config["INIT_FROM"]] if config["INIT_FROM"] else []
        files += [] if digests and all(digests) else Path(config["DATA_PATH"]).glob("*.bin")
        return run.began > max((Path(file).stat().st_mtime for file in files), default=0)

    def tag(self) -> str:
        """Return digests for RUN_IDs: of the content and, if it counts, of the CPU's name."""
        digest = sha256(repr(sorted(self.content.items())).encode()).hexdigest()[:6]
        return f"{digest}_on_{self.content['cpu']}" if self.content["cpu"] else digest

    def add(self, runs: list[Run]) -> None:
        """Take the runs that are of this arm."""
        for run in runs:
            if run.seed not in {known.seed for known in self.runs} and self.has(run, run.seed):
                self.runs.append(run)
                if run.checked:
                    self.verdict, self.reason = "invalid", run.checked


# ---- The command -----------------------------------------------------------------------


def read_common(options) -> dict:
    """Return the settings of all runs. Raises ValueError unless they limit a run in one way."""
    settings = {}
    if options.base:
        settings, _ = read_settings(options.base)
    settings |= {"MAX_WALLCLOCK_SECONDS": f"{options.seconds:g}", **pairs_of(options.settings)}
    has_steps = "ITERATIONS" in settings or "ITERATIONS" in os.environ
    if has_steps == bool(options.seconds):
        raise ValueError("how long is a run? Give either --settings ITERATIONS=600, or --seconds 60"
                         ": the time limit of a preset is not used")
    if options.seconds and not gpu_names() and hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        if load > BUSY * count_cores():
            raise ValueError(f"the cores are busy (load {load:.1f} of {count_cores()}), and "
                             "--seconds would measure that; wait, or compare at equal ITERATIONS")
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
        script = Path(own.pop("script", ROOT / "train_gpt.py"))
        if not script.is_file():
            raise ValueError(f"{name}: script={script} is no file")
        for variable in sorted(FOR_ALL & own.keys()):
            raise ValueError(f"{name} sets {variable}, which must be equal in all: "
                             f"--settings {variable}={own[variable]}")
        copy = folder / str(number) / "train_gpt.py"
        copy.parent.mkdir()
        shutil.copy(script, copy)
        arms.append(Arm(name, copy, {**common, **own}, shlex.join(words)))
    if len(arms) < 2:
        raise ValueError(f"{arms[0].name} is compared with nothing; give a second variation: "
                         "'NAME VARIABLE=value'")
    return arms


def describe_end(status: int, errors: str) -> str:
    """Return why a process ended, by its exit status and stderr: its signal, or the last line of
    what it wrote, and the line of the script that a traceback names; "" without an error."""
    if not status:
        return ""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = re.findall(r'train_gpt.py", (line \d+)', errors)[-1:]
    last = [line.removeprefix("train_gpt.py: ") for line in errors.strip().splitlines()[-1:]]
    return ", ".join([f"status {status}", *lines, *last])


def make_plans(arms: list[Arm], environment: dict) -> None:
    """Ask each arm's script what it would train, and whether its model is valid. Raises ValueError
    for a setting that is wrong, and if the first arm cannot be used."""
    cpu = sha256(hardware(uses_gpus=False).encode()).hexdigest()[:6]
    for arm in arms:
        words = [f"{name}={value}" for name, value in {"RUN_ID": arm.name, **arm.settings}.items()]
        probe = str(ROOT / "tools" / "probe.py")
        command = [sys.executable, probe, str(arm.script), "plan", *words]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                                errors="replace", check=False)
        if result.returncode:
            end = describe_end(result.returncode, result.stderr)
            arm.verdict, arm.reason = "failed", f"the script cannot be used: {end}"
            continue
        arm.plan = json.loads(result.stdout.splitlines()[-1])
        if "error" in arm.plan:
            hint = "" if "script=" in arm.given else " (no script=FILE is given)"
            raise ValueError(f"{arm.name}: {arm.plan['error']}{hint}")
        arm.content = content_of(arm.plan, arm.script.read_text(encoding="utf-8"), cpu)
        if arm.plan["reason"]:
            arm.verdict, arm.reason = "invalid", arm.plan["reason"]
    if arms[0].verdict:
        raise ValueError(f"{arms[0].name} is {arms[0].verdict}: {arms[0].reason}")
    for folder in {arm.plan["config"]["DATA_PATH"] for arm in arms if arm.plan}:
        check_shards(Path(folder))


def check_against(first: Arm, arm: Arm) -> None:
    """Raises ValueError if a variation is equal to the first one, or is scored on another text."""
    if arm.verdict:
        return
    if first.content == arm.content:
        raise ValueError(f"{arm.name} is equal to {first.name}: what it sets changes nothing")
    if text_of(first.plan) != text_of(arm.plan):
        raise ValueError(f"{arm.name} is scored on another text than {first.name}")


def text_of(plan: dict) -> int | list:
    """Return what tells a validation text from others: its bytes, whatever the tokenizer; if no
    manifest has them, the digests of its shards, or the bytes that are scored."""
    manifest = Path(plan["config"]["DATA_PATH"], "manifest.json")
    splits = load_json(manifest)["splits"] if manifest.exists() else {"val": {}}
    shards = [digest for name, digest in plan["data_sha256"].items() if "_val_" in name]
    return splits["val"].get("decoded_bytes") or (all(shards) and shards) or plan["val_bytes"]


def check_shards(folder: Path) -> None:
    """Raises ValueError if a shard that is newer than its manifest is not the one that it lists."""
    manifest = folder / "manifest.json"
    splits = load_json(manifest)["splits"] if manifest.exists() else {}
    for entry in [entry for split in splits.values() for entry in split["shards"]]:
        shard = folder / entry["file"]
        if not entry.get("sha256") or shard.stat().st_mtime <= manifest.stat().st_mtime:
            continue
        with shard.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise ValueError(f"{shard} is not the shard that {manifest} lists: prepare the data "
                             "again")


# ---- Runs ------------------------------------------------------------------------------


class Runner:
    """Trains arms, each on a GPU of its own if there are any, else on a share of the cores. `runs`
    are all that are known. A run that does not write to its log for `patience` seconds is ended."""
    def __init__(self, jobs: int, say, patience: float = math.inf):
        self.jobs, self.say, self.patience = jobs, say, patience
        self.runs, self.processes, self.is_stopping = [], [], False
        self.took = []  # seconds of each run
        self.pool, self.places = ThreadPoolExecutor(jobs), queue.Queue()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = map(str, range(len(gpu_names()))) if visible is None else visible.split(",")
        gpus = [number for number in numbers if number]
        for job in range(jobs):
            self.places.put({"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)]} if gpus else {})
        self.environment = dict(os.environ)
        if jobs > 1 and not self.environment.get("OMP_NUM_THREADS"):
            self.environment["OMP_NUM_THREADS"] = str(max(1, count_cores() // jobs))

    def start(self, command: list[str], lock, log: Path) -> str:
        """Run a command, which holds the locked file, too; return its error, or ""."""
        inherited = [lock.fileno()] if os.name == "posix" else []
        place, size, quiet_s = self.places.get(), 0, 0.0
        look_s = min(5, self.patience or 1)  # 0 would not wait
        try:
            process = subprocess.Popen(command, cwd=ROOT, env={**self.environment, **place},
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                       text=True, errors="replace", pass_fds=inherited)
            self.processes.append(process)
            if self.is_stopping:
                process.terminate()
            while True:
                try:
                    _, errors = process.communicate(timeout=look_s)
                    return describe_end(process.returncode, errors)
                except subprocess.TimeoutExpired:
                    before, size = size, log.stat().st_size if log.exists() else 0
                    quiet_s = quiet_s + look_s if size == before else 0.0  # a clock counts sleep
                    if quiet_s > self.patience:
                        process.kill()
                        process.communicate()
                        return (f"it hung: its log has not grown for {self.patience / 60:.3g} "
                                "minutes (--patience)")
        finally:
            self.places.put(place)

    def minutes_for(self, trials: list[tuple[Arm, int]]) -> str:
        """Return how long the trials will take, if runs of this command, or of such a length,
        tell."""
        if not trials:
            return ""
        wanted = trials[0][0].content
        known = self.took or [run.log.stat().st_mtime - run.began for run in self.runs
                              if all(run.content[name] == wanted[name] for name in SAME)]
        if not known:
            return ("; the first ones will tell how long they take. Each compiles first: for a "
                    "trial of a minute, add COMPILE=0")
        seconds = math.ceil(len(trials) / self.jobs) * statistics.median(known)
        return f", about {seconds / 60:.1f} min"

    def train(self, trial: tuple[Arm, int]) -> None:
        """Train an arm with a seed, and add the run to `runs`, or why it failed to the arm. If
        another command trains it, or a run that such a command has left, wait for that one."""
        arm, seed = trial
        length = f"_{arm.settings['ITERATIONS']}" if "ITERATIONS" in arm.settings else ""
        name = f"ablate_{arm.name}{length}_{arm.tag()}_{seed}"
        words = [f"{key}={value}" for key, value in arm.settings.items()]
        command = [sys.executable, str(arm.script), *words, f"SEED={seed}", f"RUN_ID={name}",
                   f"OUT_DIR=logs/{name}"]
        log, started, error = LOGS / f"{name}.jsonl", time.monotonic(), ""
        (LOGS / name).mkdir(parents=True, exist_ok=True)
        with (LOGS / name / "lock").open("w") as lock:
            if not can_lock(lock):
                self.say(f"{name}: waiting for another command, which trains it")
            while not (can_lock(lock) or self.is_stopping or arm.verdict):
                time.sleep(1)
            run = read_run(log)
            if not (self.is_stopping or arm.verdict or arm.has(run, seed)):
                error = self.start(command, lock, log)
                self.took.append(time.monotonic() - started)
                if error:  # no run is resumed
                    shutil.rmtree(LOGS / name / "checkpoints", ignore_errors=True)
                run = read_run(log)
        if arm.has(run, seed):
            self.runs.append(run)
            minutes = (time.monotonic() - started) / 60
            self.say(f"{name}: {run.bpb:.4f} bits per byte, {minutes:.1f} min")
        elif not arm.verdict:
            reason = error or "its log is not of the run that was planned"
            arm.verdict, arm.reason = "failed", f"{name}: {reason}"

    def stop(self) -> None:
        self.is_stopping = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.terminate()


def model_of(run: Run) -> Path:
    """Return the path of the artifact that a run in logs/ has left."""
    import train_gpt
    return run.log.with_suffix("") / train_gpt.MODEL_FILE


def check_scores(arm: Arm) -> None:
    """Score the artifacts of the arm's runs again, by the logits of its script, on this checkout's
    validation text. If a log has another score, the arm is invalid, and so are its other runs: a
    probe before training does not see everything. Runs without an artifact stay unchecked."""
    from probe import check_artifact, read_text
    for run in arm.runs:
        if arm.verdict or run.checked is not None or not model_of(run).exists():
            continue
        config = read_events(run.log)[0]["config"]
        try:
            text = read_text(arm.plan["config"])  # The run's data may have been moved.
            _, reason = check_artifact(arm.script, model_of(run), config, text, run.bpb)
        except ValueError as error:  # perhaps for lack of memory: not for the log
            arm.verdict, arm.reason = "invalid", str(error)
            return
        checked = [run]
        if reason:
            arm.verdict, arm.reason, checked = "invalid", reason, arm.runs
        for one in checked:
            note_check(one.log, reason)
        logs = {one.log for one in checked}
        arm.runs = [one._replace(checked=reason) if one.log in logs else one for one in arm.runs]


def missing_runs(arms: list[Arm], seeds) -> list[tuple[Arm, int]]:
    """Return the arms with the seeds that they have no run of. From seed to seed, the arms change
    their order, so that a machine that slows down treats them alike."""
    trials = []
    for place, seed in enumerate(sorted(seeds)):
        in_order = arms[::-1] if place % 2 else arms
        trials += [(arm, seed) for arm in in_order if seed not in {run.seed for run in arm.runs}]
    return trials


def train_all(arms: list[Arm], seeds, runner: Runner) -> None:
    """Train what is missing of the arms with these seeds, and score it again."""
    for arm in arms:
        arm.add(runner.runs)
    trials = missing_runs(arms, seeds)
    count = f"{len(trials)} runs" if trials else "all runs are there"
    runner.say(f"{count}, for seeds up to {max(seeds)}{runner.minutes_for(trials)}")
    list(runner.pool.map(runner.train, trials))
    for arm in arms:
        arm.add(runner.runs)
        check_scores(arm)
    checked = {run.log: run for arm in arms for run in arm.runs}
    runner.runs = [checked.get(run.log, run) for run in runner.runs]


def train_until_clear(arms: list[Arm], runner: Runner, options) -> None:
    """Train the arms with more and more seeds, until all have a verdict."""
    first, *rest = arms
    seed, count = first.plan["config"]["SEED"], min(2, options.most_seeds)
    family = 1 if options.error == "each" else len(rest)
    while undecided := [arm for arm in rest if not arm.verdict]:
        train_all([first, *undecided], range(seed, seed + count), runner)
        for arm in undecided:
            pairs = pairs_of_seeds(first.runs, arm.runs)
            if first.verdict:
                arm.verdict = first.verdict
                arm.reason = f"{first.name}, the first one: {first.reason}"
            elif not arm.verdict:
                arm.effect = limits_of(differences_of(pairs))
        judged = [arm for arm in rest if arm.effect and arm.verdict not in ("invalid", "failed")]
        verdicts = judge_all([arm.effect for arm in judged], options.diff, family)
        for arm, verdict in zip(judged, verdicts):
            if not arm.verdict and (verdict != "undecided" or count == options.most_seeds):
                arm.verdict = verdict
        more = max(1, options.jobs // (1 + len(undecided)))
        count = min(options.most_seeds, count + more)


# ---- The answer ------------------------------------------------------------------------


def facts_of(first: Arm, arm: Arm, most: int) -> dict:
    """Return what is known of an arm with at most this many pairs, for --json."""
    facts = {"name": arm.name, "verdict": arm.verdict, "reason": arm.reason}
    pairs = pairs_of_seeds(first.runs, arm.runs)
    if not pairs or arm.verdict in ("invalid", "failed"):
        return facts
    effect = arm.effect
    facts |= {"effect": effect.mean, "pairs": effect.pairs, "spread": effect.spread}
    if effect.pairs > 1:
        facts |= {"low": effect.low, "high": effect.high, "p": effect.p}
    if arm.verdict == "better":
        facts["effect_corrected"] = correct_for_selection(effect, most)
    return {**facts, "logs": [[str(run.log) for run in pair] for pair in pairs],
            "unchecked": sum(run.checked is None for pair in pairs for run in pair),
            "step_ratios": [second.step_ms / run.step_ms for run, second in pairs],
            "bytes": [run.artifact_bytes for run in pairs[0]]}


def sentence(facts: dict, diff: float) -> str:
    """Return the line about an arm."""
    begin = f"{facts['name']:<12} {facts['verdict']:<9}  "
    if "effect" not in facts:
        return begin + facts["reason"]
    if not (facts["effect"] or facts["spread"]):
        return f"{begin}its scores are those of the first one: is it switched on?"
    pairs = facts["pairs"]
    text = f"{facts['effect']:+.4f} bits per byte"
    if pairs > 1:
        text += f" (90 % interval {facts['low']:+.4f} to {facts['high']:+.4f})"
    text += f", {pairs} pair{'s' * (pairs > 1)} of seeds"
    if facts["verdict"] == "no gain":
        is_worse = facts.get("low", 0) > 0
        text = f"it is worse: {text}" if is_worse else f"of {diff:g} or more: {text}"
    if facts["verdict"] == "better":
        text += f"; without what the selection adds {facts['effect_corrected']:+.4f}"
    if facts["verdict"] == "better" and facts["spread"] > diff:
        text += "; pairs vary by more than --diff, so rare bad runs may have been missed"
    if facts["verdict"] == "undecided" and pairs > 1:
        text += f"; p = {facts['p']:.2g}"
    ratios = facts["step_ratios"]
    text += f"; a step takes {min(ratios):.2f} to {max(ratios):.2f} times as long"
    growth = 100 * (facts["bytes"][1] / facts["bytes"][0] - 1)
    text += f", model and script have {growth:+.1f} % bytes"
    if facts["unchecked"]:
        text += f"; {facts['unchecked']} runs were not scored again, for lack of an artifact"
    return begin + text


def length_of(content: dict) -> str:
    """Return the length of the runs of a content, in steps or seconds."""
    seconds = content["MAX_WALLCLOCK_SECONDS"]
    return f"{seconds:g} s" if seconds else f"{content['ITERATIONS']:,} steps"


def row_of(facts: dict, arm: Arm) -> list:
    """Return a verdict as a row of records/ablations.md."""
    effect = "{effect:+.4f} ({low:+.4f} to {high:+.4f})".format(**facts).replace("-", "−")
    return [f"`{arm.given}`", length_of(arm.content), facts["verdict"], effect, facts["pairs"],
            f"{facts['spread']:.4f}"]


def count_better(tried: list[list[tuple[Run, Run]]]) -> str:
    """Return how many comparisons look better, and how many of them may be false."""
    better = sum(p_of(differences_of(pairs))[-1] <= ERROR for pairs in tried)
    return (f"{better} look better one by one (p <= {ERROR:g}), as about "
            f"{ERROR * len(tried):.1f} would without any effect")


def count_tried(first: Arm, runs: list[Run]) -> str:
    """Return how many ideas the logs compared on the text of an arm, and how many look better. Runs
    that start together may be in either order: the arm is never the idea."""
    tried = []
    for pairs in compare_all(runs):
        if pairs[0][0].content["data"] == first.content["data"]:
            is_idea = differing(pairs[0][1].content, first.content)
            tried.append(pairs if is_idea else [pair[::-1] for pair in pairs])
    return f"ideas tried on this text, by the logs: {len(tried)}; {count_better(tried)}"


def report(first: Arm, arms: list[Arm], runner: Runner, options) -> None:
    """Print the verdicts on the arms, which were compared with the first."""
    rows = [facts_of(first, arm, options.most_seeds) for arm in arms]
    if options.json:
        print("\n".join(map(json.dumps, rows)))
        return
    print("\n".join(sentence(facts, options.diff) for facts in rows))
    if len(rows) > 1:
        how = ": with 5 % each" if options.error == "each" else " together, by Holm's procedure"
        print(f"5 % for a false \"better\" of {len(rows)} comparisons{how}; intervals are of each")
    print(f"against {first.name}; {count_tried(first, runner.runs)}")
    print(f"{len(runner.took)} runs took {sum(runner.took) / 60:.1f} min one by one")
    judged = [row_of(facts, arm) for facts, arm in zip(rows, arms) if facts.get("pairs", 0) > 1]
    if judged:
        print("for records/ablations.md, with the base and the text above the table:")
        print("\n".join(table(ROW, judged)[2:]))


def list_tried(word: str) -> list[str]:
    """Return a table of the comparisons that the logs hold, the newest last, of those with `word`
    in their line."""
    rows, tried = [], compare_all(read_runs(LOGS))
    for pairs in tried:
        first, second = pairs[0]
        one, two = first.content, second.content
        changes = [f"{name} {one[name]} -> {two[name]}" for name in differing(one, two)]
        added = sorted(two.keys() - one.keys())  # the settings of an edited script
        changes += [f"{name}={two[name]}" for name in added if two[name]]
        effect = limits_of(differences_of(pairs))
        interval = f"{effect.low:+.4f} to {effect.high:+.4f}" if len(pairs) > 1 else ""
        row = [second.log.stem, ", ".join(changes), f"{effect.mean:+.4f}", interval, len(pairs),
               length_of(two), second.text, two["machine"]]
        if word.lower() in " ".join(map(str, row)).lower():
            rows.append(row)
    if not rows:
        return [f"no comparison in {LOGS} has {word!r}"]
    about = f"Each interval holds for itself. Of all {len(tried)}, {count_better(tried)}.\n"
    header = "| log | what differs | effect | 90 % interval | pairs | length | text | machine |"
    return [about, *table(header, rows)]


def shared_options(description: str) -> argparse.ArgumentParser:
    """Return a parser for the options that ablate.py and loop.py share."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="file with settings, one VARIABLE=value a line")
    parser.add_argument("--settings", nargs="*", action="extend", default=[],
                        metavar="VARIABLE=value",
                        help="settings of all runs; SEED is the first seed")
    parser.add_argument("--diff", type=limited(0, 1), default=0.002, metavar="N",
                        help="the gain that matters (default: %(default)s)")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N",
                        help="runs at the same time, each on a GPU of its own or a share of the "
                        "cores")
    parser.add_argument("--patience", type=limited(0), default=30, metavar="N",
                        help="a run has failed if its log does not grow for N minutes (default: "
                        "%(default)s)")
    return parser


def main() -> int:
    parser = shared_options(__doc__)
    parser.add_argument("variations", nargs="*", metavar="'NAME [script=FILE] VARIABLE=value ...'",
                        help="or: tried [WORD]")
    parser.add_argument("--most-seeds", type=int, choices=range(1, MOST_PAIRS + 1), default=12,
                        metavar="N", help="seeds of a variation (default: %(default)s)")
    parser.add_argument("--error", choices=("family", "each"), default="family",
                        help="whether the 5 %% for a false \"better\" hold for all variations "
                        "together (the default), or for each")
    parser.add_argument("--seconds", type=limited(0), default=0, metavar="N",
                        help="train each for N seconds, not for ITERATIONS")
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object for each variation")
    options = parser.parse_intermixed_args()
    variations = [word for word in options.settings if not re.match(r"\w+=", word)]
    options.settings = [word for word in options.settings if word not in variations]
    options.variations += variations  # which stand behind --settings
    if not options.variations:
        parser.error("give at least two variations: base 'NAME VARIABLE=value'")
    require_packages()
    if options.variations[0] == "tried":
        print("\n".join(list_tried(" ".join(options.variations[1:]))))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    output = sys.stderr if options.json else sys.stdout
    runner = Runner(options.jobs, lambda text: print(text, file=output, flush=True),
                    60 * options.patience)
    try:
        with tempfile.TemporaryDirectory() as folder:
            arms = read_arms(options, Path(folder))
            os.chdir(ROOT)  # to which the paths in the settings are relative
            check_logs()
            make_plans(arms, runner.environment)
            for arm in arms[1:]:
                check_against(arms[0], arm)
            runner.runs = read_runs(LOGS)
            train_until_clear(arms, runner, options)
    except (OSError, ValueError) as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return 2
    finally:
        runner.stop()
    report(arms[0], arms[1:], runner, options)
    verdicts = {arm.verdict for arm in arms[1:]}
    if "failed" in verdicts:
        return 3
    return 2 if "invalid" in verdicts else int(verdicts != {"better"})


if __name__ == "__main__":
    prepare_output(ends_with_reader=sys.argv[1:2] == ["tried"])
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("ablate.py: stopped; the same command goes on, and keeps the runs that have finished",
              file=sys.stderr)
        sys.exit(130)
