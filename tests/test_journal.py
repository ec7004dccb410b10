"""Long runs are safe: what is finished is kept, what was interrupted is redone, other experiments are refused."""

from __future__ import annotations

import json
import os

import pytest

from minikv.errors import InputError
from minikv.evals.journal import Journal

SETTINGS = {"model": "tiny", "lengths": [1024, 2048], "budgets": ["3%"]}
ODD = {"text": 'two\nlines, a "quote", U+2028 \u2028, \x85, 家 🦙', "score": 1 / 3}


def filled(path, settings=SETTINGS):
    with Journal(path, settings) as journal:
        for number in range(3):
            journal.add(f"example {number}", {"score": number / 7})
    return journal


def test_a_second_run_finds_what_the_first_finished(tmp_path):
    filled(tmp_path / "run.jsonl")
    with Journal(tmp_path / "run.jsonl", SETTINGS) as journal:
        journal.add("odd", ODD)
    again = Journal(tmp_path / "run.jsonl", SETTINGS)
    assert again.done == {f"example {number}": {"score": number / 7} for number in range(3)} | {"odd": ODD}


def test_a_result_is_on_disk_as_soon_as_it_is_added(tmp_path):
    with Journal(tmp_path / "run.jsonl", SETTINGS) as journal:
        journal.add("a", ODD)
        lines = (tmp_path / "run.jsonl").read_text().split("\n")  # the journal is still open
    assert len(lines) == 3 and json.loads(lines[1]) == {"key": "a", "result": ODD}
    assert json.loads(lines[0])["settings"] == SETTINGS and len(json.loads(lines[0])["hash"]) == 16


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_an_interrupted_last_line_is_dropped_and_its_example_done_again(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    filled(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, SETTINGS) as journal:
        assert "example 2" not in journal.done
        missing = [f"example {number}" for number in range(3) if f"example {number}" not in journal.done]
        for key in missing:
            journal.add(key, {"score": 9})
    assert Journal(path, SETTINGS).done.keys() == {"example 0", "example 1", "example 2"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_run_that_was_killed_while_it_wrote_its_settings_begins_anew(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"settings": {"mod')
    assert filled(path).done == Journal(path, SETTINGS).done != {}


def test_a_run_without_results_binds_nobody(tmp_path):
    """Such as one that failed on its arguments, or was stopped in its first example."""
    path = tmp_path / "run.jsonl"
    filled(path)
    head, first = path.read_text().splitlines()[:2]
    Journal(tmp_path / "new.jsonl", SETTINGS).close()
    assert (tmp_path / "new.jsonl").read_text() == ""
    path.write_text(f"{head}\n{first[:9]}")
    filled(path, SETTINGS | {"seed": 1})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["settings"]["seed"] == 1 and len(lines) == 4
    assert len(Journal(path, SETTINGS | {"seed": 1}).done) == 3


def test_a_second_process_is_refused_while_the_first_writes(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add("a", ODD)
        before = path.read_bytes()
        with pytest.raises(InputError, match="another process is writing .*run.jsonl"):
            Journal(path, SETTINGS)
        Journal(path, SETTINGS, rank=1).close()  # another rank of the same run
        assert path.read_bytes() == before
    assert Journal(path, SETTINGS).done == {"a": ODD}


def test_a_file_that_is_already_gone_is_removed_without_complaint(tmp_path):
    journal = Journal(tmp_path / "run.jsonl", SETTINGS)
    (tmp_path / "run.jsonl").unlink()
    journal.remove()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_line():
    with Journal("/dev/full", SETTINGS) as journal:
        with pytest.raises(InputError, match="/dev/full cannot be written: No space left"):
            journal.add("a", ODD)


def test_notes_of_one_line_are_not_taken_for_an_interrupted_run(tmp_path):
    (tmp_path / "notes.txt").write_text("do not lose this")
    with pytest.raises(InputError, match="notes.txt is not a file of results"):
        Journal(tmp_path / "notes.txt", SETTINGS)
    assert (tmp_path / "notes.txt").read_text() == "do not lose this"


@pytest.mark.parametrize("change", [{"lengths": [1024]}, {"budgets": ["6%"]}, {"seed": 1}])
def test_results_of_other_settings_are_refused_and_the_setting_is_named(tmp_path, change):
    filled(tmp_path / "run.jsonl")
    before = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(InputError, match=f"run.jsonl holds results of other settings: {next(iter(change))} is"):
        Journal(tmp_path / "run.jsonl", SETTINGS | change)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_settings_are_the_same_whether_lists_or_tuples(tmp_path):
    filled(tmp_path / "run.jsonl", SETTINGS | {"lengths": (1024, 2048)})
    assert len(Journal(tmp_path / "run.jsonl", SETTINGS).done) == 3


@pytest.mark.parametrize("line", ["no JSON", "[1, 2]", '{"key": "a"}', "7", '{"key": [], "result": {}}', "[" * 100_000])
@pytest.mark.parametrize("place", [0, 2])
def test_a_file_of_something_else_is_refused_by_line(tmp_path, line, place):
    path = tmp_path / "run.jsonl"
    filled(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:place], line, *lines[place + 1 :]]) + "\n")
    with pytest.raises(InputError, match=f"run.jsonl, line {place + 1} is not a result"):
        Journal(path, SETTINGS)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        Journal(tmp_path / "file" / "run.jsonl", SETTINGS)


def test_ranks_write_files_of_their_own_and_read_each_others(tmp_path):
    path = tmp_path / "run[1].jsonl"  # a name that a pattern would misread
    with Journal(path, SETTINGS, rank=0) as first, Journal(path, SETTINGS, rank=1) as second:
        first.add("a", {"score": 1})
        second.add("b", {"score": 2})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run[1].jsonl", "run[1].jsonl.rank1"]
    for rank in range(3):  # also with another number of processes
        assert Journal(path, SETTINGS, rank).done == {"a": {"score": 1}, "b": {"score": 2}}
    with pytest.raises(InputError, match="other settings"):
        Journal(path, SETTINGS | {"seed": 1}, rank=1)


def test_a_line_that_another_rank_is_writing_is_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    filled(path)
    with open(path, "ab") as file:
        file.write(b'{"key": "half')
    before = path.read_bytes()
    assert len(Journal(path, SETTINGS, rank=1).done) == 3
    assert path.read_bytes() == before


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(filled(None).done) == 3
    assert not list(tmp_path.iterdir())
