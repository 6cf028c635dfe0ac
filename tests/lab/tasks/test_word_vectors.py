import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.lab.tasks._tokens import find_word_vectors, read_word_vectors, start_vectors

VOCABULARY = (" The", "river", " River", "<A9>", "Ġ", " 's")


def write_official(folder, lines):
    path = folder / "glove.6B.100d.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_official_rows_are_found_as_written_in_lower_case_and_without_the_blank(tmp_path):
    path = write_official(tmp_path, ["the 1 2", "river 3 4", "unused 5 6", "'s 7 8"])
    vectors = read_word_vectors(path, VOCABULARY)
    nan = np.nan
    np.testing.assert_array_equal(vectors, [[1, 2], [3, 4], [3, 4], [nan, nan], [nan, nan], [7, 8]])
    assert vectors.dtype == np.float32


def test_the_spelling_itself_goes_first(tmp_path):
    path = write_official(tmp_path, ["river 3 4", "River 9 9"])
    assert read_word_vectors(path, ("River", "river", " River")).tolist() == [[9, 9], [3, 4], [3, 4]]


def test_packed_rows_go_by_token_id(tmp_path):
    path = tmp_path / "glove.6B.100d.gpt2vocab.f16.npz"
    table = np.array([[1, 2], [3, 4]], dtype=np.float16)
    np.savez(path, token_ids=np.array([4, 0, 2]), row=np.array([1, 0, 1]), vectors=table)
    vectors = read_word_vectors(path, VOCABULARY)
    assert vectors[[4, 0, 2]].tolist() == [[3, 4], [1, 2], [3, 4]]
    assert np.isnan(vectors[[1, 3, 5]]).all()
    with pytest.raises(InputError, match=r"npz' does not hold GloVe for GPT-2's tokens"):
        read_word_vectors(path, VOCABULARY[:2])


@pytest.mark.parametrize("lines", [["the 1 x"], ["the 1 2", "river 3"], ["nothing 1 2"]])
def test_damaged_text_is_one_line(tmp_path, lines):
    with pytest.raises(InputError, match=r"glove.6B.100d.txt' (line 1 is not|does not hold)"):
        read_word_vectors(write_official(tmp_path, lines), VOCABULARY)


def test_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "glove.6B.100d.gpt2vocab.f16.npz"
    path.write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(InputError, match=r"npz' does not hold GloVe"):
        read_word_vectors(path, VOCABULARY)


def test_the_longest_vectors_are_preferred_and_none_is_no_error(tmp_path):
    assert find_word_vectors(tmp_path) is None
    short = write_official(tmp_path, ["the 1"])
    assert find_word_vectors(tmp_path) == short
    (tmp_path / "glove").mkdir()
    longer = tmp_path / "glove" / "glove.6B.300d.txt"
    longer.write_text("the 1\n")
    assert find_word_vectors(tmp_path) == longer


@pytest.fixture
def vectors():
    generator = np.random.default_rng(1)
    drawn = generator.normal(size=(400, 10)) @ np.diag(np.arange(10, 0, -1.0))
    drawn[::4] = np.nan
    return drawn.astype(np.float32)


@pytest.mark.parametrize("width", [10, 30])
def test_a_wider_start_keeps_inner_products(vectors, width):
    start = start_vectors(vectors, width, seed=3)
    known = np.isfinite(vectors[:, 0])
    assert start.shape == (400, width)
    assert start.dtype == np.float32
    np.testing.assert_allclose(
        start[known] @ start[known].T, vectors[known] @ vectors[known].T, rtol=1e-4, atol=1e-3
    )


def test_a_narrower_start_keeps_as_much_as_any_map_can(vectors):
    known = np.isfinite(vectors[:, 0])
    start = start_vectors(vectors, 6, seed=3)
    singular = np.linalg.svd(vectors[known], compute_uv=False)
    assert np.square(start[known]).sum() == pytest.approx(np.square(singular[:6]).sum(), rel=1e-4)


@pytest.mark.parametrize("width", [6, 30])
def test_unknown_rows_are_drawn_at_the_scale_of_the_known(vectors, width):
    known = np.isfinite(vectors[:, 0])
    start = start_vectors(vectors, width, seed=3)
    assert np.isfinite(start).all()
    assert start[~known].std() == pytest.approx(start[known].std(), rel=0.1)
    np.testing.assert_array_equal(start, start_vectors(vectors, width, seed=3))
    assert not np.array_equal(start[~known], start_vectors(vectors, width, seed=4)[~known])
