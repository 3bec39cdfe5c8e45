"""Steps of a trajectory that need not be computed: what a schedule is made of, and how it is made."""
