"""tools/flops.py: by hand, and the peaks of GPUs by their names."""

import flops
import pytest
import train_gpt
from train_gpt import torch

DEFAULTS = {"NUM_LAYERS": 9, "MODEL_DIM": 512, "NUM_HEADS": 8, "NUM_KV_HEADS": 4, "MLP_MULT": 2, "VOCAB_SIZE": 1024,
            "TRAIN_SEQ_LEN": 4096, "TIE_EMBEDDINGS": 1}
GPT2 = {"NUM_LAYERS": 12, "MODEL_DIM": 768, "NUM_HEADS": 12, "NUM_KV_HEADS": 12, "MLP_MULT": 4, "VOCAB_SIZE": 50304,
        "TRAIN_SEQ_LEN": 1024, "TIE_EMBEDDINGS": 1}
QUICK = {"NUM_LAYERS": 3, "MODEL_DIM": 192, "NUM_HEADS": 3, "NUM_KV_HEADS": 1, "MLP_MULT": 3, "VOCAB_SIZE": 2000,
         "VOCAB_PAD": 64, "TRAIN_SEQ_LEN": 256, "TIE_EMBEDDINGS": 0, "LANES": 1, "SMEAR": 1}


@pytest.mark.parametrize("settings, weights, attention", [
    # A block has 512 x (512 + 512) for queries and output, 512 x 512 for keys and values, 2 x 512 x 1,024 for the MLP.
    (DEFAULTS, 9 * (524_288 + 262_144 + 1_048_576) + 524_288, 12 * 9 * 512 * 4096),
    # A block has 4 x 768 x 768 and 2 x 768 x 3,072; the head has 50,304 x 768.
    (GPT2, 12 * 7_077_888 + 38_633_472, 12 * 12 * 768 * 1024),
    # A block has 192 x (384 + 128) and 2 x 192 x 576; the head's 2,000 rows are 2,048.
    (QUICK, 3 * (98_304 + 221_184) + 393_216, 12 * 3 * 192 * 256)])
def test_the_count_is_that_of_a_hand_and_of_the_model(settings, weights, attention):
    assert flops.count_flops(settings, with_attention=False) == 6 * weights
    assert flops.count_flops(settings) == 6 * weights + attention
    config, _ = train_gpt.load_config([f"{name}={value}" for name, value in settings.items()], {})
    with torch.device("meta"):
        params = dict(train_gpt.GPT(config).named_parameters())
    looked_up = params["tok_emb.weight"].numel() * (not config.tie_embeddings)  # no product
    matrices = sum(p.numel() for name, p in params.items() if name.endswith(".weight")) - looked_up
    assert matrices == weights


@pytest.mark.parametrize("gpu, dtype, peak", [
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5), ("NVIDIA H100 PCIe", "bfloat16", 756.5), ("NVIDIA H200", "float16", 989.5),
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312), ("A100-PCIE-40GB", "bfloat16", 312), ("NVIDIA L4", "bfloat16", 121),
    ("Tesla T4", "float16", 65), ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2), ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
    ("Tesla T4", "bfloat16", None), ("NVIDIA H100 80GB HBM3", "float32", None), ("NVIDIA L40S", "bfloat16", None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
    ("", "bfloat16", None)])
def test_a_peak_is_found_by_the_name_of_a_gpu(gpu, dtype, peak):
    assert flops.find_peak(gpu, dtype) == peak


def test_a_speed_in_words():
    """By hand: 1,480,000 tokens/s of 328.7 million operations are 487 TFLOP/s, 49.2 % of 989.5."""
    settings = DEFAULTS | {"DTYPE": "bfloat16"}
    assert flops.describe(1_480_000, settings, "NVIDIA H100 80GB HBM3") == (
        "487 TFLOP/s (151 without attention), 49.2% of the peak of 1x NVIDIA H100 80GB HBM3")
    assert flops.describe(2_960_000, settings, "NVIDIA H100 80GB HBM3", 2).endswith(", 49.2% of the peak of 2x NVIDIA H100 80GB HBM3")
    assert flops.describe(20_000, settings) == "6.57 TFLOP/s (2.04 without attention)"
