"""What TensorBoard shows of a run, through its own reader and, where there is a browser, on its page."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import tensorboard_page
from tests.conftest import STEPS, SWITCH
from tests.runs import run


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorboard")
    status, output = run("fit", "--config", recipe, folder=folder)
    assert status == 0, output
    return folder


def test_the_switch_and_a_sample_at_each_validation(folder):
    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    bags = {event.step: event.value for event in events.Scalars("phase/bag_size")}
    assert bags == {step: 4 if step <= SWITCH else 1 for step in range(1, STEPS + 1)}
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")}
    assert list(texts) == [4, 8, 12, 16, 20, 24]
    assert all(("superposition" in text) == (step <= SWITCH) for step, text in texts.items())


@pytest.mark.slow
@pytest.mark.skipif(
    not (tensorboard_page.CHROMIUM and tensorboard_page.DRIVER), reason="needs Chromium and chromedriver"
)
def test_the_page_in_a_browser(folder, tmp_path):
    with tensorboard_page.open_page(folder) as page:
        assert tensorboard_page.faults(page, str(tmp_path / "page.png")) == []
        text = page.text_with("text", f"step\n{STEPS}\n")
        assert f"step\n{STEPS}\nPrompt" in text and "No text at step 4" in text
        assert page.cards(["no/such_curve"], timeout=3) == {}
