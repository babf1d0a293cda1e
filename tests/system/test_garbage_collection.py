"""Control of the garbage collector."""

import gc
import weakref

import pytest

from sparsellm.system.garbage_collection import without_garbage_collection


class Node:
    """It may refer to itself."""


def cycle() -> weakref.ref:
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.fixture
def unfrozen():
    assert gc.isenabled()
    yield
    gc.unfreeze()


def test_what_a_block_without_garbage_collection_makes_is_never_looked_at(unfrozen):
    with without_garbage_collection():
        assert not gc.isenabled()
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
        inside, single = cycle(), weakref.ref(Node())
    assert gc.isenabled()
    outside = cycle()
    gc.collect()
    assert inside() is not None
    assert outside() is None
    assert single() is None  # nothing refers to it: that needs no collection


def test_garbage_is_looked_for_again_after_a_failure(unfrozen):
    with pytest.raises(KeyError), without_garbage_collection():
        raise KeyError
    assert gc.isenabled()
