"""Checkpoints by name, from a small hub on this machine: what is fetched, what is kept, how a failure reads."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minikv.command import default_profile_path
from minikv.errors import InputError
from minikv.hub import fetch
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Answers what the huggingface_hub package asks, from a folder of repositories, and notes which files it sent."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.sent: list[str] = []  # "org/name/file", and after it "from N" where only a part was asked for
        self.stalls_at: str | None = None  # the file of which only half is sent
        self.stalled = threading.Event()
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}  # for a repository: status and headers
        self.token: str | None = None  # who sends it is not refused
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def environment(self, home: Path, **settings: str) -> dict[str, str]:
        """For a program that uses this hub and a cache of its own."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        address = f"http://127.0.0.1:{self.server_port}"
        return clean | {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"} | settings


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        repository = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        folder = self.server.folder / repository
        trusted = self.server.token and self.headers["Authorization"] == f"Bearer {self.server.token}"
        if repository in self.server.refusals and not trusted:
            self.refuse(*self.server.refusals[repository])
        elif not folder.is_dir():
            self.refuse(404, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api":
            self.describe(folder, listing="tree" in parts)
        elif not folder.joinpath(*parts[4:]).is_file():
            self.refuse(404, {"X-Error-Code": "EntryNotFound"})
        else:
            self.send_file("/".join(parts[4:]), folder.joinpath(*parts[4:]))

    def refuse(self, status: int, headers: dict[str, str]) -> None:
        self.answer(status, b"", headers)

    def describe(self, folder: Path, listing: bool) -> None:
        files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        entries = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": etag(file)}
            for name, file in files.items()
        ]
        repository = str(folder.relative_to(self.server.folder))
        summary = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self.answer(200, json.dumps(entries if listing else summary).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str, file: Path) -> None:
        data = file.read_bytes()
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.sent.append(f"{file.relative_to(self.server.folder)}" + (f" from {start}" if start else ""))
        stalls = self.command == "GET" and name == self.server.stalls_at
        self.answer(206 if start else 200, data[start:], headers, stalls)

    def answer(self, status: int, body: bytes, headers: dict[str, str], stalls: bool = False) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if stalls else body)
            self.wfile.flush()
        if stalls:
            self.server.stalled.set()
            self.rfile.read(1)  # until the other side is gone


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    tiny = folder / "org" / "tiny"
    tiny.mkdir(parents=True)
    write_checkpoint(tiny)
    for other in ("pytorch_model.bin", "evil.py", "consolidated.safetensors", "original/params.json", "README.md"):
        (tiny / other).parent.mkdir(exist_ok=True)
        (tiny / other).write_text("raise SystemExit('this is not to be fetched')")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    evil = {"c": "pytorch_model.bin", "d": "../../../tiny/evil.py"}
    others = ["config.json", "other.safetensors", "pytorch_model.bin"]
    write_texts(folder / "org" / "sharded", *others, *shards.values(), index=shards | evil)
    write_texts(folder / "org" / "pickles", "config.json", "pytorch_model.bin")
    write_texts(folder / "org" / "no-config", "model.safetensors")
    return folder


def write_texts(folder: Path, *names: str, index: dict[str, str] | None = None) -> None:
    """A repository of files that are {}, and an index of shards."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.fixture
def hub(repositories):
    server = Hub(repositories)
    yield server
    server.shutdown()
    server.server_close()


def generate(environment: dict[str, str], model: str | Path):
    """The program as people run it, with a method that needs no profile."""
    command = [sys.executable, "-m", "minikv.generate", "--model", str(model), "--policy", "snapkv"]
    command += ["--max-new-tokens", "8", "--prompt", "The tower clock was repaired by Ingrid Halloran. " * 3]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def start_fetching(environment: dict[str, str], names: list[str]) -> subprocess.Popen:
    """Fetches in another process, since the package reads its settings once; prints what became of each name."""
    program = (
        "import signal, sys\nfrom minikv.errors import InputError\nfrom minikv.hub import fetch\n"
        # A shell that starts the tests in the background has them ignore Ctrl-C, and their children with them.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(fetch(name))\n"
        "    except InputError as error:\n        print(repr(str(error)))\n"
    )
    command = [sys.executable, "-c", program, *names]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe)


def answer_of(result) -> str:
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout.split("\n\n")[0]  # the table after it holds times


def test_a_name_gives_the_answer_of_the_folder_and_again_without_a_network(hub, repositories, tmp_path):
    online, offline = hub.environment(tmp_path), hub.environment(tmp_path, HF_HUB_OFFLINE="1")
    from_folder = answer_of(generate(online, repositories / "org/tiny"))
    assert answer_of(generate(online, "org/tiny")) == from_folder
    wanted = {"config.json", "model.safetensors", "profile.json", "tokenizer.json", "tokenizer_config.json"}
    assert sorted(hub.sent) == sorted(f"org/tiny/{name}" for name in wanted)  # each once, and nothing else
    hub.shutdown()
    assert answer_of(generate(offline, "org/tiny")) == from_folder
    assert len(hub.sent) == len(wanted)


@pytest.mark.parametrize("model, settings, words", [
    ("org/missing", {}, "is not a folder here, and cannot be fetched from the hub: there is no such repository"),
    ("org/gated", {}, "access is refused (401); set HF_TOKEN"),
    ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be used (Connect"),
])  # fmt: skip
def test_a_failure_is_one_line_and_exit_code_2(hub, tmp_path, model, settings, words):
    hub.refusals["org/gated"] = (401, {"X-Error-Code": "GatedRepo"})
    result = generate(hub.environment(tmp_path, **settings), model)
    assert result.returncode == 2 and result.stdout == "", result
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_each_failure_says_what_to_do(hub, tmp_path):
    hub.refusals = {
        "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
        "org/closed": (403, {}),
        "org/private": (401, {"X-Error-Code": "RepoNotFound"}),
        "org/broken": (500, {}),
    }
    expected = {
        "org/gated": "access is refused (403); set HF_TOKEN",
        "org/closed": "access is refused (403); set HF_TOKEN",
        "org/private": "there is no such repository, or it is private and a token",
        "org/broken": "Internal Server Error",
        "org/pickles": "it lacks model.safetensors, or a shard that its index names; pickles (.bin) are not",
        "org/no-config": "org/no-config has no config.json",
    }
    output, _ = start_fetching(hub.environment(tmp_path), list(expected)).communicate(timeout=120)
    for line, (name, words) in zip(output.splitlines(), expected.items(), strict=True):
        assert name in line and words in line and "\\n" not in line
    assert not any(name.endswith(".bin") for name in hub.sent)


def test_a_token_opens_what_is_gated_and_shards_are_those_of_the_index(hub, tmp_path):
    hub.refusals["org/tiny"], hub.token = (403, {"X-Error-Code": "GatedRepo"}), "hf_open"
    names = ["org/tiny", "org/sharded"]
    output, _ = start_fetching(hub.environment(tmp_path, HF_TOKEN="hf_open"), names).communicate(timeout=120)
    tiny, sharded = (sorted(file.name for file in Path(line).glob("*.safetensors")) for line in output.splitlines())
    assert tiny == ["model.safetensors"]
    assert sharded == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert not any("evil" in name or "pytorch_model" in name for name in hub.sent)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_is_interrupted_ends_at_once_and_is_made_good(hub, repositories, tmp_path, end):
    hub.stalls_at = "model.safetensors"
    first = start_fetching(hub.environment(tmp_path), ["org/tiny"])
    assert hub.stalled.wait(60)
    first.send_signal(end)
    first.communicate(timeout=30)
    assert not list(tmp_path.glob("**/snapshots/*/model.safetensors"))
    hub.stalls_at = None
    output, _ = start_fetching(hub.environment(tmp_path), ["org/tiny"]).communicate(timeout=120)
    fetched = Path(output.strip()) / "model.safetensors"
    assert fetched.read_bytes() == (repositories / "org/tiny/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["org/tiny", "tiny", "some/where/tiny", "some/tiny.gguf", "tiny.GGUF"])
def test_a_profile_bears_the_last_part_of_the_models_name(name):
    assert default_profile_path(name).name == "tiny.json"


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="org/tiny.*pip install huggingface_hub"):
        fetch("org/tiny")


def test_a_full_disk_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InputError, match="org/tiny.*cannot be fetched from the hub: OSError: .*No space"):
        fetch("org/tiny")
