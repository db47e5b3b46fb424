"""`kvist bench tiers`: what a disk tier is worth, and what writing to it costs.

It turns flags into engines and measurements into a table or JSON; the measuring is the bench room's. The tier's folder is made anew
and removed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from kvist.bench.workloads import Work
from kvist.cli.fetching import fetch
from kvist.cli.options import JsonFlag, engine_options, takes
from kvist.cli.params import option
from kvist.cli.terminal import print_json, progress
from kvist.config import EngineOptions, check_options
from kvist.errors import ConfigError

TIER = "disk=4GiB:{}"


def _check(engine: EngineOptions) -> None:
    """Raises ConfigError for what no measurement with a tier can have."""
    if engine.kv_tiers is not None:
        raise ConfigError("kvist bench tiers makes its own tier; leave kv_tiers out, and say where with --folder.")
    if not (engine.enable_prefix_caching and engine.use_cache) or engine.kv_allocator != "paged":
        raise ConfigError(
            "kvist bench tiers measures a disk tier, which keeps the prefixes of paged blocks; leave out "
            "--no-enable-prefix-caching, --no-use-cache and --kv-allocator."
        )
    check_options(replace(engine, kv_tiers=TIER.format("folder")))


@takes(engine=engine_options(check=_check, max_num_batched_tokens=512))
def tiers_command(
    engine: EngineOptions,
    folder: Annotated[Path | None, option(help="Where the tier's folder is made; without it where temporary files go.")] = None,
    prefix_tokens: Annotated[int, option(min=64, help="Length of the prefix that is restored.")] = 1000,
    decode_tokens: Annotated[int, option(min=16, help="Tokens that each of eight requests decodes in a round.")] = 256,
    rounds: Annotated[int, option(min=1, help="Rounds; the median is reported, with the smallest and the largest.")] = 5,
    as_json: JsonFlag = False,
) -> None:
    """Restoring a prefix from disk against computing it, and decoding with and without a tier's writes."""
    try:
        place = Path(tempfile.mkdtemp(prefix="kvist-tier-", dir=folder))
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise ConfigError(f"The tier's folder cannot be made in {where}: {error.strerror}; name another with --folder.") from error
    try:
        fetch(engine.model)
        report = _measure(engine, place, prefix_tokens, decode_tokens, rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if as_json:
        print_json(report)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "median", "min", "max", "unit")
    for row in report["measurements"]:
        table.add_row(row["name"], *(f"{row[key]:,.1f}" for key in ("median", "min", "max")), row["unit"])
    Console().print(table)


def _measure(engine: EngineOptions, folder: Path, prefix_tokens: int, decode_tokens: int, rounds: int) -> dict[str, Any]:
    from kvist import LLM
    from kvist.bench import machine, measure, tiers

    measurements: list[measure.Measurement] = []
    work = replace(tiers.DECODE, new_tokens=decode_tokens)
    assert isinstance(work, Work)
    with progress("Restoring", rounds) as update, LLM(**asdict(replace(engine, kv_tiers=TIER.format(folder / "a")))) as llm:
        tiers.require_room(llm, prefix_tokens, work)
        for done, so_far in enumerate(
            tiers.measure_restore(llm, measure.generator(llm), folder / "a", prefix_tokens, rounds), start=1
        ):
            measurements = so_far
            update(done)
        config = llm.config
    without = replace(engine, kv_tier_fsync=None)
    with LLM(**asdict(without)) as plain, LLM(**asdict(replace(engine, kv_tiers=TIER.format(folder / "b")))) as tiered:
        generators = measure.generator(plain), measure.generator(tiered)
        measurements += tiers.measure_decode(*generators, config.model.vocab_size, rounds, work)
        snapshot = tiered.engine.snapshot().tier
    assert snapshot is not None
    assert config.disk_tier is not None
    return {
        "command": "tiers",
        "machine": machine.machine_facts(),
        "engine": {
            "model": config.served_model_name,
            "profile": config.profile,
            "num_threads": config.num_threads,
            "num_kv_blocks": config.num_kv_blocks,
            "kv_tier_fsync": config.disk_tier.sync,
        },
        "prefix_tokens": prefix_tokens,
        "measurements": [measurement.as_dict() for measurement in measurements],
        "written": {"blocks": snapshot.store.stored_blocks, "dropped": snapshot.dropped_blocks},
    }
