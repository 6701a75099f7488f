"""Which policy versions a step may train on."""

from __future__ import annotations

from dataclasses import dataclass

from preceptor.policy import Version


@dataclass(frozen=True)
class Lineage:
    """The accepted history of a run.

    Every start opens an incarnation. When a run resumes from a checkpoint at step s, what earlier
    incarnations published beyond s is a lost future: those weights no longer lead here.

    Attributes:
        incarnation: the running one.
        ends: earlier incarnation -> last step of it that still counts.
    """

    incarnation: int
    ends: dict[int, int]

    def resumed(self, incarnation: int, step: int) -> Lineage:
        """The lineage after a restart from a checkpoint taken at `step`."""
        ends = {old: min(end, step) for old, end in self.ends.items()}
        ends[self.incarnation] = step
        return Lineage(incarnation, ends)

    def staleness(self, version: Version, step: int) -> int | None:
        """Steps `version` lies behind the policy that trains step `step`; None outside the lineage.

        The policy that trains step s is version s.
        """
        end = (
            step if version.incarnation == self.incarnation else self.ends.get(version.incarnation)
        )
        if end is None or version.step > min(end, step):
            return None
        return step - version.step

    def accepts(self, version: Version, step: int, max_staleness: int) -> bool:
        """Whether step `step` may train on tokens that `version` wrote."""
        staleness = self.staleness(version, step)
        return staleness is not None and staleness <= max_staleness
