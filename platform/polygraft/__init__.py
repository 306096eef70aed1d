"""What people run: HTTP, tenants, the queue, quotas, dashboards and the command line."""
