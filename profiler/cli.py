"""Shared command-line plumbing: commands found by listing a folder and imported only when called."""

import importlib
import pkgutil
import sys
from typing import Any

import click

from profiler.core.errors import SparsightError, unknown


class LazyGroup(click.Group):
    """A click group whose subcommands are the modules of a package, each with a `command` attribute.

    A module is imported when its command runs or its help is asked for; the one-line summaries of `--help`
    come from the package's `SUMMARIES` mapping, so that listing commands imports none of them.
    """

    def __init__(self, *args: Any, package: str, default: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.package = package
        self.default = default

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._summaries())

    def _summaries(self) -> dict[str, str]:
        package = importlib.import_module(self.package)
        names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
        return {name.rstrip("_"): package.SUMMARIES.get(name.rstrip("_"), "") for name in names}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries():
            return None
        package = importlib.import_module(self.package)
        modules = {m.name.rstrip("_"): m.name for m in pkgutil.iter_modules(package.__path__)}
        module = importlib.import_module(f"{self.package}.{modules[cmd_name]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in self._summaries():
            raise unknown("command", name, self._summaries())
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default and args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._summaries().items()))


def run(group: click.Group, prog_name: str) -> None:
    """Run a command group; a SparsightError becomes one message on stderr and its exit code."""
    try:
        group.main(prog_name=prog_name, standalone_mode=False)
    except SparsightError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
