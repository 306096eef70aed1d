"""Lines of code per top-level folder, so that growth is seen when it happens."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

SUFFIXES = {".py", ".cpp", ".h", ".lua"}


def main() -> None:
    """Count the lines of tracked source files and print them as a table."""
    root = Path(__file__).parent.parent
    tracked = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in tracked.splitlines():
        path = root / name
        if path.suffix in SUFFIXES and path.is_file():
            folder = name.split("/")[0] if "/" in name else "."
            lines[folder] += len(path.read_text().splitlines())
            files[folder] += 1
    table = Table("folder", "files", "lines")
    for folder, count in sorted(lines.items()):
        table.add_row(folder, str(files[folder]), str(count))
    table.add_row("total", str(files.total()), str(lines.total()))
    Console().print(table)


if __name__ == "__main__":
    main()
