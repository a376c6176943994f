"""Finished runs as evidence: read them from logs, pair them by seed, and say how large an effect is and how sure that is.

The effect of a change is the mean over seeds of bits per byte with it minus without it, of the compressed models. `limits_of`
gives an interval that holds as pairs are added.
"""

import argparse
import ast
import itertools
import json
import math
import os
import statistics
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events

# Settings that do not change a result. The digests of the data stand for the paths.
NOT_CONTENT = MAY_DIFFER_BETWEEN_SEEDS | {"DATA_PATH", "TOKENIZER_PATH", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY", "VAL_BATCH_SIZE"}
LENGTH = ("ITERATIONS", "MAX_WALLCLOCK_SECONDS")
SAME = ("data", "torch", "machine", "ranks", "threads", *LENGTH)  # in the runs of a pair
ERROR = 0.05  # of each end of an interval, over all looks together
FILL = 4  # degrees of freedom of the spread that earlier pairs may add up to
MANY = 16  # looks of a long comparison, by which needed pairs are counted
DRAWS = 100_000
MOST_DIFFERENCES = 3  # settings in which two runs of a comparison differ


class Run(NamedTuple):
    """A finished run. Scores are bits per byte."""
    log: Path
    content: dict  # all that makes the result, but the seed
    seed: int
    text: str  # the name of the data's folder
    bpb: float  # of the compressed model
    trained_bpb: float  # of the model before that
    artifact_bytes: int  # with the script
    step_ms: float
    began: float  # in seconds, as the time of a file
    curve: dict  # bits per byte by step
    checked: str | None = None  # why its score is wrong, "" if it is right, None if ablate.py has not checked it


class Effect(NamedTuple):
    """Mean of the pairs' differences, the ends of its interval, the pairs, and the spread of a pair that is behind them."""
    mean: float
    low: float
    high: float
    pairs: int
    spread: float


# ---- Runs ----------------------------------------------------------------------------------------------


@cache
def digest_code(source: str) -> str:
    """Return a digest of a script without its comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def content_of(start: dict, source: str) -> dict:
    """Return what makes a run's result, but its seed, from its "config" event and its script."""
    data = json.dumps([start["data_sha256"], start["val_tokens"], start["val_bytes"]], sort_keys=True)
    settings = {name: value for name, value in start["config"].items() if name not in NOT_CONTENT}
    is_timed = bool(settings["MAX_WALLCLOCK_SECONDS"])
    return {"script": digest_code(source), "data": sha256(data.encode()).hexdigest()[:12],
            "torch": start["torch"].partition("+")[0], "machine": start["gpu"] or f"CPU, {settings['DTYPE']}",
            "ranks": start["world_size"], "threads": start["threads"] if is_timed else "any", **settings}


def read_run(log: Path) -> Run | None:
    """Return the run of a .jsonl log; None if it has not ended, was resumed, or has no script beside it."""
    try:
        files = [path.stat() for path in (log, log.with_suffix(".txt"))]
    except OSError:
        return None
    return read_run_as_of(log, tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files))


@cache
def read_run_as_of(log: Path, _: tuple) -> Run | None:
    """Return what `read_run` returns, while inode, size and time of its two files, the second argument, stay what they are."""
    try:
        events = read_events(log)
        latest = {event["event"]: event for event in events}
        if "final" not in latest or "resume" in latest or None in (latest["final"]["val_bpb"], latest["val"]["val_bpb"]):
            return None
        source = log.with_suffix(".txt").read_text(encoding="utf-8").partition(f"\n{RULE}")[0]
        start, export = events[0], latest["export"]
        content = content_of(start, source)
        key_of(content)  # whose values are numbers and text
        train = [event for event in events if event["event"] == "train" and event["step"] >= 10]  # the first ones are slow
        paces = [(later["train_time_ms"] - event["train_time_ms"]) / (later["step"] - event["step"])
                 for event, later in itertools.pairwise(train)]
        curve = {event["step"]: event["val_bpb"] for event in events if event["event"] == "val"}
        return Run(log, content, start["config"]["SEED"], Path(start["config"]["DATA_PATH"]).name,
                   latest["final"]["val_bpb"], latest["val"]["val_bpb"], export["artifact_bytes"] + export["code_bytes"],
                   statistics.median(paces) if paces else latest["val"]["step_avg_ms"],
                   log.stat().st_mtime - latest["final"]["elapsed_s"], curve, latest.get("checked", {}).get("reason"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SyntaxError):  # no log of this trainer
        return None


def note_check(log: Path, reason: str) -> None:
    """Add to a log what a check of its score found. The file's time, which tells when the run began, stays."""
    before = log.stat()
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "checked", "reason": reason}) + "\n")
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_runs(folders) -> list[Run]:
    """Return the finished runs of all logs in these folders, the one that began first in front."""
    logs = sorted({log for folder in folders for log in Path(folder).glob("*.jsonl")})
    return sorted(filter(None, map(read_run, logs)), key=lambda run: run.began)


def key_of(content: dict) -> frozenset:
    """Return a content as a key of a dict. Raises TypeError for a value that is none."""
    return frozenset(content.items())


def group_runs(runs: list[Run]) -> list[list[Run]]:
    """Return the runs by content, one of each seed."""
    groups: dict[frozenset, dict[int, Run]] = {}
    for run in runs:
        groups.setdefault(key_of(run.content), {}).setdefault(run.seed, run)
    return [[*members.values()] for members in groups.values()]


def differing(one: dict, other: dict) -> list[str]:
    """Return the names of what differs in two contents. A setting that only one of their scripts has does not count."""
    return [name for name in one.keys() & other.keys() if one[name] != other[name]]


def pairs_of_seeds(first: list[Run], second: list[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of two groups in pairs of one seed."""
    by_seed = {run.seed: run for run in first}
    return [(by_seed[run.seed], run) for run in second if run.seed in by_seed]


def compare_all(runs: list[Run]) -> list[list[tuple[Run, Run]]]:
    """Return the pairs of each comparison that the runs hold: of each group with the earlier one that is most like it. Wrong
    scores are left out."""
    alike: dict[tuple, list[int]] = {}
    groups = group_runs([run for run in runs if not run.checked])
    for number, group in enumerate(groups):
        alike.setdefault(tuple(group[0].content[name] for name in SAME), []).append(number)
    found = {}
    for numbers in alike.values():
        members = [groups[number] for number in numbers]
        for later, earlier in enumerate(find_partners(members)):
            if earlier is not None:
                found[numbers[later]] = pairs_of_seeds(members[earlier], members[later])
    return [found[number] for number in sorted(found)]


def find_partners(groups: list[list[Run]]) -> list[int | None]:
    """Return for each group the place of the earlier one with which it is compared: of those that share a seed with it, the one
    that differs in the fewest settings, and among these in the most seeds; None if none is like it. All are alike in SAME."""
    contents = [group[0].content for group in groups]
    names = sorted({name for content in contents for name in content})
    values = np.stack([numbered([content.get(name) for content in contents]) for name in names], axis=1)  # (groups, names)
    values = values[:, (values != values[0]).any(0)]  # most settings are equal in all
    seeds = sorted({run.seed for group in groups for run in group})
    has_seed = np.array([np.isin(seeds, [run.seed for run in group]) for group in groups], dtype=np.float32)  # (groups, seeds)
    partners: list[int | None] = []
    for later, (row, own) in enumerate(zip(values, has_seed)):
        earlier = values[:later]
        counts = ((earlier != row) & (earlier >= 0) & (row >= 0)).sum(1)
        shared = has_seed[:later] @ own
        places = np.flatnonzero((shared > 0) & (counts <= MOST_DIFFERENCES))
        order = np.lexsort((-shared[places], counts[places]))  # the first of equals stays the first
        partners.append(int(places[order[0]]) if len(places) else None)
    return partners


def numbered(values: list) -> np.ndarray:
    """Return a number for each value, equal for equal ones, and -1 for None."""
    numbers: dict = {None: -1}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


# ---- Statistics ----------------------------------------------------------------------------------------


def is_like(content: dict, other: dict) -> bool:
    """Whether runs are of one text and of lengths within a factor of two, so that their pairs have a like spread."""
    lengths = [(content[name], other[name]) for name in LENGTH]
    return content["data"] == other["data"] and all(2 * min(two) >= max(two) for two in lengths)


def differences_of(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Return the second runs' bits per byte minus the first ones'."""
    return [second.bpb - first.bpb for first, second in pairs]


@cache
def median_of_chi2(freedom: int) -> float:
    """Return the median of the chi-squared distribution."""
    from scipy import special  # in a tenth of the time that scipy.stats takes to import
    return float(special.chdtri(freedom, 0.5))


class Ledger:
    """The comparisons that logs hold, and what each tells of the spread of a pair, computed once."""
    def __init__(self, comparisons: list[list[tuple[Run, Run]]]):
        self.contents, self.pairs, self.variances = [], [], []  # of those that tell something
        self.by_fact: dict = {}  # places of comparisons by the content of a side, and by a pair's difference
        self.like: dict[tuple, list[int]] = {}  # the places of those of one text and a length within a factor of two
        for pairs in comparisons:
            differences = differences_of(pairs)
            variance = statistics.variance(differences) if len(pairs) > 1 else 0.0
            if variance:  # else nothing was changed
                for fact in (*(key_of(run.content) for run in pairs[0]), *differences):
                    self.by_fact.setdefault(fact, set()).add(len(self.pairs))
                self.contents.append(pairs[0][1].content)
                self.pairs.append(len(pairs))
                self.variances.append(variance * (len(pairs) - 1) / median_of_chi2(len(pairs) - 1))

    def spread_of_others(self, pairs: list[tuple[Run, Run]]) -> tuple[float, int, Counter]:
        """Return the spread of a pair from comparisons like that of `pairs`, which is not among them, its degrees of freedom, and
        the number of their pairs by kind of machine. The spread is a median, so that one run that diverged does not matter; a
        median of variances is about half as sure as their mean."""
        content = pairs[0][1].content
        kind = tuple(content[name] for name in ("data", *LENGTH))
        if kind not in self.like:
            self.like[kind] = [place for place, other in enumerate(self.contents) if is_like(other, content)]
        facts = (key_of(content), *differences_of(pairs))  # by a difference: it was trained again, equal bit for bit
        same = set().union(*(self.by_fact.get(fact, ()) for fact in facts))
        places = [place for place in self.like[kind] if place not in same]
        machines = Counter()
        for place in places:
            machines[self.contents[place]["machine"]] += self.pairs[place]
        variances = [self.variances[place] for place in places]
        freedom = sum(self.pairs[place] - 1 for place in places) // 2
        return math.sqrt(statistics.median(variances or [0])), freedom, machines


def added_freedom(freedom: int, pairs):
    """Return how many of the earlier spread's degrees of freedom a number of pairs still needs, to have `freedom` in all."""
    return np.maximum(0, freedom - (pairs - 1))


@cache
def bounds(most: int, freedom: int) -> dict[int, float]:
    """Return, for 2 to `most` pairs, the bound of |t| within which a mean without effect stays at all looks together, on each
    side with a probability of 1 - ERROR. t has the moderated variance of Smyth (2004, doi:10.2202/1544-6115.1027); `freedom`
    is that of the earlier spread. The bounds are of a simulation in which the true spread of a pair is half the earlier one,
    equal to it, or twice; the worst counts. The error that a look may use grows as the square of its pairs."""
    from scipy import special
    looks = np.arange(2, most + 1)
    degrees = added_freedom(freedom, looks) + looks - 1
    share = (looks / most) ** 2
    random = np.random.default_rng(0)
    z = random.standard_normal((DRAWS, most))
    counts = np.arange(1, most + 1)
    means = z.cumsum(1) / counts
    squares = (np.square(z).cumsum(1) - counts * means**2)[:, 1:]  # of deviations, (DRAWS, looks)
    earlier = random.chisquare(freedom, (DRAWS, 1)) / freedom if freedom else np.zeros((DRAWS, 1))
    worst = 1.0
    for ratio in (0.5, 1, 2):
        variances = (added_freedom(freedom, looks) * earlier / ratio**2 + squares) / degrees
        t = means[:, 1:] / np.sqrt(variances / looks)
        least = (special.stdtr(degrees, -t) / share).min(1)  # the probabilities of larger ones
        worst = min(worst, np.quantile(least, ERROR))
    return dict(zip(looks.tolist(), (-special.stdtrit(degrees, worst * share)).tolist()))


def limits_of(differences: list[float], most: int, earlier: float = 0.0, freedom: int = 0) -> Effect:
    """Return the effect of pairs that came one by one, of at most `most`. The interval holds at all looks together, each of its
    ends with a probability of 1 - ERROR. `earlier` is the spread of earlier pairs, with its degrees of freedom."""
    pairs, mean = len(differences), statistics.mean(differences)
    if pairs < 2:
        return Effect(mean, -math.inf, math.inf, pairs, earlier)
    freedom = min(FILL, freedom)
    added = int(added_freedom(freedom, pairs))
    total = added * earlier**2 + (pairs - 1) * statistics.variance(differences)
    spread = math.sqrt(total / (added + pairs - 1))
    table = bounds(max(most, 2), freedom)
    reach = table[min(pairs, max(table))] * spread / math.sqrt(pairs)
    return Effect(mean, mean - reach, mean + reach, pairs, spread)


def judge(effect: Effect, least: float) -> str:
    """Return whether a change is "better", brings "no gain" of `least` bits per byte or more, or is "undecided"."""
    if effect.low > -least:
        return "no gain"
    return "better" if effect.high < 0 else "undecided"


def pairs_needed(effect: Effect, most: int, least: float) -> int:
    """Return how many pairs would show an effect of `least` four times in five, if their spread stays what it is."""
    table = bounds(max(most, MANY), 0)
    power = statistics.NormalDist().inv_cdf(0.8)
    for pairs in range(2, 1000):
        bound = table.get(pairs, table[max(table)])
        if (bound + power) * effect.spread <= least * math.sqrt(pairs):
            return pairs
    return 1000


if __name__ == "__main__":  # for those who look what it is
    argparse.ArgumentParser(description=f"{__doc__} Other scripts import this file.").parse_args()
