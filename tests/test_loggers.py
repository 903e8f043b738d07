"""Logs that are taken back to where a checkpoint was saved."""

import csv

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tst_lightning import MetricsCSV, TensorBoard


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def events(folder):
    return [
        (value.tag, event.step, value.tensor.float_val[0])
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def test_rows_are_on_disk_at_once_and_a_new_column_widens_the_header(tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"b": torch.tensor(0.5)}, step=1)
    assert rows(tmp_path) == [{"b": "0.5", "step": "1"}]
    logger.log_metrics({"a": 2}, step=3)
    assert (tmp_path / "metrics.csv").read_bytes() == b"a,b,step\r\n,0.5,1\r\n2,,3\r\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_goes_on_where_it_was(tmp_path):
    first = MetricsCSV(tmp_path)
    for step in (1, 2):
        first.log_metrics({"a": step}, step=step)
    place = first.place()
    first.log_metrics({"a": 3, "late": 1}, step=3)

    second = MetricsCSV(tmp_path)  # another process, which must not delete the file
    _ = second.experiment
    assert len(rows(tmp_path)) == 3
    second.rewind(place)
    assert rows(tmp_path) == [{"a": "1", "step": "1"}, {"a": "2", "step": "2"}]
    second.log_metrics({"a": 4}, step=3)
    assert rows(tmp_path)[-1] == {"a": "4", "step": "3"}
    second.rewind({})
    assert not (tmp_path / "metrics.csv").exists()
    second.log_metrics({"z": 1}, step=1)
    assert (tmp_path / "metrics.csv").read_bytes() == b"step,z\r\n1,1\r\n"


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_a_row_that_was_half_written_is_dropped(cut, tmp_path):
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"a": 1.25}, step=1)
    place = logger.place()
    whole = (tmp_path / "metrics.csv").read_bytes()
    logger.log_metrics({"a": 2.25}, step=2)
    (tmp_path / "metrics.csv").write_bytes((tmp_path / "metrics.csv").read_bytes()[:-cut])
    again = MetricsCSV(tmp_path)
    again.rewind(place)
    assert (tmp_path / "metrics.csv").read_bytes() == whole


def test_tensorboard_goes_on_where_it_was(tmp_path):
    first = TensorBoard(tmp_path)
    first.log_metrics({"a": 1.0}, step=1)
    place = first.place()
    first.log_metrics({"a": 2.0}, step=2)
    first.save()
    lost = TensorBoard(tmp_path)  # a run that went on from there and was killed before its first checkpoint
    _ = lost.experiment
    lost.rewind(place)
    lost.log_metrics({"a": 9.0}, step=2)
    lost.save()
    assert events(tmp_path) == [("a", 1, 1.0), ("a", 2, 9.0)]

    second = TensorBoard(tmp_path)
    _ = second.experiment
    second.rewind(place)
    second.log_metrics({"a": 3.0}, step=2)
    second.finalize("success")
    assert events(tmp_path) == [("a", 1, 1.0), ("a", 2, 3.0)]
    assert all(path.name.startswith("events.out.tfevents") for path in tmp_path.iterdir()), "an hparams.yaml, say"

    third = TensorBoard(tmp_path)
    _ = third.experiment
    third.rewind({})
    assert events(tmp_path) == []


def test_places_are_plain_types(tmp_path):
    for logger in (MetricsCSV(tmp_path), TensorBoard(tmp_path)):
        logger.log_metrics({"a": 1.0}, step=1)
        torch.save(logger.place(), tmp_path / "place.pt")
        assert torch.load(tmp_path / "place.pt", weights_only=True) == logger.place()
