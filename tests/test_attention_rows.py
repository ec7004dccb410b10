"""The tutorial's picture of what two heads look at shows the model's own attention rows."""

import matplotlib.pyplot as plt
import pytest

from minikv.report import attention_rows


@pytest.fixture
def example(default_model):
    return attention_rows.example_prompt(default_model[1])


def test_the_example_is_of_the_promised_length_and_its_answer_is_where_it_says(example):
    assert len(example.ids) == attention_rows.LENGTH
    needle = attention_rows.example_needle()
    assert attention_rows.positions_of(example.prompt, needle.answer) == example.answer_positions
    assert set(example.answer_positions) < set(attention_rows.positions_of(example.prompt, needle.needle))


def test_the_answer_is_written_up_to_its_first_token(default_model, example):
    model, tokenizer = default_model
    longer = attention_rows.before_the_answer(model, tokenizer, example.ids, "58213")
    assert longer[: len(example.ids)] == example.ids
    assert tokenizer.decode(longer[len(example.ids) :]).endswith("Bank is ")


def test_the_panels_show_a_streaming_and_a_retrieving_head(default_model, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(attention_rows, "save", lambda figure, settings, path: figures.append(figure))
    attention_rows.draw(*default_model, tmp_path / "rows.png")
    panels = [axes.collections[0].get_segments() for axes in figures[0].axes]  # position and height of each line
    plt.close(figures[0])
    heights = [{int(x): top for (x, _), (_, top) in lines} for lines in panels]
    streaming, streaming_later, retrieving, retrieving_later = heights
    assert len(streaming) == 640 and len(streaming_later) == 654
    assert all(abs(sum(rows.values()) - 1) < 1e-3 for rows in heights)
    assert streaming[0] > 0.5 and streaming_later[0] > 0.5
    assert max(retrieving_later, key=retrieving_later.get) == 277  # the answer's first digit
    assert retrieving[275] > 10 * streaming[275]
