"""The command line: one module for each group of commands, all of them thin.

A command reads its options, asks the `PlanRoom`, and shows what came of it: a table or a sentence
for people, or JSON for machines. Nothing heavy is imported before a command needs it, so that
`planroom --help` answers at once.
"""

from planroom.cli.app import main

__all__ = ["main"]
