"""How much arithmetic training takes: from tokens/s to TFLOP/s, and to a share of what a GPU can do (MFU)."""

import math
import re

# Dense products of bfloat16 or float16, with sums in float32, in TFLOP/s, by the name that PyTorch gives a GPU. Data sheets
# of NVIDIA that state a figure "with sparsity" are halved.
PEAKS = {
    r"NVIDIA H[12]00( 80GB HBM3)?": 989.5,  # "H100 Tensor Core GPU", SXM; "H200 Tensor Core GPU", SXM: 1,979 with sparsity
    r"NVIDIA H[12]00 NVL": 835.5,  # the same, NVL: 1,671 with sparsity
    r"NVIDIA H100 PCIe": 756.5,  # "H100 PCIe GPU", product brief: 1,513 with sparsity
    r"(NVIDIA )?A100[- ].*": 312.0,  # "A100 Tensor Core GPU"
    r"NVIDIA L4": 121.0,  # "L4 Tensor Core GPU": 242 with sparsity
    r"NVIDIA GeForce RTX 4090": 165.2,  # "Ada GPU Architecture", whitepaper, appendix A
    r"NVIDIA GeForce RTX 5090": 209.5,  # "RTX Blackwell GPU Architecture", whitepaper, appendix A
}
FLOAT16_PEAKS = {r"(NVIDIA |Tesla )T4": 65.0}  # "T4 Tensor Core GPU"; it has no bfloat16


def count_flops(settings: dict, with_attention: bool = True) -> int:
    """Return the floating-point operations that training takes for one token, from a run's settings.

    A weight of a matrix takes one multiplication and one addition in the forward pass, and twice as many in the backward
    pass: 6 N, where N counts the blocks' matrices and the output head, with the rows that VOCAB_PAD adds. Looking up an
    embedding is no product, so an untied one does not count, and a tied one counts once. Gains, scales and other vectors do
    not count, nor do optimizers, validation, or a forward pass that is computed again.

    With attention, scores and weighted values add 12 L H Q T: L layers, H heads of width Q, rows of T tokens. This is
    appendix B of the PaLM paper (arXiv:2204.02311), and counts all T x T scores, also the half that a causal kernel skips.
    nanochat counts the same; nanoGPT counts vectors, too, which is 0.02 % more at 124 million weights. Raises KeyError."""
    layers, width, length = settings["NUM_LAYERS"], settings["MODEL_DIM"], settings["TRAIN_SEQ_LEN"]
    kv_width = width // settings["NUM_HEADS"] * settings["NUM_KV_HEADS"]
    block = 2 * width * width + 2 * width * kv_width + 2 * settings["MLP_MULT"] * width * width
    pad = settings.get("VOCAB_PAD", 1)
    head = math.ceil(settings["VOCAB_SIZE"] / pad) * pad * width
    return 6 * (layers * block + head) + 12 * layers * width * length * with_attention


def find_peak(gpu: str, dtype: str) -> float | None:
    """Return the TFLOP/s that a GPU's data sheet promises for a type, or None if we do not know them."""
    peaks = {"float16": FLOAT16_PEAKS | PEAKS, "bfloat16": PEAKS}.get(dtype, {})
    is_part = "MIG" in gpu
    return next((peak for name, peak in peaks.items() if re.fullmatch(name, gpu) and not is_part), None)


def describe(tokens_per_s: float, settings: dict, gpu: str = "", gpus: int = 1) -> str:
    """Return a speed as TFLOP/s with and without attention, and as a share of the peak of `gpus` GPUs if it is known."""
    tflops, without = (tokens_per_s * count_flops(settings, attention) / 1e12 for attention in (True, False))
    text = f"{tflops:.3g} TFLOP/s ({without:.3g} without attention)"
    peak = find_peak(gpu, settings["DTYPE"])
    return text + (f", {tflops / peak / gpus:.1%} of the peak of {gpus}x {gpu}" if peak else "")


if __name__ == "__main__":
    print(f"usage: other scripts import this file. {__doc__}")
