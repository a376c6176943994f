"""Try ideas one after another, and keep those that are shown to help.

    python tools/loop.py ideas/ --base records/presets/cpu_1mb.env --jobs 2 \\
        --settings ITERATIONS=600 DATA_PATH=data/datasets/sotu_caseops2048

An idea is a file in the folder: NAME.py, a script, or NAME.env, with one VARIABLE=value a line; if
both are there, the script with these settings. A changed file is a new idea. More may be added at
any time. What failed is tried again at the next start. Each is compared with the best model so far:

    screening      1 to 4 seeds that all ideas share; what does not look better is dropped
    confirmation   4 to 16 seeds that nothing has used; what is clearly better is kept, and the
                   next ideas are added to it: settings to settings; a script replaces the script

On average, at most a tenth of the kept ideas are false, by LORD++ (arXiv:1710.00499). With
--finish, the loop ends when all ideas in the folder are tried. Then it measures the claim, the best
model against the start, once: on new seeds, and on the second half of the validation text, which no
other run has scored. The folder also gets loop.json, all that the loop knows; loop.md, a table; and
loop.png, after each --jobs ideas. After a stop, even by kill -9, the same command resumes.
"""

import json
import math
import os
import re
import shutil
import statistics
import time
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import numpy as np
from ablate import FOR_ALL, LOGS, Arm, Runner, check_against, make_plans, model_of, read_common, shared_options, train_all
from common import ROOT, load_json, only_one, require_packages, run_command, table, write_whole
from effects import ERROR, differences_of, ends_of, limits_of, p_of, pairs_of_seeds, read_runs
from events import given_settings, prepare_output, read_events
from plot import own_style, plain_label
from probe import read_text, score_artifact
from settings import read_settings, words_of

SCREENED, CONFIRMED, CLAIMED = 4, 16, 6  # pairs at most
LOOK_FROM = 4  # pairs of a confirmation
FALSE = 0.1  # share of what is kept
BLOCKS = 16  # parts of the unseen text
UNCHANGED = "its scores are the best's: is it switched on?"
HEADER = "| idea | effect | 90 % interval | pairs | verdict | why |"


# ---- Decisions -------------------------------------------------------------------------


def is_hopeless(differences: list[float], diff: float) -> bool:
    """Whether an idea is dropped in screening. Nothing is claimed, so there is no error to keep."""
    pairs, mean = len(differences), statistics.mean(differences)
    least = {1: 0.0, 2: diff / 4, 3: diff / 4}.get(pairs, diff / 2)
    return mean > -least


def confirm(differences: list[float], level: float, diff: float) -> str:
    """Return "kept", "dropped", or "" while pairs of a confirmation do not tell yet."""
    pairs = len(differences)
    if pairs >= LOOK_FROM and p_of(differences)[-1] <= level:
        return "kept"
    least = diff / 4 if pairs < 6 else diff / 2
    is_over = pairs >= CONFIRMED or (pairs >= LOOK_FROM and statistics.mean(differences) > -least)
    return "dropped" if is_over else ""


def next_level(was_kept: list[bool]) -> float:
    """Return the error of the next confirmation, by LORD++ (Ramdas et al. 2017, arXiv:1710.00499),
    from which of those before kept their idea. Each one that did earns error for those after it."""
    numbers = np.arange(1, len(was_kept) + 2)
    spent = np.log(np.maximum(numbers, 2)) / (numbers * np.exp(np.sqrt(np.log(numbers))))
    spent *= 0.07720838  # all terms add up to 1 (Javanmard and Montanari 2018, arXiv:1603.09000)
    level = spent[-1] * FALSE / 2
    for count, place in enumerate(place for place, kept in enumerate(was_kept) if kept):
        level += spent[len(was_kept) - place - 1] * (FALSE if count else FALSE / 2)
    return float(level)


def claim_of(differences: np.ndarray) -> dict:
    """Return the mean of differences (seeds, blocks of text), and its 90 % interval over seeds and
    blocks: both are samples, and the variances of their means add (Owen 2007, arXiv:0711.3077)."""
    from scipy import special
    seeds, blocks = differences.shape
    mean = float(differences.mean())
    variance = differences.mean(1).var(ddof=1) / seeds + differences.mean(0).var(ddof=1) / blocks
    reach = -float(special.stdtrit(min(seeds, blocks) - 1, ERROR)) * math.sqrt(variance)
    return {"effect": mean, "low": mean - reach, "high": mean + reach, "pairs": seeds}


# ---- The folder ------------------------------------------------------------------------


class Loop:
    """A folder of ideas, and what is known of them. `state` is loop.json: the settings of all runs,
    the next seed that nothing has used, the seeds of the screening, the ideas as they came,
    the numbers of those that were kept, whether each confirmation kept its idea, and claims."""
    def __init__(self, folder: Path, settings: dict, seed: int, diff: float):
        self.folder, self.diff, self.retries = folder, diff, True
        file = folder / "loop.json"
        if file.exists():
            self.state = load_json(file)
            then, now = ({**given, "--diff": least} for given, least in (self.state["given"], [settings, diff]))
            for name in sorted(name for name in then | now if then.get(name) != now.get(name)):
                was = f"with {then[name]}" if name in then else "without it"
                raise ValueError(f"{name} is {now.get(name, 'not set')}, but {file} was made {was}: "
                                 "undo that in the command or the environment, or use another folder")
            return
        self.keep_copies("start", [ROOT / "train_gpt.py"])
        self.state = {"given": [settings, diff], "settings": settings, "seed": seed, "ideas": [],
                      "kept": [], "confirmed": [], "claims": []}
        self.state["screening"] = [*self.take_seeds(SCREENED)]

    def save(self) -> None:
        write_whole(self.folder / "loop.json", json.dumps(self.state, indent=1))
        lines = [*table(HEADER, map(row_of, self.state["ideas"] + self.state["claims"])), ""]
        text = "\n".join(lines).encode(errors="backslashreplace")  # Names may be no UTF-8.
        write_whole(self.folder / "loop.md", text.decode())

    def keep_copies(self, name: str, files: list[Path]) -> str:
        """Copy an idea's files, which may be edited later. Return a copy's path in the folder."""
        place = self.folder / "loop" / name
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            copy = place / ("train_gpt.py" if file.suffix == ".py" else "settings.env")
            shutil.copy(file, copy)
        return str(copy.relative_to(self.folder))

    def take_seeds(self, count: int) -> range:
        """Return this many seeds that nothing has used."""
        first = self.state["seed"]
        self.state["seed"] += count
        return range(first, first + count)

    def find_ideas(self) -> bool:
        """Add new ideas, NAME.py, NAME.env, or both, oldest first; at the start, also what failed.
        Return whether a file is so new, or new and empty, that it may still be written."""
        known = {(idea["name"], idea["digest"], Path(idea["copy"]).suffix): idea
                 for idea in self.state["ideas"]}
        ideas, unfinished = defaultdict(list), set()
        files = [*self.folder.glob("[!.]*.py"), *self.folder.glob("[!.]*.env")]
        for file in sorted(filter(Path.is_file, files)):  # not a folder, or a file that an editor replaces
            about = file.stat()
            ideas[file.stem].append(file)
            if abs(time.time() - about.st_mtime) < (1 if about.st_size else 60):
                unfinished.add(file.stem)
        ages = {name: max(file.stat().st_mtime for file in files) for name, files in ideas.items()}
        for name in sorted(ideas.keys() - unfinished, key=lambda name: (ages[name], name)):
            digest = sha256(b"".join(map(Path.read_bytes, ideas[name]))).hexdigest()[:12]
            idea = known.get((name, digest, ideas[name][-1].suffix))
            if idea is None:
                copy = self.keep_copies(f"{len(self.state['ideas']):03d}_{digest}", ideas[name])
                self.state["ideas"].append({"name": name, "digest": digest, "copy": copy,
                                            "verdict": "", "why": ""})
                self.save()
            elif idea["verdict"] == "failed" and self.retries:  # perhaps for lack of memory
                idea["verdict"] = ""
        self.retries = False
        return bool(unfinished)

    def arm_of(self, numbers: list[int]) -> Arm:
        """Return what trains the start with these ideas added to it. Raises ValueError."""
        script = self.folder / "loop" / "start" / "train_gpt.py"
        arm = Arm("start", script, dict(self.state["settings"]))
        for place in numbers:
            idea = self.state["ideas"][place]
            arm.name = re.sub(r"[^\w.-]", "_", f"{place}_{idea['name']}", flags=re.ASCII)[:99]
            copy = self.folder / idea["copy"]
            if copy.suffix == ".py":
                arm.script = copy
            if copy.suffix == ".env" or copy.with_name("settings.env").exists():
                own, _ = read_settings(copy.with_name("settings.env"))
                for variable in sorted((FOR_ALL | {"DATA_PATH"}) & own.keys()):
                    raise ValueError(f"{variable} must be equal in all runs")
                arm.settings |= own
        return arm


def row_of(idea: dict) -> list:
    """Return an idea as a row of loop.md."""
    effect = f"{idea['effect']:+.4f}" if "effect" in idea else ""
    interval = ends_of(idea) if "pairs" in idea else ""
    why = idea["why"] + "; the next start tries it again" * (idea["verdict"] == "failed")
    state = "screening" if "pairs" in idea else "waiting"
    if idea.get("pairs", 0) >= SCREENED:
        state = "confirming"
    return [idea["name"], effect, interval, str(idea.get("pairs", "")), idea["verdict"] or state, why]


def divide_text(data: Path, folder: Path) -> None:
    """Write two data folders into `folder`, "seen" and "unseen", with the halves of the validation
    text of `data`. The rest is linked."""
    from train_gpt import HEADER_BYTES
    shards = sorted(data.glob("*_val_[0-9]*.bin"))
    tokens = np.hstack([np.fromfile(shard, dtype="<u2", offset=HEADER_BYTES) for shard in shards])
    header = np.fromfile(shards[0], dtype="<i4", count=HEADER_BYTES // 4)
    own = {"manifest.json", *(shard.name for shard in shards)}
    for name, part in zip(("seen", "unseen"), np.array_split(tokens, 2)):
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)  # of a command that was stopped
        place.mkdir(parents=True)
        for file in data.resolve().iterdir():
            if file.name not in own:
                (place / file.name).symlink_to(file)
        header[2] = len(part)
        content = header.tobytes() + part.tobytes()
        (place / shards[0].name).write_bytes(content)
        shutil.copystat(shards[-1], place / shards[0].name)  # Runs must be younger than it.
        if (data / "manifest.json").exists():
            manifest = load_json(data / "manifest.json")
            entry = {"file": shards[0].name, "sha256": sha256(content).hexdigest()}
            manifest["splits"]["val"] = {"shards": [entry], "tokens": len(part)}
            write_whole(place / "manifest.json", json.dumps(manifest, indent=1))


# ---- Trying ----------------------------------------------------------------------------


def compare(best: Arm, arms: list[Arm], seeds, runner: Runner) -> list[list[float]]:
    """Train the arms and the best one with these seeds, and return the differences of each arm's
    pairs. Raises ValueError if the best one fails."""
    train_all([best, *arms], seeds, runner)
    if best.verdict:
        raise ValueError(f"the best model so far, {best.name}, is {best.verdict}: {best.reason}")
    used = [run for run in best.runs if run.seed in seeds]
    return [differences_of(pairs_of_seeds(used, arm.runs)) for arm in arms]


def note(idea: dict, arm: Arm, differences: list[float]) -> None:
    """Write the effect of pairs into an idea, or why its runs failed."""
    if arm.verdict:
        idea |= {"verdict": arm.verdict, "why": arm.reason}
        return
    effect = limits_of(differences)
    idea |= {"effect": effect.mean, "pairs": effect.pairs}
    if effect.pairs > 1:
        idea |= {"low": effect.low, "high": effect.high, "p": effect.p}


def tell(idea: dict, runner: Runner) -> None:
    """Print what is now known of an idea."""
    runner.say("  ".join(row_of(idea)))


def try_ideas(loop: Loop, numbers: list[int], runner: Runner) -> None:
    """Screen ideas, and confirm those that remain until one is kept; the others then wait."""
    ideas, kept, arms = loop.state["ideas"], loop.state["kept"], {}
    best = loop.arm_of(kept)
    make_plans([best], runner)
    for number in numbers:
        try:
            arms[number] = loop.arm_of([*kept, number])
            make_plans([arms[number]], runner)
            check_against(best, arms[number])
        except ValueError as error:
            verdict = arms.pop(number, best).verdict  # "failed" if the script cannot be used
            ideas[number] |= {"verdict": verdict or "invalid", "why": str(error)}
            tell(ideas[number], runner)
    for count in range(1, SCREENED + 1):
        loop.save()
        if not arms:
            return
        found = compare(best, [*arms.values()], loop.state["screening"][:count], runner)
        for number, differences in zip([*arms], found):
            note(ideas[number], arms[number], differences)
            if not ideas[number]["verdict"] and is_hopeless(differences, loop.diff):
                why = f"screening, pair {count}" if any(differences) else UNCHANGED
                ideas[number] |= {"verdict": "dropped", "why": why}
            if ideas[number]["verdict"]:
                tell(ideas[number], runner)
                del arms[number]
    loop.save()
    for number, arm in arms.items():
        confirm_idea(loop, number, best, arm, runner)
        if ideas[number]["verdict"] == "kept":
            return


def confirm_idea(loop: Loop, number: int, best: Arm, arm: Arm, runner: Runner) -> None:
    """Compare an idea with the best one on fresh seeds, until it is kept or dropped."""
    state, idea = loop.state, loop.state["ideas"][number]
    seeds = loop.take_seeds(CONFIRMED)
    level, count, verdict = next_level(state["confirmed"]), LOOK_FROM, ""
    while not (verdict or arm.verdict):
        [differences] = compare(best, [arm], seeds[:count], runner)
        for pairs in range(LOOK_FROM, len(differences) + 1):
            verdict = verdict or confirm(differences[:pairs], level, loop.diff)
        count = min(CONFIRMED, count + max(1, runner.jobs // 2))
    note(idea, arm, differences)
    if not arm.verdict:
        growth = 100 * (arm.runs[0].artifact_bytes / best.runs[0].artifact_bytes - 1)
        why = f"confirmation: p = {idea['p']:.2g}, level {level:.2g}; {growth:+.1f} % bytes"
        idea |= {"verdict": verdict, "why": why}
    tell(idea, runner)
    state["confirmed"].append(idea["verdict"] == "kept")
    if idea["verdict"] == "kept":
        state["kept"].append(number)
        state["screening"] = [*loop.take_seeds(SCREENED)]  # the old ones flatter what was kept
    loop.save()


def measure_claim(loop: Loop, runner: Runner) -> None:
    """Compare the best model with the start on new seeds and on the text that no run has scored."""
    start, best, seeds = loop.arm_of([]), loop.arm_of(loop.state["kept"]), loop.take_seeds(CLAIMED)
    make_plans([start, best], runner)
    compare(start, [best], seeds, runner)
    if best.verdict:
        raise ValueError(f"the claim cannot be measured: {best.reason}")
    pairs = pairs_of_seeds([run for run in start.runs if run.seed in seeds], best.runs)
    unseen = {"DATA_PATH": str(loop.folder / "loop" / "unseen")}
    tokens, size = read_text({**start.plan["config"], **unseen})
    nats = [nats_of_blocks(best, two, tokens) - nats_of_blocks(start, one, tokens)
            for one, two in pairs]
    about = {"name": "best against start", "verdict": "measured",
             "why": f"on new seeds and {size:,} bytes that no other run has scored"}
    loop.state["claims"].append(about | claim_of(np.array(nats) / math.log(2) / size * BLOCKS))
    loop.save()


def nats_of_blocks(arm: Arm, run, tokens: np.ndarray) -> np.ndarray:
    """Return the nats of an artifact on each of BLOCKS parts of the tokens. Raises ValueError."""
    config = read_events(run.log)[0]["config"]
    nats, reason = score_artifact(arm.script, model_of(run), config, tokens)
    if reason:
        raise ValueError(f"{run.log.stem}: {reason}")
    return np.array([part.sum() for part in np.array_split(nats, BLOCKS)])


# ---- The picture and the command -------------------------------------------------------


@own_style()
def draw(loop: Loop) -> None:
    """Draw each idea's effect on top of those that were kept before it, and the claim."""
    from matplotlib.figure import Figure
    picture = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    axes, level, path = picture.subplots(), 0.0, [(0, 0.0)]
    colors = {"kept": "C0", "measured": "C1"}
    for place, idea in enumerate(loop.state["ideas"] + loop.state["claims"], 1):
        if "effect" not in idea:
            continue
        base = 0.0 if idea["verdict"] == "measured" else level
        value, color = base + idea["effect"], colors.get(idea["verdict"], "0.7")
        reach = idea["high"] - idea["effect"] if idea["pairs"] >= LOOK_FROM else 0.0
        axes.errorbar([place], [value], yerr=[reach], fmt="o", color=color, capsize=3)
        if idea["verdict"] in colors:
            side = {"kept": "bottom", "measured": "top"}[idea["verdict"]]  # So labels are apart.
            axes.annotate(plain_label(idea["name"]) + "  ", (place, value), ha="right", va=side)
        if idea["verdict"] == "kept":
            level += idea["effect"]
        path.append((place, level))
    axes.step(*zip(*path), where="post", color="C0", linewidth=1)
    axes.set(title="blue: kept; grey: not kept; orange: the claim; bars: 90 %", xlabel="idea",
             ylabel="bits per byte, against the start")
    picture.savefig(loop.folder / "loop.png")


def open_loop(options, runner: Runner) -> Loop:
    """Return the loop of a folder, whose claim has half of the text. The text is divided again if
    the folder was moved: its links may lead nowhere. Raises ValueError."""
    from train_gpt import load_config
    words = words_of(read_common(options))
    os.chdir(ROOT)  # to which the paths in the settings are relative
    config, overrides = load_config(words, dict(os.environ))
    settings = given_settings({"overrides": overrides})
    loop = Loop(options.folder, settings, config.seed, options.diff)
    seen = str(loop.folder / "loop" / "seen")
    if loop.state["settings"].get("DATA_PATH") != seen:  # It is new, or was moved.
        loop.state["settings"] = settings
        start = loop.arm_of([])
        make_plans([start], runner)
        divide_text(Path(start.plan["config"]["DATA_PATH"]), loop.folder / "loop")
        loop.state["settings"] = {**settings, "DATA_PATH": seen}
        loop.save()
    for file in Path(seen).glob("*.bin"):
        if not file.exists() or file.stat().st_mtime > os.stat(seen).st_mtime:
            raise ValueError(f"{file.resolve()} has changed since the loop began: use another "
                             f"folder, or, if only its date is new, touch {seen}")
    return loop


def run_loop(loop: Loop, runner: Runner, finish: bool) -> None:
    """Try all ideas, and wait for more, or measure the claim."""
    told = -1  # number of ideas when it last said that it waits
    while True:
        is_written = loop.find_ideas()
        waiting = [number for number, idea in enumerate(loop.state["ideas"]) if not idea["verdict"]]
        if waiting:
            try_ideas(loop, waiting[:runner.jobs], runner)
            draw(loop)
        elif finish and not is_written:
            break
        else:
            if len(loop.state["ideas"]) != told:
                runner.say(f"waiting for more ideas in {loop.folder}; Ctrl-C stops")
            told = len(loop.state["ideas"])
            time.sleep(1)
    if loop.state["kept"] and not loop.state["claims"]:
        measure_claim(loop, runner)
        draw(loop)


def main() -> int:
    parser = shared_options(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--finish", action="store_true",
                        help="end when all ideas are tried, and measure the claim")
    parser.set_defaults(seconds=0)  # the length is ITERATIONS
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    require_packages()
    runner = Runner(options.jobs, lambda text: print(text, flush=True), 60 * options.patience)
    try:
        with only_one(options.folder / ".lock"):
            loop = open_loop(options, runner)
            runner.runs = read_runs(LOGS)
            run_loop(loop, runner, options.finish)
    finally:
        runner.stop()
    print((loop.folder / "loop.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    run_command(main)
