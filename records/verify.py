"""Check record folders: recompute every number from the logs and apply the rules of the track.

    python records/verify.py                     all folders
    python records/verify.py FOLDER --rerun      also hash the data and score the artifacts again

The exit status is 1 if a folder is refused; each reason is a line. verify.py catches mistakes, --rerun catches wrong scores, and a
person who reads the changes to the script catches lies. --rerun runs the folder's train_gpt.py, which is the submitter's code: read
it first. It also needs the artifacts that are too large for git: copy them into the folder.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from common import ROOT, compare_scores, deviation, load_json, require_packages, score, table  # noqa: E402
from events import MAY_DIFFER_BETWEEN_SEEDS, prepare_output  # noqa: E402
from rescore import rescore  # noqa: E402
from rules import (  # noqa: E402
    FOLDER_NAME, Findings, best_before, check_rules, load_base, load_track, place_of, read_folder,
)

SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git
NOTES = "\n## Notes\n"
# What the author writes in submission.json; the logs decide the rest.
AUTHORED = ("name", "author", "date", "submitted", "track", "division", "blurb", "base", "hardware")
OF_SEEDS = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps", "train_seconds", "eval_seconds",
            "wall_seconds", "artifact_bytes", "artifact_sha256", "bytes_total")


# ---- submission.json -----------------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, findings: Findings) -> tuple[dict, list[dict]]:
    """Return everything in submission.json that the logs decide, and the seeds. Findings say why there is nothing."""
    track = load_track(folder)
    division = authored["division"]
    seeds = read_folder(folder, division, findings)
    base = load_base(folder, authored["base"], division, findings)
    if findings:
        return {}, seeds
    first = seeds[0]
    machine = machine_of(first)
    best = best_before(folder, authored, machine)
    against = compare_with(track, seeds, best) if best else None
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {f"{key}_std": deviation([seed[key] for seed in seeds]) for key in ("val_loss", "val_bpb")}
    originals = [seed["val_bpb_original"] for seed in seeds]
    claims |= {
        "machine": machine,
        "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
        "script_sha256": first["code_sha256"], "parameters": first["parameters"],
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in OF_SEEDS} for seed in seeds},
        "command": command_of(place_of(authored), first),
        "settings": first["overrides"], "changes": changes(base, first),
        "significance": compare_with(track, seeds, base) if base else None,
        "incumbent": place_of(best) if best else "", "against_incumbent": against,
        "is_best": not best or (against["p"] is not None and against["p"] < track.get("p", 0.01)),
        "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}
    return claims, seeds


def compare_with(track: dict, seeds: list[dict], other: dict) -> dict:
    """Return the test of the seeds against another record. With one seed on a side there is none: p is None."""
    theirs = list(other["seed_results"].values())
    difference = statistics.mean(map(score, seeds)) - statistics.mean(map(score, theirs))
    return compare_scores(track, seeds, theirs) or {"n": [len(seeds), len(theirs)], "p": None, "difference": difference}


def machine_of(seed: dict) -> str:
    """Return the kind of machine, within which records compete: the GPU, or for CPUs the type of the model's products."""
    return seed.get("gpu") or f"{seed['settings']['DEVICE'].upper()}, {seed['settings']['DTYPE']}"


def command_of(place: str, seed: dict) -> str:
    """Return the command that runs a record's own script again, from the root of the repository."""
    ranks = seed["world_size"]
    program = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    settings = [f"{name}={value}" for name, value in seed["overrides"].items()]
    return shlex.join([*program, f"records/{place}/train_gpt.py", *settings])


def changes(base: dict, seed: dict) -> dict[str, list]:
    """Return the settings, and the script's digest, that differ from the base: name, old value, new value."""
    if not base:
        return {}
    old = base["config"]
    new = seed["settings"]
    names = sorted((old.keys() | new.keys()) - MAY_DIFFER_BETWEEN_SEEDS)
    result = {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    if base["script_sha256"] != seed["code_sha256"]:
        result["train_gpt.py"] = [base["script_sha256"][:12], seed["code_sha256"][:12]]
    return result


def rounded(claims: object) -> object:
    """Return claims with 9 digits of each fraction: sums in another order, and other releases of SciPy, differ in the last."""
    return json.loads(json.dumps(claims), parse_float=lambda text: float(f"{float(text):.9g}"))


def compare_claims(submission: dict, computed: dict, findings: Findings) -> None:
    """Everything in submission.json that its author did not write must be what the logs give."""
    claimed, wanted = rounded(submission), rounded(computed)
    for key in sorted((claimed.keys() | wanted.keys()) - set(AUTHORED)):
        claim, number = claimed.get(key, "nothing"), wanted.get(key, "nothing")
        findings.check(claim == number, f"submission.json: {key} is {claim!r}, but the logs give {number!r}")


# ---- README.md -----------------------------------------------------------------------------------------


def describe_test(test: dict) -> str:
    """Return a difference and its test in words."""
    ours, theirs = test["n"]
    difference = f"{test['difference']:+.5f} bits per byte"
    if test["p"] is None:
        return f"{difference}. A test needs two seeds of each; there are {ours} and {theirs}."
    return (f"{difference}; one-sided Welch t-test of {ours} against {theirs} seeds "
            f"for a difference of more than {test['margin']:g}: p = {test['p']:.2g}.")


def describe_rank(claims: dict) -> str:
    """Return in words whether a record is the best of its division and kind of machine until then, and if not, why."""
    incumbent, test = claims["incumbent"], claims["against_incumbent"]
    if not incumbent:
        return "the first of its division on this kind of machine"
    if claims["is_best"]:
        return "a new best"
    if test["difference"] >= 0:
        return f"not a new best: {test['difference']:.4f} bits per byte above {incumbent}"
    why = "the test needs two seeds of each" if test["p"] is None else f"p = {test['p']:.2g} is too high"
    return f"not a new best yet: {-test['difference']:.4f} bits per byte below {incumbent}, but {why}"


def count_seeds(seeds) -> str:
    """Return the number of seeds in words."""
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def render(claims: dict) -> str:
    """Return README.md up to its notes, from submission.json."""
    results = {seed: claims["seed_results"][str(seed)] for seed in claims["seeds"]}
    spread = deviation([score(result) for result in results.values()])
    text = (f"Mean of {count_seeds(results)}, sample deviation {spread:.4f} bits per byte; "
            f"{claims['val_loss']:.4f} ± {claims['val_loss_std']:.4f} nats per token. The score is that of "
            f"the artifact as read back from its file. At most {claims['bytes_total']:,} bytes, "
            f"{claims['bytes_code']:,} of them code; {claims['parameters']:,} parameters.")
    original = claims["val_bpb_original"]
    if original not in (None, claims["val_bpb"]):
        text += (f" The tokenizer changes the text: {claims['val_bpb']:.4f} bits per byte of the text as "
                 f"tokenized, which is the published convention, and {original:.4f} per byte of the original text.")
    rows = [[seed, f"{r['val_bpb']:.5f}", f"{r['val_bpb_before_export']:.5f}", f"{r['val_loss']:.5f}",
             f"{r['steps']:,}", f"{r['train_seconds']:.1f}", f"{r['eval_seconds']:.1f}",
             f"{r['wall_seconds']:.1f}", f"{r['artifact_bytes']:,}", f"{r['bytes_total']:,}"]
            for seed, r in results.items()]
    lines = [f"# {claims['name'].replace('_', ' ')}: {score(claims):.4f} bits per byte", "", text, "", claims["blurb"], "",
             *table("| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | "
                    "total, s | artifact, bytes | with code |", rows), "", "![curves of the seeds](curve.png)", "",
             f"## The best before it on this kind of machine ({claims['machine']})", claims["incumbent"] or "None."]
    if claims["against_incumbent"]:
        lines += ["", describe_test(claims["against_incumbent"])]
    lines += ["", f"This is {describe_rank(claims)}."]
    lines += ["", f"## Changes from {claims['base'] or 'the defaults'}"]
    if claims["significance"] and claims["base"] != claims["incumbent"]:
        lines += [describe_test(claims["significance"]), ""]
    if claims["base"]:
        lines += table("| | base | this record |", [[name, *values] for name, values in claims["changes"].items()])
        lines += ["", f"`train_gpt.py`: {'changed' if 'train_gpt.py' in claims['changes'] else 'unchanged'}."]
    else:
        lines += table("| | this record |", claims["settings"].items())
    environment = claims["environment"]
    lines += ["", "## Command", "Run it from the root of the repository. It trains the seed 1337 with this folder's script. "
              "If its data is missing, `python records/verify.py --rerun` prints the command that gets it.", "",
              f"    {claims['command']}", "",
              f"{claims['hardware']}; ranks: {environment['world_size']}, threads of each: {environment['threads']}; "
              f"Python {environment['python']}, PyTorch {environment['torch']}. "
              f"Division: {claims['division'] or 'none'}."]
    return "\n".join(lines) + "\n" + NOTES


# ---- A folder -------------------------------------------------------------------------------------------


def check_files(folder: Path, seeds: list[dict], largest: float, findings: Findings) -> None:
    """The folder must have its files and no others, among them the artifacts of less than `largest` bytes, as logged."""
    artifacts = {f"artifact_seed{seed['seed']}.int8.ptz": seed for seed in seeds}
    needed = {"README.md", "submission.json", "train_gpt.py", "curve.png"}
    needed |= {f"train_seed{seed['seed']}.{ending}" for seed in seeds for ending in ("log", "jsonl")}
    needed |= {name for name, seed in artifacts.items() if seed["artifact_bytes"] < largest}
    there = {path.name for path in folder.iterdir()} - {".DS_Store"}
    for name in sorted(needed - there):
        source = ": copy final_model.int8.ptz of that seed's run to it" if name in artifacts else ""
        findings.append(f"{name} is missing{source}")
    findings += [f"{name} does not belong in a record" for name in sorted(there - needed - artifacts.keys())]
    for name in sorted(there & artifacts.keys()):
        data = (folder / name).read_bytes()
        wanted = artifacts[name]["artifact_bytes"], artifacts[name]["artifact_sha256"]
        findings.check((len(data), sha256(data).hexdigest()) == wanted, f"{name} is not the artifact of the log")


def verify_record(folder: Path, again: bool = False) -> tuple[Findings, list[str]]:
    """Return the findings and lines to print about one record folder. `again` scores its artifacts."""
    findings = Findings()
    track = load_track(folder)
    findings.check(FOLDER_NAME.fullmatch(folder.name), f"{folder.name} must be DATE_Name (example: 2026-01-31_Wider)")
    submission = {**dict.fromkeys(AUTHORED, ""), **load_json(folder / "submission.json")}
    no_text = [key for key in AUTHORED if not isinstance(submission[key], str)]
    findings.check(not no_text, f"submission.json: {', '.join(no_text)} must be text in quotes")
    place = f"{folder.parent.name}/{folder.name}"
    findings.check(place_of(submission) == place, f"submission.json names {place_of(submission)}, not {place}")
    if findings:
        return findings, []
    computed, seeds = make_claims(folder, submission, findings)
    if not computed:
        return findings, []
    compare_claims(submission, computed, findings)
    check_rules(track, submission["division"], seeds, findings)
    has_artifacts = folder.name not in track.get("without_artifacts", [])
    largest = 0 if not has_artifacts else math.inf if again else SMALL_ARTIFACT
    check_files(folder, seeds, largest, findings)
    if not findings:
        text = (folder / "README.md").read_text(encoding="utf-8")
        findings.check(text.startswith(render(submission)), "README.md: the part above the notes does not follow "
                       "from submission.json; records/make.py --again rewrites it")
    spread = deviation([score(seed) for seed in seeds])
    notes = [f"{score(computed):.5f} ± {spread:.5f} bits per byte, {count_seeds(seeds)}, at "
             f"most {computed['bytes_total']:,} bytes"]
    tests = {submission["base"]: computed["significance"], computed["incumbent"]: computed["against_incumbent"]}
    notes += [f"against {other}: {describe_test(test)}" for other, test in tests.items() if test]
    if again and not has_artifacts:
        notes.append("not scored again: only the digests of its artifacts are kept")
    elif again and not findings:
        notes += rescore(folder, submission["division"], seeds, findings)
    return findings, notes


def report(folder: Path, again: bool = False) -> bool:
    """Print what is found about a record; return whether it is accepted."""
    place = ""
    try:
        findings, notes = verify_record(folder, again)
        if not findings:
            place = f"; {describe_rank(load_json(folder / 'submission.json'))}"
    except Exception as error:  # one folder must not hide the others
        findings, notes = Findings([f"{type(error).__name__}: {error}"]), []
    print(f"{folder.parent.name}/{folder.name}: {'refused' if findings else 'accepted' + place}")
    for line in (*notes, *(f"REFUSED: {line}" for line in findings)):
        print("   ", line)
    return not findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true", help="score the artifacts again; runs the folder's train_gpt.py")
    options = parser.parse_args()
    require_packages()
    folders = options.folders or sorted(path for path in (ROOT / "records").glob("track_*/*") if path.is_dir())
    accepted = [report(folder.resolve(), options.rerun) for folder in folders]
    sys.exit(0 if all(accepted) else 1)


if __name__ == "__main__":
    prepare_output()
    main()
