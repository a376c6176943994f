"""A data set that prepare.py has begun, in OUT.unfinished, from which the same command goes on.

    part-1-of-1.lock      held while a process writes that part
    part-1-of-1/          its shards, and progress.json
    NAME/                 the tokenizer and, when all parts are done, their shards: the data set
"""

import json
import os
import sys
import time
from pathlib import Path

from shards import ShardWriter, sync

SAVE_S = 10  # from one save to the next


class Progress:
    """What is done of a part. `state` is what progress.json holds:

    command: names and values of what decides the result; the same in all parts.
    documents, digest: the documents that were read, and the SHA-256 of their splits and hashes.
    splits, checked: counts and shards of those that were encoded.
    done: whether that is all. Then prepare.py adds what it needs for the manifest, and whole_digest: as digest, but of all
    documents, so that it is the same in all parts."""

    def __init__(self, folder: Path, part: tuple[int, int]):
        """`folder` is OUT.unfinished/NAME, `part` the number of the part, from 1, and of all parts."""
        self.folder, self.parent = folder, folder.parent
        self.part, self.parts = part
        self.own = self.folder_of(self.part)
        self.own.mkdir(exist_ok=True)
        self.saved_at = time.monotonic()
        self.state = self.read(self.own) or {"documents": 0, "digest": "", "splits": {}, "checked": {}, "done": False}
        if self.state["documents"] and not self.state["done"]:
            print(f"{self.own} resumes after document {self.state['documents']:,}; the text up to there is only read again",
                  file=sys.stderr)

    def folder_of(self, number: int) -> Path:
        return self.parent / f"part-{number}-of-{self.parts}"

    def read(self, folder: Path) -> dict:
        """Return the saved state of a part, {} if there is none."""
        path = folder / "progress.json"
        try:
            return json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; {self.way_out()}") from None

    def way_out(self) -> str:
        return f"delete {self.parent} to begin again, or choose another --out"

    def compare(self, command: dict) -> None:
        """Set the command. Raises ValueError if a part that was saved has other values."""
        for path in sorted(self.parent.glob("part-*/progress.json")):
            saved = self.read(path.parent).get("command", {})  # none if another part has just joined all and removed this
            for name, value in command.items():
                if saved.get(name, value) != value:
                    raise ValueError(f"{path.parent} was begun with {name} {saved[name]!r}, but now it is {value!r}; go on with "
                                     f"the same command and text, {self.way_out()}")
        self.state["command"] = command

    def save(self, writers: dict[str, ShardWriter], wait_s: float = 0, **changes) -> None:
        """Save what was written so far, with changes of the state, if the last save was `wait_s` seconds ago."""
        if time.monotonic() - self.saved_at < wait_s:
            return
        for writer in writers.values():
            writer.sync()
        self.state.update(changes, splits={split: writer.split for split, writer in writers.items()})
        path = self.own / "progress.tmp"
        path.write_text(json.dumps(self.state), encoding="utf-8")
        sync(path)
        os.replace(path, path.with_suffix(".json"))
        self.saved_at = time.monotonic()

    def join(self) -> list[dict]:
        """Move the shards of all parts into the data set, if all are done. Return the parts' states, in which the shards have
        their new names; or those that are done. Raises ValueError if a shard is missing, or if the parts' texts differ."""
        states = [self.read(self.folder_of(number)) for number in range(1, self.parts + 1)]
        done = [state for state in states if state.get("done")]
        if len(done) < self.parts:
            return done
        if len({state.get("whole_digest") for state in states}) > 1:
            raise ValueError(f"the parts were not made from the same text; {self.way_out()}")
        self.folder.mkdir(exist_ok=True)
        for split in ("train", "val"):
            count = 0
            for number, state in enumerate(states, 1):
                for shard in state["splits"][split]["shards"]:
                    source = self.folder_of(number) / shard["file"]
                    shard["file"] = f"{self.folder.name}_{split}_{count:06d}.bin"
                    count += 1
                    if source.exists():
                        os.replace(source, self.folder / shard["file"])
                    elif not (self.folder / shard["file"]).exists():  # an earlier join has moved it
                        raise ValueError(f"{source} is missing; {self.way_out()}")
        return states
