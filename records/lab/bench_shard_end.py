"""Measure how long a step waits for its tokens at the end of a shard of 100M tokens; print the table in speed.md.

    python records/lab/bench_shard_end.py [--repeat 5]

One rank of eight reads its share of 24 steps of the default size; a shard ends in the middle of them. The trainer maps
shards and reads what a step needs; the published trainer reads the whole next shard when it needs its first token.
Cold means that the page cache holds neither shard. Needs 400 MB of disk. Linux only.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import train_gpt  # noqa: E402

TOKENS = 100_000_000  # of a shard
STEPS = 12  # before and after its end


def write_shard(path: Path, seed: int) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, TOKENS
    tokens = np.random.default_rng(seed).integers(0, 1024, TOKENS, dtype=np.uint16)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def forget(path: Path) -> None:
    """Take a file out of the kernel's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mapped_ms(config: train_gpt.Config, first: int) -> list[float]:
    """Milliseconds of each batch of the trainer's loader."""
    loader = train_gpt.TokenLoader(config, train_gpt.Ranks(0, 8, torch.device("cpu")))
    times = []
    for step in range(first, first + 2 * STEPS):
        started = time.perf_counter()
        loader.batches(step)
        times.append(1000 * (time.perf_counter() - started))
    return times


def whole_ms(files: list[Path], config: train_gpt.Config, first: int) -> list[float]:
    """Milliseconds of each batch if a shard is read whole when its first token is needed."""
    tokens = np.fromfile(files[0], dtype="<u2", offset=1024)
    position = 0  # of tokens[0]
    share = config.train_batch_tokens // 8
    times = []
    for step in range(first, first + 2 * STEPS):
        start = step * config.train_batch_tokens
        started = time.perf_counter()
        if start < TOKENS < start + config.train_batch_tokens:
            tokens = np.concatenate((tokens[start:], np.fromfile(files[1], dtype="<u2", offset=1024)))
            position = start
        torch.from_numpy(tokens[start - position:][:share + 1].astype(np.int64))
        times.append(1000 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"made_train_{number:06d}.bin") for number in range(2)]
        for number, path in enumerate(files):
            write_shard(path, number)
        config = train_gpt.Config(data_path=folder, grad_accum_steps=1)
        first = TOKENS // config.train_batch_tokens - STEPS
        print(f"| loader | cache | median step, ms | longest step, ms, median of {options.repeat} (smallest to largest) |")
        print("|---|---|---|---|")
        for cache in ("warm", "cold"):
            for name in ("mapped", "whole shards"):
                runs = []
                for _ in range(options.repeat):
                    for path in files:
                        if cache == "cold":
                            forget(path)
                    runs.append(mapped_ms(config, first) if name == "mapped" else whole_ms(files, config, first))
                longest = sorted(max(run) for run in runs)
                usual = statistics.median(statistics.median(run) for run in runs)
                print(f"| {name} | {cache} | {usual:.2f} | {statistics.median(longest):.1f} ({longest[0]:.1f} to "
                      f"{longest[-1]:.1f}) |")


if __name__ == "__main__":
    main()
