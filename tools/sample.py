"""Generate text with a trained model.

    python tools/sample.py --prompt "Fellow citizens," --samples 3     with the model of the last run
    python tools/sample.py RUN_ID --interactive                        one prompt per line; Ctrl-D ends

A sample ends where the model ends the document, or after --length tokens. Without --prompt, it has at least 80 visible
characters if --length allows. final_model.pt and older artifacts do not contain their settings: add all of those that the
training set, and its DTYPE, such as DTYPE=bfloat16 NUM_LAYERS=4 MODEL_DIM=192 NUM_HEADS=4 TOKENIZER_PATH=... (see the config
event in the .jsonl log).
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]  # before others' modules of these names

import kv_cache  # noqa: E402
import train_gpt  # noqa: E402
from events import (  # noqa: E402
    MAX_LISTED, check_logs, find_checkpoint, find_run, limited, newest_first, prepare_output, read_events, read_outline,
)
from tokenization import Tokenizer, load_tokenizer  # noqa: E402

SHORTEST = 80  # visible characters of a sample without a prompt


def newest_models() -> Iterator[Path]:
    """Yield the artifacts of the runs that ended, by the times of their logs, the newest first: a copied file has another time."""
    for log in newest_first("*.jsonl"):
        with suppress(ValueError, LookupError, TypeError, OSError):
            if any(event["event"] == "final" for event in read_outline(log)):
                yield find_model(log.stem)


def find_model(name: str) -> Path:
    """Return the file `name`, the artifact of the run or in the folder `name`, or with "" that of the last run that ended.
    Raises ValueError."""
    check_logs()
    found = newest_first(f"*/{train_gpt.MODEL_FILE}")
    path, copied = Path(name), Path("logs", name, train_gpt.MODEL_FILE)
    log = find_run(name) or find_run(name.removeprefix("logs/").removesuffix(".jsonl"))
    if not name:
        path = next(newest_models(), found[0] if found else path)
    elif not log and not path.is_file() and copied.is_file():
        path = copied  # a folder without its log
    elif log:  # also where a file has this name: a run may be named after its text
        latest = {event["event"]: event for event in read_outline(log)}
        path = Path(latest["config"]["config"].get("OUT_DIR", log.with_suffix("")), train_gpt.MODEL_FILE)
        wanted = latest.get("export", {}).get("artifact_sha256")
        if path.is_file() and (wanted or "export" not in latest) and sha256(path.read_bytes()).hexdigest() != wanted:
            raise ValueError(f"{path} is the model of another run, not of {name} as {log} tells it")
    elif path.is_dir():
        path /= train_gpt.MODEL_FILE
    if not name and not path.is_file():
        raise ValueError("there is no model in logs/ yet")
    if not path.is_file():
        if log and (checkpoint := find_checkpoint(log, read_outline(log))):
            raise ValueError(f"{name} has no final model; give its checkpoint: {checkpoint}")
        runs = ", ".join(path.parent.name for path in found[:MAX_LISTED]) or "none"
        raise ValueError(f"{name!r} is neither a file nor a RUN_ID with a model in logs/; the newest are: {runs}")
    return path


def load(path: Path | str, settings: Sequence[str] = ()) -> train_gpt.GPT:
    """Load the model in an artifact, in float32 on the CPU. A state dict or checkpoint needs the settings that it was trained
    with, as NAME=value, and its DTYPE: bfloat16 rounds the rotary frequencies. Raises ValueError."""
    for name in train_gpt.SDP_OF_ATTN.values():  # an earlier run in this process, a notebook's, has switched kernels off
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    config, _ = train_gpt.load_config([*settings, "OPTIMIZER=adamw", f"INIT_FROM={path}"], {})  # its table is in float32
    if config.dtype == "auto" and Path(path).is_file():
        raise ValueError(f"{path} does not say what its model is; add the settings of its training, and its DTYPE, such as "
                         "DTYPE=bfloat16 NUM_LAYERS=9 (the config event in its .jsonl log has them all)")
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, path)
    model.compute_dtype = torch.float32
    return model.float()


def may_be(spec: str, digest: str) -> bool:
    """Whether a tokenizer is there, or a name, and has this digest of its file or its name, if it is known."""
    if spec.endswith(".model") and not Path(spec).is_file():
        return False
    content = Path(spec).read_bytes() if Path(spec).is_file() else spec.encode()
    return digest in ("", sha256(content).hexdigest())


def places_of_tokenizer(named: str, path: Path) -> Iterator[str]:
    """Yield where a tokenizer may be that an artifact names, given the artifact's path: there; where the log of the run says, as
    an artifact does not keep an absolute path; in this repository; beside the artifact."""
    yield named
    log = Path(f"{path.resolve().parent}.jsonl")  # a RUN_ID may have dots
    if log.is_file():
        yield read_events(log)[0]["config"]["TOKENIZER_PATH"]
    yield str(ROOT / named)
    yield str(path.with_name(Path(named).name))


def find_tokenizer(model: train_gpt.GPT, path: Path, spec: str | None = None) -> Tokenizer:
    """Load the tokenizer `spec`, or the one that the artifact, or else the log of its run, names. `path` is the artifact's.
    Raises ValueError if it is not the model's."""
    config = model.config
    places = [spec] if spec else places_of_tokenizer(config.tokenizer_path, path)
    found = next((place for place in places if may_be(place, config.tokenizer_sha256)), "")
    if not found:
        raise ValueError(f"tokenizer {spec or config.tokenizer_path} is not there, or not the one that the model was trained with; "
                         f"put that one, under its name, beside {path}, or give its path with --tokenizer")
    tokenizer = load_tokenizer(found)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"tokenizer {found} has {tokenizer.vocab_size} tokens, but the model {config.vocab_size}; give the path "
                         "of another with --tokenizer")
    return tokenizer


def choose(logits: Tensor, options, generator: torch.Generator) -> int:
    """Sample a token from logits, float32 (V,), by temperature, top-k and top-p (nucleus) sampling. A temperature of 0
    takes the likeliest."""
    if options.temperature == 0:
        return int(logits.argmax())
    largest = logits.topk(min(options.top_k or len(logits), len(logits)))  # sorted
    below = (largest.values - largest.values[0]).double()  # which no temperature makes infinite
    probabilities = (below / options.temperature).softmax(0).float()
    if options.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.where(before < options.top_p, 0)
    return int(largest.indices[torch.multinomial(probabilities, 1, generator=generator)])


@torch.inference_mode()
def generate(model: train_gpt.GPT, ids: list[int], bos: int, options, generator: torch.Generator,
             may_end: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Yield the tokens that continue `ids` (at least one), until the document ends, which it does not do before `may_end`, or
    there are `options.length`. At least the last TRAIN_SEQ_LEN / 2 tokens are seen, or all if there are fewer."""
    ids, first = list(ids), -1
    for _ in range(options.length):
        start = kv_cache.window_start(len(ids), model.config.train_seq_len)
        if start > first:
            cache = kv_cache.Cache(model.config.train_seq_len)
            first = read = start
        x = kv_cache.hidden(model, torch.tensor([ids[read:]]), cache)[:, -1:]
        logits = model.logits(x)[0, 0, :model.config.vocab_size]
        if not may_end():
            logits[bos] = -math.inf
        token = choose(logits, options, generator)
        if token == bos:
            return
        yield token
        read = len(ids)
        ids.append(token)


def write_sample(model: train_gpt.GPT, tokenizer: Tokenizer, prompt: str, options, generator: torch.Generator) -> None:
    """Print the prompt and what follows it, each token as it comes. Without a prompt, a document ends only after SHORTEST
    visible characters: some texts begin with blank lines, or have empty documents."""
    ids = tokenizer.encode([prompt])[0].tolist() if prompt else []
    print(prompt, end="", flush=True)
    text = tokenizer.decode(np.array(ids)).decode("utf-8", "replace")
    shown = len(text)

    def may_end() -> bool:
        return bool(prompt) or len("".join(text.split())) >= SHORTEST

    for token in generate(model, [tokenizer.bos, *ids], tokenizer.bos, options, generator, may_end):
        ids.append(token)
        text = tokenizer.decode(np.array(ids)).decode("utf-8", "replace")
        whole = text.rstrip("\ufffd")  # a character can have several tokens
        print(whole[shown:], end="", flush=True)
        shown = max(shown, len(whole))
    print(text[shown:], end="\n\n", flush=True)


def ask() -> Iterator[str]:
    """Yield the lines that are typed."""
    if sys.stdin.isatty():
        print("Type how a text begins; the model goes on. Ctrl-D ends.")
    with suppress(ImportError):
        import readline  # noqa: F401  (input() has a history then)
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="artifact, its folder, state dict or RUN_ID (default: the last run)")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--prompt", default="", help="how the text begins (default: a new document)")
    parser.add_argument("--samples", type=limited(1, kind=int), default=1)
    parser.add_argument("--length", type=limited(1, kind=int), default=200, help="maximum tokens per sample (default 200)")
    parser.add_argument("--temperature", type=limited(0), default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=limited(0, kind=int), default=0, help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=limited(0, 1), default=0.95, help="keep the likeliest with a total of P (default 0.95)")
    parser.add_argument("--seed", type=limited(0, 2**63 - 1, int), default=1337)
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal")
    options = parser.parse_intermixed_args()
    if options.prompt != options.prompt.encode("utf-8", "replace").decode():
        parser.error("--prompt is not UTF-8, which this terminal should write")
    for word in options.settings:
        if "=" not in word:
            parser.error(f"{word!r} is not VARIABLE=value; a text to continue is --prompt {shlex.quote(word)}")
    if options.top_p == 0:
        parser.error("--top-p 0 keeps no token; --temperature 0 takes the likeliest")
    try:
        path = find_model(options.model)
        if not options.model:
            print(f"the model is {path}", file=sys.stderr)
        model = load(path, options.settings)
        tokenizer = find_tokenizer(model, path, options.tokenizer)
        generator = torch.Generator().manual_seed(options.seed)
        for prompt in ask() if options.interactive else [options.prompt] * options.samples:
            write_sample(model, tokenizer, prompt, options, generator)
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    prepare_output()
    for stream in (sys.stdin, sys.stdout):  # A terminal may not have all characters; a notebook's streams have them.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    main()
