"""The floor of kernels and planning: attention kernels, merge, schedules, and the pure planner."""
