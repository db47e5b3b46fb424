"""`kvist bench prefix`: what sharing a prefix is worth, as a table, JSON and a plot.

It turns flags into engines and runs into a report; the measuring is the bench room's. Two engines live side by side, one that
shares and one that does not.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from kvist.cli.fetching import fetch
from kvist.cli.options import JsonFlag, KeptFile, engine_options, takes
from kvist.cli.params import option
from kvist.cli.terminal import print_json, progress, say
from kvist.config import EngineOptions
from kvist.errors import ConfigError


@takes(engine=engine_options())
def prefix_command(
    engine: EngineOptions,
    requests: Annotated[int, option(min=2, help="Requests behind one prompt.")] = 50,
    prefix_tokens: Annotated[int, option(min=1, help="Tokens that all of them have in common.")] = 1024,
    own_tokens: Annotated[int, option(min=1, help="Tokens of each request's own, behind those.")] = 32,
    new_tokens: Annotated[int, option(min=1, help="Tokens of each answer.")] = 16,
    cached_tokens: Annotated[int, option(min=1, help="Length of the prompt that is asked for again.")] = 4096,
    rounds: Annotated[int, option(min=1, help="Rounds; the median is reported, with the smallest and the largest.")] = 3,
    save: KeptFile = None,
    plot: Annotated[Path | None, option(metavar="FILE.png", help="Draw memory over time and the first token.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """A crowd behind one prompt with sharing and without, and the first token of a prompt that is cached."""
    from kvist.bench import machine, prefix, render
    from kvist.bench.kept import Kept

    if not (engine.enable_prefix_caching and engine.use_cache):
        raise ConfigError("kvist bench prefix runs with sharing and without; leave --no-enable-prefix-caching and --no-use-cache.")
    if plot is not None:
        render.check_plot(plot)
    crowd = prefix.Crowd(requests, prefix_tokens, own_tokens, new_tokens)
    prompt = prefix.CachedPrompt(cached_tokens)
    head = {
        "command": "prefix",
        "machine": {"cpu": machine.cpu_facts()},
        "engine": asdict(engine),
        "crowd": asdict(crowd),
        "prompt": asdict(prompt),
    }
    kept = Kept(head, save)
    due = [(n, part) for n in range(rounds) for part in prefix.PARTS if not kept.select(part=part, round=n)]
    if due:
        _run(engine, due, kept, crowd, prompt)
    report = {**head, "machine": machine.machine_facts(), **prefix.summarize(kept, crowd, engine.block_size)}
    if plot is not None:
        prefix.plot(report, kept, plot)
    if report["preemptions"]:
        say(f"kvist: warning: {report['preemptions']} requests gave way to others: the pool is too small for this crowd.")
    if as_json:
        return print_json(report)
    return _print(report)


def _run(engine: EngineOptions, due: list[tuple[int, str]], kept: Any, crowd: Any, prompt: Any) -> None:
    from kvist import LLM
    from kvist.bench import measure, prefix

    fetch(engine.model)
    with ExitStack() as stack, progress("Measuring", len(due)) as update:
        llms = {True: stack.enter_context(LLM(**asdict(engine)))}
        prefix.check_room(llms[True], crowd, prompt)
        if any(part == prefix.ALONE for _, part in due):
            nothing_kept = replace(engine, eviction_policy=None, kv_pin_budget=None, kv_priority_budget=None)
            without = replace(nothing_kept, enable_prefix_caching=False)
            llms[False] = stack.enter_context(LLM(**asdict(without)))
        for llm in llms.values():
            measure.warm_up(measure.generator(llm), llm.config.model.vocab_size)
        for done, (number, part) in enumerate(due):
            update(done)
            kept.add(prefix.run_part(llms[part != prefix.ALONE], part, number, crowd, prompt))


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "median", "min", "max", "unit")
    for row in report["measurements"]:
        table.add_row(row["name"], *(f"{row[key]:,.2f}" for key in ("median", "min", "max")), row["unit"])
    console = Console()
    console.print(table)
    crowd, blocks, computed = report["crowd"], report["blocks"], report["computed_tokens"]
    console.print(
        f"{crowd['num_requests']} requests with {crowd['prefix_tokens']:,} tokens in common held {blocks['peak_shared']:,} blocks "
        f"at most: one copy of the prefix takes {blocks['one_copy']:,} in all, a copy each {blocks['copies']:,}. "
        f"Tokens computed: {computed['shared']:,} with sharing, {computed['alone']:,} without.",
        highlight=False,
    )
