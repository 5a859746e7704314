"""Workers of a preparation that are killed at random moments: each is noticed, each rerun gives the same bytes."""

import random
import time

import pytest


@pytest.mark.reliability
@pytest.mark.process
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments(tmp_path, check_a_kill):
    random.seed(1)
    hits = 0
    for number in range(20):
        moment = time.monotonic() + random.uniform(1, 5)
        hits += check_a_kill(tmp_path / str(number), lambda moment=moment: time.monotonic() > moment)
    assert hits >= 10
