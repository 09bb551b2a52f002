"""Messages through shared memory and, without a slot, through the group: in order, and with an end when a peer ends."""

import fcntl
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest.mock import ANY, patch

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.pipelines import chunked
from tests.support.parity import Case, in_layout, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.cpu.mailbox import MOST_BYTES, SLOTS, SharedMailbox, room_for_mail, share_mailbox
from threefold.cpu.segments import Shared
from threefold.errors import PeerLostError

PAGE = mmap.PAGESIZE
BYTES = torch.Size([PAGE])


def test_messages_through_slots_and_the_group(pool) -> None:
    """More than there are slots, and longer than these, both ways, taken in another order than sent; in two passes."""
    for kept, sent_by_group, slots in pool.run(2, exchange_many, 3 * SLOTS):
        assert kept == 0
        assert sent_by_group >= 2 * SLOTS
        assert slots == list(range(SLOTS))


def exchange_many(count: int) -> tuple[int, int, list[int]]:
    group = dist.distributed_c10d._get_default_group()
    mailbox = share_mailbox(group, PAGE, 3 * SLOTS)
    assert mailbox is not None
    peer, me = 1 - dist.get_rank(), dist.get_rank()
    by_group = 0
    for number in range(2):
        mailbox.begin()
        for message in range(count):
            mailbox.send(_message(me, number, message), peer)
            by_group = max(by_group, len(mailbox._by_group))
        dist.barrier()  # nothing comes back before all is sent
        places = [mailbox.expect(peer) for _ in range(count)]
        for place in reversed(places):
            wanted = _message(peer, number, place)
            found = mailbox.receive(peer, place, wanted.shape, wanted.dtype)
            assert torch.equal(found, wanted)
        mailbox.finish()
        dist.barrier()
    mailbox._take_back()
    return len(mailbox._by_group), by_group, sorted(mailbox._free)


def _message(source: int, number: int, place: int) -> torch.Tensor:
    dtype = (torch.float32, torch.bfloat16, torch.int64, torch.bool)[place % 4]
    size = PAGE if place == 1 else 3 * place  # the second one is longer than a slot
    return (torch.arange(size).view(-1, 1).t() + 100 * source + 10 * number + place).to(dtype)


def test_what_has_arrived_through_the_group_is_not_kept(pool) -> None:
    assert pool.run(2, send_long_ones) == [1, 0]


def send_long_ones() -> int:
    """How many long messages rank 0 keeps when the other has taken all but the last of them."""
    mailbox = share_mailbox(dist.distributed_c10d._get_default_group(), PAGE, 5)
    assert mailbox is not None
    mailbox.begin()
    me, long = dist.get_rank(), torch.ones(2 * PAGE)
    for _ in range(5):
        if me == 0:
            mailbox.send(long, 1)
            most = len(mailbox._by_group)
        else:
            mailbox.receive(0, mailbox.expect(0), long.shape, long.dtype)
            most = 0
        dist.barrier()
    mailbox.finish()
    return most


def test_what_a_pass_given_up_sent_through_the_group_is_dropped(pool) -> None:
    assert pool.run(2, give_up_a_pass) == [0, 0]


def give_up_a_pass() -> int:
    """How many messages are kept after the pass that follows."""
    mailbox = share_mailbox(dist.distributed_c10d._get_default_group(), PAGE, 3)
    assert mailbox is not None
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    for number in range(2):
        mailbox.begin()
        for _ in range(3):
            mailbox.send(torch.full((2 * PAGE,), 10.0 * me + number), peer)
        if number == 0:  # it fails here
            continue
        for _ in range(3):
            found = mailbox.receive(peer, mailbox.expect(peer), torch.Size([2 * PAGE]), torch.float32)
            assert torch.equal(found, torch.full((2 * PAGE,), 10.0 * peer + number))
        mailbox.finish()
    return len(mailbox._by_group)


def test_slots_come_back() -> None:
    with _mailboxes(2) as (one, two):
        for number in range(3 * SLOTS):
            one.send(torch.full(BYTES, number, dtype=torch.uint8), 1)
            assert two.receive(0, two.expect(0), BYTES, torch.uint8)[-1] == number


def test_messages_of_several_ranks_and_of_the_next_pass() -> None:
    with _mailboxes(3) as (one, two, three):
        one.send(torch.tensor([1.0]), 2)
        two.send(torch.tensor([2.0]), 2)
        one.begin()
        one.send(torch.tensor([3.0]), 2)
        number = three.expect(0)
        assert three.receive(1, three.expect(1), torch.Size([1]), torch.float32) == 2
        assert three.receive(0, number, torch.Size([1]), torch.float32) == 1
        three.begin()
        assert three.receive(0, three.expect(0), torch.Size([1]), torch.float32) == 3


def test_a_pass_given_up_is_dropped_with_its_slots() -> None:
    with _mailboxes(2) as (one, two):
        for seen in (True, False):
            for _ in range(SLOTS):
                one.send(torch.tensor([1.0]), 1)
            assert not one._free
            if seen:  # of half of them, the notes are read
                two.receive(0, two.expect(0), torch.Size([1]), torch.float32)
            one.begin()
            two.begin()
            one._free, free = [0], one._free  # as if there were one more
            one.send(torch.tensor([2.0]), 1)
            assert two.receive(0, two.expect(0), torch.Size([1]), torch.float32) == 2
            one._free = free
            one._take_back()
            one._free = sorted(set(one._free))
            assert one._free == list(range(SLOTS))


def test_who_has_ended_is_named_when_what_it_sent_is_taken() -> None:
    with _mailboxes(2) as (one, two):
        one.send(torch.tensor([1.0]), 1)
        one.close()
        assert two.receive(0, two.expect(0), torch.Size([1]), torch.float32) == 1
        with pytest.raises(PeerLostError, match=r"^rank 10 ended while rank 11 was in receive$"):
            two.receive(0, two.expect(0), torch.Size([1]), torch.float32)


def test_who_does_not_send_is_named() -> None:
    with (
        _mailboxes(3, timeout=0.01) as (_, two, _three),
        pytest.raises(TimeoutError, match=r"^rank 11 has waited 0\.01 s in receive for rank 10$"),
    ):
        two.receive(0, two.expect(0), torch.Size([1]), torch.float32)


def test_another_length_is_an_error() -> None:
    with _mailboxes(2) as (one, two):
        one.send(torch.tensor([1.0]), 1)
        with pytest.raises(RuntimeError, match=r"^rank 11 expected 8 bytes of rank 10, which sent 4$"):
            two.receive(0, two.expect(0), torch.Size([2]), torch.float32)


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_pipe_that_is_full_names_its_rank(operation: str) -> None:
    with _mailboxes(2, timeout=0.01) as (one, two), _full(one, two, operation) as use:
        with pytest.raises(TimeoutError, match=rf"^rank 10 has waited 0\.01 s in {operation} for rank 11$"):
            use()
        two.close()
        with pytest.raises(PeerLostError, match=rf"^rank 11 ended while rank 10 was in {operation}$"):
            use()


def test_a_full_pipe_is_waited_for() -> None:
    """Until its rank reads it."""
    with _mailboxes(2) as (one, two), _full(one, two, "send") as use, ThreadPoolExecutor(1) as thread:
        sent = thread.submit(use)
        assert wait([sent], timeout=0.05).not_done
        while not sent.done():
            with suppress(BlockingIOError):
                os.read(two._inboxes[1], 4096)
        sent.result()


@contextmanager
def _full(one: SharedMailbox, two: SharedMailbox, operation: str) -> Iterator[Callable[[], object]]:
    """With a pipe that `two` reads full; gives what makes `one` write into it."""
    for _ in range(2):
        two.send(torch.tensor([1.0]), 0)
    pipe = one._inboxes[1] if operation == "send" else one._returns[1]
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))

    def use() -> None:
        if operation == "send":
            one.send(torch.tensor([1.0]), 1)
        else:
            one.receive(1, one.expect(1), torch.Size([1]), torch.float32)

    yield use


def test_its_room() -> None:
    assert room_for_mail(3, 1, 10) == (3 * SLOTS * PAGE, ANY, 2 * 10 * 16)
    assert room_for_mail(2, MOST_BYTES, 10) == (2 * SLOTS * MOST_BYTES, ANY, ANY)
    assert room_for_mail(2, MOST_BYTES + 1, 10) is None


def test_more_messages_than_a_pipe_takes_and_longer_ones_go_through_the_group(pool) -> None:
    assert pool.run(3, try_messages) == [[True, False, False, False]] * 3


def try_messages() -> list[bool]:
    """Whether there is a mailbox: for as many messages as a pipe takes in two passes, where one rank has more, and
    where one has messages that are too long, the first one or another."""
    group, me = dist.distributed_c10d._get_default_group(), dist.get_rank()
    read, write = os.pipe()
    most = fcntl.fcntl(read, fcntl.F_GETPIPE_SZ) // 16 // 2
    os.close(read)
    os.close(write)
    found = [share_mailbox(group, PAGE, most), share_mailbox(group, PAGE, most + (me == 2))]
    found += [share_mailbox(group, PAGE + MOST_BYTES * (me == long), most) for long in range(2)]
    return [each is not None for each in found]


@sweep(
    ("schedule", "chunks", "neighbours"),
    [("1f1b", 1, 1), ("gpipe", 1, 1), ("interleaved", 2, 3), ("looped-bfs", 2, 3), ("zbv", 2, 2), ("dualpipev", 2, 2)],
    quick=(4,),
)
def test_training_sends_by_mail_and_an_evaluation_through_the_group(
    pool, schedule: str, chunks: int, neighbours: int
) -> None:
    """With so many pairs of neighbouring stages on different ranks, an activation and a gradient each."""
    case = chunked(schedule, chunks, pp=2, dtype="fp32", accumulation=4)
    for shared_memory in (True, False):
        ranks = pool.run(2, count_mail, replace(case, shared_memory=shared_memory))
        assert sum(trained for trained, _ in ranks) == (2 * neighbours * 4 if shared_memory else 0)
        assert [evaluated for _, evaluated in ranks] == [0, 0]


def count_mail(case: Case) -> tuple[int, int]:
    """Messages that this rank sends by mail in a step, and in an evaluation."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    with patch.object(SharedMailbox, "send", autospec=True, side_effect=SharedMailbox.send) as send:
        engine.train_step(batch, 0)
        trained = send.call_count
        engine.evaluate(batch)
    return trained, send.call_count - trained


def test_descriptors_do_not_grow_over_runs_of_one_process(pool) -> None:
    counts = [pool.run(2, descriptors_before_a_run, Case(pp=2, steps=1)) for _ in range(3)]
    assert counts[1] == counts[2]


def descriptors_before_a_run(case: Case) -> int:
    gc.collect()  # what the run before has left
    count = len(os.listdir("/proc/self/fd"))
    in_layout(case)
    return count


@contextmanager
def _mailboxes(size: int, timeout: float = 20.0) -> Iterator[list[SharedMailbox]]:
    """Of `size` ranks, from 10 on, all in this process, which have begun a pass; without a process group."""
    room, ends = room_for_mail(size, PAGE, 3 * SLOTS), [os.pipe() for _ in range(size)]
    assert room is not None
    memory, pipes = mmap.mmap(-1, room.nbytes), [os.pipe() for _ in room.pipes]
    made = []
    for index in range(size):
        # Both ends of each pipe in one descriptor, as those opened by name are.
        both = tuple(os.open(f"/proc/self/fd/{read}", os.O_RDWR | os.O_NONBLOCK) for read, _ in pipes)
        alive = {peer: os.dup(ends[peer][0]) for peer in range(size) if peer != index}
        shared = Shared(list(range(10, 10 + size)), index, memory, both, alive, ends[index][1], timeout)
        made.append(SharedMailbox(shared, None))  # type: ignore[arg-type]
    for end in [*(end for end, _ in ends), *(end for pipe in pipes for end in pipe)]:
        os.close(end)
    for each in made:
        each.begin()
    try:
        yield made
    finally:
        for each in made:
            each.close()
