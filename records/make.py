"""Make a record: train its seeds one after another, and package them as a folder that others can check.

    python records/make.py --track track_10min_1mb_cpu --division sotu --name Wider --author me --blurb "What is new" \\
        --base track_10min_1mb_cpu/2026-01-31_Control MLP_MULT=3             on the base's settings
    python records/make.py ... --runs RUN_ID,RUN_ID,RUN_ID                   of runs in logs/ that differ only in SEED
    python records/make.py --again records/track_open/2026-01-31_Wider       write its claims and texts again

After an interruption, run the same command again: the runs, NAME_seedN, are kept if they have finished with these settings and
this script. To change blurb, base or author, edit them in submission.json and run --again. What you write in README.md below the
line "## Notes" is kept.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from common import (  # noqa: E402
    ROOT, describe_machine, deviation, has_finished, launcher, load_json, only_one, pairs_of, read_settings, require_packages,
    score, table,
)

import train_gpt  # after common, which finds it  # noqa: E402
from events import RULE, check_logs, prepare_output, read_events  # noqa: E402
from plot import draw, groups_of, read_run  # noqa: E402
from rescore import data_command, read_data  # noqa: E402
from rules import (  # noqa: E402
    FOLDER_NAME, Findings, check_request, kind_of, load_base, load_track, read_history, read_submission, read_submissions,
    script_line,
)
from verify import AUTHORED, NOTES, SMALL_ARTIFACT, make_claims, render, report  # noqa: E402

# Settings of older records that the trainer does not have now.
GONE = {"EMBED_FLOAT32", "EMA_DECAY", "MUON_SLOW_AT", "NUM_LOOPS", "LOOP_START", "LOOP_END", "LOOP_AT", "EVAL_SEQ_LEN"}
STOPPED = "make.py: stopped; the same command keeps finished seeds and trains this one anew: a resumed run is no record"
KINDS = {"CPU, bfloat16": " (by default with AVX512-BF16 or AMX)", "CPU, float32": " (by default without AVX512-BF16 and AMX)"}
BEGIN, END = "<!-- leaderboard -->\n", "<!-- end of leaderboard -->\n"


# ---- Training the seeds --------------------------------------------------------------------------------


def plan_settings(options, folder: Path) -> dict[str, str]:
    """Return the settings of the runs by name: the base's, the environment's where the base sets them, those of the
    command, the data in the vocabulary that a preset names, and the track's DEVICE. Raises ValueError and OSError."""
    settings = {}
    if options.base:
        submission = read_submission(ROOT / "records" / options.base / "submission.json")
        settings = {name: os.environ.get(name) or str(value) for name, value in submission["settings"].items() if name not in GONE}
    given, tokenizer = {}, ""
    for word in sorted(options.settings, key=lambda word: not word.startswith("@")):  # arguments win over files
        more, named = read_settings(word[1:]) if word.startswith("@") else (pairs_of([word]), "")
        given |= more
        tokenizer = named or tokenizer
    for name in ("TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE") if "DATA_PATH" in given else ():
        settings.pop(name, None)  # the manifest of the other data has them
    settings |= given
    track = load_track(folder)
    has_data = settings.get("DATA_PATH") or os.environ.get("DATA_PATH")
    if tokenizer and options.division in track.get("divisions", {}) and not has_data:
        settings = pairs_of(data_command(track, options.division, tokenizer)[1].split()) | settings
    allowed = track.get("settings", {})
    if "DEVICE" in allowed and not os.environ.get("DEVICE"):  # the trainer would prefer a GPU
        settings.setdefault("DEVICE", allowed["DEVICE"][0])
    return settings


def check_plan(options, folder: Path, settings: dict[str, str], seeds: list[int]) -> None:
    """Raise ValueError with all reasons known before training for which the record would be refused."""
    track = load_track(folder)
    problems = Findings()
    problems.check(FOLDER_NAME.fullmatch(folder.name), f"--name {options.name!r} must be letters, digits or _ . -")
    problems.check(len(set(seeds)) == len(seeds), f"--seeds {seeds} must be different")
    problems.check(not folder.exists(), f"{folder.relative_to(ROOT)} exists; delete it, or choose another --name")
    most = min(track.get("max_world_size", options.ranks), track.get("max_threads", options.ranks))
    problems.check(options.ranks <= most, f"--ranks {options.ranks} is more than the track's {most}")
    config, given = train_gpt.load_config([f"{name}={text}" for name, text in settings.items()], dict(os.environ))
    names = [*given, "MAX_WALLCLOCK_SECONDS", *track.get("settings", {})]
    planned = {name: getattr(config, name.lower()) for name in names}
    check_request(track, options.division, len(seeds), planned, problems)
    load_base(folder, options.base, options.division, problems)
    if not problems:
        read_data(config, track, options.division, problems)
    if problems:
        raise ValueError("; ".join(problems))


def run_seed(command: list[str], environment: dict[str, str], lock) -> int:
    """Run the trainer, which inherits the lock, and return its exit status. What ends this process ends the trainer, too."""
    inherited = [lock.fileno()] if os.name == "posix" else []
    with subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=inherited) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def check_texts(texts: dict[str, str], place: str) -> None:
    """Raise ValueError for a text that README.md cannot have. `place` and the text's name say where it came from."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{place}{name} is {text!r}, which must be text in quotes")
        if NOTES.strip() in map(str.strip, text.splitlines()):
            raise ValueError(f"{place}{name} has a line {NOTES.strip()!r}, which begins your own notes in README.md: leave it out")
        if text != text.encode("utf-8", "replace").decode():
            raise ValueError(f"{place}{name} is not UTF-8, which this terminal should write")


def run_seeds(options, folder: Path, settings: dict[str, str], seeds: list[int]) -> list[str]:
    """Run the seeds that have not finished and return all RUN_IDs. Exits if a run fails. Raises ValueError, also if another
    command trains them."""
    track = load_track(folder)
    with only_one(ROOT / "logs" / f"{options.name}.lock") as lock:
        for seed in seeds:
            run_id = f"{options.name}_seed{seed}"
            given = {**settings, "SEED": str(seed), "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}"}
            if has_finished(ROOT, run_id, given, options.ranks):
                print(f"{run_id} has already finished", flush=True)
            else:
                check_place(run_id)
                train(options, given, track, lock)
            check_size(run_id, track)
    return [f"{options.name}_seed{seed}" for seed in seeds]


def check_place(run_id: str) -> None:
    """Raise ValueError if logs/RUN_ID has what another run has left: its model, perhaps the only one of a record, or checkpoints,
    also of a run that still trains on another machine or was started by hand."""
    log, folder = ROOT / "logs" / f"{run_id}.jsonl", ROOT / "logs" / run_id
    has_ended = not log.exists() or '"event": "final"' in log.read_text(encoding="utf-8")
    if has_ended and (folder / train_gpt.MODEL_FILE).exists():
        raise ValueError(f"logs/{run_id} has the model of another run: move it, or choose another --name")
    if any(folder.glob("checkpoints/*.pt")):
        raise ValueError(f"logs/{run_id} has checkpoints of a run that may still train, or be resumed: wait for it, move or delete "
                         "the folder to train anew, or choose another --name")


def train(options, given: dict[str, str], track: dict, lock) -> None:
    """Train one seed. Exits if the run fails."""
    environment = dict(os.environ)
    if threads := track.get("max_threads"):
        environment["OMP_NUM_THREADS"] = str(threads // options.ranks)
    arguments = [f"{name}={text}" for name, text in given.items()]
    if status := run_seed([*launcher(options.ranks), "train_gpt.py", *arguments], environment, lock):
        sys.exit(f"make.py: {given['RUN_ID']} ended with status {status}; run the same command again to continue")


def check_size(run_id: str, track: dict) -> None:
    """Raise ValueError if a run is larger than the track allows, before the other seeds are trained."""
    export = next((event for event in read_events(ROOT / "logs" / f"{run_id}.jsonl") if event["event"] == "export"), None)
    if not export:
        raise ValueError(f"logs/{run_id}.jsonl has no export: a run of the same RUN_ID has replaced it; run the same command again")
    size, limit = export["artifact_bytes"] + export["code_bytes"], track.get("max_bytes", math.inf)
    if size > limit:
        raise ValueError(f"{run_id} has {size:,} bytes, more than {limit:,}; raise EXPORT_CLIP, or lower EXPORT_BITS")


# ---- Packaging runs ------------------------------------------------------------------------------------


def copy_run(folder: Path, run_id: str) -> None:
    """Copy the logs, the script and a small artifact of a finished run into the folder."""
    text = ROOT / "logs" / f"{run_id}.txt"
    config = read_events(text.with_suffix(".jsonl"))[0]["config"]
    name = f"train_seed{config['SEED']}"
    if (folder / f"{name}.log").exists():
        raise ValueError(f"{run_id} has the same SEED={config['SEED']} as another run")
    script, rule, rest = text.read_text(encoding="utf-8").partition("\n" + RULE + "\n")
    (folder / f"{name}.log").write_text(script_line(script) + rule + rest, encoding="utf-8")
    shutil.copy(text.with_suffix(".jsonl"), folder / f"{name}.jsonl")
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    artifact = ROOT / config["OUT_DIR"] / "final_model.int8.ptz"
    if artifact.is_file() and artifact.stat().st_size < SMALL_ARTIFACT:
        shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def write_record(folder: Path, authored: dict) -> None:
    """Write submission.json, README.md and curve.png of a folder that has its logs. Raises ValueError with the reasons for
    which the logs would be refused."""
    readme = folder / "README.md"
    if readme.is_file() and NOTES not in readme.read_text(encoding="utf-8"):
        raise ValueError(f"{readme} has no line {NOTES.strip()!r}, below which your text is kept; put it back")
    findings = Findings()
    claims, seeds = make_claims(folder, authored, findings)
    if findings:
        raise ValueError("; ".join(findings))
    submission = {**authored, **claims}
    (folder / "submission.json").write_text(json.dumps(submission, indent=1) + "\n", encoding="utf-8")
    notes = readme.read_text(encoding="utf-8").partition(NOTES)[2] if readme.is_file() else ""
    readme.write_text(render(submission) + notes, encoding="utf-8")
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    if authored["base"]:
        paths += sorted((folder.parent.parent / authored["base"]).glob("train_seed*.jsonl"))
    draw(groups_of([read_run(str(path)) for path in paths]), folder / "curve.png")


def package(options, folder: Path, run_ids: list[str]) -> None:
    """Make the record folder of finished runs, or leave nothing behind. Raises ValueError with the reasons for which the logs
    would be refused."""
    start = read_events(ROOT / "logs" / f"{run_ids[0]}.jsonl")[0]
    authored = {key: getattr(options, key, "") for key in AUTHORED}
    authored |= {"hardware": describe_machine(start), "date": folder.name.split("_")[0],
                 "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    folder.mkdir()
    try:
        for run_id in run_ids:
            copy_run(folder, run_id)
        write_record(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# ---- The leaderboard -----------------------------------------------------------------------------------


def record_row(submission: dict, folder: str) -> list[str]:
    """Return the cells of one record, or of a line of history."""
    scores = [score(result) for result in submission["seed_results"].values()]
    test = submission["against_incumbent"]
    against = f"{test['difference']:+.4f}" if test else ""
    if test and test["p"] is not None:
        against += f", p = {test['p']:.1g}"
    name = f"{submission['date']}_{submission['name']}"
    link = f"{name}, in git at {submission['commit']}" if "commit" in submission else f"[{name}]({folder}/{name})"
    bold = "**" if submission["is_best"] else ""
    return [f"{bold}{score(submission):.4f} ± {deviation(scores):.4f}{bold}", str(len(scores)), f"{submission['bytes_total']:,}",
            submission["hardware"].split(" in ")[0], against, submission["author"], link]  # without the type of the products


def leaderboard(records: Path) -> str:
    """Return the tables of all tracks: one for each division and kind of machine that has records, best first."""
    lines = []
    for path in sorted(records.glob("track_*/track.json")):
        track, folder = load_track(path), path.parent
        submissions = read_submissions(folder)
        submissions += [line for line in read_history(records) if line["track"] == folder.name]
        lines += [f"### [{track['title']}]({folder.name})", ""]
        if not submissions:
            lines += ["No record yet.", ""]
        submissions.sort(key=lambda submission: (kind_of(submission), score(submission)))
        for (_, division, machine), members in groupby(submissions, kind_of):
            rows = [record_row(submission, folder.name) for submission in members]
            lines += [f"Division `{division or 'none'}`, {machine}{KINDS.get(machine, '')}", ""]
            lines += [*table("| bits per byte | seeds | bytes | machine | against the best before it | by | record |", rows), ""]
    return "\n".join(lines)


def write_leaderboard(records: Path) -> None:
    """Write the tables into README.md, between their markers."""
    readme = records / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{leaderboard(records)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def read_seeds(text: str) -> list[int]:
    """Return the numbers of --seeds. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, separated by commas, such as 1337,1338,1339")
    return [int(seed) for seed in text.split(",")]


def main() -> None:
    records = ROOT / "records"
    tracks = sorted(path.parent.name for path in records.glob("track_*/track.json"))
    bases = sorted(path.parent.relative_to(records).as_posix() for path in records.glob("track_*/*/submission.json"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--track", choices=tracks, metavar="TRACK", type=lambda text: text.strip("/"),
                        help="a folder of records/ (example: track_10min_1mb_cpu)")
    parser.add_argument("--name", help="of the record (example: Wider_MLP)")
    parser.add_argument("--division", default="", help="one of the track's, if any (default: the base's)")
    parser.add_argument("--base", default="", choices=["", *bases], metavar="BASE",
                        help="the record that this one changes (example: track_open/2026-01-31_Name)")
    parser.add_argument("--author", default="", help="your name")
    parser.add_argument("--blurb", default="", help="what is new, in a sentence or two")
    parser.add_argument("--seeds", default=[1337, 1338, 1339], type=read_seeds, metavar="N,N",
                        help="numbers, separated by commas (default: 1337,1338,1339)")
    parser.add_argument("--ranks", type=int, choices=range(1, 9), default=1, metavar="N", help="processes, started by torchrun")
    parser.add_argument("--runs", default="", metavar="RUN_ID,...", help="package these finished runs of this machine")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="write its submission.json, texts and curve.png again")
    parser.add_argument("settings", nargs="*", metavar="NAME=value", help="variables of train_gpt.py, and @FILE with such lines")
    options = parser.parse_intermixed_args()  # settings before and after options
    if not (options.again or (options.track and options.name)):
        parser.error("--track and --name are needed, or --again FOLDER")
    if options.track == "track_open" and not (options.division or options.base):
        parser.error("--division is needed: a name for the data, such as sotu")
    require_packages()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        if options.base and not options.division:
            options.division = read_submission(records / options.base / "submission.json")["division"]
        if options.again:
            folder = options.again.resolve()
            submission = load_json(folder / "submission.json")
            if not isinstance(submission, dict):
                raise ValueError(f"{folder / 'submission.json'} is damaged: take it from git, or package the runs again")
            authored = {key: submission.get(key, "") for key in AUTHORED}
            check_texts(authored, f"{folder / 'submission.json'}: ")
            write_record(folder, authored)
        else:
            folder = records / options.track / f"{time.strftime('%Y-%m-%d', time.gmtime())}_{options.name}"
            run_ids = options.runs.split(",")
            check_texts({"author": options.author, "blurb": options.blurb}, "--")
            if not options.runs:
                settings = plan_settings(options, folder)
                with chdir(ROOT):  # to which the paths in the settings are relative
                    check_logs()
                    check_plan(options, folder, settings, options.seeds)
                run_ids = run_seeds(options, folder, settings, options.seeds)
            package(options, folder, run_ids)
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"make.py: {error}")
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    accepted = report(folder)
    if accepted:
        write_leaderboard(records)
    sys.exit(0 if accepted else 1)


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
