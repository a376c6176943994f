"""Write the leaderboard of all tracks into records/README.md, between its two marks.

    python records/leaderboard.py            writes it
    python records/leaderboard.py --check    ends with 1 if it is not what the record folders give
"""

import json
import sys
from pathlib import Path

RECORDS = Path(__file__).resolve().parent
BEGIN, END = "<!-- leaderboard -->\n", "<!-- end of leaderboard -->\n"


def tables(records: Path) -> str:
    """A table for each track and division that has records, the lowest mean first."""
    parts = []
    for path in sorted(records.glob("track_*/track.json")):
        track, folder = json.loads(path.read_text(encoding="utf-8")), path.parent
        said = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/submission.json"))]
        parts.append(f"### [{track['title']}]({folder.name})\n")
        ladders = sorted(place.name for place in folder.iterdir() if (place / "ladder.json").is_file())
        parts += [f"- [{name}]({folder.name}/{name})\n" for name in ladders]
        if not said and not ladders:
            parts.append("No record yet.\n")
        for division in sorted({s["division"] for s in said}):
            if division:
                parts.append(f"Division `{division}`:\n")
            parts.append("| | bits per byte | seeds | bytes | against | p | by | record |\n|---|---|---|---|---|---|---|---|")
            best = sorted((s for s in said if s["division"] == division), key=lambda s: s["val_bpb"])
            for place, s in enumerate(best, 1):
                test, name = s["significance"], f"{s['date']}_{s['name']}"
                bold = "**" if test and test["p"] < track.get("p", 0.01) else ""
                against = (f"{test['difference']:+.4f} {test['unit']}", f"{bold}{test['p']:.1g}{bold}") if test else ("", "")
                parts.append(f"| {place} | {s['val_bpb']:.4f} ± {s['val_bpb_std']:.4f} | {len(s['seeds'])} | "
                             f"{s['bytes_total']:,} | {against[0]} | {against[1]} | {s['author']} | "
                             f"[{name}]({folder.name}/{name}) |")
            parts[-1] += "\n"
    return "\n".join(parts)


def main() -> None:
    readme = RECORDS / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = f"{before}{BEGIN}\n{tables(RECORDS)}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if text != wanted:
            sys.exit("records/README.md is stale: python records/leaderboard.py writes it anew")
    else:
        readme.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
