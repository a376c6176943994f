"""Answer rows of tokens with a record's logits. rescore.py copies this file beside the record's script and starts it.

A question is two int64, rows and length, and the tokens, int64 (rows, length); the answer is float32 (rows, length, V). What
the script prints goes to stderr.
"""

import os
import sys

answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import train_gpt  # noqa: E402


@torch.inference_mode()
def main() -> None:
    config, _ = train_gpt.load_config(sys.argv[1:], {})
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, config.init_from)
    model.compute_dtype = torch.float32
    model.float().eval()
    largest = max(model.parameters(), key=torch.numel)
    np.save("largest.npy", largest.numpy())
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    model.to(device)
    while shape := sys.stdin.buffer.read(16):
        rows, length = np.frombuffer(shape, np.int64).tolist()
        tokens = np.frombuffer(sys.stdin.buffer.read(8 * rows * length), np.int64).copy()
        logits = model.logits(model.hidden(torch.from_numpy(tokens).view(rows, length).to(device)))
        answers.write(logits.float().cpu().contiguous().numpy())
        answers.flush()


if __name__ == "__main__":
    main()
