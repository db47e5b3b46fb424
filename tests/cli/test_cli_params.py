"""Commands from signatures: what each type reads, what holds without a flag, and where the help has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from click.testing import CliRunner

from kvist.cli.params import Group, argument, make_command, option


def run(function: Any, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_command(function, "sample"), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def sample(
    names: Annotated[list[str] | None, argument(help="What is named.")] = None,
    count: Annotated[int, option(min=2, help="How many.")] = 3,
    share: Annotated[float | None, option(panel="More", help="Which part.")] = None,
    file: Annotated[list[Path] | None, option("--file", "-f", help="Where.")] = None,
    keep: Annotated[bool, option(panel="More", help="Whether it stays.")] = True,
    json: Annotated[bool, option("--json", help="As JSON.")] = False,
) -> None:
    """Show what was
    read.

    And more.
    """
    print((names, count, share, file, keep, json))


def test_without_flags_the_defaults_hold() -> None:
    assert run(sample)[:2] == (0, f"{(None, 3, None, None, True, False)}\n")


def test_each_type_reads_its_own() -> None:
    given = ["a", "--count", "4", "-f", "x", "b", "--share", "-0.5", "--file", "y z", "--no-keep", "--json"]
    assert run(sample, *given)[1] == f"{(['a', 'b'], 4, -0.5, [Path('x'), Path('y z')], False, True)}\n"
    assert run(sample, "--", "--count")[1] == f"{(['--count'], 3, None, None, True, False)}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--count", "1"], "1 is not in the range x>=2"),
        (["--count", "many"], "'many' is not a valid integer"),
        (["--share", "half"], "'half' is not a valid float"),
        (["--share"], "requires an argument"),
        (["--no-json"], "No such option"),
    ],
)
def test_a_value_of_another_kind_is_bad_usage(arguments: list[str], words: str) -> None:
    status, out, err = run(sample, *arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_what_has_no_default_must_be_given() -> None:
    def command(name: Annotated[str, argument(help="A name.")], size: Annotated[int, option(help="A size.")]) -> None:
        print(name, size)

    assert run(command, "a", "--size", "2")[1] == "a 2\n"
    for arguments in ([], ["a"], ["--size", "2"]):
        assert run(command, *arguments)[0] == 2


def test_the_help_has_flags_by_panel_and_each_once() -> None:
    text = run(sample, "--help")[1]
    assert [line for line in text.splitlines() if line.endswith(":")] == ["Arguments:", "Options:", "More:"]
    places = [
        text.index(words) for words in ("read.", "What is named.", "How many.", "Where.", "As JSON.", "Which part.", "stays.")
    ]
    assert places == sorted(places)
    assert text.count("What is named.") == 1
    assert "[default: 3; x>=2]" in text
    assert "[default: keep]" in text
    assert "[default: False]" not in text


def test_a_group_lists_its_commands_in_order_with_their_beginnings() -> None:
    group = Group("all", commands=[make_command(sample, "zeta"), make_command(sample, "alpha", "In short.")])
    text = CliRunner().invoke(group, ["--help"]).stdout
    assert text.index("zeta   Show what was read.\n") < text.index("alpha  In short.\n")
