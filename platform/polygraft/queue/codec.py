"""MessagePack of what travels, and JSON of cards; encoders and decoders are made once."""

from __future__ import annotations

import msgspec

from polygraft.card import ModelCard
from polygraft.queue.messages import AccessChange, Job, JobEvent, StepMessage, WorkerStatus

_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_event = msgspec.msgpack.Decoder(JobEvent).decode
decode_step = msgspec.msgpack.Decoder(StepMessage).decode
decode_card = msgspec.json.Decoder(ModelCard).decode
decode_status = msgspec.msgpack.Decoder(WorkerStatus).decode
decode_change = msgspec.msgpack.Decoder(AccessChange).decode
