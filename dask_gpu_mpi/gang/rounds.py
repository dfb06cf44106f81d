"""The collective operations of a gang, as the scheduler sees them: each is a round to which every member brings its part."""

from __future__ import annotations

from dask_gpu_mpi.base.hostlist import ranks_text

__all__ = ["MismatchError", "Rounds"]


class MismatchError(ValueError):
    """Members of a gang call different operations where they have to call the same."""


class Rounds:
    """The rounds of one gang: the first call of each member belongs to round 0, the second to round 1, and so on.

    Parameters
    ----------
    size : int
        Members of the gang.

    Examples
    --------
    >>> rounds = Rounds(2)
    >>> rounds.put(0, 1, "allgather", b"of rank 1")
    >>> rounds.put(0, 0, "allgather", b"of rank 0")
    [b'of rank 0', b'of rank 1']
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: Rounds that have begun: the operation, who brought it first, and each member's part.
        self._open: dict[int, tuple[str, int, dict[int, bytes]]] = {}
        #: The first round in which somebody has stopped waiting, and who.
        self._given_up: tuple[int, int] | None = None
        #: Those whose function has returned: they come to no further round.
        self._left: set[int] = set()

    def put(self, number: int, rank: int, operation: str, part: bytes) -> list[bytes] | None:
        """A member's part of a round; returns all parts in rank order with the last one, which ends the round.

        Raises
        ------
        MismatchError
            Another member has called another operation in this round, has returned, or has stopped waiting: its next call would
            meet this one. The text is what this member has done.
        """
        if self._given_up is not None and number >= self._given_up[0]:
            raise MismatchError(
                f"calls {operation} when rank {self._given_up[1]} has stopped waiting (expected a longer timeout)"
            )
        first, by, parts = self._open.setdefault(number, (operation, rank, {}))
        if first != operation:
            raise MismatchError(
                f"calls {operation} where rank {by} calls {first} (expected the same calls in the same order on all ranks)"
            )
        if gone := sorted(self._left.difference(parts)):
            raise MismatchError(
                f"calls {operation} after {ranks_text(gone)} returned (expected the same calls on all ranks)"
            )
        parts[rank] = part
        if len(parts) < self._size:
            return None
        del self._open[number]
        return [parts[rank] for rank in range(self._size)]

    def give_up(self, number: int, rank: int) -> None:
        """A member no longer waits for this round."""
        if self._given_up is None:
            self._given_up = (number, rank)

    def leave(self, rank: int) -> str | None:
        """A member has returned, and comes to no round any more; what others wait for in vain, if anything."""
        self._left.add(rank)
        for operation, _, parts in self._open.values():
            if rank not in parts:
                return f"returned while {ranks_text(sorted(parts))} waited in {operation} (expected the same calls on all ranks)"
        return None

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to a round that has begun."""
        parts = self._open[number][2] if number in self._open else {}
        return [rank for rank in range(self._size) if rank not in parts]
