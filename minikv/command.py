"""What the programs that people run have in common: arguments, errors in one line, records of a run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from minikv import policy
from minikv.budget import parse
from minikv.errors import InputError
from minikv.srh import Profile
from minikv.weights import DEFAULT_MODEL

PROFILES = Path(__file__).parent.parent / "weights" / "profiles"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every argument that has one, lists as they are typed."""

    def _get_help_string(self, action):
        if action.default in (None, False, argparse.SUPPRESS):
            return action.help
        if isinstance(action.default, list):
            typed = " ".join(map(str, action.default)).replace("%", "%%")
            return f"{action.help} (default: {typed})"
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Shows defaults in --help and reports a wrong argument in one line, as everything else is reported."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=Help)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str):
        raise InputError(f"{message} (--help lists what is accepted)")


def add_model_arguments(parser: argparse.ArgumentParser, compiles: bool = False) -> None:
    """Which model, where, in which dtype, by which kernels; compiled ones for programs that decode long enough."""
    models = "the default model, a checkpoint folder, a GGUF file, or org/name on the hub"
    parser.add_argument("--model", default=DEFAULT_MODEL, help=models)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps; auto takes CUDA, then MPS, then the CPU")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16; auto: bfloat16 on CUDA, else float32")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--plain", action="store_true", help="compute by the plain definitions instead of the fastest kernels")
    if compiles:
        fused = "decode with layers that torch.compile has fused; costs some seconds at the start, and needs a C++ compiler"
        forms.add_argument("--compile", action="store_true", help=fused)


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="compresskv", help=f"the method: {', '.join(policy.METHODS)}, {changes_help}")
    parser.add_argument("--budget", default="12%", help=budget_help)
    add_selection_arguments(parser)


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """How a method chooses, whichever it is and whatever its budget."""
    own = "default: the method's own, %s in the paper's and %s in sharedvote"
    window = "last prompt tokens whose attention chooses; kept, too, where the budget holds them; " + own % (8, 24)
    parser.add_argument("--window", type=positive, help=window)
    parser.add_argument("--kernel", type=positive, help="width of the pooling over positions, odd; " + own % (5, 31))
    parser.add_argument("--heads", type=positive, help="compresskv: retrieval heads of a layer that vote; default: 4")
    profile = "compresskv, sharedvote: the model's profile; default: weights/profiles/MODEL.json"
    parser.add_argument("--profile", help=profile)


changes_help = "or with changes of its own as in compresskv:window=16:kernel=21"
budget_help = (
    "what is kept of the prompt, as a mean over the layers: entries a layer (256), a share of the prompt's entries that"
    " is kept (3%%), or bytes of all keys and values (2MB)"
)


def make_policy(spec: str, arguments, profile: Callable[[], Profile]) -> policy.Policy:
    """The policy that `spec` asks for, a method's name and changes of its own: `compresskv:window=16:kernel=21`.

    Options that are not changed there come from the arguments, where they were given, or are the method's own;
    `profile` is called where the method needs one.
    """
    method, changes = read_spec(spec)
    known = {field.name for field in dataclasses.fields(method)}
    given = {key: getattr(arguments, key) for key in ("window", "kernel", "heads") if key in known}
    options = {key: value for key, value in given.items() if value is not None}
    if "budget" in known:
        options["budget"] = parse(arguments.budget)
    if "profile" in known:
        options["profile"] = profile()
    return method(**options | changes)


def options_of(chosen: policy.Policy) -> dict[str, int | float | bool]:
    """The numbers that a policy chooses by, its budget apart: given, or its own."""
    numbers = {name: value for name, value in vars(chosen).items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if name != "budget"}


def read_spec(spec: str) -> tuple[type[policy.Policy], dict]:
    """The method and the changed options of a `name:option=value:option=value`."""
    name, *changes = spec.split(":")
    if name not in policy.METHODS:
        raise InputError(f"method {name!r} is unknown; accepted: {', '.join(policy.METHODS)}")
    method, options = policy.METHODS[name], {}
    kinds = {field.name: type(field.default) for field in dataclasses.fields(method)}
    kinds = {key: kind for key, kind in kinds.items() if kind in (int, float, bool)}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in kinds:
            accepted = ", ".join(f"{known}={kind.__name__}" for known, kind in kinds.items()) or "no option"
            raise InputError(f"method {spec!r}: {name} has no option {key!r}; accepted: {accepted}")
        options[key] = _option(spec, key, text, kinds[key])
    return method, options


def _option(spec: str, key: str, text: str, kind: type) -> int | float | bool:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        accepted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"method {spec!r}: {key} is {text!r}; accepted: {accepted}") from None


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if not text.isdecimal() or not 0 < int(text[:20]) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def not_negative(text: str) -> int:
    """An argparse type: a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def percent(text: str) -> float:
    """An argparse type: a number from 0 to 100."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return value


def seed(text: str) -> int:
    """An argparse type: a seed of random numbers, 0 to 2^63 - 1."""
    value = not_negative(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is beyond 2^63 - 1")
    return value


def check_outputs(arguments, *names: str) -> None:
    """Refuse, before any long work, output files that cannot be written or that are one and the same.

    `names` are the arguments that hold a path or None.
    """
    seen: dict[Path, str] = {}
    for name in names:
        value = getattr(arguments, name)
        if value is None:
            continue
        path, option = Path(value).absolute(), "--" + name.replace("_", "-")
        if path in seen:
            raise InputError(f"{option} and {seen[path]} name the same file, {value}")
        seen[path] = option
        if path.is_dir() or not path.name:
            raise InputError(f"{option} {value} is a folder; a file is needed")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            writable = os.access(path if path.exists() else path.parent, os.W_OK)
        except OSError as error:
            raise InputError(f"{option} {value}: {error.strerror}") from error
        if not writable:
            raise InputError(f"{option} {value} cannot be written")


def run(main: Callable[[], None]) -> None:
    """Run a program's main: bad input is one line on stderr and exit code 2, Ctrl-C ends without a traceback."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        main()
        sys.stdout.flush()
    except (InputError, KeyboardInterrupt) as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, KeyboardInterrupt):
            print("\ninterrupted", file=sys.stderr)
            sys.exit(130)
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone; as other programs end then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def default_profile_path(model_name: str) -> Path:
    """Where the profile of a model is kept: by the name of its folder, of its GGUF file, or on the hub."""
    name = Path(model_name).resolve().name
    return PROFILES / f"{name[:-5] if name.lower().endswith('.gguf') else name}.json"


def load_profile(model, path: str | None, model_name: str) -> Profile:
    """The profile at `path`, or the one in weights/profiles that bears the model's name; checked against the model."""
    found = Path(path) if path else default_profile_path(model_name)
    if not path and not found.is_file():
        raise InputError(
            f"there is no profile of {model_name} ({found.name} in weights/profiles);"
            f" make one with `python -m minikv.profile --model {model_name}`, or name one with --profile"
        )
    profile = Profile.load(found)
    warning = profile.check_model(model, model.config)
    if warning:
        print(f"warning: {found}: {warning}", file=sys.stderr)
    return profile


def show_progress(total: int, what: str, shown: bool = True):
    """A progress bar for terminals, with time left: call update() on it. Nothing is shown elsewhere."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, disable=not (shown and sys.stderr.isatty()), leave=False, delay=1)


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells as aligned text, the first row being the head and the first column the names."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def versions() -> dict[str, str]:
    """What a result was made with: minikv's commit where it is a checkout, Python, packages and processor."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git here, or one that hangs
        commit = ""
    packages = {name: metadata.version(name) for name in ("torch", "tokenizers", "safetensors")}
    return {"minikv": commit or "unknown", "python": platform.python_version(), **packages, "machine": platform.machine()}
