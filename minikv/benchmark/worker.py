"""One participant in a process of its own: it loads, warms up, then answers requests, one JSON line each.

The first line on stdin are its settings, answered by {"ready": facts}; each further one a request, {"ids", "new_tokens",
"method"} for a run or {"ids", "selections"} for the time of the selection alone. An answer may be {"error": text}, and
the first one {"missing": package}. Reading the end of stdin ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

import torch

from minikv.benchmark.machine import PeakMemory
from minikv.errors import InputError

WARM_UP_TOKENS, WARM_UP_STEPS = 300, 3


def claim_stdout() -> TextIO:
    """stdout for the answers alone: what libraries print goes to stderr from here on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def open_subject(settings: dict):
    """What is measured: an object with `facts`, `device`, `held`, and `run`. Imports its packages only here."""
    if settings["kind"] == "minikv":
        from minikv.benchmark.ours import Ours

        return Ours(settings)
    from minikv.benchmark import peers

    return peers.KINDS[settings["kind"]](settings)


def warm_up(subject, settings: dict) -> None:
    for method in settings["methods"]:
        subject.run(settings["warm_up"], WARM_UP_STEPS + 1, method)


def answer_request(subject, memory: PeakMemory, request: dict) -> dict:
    if "selections" in request:
        return {"selection_s": subject.selections(request["ids"], request["selections"])}
    memory.start()
    found = subject.run(request["ids"], request["new_tokens"], request["method"])
    return found | {"peak_bytes": memory.above()}


def serve(requests: TextIO, answers: TextIO) -> None:
    def answer(record: dict) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    settings = json.loads(requests.readline())
    torch.set_num_threads(settings["threads"])
    try:
        subject = open_subject(settings)
        warm_up(subject, settings)
    except ModuleNotFoundError as error:
        return answer({"missing": error.name})
    except Exception as error:  # whatever a peer's library raises, it is reported by name
        return answer({"error": _line(error)})
    memory = PeakMemory(subject.device, subject.held)
    answer({"ready": subject.facts})
    for line in requests:
        try:
            answer(answer_request(subject, memory, json.loads(line)))
        except Exception as error:
            answer({"error": _line(error)})


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    serve(sys.stdin, claim_stdout())
