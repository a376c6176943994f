"""Kills runs, damages files and fills disks, many times over, and prints the table that logs/README.md quotes.

    python records/lab/faults.py [--kills 50 20 10] [--mutations 2000]

Every killed run is resumed and has to end with the artifact of the uninterrupted one; every damaged file has to be
refused, or to be read as what it was. The status is 1 if anything was lost. It takes about 20 minutes on 2 cores.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"

import sentencepiece  # noqa: E402
import torch  # noqa: E402
from tiny import (REPOSITORY, make_shards, make_trainer, one_process, read_checkpoint, silent_log, tiny_arguments, tiny_config,  # noqa: E402
                  train_gpt, write_shard)

PHASES = [("Serialized model", "export"), ("step:", "training"), ("warmup_step", "warm-up"), ("", "start")]


def start(folder: Path, data: Path, ranks: int, **changes) -> subprocess.Popen:
    """Starts a small run with checkpoints."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    arguments = tiny_arguments(data, RUN_ID="run", ITERATIONS=60, CHECKPOINT_EVERY=4, VAL_LOSS_EVERY=7, RESUME="auto",
                               LOADER="shuffled", **changes)
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen([*launcher, str(REPOSITORY / "train_gpt.py"), *arguments], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def children(pid: int) -> list[int]:
    """The processes that a process has started, in the order of their numbers: torchrun's ranks."""
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return sorted(map(int, listed.split()))


def finish(process: subprocess.Popen) -> str:
    """The output of a run that has to succeed."""
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        sys.exit(f"a run that nobody killed failed:\n{output}")
    return output


def artifact(folder: Path) -> bytes:
    return (folder / "final_model.int8.ptz").read_bytes() + (folder / "final_model.pt").read_bytes()


def kill_at_random(folder: Path, data: Path, ranks: int, count: int, random) -> tuple[str, int]:
    """SIGKILL to all processes of a run at `count` random moments, up to 0.1 s after a random line of the log from the
    first validation on; each is resumed once."""
    lines = finish(start(folder / "whole", data, ranks)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step:0/"))
    wanted = artifact(folder / "whole")
    phases, lost, resumed_from = Counter(), 0, Counter()
    for i in range(count):
        place = folder / f"killed_{i}"
        process, begun, seen = start(place, data, ranks), False, []
        left = int(random.integers(len(lines) - first))
        while left and (line := process.stdout.readline()):
            seen.append(line)
            begun = begun or line.startswith("step:0/")
            left -= begun
        time.sleep(random.uniform(0, 0.1))
        for pid in (*children(process.pid), process.pid):  # torchrun's workers are in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output = "".join(seen) + process.communicate()[0]
        half = list(place.rglob("*.tmp"))
        last = output.strip().splitlines()[-1:] or [""]
        phase = "ended before" if process.returncode == 0 else next(
            name for sign, name in PHASES if sign in output) + (", of it writing a file" if half else "") + (
                ", of it validation" if "val_loss" in last[0] and "roundtrip" not in last[0] else "")
        phases[phase] += 1
        again = finish(start(place, data, ranks))
        resumed_from["a checkpoint" if "resumed: step:" in again else "the start"] += 1
        lost += artifact(place) != wanted
    return f"{dict(phases)}, resumed from {dict(resumed_from)}", lost


def mutate(random, content: bytes) -> bytes:
    """A damaged copy: bytes or bits changed, cut, longer, or with parts in other places."""
    data, kind = bytearray(content), random.integers(5)
    if kind == 0:
        for at in random.integers(0, len(data), int(random.integers(1, 20))):
            data[at] = int(random.integers(256))
    elif kind == 1:
        data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
    elif kind == 2:
        del data[int(random.integers(len(data))):]
    elif kind == 3:
        data += random.bytes(int(random.integers(1, 1000)))
    else:
        a, b = sorted(random.integers(0, len(data), 2).tolist())
        data = data[b:] + data[a:b] + data[:a]
    return bytes(data)


def mutations(folder: Path, count: int, random) -> tuple[str, int]:
    """Damaged artifacts, state dicts, checkpoints, shards and tokenizers, each read in a process that may crash or hang."""
    config = tiny_config(int8_keep_float_max_numel=100, data_path=str(folder), train_seq_len=8)
    model = train_gpt.GPT(config)
    content = io.BytesIO()
    torch.save(train_gpt.quantize(model.state_dict(), config)[0], content)
    (folder / "good.ptz").write_bytes(zlib.compress(content.getvalue(), 9))
    torch.save(model.state_dict(), folder / "good.pt")
    saved = next((folder.parent / "one" / "whole" / "checkpoints").glob("*.pt"))
    shard = next(folder.parent.rglob("tiny_train_000000.bin"))

    text = b"some words of a text and some more words of it " * 99
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.decode().split(" of ")), model_prefix=str(folder / "good"), vocab_size=300,
        model_type="bpe", byte_fallback=True, bos_id=1, eos_id=2, pad_id=0, unk_id=3, minloglevel=2)
    (folder / "good.vocab").unlink()
    model_config = train_gpt.replace(config, data_path=str(folder / "text"), vocab_size=300, train_seq_len=1,
                                     tokenizer_path=str(folder / "bad.model"))
    ids = sentencepiece.SentencePieceProcessor(model_file=str(folder / "good.model")).encode(text.decode())
    (folder / "text").mkdir()
    write_shard(folder / "text" / "t_val_000000.bin", [1, *ids])
    (folder / "text" / "manifest.json").write_text(json.dumps({
        "made_by": "data/prepare.py", "tokenizer": {
            "sha256": hashlib.sha256((folder / "good.model").read_bytes()).hexdigest(), "changes_text": False},
        "splits": {"val": {"tokens": len(ids) + 1, "bytes": len(text) - 1, "decoded_bytes": len(text) - 1}}}))

    def read(kind: str, path: Path) -> bytes:
        if kind == "tokenizer":
            return repr(train_gpt.Validation(model_config, one_process()).bytes).encode()
        if kind == "checkpoint":
            state = read_checkpoint(path)
            return b"".join(t.numpy().tobytes() for t in state["model"].values())
        if kind == "shard":
            return train_gpt.TokenLoader(config, one_process()).read(0, 8999).tobytes()
        train_gpt.load_weights(model, path)
        return b"".join(t.numpy().tobytes() for t in model.state_dict().values())

    kinds = {"artifact": folder / "good.ptz", "state dict": folder / "good.pt", "checkpoint": saved, "shard": shard,
             "tokenizer": folder / "good.model"}
    outcomes, wrong = Counter(), 0
    for i in range(count):
        kind = list(kinds)[i % len(kinds)]
        good = kinds[kind].read_bytes()
        damaged = mutate(random, good)
        path = folder / {"checkpoint": saved.name, "shard": "f_train_000000.bin", "tokenizer": "bad.model"}.get(kind, "bad")
        path.unlink(missing_ok=True)
        path.write_bytes(good)
        wanted = read(kind, path)
        path.unlink()
        path.write_bytes(damaged)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there about damage
            try:
                same = read(kind, path) == (damaged[1024:1024 + 17998] if kind == "shard" else wanted)
                os._exit(0 if same else 3)
            except ValueError as error:
                os._exit(1 if str(path) in str(error) or "DATA_PATH" in str(error) else 4)
            except BaseException:
                os._exit(5)
        _, status = os.waitpid(child, 0)
        name = {0: "read as it was", 1 << 8: "error", 3 << 8: "WRONG", 4 << 8: "ERROR WITHOUT THE NAME", 5 << 8: "TRACEBACK",
                signal.SIGALRM: "HANG"}.get(status, "CRASH")
        outcomes[f"{kind}: {name}"] += 1
        wrong += name.isupper()
        path.unlink()
    return str(dict(sorted(outcomes.items()))), wrong


def full_disk(folder: Path, data: Path) -> tuple[str, int]:
    """A run whose folder is a tmpfs that becomes full; then the disk is emptied and the run goes on."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", folder], check=False, capture_output=True).returncode:
        return "skipped: mounting a tmpfs is not allowed here", 0
    try:
        wanted = artifact(folder.parent / "one" / "whole")
        process = start(folder, data, 1, KEEP_CHECKPOINTS=3)
        filler = None
        for line in process.stdout:
            if line.startswith("step:30/") and filler is None:
                filler = folder / "filler"
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
        process.wait()
        kept = len(list((folder / "checkpoints").glob("*.pt")))
        filler.unlink()
        output = finish(start(folder, data, 1, KEEP_CHECKPOINTS=3))
        return (f"status {process.returncode} with {kept} checkpoints kept, then resumed",
                int(artifact(folder) != wanted or "resumed: step:" not in output or not kept))
    finally:
        subprocess.run(["umount", folder], check=False)


def dead_rank(folder: Path, data: Path) -> tuple[str, int]:
    """One rank of four is killed."""
    process = start(folder, data, 4)
    lines, killed = [], None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step:10/") and killed is None:
            killed = (children(process.pid)[2], time.monotonic())
            os.kill(killed[0], signal.SIGKILL)
    process.wait()
    seconds, output = time.monotonic() - killed[1], "".join(lines)
    named = f"(pid: {killed[0]})" in output and "rank      : 2" in output and "SIGKILL" in output
    return f"all ended {seconds:.1f} s later, rank 2 was {'' if named else 'not '}named", int(seconds > 60 or not named)


def restarts(folder: Path, data: Path) -> tuple[str, int]:
    """torchrun --max-restarts takes a run over that has lost a rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
    folder.mkdir()
    arguments = tiny_arguments(data, RUN_ID="run", ITERATIONS=60, CHECKPOINT_EVERY=4, VAL_LOSS_EVERY=7, RESUME="auto",
                               LOADER="shuffled")
    process = subprocess.Popen([*launcher, str(REPOSITORY / "train_gpt.py"), *arguments], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines, killed = [], False
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step:20/") and not killed:
            os.kill(children(process.pid)[1], signal.SIGKILL)
            killed = True
    process.wait()
    resumed = next((line.split(" train_time")[0] for line in lines if line.startswith("resumed:")), "not resumed")
    same = not process.returncode and artifact(folder) == artifact(folder.parent / "two" / "whole")
    return f"status {process.returncode}, {resumed}", int(not same)


def checkpoint_cost(folder: Path) -> tuple[str, int]:
    """How long training waits for a checkpoint of the default model."""
    trainer = make_trainer(out_dir=str(folder), run_id="cost", vocab_size=1024, num_layers=9, model_dim=512, num_heads=8,
                           num_kv_heads=4)
    for p in trainer.model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in trainer.optimizers:
        optimizer.step()
    folder.mkdir()
    loader = train_gpt.TokenLoader(tiny_config(data_path=str(make_shards(folder))), one_process())
    seconds = []
    for trainer.clock.step in range(1, 6):
        started = time.perf_counter()
        train_gpt.save_checkpoint(trainer, loader, silent_log())
        seconds.append(time.perf_counter() - started)
    size = next(folder.rglob("*.pt")).stat().st_size
    return f"{size / 1e6:.0f} MB: {np.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})", 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, nargs=3, default=[50, 20, 10], help="of runs with one, two and three ranks")
    parser.add_argument("--mutations", type=int, default=2000)
    options = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as name:
        folder, random = Path(name), np.random.default_rng(2026)
        (folder / "damaged").mkdir()
        data = make_shards(folder)
        kills = [(f"SIGKILL at {count} random moments, {ranks} rank{'s' * (ranks > 1)}",
                  partial(kill_at_random, folder / place, data, ranks, count, random))
                 for ranks, (place, count) in enumerate(zip(("one", "two", "three"), options.kills), 1)]
        print("| what | what happened | lost or wrong |\n|---|---|---|", flush=True)
        for title, campaign in (
            *kills,
            (f"{options.mutations} damaged files", lambda: mutations(folder / "damaged", options.mutations, random)),
            ("a disk that becomes full", lambda: full_disk(folder / "full", data)),
            ("1 rank of 4 killed", lambda: dead_rank(folder / "dead", data)),
            ("1 rank of 2 killed, --max-restarts", lambda: restarts(folder / "restarts", data)),
            ("a checkpoint of the default model", lambda: checkpoint_cost(folder / "cost")),
        ):
            started = time.monotonic()
            text, bad = campaign()
            lost += bad
            print(f"| {title} | {text} ({time.monotonic() - started:.0f} s) | {bad} |", flush=True)
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
