"""Print as JSON how a record's model scores the validation text: "nats", the sum of the losses of the tokens after the first, and
"apart", the largest difference between logits of rows and of their beginnings alone. A model that sees later tokens or other rows
has a large one. rescore.py copies this file beside the record's script and the files that it reads, and runs it there.
"""

import json
import math
import sys

import numpy as np
import torch
import train_gpt  # the record's

BATCH_TOKENS = 8192


@torch.inference_mode()
def main() -> None:
    config, _ = train_gpt.load_config(sys.argv[1:], {})
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, config.init_from)
    model.compute_dtype = torch.float32
    model.float().eval().to(device)

    def logits_of(x: np.ndarray) -> torch.Tensor:
        return model.logits(model.hidden(torch.from_numpy(x.astype(np.int64)).to(device))).float().cpu()

    tokens = np.load("tokens.npy")
    length = config.train_seq_len
    inputs, targets = tokens[:-1].reshape(-1, length), tokens[1:].reshape(-1, length)
    rows = math.ceil(BATCH_TOKENS / length)
    random = np.random.default_rng(0)
    nats, differences = 0.0, []
    for number, at in enumerate(range(0, len(inputs), rows)):
        logits = logits_of(inputs[at:at + rows])  # (rows, length, vocabulary)
        wanted = torch.from_numpy(targets[at:at + rows].astype(np.int64))
        nats += torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="sum").item()
        for _ in range(4 if number % 8 == 0 else 0):
            row = random.integers(len(logits))
            cut = random.integers(1, length + 1)
            beginning = logits_of(inputs[at + row:at + row + 1, :cut])
            differences.append((beginning - logits[row:row + 1, :cut]).abs().max())
    print(json.dumps({"nats": nats, "apart": torch.stack(differences).max().item()}))  # a NaN stays


if __name__ == "__main__":
    main()
