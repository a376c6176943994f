"""Calculate the bytes that ranks communicate in a step, and the time that this takes on 2 to 1,024 GPUs.

    python records/lab/scaling.py                                                          print the tables
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 records/lab/scaling.py --count           measure the bytes of a step

The times are calculated, not measured: bytes over the peak rate of the link, for ring algorithms, without latency
and without overlap, compared with the calculated time of forward and backward (compile_for_gpu.json). --count runs one
step of the default model with rows of 64 tokens under PyTorch's profiler, on CPUs with gloo.
"""

import argparse
import math
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench import write_data

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_gpt  # noqa: E402
from common import load_json, table  # noqa: E402

SHAPES = {  # the trainer's settings, and the case of compile_for_gpu.json with its tokens
    "default": ({}, "default-4096", 12 * 4096),
    "124M": ({"num_layers": 12, "model_dim": 768, "num_heads": 12, "num_kv_heads": 12, "mlp_mult": 4,
              "vocab_size": 50304, "train_seq_len": 1024}, "124M-1024", 8 * 1024)}
MACHINE = 8  # GPUs in a machine
LINKS = {  # bytes/s each way: of an H100; of a machine with eight adapters of 400 Gbit/s; of a machine with one
    "NVLink": 450e9, "InfiniBand, 8 x 400 Gbit/s": 400e9, "Ethernet, 10 Gbit/s": 1.25e9}
BYTES = {"float": 4, "c10::BFloat16": 2}  # of the profiler's types
HEADER = ("| GPUs | tokens per step | MB reduced + gathered | link | ms | share of the step | tokens per GPU for 10 % |")


def payloads(config: train_gpt.Config, ranks: int) -> tuple[int, int]:
    """Return the bytes of a step's all-reduce, and of what the all-gathers give each rank."""
    model = train_gpt.GPT(config)
    reduced = sum(p.numel() * p.element_size() for p in model.parameters())  # the gradients
    shapes = Counter(p.shape for name, p in model.named_parameters()
                     if p.ndim == 2 and name.startswith("blocks.") and not train_gpt.matches(name, train_gpt.CONTROL))
    gathered = sum(2 * math.ceil(count / ranks) * ranks * shape.numel() for shape, count in shapes.items())
    return reduced, gathered if ranks > 1 else 0


def communication_ms(reduced: int, gathered: int, ranks: int, link: float) -> float:
    """Return the ms of ring algorithms over `ranks` that each send at `link` bytes/s."""
    return (2 * reduced + gathered) * (ranks - 1) / ranks / link * 1000


def rows_of(name: str) -> list[list[str]]:
    """Return the table's rows for a shape, with the same tokens for each GPU at every number of GPUs."""
    settings, case, tokens = SHAPES[name]
    config = train_gpt.Config(dtype="float32", **settings)
    compute = load_json(Path(__file__).with_name("compile_for_gpu.json"))["cases"][case]["cudnn ms"]
    rows = []
    for ranks in (2, 4, 8, 16, 32, 64, 256, 1024):
        reduced, gathered = payloads(config, ranks)
        for link in list(LINKS)[:1] if ranks <= MACHINE else list(LINKS)[1:]:
            ms = communication_ms(reduced, gathered, ranks, LINKS[link])
            rows.append([f"{ranks:,}", f"{ranks * tokens:,}", f"{reduced / 1e6:.0f} + {gathered / 1e6:.0f}", link,
                         f"{ms:.2f}", f"{100 * ms / (compute + ms):.1f} %", f"{9 * ms / compute * tokens:,.0f}"])
    return rows


def count() -> None:
    """Run a step of the default model, and print the bytes of its collectives as the profiler saw them."""
    from torch.profiler import ProfilerActivity, profile
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        write_data(Path("data"), 1024, 512)
        words = ("DATA_PATH=data TOKENIZER_PATH=data/vocabulary.json TRAIN_SEQ_LEN=64 TRAIN_BATCH_TOKENS=512 "
                 "VAL_BATCH_SIZE=512 DEVICE=cpu DTYPE=float32 COMPILE=0 RUN_ID=scaling").split()
        config = train_gpt.load_config(words, {})[0]
        ranks = train_gpt.start_ranks(config)
        config = train_gpt.resolve(config, ranks)
        loader, trainer = train_gpt.TokenLoader(config, ranks), train_gpt.Trainer(config, ranks)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            trainer.train_step(loader.batches(0))
    found = Counter()
    for event in profiler.events():
        if event.name in ("gloo:all_reduce", "gloo:all_gather"):
            copies = ranks.world_size if event.name == "gloo:all_gather" else 1  # what each rank gives, all receive
            found[event.name] += math.prod(event.input_shapes[0]) * BYTES[event.input_dtypes[0]] * copies
    if ranks.rank == 0:
        reduced, gathered = payloads(config, ranks.world_size)
        print(f"{ranks.world_size} ranks: reduced {found['gloo:all_reduce']:,} bytes, by formula {reduced:,}; "
              f"gathered {found['gloo:all_gather']:,}, by formula {gathered:,}")
    train_gpt.dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="measure the bytes of one step (run under torchrun)")
    if parser.parse_args().count:
        count()
        return
    for name, (_, _, tokens) in SHAPES.items():
        print(f"\n{name}, {tokens:,} tokens for each GPU:\n")
        print("\n".join(table(HEADER, rows_of(name))))


if __name__ == "__main__":
    main()
