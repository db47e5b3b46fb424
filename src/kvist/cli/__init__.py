"""The command line: one file per command, and `run`, the console script.

Invariant: importing this package imports nothing else, so that Ctrl-C while the rest is imported ends quietly too.
"""


def run() -> None:
    """`kvist`, with the process's own arguments; leaves through SystemExit."""
    import sys

    try:
        from kvist.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
