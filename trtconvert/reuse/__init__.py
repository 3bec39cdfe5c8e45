"""Schedules of computed and extrapolated denoising steps, and the measured trajectories that they are chosen by."""
