-- worker, model, nonce, count, lease (ms), record_ttl (ms) -> id, attempt, payload, id, attempt, payload, ...
-- The same nonce again gives the same jobs, as far as they are still this worker's.
local worker, model, nonce = ARGV[1], ARGV[2], ARGV[3]
local count, lease, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_ms()
local claimed = {}

local latest = redis.call('HMGET', CLAIM .. worker, 'nonce', 'ids')
if latest[1] == nonce then
  claimed = cmsgpack.unpack(latest[2])
else
  -- A burst is shared: nobody takes more than its part at once, however much room it has.
  local share = math.ceil(redis.call('ZCARD', QUEUED) / math.max(1, redis.call('SCARD', WORKERS)))
  count = math.min(count, share)
  while #claimed < count do
    local tenant = redis.call('LMOVE', RING .. model, RING .. model, 'LEFT', 'RIGHT')
    if not tenant then
      break
    end
    local id = redis.call('LPOP', tenant_queue(model, tenant))
    leave_ring_if_empty(model, tenant)
    if redis.call('EXISTS', JOB .. id) == 0 then
      redis.call('ZREM', QUEUED, id)
    elseif tonumber(redis.call('ZSCORE', QUEUED, id)) < now then
      conclude(id, failed('overloaded', 'The request waited until its deadline; try again later.'), record_ttl)
    else
      redis.call('HSET', JOB .. id, 'state', 'running', 'worker', worker)
      redis.call('HINCRBY', JOB .. id, 'attempt', 1)
      redis.call('ZREM', QUEUED, id)
      redis.call('ZADD', RUNNING, now + lease, id)
      claimed[#claimed + 1] = id
    end
  end
  redis.call('HSET', CLAIM .. worker, 'nonce', nonce, 'ids', cmsgpack.pack(claimed))
  redis.call('PEXPIRE', CLAIM .. worker, 60000)
end

local answer = {}
for _, id in ipairs(claimed) do
  local job = redis.call('HMGET', JOB .. id, 'worker', 'attempt', 'payload')
  if job[1] == worker and job[3] then
    answer[#answer + 1] = id
    answer[#answer + 1] = job[2]
    answer[#answer + 1] = job[3]
  end
end
return answer
