-- worker, model, step_ended (s), lease (ms), record_ttl (ms), rows, then one event for each row
-- `rows` is MessagePack: for each job {id, attempt, seq, final}. A row whose seq is false only renews the lease.
-- -> {this worker's jobs to cancel, jobs of this call that are not its own, 1 if the model has queued jobs}
-- Fenced by worker and attempt; an event that is already in the record is not announced twice.
local worker, model, step_ended = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local stale, news = {}, {}

-- Whether the record now ends with this event; an event that is there already is left at that.
local function append(id, seq, event, gateway)
  local length = redis.call('RPUSH', EVENTS .. id, event)
  if length == seq + 1 then
    news[gateway] = news[gateway] or {}
    table.insert(news[gateway], event)
    return true
  end
  redis.call('RPOP', EVENTS .. id)
  return length > seq + 1
end

for i, row in ipairs(cmsgpack.unpack(ARGV[6])) do
  local id, attempt, seq, final, event = row[1], row[2], row[3], row[4], ARGV[6 + i]
  local job = redis.call('HMGET', JOB .. id, 'worker', 'attempt', 'state', 'gateway', 'deadline')
  local gateway, deadline = job[4], tonumber(job[5])
  if job[1] ~= worker or tonumber(job[2]) ~= attempt or job[3] ~= 'running' then
    stale[#stale + 1] = id
  elseif not seq then
    redis.call('ZADD', RUNNING, now + lease, id)
  elseif not append(id, seq, event, gateway) then
    -- The server came back with less than it had: what is missing cannot be told any more.
    local ending = failed('dependency_unavailable', 'A part of the answer was lost; try again.')
    ending.seq = seq
    conclude(id, ending, record_ttl)
    stale[#stale + 1] = id
  elseif final then
    retire(id, gateway, worker, record_ttl)
  end
  if deadline and deadline > 0 and deadline < now and not final then
    redis.call('SADD', CANCELS .. worker, id)
  end
end

for gateway, events in pairs(news) do
  announce(gateway, step_ended, events)
end
return { redis.call('SMEMBERS', CANCELS .. worker), stale, redis.call('EXISTS', RING .. model) }
