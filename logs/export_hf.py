"""Write a model as a folder that transformers loads: AutoModelForCausalLM and AutoTokenizer, with trust_remote_code=True.

    python logs/export_hf.py final_model.int8.ptz huggingface/
    python logs/export_hf.py final_model.pt huggingface/ NUM_LAYERS=4 MODEL_DIM=192 ...    with all settings of its training

The folder has the weights in float32, the trainer's settings in config.json, the tokenizer, train_gpt.py itself, and three
short files that let transformers (5.0 or newer) use them. If transformers is installed, the script loads the folder with it
and compares its logits with those of the model.
"""

import argparse
import json
import shutil
import sys
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from sample import ROOT, find_tokenizer, load

import train_gpt  # isort: skip  (sample.py finds it)

CODE = ["train_gpt.py", "data/tokenization.py", "logs/modeling_train_gpt.py", "logs/tokenization_train_gpt.py"]
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A language model of {parameters:,} parameters, trained by `train_gpt.py` with a context of {context} tokens. The folder
contains `train_gpt.py`, whose GPT class transformers runs.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
    ids = tokenizer("Once upon a time", return_tensors="pt")
    text = model.generate(**ids, max_new_tokens=50, do_sample=True, top_p=0.95)[0]
    print(tokenizer.decode(text, skip_special_tokens=True))

It needs PyTorch, transformers 5.0 or newer, and {packages}. The SHA-256 of the tokenizer, `{tokenizer}`, is {digest}.
"""


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(model: train_gpt.GPT, spec: str | None, folder: Path) -> None:
    """Write the folder of a model with its tokenizer, or the one that `spec` names. Raises ValueError if the folder is not
    empty or the tokenizer is another one, and OSError."""
    from safetensors.torch import save
    config = model.config
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    tokenizer = find_tokenizer(model, spec)
    folder.mkdir(parents=True, exist_ok=True)
    for path in CODE:
        shutil.copy(ROOT / path, folder)
    name = tokenizer.spec
    if tokenizer.file:
        name = {".model": "tokenizer.model", ".json": "vocabulary.json"}[tokenizer.file.suffix]
        shutil.copyfile(tokenizer.file, folder / name)
    variables = {name: getattr(config, name.lower()) for name in train_gpt.KEPT} | {"TOKENIZER_PATH": name}
    boundary = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos} if tokenizer.bos >= 0 else {}
    write_json(folder / "config.json", {  # transformers serve looks for the architecture among transformers' own names
        "model_type": "train_gpt", "architectures": ["AutoModelForCausalLM"], "dtype": "float32",
        "auto_map": {"AutoConfig": "modeling_train_gpt.TrainGPTConfig",
                     "AutoModelForCausalLM": "modeling_train_gpt.TrainGPTForCausalLM"},
        "variables": variables, **boundary})
    write_json(folder / "generation_config.json", boundary)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "TrainGPTTokenizer", "model_max_length": config.train_seq_len, "tokenizer": name,
        "auto_map": {"AutoTokenizer": ["tokenization_train_gpt.TrainGPTTokenizer", None]}})
    (folder / "README.md").write_text(CARD.format(
        name=folder.resolve().name, parameters=sum(p.numel() for p in model.parameters()), context=config.train_seq_len,
        packages={"sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}.get(tokenizer.kind, "numpy"),
        tokenizer=name, digest=config.tokenizer_sha256 or "unknown"), encoding="utf-8")
    tensors = {f"gpt.{name}": t.contiguous() for name, t in model.state_dict().items()}
    about = sha256(json.dumps(variables, sort_keys=True).encode()).digest()  # as modeling_train_gpt.py has it
    tensors["variables_sha256"] = torch.tensor(list(about), dtype=torch.uint8)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))  # as readable as the other files


@torch.inference_mode()
def compare(model: train_gpt.GPT, folder: Path) -> float:
    """Load the folder with transformers; return the largest difference of its logits from the model's, for random tokens."""
    from transformers import AutoModelForCausalLM
    other = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.randint(model.config.vocab_size, (1, model.config.train_seq_len))
    logits = model.logits(model.hidden(tokens))[..., :model.config.vocab_size]
    return float((logits - other(tokens).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="artifact or state dict")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    options = parser.parse_args()
    if not find_spec("safetensors"):
        sys.exit("export_hf.py: safetensors must be installed: pip install safetensors")
    try:
        model = load(options.model, options.settings)
        write_folder(model, options.tokenizer, options.folder)
    except (ValueError, OSError) as error:
        sys.exit(f"export_hf.py: {error}")
    if not find_spec("transformers") or int(version("transformers").split(".")[0]) < 5:
        print(f"wrote {options.folder}; transformers 5.0 or newer is not installed, so it was not read back")
        return
    difference = compare(model, options.folder)
    if not difference <= 1e-5:  # NaN, too
        sys.exit(f"export_hf.py: {options.folder} was read back by transformers, but its logits differ by {difference}")
    print(f"wrote {options.folder}; read back by transformers, its logits differ by {difference:.1g} from {options.model}")


if __name__ == "__main__":
    main()
