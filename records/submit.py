"""Package finished runs as a record folder that others can check.

    python records/submit.py --track track_open --name Wider --author me --blurb "MLP_MULT=3" RUN_ID RUN_ID RUN_ID
    python records/submit.py --again records/track_open/2026-01-31_Wider      after a change of blurb, base or notes

A RUN_ID is one of logs/; the runs differ in SEED alone. The folder records/TRACK/DATE_NAME/ gets README.md,
submission.json, train_gpt.py as it ran, train_seedN.log and .jsonl, curve.png, and artifacts under 2 MB. What stands in
README.md below the line "## Notes" is yours and stays.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "logs")]

import plot  # noqa: E402
from verify import (ABSOLUTE, FOLDER, ROOT, RULE, SAME_RUN, UNSAFE, Findings, check_base, claims_of,  # noqa: E402
                    load_track, read_events, read_folder, verify_record)

NOTES = "\n## Notes\n"
AUTHORED = ("name", "author", "github_id", "date", "track", "division", "blurb", "base", "hardware", "command")


def hardware() -> str:
    """The machine in words: GPUs where there are any, else the CPU and its cores."""
    if command := shutil.which("nvidia-smi"):
        names = subprocess.run([command, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                               check=False).stdout.split("\n")
        names = [name.strip() for name in names if name.strip()]
        if names:
            return f"{len(names)}x {names[0]}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file() and (match := re.search(r"model name\s*: (.+)", cpuinfo.read_text(encoding="utf-8"))):
        model = match[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {model}"


def render(said: dict) -> str:
    """README.md down to its notes, from submission.json alone: the score comes first."""
    results = [said["seed_results"][str(seed)] for seed in said["seeds"]]
    lines = [f"# {said['name'].replace('_', ' ')}: {said['val_bpb']:.4f} bits per byte", "",
             f"Mean of {len(said['seeds'])} seeds, sample deviation {said['val_bpb_std']:.4f} bits per byte; "
             f"{said['val_loss']:.4f} ± {said['val_loss_std']:.4f} nats per token. Scored is the artifact as read back from "
             f"its file. {said['bytes_total']:,} bytes at most, {said['bytes_code']:,} of them code; "
             f"{said['parameters']:,} parameters."]
    if said["val_bpb_original"] not in (None, said["val_bpb"]):
        lines[-1] += f" Per byte of the original text, which the tokenizer changes: {said['val_bpb_original']:.4f}."
    lines += ["", said["blurb"], "",
              "| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | all in, s | artifact, bytes | "
              "with code |",
              "|---|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| {seed} | {r['val_bpb']:.5f} | {r['val_bpb_before_export']:.5f} | {r['val_loss']:.5f} | {r['steps']:,} | "
              f"{r['train_seconds']:.1f} | {r['eval_seconds']:.1f} | {r['wall_seconds']:.1f} | {r['artifact_bytes']:,} | "
              f"{r['bytes_total']:,} |" for seed, r in zip(said["seeds"], results)]
    if any(r["resumed"] for r in results):
        lines += ["", "Resumed: " + ", ".join(str(s) for s, r in zip(said["seeds"], results) if r["resumed"]) + "."]
    lines += ["", "![curves of the seeds](curve.png)", "", f"## Against {said['base'] or 'the defaults'}"]
    if test := said["significance"]:
        lines += [f"{test['difference']:+.5f} {test['unit']}; one-sided Welch t-test of {test['n'][0]} against "
                  f"{test['n'][1]} seeds for a difference of more than {test['margin']:g}: p = {test['p']:.2g}."]
    if said["base"]:
        lines += ["", "| | base | here |", "|---|---|---|"]
        lines += [f"| {name} | {then} | {now} |" for name, (then, now) in said["changes"].items()]
    else:
        lines += ["", "| | here |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in said["settings"].items()]
    env = said["environment"]
    lines += ["", "## Command", "", f"    {said['command']}", "", "## Environment",
              f"{said['hardware']}; {env['world_size']} process{'es' * (env['world_size'] > 1)}, {env['threads']} threads each; "
              f"Python {env['python']}, PyTorch {env['torch']}. Division: {said['division'] or 'none'}.", "", "## Files",
              "`submission.json` all of this as data · `train_gpt.py` as it ran · `train_seedN.log` text log with the source "
              "· `train_seedN.jsonl` unrounded events · `curve.png` · `artifact_seedN.int8.ptz`, where under 2 MB"]
    return "\n".join(lines) + "\n" + NOTES


def write_claims(folder: Path, authored: dict) -> None:
    """Writes submission.json, README.md and curve.png of a folder that has its logs. ValueError: it would be refused."""
    found, track = Findings(), load_track(folder)
    seeds = read_folder(folder, found)
    base = check_base(folder, authored, found)
    if found:
        raise ValueError("; ".join(found))
    said = {**authored, **claims_of(track, authored["division"], seeds, base)}
    (folder / "submission.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    notes = readme.read_text(encoding="utf-8").partition(NOTES)[2] if readme.is_file() else ""
    readme.write_text(render(said) + notes, encoding="utf-8")
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    paths += [folder.parent.parent / said["base"] / f"train_seed{seed['seed']}.jsonl" for seed in base]
    (folder / "curve.png").write_bytes(plot.draw(plot.groups_of([plot.read_run(str(path)) for path in paths])))


def collect(folder: Path, run_ids: list[str]) -> None:
    """Copies the logs, artifacts and the script of finished runs into the folder. ValueError names what is missing."""
    for run_id in run_ids:
        text, log = (ROOT / "logs" / f"{run_id}{suffix}" for suffix in (".txt", ".jsonl"))
        for path in (text, log):
            if not path.is_file():
                raise ValueError(f"{path.relative_to(ROOT)} is missing: is {run_id!r} the RUN_ID of a finished run?")
        events = {event["event"]: event for event in read_events(log)}
        if "final" not in events:
            raise ValueError(f"logs/{run_id}.jsonl has no final score: the run has not finished")
        config = events["config"]["config"]
        name = f"train_seed{config['SEED']}"
        for source, suffix in ((text, ".log"), (log, ".jsonl")):
            shutil.copy(source, folder / (name + suffix))
            for older in sorted(source.parent.glob(f"{run_id}.*{source.suffix}")) if "resume" in events else ():
                shutil.copy(older, folder / (name + older.name.removeprefix(run_id).removesuffix(source.suffix) + suffix))
        (folder / "train_gpt.py").write_text(text.read_text(encoding="utf-8").partition("\n" + RULE + "\n")[0],
                                             encoding="utf-8")
        artifact = ROOT / config["OUT_DIR"] / "final_model.int8.ptz"
        if artifact.is_file() and artifact.stat().st_size < 2_000_000:
            if sha256(artifact.read_bytes()).hexdigest() != events["export"]["artifact_sha256"]:
                raise ValueError(f"OUT_DIR={config['OUT_DIR']} has the artifact of a later run than {run_id}: each run needs "
                                 "an OUT_DIR of its own")
            shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What submit.py and run.py both want to know."""
    parser.add_argument("--track", help="a folder of records/, as track_10min_1mb_cpu")
    parser.add_argument("--name", help="of the record, as Wider_MLP")
    parser.add_argument("--division", default="", help="of the track, where it has some")
    parser.add_argument("--base", default="", help="the record that it changes, as track_open/2026-01-31_Name")
    parser.add_argument("--author", default="", help="your name")
    parser.add_argument("--github", default="", help="your name on GitHub")
    parser.add_argument("--blurb", default="", help="what is new, in a sentence or two")
    parser.add_argument("--hardware", default="", help="the machine in words (default: found out)")


def preflight(options, settings: dict[str, str], seeds: int, ranks: int = 1) -> Path:
    """The folder to be made. ValueError: what would be refused after the runs, known before them."""
    folder = ROOT / "records" / options.track / f"{time.strftime('%Y-%m-%d')}_{options.name}"
    track, problems = load_track(folder), Findings()
    problems.check(FOLDER.fullmatch(folder.name), f"--name {options.name!r} has to be of letters, digits and _ . -")
    problems.check(not folder.exists(), f"{folder.relative_to(ROOT)} is there already; delete it, or choose another --name")
    problems.check(seeds >= track.get("min_seeds", 1), f"the track asks for {track.get('min_seeds')} seeds")
    problems.check(not track.get("divisions") or options.division in track["divisions"],
                   f"--division {options.division!r} is none of {', '.join(track.get('divisions', {}))}")
    for name, value in settings.items():
        problems.check(not ABSOLUTE.search(" " + value) and not value.startswith(("/", "~")),
                       f"{name}={value}: records have no absolute paths; give it from the repository on")
    for name, allowed in track.get("settings", {}).items():
        texts = {str(int(value) if isinstance(value, bool) else value) for value in allowed}
        problems.check(settings.get(name, "") in texts | {""}, f"{name}={settings.get(name)}: the track allows "
                       f"{', '.join(sorted(texts))}")
    limit = min(track.get("max_world_size", ranks), track.get("max_threads", ranks))
    problems.check(ranks <= limit, f"--ranks {ranks} is more than the track's {limit}")
    for name in ("author", "github", "hardware"):
        problems.check(not UNSAFE.search(getattr(options, name)), f"--{name} has a line end, or one of | < >")
    limit = track.get("max_train_seconds")
    problems.check(limit is None or 0 < float(settings.get("MAX_WALLCLOCK_SECONDS", 600)) <= limit,
                   f"MAX_WALLCLOCK_SECONDS has to be between 0 and the track's {limit}")
    check_base(folder, {"base": options.base, "division": options.division}, problems)
    for package in ("scipy", "matplotlib"):
        try:
            __import__(package)
        except ImportError:
            problems.append(f"{package} is missing: pip install -r requirements-dev.txt")
    if problems:
        raise ValueError("; ".join(problems))
    return folder


def submit(options, folder: Path, run_ids: list[str], command: str) -> None:
    """Makes the record folder, or leaves nothing behind. ValueError: why it would be refused."""
    authored = dict(zip(AUTHORED, (options.name, options.author, options.github, folder.name[:10], options.track,
                                   options.division, options.blurb, options.base, options.hardware or hardware(), command)))
    folder.mkdir(parents=True)
    try:
        collect(folder, run_ids)
        write_claims(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def report(folder: Path) -> None:
    """Prints what verify.py says about a new folder, and ends with 1 if that is not good."""
    found, notes = verify_record(folder)
    print("\n".join((str(folder.relative_to(ROOT)), *notes, *(f"REFUSED: {line}" for line in found))))
    sys.exit(1 if found else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--command", default="", help="that started the runs (default: what the first log says)")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="write its README.md, submission.json, curve.png anew")
    parser.add_argument("runs", nargs="*", metavar="RUN_ID", help="finished runs that differ in SEED alone")
    options = parser.parse_args()
    if not options.again and not (options.track and options.name and options.runs):
        parser.error("--track, --name and a RUN_ID are needed, or --again FOLDER")
    try:
        if options.again:
            folder = options.again.resolve()
            said = json.loads((folder / "submission.json").read_text(encoding="utf-8"))
            given = {key: getattr(options, "github" if key == "github_id" else key, "") for key in AUTHORED}
            for fixed in ("track", "name"):
                if given.pop(fixed):
                    raise ValueError(f"--{fixed} is the folder's place: move the folder, and edit its submission.json")
            write_claims(folder, {key: given.get(key) or said[key] for key in AUTHORED})
        else:
            log = ROOT / "logs" / f"{options.runs[0]}.jsonl"
            if not log.is_file():
                raise ValueError(f"logs/{log.name} is missing: is {options.runs[0]!r} the RUN_ID of a finished run?")
            texts = {name: text for name, (text, _) in read_events(log)[0]["overrides"].items()}
            folder = preflight(options, texts, len(options.runs))
            submit(options, folder, options.runs, options.command or "python train_gpt.py " + shlex.join(
                f"{name}={text}" for name, text in texts.items() if name not in SAME_RUN))
        report(folder)
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"submit.py: {error}")


if __name__ == "__main__":
    main()
