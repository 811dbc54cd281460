"""Waiting records: registered workers that are not members of the fleet yet. Pure."""

from baton.cluster.registry.registry import WorkerRecord

_MAX_COUNTED = 16_384  # workers whose trials are counted


class WaitingRecords:
    """Waiting records by worker. Those with the fewest trials come first, the newest of them before
    others: so a new worker does not wait for the trials of many records without a worker."""

    def __init__(self) -> None:
        self._records: dict[int, dict[str, WorkerRecord]] = {}  # by number of trials
        self._num_trials: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Returns whether a record waits."""
        return bool(self._records)

    def add(self, record: WorkerRecord) -> None:
        """Adds a record, or replaces the one of its worker."""
        self.remove(record.id)
        number = self._num_trials.get(record.id, 0)
        self._records.setdefault(number, {})[record.id] = record

    def add_again(self, record: WorkerRecord) -> None:
        """Adds a record after a trial in which its worker was not ready."""
        if len(self._num_trials) >= _MAX_COUNTED:
            self._num_trials.clear()
        self._num_trials[record.id] = self._num_trials.get(record.id, 0) + 1
        self.add(record)

    def remove(self, worker: str) -> None:
        """Removes the record of the worker, if it waits."""
        for number, records in self._records.items():
            if records.pop(worker, None) is not None:
                if not records:
                    del self._records[number]
                return

    def forget(self, worker: str) -> None:
        """Forgets the trials of the worker, which was ready."""
        self._num_trials.pop(worker, None)

    def take(self) -> WorkerRecord:
        """Removes and returns the first record, of which there must be one."""
        number = min(self._records)
        _, record = self._records[number].popitem()
        if not self._records[number]:
            del self._records[number]
        return record
