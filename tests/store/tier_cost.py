"""What a start of the disk tier costs, and the digest of what is read from it; figures of docs/memory.md.

    python tests/store/tier_cost.py [--blocks 60000] [--block-bytes 368640] [--folder FOLDER]

It writes segments that have everything but the blocks' bytes, in whose place are holes: a start reads footers. Then a new process
opens the store and tells the decider what was found, as a server does. By default blocks are those of SmolLM2-135M in bf16. Prints
the seconds and the memory that this took, and GB/s of digests over one block.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from kvist.kv.block import BlockHash
from kvist.kv.origins import Origin, encode_format, max_bytes
from kvist.kv.spec import KVGroup, KVSpec
from kvist.kv.tiers import TierDecider, name_of
from kvist.store.disk import DiskStore
from kvist.store.files import Files

BLOCK_SIZE, PREFIX_BLOCKS = 16, 64
ROUNDS = 5
SPEC = KVSpec(num_kv_heads=1, head_dim=16, kv_format="bf16", block_size=BLOCK_SIZE, groups=(KVGroup((0,), None),))


class WithHoles(Files):
    """Of a record its header is written, and its payload left out."""

    def __init__(self, payload: int) -> None:
        self._payload = payload

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        super().write(fd, [buffer for buffer in buffers if buffer.nbytes != self._payload], offset)


def open_store(folder: Path, blocks: int, block_bytes: int, files: Files | None = None) -> DiskStore:
    quota = 2 * blocks * block_bytes
    return DiskStore(folder, quota, block_bytes, max_about=max_bytes(BLOCK_SIZE), sync="never", files=files)


def write(folder: Path, blocks: int, block_bytes: int) -> None:
    """Prompts of 64 blocks each."""
    store, payload = open_store(folder, blocks, block_bytes, WithHoles(block_bytes)), memoryview(bytes(block_bytes))
    form, root = encode_format("bf16", BLOCK_SIZE), BlockHash(hashlib.sha256(b"root").digest())
    parent, records = root, []
    for block in range(blocks):
        name = BlockHash(hashlib.sha256(block.to_bytes(4, "little")).digest())
        tokens = array("I", range(BLOCK_SIZE * block, BLOCK_SIZE * (block + 1)))
        records.append(
            (name_of(0, name), Origin(form, root, root if block % PREFIX_BLOCKS == 0 else parent, tokens).encode(), payload)
        )
        parent = name
    store.put(records)
    store.close()


def resident_bytes() -> int:
    kib = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(kib)


def start(folder: Path, blocks: int, block_bytes: int) -> None:
    before, began = resident_bytes(), time.perf_counter()
    store = open_store(folder, blocks, block_bytes)
    decider = TierDecider(SPEC)
    decider.found(store.records())
    seconds, grown = time.perf_counter() - began, resident_bytes() - before
    stats = store.stats()
    assert stats.found_blocks == blocks, "all were found"
    print(f"{blocks:,} blocks in {stats.num_segments:,} segments: {seconds:.2f} s, {grown / 1e6:.0f} MB")
    store.close()


def rate(digest: Callable[[bytes], object], data: bytes) -> float:
    """The best of some rounds, in GB/s."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(100):
            digest(data)
        times.append(time.perf_counter() - began)
    return 100 * len(data) / min(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=60_000)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--folder", type=Path, help="Where the segments are written; without it where temporary files go.")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.blocks, options.block_bytes
    if options.start is not None:
        start(options.start, *sizes)
        return
    with tempfile.TemporaryDirectory(prefix="kvist-tier-cost-", dir=options.folder) as place:
        write(Path(place), *sizes)
        command = [sys.executable, __file__, "--start", place, "--blocks", str(sizes[0]), "--block-bytes", str(sizes[1])]
        for _ in range(ROUNDS):
            subprocess.run(command, check=True)
    data = bytes(options.block_bytes)
    for name, digest in (("SHA-256", hashlib.sha256), ("CRC-32", zlib.crc32), ("BLAKE2b", hashlib.blake2b)):
        print(f"{name}: {rate(digest, data):.1f} GB/s")


if __name__ == "__main__":
    main()
