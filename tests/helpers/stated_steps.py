"""A scheduler of steps that a test states."""

from __future__ import annotations

from collections.abc import Sequence

from trtconvert.reuse.schedule import Schedule, all_computed


class StatedSteps:
    """Computes the same steps of every trajectory of their number, and all steps of others.

    Attributes:
        asked: the timesteps of the trajectories, as they were told.
    """

    timestep_input, timestep_place, noise_input, sample_input = "timestep", 1, None, "x"
    timesteps_fall = True

    def __init__(self, computed: Sequence[bool]) -> None:
        self._computed = tuple(computed)
        self.asked: list[tuple[float, ...]] = []

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `trtconvert.reuse.schedule.Scheduler`."""
        self.asked.append(tuple(timesteps))
        fits = len(timesteps) == len(self._computed)
        return Schedule(self._computed, 0.0) if fits else all_computed(len(timesteps))


class StatedSchedule:
    """A scheduler of one schedule, for any timesteps."""

    timestep_input, timestep_place, noise_input, sample_input = "timestep", 1, None, "x"
    timesteps_fall = True

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `trtconvert.reuse.schedule.Scheduler`."""
        return self._schedule
