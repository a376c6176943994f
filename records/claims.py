"""What a record claims: the numbers in submission.json, which the logs decide, and the README.md that shows them."""

import json
import math
import shlex
import statistics
from pathlib import Path

from common import compare_scores, deviation, score, table
from events import MAY_DIFFER_BETWEEN_SEEDS
from rules import Findings, earlier_records, load_track, other_seeds, place_of, read_folder

NOTES = "\n## Notes\n"
# What the author writes in submission.json; the logs decide the rest.
AUTHORED = ("name", "author", "date", "submitted", "track", "division", "blurb", "base", "hardware")
OF_SEEDS = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps", "train_seconds", "eval_seconds",
            "wall_seconds", "artifact_bytes", "artifact_sha256", "bytes_total")
GAP_NATS = 0.3  # honest records of a division differ by up to 0.2; one trained on validation text was 0.5 below


# ---- submission.json -----------------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, findings: Findings) -> tuple[dict, list[dict]]:
    """Return everything in submission.json that the logs decide, and the seeds. Findings say why there is nothing."""
    track = load_track(folder)
    division = authored["division"]
    seeds = read_folder(folder, division, findings)
    if findings:
        return {}, seeds
    base = other_seeds(folder, authored["base"], division, findings)
    machine = machine_of(seeds[0])
    kind = (folder.parent.name, division, machine)
    # The best before it is taken at its word: its own folder is checked for itself.
    best = next((other for other in earlier_records(folder, authored) if other["kind"] == kind), None)
    against = compare_scores(track, seeds, list(best["seed_results"].values())) if best else None
    first = seeds[0]
    ranks = first["world_size"]
    program = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {f"{key}_std": deviation([seed[key] for seed in seeds]) for key in ("val_loss", "val_bpb")}
    originals = [seed["val_bpb_original"] for seed in seeds]
    claims |= {
        "machine": machine, "gap": {"here": loss_gap(seeds), "incumbent": best["gap"]["here"] if best else None},
        "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
        "script_sha256": first["code_sha256"], "parameters": first["parameters"],
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in OF_SEEDS} for seed in seeds},
        "command": shlex.join([*program, "train_gpt.py", *(f"{name}={value}" for name, value in first["overrides"].items())]),
        "settings": first["overrides"], "changes": changes(base, first),
        "significance": compare_scores(track, seeds, base),
        "incumbent": place_of(best) if best else "", "against_incumbent": against,
        "is_best": not best or (against is not None and against["p"] < track.get("p", 0.01)),
        "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}
    return claims, seeds


def machine_of(seed: dict) -> str:
    """Return the kind of machine, on which alone records compete: the GPU, or the type of the CPU's products, which is bfloat16
    where it has units for it (AVX512-BF16, AMX)."""
    return seed.get("gpu") or f"{seed['settings']['DEVICE'].upper()}, {seed['settings']['DTYPE']}"


def loss_gap(seeds: list[dict]) -> float:
    """Return by how many nats the validation loss before export is above the training loss of the last tenth of the logged
    steps, as a mean over the seeds."""
    gaps = []
    for seed in seeds:
        losses = seed["losses"][-max(1, len(seed["losses"]) // 10):]
        nats = seed["val_bpb_before_export"] * math.log(2) * seed["val_bytes"] / seed["val_tokens"]
        gaps.append(nats - statistics.mean(losses))
    return statistics.mean(gaps)


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
    return (f"{test['difference']:+.5f} bits per byte; one-sided Welch t-test of {ours} against {theirs} seeds "
            f"for a difference of more than {test['margin']:g}: p = {test['p']:.2g}.")


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
    here, there = claims["gap"]["here"], claims["gap"]["incumbent"]
    lines += ["", f"This is {'' if claims['is_best'] else 'not '}a new best. The validation loss is {here:+.2f} nats from the "
              f"training loss{'' if there is None else f'; there, {there:+.2f}'}."]
    if there is not None and here < there - GAP_NATS:
        lines += ["**Warning: a validation loss this near to the training loss, or below it, can be that of a model which has "
                  "seen the validation text. Read the script.**"]
    lines += ["", f"## Changes from {claims['base'] or 'the defaults'}"]
    if claims["significance"] and claims["base"] != claims["incumbent"]:
        lines += [describe_test(claims["significance"]), ""]
    if claims["base"]:
        lines += table("| | base | this record |", [[name, *values] for name, values in claims["changes"].items()])
        lines += ["", f"`train_gpt.py`: {'changed' if 'train_gpt.py' in claims['changes'] else 'unchanged'}."]
    else:
        lines += table("| | this record |", claims["settings"].items())
    environment = claims["environment"]
    lines += ["", "## Command", "", f"    {claims['command']}", "",
              f"{claims['hardware']}; ranks: {environment['world_size']}, threads of each: {environment['threads']}; "
              f"Python {environment['python']}, PyTorch {environment['torch']}. "
              f"Division: {claims['division'] or 'none'}."]
    return "\n".join(lines) + "\n" + NOTES
