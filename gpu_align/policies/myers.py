"""Token-level realignment with Myers' O(ND) difference algorithm, carried from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_align.policies._sequence import CursorPolicy

_Int = npt.NDArray[np.int64]

#: Stands for "no path reaches this diagonal"; far enough from overflow to be incremented.
_UNREACHED = np.int64(-(1 << 40))


class MyersFrontier:
    """Furthest-reaching paths between a fixed sequence and one that grows.

    With ``a`` the fixed sequence, ``b`` the tokens given so far and ``dist`` the number of insertions and
    deletions that turn one sequence into another (a substitution costs 2)::

        edits == min(dist(a[:x], b) for x in range(len(a) + 1))
        ends() == [x for x in range(len(a) + 1) if dist(a[:x], b) == edits]

    Only the last layer of paths is kept. No path of an earlier layer had come to the end of ``b``, so
    those are final, and growing ``b`` only lengthens the diagonals of the last layer that had.
    All appends together take O((len(a) + len(b)) · edits) comparisons and O(edits) memory, vectorised
    over the diagonals of a layer.

    Source: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986).
    """

    def __init__(self, a: list[int]) -> None:
        self._a: _Int = np.asarray(a, dtype=np.int64)
        self._b: _Int = np.empty(64, dtype=np.int64)
        self._length = 0
        self.edits = 0
        # [edits + 1] furthest x on diagonals k = x - y in -edits, -edits + 2, …, edits.
        self._furthest: _Int = np.zeros(1, dtype=np.int64)

    def append(self, tokens: list[int]) -> None:
        """Grow ``b``; the result does not depend on how its tokens are grouped into calls."""
        grown = self._length + len(tokens)
        if grown > len(self._b):
            self._b = np.concatenate([self._b, np.empty(max(grown, len(self._b)), dtype=np.int64)])
        self._b[self._length : grown] = tokens
        self._length = grown
        self._slide()
        while not len(self.ends()):
            self._next_layer()
            self._slide()

    def ends(self) -> _Int:
        """Ascending x at which a shortest script that uses up all of ``b`` ends."""
        x = self._furthest
        ends: _Int = x[(x >= 0) & (x - self._diagonals() == self._length)]
        return ends

    def _diagonals(self) -> _Int:
        return np.arange(-self.edits, self.edits + 1, 2, dtype=np.int64)

    def _next_layer(self) -> None:
        """One more edit: from k - 1 by skipping a token of ``a``, from k + 1 by inserting one of ``b``."""
        deleted = np.concatenate([[_UNREACHED], self._furthest + 1])
        inserted = np.concatenate([self._furthest, [_UNREACHED]])
        deleted[deleted > len(self._a)] = _UNREACHED
        self.edits += 1
        self._furthest = np.maximum(deleted, inserted)

    def _slide(self) -> None:
        """Move every path along its diagonal while the tokens are equal."""
        k = self._diagonals()
        moving = np.flatnonzero(self._furthest >= 0)
        while len(moving):
            x = self._furthest[moving]
            y = x - k[moving]
            inside = (x < len(self._a)) & (y < self._length)
            moving, x, y = moving[inside], x[inside], y[inside]
            moving = moving[self._a[x] == self._b[y]]
            self._furthest[moving] += 1


class Myers(CursorPolicy):
    """Cursor at the end of the shortest edit script from the prediction to the output so far.

    ::

        d      = min over x of dist(prediction[:x], output)        # insertions + deletions
        cursor = the largest x with dist(prediction[:x], output) == d
                 and prediction[x - 1] == output[-1]               # the script ends in a match
        draft  = prediction[cursor : cursor + K], or nothing if there is no such x

    Before any output the cursor is 0. While the output follows the prediction, d = 0 and the cursor is
    simply the next position; "realigning" is the same rule when d > 0. Coming back after an insertion or a
    substitution needs one matching token. After a deletion of L tokens the script must pay L edits for the
    jump, so it takes about L generated tokens until the jump is cheaper than calling all of them inserted:
    the weakness of an edit distance for this purpose.

    Cost: see `MyersFrontier`. A step that follows the prediction takes a few microseconds; an unrelated
    output of 8,000 tokens takes about a second in all.

    Source: https://cascadetech.ai/blog/vllm-predicted-outputs ("we use the Myers diff algorithm to
    realign") and the token-level prototype in https://github.com/cascade-tech-ai/vllmx
    (``cascade/src/smart_prediction/algorithms/myers_streaming.py``), which goes on to longer scripts when
    no shortest one ends in a match; see ``docs/developer/policies.md`` for the differences.
    """

    def __init__(self, name: str = "myers") -> None:
        super().__init__(name)

    def _begin(self) -> None:
        super()._begin()
        self._frontier = MyersFrontier(self._prediction)

    def _advance(self, tokens: list[int]) -> None:
        self._frontier.append(tokens)
        last = tokens[-1]
        ends = (int(x) for x in self._frontier.ends()[::-1])
        self._cursor = next((x for x in ends if x > 0 and self._prediction[x - 1] == last), None)
