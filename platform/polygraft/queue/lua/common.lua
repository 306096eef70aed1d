-- What the scripts share. Constants named as in keys.py come before this.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function tenant_queue(model, tenant)
  return TENANT_QUEUE .. #model .. ':' .. model .. ':' .. tenant
end

-- A tenant is in the ring exactly while its queue of that model holds something.
local function enqueue(push, id, model, tenant)
  if redis.call(push, tenant_queue(model, tenant), id) == 1 then
    redis.call('RPUSH', RING .. model, tenant)
  end
  -- As many marks as there may be idle workers are enough; busy ones take none.
  redis.call('RPUSH', WAKE .. model, '')
  redis.call('LTRIM', WAKE .. model, -256, -1)
end

local function leave_ring_if_empty(model, tenant)
  if redis.call('EXISTS', tenant_queue(model, tenant)) == 0 then
    redis.call('LREM', RING .. model, 0, tenant)
  end
  if redis.call('EXISTS', RING .. model) == 0 then
    redis.call('DEL', WAKE .. model)
  end
end

local function dequeue(id, model, tenant)
  redis.call('LREM', tenant_queue(model, tenant), 0, id)
  leave_ring_if_empty(model, tenant)
end

local function nudge(worker)
  redis.call('LPUSH', NUDGE .. worker, '')
  redis.call('LTRIM', NUDGE .. worker, 0, 0)
  redis.call('PEXPIRE', NUDGE .. worker, 60000)
end

-- MessagePack of a StepMessage, put together around events that are already encoded.
local function announce(gateway, step_ended, events)
  local count = #events < 16 and string.char(0x90 + #events) or struct.pack('>BH', 0xdc, #events)
  redis.call(
    'PUBLISH', CHANNEL .. gateway,
    string.char(0x82)
      .. cmsgpack.pack('step_ended') .. struct.pack('>Bd', 0xcb, step_ended)
      .. cmsgpack.pack('events') .. count .. table.concat(events)
  )
end

-- Everything forgets the job but its record, which stays readable for `record_ttl` ms.
local function retire(id, gateway, worker, record_ttl)
  redis.call('HSET', JOB .. id, 'state', 'done')
  redis.call('HDEL', JOB .. id, 'payload')
  redis.call('ZREM', QUEUED, id)
  redis.call('ZREM', RUNNING, id)
  redis.call('SREM', GATEWAY_JOBS .. gateway, id)
  if worker then
    redis.call('SREM', CANCELS .. worker, id)
  end
  redis.call('PEXPIRE', JOB .. id, record_ttl)
  redis.call('PEXPIRE', EVENTS .. id, record_ttl)
end

-- Ends a job that no worker will end. `ending` holds fields of a JobEvent.
local function conclude(id, ending, record_ttl)
  local job = redis.call('HMGET', JOB .. id, 'gateway', 'worker')
  ending.job = id
  ending.seq = ending.seq or redis.call('LLEN', EVENTS .. id)
  local event = cmsgpack.pack(ending)
  redis.call('RPUSH', EVENTS .. id, event)
  retire(id, job[1], job[2], record_ttl)
  announce(job[1], now_ms() / 1000, { event })
end

local function aborted(id)
  local deltas = {}
  for index = 0, tonumber(redis.call('HGET', JOB .. id, 'choices')) - 1 do
    deltas[#deltas + 1] = { index = index, finish_reason = 'abort' }
  end
  return { deltas = deltas, usage = { prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0 } }
end

local function failed(code, message)
  return { error = { status = 503, type = 'service_unavailable_error', code = code, message = message } }
end

-- A claimed job goes back to the head of its tenant's queue.
local function requeue(id, max_wait)
  local job = redis.call('HMGET', JOB .. id, 'model', 'tenant', 'worker', 'deadline')
  local give_up = now_ms() + max_wait
  local deadline = tonumber(job[4])
  if deadline > 0 then
    give_up = math.min(give_up, deadline)
  end
  redis.call('HSET', JOB .. id, 'state', 'queued')
  redis.call('HDEL', JOB .. id, 'worker')
  redis.call('ZREM', RUNNING, id)
  redis.call('SREM', CANCELS .. job[3], id)
  redis.call('ZADD', QUEUED, give_up, id)
  enqueue('LPUSH', id, job[1], job[2])
end

-- Queued: ended here. Running: its worker ends it, as soon as it looks.
local function cancel(id, record_ttl)
  local job = redis.call('HMGET', JOB .. id, 'state', 'model', 'tenant', 'worker')
  if job[1] == 'queued' then
    dequeue(id, job[2], job[3])
    conclude(id, aborted(id), record_ttl)
  elseif job[1] == 'running' then
    redis.call('HSET', JOB .. id, 'cancelled', 1)
    redis.call('SADD', CANCELS .. job[4], id)
    nudge(job[4])
  end
end
