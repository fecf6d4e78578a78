"""Ranks of one Python environment that serve requests on their standard input, so that two environments can take turns."""

import subprocess
from collections.abc import Mapping, Sequence


class Installation:
    """Processes that answer each line of their input with one line.

    Args:
        commands: words that start each rank. A rank prints one line when it is ready.
        environment: variables of all ranks.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self.processes = [subprocess.Popen(c, stdin=pipe, stdout=pipe, text=True, env=environment) for c in commands]
        self._answers()

    def ask(self, line: str) -> list[str]:
        """Send a line to all ranks and return the answer of each."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def _answers(self) -> list[str]:
        lines = [process.stdout.readline().strip() for process in self.processes if process.stdout]
        if not all(lines):
            self.close()
            raise SystemExit("a rank ended; its error stands above")
        return lines
