"""How a call lies on a mesh, as data: the specs are those written by hand."""

import re

import pytest
from jax.sharding import PartitionSpec as P

from jflash.parallel.partition import placement_of

MESH = {"data": 2, "model": 4, "spare": 3}


def place(*, N, K, B=6, batch=("data",), heads=("model",)):
    return placement_of(MESH, batch=batch, heads=heads, B=B, N=N, K=K)


def test_key_value_heads_follow_the_query_heads():
    placement = place(N=16, K=8)
    assert placement.splits_kv_heads
    assert placement.spec("BTNH", (6, 100, 16, 64)) == P("data", None, "model", None)
    assert placement.spec("BSKH", (6, 90, 8, 64)) == P("data", None, "model", None)
    assert placement.spec("BNT", (6, 16, 100)) == P("data", "model", None)


@pytest.mark.parametrize("K", [1, 2])
def test_fewer_key_value_heads_than_devices_are_on_all_of_them(K):
    placement = place(N=8, K=K)
    assert not placement.splits_kv_heads
    assert placement.spec("BSKH", (6, 90, K, 64)) == P("data", None, None, None)
    assert placement.spec("BTNH", (6, 100, 8, 64)) == P("data", None, "model", None)


def test_axes_that_broadcast_are_not_split():
    placement = place(N=16, K=8)
    assert placement.spec("BNTS", (1, 16, 100, 90)) == P(None, "model", None, None)
    assert placement.spec("BT", (6, 100)) == P("data", None)
    assert placement.spec("B", (1,)) == P(None)


def test_several_mesh_axes_on_one_dimension():
    placement = place(N=12, K=12, heads=("model", "spare"))
    assert placement.head_shards == 12
    assert placement.spec("BTNH", (6, 100, 12, 64)) == P("data", None, ("model", "spare"), None)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"N": 16, "K": 8, "B": 3}, r"B=3 does not divide over the 2 devices"),
        ({"N": 6, "K": 6}, r"N=6 does not divide over the 4 devices"),
        ({"N": 12, "K": 3}, r"K=3 key/value heads and the 4 devices .* do not divide one another"),
    ],
)
def test_a_split_that_cannot_be_gives_its_reason(sizes, reason):
    assert re.search(reason, place(**sizes))
