"""What a record claims: its track's rules, the numbers in submission.json, the comparison with other records, README.md."""

import difflib
import math
import re
import statistics
from pathlib import Path

from common import (FOLDER_NAME, Findings, compare_scores, deviation, earlier_records, is_close, load_json,
                    load_track, score, table)
from events import MAY_DIFFER_BETWEEN_SEEDS
from log_rules import LAST_MS, ROUNDING, read_folder

NOTES = "\n## Notes\n"
# What the author writes in submission.json; the logs decide the rest.
AUTHORED = ("name", "author", "github_id", "date", "submitted", "track", "division", "blurb", "base",
            "hardware", "command")
GAP_NATS = 0.3  # honest records of a division differ by up to 0.2; one trained on validation text was 0.5 below


# ---- The rules of a track ------------------------------------------------------------------------------


def check_request(track: dict, division: str, count: int, settings: dict, findings: Findings) -> None:
    """Apply the rules that can be checked before a run: division, number of seeds, settings and cap."""
    least = track.get("min_seeds", 1)
    findings.check(count >= least, f"the track asks for {least} seeds; there are {count}")
    divisions = track.get("divisions", {})
    findings.check(not divisions or division in divisions,
                   f"division {division!r} must be one of {', '.join(divisions)}")
    rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~"))]
    findings.check(not rooted, f"{', '.join(rooted)} must be relative to the repository")
    for key, values in track.get("settings", {}).items():
        findings.check(settings.get(key) in values, f"{key}={settings.get(key)!r} is not one of {values}")
    if limit := track.get("max_train_seconds"):
        cap = settings["MAX_WALLCLOCK_SECONDS"]
        findings.check(0 < cap <= limit,
                       f"MAX_WALLCLOCK_SECONDS={cap:g} must be more than 0 and at most {limit:g}")


def check_rules(track: dict, division: str, seeds: list[dict], findings: Findings) -> None:
    """Apply every rule of track.json: the limits of the track, its settings and the data of the division."""
    request = Findings()
    for seed in seeds:
        name = f"seed {seed['seed']}"
        reasons = Findings()
        check_request(track, division, len(seeds), seed["settings"], request)
        amounts = {"max_bytes": seed["bytes_total"], "max_eval_seconds": seed["eval_seconds"],
                   "max_world_size": seed["world_size"], "max_threads": seed["threads"] * seed["world_size"]}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            reasons.check(amount <= limit, f"{rule.removeprefix('max_')} is {amount:g}, more than {limit:g}")
        seconds = seed["train_seconds"]
        slack = seconds / max(1, seed["steps"]) + LAST_MS / 1000
        reasons.check(seconds <= track.get("max_train_seconds", math.inf) + slack,
                      f"{seconds:.1f} s of training pass the cap by more than the last step, {slack:.1f} s")
        machine = track.get("machine", "")
        reasons.check(machine in seed["machine"], f"nvidia-smi's output has no {machine}")
        if track.get("divisions"):
            check_division(seed, division, reasons)
        findings += [f"{name}: {reason}" for reason in reasons]
    findings += dict.fromkeys(request)  # each reason once


def check_division(seed: dict, division: str, findings: Findings) -> None:
    """The run must have scored the division's validation split, and trained on its training split if pinned."""
    findings.check(seed["table"], f"{seed['val_tokens']} validation tokens of {seed['val_bytes']} bytes are "
                   f"not those of the division {division!r} for "
                   f"TRAIN_SEQ_LEN={seed['settings']['TRAIN_SEQ_LEN']}")
    for split in ("train", "val"):
        pinned = seed["table"].get(f"{split}_shards_sha256")
        logged = [digest for file, digest in (seed["data_sha256"] or {}).items() if f"_{split}_" in file]
        if pinned and (seed["data_sha256"] is not None or "train_shards_sha256" in seed["table"]):
            findings.check(logged == pinned,
                           f"the {split} shards that the log names are not those of the division")


def other_seeds(folder: Path, other: str, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of another record of the same track and division, which must be valid; [] for ""."""
    if not other:
        return []
    place = folder.parent.parent / other
    track = folder.parent.name
    is_other = re.fullmatch(rf"{re.escape(track)}/{FOLDER_NAME.pattern}", other) and place != folder
    if not findings.check(is_other and (place / "submission.json").is_file(),
                          f"{other!r} is not another record of this track (example: {track}/2026-01-31_Name)"):
        return []
    theirs = load_json(place / "submission.json")["division"]
    findings.check(theirs == division, f"{other} is of the division {theirs!r}")
    broken = Findings()
    seeds = read_folder(place, division, broken)
    check_rules(load_track(place), division, seeds, broken)
    findings.check(not broken and seeds, f"{other} is refused itself: {'; '.join(broken)[:300]}")
    return seeds


# ---- Numbers -------------------------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, seeds: list[dict], findings: Findings) -> dict:
    """Return everything in submission.json that the logs decide."""
    track = load_track(folder)
    division = authored["division"]
    base = other_seeds(folder, authored["base"], division, findings)
    machine = machine_of(seeds[0])
    incumbent, rivals, their_gap = "", [], None
    for best in earlier_records(folder, authored, machine):
        refused = Findings()  # a record that is refused itself is passed over
        place = f"{folder.parent.name}/{best['date']}_{best['name']}"
        if "commit" in best:  # a line of history
            counts = {key: best[key] for key in ("val_tokens", "val_bytes")}
            rivals = [{**counts, **seed} for seed in best["seeds"].values()]
            their_gap = best["gap"]
        else:
            rivals = base if place == authored["base"] else other_seeds(folder, place, division, refused)
            their_gap = None if refused else loss_gap(rivals)
        if not refused:
            incumbent = place
            break
    against = compare_scores(track, seeds, rivals)
    first = seeds[0]
    per_seed = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps", "train_seconds",
                "eval_seconds", "wall_seconds", "artifact_bytes", "artifact_sha256", "bytes_total", "rates")
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {f"{key}_std": deviation([seed[key] for seed in seeds]) for key in ("val_loss", "val_bpb")}
    originals = [seed["val_bpb_original"] for seed in seeds]
    return {
        **claims, "machine": machine, "gap": {"here": loss_gap(seeds), "incumbent": their_gap},
        "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
        "script_sha256": first["code_sha256"], "parameters": first["parameters"],
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in per_seed if key in seed} for seed in seeds},
        "settings": first["overrides"], "changes": changes(base, first),
        "significance": compare_scores(track, seeds, base),
        "incumbent": incumbent, "against_incumbent": against,
        "is_best": not incumbent or (against is not None and against["p"] < track.get("p", 0.01)),
        "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}


def machine_of(seed: dict) -> str:
    """Return the kind of machine, on which alone records compete: the GPU, or the type of the CPU's products, which is bfloat16
    where it has units for it (AVX512-BF16, AMX)."""
    return seed.get("gpu") or f"CPU, {seed['settings']['DTYPE']}"


def loss_gap(seeds: list[dict]) -> float:
    """Return by how many nats the validation loss before export is above the training loss of the last tenth of the logged
    steps, as a mean over the seeds."""
    gaps = []
    for seed in seeds:
        if losses := seed["losses"][-max(1, len(seed["losses"]) // 10):]:  # none, if resumed at the last step
            nats = seed["val_bpb_before_export"] * math.log(2) * seed["val_bytes"] / seed["val_tokens"]
            gaps.append(nats - statistics.mean(losses))
    return statistics.mean(gaps) if gaps else 0.0


def changes(base: list[dict], seed: dict) -> dict[str, list]:
    """Return the settings, and the script's digest, that differ from the base: name, old value, new value."""
    if not base:
        return {}
    old = base[0]["settings"]
    new = seed["settings"]
    names = sorted((old.keys() | new.keys()) - MAY_DIFFER_BETWEEN_SEEDS)
    result = {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    if base[0]["code_sha256"] != seed["code_sha256"]:
        result["train_gpt.py"] = [base[0]["code_sha256"][:12], seed["code_sha256"][:12]]
    return result


def leaves(value: object, place: str) -> dict[str, object]:
    """Return the texts and numbers of nested claims by their places."""
    if not isinstance(value, dict) or not value:
        return {place: value}
    return {where: leaf for key, item in value.items()
            for where, leaf in leaves(item, f"{place}: {key}").items()}


def compare_claims(submission: dict, computed: dict, findings: Findings) -> None:
    """Everything in submission.json that its author did not write must be what the logs give."""
    claims = {key: value for key, value in submission.items() if key not in AUTHORED}
    claimed = leaves(claims, "submission.json")
    wanted = leaves(computed, "submission.json")
    for place in sorted(claimed.keys() | wanted.keys()):
        claim, number = claimed.get(place, "nothing"), wanted.get(place, "nothing")
        are_numbers = isinstance(number, float) and isinstance(claim, int | float)
        equal = is_close(claim, number, ROUNDING) if are_numbers else claim == number
        findings.check(equal, f"{place} is {claim!r}, but the logs give {number!r}")


def describe_test(test: dict) -> str:
    """Return a difference and its test in words."""
    ours, theirs = test["n"]
    return (f"{test['difference']:+.5f} bits per byte; one-sided Welch t-test of {ours} against {theirs} seeds "
            f"for a difference of more than {test['margin']:g}: p = {test['p']:.2g}.")


def count_seeds(seeds) -> str:
    """Return the number of seeds in words."""
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def render(claims: dict) -> str:
    """Return README.md up to its notes, from submission.json."""
    results = {seed: claims["seed_results"][str(seed)] for seed in claims["seeds"]}
    original = claims["val_bpb_original"]
    lines = [f"# {claims['name'].replace('_', ' ')}: {score(claims):.4f} bits per byte", ""]
    spread = deviation([score(result) for result in results.values()])
    text = (f"Mean of {count_seeds(results)}, sample deviation {spread:.4f} bits per byte; "
            f"{claims['val_loss']:.4f} ± {claims['val_loss_std']:.4f} nats per token. The score is that of "
            f"the artifact as read back from its file. At most {claims['bytes_total']:,} bytes, "
            f"{claims['bytes_code']:,} of them code; {claims['parameters']:,} parameters.")
    if original not in (None, claims["val_bpb"]):
        text += (f" The tokenizer changes the text: {claims['val_bpb']:.4f} bits per byte of the text as "
                 f"tokenized, which is the published convention, and {original:.4f} per byte of the original "
                 "text.")
    rows = [[seed, f"{r['val_bpb']:.5f}", f"{r['val_bpb_before_export']:.5f}", f"{r['val_loss']:.5f}",
             f"{r['steps']:,}", f"{r['train_seconds']:.1f}", f"{r['eval_seconds']:.1f}",
             f"{r['wall_seconds']:.1f}", f"{r['artifact_bytes']:,}", f"{r['bytes_total']:,}"]
            for seed, r in results.items()]
    lines += [text, "", claims["blurb"], "",
              *table("| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | "
                     "total, s | artifact, bytes | with code |", rows)]
    rows = [[seed, *r["rates"].values()] for seed, r in results.items() if r.get("rates")]
    lines += ["", "The machine, measured just before each seed:", "", *table(
        "| seed | bfloat16, TFLOP/s | float32, TFLOP/s | copy, GB/s |", rows)] if rows else []
    lines += ["", "![curves of the seeds](curve.png)", ""]
    lines += [f"## The best before it on this kind of machine ({claims['machine']})", claims["incumbent"] or "None."]
    lines += ["", describe_test(claims["against_incumbent"])] if claims["against_incumbent"] else []
    lines += ["", "This is a new best." if claims["is_best"] else "This is not a new best."]
    here, other = claims["gap"]["here"], claims["gap"]["incumbent"]
    there = f"; there, {other:+.2f}." if other is not None else "."
    lines += [f"The validation loss is {here:+.2f} nats from the training loss{there}"]
    if other is not None and here < other - GAP_NATS:
        lines += ["**Warning: a validation loss this near to the training loss, or below it, can be that of a model which has "
                  "seen the validation text. Read the script.**"]
    lines += ["", f"## Changes from {claims['base'] or 'the defaults'}"]
    is_repeated = claims["base"] == claims["incumbent"]
    lines += [describe_test(claims["significance"]), ""] if claims["significance"] and not is_repeated else [""]
    if claims["base"]:
        rows = [[name, *values] for name, values in claims["changes"].items()]
        lines += table("| | base | this record |", rows)
        is_changed = "train_gpt.py" in claims["changes"]
        lines += ["", f"`train_gpt.py`: {'changed, see `script.diff`' if is_changed else 'unchanged'}."]
    else:
        lines += table("| | this record |", claims["settings"].items())
    environment = claims["environment"]
    processes = f"{environment['world_size']} process{'es' if environment['world_size'] > 1 else ''}"
    lines += ["", "## Command", "", f"    {claims['command']}", "", "## Environment",
              f"{claims['hardware']}; {processes}, {environment['threads']} threads each; "
              f"Python {environment['python']}, PyTorch {environment['torch']}. "
              f"Division: {claims['division'] or 'none'}."]
    return "\n".join(lines) + "\n" + NOTES


def script_difference(folder: Path, submission: dict) -> str:
    """Return the unified diff from the train_gpt.py of the base, or else of the incumbent, to the folder's; "" if there is
    none here, since the incumbent's may be in git alone."""
    base = submission["base"] or submission["incumbent"]
    if not base or not (folder.parent.parent / base).is_dir():
        return ""
    scripts = (folder.parent.parent / base / "train_gpt.py", folder / "train_gpt.py")
    before, after = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in scripts)
    return "".join(difflib.unified_diff(before, after, f"{base}/train_gpt.py", "train_gpt.py"))
