"""Measure the machine for about a second, and print its rates as JSON.

    python records/rates.py cpu 192         matrix products of width 192; auto instead of cpu: on a GPU, if there is one

run.py does this before each seed, with the threads of the run, so that records of different machines can be compared.
"""

import json
import sys
import time
from collections.abc import Callable

import torch


def per_second(function: Callable, work: float, seconds: float = 0.3) -> float:
    """Return work / seconds of the fastest call, of those that fit into `seconds` but at least two."""
    end = time.perf_counter() + seconds
    fastest = float("inf")
    calls = 0
    while calls < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        calls += 1
    return work / fastest


def rates(device: str, width: int) -> dict[str, float]:
    """TFLOP/s of products (2048, width) @ (width, 4 width) in bfloat16 and float32, and GB/s read and written by a copy."""
    if device == "auto":
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    result = {}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(2048, width, device=device).to(dtype)
        b = torch.randn(width, 4 * width, device=device).to(dtype)
        flops = 2 * 2048 * width * 4 * width
        result[f"{str(dtype).removeprefix('torch.')}_tflops"] = per_second(lambda a=a, b=b: a @ b, flops) / 1e12
    source = torch.zeros(1 << 24, device=device)
    target = torch.empty_like(source)
    result["copy_gb_per_s"] = per_second(lambda: target.copy_(source), 2 * source.nbytes) / 1e9
    return {name: float(f"{value:.3g}") for name, value in result.items()}


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1], int(sys.argv[2]))))
