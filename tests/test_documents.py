"""What README.md and tutorial.md show is what happens: their code runs, prints what they say, and links lead somewhere."""

import importlib
import shlex
import sys

import documents
import pytest
from documents import ROOT

from minikv import policy

PAGES = ("README.md", "tutorial.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
EVERY_COMMAND = [(page, *command) for page, text in TEXTS.items() for command in documents.commands(text)]


@pytest.fixture
def at_root(monkeypatch):
    """In the checkout, where profiles are found, with a list of methods that a page may add to."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(policy, "METHODS", dict(policy.METHODS))


def differences(page) -> list[str]:
    """The blocks of a page that print something else than it shows."""
    return [
        f"{page.name}, line {block.line}: the page shows\n{block.output}but the code prints\n{printed}"
        for block, printed in documents.run(page)
        if block.output is not None and not documents.same(block.output, printed)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_code_on_a_page_runs_and_prints_what_the_page_shows(page, at_root, default_folder):
    assert not differences(ROOT / page)


@pytest.mark.parametrize("page", PAGES)
def test_links_on_a_page_lead_to_what_they_name(page):
    assert not documents.missing_links(TEXTS[page])


@pytest.mark.parametrize("page, module, arguments", EVERY_COMMAND)
def test_a_command_on_a_page_is_understood_by_its_program(page, module, arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # checking where results go makes their folders
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(arguments)])
    program = importlib.import_module(module)
    if "--help" in sys.argv:
        with pytest.raises(SystemExit) as end:
            program.parse_arguments()
        assert end.value.code == 0
    else:
        program.parse_arguments()


def write_page(folder, text: str):
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_of_a_page_share_their_names_and_are_compared_with_the_output_below(tmp_path):
    page = write_page(tmp_path, "```python\na = 2\n```\n\nand\n\n```python\nprint(a)\n```\n```text\n2\n```\n")
    assert not differences(page)
    page = write_page(tmp_path, page.read_text().replace("\n2\n", "\n3\n"))
    assert "line 8" in differences(page)[0]


def test_a_page_that_fails_says_in_which_of_its_lines(tmp_path):
    page = write_page(tmp_path, "# Title\n\n```python\nx = 1\nx.y\n```\n")
    with pytest.raises(AttributeError) as error:
        list(documents.run(page))
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == (str(page), 5)


def test_shell_blocks_are_run_where_their_output_is_shown_and_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = write_page(tmp_path, "```sh\ntouch a; echo 1\n```\n\n```text\n1\n```\n\n```sh\nexit 1\n```\n")
    assert [printed for _, printed in documents.run(page)] == ["1\n"]
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize(
    "shown, printed, agree",
    [
        ("a 0.25 b", "a 0.26 b", True),  # the last place may round the other way
        ("a 0.25 b", "a 0.27 b", False),
        ("0.9", "1.0", True),
        ("-0.1", "0.0", True),
        ("1,000.5", "1,000.6", True),
        ("0.25", "0.3", False),
        ("3", "4", False),
        ("3 \n", "3", True),
        ("a", "b", False),
        ("", "a", False),
    ],
)
def test_only_the_last_decimal_of_an_output_may_differ(shown, printed, agree):
    assert documents.same(shown, printed) is agree


def test_a_page_is_brought_up_to_date_by_running_it(tmp_path):
    page = write_page(tmp_path, "```python\nprint(1)\n```\n```text\nold\n```\n\n```python\nprint(2)\n```\n\nEnd.\n")
    documents.rewrite(page)
    assert page.read_text() == "```python\nprint(1)\n```\n```text\n1\n```\n\n```python\nprint(2)\n```\n\nEnd.\n"


@pytest.mark.parametrize(
    "link, missing",
    [
        ("[`scores.pool`](minikv/scores.py)", []),
        ("[`LayerCache.nbytes`](minikv/cache.py)", []),
        ("[`Prefill.logits`](minikv/inference.py)", []),
        ("[`scores.gone`](minikv/scores.py)", ["scores.gone in minikv/scores.py"]),
        ("[`scores.pool`](minikv/gone.py)", ["minikv/gone.py", "minikv/gone.py"]),
        ("[words](#a-heading-1-of-it)", []),
        ("[words](#another)", ["#another"]),
        ("[words](README.md#results)", []),
        ("[words](README.md#another)", ["README.md#another"]),
        ("![picture](docs/images/gone.png)", ["docs/images/gone.png"]),
        ("[paper](https://arxiv.org/abs/2606.24467)", []),
    ],
)
def test_links_to_what_is_not_there_are_found(link, missing):
    assert documents.missing_links(f"## A heading: `1` of it\n\n{link}\n") == missing


def test_commands_are_found_in_text_and_in_shell_blocks():
    page = "`python -m minikv.profile --model M` and\n\n    . x && python -m minikv.generate && echo\n"
    page += "\n```python\n'python -m minikv.x'\n```\n"
    assert documents.commands(page) == [("minikv.profile", " --model M"), ("minikv.generate", " ")]
