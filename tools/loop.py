"""Try ideas one after another, and keep those that are shown to help.

    python tools/loop.py ideas/ --base records/presets/cpu_1mb.env --jobs 2 \\
        --settings ITERATIONS=600 DATA_PATH=data/datasets/sotu_caseops2048

An idea is a file in the folder: NAME.py, a script, or NAME.env, settings, one VARIABLE=value a line.
People or programs may add files while the loop runs. Each is compared with the best model so far:

    screening      1 to 4 seeds that all ideas share; what does not look better is dropped
    confirmation   4 to 16 seeds that nothing has used; what is clearly better is kept, and the
                   next ideas are added to it: settings to settings; a script replaces the script

On average, at most a tenth of the kept ideas are false, by LORD++ (arXiv:1710.00499). With --finish,
the loop ends when all ideas in the folder are tried. Then it measures the claim, the best model
against the start, once: on new seeds, and on the second half of the validation text, which no other
run has scored.

The folder also gets loop.json, all that the loop knows; loop.md, a table; and loop.png. After a
stop, even by kill -9, the same command resumes.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
from ablate import (
    FOR_ALL, LOGS, Arm, Runner, add_options, check_against, check_length, last_line,
    make_plans, model_of, train_all,
)
from common import ROOT, load_json, only_one, pairs_of, read_settings, require_packages, table
from effects import ERROR, differences_of, limits_of, p_of, pairs_of_seeds, read_runs
from events import check_logs, prepare_output
from plot import own_style, plain_label
from probe import in_float32, load_script, logits_of, read_text, rows_at_once, rows_of

SCREENED, CONFIRMED, CLAIMED = 4, 16, 6  # pairs at most
LOOK_FROM = 4  # pairs of a confirmation
FALSE = 0.1  # share of what is kept
BLOCKS = 16  # parts of the unseen text
HEADER = "| idea | effect | 90 % interval | pairs | runs | verdict | why |"


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
    mean = differences.mean()
    variance = differences.mean(1).var(ddof=1) / seeds + differences.mean(0).var(ddof=1) / blocks
    reach = -special.stdtrit(min(seeds, blocks) - 1, ERROR) * math.sqrt(variance)
    low, high = float(mean - reach), float(mean + reach)
    return {"effect": float(mean), "low": low, "high": high, "pairs": seeds}


# ---- The folder ------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that a stop at any moment leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Loop:
    """A folder of ideas, and what is known of them. `state` is loop.json: the settings of all runs,
    the next seed that nothing has used, the first seed of the screening, the ideas as they came, the
    numbers of those that were kept, whether each confirmation kept its idea, and the claim."""
    def __init__(self, folder: Path, settings: dict, seed: int, diff: float):
        self.folder, self.diff, self.known = folder, diff, {}
        file = folder / "loop.json"
        if file.exists():
            self.state = json.loads(file.read_text(encoding="utf-8"))
            if self.state["given"] != [settings, diff]:
                raise ValueError(f"{file} was made with other settings: {self.state['given']}, "
                                 f"not {[settings, diff]}; repeat them, or use another folder")
            return
        self.keep_copy("start", ROOT / "train_gpt.py")
        self.state = {"given": [settings, diff], "settings": settings, "seed": seed, "ideas": [],
                      "kept": [], "confirmed": [], "claim": None}
        self.state["screening"] = self.take_seeds(SCREENED)

    def save(self) -> None:
        write_whole(self.folder / "loop.json", json.dumps(self.state, indent=1))
        lines = table(HEADER, map(row_of, self.rows()))
        write_whole(self.folder / "loop.md", "\n".join(lines) + "\n")

    def keep_copy(self, name: str, file: Path) -> str:
        """Copy an idea's file, which may be edited meanwhile. Return the copy's path in the folder."""
        kind = "train_gpt.py" if file.suffix == ".py" else "settings.env"
        copy = self.folder / "loop" / name / kind
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        return str(copy.relative_to(self.folder))

    def take_seeds(self, count: int) -> int:
        """Return the first of this many seeds that nothing has used."""
        self.state["seed"] += count
        return self.state["seed"] - count

    def find_ideas(self) -> bool:
        """Add the ideas that are new in the folder, oldest first. Return whether a file is so new
        that it may still be written."""
        known = {(idea["name"], idea["digest"]) for idea in self.state["ideas"]}
        files = [file for suffix in ("py", "env") for file in self.folder.glob(f"[!.]*.{suffix}")]
        is_written = False
        for file in sorted(files, key=lambda file: (file.stat().st_mtime, file.name)):
            content = file.read_bytes()
            digest = sha256(content).hexdigest()[:12]
            if (file.stem, digest) in known:
                continue
            if time.time() - file.stat().st_mtime < 1 or not content:
                is_written = True
                continue
            copy = self.keep_copy(f"{len(self.state['ideas']):03d}_{digest}", file)
            self.state["ideas"].append({"name": file.stem, "digest": digest, "copy": copy,
                                        "verdict": "", "why": "", "runs": 0})
            self.save()
        return is_written

    def arm_of(self, number: int | None) -> Arm:
        """Return what trains an idea on top of those that were kept before it, or None: the start.
        Raises ValueError for settings that cannot be used."""
        kept = self.state["kept"]
        before = kept[:kept.index(number)] if number in kept else kept
        numbers = [] if number is None else [*before, number]
        script = self.folder / "loop" / "start" / "train_gpt.py"
        arm = Arm("start", script, dict(self.state["settings"]))
        for place in numbers:
            idea = self.state["ideas"][place]
            arm.name = re.sub(r"[^\w.-]", "_", f"{place}_{idea['name']}")
            copy = self.folder / idea["copy"]
            if copy.suffix == ".py":
                arm.script, arm.given = copy, f"script={idea['name']}.py"
                continue
            own, _ = read_settings(copy)
            for variable in sorted((FOR_ALL | {"DATA_PATH"}) & own.keys()):
                raise ValueError(f"{variable} must be equal in all runs")
            arm.settings |= own
            arm.given = " ".join(f"{name}={value}" for name, value in own.items())
        return arm

    def best(self, environment: dict) -> Arm:
        """Return what trains the best model so far, ready to be trained."""
        number = self.state["kept"][-1] if self.state["kept"] else None
        if number not in self.known:
            self.known[number] = self.arm_of(number)
            make_plans([self.known[number]], environment)
        return self.known[number]

    def rows(self) -> list[dict]:
        """Return the ideas, and the claim behind them."""
        claim = self.state["claim"]
        return [*self.state["ideas"], *([{"name": "best against start", **claim}] if claim else [])]


def row_of(idea: dict) -> list:
    """Return an idea as a row of loop.md."""
    effect = f"{idea['effect']:+.4f}" if "effect" in idea else ""
    interval = "{low:+.4f} to {high:+.4f}".format(**idea) if idea.get("pairs", 0) > 1 else ""
    return [idea["name"], effect, interval, idea.get("pairs", ""), idea["runs"],
            idea["verdict"] or "waiting", idea["why"]]


def divide_text(data: Path, folder: Path) -> None:
    """Write two data folders into `folder`, "seen" and "unseen", with the halves of the validation
    text of `data`. The rest is linked."""
    from train_gpt import HEADER_BYTES
    shards = sorted(data.glob("*_val_[0-9]*.bin"))
    tokens = np.hstack([np.fromfile(shard, dtype="<u2", offset=HEADER_BYTES) for shard in shards])
    header = np.fromfile(shards[0], dtype="<i4", count=HEADER_BYTES // 4)
    for name, part in zip(("seen", "unseen"), np.array_split(tokens, 2)):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for file in data.resolve().iterdir():
            if file not in {shard.resolve() for shard in shards} and file.name != "manifest.json":
                (place / file.name).unlink(missing_ok=True)
                (place / file.name).symlink_to(file)
        header[2] = len(part)
        content = header.tobytes() + part.tobytes()
        (place / shards[0].name).write_bytes(content)
        if (data / "manifest.json").exists():
            manifest = load_json(data / "manifest.json")
            entry = {"file": shards[0].name, "sha256": sha256(content).hexdigest()}
            manifest["splits"]["val"] = {"shards": [entry], "tokens": len(part)}
            write_whole(place / "manifest.json", json.dumps(manifest, indent=1))


def note(idea: dict, differences: list[float]) -> None:
    """Write the effect of pairs into an idea."""
    effect = limits_of(differences)
    idea |= {"effect": effect.mean, "pairs": effect.pairs}
    if effect.pairs > 1:
        idea |= {"low": effect.low, "high": effect.high, "p": effect.p}


# ---- Trying ----------------------------------------------------------------------------


def compare(best: Arm, arms: list[Arm], first_seed: int, count: int,
            runner: Runner) -> list[list[float]]:
    """Train the arms and the best one with `count` seeds, and return the differences of each arm's
    pairs. Raises ValueError if the best one fails."""
    seeds = range(first_seed, first_seed + count)
    train_all([best, *arms], seeds, runner, [LOGS])
    if best.verdict:
        raise ValueError(f"the best model so far, {best.name}, is {best.verdict}: {best.reason}")
    used = [run for run in best.runs if run.seed in seeds]
    return [differences_of(pairs_of_seeds(used, arm.runs)) for arm in arms]


def try_ideas(loop: Loop, numbers: list[int], runner: Runner) -> None:
    """Screen ideas, and confirm those that remain until one is kept; the others then wait for a
    comparison with it."""
    ideas, best, arms = loop.state["ideas"], loop.best(runner.environment), {}
    for number in numbers:
        try:
            arm = loop.arm_of(number)
            make_plans([arm], runner.environment)
            check_against(best, arm)
            arms[number] = arm
        except (ValueError, OSError) as error:
            ideas[number] |= {"verdict": "invalid", "why": str(error)}
    for count in range(1, SCREENED + 1):
        settle(loop, arms)
        alive = [number for number in arms if not ideas[number]["verdict"]]
        if not alive:
            return
        first_seed = loop.state["screening"]
        found = compare(best, [arms[number] for number in alive], first_seed, count, runner)
        for number, differences in zip(alive, found):
            if not arms[number].verdict:
                note(ideas[number], differences)
                ideas[number]["runs"] = count
                if is_hopeless(differences, loop.diff):
                    why = f"screening: no better after {count} seed{'s' * (count > 1)}"
                    ideas[number] |= {"verdict": "dropped", "why": why}
    settle(loop, arms)
    for number in [number for number in arms if not ideas[number]["verdict"]]:
        confirm_idea(loop, number, best, arms[number], runner)
        if ideas[number]["verdict"] == "kept":
            return


def settle(loop: Loop, arms: dict[int, Arm]) -> None:
    """Give ideas whose runs failed their verdict, and save all."""
    for number, arm in arms.items():
        if arm.verdict:
            loop.state["ideas"][number] |= {"verdict": arm.verdict, "why": arm.reason}
    loop.save()


def confirm_idea(loop: Loop, number: int, best: Arm, arm: Arm, runner: Runner) -> None:
    """Compare an idea with the best one on seeds that nothing has used, until it is kept or
    dropped."""
    idea, state = loop.state["ideas"][number], loop.state
    if "seed" not in idea:
        idea["seed"] = loop.take_seeds(CONFIRMED)
        loop.save()  # before the first run: these seeds are used
    level = next_level(state["confirmed"])
    screened, count, verdict = idea["runs"], LOOK_FROM, ""
    while not verdict:
        [differences] = compare(best, [arm], idea["seed"], count, runner)
        if arm.verdict:
            state["confirmed"].append(False)
            settle(loop, {number: arm})
            return
        for pairs in range(LOOK_FROM, len(differences) + 1):
            verdict = verdict or confirm(differences[:pairs], level, loop.diff)
        count = min(CONFIRMED, count + max(1, runner.jobs // 2))
    note(idea, differences)
    sign = "<=" if verdict == "kept" else ">"
    idea |= {"verdict": verdict, "runs": screened + 2 * len(differences), "level": level,
             "why": f"confirmation: p = {idea['p']:.2g} {sign} {level:.2g}"}
    state["confirmed"].append(verdict == "kept")
    if verdict == "kept":
        state["kept"].append(number)
        state["screening"] = loop.take_seeds(SCREENED)  # the old ones flatter what was kept
    loop.save()


# ---- The claim -------------------------------------------------------------------------


def measure_claim(loop: Loop, runner: Runner) -> None:
    """Compare the best model with the start on new seeds and on the text that no run has scored."""
    state = loop.state
    start, best = loop.arm_of(None), loop.best(runner.environment)
    make_plans([start], runner.environment)
    if "claim_seed" not in state:
        state["claim_seed"] = loop.take_seeds(CLAIMED)
        loop.save()
    compare(start, [best], state["claim_seed"], CLAIMED, runner)
    if best.verdict:
        raise ValueError(f"the claim cannot be measured: {best.reason}")
    unseen = {"DATA_PATH": str(loop.folder / "loop" / "unseen")}
    tokens, size = read_text({**start.plan["config"], **unseen})
    pairs = pairs_of_seeds([run for run in start.runs if run.seed >= state["claim_seed"]], best.runs)
    rows = [nats_of_blocks(best, two, tokens) - nats_of_blocks(start, one, tokens)
            for one, two in pairs]
    differences = np.array(rows) / math.log(2) / size * BLOCKS
    state["claim"] = {**claim_of(differences), "runs": 2 * len(pairs), "verdict": "measured",
                      "why": f"{len(state['kept'])} kept, on new seeds and {size:,} bytes "
                             "that no other run has scored"}
    loop.save()


def nats_of_blocks(arm: Arm, run, tokens: np.ndarray) -> np.ndarray:
    """Return the nats of an artifact on each of BLOCKS parts of the tokens. Raises ValueError."""
    words = [f"{name}={value}" for name, value in arm.settings.items() if name != "ATTN"]
    words += [f"INIT_FROM={model_of(run)}", f"DTYPE={arm.plan['config']['DTYPE']}"]
    with tempfile.TemporaryDirectory() as place:
        np.save(Path(place, "tokens.npy"), tokens)
        command = [sys.executable, str(Path(__file__).resolve()), "rows", str(arm.script), *words]
        result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{run.log.stem}: its artifact cannot be scored: {last_line(result)}")
    rows = np.array(json.loads(result.stdout.splitlines()[-1]))
    return np.array([part.sum() for part in np.array_split(rows, BLOCKS)])


def print_rows(script: str, settings: list[str]) -> None:
    """Print the nats of each row of the tokens of tokens.npy, here, by the artifact INIT_FROM."""
    import torch
    train_gpt = load_script(script)
    config, _ = train_gpt.load_config(settings, {})
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, config.init_from)
    uses_gpu = config.device != "cpu" and torch.cuda.is_available()
    model = in_float32(model).eval().to("cuda" if uses_gpu else "cpu")
    device = next(model.parameters()).device
    inputs, targets = rows_of(np.load("tokens.npy"), config.train_seq_len, device)
    nats, batch = [], rows_at_once(config)
    with torch.inference_mode():
        for rows, wanted in zip(inputs.split(batch), targets.split(batch)):
            losses = torch.nn.functional.cross_entropy(logits_of(model, rows).mT, wanted, reduction="none")
            nats += losses.sum(1, dtype=torch.float64).tolist()
    print(json.dumps(nats))


# ---- The picture and the command -------------------------------------------------------


@own_style()
def draw(loop: Loop) -> None:
    """Draw each idea's effect on top of those that were kept before it, its interval, and the claim."""
    from matplotlib.figure import Figure
    picture = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    axes, level, path = picture.subplots(), 0.0, [(0, 0.0)]
    colors = {"kept": "C0", "measured": "C1"}
    for place, idea in enumerate(loop.rows(), 1):
        if "effect" not in idea:
            continue
        base = 0.0 if idea["verdict"] == "measured" else level
        value, color = 1000 * (base + idea["effect"]), colors.get(idea["verdict"], "0.7")
        axes.plot([place], [value], "o", color=color)
        if idea["pairs"] >= LOOK_FROM:
            reach = 1000 * (idea["high"] - idea["effect"])
            axes.errorbar([place], [value], yerr=[reach], color=color, capsize=3)
        if idea["verdict"] == "kept":
            level += idea["effect"]
        if idea["verdict"] in colors:
            axes.annotate(plain_label(idea["name"]), (place, value), xytext=(-8, 6), ha="right",
                          textcoords="offset points")
        path.append((place, 1000 * level))
    axes.step(*zip(*path), where="post", color="C0", linewidth=1)
    axes.axhline(0, color="0.3", linewidth=1)
    title = "against the start; blue: kept; grey: not kept; orange: the claim; bars: 90 %, from 4 pairs on"
    axes.set(title=title, xlabel="idea", ylabel="thousandths of a bit per byte")
    axes.title.set_fontsize(10)
    axes.set_xticks(range(1, len(loop.rows()) + 1))
    temporary = loop.folder / ".loop.tmp.png"
    picture.savefig(temporary)
    temporary.replace(loop.folder / "loop.png")


def open_loop(options, environment: dict) -> Loop:
    """Return the loop of a folder, whose claim has half of the validation text. Raises ValueError."""
    settings = {}
    if options.base:
        settings, _ = read_settings(options.base)
    settings |= {"MAX_WALLCLOCK_SECONDS": "0", **pairs_of(options.settings)}
    options.seconds, options.horizons = 0, []
    check_length(settings, options)
    seed = int(settings.pop("SEED", 1337))
    folder = options.folder.resolve()
    os.chdir(ROOT)  # to which the paths in the settings are relative
    check_logs()
    loop = Loop(folder, settings, seed, options.diff)
    if not (folder / "loop.json").exists():
        start = loop.arm_of(None)
        make_plans([start], environment)
        divide_text(Path(start.plan["config"]["DATA_PATH"]), folder / "loop")
        loop.state["settings"] = {**settings, "DATA_PATH": str(folder / "loop" / "seen")}
        loop.save()
    return loop


def run_loop(loop: Loop, runner: Runner, finish: bool) -> None:
    """Try all ideas, and wait for more, or measure the claim."""
    while True:
        is_written = loop.find_ideas()
        waiting = [number for number, idea in enumerate(loop.state["ideas"]) if not idea["verdict"]]
        if waiting:
            try_ideas(loop, waiting[:runner.jobs], runner)
            draw(loop)
            for number in waiting[:runner.jobs]:
                runner.say("  ".join(map(str, row_of(loop.state["ideas"][number]))))
        elif finish and not is_written:
            break
        else:
            time.sleep(1)
    if not loop.state["kept"]:
        runner.say("no idea was kept, so there is nothing to claim")
    elif not loop.state["claim"]:
        measure_claim(loop, runner)
        draw(loop)


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add_options(parser)
    parser.add_argument("--finish", action="store_true",
                        help="end when all ideas are tried, and measure the claim")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    require_packages()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner(options.jobs, lambda text: print(text, flush=True), 60 * options.patience)
    try:
        with only_one(options.folder.resolve() / ".lock"):
            loop = open_loop(options, runner.environment)
            runner.runs = read_runs([LOGS])
            run_loop(loop, runner, options.finish)
    except (OSError, ValueError) as error:
        print(f"loop.py: {error}", file=sys.stderr)
        return 2
    finally:
        runner.stop()
    print((loop.folder / "loop.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        print_rows(sys.argv[2], sys.argv[3:])
        sys.exit(0)
    prepare_output()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("loop.py: stopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
