"""What can be wrong with a checkpoint folder: one class per remedy.

`ConfigError` is fixed in `config.json`; `CheckpointError` by fetching or converting weight files again. Both name all
faults at once, so that nobody repairs a folder one message at a time.
"""

from collections.abc import Sequence


class ConfigError(ValueError):
    """`config.json` describes a model that cannot run.

    Attributes:
        problems: one line per broken field, the field's full name first.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join((f"{where}: {count} in the configuration", *self.problems)))


class CheckpointError(ValueError):
    """Weight files are absent, damaged, or not those that the configuration asks for.

    Attributes:
        problems: one line per fault, the file or tensor named in each.
    """

    def __init__(self, where: str, summary: str, problems: Sequence[str], remedy: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join((f"{where}: {summary}", *self.problems)) + f"\n{remedy}")
