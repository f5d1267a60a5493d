"""The command line: `jflash check`, `jflash explain` and `jflash bench`."""

from jflash.cli.command import main as main
