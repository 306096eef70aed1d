-- id, payload, model, tenant, gateway, choices, deadline (ms, 0: none), max_queued, max_wait (ms) -> queued, known or full
local id, payload, model, tenant, gateway, choices = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local deadline, max_queued, max_wait = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])

if redis.call('EXISTS', JOB .. id) == 1 then
  return 'known'
end
if redis.call('ZCARD', QUEUED) >= max_queued then
  return 'full'
end
local give_up = now_ms() + max_wait
if deadline > 0 then
  give_up = math.min(give_up, deadline)
end
redis.call(
  'HSET', JOB .. id,
  'payload', payload, 'state', 'queued', 'model', model, 'tenant', tenant, 'gateway', gateway,
  'choices', choices, 'deadline', deadline, 'attempt', 0, 'losses', 0
)
redis.call('ZADD', QUEUED, give_up, id)
redis.call('SADD', GATEWAY_JOBS .. gateway, id)
enqueue('RPUSH', id, model, tenant)
return 'queued'
