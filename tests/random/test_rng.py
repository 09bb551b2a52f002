"""Named random streams that a user adds."""

import pytest
import torch
from torch.nn import functional as F

import threefold
from threefold.errors import UserError


def streams(tp: int = 0) -> threefold.RandomStreams:
    made = threefold.RandomStreams(7, (0, 0, 0, tp))
    made.add("shared", 11)
    made.add("own", 20 + tp)
    return made


def dropped(made: threefold.RandomStreams, name: str) -> torch.Tensor:
    with made.use(name):
        return F.dropout(torch.ones(64), 0.5)


def test_a_stream_draws_what_torch_draws_after_its_seed() -> None:
    made = streams()
    state = torch.get_rng_state()
    found = [dropped(made, "shared"), dropped(made, "shared")]
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        assert all(torch.equal(each, F.dropout(torch.ones(64), 0.5)) for each in found)


def test_ranks_with_one_seed_drop_the_same_and_streams_do_not_disturb_each_other() -> None:
    first, second = streams(0), streams(1)
    dropped(first, "own")
    assert torch.equal(dropped(first, "shared"), dropped(second, "shared"))
    assert not torch.equal(dropped(first, "own"), dropped(second, "own"))


def test_states_are_stored_by_place_and_restored() -> None:
    made = streams(1)
    dropped(made, "own")
    stored = made.stored((1, 1, 1, 2))
    assert sorted(name.partition(".")[2] for name in stored) == [
        f"dp1-pp1-cp1-tp2.{name}" for name in ("global.0.0.0", "local.0.0.0.1", "own.0.0.0.1", "shared.0.0.0.1")
    ]
    expected = dropped(made, "own")
    again = streams(1)
    again.load_stored(stored, (1, 1, 1, 2))
    assert torch.equal(dropped(again, "own"), expected)


def test_streams_start_anew_in_another_layout() -> None:
    made = streams()
    first = dropped(made, "own")
    made.reseed("after", 5)
    assert not torch.equal(dropped(made, "own"), first)


@pytest.mark.parametrize(
    ("name", "seed", "sentence"),
    [
        ("own", 3, "There is a random stream 'own' already; give the new one another name."),
        ("other", 11, "The random stream 'other' has the seed 11 of 'shared', so both would draw the same; give it "),
        ("a.b", 3, "A random stream is called 'a.b' but its name has no full stop; use 'a_b'."),
    ],
)
def test_wrong_streams_are_one_sentence(name: str, seed: int, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        streams().add(name, seed)
    assert str(caught.value).startswith(sentence)


def test_a_stream_that_is_not_there_proposes_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"^There is no random stream 'shard'; use 'shared', or make it with `add` first"
    ):
        streams().use("shard")
