"""Pipeline schedules in time: the actions of each rank as data, when each runs, and how many micro-batches are held."""
