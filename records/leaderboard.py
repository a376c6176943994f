"""Write the leaderboard of all tracks into records/README.md, between its markers.

    python records/leaderboard.py            write it
    python records/leaderboard.py --check    exit with 1 if it is not what the record folders give
"""

import argparse
import sys
from pathlib import Path

from common import ROOT, deviation, load_json, order_of, read_history, score, table

BEGIN = "<!-- leaderboard -->\n"
END = "<!-- end of leaderboard -->\n"


def record_row(place: int, submission: dict, folder: str) -> list[str]:
    """Return the cells of one record, or of a line of history."""
    results = submission.get("seed_results") or submission["seeds"]
    original = [score(result) for result in results.values()]
    test = submission["against_incumbent"]
    against = f"{test['difference']:+.4f}, p = {test['p']:.1g}" if test else ""
    name = f"{submission['date']}_{submission['name']}"
    link = f"{name}, in git at {submission['commit']}" if "commit" in submission else f"[{name}]({folder}/{name})"
    return [str(place), f"{score(submission):.4f} ± {deviation(original):.4f}", str(len(results)),
            f"{submission['bytes_total']:,}", f"{submission['hardware']} ({submission['machine'].removeprefix('CPU, ')})",
            "yes" if submission["is_best"] else "no", against, submission["author"], link]


def track_table(folder: Path) -> list[str]:
    """Return the lines about one track: its ladders, and a table for each division that has records, best first."""
    track = load_json(folder / "track.json")
    submissions = [load_json(path) for path in folder.glob("*/submission.json")]
    submissions += [line for line in read_history(folder.parent) if line["track"] == folder.name]
    ladders = sorted(path.parent.name for path in folder.glob("*/ladder.json"))
    lines = [f"### [{track['title']}]({folder.name})", ""]
    lines += [f"- [{name}]({folder.name}/{name})" for name in ladders]
    lines += ["No record yet."] if not submissions and not ladders else []
    used = {submission["division"] for submission in submissions}
    for division in sorted(used, key=lambda name: (name not in track.get("divisions", {}), name)):  # those of old data last
        members = [submission for submission in submissions if submission["division"] == division]
        members.sort(key=lambda submission: (score(submission), order_of(submission)))
        lines += [f"Division `{division}`:", ""] if division else []
        rows = [record_row(place, submission, folder.name) for place, submission in enumerate(members, 1)]
        lines += [*table("| | bits per byte | seeds | bytes | machine | best at its time | against the best before it | by | "
                         "record |", rows), ""]
    return lines if lines[-1] == "" else [*lines, ""]


def leaderboard(records: Path) -> str:
    """Return the tables of all tracks."""
    paths = sorted(records.glob("track_*/track.json"))
    return "\n".join(line for path in paths for line in track_table(path.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    options = parser.parse_args()
    readme = ROOT / "records" / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = f"{before}{BEGIN}\n{leaderboard(readme.parent)}\n{END}{after}"
    if not options.check:
        readme.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        sys.exit("records/README.md is stale: python records/leaderboard.py rewrites it")


if __name__ == "__main__":
    main()
