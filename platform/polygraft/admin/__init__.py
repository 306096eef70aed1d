"""The operator's routes below /admin/v1: tenants, their keys, the audit log and the workers."""
