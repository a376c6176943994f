"""Say whether changes to settings or to the script make a better model, in as few runs as that takes.

    python tools/ablate.py base 'relu MLP_SLOPE=0' 'mine script=ideas/mine.py' --base records/presets/cpu_1mb.env \\
        --settings ITERATIONS=600 DATA_PATH=data/datasets/sotu_caseops2048
    python tools/ablate.py tried [WORD]      list the comparisons that the logs hold

A variation is a name and its settings; script=FILE trains another script. The first one is what the
others are compared with. All train with seed after seed, until each gets a verdict:

    better     it gains. If none of the variations gains anything, one or more is called better in 5 % of
               commands, however many variations there are and however often seeds are added
    no gain    it does not gain --diff bits per byte or more; if it does, this is said in 5 % of cases
    undecided  --most-seeds are not enough; with more, the command goes on
    invalid    its scores would be wrong: its logits depend on later tokens or other rows, its loss is
               not theirs, or an artifact does not score what its log says. Not noticed: training on the validation
               text, several updates in a step
    failed     a run failed

All train for ITERATIONS, or for --seconds, which needs a quiet machine. Finished runs in logs/ with the
same script (except comments), settings, data, seed, PyTorch and kind of machine are not repeated, so a
command that was stopped can be given again. loop.py tries one idea after another and keeps what helps.

Exit status: 0 if all are better, 1 if some are not, 2 for an invalid variation or a mistake in the
command, 3 if a run failed (even if others are invalid), 130 if stopped.
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
from hashlib import file_digest
from pathlib import Path

from common import (
    ROOT, can_lock, count_cores, gpu_names, load_json, pairs_of, read_settings, require_packages, table,
)
from effects import (
    ERROR, MOST_PAIRS, SAME, Effect, Run, compare_all, content_of, correct_for_selection, differences_of, differing,
    judge_all, limits_of, note_check, p_of, pairs_needed, pairs_of_seeds, read_run, read_runs,
)
from events import check_logs, limited, prepare_output, read_events
from plot import own_style, plain_label

LOGS = ROOT / "logs"
OTHER_LENGTH = 1.2  # ratio of two lengths that tell how the score falls with the steps
BUSY = 0.6  # load of a core; a program that ended a minute ago still counts a third
ROW = "| change | length | verdict | effect (90 % interval) | pairs | spread of a pair |"
FOR_ALL = {"SEED", "ITERATIONS", "MAX_WALLCLOCK_SECONDS", "INIT_FROM", "RUN_ID", "OUT_DIR", "RESUME"}


@dataclass
class Arm:
    """A variation at one length, and what is known of it."""
    name: str
    script: Path
    settings: dict
    origins: dict = field(default_factory=dict)  # of settings, as "--base FILE"
    plan: dict = field(default_factory=dict)  # what probe.py says
    content: dict = field(default_factory=dict)  # of its runs
    verdict: str = ""
    reason: str = ""
    runs: list = field(default_factory=list)  # one of each seed
    effect: Effect | None = None  # by which it was judged
    given: str = ""  # the words of the variation

    def has(self, run: Run) -> bool:
        """Whether a run is of this arm. Files without a digest in its log must be older than the run."""
        if differing(run.content, self.content):
            return False
        config, digests = self.plan["config"], self.plan["data_sha256"].values()
        files = [config["INIT_FROM"]] if config["INIT_FROM"] else []
        files += [] if digests and all(digests) else Path(config["DATA_PATH"]).glob("*.bin")
        return run.began > max((Path(file).stat().st_mtime for file in files), default=0)

    def add(self, runs: list[Run]) -> None:
        """Take the runs that are of this arm; if time limits them, only those of this machine."""
        for run in runs:
            is_elsewhere = run.content["MAX_WALLCLOCK_SECONDS"] and run.log.parent != LOGS
            if run.seed not in {known.seed for known in self.runs} and self.has(run) and not is_elsewhere:
                self.runs.append(run)
                if run.checked:
                    self.verdict, self.reason = "invalid", run.checked


# ---- The command ---------------------------------------------------------------------------------------


def read_arms(options, folder: Path) -> list[list[Arm]]:
    """Return the variations for each length. Their scripts are copied into `folder`, so that they can be edited meanwhile.
    Raises ValueError for a mistake."""
    common = {}
    if options.base:
        common, _ = read_settings(options.base)
    origins = {name: f" (from --base {options.base})" for name in common}
    for name in pairs_of(options.settings):
        origins[name] = " (from --settings)"
    common |= {"MAX_WALLCLOCK_SECONDS": f"{options.seconds:g}", **pairs_of(options.settings)}
    variations = [split_words(text) for text in options.variations]
    names = [words[0] for words in variations]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two variations are called {' and '.join(sorted(repeated))}; give each its own name")
    if settings := [name for name in names if "=" in name]:
        raise ValueError(f"{settings[0]} is a setting; before it, in the same quotes, goes a name: 'NAME {settings[0]}'")
    if len(names) < 2:
        raise ValueError(f"{names[0]} is compared with nothing; give a second variation: 'NAME VARIABLE=value'")
    if options.horizons and options.seconds:
        raise ValueError("--horizons are steps and --seconds is a time; give one of them")
    check_length(common, options)
    arms = []
    for number, (name, *words) in enumerate(variations):
        own = pairs_of(words)
        script = Path(own.pop("script", ROOT / "train_gpt.py"))
        copy = folder / str(number) / "train_gpt.py"
        copy.parent.mkdir()
        if not script.is_file():
            raise ValueError(f"{name}: script={script} is no file")
        shutil.copy(script, copy)
        for variable in sorted(FOR_ALL & own.keys()):
            raise ValueError(f"{name} sets {variable}, which must be equal in all: --settings {variable}={own[variable]}")
        places = {key: text for key, text in origins.items() if key not in own}
        arms.append((name, copy, {**common, **own}, places, shlex.join(words)))
    lengths = [{"ITERATIONS": steps} for steps in options.horizons] or [{}]
    return [[Arm(name, script, {**settings, **length}, places, given=given)
             for name, script, settings, places, given in arms] for length in lengths]


def split_words(text: str) -> list[str]:
    """Return the words of a variation, as a shell would. Raises ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"variation {text!r}: {error}") from None
    if not words:
        raise ValueError("a variation is empty; it needs a name: 'NAME VARIABLE=value'")
    return words


def check_length(common: dict, options) -> None:
    """Raises ValueError unless the command says how long to train, in one way."""
    has_steps = "ITERATIONS" in common or "ITERATIONS" in os.environ
    if options.seconds and has_steps:
        raise ValueError("ITERATIONS and --seconds both limit a run; give one of them")
    if not (options.seconds or options.horizons or has_steps):
        raise ValueError("how long is a run? Give --settings ITERATIONS=600, or --seconds 60: "
                         "the time limit of a preset is not used")
    if options.seconds and not gpu_names() and hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        if load > BUSY * count_cores():
            raise ValueError(f"the cores are busy (load {load:.1f} of {count_cores()}), and --seconds would measure "
                             "that; wait, or compare at equal ITERATIONS")


def read_horizons(text: str) -> list[str]:
    """Return the numbers of --horizons. Raises argparse.ArgumentTypeError."""
    steps = text.replace(" ", "").split(",")
    if not all(map(str.isdecimal, steps)):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of steps, separated by commas, such as 600,1800")
    return steps


def last_line(result: subprocess.CompletedProcess) -> str:
    """Return the last line of a process's errors, or its status."""
    return (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]


def make_plans(arms: list[Arm], environment: dict) -> None:
    """Ask each script, in one process for all its arms, what it would train, and whether its model is valid. Raises ValueError
    for a setting that is wrong, and if the first arm cannot be used."""
    by_code: dict[bytes, list[Arm]] = {}
    for arm in arms:
        by_code.setdefault(arm.script.read_bytes(), []).append(arm)
    for members in by_code.values():
        lists = [[f"RUN_ID={arm.name}", *(f"{name}={value}" for name, value in arm.settings.items())] for arm in members]
        command = [sys.executable, str(ROOT / "tools" / "probe.py"), str(members[0].script), "plan"]
        result = subprocess.run(command, cwd=ROOT, env=environment, input=json.dumps(lists), capture_output=True, text=True,
                                errors="replace", check=False)
        if result.returncode:
            lines = re.findall(r'train_gpt.py", line (\d+)', result.stderr)
            where = f" line {lines[-1]}:" if lines else ""
            for arm in members:
                arm.verdict, arm.reason = "failed", f"the script cannot be used:{where} {last_line(result)}"
            continue
        for arm, plan in zip(members, json.loads(result.stdout.splitlines()[-1])):
            if "error" in plan:
                origin = arm.origins.get(plan["error"].partition("=")[0], "")
                raise ValueError(f"{arm.name}: {plan['error']}{origin}")
            arm.plan, arm.content = plan, content_of(plan, arm.script.read_text(encoding="utf-8"))
            arm.verdict, arm.reason = plan["verdict"], plan["reason"]
    if arms[0].verdict:
        raise ValueError(f"{arms[0].name} is {arms[0].verdict}: {arms[0].reason}")
    for folder in {arm.plan["config"]["DATA_PATH"] for arm in arms if arm.plan}:
        check_shards(Path(folder))


def check_against(first: Arm, arm: Arm) -> None:
    """Raises ValueError if a variation is equal to the first one, or is scored on another text."""
    if arm.verdict or not (first.plan and arm.plan):
        return
    if first.content == arm.content:
        raise ValueError(f"{arm.name} is equal to {first.name}: {arm.given or 'without settings, it'} changes nothing")
    texts = [read_text(one.plan) for one in (first, arm)]
    if texts[0] != texts[1]:
        raise ValueError(f"{arm.name} is scored on another text than {first.name}: {texts[1]}, not {texts[0]}")


def read_text(plan: dict) -> str:
    """Return what tells a validation text from others: its bytes, whatever the tokenizer; if no manifest
    has them, its shards, or the bytes that are scored, which depend on the length of a row."""
    manifest = Path(plan["config"]["DATA_PATH"], "manifest.json")
    size = load_json(manifest)["splits"]["val"].get("decoded_bytes") if manifest.exists() else None
    if size:
        return f"{size:,} bytes"
    shards = {name: digest for name, digest in plan["data_sha256"].items() if "_val_" in name}
    if shards and all(shards.values()):
        return str(shards)
    return f"{plan['val_bytes']:,} bytes in rows of {plan['config']['TRAIN_SEQ_LEN']}"


def check_shards(folder: Path) -> None:
    """Raises ValueError if a shard that is newer than its manifest is not the one that it lists."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return
    for split in load_json(manifest)["splits"].values():
        for entry in split["shards"]:
            shard = folder / entry["file"]
            if not entry.get("sha256") or shard.stat().st_mtime <= manifest.stat().st_mtime:
                continue
            with shard.open("rb") as file:
                found = file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                raise ValueError(f"{shard} is not the shard that {manifest} lists: prepare the data again")


# ---- Runs ----------------------------------------------------------------------------------------------


class Runner:
    """Trains arms, each on a GPU of its own if there are any, else on a share of the cores. `runs` are all that are known."""
    def __init__(self, jobs: int, say, patience: float = math.inf):
        self.jobs, self.patience, self.took = jobs, patience, []  # seconds of each run
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = map(str, range(len(gpu_names()))) if visible is None else visible.split(",")
        gpus = [number for number in numbers if number]
        self.places: queue.Queue = queue.Queue()
        for job in range(jobs):
            self.places.put({"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)]} if gpus else {})
        self.environment = dict(os.environ)
        if jobs > 1 and not self.environment.get("OMP_NUM_THREADS"):
            self.environment["OMP_NUM_THREADS"] = str(max(1, count_cores() // jobs))
        self.pool, self.processes, self.runs, self.say, self.is_stopping = ThreadPoolExecutor(jobs), [], [], say, False

    def start(self, command: list[str], lock, log: Path | None = None) -> str:
        """Run a command, which holds the locked file, too; return its error, or "". It is killed if it has
        not written to its log for `patience` seconds."""
        inherited = [lock.fileno()] if os.name == "posix" else []
        place = self.places.get()
        try:
            process = subprocess.Popen(command, cwd=ROOT, env={**self.environment, **place}, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=inherited)
            self.processes.append(process)
            if self.is_stopping:
                process.terminate()
            errors = self.wait_for(process, log).strip()
        finally:
            self.places.put(place)
        if not process.returncode:
            return ""
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            hint = "; the system does this when memory is short: use fewer --jobs" if name == "SIGKILL" else ""
            return errors if errors.startswith("it hung") else f"ended by {name}{hint}"
        place_in_script = re.findall(r'train_gpt.py", (line \d+)', errors)[-1:]  # of a traceback
        said = errors.split("train_gpt.py: ")[-1].splitlines()[-1:] if place_in_script else [errors.split("train_gpt.py: ")[-1]]
        return ", ".join([f"status {process.returncode}", *place_in_script, *said])

    def wait_for(self, process: subprocess.Popen, log: Path | None) -> str:
        """Return what a process writes to stderr."""
        started = time.time()
        while True:
            try:
                return process.communicate(timeout=min(5, self.patience))[1]
            except subprocess.TimeoutExpired:
                wrote = log.stat().st_mtime if log and log.exists() else 0
                if time.time() - max(started, wrote) > self.patience:
                    process.kill()
                    process.communicate()
                    return f"it hung: its log has not grown for {self.patience / 60:.3g} minutes (--patience)"

    def minutes_for(self, trials: list[tuple[Arm, int]]) -> str:
        """Return how long the trials will take, if runs of this command, or of such a length, tell."""
        if not trials:
            return ""
        wanted = trials[0][0].content
        known = self.took or [run.log.stat().st_mtime - run.began for run in self.runs
                              if all(run.content[name] == wanted[name] for name in SAME)]
        if not known:
            return "; the first ones will tell how long they take"
        return f", about {math.ceil(len(trials) / self.jobs) * statistics.median(known) / 60:.1f} min"

    def train(self, trial: tuple[Arm, int]) -> None:
        """Train an arm with a seed, and add the run to `runs`, or why it failed to the arm. If another command trains it, or a
        run that such a command has left, wait for that one."""
        arm, seed = trial
        length = f"_{arm.settings['ITERATIONS']}" if "ITERATIONS" in arm.settings else ""
        name = f"ablate_{arm.name}{length}_{seed}"
        words = [f"{key}={value}" for key, value in arm.settings.items()]
        command = [sys.executable, str(arm.script), *words, f"SEED={seed}", f"RUN_ID={name}", f"OUT_DIR=logs/{name}"]
        started, error = time.monotonic(), ""
        (LOGS / name).mkdir(parents=True, exist_ok=True)
        with (LOGS / name / "lock").open("w") as lock:
            if not can_lock(lock):
                self.say(f"{name}: waiting for another command, which trains it")
            while not (can_lock(lock) or self.is_stopping or arm.verdict):
                time.sleep(1)
            run = read_run(LOGS / f"{name}.jsonl")
            if not (self.is_stopping or arm.verdict or is_trained(run, trial)):
                for file in (LOGS / name).glob("final_model*"):  # of other content, or cut off
                    file.unlink(missing_ok=True)
                error = self.start(command, lock, LOGS / f"{name}.jsonl")
                self.took.append(time.monotonic() - started)
                if error:  # no run is resumed
                    shutil.rmtree(LOGS / name / "checkpoints", ignore_errors=True)
                run = read_run(LOGS / f"{name}.jsonl")
        if is_trained(run, trial):
            self.runs.append(run)
            self.say(f"{name}: {run.bpb:.4f} bits per byte, {(time.monotonic() - started) / 60:.1f} min")
        elif not arm.verdict:
            changed = ", ".join(differing(run.content, arm.content)) if run else "its log"
            arm.verdict, arm.reason = "failed", f"{name}: {error or f'{changed} is not what was planned'}"

    def stop(self) -> None:
        self.is_stopping = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.terminate()


def is_trained(run: Run | None, trial: tuple[Arm, int]) -> bool:
    """Whether a run is of this arm with this seed."""
    arm, seed = trial
    return run is not None and run.seed == seed and arm.has(run)


def model_of(run: Run) -> Path:
    """Return the path of the artifact that a run in logs/ has left."""
    import train_gpt
    return run.log.with_suffix("") / train_gpt.MODEL_FILE


def check_scores(arm: Arm) -> None:
    """Score the artifacts of the arm's runs again, by the logits of its script, on this checkout's
    validation text. If a log has another score, the arm is invalid: a probe before training does not
    see everything. Runs of another machine have no artifact here; they stay unchecked."""
    for place, run in enumerate(arm.runs):
        if arm.verdict or run.checked is not None or run.log.parent != LOGS or not model_of(run).exists():
            continue
        try:
            reason = find_wrong_score(arm, run)
        except ValueError as error:  # perhaps for lack of memory: not for the log
            arm.verdict, arm.reason = "invalid", str(error)
            return
        arm.runs[place] = run._replace(checked=reason)
        if reason:
            arm.verdict, arm.reason = "invalid", reason
        for checked in [known for known in arm.runs if known.log.parent == LOGS] if reason else [run]:
            note_check(checked.log, reason)


def find_wrong_score(arm: Arm, run: Run) -> str:
    """Return why the score in a run's log is not that of its artifact, or "". Raises ValueError if it cannot be scored."""
    from probe import check_artifact, read_text
    config = read_events(run.log)[0]["config"]
    return check_artifact(arm.script, model_of(run), config, read_text(config), run.bpb)[1]


def missing_runs(arms: list[Arm], seeds) -> list[tuple[Arm, int]]:
    """Return the arms with the seeds that they have no run of, once for equal arms. From seed to seed,
    the arms change their order, so that a machine that slows down treats them alike."""
    trials = {}
    for place, seed in enumerate(sorted(seeds)):
        for arm in arms[::-1] if place % 2 else arms:
            if seed not in {run.seed for run in arm.runs}:
                trials.setdefault((seed, json.dumps(arm.content, sort_keys=True)), (arm, seed))
    return [*trials.values()]


def train_all(arms: list[Arm], seeds, runner: Runner, folders: list[Path]) -> None:
    """Train what is missing of the arms with these seeds, and score it again."""
    for arm in arms:
        arm.add(runner.runs)
    trials = missing_runs(arms, seeds)
    runner.say(f"{len(trials)} runs, for seeds up to {max(seeds)}{runner.minutes_for(trials)}")
    list(runner.pool.map(runner.train, trials))
    for arm in arms:
        arm.add(runner.runs)
        check_scores(arm)
    runner.runs = read_runs(folders)  # with what the checks found


def train_until_clear(arms: list[Arm], runner: Runner, options, error: float) -> None:
    """Train the arms of one length with more and more seeds, until all have a verdict. `error` is that of
    all of them together, or of each."""
    first, *rest = arms
    seed, count = first.plan["config"]["SEED"], min(2, options.most_seeds)
    family = 1 if options.error == "each" else len(rest)
    while undecided := [arm for arm in rest if not arm.verdict]:
        train_all([first, *undecided], range(seed, seed + count), runner, options.logs)
        for arm in undecided:
            pairs = pairs_of_seeds(first.runs, arm.runs)
            if first.verdict:
                arm.verdict, arm.reason = first.verdict, f"{first.name}, the first one: {first.reason}"
            elif not arm.verdict and not pairs:  # an equal arm failed, or its data is newer than its runs
                arm.verdict, arm.reason = "failed", "it has no run that can be used"
            elif not arm.verdict:
                arm.effect = limits_of(differences_of(pairs))
        judged = [arm for arm in rest if arm.effect and arm.verdict not in ("invalid", "failed")]
        for arm, verdict in zip(judged, judge_all([arm.effect for arm in judged], options.diff, family, error)):
            if not arm.verdict and (verdict != "undecided" or count == options.most_seeds):
                arm.verdict = verdict
        count = min(options.most_seeds, count + max(1, options.jobs // (1 + len(undecided))))


# ---- The answer ----------------------------------------------------------------------------------------


def at_equal_time(first: Run, runs: list[Run], effect: float, ratios: list[float]) -> list[float] | None:
    """Return the lowest and highest effect if the variation trained as long as the first, not as many steps: calculated from
    its shortest and longest step, as ratios to the first's, and the scores of the first at the nearest other length. None
    without such a run, or if the steps do not clearly differ."""
    slopes = {}
    for other in runs:
        only_length = other.seed == first.seed and differing(first.content, other.content) == ["ITERATIONS"]
        if only_length and other.content["ITERATIONS"] > 0:
            factor = math.log(other.content["ITERATIONS"] / first.content["ITERATIONS"])
            slopes[abs(factor)] = (other.bpb - first.bpb) / factor
    nearest = min((distance for distance in slopes if distance > math.log(OTHER_LENGTH)), default=None)
    if nearest is None or min(ratios) <= 1 <= max(ratios):
        return None
    return sorted(effect - slopes[nearest] * math.log(ratio) for ratio in (min(ratios), max(ratios)))


def facts_of(first: Arm, arm: Arm, runs: list[Run], options) -> dict:
    """Return what is known of an arm, for --json."""
    facts = {"name": arm.name, "iterations": first.plan["config"]["ITERATIONS"], "seconds": options.seconds,
             "verdict": arm.verdict, "reason": arm.reason, "diff": options.diff}
    pairs = pairs_of_seeds(first.runs, arm.runs)
    if not pairs or arm.verdict in ("invalid", "failed"):
        return facts
    effect = arm.effect
    one, two = pairs[0]
    ratios = [second.step_ms / run.step_ms for run, second in pairs]
    facts |= {"effect": effect.mean, "pairs": effect.pairs, "spread": effect.spread}
    if effect.pairs > 1:
        facts |= {"low": effect.low, "high": effect.high, "p": effect.p, "pairs_needed": pairs_needed(effect, options.diff)}
    if arm.verdict == "better":
        facts["effect_corrected"] = correct_for_selection(effect, options.most_seeds)
    facts |= {"effect_before_export": statistics.mean(second.trained_bpb - run.trained_bpb for run, second in pairs),
              "scores": [second.bpb for _, second in pairs], "scores_of_first": [run.bpb for run, _ in pairs],
              "step_ratios": ratios, "bytes": two.artifact_bytes, "bytes_of_first": one.artifact_bytes,
              "size_cap": two.content.get("SIZE_CAP", 0),
              "unchecked": sum(run.checked is None for pair in pairs for run in pair),
              "logs": [str(second.log) for _, second in pairs]}
    if not options.seconds:
        facts["at_equal_time"] = at_equal_time(one, runs, effect.mean, ratios)
    return facts


def sentence(facts: dict, has_lengths: bool) -> str:
    """Return the line about an arm."""
    name = f"{facts['name']:<12}" + (f" {facts['iterations']:>6} steps " if has_lengths else "")
    if "effect" not in facts:
        return f"{name} {facts['verdict']:<9}  {facts['reason']}"
    pairs = facts["pairs"]
    interval = f" (90 % interval {facts['low']:+.4f} to {facts['high']:+.4f})" if pairs > 1 else ""
    text = f"{facts['effect']:+.4f} bits per byte{interval}, {pairs} pair{'s' * (pairs > 1)} of seeds"
    if facts["verdict"] == "no gain":
        is_worse = facts.get("low", 0) > 0
        text = f"it is worse: {text}" if is_worse else f"of {facts['diff']:g} or more: {text}"
    if facts["verdict"] == "better":
        text += f"; without what the selection adds {facts['effect_corrected']:+.4f}"
        if facts["spread"] > facts["diff"]:
            text += "; pairs vary by more than --diff, so rare bad runs may have been missed"
    if facts["verdict"] == "undecided" and pairs > 1:
        needed = max(pairs + 1, facts["pairs_needed"])
        option = f"{needed} pairs: --most-seeds {needed}" if needed < MOST_PAIRS else f"more than {MOST_PAIRS} pairs"
        text += f"; p = {facts['p']:.2g}; to see {facts['diff']:g} may take {option}"
    text += f"; a step takes {min(facts['step_ratios']):.2f} to {max(facts['step_ratios']):.2f} times as long"
    if facts.get("at_equal_time"):
        text += "; at equal time {:+.4f} to {:+.4f} (calculated)".format(*facts["at_equal_time"])
    if 0 < facts["size_cap"] < facts["bytes"]:
        text += f"; {facts['bytes']:,} bytes ({facts['bytes_of_first']:,} without it) are more than SIZE_CAP={facts['size_cap']}"
    if facts["unchecked"]:
        text += f"; {facts['unchecked']} runs were not scored again, for lack of an artifact"
    return f"{name} {facts['verdict']:<9}  {text}"


@own_style()
def draw(rows: list[tuple[dict, Arm, Arm]], options) -> None:
    """Draw the effects with their intervals."""
    from matplotlib.figure import Figure
    shown = sorted((row for row in rows if row[0].get("pairs", 0) > 1), key=lambda row: row[0]["effect"], reverse=True)
    picture = Figure(figsize=(6, 2 + 0.4 * len(shown)), dpi=100, layout="constrained")
    axes = picture.subplots()
    for place, (facts, _, _) in enumerate(shown):
        length = f", {facts['iterations']} steps" if options.horizons else ""
        label = plain_label(f"{facts['name']}{length}: {facts['verdict']}")
        reach = [1000 * (facts["high"] - facts["effect"])]
        axes.errorbar([1000 * facts["effect"]], [label], xerr=reach, fmt="o", color=f"C{place % 10}", capsize=3)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.axvline(-1000 * options.diff, color="0.3", linewidth=1, linestyle=":")
    title = plain_label(f"against {rows[0][1].name}; dotted: a gain of {options.diff:g}")
    axes.set(title=title, xlabel="thousandths of a bit per byte")
    axes.margins(y=0.2)
    axes.title.set_fontsize(10)
    axes.locator_params(axis="x", nbins=5)
    picture.savefig(options.plot)


def row_of(facts: dict, arm: Arm) -> list:
    """Return a verdict as a row of records/ablations.md."""
    length = f"{facts['seconds']:g} s" if facts["seconds"] else f"{facts['iterations']:,} steps"
    if facts.get("pairs", 0) < 2:
        return [f"`{arm.given}`", length, facts["verdict"], facts["reason"], facts.get("pairs", 0), ""]
    effect = "{effect:+.4f} ({low:+.4f} to {high:+.4f})".format(**facts).replace("-", "−")
    return [f"`{arm.given}`", length, facts["verdict"], effect, facts["pairs"], f"{facts['spread']:.4f}"]


def count_tried(first: Arm, runs: list[Run]) -> str:
    """Return how many ideas the logs compared on the text of an arm, and how many of those that look
    better may be false."""
    tried = [pairs for pairs in compare_all(runs) if pairs[0][0].content["data"] == first.content["data"]]
    # Runs that start together may be in either order: the command's base is never the idea.
    tried = [pairs if differing(pairs[0][1].content, first.content) else [pair[::-1] for pair in pairs] for pairs in tried]
    better = sum(p_of(differences_of(pairs))[-1] <= ERROR for pairs in tried)
    return (f"the logs hold {len(tried)} ideas that were tried on this text; {better} look better one by one (p <= {ERROR:g}), "
            f"as about {ERROR * len(tried):.1f} would without any effect")


def report(rows: list[tuple[dict, Arm, Arm]], lengths: list[list[Arm]], runner: Runner, options) -> None:
    """Print the verdicts."""
    if options.json:
        print("\n".join(json.dumps(facts) for facts, _, _ in rows))
        return
    for facts, _, _ in rows:
        print(sentence(facts, bool(options.horizons)))
    first, count = lengths[0][0], len(rows)
    if count > 1:
        together = ": with 5 % each" if options.error == "each" else " together, by Holm's procedure"
        print(f"5 % for a false \"better\" of {count} comparisons{together}; intervals are of each")
    print(f"against {first.name}; {count_tried(first, runner.runs)}")
    print(f"{len(runner.took)} runs took {sum(runner.took) / 60:.1f} min one by one; for records/ablations.md:")
    print("\n".join(table(ROW, [row_of(facts, arm) for facts, _, arm in rows])[2:]))


def list_tried(word: str, folders: list[Path]) -> list[str]:
    """Return a table of the comparisons that the logs hold, the newest last, of those with `word` in their line."""
    rows = []
    for pairs in compare_all(read_runs(folders)):
        first, second = pairs[0]
        names = differing(first.content, second.content)
        changes = [f"{name} {first.content[name]} -> {second.content[name]}" for name in names]
        added = second.content.keys() - first.content.keys()  # the settings of an edited script
        changes += [f"{name}={second.content[name]}" for name in sorted(added) if second.content[name]]
        effect = limits_of(differences_of(pairs))
        interval = f"{effect.low:+.4f} to {effect.high:+.4f}" if len(pairs) > 1 else ""
        seconds = second.content["MAX_WALLCLOCK_SECONDS"]
        length = f"{seconds:g} s" if seconds else f"{second.content['ITERATIONS']} steps"
        date = time.strftime("%Y-%m-%d", time.localtime(second.log.stat().st_mtime))
        row = [second.log.stem, ", ".join(changes), f"{effect.mean:+.4f}", interval, len(pairs), length, second.text,
               second.content["machine"], date]
        if word.lower() in " ".join(map(str, row)).lower():
            rows.append(row)
    if not rows:
        with_word = f" with {word!r}" * bool(word)
        return [f"no comparison{with_word} in {' or '.join(map(str, folders))}; records/ablations.md has others"]
    about = "Each interval holds for itself: of 100 ideas without effect, 5 look better.\n"
    header = "| first log | what differs | bits per byte | 90 % interval | pairs | length | text | machine | date |"
    return [about, *table(header, rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ablate.py and loop.py share."""
    parser.add_argument("--base", help="file with settings, one VARIABLE=value a line")
    parser.add_argument("--settings", nargs="*", action="extend", default=[], metavar="VARIABLE=value",
                        help="settings of all runs; SEED is the first seed")
    parser.add_argument("--diff", type=limited(0, 1), default=0.002, metavar="N",
                        help="the gain that matters (default: %(default)s)")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N",
                        help="runs at the same time, each on a GPU of its own or a share of the cores")
    parser.add_argument("--patience", type=limited(0), default=30, metavar="N",
                        help="a run has failed if its log does not grow for N minutes (default: %(default)s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variations", nargs="*", metavar="'NAME [script=FILE] VARIABLE=value ...'", help="or: tried [WORD]")
    add_options(parser)
    parser.add_argument("--most-seeds", type=int, choices=range(1, MOST_PAIRS + 1), default=12, metavar="N",
                        help="seeds of a variation (default: %(default)s)")
    parser.add_argument("--error", choices=("family", "each"), default="family",
                        help="whether the 5 %% for a false \"better\" hold for all variations together (the default), or for each")
    parser.add_argument("--horizons", type=read_horizons, default=[], metavar="N,N", help="compare at each of these ITERATIONS")
    parser.add_argument("--seconds", type=limited(0), default=0, metavar="N", help="train each for N seconds, not for ITERATIONS")
    parser.add_argument("--from", dest="folders", nargs="*", action="extend", type=Path, default=[], metavar="FOLDER",
                        help="look for finished runs here, too")
    parser.add_argument("--plot", type=lambda file: Path(file).resolve(), metavar="FILE", help="draw the effects")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each variation and length")
    options = parser.parse_args()
    variations = [word for word in options.settings if not re.match(r"\w+=", word)]  # behind --settings
    options.settings = [word for word in options.settings if word not in variations]
    options.variations += variations
    if not options.variations:
        parser.error("give at least two variations: base 'NAME VARIABLE=value'")
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"--from {folder} is no folder")
    require_packages()
    options.logs = [LOGS, *(folder.resolve() for folder in options.folders)]
    if options.variations[0] == "tried":
        print("\n".join(list_tried(" ".join(options.variations[1:]), options.logs)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    output = sys.stderr if options.json else sys.stdout
    runner = Runner(options.jobs, lambda text: print(text, file=output, flush=True), 60 * options.patience)
    with tempfile.TemporaryDirectory() as folder:
        try:
            lengths = read_arms(options, Path(folder))
            os.chdir(ROOT)  # to which the paths in the settings are relative
            check_logs()
            every_arm = [arm for arms in lengths for arm in arms]
            runner.say("checking the variations before training")
            make_plans(every_arm, runner.environment)
            for arms in lengths:
                for arm in arms[1:]:
                    check_against(arms[0], arm)
            if options.plot and not options.plot.exists():
                from matplotlib.figure import Figure
                Figure().savefig(options.plot)  # fails now, not after the runs, if it cannot be written
        except (OSError, ValueError) as error:
            print(f"ablate.py: {error}", file=sys.stderr)
            return 2
        runner.runs = read_runs(options.logs)
        error = ERROR if options.error == "each" else ERROR / len(lengths)
        try:
            for arms in lengths:
                train_until_clear(arms, runner, options, error)
        finally:
            runner.stop()
    rows = [(facts_of(arms[0], arm, runner.runs, options), arms[0], arm) for arms in lengths for arm in arms[1:]]
    report(rows, lengths, runner, options)
    if options.plot:
        draw(rows, options)
    verdicts = {facts["verdict"] for facts, _, _ in rows}
    if "failed" in verdicts:
        return 3
    return 2 if "invalid" in verdicts else int(verdicts != {"better"})


if __name__ == "__main__":
    prepare_output(ends_with_reader=sys.argv[1:2] == ["tried"])
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("ablate.py: stopped; the same command goes on, and keeps the runs that have finished", file=sys.stderr)
        sys.exit(130)
