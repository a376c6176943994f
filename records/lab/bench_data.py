"""How fast text becomes shards and shards become batches: prints the tables in data/README.md.

    python records/lab/bench_data.py TEXT.jsonl.xz TOKENIZER.model [--threads 2] [--repeat 3]

TEXT is a .jsonl or .jsonl.xz of documents. The same text is encoded by SentencePiece alone, from memory with as many
threads, and by data/prepare.py from a plain file and from an .xz, in turn and REPEAT times. Memory is the proportional
share (PSS) of all processes together, sampled; a run on a quarter of the text shows whether it grows. Linux only.
"""

import argparse
import json
import lzma
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]


def own_encode(model: str, texts: list[str], threads: int) -> float:
    """Seconds that SentencePiece takes for the texts, in its fastest form: batches, ids as arrays."""
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    started = time.perf_counter()
    for first in range(0, len(texts), 1000):
        processor.encode(texts[first:first + 1000], out_type="numpy", num_threads=threads)
    return time.perf_counter() - started


def proportional_kib(pid: int) -> int:
    """The memory of a process and its children in KiB, shared pages divided among their users."""
    total, pids = 0, [pid]
    while pids:
        folder = Path("/proc", str(pids.pop()))
        try:
            total += int((folder / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
            pids += [int(child) for task in (folder / "task").iterdir()
                     for child in (task / "children").read_text().split()]
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return total


def prepare(text: Path, model: str, out: Path, threads: int) -> tuple[float, float]:
    """Seconds and peak GB of the whole command, from start to the proven data set."""
    command = [sys.executable, str(REPOSITORY / "data" / "prepare.py"), str(text), "--tokenizer", model, "--out", str(out),
               "--threads", str(threads), "--shard-tokens", "10000000"]
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ended = threading.Event()

    def sample():
        nonlocal peak
        while not ended.wait(0.2):
            peak = max(peak, proportional_kib(process.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - started
    ended.set()
    sampler.join()
    if process.returncode:
        sys.exit(output)
    return seconds, peak * 1024 / 1e9


def loader_rate(out: Path, model: str, loader: str, length: int) -> tuple[float, float]:
    """Seconds until the first batch of a new loader, and its tokens/s when nothing else is done."""
    sys.path.insert(0, str(REPOSITORY))
    import torch
    import train_gpt
    vocab_size = json.loads((out / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    config = train_gpt.Config(data_path=str(out), tokenizer_path=model, vocab_size=vocab_size, train_seq_len=length,
                              loader=loader, grad_accum_steps=8)
    ranks = train_gpt.Ranks(0, 1, torch.device("cpu"))
    started = time.perf_counter()
    stream = train_gpt.TokenLoader(config, ranks)
    stream.batches(0)
    first = time.perf_counter() - started
    steps, started = 0, time.perf_counter()
    while time.perf_counter() < started + 3:
        stream.batches(steps)
        steps += 1
    return first, steps * config.train_batch_tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        content = Path(options.text).read_bytes()
        content = lzma.decompress(content) if options.text.endswith(".xz") else content
        lines = content.splitlines(keepends=True)
        files = {"plain .jsonl": Path(folder, "text.jsonl"), ".jsonl.xz": Path(folder, "text.jsonl.xz"),
                 "a quarter of it": Path(folder, "quarter.jsonl")}
        files["plain .jsonl"].write_bytes(content)
        packed = Path(options.text).read_bytes() if options.text.endswith(".xz") else lzma.compress(content)
        files[".jsonl.xz"].write_bytes(packed)
        files["a quarter of it"].write_bytes(b"".join(lines[:len(lines) // 4]))
        texts = [json.loads(line)["text"] for line in lines]
        size = sum(len(text.encode("utf-8")) for text in texts)
        quarter = sum(len(text.encode("utf-8")) for text in texts[:len(lines) // 4])
        del content, lines
        print(f"{len(texts)} documents, {size / 1e6:.1f} MB; {options.threads} threads; "
              f"median of {options.repeat}, smallest to largest in brackets\n")
        own, runs, out = [], {name: [] for name in files}, Path(folder, "set")
        for _ in range(options.repeat):
            own.append(own_encode(options.model, texts, options.threads))
            shutil.rmtree(out, ignore_errors=True)
            for name, path in files.items():
                runs[name].append(prepare(path, options.model, out / name.strip(".").replace(" ", "_"), options.threads))
        base = size / statistics.median(own)
        print("| | seconds | MB/s | of SentencePiece's own | peak memory |\n|---|---|---|---|---|")
        rows = [("SentencePiece alone", size, own, "")]
        rows += [(f"prepare.py, {name}", quarter if name.startswith("a ") else size, [run[0] for run in results],
                  f"{max(run[1] for run in results):.2f} GB") for name, results in runs.items()]
        for name, amount, seconds, memory in rows:
            rate = amount / statistics.median(seconds)
            print(f"| {name} | {statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {rate / 1e6:.2f} | "
                  f"{rate / base:.2f} | {memory} |")
        del texts
        data = out / "plain_.jsonl"
        print(f"\n{len(list(data.glob('*_train_*.bin')))} training shards, one process\n\n"
              "| LOADER | TRAIN_SEQ_LEN | first batch | M tokens/s |\n|---|---|---|---|")
        for loader in ("sequential", "shuffled"):
            for length in (1024, 4096):
                results = [loader_rate(data, str(data / "tokenizer.model"), loader, length)
                           for _ in range(options.repeat)]
                first, rate = np.median(results, axis=0)
                print(f"| {loader} | {length} | {first * 1000:.0f} ms | {rate / 1e6:.0f} |")


if __name__ == "__main__":
    main()
