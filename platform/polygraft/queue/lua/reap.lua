-- gateway, gateway_ttl (ms), grace (ms), max_losses, max_wait (ms), record_ttl (ms)
-- The calling gateway's heartbeat; then cleans up after workers and gateways that are gone.
local gateway, gateway_ttl, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_losses, max_wait, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_ms()

redis.call('ZADD', GATEWAYS, now + gateway_ttl, gateway)

-- After a pause of the server or of all gateways, everybody gets time to be heard again before anybody counts as gone.
local reaper = redis.call('HMGET', REAPER, 'last', 'since')
local since = tonumber(reaper[2])
if not since or now - tonumber(reaper[1]) > grace then
  since = now
end
redis.call('HSET', REAPER, 'last', now, 'since', since)
if now - since < grace then
  return 0
end

-- Ids whose record is gone, by whoever's hand, are dropped wherever they turn up: they may not stop the reaper.

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', now)) do
  for _, id in ipairs(redis.call('SMEMBERS', GATEWAY_JOBS .. gone)) do
    cancel(id, record_ttl)
    if redis.call('EXISTS', JOB .. id) == 0 then
      redis.call('SREM', GATEWAY_JOBS .. gone, id)
    end
  end
  if redis.call('EXISTS', GATEWAY_JOBS .. gone) == 0 then
    redis.call('ZREM', GATEWAYS, gone)
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', QUEUED, '-inf', now, 'LIMIT', 0, 100)) do
  local job = redis.call('HMGET', JOB .. id, 'model', 'tenant')
  if job[1] then
    dequeue(id, job[1], job[2])
    conclude(id, failed('overloaded', 'The request waited until its deadline; try again later.'), record_ttl)
  else
    redis.call('ZREM', QUEUED, id)
  end
end

-- The one place that decides what becomes of a job whose worker was lost.
local function lost(id)
  local job = redis.call('HMGET', JOB .. id, 'cancelled', 'losses')
  if job[1] then
    conclude(id, aborted(id), record_ttl)
  elseif redis.call('LLEN', EVENTS .. id) == 0 and job[2] + 1 < max_losses then
    redis.call('HINCRBY', JOB .. id, 'losses', 1)
    requeue(id, max_wait)
  else
    conclude(id, failed('dependency_unavailable', 'The worker running this request was lost; try again.'), record_ttl)
  end
end

local alive = {}
local running = redis.call('ZRANGE', RUNNING, 0, -1, 'WITHSCORES')
for i = 1, #running, 2 do
  local id, lease_end = running[i], tonumber(running[i + 1])
  local worker = redis.call('HGET', JOB .. id, 'worker')
  if not worker then
    redis.call('ZREM', RUNNING, id)
  else
    if alive[worker] == nil then
      alive[worker] = redis.call('EXISTS', WORKER .. worker) == 1
    end
    if lease_end < now or not alive[worker] then
      lost(id)
    end
  end
end

for _, worker in ipairs(redis.call('SMEMBERS', WORKERS)) do
  if redis.call('EXISTS', WORKER .. worker) == 0 then
    redis.call('SREM', WORKERS, worker)
  end
end
return 1
