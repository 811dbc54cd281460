"""The circuit of a worker, with a clock and chance of the test's own."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.rpc.backoff import Backoff
from baton_router.routing.fleet.circuit_breaker import CircuitBreaker, CircuitState
from tests.support.clock import Clock

CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN


def circuit_and_clock(chance: float = 0.999) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(Backoff(1.0, 8.0, lambda: chance), clock), clock


@given(st.integers(1, 100), st.floats(0.0, 1.0, exclude_max=True))
def test_backoff_doubles_to_its_limit_with_jitter_of_half(n, chance):
    whole = min(8.0, 2.0 ** (n - 1))
    assert whole / 2 <= Backoff(1.0, 8.0, lambda: chance).delay(n) <= whole


def test_circuit_breaker_opens_after_consecutive_failures():
    circuit, _ = circuit_and_clock()
    for _ in range(10):
        circuit.record_failure()
        circuit.record_failure()
        assert circuit.state is CLOSED
        circuit.record_success()
    for _ in range(3):
        circuit.record_failure()
    assert circuit.state is OPEN


def test_circuit_breaker_counts_simultaneous_trips_once():
    circuit, _ = circuit_and_clock()
    for _ in range(100):
        circuit.trip()
    assert circuit.seconds_to_probe <= 1.0


def test_circuit_breaker_backs_off_when_only_probes_succeed():
    circuit, clock = circuit_and_clock()
    waits = []
    for _ in range(5):
        circuit.trip()
        waits.append(round(circuit.seconds_to_probe))
        clock.now += circuit.seconds_to_probe
        circuit.probe_succeeded()
    assert waits == [1, 2, 4, 8, 8]
    circuit.record_success()
    circuit.trip()
    assert round(circuit.seconds_to_probe) == 1


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, a worker that is well takes work again within the longest delay."""

    def __init__(self) -> None:
        super().__init__()
        self.circuit, self.clock = circuit_and_clock(0.5)

    @rule()
    def lose(self) -> None:
        self.circuit.trip()
        assert self.circuit.state is not CLOSED

    @rule()
    def fail(self) -> None:
        was_closed = self.circuit.is_closed
        self.circuit.record_failure()
        assert was_closed or not self.circuit.is_closed

    @rule()
    def succeed(self) -> None:
        before = self.circuit.state
        self.circuit.record_success()
        assert self.circuit.state is before

    @precondition(lambda self: self.circuit.state is HALF_OPEN)
    @rule(is_well=st.booleans())
    def probe(self, is_well: bool) -> None:
        if is_well:
            self.circuit.probe_succeeded()
        else:
            self.circuit.probe_failed()
        assert self.circuit.state is (CLOSED if is_well else OPEN)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        was_closed = self.circuit.is_closed
        self.clock.now += seconds
        assert self.circuit.is_closed == was_closed, "time alone closes nothing"

    @invariant()
    def is_probed_soon(self) -> None:
        assert 0.0 <= self.circuit.seconds_to_probe <= 8.0
        assert (self.circuit.state is OPEN) == (self.circuit.seconds_to_probe > 0.0)


TestAnyHistory = AnyHistory.TestCase
