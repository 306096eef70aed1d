"""The audit log: who did what to which object, from where, when."""

from polygraft.audit.log import AuditLog
from polygraft.audit.record import SERVER, Actor, record

__all__ = ["SERVER", "Actor", "AuditLog", "record"]
