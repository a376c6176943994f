"""Generate text with a trained model, or score a text.

    python logs/sample.py --prompt "Fellow citizens," --samples 3     with the newest model in logs/
    python logs/sample.py RUN_ID --interactive                        one prompt per line; Ctrl-D ends
    python logs/sample.py final_model.int8.ptz --score texts.jsonl    bits per byte, each text alone

A sample ends where the model ends the document, or after --length tokens. final_model.pt and older artifacts do not contain
their settings: add all of those that the training set, and its DTYPE, for example DTYPE=bfloat16 NUM_LAYERS=4 MODEL_DIM=192
NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=256 TOKENIZER_PATH=... (see the config event in the .jsonl log). Tokens/s are printed
to stderr.
"""

import argparse
import codecs
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]  # before others' modules of these names

import train_gpt  # noqa: E402
from events import read_events  # noqa: E402
from tokenization import Tokenizer, load_tokenizer  # noqa: E402


def find_model(name: str) -> Path:
    """The file `name`, or the artifact of a run: that RUN_ID, or with "" the newest in logs/. Raises ValueError."""
    if not name:
        found = sorted(Path("logs").glob(f"*/{train_gpt.MODEL_FILE}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError("there is no model in logs/; train one, or name a file")
        return found[-1]
    log = Path("logs", f"{name}.jsonl")
    if log.is_file() and not Path(name).is_file():
        events = {event["event"]: event for event in read_events(log)}
        path = Path(events["config"]["config"]["OUT_DIR"], train_gpt.MODEL_FILE)
        wanted = events.get("export", {}).get("artifact_sha256")
        if wanted and path.is_file() and sha256(path.read_bytes()).hexdigest() != wanted:
            raise ValueError(f"{path} is the model of a later run with the same OUT_DIR, not of {name}")
        folders = [path.parent]
    else:
        folders = [name, Path("logs", name)]
    for path in (Path(name), *(Path(folder, train_gpt.MODEL_FILE) for folder in folders)):
        if path.is_file():
            return path
    runs = sorted(path.parent.name for path in Path("logs").glob(f"*/{train_gpt.MODEL_FILE}"))
    raise ValueError(f"{name!r} is neither a file nor a RUN_ID with a model in logs/; there are: {', '.join(runs) or 'none'}")


def load(path: Path | str, settings: Sequence[str] = ()) -> train_gpt.GPT:
    """Load the model in an artifact, in float32 on the CPU. A state dict or checkpoint says nothing of its model and needs
    the settings that it was trained with, as NAME=value, and its DTYPE: bfloat16 rounds the rotary frequencies. Raises
    ValueError."""
    words = ["EMBED_FLOAT32=1", *settings, f"INIT_FROM={path}"]  # the table as the file has it
    config, _ = train_gpt.load_config(words, {})
    if config.dtype == "auto" and Path(path).is_file():
        if settings:
            raise ValueError(f"{path} does not say its DTYPE, nor do the settings; add the training's, such as DTYPE=bfloat16")
        raise ValueError(f"{path} does not say what its model is; add the settings of its training, such as DTYPE=bfloat16 "
                         "NUM_LAYERS=9 (the config event in its .jsonl log has them all)")
    model = train_gpt.GPT(config)
    train_gpt.load_weights(model, path)
    model.compute_dtype = torch.float32
    return model.float()


def choose(logits: Tensor, options, generator: torch.Generator) -> int:
    """Sample a token from logits, float32 (V,), by temperature, top-k and top-p (nucleus) sampling. A temperature of 0
    takes the likeliest."""
    if options.temperature == 0:
        return int(logits.argmax())
    largest = logits.topk(min(options.top_k or len(logits), len(logits)))  # sorted
    probabilities = (largest.values / options.temperature).softmax(0)
    if options.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.where(before < options.top_p, 0)
    return int(largest.indices[torch.multinomial(probabilities, 1, generator=generator)])


@torch.inference_mode()
def generate(model: train_gpt.GPT, ids: list[int], bos: int, options, generator: torch.Generator) -> Iterator[int]:
    """Yield the tokens that continue `ids` (at least one), until the document ends or there are `options.length`. Each
    token reads the text again, at most its last TRAIN_SEQ_LEN tokens."""
    ids = list(ids)
    for _ in range(options.length):
        x = model.hidden(torch.tensor([ids[-model.config.train_seq_len:]]))[:, -1:]
        token = choose(model.logits(x)[0, 0, :model.config.vocab_size], options, generator)
        if token == bos:
            return
        yield token
        ids.append(token)


def write_sample(model: train_gpt.GPT, tokenizer: Tokenizer, prompt: str, options, generator: torch.Generator) -> None:
    """Print the prompt and what follows it, each token as it comes."""
    start = [tokenizer.bos] if tokenizer.bos >= 0 else []
    ids = start + (tokenizer.encode([prompt], 1)[0].tolist() if prompt else [])
    if not ids:
        raise ValueError("--prompt must not be empty: this tokenizer has no token that begins a document")
    print(prompt, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character can have several tokens
    prefix = b"" if prompt else tokenizer.prefix
    started = time.perf_counter()
    count = 0
    for token in generate(model, ids, tokenizer.bos, options, generator):
        text = tokenizer.token_bytes[token].removeprefix(prefix)
        prefix = b""
        print(decoder.decode(text), end="", flush=True)
        count += 1
    seconds = time.perf_counter() - started
    print(decoder.decode(b"", final=True), flush=True)
    print(f"[{count} tokens, {count / seconds:.0f} tokens/s]", file=sys.stderr)


@torch.inference_mode()
def score(model: train_gpt.GPT, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Bits per byte of texts, each read alone from a boundary token on, in rows of TRAIN_SEQ_LEN. The last row reaches back
    over what was scored already, so that it is full, as in lm-evaluation-harness. The end of a text is not scored."""
    context = model.config.train_seq_len
    nats = 0.0
    for ids in tokenizer.encode(texts, 1):
        tokens = torch.tensor([tokenizer.bos, *ids.tolist()])
        for done in range(0, len(ids), context):
            end = min(done + context, len(ids))
            start = max(0, end - context)
            targets = tokens[start + 1:end + 1].clone()
            targets[:done - start] = -1  # scored already
            nats += float(model(tokens[None, start:end], targets[None])) * (end - done)
    return nats / math.log(2) / sum(len(text.encode("utf-8")) for text in texts)


def read_texts(path: Path) -> list[str]:
    """The texts of a .jsonl file, {"text": ...} a line, or one text of any other file. Raises ValueError and OSError."""
    try:
        content = path.read_bytes().decode("utf-8-sig")  # with the line ends that it has
        texts = [content]
        if path.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
        "".join(texts).encode("utf-8")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not UTF-8 text, or a line is not {{\"text\": ...}}: {error}") from None
    if not any(texts):
        raise ValueError(f"{path}: there is no text")
    return texts


def log_of(model: Path) -> Path | None:
    """The .jsonl log of a model in logs/RUN_ID/, or None."""
    log = model.resolve().parent.parent / f"{model.resolve().parent.name}.jsonl"
    return log if log.is_file() else None


def ask() -> Iterator[str]:
    """Yield the lines that are typed, with a history where there is a terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() has a history then)
    sign = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(sign)


def find_tokenizer(model: train_gpt.GPT, spec: str | None = None, log: Path | None = None) -> Tokenizer:
    """Load the tokenizer `spec`, or the one that the artifact or its run's log names. Raises ValueError if it is not the
    model's."""
    if not spec:
        spec = model.config.tokenizer_path
        if log and not Path(spec).is_file():  # an artifact does not keep an absolute path
            spec = read_events(log)[0]["config"]["TOKENIZER_PATH"]
    if spec.endswith((".model", ".json")) and not Path(spec).is_file():
        raise ValueError(f"tokenizer {spec} not found; give its path with --tokenizer")
    tokenizer = load_tokenizer(spec)
    wanted = model.config.tokenizer_sha256
    content = Path(spec).read_bytes() if Path(spec).is_file() else spec.encode()
    if wanted not in ("", sha256(content).hexdigest()) or tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(f"tokenizer {spec} is not the one that the model was trained with; give its path with --tokenizer")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="artifact, state dict or RUN_ID (default: the newest in logs/)")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--prompt", default="", help="how the text begins (default: a new document)")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--length", type=int, default=200, help="maximum tokens per sample (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep the likeliest with a total of P (default 0.95)")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal")
    parser.add_argument("--score", type=Path, metavar="FILE", help="score a text, or each text of a .jsonl, instead")
    options = parser.parse_intermixed_args()
    if options.temperature < 0 or options.top_k < 0 or not 0 < options.top_p <= 1:
        parser.error("--temperature and --top-k must be 0 or larger, --top-p above 0 and at most 1")
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    try:
        path = find_model(options.model)
        model = load(path, options.settings)
        tokenizer = find_tokenizer(model, options.tokenizer, log_of(path))
        if tokenizer.kind == "table" and (options.prompt or options.interactive or options.score):
            raise ValueError("text cannot be read: this tokenizer only decodes")
        if options.score:
            texts = read_texts(options.score)
            print(f"{len(texts)} texts, {score(model, tokenizer, texts):.6f} bits per byte")
            return
        generator = torch.Generator().manual_seed(options.seed)
        prompt = options.prompt.encode("utf-8", "replace").decode("utf-8")  # of bytes that are not UTF-8
        prompts = [prompt] * options.samples
        if options.interactive:
            print("One prompt per line; Ctrl-D ends.", file=sys.stderr)
            prompts = ask()
        for prompt in prompts:
            write_sample(model, tokenizer, prompt, options, generator)
            print()
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
