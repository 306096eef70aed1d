"""The worker process: one model, one engine, jobs from the queue. `main` runs it."""
