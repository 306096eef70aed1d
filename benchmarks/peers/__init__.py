"""What the comparisons with other systems share: environments, processes, loads, rounds, results."""
