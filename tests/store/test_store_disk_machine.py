"""The disk tier against a naive dict, through puts, gets, damage, restarts and kills in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.disk import FAST, FaultyFiles, abandon, get, known, names, open_store, put

ALL = names(40)
QUOTA = 6000
LISTS = st.lists(st.sampled_from(ALL), min_size=1, max_size=6, unique=True)


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.known: set[bytes] = set()
        """What was stored and not told lost: the naive model, whose payloads follow from the names."""

    @initialize(sync=st.sampled_from(["always", "segment", "never"]))
    def begin(self, sync: str) -> None:
        self.sync = sync
        self.open(FaultyFiles())

    def open(self, files: FaultyFiles) -> None:
        self.files = files
        self.store = open_store(self.folder, QUOTA, sync=self.sync, files=files)

    @rule(batch=LISTS)
    def put(self, batch: list[bytes]) -> None:
        stored = put(self.store, *batch)
        assert set(batch) - self.known <= set(stored) <= set(batch), "only what was there may have made room meanwhile"
        self.known -= set(self.store.take_lost())
        self.known |= set(stored)

    @rule(batch=LISTS)
    def get(self, batch: list[bytes]) -> None:
        hits = get(self.store, *batch)
        self.known -= set(self.store.take_lost())
        assert {name for name, hit in zip(batch, hits, strict=True) if hit} == self.known & set(batch)

    @rule(kind=st.sampled_from(["write", "sync", "rename", "unlink", "truncate"]), batch=LISTS)
    def put_on_a_bad_disk(self, kind: str, batch: list[bytes]) -> None:
        self.files.fail_at = {kind: self.files.calls[kind] + 1}
        stored = put(self.store, *batch)
        self.files.fail_at = {}
        self.known -= set(self.store.take_lost())
        self.known |= set(stored)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Somebody writes into a file, or cuts it: what is hit may be lost, nothing else."""
        paths = sorted(self.folder.glob("0*"))
        if not paths:
            return
        path = data.draw(st.sampled_from(paths))
        at = data.draw(st.integers(0, max(0, path.stat().st_size - 1)))
        with path.open("r+b") as file:
            if data.draw(st.booleans()):
                file.truncate(at)
            else:
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([255 - old[0]]) if old else b"")
        get(self.store, *ALL)
        self.known -= set(self.store.take_lost())

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        if killed:
            abandon(self.store)
        else:
            self.store.close()
        self.known -= set(self.store.take_lost())
        self.open(FaultyFiles())
        found = set(known(self.store))
        assert found == {name for name, hit in zip(ALL, get(self.store, *ALL), strict=True) if hit} | (
            found & set(self.store.take_lost())
        )
        # A file that could not be removed may come back; damage in a header may take what is behind it.
        self.known = set(known(self.store))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        assert set(known(self.store)) == self.known
        assert stats.num_blocks == len(self.known)
        assert stats.used_bytes <= QUOTA
        assert sum(path.stat().st_size for path in self.folder.glob("0*")) <= QUOTA
        assert not self.store.is_read_only, "no two failures come in a row"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
