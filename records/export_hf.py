"""Write an artifact as safetensors with config.json and a model card, and read it back.

    python records/export_hf.py final_model.int8.ptz huggingface/
    python records/export_hf.py final_model.pt huggingface/ NUM_LAYERS=4 MODEL_DIM=192     if it has no settings

The folder has the weights in float32 under the trainer's names, and the trainer's settings in config.json.
records/sample.py and load_folder read it. transformers, vLLM and llama.cpp cannot run it: they do not implement this
architecture (its attention, skip connections and logit cap). Any software can read the tensors.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import torch

from common import ROOT, load_json, pairs_of

sys.path.append(str(ROOT))

import train_gpt  # noqa: E402

CARD = """---
library_name: safetensors
tags:
- text-generation
---
# {name}

A language model of {parameters:,} parameters, trained by `train_gpt.py` with a context of {context} tokens.
`config.json` has the trainer's variables; `model.safetensors` has its tensors in float32, under the trainer's names.

With the repository that has `train_gpt.py`:

    python records/sample.py {name} --prompt "..."

In Python, with its root and records/ on the path:

    from export_hf import load_folder
    model = load_folder("{name}")
    logits = model.logits(model.hidden(tokens))     # tokens: int64 (rows, length)

transformers, vLLM and llama.cpp cannot run this model; they can read its tensors. The tokenizer is
`{tokenizer}` (SHA-256 {digest}).
"""


def load_file(path: Path | str, **variables) -> train_gpt.GPT:
    """Load the model in an artifact, in float32 on the CPU. A state dict or checkpoint says nothing of its model and needs
    the variables that it was trained with. Raises ValueError."""
    words = {"EMBED_FLOAT32": 1, **variables, "INIT_FROM": path}  # the table as the file has it
    config, given = train_gpt.load_config([f"{name}={value}" for name, value in words.items()], {})
    if not given.keys() - {"EMBED_FLOAT32", "INIT_FROM"} and Path(path).is_file():
        raise ValueError(f"{path} does not say what its model is; add the settings of its training, such as NUM_LAYERS=9 "
                         "(the config event in its .jsonl log has them all)")
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, path)
    model.compute_dtype = torch.float32
    return model.float()


def load_folder(folder: Path | str) -> train_gpt.GPT:
    """Load the model in a folder that this script wrote, in float32 on the CPU. Raises ValueError."""
    folder = Path(folder)
    try:
        from safetensors.torch import load_file as load_tensors
        words = [f"{name}={value}" for name, value in load_json(folder / "config.json")["variables"].items()]
        config, _ = train_gpt.load_config(["EMBED_FLOAT32=1", *words], {})  # as the file has the table
        if (folder / config.tokenizer_path).is_file():
            config = replace(config, tokenizer_path=str(folder / config.tokenizer_path))
        model = train_gpt.GPT(config)
        model.load_state_dict(load_tensors(folder / "model.safetensors"))
        model.compute_dtype = torch.float32
    except Exception as error:  # a missing package, and damaged files, which fail in many ways
        raise ValueError(f"{folder} cannot be loaded: {error}") from None
    return model.float()


def write_folder(model: train_gpt.GPT, folder: Path) -> None:
    """Write the model's tensors, config.json, README.md, and its tokenizer if that is a file. Raises ValueError if
    the folder is not empty, and OSError."""
    from safetensors.torch import save
    config = model.config
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Path(config.tokenizer_path)
    if tokenizer.is_file() and sha256(tokenizer.read_bytes()).hexdigest() == config.tokenizer_sha256:
        shutil.copyfile(tokenizer, folder / tokenizer.name)
    elif tokenizer.suffix:
        print(f"warning: {tokenizer} is not here, or is another file; add the tokenizer to {folder} by hand", file=sys.stderr)
    variables = {name: getattr(config, name.lower()) for name in train_gpt.KEPT}
    about = {"model_type": "train_gpt", "architectures": ["GPT"],
             "variables": {**variables, "TOKENIZER_PATH": tokenizer.name}}
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD.format(
        name=folder.resolve().name, parameters=sum(p.numel() for p in model.parameters()), tokenizer=tokenizer.name,
        context=config.train_seq_len, digest=config.tokenizer_sha256 or "unknown"), encoding="utf-8")
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))  # as readable as the other files


@torch.inference_mode()
def compare(model: train_gpt.GPT, other: train_gpt.GPT) -> float:
    """Return the largest difference of two models' logits for a row of random tokens."""
    tokens = torch.randint(model.config.vocab_size, (1, model.config.train_seq_len))
    return float((model.logits(model.hidden(tokens)) - other.logits(other.hidden(tokens))).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="artifact or state dict")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    options = parser.parse_args()
    if not find_spec("safetensors"):
        sys.exit("export_hf.py: safetensors must be installed: pip install safetensors")
    try:
        model = load_file(options.model, **pairs_of(options.settings))
        write_folder(model, options.folder)
        difference = compare(model, load_folder(options.folder))
    except (ValueError, OSError) as error:
        sys.exit(f"export_hf.py: {error}")
    if difference:
        sys.exit(f"export_hf.py: {options.folder} was read back, but its logits differ by {difference}")
    print(f"wrote {options.folder}; read back, it gives the same logits as {options.model}")


if __name__ == "__main__":
    main()
