"""Two processes that call functions, for tests of training on more than one: they are started once for many tests."""

import os
import socket
import traceback
from contextlib import contextmanager
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker(rank, master, pipe):
    """Call each function that comes through the pipe, and send back its traceback, or None if it returned."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while (call := pipe.recv()) is not None:
        function, arguments = call
        try:
            function(*arguments)
        except BaseException:
            pipe.send(traceback.format_exc())
            raise
        pipe.send(None)
    dist.destroy_process_group()


@contextmanager
def two_processes():
    """A function that calls another in both of two processes. What fails in one of them ends both, and the next call
    starts two new ones.
    """
    context, processes, pipes = mp.get_context("spawn"), [], []

    def begin():
        master = port()
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=worker, args=(rank, master, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)

    def end():
        for process in processes:
            process.kill()
            process.join()
        processes.clear()
        pipes.clear()

    def call(function, *arguments):
        if not processes:
            begin()
        for pipe in pipes:
            pipe.send((function, arguments))
        running = list(pipes)
        while running:
            for pipe in wait(running):
                try:
                    failure = pipe.recv()
                except EOFError:
                    failure = "the process ended"
                if failure is not None:
                    end()
                    pytest.fail(f"{function.__name__}: {failure}")
                running.remove(pipe)

    yield call
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
    codes = [process.exitcode for process in processes]
    end()
    assert codes in ([], [0, 0])
