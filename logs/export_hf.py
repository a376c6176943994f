"""Write a model as a folder that transformers loads: AutoModelForCausalLM and AutoTokenizer, with trust_remote_code=True.

    python logs/export_hf.py RUN_ID huggingface/ --licence mit --push OWNER/NAME
    python logs/export_hf.py final_model.pt huggingface/ NUM_LAYERS=4 MODEL_DIM=192 ...    with all settings of its training

The folder has the weights in float32, the trainer's settings in config.json, the tokenizer, train_gpt.py itself, three
short files that let transformers (5.0 or newer) use them, and a model card, with the run's score and command if its log is
there. If transformers is installed, the script loads the folder with it and compares its logits with those of the model.
"""

import argparse
import json
import shlex
import shutil
import sys
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from events import read_events
from sample import ROOT, find_model, find_tokenizer, load, log_of

import train_gpt  # isort: skip  (sample.py finds it)

CODE = ["train_gpt.py", "data/tokenization.py", "logs/modeling_train_gpt.py", "logs/tokenization_train_gpt.py"]
CARD = """---
{data}
---
# {name}

A language model of {parameters:,} parameters, trained by `train_gpt.py` with a context of {context} tokens. The folder
contains `train_gpt.py`, whose GPT class transformers runs.
{run}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{place}", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("{place}", trust_remote_code=True)
    ids = tokenizer("Once upon a time", return_tensors="pt")
    text = model.generate(**ids, max_new_tokens=50, do_sample=True, top_p=0.95)[0]
    print(tokenizer.decode(text, skip_special_tokens=True))

It needs PyTorch, transformers 5.0 or newer, and {packages}. The SHA-256 of the tokenizer, `{tokenizer}`, is {digest}.
"""
RUN = """
It was trained on {data} and scores {val_bpb:.4f} bits per byte on the validation text. Its int8 file has {size:,} bytes. The
command:

    {command}

In Python:
"""


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def describe_run(log: Path | None) -> str:
    """What a model card says of the run with this log; "" without one that ended."""
    latest = {event["event"]: event for event in read_events(log)} if log else {}
    if not {"config", "export", "final"} <= latest.keys():
        return ""
    own = {"RUN_ID", "OUT_DIR", "RESUME"}
    words = [f"{name}={text}" for name, (text, _) in latest["config"]["overrides"].items() if name not in own]
    return RUN.format(data=Path(latest["config"]["config"]["DATA_PATH"]).name, val_bpb=latest["final"]["val_bpb"],
                      size=latest["export"]["artifact_bytes"], command=shlex.join(["python", "train_gpt.py", *words]))


def write_folder(model: train_gpt.GPT, folder: Path, spec: str | None = None, log: Path | None = None,
                 licence: str | None = None, place: str = "") -> None:
    """Write the folder of a model, with its tokenizer or the one that `spec` names. The card describes the run of `log` and
    loads the model from `place`. Raises ValueError if the folder is not empty or the tokenizer is another one, and OSError."""
    from huggingface_hub import ModelCardData
    from safetensors.torch import save
    config = model.config
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or delete it if it is an earlier export")
    tokenizer = find_tokenizer(model, spec, log)
    place = place or str(folder)
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
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", license=licence)
    (folder / "README.md").write_text(CARD.format(
        data=data.to_yaml(), run=describe_run(log), place=place,
        name=Path(place).name, parameters=sum(p.numel() for p in model.parameters()), context=config.train_seq_len,
        packages={"sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}.get(tokenizer.kind, "numpy"),
        tokenizer=name, digest=config.tokenizer_sha256 or "unknown"), encoding="utf-8")
    tensors = {f"gpt.{name}": t.contiguous() for name, t in model.state_dict().items()}
    about = sha256(json.dumps(variables, sort_keys=True).encode()).digest()  # as modeling_train_gpt.py has it
    tensors["variables_sha256"] = torch.tensor(list(about), dtype=torch.uint8)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))  # as readable as the other files


def push(folder: Path, name: str) -> None:
    """Upload a folder to the hub, as the user of HF_TOKEN or of `hf auth login`."""
    from huggingface_hub import HfApi
    try:
        api = HfApi()
        api.create_repo(name, exist_ok=True)
        print(f"uploaded: {api.upload_folder(repo_id=name, folder_path=folder)}")
    except Exception as error:  # of the hub and of the network, in many types
        sys.exit(f"export_hf.py: {name} was not uploaded: {error}\nLog in with `hf auth login`, or upload the folder by hand")


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
    parser.add_argument("model", help="artifact, state dict or RUN_ID")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    parser.add_argument("--licence", metavar="NAME", help="of the model, for its card, such as mit or cc-by-4.0")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the folder to the Hugging Face hub")
    options = parser.parse_intermixed_args()
    for package in ("safetensors", "huggingface_hub"):
        if not find_spec(package):
            sys.exit(f"export_hf.py: {package} must be installed: pip install safetensors huggingface_hub")
    try:
        path = find_model(options.model)
        model = load(path, options.settings)
        write_folder(model, options.folder, options.tokenizer, log_of(path), options.licence, options.push or "")
    except (ValueError, OSError) as error:
        sys.exit(f"export_hf.py: {error}")
    if not find_spec("transformers") or int(version("transformers").split(".")[0]) < 5:
        print(f"wrote {options.folder}; transformers 5.0 or newer is not installed, so it was not read back")
    else:
        difference = compare(model, options.folder)
        if not difference <= 1e-5:  # NaN, too
            sys.exit(f"export_hf.py: {options.folder} was read back by transformers, but its logits differ by {difference}")
        print(f"wrote {options.folder}; read back by transformers, its logits differ by {difference:.1g} from {path}")
    if options.push:
        push(options.folder, options.push)


if __name__ == "__main__":
    main()
