"""Write a model as a folder that transformers loads: AutoModelForCausalLM and AutoTokenizer, with trust_remote_code=True.

    python tools/huggingface/export_hf.py RUN_ID huggingface/
    python tools/huggingface/export_hf.py final_model.pt huggingface/ NUM_LAYERS=4 ...    with all settings of its training

The folder has the weights in float32, the trainer's settings in config.json, the tokenizer, train_gpt.py itself and four
short files that let transformers (5.0 or newer) use them, and README.md, a model card. The script then loads the folder and
compares its logits.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from events import find_run, prepare_output, read_outline  # noqa: E402
from sample import ROOT, find_model, find_tokenizer, load, train_gpt  # noqa: E402
from tokenization import Tokenizer  # noqa: E402

CODE = ["LICENSE", "train_gpt.py", "data/tokenization.py", "tools/kv_cache.py",
        "tools/huggingface/modeling_train_gpt.py", "tools/huggingface/tokenization_train_gpt.py"]
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A language model with {parameters:,} parameters, trained with `train_gpt.py`, which is in this folder.

| | |
|---|---|
| score | {score} |
| context | {context:,} tokens |
| vocabulary | {vocabulary:,} tokens |

## Use

    pip install torch 'transformers>=5' safetensors{package}

With the path of this folder, or OWNER/NAME if it has been uploaded:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
ids = tokenizer("Fellow citizens,", return_tensors="pt")
text = model.generate(**ids, max_new_tokens=64, do_sample=True, top_p=0.95)[0]
print(tokenizer.decode(text, skip_special_tokens=True))
```

`trust_remote_code=True` runs the Python files of this folder.

## Licence

`LICENSE` is that of the Python files. It does not cover the weights and the tokenizer: their licence is for whoever trained the
model to choose, and may depend on the training text.
"""


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def find_score(path: Path, name: str) -> str:
    """Return the score of the artifact `path`, from the log of the run `name` or of the folder that it is in, with what it was
    measured on; without such a log, that it is not known."""
    for log in (find_run(name), Path(f"{path.resolve().parent}.jsonl")):
        latest = {event["event"]: event for event in read_outline(log)} if log and log.is_file() else {}
        is_its_log = latest.get("export", {}).get("artifact_sha256") == sha256(path.read_bytes()).hexdigest()
        if is_its_log and latest.get("final", {}).get("val_bpb"):
            start = latest["config"]
            return (f"{latest['final']['val_bpb']:.4f} bits per byte of the validation text of "
                    f"`{Path(start['config']['DATA_PATH']).name}`, {start['val_tokens']:,} tokens")
    return "not known: the model was exported without the log of its training"


def write_folder(model: train_gpt.GPT, tokenizer: Tokenizer, folder: Path, score: str = "not known") -> None:
    """Write a folder for transformers; its model card names the score. Raises ValueError if it is not empty, and OSError."""
    from safetensors.torch import save
    config = model.config
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or delete it if it is an earlier export")
    folder.mkdir(parents=True, exist_ok=True)
    for path in CODE:
        shutil.copy(ROOT / path, folder)
    name = tokenizer.spec
    if tokenizer.file:
        name = "tokenizer.model"
        shutil.copyfile(tokenizer.file, folder / name)
    package = {"sentencepiece": " sentencepiece", "tiktoken": " tiktoken"}.get(tokenizer.kind, "")
    parameters = sum(p.numel() for p in model.parameters())
    (folder / "README.md").write_text(CARD.format(
        name=folder.resolve().name, parameters=parameters, score=score, context=config.train_seq_len,
        vocabulary=config.vocab_size, package=package), encoding="utf-8")
    boundary = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos}
    variables = {variable: getattr(config, variable.lower()) for variable in train_gpt.STORED} | {"TOKENIZER_PATH": name}
    write_json(folder / "config.json", {  # transformers serve looks for the architecture among transformers' own names
        "model_type": "train_gpt", "architectures": ["AutoModelForCausalLM"], "dtype": "float32",
        "auto_map": {"AutoConfig": "modeling_train_gpt.TrainGPTConfig",
                     "AutoModelForCausalLM": "modeling_train_gpt.TrainGPTForCausalLM"},
        "variables": variables, **boundary})
    write_json(folder / "generation_config.json", boundary)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "TrainGPTTokenizer", "model_max_length": config.train_seq_len, "tokenizer": name,
        "auto_map": {"AutoTokenizer": ["tokenization_train_gpt.TrainGPTTokenizer", None]}})
    tensors = {f"gpt.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))  # as readable as the other files


@torch.inference_mode()
def compare(model: train_gpt.GPT, folder: Path) -> float:
    """Load the folder with transformers; return the largest difference of its logits from the model's, for random tokens."""
    from transformers import AutoModelForCausalLM
    other = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.randint(model.config.vocab_size, (1, model.config.train_seq_len))
    logits = model.logits(model.hidden(tokens))[..., :model.config.vocab_size]
    return float((logits - other(tokens, use_cache=False).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="artifact, state dict or RUN_ID")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    options = parser.parse_intermixed_args()
    try:
        path = find_model(options.model)
        model = load(path, options.settings)
        if missing := [package for package in ("safetensors", "transformers") if not find_spec(package)]:
            raise ValueError(f"{' and '.join(missing)} must be installed: pip install safetensors 'transformers>=5'")
        if int(version("transformers").split(".")[0]) < 5:
            raise ValueError(f"transformers {version('transformers')} is too old: pip install 'transformers>=5'")
        tokenizer = find_tokenizer(model, path, options.tokenizer)
        write_folder(model, tokenizer, options.folder, find_score(path, options.model))
        try:
            difference = compare(model, options.folder)
        except Exception as error:  # of any part of transformers; the folder was empty before
            for part in options.folder.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            raise ValueError(f"transformers cannot read the folder, which was emptied: {error}") from error
    except (ValueError, OSError) as error:
        sys.exit(f"export_hf.py: {error}")
    if not difference <= 1e-5:  # NaN, too
        sys.exit(f"export_hf.py: {options.folder} was read back by transformers, but its logits differ by {difference}")
    print(f"wrote {options.folder}; read back by transformers, its logits differ by {difference:.1g} from {path}")


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
