"""Host copies: what a save reads is the state at the moment it was begun, whatever the training does meanwhile."""

import threading

import torch

from jobs.hostcopy import HostCopy


def tree(value: float) -> dict[str, object]:
    return {
        "model": {"weight": torch.full((3, 2), value), "running_mean": torch.full((4,), value)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.full((3, 2), -value)}}, "param_groups": [{"lr": value}]},
    }


def test_copy_is_of_the_moment_when_it_was_started() -> None:
    source = tree(1.0)
    weights, running = source["model"]["weight"], source["model"]["running_mean"]  # type: ignore[index]
    host = HostCopy()
    copy = host.start(source, [running])
    running.fill_(2.0)  # a forward pass
    host.finish()
    host.wait()
    weights.fill_(2.0)  # an update
    assert copy["model"]["weight"].tolist() == [[1.0, 1.0]] * 3
    assert copy["model"]["running_mean"].tolist() == [1.0] * 4
    assert copy["optimizer"]["state"][0]["momentum_buffer"].tolist() == [[-1.0, -1.0]] * 3
    assert copy["optimizer"]["param_groups"] == [{"lr": 1.0}]


def test_update_waits_until_the_weights_are_copied() -> None:
    weights = torch.ones(2)
    host = HostCopy()
    copy = host.start({"weight": weights}, [])

    def update() -> None:
        host.wait()
        weights.fill_(2.0)

    updated = threading.Thread(target=update)
    updated.start()
    updated.join(timeout=0.2)
    assert updated.is_alive()
    host.finish()
    updated.join()
    assert (copy["weight"].tolist(), weights.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_nothing_is_waited_for_when_no_copy_was_started() -> None:
    waiting = threading.Thread(target=HostCopy().wait, daemon=True)
    waiting.start()
    waiting.join(timeout=60)
    assert not waiting.is_alive()


def test_buffers_of_the_first_copy_serve_all_others() -> None:
    host = HostCopy()
    assert host.prepare(tree(0.0)) == 4 * (6 + 4 + 6)
    first, second = host.start(tree(1.0), []), host.start(tree(2.0), [])
    host.finish()
    weights = [copy["model"]["weight"] for copy in (first, second)]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert weights[1].tolist() == [[2.0, 2.0]] * 3


def test_tensor_of_another_shape_gets_another_buffer() -> None:
    host = HostCopy()
    host.prepare({"weight": torch.zeros(2)})
    copy = host.start({"weight": torch.ones(3)}, [])
    host.finish()
    assert copy["weight"].tolist() == [1.0, 1.0, 1.0]
