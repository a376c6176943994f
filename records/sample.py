"""Generate text with a trained model.

    python records/sample.py final_model.int8.ptz --prompt "Fellow citizens," --samples 3
    python records/sample.py final_model.int8.ptz --interactive                  one prompt per line; Ctrl-D ends
    python records/sample.py huggingface/ --temperature 0                        a folder of export_hf.py

A sample ends where the model ends the document, or after --length tokens. final_model.pt and older artifacts do not contain
their settings: add those of the training, for example NUM_LAYERS=4 MODEL_DIM=192. Tokens/s are printed to stderr.
"""

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from common import ROOT, pairs_of
from export_hf import load_file, load_folder

sys.path += [str(ROOT), str(ROOT / "data")]

import train_gpt  # noqa: E402
from shards import Tokenizer, load_tokenizer  # noqa: E402


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
    """Yield the tokens that continue `ids` (at least one), until the document ends or there are `options.length`. The
    context has TRAIN_SEQ_LEN tokens; when it is full, generation continues from its last half."""
    ids = list(ids)
    window = model.config.train_seq_len
    cached = window
    told = False
    for _ in range(options.length):
        if cached == window:  # at the start, or when the cache is full
            if len(ids) >= window and not told:
                print(f"[the context of TRAIN_SEQ_LEN={window} tokens is full; the text goes on from its last half]",
                      file=sys.stderr)
                told = True
            caches = [{} for _ in model.blocks]
            tokens = ids if len(ids) < window else ids[-max(1, window // 2):]
            cached = 0
        x = model.hidden(torch.tensor([tokens]), caches)[:, -1:]
        cached += len(tokens)
        token = choose(model.logits(x)[0, 0, :model.config.vocab_size], options, generator)
        if token == bos:
            return
        yield token
        ids.append(token)
        tokens = [token]


def write_sample(model: train_gpt.GPT, tokenizer: Tokenizer, prompt: str, options, generator: torch.Generator) -> None:
    """Print the prompt and what follows it, each token as it comes."""
    if prompt and tokenizer.kind == "table":
        raise ValueError("--prompt cannot be read: this tokenizer only decodes")
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


def load(path: Path | str, settings: Sequence[str] = ()) -> train_gpt.GPT:
    """Load an artifact, a state dict with its settings as NAME=value, or a folder of export_hf.py, in float32 on the CPU.
    Raises ValueError."""
    return load_folder(path) if Path(path).is_dir() else load_file(path, **pairs_of(settings))


def find_tokenizer(model: train_gpt.GPT, spec: str | None) -> Tokenizer:
    """Load the tokenizer `spec`, or the one that the artifact names. Raises ValueError if it is not the model's."""
    spec = spec or model.config.tokenizer_path
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
    parser.add_argument("model", type=Path, help="artifact, state dict, or folder of export_hf.py")
    parser.add_argument("settings", nargs="*", default=[], metavar="VARIABLE=value",
                        help="settings of the training, if the file has none")
    parser.add_argument("--prompt", default="", help="how the text begins (default: a new document)")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--length", type=int, default=200, help="maximum tokens per sample (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep the likeliest whose probabilities add up to P (default 0.95)")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--tokenizer", help="file or name (default: as the artifact says)")
    parser.add_argument("--interactive", action="store_true", help="read prompts from the terminal")
    options = parser.parse_args()
    if options.temperature < 0 or options.top_k < 0 or not 0 < options.top_p <= 1:
        parser.error("--temperature and --top-k must be 0 or larger, --top-p above 0 and at most 1")
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    try:
        model = load(options.model, options.settings)
        tokenizer = find_tokenizer(model, options.tokenizer)
        generator = torch.Generator().manual_seed(options.seed)
        prompts = [options.prompt] * options.samples
        if options.interactive:
            print("One prompt per line; Ctrl-D ends.", file=sys.stderr)
            prompts = (line.rstrip("\n") for line in sys.stdin)
        for prompt in prompts:
            write_sample(model, tokenizer, prompt, options, generator)
            print()
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
