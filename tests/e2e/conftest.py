"""The cluster shapes that tests share."""

from tests.support.cluster.fixtures import *  # noqa: F403
