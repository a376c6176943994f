"""Make a record: train its seeds one after another, and package them as a folder for others to check.

    python records/make.py --track track_10min_1mb_cpu --division sotu --name Wider --author me \\
        --blurb "What is new" --base track_10min_1mb_cpu/2026-01-31_Control MLP_MULT=3
    python records/make.py ... --runs RUN_ID,RUN_ID,RUN_ID       of runs in logs/ that differ in SEED
    python records/make.py --again records/track_open/2026-01-31_Wider    write its texts again

After an interruption, run the same command again: the runs, NAME_seedN, are kept if they have
finished with these settings and this script; a stopped one begins anew. To change blurb, base,
in_turn or author, edit them in submission.json and run --again. What you write in README.md below
the line "## Notes" is kept.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import common  # first: it finds train_gpt  # noqa: E402
import train_gpt  # noqa: E402
import verify  # noqa: E402
from common import ROOT, load_json, table  # noqa: E402
from events import RULE, check_logs, prepare_output, read_events  # noqa: E402
from plot import draw, groups_of, read_run  # noqa: E402

# Settings of older records that the trainer does not have now.
GONE = {"EMBED_FLOAT32", "EMA_DECAY", "MUON_SLOW_AT", "NUM_LOOPS", "LOOP_START", "LOOP_END",
        "LOOP_AT", "EVAL_SEQ_LEN"}
NOTES = "\n## Notes\n"
BEGIN, END = "<!-- leaderboard -->\n", "<!-- end of leaderboard -->\n"


# ---- Training the seeds ------------------------------------------------------------------------


def plan_settings(options, folder: Path) -> dict[str, str]:
    """Return the settings of the runs by name: the base's, the environment's where the base sets
    them, the command's, the data of a preset's vocabulary, and the track's DEVICE. Raises
    ValueError and OSError."""
    settings, track = {}, verify.load_track(folder)
    if options.base:
        of_base = load_json(ROOT / "records" / options.base / "submission.json")["settings"]
        settings = {name: os.environ.get(name) or str(value) for name, value in of_base.items()
                    if name not in GONE}
    given, tokenizer = {}, ""
    for word in sorted(options.settings, key=lambda word: word[0] != "@"):  # arguments win
        more, named = common.read_settings(word[1:]) if word[0] == "@" else ({}, "")
        given |= more or common.pairs_of([word])
        tokenizer = named or tokenizer
    if "DATA_PATH" in given:  # The manifest of the other data has these.
        for name in ("TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"):
            settings.pop(name, None)
    settings |= given
    has_data = settings.get("DATA_PATH") or os.environ.get("DATA_PATH")
    if tokenizer and options.division in track.get("divisions", {}) and not has_data:
        _, needed = verify.data_command(track, options.division, tokenizer)
        settings = common.pairs_of(needed.split()) | settings
    if "DEVICE" in track.get("settings", {}) and not os.environ.get("DEVICE"):
        settings.setdefault("DEVICE", track["settings"]["DEVICE"][0])  # not a GPU that is here
    return settings


def check_plan(options, folder: Path, settings: dict[str, str]):
    """Raise ValueError with all reasons known before training for which a record is refused."""
    track, problems = verify.load_track(folder), verify.Findings()
    problems.check(verify.FOLDER_NAME.fullmatch(folder.name),
                   f"--name {options.name!r} must be letters, digits or _ . -")
    problems.check(len(set(options.seeds)) == len(options.seeds),
                   f"--seeds {options.seeds} must be different")
    problems.check(not folder.exists(), f"{folder} exists; delete it, or choose another --name")
    most = min(track.get("max_world_size", 8), track.get("max_threads", 8))
    problems.check(options.ranks <= most, f"--ranks {options.ranks} is more than the track's {most}")
    words = [f"{name}={text}" for name, text in settings.items()]
    config, given = train_gpt.load_config(words, dict(os.environ))
    values = {name.upper(): value for name, value in asdict(config).items()}
    names = [*given, "MAX_WALLCLOCK_SECONDS", *track.get("settings", {})]
    planned = {name: values[name] for name in names}
    verify.check_request(track, options.division, len(options.seeds), planned, problems)
    verify.load_base(folder, options.base, options.division, problems)
    if not problems:
        verify.read_data(values, track, options.division, problems)
    if problems:
        raise ValueError("; ".join(problems))


def run_seeds(options, track: dict, settings: dict[str, str]) -> list[str]:
    """Run the seeds that have not finished and return all RUN_IDs. Raises ValueError if a run fails
    or is too large, and if another command trains them."""
    run_ids = [f"{options.name}_seed{seed}" for seed in options.seeds]
    with common.only_one(ROOT / "logs" / f"{options.name}.lock") as lock:
        for seed, run_id in zip(options.seeds, run_ids):
            own = {"SEED": str(seed), "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}"}
            if common.has_finished(ROOT, run_id, settings | own, options.ranks):
                print(f"{run_id} has already finished", flush=True)
            else:
                check_place(run_id)
                run_seed(settings | own, options.ranks, track, lock)
            events = read_events(ROOT / "logs" / f"{run_id}.jsonl")
            export = {event["event"]: event for event in events}["export"]
            size, limit = export["artifact_bytes"] + export["code_bytes"], track.get("max_bytes")
            if size > (limit or math.inf):  # before the other seeds are trained
                raise ValueError(f"{run_id} has {size:,} bytes, more than {limit:,}; raise "
                                 "EXPORT_CLIP, or lower EXPORT_BITS")
    return run_ids


def check_place(run_id: str):
    """Raise ValueError if logs/RUN_ID has a model, perhaps the only one of a record, or checkpoints
    of a run that may still train elsewhere."""
    log, folder = ROOT / "logs" / f"{run_id}.jsonl", ROOT / "logs" / run_id
    has_ended = not log.exists() or '"event": "final"' in log.read_text(encoding="utf-8")
    if has_ended and (folder / train_gpt.MODEL_FILE).exists():
        raise ValueError(f"logs/{run_id} has the model of another run: move it, or choose another "
                         "--name")
    if any(folder.glob("checkpoints/*.pt")):
        raise ValueError(f"logs/{run_id} has checkpoints of a run that may still train: wait for "
                         "it, delete the folder, or choose another --name")


def run_seed(settings: dict[str, str], ranks: int, track: dict, lock):
    """Train one seed in a process that holds the lock, too. Raises ValueError if it fails."""
    environment = dict(os.environ)
    if threads := track.get("max_threads"):
        environment["OMP_NUM_THREADS"] = str(threads // ranks)
    words = [f"{name}={text}" for name, text in settings.items()]
    command = [*common.launcher(ranks), "train_gpt.py", *words]
    inherited = [lock.fileno()] if os.name == "posix" else []
    with subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=inherited) as process:
        try:
            status = process.wait()
        except BaseException:  # What ends this process ends the trainer, too.
            process.terminate()
            process.wait()
            raise
        finally:
            if process.returncode:  # What it saved is of no use: a resumed run is no record.
                checkpoints = ROOT / "logs" / settings["RUN_ID"] / "checkpoints"
                shutil.rmtree(checkpoints, ignore_errors=True)
    if status:
        raise ValueError(f"{settings['RUN_ID']} ended with status {status}; run the same command "
                         "again to continue")


# ---- The folder --------------------------------------------------------------------------------


def package(options, folder: Path, run_ids: list[str]):
    """Make the record folder of finished runs, or leave nothing behind. Raises ValueError with the
    reasons for which the logs would be refused."""
    start = read_events(ROOT / "logs" / f"{run_ids[0]}.jsonl")[0]
    authored = {key: getattr(options, key, value) for key, value in verify.AUTHORED.items()}
    authored |= {"hardware": common.describe_machine(start), "date": folder.name.split("_")[0],
                 "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    folder.mkdir()
    try:
        for run_id in run_ids:
            copy_run(folder, run_id)
        write_record(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def copy_run(folder: Path, run_id: str):
    """Copy the logs, the script and a small artifact of a finished run into the folder."""
    text = ROOT / "logs" / f"{run_id}.txt"
    config = read_events(text.with_suffix(".jsonl"))[0]["config"]
    name = f"train_seed{config['SEED']}"
    if (folder / f"{name}.log").exists():
        raise ValueError(f"{run_id} has the same SEED={config['SEED']} as another run")
    script, rule, rest = text.read_text(encoding="utf-8").partition(f"\n{RULE}\n")
    log = verify.script_line(script) + rule + rest
    (folder / f"{name}.log").write_text(log, encoding="utf-8")
    shutil.copy(text.with_suffix(".jsonl"), folder / f"{name}.jsonl")
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    artifact = ROOT / config["OUT_DIR"] / train_gpt.MODEL_FILE
    if artifact.is_file() and artifact.stat().st_size < verify.SMALL_ARTIFACT:
        shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def write_record(folder: Path, authored: dict):
    """Write submission.json, README.md and curve.png of a folder that has its logs. Raises
    ValueError with the reasons for which the logs would be refused."""
    readme, findings = folder / "README.md", verify.Findings()
    old = readme.read_text(encoding="utf-8") if readme.is_file() else NOTES
    if NOTES not in old:
        raise ValueError(f"{readme} has no line {NOTES.strip()!r}, below which your text is kept")
    claims, seeds = verify.make_claims(folder, authored, findings)
    if findings:
        raise ValueError("; ".join(findings))
    submission, records = {**authored, **claims}, folder.parent.parent
    text = json.dumps(submission, indent=1) + "\n"
    (folder / "submission.json").write_text(text, encoding="utf-8")
    base = authored["base"] and load_json(records / authored["base"] / "submission.json")
    readme.write_text(render(submission, base) + old.partition(NOTES)[2], encoding="utf-8")
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    paths += sorted((records / authored["base"]).glob("train_seed*.jsonl")) if base else []
    draw(groups_of([read_run(str(path)) for path in paths]), folder / "curve.png")


def render(claims: dict, base: dict) -> str:
    """Return README.md up to its notes, from submission.json and that of the base, if any."""
    text = (f"{verify.describe_score(claims)}; {claims['val_loss']:.4f} nats per token. The score is "
            f"that of the artifact as read back from its file. At most {claims['bytes_total']:,} "
            f"bytes, {claims['bytes_code']:,} of them code; {claims['parameters']:,} parameters.")
    if claims["val_bpb_original"] not in (None, claims["val_bpb"]):
        text += (f" The tokenizer changes the text: {claims['val_bpb']:.4f} bits per byte of the "
                 f"text as tokenized, and {claims['val_bpb_original']:.4f} per byte of the original "
                 "text.")
    header = ("| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | "
              "total, s | artifact, bytes | with code |")
    rows = [[seed, f"{r['val_bpb']:.5f}", f"{r['val_bpb_before_export']:.5f}",
             f"{r['val_loss']:.5f}", f"{r['steps']:,}", f"{r['train_seconds']:.1f}",
             f"{r['eval_seconds']:.1f}", f"{r['wall_seconds']:.1f}", f"{r['artifact_bytes']:,}",
             f"{r['bytes_total']:,}"] for seed, r in claims["seed_results"].items()]
    lines = [f"# {claims['name'].replace('_', ' ')}", "", text, "", claims["blurb"], "",
             *table(header, rows), "", "![curves of the seeds](curve.png)", "",
             f"## Changes from {claims['base'] or 'the defaults'}", ""]
    ours, theirs = claims["settings"], base["settings"] if base else {}
    names = [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
    lines += table("| | before | this record |",
                   [[name, theirs.get(name, ""), ours.get(name, "")] for name in names])
    if base:
        is_new = base["script_sha256"] != claims["script_sha256"]
        lines += ["", f"`train_gpt.py`: {'changed' if is_new else 'unchanged'}. Against the base: "
                  + verify.describe_test(claims["against_base"])]
    about = claims["environment"]
    ranks = about["world_size"]
    program = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
    script = f"records/{verify.place_of(claims)}/train_gpt.py"
    command = [*program, script, *(f"{name}={value}" for name, value in ours.items())]
    lines += ["", "## Command", "Run it from the root of the repository. It trains the seed 1337 "
              "with this folder's script. If its data is missing, `python records/verify.py "
              "--rerun` prints the command that gets it.", "", f"    {shlex.join(command)}", "",
              f"{claims['hardware']}; ranks: {ranks}, threads of each: {about['threads']}; Python "
              f"{about['python']}, PyTorch {about['torch']}. Division: {claims['division']}."]
    return "\n".join(lines) + "\n" + NOTES


def leaderboard(records: Path) -> str:
    """Return the tables of all tracks: one for each division and kind of machine that has records,
    lowest score first. Damaged records are left out: verify.py refuses them."""
    lines = []
    for path in sorted(records.glob("track_*/track.json")):
        rows = []
        for record in path.parent.glob("*/submission.json"):
            try:
                claims = load_json(record)
                name, group = record.parent.name, (claims["division"], claims["machine"])
                cells = [*verify.describe_score(claims).split(" bits per byte, "),
                         f"{claims['bytes_total']:,}", claims["hardware"].split(" in ")[0],
                         claims["author"], f"[{name}]({path.parent.name}/{name})"]
                rows.append((group, common.score(claims), cells))
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
        lines += [f"### [{load_json(path)['title']}]({path.parent.name})", ""]
        lines += [] if rows else ["No record yet.", ""]
        for (division, machine), members in groupby(sorted(rows), lambda row: row[0]):
            lines += [f"Division `{division}`, {machine}", ""]
            lines += table("| bits per byte | seeds | bytes | machine | by | record |",
                           [cells for _, _, cells in members])
            lines.append("")
    return "\n".join(lines)


def write_leaderboard(records: Path):
    """Write the tables into README.md, between their markers."""
    readme = records / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    text = f"{before}{BEGIN}\n{leaderboard(records)}\n{END}{rest.partition(END)[2]}"
    readme.write_text(text, encoding="utf-8")


def read_seeds(text: str) -> list[int]:
    """Return the numbers of --seeds. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, separated by commas")
    return [int(seed) for seed in text.split(",")]


def main():
    records = ROOT / "records"
    tracks = sorted(path.parent.name for path in records.glob("track_*/track.json"))
    bases = sorted(path.parent.relative_to(records).as_posix()
                   for path in records.glob("track_*/*/submission.json"))
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--track", choices=tracks, metavar="TRACK", type=lambda text: text.strip("/"),
        help="a folder of records/ (example: track_10min_1mb_cpu)")
    add("--name", help="of the record (example: Wider_MLP)")
    add("--division", default="", help="one of the track's, if any (default: the base's)")
    add("--base", default="", choices=["", *bases], metavar="BASE",
        help="the record that this one changes (example: track_open/2026-01-31_Name)")
    add("--in-turn", action="store_true",
        help="these --runs and the base's were trained in turn on one machine: test the difference")
    add("--author", default="", help="your name")
    add("--blurb", default="", help="what is new, in a sentence or two")
    add("--seeds", default=[1337, 1338, 1339], type=read_seeds, metavar="N,N",
        help="numbers, separated by commas (default: 1337,1338,1339)")
    add("--ranks", type=int, choices=range(1, 9), default=1, metavar="N", help="processes")
    add("--runs", default="", metavar="RUN_ID,...", help="package these finished runs")
    add("--again", type=Path, metavar="FOLDER", help="write its submission.json and texts again")
    add("settings", nargs="*", metavar="NAME=value", help="for train_gpt.py; @FILE with such lines")
    options = parser.parse_intermixed_args()  # settings before and after options
    if not (options.again or (options.track and options.name)):
        parser.error("--track and --name are needed, or --again FOLDER")
    if options.base and not options.division:
        options.division = load_json(records / options.base / "submission.json")["division"]
    if options.track and not options.division:
        parser.error("--division is needed: a name for the data, such as sotu")
    common.require_packages()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.again:
            folder = options.again.resolve()
            submission = load_json(folder / "submission.json")
            write_record(folder, {key: submission.get(key, value)
                                  for key, value in verify.AUTHORED.items()})
        else:
            date = time.strftime("%Y-%m-%d", time.gmtime())
            folder = records / options.track / f"{date}_{options.name}"
            run_ids = options.runs.split(",")
            if not options.runs:
                settings = plan_settings(options, folder)
                with chdir(ROOT):  # to which the paths in the settings are relative
                    check_logs()
                    check_plan(options, folder, settings)
                run_ids = run_seeds(options, verify.load_track(folder), settings)
            package(options, folder, run_ids)
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"make.py: {error}")
    except KeyboardInterrupt:
        sys.exit("make.py: stopped; the same command keeps finished seeds and trains this one anew")
    accepted = verify.report(folder)
    if accepted:
        write_leaderboard(records)
    sys.exit(0 if accepted else 1)


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
