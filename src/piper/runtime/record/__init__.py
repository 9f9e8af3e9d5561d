"""The times of tasks, noted on request, and clocks of several ranks brought to one."""
