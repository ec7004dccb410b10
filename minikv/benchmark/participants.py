"""Participants, each a process of its own, and the rounds in which they take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent


class Failed(Exception):
    """A request failed; the participant may be `dead`, or only unable to do what was asked."""

    def __init__(self, reason: str, dead: bool = False):
        super().__init__(reason)
        self.dead = dead


class Participant:
    """A worker process: loaded and warm once made, asked as often as wanted, ended by `close`.

    Raises Failed where its package is missing, or it cannot be loaded.
    """

    def __init__(self, settings: dict, python: str = sys.executable):
        self.name, self.dtype, self.methods = settings["name"], settings["dtype"], settings["methods"]
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        path = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [python, "-m", "minikv.benchmark.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for the main process alone, which then ends its workers
                env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            self._errors.close()
            raise Failed(f"{python}: {error.strerror}", dead=True) from error
        try:
            self.facts = self.ask(settings)["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict) -> dict:
        """The answer to one request. Raises Failed."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:  # it has closed its end
            line = ""
        if not line:
            raise Failed(self._last_words(), dead=True)
        answer = json.loads(line)
        if "missing" in answer:
            raise Failed(f"the package {answer['missing']} is not installed", dead=True)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._process.stdin.close()
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended with {cause}" + (f": {lines[-1].strip()[:200]}" if lines else "")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._errors):
            pipe.close()
        try:
            self._process.stdin.close()
        except OSError:  # what was still to be written has no reader any more
            pass


@dataclass
class Run:
    """What came of the rounds so far."""

    measurements: list[dict] = field(default_factory=list)
    failures: list[dict] = field(default_factory=list)  # participant, and what it failed at and why
    interrupted: bool = False

    def fail(self, participant: str, reason: str, **where) -> None:
        self.failures.append({"participant": participant, **where, "reason": reason})
        at = f", {where['method']} at {where['length']} tokens" if where else ""
        print(f"{participant}{at} is left out: {reason}", file=sys.stderr)


def take_turns(
    participants: list,
    prompts: dict[int, list[int]],
    new_tokens: int,
    repeats: int,
    run: Run,
    after_round: Callable[[], None] = lambda: None,
    after_request: Callable[[], object] = lambda: None,
) -> None:
    """`repeats` rounds; in each, every participant in turn runs each length's prompt with each of its methods.

    So what slows the machine down for a while slows all of them. What fails once is not asked again. Measurements are
    added to `run` one by one, so that an interrupt loses none.
    """
    given_up: set[tuple] = set()
    for number in range(repeats):
        for length, ids in prompts.items():
            for participant in participants:
                for method in participant.methods:
                    if not given_up & {(participant.name,), (participant.name, method, length)}:
                        request = {"ids": ids, "new_tokens": new_tokens, "method": method}
                        try:
                            found = participant.ask(request)
                        except Failed as failure:
                            _give_up(participant.name, method, length, failure, run, given_up)
                        else:
                            who = {"participant": participant.name, "dtype": participant.dtype, "method": method}
                            run.measurements.append({**who, "length": length, "round": number, **found})
                    after_request()
        after_round()


def _give_up(name: str, method: str, length: int, failure: Failed, run: Run, given_up: set[tuple]) -> None:
    given_up.add((name,) if failure.dead else (name, method, length))
    run.fail(name, str(failure), method=method, length=length)


def time_selections(participants: list, prompts: dict[int, list[int]], repeats: int, run: Run) -> dict[tuple, list[float]]:
    """Seconds of the selection by (participant, method, length), of our own participants that are still there."""
    found = {}
    alive = {measurement["participant"] for measurement in run.measurements}
    alive -= {failure["participant"] for failure in run.failures}
    for participant in participants:
        if participant.name.startswith("minikv") and participant.name in alive:
            for length, ids in prompts.items():
                try:
                    seconds = participant.ask({"ids": ids, "selections": repeats})["selection_s"]
                except Failed as failure:
                    run.fail(participant.name, str(failure), method="selection", length=length)
                else:
                    found |= {(participant.name, method, length): times for method, times in seconds.items()}
    return found
