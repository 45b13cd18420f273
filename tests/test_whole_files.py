"""Files that a tool writes: whole, or as they were."""

from __future__ import annotations

import os

import pytest

from s2o_cupy.tools import inputs
from s2o_cupy.tools.whole_files import whole_file, write_picture, write_text


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    place = tmp_path / "a.json"
    write_text(place, "one")
    place.chmod(0o640)
    with whole_file(place) as file:
        file.write_text("two")
        assert file.suffix == ".json" and place.read_text() == "one"
    assert place.read_text() == "two" and place.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [place]


def test_an_error_leaves_what_was_there(tmp_path):
    place = tmp_path / "a.json"
    place.write_text("one")
    with pytest.raises(OSError, match="full"), whole_file(place) as file:
        file.write_text("tw")
        raise OSError("full")
    assert place.read_text() == "one" and [*tmp_path.iterdir()] == [place]


def test_a_link_stays_one(tmp_path):
    place, link = tmp_path / "a.json", tmp_path / "link"
    place.write_text("one")
    link.symlink_to(place)
    write_text(link, "two")
    assert link.is_symlink() and place.read_text() == "two"


def test_what_is_no_file_is_written_in_place(tmp_path):
    write_text(os.devnull, "gone")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["a.png", "a"])
def test_a_picture(tmp_path, name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = pyplot.figure(figsize=(1, 1))
    write_picture(tmp_path / name, figure)
    assert not pyplot.get_fignums()
    assert [*tmp_path.iterdir()] == [tmp_path / "a.png"]
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_picture_behind_a_link(tmp_path, name, begins):
    """What it leads to may have no ending, as an object of a store."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    (tmp_path / "object").write_text("")
    (tmp_path / name).symlink_to(tmp_path / "object")
    figure = pyplot.figure(figsize=(1, 1))
    write_picture(tmp_path / name, figure)
    assert not pyplot.get_fignums()
    assert (tmp_path / name).is_symlink() and (tmp_path / "object").read_bytes().startswith(begins)
    assert len([*tmp_path.iterdir()]) == 2


def test_arrays_behind_a_link(tmp_path):
    """NumPy would put an ending to a name without one, and the file into no place."""
    (tmp_path / "object").write_text("")
    (tmp_path / "a.npz").symlink_to(tmp_path / "object")
    inputs.save(tmp_path / "a.npz", inputs.builtin("random", 64))
    assert inputs.load(tmp_path / "a.npz").q.shape == (1, 4, 64, 128) and len([*tmp_path.iterdir()]) == 2
