"""`kvist bench`: its commands, and `latency` and `throughput`: the common works on this machine, in this process.

It turns flags into an engine and measurements into a table or JSON; the works and the timing are the bench room's. Greedy, end
tokens ignored, prefix caching off unless it is asked for. The machine stands beside the figures, without which they mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from kvist.bench.workloads import WORKS, Work, choose_works
from kvist.cli.bench_compare import compare_command, show_command
from kvist.cli.bench_fragmentation import fragmentation_command
from kvist.cli.bench_memory import eviction_command, manager_command
from kvist.cli.bench_prefix import prefix_command
from kvist.cli.bench_sweep import sweep_command
from kvist.cli.bench_tiers import tiers_command
from kvist.cli.fetching import fetch
from kvist.cli.options import JsonFlag, engine_options, read_text, takes
from kvist.cli.params import option
from kvist.cli.terminal import dim, print_json, progress, say
from kvist.config import EngineOptions
from kvist.errors import UsageError
from kvist.sizes import format_bytes

Rounds = Annotated[int, option(min=1, help="Rounds of each work; the median is reported, with the smallest and the largest.")]
Works = Annotated[str, option(help="Works to run, separated by commas.")]
LATENCY_WORKS = "prefill_512,prefill_4096,decode_1,decode_1_deep"
ALL_WORKS = ",".join(work.name for work in WORKS)


def print_table(report: dict[str, Any]) -> None:
    """The same facts as the JSON report, for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    cpu, engine = report["machine"]["cpu"], report["engine"]
    console.print(f"{cpu['name']}, {cpu['usable_cores']} of {cpu['cores']} cores; {' '.join(cpu['flags'])}", highlight=False)
    if engine:
        console.print(
            f"{engine['model']}: isa {engine['isa']}, {engine['num_threads']} threads, KV {engine['kv_cache_dtype']}",
            highlight=False,
        )
    table = Table("work", "median", "min", "max", "unit")
    for row in report["measurements"]:
        table.add_row(row["name"], *(f"{row[key]:,.1f}" for key in ("median", "min", "max")), row["unit"])
    console.print(table)
    for name in report["skipped"]:
        console.print(f"skipped: {name}", highlight=False)
    if report["memory"]:
        memory = report["memory"]
        console.print(f"resident memory {format_bytes(memory['resident_bytes'])}, at its peak {format_bytes(memory['peak_bytes'])}")
    if report["scheduler_share"] is not None:
        console.print(f"scheduler: {report['scheduler_share']:.1%} of the time of a step")
    baseline = report.get("baseline") or {"ratios": {}}
    if baseline["ratios"]:
        console.print(f"Beside the baseline of {baseline['beside']}:", highlight=False)
    for name, ratio in baseline["ratios"].items():
        console.print(f"{name}: {ratio:.2f} × the baseline", highlight=False)


def run_works(options: EngineOptions, works: Sequence[Work], rounds: int, command: str) -> dict[str, Any]:
    """Load once, run every work that fits the context, and report with machine and engine."""
    from kvist import LLM
    from kvist.bench import latency, machine, measure, throughput

    fetch(options.model)
    llm = LLM(**asdict(options), report=lambda message: say(dim(message)))
    config = llm.engine.config
    generate = measure.generator(llm)
    measure.warm_up(generate, config.model.vocab_size)
    run = throughput.measure_throughput if command == "throughput" else latency.measure_latency
    fitting = [work for work in works if work.num_tokens <= config.effective_max_len]
    measurements = []
    with progress("Measuring", len(fitting)) as update:
        for done, work in enumerate(fitting):
            update(done)
            measurements += run(generate, [work], rounds, config.model.vocab_size)
    snapshot = llm.engine.snapshot()
    return {
        "command": command,
        "machine": machine.machine_facts(),
        "engine": {
            "model": config.served_model_name,
            "isa": config.isa,
            "profile": config.profile,
            "num_threads": config.num_threads,
            "quantization": config.quantization,
            "kv_cache_dtype": config.spec.kv_format,
            "enable_prefix_caching": config.enable_prefix_caching,
            "use_cache": config.use_cache,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        },
        "measurements": [measurement.as_dict() for measurement in measurements],
        "skipped": [
            f"{work.name} needs {work.num_tokens} tokens, the context holds {config.effective_max_len}"
            for work in works
            if work not in fitting
        ],
        "memory": {"resident_bytes": machine.resident_bytes(), "peak_bytes": machine.peak_resident_bytes()},
        "scheduler_share": snapshot.scheduler_seconds / snapshot.step_seconds if snapshot.step_seconds else None,
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        print_table(report)


@takes(engine=engine_options(enable_prefix_caching=False))
def latency_command(
    engine: EngineOptions,
    works: Works = LATENCY_WORKS,
    rounds: Rounds = 5,
    startup: Annotated[
        bool, option("--startup", help="Instead of the works, time fresh processes from their start to the first token.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Time to the first token and time per token after it."""
    chosen = choose_works(works)
    if not startup:
        return _print(run_works(engine, chosen, rounds, "latency"), as_json)
    if works != LATENCY_WORKS:
        raise UsageError("--startup runs no works: leave --works away, or --startup.")
    from kvist.bench import machine
    from kvist.bench.latency import measure_startup

    if not machine.has_bytecode():
        say(machine.NO_BYTECODE)
    measurements = [measurement.as_dict() for measurement in measure_startup(engine, rounds)]
    facts = machine.machine_facts()
    report = {"command": "latency --startup", "machine": facts, "engine": None, "measurements": measurements}
    return _print({**report, "skipped": [], "memory": None, "scheduler_share": None}, as_json)


@takes(engine=engine_options(enable_prefix_caching=False))
def throughput_command(
    engine: EngineOptions,
    works: Works = ALL_WORKS,
    rounds: Rounds = 3,
    baseline: Annotated[
        Path | None,
        option(metavar="FILE.json", help="Compare with what --json printed before (or a list of such); warns where slower."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokens a second: prompts, single requests and batches."""
    from kvist.bench.baseline import TOLERANCE, against_baseline, read_baseline

    kept = None if baseline is None else read_baseline(baseline, read_text(baseline))
    report = run_works(engine, choose_works(works), rounds, "throughput")
    if kept is not None:
        against = against_baseline(report, kept)
        report["baseline"] = against.as_dict()
        if against.reason is not None:
            say(f"kvist: warning: nothing was compared: {against.reason}.")
        for name in against.slower:
            say(f"kvist: warning: {name} is slower than {TOLERANCE:.0%} of the baseline: {against.ratios[name]:.2f} ×.")
    _print(report, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "compare": compare_command,
    "show": show_command,
    "fragmentation": fragmentation_command,
    "sweep": sweep_command,
    "eviction": eviction_command,
    "manager": manager_command,
    "tiers": tiers_command,
    "prefix": prefix_command,
    "latency": latency_command,
    "throughput": throughput_command,
}
